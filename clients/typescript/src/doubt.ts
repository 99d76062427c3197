import { Cleared_Reason, Gap_Reason, Tier, type Cleared, type Gap } from "./gen/kvcast/v1/event_pb.js";
import type { SnapshotRank } from "./gen/kvcast/v1/router_event_service_pb.js";
import { DegradedReason, Trust } from "./gen/kvcast/v1/worker_pb.js";
import { numTiers, tierBit } from "./rank_blocks.js";

/** The reason that each reason of a Gap causes, for those that cause another one than GAP. */
const gapReasons: ReadonlyMap<Gap_Reason, DegradedReason> = new Map([
  [Gap_Reason.POSSIBLE_RESTART, DegradedReason.POSSIBLE_RESTART],
  [Gap_Reason.AMBIGUOUS_PUBLISHER, DegradedReason.CONFLICT],
  [Gap_Reason.TOO_MANY_BLOCKS, DegradedReason.BLOCKS_OMITTED],
  [Gap_Reason.JOINED_LATE, DegradedReason.JOINED_LATE],
  [Gap_Reason.SHARED_TIER, DegradedReason.SHARED_TIER],
  [Gap_Reason.TOO_MANY_ATTRIBUTES, DegradedReason.BLOCKS_OMITTED],
  [Gap_Reason.EVENTS_SKIPPED, DegradedReason.EVENTS_SKIPPED],
  [Gap_Reason.BLOCK_SIZE_MISMATCH, DegradedReason.BLOCK_SIZE_MISMATCH],
  [Gap_Reason.UNKNOWN_CONTENT, DegradedReason.UNKNOWN_CONTENT],
  [Gap_Reason.TIER_NOT_CLEARED, DegradedReason.TIER_NOT_CLEARED],
  [Gap_Reason.REPLAY_UNPROVED, DegradedReason.REPLAY_UNPROVED],
  [Gap_Reason.REPLAY_FOREIGN, DegradedReason.REPLAY_FOREIGN],
  [Gap_Reason.COPIES_UNSURE, DegradedReason.COPIES_UNSURE],
  [Gap_Reason.CONNECTOR_TIER, DegradedReason.CONNECTOR_TIER],
  [Gap_Reason.RELAYED, DegradedReason.RELAYED],
]);

const allTiers: readonly Tier[] = [Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL];

/** Why the blocks of a dp rank may differ from the engine's, by tier, as the stream reports. */
export class Doubt {
  /** The reasons of each tier, by tier minus 1. */
  readonly #reasons: Set<DegradedReason>[] = allTiers.map(() => new Set());
  /** Tokens in a connector's chunk in each tier; 0: it has none, or their size is unknown. */
  readonly chunks: number[] = new Array<number>(numTiers).fill(0);
  /** Whether the engine has further attention groups, which a View does not follow. */
  hasGroups = false;

  /** Makes the rank one of which events may have been sent before the stream, also of further attention groups. */
  joinLate(): void {
    this.#add([DegradedReason.JOINED_LATE], []);
    this.hasGroups = true;
  }

  /** Applies a Gap. A reason of a later version counts as GAP. */
  gap(g: Gap): void {
    this.#add([gapReasons.get(g.reason) ?? DegradedReason.GAP], g.tiers);
    if (g.chunkTokens > 0) {
      for (const tier of known(g.tiers)) {
        this.chunks[tier - 1] = g.chunkTokens;
      }
    }
  }

  /** Applies a Cleared. */
  clear(c: Cleared): void {
    for (const tier of known(c.tiers)) {
      this.#reasons[tier - 1]!.clear();
      this.chunks[tier - 1] = 0;
    }
    if (c.reason === Cleared_Reason.UNREPAIRED_GAP) {
      this.#add([DegradedReason.GAP], c.tiers);
    }
    if (c.reason === Cleared_Reason.ENGINE_RESTARTED && c.tiers.length === 0) {
      this.hasGroups = false;
    }
  }

  /** Applies a Resolved. Other reasons than this one cannot be resolved: several Gaps may have caused them. */
  resolve(reasons: readonly Gap_Reason[]): void {
    if (reasons.includes(Gap_Reason.REPLAY_UNPROVED)) {
      for (const tier of this.#reasons) {
        tier.delete(DegradedReason.REPLAY_UNPROVED);
      }
    }
  }

  /** Applies what a snapshot reports. Reasons that it does not report for a tier hold for all. */
  report(s: SnapshotRank): void {
    const byTier = new Set(s.tierReasons.flatMap((t) => t.reasons));
    this.#add(s.reasons.filter((reason) => !byTier.has(reason)), []);
    for (const t of s.tierReasons) {
      this.#add(t.reasons, [t.tier]);
      if (tierBit(t.tier) !== 0) {
        this.chunks[t.tier - 1] = t.chunkTokens;
      }
    }
    this.hasGroups = s.groupsOmitted || s.groups !== undefined;
  }

  /** Makes the rank incomplete for a reason that a snapshot does not give. */
  setIncomplete(): void {
    if (this.reasons().length === 0) {
      this.#add([DegradedReason.GAP], []);
    }
  }

  /** The reasons of a tier, or of all, ascending. */
  reasons(tier?: Tier): DegradedReason[] {
    const sets = tier === undefined ? this.#reasons : [this.#reasons[tier - 1]!];
    return [...new Set(sets.flatMap((set) => [...set]))].sort((a, b) => a - b);
  }

  /** Returns how far a prefix can be trusted, with some reasons. */
  trust(reasons: readonly DegradedReason[]): Trust {
    if (reasons.length > 0) {
      return Trust.DEGRADED;
    }
    return this.hasGroups ? Trust.UPPER_BOUND : Trust.EXACT;
  }

  /** Adds reasons to the tiers named, or to all if none is. */
  #add(reasons: readonly DegradedReason[], tiers: readonly Tier[]): void {
    for (const tier of known(tiers)) {
      for (const reason of reasons) {
        const known = reason !== DegradedReason.UNSPECIFIED && DegradedReason[reason] !== undefined;
        this.#reasons[tier - 1]!.add(known ? reason : DegradedReason.GAP); // of a later version
      }
    }
  }
}

/** Returns the tiers named that this version knows; all if none is named. */
export function known(tiers: readonly Tier[]): readonly Tier[] {
  return tiers.length === 0 ? allTiers : tiers.filter((t) => tierBit(t) !== 0);
}
