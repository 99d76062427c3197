"""A view of all KV caches, from the updates of a subscription."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from kvcast.errors import Reason, StatusError
from kvcast.matching import Match, Prompt, tokens_hashes
from kvcast.position import Position
from kvcast.session import Update
from kvcast.v1 import event_pb2, match_pb2, router_event_service_pb2 as pb, worker_pb2

_QUIET_INTERVALS = 2
STALE_AFTER = 3.0
"""Seconds without a stream after which the ranks of a view are degraded: the servers' default cluster.ttl."""

_TIERS = (event_pb2.TIER_DEVICE, event_pb2.TIER_HOST_PINNED, event_pb2.TIER_DISK, event_pb2.TIER_EXTERNAL)

# The reasons of a Gap by name; those that are not here have the same name, and unknown ones are a gap.
_GAP_REASONS = {
    "REPLAY_UNAVAILABLE": "GAP",
    "REPLAY_INCOMPLETE": "GAP",
    "REPLAY_FORGOTTEN": "GAP",
    "AMBIGUOUS_PUBLISHER": "CONFLICT",
    "TOO_MANY_BLOCKS": "BLOCKS_OMITTED",
    "TOO_MANY_ATTRIBUTES": "BLOCKS_OMITTED",
}


def _degraded(reason: event_pb2.Gap.Reason) -> worker_pb2.DegradedReason:
    """Returns what a Gap's reason makes of a rank."""
    if reason not in event_pb2.Gap.Reason.values():
        return worker_pb2.DEGRADED_REASON_GAP
    name = event_pb2.Gap.Reason.Name(reason).removeprefix("REASON_")
    name = "DEGRADED_REASON_" + _GAP_REASONS.get(name, name)
    if name not in worker_pb2.DegradedReason.keys() or name == "DEGRADED_REASON_UNSPECIFIED":
        return worker_pb2.DEGRADED_REASON_GAP
    return cast("worker_pb2.DegradedReason", worker_pb2.DegradedReason.Value(name))


def _known(reason: worker_pb2.DegradedReason) -> worker_pb2.DegradedReason:
    """Returns a reason that this version knows: of a later version, it is a gap."""
    return reason if reason in worker_pb2.DegradedReason.values() else worker_pb2.DEGRADED_REASON_GAP


class _Block:
    __slots__ = ("parent", "content", "tiers")

    def __init__(self, parent: int | None, content: int | None) -> None:
        self.parent = parent  # None: the block starts a prompt
        self.content = content  # the tokens hash; None: unknown
        self.tiers: set[event_pb2.Tier] = set()


class _Rank:
    """The blocks of a dp rank, and what is known to be wrong with them."""

    def __init__(self, joined_late: bool = False) -> None:
        self.blocks: dict[int, _Block] = {}
        # Hashes of blocks by the hash of their parent and their content. Several blocks may have the same.
        self.children: dict[tuple[int | None, int], set[int]] = {}
        self.reasons: dict[event_pb2.Tier, set[worker_pb2.DegradedReason]] = collections.defaultdict(set)
        self.has_groups = joined_late  # the engine may reuse less than the prefix
        if joined_late:  # the subscription started after the worker was added: what was said before is not known
            self.doubt(worker_pb2.DEGRADED_REASON_JOINED_LATE)

    def store(self, tier: event_pb2.Tier, stored: event_pb2.Stored) -> None:
        parent = stored.parent_hash if stored.HasField("parent_hash") else None
        contents = stored.tokens_hashes
        for i, block_hash in enumerate(stored.block_hashes):
            content = contents[i] if i < len(contents) else None
            block = self.blocks.get(block_hash)
            if block is not None and tier != event_pb2.TIER_DEVICE and (event_pb2.TIER_DEVICE in block.tiers or block.content is not None):
                content = None  # of a copy, which does not change the content
            if block is not None and content is not None and (block.parent, block.content) != (parent, content):
                tiers = block.tiers
                self._forget(block_hash)
                block = None
            else:
                tiers = set()
            if block is None:
                block = self.blocks[block_hash] = _Block(parent, content)
                block.tiers |= tiers
                if content is not None:
                    self.children.setdefault((parent, content), set()).add(block_hash)
            block.tiers.add(tier)
            parent = block_hash

    def remove(self, tier: event_pb2.Tier, block_hashes: Sequence[int]) -> None:
        for block_hash in block_hashes:
            block = self.blocks.get(block_hash)
            if block is not None:
                block.tiers.discard(tier)
                if not block.tiers:
                    self._forget(block_hash)

    def clear(self, cleared: event_pb2.Cleared) -> None:
        tiers = tuple(cleared.tiers) or _TIERS
        for block_hash in list(self.blocks):
            for tier in tiers:
                self.remove(tier, (block_hash,))
        for tier in tiers:
            self.reasons[tier].clear()
            if cleared.reason == event_pb2.Cleared.REASON_UNREPAIRED_GAP:
                self.reasons[tier].add(worker_pb2.DEGRADED_REASON_GAP)
        if cleared.reason == event_pb2.Cleared.REASON_ENGINE_RESTARTED and not cleared.tiers:
            self.has_groups = False

    def doubt(self, *reasons: worker_pb2.DegradedReason) -> None:
        """Degrades all tiers."""
        for tier in _TIERS:
            self.reasons[tier].update(reasons)

    def degrade(self, gap: event_pb2.Gap) -> None:
        for tier in tuple(gap.tiers) or _TIERS:
            self.reasons[tier].add(_degraded(gap.reason))

    def resolve(self, resolved: event_pb2.Resolved) -> None:
        for reasons in self.reasons.values():
            reasons.difference_update(_degraded(reason) for reason in resolved.reasons)

    def restore(self, r: pb.SnapshotRank) -> None:
        """Takes what a snapshot reports."""
        for of_tier in r.tier_reasons:
            self.reasons[of_tier.tier].update(map(_known, of_tier.reasons))
        if not r.tier_reasons:
            self.doubt(*map(_known, r.reasons))
        self.has_groups = r.groups_omitted or r.HasField("groups")

    def _forget(self, block_hash: int) -> None:
        block = self.blocks.pop(block_hash)
        if block.content is not None:
            same = self.children[block.parent, block.content]
            same.discard(block_hash)
            if not same:
                del self.children[block.parent, block.content]

    def prefix(self, contents: Sequence[int]) -> tuple[int, dict[event_pb2.Tier, int]]:
        """Returns the number of blocks in the longest prefix with these contents, and in each tier."""
        in_tier: dict[event_pb2.Tier, int] = {}
        held: set[int | None] = {None}
        for n, content in enumerate(contents):
            held = {block for parent in held for block in self.children.get((parent, content), ())}
            if not held:
                return n, in_tier
            for tier in {tier for block in held if block is not None for tier in self.blocks[block].tiers}:
                if in_tier.get(tier, 0) == n:
                    in_tier[tier] = n + 1
        return len(contents), in_tier

    def prefix_by_hash(self, block_hashes: Sequence[int]) -> tuple[int, dict[event_pb2.Tier, int]]:
        """Is prefix, by the engine's own hashes."""
        in_tier: dict[event_pb2.Tier, int] = {}
        for n, block_hash in enumerate(block_hashes):
            block = self.blocks.get(block_hash)
            if block is None:
                return n, in_tier
            for tier in block.tiers:
                if in_tier.get(tier, 0) == n:
                    in_tier[tier] = n + 1
        return len(block_hashes), in_tier


class _Worker:
    def __init__(self, added: event_pb2.WorkerAdded, joined_late: bool = False) -> None:
        self.added = added
        self.block_size = added.block_size
        self.ranks: dict[int, _Rank] = {rank: _Rank() for rank in added.ranks}
        self._joined_late = joined_late  # the subscription started after the worker was added

    def rank(self, number: int) -> _Rank:
        rank = self.ranks.get(number)
        if rank is None:
            rank = self.ranks[number] = _Rank(self._joined_late)
        return rank


class _State:
    """All workers at a position."""

    def __init__(self) -> None:
        self.workers: dict[str, _Worker] = {}

    def apply_entry(self, e: event_pb2.Entry) -> None:
        for event in e.events:
            kind = event.WhichOneof("event")
            if kind == "worker_added":
                self.workers[e.worker] = _Worker(event.worker_added)
            elif kind == "worker_removed":
                self.workers.pop(e.worker, None)
            elif kind is not None:  # None: of a later version
                if e.worker not in self.workers:
                    self.workers[e.worker] = _Worker(event_pb2.WorkerAdded(model=e.model), joined_late=True)
                self._apply_event(self.workers[e.worker], event, kind)

    def _apply_event(self, worker: _Worker, event: event_pb2.RouterEvent, kind: str) -> None:
        rank = worker.rank(event.dp_rank)
        if kind == "stored":
            rank.store(event.tier, event.stored)
            worker.block_size = event.stored.block_size or worker.block_size
        elif kind == "removed":
            rank.remove(event.tier, event.removed.block_hashes)
        elif kind == "cleared":
            rank.clear(event.cleared)
        elif kind == "gap":
            rank.degrade(event.gap)
        elif kind == "resolved":
            rank.resolve(event.resolved)
        elif kind in ("groups_omitted", "groups"):
            rank.has_groups = True

    def apply_contents(self, m: pb.SubscribeResponse) -> None:
        if m.HasField("snapshot_worker"):
            w = m.snapshot_worker
            worker = self.workers[w.worker] = _Worker(w.added)
            for r in w.ranks:
                worker.rank(r.dp_rank).restore(r)
            for number in w.incomplete_ranks:
                rank = worker.rank(number)
                if not any(rank.reasons.values()):  # the server does not say why
                    rank.doubt(worker_pb2.DEGRADED_REASON_GAP)
        for blocks in m.snapshot_blocks:
            for event in blocks.events:
                self._apply_event(self.workers[blocks.worker], event, event.WhichOneof("event") or "")
        for e in m.entries:
            self.apply_entry(e)


class View:
    """The state of all workers according to one subscription, in plain dictionaries: for tests and small fleets. A block of
    a rank takes some 500 bytes, and a message of a large stream takes longer to apply than a server takes to send it. For
    more, ask the server with a Matcher.

    It knows what the stream reports. A match says TRUST_EXACT unless the stream has given a reason for doubt: an engine whose
    connection is lost is only known to the server. With other attention groups than the main group, a prefix is an upper
    bound (TRUST_UPPER_BOUND), where the server can say more. Digests are not compared.

    One thread applies the updates. Do not query it in another thread at the same time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = _State()
        self._pending: _State | None = None  # the snapshot that is being received
        self._known = math.inf  # when the state was last known to be up to date
        self._quiet = 0.0  # how long it is after that, without another message; 0 without a stream, or behind it
        self._silence = math.inf  # how long the stream may be silent
        self._goal = 0  # the newest entry at a message that was before it, which the state must reach; 0: none
        self._goal_at = 0.0  # when that message came
        self.position: Position | None = None
        """The last position applied; None: none since the state was empty."""
        self.ready = False
        """Whether a snapshot has been applied, or the subscription has started without one."""

    def apply(self, update: Update) -> None:
        """Applies the next update of a subscription."""
        m = update.message
        if m is None:
            self._pending = None  # the next stream starts another snapshot
            error = update.interruption.error if update.interruption else None
            self._outdated(isinstance(error, StatusError) and error.reason == Reason.OUTDATED)
            return
        if m.HasField("accepted"):
            self._silence = _QUIET_INTERVALS * m.accepted.progress_interval_nano / 1e9 or math.inf
        if m.HasField("snapshot_begin"):
            self._pending = _State()
            self._outdated()  # until the snapshot is complete, the state is the one before
        elif m.HasField("snapshot_end") and self._pending is not None:
            self._state, self._pending = self._pending, None
        else:
            (self._pending or self._state).apply_contents(m)
        if update.position is not None:
            self.position, self.ready = update.position, True
            self._heard(m, update.position.seq)

    def _heard(self, m: pb.SubscribeResponse, seq: int) -> None:
        """Records when the state was up to date, at a message with a position."""
        now, newest = self._clock(), max(m.newest_seq, m.accepted.newest_seq)
        if m.HasField("accepted") or m.HasField("snapshot_end"):
            self._goal = 0
        if max(newest, self._goal) <= seq:  # earlier servers say what is newest in accepted alone
            self._known, self._quiet, self._goal = now, self._silence, 0
            return
        if self._goal == 0:
            self._outdated()  # it is behind from now on
        elif self._goal <= seq:
            self._known, self._quiet = self._goal_at, 0.0
        else:
            return
        self._goal, self._goal_at = newest, now

    def _outdated(self, at_once: bool = False) -> None:
        """Records that the state is not up to date any more."""
        self._quiet = 0.0
        if at_once or self._known == math.inf:
            self._known = self._clock() - 2 * STALE_AFTER

    def _age(self) -> float:
        """Returns the seconds since the state was known to be up to date; 0: it is."""
        age = self._clock() - self._known
        return age if age > self._quiet else 0.0

    @property
    def workers(self) -> Mapping[str, event_pb2.WorkerAdded]:
        """The workers by name, with their properties."""
        return {name: worker.added for name, worker in self._state.workers.items()}

    def match(self, prompt: Prompt, model: str = "") -> list[Match]:
        """Returns the dp ranks that hold the first block of a prompt: the longest prefix first, then the longest in
        TIER_DEVICE, then by worker and rank. A model restricts it to workers of the model."""
        contents: dict[int, list[int]] = {}  # by block size
        out = []
        age = self._age()
        for name, worker, number, rank in self._ranks(model):
            size = worker.block_size
            if prompt.block_size and size and prompt.block_size != size:
                continue
            size = size or prompt.block_size
            if prompt.tokens_hashes:
                blocks, in_tier = rank.prefix(prompt.tokens_hashes)
            elif prompt.block_hashes:
                blocks, in_tier = rank.prefix_by_hash(prompt.block_hashes)
            elif size:
                if size not in contents:
                    contents[size] = _contents(prompt, size)
                blocks, in_tier = rank.prefix(contents[size])
            else:
                continue
            if blocks > 0:
                out.append(_match(name, worker, number, rank, blocks, in_tier, size, age))
        device = event_pb2.TIER_DEVICE
        out.sort(key=lambda m: (-m.blocks, -m.tier_blocks.get(device, 0), m.worker, m.rank))
        return out

    def _ranks(self, model: str) -> Iterator[tuple[str, _Worker, int, _Rank]]:
        for name, worker in self._state.workers.items():
            if not worker.added.pool and model in ("", worker.added.model):
                for number, rank in worker.ranks.items():
                    yield name, worker, number, rank


def _contents(prompt: Prompt, size: int) -> list[int]:
    hashes = tokens_hashes(prompt.tokens, size, prompt.lora, prompt.salt, prompt.eagle)
    if prompt.exclude_last_token:
        hashes = hashes[: max(0, (len(prompt.tokens) - 1) // size)]
    return hashes


def _match(
    name: str,
    worker: _Worker,
    number: int,
    rank: _Rank,
    blocks: int,
    in_tier: Mapping[event_pb2.Tier, int],
    size: int,
    age: float,
) -> Match:
    stale = {worker_pb2.DEGRADED_REASON_STALE} if age > STALE_AFTER else set()
    reasons = set(stale).union(*rank.reasons.values())
    bound = worker_pb2.TRUST_UPPER_BOUND if rank.has_groups else worker_pb2.TRUST_EXACT
    degraded = worker_pb2.TRUST_DEGRADED
    return Match(
        worker=name,
        rank=number,
        endpoint=worker.added.endpoint,
        model=worker.added.model,
        blocks=blocks,
        tokens=blocks * size,
        tiers=[
            match_pb2.TierPrefix(
                tier=tier, blocks=n, tokens=n * size, trust=degraded if stale or rank.reasons[tier] else bound
            )
            for tier, n in sorted(in_tier.items())
        ],
        trust=degraded if reasons else bound,
        reasons=sorted(reasons),
        age=age,
    )
