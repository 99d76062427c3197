from kvcast.v1 import event_pb2 as _event_pb2
from kvcast.v1 import match_pb2 as _match_pb2
from kvcast.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GapPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GAP_POLICY_UNSPECIFIED: _ClassVar[GapPolicy]
    GAP_POLICY_SNAPSHOT: _ClassVar[GapPolicy]
    GAP_POLICY_FAIL: _ClassVar[GapPolicy]
GAP_POLICY_UNSPECIFIED: GapPolicy
GAP_POLICY_SNAPSHOT: GapPolicy
GAP_POLICY_FAIL: GapPolicy

class Filter(_message.Message):
    __slots__ = ("workers", "models", "tiers")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedScalarFieldContainer[_event_pb2.Tier]
    def __init__(self, workers: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[_event_pb2.Tier, str]]] = ...) -> None: ...

class FromSnapshot(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromLatest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromEarliest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("after", "snapshot", "latest", "earliest", "filter", "gap_policy", "progress_digests", "client_id")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LATEST_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    GAP_POLICY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    after: _event_pb2.Position
    snapshot: FromSnapshot
    latest: FromLatest
    earliest: FromEarliest
    filter: Filter
    gap_policy: GapPolicy
    progress_digests: bool
    client_id: str
    def __init__(self, after: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., snapshot: _Optional[_Union[FromSnapshot, _Mapping]] = ..., latest: _Optional[_Union[FromLatest, _Mapping]] = ..., earliest: _Optional[_Union[FromEarliest, _Mapping]] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ..., gap_policy: _Optional[_Union[GapPolicy, str]] = ..., progress_digests: bool = ..., client_id: _Optional[str] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("entries", "position", "prev_seq", "accepted", "progress", "snapshot_begin", "snapshot_worker", "snapshot_blocks", "snapshot_end", "newest_seq")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREV_SEQ_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WORKER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_event_pb2.Entry]
    position: _event_pb2.Position
    prev_seq: int
    accepted: Accepted
    progress: Progress
    snapshot_begin: SnapshotBegin
    snapshot_worker: SnapshotWorker
    snapshot_blocks: _containers.RepeatedCompositeFieldContainer[SnapshotBlocks]
    snapshot_end: SnapshotEnd
    newest_seq: int
    def __init__(self, entries: _Optional[_Iterable[_Union[_event_pb2.Entry, _Mapping]]] = ..., position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., prev_seq: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., snapshot_begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., snapshot_worker: _Optional[_Union[SnapshotWorker, _Mapping]] = ..., snapshot_blocks: _Optional[_Iterable[_Union[SnapshotBlocks, _Mapping]]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ..., newest_seq: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("epoch", "oldest_seq", "newest_seq", "mode", "progress_interval_nano")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Accepted.Mode]
        MODE_RESUME: _ClassVar[Accepted.Mode]
        MODE_SNAPSHOT: _ClassVar[Accepted.Mode]
        MODE_LATEST: _ClassVar[Accepted.Mode]
        MODE_EARLIEST: _ClassVar[Accepted.Mode]
    MODE_UNSPECIFIED: Accepted.Mode
    MODE_RESUME: Accepted.Mode
    MODE_SNAPSHOT: Accepted.Mode
    MODE_LATEST: Accepted.Mode
    MODE_EARLIEST: Accepted.Mode
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_INTERVAL_NANO_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    oldest_seq: int
    newest_seq: int
    mode: Accepted.Mode
    progress_interval_nano: int
    def __init__(self, epoch: _Optional[str] = ..., oldest_seq: _Optional[int] = ..., newest_seq: _Optional[int] = ..., mode: _Optional[_Union[Accepted.Mode, str]] = ..., progress_interval_nano: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerDigest]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerDigest, _Mapping]]] = ...) -> None: ...

class WorkerDigest(_message.Message):
    __slots__ = ("worker", "dp_rank", "tier", "blocks", "digest", "seq", "group_blocks", "group_digest")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    GROUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker: str
    dp_rank: int
    tier: _event_pb2.Tier
    blocks: int
    digest: int
    seq: int
    group_blocks: int
    group_digest: int
    def __init__(self, worker: _Optional[str] = ..., dp_rank: _Optional[int] = ..., tier: _Optional[_Union[_event_pb2.Tier, str]] = ..., blocks: _Optional[int] = ..., digest: _Optional[int] = ..., seq: _Optional[int] = ..., group_blocks: _Optional[int] = ..., group_digest: _Optional[int] = ...) -> None: ...

class SnapshotBegin(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    def __init__(self, epoch: _Optional[str] = ...) -> None: ...

class SnapshotWorker(_message.Message):
    __slots__ = ("worker", "added", "last_event_id", "incomplete_ranks", "ranks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    LAST_EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_RANKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    added: _event_pb2.WorkerAdded
    last_event_id: int
    incomplete_ranks: _containers.RepeatedScalarFieldContainer[int]
    ranks: _containers.RepeatedCompositeFieldContainer[SnapshotRank]
    def __init__(self, worker: _Optional[str] = ..., added: _Optional[_Union[_event_pb2.WorkerAdded, _Mapping]] = ..., last_event_id: _Optional[int] = ..., incomplete_ranks: _Optional[_Iterable[int]] = ..., ranks: _Optional[_Iterable[_Union[SnapshotRank, _Mapping]]] = ...) -> None: ...

class SnapshotRank(_message.Message):
    __slots__ = ("dp_rank", "reasons", "gaps", "missed_batches", "groups_omitted", "tier_reasons", "detail", "groups")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    MISSED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_OMITTED_FIELD_NUMBER: _ClassVar[int]
    TIER_REASONS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    reasons: _containers.RepeatedScalarFieldContainer[_worker_pb2.DegradedReason]
    gaps: int
    missed_batches: int
    groups_omitted: bool
    tier_reasons: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TierReasons]
    detail: str
    groups: _event_pb2.Groups
    def __init__(self, dp_rank: _Optional[int] = ..., reasons: _Optional[_Iterable[_Union[_worker_pb2.DegradedReason, str]]] = ..., gaps: _Optional[int] = ..., missed_batches: _Optional[int] = ..., groups_omitted: bool = ..., tier_reasons: _Optional[_Iterable[_Union[_worker_pb2.TierReasons, _Mapping]]] = ..., detail: _Optional[str] = ..., groups: _Optional[_Union[_event_pb2.Groups, _Mapping]] = ...) -> None: ...

class SnapshotBlocks(_message.Message):
    __slots__ = ("worker", "events")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    events: _containers.RepeatedCompositeFieldContainer[_event_pb2.RouterEvent]
    def __init__(self, worker: _Optional[str] = ..., events: _Optional[_Iterable[_Union[_event_pb2.RouterEvent, _Mapping]]] = ...) -> None: ...

class SnapshotEnd(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: _event_pb2.Position
    def __init__(self, position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ...) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("after", "until", "filter")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    after: _event_pb2.Position
    until: _event_pb2.Position
    filter: Filter
    def __init__(self, after: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., until: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class ReplayResponse(_message.Message):
    __slots__ = ("entries", "position", "prev_seq", "accepted")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREV_SEQ_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_event_pb2.Entry]
    position: _event_pb2.Position
    prev_seq: int
    accepted: Accepted
    def __init__(self, entries: _Optional[_Iterable[_Union[_event_pb2.Entry, _Mapping]]] = ..., position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., prev_seq: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: Filter
    def __init__(self, filter: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("entries", "position", "prev_seq", "progress", "snapshot_begin", "snapshot_worker", "snapshot_blocks", "snapshot_end")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREV_SEQ_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BEGIN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_WORKER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_event_pb2.Entry]
    position: _event_pb2.Position
    prev_seq: int
    progress: Progress
    snapshot_begin: SnapshotBegin
    snapshot_worker: SnapshotWorker
    snapshot_blocks: _containers.RepeatedCompositeFieldContainer[SnapshotBlocks]
    snapshot_end: SnapshotEnd
    def __init__(self, entries: _Optional[_Iterable[_Union[_event_pb2.Entry, _Mapping]]] = ..., position: _Optional[_Union[_event_pb2.Position, _Mapping]] = ..., prev_seq: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., snapshot_begin: _Optional[_Union[SnapshotBegin, _Mapping]] = ..., snapshot_worker: _Optional[_Union[SnapshotWorker, _Mapping]] = ..., snapshot_blocks: _Optional[_Iterable[_Union[SnapshotBlocks, _Mapping]]] = ..., snapshot_end: _Optional[_Union[SnapshotEnd, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("epoch", "oldest_seq", "newest_seq", "journal_bytes", "workers", "blocks", "subscribers", "version", "recovery", "instances", "instance_id", "snapshots", "snapshots_waiting", "replays", "journal_max_bytes", "journal_max_age_nano", "journal_evicted_bytes", "newest_incident_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_MAX_AGE_NANO_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_INCIDENT_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    oldest_seq: int
    newest_seq: int
    journal_bytes: int
    workers: int
    blocks: int
    subscribers: int
    version: str
    recovery: Recovery
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    instance_id: str
    snapshots: int
    snapshots_waiting: int
    replays: int
    journal_max_bytes: int
    journal_max_age_nano: int
    journal_evicted_bytes: int
    newest_incident_id: int
    def __init__(self, epoch: _Optional[str] = ..., oldest_seq: _Optional[int] = ..., newest_seq: _Optional[int] = ..., journal_bytes: _Optional[int] = ..., workers: _Optional[int] = ..., blocks: _Optional[int] = ..., subscribers: _Optional[int] = ..., version: _Optional[str] = ..., recovery: _Optional[_Union[Recovery, _Mapping]] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ..., instance_id: _Optional[str] = ..., snapshots: _Optional[int] = ..., snapshots_waiting: _Optional[int] = ..., replays: _Optional[int] = ..., journal_max_bytes: _Optional[int] = ..., journal_max_age_nano: _Optional[int] = ..., journal_evicted_bytes: _Optional[int] = ..., newest_incident_id: _Optional[int] = ...) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("id", "host", "pid", "grpc_address", "version", "start_time_unix_nano", "ingests", "draining", "live", "newest_seq", "workers", "cut_off", "behind")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    INGESTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    id: str
    host: str
    pid: int
    grpc_address: str
    version: str
    start_time_unix_nano: int
    ingests: bool
    draining: bool
    live: bool
    newest_seq: int
    workers: int
    cut_off: bool
    behind: int
    def __init__(self, id: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., grpc_address: _Optional[str] = ..., version: _Optional[str] = ..., start_time_unix_nano: _Optional[int] = ..., ingests: bool = ..., draining: bool = ..., live: bool = ..., newest_seq: _Optional[int] = ..., workers: _Optional[int] = ..., cut_off: bool = ..., behind: _Optional[int] = ...) -> None: ...

class Recovery(_message.Message):
    __slots__ = ("workers", "applied_seq", "newest_seq")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_SEQ_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SEQ_FIELD_NUMBER: _ClassVar[int]
    workers: int
    applied_seq: int
    newest_seq: int
    def __init__(self, workers: _Optional[int] = ..., applied_seq: _Optional[int] = ..., newest_seq: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: Filter
    def __init__(self, filter: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[_worker_pb2.WorkerStatus, _Mapping]]] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("block_hashes", "tokens_hashes", "filter")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASHES_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    tokens_hashes: _containers.RepeatedScalarFieldContainer[int]
    filter: Filter
    def __init__(self, block_hashes: _Optional[_Iterable[int]] = ..., tokens_hashes: _Optional[_Iterable[int]] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("block_hash", "tokens_hash", "worker", "model", "dp_rank", "tier", "sources", "lora_name")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HASH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    tokens_hash: int
    worker: str
    model: str
    dp_rank: int
    tier: _event_pb2.Tier
    sources: _containers.RepeatedScalarFieldContainer[str]
    lora_name: str
    def __init__(self, block_hash: _Optional[int] = ..., tokens_hash: _Optional[int] = ..., worker: _Optional[str] = ..., model: _Optional[str] = ..., dp_rank: _Optional[int] = ..., tier: _Optional[_Union[_event_pb2.Tier, str]] = ..., sources: _Optional[_Iterable[str]] = ..., lora_name: _Optional[str] = ...) -> None: ...

class ListSubscribersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscribersResponse(_message.Message):
    __slots__ = ("subscribers",)
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    subscribers: _containers.RepeatedCompositeFieldContainer[SubscriberStatus]
    def __init__(self, subscribers: _Optional[_Iterable[_Union[SubscriberStatus, _Mapping]]] = ...) -> None: ...

class SubscriberStatus(_message.Message):
    __slots__ = ("peer", "user_agent", "filter", "start_time_unix_nano", "seq", "behind", "in_snapshot", "client_id")
    PEER_FIELD_NUMBER: _ClassVar[int]
    USER_AGENT_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    START_TIME_UNIX_NANO_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    IN_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    peer: str
    user_agent: str
    filter: Filter
    start_time_unix_nano: int
    seq: int
    behind: int
    in_snapshot: bool
    client_id: str
    def __init__(self, peer: _Optional[str] = ..., user_agent: _Optional[str] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ..., start_time_unix_nano: _Optional[int] = ..., seq: _Optional[int] = ..., behind: _Optional[int] = ..., in_snapshot: bool = ..., client_id: _Optional[str] = ...) -> None: ...
