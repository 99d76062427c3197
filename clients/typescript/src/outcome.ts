import { create } from "@bufbuild/protobuf";
import { Tier } from "./gen/kvcast/v1/event_pb.js";
import { OutcomeSchema, type Outcome as OutcomeMessage } from "./gen/kvcast/v1/match_pb.js";
import { Trust } from "./gen/kvcast/v1/worker_pb.js";
import type { Match } from "./match.js";
import { positionMessage, toPosition, type Position } from "./position.js";

/** The number of outcomes of a call. */
export const maxOutcomes = 1000;

/** What an engine has reused of a prompt, and what was predicted. */
export interface Outcome {
  /** Where the prompt was computed. The rank is 0 by default. */
  worker: string;
  rank?: number | undefined;
  /** The position of the prediction: MatchResult.position, or View.position before View.match. */
  position: Position | string;
  /** The number of tokens that the engine was predicted to reuse. */
  predicted: number;
  /** The number of tokens that it has reused, as in usage.prompt_tokens_details.cached_tokens. */
  reused: number;
  /** The trust of the prediction. Unspecified: the rank's trust when the server gets the report. */
  trust?: Trust | undefined;
}

/**
 * Returns the outcome of a match of a prompt without its last token, which engines compute always. The prediction is that
 * the engine reuses what its device memory holds.
 */
export function outcomeOf(match: Match, position: Position, reused: number): Outcome {
  const device = match.tiers.find((t) => t.tier === Tier.DEVICE);
  return {
    worker: match.worker, rank: match.rank, position, predicted: device?.tokens ?? 0, reused, trust: device?.trust ?? match.trust,
  };
}

/** Returns an outcome as a message. */
export function outcomeMessage(o: Outcome): OutcomeMessage {
  return create(OutcomeSchema, {
    worker: o.worker, dpRank: o.rank ?? 0, position: positionMessage(toPosition(o.position)),
    predictedTokens: BigInt(Math.max(Math.trunc(o.predicted), 0)), cachedTokens: BigInt(Math.max(Math.trunc(o.reused), 0)),
    trust: o.trust ?? Trust.UNSPECIFIED,
  });
}
