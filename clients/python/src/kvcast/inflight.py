"""The requests of a MatchPrefixes stream that have no answer yet."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import grpc

from kvcast.errors import EndedError, StatusError, ViolationError
from kvcast.matching import MatchRequest, MatchResult, Routed
from kvcast.v1 import match_pb2

MAX_IN_FLIGHT = 1024
"""Requests of a matcher that have no answer yet. Further ones wait."""


@dataclasses.dataclass
class Call:
    """A request, with the future of its answer."""

    message: match_pb2.MatchPrefixesRequest
    model: str
    future: Any
    attempts: int = 0

    @classmethod
    def of_match(cls, request: MatchRequest, future: Any) -> Call:
        """Returns the call of a MatchRequest."""
        return cls(match_pb2.MatchPrefixesRequest(request=request.to_proto()), request.model, future)

    @classmethod
    def of_routed(cls, routed: list[Routed], future: Any) -> Call:
        """Returns the call that notes routed prompts. It has no result."""
        return cls(match_pb2.MatchPrefixesRequest(routed=[r.to_proto() for r in routed]), "", future)

    def answer(self, response: match_pb2.MatchPrefixesResponse) -> None:
        """Sets the result."""
        if not self.future.done():
            self.future.set_result(
                MatchResult.of(response.response, self.model) if response.HasField("response") else None
            )

    def fail(self, error: Exception) -> None:
        """Sets the error."""
        if not self.future.done():
            self.future.set_exception(error)


class InFlight:
    """The calls of one stream in the order of their requests. It has no lock and no socket."""

    def __init__(self) -> None:
        self._calls: collections.deque[Call] = collections.deque()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> match_pb2.MatchPrefixesRequest:
        """Adds a call, and returns the message to send."""
        self._next_id += 1
        call.message.id = self._next_id
        call.attempts += 1
        self._calls.append(call)
        return call.message

    def pop(self, response: match_pb2.MatchPrefixesResponse) -> Call:
        """Removes the call that a response answers. Raises ViolationError."""
        if not self._calls or self._calls[0].message.id != response.id:
            raise ViolationError("answers are not in the order of requests")
        return self._calls.popleft()

    def end(self, error: Exception, max_attempts: int) -> list[Call]:
        """Ends all calls with the error that ended the stream, but returns those to send again: the server ends a stream
        at the first request that it cannot answer, and a lost connection is the fault of none."""
        is_connection = isinstance(error, EndedError) or (
            isinstance(error, StatusError) and error.code is grpc.StatusCode.UNAVAILABLE
        )
        again = []
        for i, call in enumerate(self._calls):
            if (i == 0 and not is_connection) or call.attempts > max_attempts:
                call.fail(error)
            else:
                again.append(call)
        self._calls.clear()
        return again
