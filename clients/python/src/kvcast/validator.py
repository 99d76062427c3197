"""Checks that no message of a subscription is missing, repeated or out of order."""

from __future__ import annotations

import enum

from google.protobuf.unknown_fields import UnknownFieldSet

from kvcast.errors import ViolationError
from kvcast.options import Filter, Start
from kvcast.position import Position
from kvcast.v1 import event_pb2, router_event_service_pb2 as pb


class _Phase(enum.Enum):
    """The phase of a stream, by which messages are valid next."""

    START = 0  # Accepted
    AWAITING_SNAPSHOT = 1  # heartbeats and SnapshotBegin
    SNAPSHOT = 2  # parts of a snapshot and heartbeats
    FOLLOWING = 3  # entries, Progress and SnapshotBegin


class _Delivered(enum.Enum):
    """The part of the state that has been delivered."""

    NOTHING = 0
    PART = 1  # of a snapshot
    ALL = 2  # the state at a position


_MODES = {
    Start.SNAPSHOT: pb.Accepted.MODE_SNAPSHOT,
    Start.LATEST: pb.Accepted.MODE_LATEST,
    Start.EARLIEST: pb.Accepted.MODE_EARLIEST,
}


class Validator:
    """Checks all streams of one subscription. It has no socket and no clock.

    - prev_seq is the seq of the previous position. Seqs of entries are contiguous; with a filter they grow.
    - The event_ids of a worker are contiguous; with a filter by tier they grow.
    - After a snapshot or the first entry, a worker has no event before its worker_added.
    - A position has the seq of the last entry before it, and the epoch of the stream.
    - Accepted, SnapshotBegin and SnapshotEnd are in a message of their own, with a position at most.

    Before and within a snapshot, Progress without a position is a heartbeat.

    The event_ids of a worker that is removed and added again are not compared, since the server remembers
    those of a bounded number of removed workers. The seqs show all the same that no entry is missing.
    """

    def __init__(self, selects: Filter | None, fail_on_gap: bool) -> None:
        self._filtered = selects is not None and bool(selects.workers or selects.models or selects.tiers)
        self._tier_filtered = selects is not None and bool(selects.tiers)
        self._fail_on_gap = fail_on_gap
        self._delivered = _Delivered.NOTHING
        self._epoch = ""
        self._seq = 0
        self._snapshot_seq = 0  # of the last entry in the snapshot
        self._workers_known = False  # all existing workers were delivered
        self._last_event_ids: dict[str, int] = {}
        self._phase = _Phase.START
        self._start: Start | Position = Start.SNAPSHOT
        self._accepted_epoch = ""

    @property
    def position(self) -> Position | None:
        """The position from which to resume; None if the delivered state is incomplete."""
        if self._delivered is not _Delivered.ALL:
            return None
        return Position(self._epoch, self._seq)

    @property
    def stored_position(self) -> Position | None:
        """The position that the caller may store with its state: none while a snapshot is expected that
        replaces the state."""
        return None if self._phase is _Phase.AWAITING_SNAPSHOT else self.position

    @property
    def part_delivered(self) -> bool:
        """Whether the delivered state is a part of a snapshot."""
        return self._delivered is _Delivered.PART

    @property
    def following(self) -> bool:
        """Whether the stream has delivered its state, so that entries and Progress follow."""
        return self._phase is _Phase.FOLLOWING

    def start_stream(self, start: Start | Position) -> None:
        """Begins a stream: an Accepted is the only valid message."""
        self._phase, self._start, self._accepted_epoch = _Phase.START, start, ""

    def check(self, m: pb.SubscribeResponse) -> None:
        """Checks the next message of the stream. Raises ViolationError."""
        at = self.position
        violation = self._message(m)
        if violation:
            raise ViolationError(violation, at)

    def _message(self, m: pb.SubscribeResponse) -> str:
        accepted, begin, end = m.HasField("accepted"), m.HasField("snapshot_begin"), m.HasField("snapshot_end")
        progress, worker = m.HasField("progress"), m.HasField("snapshot_worker")
        contents = bool(m.entries) or worker or bool(m.snapshot_blocks)
        others = contents or progress
        known = accepted or begin or end or others or m.HasField("position") or m.prev_seq
        if self._phase is not _Phase.START and not known and len(UnknownFieldSet(m)) > 0:
            return ""  # of a later version; it has no position, so that nothing is missed
        if accepted and (begin or end or others) or begin and (end or others) or end and others:
            return "Accepted, SnapshotBegin or SnapshotEnd in a message with other contents"
        if self._phase is _Phase.START:
            return self._accept(m) if accepted else "the first message has no Accepted"
        if accepted:
            return "a second Accepted"
        if begin:
            return self._begin_snapshot(m.snapshot_begin)
        heartbeat = progress and not m.HasField("position") and not m.prev_seq and not contents
        if self._phase is not _Phase.FOLLOWING and heartbeat:
            return ""
        if self._phase is _Phase.AWAITING_SNAPSHOT:
            return "another message instead of the announced snapshot"
        if self._phase is _Phase.SNAPSHOT:
            return "Progress within a snapshot that is not a heartbeat" if progress else self._snapshot_part(m)
        if end or worker or m.snapshot_blocks:
            return "part of a snapshot that has not begun"
        return self._follow(m)

    def _accept(self, m: pb.SubscribeResponse) -> str:
        a, at = m.accepted, m.position
        resumes = isinstance(self._start, Position)
        want = pb.Accepted.MODE_RESUME if isinstance(self._start, Position) else _MODES[self._start]
        self._accepted_epoch = a.epoch
        if not a.epoch:
            return "an Accepted without an epoch"
        if a.mode == pb.Accepted.MODE_SNAPSHOT and (want == a.mode or resumes and not self._fail_on_gap):
            self._phase = _Phase.AWAITING_SNAPSHOT
            return ""
        if a.mode != want:
            return f"requested mode {want}, got {a.mode}"
        if at.epoch != a.epoch:
            return f"an Accepted of epoch {a.epoch!r} with a position of epoch {at.epoch!r}"
        if isinstance(self._start, Position) and (self._start.epoch not in ("", a.epoch) or self._start.seq != at.seq):
            return f"requested to resume after {self._start}, got {at.epoch}:{at.seq}"
        if self._delivered is _Delivered.NOTHING:
            self._workers_known = at.seq == 0
        self._delivered, self._epoch, self._seq = _Delivered.ALL, a.epoch, at.seq
        self._phase = _Phase.FOLLOWING
        return ""

    def _begin_snapshot(self, b: pb.SnapshotBegin) -> str:
        if b.epoch != self._accepted_epoch:
            return f"a snapshot of epoch {b.epoch!r} in a stream of epoch {self._accepted_epoch!r}"
        if self._phase is _Phase.FOLLOWING and self._fail_on_gap:
            return "a snapshot in a stream that must continue or fail"
        self._phase, self._delivered, self._epoch = _Phase.SNAPSHOT, _Delivered.PART, b.epoch
        self._seq, self._snapshot_seq, self._workers_known = 0, 0, False
        self._last_event_ids.clear()
        return ""

    def _snapshot_part(self, m: pb.SubscribeResponse) -> str:
        if m.HasField("snapshot_worker"):
            w = m.snapshot_worker
            if w.worker in self._last_event_ids:
                return f"worker {w.worker!r} twice in a snapshot"
            self._last_event_ids[w.worker] = w.last_event_id
        for e in m.entries:
            if e.seq <= self._snapshot_seq:
                return f"entry {e.seq} after {self._snapshot_seq}"
            self._snapshot_seq = e.seq
            if violation := self._events(e):
                return violation
        if not m.HasField("snapshot_end"):
            return ""
        at = m.position
        if at.epoch != self._epoch:
            return f"a snapshot of epoch {self._epoch!r} ends in epoch {at.epoch!r}"
        if at.seq < self._snapshot_seq or m.prev_seq != at.seq:
            return f"a snapshot with entry {self._snapshot_seq} ends at {at.seq} with prev_seq {m.prev_seq}"
        self._phase, self._delivered, self._seq, self._workers_known = _Phase.FOLLOWING, _Delivered.ALL, at.seq, True
        return ""

    def _follow(self, m: pb.SubscribeResponse) -> str:
        at = m.position
        if at.epoch != self._epoch:
            return f"a message of epoch {at.epoch!r} in a stream of epoch {self._epoch!r}"
        if m.prev_seq != self._seq:
            return f"a message with prev_seq {m.prev_seq} after one at {self._seq}: a message is missing"
        last = self._seq
        for e in m.entries:
            if e.seq <= last or not self._filtered and e.seq != last + 1:
                return f"entry {e.seq} after {last}"
            last = e.seq
            if violation := self._events(e):
                return violation
        if at.seq < last or not self._filtered and at.seq != last:
            return f"position {at.seq} after entry {last}"
        self._seq = at.seq
        return ""

    def _events(self, e: event_pb2.Entry) -> str:
        last = self._last_event_ids.get(e.worker)
        for ev in e.events:
            kind, event_id = ev.WhichOneof("event"), ev.event_id
            added = kind == "worker_added"
            if last is None and self._workers_known and not added:
                return f"entry {e.seq} of unknown worker {e.worker!r}"
            if last is not None and event_id <= last:
                return f"event {event_id} of worker {e.worker!r} in entry {e.seq} after event {last}"
            if last is not None and event_id != last + 1 and not self._tier_filtered and not added:
                return f"event {event_id} of worker {e.worker!r} in entry {e.seq} instead of event {last + 1}"
            last = None if kind == "worker_removed" else event_id
        if last is None:
            self._last_event_ids.pop(e.worker, None)
        else:
            self._last_event_ids[e.worker] = last
        return ""
