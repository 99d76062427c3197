import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Cleared_Reason, DegradedReason, Gap_Reason, Tier, Trust, View } from "../src/index.js";
import { added, cleared, Feed, gap, groups, groupsOmitted, removed, resolved, stored, workerRemoved, type Event } from "./view_updates.js";

/** Blocks 1 to 15 are a tree: block n continues n / 2. Blocks n + 100 have the same contents under other hashes. */
const parentOf = (hash: bigint): bigint | undefined => {
  const base = hash % 100n;
  return base === 1n ? undefined : hash - base + base / 2n;
};
const tokensOf = (hash: bigint): bigint => 500n + (hash % 100n) % 3n;

type Step =
  | { kind: "store"; from: bigint; length: number; tier: Tier }
  | { kind: "remove"; hashes: bigint[]; tier: Tier }
  | { kind: "clear"; reason: Cleared_Reason; tiers: Tier[] }
  | { kind: "gap"; reason: Gap_Reason; tiers: Tier[] }
  | { kind: "resolve" } | { kind: "groupsOmitted" } | { kind: "groups" } | { kind: "restartWorker" };

/** Returns the chain of blocks that ends at a block, at most length of them. */
function chainTo(hash: bigint, length: number): bigint[] {
  const chain: bigint[] = [];
  for (let at: bigint | undefined = hash; at !== undefined && chain.length < length; at = parentOf(at)) {
    chain.unshift(at);
  }
  return chain;
}

function eventsOf(s: Step): Event[] {
  switch (s.kind) {
    case "store": {
      const chain = chainTo(s.from, s.length);
      const parent = parentOf(chain[0]!);
      return [stored(chain, chain.map(tokensOf), { tier: s.tier, ...(parent === undefined ? {} : { parent }) })];
    }
    case "remove":
      return [removed(s.hashes, s.tier)];
    case "clear":
      return [cleared(s.reason, s.tiers)];
    case "gap":
      return [gap(s.reason, s.tiers)];
    case "resolve":
      return [resolved([Gap_Reason.REPLAY_UNPROVED])];
    case "groupsOmitted":
      return [groupsOmitted];
    case "groups":
      return [groups];
    case "restartWorker":
      return [workerRemoved, added()];
  }
}

const allTiers = [Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL];
const reasonOf = new Map([
  [Gap_Reason.REPLAY_UNPROVED, DegradedReason.REPLAY_UNPROVED], [Gap_Reason.JOINED_LATE, DegradedReason.JOINED_LATE],
  [Gap_Reason.REPLAY_FORGOTTEN, DegradedReason.GAP], [Gap_Reason.AMBIGUOUS_PUBLISHER, DegradedReason.CONFLICT],
]);

/** What the steps say, each time from the first one: what a tier holds, why it is in doubt, and whether there are groups. */
function naive(steps: Step[]): { holds: (hash: bigint, tier: Tier) => boolean; reasons: Set<DegradedReason>; hasGroups: boolean } {
  const holds = (hash: bigint, tier: Tier): boolean => {
    let is = false;
    for (const s of steps) {
      if (s.kind === "store" && s.tier === tier && chainTo(s.from, s.length).includes(hash)) {
        is = true;
      } else if (s.kind === "restartWorker" || (s.kind === "remove" && s.tier === tier && s.hashes.includes(hash)) ||
        (s.kind === "clear" && (s.tiers.length === 0 || s.tiers.includes(tier)))) {
        is = false;
      }
    }
    return is;
  };
  const reasons = new Set<DegradedReason>();
  for (const tier of allTiers) {
    let ofTier = new Set<DegradedReason>();
    for (const s of steps) {
      const isNamed = (s.kind === "clear" || s.kind === "gap") && (s.tiers.length === 0 || s.tiers.includes(tier));
      if (s.kind === "restartWorker" || (s.kind === "clear" && isNamed)) {
        ofTier = new Set(s.kind === "clear" && s.reason === Cleared_Reason.UNREPAIRED_GAP ? [DegradedReason.GAP] : []);
      } else if (s.kind === "gap" && isNamed) {
        ofTier.add(reasonOf.get(s.reason)!);
      } else if (s.kind === "resolve") {
        ofTier.delete(DegradedReason.REPLAY_UNPROVED);
      }
    }
    ofTier.forEach((r) => reasons.add(r));
  }
  let hasGroups = false;
  for (const s of steps) {
    if (s.kind === "groups" || s.kind === "groupsOmitted") {
      hasGroups = true;
    } else if (s.kind === "restartWorker" || (s.kind === "clear" && s.reason === Cleared_Reason.ENGINE_RESTARTED && s.tiers.length === 0)) {
      hasGroups = false;
    }
  }
  return { holds, reasons, hasGroups };
}

const hashes = [...Array(15).keys()].flatMap((n) => [BigInt(n + 1), BigInt(n + 101)]);

/** The blocks of a prefix that some tiers hold: of each, a block with the content that continues a held one. */
function prefixIn(tiers: Tier[], prompt: bigint[], holds: (hash: bigint, tier: Tier) => boolean): number {
  let before: (bigint | undefined)[] = [undefined];
  let inTiers = 0;
  for (const tokens of prompt) {
    const next = hashes.filter((h) => tokensOf(h) === tokens && before.includes(parentOf(h)) && allTiers.some((t) => holds(h, t)));
    if (!next.some((h) => tiers.some((t) => holds(h, t)))) {
      break;
    }
    inTiers++;
    before = next;
  }
  return inTiers;
}

const tier = fc.constantFrom(...allTiers);
const tiers = fc.uniqueArray(tier, { maxLength: 2 });
const hash = fc.constantFrom(...hashes);
const step: fc.Arbitrary<Step> = fc.oneof(
  { weight: 8, arbitrary: fc.record({ kind: fc.constant("store" as const), from: hash, length: fc.integer({ min: 1, max: 4 }), tier }) },
  { weight: 4, arbitrary: fc.record({ kind: fc.constant("remove" as const), hashes: fc.uniqueArray(hash, { maxLength: 6 }), tier }) },
  { weight: 1, arbitrary: fc.record({
    kind: fc.constant("clear" as const), tiers,
    reason: fc.constantFrom(Cleared_Reason.ENGINE_CLEARED, Cleared_Reason.ENGINE_RESTARTED, Cleared_Reason.UNREPAIRED_GAP),
  }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant("gap" as const), reason: fc.constantFrom(...reasonOf.keys()), tiers }) },
  { weight: 1, arbitrary: fc.constantFrom<Step>({ kind: "resolve" }, { kind: "groups" }, { kind: "groupsOmitted" }, { kind: "restartWorker" }) },
);

test("a View is what a naive model is", () => {
  fc.assert(fc.property(fc.array(step, { maxLength: 30 }), fc.array(hash, { minLength: 1, maxLength: 4 }), (steps, ends) => {
    const feed = new Feed(new View());
    feed.snapshot();
    for (const s of steps) {
      feed.events(...eventsOf(s));
    }
    const want = naive(steps);
    for (const end of ends) {
      const prompt = chainTo(end, 4).map(tokensOf);
      const blocks = prefixIn(allTiers, prompt, want.holds);
      const found = feed.view.match({ tokensHashes: prompt });
      assert.equal(found.length, blocks > 0 ? 1 : 0);
      if (blocks === 0) {
        continue;
      }
      const m = found[0]!;
      const reasons = [...want.reasons].sort((a, b) => a - b);
      assert.equal(m.blocks, blocks);
      assert.deepEqual(m.reasons, reasons);
      assert.equal(m.trust, reasons.length > 0 ? Trust.DEGRADED : want.hasGroups ? Trust.UPPER_BOUND : Trust.EXACT);
      const byTier = allTiers.map((t) => [t, prefixIn([t], prompt, want.holds)] as const).filter(([, n]) => n > 0);
      assert.deepEqual(m.tiers.map((t) => [t.tier, t.blocks]), byTier);
    }
  }), { numRuns: Number(process.env["KVCAST_TEST_RUNS"] ?? 500) });
});

test("a View that begins with a snapshot of the blocks matches the same", () => {
  fc.assert(fc.property(fc.array(step, { maxLength: 20 }), (steps) => {
    const { holds } = naive(steps);
    const feed = new Feed(new View());
    feed.snapshot(hashes.flatMap((h) => allTiers.filter((t) => holds(h, t)).map((t) => {
      const parent = parentOf(h);
      return stored([h], [tokensOf(h)], { tier: t, ...(parent === undefined ? {} : { parent }) });
    })));
    const live = new Feed(new View());
    live.snapshot();
    steps.forEach((s) => live.events(...eventsOf(s)));
    for (const end of hashes) {
      const prompt = { tokensHashes: chainTo(end, 4).map(tokensOf) };
      assert.deepEqual(feed.view.match(prompt).map((m) => m.blocks), live.view.match(prompt).map((m) => m.blocks));
    }
  }), { numRuns: 100 });
});
