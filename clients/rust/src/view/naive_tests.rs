//! The view does what a naive model does.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A rank of the naive model: the contents from the start of the prompt to each block, if they are known.
#[derive(Clone, Debug, Default)]
struct NaiveRank {
    blocks: HashMap<u64, NaiveBlock>,
    reasons: [Vec<i32>; 4],
    groups: bool,
}

#[derive(Clone, Debug, Default)]
struct NaiveBlock {
    tiers: [bool; 4],
    path: Option<Vec<u64>>,
    /// What to follow, when that has a path: the parent, and the block's own content.
    orphan: Option<(u64, u64)>,
}

impl NaiveRank {
    fn store(&mut self, tier: usize, parent: Option<u64>, blocks: &[u64], tokens: &[u64]) {
        let mut parent = parent;
        for (i, &hash) in blocks.iter().enumerate() {
            let is_copy = tier > 0 && self.blocks.get(&hash).is_some_and(|b| b.tiers[0] || b.path.is_some() || b.orphan.is_some());
            self.blocks.entry(hash).or_default().tiers[tier] = true;
            if let Some(&content) = tokens.get(i).filter(|_| !is_copy) {
                let before = parent.map_or(Some(vec![]), |p| self.blocks.get(&p).and_then(|b| b.path.clone()));
                let block = self.blocks.get_mut(&hash).unwrap();
                match before {
                    Some(before) => (block.path, block.orphan) = (Some([before, vec![content]].concat()), None),
                    None if block.path.is_none() => block.orphan = parent.map(|p| (p, content)),
                    None => {}
                }
            }
            while self.adopt() {}
            parent = Some(hash);
        }
    }

    fn adopt(&mut self) -> bool {
        let before = self.clone();
        for block in self.blocks.values_mut() {
            let Some((parent, content)) = block.orphan else { continue };
            if let Some(path) = before.blocks.get(&parent).and_then(|b| b.path.clone()) {
                (block.path, block.orphan) = (Some([path, vec![content]].concat()), None);
                return true;
            }
        }
        false
    }

    fn remove(&mut self, tier: usize, hashes: &[u64]) {
        for hash in hashes {
            if let Some(block) = self.blocks.get_mut(hash) {
                block.tiers[tier] = false;
            }
        }
        self.blocks.retain(|_, b| b.tiers != [false; 4]);
    }

    fn prefix(&self, prompt: &[u64], held: impl Fn(&[bool; 4]) -> bool) -> u32 {
        let holds = |n: usize| self.blocks.values().any(|b| held(&b.tiers) && b.path.as_deref() == Some(&prompt[..n]));
        (1..=prompt.len()).take_while(|&n| holds(n)).count() as u32
    }

    fn trust(&self) -> Trust {
        match (self.reasons.iter().all(Vec::is_empty), self.groups) {
            (false, _) => Trust::Degraded,
            (true, true) => Trust::UpperBound,
            (true, false) => Trust::Exact,
        }
    }

    fn apply(&mut self, event: &RouterEvent) {
        let named =
            |tiers: &[i32]| (0..4).filter(|t| tiers.is_empty() || tiers.contains(&(*t as i32 + 1))).collect::<Vec<usize>>();
        let tier = usize::try_from(event.tier - 1).ok().filter(|&t| t < 4);
        match (event.event.as_ref().unwrap(), tier) {
            (Event::Stored(s), Some(tier)) => self.store(tier, s.parent_hash, &s.block_hashes, &s.tokens_hashes),
            (Event::Removed(r), Some(tier)) => self.remove(tier, &r.block_hashes),
            (Event::Cleared(c), _) => {
                for tier in named(&c.tiers) {
                    let all: Vec<u64> = self.blocks.keys().copied().collect();
                    self.remove(tier, &all);
                    self.reasons[tier].clear();
                    if c.reason() == cleared::Reason::UnrepairedGap {
                        self.reasons[tier].push(gap::Reason::Unspecified as i32);
                    }
                }
                self.groups &= !(c.tiers.is_empty() && c.reason() == cleared::Reason::EngineRestarted);
            }
            (Event::Gap(g), _) => named(&g.tiers).into_iter().for_each(|tier| self.reasons[tier].push(g.reason)),
            (Event::Resolved(r), _) => self.reasons.iter_mut().for_each(|all| all.retain(|reason| !r.reasons.contains(reason))),
            (Event::GroupsOmitted(_), _) => self.groups = true,
            _ => {}
        }
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    let hash = 1..7u64;
    let tiers = || prop::collection::vec(1..6i32, 0..2);
    let unproved = gap::Reason::ReplayUnproved as i32;
    let any_stored = (prop::option::of(hash.clone()), prop::collection::vec((hash.clone(), 1..4u64), 1..4), 0..8u32);
    prop_oneof![
        8 => any_stored.prop_map(|(parent, blocks, content)| {
            let (hashes, tokens): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
            stored(parent, &hashes, if content == 0 { &[] } else { &tokens })
        }),
        4 => prop::collection::vec(hash, 1..3).prop_map(|block_hashes| Event::Removed(Removed { block_hashes, ..Default::default() })),
        1 => (1..5i32, tiers()).prop_map(|(reason, tiers)| Event::Cleared(Cleared { reason, tiers })),
        1 => (1..20i32, tiers()).prop_map(|(reason, tiers)| Event::Gap(Gap { reason, tiers, ..Default::default() })),
        1 => Just(Event::Resolved(Resolved { reasons: vec![unproved] })),
        1 => Just(Event::GroupsOmitted(GroupsOmitted {})),
        1 => Just(Event::WorkerRemoved(WorkerRemoved::default())),
    ]
}

/// A store whose chain repeats a block, or follows itself, contradicts the contract, and may differ.
fn is_contradictory(event: &Event) -> bool {
    match event {
        Event::Stored(s) => {
            let mut all: Vec<u64> = s.parent_hash.iter().chain(&s.block_hashes).copied().collect();
            all.sort_unstable();
            all.windows(2).any(|w| w[0] == w[1])
        }
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// After each event, each prompt matches what the naive model has, with its trust; and nothing is left when all workers are
    /// removed.
    #[test]
    fn matches_are_those_of_a_naive_model(
        events in prop::collection::vec((0..2usize, 0..2u32, 1..6i32, any_event()), 1..60),
        prompts in prop::collection::vec(prop::collection::vec(1..4u64, 1..5), 1..6),
    ) {
        let view = View::new();
        view.apply(&accepted(Mode::Earliest, Some(0)));
        let names = ["v", "w"];
        let mut model: HashMap<(usize, u32), NaiveRank> = HashMap::new();
        let add = |seq, name| {
            let added = RouterEvent { event: Some(Event::WorkerAdded(worker_added(false))), ..Default::default() };
            view.apply(&entry(seq, name, vec![added]));
        };
        names.iter().for_each(|name| add(0, name));
        for (seq, (worker, rank, tier, kind)) in events.into_iter().enumerate() {
            if is_contradictory(&kind) {
                continue;
            }
            let event = event(rank, tier, kind);
            if let Some(Event::WorkerRemoved(_)) = event.event {
                model.retain(|&(of, _), _| of != worker);
                view.apply(&entry(seq as u64, names[worker], vec![event]));
                add(seq as u64, names[worker]);
            } else {
                model.entry((worker, rank)).or_default().apply(&event);
                view.apply(&entry(seq as u64, names[worker], vec![event]));
            }
            for prompt in &prompts {
                let got = find(&view, prompt);
                let mut want = 0;
                for (&(worker, rank), naive) in &model {
                    let blocks = naive.prefix(prompt, |_| true);
                    want += usize::from(blocks > 0);
                    let m = got.iter().find(|m| m.worker == names[worker] && m.rank == rank);
                    prop_assert_eq!(m.map_or(0, |m| m.blocks), blocks, "{} {} of {:?} in {:?}", worker, rank, prompt, naive);
                    let Some(m) = m else { continue };
                    prop_assert_eq!(m.trust, naive.trust());
                    prop_assert_eq!(m.trust == Trust::Degraded, !m.reasons.is_empty());
                    for (i, tier) in TIERS.into_iter().enumerate() {
                        let of_tier = m.tier(tier).map_or(0, |t| t.blocks);
                        prop_assert_eq!(of_tier, naive.prefix(prompt, |held| held[i]));
                    }
                }
                prop_assert_eq!(got.len(), want);
                prop_assert!(got.is_sorted_by(|a, b| order(a) < order(b)));
            }
        }
        for name in names {
            view.apply(&entry(99, name, vec![event(0, 0, Event::WorkerRemoved(WorkerRemoved::default()))]));
        }
        prop_assert_eq!(view.read().index.size(), (0, 0));
    }
}
