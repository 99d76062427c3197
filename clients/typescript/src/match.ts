import { create } from "@bufbuild/protobuf";
import { ConfigError } from "./errors.js";
import type { Tier } from "./gen/kvcast/v1/event_pb.js";
import {
  MatchPrefixRequestSchema, type MatchPrefixRequest, type MatchPrefixResponse, type PrefixMatch,
} from "./gen/kvcast/v1/match_pb.js";
import { Trust, type DegradedReason } from "./gen/kvcast/v1/worker_pb.js";
import { positionFrom, positionMessage, toPosition, type Position } from "./position.js";
import { promptMessage, type Prompt } from "./prompt.js";

/** Asks a server which dp ranks hold prefixes of prompts. */
export interface MatchRequest {
  /** The model whose workers are matched; undefined: that of the first prompt. All prompts have the same one. */
  model?: string | undefined;
  /** 1 to 64 prompts. */
  prompts: readonly Prompt[];
  /** Names of the workers to match; empty: all. */
  workers?: readonly string[] | undefined;
  /** The maximum number of matches for each prompt; 0: all. */
  limit?: number | undefined;
  /** The position that the answer must include: the server waits until it has applied it. */
  after?: Position | string | undefined;
  /** The longest time to wait for the position, at most 10,000; 0: 1,000. */
  maxWaitMs?: number | undefined;
  /** The maximum number of Match.blockHashes of each match; 0: none. A server refuses it unless it keeps them. */
  maxBlockHashes?: number | undefined;
}

/** A server's answer to a MatchRequest. */
export interface MatchResult {
  /** The position at which the answer is exact. */
  position: Position;
  /** The matches of each prompt of the request, best first. */
  matches: Match[][];
}

/** The longest prefix of a prompt that one dp rank of a worker holds. */
export interface Match {
  worker: string;
  model: string;
  /** The configured address for requests. */
  endpoint: string;
  rank: number;
  /** Blocks in the longest prefix. Each is held in at least one tier. */
  blocks: number;
  /** Tokens in the prefix; 0 if the block size is unknown. With several attention groups it may end within a block. */
  tokens: number;
  /**
   * Blocks in the prefix that the rank is expected to hold soon, because prompts were routed to it, if they are more
   * than blocks; else 0. Nothing else depends on it, and only a server knows it.
   */
  expectedBlocks: number;
  expectedTokens: number;
  /** The longest prefix in each tier that holds the first block, nearest first. */
  tiers: TierPrefix[];
  /** How far the prefix can be trusted, in the tier that can be trusted least. */
  trust: Trust;
  /** With Trust.DEGRADED, why; ascending. */
  reasons: DegradedReason[];
  /** How long a source of the rank has had no connection; 0: each has one. Only a server knows it. */
  downMs: number;
  /** The time since the rank was known to be up to date with its engine; of a View, without a stream. */
  ageMs: number;
  /** The engine's own hashes of the first blocks, at most MatchRequest.maxBlockHashes. A View has none. */
  blockHashes: bigint[];
  /** The address from which other engines can fetch the blocks; empty if it is not known. */
  fetchEndpoint: string;
  /** The longest prefixes in the pools from which the worker can load blocks. A View has none. */
  pools: PoolPrefix[];
}

/** The longest prefix that is held in one tier. */
export interface TierPrefix {
  tier: Tier;
  blocks: number;
  tokens: number;
  trust: Trust;
  /** With Trust.DEGRADED, why. Empty in a server's answer if all tiers have the reasons of the match. */
  reasons: DegradedReason[];
  /** The attention group because of which the prefix is not longer, if one is. */
  endedByGroup?: number | undefined;
}

/** The longest prefix that a pool holds: a store from which several workers load blocks. */
export interface PoolPrefix {
  pool: string;
  tokens: number;
  blocks: number;
  trust: Trust;
  reasons: DegradedReason[];
}

/** Returns milliseconds as the nanoseconds of a message. */
export function nanoseconds(ms: number | undefined): bigint {
  return BigInt(Math.round(Math.max(ms ?? 0, 0) * 1e6));
}

/** Returns a request as a message. */
export function matchRequestMessage(r: MatchRequest): MatchPrefixRequest {
  const model = r.model ?? r.prompts[0]?.model ?? "";
  r.prompts.forEach((p, i) => {
    if ((p.model ?? model) !== model) {
      throw new ConfigError(`prompts[${i}].model`, `is ${JSON.stringify(p.model)}: want ${JSON.stringify(model)}, the model of the request`);
    }
  });
  const message = create(MatchPrefixRequestSchema, {
    model, prompts: r.prompts.map(promptMessage), workers: [...(r.workers ?? [])], limit: r.limit ?? 0,
    maxWaitNano: nanoseconds(r.maxWaitMs), maxBlockHashes: r.maxBlockHashes ?? 0,
  });
  if (r.after !== undefined) {
    message.after = positionMessage(toPosition(r.after));
  }
  return message;
}

/** Returns the result that an answer to a request for a model has. */
export function matchResult(model: string, response: MatchPrefixResponse | undefined): MatchResult {
  return {
    position: positionFrom(response?.position),
    matches: (response?.prompts ?? []).map((p) => p.matches.map((m) => matchFrom(model, m))),
  };
}

function matchFrom(model: string, m: PrefixMatch): Match {
  return {
    worker: m.worker, model: model || m.model, endpoint: m.endpoint, rank: m.dpRank, blocks: m.blocks, tokens: m.tokens,
    expectedBlocks: m.expectedBlocks, expectedTokens: m.expectedTokens,
    tiers: m.tiers.map((t) => ({
      tier: t.tier, blocks: t.blocks, tokens: t.tokens, trust: t.trust === Trust.UNSPECIFIED ? m.trust : t.trust, reasons: t.reasons,
      ...(t.endedByGroup === undefined ? {} : { endedByGroup: t.endedByGroup }),
    })),
    trust: m.trust, reasons: m.reasons, downMs: Number(m.downNano) / 1e6, ageMs: Number(m.ageNano) / 1e6,
    blockHashes: m.blockHashes, fetchEndpoint: m.fetchEndpoint,
    pools: m.pools.map((p) => ({ pool: p.pool, tokens: p.tokens, blocks: p.blocks, trust: p.trust, reasons: p.reasons })),
  };
}
