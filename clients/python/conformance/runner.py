"""The runner of the Python client for the scripts of test/conformance; with --asyncio, that of the client for asyncio.

It reads jobs from standard input, and writes what it did to standard output. See test/conformance/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import sys
import time
from typing import Any

from google.protobuf import json_format

import kvcast
import kvcast.aio
from kvcast.v1 import event_pb2, router_event_service_pb2 as pb, worker_pb2


class Rejected(Exception):
    """The cause of snapshots that the runner requests."""


def report(line: dict[str, Any]) -> None:
    print(json.dumps(compact(line)), flush=True)


def compact(line: dict[str, Any]) -> dict[str, Any]:
    """Removes values that say nothing."""
    return {key: value for key, value in line.items() if value not in (None, "", 0, False) and value != {} or key == "matches"}


def numbers(texts: list[str]) -> list[int]:
    return [int(text) for text in texts]


def why(error: Exception) -> str:
    match error:
        case kvcast.ViolationError():
            return "VIOLATION"
        case kvcast.IdleError():
            return "IDLE"
        case kvcast.EndedError():
            return "ENDED"
        case Rejected():
            return "REJECTED"
        case kvcast.StatusError():
            return error.code.name + (f"/{error.reason_name}" if error.reason_name else "")
    raise error


def report_error(error: Exception) -> None:
    line: dict[str, Any] = {"error": why(error)}
    if isinstance(error, kvcast.StatusError) and error.reason:
        line |= {"epoch": error.epoch, "retry_after_ms": round(error.retry_after * 1000)}
        if error.newest:
            line |= {"oldest": str(error.oldest), "newest": str(error.newest)}
    report(line)


def report_update(update: kvcast.Update) -> None:
    line: dict[str, Any] = {"position": str(update.position) if update.position else ""}
    if update.interruption:
        i = update.interruption
        report(line | {"interruption": why(i.error), "snapshot": i.snapshot, "failures": i.failures})
        return
    m = update.message
    kinds = ("accepted", "progress", "snapshot_begin", "snapshot_worker", "snapshot_end")
    line["update"] = next((kind for kind in kinds if m.HasField(kind)), "unknown")
    if m.HasField("accepted"):
        line["mode"] = pb.Accepted.Mode.Name(m.accepted.mode)
    elif m.HasField("snapshot_worker"):
        line["worker"] = m.snapshot_worker.worker
    elif m.snapshot_blocks:
        line["update"] = "snapshot_blocks"
    elif m.entries:
        line |= {"update": "entries", "seqs": [str(e.seq) for e in m.entries]}
    report(line)


def matches(all_matches: Any) -> list[dict[str, Any]]:
    return [
        compact(
            {
                "worker": m.worker,
                "rank": m.rank,
                "blocks": m.blocks,
                "tokens": m.tokens,
                "tiers": {event_pb2.Tier.Name(tier): n for tier, n in m.tier_blocks.items()},
                "trust": worker_pb2.Trust.Name(m.trust),
                "reasons": [worker_pb2.DegradedReason.Name(reason) for reason in m.reasons] or None,
                "endpoint": m.endpoint,
                "expected_blocks": m.expected_blocks,
            }
        )
        for m in all_matches
    ]


def report_result(result: kvcast.MatchResult) -> None:
    report({"position": str(result.position), "matches": [matches(prompt) for prompt in result.matches]})


def report_messages(name: str, messages: Any) -> None:
    print(json.dumps({name: [json_format.MessageToDict(m, preserving_proto_field_name=True) for m in messages]}), flush=True)


def prompt(p: dict[str, Any]) -> kvcast.Prompt:
    hashes = {key: numbers(p[key]) for key in ("tokens_hashes", "block_hashes") if key in p}
    others = {key: value for key, value in p.items() if key not in ("tokens_hashes", "block_hashes", "model")}
    return kvcast.Prompt(**others, **hashes)


def request(r: dict[str, Any]) -> kvcast.MatchRequest:
    return kvcast.MatchRequest(
        prompts=[prompt(p) for p in r["prompts"]],
        model=r.get("model", ""),
        workers=r.get("workers", ()),
        limit=r.get("limit", 0),
        after=kvcast.Position.parse(r["after"]) if "after" in r else None,
        max_wait=r.get("max_wait_ms", 0) / 1000,
    )


def selects(f: dict[str, Any] | None) -> kvcast.Filter | None:
    if f is None:
        return None
    tiers = [event_pb2.Tier.Value(name) for name in f.get("tiers", ())]
    return kvcast.Filter(f.get("workers", ()), f.get("models", ()), tiers)


def options(o: dict[str, Any]) -> kvcast.SubscribeOptions:
    return kvcast.SubscribeOptions(
        start=kvcast.Position.parse(o["after"]) if "after" in o else kvcast.Start(o.get("start", "snapshot")),
        filter=selects(o.get("filter")),
        gap_policy=kvcast.GapPolicy(o.get("gap_policy", "snapshot")),
        idle_timeout=o["idle_timeout_ms"] / 1000 if "idle_timeout_ms" in o else None,
        backoff_min=o["backoff_min_ms"] / 1000,
        backoff_max=o["backoff_max_ms"] / 1000,
    )


def outcomes(call: dict[str, Any]) -> list[kvcast.Outcome]:
    return [
        kvcast.Outcome(
            o["worker"],
            o.get("rank", 0),
            kvcast.Position.parse(o["position"]),
            o["predicted"],
            o["reused"],
            worker_pb2.Trust.Value(o.get("trust", "TRUST_UNSPECIFIED")),
        )
        for o in call["outcomes"]
    ]


def routed(call: dict[str, Any]) -> list[kvcast.Routed]:
    return [
        kvcast.Routed(r["worker"], r.get("rank", 0), prompt(r["prompt"]), r.get("ttl_ms", 0) / 1000) for r in call["routed"]
    ]


class Taken:
    """Takes the updates of a subscription."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.call, self.n = call, 0
        self.view = kvcast.View() if call["call"] == "view" else None

    def take(self, update: kvcast.Update) -> bool:
        """Reports whether it was the last."""
        if self.view is None:
            report_update(update)
        else:
            self.view.apply(update)
        self.n += 1
        if self.n == self.call.get("resnapshot_after"):
            update.resnapshot(Rejected())
        return self.n == self.call["updates"]

    def end(self) -> None:
        if self.view is not None:
            time.sleep(self.call.get("wait_ms", 0) / 1000)
            report({"matches": [matches(self.view.match(prompt(p), p.get("model", ""))) for p in self.call["prompts"]]})


def local(call: dict[str, Any]) -> bool:
    """Makes a call that asks no server."""
    if call["call"] == "tokens_hashes":
        hashes = kvcast.tokens_hashes(call["tokens"], call["block_size"], call.get("lora", ""), call.get("salt", ""))
        report({"tokens_hashes": [str(h) for h in hashes]})
    elif call["call"] == "position":
        try:
            position = kvcast.Position.parse(call["text"])
        except ValueError:
            report({"error": "POSITION"})
        else:
            report({"epoch": position.epoch, "seq": str(position.seq), "text": str(position)})
    else:
        return False
    return True


def connection(job: dict[str, Any]) -> dict[str, Any]:
    ca = pathlib.Path(job["ca_file"]).read_bytes() if "ca_file" in job else None
    return {"ca": ca, "token": job.get("token", ""), "client_id": job.get("client_id", "")}


def run_call(client: kvcast.Client, call: dict[str, Any]) -> None:
    match call["call"]:
        case "subscribe" | "view":
            taken = Taken(call)
            with contextlib.closing(client.subscribe(options(call["options"]))) as updates:
                for update in updates:
                    if taken.take(update):
                        break
            taken.end()
        case "match":
            report_result(client.match(request(call["request"])))
        case "matches":
            with client.matcher() as matcher:
                for future in [matcher.submit(request(r)) for r in call["requests"]]:
                    try:
                        report_result(future.result())
                    except kvcast.KvcastError as error:
                        report_error(error)
        case "lookup":
            hashes = [numbers(call.get(key, [])) for key in ("block_hashes", "tokens_hashes")]
            report_messages("holders", client.lookup_blocks(*hashes, selects(call.get("filter"))))
        case "workers":
            report_messages("workers", client.workers(selects(call.get("filter"))))
        case "report_outcomes":
            report({"ignored": str(client.report_outcomes(outcomes(call)))})
        case "note_routed":
            report({"ignored": str(client.note_routed(routed(call)))})


async def run_async_call(client: kvcast.aio.Client, call: dict[str, Any]) -> None:
    match call["call"]:
        case "subscribe" | "view":
            taken = Taken(call)
            async with contextlib.aclosing(client.subscribe(options(call["options"]))) as updates:
                async for update in updates:
                    if taken.take(update):
                        break
            taken.end()
        case "match":
            report_result(await client.match(request(call["request"])))
        case "matches":
            async with client.matcher() as matcher:
                answers = await asyncio.gather(*(matcher.match(request(r)) for r in call["requests"]), return_exceptions=True)
                for answer in answers:
                    report_error(answer) if isinstance(answer, Exception) else report_result(answer)
        case "lookup":
            hashes = [numbers(call.get(key, [])) for key in ("block_hashes", "tokens_hashes")]
            report_messages("holders", await client.lookup_blocks(*hashes, selects(call.get("filter"))))
        case "workers":
            report_messages("workers", await client.workers(selects(call.get("filter"))))
        case "report_outcomes":
            report({"ignored": str(await client.report_outcomes(outcomes(call)))})
        case "note_routed":
            report({"ignored": str(await client.note_routed(routed(call)))})


def run_job(job: dict[str, Any]) -> None:
    with kvcast.Client(job["targets"], **connection(job)) as client:
        for call in job["calls"]:
            try:
                local(call) or run_call(client, call)
            except kvcast.KvcastError as error:
                report_error(error)
    report({"end": True})


async def run_async_jobs() -> None:
    for line in sys.stdin:  # nothing else runs while it waits
        job = json.loads(line)
        async with kvcast.aio.Client(job["targets"], **connection(job)) as client:
            for call in job["calls"]:
                try:
                    local(call) or await run_async_call(client, call)
                except kvcast.KvcastError as error:
                    report_error(error)
        report({"end": True})


if __name__ == "__main__":
    if "--asyncio" in sys.argv:
        asyncio.run(run_async_jobs())
    else:
        for text in sys.stdin:
            run_job(json.loads(text))
