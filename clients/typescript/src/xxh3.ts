/**
 * XXH3 with 64 bits and a seed, for inputs of any length.
 *
 * Blocks of prompts are short, so the time for some hundred bytes matters. bigint is slow for that: numbers of 64 bits
 * are pairs of 32 bits, high and low, and functions leave their result in the variables hi and lo.
 */

const secretText =
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c" +
  "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364ea" +
  "c5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e";
const secretBytes = Uint8Array.from(secretText.match(/../g)!, (pair) => parseInt(pair, 16));
const secret = new DataView(secretBytes.buffer);
const secretLength = 192;

/** The result of the last function. */
let hi = 0;
let lo = 0;

/** The sum of the mixes of an input. */
let sumHi = 0;
let sumLo = 0;

/** The state for long inputs: eight pairs, high and low. */
const state = new Uint32Array(16);
const initialState = Uint32Array.of(
  0, 0xc2b2ae3d, 0x9e3779b1, 0x85ebca87, 0xc2b2ae3d, 0x27d4eb4f, 0x165667b1, 0x9e3779f9,
  0x85ebca77, 0xc2b2ae63, 0, 0x85ebca77, 0x27d4eb2f, 0x165667c5, 0, 0x9e3779b1,
);

/** Returns the XXH3-64 of bytes. The seed has 64 bits. */
export function hash64(bytes: Uint8Array, seed: bigint): bigint {
  const seedLo = Number(seed & 0xffffffffn);
  const seedHi = Number((seed >> 32n) & 0xffffffffn);
  const input = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const n = bytes.byteLength;
  if (n > 240) {
    hashLong(input, n, seedHi, seedLo);
  } else if (n > 128) {
    hash129to240(input, n, seedHi, seedLo);
  } else if (n > 16) {
    hash17to128(input, n, seedHi, seedLo);
  } else if (n > 8) {
    hash9to16(input, n, seedHi, seedLo);
  } else if (n > 3) {
    hash4to8(input, n, seedHi, seedLo);
  } else if (n > 0) {
    hash1to3(input, n, seedHi, seedLo);
  } else {
    avalancheXxh64(seedHi ^ high(secret, 56) ^ high(secret, 64), seedLo ^ low(secret, 56) ^ low(secret, 64));
  }
  return (BigInt(hi >>> 0) << 32n) | BigInt(lo >>> 0);
}

function low(v: DataView, at: number): number {
  return v.getUint32(at, true);
}

function high(v: DataView, at: number): number {
  return v.getUint32(at + 4, true);
}

/** Sets the result to a sum. */
function add(aHi: number, aLo: number, bHi: number, bLo: number): void {
  const sum = (aLo >>> 0) + (bLo >>> 0);
  lo = sum >>> 0;
  hi = (aHi + bHi + (sum > 0xffffffff ? 1 : 0)) >>> 0;
}

/** Sets the result to a difference. */
function subtract(aHi: number, aLo: number, bHi: number, bLo: number): void {
  const borrow = aLo >>> 0 < bLo >>> 0 ? 1 : 0;
  lo = (aLo - bLo) >>> 0;
  hi = (aHi - bHi - borrow) >>> 0;
}

/** Sets the result to the product of two numbers of 32 bits. */
function multiply32(a: number, b: number): void {
  const aLow = a & 0xffff;
  const aHigh = a >>> 16;
  const bLow = b & 0xffff;
  const bHigh = b >>> 16;
  const low16 = Math.imul(aLow, bLow) >>> 0;
  const cross = (Math.imul(aHigh, bLow) >>> 0) + (low16 >>> 16); // at most 49 bits
  const middle = (Math.imul(aLow, bHigh) >>> 0) + (cross % 0x10000);
  hi = (Math.imul(aHigh, bHigh) + Math.floor(cross / 0x10000) + Math.floor(middle / 0x10000)) >>> 0;
  lo = (((middle & 0xffff) << 16) | (low16 & 0xffff)) >>> 0;
}

/** Sets the result to the lower 64 bits of a product. */
function multiply64(aHi: number, aLo: number, bHi: number, bLo: number): void {
  multiply32(aLo, bLo);
  hi = (hi + Math.imul(aHi, bLo) + Math.imul(aLo, bHi)) >>> 0;
}

/** Sets the result to the XOR of the halves of a product of 128 bits. */
function foldProduct(aHi: number, aLo: number, bHi: number, bLo: number): void {
  multiply32(aLo, bLo);
  const word0 = lo;
  let carry = hi;
  multiply32(aHi, bLo);
  const crossHi = hi;
  carry += lo; // below 2^33
  multiply32(aLo, bHi);
  const word1 = carry + lo; // below 2^34
  const middle = crossHi + hi + Math.floor(word1 / 0x100000000); // below 2^34
  multiply32(aHi, bHi);
  const word2 = lo + middle;
  const word3 = hi + Math.floor(word2 / 0x100000000);
  lo = (word0 ^ (word2 >>> 0)) >>> 0;
  hi = ((word1 >>> 0) ^ (word3 >>> 0)) >>> 0;
}

/** XORs the result with itself, shifted to the right. */
function xorShift(bits: number): void {
  if (bits >= 32) {
    lo = (lo ^ (bits === 32 ? hi : hi >>> (bits - 32))) >>> 0;
  } else {
    lo = (lo ^ ((lo >>> bits) | (hi << (32 - bits)))) >>> 0;
    hi = (hi ^ (hi >>> bits)) >>> 0;
  }
}

/** The last step of XXH3, on the result. */
function avalanche(): void {
  xorShift(37);
  multiply64(hi, lo, 0x16566791, 0x9e3779f9);
  xorShift(32);
}

/** The last step of XXH64, for the shortest inputs. */
function avalancheXxh64(aHi: number, aLo: number): void {
  hi = aHi >>> 0;
  lo = aLo >>> 0;
  xorShift(33);
  multiply64(hi, lo, 0xc2b2ae3d, 0x27d4eb4f);
  xorShift(29);
  multiply64(hi, lo, 0x165667b1, 0x9e3779f9);
  xorShift(32);
}

function swap32(x: number): number {
  return ((x << 24) | ((x & 0xff00) << 8) | ((x >>> 8) & 0xff00) | (x >>> 24)) >>> 0;
}

function hash1to3(input: DataView, n: number, seedHi: number, seedLo: number): void {
  const combined = (input.getUint8(0) << 16) | (input.getUint8(n >> 1) << 24) | input.getUint8(n - 1) | (n << 8);
  add(0, low(secret, 0) ^ high(secret, 0), seedHi, seedLo);
  avalancheXxh64(hi, lo ^ combined);
}

function hash4to8(input: DataView, n: number, seedHi: number, seedLo: number): void {
  subtract(high(secret, 8) ^ high(secret, 16), low(secret, 8) ^ low(secret, 16), seedHi ^ swap32(seedLo), seedLo);
  const keyHi = (hi ^ low(input, 0)) >>> 0;
  const keyLo = (lo ^ low(input, n - 4)) >>> 0;
  // XORs the key with itself, rotated to the left by 49 and by 24 bits.
  hi = (keyHi ^ ((keyLo << 17) | (keyHi >>> 15)) ^ ((keyHi << 24) | (keyLo >>> 8))) >>> 0;
  lo = (keyLo ^ ((keyHi << 17) | (keyLo >>> 15)) ^ ((keyLo << 24) | (keyHi >>> 8))) >>> 0;
  multiply64(hi, lo, 0x9fb21c65, 0x1e98df25);
  lo = (lo ^ ((hi >>> 3) + n)) >>> 0; // the product shifted by 35 bits, and the length
  multiply64(hi, lo, 0x9fb21c65, 0x1e98df25);
  xorShift(28);
}

function hash9to16(input: DataView, n: number, seedHi: number, seedLo: number): void {
  add(high(secret, 24) ^ high(secret, 32), low(secret, 24) ^ low(secret, 32), seedHi, seedLo);
  const aHi = (high(input, 0) ^ hi) >>> 0;
  const aLo = (low(input, 0) ^ lo) >>> 0;
  subtract(high(secret, 40) ^ high(secret, 48), low(secret, 40) ^ low(secret, 48), seedHi, seedLo);
  const bHi = (high(input, n - 8) ^ hi) >>> 0;
  const bLo = (low(input, n - 8) ^ lo) >>> 0;
  foldProduct(aHi, aLo, bHi, bLo);
  add(hi, lo, bHi, bLo);
  add(hi, lo, swap32(aLo), swap32(aHi));
  add(hi, lo, 0, n);
  avalanche();
}

/** Adds the mix of 16 bytes of the input to the sum. */
function mix16(input: DataView, at: number, key: number, seedHi: number, seedLo: number): void {
  add(high(secret, key), low(secret, key), seedHi, seedLo);
  const aHi = (high(input, at) ^ hi) >>> 0;
  const aLo = (low(input, at) ^ lo) >>> 0;
  subtract(high(secret, key + 8), low(secret, key + 8), seedHi, seedLo);
  foldProduct(aHi, aLo, high(input, at + 8) ^ hi, low(input, at + 8) ^ lo);
  add(hi, lo, sumHi, sumLo);
  sumHi = hi;
  sumLo = lo;
}

/** Sets the sum to the length times the first prime. */
function beginSum(n: number): void {
  multiply64(0, n, 0x9e3779b1, 0x85ebca87);
  sumHi = hi;
  sumLo = lo;
}

function hash17to128(input: DataView, n: number, seedHi: number, seedLo: number): void {
  beginSum(n);
  for (let i = (n - 1) >> 5; i >= 0; i--) {
    mix16(input, 16 * i, 32 * i, seedHi, seedLo);
    mix16(input, n - 16 * (i + 1), 32 * i + 16, seedHi, seedLo);
  }
  hi = sumHi;
  lo = sumLo;
  avalanche();
}

function hash129to240(input: DataView, n: number, seedHi: number, seedLo: number): void {
  beginSum(n);
  for (let i = 0; i < 8; i++) {
    mix16(input, 16 * i, 16 * i, seedHi, seedLo);
  }
  hi = sumHi;
  lo = sumLo;
  avalanche();
  sumHi = hi;
  sumLo = lo;
  for (let i = 8; i < n >> 4; i++) {
    mix16(input, 16 * i, 16 * (i - 8) + 3, seedHi, seedLo);
  }
  mix16(input, n - 16, 136 - 17, seedHi, seedLo);
  hi = sumHi;
  lo = sumLo;
  avalanche();
}

/** The secret for the last seed of a long input. */
const seeded = new DataView(new ArrayBuffer(secretLength));
let seededHi = 0;
let seededLo = 0;
for (let i = 0; i < secretLength; i++) {
  seeded.setUint8(i, secretBytes[i]!);
}

function seedSecret(seedHi: number, seedLo: number): void {
  if (seededHi === seedHi && seededLo === seedLo) {
    return;
  }
  for (let at = 0; at < secretLength; at += 16) {
    add(high(secret, at), low(secret, at), seedHi, seedLo);
    seeded.setUint32(at, lo, true);
    seeded.setUint32(at + 4, hi, true);
    subtract(high(secret, at + 8), low(secret, at + 8), seedHi, seedLo);
    seeded.setUint32(at + 8, lo, true);
    seeded.setUint32(at + 12, hi, true);
  }
  seededHi = seedHi;
  seededLo = seedLo;
}

/** Adds a stripe of 64 bytes to the state. */
function accumulate(input: DataView, at: number, key: number): void {
  for (let i = 0; i < 8; i++) {
    const dataLo = low(input, at + 8 * i);
    const dataHi = high(input, at + 8 * i);
    const other = 2 * (i ^ 1);
    add(state[other]!, state[other + 1]!, dataHi, dataLo);
    state[other] = hi;
    state[other + 1] = lo;
    multiply32(dataLo ^ low(seeded, key + 8 * i), dataHi ^ high(seeded, key + 8 * i));
    add(state[2 * i]!, state[2 * i + 1]!, hi, lo);
    state[2 * i] = hi;
    state[2 * i + 1] = lo;
  }
}

/** Scrambles the state after a block of 1,024 bytes. */
function scramble(): void {
  const key = secretLength - 64;
  for (let i = 0; i < 8; i++) {
    hi = state[2 * i]!;
    lo = state[2 * i + 1]!;
    xorShift(47);
    multiply64(hi ^ high(seeded, key + 8 * i), lo ^ low(seeded, key + 8 * i), 0, 0x9e3779b1);
    state[2 * i] = hi;
    state[2 * i + 1] = lo;
  }
}

function hashLong(input: DataView, n: number, seedHi: number, seedLo: number): void {
  seedSecret(seedHi, seedLo);
  state.set(initialState);
  const stripes = Math.floor((n - 1) / 64); // the last one is not counted: it may overlap the one before
  for (let i = 0; i < stripes; i++) {
    accumulate(input, 64 * i, 8 * (i % 16));
    if (i % 16 === 15) {
      scramble();
    }
  }
  accumulate(input, n - 64, secretLength - 64 - 7);
  beginSum(n);
  for (let i = 0; i < 4; i++) {
    const key = 11 + 16 * i;
    foldProduct(
      state[4 * i]! ^ high(seeded, key), state[4 * i + 1]! ^ low(seeded, key),
      state[4 * i + 2]! ^ high(seeded, key + 8), state[4 * i + 3]! ^ low(seeded, key + 8),
    );
    add(hi, lo, sumHi, sumLo);
    sumHi = hi;
    sumLo = lo;
  }
  avalanche();
}
