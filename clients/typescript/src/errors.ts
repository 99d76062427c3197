import type { Position } from "./position.js";

/** The name of a gRPC code other than OK. */
export type GrpcCode =
  | "CANCELLED" | "UNKNOWN" | "INVALID_ARGUMENT" | "DEADLINE_EXCEEDED" | "NOT_FOUND" | "ALREADY_EXISTS" | "PERMISSION_DENIED"
  | "RESOURCE_EXHAUSTED" | "FAILED_PRECONDITION" | "ABORTED" | "OUT_OF_RANGE" | "UNIMPLEMENTED" | "INTERNAL" | "UNAVAILABLE"
  | "DATA_LOSS" | "UNAUTHENTICATED";

/** The reasons of the contract, see RouterEventService. A server of a later version may send others. */
export type Reason =
  | "POSITION_COMPACTED" | "POSITION_AHEAD" | "BEHIND" | "OUTDATED" | "EPOCH_MISMATCH" | "SLOW_SUBSCRIBER" | "TOO_MANY_SUBSCRIBERS"
  | "TOO_MANY_SNAPSHOTS" | "TOO_MANY_HOLDERS" | "POSITION_NOT_REACHED" | "TOO_MANY_QUERIES" | "RESPONSE_TOO_LARGE"
  | "TOO_MANY_STREAMS" | "FILTERS_TOO_LARGE" | "STARTING" | "NOT_SERVING" | "SHUTTING_DOWN" | "MAX_CONNECTION_AGE"
  | "INVALID_ARGUMENT" | "UNIMPLEMENTED" | "INTERNAL" | "UNAUTHENTICATED" | "PERMISSION_DENIED";

/** What a KvcastError has beside its message. */
export interface KvcastErrorDetails {
  code: GrpcCode;
  reason?: Reason | (string & {}) | undefined;
  epoch?: string | undefined;
  oldest?: bigint | undefined;
  newest?: bigint | undefined;
  retryAfterMs?: number | undefined;
}

/** The status with which a call or a stream ended. */
export class KvcastError extends Error {
  override readonly name = "KvcastError";
  /** The gRPC code. A connection that cannot be made or that is lost is UNAVAILABLE, without a reason. */
  readonly code: GrpcCode;
  /** The contract's reason; undefined if the error does not come from a kvcast server. */
  readonly reason: Reason | (string & {}) | undefined;
  /** The epoch and the range of retained seqs of the server's journal; undefined if the error does not have them. */
  readonly epoch: string | undefined;
  readonly oldest: bigint | undefined;
  readonly newest: bigint | undefined;
  /** The delay that the server requests before a retry; undefined: none. */
  readonly retryAfterMs: number | undefined;

  constructor(message: string, details: KvcastErrorDetails, options?: ErrorOptions) {
    super(details.reason ? `${details.code}: ${details.reason}: ${message}` : `${details.code}: ${message}`, options);
    this.code = details.code;
    this.reason = details.reason;
    this.epoch = details.epoch;
    this.oldest = details.oldest;
    this.newest = details.newest;
    this.retryAfterMs = details.retryAfterMs;
  }
}

/** A violation of the contract by the server, such as a missing or duplicate message. The message is not delivered. */
export class ViolationError extends Error {
  override readonly name = "ViolationError";
  /** The last valid position; undefined: there is none. */
  readonly at: Position | undefined;

  constructor(what: string, at?: Position) {
    super(at === undefined ? `the stream violates the contract: ${what}` : `the stream violates the contract after ${at}: ${what}`);
    this.at = at;
  }
}

/** No message was received within the idle timeout. */
export class IdleError extends Error {
  override readonly name = "IdleError";

  constructor() {
    super("no message was received within the idle timeout");
  }
}

/** The server ended the stream without an error. */
export class EndedError extends Error {
  override readonly name = "EndedError";

  constructor() {
    super("the server ended the stream");
  }
}

/** The matcher is closed. */
export class ClosedError extends Error {
  override readonly name = "ClosedError";

  constructor() {
    super("the matcher is closed");
  }
}

/** An option or a request has a value that is not allowed. */
export class ConfigError extends Error {
  override readonly name = "ConfigError";
  /** The name of the field. */
  readonly field: string;

  constructor(field: string, problem: string) {
    super(`${field} ${problem}`);
    this.field = field;
  }
}

/** The codes of errors that a retry would repeat. */
const permanentCodes: ReadonlySet<GrpcCode> = new Set<GrpcCode>([
  "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "OUT_OF_RANGE", "FAILED_PRECONDITION",
]);

/** Reports whether a retry would fail with the same code. */
export function isPermanent(e: KvcastError): boolean {
  return permanentCodes.has(e.code);
}

/** Reports whether the entries after the position are not available, so that only a snapshot helps. */
export function isPositionLost(e: KvcastError): boolean {
  return e.reason === "POSITION_COMPACTED" || e.reason === "EPOCH_MISMATCH";
}
