# Runs a Mooncake master, and a client that stores blocks in it under the keys of an engine, which the engine's own code makes. The arguments are the
# directory of Mooncake's package, the ports of the master and of its HTTP server, the file with the code that makes keys, of vllm or sglang, and
# which of the two it is. It answers each request, a JSON object a line, when it is done.
import ctypes
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
import urllib.request

from unused import replace

package, port, http, code, engine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
replace("numpy", "torch", "requests", "vllm", "sglang")
spec = importlib.util.spec_from_file_location("keys", code)
module = sys.modules["keys"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
ranks = 2


def digest(block, rest):
    """Returns a hash of 32 bytes, of which events have the block's 8."""
    other = hashlib.sha256(block.to_bytes(8, "big")).digest()[:24]
    return other + block.to_bytes(8, "big") if rest == "before" else block.to_bytes(8, "big") + other


class VLLM:
    def __init__(self):
        self.layouts = [
            module.RankLocalStoreLayout(module.KeyMetadata(model_name="m", tp_rank=rank, pcp_rank=0, dcp_rank=0, pp_rank=0), 2, 2)
            for rank in range(ranks)
        ]

    def stored(self, block, rank):
        """Returns the keys under which a rank stores a block."""
        return [self.layouts[rank].key_for(0, digest(block, "before"))]

    def loaded(self, block):
        """Returns the keys that must exist for a block to be loaded."""
        prefixes = self.layouts[0].lookup_key_prefixes([(rank, 0, 0, 0) for rank in range(ranks)])
        return [module.PoolKey.build_key_string(prefix, digest(block, "before").hex()) for prefix in prefixes]


class SGLang:
    def stored(self, block, rank):
        memory = types.SimpleNamespace(get_page_buffer_meta=lambda indices: ([0, 0], [0, 0]))
        this = types.SimpleNamespace(mem_pool_host=memory, mha_suffix=str(rank), config_prefix="tag_org-m")
        pages = module.MooncakeStore._tag_keys(this, [digest(block, "after").hex()])
        return module.MooncakeStore._get_mha_buffer_meta(this, pages, [])[0]

    def loaded(self, block):
        return [key for rank in range(ranks) for key in self.stored(block, rank)]


keys = {"vllm": VLLM, "sglang": SGLang}[engine]()
sys.path.insert(0, os.path.dirname(package))
store = master = None
client = """
import sys
sys.path.insert(0, sys.argv[1])
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
config = ReplicateConfig()
result = store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", "127.0.0.1:" + sys.argv[2])
config.preferred_segment = store.get_hostname()
print(result or sum(store.put(key, b"x" * 1000, config) for key in sys.argv[3:]), flush=True)
sys.stdin.read()
"""


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def listed():
    """Returns the keys of all objects."""
    answer = urllib.request.urlopen(f"http://127.0.0.1:{http}/get_all_keys", timeout=60)
    return set(answer.read().decode().split("\n")) - {""}


def start():
    global store, master
    stop()
    flags = {
        "rpc_port": port, "metrics_port": http, "default_kv_lease_ttl": 100, "client_ttl": 2, "metrics_host": "127.0.0.1", "rpc_address": "127.0.0.1",
    }
    master = subprocess.Popen(
        [os.path.join(package, "mooncake_master"), *(f"-{name}={value}" for name, value in flags.items())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent,
    )
    while True:
        try:
            listed()
            break
        except OSError:
            if master.poll() is not None:
                sys.exit(f"the master ended with {master.returncode}")
            time.sleep(0.05)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    need(store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{port}"), "set up")


def stop():
    global store, master
    if store is not None:
        store.close()
    if master is not None:
        master.kill()
        master.wait()
    store = master = None


def need(result, what):
    if result != 0:
        sys.exit(f"{what}: Mooncake's client returned {result}")


def answer(request):
    """Does what a request asks for, and returns which of its blocks can be loaded."""
    blocks = request.get("blocks", [])
    match request["do"]:
        case "start":
            start()
        case "put":  # by all ranks, or by some
            for block in blocks:
                for rank in range(request.get("ranks", ranks)):
                    for key in keys.stored(block, rank):
                        store.put(key, b"x" * 1000)  # it fails if the master names the memory of a client that is gone
        case "remove":
            for block in blocks:
                store.remove(keys.loaded(block)[-1])
        case "clear":
            while listed():  # those that were looked up a moment ago are kept
                store.remove_all()
                time.sleep(0.05)
        case "fill":  # until the master evicts
            for i in range(64):
                store.put(f"other objects/{i}", b"x" * (1 << 20))
        case "lose":  # a client, with what is in its memory
            all_keys = [key for block in blocks for rank in range(ranks) for key in keys.stored(block, rank)]
            child = subprocess.Popen([sys.executable, "-c", client, os.path.dirname(package), str(port), *all_keys], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            need(int(child.stdout.readline()), "put by another client")
            child.kill()
            child.wait()
            while listed() & set(all_keys):  # a lookup would keep them
                time.sleep(0.05)
    return [min(store.batch_is_exist(keys.loaded(block)), default=0) == 1 for block in blocks]


sys.stderr = os.fdopen(os.dup(2), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of Mooncake's log
try:
    for line in sys.stdin:
        print(json.dumps({"held": answer(json.loads(line))}), flush=True)
finally:
    stop()
