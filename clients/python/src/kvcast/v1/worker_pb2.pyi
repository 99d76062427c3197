from kvcast.v1 import event_pb2 as _event_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Consolidate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSOLIDATE_UNSPECIFIED: _ClassVar[Consolidate]
    CONSOLIDATE_DEDUP: _ClassVar[Consolidate]
    CONSOLIDATE_PASSTHROUGH: _ClassVar[Consolidate]

class Clears(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLEARS_UNSPECIFIED: _ClassVar[Clears]
    CLEARS_AUTO: _ClassVar[Clears]
    CLEARS_DEVICE: _ClassVar[Clears]
    CLEARS_ALL: _ClassVar[Clears]

class Copies(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COPIES_UNSPECIFIED: _ClassVar[Copies]
    COPIES_AUTO: _ClassVar[Copies]
    COPIES_COUNTED: _ClassVar[Copies]
    COPIES_ANNOUNCED_LAST: _ClassVar[Copies]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_LIVE: _ClassVar[WorkerState]
    WORKER_STATE_DEGRADED: _ClassVar[WorkerState]
    WORKER_STATE_DISCONNECTED: _ClassVar[WorkerState]

class SourceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_STATE_UNSPECIFIED: _ClassVar[SourceState]
    SOURCE_STATE_CONNECTING: _ClassVar[SourceState]
    SOURCE_STATE_CATCHING_UP: _ClassVar[SourceState]
    SOURCE_STATE_LIVE: _ClassVar[SourceState]
    SOURCE_STATE_REPAIRING: _ClassVar[SourceState]
    SOURCE_STATE_SUSPECT: _ClassVar[SourceState]
    SOURCE_STATE_STOPPED: _ClassVar[SourceState]

class ReplayState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAY_STATE_UNSPECIFIED: _ClassVar[ReplayState]
    REPLAY_STATE_NONE: _ClassVar[ReplayState]
    REPLAY_STATE_NEVER_ANSWERED: _ClassVar[ReplayState]
    REPLAY_STATE_ANSWERS: _ClassVar[ReplayState]
    REPLAY_STATE_UNANSWERED: _ClassVar[ReplayState]
    REPLAY_STATE_FOREIGN: _ClassVar[ReplayState]

class Trust(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUST_UNSPECIFIED: _ClassVar[Trust]
    TRUST_EXACT: _ClassVar[Trust]
    TRUST_UPPER_BOUND: _ClassVar[Trust]
    TRUST_DEGRADED: _ClassVar[Trust]

class DegradedReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEGRADED_REASON_UNSPECIFIED: _ClassVar[DegradedReason]
    DEGRADED_REASON_JOINED_LATE: _ClassVar[DegradedReason]
    DEGRADED_REASON_GAP: _ClassVar[DegradedReason]
    DEGRADED_REASON_POSSIBLE_RESTART: _ClassVar[DegradedReason]
    DEGRADED_REASON_CONFLICT: _ClassVar[DegradedReason]
    DEGRADED_REASON_SOURCE_DOWN: _ClassVar[DegradedReason]
    DEGRADED_REASON_BLOCKS_OMITTED: _ClassVar[DegradedReason]
    DEGRADED_REASON_SHARED_TIER: _ClassVar[DegradedReason]
    DEGRADED_REASON_EVENTS_SKIPPED: _ClassVar[DegradedReason]
    DEGRADED_REASON_BLOCK_SIZE_MISMATCH: _ClassVar[DegradedReason]
    DEGRADED_REASON_UNKNOWN_CONTENT: _ClassVar[DegradedReason]
    DEGRADED_REASON_TIER_NOT_CLEARED: _ClassVar[DegradedReason]
    DEGRADED_REASON_REPLAY_UNPROVED: _ClassVar[DegradedReason]
    DEGRADED_REASON_REPLAY_FOREIGN: _ClassVar[DegradedReason]
    DEGRADED_REASON_COPIES_UNSURE: _ClassVar[DegradedReason]
    DEGRADED_REASON_CONNECTOR_TIER: _ClassVar[DegradedReason]
    DEGRADED_REASON_RELAYED: _ClassVar[DegradedReason]
    DEGRADED_REASON_STALE: _ClassVar[DegradedReason]
    DEGRADED_REASON_OVERPREDICTED: _ClassVar[DegradedReason]
CONSOLIDATE_UNSPECIFIED: Consolidate
CONSOLIDATE_DEDUP: Consolidate
CONSOLIDATE_PASSTHROUGH: Consolidate
CLEARS_UNSPECIFIED: Clears
CLEARS_AUTO: Clears
CLEARS_DEVICE: Clears
CLEARS_ALL: Clears
COPIES_UNSPECIFIED: Copies
COPIES_AUTO: Copies
COPIES_COUNTED: Copies
COPIES_ANNOUNCED_LAST: Copies
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_LIVE: WorkerState
WORKER_STATE_DEGRADED: WorkerState
WORKER_STATE_DISCONNECTED: WorkerState
SOURCE_STATE_UNSPECIFIED: SourceState
SOURCE_STATE_CONNECTING: SourceState
SOURCE_STATE_CATCHING_UP: SourceState
SOURCE_STATE_LIVE: SourceState
SOURCE_STATE_REPAIRING: SourceState
SOURCE_STATE_SUSPECT: SourceState
SOURCE_STATE_STOPPED: SourceState
REPLAY_STATE_UNSPECIFIED: ReplayState
REPLAY_STATE_NONE: ReplayState
REPLAY_STATE_NEVER_ANSWERED: ReplayState
REPLAY_STATE_ANSWERS: ReplayState
REPLAY_STATE_UNANSWERED: ReplayState
REPLAY_STATE_FOREIGN: ReplayState
TRUST_UNSPECIFIED: Trust
TRUST_EXACT: Trust
TRUST_UPPER_BOUND: Trust
TRUST_DEGRADED: Trust
DEGRADED_REASON_UNSPECIFIED: DegradedReason
DEGRADED_REASON_JOINED_LATE: DegradedReason
DEGRADED_REASON_GAP: DegradedReason
DEGRADED_REASON_POSSIBLE_RESTART: DegradedReason
DEGRADED_REASON_CONFLICT: DegradedReason
DEGRADED_REASON_SOURCE_DOWN: DegradedReason
DEGRADED_REASON_BLOCKS_OMITTED: DegradedReason
DEGRADED_REASON_SHARED_TIER: DegradedReason
DEGRADED_REASON_EVENTS_SKIPPED: DegradedReason
DEGRADED_REASON_BLOCK_SIZE_MISMATCH: DegradedReason
DEGRADED_REASON_UNKNOWN_CONTENT: DegradedReason
DEGRADED_REASON_TIER_NOT_CLEARED: DegradedReason
DEGRADED_REASON_REPLAY_UNPROVED: DegradedReason
DEGRADED_REASON_REPLAY_FOREIGN: DegradedReason
DEGRADED_REASON_COPIES_UNSURE: DegradedReason
DEGRADED_REASON_CONNECTOR_TIER: DegradedReason
DEGRADED_REASON_RELAYED: DegradedReason
DEGRADED_REASON_STALE: DegradedReason
DEGRADED_REASON_OVERPREDICTED: DegradedReason

class WorkerSpec(_message.Message):
    __slots__ = ("name", "model", "block_size", "endpoint", "labels", "sources", "consolidate", "attention", "pool", "pools")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CONSOLIDATE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    block_size: int
    endpoint: str
    labels: _containers.ScalarMap[str, str]
    sources: _containers.RepeatedCompositeFieldContainer[SourceSpec]
    consolidate: Consolidate
    attention: AttentionSpec
    pool: bool
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., endpoint: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., sources: _Optional[_Iterable[_Union[SourceSpec, _Mapping]]] = ..., consolidate: _Optional[_Union[Consolidate, str]] = ..., attention: _Optional[_Union[AttentionSpec, _Mapping]] = ..., pool: bool = ..., pools: _Optional[_Iterable[str]] = ...) -> None: ...

class AttentionSpec(_message.Message):
    __slots__ = ("chunk_size", "eagle", "eagle_groups", "hash_seed", "lora_paths")
    class LoraPathsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EAGLE_FIELD_NUMBER: _ClassVar[int]
    EAGLE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    LORA_PATHS_FIELD_NUMBER: _ClassVar[int]
    chunk_size: int
    eagle: bool
    eagle_groups: _containers.RepeatedScalarFieldContainer[int]
    hash_seed: str
    lora_paths: _containers.ScalarMap[str, str]
    def __init__(self, chunk_size: _Optional[int] = ..., eagle: bool = ..., eagle_groups: _Optional[_Iterable[int]] = ..., hash_seed: _Optional[str] = ..., lora_paths: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SourceSpec(_message.Message):
    __slots__ = ("engine", "connect", "replay", "dp_size", "topic", "copies", "clears", "first_rank")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    CLEARS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    engine: str
    connect: str
    replay: str
    dp_size: int
    topic: str
    copies: Copies
    clears: Clears
    first_rank: int
    def __init__(self, engine: _Optional[str] = ..., connect: _Optional[str] = ..., replay: _Optional[str] = ..., dp_size: _Optional[int] = ..., topic: _Optional[str] = ..., copies: _Optional[_Union[Copies, str]] = ..., clears: _Optional[_Union[Clears, str]] = ..., first_rank: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "model", "block_size", "endpoint", "labels", "state", "ranks", "sources", "last_event_id", "owner", "pool", "pools")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    block_size: int
    endpoint: str
    labels: _containers.ScalarMap[str, str]
    state: WorkerState
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    sources: _containers.RepeatedCompositeFieldContainer[SourceStatus]
    last_event_id: int
    owner: WorkerOwner
    pool: bool
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., block_size: _Optional[int] = ..., endpoint: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[SourceStatus, _Mapping]]] = ..., last_event_id: _Optional[int] = ..., owner: _Optional[_Union[WorkerOwner, _Mapping]] = ..., pool: bool = ..., pools: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerOwner(_message.Message):
    __slots__ = ("instance_id", "handed_over")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    handed_over: bool
    def __init__(self, instance_id: _Optional[str] = ..., handed_over: bool = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("dp_rank", "incomplete", "gaps", "missed_batches", "blocks", "trust", "reasons", "down_nano", "tier_reasons", "detail", "age_nano", "accuracy", "groups")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    MISSED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    DOWN_NANO_FIELD_NUMBER: _ClassVar[int]
    TIER_REASONS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    AGE_NANO_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    incomplete: bool
    gaps: int
    missed_batches: int
    blocks: _containers.RepeatedCompositeFieldContainer[TierBlocks]
    trust: Trust
    reasons: _containers.RepeatedScalarFieldContainer[DegradedReason]
    down_nano: int
    tier_reasons: _containers.RepeatedCompositeFieldContainer[TierReasons]
    detail: str
    age_nano: int
    accuracy: Accuracy
    groups: _event_pb2.Groups
    def __init__(self, dp_rank: _Optional[int] = ..., incomplete: bool = ..., gaps: _Optional[int] = ..., missed_batches: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[TierBlocks, _Mapping]]] = ..., trust: _Optional[_Union[Trust, str]] = ..., reasons: _Optional[_Iterable[_Union[DegradedReason, str]]] = ..., down_nano: _Optional[int] = ..., tier_reasons: _Optional[_Iterable[_Union[TierReasons, _Mapping]]] = ..., detail: _Optional[str] = ..., age_nano: _Optional[int] = ..., accuracy: _Optional[_Union[Accuracy, _Mapping]] = ..., groups: _Optional[_Union[_event_pb2.Groups, _Mapping]] = ...) -> None: ...

class Accuracy(_message.Message):
    __slots__ = ("exact", "over", "under", "exact_tokens", "over_tokens", "under_tokens", "detail")
    EXACT_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    UNDER_FIELD_NUMBER: _ClassVar[int]
    EXACT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNDER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    exact: int
    over: int
    under: int
    exact_tokens: int
    over_tokens: int
    under_tokens: int
    detail: str
    def __init__(self, exact: _Optional[int] = ..., over: _Optional[int] = ..., under: _Optional[int] = ..., exact_tokens: _Optional[int] = ..., over_tokens: _Optional[int] = ..., under_tokens: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class TierReasons(_message.Message):
    __slots__ = ("tier", "reasons", "chunk_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: _event_pb2.Tier
    reasons: _containers.RepeatedScalarFieldContainer[DegradedReason]
    chunk_tokens: int
    def __init__(self, tier: _Optional[_Union[_event_pb2.Tier, str]] = ..., reasons: _Optional[_Iterable[_Union[DegradedReason, str]]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class TierBlocks(_message.Message):
    __slots__ = ("tier", "blocks")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tier: _event_pb2.Tier
    blocks: int
    def __init__(self, tier: _Optional[_Union[_event_pb2.Tier, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("engine", "endpoint", "replay_endpoint", "dp_rank", "state", "started", "last_seq", "down_nano", "engine_delay_nano", "restarts", "repairs", "replay_state")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    DOWN_NANO_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DELAY_NANO_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_STATE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    endpoint: str
    replay_endpoint: str
    dp_rank: int
    state: SourceState
    started: bool
    last_seq: int
    down_nano: int
    engine_delay_nano: int
    restarts: int
    repairs: int
    replay_state: ReplayState
    def __init__(self, engine: _Optional[str] = ..., endpoint: _Optional[str] = ..., replay_endpoint: _Optional[str] = ..., dp_rank: _Optional[int] = ..., state: _Optional[_Union[SourceState, str]] = ..., started: bool = ..., last_seq: _Optional[int] = ..., down_nano: _Optional[int] = ..., engine_delay_nano: _Optional[int] = ..., restarts: _Optional[int] = ..., repairs: _Optional[int] = ..., replay_state: _Optional[_Union[ReplayState, str]] = ...) -> None: ...
