"""Measures how many matches a second a matcher of this client makes: one prompt of 32 blocks in each request, by tokens hashes.

It takes a prompt that a worker of the server holds. Usage: bench.py TARGET [SECONDS]
"""

from __future__ import annotations

import asyncio
import collections
import sys
import time

import kvcast
import kvcast.aio

BLOCKS = 32


def held_prompt(target: str) -> list[int]:
    """Returns the tokens hashes of the longest chain of blocks in a snapshot, at most BLOCKS."""
    best: list[int] = []
    chains: dict[tuple[str, int, int], list[int]] = {}
    with kvcast.Client(target) as client:
        for update in client.subscribe():
            m = update.message
            if m is None or m.HasField("snapshot_end"):
                break
            for blocks in m.snapshot_blocks:
                for event in blocks.events:
                    s = event.stored
                    chain = chains.get((blocks.worker, event.dp_rank, s.parent_hash), []) if s.HasField("parent_hash") else []
                    for block_hash, content in zip(s.block_hashes, s.tokens_hashes):
                        chain = [*chain, content]
                        chains[blocks.worker, event.dp_rank, block_hash] = chain
                    best = max(best, chain, key=len)
    return best[:BLOCKS]


def measure(target: str, request: kvcast.MatchRequest, in_flight: int, seconds: float) -> float:
    with kvcast.Client(target) as client, client.matcher() as matcher:
        waiting = collections.deque(matcher.submit(request) for _ in range(in_flight))
        began, n = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            waiting.popleft().result()
            waiting.append(matcher.submit(request))
            n += 1
        return n / (time.perf_counter() - began)


async def measure_asyncio(target: str, request: kvcast.MatchRequest, in_flight: int, seconds: float) -> float:
    async with kvcast.aio.Client(target) as client, client.matcher() as matcher:
        end, n = time.perf_counter() + seconds, 0

        async def ask() -> None:
            nonlocal n
            while time.perf_counter() < end:
                await matcher.match(request)
                n += 1

        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(in_flight)))
        return n / (time.perf_counter() - began)


def main() -> None:
    target, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 3
    prompt = held_prompt(target)
    request = kvcast.MatchRequest([kvcast.Prompt(tokens_hashes=prompt)], limit=8)
    with kvcast.Client(target) as client:
        found = client.match(request).matches[0]
    print(f"a prompt of {len(prompt)} blocks; {len(found)} matches, the best of {found[0].blocks if found else 0} blocks")
    for in_flight in (1, 8, 64):
        threads = measure(target, request, in_flight, seconds)
        tasks = asyncio.run(measure_asyncio(target, request, in_flight, seconds))
        print(f"{in_flight} in flight: {threads:,.0f} matches/s with threads, {tasks:,.0f} with asyncio")


if __name__ == "__main__":
    main()
