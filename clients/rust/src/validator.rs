use std::collections::HashMap;

use crate::options::{GapPolicy, Start};
use crate::proto::{self, accepted::Mode, router_event::Event, Accepted, Filter, SnapshotBegin, SubscribeResponse};
use crate::{Error, Position};

/// The part of the state that has been delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    /// No stream has been accepted.
    Nothing,
    /// A part of a snapshot.
    Part,
    /// The state at a position.
    All,
}

/// The phase of a stream. It determines which messages are valid next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Valid: Accepted.
    Start,
    /// Valid: heartbeats and SnapshotBegin.
    AwaitingSnapshot,
    /// Valid: parts of a snapshot and heartbeats.
    Snapshot,
    /// Valid: entries, Progress and SnapshotBegin.
    Following,
}

/// Checks that no message is missing, repeated or out of order, over all streams of a subscription:
///
///   - prev_seq is the seq of the previous position. Seqs of entries are contiguous; with a filter they grow.
///   - The event_ids of a worker are contiguous; with a filter by tier they grow.
///   - After a snapshot or the first entry, a worker has no event before its worker_added.
///   - A position has the seq of the last entry before it and the epoch of the stream.
///   - Accepted, SnapshotBegin and SnapshotEnd are in a message of their own, with a position at most.
///
/// Before and within a snapshot, Progress without a position is a heartbeat.
///
/// The event_ids of a worker that is removed and added again are not compared, since the server remembers the event_ids of
/// a bounded number of removed workers. The seqs still show that no entry is missing.
#[derive(Debug)]
pub(crate) struct Validator {
    filtered: bool,
    tier_filtered: bool,
    fail_on_gap: bool,
    pub delivered: Delivered,
    pub phase: Phase,
    epoch: String,
    /// The seq of the last position.
    seq: u64,
    /// The seq of the last entry in a snapshot.
    snapshot_seq: u64,
    /// All existing workers were delivered.
    workers_known: bool,
    /// The last event_id, by worker.
    last_event_ids: HashMap<String, u64>,
    /// Requested for the current stream.
    start: Start,
    /// The epoch of the current stream's Accepted.
    accepted_epoch: String,
}

/// The result of a check: what violates the contract.
type Check = Result<(), String>;

impl Validator {
    pub fn new(filter: Option<&Filter>, policy: GapPolicy) -> Self {
        let is_some = |list: fn(&Filter) -> bool| filter.is_some_and(list);
        Self {
            filtered: is_some(|f| !f.workers.is_empty() || !f.models.is_empty() || !f.tiers.is_empty()),
            tier_filtered: is_some(|f| !f.tiers.is_empty()),
            fail_on_gap: policy == GapPolicy::Fail,
            delivered: Delivered::Nothing,
            phase: Phase::Start,
            epoch: String::new(),
            seq: 0,
            snapshot_seq: 0,
            workers_known: false,
            last_event_ids: HashMap::new(),
            start: Start::Snapshot,
            accepted_epoch: String::new(),
        }
    }

    /// Returns the position from which to resume; None if the delivered state is incomplete.
    pub fn position(&self) -> Option<Position> {
        (self.delivered == Delivered::All).then(|| Position::new(&*self.epoch, self.seq))
    }

    /// Returns the position that the caller may store with its state: none while a snapshot is expected that replaces the
    /// state.
    pub fn stored(&self) -> Option<Position> {
        if self.phase == Phase::AwaitingSnapshot {
            return None;
        }
        self.position()
    }

    /// Makes an Accepted the only valid next message.
    pub fn start_stream(&mut self, start: Start) {
        (self.phase, self.start) = (Phase::Start, start);
        self.accepted_epoch.clear();
    }

    /// Checks the next message of the stream. The error is a violation.
    pub fn validate(&mut self, m: &SubscribeResponse) -> Result<(), Error> {
        let at = self.position();
        self.message(m).map_err(|what| Error::Violation { at, what })
    }

    fn message(&mut self, m: &SubscribeResponse) -> Check {
        match (&m.accepted, &m.snapshot_begin, self.phase) {
            _ if self.phase != Phase::Start && is_unknown_kind(m) => Ok(()),
            _ if is_mixed(m) => Err("Accepted, SnapshotBegin or SnapshotEnd in a message with other contents".into()),
            (None, _, Phase::Start) => Err("the first message has no Accepted".into()),
            (Some(a), _, Phase::Start) => self.accept(a, m.position.as_ref()),
            (Some(_), ..) => Err("a second Accepted".into()),
            (_, Some(b), _) => self.begin_snapshot(b),
            (_, _, Phase::AwaitingSnapshot | Phase::Snapshot) if is_heartbeat(m) => Ok(()),
            (_, _, Phase::AwaitingSnapshot) => Err("another message instead of the announced snapshot".into()),
            (_, _, Phase::Snapshot) if m.progress.is_some() => Err("Progress within a snapshot that is not a heartbeat".into()),
            (_, _, Phase::Snapshot) => self.snapshot_part(m),
            (_, _, Phase::Following)
                if m.snapshot_end.is_some() || m.snapshot_worker.is_some() || !m.snapshot_blocks.is_empty() =>
            {
                Err("part of a snapshot that has not begun".into())
            }
            (_, _, Phase::Following) => self.follow(m),
        }
    }

    fn accept(&mut self, a: &Accepted, at: Option<&proto::Position>) -> Check {
        let (mode, want) = (a.mode(), self.start.mode());
        self.accepted_epoch.clone_from(&a.epoch);
        let epoch = &self.accepted_epoch;
        let (at_epoch, at_seq) = at.map_or(("", 0), |p| (p.epoch.as_str(), p.seq));
        if epoch.is_empty() {
            return Err("an Accepted without an epoch".into());
        }
        if mode == Mode::Snapshot && (want == mode || want == Mode::Resume && !self.fail_on_gap) {
            self.phase = Phase::AwaitingSnapshot;
            return Ok(());
        }
        if mode != want {
            return Err(format!("requested {}, got {}", want.as_str_name(), mode.as_str_name()));
        }
        if at_epoch != epoch {
            return Err(format!("an Accepted of epoch {epoch:?} with a position of epoch {at_epoch:?}"));
        }
        match &self.start {
            Start::After(p) if !p.epoch.is_empty() && p.epoch != *epoch || p.seq != at_seq => {
                return Err(format!("requested to resume after {p}, got {at_epoch}:{at_seq}"));
            }
            _ => {}
        }
        if self.delivered == Delivered::Nothing {
            self.workers_known = at_seq == 0;
        }
        (self.delivered, self.phase, self.seq) = (Delivered::All, Phase::Following, at_seq);
        self.epoch.clone_from(&self.accepted_epoch);
        Ok(())
    }

    fn begin_snapshot(&mut self, b: &SnapshotBegin) -> Check {
        if b.epoch != self.accepted_epoch {
            return Err(format!("a snapshot of epoch {:?} in a stream of epoch {:?}", b.epoch, self.accepted_epoch));
        }
        if self.phase == Phase::Following && self.fail_on_gap {
            return Err("a snapshot in a stream that must continue or fail".into());
        }
        (self.phase, self.delivered, self.workers_known) = (Phase::Snapshot, Delivered::Part, false);
        self.epoch.clone_from(&self.accepted_epoch);
        (self.seq, self.snapshot_seq) = (0, 0);
        self.last_event_ids.clear();
        Ok(())
    }

    fn snapshot_part(&mut self, m: &SubscribeResponse) -> Check {
        if let Some(w) = &m.snapshot_worker {
            if self.last_event_ids.insert(w.worker.clone(), w.last_event_id).is_some() {
                return Err(format!("worker {:?} twice in a snapshot", w.worker));
            }
        }
        for e in &m.entries {
            if e.seq <= self.snapshot_seq {
                return Err(format!("entry {} after {}", e.seq, self.snapshot_seq));
            }
            self.snapshot_seq = e.seq;
            self.events(e)?;
        }
        if m.snapshot_end.is_none() {
            return Ok(());
        }
        let at = m.position.clone().unwrap_or_default();
        if at.epoch != self.epoch {
            return Err(format!("a snapshot of epoch {:?} ends in epoch {:?}", self.epoch, at.epoch));
        }
        if at.seq < self.snapshot_seq || m.prev_seq != at.seq {
            let last = self.snapshot_seq;
            return Err(format!("a snapshot with entry {last} ends at {} with prev_seq {}", at.seq, m.prev_seq));
        }
        (self.phase, self.delivered, self.seq, self.workers_known) = (Phase::Following, Delivered::All, at.seq, true);
        Ok(())
    }

    /// Checks entries and Progress.
    fn follow(&mut self, m: &SubscribeResponse) -> Check {
        let (epoch, seq) = m.position.as_ref().map_or(("", 0), |p| (p.epoch.as_str(), p.seq));
        if epoch != self.epoch {
            return Err(format!("a message of epoch {epoch:?} in a stream of epoch {:?}", self.epoch));
        }
        if m.prev_seq != self.seq {
            return Err(format!("a message with prev_seq {} after one at {}: a message is missing", m.prev_seq, self.seq));
        }
        let mut last = self.seq;
        for e in &m.entries {
            if e.seq <= last || !self.filtered && e.seq != last + 1 {
                return Err(format!("entry {} after {last}", e.seq));
            }
            last = e.seq;
            self.events(e)?;
        }
        if seq < last || !self.filtered && seq != last {
            return Err(format!("position {seq} after entry {last}"));
        }
        self.seq = seq;
        Ok(())
    }

    /// Checks the event_ids of an entry.
    fn events(&mut self, e: &proto::Entry) -> Check {
        let mut last = self.last_event_ids.get(&e.worker).copied();
        for event in &e.events {
            let (id, name, seq) = (event.event_id, &e.worker, e.seq);
            let added = matches!(event.event, Some(Event::WorkerAdded(_)));
            match last {
                None if self.workers_known && !added => return Err(format!("entry {seq} of unknown worker {name:?}")),
                Some(last) if id <= last => {
                    return Err(format!("event {id} of worker {name:?} in entry {seq} after event {last}"));
                }
                Some(last) if id != last + 1 && !self.tier_filtered && !added => {
                    return Err(format!("event {id} of worker {name:?} in entry {seq} instead of event {}", last + 1));
                }
                _ => {}
            }
            last = (!matches!(event.event, Some(Event::WorkerRemoved(_)))).then_some(id);
        }
        match last {
            Some(id) => match self.last_event_ids.get_mut(&e.worker) {
                Some(known) => *known = id,
                None => _ = self.last_event_ids.insert(e.worker.clone(), id),
            },
            None => _ = self.last_event_ids.remove(&e.worker),
        }
        Ok(())
    }
}

/// Reports whether a message has entries, or a worker or blocks of a snapshot.
fn has_contents(m: &SubscribeResponse) -> bool {
    !m.entries.is_empty() || m.snapshot_worker.is_some() || !m.snapshot_blocks.is_empty()
}

/// Reports whether a message has an Accepted, SnapshotBegin or SnapshotEnd, and another field except for the position.
fn is_mixed(m: &SubscribeResponse) -> bool {
    let own = [m.accepted.is_some(), m.snapshot_begin.is_some(), m.snapshot_end.is_some()];
    match own.iter().filter(|&&present| present).count() {
        0 => false,
        1 => has_contents(m) || m.progress.is_some(),
        _ => true,
    }
}

/// Reports whether a message has no field that this version knows. It has only fields of later versions of the contract
/// then, and can be ignored since it has no position.
fn is_unknown_kind(m: &SubscribeResponse) -> bool {
    *m == SubscribeResponse::default()
}

/// Reports whether a message is Progress without a position.
fn is_heartbeat(m: &SubscribeResponse) -> bool {
    m.progress.is_some() && m.position.is_none() && m.prev_seq == 0 && !has_contents(m)
}

#[cfg(test)]
#[path = "validator_tests.rs"]
mod tests;
