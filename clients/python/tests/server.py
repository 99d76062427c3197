"""A server for tests, which plays streams."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterable, Iterator

import grpc

from kvcast.v1 import event_pb2, router_event_service_pb2 as pb, router_event_service_pb2_grpc

Stream = Callable[[pb.SubscribeRequest, grpc.ServicerContext], Iterable[pb.SubscribeResponse]]


class _Service(router_event_service_pb2_grpc.RouterEventServiceServicer):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def Subscribe(self, request: pb.SubscribeRequest, context: grpc.ServicerContext) -> Iterator[pb.SubscribeResponse]:
        yield from self._stream(request, context)


@contextlib.contextmanager
def serve(stream: Stream) -> Iterator[str]:
    """Yields the address of a server that answers Subscribe with a stream."""
    threads = concurrent.futures.ThreadPoolExecutor(max_workers=16)
    server = grpc.server(threads)
    router_event_service_pb2_grpc.add_RouterEventServiceServicer_to_server(_Service(stream), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        threads.shutdown()


def accepted(seq: int, mode: pb.Accepted.Mode = pb.Accepted.MODE_RESUME) -> pb.SubscribeResponse:
    """Returns the first message of a stream that starts after a seq."""
    at = event_pb2.Position(epoch="e", seq=seq)
    return pb.SubscribeResponse(accepted=pb.Accepted(epoch="e", mode=mode, newest_seq=seq), position=at, prev_seq=seq)


def entry(seq: int) -> pb.SubscribeResponse:
    """Returns a message with an entry without events."""
    e = event_pb2.Entry(seq=seq, worker="w", model="m")
    return pb.SubscribeResponse(entries=[e], position=event_pb2.Position(epoch="e", seq=seq), prev_seq=seq - 1)
