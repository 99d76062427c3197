"""Prompts, and the ranks that hold prefixes of them."""

from __future__ import annotations

import array
import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvcast.position import Position
from kvcast.v1 import event_pb2, match_pb2, worker_pb2

_SEED = 1337
_UINT32 = next(code for code in "IL" if array.array(code).itemsize == 4)


def tokens_hashes(
    tokens: Sequence[int], block_size: int, lora: str = "", salt: str = "", eagle: bool = False
) -> list[int]:
    """Returns the tokens hashes of a prompt's whole blocks, as Stored.tokens_hashes of the contract describes. A block of
    EAGLE has one token more, which is also the first of the next block.

    Raises ValueError if block_size is less than 1, or a token is no uint32.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}: want 1 or more")
    seed = _SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode(), 0)
    if salt:
        seed += xxhash.xxh3_64_intdigest(salt.encode(), 1)
    seed &= (1 << 64) - 1
    try:
        data = array.array(_UINT32, tokens)
    except (OverflowError, TypeError):
        bad = next(token for token in tokens if not (isinstance(token, int) and 0 <= token < 1 << 32))
        raise ValueError(f"token {bad!r} is not allowed: want 0 to {(1 << 32) - 1}") from None
    if sys.byteorder == "big":
        data.byteswap()
    step, size = 4 * block_size, 4 * (block_size + eagle)
    text = data.tobytes()
    return [xxhash.xxh3_64_intdigest(text[i : i + size], seed) for i in range(0, len(text) - size + 1, step)]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, given by its tokens or by hashes of its blocks."""

    tokens: Sequence[int] = ()
    """The token ids. Tokens after the last whole block are ignored."""
    lora: str = ""
    """The name of the LoRA adapter; empty: the base model."""
    salt: str = ""
    """The cache salt; empty: none."""
    eagle: bool = False
    """Whether the engines are SGLang with EAGLE decoding, whose hash of a block includes the next token."""
    exclude_last_token: bool = False
    """Whether the last token is left out, as for what an engine reuses: it computes the last token always."""
    block_size: int = 0
    """Only workers with this number of tokens per block match; 0: that of each worker."""
    tokens_hashes: Sequence[int] = ()
    """In place of tokens: the tokens hashes of the blocks. Adapter, salt and eagle are part of them."""
    block_hashes: Sequence[int] = ()
    """In place of tokens: the engine's own hashes, which only workers with the same hashes hold."""

    def to_proto(self) -> match_pb2.Prompt:
        """Returns the prompt as a message of the contract."""
        if self.tokens_hashes:
            return match_pb2.Prompt(tokens_hashes=self.tokens_hashes, block_size=self.block_size)
        if self.block_hashes:
            return match_pb2.Prompt(block_hashes=self.block_hashes, block_size=self.block_size)
        return match_pb2.Prompt(
            token_ids=self.tokens,
            lora_name=self.lora,
            cache_salt=self.salt,
            eagle=self.eagle,
            exclude_last_token=self.exclude_last_token,
            block_size=self.block_size,
        )


class Match(NamedTuple):
    """The longest prefix of a prompt that a dp rank of a worker holds."""

    worker: str
    """Name of the worker."""
    rank: int
    """The dp rank."""
    endpoint: str
    """The address for requests, as configured."""
    model: str
    blocks: int
    """Blocks in the longest prefix of which each block is held in some tier."""
    tokens: int
    """Tokens in the prefix; 0 if the block size is unknown."""
    tiers: Sequence[match_pb2.TierPrefix]
    """The longest prefix held in one tier, for each tier that holds the first block."""
    trust: worker_pb2.Trust
    """How far the prefix can be trusted, in the tier that can be trusted least."""
    reasons: Sequence[worker_pb2.DegradedReason] = ()
    """With TRUST_DEGRADED, why; ascending."""
    expected_blocks: int = 0
    """Blocks that the rank is expected to hold soon, because prompts were routed to it, if that is more than blocks."""
    expected_tokens: int = 0
    down: float = 0
    """For how many seconds a source of the rank has had no connection; 0: each has one. Only the server knows it."""
    age: float = 0
    """Seconds since the rank was known to be up to date with its engine; 0: it is."""
    pools: Sequence[match_pb2.PoolPrefix] = ()
    """The longest prefix in each pool from which the worker can load blocks."""
    block_hashes: Sequence[int] = ()
    """The engine's own hashes of the first blocks, at most those requested."""
    fetch_endpoint: str = ""
    """The address from which other engines can fetch its blocks."""

    @property
    def tier_blocks(self) -> dict[event_pb2.Tier, int]:
        """Blocks of the prefix in each tier. An engine need not load those of TIER_DEVICE."""
        return {t.tier: t.blocks for t in self.tiers}

    @property
    def tier_tokens(self) -> dict[event_pb2.Tier, int]:
        """Tokens of the prefix in each tier."""
        return {t.tier: t.tokens for t in self.tiers}

    @property
    def tier_trust(self) -> dict[event_pb2.Tier, worker_pb2.Trust]:
        """How far the prefix in each tier can be trusted."""
        return {t.tier: t.trust or self.trust for t in self.tiers}

    def outcome(self, position: Position, reused: int) -> Outcome:
        """Returns the outcome of a match of a prompt with exclude_last_token. The prediction is that the engine
        reuses what its device memory holds."""
        device = event_pb2.TIER_DEVICE
        return Outcome(
            self.worker, self.rank, position, self.tier_tokens.get(device, 0), reused, self.tier_trust.get(device, self.trust)
        )

    @classmethod
    def of(cls, m: match_pb2.PrefixMatch, model: str) -> Match:
        """Returns the match that a message of the contract is."""
        # What has several elements stays in the message, since most callers do not look at it.
        return cls(
            m.worker,
            m.dp_rank,
            m.endpoint,
            model or m.model,
            m.blocks,
            m.tokens,
            m.tiers,
            m.trust,
            m.reasons,
            m.expected_blocks,
            m.expected_tokens,
            m.down_nano / 1e9,
            m.age_nano / 1e9,
            m.pools,
            m.block_hashes,
            m.fetch_endpoint,
        )


@dataclasses.dataclass(frozen=True)
class MatchRequest:
    """Asks which dp ranks hold prefixes of prompts."""

    prompts: Sequence[Prompt]
    """1 to 64 prompts."""
    model: str = ""
    """Only workers of the model match; empty: all. Equal token ids of different models are different text."""
    workers: Sequence[str] = ()
    """Names of the workers to match; empty: all."""
    limit: int = 0
    """The maximum number of matches for each prompt, best first; 0: all."""
    after: Position | None = None
    """The answer must include the entries up to this position: the server waits for them."""
    max_wait: float = 0
    """The longest time in seconds to wait for the position, at most 10; 0: 1 s."""
    block_hashes: int = 0
    """The maximum number of Match.block_hashes; 0: none."""

    def to_proto(self) -> match_pb2.MatchPrefixRequest:
        """Returns the request as a message of the contract."""
        return match_pb2.MatchPrefixRequest(
            model=self.model,
            prompts=[p.to_proto() for p in self.prompts],
            workers=self.workers,
            limit=self.limit,
            after=self.after.to_proto() if self.after else None,
            max_wait_nano=round(self.max_wait * 1e9),
            max_block_hashes=self.block_hashes,
        )


class MatchResult(NamedTuple):
    """The answer to a MatchRequest."""

    position: Position
    """The position at which the answer is exact."""
    matches: Sequence[Sequence[Match]]
    """For each prompt the ranks that hold its first block, or are expected to: the longest prefix first."""

    @classmethod
    def of(cls, response: match_pb2.MatchPrefixResponse, model: str) -> MatchResult:
        """Returns the result that a message of the contract is."""
        at = response.position
        return cls(Position(at.epoch, at.seq), [[Match.of(m, model) for m in p.matches] for p in response.prompts])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an engine has reused of a prompt, and what was predicted."""

    worker: str
    rank: int
    position: Position
    """The position of the prediction, as in MatchResult."""
    predicted: int
    """The number of tokens that the engine was predicted to reuse."""
    reused: int
    """The number that it has reused, as in usage.prompt_tokens_details.cached_tokens."""
    trust: worker_pb2.Trust = worker_pb2.TRUST_UNSPECIFIED
    """The trust of the prediction; unspecified: that of the rank when the server gets the report."""

    def to_proto(self) -> match_pb2.Outcome:
        """Returns the outcome as a message of the contract."""
        return match_pb2.Outcome(
            worker=self.worker,
            dp_rank=self.rank,
            position=self.position.to_proto(),
            predicted_tokens=max(0, self.predicted),
            cached_tokens=max(0, self.reused),
            trust=self.trust,
        )


@dataclasses.dataclass(frozen=True)
class Routed:
    """A prompt that was sent to a dp rank, which is expected to store its whole blocks soon."""

    worker: str
    rank: int
    prompt: Prompt
    """By tokens or tokens_hashes."""
    ttl: float = 0
    """How many seconds the blocks are expected, at most 60; 0: 2 s."""

    def to_proto(self) -> match_pb2.RoutedPrompt:
        """Returns the routed prompt as a message of the contract."""
        return match_pb2.RoutedPrompt(
            worker=self.worker, dp_rank=self.rank, prompt=self.prompt.to_proto(), ttl_nano=round(self.ttl * 1e9)
        )
