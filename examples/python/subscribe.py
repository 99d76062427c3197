"""Follows a kvcast server and prints a line per entry.

When a stream ends, the program resumes after the last printed entry, so that each entry is
printed exactly once. To resume in another run, pass the first word of the last line as --after.
See README.md for how to run it.
"""

import argparse
import os
import random
import sys
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvcast.v1 import event_pb2, router_event_service_pb2, router_event_service_pb2_grpc

# Codes of errors that a retry would repeat.
PERMANENT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class Follower:
    """A router's state: the hashes of all blocks by worker, dp rank and tier."""

    def __init__(self, after):
        self.after = after  # a Position; None: the state is incomplete
        self.entries = 0
        self.workers = {}  # sets of block hashes by dp rank and tier, by worker

    def request(self):
        request = router_event_service_pb2.SubscribeRequest()
        if self.after is None:
            request.snapshot.SetInParent()
        else:
            request.after.CopyFrom(self.after)
        return request

    def apply(self, message):
        if message.HasField("snapshot_begin"):
            # Discard the state. The new state is incomplete until snapshot_end.
            self.after = None
            self.workers.clear()
        if message.HasField("snapshot_worker"):
            self.workers.setdefault(message.snapshot_worker.worker, {})
        for blocks in message.snapshot_blocks:
            for event in blocks.events:
                self.apply_event(blocks.worker, event)
        for entry in message.entries:
            for event in entry.events:
                self.apply_event(entry.worker, event)
            if self.after is not None:
                self.after.seq = entry.seq
            if self.after is not None and entry.events:  # without events, it says which server reads the worker's engines
                self.entries += 1
                kinds = " ".join(event.WhichOneof("event") or "?" for event in entry.events)
                print_line(f"{self.after.epoch}:{entry.seq} {entry.worker} {kinds}")
        if message.HasField("position"):
            self.after = message.position
        if message.HasField("snapshot_end"):
            print_line(f"{self.after.epoch}:{self.after.seq} snapshot of {len(self.workers)} workers, {self.blocks()} blocks")

    def apply_event(self, worker, event):
        """Applies an event. Applying it twice has no further effect."""
        sets = self.workers.setdefault(worker, {})
        key = (event.dp_rank, event.tier)
        kind = event.WhichOneof("event")
        if kind == "stored":
            sets.setdefault(key, set()).update(event.stored.block_hashes)
        elif kind == "removed":
            sets.get(key, set()).difference_update(event.removed.block_hashes)
        elif kind == "cleared":
            for rank, tier in list(sets):
                if rank == event.dp_rank and (not event.cleared.tiers or tier in event.cleared.tiers):
                    del sets[rank, tier]
        elif kind == "worker_removed":
            del self.workers[worker]

    def blocks(self):
        return sum(len(hashes) for sets in self.workers.values() for hashes in sets.values())


def print_line(line):
    print(line, flush=True)


def follow(addr, follower, count):
    # Pings detect a dead connection. Servers allow a ping every 10 s. Without the last option,
    # gRPC would stop after two pings, since the client sends no data.
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    wait = 1.0
    with grpc.insecure_channel(addr, options) as channel:
        stub = router_event_service_pb2_grpc.RouterEventServiceStub(channel)
        while True:
            try:
                for message in stub.Subscribe(follower.request()):
                    follower.apply(message)
                    wait = 1.0
                    if count and follower.entries >= count:
                        return
            except grpc.RpcError as error:
                if error.code() in PERMANENT:
                    sys.exit(f"{error.code().name}: {error.details()}")
                print(f"the stream ended ({error.code().name}: {error.details()}); resuming", file=sys.stderr)
                requested = retry_after(error)
            else:
                requested = 0.0
            time.sleep(max(requested, random.uniform(wait / 2, wait)))
            wait = min(2 * wait, 30.0)


def retry_after(error):
    """Returns the delay in seconds that the server requests."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return 0.0


def position(text):
    epoch, _, seq = text.rpartition(":")
    return event_pb2.Position(epoch=epoch, seq=int(seq))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--addr", default="localhost:50051", help="address of the server (%(default)s)")
    parser.add_argument("--after", type=position, metavar="EPOCH:SEQ", help="resume after this position (default: start with a snapshot)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="stop after this many entries and the rest of their message")
    args = parser.parse_args()
    follow(args.addr, Follower(args.after), args.count)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
