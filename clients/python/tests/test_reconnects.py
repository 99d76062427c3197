"""A subscription that reconnects again and again keeps nothing of its earlier streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading

import kvcast
import kvcast.aio
from server import accepted, entry, serve

RECONNECTS = int(os.environ.get("KVCAST_RECONNECTS", "300"))
"""The number of streams; 10,000 take some minutes."""

OPTIONS = kvcast.SubscribeOptions(start=kvcast.Position("e", 0), backoff_min=0.0001, backoff_max=0.0001)


def streams(request, context):
    """Delivers one entry after the position."""
    yield accepted(request.after.seq)
    yield entry(request.after.seq + 1)


class Usage:
    """What the process uses."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = threading.active_count()
        self.files = len(os.listdir("/proc/self/fd"))
        self.objects = len(gc.get_objects())

    def check(self, before: Usage, streams: int) -> None:
        assert self.threads <= before.threads + 4
        assert self.files <= before.files + 20
        assert self.objects - before.objects < streams  # less than one for each


def test_threads() -> None:
    with serve(streams) as address, kvcast.Client(address) as client:
        warm = None
        n = 0
        for update in client.subscribe(OPTIONS):
            if update.interruption is None:
                continue
            n += 1
            if n == RECONNECTS // 10:
                warm = Usage()
            if n == RECONNECTS:
                break
        assert update.position is not None and update.position.seq == RECONNECTS
        Usage().check(warm, RECONNECTS)


def test_asyncio() -> None:
    async def run(address: str) -> None:
        warm = None
        n = 0
        async with kvcast.aio.Client(address) as client, contextlib.aclosing(client.subscribe(OPTIONS)) as updates:
            async for update in updates:
                if update.interruption is None:
                    continue
                n += 1
                if n == RECONNECTS // 10:
                    warm = Usage()
                if n == RECONNECTS:
                    break
        assert update.position is not None and update.position.seq == RECONNECTS
        Usage().check(warm, RECONNECTS)

    with serve(streams) as address:
        asyncio.run(run(address))
