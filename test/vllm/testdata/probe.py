"""What a vLLM engine core has published and cached, seen from within its process.

engine.py uses it directly. In vllm serve it is a plugin, which writes a file RANK.json to the directory KVCAST_PROBE at each batch.
"""

import json
import os
import time

published = 0  # batches
bound = 0.0  # when the publisher's socket was bound or began to connect, in seconds since the Unix epoch


def fields():
    """Returns the fields of the events of stored blocks."""
    from vllm.distributed.kv_events import BlockStored

    return BlockStored.__struct_fields__


def pool(manager):
    """Returns the hashes of the cached blocks, as events have them, by attention group."""
    from vllm.v1.core import kv_cache_utils

    groups = {str(i): [] for i in range(len(manager.kv_cache_config.kv_cache_groups))}
    for key in manager.block_pool.cached_block_hash_to_block._cache:
        block_hash = kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.get_block_hash(key))
        if isinstance(block_hash, bytes):
            block_hash = int.from_bytes(block_hash[-8:], "big")
        groups[str(kv_cache_utils.get_group_id(key))].append(block_hash)
    return groups


def start_unbound():
    """Has vLLM start although its threads are bound to no cores: 0.20 fails when it writes to its log which ones they are bound to."""
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ModuleNotFoundError:
        return
    parse = OMPProcessManager._parse_omp_threads_bind_env

    def parse_all(self):
        try:
            parse(self)
        except IndexError:
            if not self.skip_setup:
                raise

    OMPProcessManager._parse_omp_threads_bind_env = parse_all


def install(on_publish=lambda publisher: None):
    """Counts batches, which the publisher numbers from 0."""
    from vllm.distributed import kv_events

    start_unbound()

    class Publisher(kv_events.ZmqEventPublisher):
        def _socket_setup(self):
            global bound
            super()._socket_setup()
            bound = time.time()

        def publish(self, events):
            global published
            super().publish(events)
            published += 1
            on_publish(self)

    kv_events.EventPublisherFactory._registry["zmq"] = Publisher


def plugin():
    from vllm.v1.core.sched.scheduler import Scheduler

    directory = os.environ["KVCAST_PROBE"]
    schedulers = []  # of this process: one
    construct = Scheduler.__init__

    def remember(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        schedulers.append(self)

    def write(publisher):
        file = os.path.join(directory, f"{publisher._data_parallel_rank}.json")
        with open(file + ".new", "w") as new:
            json.dump({"seq": published - 1, "pool": pool(schedulers[0].kv_cache_manager), "fields": fields()}, new)
        os.replace(file + ".new", file)

    if not getattr(Scheduler, "probed", False):  # a fork has the plugin already
        Scheduler.probed, Scheduler.__init__ = True, remember
        install(write)
