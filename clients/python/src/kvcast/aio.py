"""The client for asyncio: the same as kvcast.Client and kvcast.Matcher, with coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc

from kvcast.channels import Connection, Servers
from kvcast.client import MAX_OUTCOMES, MAX_ROUTED, _parts
from kvcast.errors import ClosedError, EndedError, IdleError, StatusError, ViolationError
from kvcast.inflight import MAX_IN_FLIGHT, Call, InFlight
from kvcast.matching import MatchRequest, MatchResult, Outcome, Routed
from kvcast.options import Filter, SubscribeOptions
from kvcast.session import Session, Update
from kvcast.v1 import match_pb2, router_event_service_pb2 as pb, router_event_service_pb2_grpc, worker_pb2

__all__ = ["Client", "Matcher"]


class Client:
    """A client of a server, or of several that serve the same workers, for one event loop; see kvcast.Client.

    Close it, or use it as an asynchronous context manager.
    """

    def __init__(self, target: str, **connection: Any) -> None:
        self._connection = Connection(target, **connection)
        self._servers = Servers(self._connection, asynchronous=True)
        self._channel: tuple[int, Any] | None = None  # for unary calls, with its choice
        self._closed = False

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection of calls. Subscriptions end with their iterators, and matchers are closed by themselves."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel[1].close()

    async def subscribe(self, options: SubscribeOptions | None = None) -> AsyncIterator[Update]:
        """Yields the updates of a subscription, which resumes over connections and servers; see kvcast.Client.subscribe.

        Use contextlib.aclosing to cancel the stream when you leave the loop; otherwise it ends when the iterator is
        collected. A cancelled task cancels the stream.
        """
        session = Session(options or SubscribeOptions(), self._connection.client_id, len(self._servers), time.monotonic)
        while not self._closed:
            choice = self._servers.current
            channel = self._servers.open(choice)
            call: Any = None
            try:
                request = session.begin_stream()
                stub = router_event_service_pb2_grpc.RouterEventServiceStub(channel)
                call = stub.Subscribe(request, metadata=self._connection.metadata)
                while True:
                    yield session.receive(await _read(call, session.idle_timeout))
                    session.check_rejected()
            except Exception as error:
                self._servers.failed(choice)
                update = session.end_stream(error)
            finally:
                if call is not None:
                    call.cancel()
                await channel.close()
            yield update
            if update.interruption is not None:
                await asyncio.sleep(update.interruption.wait)

    async def match(self, request: MatchRequest, timeout: float | None = None) -> MatchResult:
        """Returns the dp ranks that hold prefixes of prompts. Use a matcher for more than a few requests."""
        return MatchResult.of(await self._call("MatchPrefix", request.to_proto(), timeout), request.model)

    def matcher(self) -> Matcher:
        """Returns a Matcher, which sends requests over one stream. The caller closes it."""
        return Matcher(self._servers)

    async def workers(
        self, selects: Filter | None = None, timeout: float | None = None
    ) -> Sequence[worker_pb2.WorkerStatus]:
        """Returns the workers that a filter selects, by name; None: all."""
        request = pb.ListWorkersRequest(filter=selects.to_proto() if selects else None)
        response: pb.ListWorkersResponse = await self._call("ListWorkers", request, timeout)
        return response.workers

    async def lookup_blocks(
        self,
        block_hashes: Sequence[int] = (),
        tokens_hashes: Sequence[int] = (),
        selects: Filter | None = None,
        timeout: float | None = None,
    ) -> Sequence[pb.BlockHolder]:
        """Returns the holders of blocks; see kvcast.Client.lookup_blocks."""
        request = pb.LookupBlocksRequest(
            block_hashes=block_hashes, tokens_hashes=tokens_hashes, filter=selects.to_proto() if selects else None
        )
        response: pb.LookupBlocksResponse = await self._call("LookupBlocks", request, timeout)
        return response.holders

    async def report_outcomes(self, outcomes: Iterable[Outcome], timeout: float | None = None) -> int:
        """Reports what engines have reused, and returns how many the server ignored."""
        ignored = 0
        for some in _parts([o.to_proto() for o in outcomes], MAX_OUTCOMES):
            ignored += (await self._call("ReportOutcome", match_pb2.ReportOutcomeRequest(outcomes=some), timeout)).ignored
        return ignored

    async def note_routed(self, routed: Iterable[Routed], timeout: float | None = None) -> int:
        """Notes where prompts were sent, and returns how many the server ignored."""
        ignored = 0
        for some in _parts([r.to_proto() for r in routed], MAX_ROUTED):
            ignored += (await self._call("NoteRouted", match_pb2.NoteRoutedRequest(routed=some), timeout)).ignored
        return ignored

    async def _call(self, method: str, request: Any, timeout: float | None) -> Any:
        """Makes a call. It tries each server until one is available."""
        deadline = time.monotonic() + (self._connection.timeout if timeout is None else timeout)
        for attempt in range(1, len(self._servers) + 1):
            choice, channel = await self._unary_channel()
            stub = router_event_service_pb2_grpc.RouterEventServiceStub(channel)
            try:
                return await getattr(stub, method)(
                    request, timeout=max(0.001, deadline - time.monotonic()), metadata=self._connection.metadata
                )
            except grpc.RpcError as error:
                failure = StatusError.of(error)
            if failure.code is not grpc.StatusCode.UNAVAILABLE:
                raise failure
            self._servers.failed(choice)
            if attempt == len(self._servers):
                raise failure
        raise AssertionError("unreachable")

    async def _unary_channel(self) -> tuple[int, Any]:
        if self._closed:
            raise ClosedError()
        choice = self._servers.current
        if self._channel is None or self._channel[0] != choice:
            before, self._channel = self._channel, (choice, self._servers.open(choice))
            if before is not None:
                await before[1].close()
        return self._channel


async def _read(call: Any, timeout: float) -> pb.SubscribeResponse:
    """Returns the next message of a stream. Raises what ended it."""
    try:
        message = await asyncio.wait_for(call.read(), timeout)
    except asyncio.TimeoutError:
        raise IdleError() from None
    except grpc.RpcError as error:
        raise StatusError.of(error) from None
    if message is grpc.aio.EOF:
        raise EndedError()
    return message  # type: ignore[no-any-return]


class Matcher:
    """Sends MatchRequests over one stream; see kvcast.Matcher. Requests of several tasks are in flight at the same time.

    Close it, or use it as an asynchronous context manager.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slots = asyncio.BoundedSemaphore(MAX_IN_FLIGHT)
        self._stream: _Stream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Matcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends requests without an answer with ClosedError, and closes the stream and its connection."""
        self._closed = True
        if self._stream is not None:
            self._stream.call.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def match(self, request: MatchRequest) -> MatchResult:
        """Sends a request and waits for the answer."""
        future: asyncio.Future[MatchResult] = asyncio.get_running_loop().create_future()
        async with self._slots:
            self._send(Call.of_match(request, future))
            return await future

    async def note_routed(self, *routed: Routed) -> None:
        """Is Client.note_routed over the stream, with at most 64 prompts. It does not return how many were ignored."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._slots:
            self._send(Call.of_routed(list(routed), future))
            await future

    def _send(self, call: Call) -> None:
        if self._closed:
            call.fail(ClosedError())
            return
        if self._stream is None:
            self._stream = _Stream(self._servers)
            for part in (self._write(self._stream), self._receive(self._stream)):
                task = asyncio.ensure_future(part)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._stream.requests.put_nowait(self._stream.in_flight.add(call))

    async def _write(self, stream: _Stream) -> None:
        try:
            while (request := await stream.requests.get()) is not None:
                await stream.call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the stream has ended: its receiver gets the reason

    async def _receive(self, stream: _Stream) -> None:
        """Passes answers to their calls until the stream ends."""
        error: Exception
        try:
            while (response := await stream.call.read()) is not grpc.aio.EOF:
                stream.in_flight.pop(response).answer(response)
            error = EndedError()
        except grpc.RpcError as failure:
            error = StatusError.of(failure)
        except ViolationError as violation:
            error = violation
        except asyncio.CancelledError:
            error = ClosedError()
        self._servers.failed(stream.choice)
        self._stream = None
        if self._closed:
            error = ClosedError()
        for call in stream.in_flight.end(error, len(self._servers)):
            self._send(call)
        await stream.close()


class _Stream:
    """An open stream with its requests."""

    def __init__(self, servers: Servers) -> None:
        self.in_flight = InFlight()
        self.requests: asyncio.Queue[match_pb2.MatchPrefixesRequest | None] = asyncio.Queue()
        self.choice = servers.current
        self._channel: Any = servers.open(self.choice)
        stub = router_event_service_pb2_grpc.RouterEventServiceStub(self._channel)
        self.call: Any = stub.MatchPrefixes(metadata=servers.connection.metadata)

    async def close(self) -> None:
        """Ends the stream, and closes its connection."""
        self.call.cancel()
        self.requests.put_nowait(None)
        await self._channel.close()
