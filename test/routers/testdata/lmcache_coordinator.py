# Runs LMCache's coordinator, without what needs a GPU, until its standard input ends. The arguments are the directory of LMCache's package, and the port. It answers each line with an
# empty object once it serves.
import os
import sys
import threading
import urllib.request

from unused import Unused, replace

package, port = sys.argv[1], int(sys.argv[2])

replace(
    "torch", "numba", "cpuinfo", "cryptography", "lmcache.usage_telemetry", "lmcache.lmcache_native", "lmcache.v1.platform", "lmcache.v1.gpu_connector",
    "lmcache.v1.distributed.storage_manager", "lmcache.v1.distributed.l2_adapters", "lmcache.v1.distributed.serde", "lmcache.v1.multiprocess.engine_context",
)
root = Unused("lmcache")
root.__path__ = [package]
sys.modules["lmcache"] = root

import logging  # noqa: E402

logging.disable(logging.CRITICAL)
import uvicorn  # noqa: E402
from lmcache.v1.mp_coordinator.app import create_app  # noqa: E402
from lmcache.v1.mp_coordinator.config import MPCoordinatorConfig  # noqa: E402

server = uvicorn.Server(uvicorn.Config(create_app(MPCoordinatorConfig()), host="127.0.0.1", port=port, log_level="critical"))
threading.Thread(target=server.run, daemon=True).start()
for _ in sys.stdin:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/directory/stats").read()
            break
        except OSError:
            pass
    print("{}", flush=True)
os._exit(0)
