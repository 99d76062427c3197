import { create } from "@bufbuild/protobuf";
import type { Servers } from "./connection.js";
import { Deadline, type CallOptions } from "./deadline.js";
import { ClosedError, EndedError, KvcastError } from "./errors.js";
import {
  MatchPrefixesRequestSchema, type MatchPrefixesRequest, type MatchPrefixRequest, type MatchPrefixResponse, type RoutedPrompt,
} from "./gen/kvcast/v1/match_pb.js";
import { MatchStream, type MatchCall } from "./match_stream.js";
import { matchRequestMessage, matchResult, type MatchRequest, type MatchResult } from "./match.js";
import { maxRouted, routedMessage, type Routed } from "./routed.js";

/** The requests of a Matcher that have no answer yet. Further requests wait. */
export const maxInFlight = 1024;

/**
 * Sends requests over one stream, which costs less than a call for each: a request does not wait for the answers to those
 * before it. The stream is opened with the first request, and another one after an error. An open stream keeps the process
 * alive, until close.
 *
 * The server answers in the order of the requests. A request that waits for a position therefore delays those after it.
 */
export class Matcher {
  readonly #servers: Servers;
  readonly #timeoutMs: number | undefined;
  #stream: MatchStream | undefined;
  #nextId = 0n;
  #closed = false;
  #inFlight = 0;
  /** Requests that wait for one of those in flight to end, in order. */
  readonly #waiting: Set<() => void> = new Set();
  /** Streams whose connection is not closed yet. */
  readonly #open: Set<Promise<void>> = new Set();

  /** @internal Use Client.matcher. */
  constructor(servers: Servers, timeoutMs: number | undefined) {
    this.#servers = servers;
    this.#timeoutMs = timeoutMs;
  }

  /**
   * Sends a request and returns the answer. A request whose stream broke before the answer is sent over another stream, at
   * most once more for each server. It throws a KvcastError, a ViolationError, a ClosedError or the signal's reason.
   */
  async match(request: MatchRequest, options: CallOptions = {}): Promise<MatchResult> {
    const message = matchRequestMessage(request);
    return matchResult(message.model, await this.#answer(options, { request: message }));
  }

  /**
   * Is Client.noteRouted over the stream, and does not return how many were ignored. A match that begins after it has
   * returned is sure to see them, if it has the same server.
   */
  async noteRouted(routed: readonly Routed[], options: CallOptions = {}): Promise<void> {
    const all = routed.map(routedMessage);
    for (let i = 0; i < all.length; i += maxRouted) {
      await this.#answer(options, { routed: all.slice(i, i + maxRouted) });
    }
  }

  /** Ends the requests without an answer with a ClosedError, and closes the stream and its connection. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#stream?.close(new ClosedError());
    for (const wake of this.#waiting) {
      wake();
    }
    await Promise.all(this.#open);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Sends a request, and returns the answer. */
  async #answer(
    options: CallOptions, what: { request?: MatchPrefixRequest; routed?: RoutedPrompt[] },
  ): Promise<MatchPrefixResponse | undefined> {
    if (options.signal === undefined && options.timeoutMs === undefined && this.#timeoutMs === undefined) {
      return this.#answerUntil(undefined, what);
    }
    const deadline = new Deadline({ timeoutMs: this.#timeoutMs, ...options });
    try {
      return await this.#answerUntil(deadline, what);
    } finally {
      deadline.release();
    }
  }

  async #answerUntil(
    deadline: Deadline | undefined, what: { request?: MatchPrefixRequest; routed?: RoutedPrompt[] },
  ): Promise<MatchPrefixResponse | undefined> {
    deadline?.check();
    if (this.#inFlight >= maxInFlight) {
      await this.#turn(deadline);
    } else {
      this.#inFlight++;
    }
    try {
      for (let attempt = 0; ; attempt++) {
        const answer = this.#send(create(MatchPrefixesRequestSchema, what));
        try {
          return await (deadline === undefined ? answer : Promise.race([answer, deadline.ended]));
        } catch (e) {
          if (!(e instanceof LostError)) {
            throw e;
          }
          if (this.#closed || attempt >= this.#servers.count) {
            throw e.cause;
          }
        }
      }
    } finally {
      const next = this.#waiting.values().next().value;
      if (next === undefined) {
        this.#inFlight--;
      } else {
        next(); // which takes the place
      }
    }
  }

  /** Waits for a place among the requests in flight. */
  async #turn(deadline: Deadline | undefined): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      const wake = (): void => {
        this.#waiting.delete(wake);
        resolve();
      };
      this.#waiting.add(wake);
      deadline?.onEnd((reason) => {
        if (this.#waiting.delete(wake)) {
          reject(reason);
        }
      });
    });
  }

  /** Sends a request over the open stream, and opens one if there is none. It throws a LostError if it can be sent again. */
  async #send(message: MatchPrefixesRequest): Promise<MatchPrefixResponse | undefined> {
    if (this.#closed) {
      throw new ClosedError();
    }
    const stream = (this.#stream ??= this.#openStream());
    message.id = ++this.#nextId;
    return new Promise((resolve, reject) => stream.send({ message, resolve, reject }));
  }

  #openStream(): MatchStream {
    const connection = this.#servers.open();
    const stream = new MatchStream(connection, (error, calls) => {
      connection.failed();
      if (this.#stream === stream) {
        this.#stream = undefined;
      }
      fail(error, calls);
    });
    const done = stream.done.finally(() => this.#open.delete(done));
    this.#open.add(done);
    return stream;
  }
}

/** The error of a request that can be sent again: another request, or the connection, caused the error. */
class LostError extends Error {
  constructor(cause: Error) {
    super(cause.message, { cause });
  }
}

/**
 * Ends calls with the error that ended their stream. The server ends a stream at the first request that it cannot answer,
 * so later requests can be sent again.
 */
function fail(error: Error, calls: MatchCall[]): void {
  const isConnection = error instanceof EndedError || (error instanceof KvcastError && error.code === "UNAVAILABLE");
  calls.forEach((call, i) => {
    const isItsOwn = error instanceof ClosedError || (i === 0 && !isConnection);
    call.reject(isItsOwn ? error : new LostError(error));
  });
}
