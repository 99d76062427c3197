"""A vLLM engine in one process that answers a line of JSON for each line of JSON: engine.py CONFIG.

CONFIG is a JSON object: the model, arguments of LLM (args), and those of KVEventsConfig (events). The first line of the output says that the engine is
ready. Requests have one of these keys:

  generate  a list of prompts, which run at the same time: token_ids or embeddings (a number of random ones), cache_salt, lora, max_tokens, report_mode
  reset     resets the prefix cache, and with true also what a connector has offloaded

An answer has the outputs of the prompts, the seq of the last batch that was published (-1 for none), and what the block pool has cached then, by attention group.
With offload_bytes, a connector offloads blocks to host memory of that size. Its transfers copy nothing: what the blocks contain does not matter here, and
vLLM has none for CPUs.
"""

import json
import os
import sys
import traceback

# vLLM writes to standard output as well.
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

config = json.loads(sys.argv[1])

import probe  # noqa: E402
import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

preemptions = 0
probe.install()


def offload(size):
    """Returns the configuration of vLLM's own connector that offloads to host memory, with transfers that are done at once."""
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class Worker(base.OffloadingWorker):
        def __init__(self):
            self.done = []

        def submit(self, job_id, source, target):
            self.done.append(base.TransferResult(job_id, True))
            return True

        submit_store = submit_load = submit

        def get_finished(self):
            done, self.done = self.done, []
            return done

        def wait(self, job_ids):
            pass

    worker = Worker()
    CPUOffloadingSpec.get_worker = lambda spec, caches: worker
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config={"cpu_bytes_to_use": size})


if "offload_bytes" in config:
    config["args"]["kv_transfer_config"] = offload(config["offload_bytes"])

llm = LLM(
    model=config["model"],
    load_format="dummy",
    dtype="bfloat16",
    enforce_eager=True,
    distributed_executor_backend="uni",
    kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **config["events"]),
    **config["args"],
)
core = llm.llm_engine.engine_core.engine_core
manager = core.scheduler.kv_cache_manager

preempt = core.scheduler._preempt_request


def count_preemption(*args, **kwargs):
    global preemptions
    preemptions += 1
    return preempt(*args, **kwargs)


core.scheduler._preempt_request = count_preemption

device_hits = {}  # tokens found in the pool when a request was scheduled first, without those that a connector has
lookup = manager.get_computed_blocks


def record_hits(request):
    found = lookup(request)
    device_hits.setdefault(request.request_id, found[1])
    return found


manager.get_computed_blocks = record_hits


def prompt(p):
    tokens = {"prompt_token_ids": p["token_ids"]}
    if p.get("embeddings"):
        torch.manual_seed(p["embeddings"])
        hidden = llm.llm_engine.model_config.get_hidden_size()
        tokens = {"prompt_embeds": torch.randn(p["embeddings"], hidden, dtype=torch.bfloat16)}
    if p.get("cache_salt"):
        tokens["cache_salt"] = p["cache_salt"]
    return tokens


def sampling(p):
    extra = {"kv_cache_report_mode": p["report_mode"]} if p.get("report_mode") else None
    return SamplingParams(temperature=0, max_tokens=p["max_tokens"], ignore_eos=True, detokenize=False, extra_args=extra)


adapters = {name: LoRARequest(name, i + 1, path) for i, (name, path) in enumerate(config.get("adapters", {}).items())}


def generate(prompts):
    lora = [adapters[p["lora"]] if p.get("lora") else None for p in prompts]
    outputs = llm.generate([prompt(p) for p in prompts], [sampling(p) for p in prompts], lora_request=lora if adapters else None, use_tqdm=False)
    hits = list(device_hits.values())
    device_hits.clear()
    return [{"cached": o.num_cached_tokens, "device": h, "token_ids": list(o.outputs[0].token_ids)} for o, h in zip(outputs, hits, strict=True)]


def answer(**more):
    answers.write(json.dumps({"seq": probe.published - 1, "pool": probe.pool(manager), "preemptions": preemptions, **more}) + "\n")


def main():
    answer(
        bound=probe.bound,
        groups=[type(g.kv_cache_spec).__name__ for g in manager.kv_cache_config.kv_cache_groups],
        block_sizes=[g.kv_cache_spec.block_size for g in manager.kv_cache_config.kv_cache_groups],
    )
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "generate" in request:
                answer(outputs=generate(request["generate"]))
            else:
                answer(reset=llm.reset_prefix_cache(reset_connector=request["reset"]))
        except Exception as e:  # the test says what failed
            traceback.print_exc()
            answer(error=f"{type(e).__name__}: {e}")


try:
    main()
except BaseException:
    traceback.print_exc()
finally:
    os._exit(0)  # the engine's threads do not end by themselves
