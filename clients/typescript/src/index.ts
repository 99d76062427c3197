export { Client, type ClientOptions, type Filter, type Lookup } from "./client.js";
export type { TlsOptions, Token } from "./connection_options.js";
export type { CallOptions } from "./deadline.js";
export {
  ClosedError, ConfigError, EndedError, IdleError, KvcastError, ViolationError, type GrpcCode, type KvcastErrorDetails, type Reason,
} from "./errors.js";
export type { Match, MatchRequest, MatchResult, PoolPrefix, TierPrefix } from "./match.js";
export { Matcher } from "./matcher.js";
export { outcomeOf, type Outcome } from "./outcome.js";
export { Position } from "./position.js";
export type { Prompt } from "./prompt.js";
export type { Routed } from "./routed.js";
export type { SubscribeOptions } from "./subscribe_options.js";
export { Subscription } from "./subscription.js";
export { tokensHashes, type HashOptions } from "./tokens_hashes.js";
export type { InterruptionUpdate, MessageKind, MessageUpdate, Update } from "./update.js";
export { Validator } from "./validator.js";
export { View, type ViewRank, type ViewWorker } from "./view.js";
export {
  Cleared_Reason, Gap_Reason, Tier, type Cleared, type Entry, type Gap, type Groups, type RouterEvent, type Stored, type WorkerAdded,
} from "./gen/kvcast/v1/event_pb.js";
export { Accepted_Mode, type BlockHolder, type SubscribeResponse } from "./gen/kvcast/v1/router_event_service_pb.js";
export { DegradedReason, Trust, WorkerState, type WorkerStatus } from "./gen/kvcast/v1/worker_pb.js";
