import type { Cleared, Entry, RouterEvent, WorkerAdded } from "./gen/kvcast/v1/event_pb.js";
import type { SnapshotBlocks, SnapshotWorker } from "./gen/kvcast/v1/router_event_service_pb.js";
import { Doubt, known } from "./doubt.js";
import { RankBlocks, tierBit } from "./rank_blocks.js";

/** The state of a dp rank. */
export class RankState {
  readonly blocks = new RankBlocks();
  readonly doubt = new Doubt();

  clear(c: Cleared): void {
    if (c.tiers.length === 0) {
      this.blocks.clear();
    } else {
      known(c.tiers).forEach((tier) => this.blocks.clearTier(tier));
    }
    this.doubt.clear(c);
  }
}

/** The state of a worker. */
export class WorkerState {
  readonly name: string;
  readonly model: string;
  /** The worker's properties; undefined if the stream began after the worker was added. */
  readonly added: WorkerAdded | undefined;
  /** Tokens per block; 0: unknown. */
  blockSize: number;
  /** The dp ranks by number. */
  readonly ranks = new Map<number, RankState>();

  constructor(name: string, model: string, added: WorkerAdded | undefined) {
    this.name = name;
    this.model = model;
    this.added = added;
    this.blockSize = added?.blockSize ?? 0;
    added?.ranks.forEach((number) => this.rank(number));
  }

  /** Returns a dp rank, and adds it if it does not exist. */
  rank(number: number): RankState {
    let r = this.ranks.get(number);
    if (r === undefined) {
      r = new RankState();
      if (this.added === undefined) {
        r.doubt.joinLate(); // what was before the stream is unknown
      }
      this.ranks.set(number, r);
    }
    return r;
  }
}

/** The state of all workers at a position of the stream. */
export class ViewState {
  readonly workers = new Map<string, WorkerState>();

  /** Applies the events of an entry, in order. */
  applyEntry(e: Entry): void {
    for (const event of e.events) {
      this.#apply(e.worker, e.model, event);
    }
  }

  /** Adds a worker of a snapshot, without blocks. */
  applySnapshotWorker(s: SnapshotWorker): void {
    const w = new WorkerState(s.worker, s.added?.model ?? "", s.added);
    this.workers.set(s.worker, w);
    for (const report of s.ranks) {
      w.rank(report.dpRank).doubt.report(report);
    }
    for (const number of s.incompleteRanks) {
      w.rank(number).doubt.setIncomplete(); // of servers that send no reasons
    }
  }

  /**
   * Adds blocks of a snapshot. The worker keeps the block size of its SnapshotWorker, since the last block is not
   * necessarily the newest.
   */
  applySnapshotBlocks(b: SnapshotBlocks): void {
    const size = this.workers.get(b.worker)?.blockSize ?? 0;
    for (const event of b.events) {
      this.#apply(b.worker, "", event);
    }
    const w = this.workers.get(b.worker);
    if (size !== 0 && w !== undefined) {
      w.blockSize = size;
    }
  }

  /** Applies an event. It ignores kinds of events and tiers that this version does not know. */
  #apply(name: string, model: string, { event, dpRank, tier }: RouterEvent): void {
    switch (event.case) {
      case undefined:
        return;
      case "workerAdded":
        this.workers.set(name, new WorkerState(name, event.value.model, event.value));
        return;
      case "workerRemoved":
        this.workers.delete(name);
        return;
    }
    let w = this.workers.get(name);
    if (w === undefined) {
      w = new WorkerState(name, model, undefined); // the stream began after the worker was added
      this.workers.set(name, w);
    }
    const rank = w.rank(dpRank ?? 0);
    switch (event.case) {
      case "stored":
        if (event.value.blockSize !== 0) {
          w.blockSize = event.value.blockSize; // an engine may restart with another block size
        }
        if (tierBit(tier) !== 0) {
          rank.blocks.store(tier, event.value);
        }
        return;
      case "removed":
        if (tierBit(tier) !== 0) {
          rank.blocks.remove(tier, event.value.blockHashes);
        }
        return;
      case "cleared":
        rank.clear(event.value);
        return;
      case "gap":
        rank.doubt.gap(event.value);
        return;
      case "resolved":
        rank.doubt.resolve(event.value.reasons);
        return;
      case "groupsOmitted":
      case "groups":
      case "groupStored":
      case "groupRemoved":
        rank.doubt.hasGroups = true;
        return;
    }
  }
}
