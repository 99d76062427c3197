import type { Stored } from "./gen/kvcast/v1/event_pb.js";

/** The number of tiers of the contract. Tier t has the bit 1 << (t - 1) in sets of tiers. */
export const numTiers = 4;

/** Returns the bit of a tier; 0 if this version does not know the tier. */
export function tierBit(tier: number): number {
  return tier >= 1 && tier <= numTiers ? 1 << (tier - 1) : 0;
}

/** Device memory, the first tier. */
const deviceBit = 1;

/** A block that at least one tier holds. */
interface Block {
  readonly hash: bigint;
  /** The block that it continues; undefined if it starts a prompt. */
  parent: bigint | undefined;
  /** Its tokens hash; undefined if its content is unknown. */
  tokens: bigint | undefined;
  /** Tokens in the block; 0 if the size is unknown. */
  size: number;
  /** The tiers that hold it, as bits. */
  tiers: number;
}

/** The longest prefix of a prompt that a rank holds: in all tiers together, and in each, by tier minus 1. */
export interface Prefix {
  blocks: number;
  tiers: number[];
}

/** Blocks by tokens hash, of the blocks that continue one block. Several may have the same content. */
type Children = Map<bigint, Block[]>;

/**
 * The blocks of a dp rank.
 *
 * A block is found after its parent, by its tokens hash. The parent may be absent: as soon as it is stored again, its
 * children continue it.
 */
export class RankBlocks {
  readonly #blocks = new Map<bigint, Block>();
  readonly #roots: Children = new Map();
  readonly #children = new Map<bigint, Children>();
  /** The number of blocks in each tier, by tier minus 1. */
  readonly counts: number[] = new Array<number>(numTiers).fill(0);

  /** Adds a chain of blocks in a tier. */
  store(tier: number, s: Stored): void {
    const bit = tierBit(tier);
    let parent = s.parentHash;
    s.blockHashes.forEach((hash, i) => {
      this.#storeBlock(bit, tier, hash, parent, s.tokensHashes[i], s.blockSize);
      parent = hash;
    });
  }

  /** Removes blocks from a tier. */
  remove(tier: number, hashes: readonly bigint[]): void {
    const bit = tierBit(tier);
    for (const hash of hashes) {
      const b = this.#blocks.get(hash);
      if (b === undefined || (b.tiers & bit) === 0) {
        continue;
      }
      b.tiers &= ~bit;
      this.counts[tier - 1]!--;
      if (b.tiers === 0) {
        this.#unlink(b);
        this.#blocks.delete(hash);
      }
    }
  }

  /** Empties a tier. */
  clearTier(tier: number): void {
    this.remove(tier, [...this.#blocks.keys()]);
  }

  /** Empties all tiers. */
  clear(): void {
    this.#blocks.clear();
    this.#roots.clear();
    this.#children.clear();
    this.counts.fill(0);
  }

  /**
   * Returns the longest prefix of a prompt that is given by tokens hashes. Blocks of another size than the worker's end
   * it: their number says nothing of tokens then.
   */
  match(hashes: readonly bigint[], size: number): Prefix {
    let before: (bigint | undefined)[] = [undefined];
    return this.#longest(hashes, (tokens) => {
      const found: Block[] = [];
      for (const parent of before) {
        found.push(...(this.#childrenOf(parent)?.get(tokens) ?? []));
      }
      before = found.map((b) => b.hash);
      return found;
    }, size);
  }

  /** Returns the longest prefix of a prompt that is given by the engine's own block hashes. */
  matchHashes(hashes: readonly bigint[], size: number): Prefix {
    return this.#longest(hashes, (hash) => {
      const b = this.#blocks.get(hash);
      return b === undefined ? [] : [b];
    }, size);
  }

  /** Returns the prefix of those blocks that a function finds, one after the other. */
  #longest(hashes: readonly bigint[], find: (hash: bigint) => Block[], size: number): Prefix {
    const prefix: Prefix = { blocks: 0, tiers: new Array<number>(numTiers).fill(0) };
    let inTiers = ~0; // the tiers that hold all blocks so far
    for (const hash of hashes) {
      let tiers = 0;
      for (const b of find(hash)) {
        if (b.size === 0 || size === 0 || b.size === size) {
          tiers |= b.tiers;
        }
      }
      if (tiers === 0) {
        break;
      }
      prefix.blocks++;
      inTiers &= tiers;
      for (let tier = 1; tier <= numTiers; tier++) {
        if (inTiers & tierBit(tier)) {
          prefix.tiers[tier - 1]!++;
        }
      }
    }
    return prefix;
  }

  #storeBlock(bit: number, tier: number, hash: bigint, parent: bigint | undefined, tokens: bigint | undefined, size: number): void {
    let b = this.#blocks.get(hash);
    if (b === undefined) {
      b = { hash, parent, tokens, size, tiers: 0 };
      this.#blocks.set(hash, b);
      this.#link(b);
    } else if (tokens !== undefined && (bit === deviceBit || ((b.tiers & deviceBit) === 0 && b.tokens === undefined))) { // else a copy, which does not change the content
      b.size = size;
      if (b.tokens !== tokens || b.parent !== parent) {
        this.#move(b, parent, tokens);
      }
    }
    if ((b.tiers & bit) === 0) {
      b.tiers |= bit;
      this.counts[tier - 1]!++;
    }
  }

  /** Gives a block another content or parent, unless a prompt finds it now and would not find it then. */
  #move(b: Block, parent: bigint | undefined, tokens: bigint): void {
    if (b.tokens !== undefined && !this.#isReachable(parent) && this.#isReachable(b.hash)) {
      return;
    }
    this.#unlink(b);
    b.parent = parent;
    b.tokens = tokens;
    this.#link(b);
  }

  /** Reports whether a prompt can find a block; undefined: the begin of all prompts. */
  #isReachable(hash: bigint | undefined): boolean {
    let at = hash;
    for (let steps = 0; at !== undefined && steps <= this.#blocks.size; steps++) { // more steps are a cycle
      const b = this.#blocks.get(at);
      if (b === undefined || b.tokens === undefined) {
        return false;
      }
      at = b.parent;
    }
    return at === undefined;
  }

  #childrenOf(parent: bigint | undefined): Children | undefined {
    return parent === undefined ? this.#roots : this.#children.get(parent);
  }

  #link(b: Block): void {
    if (b.tokens === undefined) {
      return;
    }
    let children = this.#childrenOf(b.parent);
    if (children === undefined) {
      children = new Map();
      this.#children.set(b.parent!, children);
    }
    const same = children.get(b.tokens);
    if (same === undefined) {
      children.set(b.tokens, [b]);
    } else {
      same.push(b);
    }
  }

  #unlink(b: Block): void {
    const children = this.#childrenOf(b.parent);
    if (b.tokens === undefined || children === undefined) {
      return;
    }
    const left = (children.get(b.tokens) ?? []).filter((other) => other !== b);
    if (left.length > 0) {
      children.set(b.tokens, left);
      return;
    }
    children.delete(b.tokens);
    if (children.size === 0 && b.parent !== undefined) {
      this.#children.delete(b.parent);
    }
  }
}
