import { create } from "@bufbuild/protobuf";
import { RoutedPromptSchema, type RoutedPrompt } from "./gen/kvcast/v1/match_pb.js";
import { nanoseconds } from "./match.js";
import { promptMessage, type Prompt } from "./prompt.js";

/** The number of prompts of a call. */
export const maxRouted = 64;

/** A prompt that was sent to a dp rank, which is expected to store its whole blocks soon. */
export interface Routed {
  /** Where the prompt is computed. The rank is 0 by default. */
  worker: string;
  rank?: number | undefined;
  /** The prompt, by tokens or tokensHashes. Its model is that of the worker. */
  prompt: Prompt;
  /** How long the blocks are expected, at most 60,000; 0: 2,000. */
  ttlMs?: number | undefined;
}

/** Returns a routed prompt as a message. */
export function routedMessage(r: Routed): RoutedPrompt {
  return create(RoutedPromptSchema, {
    worker: r.worker, dpRank: r.rank ?? 0, prompt: promptMessage(r.prompt), ttlNano: nanoseconds(r.ttlMs),
  });
}
