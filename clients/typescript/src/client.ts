import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Servers, type Connection } from "./connection.js";
import type { ConnectionOptions } from "./connection_options.js";
import { Deadline, type CallOptions } from "./deadline.js";
import { ConfigError } from "./errors.js";
import { NoteRoutedRequestSchema, ReportOutcomeRequestSchema } from "./gen/kvcast/v1/match_pb.js";
import {
  ListWorkersRequestSchema, LookupBlocksRequestSchema, type BlockHolder, type FilterSchema,
} from "./gen/kvcast/v1/router_event_service_pb.js";
import type { WorkerStatus } from "./gen/kvcast/v1/worker_pb.js";
import { matchRequestMessage, matchResult, type MatchRequest, type MatchResult } from "./match.js";
import { Matcher } from "./matcher.js";
import { maxOutcomes, outcomeMessage, type Outcome } from "./outcome.js";
import { maxRouted, routedMessage, type Routed } from "./routed.js";
import { errorFrom } from "./status.js";
import { Subscription } from "./subscription.js";
import type { SubscribeOptions } from "./subscribe_options.js";

/** Options of a Client. */
export interface ClientOptions extends ConnectionOptions {
  /** A name of the router for people: at most 128 bytes of printable ASCII. It need not be unique. */
  clientId?: string | undefined;
  /** The time limit of calls, over all servers; undefined: none. Subscriptions have an idle timeout instead. */
  timeoutMs?: number | undefined;
}

/** Selects workers, models and tiers. */
export type Filter = MessageInitShape<typeof FilterSchema>;

/** Asks which dp ranks hold blocks: 1 to 10,000 hashes in all. */
export interface Lookup {
  /** The engine's own hashes, as in Stored.block_hashes. */
  blockHashes?: readonly bigint[] | undefined;
  /** Hashes of the contents, as in Stored.tokens_hashes. A lookup of them is slow. */
  tokensHashes?: readonly bigint[] | undefined;
  /** Selects workers and tiers; undefined: all. */
  filter?: Filter | undefined;
}

/**
 * A client of a server, or of one of several that serve the same workers. It has no connection between streams and calls,
 * and needs no close: each stream and each call opens its own connection. A connection without traffic for 10 s is pinged.
 */
export class Client {
  readonly #servers: Servers;
  readonly #options: ClientOptions;

  /**
   * Makes a client for a server, "HOST:PORT", or several, separated by commas. The client uses the first one until a
   * stream ends or a call finds it unavailable, and then the next. It does not connect. It throws a ConfigError.
   */
  constructor(addresses: string, options: ClientOptions = {}) {
    this.#servers = new Servers(addresses, options);
    this.#options = options;
    if (options.clientId !== undefined && !/^[\x20-\x7e]{0,128}$/.test(options.clientId)) {
      throw new ConfigError("clientId", "is not allowed: want at most 128 bytes of printable ASCII");
    }
    if (options.timeoutMs !== undefined && !(options.timeoutMs > 0)) {
      throw new ConfigError("timeoutMs", `is ${options.timeoutMs}: want more than 0, or undefined for no limit`);
    }
  }

  /**
   * Returns the updates of a subscription, over any number of streams. It does not read ahead of the caller. A break of
   * the loop ends the stream, and nothing is left of it.
   *
   * The loop ends without an error when options.signal is aborted. Otherwise it throws the error that ended it: a
   * ConfigError at once; a KvcastError that a retry would repeat; with gapPolicy "fail", any error after which a snapshot
   * would follow otherwise. All other errors are interruptions.
   */
  subscribe(options: SubscribeOptions = {}): Subscription {
    return new Subscription(this.#servers, { clientId: this.#options.clientId, ...options });
  }

  /**
   * Returns the dp ranks that hold prefixes of prompts, according to the server. It opens a connection for the call: use a
   * Matcher for more than a few requests. It throws a KvcastError.
   */
  async match(request: MatchRequest, options: CallOptions = {}): Promise<MatchResult> {
    const message = matchRequestMessage(request);
    return this.#call(options, async ({ rpc }, signal) => matchResult(message.model, await rpc.matchPrefix(message, { signal })));
  }

  /** Returns a Matcher, which the caller must close. It does not connect. */
  matcher(): Matcher {
    return new Matcher(this.#servers, this.#options.timeoutMs);
  }

  /** Returns the holders of blocks; blocks that no worker holds have none. It throws a KvcastError. */
  async lookupBlocks(lookup: Lookup, options: CallOptions = {}): Promise<BlockHolder[]> {
    const request = create(LookupBlocksRequestSchema, {
      blockHashes: [...(lookup.blockHashes ?? [])], tokensHashes: [...(lookup.tokensHashes ?? [])],
      ...(lookup.filter === undefined ? {} : { filter: lookup.filter }),
    });
    return this.#call(options, async ({ rpc }, signal) => (await rpc.lookupBlocks(request, { signal })).holders);
  }

  /** Returns the workers that a filter selects, by name; undefined: all. Its tiers are ignored. It throws a KvcastError. */
  async workers(filter?: Filter, options: CallOptions = {}): Promise<WorkerStatus[]> {
    const request = create(ListWorkersRequestSchema, filter === undefined ? {} : { filter });
    return this.#call(options, async ({ rpc }, signal) => (await rpc.listWorkers(request, { signal })).workers);
  }

  /**
   * Reports outcomes to the server, and returns how many it ignored: those of workers, ranks and positions that it does
   * not know. It throws a KvcastError.
   */
  async reportOutcomes(outcomes: readonly Outcome[], options: CallOptions = {}): Promise<number> {
    let ignored = 0;
    for (const part of parts(outcomes.map(outcomeMessage), maxOutcomes)) {
      const request = create(ReportOutcomeRequestSchema, { outcomes: part });
      ignored += await this.#call(options, async ({ rpc }, signal) => (await rpc.reportOutcome(request, { signal })).ignored);
    }
    return ignored;
  }

  /**
   * Tells the server where prompts were sent, and returns how many it ignored. Until the engine reports that their blocks
   * are stored, matches of the server say that they are expected. Other servers do not get them. It throws a KvcastError.
   */
  async noteRouted(routed: readonly Routed[], options: CallOptions = {}): Promise<number> {
    let ignored = 0;
    for (const part of parts(routed.map(routedMessage), maxRouted)) {
      const request = create(NoteRoutedRequestSchema, { routed: part });
      ignored += await this.#call(options, async ({ rpc }, signal) => (await rpc.noteRouted(request, { signal })).ignored);
    }
    return ignored;
  }

  /** Makes a call over a connection for it. It tries each server until one is available. */
  async #call<T>(options: CallOptions, call: (c: Connection, signal: AbortSignal) => Promise<T>): Promise<T> {
    const deadline = new Deadline({ timeoutMs: this.#options.timeoutMs, ...options });
    try {
      for (let attempt = 1; ; attempt++) {
        deadline.check();
        const connection = this.#servers.open();
        const ended = new AbortController();
        deadline.onEnd((reason) => ended.abort(reason));
        try {
          return await Promise.race([connection.connect().then(() => call(connection, ended.signal)), deadline.ended]);
        } catch (reason) {
          deadline.check();
          const error = errorFrom(reason);
          if (error.code !== "UNAVAILABLE") {
            throw error;
          }
          connection.failed();
          if (attempt === this.#servers.count) {
            throw error;
          }
        } finally {
          connection.close();
        }
      }
    } finally {
      deadline.release();
    }
  }
}

function* parts<T>(all: T[], size: number): Iterable<T[]> {
  for (let i = 0; i < all.length; i += size) {
    yield all.slice(i, i + size);
  }
}
