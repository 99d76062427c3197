from kvcast.v1 import event_pb2 as _event_pb2
from kvcast.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MatchPrefixRequest(_message.Message):
    __slots__ = ("model", "prompts", "workers", "limit", "after", "max_wait_nano", "max_block_hashes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_NANO_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    workers: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    after: _event_pb2.Position
    max_wait_nano: int
    max_block_hashes: int
    def __init__(self, model: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., workers: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ..., after: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., max_wait_nano: _Optional[int] = ..., max_block_hashes: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("token_ids", "tokens_hashes", "block_hashes", "lora_name", "cache_salt", "eagle", "block_size", "exclude_last_token")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EAGLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    lora_name: str
    cache_salt: str
    eagle: bool
    block_size: int
    exclude_last_token: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens_hashes: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ..., lora_name: _Optional[str] = ..., cache_salt: _Optional[str] = ..., eagle: bool = ..., block_size: _Optional[int] = ..., exclude_last_token: bool = ...) -> None: ...

class MatchPrefixResponse(_message.Message):
    __slots__ = ("position", "prompts")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    position: _event_pb2.Position
    prompts: _containers.RepeatedCompositeFieldContainer[PromptMatches]
    def __init__(self, position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptMatches, _Mapping]]] = ...) -> None: ...

class MatchPrefixesRequest(_message.Message):
    __slots__ = ("id", "request", "outcomes", "routed")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    id: int
    request: MatchPrefixRequest
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    routed: _containers.RepeatedCompositeFieldContainer[RoutedPrompt]
    def __init__(self, id: _Optional[int] = ..., request: _Optional[_Union[MatchPrefixRequest, _Mapping]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., routed: _Optional[_Iterable[_Union[RoutedPrompt, _Mapping]]] = ...) -> None: ...

class MatchPrefixesResponse(_message.Message):
    __slots__ = ("id", "response")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    id: int
    response: MatchPrefixResponse
    def __init__(self, id: _Optional[int] = ..., response: _Optional[_Union[MatchPrefixResponse, _Mapping]] = ...) -> None: ...

class PromptMatches(_message.Message):
    __slots__ = ("matches",)
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    matches: _containers.RepeatedCompositeFieldContainer[PrefixMatch]
    def __init__(self, matches: _Optional[_Iterable[_Union[PrefixMatch, _Mapping]]] = ...) -> None: ...

class PrefixMatch(_message.Message):
    __slots__ = ("worker", "endpoint", "dp_rank", "blocks", "tokens", "tiers", "trust", "reasons", "down_nano", "model", "age_nano", "expected_blocks", "block_hashes", "fetch_endpoint", "expected_tokens", "pools")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    DOWN_NANO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGE_NANO_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    FETCH_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    endpoint: str
    dp_rank: int
    blocks: int
    tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierPrefix]
    trust: _worker_pb2.Trust
    reasons: _containers.RepeatedScalarFieldContainer[_worker_pb2.DegradedReason]
    down_nano: int
    model: str
    age_nano: int
    expected_blocks: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    fetch_endpoint: str
    expected_tokens: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolPrefix]
    def __init__(self, worker: _Optional[str] = ..., endpoint: _Optional[str] = ..., dp_rank: _Optional[int] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierPrefix, _Mapping]]] = ..., trust: _Optional[_Union[_worker_pb2.Trust, str]] = ..., reasons: _Optional[_Iterable[_Union[_worker_pb2.DegradedReason, str]]] = ..., down_nano: _Optional[int] = ..., model: _Optional[str] = ..., age_nano: _Optional[int] = ..., expected_blocks: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., fetch_endpoint: _Optional[str] = ..., expected_tokens: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolPrefix, _Mapping]]] = ...) -> None: ...

class PoolPrefix(_message.Message):
    __slots__ = ("pool", "tokens", "blocks", "trust", "reasons")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    tokens: int
    blocks: int
    trust: _worker_pb2.Trust
    reasons: _containers.RepeatedScalarFieldContainer[_worker_pb2.DegradedReason]
    def __init__(self, pool: _Optional[str] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., trust: _Optional[_Union[_worker_pb2.Trust, str]] = ..., reasons: _Optional[_Iterable[_Union[_worker_pb2.DegradedReason, str]]] = ...) -> None: ...

class TierPrefix(_message.Message):
    __slots__ = ("tier", "blocks", "tokens", "trust", "reasons", "ended_by_group")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    ENDED_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    tier: _event_pb2.Tier
    blocks: int
    tokens: int
    trust: _worker_pb2.Trust
    reasons: _containers.RepeatedScalarFieldContainer[_worker_pb2.DegradedReason]
    ended_by_group: int
    def __init__(self, tier: _Optional[_Union[_event_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., trust: _Optional[_Union[_worker_pb2.Trust, str]] = ..., reasons: _Optional[_Iterable[_Union[_worker_pb2.DegradedReason, str]]] = ..., ended_by_group: _Optional[int] = ...) -> None: ...

class RoutedPrompt(_message.Message):
    __slots__ = ("worker", "dp_rank", "prompt", "ttl_nano")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_NANO_FIELD_NUMBER: _ClassVar[int]
    worker: str
    dp_rank: int
    prompt: Prompt
    ttl_nano: int
    def __init__(self, worker: _Optional[str] = ..., dp_rank: _Optional[int] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., ttl_nano: _Optional[int] = ...) -> None: ...

class NoteRoutedRequest(_message.Message):
    __slots__ = ("routed",)
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    routed: _containers.RepeatedCompositeFieldContainer[RoutedPrompt]
    def __init__(self, routed: _Optional[_Iterable[_Union[RoutedPrompt, _Mapping]]] = ...) -> None: ...

class NoteRoutedResponse(_message.Message):
    __slots__ = ("ignored",)
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    ignored: int
    def __init__(self, ignored: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("worker", "dp_rank", "position", "predicted_tokens", "cached_tokens", "trust")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    worker: str
    dp_rank: int
    position: _event_pb2.Position
    predicted_tokens: int
    cached_tokens: int
    trust: _worker_pb2.Trust
    def __init__(self, worker: _Optional[str] = ..., dp_rank: _Optional[int] = ..., position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., predicted_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., trust: _Optional[_Union[_worker_pb2.Trust, str]] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ("ignored",)
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    ignored: int
    def __init__(self, ignored: _Optional[int] = ...) -> None: ...
