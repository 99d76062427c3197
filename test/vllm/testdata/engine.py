"""A vLLM engine in one process that answers a line of JSON for each line of JSON: engine.py CONFIG.

CONFIG is a JSON object: the model, arguments of LLM (args), and those of KVEventsConfig (events). The first line of the output says that the engine is
ready, or that the version lacks the module that the model needs (needs). Requests have one of these keys:

  generate  a list of prompts, which run at the same time: token_ids or embeddings (a number of random ones), cache_salt, lora, max_tokens, report_mode
  reset     resets the prefix cache, and with true also what a connector has offloaded

An answer has the outputs of the prompts, the seq of the last batch that was published (-1 for none), and what the block pool has cached then, by attention group.
With offload_bytes, a connector offloads blocks to host memory of that size. Its transfers copy nothing: what the blocks contain does not matter here, and
vLLM has none for CPUs. With files, the settings of a tier of files, it also writes blocks to files and reads them.

With mooncake, the directory of Mooncake's package, a connector stores blocks in the Mooncake store that the variable MOONCAKE_CONFIG_PATH says, and loads them. An answer
comes when they are stored.
"""

import importlib.util
import json
import os
import sys
import traceback

# vLLM writes to standard output as well.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

config = json.loads(sys.argv[1])


def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package
        return False


if "needs" in config and not has(config["needs"]):
    answers.write(json.dumps({"lacks": config["needs"]}) + "\n")
    sys.exit()

import probe  # noqa: E402
import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

probe.install()


class Transfers:
    """Transfers between device and host memory that copy nothing and are done at once, for the worker's side of a connector."""

    def __init__(self, result):
        self.result, self.done = result, []

    def submit(self, job_id, *spec):
        self.done.append(self.result(job_id, True))
        return True

    submit_store = submit_load = transfer_async = submit

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        pass


def offload(size, files):
    """Returns the configuration of vLLM's own connector that offloads to host memory, and to files if there are settings, with transfers from device memory that are done at once."""
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    settings = {"cpu_bytes_to_use": size, "spec_name": "TieringOffloadingSpec" if files else "CPUOffloadingSpec"}
    spec = OffloadingSpecFactory._registry[settings["spec_name"]]()
    if hasattr(spec, "get_worker"):
        from vllm.v1.kv_offload.base import TransferResult

        transfers = Transfers(TransferResult)
        spec.get_worker = lambda self, caches: transfers
    else:  # before, a handler for each direction
        from vllm.v1.kv_offload.worker.worker import TransferResult

        transfers, names = Transfers(TransferResult), sys.modules[spec.__module__]
        device, host = names.GPULoadStoreSpec, names.CPULoadStoreSpec
        spec.get_handlers = lambda self, *caches: [(device, host, transfers), (host, device, transfers)]
    if files:
        settings["self_describing_kv_events"] = True
        settings["secondary_tiers"] = [{"type": "fs", "enable_kv_events": True, **{name: value for name, value in files.items() if value}}]
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=settings)


if "offload_bytes" in config:  # also in a process of a worker, which vLLM may have beside this one
    config["args"]["kv_transfer_config"] = offload(config["offload_bytes"], config.get("files"))


class Done:
    """An event of a device, for transfers from the memory of a CPU."""

    def record(self, *args):
        pass

    synchronize = record


if "mooncake" in config:
    from vllm.config import KVTransferConfig

    sys.path.append(config["mooncake"])
    torch.cuda.Event = Done
    config["args"]["kv_transfer_config"] = KVTransferConfig(kv_connector="MooncakeStoreConnector", kv_role="kv_both")


class Engine:
    def __init__(self):
        self.llm = LLM(
            model=config["model"],
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            distributed_executor_backend="uni",
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **config["events"]),
            **config["args"],
        )
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = scheduler.kv_cache_manager
        self.adapters = {name: LoRARequest(name, i + 1, path) for i, (name, path) in enumerate(config.get("adapters", {}).items())}

        self.preemptions = 0
        preempt = scheduler._preempt_request

        def count_preemption(*args, **kwargs):
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = count_preemption

        self.device_hits = {}  # tokens found in the pool when a request was scheduled first, without those that a connector has
        lookup = self.manager.get_computed_blocks

        def record_hits(request):
            found = lookup(request)
            self.device_hits.setdefault(request.request_id, found[1])
            return found

        self.manager.get_computed_blocks = record_hits

    def prompt(self, p):
        tokens = {"prompt_token_ids": p["token_ids"]}
        if p.get("embeddings"):
            torch.manual_seed(p["embeddings"])
            hidden = self.llm.llm_engine.model_config.get_hidden_size()
            tokens = {"prompt_embeds": torch.randn(p["embeddings"], hidden, dtype=torch.bfloat16)}
        if p.get("cache_salt"):
            tokens["cache_salt"] = p["cache_salt"]
        return tokens

    def sampling(self, p):
        extra = {"kv_cache_report_mode": p["report_mode"]} if p.get("report_mode") else None
        return SamplingParams(temperature=0, max_tokens=p["max_tokens"], ignore_eos=True, detokenize=False, extra_args=extra)

    def generate(self, prompts):
        lora = [self.adapters[p["lora"]] if p.get("lora") else None for p in prompts] if self.adapters else None
        outputs = self.llm.generate([self.prompt(p) for p in prompts], [self.sampling(p) for p in prompts], lora_request=lora, use_tqdm=False)
        if "mooncake" in config:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().connector_worker.kv_send_thread.request_queue.join()
        hits = list(self.device_hits.values())
        self.device_hits.clear()
        return [{"cached": o.num_cached_tokens, "device": h, "token_ids": list(o.outputs[0].token_ids)} for o, h in zip(outputs, hits, strict=True)]

    def answer(self, **more):
        state = {"seq": probe.published - 1, "pool": probe.pool(self.manager), "preemptions": self.preemptions}
        answers.write(json.dumps(state | more) + "\n")

    def serve(self):
        groups = [g.kv_cache_spec for g in self.manager.kv_cache_config.kv_cache_groups]
        self.answer(
            bound=probe.bound,
            groups=[type(g).__name__ for g in groups],
            block_sizes=[g.block_size for g in groups],
            fields=probe.fields(),
            plain_adapters=kv_cache_utils._gen_lora_extra_hash_keys.__annotations__["return"] == list[str],
            random_hashes="urandom" in kv_cache_utils.init_none_hash.__code__.co_names,
            report_mode="kv_cache_report_mode" in Request.__init__.__code__.co_names,
        )
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if "generate" in request:
                    self.answer(outputs=self.generate(request["generate"]))
                else:
                    self.answer(reset=self.llm.reset_prefix_cache(reset_connector=request["reset"]))
            except Exception as e:  # the test says what failed
                traceback.print_exc()
                self.answer(error=f"{type(e).__name__}: {e}")


if __name__ == "__main__":
    try:
        Engine().serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # the engine's threads do not end by themselves
