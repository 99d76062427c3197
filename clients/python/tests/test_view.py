"""The view against a model that keeps a set of blocks for each tier, and walks all of them."""

from __future__ import annotations

from hypothesis import given, strategies as st

import kvcast
from kvcast.v1 import event_pb2, router_event_service_pb2 as pb

TIERS = (event_pb2.TIER_DEVICE, event_pb2.TIER_HOST_PINNED, event_pb2.TIER_DISK, event_pb2.TIER_EXTERNAL)

# Blocks are named by the contents from the beginning of the prompt, as engines name them.
contents = st.lists(st.integers(0, 2), min_size=1, max_size=4)
tiers = st.sampled_from(TIERS)


def name(prefix: list[int]) -> int:
    return 1 + sum((content + 1) * 4**i for i, content in enumerate(prefix))


stores = st.tuples(st.just("stored"), contents, st.integers(0, 3), tiers)
removes = st.tuples(st.just("removed"), contents, st.just(0), tiers)
clears = st.tuples(st.just("cleared"), st.just([]), st.just(0), tiers | st.none())
gaps = st.tuples(st.just("gap"), st.just([]), st.just(0), tiers | st.none())


def event(kind, prefix, at, tier) -> event_pb2.RouterEvent:
    if kind == "stored":
        at = min(at, len(prefix) - 1)  # the first block that the event stores
        stored = event_pb2.Stored(
            block_hashes=[name(prefix[: i + 1]) for i in range(at, len(prefix))], tokens_hashes=prefix[at:], block_size=4
        )
        if at > 0:
            stored.parent_hash = name(prefix[:at])
        return event_pb2.RouterEvent(dp_rank=0, tier=tier, stored=stored)
    if kind == "removed":
        return event_pb2.RouterEvent(dp_rank=0, tier=tier, removed=event_pb2.Removed(block_hashes=[name(prefix)]))
    named = [] if tier is None else [tier]
    if kind == "cleared":
        cleared = event_pb2.Cleared(reason=event_pb2.Cleared.REASON_ENGINE_CLEARED, tiers=named)
        return event_pb2.RouterEvent(dp_rank=0, cleared=cleared)
    return event_pb2.RouterEvent(dp_rank=0, gap=event_pb2.Gap(reason=event_pb2.Gap.REASON_REPLAY_FORGOTTEN, tiers=named))


class Model:
    def __init__(self) -> None:
        self.held = {tier: set() for tier in TIERS}  # prefixes
        self.wrong = set()  # tiers

    def apply(self, kind, prefix, at, tier) -> None:
        for each in TIERS if tier is None else (tier,):
            if kind == "stored":
                at = min(at, len(prefix) - 1)
                self.held[each] |= {tuple(prefix[: i + 1]) for i in range(at, len(prefix))}
            elif kind == "removed":
                self.held[each].discard(tuple(prefix))
            elif kind == "cleared":
                self.held[each].clear()
                self.wrong.discard(each)
            else:
                self.wrong.add(each)

    def longest(self, prompt, of_tiers) -> int:
        n = 0
        while n < len(prompt) and any(tuple(prompt[: n + 1]) in self.held[tier] for tier in of_tiers):
            n += 1
        return n


@given(st.lists(stores | removes | clears | gaps, max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_matches_are_those_of_a_model(events, prompt) -> None:
    view, model = kvcast.View(), Model()
    added = event_pb2.RouterEvent(worker_added=event_pb2.WorkerAdded(model="m", block_size=4))
    all_events = [added]
    for e in events:
        model.apply(*e)
        all_events.append(event(*e))
    m = pb.SubscribeResponse(entries=[event_pb2.Entry(seq=1, worker="w", model="m", events=all_events)])
    view.apply(kvcast.Update(m, kvcast.Position("e", 1)))
    got = view.match(kvcast.Prompt(tokens_hashes=prompt))
    want = model.longest(prompt, TIERS)
    assert [match.blocks for match in got] == ([want] if want else [])
    for match in got:
        by_tier = {tier: model.longest(prompt, [tier]) for tier in TIERS}
        assert match.tier_blocks == {tier: n for tier, n in by_tier.items() if n}
        assert match.trust == (kvcast.Trust.TRUST_DEGRADED if model.wrong else kvcast.Trust.TRUST_EXACT)
    by_hash = view.match(kvcast.Prompt(block_hashes=[name(prompt[: i + 1]) for i in range(len(prompt))]))
    assert by_hash == got
