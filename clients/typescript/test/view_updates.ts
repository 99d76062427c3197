import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Cleared_Reason, Gap_Reason, Tier, type RouterEventSchema } from "../src/gen/kvcast/v1/event_pb.js";
import {
  Accepted_Mode, SubscribeResponseSchema, type SnapshotRankSchema,
} from "../src/gen/kvcast/v1/router_event_service_pb.js";
import { Position, type Update, type View } from "../src/index.js";
import { kindOf } from "../src/update.js";
import type { Response } from "./server.js";

export type Event = MessageInitShape<typeof RouterEventSchema>;
export type RankReport = MessageInitShape<typeof SnapshotRankSchema>;

/** Makes the update of a message. */
export function updateOf(m: Response, position?: bigint): Update {
  const message = create(SubscribeResponseSchema, m);
  return {
    kind: kindOf(message), message, position: position === undefined ? undefined : new Position("e", position), resnapshot: () => {},
  };
}

export function interruption(): Update {
  return { kind: "interruption", error: new Error("cut"), snapshot: false, waitMs: 0, failures: 1, position: undefined, resnapshot: () => {} };
}

export const stored = (hashes: bigint[], tokens: bigint[] = hashes.map((h) => h + 100n), more: { parent?: bigint; tier?: Tier; size?: number; rank?: number } = {}): Event => ({
  dpRank: more.rank ?? 0, tier: more.tier ?? Tier.DEVICE,
  event: {
    case: "stored",
    value: { blockHashes: hashes, tokensHashes: tokens, blockSize: more.size ?? 4, ...(more.parent === undefined ? {} : { parentHash: more.parent }) },
  },
});
export const removed = (hashes: bigint[], tier = Tier.DEVICE): Event => ({ dpRank: 0, tier, event: { case: "removed", value: { blockHashes: hashes } } });
export const cleared = (reason: Cleared_Reason, tiers: Tier[] = []): Event => ({ dpRank: 0, event: { case: "cleared", value: { reason, tiers } } });
export const gap = (reason: Gap_Reason, tiers: Tier[] = [], chunkTokens = 0): Event =>
  ({ dpRank: 0, event: { case: "gap", value: { reason, tiers, chunkTokens } } });
export const resolved = (reasons: Gap_Reason[]): Event => ({ dpRank: 0, event: { case: "resolved", value: { reasons } } });
export const groupsOmitted: Event = { dpRank: 0, event: { case: "groupsOmitted", value: {} } };
export const groups: Event = { dpRank: 0, event: { case: "groups", value: { unit: 4 } } };
export const groupStored: Event = { dpRank: 0, tier: Tier.DEVICE, event: { case: "groupStored", value: { group: 1, blockHashes: [1n] } } };
export const added = (more: { pool?: boolean; blockSize?: number } = {}): Event =>
  ({ event: { case: "workerAdded", value: { model: "m", blockSize: 4, ...more } } });
export const workerRemoved: Event = { event: { case: "workerRemoved", value: {} } };

/** Applies entries of worker w to a View, each with some events. */
export class Feed {
  #seq = 5n;
  readonly view: View;

  constructor(view: View) {
    this.view = view;
  }

  /** Applies a snapshot with worker w. */
  snapshot(blocks: Event[] = [], ranks: RankReport[] = [], more: { incompleteRanks?: number[]; pool?: boolean } = {}): void {
    this.view.apply(updateOf({ accepted: { epoch: "e", mode: Accepted_Mode.SNAPSHOT } }));
    this.parts(blocks, ranks, more);
    this.end();
  }

  /** Applies a snapshot without its end. */
  parts(blocks: Event[] = [], ranks: RankReport[] = [], more: { incompleteRanks?: number[]; pool?: boolean } = {}): void {
    this.view.apply(updateOf({ snapshotBegin: { epoch: "e" } }));
    this.view.apply(updateOf({
      snapshotWorker: { worker: "w", added: { model: "m", blockSize: 4, pool: more.pool ?? false }, ranks, incompleteRanks: more.incompleteRanks ?? [] },
    }));
    this.view.apply(updateOf({ snapshotBlocks: [{ worker: "w", events: blocks }] }));
  }

  end(): void {
    this.view.apply(updateOf({ snapshotEnd: {} }, this.#seq));
  }

  accept(mode = Accepted_Mode.RESUME): void {
    this.view.apply(updateOf({ accepted: { epoch: "e", mode, progressIntervalNano: 10_000_000_000n } }, this.#seq));
  }

  progress(): void {
    this.view.apply(updateOf({ progress: {} }, this.#seq));
  }

  events(...events: Event[]): void {
    this.#seq++;
    this.view.apply(updateOf({ entries: [{ seq: this.#seq, worker: "w", model: "m", events }] }, this.#seq));
  }
}
