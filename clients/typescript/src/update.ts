import type { SubscribeResponse } from "./gen/kvcast/v1/router_event_service_pb.js";
import type { Position } from "./position.js";

/** What the message of an update is. An unknown one is of a later version of the contract, and can be ignored. */
export type MessageKind =
  | "accepted" | "progress" | "snapshotBegin" | "snapshotWorker" | "snapshotBlocks" | "snapshotEnd" | "entries" | "unknown";

/** A message from the server, or an interruption. */
export type Update = MessageUpdate | InterruptionUpdate;

/** A message from the server. */
export interface MessageUpdate {
  /** The first message of each stream is accepted. Those from snapshotBegin to snapshotEnd are a snapshot. */
  readonly kind: MessageKind;
  /** The message of the contract. */
  readonly message: SubscribeResponse;
  /**
   * The position from which to resume when this and all earlier updates are applied. Undefined while the delivered state
   * is incomplete or about to be replaced: before the first position, and from an Accepted with MODE_SNAPSHOT or a
   * SnapshotBegin to SnapshotEnd.
   */
  readonly position: Position | undefined;
  /**
   * Ends the current stream and starts another with a snapshot. The caller uses it when its state is wrong, and must call
   * it before it requests the next update, which is then an interruption with the cause. With gapPolicy "fail", the cause
   * ends the subscription instead.
   */
  resnapshot(cause: Error): void;
}

/** The end of a stream that another stream replaces. The caller may ignore it. */
export interface InterruptionUpdate {
  readonly kind: "interruption";
  /** Why: a KvcastError, a ViolationError, an IdleError, an EndedError, or the cause passed to resnapshot. */
  readonly error: Error;
  /** Whether the next stream starts with a snapshot. */
  readonly snapshot: boolean;
  /** The time until the next stream starts. */
  readonly waitMs: number;
  /** The number of streams in a row without progress, with this one. */
  readonly failures: number;
  /** The position after which the next stream resumes; undefined if it starts with a snapshot. */
  readonly position: Position | undefined;
  /** Does nothing: the stream has ended. */
  resnapshot(cause: Error): void;
}

/** Returns what a message is. */
export function kindOf(m: SubscribeResponse): MessageKind {
  if (m.accepted !== undefined) {
    return "accepted";
  }
  if (m.progress !== undefined) {
    return "progress";
  }
  if (m.snapshotBegin !== undefined) {
    return "snapshotBegin";
  }
  if (m.snapshotWorker !== undefined) {
    return "snapshotWorker";
  }
  if (m.snapshotBlocks.length > 0) {
    return "snapshotBlocks";
  }
  if (m.snapshotEnd !== undefined) {
    return "snapshotEnd";
  }
  return m.entries.length > 0 ? "entries" : "unknown";
}
