use super::*;
use crate::proto::router_event::Event;
use crate::proto::{
    self, cleared, gap, Accepted, Cleared, Entry, Gap, GroupsOmitted, Removed, Resolved, RouterEvent, SnapshotBegin,
    SnapshotBlocks, SnapshotEnd, SnapshotRank, SnapshotWorker, Stored, TierReasons, WorkerAdded, WorkerRemoved,
};
use crate::{Interruption, Tier};

fn update(message: SubscribeResponse, position: Option<u64>) -> Update {
    let position = position.map(|seq| Position::new("e", seq));
    Update { content: Content::Message(Box::new(message)), position, liveness: Arc::default() }
}

fn accepted(mode: Mode, position: Option<u64>) -> Update {
    let accepted = Accepted { epoch: "e".into(), mode: mode as i32, ..Default::default() };
    update(SubscribeResponse { accepted: Some(accepted), ..Default::default() }, position)
}

fn begin() -> Update {
    update(SubscribeResponse { snapshot_begin: Some(SnapshotBegin::default()), ..Default::default() }, None)
}

fn end(seq: u64) -> Update {
    update(SubscribeResponse { snapshot_end: Some(SnapshotEnd::default()), ..Default::default() }, Some(seq))
}

fn snapshot_worker(worker: SnapshotWorker) -> Update {
    update(SubscribeResponse { snapshot_worker: Some(worker), ..Default::default() }, None)
}

fn worker_added(pool: bool) -> WorkerAdded {
    WorkerAdded { model: "m".into(), block_size: 4, pool, ..Default::default() }
}

fn entry(seq: u64, worker: &str, events: Vec<RouterEvent>) -> Update {
    let entry = Entry { seq, worker: worker.into(), model: "m".into(), events, ..Default::default() };
    update(SubscribeResponse { entries: vec![entry], ..Default::default() }, Some(seq))
}

fn event(rank: u32, tier: i32, event: Event) -> RouterEvent {
    RouterEvent { event_id: 0, dp_rank: Some(rank), tier, event: Some(event) }
}

fn stored(parent: Option<u64>, blocks: &[u64], tokens: &[u64]) -> Event {
    Event::Stored(Stored {
        parent_hash: parent,
        block_hashes: blocks.into(),
        tokens_hashes: tokens.into(),
        block_size: 4,
        ..Default::default()
    })
}

fn cleared(reason: cleared::Reason, tiers: &[i32]) -> Event {
    Event::Cleared(Cleared { reason: reason as i32, tiers: tiers.into() })
}

/// Returns a view of a worker "w", whose rank 0 has the blocks 1 and 2 in device memory.
fn view() -> View {
    let view = View::new();
    view.apply(&accepted(Mode::Snapshot, None));
    view.apply(&begin());
    view.apply(&snapshot_worker(SnapshotWorker { worker: "w".into(), added: Some(worker_added(false)), ..Default::default() }));
    view.apply(&end(1));
    view.apply(&entry(2, "w", vec![event(0, 1, stored(None, &[1, 2], &[101, 102]))]));
    view
}

fn find(view: &View, hashes: &[u64]) -> Vec<Match> {
    view.match_prompt(&Prompt::tokens_hashes(hashes))
}

/// Returns the trust of the match of the first block.
fn trust(view: &View) -> Trust {
    find(view, &[101])[0].trust
}

fn interruption() -> Update {
    let interruption = Interruption { error: Error::Ended, snapshot: false, wait: Duration::ZERO, failures: 1 };
    Update { content: Content::Interruption(interruption), position: Some(Position::new("e", 2)), liveness: Arc::default() }
}

#[test]
fn other_groups_hold_until_the_engine_restarts() {
    let view = view();
    let apply = |events| view.apply(&entry(3, "w", events));
    let store = || event(0, 1, stored(None, &[1], &[101]));
    apply(vec![event(0, 0, Event::GroupsOmitted(GroupsOmitted {}))]);
    assert_eq!(trust(&view), Trust::UpperBound);
    apply(vec![event(0, 0, cleared(cleared::Reason::EngineCleared, &[])), store()]);
    assert_eq!(trust(&view), Trust::UpperBound);
    apply(vec![event(0, 0, cleared(cleared::Reason::EngineRestarted, &[1])), store()]);
    assert_eq!(trust(&view), Trust::UpperBound);
    apply(vec![event(0, 0, cleared(cleared::Reason::EngineRestarted, &[])), store()]);
    assert_eq!(trust(&view), Trust::Exact);
    apply(vec![event(0, 1, Event::GroupStored(proto::GroupStored::default()))]);
    assert_eq!(trust(&view), Trust::UpperBound);
}

#[test]
fn connectors_load_whole_chunks() {
    let view = view();
    let of_disk = Gap { reason: gap::Reason::ConnectorTier as i32, tiers: vec![3], chunk_tokens: 8, ..Default::default() };
    view.apply(&entry(3, "w", vec![event(0, 0, Event::Gap(of_disk)), event(0, 3, stored(None, &[1, 2, 3], &[101, 102, 103]))]));
    let [m] = &find(&view, &[101, 102, 103])[..] else { panic!() };
    assert_eq!((m.blocks, m.trust), (2, Trust::Degraded));
    assert_eq!(
        m.tiers.iter().map(|t| (t.tier, t.blocks, t.trust)).collect::<Vec<_>>(),
        [(Tier::Device, 2, Trust::Exact), (Tier::Disk, 2, Trust::Degraded)]
    );
    view.apply(&entry(4, "w", vec![event(0, 0, cleared(cleared::Reason::EngineCleared, &[1]))]));
    assert_eq!(find(&view, &[101]), []); // less than a chunk
}

#[test]
fn what_a_snapshot_says_of_a_rank() {
    let gap = proto::DegradedReason::Gap as i32;
    let of_tier = |tier, reasons: &[i32]| TierReasons { tier, reasons: reasons.into(), chunk_tokens: 0 };
    for (name, rank, incomplete, want) in [
        ("nothing", SnapshotRank::default(), vec![], [Trust::Exact; 2]),
        ("all tiers", SnapshotRank { reasons: vec![gap], ..Default::default() }, vec![0], [Trust::Degraded; 2]),
        ("no reasons", SnapshotRank::default(), vec![0], [Trust::Degraded; 2]),
        ("not known", SnapshotRank { reasons: vec![99], ..Default::default() }, vec![0], [Trust::Degraded; 2]),
        (
            "a tier",
            SnapshotRank { reasons: vec![gap], tier_reasons: vec![of_tier(3, &[gap])], ..Default::default() },
            vec![0],
            [Trust::Exact, Trust::Degraded],
        ),
        (
            "a tier that is not known",
            SnapshotRank { reasons: vec![gap], tier_reasons: vec![of_tier(9, &[])], ..Default::default() },
            vec![0],
            [Trust::Degraded; 2],
        ),
        ("groups", SnapshotRank { groups: Some(proto::Groups::default()), ..Default::default() }, vec![], [Trust::UpperBound; 2]),
    ] {
        let view = View::new();
        view.apply(&begin());
        view.apply(&snapshot_worker(SnapshotWorker {
            worker: "w".into(),
            added: Some(worker_added(false)),
            ranks: vec![rank],
            incomplete_ranks: incomplete,
            ..Default::default()
        }));
        let events = [1, 3].map(|tier| event(0, tier, stored(None, &[1], &[101]))).into();
        let blocks = SnapshotBlocks { worker: "w".into(), events };
        view.apply(&update(SubscribeResponse { snapshot_blocks: vec![blocks], ..Default::default() }, None));
        view.apply(&end(1));
        let m = &find(&view, &[101])[0];
        assert_eq!([m.tiers[0].trust, m.tiers[1].trust], want, "{name}");
    }
}

#[test]
fn a_view_is_stale_after_a_while() {
    let seconds = Duration::from_secs;
    let prompt = Prompt::tokens_hashes([101]);
    let at = |view: &View, later| view.match_at(&prompt, Instant::now() + later)[0].reasons.clone();
    let view = view();
    assert_eq!(at(&view, seconds(99)), []); // the stream has no progress interval
    view.apply(&interruption());
    assert_eq!(at(&view, seconds(2)), []);
    assert_eq!(at(&view, seconds(4)), [DegradedReason::Stale]);
    view.apply(&accepted(Mode::Resume, Some(2)));
    assert_eq!(at(&view, seconds(4)), []);
    view.apply(&begin()); // no update reaches the state
    assert_eq!(at(&view, seconds(4)), [DegradedReason::Stale]);
    view.apply(&end(3));
    assert!(view.match_prompt(&prompt).is_empty());
}

#[test]
fn a_view_whose_subscription_has_ended_is_stale() {
    let view = view();
    let mut first = accepted(Mode::Resume, Some(2));
    if let Content::Message(m) = &mut first.content {
        m.accepted.as_mut().unwrap().progress_interval_nano = 2_000_000_000;
    }
    view.apply(&first);
    let prompt = Prompt::tokens_hashes([101]);
    let trust = |seconds| view.match_at(&prompt, Instant::now() + Duration::from_secs(seconds))[0].trust;
    assert_eq!((trust(3), trust(5)), (Trust::Exact, Trust::Degraded)); // two progress intervals are 4 s
    let update = entry(3, "w", vec![]);
    view.apply(&update);
    assert_eq!((trust(3), trust(5)), (Trust::Exact, Trust::Degraded));
    update.liveness.end();
    assert_eq!((trust(2), trust(4)), (Trust::Exact, Trust::Degraded));
    view.apply(&accepted(Mode::Snapshot, None)); // of another subscription
    assert_eq!((trust(2), trust(4)), (Trust::Exact, Trust::Degraded));
}

#[test]
fn a_stream_that_begins_in_the_middle_is_no_whole_state() {
    let store = |seq| entry(seq, "w", vec![event(0, 1, stored(None, &[1], &[101]))]);
    let clear = |reason| event(0, 0, cleared(reason, &[]));
    let view = View::new();
    view.apply(&accepted(Mode::Latest, Some(7)));
    view.apply(&store(8));
    assert_eq!(find(&view, &[101])[0].reasons, [DegradedReason::JoinedLate]);
    view.apply(&entry(9, "w", vec![clear(cleared::Reason::EngineCleared)]));
    view.apply(&store(10));
    assert_eq!(trust(&view), Trust::UpperBound);
    view.apply(&entry(11, "w", vec![clear(cleared::Reason::EngineRestarted)]));
    view.apply(&store(12));
    assert_eq!(trust(&view), Trust::Exact);
    view.apply(&accepted(Mode::Resume, Some(12)));
    assert_eq!(trust(&view), Trust::Exact);
    view.apply(&accepted(Mode::Resume, Some(13))); // entry 13 is missing
    assert_eq!(trust(&view), Trust::Degraded);

    let view = View::new();
    view.apply(&accepted(Mode::Earliest, Some(0)));
    view.apply(&entry(1, "w", vec![RouterEvent { event: Some(Event::WorkerAdded(worker_added(false))), ..Default::default() }]));
    view.apply(&store(2));
    assert_eq!(trust(&view), Trust::Exact);
}

#[test]
fn a_snapshot_that_was_not_completed_is_forgotten() {
    let view = view();
    view.apply(&begin());
    view.apply(&accepted(Mode::Resume, Some(2))); // of another subscription
    view.apply(&entry(3, "w", vec![event(0, 1, Event::Removed(Removed { block_hashes: vec![1], ..Default::default() }))]));
    assert_eq!(find(&view, &[101]), []);
    view.apply(&end(4));
    view.apply(&entry(5, "w", vec![event(0, 1, stored(None, &[1], &[101]))]));
    assert_eq!(trust(&view), Trust::Degraded);
}

#[test]
fn block_hashes_match_unknown_contents() {
    let view = view();
    view.apply(&entry(3, "w", vec![event(0, 1, stored(Some(2), &[3], &[]))]));
    let [m] = &view.match_prompt(&Prompt::block_hashes([1, 2, 3, 4]))[..] else { panic!() };
    assert_eq!((m.blocks, m.tokens), (3, 12));
    assert_eq!(view.match_prompt(&Prompt::block_hashes([1]).block_size(8)), []);
    assert_eq!(view.match_prompt(&Prompt::block_hashes([1]).model("n")), []);
}

#[test]
fn workers_and_status() {
    let view = view();
    view.apply(&entry(3, "p", vec![RouterEvent { event: Some(Event::WorkerAdded(worker_added(true))), ..Default::default() }]));
    view.apply(&entry(4, "p", vec![event(0, 2, stored(None, &[1], &[101]))]));
    let workers = view.workers();
    assert_eq!(workers.iter().map(|w| (&*w.name, w.pool)).collect::<Vec<_>>(), [("p", true), ("w", false)]);
    assert_eq!(workers[1].ranks[0].blocks, [2, 0, 0, 0]);
    assert_eq!(find(&view, &[101]).len(), 1);
    let status = view.status();
    assert_eq!((status.ready, status.live, status.snapshots), (true, true, 1));
    assert_eq!(view.position(), Some(Position::new("e", 4)));
    view.apply(&interruption());
    assert!(!view.status().live);
}

#[test]
#[ignore = "it measures"]
fn memory_of_blocks() {
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    const BLOCKS: u64 = 1 << 20;
    let view = view();
    for ranks in [1, 4] {
        let before = resident();
        for rank in 0..ranks {
            for first in (0..BLOCKS).step_by(128) {
                let mixed = |n: u64| (n + (1 << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let hashes: Vec<u64> = (first..first + 128).map(mixed).collect();
                view.apply(&entry(3, "w", vec![event(ranks * 10 + rank, 1, stored(None, &hashes, &hashes))]));
            }
        }
        println!("{} bytes for each of {BLOCKS} blocks in {ranks} ranks", (resident() - before) / (BLOCKS * u64::from(ranks)));
    }
}

#[path = "naive_tests.rs"]
mod naive;
