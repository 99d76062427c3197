import { create } from "@bufbuild/protobuf";
import { Backoff } from "./backoff.js";
import type { Servers } from "./connection.js";
import { EndedError, IdleError, isPermanent, isPositionLost, KvcastError, ViolationError } from "./errors.js";
import { GapPolicy, SubscribeRequestSchema, type Accepted, type SubscribeRequest, type SubscribeResponse } from "./gen/kvcast/v1/router_event_service_pb.js";
import { positionMessage } from "./position.js";
import { errorFrom } from "./status.js";
import {
  defaultIdleTimeoutMs, idleIntervals, leastIdleTimeoutMs, withDefaults, type Start, type SubscribeConfig, type SubscribeOptions,
} from "./subscribe_options.js";
import { kindOf, type InterruptionUpdate, type MessageUpdate, type Update } from "./update.js";
import { Validator } from "./validator.js";

/** setTimeout takes no longer delay. */
const maxTimerMs = 0x7fffffff;

/** The updates of a subscription. Each loop over it is a new subscription. */
export class Subscription implements AsyncIterable<Update> {
  readonly #servers: Servers;
  readonly #config: SubscribeConfig;

  /** @internal Use Client.subscribe. */
  constructor(servers: Servers, options: SubscribeOptions) {
    this.#servers = servers;
    this.#config = withDefaults(options);
  }

  [Symbol.asyncIterator](): AsyncIterableIterator<Update> {
    const cancel = new AbortController();
    const updates = new Run(this.#servers, this.#config, cancel.signal).updates();
    return {
      next: () => updates.next(),
      return: () => {
        cancel.abort(); // also if the next update is being awaited, which would delay the generator's own return
        return updates.return(undefined);
      },
      [Symbol.asyncIterator]() {
        return this;
      },
    };
  }
}

/** One loop over a subscription: a sequence of streams. */
class Run {
  readonly #servers: Servers;
  readonly #config: SubscribeConfig;
  readonly #validator: Validator;
  readonly #left: AbortSignal;
  /** Before all streams, and before those that follow a violation. */
  readonly #backoff: Backoff;
  readonly #snapshotBackoff: Backoff;
  /** The next stream must start with a snapshot. */
  #needSnapshot = false;
  /** The cause passed to resnapshot, until the stream has ended. */
  #rejected: Error | undefined;
  /** The current stream has delivered entries, or Progress with a position. */
  #progressed = false;
  #streamStart = 0;

  constructor(servers: Servers, config: SubscribeConfig, left: AbortSignal) {
    this.#servers = servers;
    this.#config = config;
    this.#left = left;
    this.#validator = new Validator(config.filter, config.failOnGap);
    this.#backoff = new Backoff(config.backoffMinMs, config.backoffMaxMs, servers.count);
    this.#snapshotBackoff = new Backoff(config.backoffMinMs, config.backoffMaxMs, 1);
  }

  /** Whether the caller wants no more updates. */
  get #isOver(): boolean {
    return this.#left.aborted || (this.#config.signal?.aborted ?? false);
  }

  async *updates(): AsyncGenerator<Update, void, undefined> {
    while (!this.#isOver) {
      const error = yield* this.#stream();
      if (this.#isOver) {
        return;
      }
      const interruption = this.#interruption(error);
      yield interruption;
      await this.#wait(interruption.waitMs);
    }
  }

  /** Delivers the messages of one stream, and returns the error that ended it. */
  async *#stream(): AsyncGenerator<Update, Error, undefined> {
    const connection = this.#servers.open();
    const cancel = new AbortController();
    const stop = (): void => cancel.abort();
    const idle = new IdleTimer(() => cancel.abort(new IdleError()));
    this.#left.addEventListener("abort", stop);
    this.#config.signal?.addEventListener("abort", stop);
    try {
      let timeout = this.#idleTimeout(undefined);
      idle.start(timeout);
      this.#progressed = false;
      this.#streamStart = performance.now();
      const start = this.#nextStart();
      this.#validator.startStream(start);
      // The iterator is not returned: the signal ends the stream at once, in whatever state it is.
      const messages = connection.rpc.subscribe(this.#request(start), { signal: cancel.signal })[Symbol.asyncIterator]();
      for (let next = await messages.next(); !next.done; next = await messages.next()) {
        const m = next.value;
        idle.stop(); // the time in which the caller processes the message does not count
        this.#check(m);
        yield this.#update(m);
        if (this.#rejected !== undefined) {
          return this.#rejected;
        }
        if (m.accepted !== undefined) {
          timeout = this.#idleTimeout(m.accepted);
        }
        idle.start(timeout);
      }
      return new EndedError();
    } catch (reason) {
      if (idle.isExpired) {
        return new IdleError();
      }
      return reason instanceof ViolationError ? reason : errorFrom(reason);
    } finally {
      idle.stop();
      this.#left.removeEventListener("abort", stop);
      this.#config.signal?.removeEventListener("abort", stop);
      cancel.abort();
      connection.close();
      if (!this.#isOver) {
        connection.failed();
      }
    }
  }

  /** Checks a message. It throws a ViolationError. */
  #check(m: SubscribeResponse): void {
    this.#validator.validate(m);
    if (m.accepted === undefined && this.#validator.phase === "following") {
      this.#progressed = true;
    }
    if (m.snapshotBegin !== undefined) {
      this.#needSnapshot = false;
    }
  }

  #update(m: SubscribeResponse): MessageUpdate {
    return {
      kind: kindOf(m), message: m, position: this.#validator.stored,
      resnapshot: (cause) => {
        this.#rejected = cause;
      },
    };
  }

  /** Returns the idle timeout of a stream, which has no Accepted until it is accepted. */
  #idleTimeout(a: Accepted | undefined): number {
    const intervalMs = Number(a?.progressIntervalNano ?? 0n) / 1e6;
    return this.#config.idleTimeoutMs ?? (intervalMs > 0 ? Math.max(idleIntervals * intervalMs, leastIdleTimeoutMs) : defaultIdleTimeoutMs);
  }

  #nextStart(): Start {
    if (this.#needSnapshot || this.#validator.delivered === "part") {
      return { mode: "snapshot" };
    }
    const after = this.#validator.position;
    return after === undefined ? this.#config.start : { mode: "resume", after };
  }

  #request(start: Start): SubscribeRequest {
    const request = create(SubscribeRequestSchema, { clientId: this.#config.clientId });
    if (this.#config.filter !== undefined) {
      request.filter = this.#config.filter;
    }
    if (this.#config.failOnGap) {
      request.gapPolicy = GapPolicy.FAIL;
    }
    request.start = create(SubscribeRequestSchema, {
      start: start.mode === "resume" ? { case: "after", value: positionMessage(start.after) } : { case: start.mode, value: {} },
    }).start;
    return request;
  }

  /** Decides how to continue after a stream has ended with an error. It throws the error that ends the subscription. */
  #interruption(error: Error): InterruptionUpdate {
    if (this.#progressed) {
      this.#backoff.failures = 0;
      if (performance.now() - this.#streamStart > this.#config.backoffMaxMs) {
        this.#snapshotBackoff.failures = 0;
      }
    }
    let waitMs = 0;
    let retryAfterMs = 0;
    if (this.#rejected !== undefined || error instanceof ViolationError) {
      this.#rejected = undefined;
      if (this.#config.failOnGap) {
        throw error;
      }
      this.#needSnapshot = true;
      // Snapshots are expensive, so only a stream longer than backoffMaxMs resets this backoff.
      waitMs = this.#snapshotBackoff.next();
    } else if (error instanceof KvcastError) {
      if (isPositionLost(error) && !this.#config.failOnGap) {
        this.#needSnapshot = true;
      } else if (error.code === "UNAUTHENTICATED" && this.#progressed) {
        // The token of the next call may be another.
      } else if (isPermanent(error)) {
        throw error;
      } else {
        retryAfterMs = error.retryAfterMs ?? 0;
      }
    }
    waitMs = Math.max(waitMs, this.#backoff.next(retryAfterMs));
    const snapshot = this.#nextStart().mode === "snapshot";
    return {
      kind: "interruption", error, snapshot, waitMs, failures: this.#backoff.failures,
      position: snapshot ? undefined : this.#validator.position,
      resnapshot: () => {},
    };
  }

  /** Waits, until the caller wants no more updates. */
  async #wait(ms: number): Promise<void> {
    if (this.#isOver) {
      return;
    }
    await new Promise<void>((resolve) => {
      const end = (): void => {
        clearTimeout(timer);
        this.#left.removeEventListener("abort", end);
        this.#config.signal?.removeEventListener("abort", end);
        resolve();
      };
      const timer = setTimeout(end, ms);
      this.#left.addEventListener("abort", end);
      this.#config.signal?.addEventListener("abort", end);
    });
  }
}

/** A timer that runs while a message is awaited. */
class IdleTimer {
  isExpired = false;
  readonly #expire: () => void;
  #timer: NodeJS.Timeout | undefined;

  constructor(expire: () => void) {
    this.#expire = expire;
  }

  start(ms: number): void {
    if (Number.isFinite(ms)) {
      this.#timer = setTimeout(() => {
        this.isExpired = true;
        this.#expire();
      }, Math.min(ms, maxTimerMs));
    }
  }

  stop(): void {
    clearTimeout(this.#timer);
  }
}
