"""The client for threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from kvcast.channels import Connection, Servers
from kvcast.errors import ClosedError, EndedError, IdleError, StatusError
from kvcast.matcher import Matcher
from kvcast.matching import MatchRequest, MatchResult, Outcome, Routed
from kvcast.options import Filter, SubscribeOptions
from kvcast.session import Session, Update
from kvcast.v1 import match_pb2, router_event_service_pb2 as pb, router_event_service_pb2_grpc, worker_pb2

MAX_OUTCOMES = 1000
"""Outcomes in one call."""
MAX_ROUTED = 64
"""Routed prompts in one call."""


class Client:
    """A client of a server, or of several that serve the same workers. It is safe for concurrent use.

    With several, it uses the first until a stream ends or a call finds it unavailable, and then the next. It resumes
    at its position there, if the servers share their journal; otherwise their epochs differ, and a snapshot follows.

    Keyword arguments are those of Connection. Calls raise StatusError. It connects with the first call or stream. Close
    it, or use it as a context manager.
    """

    def __init__(self, target: str, **connection: Any) -> None:
        self._connection = Connection(target, **connection)
        self._servers = Servers(self._connection, asynchronous=False)
        self._lock = threading.Lock()
        self._channel: tuple[int, Any] | None = None  # for unary calls, with its choice; guarded by the lock
        self._closed = threading.Event()
        self._streams: set[Any] = set()  # open calls of subscriptions; guarded by the lock

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all subscriptions, and closes the connections. Matchers are closed by themselves."""
        self._closed.set()
        with self._lock:
            channel, self._channel = self._channel, None
            streams = list(self._streams)
        for call in streams:
            call.cancel()
        if channel is not None:
            channel[1].close()

    def subscribe(self, options: SubscribeOptions | None = None) -> Iterator[Update]:
        """Yields the updates of a subscription, which resumes over connections and servers.

        Since the last SnapshotBegin, every entry is delivered once and in order. If that is impossible, an interruption
        has the reason, and a snapshot follows. A stream that ends, sends no message within the idle timeout, or
        violates the contract is replaced by another one that resumes after the last position.

        The iterator ends when the client is closed. It raises StatusError for an error that a retry would repeat
        (INVALID_ARGUMENT, UNAUTHENTICATED before any entries, PERMISSION_DENIED, UNIMPLEMENTED, OUT_OF_RANGE,
        FAILED_PRECONDITION), and with GapPolicy.FAIL what would otherwise lead to a snapshot. It does not read ahead of
        the caller. Leaving the loop cancels the stream when the iterator is closed or collected; contextlib.closing
        makes that explicit.
        """
        session = Session(options or SubscribeOptions(), self._connection.client_id, len(self._servers), time.monotonic)
        while not self._closed.is_set():
            choice = self._servers.current
            try:
                yield from self._stream(session, choice)
            except Exception as error:
                if self._closed.is_set():
                    return
                self._servers.failed(choice)
                update = session.end_stream(error)
            else:
                return  # closed
            yield update
            if update.interruption is not None:
                self._closed.wait(update.interruption.wait)

    def _stream(self, session: Session, choice: int) -> Iterator[Update]:
        """Yields the messages of one stream. Raises the error that ended it; returns if the client is closed."""
        request = session.begin_stream()
        channel = self._servers.open(choice)
        try:
            call = router_event_service_pb2_grpc.RouterEventServiceStub(channel).Subscribe(
                request, metadata=self._connection.metadata
            )
            with self._open(call), _Watchdog(call.cancel) as watchdog:
                while True:
                    watchdog.start(session.idle_timeout)
                    try:
                        message = next(call)
                    except StopIteration:
                        raise EndedError() from None
                    except grpc.RpcError as error:
                        if watchdog.expired:
                            raise IdleError() from None
                        raise StatusError.of(error) from None
                    finally:
                        watchdog.stop()  # the time in which the caller processes the update does not count
                    yield session.receive(message)
                    session.check_rejected()
        finally:
            channel.close()

    @contextlib.contextmanager
    def _open(self, call: Any) -> Iterator[None]:
        """Makes close cancel a call while it is used, and cancels it at the end."""
        with self._lock:
            self._streams.add(call)
        try:
            if self._closed.is_set():
                raise ClosedError()
            yield
        finally:
            with self._lock:
                self._streams.discard(call)
            call.cancel()

    def match(self, request: MatchRequest, timeout: float | None = None) -> MatchResult:
        """Returns the dp ranks that hold prefixes of prompts. Use a matcher for more than a few requests."""
        response = self._call("MatchPrefix", request.to_proto(), timeout)
        return MatchResult.of(response, request.model)

    def matcher(self) -> Matcher:
        """Returns a Matcher, which sends requests over one stream. The caller closes it."""
        return Matcher(self._servers)

    def workers(self, selects: Filter | None = None, timeout: float | None = None) -> Sequence[worker_pb2.WorkerStatus]:
        """Returns the workers that a filter selects, by name; None: all."""
        request = pb.ListWorkersRequest(filter=selects.to_proto() if selects else None)
        response: pb.ListWorkersResponse = self._call("ListWorkers", request, timeout)
        return response.workers

    def lookup_blocks(
        self,
        block_hashes: Sequence[int] = (),
        tokens_hashes: Sequence[int] = (),
        selects: Filter | None = None,
        timeout: float | None = None,
    ) -> Sequence[pb.BlockHolder]:
        """Returns the holders of blocks: 1 to 10,000 hashes in all. A lookup by tokens hashes is slow: it reads every
        block of the selected workers."""
        request = pb.LookupBlocksRequest(
            block_hashes=block_hashes, tokens_hashes=tokens_hashes, filter=selects.to_proto() if selects else None
        )
        response: pb.LookupBlocksResponse = self._call("LookupBlocks", request, timeout)
        return response.holders

    def report_outcomes(self, outcomes: Iterable[Outcome], timeout: float | None = None) -> int:
        """Reports what engines have reused. Returns how many the server ignored: those of workers, ranks and positions
        that it does not know."""
        ignored = 0
        for some in _parts([o.to_proto() for o in outcomes], MAX_OUTCOMES):
            ignored += self._call("ReportOutcome", match_pb2.ReportOutcomeRequest(outcomes=some), timeout).ignored
        return ignored

    def note_routed(self, routed: Iterable[Routed], timeout: float | None = None) -> int:
        """Notes where prompts were sent, so that matches say what is expected there. Returns how many the server
        ignored: those for workers and ranks that it does not know, and more than it can remember."""
        ignored = 0
        for some in _parts([r.to_proto() for r in routed], MAX_ROUTED):
            ignored += self._call("NoteRouted", match_pb2.NoteRoutedRequest(routed=some), timeout).ignored
        return ignored

    def _call(self, method: str, request: Any, timeout: float | None) -> Any:
        """Makes a call. It tries each server until one is available."""
        deadline = time.monotonic() + (self._connection.timeout if timeout is None else timeout)
        for attempt in range(1, len(self._servers) + 1):
            choice, channel = self._unary_channel()
            stub = router_event_service_pb2_grpc.RouterEventServiceStub(channel)
            try:
                return getattr(stub, method)(
                    request, timeout=max(0.001, deadline - time.monotonic()), metadata=self._connection.metadata
                )
            except grpc.RpcError as error:
                failure = StatusError.of(error)
            except ValueError:
                raise ClosedError() from None  # of a channel that is closed
            if failure.code is not grpc.StatusCode.UNAVAILABLE:
                raise failure
            self._servers.failed(choice)
            if attempt == len(self._servers):
                raise failure
        raise AssertionError("unreachable")

    def _unary_channel(self) -> tuple[int, Any]:
        choice = self._servers.current
        with self._lock:
            if self._closed.is_set():
                raise ClosedError()
            if self._channel is None or self._channel[0] != choice:
                if self._channel is not None:
                    self._channel[1].close()
                self._channel = choice, self._servers.open(choice)
            return self._channel


def _parts(all_of: list[Any], size: int) -> Iterator[list[Any]]:
    for i in range(0, len(all_of), size):
        yield all_of[i : i + size]


class _Watchdog:
    """Calls a function if it was started and not stopped for a timeout. One thread serves all starts of a stream."""

    def __init__(self, expire: Callable[[], object]) -> None:
        self._expire = expire
        self._condition = threading.Condition()
        self._deadline: float | None = None  # None: stopped
        self._ended = False
        self.expired = False
        self._thread = threading.Thread(target=self._run, name="kvcast-idle", daemon=True)

    def __enter__(self) -> _Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._ended = True
            self._condition.notify()
        self._thread.join()

    def start(self, timeout: float) -> None:
        """Starts the timeout. A later deadline needs no wake-up: the thread looks at it when the earlier one passes."""
        self._deadline = time.monotonic() + timeout

    def stop(self) -> None:
        """Stops the timeout."""
        self._deadline = None

    def _run(self) -> None:
        with self._condition:
            while not self._ended:
                deadline = self._deadline
                # A timeout that starts later is seen at most this much late.
                left = 0.2 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left <= 0:
                    self.expired = True
                    self._expire()
                    return
                self._condition.wait(left)
