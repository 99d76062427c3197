"""Options of subscriptions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from kvcast.position import Position
from kvcast.v1 import event_pb2, router_event_service_pb2 as pb

IDLE_TIMEOUT = 30.0
"""Seconds until the first message of a stream must come, unless idle_timeout is set."""
IDLE_INTERVALS = 3
"""How many progress intervals of the server a stream may be silent, but at least LEAST_IDLE_TIMEOUT seconds."""
LEAST_IDLE_TIMEOUT = 10.0
MAX_RETRY_DELAY = 300.0
"""The longest delay in seconds that a server may request."""


class Start(enum.Enum):
    """Where a subscription starts."""

    SNAPSHOT = "snapshot"
    """With a snapshot of all workers."""
    LATEST = "latest"
    """With the next entry. The existing state is not sent."""
    EARLIEST = "earliest"
    """With the oldest retained entry."""


class GapPolicy(enum.Enum):
    """What a subscription does when it cannot continue after its position."""

    SNAPSHOT = "snapshot"
    """It continues with a snapshot."""
    FAIL = "fail"
    """It ends with the error."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """Selects events: those that match each list that is not empty."""

    workers: Sequence[str] = ()
    models: Sequence[str] = ()
    tiers: Sequence[event_pb2.Tier] = ()
    """Tiers of stored and removed blocks."""

    def to_proto(self) -> pb.Filter:
        return pb.Filter(workers=self.workers, models=self.models, tiers=self.tiers)


@dataclasses.dataclass(frozen=True)
class SubscribeOptions:
    """Options of a subscription. The default subscribes to everything, starting with a snapshot."""

    start: Start | Position = Start.SNAPSHOT
    """Where it starts; a Position: after this position."""
    filter: Filter | None = None
    gap_policy: GapPolicy = GapPolicy.SNAPSHOT
    idle_timeout: float | None = None
    """Seconds to connect, and to receive the next message, after which the stream is replaced. The time in
    which the caller processes an update does not count. None: 30 s until the stream is accepted, then three
    progress intervals of the server, but at least 10 s."""
    backoff_min: float = 1.0
    backoff_max: float = 30.0
    """Bounds in seconds of the wait before another stream, which doubles with each failure and is reduced by
    up to a half at random. A longer delay that the server requests takes precedence, up to 5 minutes. With
    several servers this is the wait after all have failed."""

    def __post_init__(self) -> None:
        if self.idle_timeout is not None and self.idle_timeout < 0.01:
            raise ValueError(f"idle_timeout is {self.idle_timeout}: want 0.01 s or more, or None")
        if self.backoff_min <= 0:
            raise ValueError(f"backoff_min is {self.backoff_min}: want more than 0")
        if self.backoff_max < self.backoff_min:
            raise ValueError(f"backoff_max is {self.backoff_max}: want backoff_min, {self.backoff_min}, or more")
