import { create } from "@bufbuild/protobuf";
import { PromptSchema, type Prompt as PromptMessage } from "./gen/kvcast/v1/match_pb.js";
import { tokensHashes } from "./tokens_hashes.js";

/** A prompt, given by its tokens or by the hashes of its blocks. A View and a server match it in the same way. */
export interface Prompt {
  /**
   * Restricts a match to workers of the model; empty: all workers. It should be set if there are several models, since
   * equal token ids of different models are different text.
   */
  model?: string | undefined;
  /** The token ids. Tokens after the last whole block are ignored. */
  tokens?: readonly number[] | Uint32Array | undefined;
  /** Tokens per block: only workers with this block size match. 0: the block size of each worker. */
  blockSize?: number | undefined;
  /** The name of the LoRA adapter, and the cache salt; empty: none. */
  lora?: string | undefined;
  salt?: string | undefined;
  /** Must be set for SGLang engines with EAGLE decoding: the hash of a block then includes the next token. */
  eagle?: boolean | undefined;
  /** Must be set to find what an engine reuses, which computes the last token of a prompt always. It applies to tokens. */
  excludeLastToken?: boolean | undefined;
  /** The tokens hashes of the blocks. If set, only they, model and blockSize are used. */
  tokensHashes?: readonly bigint[] | undefined;
  /**
   * The engine's own hashes of the blocks, which only workers with the same hashes hold. If set, and tokensHashes is
   * not, only they, model and blockSize are used.
   */
  blockHashes?: readonly bigint[] | undefined;
}

/** Returns a prompt as a message, which has no model. */
export function promptMessage(p: Prompt): PromptMessage {
  const blockSize = p.blockSize ?? 0;
  if (p.tokensHashes !== undefined) {
    return create(PromptSchema, { tokensHashes: [...p.tokensHashes], blockSize });
  }
  if (p.blockHashes !== undefined) {
    return create(PromptSchema, { blockHashes: [...p.blockHashes], blockSize });
  }
  return create(PromptSchema, {
    tokenIds: Array.from(p.tokens ?? []), blockSize, loraName: p.lora ?? "", cacheSalt: p.salt ?? "", eagle: p.eagle ?? false,
    excludeLastToken: p.excludeLastToken ?? false,
  });
}

/** Returns the tokens hashes of a prompt that is given by tokens, without the blocks that excludeLastToken leaves out. */
export function hashesOf(p: Prompt, blockSize: number): bigint[] {
  const tokens = p.tokens ?? [];
  const hashes = tokensHashes(tokens, blockSize, { lora: p.lora, salt: p.salt, eagle: p.eagle });
  if (p.excludeLastToken && tokens.length > 0) {
    hashes.length = Math.min(hashes.length, Math.floor((tokens.length - 1) / blockSize));
  }
  return hashes;
}
