use proptest::prelude::*;

use super::*;
use crate::proto::{Entry, Progress, RouterEvent, SnapshotEnd, SnapshotWorker, WorkerAdded, WorkerRemoved};

fn at(epoch: &str, seq: u64) -> Option<proto::Position> {
    Some(Position::new(epoch, seq).into())
}

fn accepted(epoch: &str, mode: Mode, position: Option<u64>) -> SubscribeResponse {
    let accepted = Accepted { epoch: epoch.into(), mode: mode as i32, ..Default::default() };
    let seq = position.unwrap_or(0);
    let position = position.and_then(|seq| at(epoch, seq));
    SubscribeResponse { accepted: Some(accepted), position, prev_seq: seq, ..Default::default() }
}

fn begin(epoch: &str) -> SubscribeResponse {
    SubscribeResponse { snapshot_begin: Some(SnapshotBegin { epoch: epoch.into() }), ..Default::default() }
}

fn worker(name: &str, last_event_id: u64) -> SubscribeResponse {
    let worker = SnapshotWorker { worker: name.into(), last_event_id, ..Default::default() };
    SubscribeResponse { snapshot_worker: Some(worker), ..Default::default() }
}

fn end(epoch: &str, seq: u64) -> SubscribeResponse {
    SubscribeResponse {
        snapshot_end: Some(SnapshotEnd::default()),
        position: at(epoch, seq),
        prev_seq: seq,
        ..Default::default()
    }
}

fn event(id: u64, event: Option<Event>) -> RouterEvent {
    RouterEvent { event_id: id, event, ..Default::default() }
}

fn entry(seq: u64, worker: &str, events: Vec<RouterEvent>) -> Entry {
    Entry { seq, worker: worker.into(), events, ..Default::default() }
}

fn entries(prev_seq: u64, seq: u64, entries: Vec<Entry>) -> SubscribeResponse {
    SubscribeResponse { entries, position: at("e", seq), prev_seq, ..Default::default() }
}

fn progress(seq: Option<u64>) -> SubscribeResponse {
    SubscribeResponse {
        progress: Some(Progress::default()),
        position: seq.and_then(|seq| at("e", seq)),
        prev_seq: seq.unwrap_or(0),
        ..Default::default()
    }
}

fn added() -> Option<Event> {
    Some(Event::WorkerAdded(WorkerAdded::default()))
}

fn removed() -> Option<Event> {
    Some(Event::WorkerRemoved(WorkerRemoved::default()))
}

/// Returns what the last message violates; all others must be valid. Empty: nothing.
fn check(v: &mut Validator, start: Start, messages: &[SubscribeResponse]) -> String {
    v.start_stream(start);
    let (last, first) = messages.split_last().unwrap();
    for m in first {
        v.validate(m).unwrap_or_else(|e| panic!("{e}: {m:?}"));
    }
    match v.validate(last) {
        Ok(()) => String::new(),
        Err(Error::Violation { what, .. }) => what,
        Err(other) => panic!("{other}"),
    }
}

fn snapshot(v: &mut Validator) -> String {
    let messages = [accepted("e", Mode::Snapshot, None), begin("e"), worker("w", 3), end("e", 5)];
    check(v, Start::Snapshot, &messages)
}

#[test]
fn messages_in_place() {
    let resumed = || accepted("e", Mode::Resume, Some(4));
    let stored = |seq| entries(seq - 1, seq, vec![entry(seq, "w", vec![event(seq, None)])]);
    for (name, messages, want) in [
        ("accepted", vec![resumed()], ""),
        ("entries first", vec![stored(5)], "the first message has no Accepted"),
        ("nothing first", vec![SubscribeResponse::default()], "the first message has no Accepted"),
        ("two accepted", vec![resumed(), resumed()], "a second Accepted"),
        ("an entry", vec![resumed(), stored(5)], ""),
        ("another kind", vec![resumed(), SubscribeResponse::default(), stored(5)], ""),
        ("a hole", vec![resumed(), stored(6)], "a message with prev_seq 5 after one at 4: a message is missing"),
        ("twice", vec![resumed(), stored(5), stored(5)], "a message with prev_seq 4 after one at 5: a message is missing"),
        ("a hole within", vec![resumed(), entries(4, 6, vec![entry(6, "w", vec![])])], "entry 6 after 4"),
        ("position ahead", vec![resumed(), entries(4, 6, vec![entry(5, "w", vec![])])], "position 6 after entry 5"),
        ("progress", vec![resumed(), progress(Some(4)), progress(Some(4))], ""),
        ("progress ahead", vec![resumed(), SubscribeResponse { prev_seq: 4, ..progress(Some(6)) }], "position 6 after entry 4"),
        ("heartbeat", vec![resumed(), progress(None)], "a message of epoch \"\" in a stream of epoch \"e\""),
        ("end without begin", vec![resumed(), end("e", 4)], "part of a snapshot that has not begun"),
        ("worker without begin", vec![resumed(), worker("w", 1)], "part of a snapshot that has not begun"),
        ("snapshot within", vec![resumed(), begin("e"), progress(None), worker("w", 1), end("e", 9)], ""),
        ("snapshot of another", vec![resumed(), begin("f")], "a snapshot of epoch \"f\" in a stream of epoch \"e\""),
        (
            "mixed",
            vec![resumed(), SubscribeResponse { progress: Some(Progress::default()), ..begin("e") }],
            "Accepted, SnapshotBegin or SnapshotEnd in a message with other contents",
        ),
        ("announced", vec![accepted("e", Mode::Snapshot, None), progress(None), begin("e")], ""),
        (
            "not announced",
            vec![accepted("e", Mode::Snapshot, None), stored(5)],
            "another message instead of the announced snapshot",
        ),
        ("no epoch", vec![accepted("", Mode::Resume, Some(4))], "an Accepted without an epoch"),
        ("other mode", vec![accepted("e", Mode::Latest, Some(4))], "requested MODE_RESUME, got MODE_LATEST"),
        ("other seq", vec![accepted("e", Mode::Resume, Some(5))], "requested to resume after e:4, got e:5"),
        ("other epoch", vec![accepted("f", Mode::Resume, Some(4))], "requested to resume after e:4, got f:4"),
        ("no position", vec![accepted("e", Mode::Resume, None)], "an Accepted of epoch \"e\" with a position of epoch \"\""),
    ] {
        let got = check(&mut Validator::new(None, GapPolicy::Snapshot), Start::After(Position::new("e", 4)), &messages);
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn snapshots() {
    let begun = || vec![accepted("e", Mode::Snapshot, None), begin("e"), worker("w", 3)];
    let with = |more: Vec<SubscribeResponse>| [begun(), more].concat();
    let part = |e: Entry| SubscribeResponse { entries: vec![e], ..Default::default() };
    for (name, messages, want) in [
        ("complete", with(vec![end("e", 5)]), ""),
        ("again", with(vec![begin("e"), worker("w", 4), end("e", 5)]), ""),
        ("twice", with(vec![worker("w", 3)]), "worker \"w\" twice in a snapshot"),
        ("entry", with(vec![part(entry(4, "w", vec![event(4, None)])), end("e", 4)]), ""),
        (
            "ends before",
            with(vec![part(entry(4, "w", vec![event(4, None)])), end("e", 3)]),
            "a snapshot with entry 4 ends at 3 with prev_seq 3",
        ),
        ("ends elsewhere", with(vec![end("f", 5)]), "a snapshot of epoch \"e\" ends in epoch \"f\""),
        ("order", with(vec![part(entry(4, "w", vec![])), part(entry(4, "w", vec![]))]), "entry 4 after 4"),
        ("progress", with(vec![progress(Some(4))]), "Progress within a snapshot that is not a heartbeat"),
        ("event", with(vec![part(entry(4, "w", vec![event(5, None)]))]), "event 5 of worker \"w\" in entry 4 instead of event 4"),
    ] {
        let mut v = Validator::new(None, GapPolicy::Snapshot);
        assert_eq!(check(&mut v, Start::Snapshot, &messages), want, "{name}");
        assert_eq!(v.position().is_some(), v.delivered == Delivered::All, "{name}");
    }
}

#[test]
fn event_ids() {
    for (name, events, want) in [
        ("next", vec![event(4, None), event(5, None)], ""),
        ("hole", vec![event(5, None)], "event 5 of worker \"w\" in entry 6 instead of event 4"),
        ("repeated", vec![event(3, None)], "event 3 of worker \"w\" in entry 6 after event 3"),
        ("comes back", vec![event(4, removed()), event(9, added()), event(10, None)], ""),
        ("gone", vec![event(4, removed()), event(5, None)], "entry 6 of unknown worker \"w\""),
    ] {
        let mut v = Validator::new(None, GapPolicy::Snapshot);
        assert_eq!(snapshot(&mut v), "");
        let got = v.message(&entries(5, 6, vec![entry(6, "w", events)])).err().unwrap_or_default();
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn filters_allow_holes() {
    let of = |filter: Filter| {
        let mut v = Validator::new(Some(&filter), GapPolicy::Snapshot);
        assert_eq!(snapshot(&mut v), "");
        v
    };
    let hole = entries(5, 9, vec![entry(7, "w", vec![event(6, None)])]);
    assert_eq!(of(Filter { tiers: vec![1], ..Default::default() }).message(&hole), Ok(()));
    let got = of(Filter { models: vec!["m".into()], ..Default::default() }).message(&hole);
    assert_eq!(got, Err("event 6 of worker \"w\" in entry 7 instead of event 4".into()));
    let missing = of(Filter { tiers: vec![1], ..Default::default() }).message(&entries(6, 9, vec![]));
    assert_eq!(missing, Err("a message with prev_seq 6 after one at 5: a message is missing".into()));
}

#[test]
fn the_gap_policy_fail_allows_no_snapshot() {
    let mut v = Validator::new(None, GapPolicy::Fail);
    let start = || Start::After(Position::new("e", 4));
    assert_eq!(check(&mut v, start(), &[accepted("e", Mode::Snapshot, None)]), "requested MODE_RESUME, got MODE_SNAPSHOT");
    let messages = [accepted("e", Mode::Resume, Some(4)), begin("e")];
    assert_eq!(check(&mut v, start(), &messages), "a snapshot in a stream that must continue or fail");
    assert_eq!(snapshot(&mut v), "");
}

#[test]
fn there_is_no_position_while_the_state_is_replaced() {
    let mut v = Validator::new(None, GapPolicy::Snapshot);
    assert_eq!(snapshot(&mut v), "");
    assert_eq!(v.stored(), Some(Position::new("e", 5)));
    assert_eq!(check(&mut v, Start::After(Position::new("e", 5)), &[accepted("f", Mode::Snapshot, None)]), "");
    assert_eq!((v.stored(), v.position()), (None, Some(Position::new("e", 5))));
    assert_eq!(v.message(&begin("f")), Ok(()));
    assert_eq!((v.stored(), v.position()), (None, None));
}

/// Returns a valid stream: a snapshot of two workers, and messages with entries of them.
fn valid_stream(sizes: &[Vec<bool>]) -> Vec<SubscribeResponse> {
    let mut all = vec![accepted("e", Mode::Snapshot, None), begin("e"), worker("v", 0), worker("w", 7), end("e", 3)];
    let (mut seq, mut ids) = (3, [1, 8]);
    for of_message in sizes {
        let prev = seq;
        let parts = of_message.iter().map(|&second| {
            let n = usize::from(second);
            (seq, ids[n]) = (seq + 1, ids[n] + 1);
            entry(seq, ["v", "w"][n], vec![event(ids[n] - 1, None)])
        });
        let parts = parts.collect();
        all.push(entries(prev, seq, parts));
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Without one of its messages, or with one twice or two exchanged, no stream is delivered as if nothing had happened.
    #[test]
    fn no_loss_is_unnoticed(
        sizes in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..4), 2..8), fault in 0..3, place in any::<prop::sample::Index>(),
    ) {
        let stream = valid_stream(&sizes);
        let play = |messages: &[SubscribeResponse]| {
            let mut v = Validator::new(None, GapPolicy::Snapshot);
            v.start_stream(Start::Snapshot);
            messages.iter().all(|m| v.validate(m).is_ok()).then(|| v.position().unwrap())
        };
        let last = stream.last().unwrap().position.clone().unwrap();
        prop_assert_eq!(play(&stream), Some(last.into()));
        let mut broken = stream.clone();
        let i = 5 + place.index(stream.len() - 6); // a message with entries, not the last one
        match fault {
            0 => _ = broken.remove(i),
            1 => broken.insert(i, stream[i].clone()),
            _ => broken.swap(i, i + 1),
        }
        prop_assert_eq!(play(&broken), None);
    }

    /// No sequence of messages makes the validator panic.
    #[test]
    fn nothing_panics(
        picks in prop::collection::vec((0..9usize, any::<u64>(), any::<u64>()), 0..20), fail in any::<bool>(), filtered in any::<bool>(),
    ) {
        let filter = Filter { tiers: vec![1], ..Default::default() };
        let policy = if fail { GapPolicy::Fail } else { GapPolicy::Snapshot };
        let mut v = Validator::new(Some(&filter).filter(|_| filtered), policy);
        v.start_stream(Start::After(Position::new("e", 4)));
        for (kind, a, b) in picks {
            let message = match kind {
                0 => accepted("e", Mode::Resume, Some(a % 8)),
                1 => accepted("e", Mode::Snapshot, None),
                2 => begin("e"),
                3 => worker("w", a),
                4 => end("e", a),
                5 => progress(Some(a)),
                6 => progress(None),
                7 => entries(a, b, vec![entry(b, "w", vec![event(b, added())])]),
                _ => entries(a, a.wrapping_add(1), vec![entry(a.wrapping_add(1), "w", vec![event(b, None)])]),
            };
            let _ = v.validate(&message);
        }
    }
}
