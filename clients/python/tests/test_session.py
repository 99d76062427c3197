"""Decisions of a session, without a server."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given, strategies as st

import kvcast
from kvcast import options
from kvcast.session import Session
from kvcast.v1 import router_event_service_pb2 as pb
from server import accepted

UNAVAILABLE = kvcast.StatusError(grpc.StatusCode.UNAVAILABLE, "it is gone")


def session(opts: kvcast.SubscribeOptions, servers: int = 1) -> Session:
    return Session(opts, "", servers, lambda: 0)


@given(st.floats(0.001, 10), st.floats(1, 100), st.integers(1, 4), st.integers(1, 60))
def test_waits_are_within_bounds(least: float, factor: float, servers: int, failures: int) -> None:
    s = session(kvcast.SubscribeOptions(backoff_min=least, backoff_max=least * factor), servers)
    for n in range(1, failures + 1):
        s.begin_stream()
        wait = s.end_stream(UNAVAILABLE).interruption.wait
        if n % servers:
            assert 0 <= wait <= least / 10  # another server is tried
        else:
            longest = min(least * factor, least * 2 ** (n // servers - 1))
            assert longest / 2 <= wait <= longest


@given(st.floats(0, 1000))
def test_requested_delay_is_kept_up_to_a_limit(requested: float) -> None:
    s = session(kvcast.SubscribeOptions(backoff_min=0.001, backoff_max=0.001))
    s.begin_stream()
    wait = s.end_stream(kvcast.StatusError(grpc.StatusCode.UNAVAILABLE, "", retry_after=requested)).interruption.wait
    kept = min(requested, options.MAX_RETRY_DELAY)
    assert kept <= wait <= max(0.001, 1.25 * kept)


@pytest.mark.parametrize(
    ("interval", "configured", "want"),
    [(10.0, None, 30.0), (0.1, None, 10.0), (0, None, 30.0), (10.0, 2.0, 2.0)],
    ids=["three intervals", "short intervals", "an old server", "configured"],
)
def test_idle_timeout(interval: float, configured: float | None, want: float) -> None:
    s = session(kvcast.SubscribeOptions(start=kvcast.Position("e", 5), idle_timeout=configured))
    s.begin_stream()
    assert s.idle_timeout == (configured or 30.0)
    m = accepted(5)
    m.accepted.progress_interval_nano = round(interval * 1e9)
    s.receive(m)
    assert s.idle_timeout == want


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"idle_timeout": 0}, "idle_timeout is 0: want 0.01 s or more"),
        ({"backoff_min": 0}, "backoff_min is 0: want more than 0"),
        ({"backoff_min": 40}, "backoff_max is 30.0: want backoff_min, 40, or more"),
    ],
)
def test_options_are_checked(arguments: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvcast.SubscribeOptions(**arguments)


@pytest.mark.parametrize(
    ("target", "arguments", "says"),
    [
        ("", {}, "want one or more servers"),
        ("a,,b", {}, "want one or more servers"),
        ("a", {"cert": b""}, "cert and key"),
        ("a", {"timeout": 0}, "timeout is 0"),
    ],
)
def test_connections_are_checked(target: str, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kvcast.Client(target, **arguments)


def test_unknown_kinds_of_messages_are_passed_on() -> None:
    s = session(kvcast.SubscribeOptions(start=kvcast.Position("e", 5)))
    s.begin_stream()
    s.receive(accepted(5))
    later = pb.SubscribeResponse.FromString(b"\xa2\x06\x00")  # field 100
    assert s.receive(later).position == kvcast.Position("e", 5)
    with pytest.raises(kvcast.ViolationError):
        s.receive(pb.SubscribeResponse())


def test_tokens_are_checked() -> None:
    for tokens in ([-1], [1 << 32], ["a"]):
        with pytest.raises(ValueError, match="is not allowed: want 0 to 4294967295"):
            kvcast.tokens_hashes(tokens, 1)
    with pytest.raises(ValueError, match="block_size is 0"):
        kvcast.tokens_hashes([1], 0)


def test_eagle_blocks_include_the_next_token() -> None:
    assert kvcast.tokens_hashes(range(9), 4, eagle=True) == [
        kvcast.tokens_hashes(range(i, i + 5), 5)[0] for i in (0, 4)
    ]
    assert len(kvcast.tokens_hashes(range(8), 4, eagle=True)) == 1
