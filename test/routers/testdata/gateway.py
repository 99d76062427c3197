"""A gateway that reads engines by SubscribeKvEvents with SMG's generated client, for package routers.

Arguments: the address of kvcast, a seed, and the authorities of workers. A line of standard input asks for the blocks; the answer is
{authority: [hash, ...]} in a line. It drops its streams now and then, and subscribes from the next sequence number, as SMG does.
"""

import json
import random
import sys
import threading
import time

import grpc
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

STUBS = [vllm_engine_pb2_grpc.VllmEngineStub, sglang_scheduler_pb2_grpc.SglangSchedulerStub]


class Worker:
    def __init__(self, target, authority, stub, rand):
        self.authority, self.rand = authority, rand
        options = [("grpc.default_authority", authority), ("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
        self.stub = stub(grpc.insecure_channel(target, options=options))
        self.lock = threading.Lock()
        self.blocks, self.last, self.resumed, self.states = {}, 0, 0, 0

    def run(self):
        while True:
            start = self.last + 1 if self.last else 0
            stream = self.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
            try:
                stream.initial_metadata()  # comes at once
                expected, snapshot = start, 0
                for n, batch in enumerate(stream):
                    if start == 0 and n == 0:
                        self.states += 1
                        expected = batch.sequence_number
                    if batch.sequence_number < 1 or batch.sequence_number != expected:
                        print(f"got batch {batch.sequence_number}, want {expected}", file=sys.stderr, flush=True)
                    if (n < batch.snapshot.count or n == 0 and start == 0) and (start != 0 or batch.snapshot.index != n):
                        print(f"batch {n} from {start} is chunk {batch.snapshot.index} of a snapshot", file=sys.stderr, flush=True)
                    expected = batch.sequence_number + 1
                    self.apply(batch)
                    if n > 3 and self.rand.random() < 0.05:
                        self.resumed += 1
                        stream.cancel()
                        break
            except grpc.RpcError as e:
                if e.code() in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS):
                    with self.lock:
                        self.blocks.clear()
                        self.last = 0
                elif e.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.CANCELLED):
                    print(e, file=sys.stderr, flush=True)
                time.sleep(0.1)

    def apply(self, batch):
        with self.lock:
            for event in batch.events:
                kind = event.WhichOneof("data")
                if kind == "cleared":
                    self.blocks.clear()
                elif kind == "removed":
                    for h in event.removed.block_hashes:
                        self.blocks.pop(h, None)
                elif kind == "stored":
                    parent = ()
                    if event.stored.HasField("parent_block_hash"):
                        parent = self.blocks.get(event.stored.parent_block_hash)
                        if parent is None:
                            continue  # cannot be placed
                    for block in event.stored.blocks:
                        if len(block.token_ids) != block.block_size or block.cache_level != 0:
                            print(f"unexpected block {block}", file=sys.stderr, flush=True)
                        parent = parent + tuple(block.token_ids)
                        self.blocks[block.block_hash] = parent
                else:
                    print(f"unexpected event {event}", file=sys.stderr, flush=True)
            self.last = batch.sequence_number


def main():
    target, seed, *authorities = sys.argv[1:]
    workers = [Worker(target, a, STUBS[i % len(STUBS)], random.Random(f"{seed} {a}")) for i, a in enumerate(authorities)]
    for w in workers:
        threading.Thread(target=w.run, daemon=True).start()
    for _ in sys.stdin:
        answer = {}
        for w in workers:
            with w.lock:
                answer[w.authority] = {"blocks": sorted([h, list(tokens)] for h, tokens in w.blocks.items()), "resumed": w.resumed, "states": w.states}
        print(json.dumps(answer), flush=True)


main()
