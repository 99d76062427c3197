import type { Tier, WorkerAdded } from "./gen/kvcast/v1/event_pb.js";
import { KvcastError } from "./errors.js";
import type { SubscribeResponse } from "./gen/kvcast/v1/router_event_service_pb.js";
import { DegradedReason, Trust } from "./gen/kvcast/v1/worker_pb.js";
import type { Match, TierPrefix } from "./match.js";
import type { Position } from "./position.js";
import { hashesOf, type Prompt } from "./prompt.js";
import type { Prefix } from "./rank_blocks.js";
import type { MessageUpdate, Update } from "./update.js";
import { ViewState, type RankState, type WorkerState } from "./view_state.js";

/** The time without a stream after which the ranks of a View are stale: the default of the servers' cluster.ttl. */
export const staleAfterMs = 3_000;

/** How many progress intervals a stream may be silent before its View grows older: messages may be late. */
const quietIntervals = 2;

/** A worker in a View. */
export interface ViewWorker {
  name: string;
  model: string;
  /** Tokens per block; 0: unknown. */
  blockSize: number;
  /** The worker's endpoint, labels and other properties; undefined if the stream began after the worker was added. */
  added: WorkerAdded | undefined;
  /** The dp ranks that were configured or have had events, ascending. */
  ranks: ViewRank[];
}

/** A dp rank in a View. */
export interface ViewRank {
  rank: number;
  /** The number of blocks in each tier, nearest first. */
  blocks: number[];
  trust: Trust;
  reasons: DegradedReason[];
}

/**
 * The blocks of all workers according to one subscription, in plain maps: for tests and small fleets. A block takes some
 * hundred bytes in each rank, and a match takes time for each rank. Otherwise ask a server: Client.match, Matcher.
 *
 * A View never calls a match exact if the stream has given a reason for doubt. Where it knows less than a server, it gives
 * the safe answer:
 *
 *  - With several attention groups, a match is Trust.UPPER_BOUND.
 *  - If a connector keeps chunks of blocks in a tier, only whole chunks count, from the first on, and the longest prefix in
 *    one tier is the match.
 *  - A prompt with eagle must be given by tokens, or by hashes that include the next token: its last block needs a token
 *    after it.
 *  - A worker whose WorkerAdded the stream did not have, as with start "latest", is degraded until its engine clears its
 *    cache (JOINED_LATE), and then Trust.UPPER_BOUND until it restarts.
 *  - Blocks of another size than the worker's newest end a prefix.
 *  - Pools are never a match.
 */
export class View {
  #state = new ViewState();
  /** The state of the snapshot that is being received. */
  #pending: ViewState | undefined;
  #position: Position | undefined;
  #isReady = false;
  #isLive = false;
  /** When the state was last known to be up to date, and how long it is after that without another message: 0 without a stream, or behind it. */
  #knownAt = Infinity;
  #quietMs = 0;
  /** How long the stream may be silent. */
  #silenceMs = Infinity;
  /** The newest entry at a message that was before it, which the state must reach, and when that message came; undefined: none. */
  #goal: { seq: bigint; at: number } | undefined;
  readonly #now: () => number;

  /** Makes an empty View. now is the clock, in milliseconds. */
  constructor({ now = () => performance.now() }: { now?: () => number } = {}) {
    this.#now = now;
  }

  /** Whether a snapshot has been applied, or the subscription has started without one. */
  get ready(): boolean {
    return this.#isReady;
  }

  /** Whether there is a stream. Without one, the View becomes outdated. */
  get live(): boolean {
    return this.#isLive;
  }

  /** The last position applied. */
  get position(): Position | undefined {
    return this.#position;
  }

  /**
   * Applies all updates of a subscription, until it ends. It throws the error that ended it. Afterwards there is no stream.
   */
  async follow(updates: AsyncIterable<Update>): Promise<void> {
    try {
      for await (const u of updates) {
        this.apply(u);
      }
    } finally {
      this.#end();
    }
  }

  /**
   * Applies the next update of a subscription. The caller must apply all updates of one subscription. Until a snapshot is
   * complete, the state before it is used.
   */
  apply(u: Update): void {
    if (u.kind === "interruption") {
      this.#end();
      if (u.error instanceof KvcastError && u.error.reason === "OUTDATED") {
        this.#outdate({ atOnce: true }); // what the server has sent was old already
      }
      return;
    }
    const { message: m } = u;
    if (m.accepted !== undefined) {
      this.#silenceMs = (quietIntervals * Number(m.accepted.progressIntervalNano)) / 1e6 || Infinity;
    } else if (m.snapshotBegin !== undefined) {
      this.#pending = new ViewState();
      this.#outdate(); // the stream does not continue the state any more
    } else if (m.snapshotEnd !== undefined) {
      this.#state = this.#pending ?? new ViewState();
      this.#pending = undefined;
    } else {
      this.#applyContents(u);
    }
    this.#isLive = true;
    if (u.position !== undefined) {
      this.#heard(u.message, u.position.seq);
      this.#isReady = true;
      this.#position = u.position;
    }
  }

  /** Records when the state was up to date, at a message with a position. */
  #heard(m: SubscribeResponse, seq: bigint): void {
    const now = this.#now();
    const newest = m.accepted?.newestSeq ?? m.newestSeq;
    if (m.accepted !== undefined || m.snapshotEnd !== undefined) {
      this.#goal = undefined;
    }
    if (newest <= seq && (this.#goal?.seq ?? 0n) <= seq) { // earlier servers say what is newest in accepted alone
      this.#knownAt = now;
      this.#quietMs = this.#silenceMs;
      this.#goal = undefined;
      return;
    }
    if (this.#goal === undefined) {
      this.#outdate(); // it is behind from now on
    } else if (this.#goal.seq <= seq) {
      this.#knownAt = this.#goal.at;
      this.#quietMs = 0;
    } else {
      return;
    }
    this.#goal = { seq: newest, at: now };
  }

  /** Records that the state is not up to date any more. */
  #outdate({ atOnce = false } = {}): void {
    this.#quietMs = 0;
    if (atOnce || this.#knownAt === Infinity) {
      this.#knownAt = this.#now() - 2 * staleAfterMs;
    }
  }

  #applyContents({ message: m }: MessageUpdate): void {
    const state = this.#pending ?? this.#state;
    if (this.#pending !== undefined) {
      if (m.snapshotWorker !== undefined) {
        state.applySnapshotWorker(m.snapshotWorker);
      }
      m.snapshotBlocks.forEach((b) => state.applySnapshotBlocks(b));
    }
    m.entries.forEach((e) => state.applyEntry(e));
  }

  #end(): void {
    this.#pending = undefined; // the next stream starts another snapshot
    this.#outdate();
    this.#isLive = false;
  }

  /** The time since the state was known to be up to date; 0: it is. */
  #ageMs(): number {
    const ageMs = this.#now() - this.#knownAt;
    return ageMs > this.#quietMs ? ageMs : 0;
  }

  /**
   * Returns the dp ranks that hold at least the first block of a prompt, by the length of the prefix, then by its length in
   * device memory, both descending, then by worker and rank.
   *
   * Blocks are matched by the contents of the block and of all blocks before it, or by block hash. Blocks with unknown
   * content are matched by block hash only. A prefix ends at the first missing block, even if later ones are held.
   */
  match(prompt: Prompt): Match[] {
    const ageMs = this.#ageMs();
    const bySize = new Map<number, bigint[]>();
    const found: Match[] = [];
    for (const w of this.#state.workers.values()) {
      const isOther = (prompt.model && prompt.model !== w.model) || (prompt.blockSize && prompt.blockSize !== w.blockSize);
      if (isOther || w.added?.pool) {
        continue;
      }
      let hashes = prompt.tokensHashes ?? prompt.blockHashes ?? bySize.get(w.blockSize);
      if (hashes === undefined) {
        bySize.set(w.blockSize, (hashes = hashesOf(prompt, w.blockSize)));
      }
      const isByHash = prompt.tokensHashes === undefined && prompt.blockHashes !== undefined;
      for (const [number, rank] of w.ranks) {
        const prefix = isByHash ? rank.blocks.matchHashes(hashes, w.blockSize) : rank.blocks.match(hashes, w.blockSize);
        cutToChunks(prefix, rank.doubt.chunks, w.blockSize);
        if (prefix.blocks > 0) {
          found.push(matchOf(w, number, rank, prefix, ageMs));
        }
      }
    }
    return found.sort(compareMatches);
  }

  /** Returns all workers, by name. */
  workers(): ViewWorker[] {
    const ageMs = this.#ageMs();
    const all = [...this.#state.workers.values()].map((w) => ({
      name: w.name, model: w.model, blockSize: w.blockSize, added: w.added,
      ranks: [...w.ranks].sort(([a], [b]) => a - b).map(([number, r]) => {
        const reasons = withAge(r.doubt.reasons(), ageMs);
        return { rank: number, blocks: [...r.blocks.counts], trust: r.doubt.trust(reasons), reasons };
      }),
    }));
    return all.sort((a, b) => compareText(a.name, b.name));
  }
}

/** Adds to reasons of the stream that the state is not that of a stream, if it has not been for long. */
function withAge(reasons: DegradedReason[], ageMs: number): DegradedReason[] {
  return ageMs > staleAfterMs ? [...new Set([...reasons, DegradedReason.STALE])].sort((a, b) => a - b) : reasons;
}

function matchOf(w: WorkerState, rank: number, state: RankState, prefix: Prefix, ageMs: number): Match {
  const reasons = withAge(state.doubt.reasons(), ageMs);
  const tiers: TierPrefix[] = [];
  prefix.tiers.forEach((blocks, i) => {
    if (blocks > 0) {
      const tier = (i + 1) as Tier;
      const ofTier = withAge(state.doubt.reasons(tier), ageMs);
      tiers.push({ tier, blocks, tokens: blocks * w.blockSize, trust: state.doubt.trust(ofTier), reasons: ofTier });
    }
  });
  return {
    worker: w.name, model: w.model, endpoint: w.added?.endpoint ?? "", rank, blocks: prefix.blocks, tokens: prefix.blocks * w.blockSize,
    expectedBlocks: 0, expectedTokens: 0, tiers, trust: state.doubt.trust(reasons), reasons, downMs: 0, ageMs,
    blockHashes: [], fetchEndpoint: "", pools: [],
  };
}

/**
 * Cuts a prefix to whole chunks in the tiers of connectors. A connector looks a prompt up from its beginning, so that the
 * prefix in its tier does not continue that in another one: the longest one is left.
 */
function cutToChunks(prefix: Prefix, chunks: readonly number[], size: number): void {
  if (chunks.every((tokens) => tokens === 0)) {
    return;
  }
  chunks.forEach((tokens, i) => {
    if (tokens > size && size > 0) {
      const whole = Math.floor((prefix.tiers[i]! * size) / tokens);
      prefix.tiers[i] = Math.floor((whole * tokens) / size);
    }
  });
  prefix.blocks = Math.max(...prefix.tiers);
}

function compareMatches(a: Match, b: Match): number {
  return b.blocks - a.blocks || deviceBlocks(b) - deviceBlocks(a) || compareText(a.worker, b.worker) || a.rank - b.rank;
}

function deviceBlocks(m: Match): number {
  return m.tiers[0]?.tier === 1 ? m.tiers[0].blocks : 0;
}

function compareText(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}
