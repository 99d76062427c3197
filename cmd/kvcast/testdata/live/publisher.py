"""Publishes KV-cache events with SGLang's own publisher.

What it holds is made up here: blocks that are stored, removed and cleared, in an order
that a seed chooses. Sockets, threads, encoding and replay are SGLang's. Each line of
standard input is a command, and the answer is a line of JSON:

    publish N   publishes N batches of each rank, and tells what each holds then
    burst       publishes until it is killed, and tells after each 100 batches
"""

import argparse
import importlib.util
import json
import random
import sys
import time
import types

BLOCK_SIZE = 4
MOST_HELD = 400  # blocks of a medium
MOST_BURST = 100_000  # batches: nobody kills what was forgotten


def load(path):
    """Loads kv_events.py without the rest of SGLang, which publishing does not need."""
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, has in (("runtime_context", "get_parallel"), ("utils.network", "NetworkAddress")):
        module = types.ModuleType("sglang.srt." + name)
        setattr(module, has, None)
        sys.modules[module.__name__] = module
    spec = importlib.util.spec_from_file_location("kv_events", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_events"] = module
    spec.loader.exec_module(module)
    return module


class Rank:
    """A cache, and the publisher that tells of it."""

    def __init__(self, kv_events, args, rank):
        self.kv = kv_events
        self.random = random.Random(args.seed * 1000 + rank)
        self.media = ["GPU"]
        if "medium" in kv_events.BlockStored.__struct_fields__:
            self.media.append("CPU_PINNED")
        self.held = {medium: [] for medium in self.media}
        # SGLang adds the rank to each port, and connects unless the host is a wildcard.
        endpoint = f"tcp://127.0.0.1:{args.port - rank}" if args.connect else f"tcp://*:{args.port}"
        config = {
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": f"tcp://*:{args.replay_port}",
            "topic": args.topic,
        }
        self.publisher = kv_events.EventPublisherFactory.create(json.dumps(config), rank)

    def named(self, medium):
        return {"medium": medium} if len(self.media) > 1 else {}

    def store(self, medium):
        """As a radix cache does: an event for each block, each the parent of the next."""
        held = self.held[medium]
        parent = self.random.choice(held) if held and self.random.random() < 0.7 else None
        for _ in range(self.random.randint(1, 6)):
            block = self.random.getrandbits(64) - 2**63
            tokens = [self.random.randrange(128_000) for _ in range(BLOCK_SIZE)]
            yield self.kv.BlockStored(
                block_hashes=[block],
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=BLOCK_SIZE,
                lora_id=None,
                **self.named(medium),
            )
            held.append(block)
            parent = block

    def remove(self, medium):
        held = self.held[medium]
        for _ in range(min(len(held), self.random.randint(1, 6))):
            block = held.pop(self.random.randrange(len(held)))
            yield self.kv.BlockRemoved(block_hashes=[block], **self.named(medium))

    def step(self):
        events = []
        medium = self.random.choice(self.media)
        if self.random.random() < 0.003:
            events.append(self.kv.AllBlocksCleared())
            self.held = {medium: [] for medium in self.media}
        if self.random.random() < 0.6 or len(self.held[medium]) > MOST_HELD:
            events += self.remove(medium)
        # A batch that ends with a new block ends with what no earlier one led to.
        events += self.store(medium)
        self.publisher.publish(self.kv.KVEventBatch(ts=time.time(), events=events))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kv_events", help="SGLang's file")
    parser.add_argument("--port", type=int, required=True, help="of rank 0; others follow")
    parser.add_argument("--connect", action="store_true", help="connect all ranks to the port")
    parser.add_argument("--topic", default="kv-events")
    parser.add_argument("--replay-port", type=int, required=True, help="of rank 0; others follow")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kv_events = load(args.kv_events)
    ranks = [Rank(kv_events, args, rank) for rank in range(args.ranks)]

    def answer(what):
        print(json.dumps(what), flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        command, *count = line.split()
        if command == "burst":
            for n in range(1, MOST_BURST + 1):
                for rank in ranks:
                    rank.step()
                if n % 100 == 0:
                    answer({"burst": n})
            return
        for _ in range(int(count[0])):
            for rank in ranks:
                rank.step()
        for rank in ranks:
            rank.publisher._event_queue.join()  # so all has been sent, or will be replayed
        answer({"held": [rank.held for rank in ranks]})


main()
