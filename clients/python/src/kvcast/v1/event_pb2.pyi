from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST_PINNED: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_EXTERNAL: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST_PINNED: Tier
TIER_DISK: Tier
TIER_EXTERNAL: Tier

class Position(_message.Message):
    __slots__ = ("epoch", "seq")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    seq: int
    def __init__(self, epoch: _Optional[str] = ..., seq: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("seq", "worker", "model", "engine_time_unix_nano", "ingest_time_unix_nano", "events")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TIME_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    INGEST_TIME_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    worker: str
    model: str
    engine_time_unix_nano: int
    ingest_time_unix_nano: int
    events: _containers.RepeatedCompositeFieldContainer[RouterEvent]
    def __init__(self, seq: _Optional[int] = ..., worker: _Optional[str] = ..., model: _Optional[str] = ..., engine_time_unix_nano: _Optional[int] = ..., ingest_time_unix_nano: _Optional[int] = ..., events: _Optional[_Iterable[_Union[RouterEvent, _Mapping]]] = ...) -> None: ...

class RouterEvent(_message.Message):
    __slots__ = ("event_id", "dp_rank", "tier", "stored", "removed", "cleared", "gap", "worker_added", "worker_removed", "groups_omitted", "resolved", "groups", "group_stored", "group_removed")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDED_FIELD_NUMBER: _ClassVar[int]
    WORKER_REMOVED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OMITTED_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_STORED_FIELD_NUMBER: _ClassVar[int]
    GROUP_REMOVED_FIELD_NUMBER: _ClassVar[int]
    event_id: int
    dp_rank: int
    tier: Tier
    stored: Stored
    removed: Removed
    cleared: Cleared
    gap: Gap
    worker_added: WorkerAdded
    worker_removed: WorkerRemoved
    groups_omitted: GroupsOmitted
    resolved: Resolved
    groups: Groups
    group_stored: GroupStored
    group_removed: GroupRemoved
    def __init__(self, event_id: _Optional[int] = ..., dp_rank: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ..., removed: _Optional[_Union[Removed, _Mapping]] = ..., cleared: _Optional[_Union[Cleared, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., worker_added: _Optional[_Union[WorkerAdded, _Mapping]] = ..., worker_removed: _Optional[_Union[WorkerRemoved, _Mapping]] = ..., groups_omitted: _Optional[_Union[GroupsOmitted, _Mapping]] = ..., resolved: _Optional[_Union[Resolved, _Mapping]] = ..., groups: _Optional[_Union[Groups, _Mapping]] = ..., group_stored: _Optional[_Union[GroupStored, _Mapping]] = ..., group_removed: _Optional[_Union[GroupRemoved, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("parent_hash", "block_hashes", "tokens_hashes", "block_size", "lora_name", "token_ids", "session_id")
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    parent_hash: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    tokens_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    lora_name: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    session_id: str
    def __init__(self, parent_hash: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., tokens_hashes: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., lora_name: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., session_id: _Optional[str] = ...) -> None: ...

class Removed(_message.Message):
    __slots__ = ("block_hashes", "reason")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class Cleared(_message.Message):
    __slots__ = ("reason", "tiers")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Cleared.Reason]
        REASON_ENGINE_CLEARED: _ClassVar[Cleared.Reason]
        REASON_ENGINE_RESTARTED: _ClassVar[Cleared.Reason]
        REASON_UNREPAIRED_GAP: _ClassVar[Cleared.Reason]
        REASON_SOURCE_CLEARED: _ClassVar[Cleared.Reason]
    REASON_UNSPECIFIED: Cleared.Reason
    REASON_ENGINE_CLEARED: Cleared.Reason
    REASON_ENGINE_RESTARTED: Cleared.Reason
    REASON_UNREPAIRED_GAP: Cleared.Reason
    REASON_SOURCE_CLEARED: Cleared.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    reason: Cleared.Reason
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, reason: _Optional[_Union[Cleared.Reason, str]] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("reason", "missed_batches", "first_seq", "last_seq", "tiers", "detail", "chunk_tokens")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Gap.Reason]
        REASON_REPLAY_UNAVAILABLE: _ClassVar[Gap.Reason]
        REASON_REPLAY_INCOMPLETE: _ClassVar[Gap.Reason]
        REASON_REPLAY_FORGOTTEN: _ClassVar[Gap.Reason]
        REASON_POSSIBLE_RESTART: _ClassVar[Gap.Reason]
        REASON_AMBIGUOUS_PUBLISHER: _ClassVar[Gap.Reason]
        REASON_TOO_MANY_BLOCKS: _ClassVar[Gap.Reason]
        REASON_JOINED_LATE: _ClassVar[Gap.Reason]
        REASON_SHARED_TIER: _ClassVar[Gap.Reason]
        REASON_TOO_MANY_ATTRIBUTES: _ClassVar[Gap.Reason]
        REASON_EVENTS_SKIPPED: _ClassVar[Gap.Reason]
        REASON_BLOCK_SIZE_MISMATCH: _ClassVar[Gap.Reason]
        REASON_UNKNOWN_CONTENT: _ClassVar[Gap.Reason]
        REASON_TIER_NOT_CLEARED: _ClassVar[Gap.Reason]
        REASON_REPLAY_UNPROVED: _ClassVar[Gap.Reason]
        REASON_REPLAY_FOREIGN: _ClassVar[Gap.Reason]
        REASON_COPIES_UNSURE: _ClassVar[Gap.Reason]
        REASON_CONNECTOR_TIER: _ClassVar[Gap.Reason]
        REASON_RELAYED: _ClassVar[Gap.Reason]
    REASON_UNSPECIFIED: Gap.Reason
    REASON_REPLAY_UNAVAILABLE: Gap.Reason
    REASON_REPLAY_INCOMPLETE: Gap.Reason
    REASON_REPLAY_FORGOTTEN: Gap.Reason
    REASON_POSSIBLE_RESTART: Gap.Reason
    REASON_AMBIGUOUS_PUBLISHER: Gap.Reason
    REASON_TOO_MANY_BLOCKS: Gap.Reason
    REASON_JOINED_LATE: Gap.Reason
    REASON_SHARED_TIER: Gap.Reason
    REASON_TOO_MANY_ATTRIBUTES: Gap.Reason
    REASON_EVENTS_SKIPPED: Gap.Reason
    REASON_BLOCK_SIZE_MISMATCH: Gap.Reason
    REASON_UNKNOWN_CONTENT: Gap.Reason
    REASON_TIER_NOT_CLEARED: Gap.Reason
    REASON_REPLAY_UNPROVED: Gap.Reason
    REASON_REPLAY_FOREIGN: Gap.Reason
    REASON_COPIES_UNSURE: Gap.Reason
    REASON_CONNECTOR_TIER: Gap.Reason
    REASON_RELAYED: Gap.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISSED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: Gap.Reason
    missed_batches: int
    first_seq: int
    last_seq: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    detail: str
    chunk_tokens: int
    def __init__(self, reason: _Optional[_Union[Gap.Reason, str]] = ..., missed_batches: _Optional[int] = ..., first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., detail: _Optional[str] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class GroupsOmitted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Groups(_message.Message):
    __slots__ = ("groups", "unit", "hashing", "missing")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    HASHING_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[AttentionGroup]
    unit: int
    hashing: BlockHashing
    missing: str
    def __init__(self, groups: _Optional[_Iterable[_Union[AttentionGroup, _Mapping]]] = ..., unit: _Optional[int] = ..., hashing: _Optional[_Union[BlockHashing, _Mapping]] = ..., missing: _Optional[str] = ...) -> None: ...

class AttentionGroup(_message.Message):
    __slots__ = ("index", "kind", "block_size", "window", "chunk", "drops", "main")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[AttentionGroup.Kind]
        KIND_FULL_ATTENTION: _ClassVar[AttentionGroup.Kind]
        KIND_MLA_ATTENTION: _ClassVar[AttentionGroup.Kind]
        KIND_SINK_FULL_ATTENTION: _ClassVar[AttentionGroup.Kind]
        KIND_SLIDING_WINDOW: _ClassVar[AttentionGroup.Kind]
        KIND_SLIDING_WINDOW_MLA: _ClassVar[AttentionGroup.Kind]
        KIND_MAMBA: _ClassVar[AttentionGroup.Kind]
        KIND_CHUNKED_LOCAL_ATTENTION: _ClassVar[AttentionGroup.Kind]
    KIND_UNSPECIFIED: AttentionGroup.Kind
    KIND_FULL_ATTENTION: AttentionGroup.Kind
    KIND_MLA_ATTENTION: AttentionGroup.Kind
    KIND_SINK_FULL_ATTENTION: AttentionGroup.Kind
    KIND_SLIDING_WINDOW: AttentionGroup.Kind
    KIND_SLIDING_WINDOW_MLA: AttentionGroup.Kind
    KIND_MAMBA: AttentionGroup.Kind
    KIND_CHUNKED_LOCAL_ATTENTION: AttentionGroup.Kind
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    MAIN_FIELD_NUMBER: _ClassVar[int]
    index: int
    kind: AttentionGroup.Kind
    block_size: int
    window: int
    chunk: int
    drops: bool
    main: bool
    def __init__(self, index: _Optional[int] = ..., kind: _Optional[_Union[AttentionGroup.Kind, str]] = ..., block_size: _Optional[int] = ..., window: _Optional[int] = ..., chunk: _Optional[int] = ..., drops: bool = ..., main: bool = ...) -> None: ...

class BlockHashing(_message.Message):
    __slots__ = ("algorithm", "seed", "lora_paths")
    class Algorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ALGORITHM_UNSPECIFIED: _ClassVar[BlockHashing.Algorithm]
        ALGORITHM_SHA256: _ClassVar[BlockHashing.Algorithm]
        ALGORITHM_SHA256_CBOR: _ClassVar[BlockHashing.Algorithm]
    ALGORITHM_UNSPECIFIED: BlockHashing.Algorithm
    ALGORITHM_SHA256: BlockHashing.Algorithm
    ALGORITHM_SHA256_CBOR: BlockHashing.Algorithm
    class LoraPathsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LORA_PATHS_FIELD_NUMBER: _ClassVar[int]
    algorithm: BlockHashing.Algorithm
    seed: str
    lora_paths: _containers.ScalarMap[str, str]
    def __init__(self, algorithm: _Optional[_Union[BlockHashing.Algorithm, str]] = ..., seed: _Optional[str] = ..., lora_paths: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GroupStored(_message.Message):
    __slots__ = ("group", "block_hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class GroupRemoved(_message.Message):
    __slots__ = ("group", "block_hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class Resolved(_message.Message):
    __slots__ = ("reasons",)
    REASONS_FIELD_NUMBER: _ClassVar[int]
    reasons: _containers.RepeatedScalarFieldContainer[Gap.Reason]
    def __init__(self, reasons: _Optional[_Iterable[_Union[Gap.Reason, str]]] = ...) -> None: ...

class WorkerAdded(_message.Message):
    __slots__ = ("model", "block_size", "endpoint", "labels", "ranks", "pool", "pools")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    model: str
    block_size: int
    endpoint: str
    labels: _containers.ScalarMap[str, str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    pool: bool
    pools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., block_size: _Optional[int] = ..., endpoint: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., ranks: _Optional[_Iterable[int]] = ..., pool: bool = ..., pools: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerRemoved(_message.Message):
    __slots__ = ("reason",)
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[WorkerRemoved.Reason]
        REASON_DEREGISTERED: _ClassVar[WorkerRemoved.Reason]
        REASON_DISCONNECTED: _ClassVar[WorkerRemoved.Reason]
        REASON_DISCOVERY: _ClassVar[WorkerRemoved.Reason]
    REASON_UNSPECIFIED: WorkerRemoved.Reason
    REASON_DEREGISTERED: WorkerRemoved.Reason
    REASON_DISCONNECTED: WorkerRemoved.Reason
    REASON_DISCOVERY: WorkerRemoved.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: WorkerRemoved.Reason
    def __init__(self, reason: _Optional[_Union[WorkerRemoved.Reason, str]] = ...) -> None: ...
