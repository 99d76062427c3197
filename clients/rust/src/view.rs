//! The state of all workers according to a subscription.

mod index;
mod rank;
mod reasons;
mod tree;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::matches::NUM_TIERS;
use crate::prompt::Text;
use crate::proto::{accepted::Mode, DegradedReason, SubscribeResponse, Trust};
use crate::update::{Content, Liveness};
use crate::{Error, Match, Position, Prompt, Reason, Subscription, TierPrefix, Update};
use index::Index;
use reasons::{Reasons, TIERS};
use tree::Prefix;

/// The longest time for which the state may not have been kept current, until it is degraded.
const STALE_AFTER: Duration = Duration::from_secs(3);
/// How many progress intervals a stream may be silent before its view grows older: messages may be late.
const QUIET_INTERVALS: u32 = 2;

/// The state of all workers according to a subscription, to match prompts with.
///
/// One task applies the updates. Any number of threads may query the view at the same time: a query sees all events of an
/// entry or none, and waits while one entry is applied, but not for a whole message or snapshot. While a snapshot is received,
/// queries use the state before it, and both take memory.
///
/// A match says how far it can be trusted, see the crate's documentation.
#[derive(Debug)]
pub struct View {
    state: RwLock<State>,
    /// Only who applies updates locks it, so that it is never waited for.
    pending: Mutex<Pending>,
    status: watch::Sender<ViewStatus>,
}

#[derive(Debug, Default)]
struct State {
    index: Index,
    /// When the state was last known to be up to date.
    known: Known,
    /// How long it is after that without another message: zero without a stream, behind it, or while a snapshot is received.
    quiet: Duration,
    /// The subscription that has delivered the last update.
    source: Arc<Liveness>,
}

#[derive(Debug, Default)]
struct Pending {
    /// The state of the snapshot that is being received.
    snapshot: Option<Index>,
    /// The newest entry at a message that was before it, which the state must reach, and when that message came; None: none.
    goal: Option<(u64, Instant)>,
    /// How long the stream may be silent.
    silence: Duration,
}

/// When a state was last known to be up to date.
#[derive(Clone, Copy, Debug, Default)]
enum Known {
    /// It has no updates yet.
    #[default]
    Empty,
    /// It never was, or it is wrong.
    Never,
    At(Instant),
}

/// The status of a [`View`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ViewStatus {
    /// Whether a snapshot has been applied, or the subscription has started without one.
    pub ready: bool,
    /// Whether there was a stream when the last update was applied.
    pub live: bool,
    /// The last position applied.
    pub position: Option<Position>,
    /// The number of snapshots applied.
    pub snapshots: u64,
}

/// A worker of a [`View`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Worker {
    /// The worker's name.
    pub name: String,
    /// The worker's model.
    pub model: String,
    /// The number of tokens in a block; 0: unknown.
    pub block_size: u32,
    /// The configured address for requests.
    pub endpoint: String,
    /// The configured labels.
    pub labels: BTreeMap<String, String>,
    /// Whether the worker is a pool, which is never a match.
    pub pool: bool,
    /// The dp ranks that were configured or have had events, ascending.
    pub ranks: Vec<Rank>,
}

/// A dp rank of a [`Worker`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Rank {
    /// The dp rank.
    pub rank: u32,
    /// The number of blocks by tier, from [`Tier::Device`](crate::Tier::Device) to [`Tier::External`](crate::Tier::External).
    pub blocks: [u64; NUM_TIERS],
    /// How far they can be trusted.
    pub trust: Trust,
    /// Why the trust is [`Trust::Degraded`], ascending.
    pub reasons: Vec<DegradedReason>,
    /// The number of gaps since the worker was added.
    pub gaps: u64,
}

impl Default for View {
    fn default() -> Self {
        Self::new()
    }
}

impl View {
    /// Returns an empty view.
    pub fn new() -> Self {
        Self { state: RwLock::default(), pending: Mutex::default(), status: watch::Sender::default() }
    }

    /// Applies all updates of a subscription, and returns the error that has ended it. It usually runs in a task.
    pub async fn follow(&self, mut subscription: Subscription) -> Error {
        loop {
            match subscription.next().await {
                Some(Ok(update)) => self.apply(&update),
                Some(Err(error)) => return error,
                None => return Error::Ended,
            }
        }
    }

    /// Applies the next update of a subscription. All of its updates must be applied, in their order.
    pub fn apply(&self, update: &Update) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        match &update.content {
            Content::Interruption(_) => pending.snapshot = None, // the next stream starts another one
            Content::Message(m) => self.apply_message(&mut pending, m, update.position.as_ref()),
        }
        let live = update.message().is_some();
        let mut state = self.write();
        match (update.message(), &update.position) {
            (Some(m), Some(position)) => state.heard(&mut pending, m, position.seq),
            _ => state.outdate(), // there is no stream, or a snapshot is awaited or received
        }
        if update.interruption().is_some_and(|i| i.error.reason() == Some(&Reason::Outdated)) {
            state.known = Known::Never; // what the server has sent was old already
        }
        state.source = update.liveness.clone();
        drop(state);
        self.status.send_modify(|status| {
            status.live = live;
            if let (true, Some(position)) = (live, &update.position) {
                (status.ready, status.position) = (true, Some(position.clone()));
            }
        });
    }

    fn apply_message(&self, pending: &mut MutexGuard<'_, Pending>, m: &SubscribeResponse, position: Option<&Position>) {
        if let Some(accepted) = &m.accepted {
            pending.snapshot = None; // of a subscription that has ended within it
            let interval = Duration::from_nanos(accepted.progress_interval_nano);
            pending.silence = if interval.is_zero() { Duration::MAX } else { interval.saturating_mul(QUIET_INTERVALS) };
            self.apply_start(accepted.mode(), position);
        }
        if m.snapshot_begin.is_some() {
            pending.snapshot = Some(Index::default());
        }
        if m.snapshot_end.is_some() {
            // Without its begin, the updates are not all of a subscription.
            let snapshot = pending.snapshot.take().unwrap_or_else(|| {
                let mut partial = Index::default();
                partial.set_partial();
                partial
            });
            let before = std::mem::replace(&mut self.write().index, snapshot);
            drop(before); // takes its time, without the lock
            self.status.send_modify(|status| status.snapshots += 1);
        }
        match &mut pending.snapshot {
            Some(index) => {
                m.snapshot_worker.iter().for_each(|w| index.apply_snapshot_worker(w));
                m.snapshot_blocks.iter().for_each(|b| index.apply_snapshot_blocks(b));
                m.entries.iter().for_each(|e| index.apply_entry(e));
            }
            None => m.entries.iter().for_each(|e| self.write().index.apply_entry(e)),
        }
    }

    /// Applies the start of a stream that continues the state. Events before it are missing, unless the state includes them.
    fn apply_start(&self, mode: Mode, position: Option<&Position>) {
        let Some(position) = position.filter(|_| mode != Mode::Snapshot) else { return };
        let before = self.status.borrow().position.clone();
        if before.as_ref() == Some(position) || before.is_none() && position.seq == 0 {
            return;
        }
        let mut state = self.write();
        state.index.set_partial();
        state.index.doubt_all(DegradedReason::Gap);
    }

    /// Returns the dp ranks that hold at least the first block of a prompt, ordered by the length of the prefix, then by the
    /// length of the prefix in [`Tier::Device`](crate::Tier::Device), both descending, then by worker and rank. Pools are
    /// never a match.
    ///
    /// Blocks are matched by the contents of the block and of all blocks before it, or by block hash. Blocks with unknown
    /// content are matched by block hash only. A prefix ends at the first missing block, even if later blocks are held.
    pub fn match_prompt(&self, prompt: &Prompt) -> Vec<Match> {
        self.match_at(prompt, Instant::now())
    }

    fn match_at(&self, prompt: &Prompt, now: Instant) -> Vec<Match> {
        let (model, size) = (&*prompt.model, prompt.block_size);
        // The hashes are computed without the lock.
        let lists: Vec<(u32, Vec<u64>)> = match &prompt.text {
            Text::Tokens(tokens) => {
                let sizes = if size != 0 { vec![size] } else { self.read().index.block_sizes(model) };
                sizes.into_iter().map(|size| (size, tokens.hashes(size))).collect()
            }
            _ => Vec::new(),
        };
        let state = self.read();
        let mut found = Vec::new();
        lists.iter().for_each(|(size, hashes)| state.index.find(model, hashes, *size, &mut found));
        match &prompt.text {
            Text::Tokens(_) => {}
            Text::TokensHashes(hashes) => state.index.find(model, hashes, size, &mut found),
            Text::BlockHashes(hashes) => state.index.find_block_hashes(model, hashes, size, &mut found),
        }
        let age = state.age(now);
        let mut matches: Vec<Match> = found.iter().filter_map(|prefix| state.index.export(prefix, age)).collect();
        matches.sort_by(|a, b| order(a).cmp(&order(b)));
        matches
    }

    /// Returns all workers, by name.
    pub fn workers(&self) -> Vec<Worker> {
        let state = self.read();
        let stale = stale(state.age(Instant::now()));
        state.index.export_workers(stale)
    }

    /// Returns the status.
    pub fn status(&self) -> ViewStatus {
        self.status.borrow().clone()
    }

    /// Returns the last position applied.
    pub fn position(&self) -> Option<Position> {
        self.status.borrow().position.clone()
    }

    /// Waits until the view is ready: a snapshot has been applied, or the subscription has started without one.
    pub async fn ready(&self) {
        let mut status = self.status.subscribe();
        // The sender is a part of the view, so that there is no error.
        _ = status.wait_for(|status| status.ready).await;
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Records when the state was up to date, at a message with a position.
    fn heard(&mut self, pending: &mut Pending, m: &SubscribeResponse, seq: u64) {
        let now = Instant::now();
        let newest = m.accepted.as_ref().map_or(m.newest_seq, |accepted| accepted.newest_seq);
        if m.accepted.is_some() || m.snapshot_end.is_some() {
            pending.goal = None;
        }
        // Earlier servers say what is newest in accepted alone.
        if newest <= seq && pending.goal.is_none_or(|(goal, _)| goal <= seq) {
            (self.known, self.quiet, pending.goal) = (Known::At(now), pending.silence, None);
            return;
        }
        match pending.goal {
            None => self.outdate(), // it is behind from now on
            Some((goal, at)) if goal <= seq => (self.known, self.quiet) = (Known::At(at), Duration::ZERO),
            Some(_) => return,
        }
        pending.goal = Some((newest, now));
    }

    /// Records that the state is not up to date any more.
    fn outdate(&mut self) {
        self.quiet = Duration::ZERO;
        if let Known::Empty = self.known {
            self.known = Known::Never;
        }
    }

    /// Returns the time since the state was known to be up to date; zero: it is.
    fn age(&self, now: Instant) -> Duration {
        match self.known {
            Known::Empty => Duration::ZERO,
            Known::Never => 2 * STALE_AFTER,
            Known::At(known) => {
                let age = now.saturating_duration_since(known);
                if age > self.quiet || self.source.has_ended() { age } else { Duration::ZERO }
            }
        }
    }
}

/// Returns the reason of a state that was not kept current for some time.
fn stale(age: Duration) -> Reasons {
    if age > STALE_AFTER {
        Reasons::of(DegradedReason::Stale)
    } else {
        Reasons::default()
    }
}

/// Returns what matches are ordered by.
fn order(m: &Match) -> impl Ord + '_ {
    let device = m.tiers.first().filter(|t| t.tier == TIERS[0]).map_or(0, |t| t.blocks);
    (std::cmp::Reverse((m.blocks, device)), &m.worker, m.rank)
}

impl Index {
    /// Returns the match of a prefix; None if nothing of it can be loaded.
    fn export(&self, prefix: &Prefix, age: Duration) -> Option<Match> {
        let rank = self.rank(prefix.rank);
        let worker = self.worker_of(rank);
        let (mut blocks, mut of_tiers) = (prefix.blocks, prefix.tiers);
        if rank.doubts.chunks != [0; NUM_TIERS] {
            // A connector looks a prompt up from its beginning: the prefix in its tier does not continue that in another one.
            for (tier, blocks) in of_tiers.iter_mut().enumerate() {
                *blocks = rank.doubts.whole_chunks(tier, *blocks, worker.block_size);
            }
            blocks = of_tiers.iter().copied().max().filter(|&blocks| blocks > 0)?;
        }
        let stale = stale(age);
        let reasons = rank.doubts.all().with(stale);
        let tiers = (0..NUM_TIERS).filter(|&tier| of_tiers[tier] > 0).map(|tier| TierPrefix {
            tier: TIERS[tier],
            blocks: of_tiers[tier],
            tokens: of_tiers[tier].saturating_mul(worker.block_size),
            trust: rank.doubts.tiers[tier].with(stale).trust(rank.groups),
            ended_by_group: None,
        });
        Some(Match {
            worker: rank.worker.to_string(),
            model: worker.model.to_string(),
            endpoint: worker.added.as_ref().map(|a| a.endpoint.clone()).unwrap_or_default(),
            rank: rank.number,
            blocks,
            tokens: blocks.saturating_mul(worker.block_size),
            tiers: tiers.collect(),
            trust: reasons.trust(rank.groups),
            reasons: reasons.list(),
            age,
            ..Match::default()
        })
    }

    fn export_workers(&self, stale: Reasons) -> Vec<Worker> {
        let rank = |id| {
            let rank = self.rank(id);
            let reasons = rank.doubts.all().with(stale);
            let (trust, reasons) = (reasons.trust(rank.groups), reasons.list());
            Rank { rank: rank.number, blocks: rank.held, trust, reasons, gaps: rank.gaps }
        };
        let worker = |(name, worker): (&Arc<str>, &index::WorkerState)| {
            let added = worker.added.clone().unwrap_or_default();
            Worker {
                name: name.to_string(),
                model: worker.model.to_string(),
                block_size: worker.block_size,
                endpoint: added.endpoint,
                labels: added.labels,
                pool: added.pool,
                ranks: worker.ranks.values().map(|&id| rank(id)).collect(),
            }
        };
        self.workers.iter().map(worker).collect()
    }
}

#[cfg(test)]
#[path = "view/view_tests.rs"]
mod tests;
