"""What a subscription does when its streams begin, deliver and end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from kvcast import options
from kvcast.errors import EndedError, IdleError, StatusError, ViolationError
from kvcast.options import GapPolicy, Start, SubscribeOptions
from kvcast.position import Position
from kvcast.validator import Validator
from kvcast.v1 import router_event_service_pb2 as pb

import grpc


@dataclasses.dataclass(frozen=True)
class Interruption:
    """The end of a stream that another one replaces."""

    error: Exception
    """Why the stream ended or failed to start: a StatusError, ViolationError, IdleError or EndedError, or the
    cause that was passed to Update.resnapshot."""
    snapshot: bool
    """Whether the next stream starts with a snapshot."""
    wait: float
    """Seconds until the next stream starts."""
    failures: int
    """The number of streams in a row without progress, including this one."""


class Update:
    """A message from the server, or an Interruption."""

    __slots__ = ("message", "position", "interruption", "_session")

    def __init__(
        self,
        message: pb.SubscribeResponse | None,
        position: Position | None,
        interruption: Interruption | None = None,
        session: Session | None = None,
    ) -> None:
        self.message = message
        """A message of the contract; None with an interruption. The first of each stream has an Accepted. Those
        from SnapshotBegin to SnapshotEnd are a snapshot: discard the state at SnapshotBegin."""
        self.position = position
        """The position from which to resume when this and all earlier updates are applied. None while the
        delivered state is incomplete or about to be replaced: before the first position, from an Accepted with
        MODE_SNAPSHOT or a SnapshotBegin to SnapshotEnd, and with an interruption whose snapshot is True."""
        self.interruption = interruption
        """Set when a stream has ended and another one follows. A caller may ignore it."""
        self._session = session

    def resnapshot(self, cause: Exception) -> None:
        """Ends the stream, and starts another one with a snapshot, because the caller's state is wrong. Call it
        before you take the next update, which is then an interruption with the cause. With GapPolicy.FAIL the
        cause ends the subscription."""
        if self._session is not None:
            self._session.rejected = cause


class Session:
    """The decisions of one subscription: what each stream requests, and how to go on when it ends. It has no
    socket. The clock is a function that returns seconds."""

    def __init__(self, opts: SubscribeOptions, client_id: str, servers: int, clock: Callable[[], float]) -> None:
        self._options = opts
        self._client_id = client_id
        self._clock = clock
        self._validator = Validator(opts.filter, opts.gap_policy is GapPolicy.FAIL)
        self._need_snapshot = False
        self._progressed = False  # the stream has delivered entries, or Progress with a position
        self._stream_start = 0.0
        self._backoff = _Backoff(opts.backoff_min, opts.backoff_max, servers)
        self._snapshot_backoff = _Backoff(opts.backoff_min, opts.backoff_max, 1)
        self.rejected: Exception | None = None
        self.idle_timeout = 0.0
        """Seconds within which the next message must come."""

    def begin_stream(self) -> pb.SubscribeRequest:
        """Begins a stream and returns its request."""
        start = self._next_start()
        self._progressed, self._stream_start = False, self._clock()
        self.idle_timeout = options.IDLE_TIMEOUT if self._options.idle_timeout is None else self._options.idle_timeout
        self._validator.start_stream(start)
        request = pb.SubscribeRequest(client_id=self._client_id)
        if isinstance(start, Position):
            request.after.CopyFrom(start.to_proto())
        else:
            getattr(request, start.value).SetInParent()
        if self._options.filter is not None:
            request.filter.CopyFrom(self._options.filter.to_proto())
        if self._options.gap_policy is GapPolicy.FAIL:
            request.gap_policy = pb.GAP_POLICY_FAIL
        return request

    def _next_start(self) -> Start | Position:
        if self._need_snapshot or self._validator.part_delivered:
            return Start.SNAPSHOT
        return self._validator.position or self._options.start

    def receive(self, m: pb.SubscribeResponse) -> Update:
        """Returns the update of the next message. Raises ViolationError."""
        self._validator.check(m)
        if m.HasField("accepted"):
            if self._options.idle_timeout is None and m.accepted.progress_interval_nano:
                interval = m.accepted.progress_interval_nano / 1e9
                self.idle_timeout = max(options.IDLE_INTERVALS * interval, options.LEAST_IDLE_TIMEOUT)
        elif self._validator.following:
            self._progressed = True
        if m.HasField("snapshot_begin"):
            self._need_snapshot = False
        return Update(m, self._validator.stored_position, session=self)

    def check_rejected(self) -> None:
        """Raises the cause if the caller has rejected its state."""
        if self.rejected is not None:
            raise self.rejected

    def end_stream(self, error: Exception) -> Update:
        """Returns the interruption after a stream has ended with an error. Raises the error if that ends the
        subscription."""
        if self._progressed:
            self._backoff.failures = 0
            if self._clock() - self._stream_start > self._options.backoff_max:
                self._snapshot_backoff.failures = 0
        wait = retry_after = 0.0
        if self.rejected is not None or isinstance(error, ViolationError):
            self.rejected = None
            if self._options.gap_policy is GapPolicy.FAIL:
                raise error
            self._need_snapshot = True
            # Snapshots are expensive, so only a stream longer than backoff_max resets this backoff.
            wait = self._snapshot_backoff.next(0)
        elif isinstance(error, StatusError):
            later = error.code is grpc.StatusCode.UNAUTHENTICATED and self._progressed
            if error.position_lost and self._options.gap_policy is GapPolicy.SNAPSHOT:
                self._need_snapshot = True
            elif error.permanent and not later:  # later credentials may be others
                raise error
            else:
                retry_after = error.retry_after
        elif not isinstance(error, (IdleError, EndedError)):
            raise error
        wait = max(wait, self._backoff.next(retry_after))
        start = self._next_start()
        interruption = Interruption(error, start is Start.SNAPSHOT, wait, self._backoff.failures)
        return Update(None, None if start is Start.SNAPSHOT else self._validator.position, interruption)


class _Backoff:
    """An exponential backoff with jitter. Several servers are tried in turn before it grows."""

    def __init__(self, least: float, most: float, servers: int) -> None:
        self._least, self._most, self._servers = least, most, servers
        self.failures = 0

    def next(self, requested: float) -> float:
        """Counts a failure and returns the wait after it in seconds: a short one before the next server, until all
        have failed. If the last server requests a longer delay, it is that delay plus up to a quarter at random, since
        the server requests the same delay from many clients."""
        rounds = self.failures // self._servers
        self.failures += 1
        if self.failures % self._servers:
            return random.uniform(0, self._least / 10)
        wait = min(self._most, self._least * 2.0 ** min(rounds, 64))
        wait -= random.uniform(0, wait / 2)
        requested = min(requested, options.MAX_RETRY_DELAY)
        if requested > 0:
            wait = max(wait, requested + random.uniform(0, requested / 4))
        return wait
