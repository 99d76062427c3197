import { hash64 } from "./xxh3.js";

/** The base of the seeds of tokens hashes. */
const baseSeed = 1337n;
const mask64 = (1n << 64n) - 1n;

/** What tokens hashes depend on beside the tokens. */
export interface HashOptions {
  /** The name of the LoRA adapter, and the cache salt; empty: none. */
  lora?: string | undefined;
  salt?: string | undefined;
  /** Whether the hash of a block includes the next token, as those of SGLang engines with EAGLE decoding. */
  eagle?: boolean | undefined;
}

/** Returns the tokens hashes of a prompt's whole blocks, as Stored.tokens_hashes of the contract describes. */
export function tokensHashes(tokens: readonly number[] | Uint32Array, blockSize: number, options: HashOptions = {}): bigint[] {
  const hashes: bigint[] = [];
  if (!(blockSize > 0)) {
    return hashes;
  }
  const window = options.eagle ? blockSize + 1 : blockSize;
  const bytes = new Uint8Array(4 * tokens.length);
  const view = new DataView(bytes.buffer);
  for (let i = 0; i < tokens.length; i++) {
    view.setUint32(4 * i, tokens[i]!, true);
  }
  const seed = seedOf(options.lora, options.salt);
  for (let start = 0; start + window <= tokens.length; start += blockSize) {
    hashes.push(hash64(bytes.subarray(4 * start, 4 * (start + window)), seed));
  }
  return hashes;
}

function seedOf(lora: string | undefined, salt: string | undefined): bigint {
  let seed = baseSeed;
  if (lora) {
    seed += hash64(new TextEncoder().encode(lora), 0n);
  }
  if (salt) {
    seed += hash64(new TextEncoder().encode(salt), 1n);
  }
  return seed & mask64;
}
