"""Matches over one stream, for threads."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from kvcast.channels import Servers
from kvcast.errors import ClosedError, EndedError, StatusError, ViolationError
from kvcast.inflight import MAX_IN_FLIGHT, Call, InFlight
from kvcast.matching import MatchRequest, MatchResult, Routed
from kvcast.v1 import match_pb2, router_event_service_pb2_grpc


class Matcher:
    """Sends MatchRequests over one stream, which costs less than a call for each. Requests of several threads are in
    flight at the same time, at most 1,024: further ones wait. It opens the stream with the first request, and another
    one after an error.

    The server answers in the order of the requests, so that one that waits for a position delays those after it. A
    request whose stream broke before the answer is sent over another stream, at most once more for each server.

    It is safe for concurrent use. Close it, or use it as a context manager.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slots = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self._lock = threading.Lock()
        self._stream: _Stream | None = None  # guarded by the lock
        self._threads: set[threading.Thread] = set()  # guarded by the lock
        self._closed = False  # guarded by the lock

    def __enter__(self) -> Matcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends requests without an answer with ClosedError, and closes the stream and its connection."""
        with self._lock:
            self._closed = True
            if self._stream is not None:
                self._stream.call.cancel()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def match(self, request: MatchRequest, timeout: float | None = None) -> MatchResult:
        """Sends a request and waits for the answer; after timeout seconds, it raises TimeoutError."""
        try:
            return self.submit(request).result(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"no answer within {timeout} s") from None

    def submit(self, request: MatchRequest) -> concurrent.futures.Future[MatchResult]:
        """Sends a request and returns the future of its answer. It waits while too many are in flight. The future cannot
        be cancelled."""
        future: concurrent.futures.Future[MatchResult] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        self._submit(Call.of_match(request, future))
        return future

    def note_routed(self, *routed: Routed) -> None:
        """Is Client.note_routed over the stream, with at most 64 prompts. It does not return how many were ignored. A match
        that is requested later sees them, if it has the same server. It does not wait for the server."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._submit(Call.of_routed(list(routed), future))

    def _submit(self, call: Call) -> None:
        self._slots.acquire()
        call.future.add_done_callback(lambda _: self._slots.release())
        self._send(call)

    def _send(self, call: Call) -> None:
        with self._lock:
            if not self._closed:
                if self._stream is None:
                    self._stream = _Stream(self._servers)
                    thread = threading.Thread(target=self._receive, args=(self._stream,), name="kvcast-match", daemon=True)
                    self._threads.add(thread)
                    thread.start()
                self._stream.requests.put(self._stream.in_flight.add(call))
                return
        call.fail(ClosedError())

    def _receive(self, stream: _Stream) -> None:
        """Passes answers to their calls until the stream ends."""
        error: Exception
        try:
            for response in stream.call:
                with self._lock:
                    call = stream.in_flight.pop(response)
                call.answer(response)
            error = EndedError()
        except grpc.RpcError as failure:
            error = StatusError.of(failure)
        except ViolationError as violation:
            error = violation
        stream.close()
        self._servers.failed(stream.choice)
        with self._lock:
            if self._closed:
                error = ClosedError()
            self._stream = None
            again = stream.in_flight.end(error, len(self._servers))
            self._threads.discard(threading.current_thread())
        for call in again:
            self._send(call)


class _Stream:
    """An open stream with its requests."""

    def __init__(self, servers: Servers) -> None:
        self.in_flight = InFlight()  # guarded by the lock of the matcher
        self.requests: queue.SimpleQueue[match_pb2.MatchPrefixesRequest | None] = queue.SimpleQueue()
        self.choice = servers.current
        self._channel: Any = servers.open(self.choice)
        stub = router_event_service_pb2_grpc.RouterEventServiceStub(self._channel)
        self.call: Any = stub.MatchPrefixes(self._sent(), metadata=servers.connection.metadata)

    def _sent(self) -> Iterator[match_pb2.MatchPrefixesRequest]:
        while (request := self.requests.get()) is not None:
            yield request

    def close(self) -> None:
        """Ends the stream, and closes its connection."""
        self.call.cancel()
        self.requests.put(None)
        self._channel.close()
