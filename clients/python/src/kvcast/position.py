"""Positions in the stream."""

from __future__ import annotations

from typing import NamedTuple

from kvcast.v1 import event_pb2

_MAX_SEQ = (1 << 64) - 1


class Position(NamedTuple):
    """A point in the stream: every entry up to and including seq is applied.

    A position is only valid for a subscription with the same filter. Its text is EPOCH:SEQ.
    """

    epoch: str
    """The random name of the journal. Empty means the server's current epoch: the subscription
    then cannot detect that the server has lost its journal."""
    seq: int
    """The number of the last entry applied; 0 is before the first entry."""

    def __str__(self) -> str:
        return f"{self.epoch}:{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parses EPOCH:SEQ, in which an epoch may have colons. Raises ValueError."""
        epoch, colon, seq = text.rpartition(":")
        if not colon or not (seq.isascii() and seq.isdigit()) or int(seq) > _MAX_SEQ:
            raise ValueError(f"position {text!r} is not allowed: want EPOCH:SEQ, or :SEQ")
        return cls(epoch, int(seq))

    def to_proto(self) -> event_pb2.Position:
        """Returns the position as a message of the contract."""
        return event_pb2.Position(epoch=self.epoch, seq=self.seq)
