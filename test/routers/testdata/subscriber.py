"""A subscriber with the message classes of vLLM, for package routers.

Arguments: vLLM's kv_events.py, the endpoint of the PUB socket, and that of the replay socket or "".
A line of standard input asks for the blocks; the answer is {topic: [hash, ...]} in a line.
"""

import importlib.util
import json
import select
import sys
import types

import zmq


def load(path):
    """Loads the file, whose imports of other modules of vLLM matter to its publisher only."""
    for name, values in {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils.network_utils": dict.fromkeys(["get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"]),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location("kv_events", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Subscriber:
    def __init__(self, vllm, replay):
        import msgspec

        self.vllm, self.replay = vllm, replay
        self.decoder = msgspec.msgpack.Decoder(vllm.KVEventBatch)
        self.encoder = msgspec.msgpack.Encoder()
        self.plain = msgspec.msgpack.decode
        self.blocks, self.last = {}, {}

    def apply(self, topic, seq, payload):
        batch = self.decoder.decode(payload)
        # vLLM's headers of maps are longer; fields, their order and their types are compared.
        want, got = repr(self.plain(self.encoder.encode(batch))), repr(self.plain(payload))
        if want != got:
            sys.exit(f"vLLM encodes batch {seq} as {want[:1000]}, got {got[:1000]}")
        held = self.blocks.setdefault(topic, set())
        for event in batch.events:
            if isinstance(event, self.vllm.AllBlocksCleared):
                held.clear()
            elif isinstance(event, self.vllm.BlockRemoved):
                held.difference_update((h, event.medium) for h in event.block_hashes)
            else:
                if event.parent_block_hash is not None and not any(h == event.parent_block_hash for h, _ in held):
                    continue  # cannot be placed
                held.update((h, event.medium) for h in event.block_hashes)
        self.last[topic] = seq

    def receive(self, topic, seq, payload):
        """Applies a batch, after those that are missing before it."""
        last = self.last.get(topic)
        if last is not None and seq <= last:
            if self.replay:
                return  # a part of a replay
        elif self.replay and (last is None or seq > last + 1):
            self.request(0 if last is None else last + 1)
            if self.last.get(topic, -1) >= seq:
                return
        self.apply(topic, seq, payload)

    def request(self, start):
        self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            if not self.replay.poll(10_000):
                return  # kvcast restarts
            _, topic, seq, payload = self.replay.recv_multipart()
            if not payload:
                return
            self.apply(topic.decode(), int.from_bytes(seq, "big"), payload)


def main():
    path, endpoint, replay_endpoint = sys.argv[1:]
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.reconnect_ivl_max = 200
    sub.subscribe("kv@")
    replay = None
    if replay_endpoint:
        replay = context.socket(zmq.DEALER)
        replay.reconnect_ivl_max = 200
        replay.connect(replay_endpoint)
    s = Subscriber(load(path), replay)
    sub.connect(endpoint)
    poller = zmq.Poller()
    poller.register(sub, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    if replay:
        s.request(0)
    while True:
        ready = dict(poller.poll())
        while sub.poll(0):
            topic, seq, payload = sub.recv_multipart()
            s.receive(topic.decode(), int.from_bytes(seq, "big"), payload)
        if sys.stdin.fileno() in ready and select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps({t: sorted([h, m] for h, m in held) for t, held in s.blocks.items()}), flush=True)


main()
