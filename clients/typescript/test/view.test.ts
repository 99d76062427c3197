import assert from "node:assert/strict";
import { test } from "node:test";
import { Accepted_Mode, Cleared_Reason, DegradedReason, Gap_Reason, Tier, tokensHashes, Trust, View, type Prompt } from "../src/index.js";
import {
  added, cleared, Feed, gap, groups, groupsOmitted, groupStored, interruption, removed, resolved, stored, updateOf, workerRemoved,
  type Event, type RankReport,
} from "./view_updates.js";

/** The trust of the match of worker w for a prompt of blocks 1 and 2, with its reasons, and its blocks. */
function result(v: View, prompt: Prompt = { tokensHashes: [101n, 102n] }): string {
  const [m] = v.match(prompt);
  return m === undefined ? "none" : [Trust[m.trust], ...m.reasons.map((r) => DegradedReason[r] ?? String(r)), m.blocks].join(" ");
}

const chain = stored([1n, 2n]);
const all = [chain];

const tables: [string, Event[], string][] = [
  ["a chain", all, "EXACT 2"],
  ["a gap", [...all, gap(Gap_Reason.REPLAY_FORGOTTEN)], "DEGRADED GAP 2"],
  ["a gap of a later version", [...all, gap(99 as Gap_Reason)], "DEGRADED GAP 2"],
  ["a gap without a reason", [...all, gap(Gap_Reason.UNSPECIFIED)], "DEGRADED GAP 2"],
  ["a gap of another tier", [...all, gap(Gap_Reason.TIER_NOT_CLEARED, [Tier.DISK])], "DEGRADED TIER_NOT_CLEARED 2"],
  ["a gap of a tier of a later version", [...all, gap(Gap_Reason.REPLAY_FORGOTTEN, [9 as Tier])], "EXACT 2"],
  ["two gaps", [...all, gap(Gap_Reason.TOO_MANY_BLOCKS), gap(Gap_Reason.JOINED_LATE)], "DEGRADED JOINED_LATE BLOCKS_OMITTED 2"],
  ["a gap ends with Cleared", [gap(Gap_Reason.REPLAY_FORGOTTEN), cleared(Cleared_Reason.ENGINE_CLEARED), ...all], "EXACT 2"],
  ["a gap does not end with its own Cleared", [cleared(Cleared_Reason.UNREPAIRED_GAP), ...all], "DEGRADED GAP 2"],
  ["a Cleared of another tier", [gap(Gap_Reason.RELAYED), cleared(Cleared_Reason.ENGINE_CLEARED, [Tier.DISK]), ...all], "DEGRADED RELAYED 2"],
  ["Cleared of each tier", [gap(Gap_Reason.RELAYED), cleared(Cleared_Reason.ENGINE_CLEARED, [1, 2, 3, 4]), ...all], "EXACT 2"],
  ["resolved", [...all, gap(Gap_Reason.REPLAY_UNPROVED), resolved([Gap_Reason.REPLAY_UNPROVED])], "EXACT 2"],
  ["another reason is not resolved", [...all, gap(Gap_Reason.RELAYED), resolved([Gap_Reason.RELAYED, 99 as Gap_Reason])], "DEGRADED RELAYED 2"],
  ["groups omitted", [...all, groupsOmitted], "UPPER_BOUND 2"],
  ["groups", [...all, groups], "UPPER_BOUND 2"],
  ["blocks of a group", [...all, groupStored], "UPPER_BOUND 2"],
  ["groups and a gap", [...all, groups, gap(Gap_Reason.COPIES_UNSURE)], "DEGRADED COPIES_UNSURE 2"],
  ["groups stay after another Cleared", [groupsOmitted, cleared(Cleared_Reason.ENGINE_CLEARED), ...all], "UPPER_BOUND 2"],
  ["groups stay after a Cleared of tiers", [groups, cleared(Cleared_Reason.ENGINE_RESTARTED, [Tier.DEVICE]), ...all], "UPPER_BOUND 2"],
  ["groups end with a restart", [groups, cleared(Cleared_Reason.ENGINE_RESTARTED), ...all], "EXACT 2"],
  ["groups end with the worker", [groups, workerRemoved, added(), ...all], "EXACT 2"],
  ["a gap ends with the worker", [gap(Gap_Reason.JOINED_LATE), workerRemoved, added(), ...all], "EXACT 2"],
  ["a worker that is not added again", [workerRemoved, ...all], "DEGRADED JOINED_LATE 2"],
  ["a removed worker", [...all, workerRemoved], "none"],
  ["a pool", [added({ pool: true }), ...all], "none"],
  ["an event of a later version", [...all, { eventId: 9n, dpRank: 0 }], "EXACT 2"],
  ["a tier of a later version", [stored([1n, 2n], [101n, 102n], { tier: 7 as Tier })], "none"],
  ["another content", [stored([1n, 2n], [101n, 103n])], "EXACT 1"],
  ["an unknown content", [stored([1n], []), stored([2n], [102n], { parent: 1n })], "none"],
  ["the content is known later", [stored([1n], []), stored([1n, 2n])], "EXACT 2"],
  ["an absent parent", [stored([2n], [102n], { parent: 1n })], "none"],
  ["the parent comes later", [stored([2n], [102n], { parent: 1n }), stored([1n])], "EXACT 2"],
  ["a removed parent", [...all, removed([1n])], "none"],
  ["two blocks with one content", [...all, stored([7n], [101n]), removed([1n])], "EXACT 1"],
  ["a block that is stored again after an absent parent", [...all, stored([2n], [102n], { parent: 9n, tier: Tier.DISK })], "EXACT 2"],
  ["a block that is stored again after a known parent", [stored([2n], [102n], { parent: 9n }), ...all], "EXACT 2"],
  ["a removal of an absent block", [...all, removed([9n]), removed([1n], Tier.DISK)], "EXACT 2"],
  ["a block that is its own ancestor", [stored([1n], [101n], { parent: 2n }), stored([2n], [102n], { parent: 1n })], "none"],
  ["blocks of another size end the prefix", [stored([1n]), stored([2n], [102n], { parent: 1n, size: 8 })], "none"],
  ["a connector's chunks", [stored([1n, 2n], [101n, 102n], { tier: Tier.DISK }), gap(Gap_Reason.CONNECTOR_TIER, [Tier.DISK], 8)], "DEGRADED CONNECTOR_TIER 2"],
  ["a part of a connector's chunk", [stored([1n], [101n], { tier: Tier.DISK }), gap(Gap_Reason.CONNECTOR_TIER, [Tier.DISK], 8)], "none"],
  ["a chunk that is no multiple of blocks", [stored([1n, 2n], [101n, 102n], { tier: Tier.DISK }), gap(Gap_Reason.CONNECTOR_TIER, [Tier.DISK], 10)], "none"],
  [
    "the longest prefix in one tier, with chunks",
    [stored([1n]), stored([1n, 2n], [101n, 102n], { tier: Tier.DISK }), gap(Gap_Reason.CONNECTOR_TIER, [Tier.DISK], 12)], "DEGRADED CONNECTOR_TIER 1",
  ],
  ["chunks end with Cleared", [gap(Gap_Reason.CONNECTOR_TIER, [Tier.DEVICE], 8), cleared(Cleared_Reason.ENGINE_CLEARED, [Tier.DEVICE]), stored([1n])], "EXACT 1"],
];

for (const [name, events, want] of tables) {
  test(name, () => {
    const feed = new Feed(new View());
    feed.snapshot();
    feed.events(...events);
    assert.equal(result(feed.view), want);
  });
}

const reports: [string, RankReport[], { incompleteRanks?: number[] }, string][] = [
  ["nothing", [], {}, "EXACT 2"],
  ["reasons", [{ reasons: [DegradedReason.GAP] }], { incompleteRanks: [0] }, "DEGRADED GAP 2"],
  ["reasons of a later version", [{ reasons: [40 as DegradedReason] }], {}, "DEGRADED GAP 2"],
  ["incomplete without reasons", [], { incompleteRanks: [0] }, "DEGRADED GAP 2"],
  ["incomplete with a report without reasons", [{ dpRank: 0 }], { incompleteRanks: [0] }, "DEGRADED GAP 2"],
  ["reasons of a tier", [{ reasons: [DegradedReason.GAP], tierReasons: [{ tier: Tier.DISK, reasons: [DegradedReason.GAP] }] }], {}, "DEGRADED GAP 2"],
  [
    "reasons that no tier has", [{ reasons: [DegradedReason.GAP, DegradedReason.CONFLICT], tierReasons: [{ tier: Tier.DISK, reasons: [DegradedReason.GAP] }] }],
    {}, "DEGRADED GAP CONFLICT 2",
  ],
  ["groups omitted", [{ groupsOmitted: true }], {}, "UPPER_BOUND 2"],
  ["groups", [{ groups: { unit: 4 } }], {}, "UPPER_BOUND 2"],
  ["chunks", [{ tierReasons: [{ tier: Tier.DEVICE, reasons: [DegradedReason.CONNECTOR_TIER], chunkTokens: 12 }] }], {}, "none"],
];

for (const [name, ranks, more, want] of reports) {
  test(`a snapshot reports ${name}`, () => {
    const feed = new Feed(new View());
    feed.snapshot(all, ranks, more);
    assert.equal(result(feed.view), want);
  });
}

test("the trust of each tier is its own", () => {
  const feed = new Feed(new View());
  feed.snapshot();
  feed.events(chain, stored([1n], [101n], { tier: Tier.DISK }), gap(Gap_Reason.SHARED_TIER, [Tier.DISK]));
  const [m] = feed.view.match({ tokensHashes: [101n, 102n] });
  assert.deepEqual(m!.tiers, [
    { tier: Tier.DEVICE, blocks: 2, tokens: 8, trust: Trust.EXACT, reasons: [] },
    { tier: Tier.DISK, blocks: 1, tokens: 4, trust: Trust.DEGRADED, reasons: [DegradedReason.SHARED_TIER] },
  ]);
});

test("without a stream, ranks are stale after 3 s, until there is a position again", () => {
  let now = 0;
  const feed = new Feed(new View({ now: () => now }));
  feed.snapshot(all);
  feed.view.apply(interruption());
  now = 3000;
  feed.view.apply(interruption());
  assert.equal(result(feed.view), "EXACT 2");
  now = 3001;
  assert.equal(result(feed.view), "DEGRADED STALE 2");
  assert.deepEqual(feed.view.workers()[0]!.ranks[0]!.reasons, [DegradedReason.STALE]);
  feed.view.apply(updateOf({ accepted: { epoch: "e", mode: Accepted_Mode.SNAPSHOT } }));
  assert.equal(result(feed.view), "DEGRADED STALE 2"); // its state is about to be replaced
  feed.accept();
  assert.equal(result(feed.view), "EXACT 2");
});

test("a snapshot that takes long makes the state before it stale", () => {
  let now = 0;
  const feed = new Feed(new View({ now: () => now }));
  feed.snapshot(all);
  feed.parts([stored([1n])]);
  assert.equal(result(feed.view), "EXACT 2");
  now = 3001;
  assert.equal(result(feed.view), "DEGRADED STALE 2");
  feed.end();
  assert.equal(result(feed.view), "EXACT 1");
});

test("a stream whose updates are not applied any more is no stream", () => {
  let now = 0;
  const feed = new Feed(new View({ now: () => now }));
  feed.snapshot(all);
  feed.accept(); // with an interval of 10 s
  now = 20_000;
  assert.equal(result(feed.view), "EXACT 2");
  now = 20_001;
  assert.equal(result(feed.view), "DEGRADED STALE 2");
  feed.progress();
  assert.equal(result(feed.view), "EXACT 2");
});

test("follow leaves a View without a stream", async () => {
  let now = 0;
  const view = new View({ now: () => now });
  const feed = new Feed(view);
  feed.snapshot(all);
  await view.follow((async function* () {
    yield updateOf({ progress: {} }, 5n);
  })());
  assert.equal(view.live, false);
  now = 3001;
  assert.equal(result(view), "DEGRADED STALE 2");
});

test("a snapshot that is cut is discarded", () => {
  const feed = new Feed(new View());
  feed.snapshot(all);
  feed.parts([]);
  feed.view.apply(interruption());
  feed.accept();
  feed.events(stored([3n], [103n], { parent: 2n }));
  assert.equal(result(feed.view, { tokensHashes: [101n, 102n, 103n] }), "EXACT 3");
});

test("what was before a stream without a snapshot is unknown", () => {
  const feed = new Feed(new View());
  feed.accept(Accepted_Mode.LATEST);
  feed.events(chain);
  assert.equal(result(feed.view), "DEGRADED JOINED_LATE 2");
  feed.events(cleared(Cleared_Reason.ENGINE_CLEARED), chain); // it may have further attention groups
  assert.equal(result(feed.view), "UPPER_BOUND 2");
  feed.events(cleared(Cleared_Reason.ENGINE_RESTARTED), chain);
  assert.equal(result(feed.view), "EXACT 2");
  feed.events(added(), chain);
  assert.equal(result(feed.view), "EXACT 2");
});

test("prompts by block hashes match blocks of unknown content", () => {
  const feed = new Feed(new View());
  feed.snapshot([stored([1n, 2n], [])]);
  assert.equal(result(feed.view, { blockHashes: [1n, 2n, 3n] }), "EXACT 2");
  assert.equal(result(feed.view, { blockHashes: [1n], blockSize: 8 }), "none");
});

test("a long chain stays where it is, though its last block is stored again after an absent parent", () => {
  const hashes = Array.from({ length: 50 }, (_, i) => BigInt(i + 1));
  const feed = new Feed(new View());
  feed.snapshot([stored(hashes)]);
  feed.events(stored([50n], [150n], { parent: 99n, tier: Tier.DISK }));
  assert.equal(result(feed.view, { tokensHashes: hashes.map((h) => h + 100n) }), "EXACT 50");
});

test("prompts with EAGLE", () => {
  const tokens = [1, 2, 3, 4, 5, 6, 7, 8];
  const feed = new Feed(new View());
  feed.snapshot([stored([1n, 2n], tokensHashes([...tokens, 9], 4, { eagle: true }))]);
  assert.equal(result(feed.view, { tokens: [...tokens, 9], eagle: true }), "EXACT 2");
  assert.equal(result(feed.view, { tokens, eagle: true }), "EXACT 1"); // the last block needs the token after it
  assert.equal(result(feed.view, { tokens: [...tokens, 8], eagle: true }), "EXACT 1");
  assert.equal(result(feed.view, { tokens }), "none");
});

test("workers", () => {
  const feed = new Feed(new View());
  assert.equal(feed.view.ready, false);
  feed.snapshot(all);
  feed.events(stored([1n], [101n], { rank: 3, tier: Tier.DISK }));
  assert.equal(feed.view.ready, true);
  assert.equal(feed.view.position?.toString(), "e:6");
  assert.deepEqual(feed.view.workers().map(({ added: _, ...w }) => w), [{
    name: "w", model: "m", blockSize: 4,
    ranks: [
      { rank: 0, blocks: [2, 0, 0, 0], trust: Trust.EXACT, reasons: [] },
      { rank: 3, blocks: [0, 0, 1, 0], trust: Trust.EXACT, reasons: [] },
    ],
  }]);
});
