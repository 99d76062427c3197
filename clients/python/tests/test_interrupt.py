"""Ctrl-C, cancellation and close end a subscription that waits for a message."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

import kvcast
import kvcast.aio
from server import accepted, serve

LIMIT = 60
"""Seconds, far more than a busy machine needs."""

OPTIONS = kvcast.SubscribeOptions(start=kvcast.Position("e", 5))


def silent(request, context):
    """Accepts the stream, and delivers nothing until the client ends it."""
    ended = threading.Event()
    context.add_callback(ended.set)
    yield accepted(5)
    ended.wait()


THREADS = """
import sys, kvcast
with kvcast.Client(sys.argv[1]) as client:
    for update in client.subscribe(kvcast.SubscribeOptions(start=kvcast.Position("e", 5))):
        print("ready", flush=True)
"""

ASYNCIO = """
import asyncio, sys, kvcast, kvcast.aio
async def main():
    async with kvcast.aio.Client(sys.argv[1]) as client:
        async for update in client.subscribe(kvcast.SubscribeOptions(start=kvcast.Position("e", 5))):
            print("ready", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [THREADS, ASYNCIO], ids=["threads", "asyncio"])
def test_interrupt_ends_a_program(program: str) -> None:
    with serve(silent) as address:
        p = subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert p.stdout is not None
        assert p.stdout.readline() == "ready\n"
        p.send_signal(signal.SIGINT)
        _, errors = p.communicate(timeout=LIMIT)
        assert p.returncode != 0
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_close_ends_subscriptions() -> None:
    with serve(silent) as address:
        client = kvcast.Client(address)
        began = threading.Event()

        def follow() -> None:
            for _ in client.subscribe(OPTIONS):
                began.set()

        thread = threading.Thread(target=follow)
        thread.start()
        assert began.wait(LIMIT)
        client.close()
        thread.join(LIMIT)
        assert not thread.is_alive()
        with pytest.raises(kvcast.ClosedError):
            client.workers()


def test_leaving_the_loop_cancels_the_stream() -> None:
    ended = threading.Event()

    def stream(request, context):
        context.add_callback(ended.set)
        yield accepted(5)
        ended.wait()

    with serve(stream) as address, kvcast.Client(address) as client:
        for _ in client.subscribe(OPTIONS):
            break
        assert ended.wait(LIMIT)


def test_cancelled_task_cancels_the_stream() -> None:
    ended = threading.Event()

    def stream(request, context):
        context.add_callback(ended.set)
        yield accepted(5)
        ended.wait()

    async def run(address: str) -> None:
        async with kvcast.aio.Client(address) as client:
            began = asyncio.Event()

            async def follow() -> None:
                async for _ in client.subscribe(OPTIONS):
                    began.set()

            task = asyncio.ensure_future(follow())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with serve(stream) as address:
        asyncio.run(run(address))
        assert ended.wait(LIMIT)


def test_close_ends_requests_of_a_matcher() -> None:
    with kvcast.Client("127.0.0.1:1") as client:
        matcher = client.matcher()
        matcher.close()
        with pytest.raises(kvcast.ClosedError):
            matcher.match(kvcast.MatchRequest([kvcast.Prompt(tokens=[1])]))
