import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { ConfigError } from "./errors.js";
import { FilterSchema, type Filter } from "./gen/kvcast/v1/router_event_service_pb.js";
import { toPosition, type Position } from "./position.js";

/** If no idle timeout is set: until a stream is accepted, and the least one after that. */
export const defaultIdleTimeoutMs = 30_000;
export const leastIdleTimeoutMs = 10_000;
/** If no idle timeout is set, it is this many progress intervals of the server. */
export const idleIntervals = 3;
/** The shortest idle timeout that can be set. */
const minIdleTimeoutMs = 10;
/** The bounds that the contract requires. */
const defaultBackoffMinMs = 1_000;
const defaultBackoffMaxMs = 30_000;

/** Options of a subscription. Without any, it has everything, and begins with a snapshot. */
export interface SubscribeOptions {
  /** The position after which the subscription resumes. The filter must be that with which it was received. */
  after?: Position | string | undefined;
  /**
   * Where the subscription starts without a position: with a snapshot of all workers (the default); with the next entry,
   * without the existing state; or with the oldest retained entry.
   */
  start?: "snapshot" | "latest" | "earliest" | undefined;
  /** Selects events; undefined: all. */
  filter?: MessageInitShape<typeof FilterSchema> | undefined;
  /**
   * What to do if the entries after the position are not available, if the server has lost its journal, or if a stream
   * violates the contract: continue with a snapshot (the default), or end with the error.
   */
  gapPolicy?: "snapshot" | "fail" | undefined;
  /**
   * The time limit to connect, and to receive the next message. After it, the stream is replaced. The time in which the
   * caller processes an update does not count. At least 10; Infinity: no limit. Default: 30,000 until the stream is
   * accepted, then three times the progress interval of the server, but at least 10,000.
   */
  idleTimeoutMs?: number | undefined;
  /**
   * Bounds of the wait before another stream. It doubles with each failure, and up to half of it is subtracted at random.
   * A longer delay that the server requests takes precedence, up to 5 minutes. With several servers this is the wait after
   * all have failed; before the next one it is at most a tenth of backoffMinMs. Defaults: 1,000 and 30,000.
   */
  backoffMinMs?: number | undefined;
  backoffMaxMs?: number | undefined;
  /** A name of the router for people; undefined: that of the client. */
  clientId?: string | undefined;
  /** Ends the subscription, which then ends without an error. */
  signal?: AbortSignal | undefined;
}

/** Options with their defaults. */
export interface SubscribeConfig {
  start: Start;
  filter: Filter | undefined;
  failOnGap: boolean;
  idleTimeoutMs: number | undefined;
  backoffMinMs: number;
  backoffMaxMs: number;
  clientId: string;
  signal: AbortSignal | undefined;
}

/** Where a stream starts. */
export type Start = { mode: "snapshot" | "latest" | "earliest" } | { mode: "resume"; after: Position };

/** Returns the options with their defaults. It throws a ConfigError. */
export function withDefaults(o: SubscribeOptions): SubscribeConfig {
  const backoffMinMs = o.backoffMinMs ?? defaultBackoffMinMs;
  const backoffMaxMs = o.backoffMaxMs ?? Math.max(defaultBackoffMaxMs, backoffMinMs);
  if (o.idleTimeoutMs !== undefined && !(o.idleTimeoutMs >= minIdleTimeoutMs)) {
    throw new ConfigError("idleTimeoutMs", `is ${o.idleTimeoutMs}: want ${minIdleTimeoutMs} or more, or Infinity for no limit`);
  }
  if (!(backoffMinMs > 0)) {
    throw new ConfigError("backoffMinMs", `is ${backoffMinMs}: want more than 0`);
  }
  if (!(backoffMaxMs >= backoffMinMs)) {
    throw new ConfigError("backoffMaxMs", `is ${backoffMaxMs}: want backoffMinMs, ${backoffMinMs}, or more`);
  }
  if (o.gapPolicy !== undefined && o.gapPolicy !== "snapshot" && o.gapPolicy !== "fail") {
    throw new ConfigError("gapPolicy", `is ${JSON.stringify(o.gapPolicy)}: want "snapshot" or "fail"`);
  }
  if (o.start !== undefined && o.start !== "snapshot" && o.start !== "latest" && o.start !== "earliest") {
    throw new ConfigError("start", `is ${JSON.stringify(o.start)}: want "snapshot", "latest" or "earliest"`);
  }
  return {
    start: startOf(o), filter: o.filter === undefined ? undefined : create(FilterSchema, o.filter), failOnGap: o.gapPolicy === "fail",
    idleTimeoutMs: o.idleTimeoutMs, backoffMinMs, backoffMaxMs, clientId: o.clientId ?? "", signal: o.signal,
  };
}

function startOf(o: SubscribeOptions): Start {
  if (o.after === undefined) {
    return { mode: o.start ?? "snapshot" };
  }
  if (o.start !== undefined) {
    throw new ConfigError("start", "is set, and after as well: want one of them");
  }
  try {
    return { mode: "resume", after: toPosition(o.after) };
  } catch (e) {
    throw new ConfigError("after", `is not allowed: ${(e as Error).message}`);
  }
}
