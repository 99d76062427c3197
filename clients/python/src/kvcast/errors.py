"""Errors of calls and streams."""

from __future__ import annotations

import enum
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvcast.position import Position

_DOMAIN = "kvcast"


class Reason(str, enum.Enum):
    """Why a server ended a call, by the error table of the contract."""

    POSITION_COMPACTED = "POSITION_COMPACTED"
    POSITION_AHEAD = "POSITION_AHEAD"
    BEHIND = "BEHIND"
    OUTDATED = "OUTDATED"
    EPOCH_MISMATCH = "EPOCH_MISMATCH"
    SLOW_SUBSCRIBER = "SLOW_SUBSCRIBER"
    TOO_MANY_SUBSCRIBERS = "TOO_MANY_SUBSCRIBERS"
    TOO_MANY_SNAPSHOTS = "TOO_MANY_SNAPSHOTS"
    TOO_MANY_HOLDERS = "TOO_MANY_HOLDERS"
    POSITION_NOT_REACHED = "POSITION_NOT_REACHED"
    TOO_MANY_QUERIES = "TOO_MANY_QUERIES"
    RESPONSE_TOO_LARGE = "RESPONSE_TOO_LARGE"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    FILTERS_TOO_LARGE = "FILTERS_TOO_LARGE"
    STARTING = "STARTING"
    NOT_SERVING = "NOT_SERVING"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    MAX_CONNECTION_AGE = "MAX_CONNECTION_AGE"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNKNOWN = "UNKNOWN"
    """A reason of a later version: StatusError.reason_name has it."""


class KvcastError(Exception):
    """The base of all errors of this package."""


class StatusError(KvcastError):
    """A call or a stream failed."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason_name: str = "",
        epoch: str = "",
        oldest: int = 0,
        newest: int = 0,
        retry_after: float = 0,
    ) -> None:
        self.code = code
        """The gRPC code."""
        self.message = message
        """What the problem is, and what to do."""
        self.reason_name = reason_name
        """The name of the reason; empty if the error is not of a kvcast server."""
        self.epoch = epoch
        """The epoch of the server's journal; empty if the error does not say it."""
        self.oldest = oldest
        self.newest = newest
        """The range of retained seqs; 0 if the error does not say it."""
        self.retry_after = retry_after
        """Seconds to wait before a retry; 0: the server requests no delay."""
        super().__init__(": ".join(part for part in (code.name, reason_name, message) if part))

    @property
    def reason(self) -> Reason | None:
        """The reason; None if the error is not of a kvcast server, as for a lost connection."""
        if not self.reason_name:
            return None
        return Reason.__members__.get(self.reason_name, Reason.UNKNOWN)

    @property
    def permanent(self) -> bool:
        """Whether a retry of a subscription would fail with the same code."""
        return self.code in _PERMANENT

    @property
    def position_lost(self) -> bool:
        """Whether the entries after the position are not available, so that only a snapshot helps."""
        return self.reason in (Reason.POSITION_COMPACTED, Reason.EPOCH_MISMATCH)

    @classmethod
    def of(cls, error: grpc.RpcError) -> StatusError:
        """Returns the error of a call that failed."""
        code: grpc.StatusCode = error.code() or grpc.StatusCode.UNKNOWN
        self = cls(code, error.details() or "")
        for detail in _details(error):
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                if info.domain == _DOMAIN:
                    self = cls(
                        code,
                        self.message,
                        info.reason,
                        info.metadata["epoch"] if "epoch" in info.metadata else "",
                        _number(info.metadata, "oldest"),
                        _number(info.metadata, "newest"),
                        self.retry_after,
                    )
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                self.retry_after = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
        return self


_PERMANENT = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


def _details(error: grpc.RpcError) -> Any:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                return status_pb2.Status.FromString(value).details
            except Exception:  # a malformed trailer says nothing
                return ()
    return ()


def _number(metadata: Any, key: str) -> int:
    text = metadata[key] if key in metadata else ""
    return int(text) if text.isascii() and text.isdigit() else 0


class ViolationError(KvcastError):
    """The server violated the contract, as by a missing or repeated message. The message that
    violates it is not delivered."""

    def __init__(self, what: str, at: Position | None = None) -> None:
        self.what = what
        self.at = at
        """The last valid position; None: there is none."""
        after = f" after {at}" if at else ""
        super().__init__(f"the stream violates the contract{after}: {what}")


class IdleError(KvcastError):
    """A stream received no message within the idle timeout."""

    def __init__(self) -> None:
        super().__init__("no message was received within the idle timeout")


class EndedError(KvcastError):
    """The server ended a stream without an error."""

    def __init__(self) -> None:
        super().__init__("the server ended the stream")


class ClosedError(KvcastError):
    """The client or the matcher is closed."""

    def __init__(self) -> None:
        super().__init__("it is closed")
