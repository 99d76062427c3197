# Serves the log of LMCache's multiprocess server, with LMCache's own event bus, log, hashes and server, but without its storage, which
# needs a GPU. The arguments are the directory of LMCache's package, the transport (zmq or grpc), the port, the number of tokens in a chunk, the number of records
# in the log, and the seconds without a ping after which a subscription ends. It answers each request, a JSON object a line, once the log has it.
import importlib.util
import json
import os
import sys
import time
import types

from unused import Unused, replace

package, transport, port, chunk, records, reap = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])

replace(
    "torch", "numba", "cpuinfo", "lmcache.usage_telemetry", "lmcache.lmcache_native", "lmcache.v1.platform", "lmcache.v1.gpu_connector",
    "lmcache.v1.distributed.storage_manager", "lmcache.v1.multiprocess.engine_context",
)
root = Unused("lmcache")
root.__path__ = [package]
sys.modules["lmcache"] = root

import logging  # noqa: E402

logging.disable(logging.CRITICAL)
import lmcache.v1.platform  # noqa: E402

spec = importlib.util.spec_from_file_location("event_notifier", os.path.join(package, "v1", "platform", "event_notifier.py"))
notifier = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notifier)
lmcache.v1.platform.create_event_notifier = notifier.create_event_notifier
from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.mp_observability.event import Event, EventType  # noqa: E402
from lmcache.v1.mp_observability import event_bus  # noqa: E402
from lmcache.v1.multiprocess.config import MPServerConfig  # noqa: E402
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule  # noqa: E402
from lmcache.v1.multiprocess.modules.management import ManagementModule  # noqa: E402
from lmcache.v1.multiprocess.token_hasher import TokenHasher  # noqa: E402
from lmcache.v1.multiprocess.transport.server_factory import create_request_server  # noqa: E402

event_bus._has_native_recorder = False
bus = event_bus.EventBus(event_bus.EventBusConfig(enabled=True))
context = types.SimpleNamespace(event_bus=bus)
log = KVEventModule(context, kv_event_log_size=records)
management = ManagementModule(context, liveness_targets=[log], worker_reap_timeout_seconds=reap, worker_registration_grace_seconds=reap)
server = create_request_server([log, management], MPServerConfig(transport=transport, host="127.0.0.1", port=port))
hasher = TokenHasher(chunk_size=chunk)
stored = set()
bus.start()
server.start()


def publish(kind, **metadata):
    bus.publish(Event(event_type=kind, session_id="s", metadata=metadata))


def settle():
    """Waits until the log has what was published."""
    done = []
    bus.subscribe(EventType.L1_READ_FINISHED, done.append)
    publish(EventType.L1_READ_FINISHED, keys=[])
    while not done:
        time.sleep(0.001)


for line in sys.stdin:
    request = json.loads(line) or {}
    tokens, model = request.get("tokens", []), request.get("model", "m")
    hashes = hasher.compute_chunk_hashes(tokens)
    if "store" in request:  # by two ranks of an engine, each of which has a part of each chunk
        chunks = [tokens[i * chunk:(i + 1) * chunk] for i in range(len(hashes))]
        publish(EventType.MP_TOKENS, chunk_hashes=hashes, token_chunks=chunks, parent_hashes=[None] + hashes[:-1])
        for rank in range(2):
            publish(EventType.L1_WRITE_FINISHED, keys=[ObjectKey(h, model, rank) for h in hashes])
            stored.update(ObjectKey(h, model, rank) for h in hashes)
    if "evict" in request:
        for rank in range(2):
            publish(EventType.L1_KEYS_EVICTED, keys=[ObjectKey(hashes[request["evict"]], model, rank)])
    if "clear" in request:
        publish(EventType.L1_KEYS_EVICTED, keys=list(stored))
        stored.clear()
    if "lose" in request:  # the bus is full
        bus._config.max_queue_size, most = 0, bus._config.max_queue_size
        publish(EventType.L1_KEYS_EVICTED, keys=[])
        bus._config.max_queue_size = most
    settle()
    print(json.dumps({"hashes": [h.hex() for h in hashes], "seq": log.report_status()["kv_events"]["next_seq"] - 1}), flush=True)
os._exit(0)  # its threads do not end
