use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::rank::RankState;
use super::reasons::{tier_index, Reasons};
use super::tree::{NodeId, Prefix, RankId, Tree};
use crate::proto::{cleared, router_event::Event, Cleared, DegradedReason, Entry, Gap};
use crate::proto::{RouterEvent, SnapshotBlocks, SnapshotRank, SnapshotWorker, WorkerAdded};

/// The state of all workers at a position of the stream. It has neither I/O nor locks.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub workers: BTreeMap<Arc<str>, WorkerState>,
    /// By number; None: it is free.
    ranks: Vec<Option<RankState>>,
    free: Vec<RankId>,
    tree: Tree,
    models: HashMap<Arc<str>, Model>,
    /// The stream has begun in the middle: workers have a past that is not known.
    partial: bool,
}

/// The workers of a model.
#[derive(Debug)]
struct Model {
    root: NodeId,
    ranks: HashSet<RankId>,
    workers: usize,
    /// How many workers have blocks of a size, of those whose size is known.
    sizes: BTreeMap<u32, usize>,
}

impl Model {
    /// Counts a worker with a block size; 0: it is unknown.
    fn count(&mut self, size: u32) {
        if size != 0 {
            *self.sizes.entry(size).or_default() += 1;
        }
    }

    /// Takes a worker with a block size off the count.
    fn discount(&mut self, size: u32) {
        if let Some(workers) = self.sizes.get_mut(&size) {
            *workers -= 1;
            if *workers == 0 {
                self.sizes.remove(&size);
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct WorkerState {
    pub model: Arc<str>,
    /// None: the worker was added before the stream has begun.
    pub added: Option<WorkerAdded>,
    /// In tokens; 0: unknown.
    pub block_size: u32,
    /// By number.
    pub ranks: BTreeMap<u32, RankId>,
}

impl WorkerState {
    pub fn is_pool(&self) -> bool {
        self.added.as_ref().is_some_and(|added| added.pool)
    }
}

impl Index {
    /// Marks workers without a WorkerAdded: what they held before is unknown.
    pub fn set_partial(&mut self) {
        self.partial = true;
    }

    /// Adds a reason to all ranks.
    pub fn doubt_all(&mut self, reason: DegradedReason) {
        self.ranks.iter_mut().flatten().for_each(|r| r.doubts.add(Reasons::of(reason), &[]));
    }

    pub fn rank(&self, id: RankId) -> &RankState {
        self.ranks[id as usize].as_ref().expect("the rank exists")
    }

    /// Returns the worker of a rank.
    pub fn worker_of(&self, rank: &RankState) -> &WorkerState {
        &self.workers[&rank.worker]
    }

    /// Applies an entry.
    pub fn apply_entry(&mut self, e: &Entry) {
        self.apply_events(&e.worker, &e.model, &e.events);
        // An entry without events, or that removes the worker, leaves none.
        if self.workers.get(&*e.worker).is_some_and(|w| w.added.is_none() && w.ranks.is_empty()) {
            self.remove_worker(&e.worker);
        }
    }

    /// Adds a worker of a snapshot, without blocks.
    pub fn apply_snapshot_worker(&mut self, s: &SnapshotWorker) {
        self.add_worker(&s.worker, s.added.as_ref().unwrap_or(&WorkerAdded::default()));
        for report in &s.ranks {
            self.rank_mut(&s.worker, report.dp_rank).apply_report(report);
        }
        for &number in &s.incomplete_ranks {
            let rank = self.rank_mut(&s.worker, number);
            if rank.doubts.all().is_empty() {
                rank.doubts.add(Reasons::of(DegradedReason::Gap), &[]); // of servers that send no reasons
            }
        }
    }

    /// Adds blocks of a snapshot. The worker keeps the block size of its SnapshotWorker, since the last block is not
    /// necessarily the newest.
    pub fn apply_snapshot_blocks(&mut self, b: &SnapshotBlocks) {
        let size = self.workers.get(&*b.worker).map_or(0, |w| w.block_size);
        self.apply_events(&b.worker, "", &b.events);
        self.set_block_size(&b.worker, size);
    }

    fn apply_events(&mut self, worker: &str, model: &str, events: &[RouterEvent]) {
        if !self.workers.contains_key(worker) {
            self.insert_worker(worker, model, None);
        }
        for event in events {
            self.apply_event(worker, event);
        }
    }

    /// Applies an event. Events and tiers that this version does not know are ignored.
    fn apply_event(&mut self, worker: &str, event: &RouterEvent) {
        let Some(kind) = &event.event else { return };
        let tier = tier_index(event.tier);
        match kind {
            Event::WorkerAdded(added) => return self.add_worker(worker, added),
            Event::WorkerRemoved(_) => {
                // It stays, empty and with a known past, if the entry adds it again.
                let model = self.workers[worker].model.clone();
                self.remove_worker(worker);
                return self.insert_worker(worker, &model, None);
            }
            // An engine may restart with another block size.
            Event::Stored(s) if tier.is_some() => self.set_block_size(worker, s.block_size),
            _ => {}
        }
        let id = self.rank_id(worker, event.dp_rank());
        let rank = self.ranks[id as usize].as_mut().expect("the rank exists");
        match (kind, tier) {
            (Event::Stored(s), Some(tier)) => rank.store(&mut self.tree, tier, s),
            (Event::Removed(r), Some(tier)) => rank.remove(&mut self.tree, tier, &r.block_hashes),
            (Event::Cleared(c), _) => rank.apply_cleared(&mut self.tree, c),
            (Event::Gap(g), _) => rank.apply_gap(g),
            (Event::Resolved(r), _) => rank.doubts.resolve(&r.reasons),
            // The other groups are not followed. Their blocks can come without their description in the middle of a stream.
            (Event::GroupsOmitted(_) | Event::Groups(_) | Event::GroupStored(_) | Event::GroupRemoved(_), _) => {
                rank.groups = true
            }
            _ => {}
        }
    }

    /// Sets the block size of a worker, unless it is 0.
    fn set_block_size(&mut self, name: &str, size: u32) {
        let Some(worker) = self.workers.get_mut(name).filter(|w| size != 0 && w.block_size != size) else { return };
        let model = self.models.get_mut(&worker.model).expect("it has the worker");
        model.discount(worker.block_size);
        model.count(size);
        worker.block_size = size;
    }

    /// Replaces a worker.
    fn add_worker(&mut self, name: &str, added: &WorkerAdded) {
        self.remove_worker(name);
        self.insert_worker(name, &added.model, Some(added));
        for &number in &added.ranks {
            self.rank_id(name, number);
        }
    }

    fn insert_worker(&mut self, name: &str, model: &str, added: Option<&WorkerAdded>) {
        let model: Arc<str> = model.into();
        let block_size = added.map_or(0, |a| a.block_size);
        let tree = &mut self.tree;
        let group = self.models.entry(model.clone());
        let group =
            group.or_insert_with(|| Model { root: tree.add_root(), ranks: HashSet::new(), workers: 0, sizes: BTreeMap::new() });
        group.workers += 1;
        group.count(block_size);
        let worker = WorkerState { model, added: added.cloned(), block_size, ranks: BTreeMap::new() };
        self.workers.insert(name.into(), worker);
    }

    /// Removes a worker with its blocks, if it exists.
    fn remove_worker(&mut self, name: &str) {
        let Some(worker) = self.workers.remove(name) else { return };
        let model = self.models.get_mut(&worker.model).expect("it has the worker");
        for &id in worker.ranks.values() {
            let mut rank = self.ranks[id as usize].take().expect("the rank exists");
            rank.clear(&mut self.tree);
            self.free.push(id);
            model.ranks.remove(&id);
        }
        model.discount(worker.block_size);
        model.workers -= 1;
        if model.workers == 0 {
            self.tree.remove_root(model.root);
            self.models.remove(&worker.model);
        }
    }

    fn rank_mut(&mut self, worker: &str, number: u32) -> &mut RankState {
        let id = self.rank_id(worker, number);
        self.ranks[id as usize].as_mut().expect("the rank exists")
    }

    /// Returns the number of a rank, which it adds if it does not exist.
    fn rank_id(&mut self, worker: &str, number: u32) -> RankId {
        let (name, _) = self.workers.get_key_value(worker).expect("it was added");
        let name = name.clone();
        let state = self.workers.get_mut(worker).expect("it was added");
        if let Some(&id) = state.ranks.get(&number) {
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.ranks.push(None);
            RankId::try_from(self.ranks.len() - 1).expect("there are fewer ranks")
        });
        let model = self.models.get_mut(&state.model).expect("it has the worker");
        let mut rank = RankState::new(id, name, number, model.root);
        if self.partial && state.added.is_none() {
            rank.doubts.add(Reasons::of(DegradedReason::JoinedLate), &[]);
            rank.groups = true; // a GroupsOmitted may have been sent before
        }
        state.ranks.insert(number, id);
        model.ranks.insert(id);
        self.ranks[id as usize] = Some(rank);
        id
    }

    fn models<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Model> {
        self.models.iter().filter(move |(model, _)| name.is_empty() || ***model == *name).map(|(_, model)| model)
    }

    /// Returns the distinct block sizes of the workers of a model; of all if the name is empty.
    pub fn block_sizes(&self, model: &str) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.models(model).flat_map(|m| m.sizes.keys()).copied().collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Reports whether a rank may match blocks of a size; 0: of any.
    fn selects(&self, id: RankId, block_size: u32) -> bool {
        let worker = self.worker_of(self.rank(id));
        !worker.is_pool() && (block_size == 0 || worker.block_size == block_size)
    }

    /// Finds the prefixes of a prompt by the contents of its blocks.
    pub fn find(&self, model: &str, hashes: &[u64], block_size: u32, found: &mut Vec<Prefix>) {
        for model in self.models(model) {
            self.tree.find(model.root, hashes, |id| self.selects(id, block_size), found);
        }
    }

    /// Finds the prefixes of a prompt by the block hashes of its blocks, also of those whose content is unknown.
    pub fn find_block_hashes(&self, model: &str, hashes: &[u64], block_size: u32, found: &mut Vec<Prefix>) {
        for id in self.models(model).flat_map(|m| &m.ranks).copied().filter(|&id| self.selects(id, block_size)) {
            let mut prefix = Prefix::new(id);
            hashes.iter().map_while(|&hash| self.rank(id).tiers(hash)).for_each(|tiers| prefix.extend(tiers));
            if prefix.blocks > 0 {
                found.push(prefix);
            }
        }
    }

    /// Returns the number of nodes of the tree, and of models.
    #[cfg(test)]
    pub fn size(&self) -> (usize, usize) {
        (self.tree.len(), self.models.len())
    }
}

impl RankState {
    fn apply_report(&mut self, report: &SnapshotRank) {
        self.doubts.clear(&[]);
        let mut told = Reasons::default();
        for of_tier in &report.tier_reasons {
            let reasons = Reasons::known(&of_tier.reasons);
            told = told.with(reasons);
            self.doubts.add(reasons, &[of_tier.tier]);
            self.doubts.set_chunk(of_tier.chunk_tokens, &[of_tier.tier]);
        }
        // Those that no tier has concern all.
        self.doubts.add(Reasons::known(&report.reasons).without(told), &[]);
        self.gaps = report.gaps;
        self.groups = report.groups_omitted || report.groups.is_some();
    }

    fn apply_gap(&mut self, g: &Gap) {
        self.doubts.add(Reasons::of_gap(g.reason), &g.tiers);
        if g.chunk_tokens > 0 {
            self.doubts.set_chunk(g.chunk_tokens, &g.tiers);
        }
        self.gaps += 1;
    }

    fn apply_cleared(&mut self, tree: &mut Tree, c: &Cleared) {
        for tier in c.tiers.iter().filter_map(|&t| tier_index(t)) {
            self.clear_tier(tree, tier);
        }
        if c.tiers.is_empty() {
            self.clear(tree);
            if c.reason() == cleared::Reason::EngineRestarted {
                self.groups = false;
            }
        }
        self.doubts.clear(&c.tiers);
        if c.reason() == cleared::Reason::UnrepairedGap {
            // The engine may still hold blocks.
            self.doubts.add(Reasons::of(DegradedReason::Gap), &c.tiers);
            self.gaps += 1;
        }
    }
}
