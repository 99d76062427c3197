import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { xxhash3 } from "hash-wasm";
import { tokensHashes } from "../src/index.js";
import { hash64 } from "../src/xxh3.js";

/** The same hash by another implementation. */
async function other(bytes: Uint8Array, seed: bigint): Promise<bigint> {
  return BigInt(`0x${await xxhash3(bytes, Number(seed & 0xffffffffn), Number(seed >> 32n))}`);
}

function bytesOf(length: number): Uint8Array {
  return Uint8Array.from({ length }, (_, i) => (i * 131 + length * 7) % 256);
}

test("hashes of bytes of each length", async () => {
  const lengths = [...Array(530).keys(), 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 5000];
  for (const length of lengths) {
    for (const seed of [0n, 1n, 1337n, 0x9e3779b185ebca87n, 0xffffffffffffffffn]) {
      const bytes = bytesOf(length);
      assert.equal(hash64(bytes, seed), await other(bytes, seed), `${length} bytes, seed ${seed}`);
    }
  }
});

test("hashes of any bytes", async () => {
  await fc.assert(fc.asyncProperty(fc.uint8Array({ maxLength: 1200 }), fc.bigInt({ min: 0n, max: (1n << 64n) - 1n }), async (bytes, seed) => {
    assert.equal(hash64(bytes, seed), await other(bytes, seed));
  }), { numRuns: 500 });
});

test("known hashes", () => {
  // Of the reference implementation, XXH3_64bits_withSeed.
  const known: [string, bigint, bigint][] = [
    ["", 0n, 0x2d06800538d394c2n],
    ["a", 0n, 0xe6c632b61e964e1fn],
    ["abc", 0n, 0x78af5f94892f3950n],
  ];
  for (const [text, seed, want] of known) {
    assert.equal(hash64(new TextEncoder().encode(text), seed), want, text);
  }
});

test("tokens hashes", () => {
  const tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];
  assert.deepEqual(tokensHashes(tokens, 4), [14643705804678351452n, 16777012769546811212n]);
  assert.deepEqual(tokensHashes(Uint32Array.from(tokens), 4), tokensHashes(tokens, 4));
  assert.deepEqual(tokensHashes(tokens, 4, { lora: "ada", salt: "salt" }), [14265800282453408960n, 10356789186970846798n]);
  assert.deepEqual(tokensHashes(tokens, 4, { lora: "", salt: "" }), tokensHashes(tokens, 4));
  assert.deepEqual(tokensHashes(tokens, 0), []);
  assert.deepEqual(tokensHashes([], 4), []);
  // With EAGLE, a block includes the next token, and is whole only with it.
  assert.deepEqual(tokensHashes(tokens.slice(0, 8), 4, { eagle: true }), tokensHashes(tokens.slice(0, 5), 5));
  assert.equal(tokensHashes(tokens, 4, { eagle: true }).length, 2);
});
