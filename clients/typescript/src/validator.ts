import { ViolationError } from "./errors.js";
import type { Entry } from "./gen/kvcast/v1/event_pb.js";
import { Accepted_Mode, type Filter, type SnapshotBegin, type SubscribeResponse } from "./gen/kvcast/v1/router_event_service_pb.js";
import { Position } from "./position.js";
import type { Start } from "./subscribe_options.js";

/** The part of the state that has been delivered: none, a part of a snapshot, or the state at a position. */
export type Delivered = "nothing" | "part" | "all";

/**
 * The phase of a stream, which determines what is valid next: Accepted; heartbeats and SnapshotBegin; parts of a snapshot
 * and heartbeats; or entries, Progress and SnapshotBegin.
 */
export type Phase = "start" | "awaitingSnapshot" | "snapshot" | "following";

const modes: Readonly<Record<Start["mode"], Accepted_Mode>> = {
  snapshot: Accepted_Mode.SNAPSHOT,
  latest: Accepted_Mode.LATEST,
  earliest: Accepted_Mode.EARLIEST,
  resume: Accepted_Mode.RESUME,
};

/**
 * Checks that no message is missing, duplicate or out of order, over all streams of a subscription:
 *
 *  - prev_seq is the seq of the previous position. Seqs of entries are contiguous; with a filter they grow.
 *  - The event_ids of a worker are contiguous; with a filter by tier they grow.
 *  - After a snapshot or the first entry, a worker has no event before its worker_added.
 *  - A position has the seq of the last entry before it and the epoch of the stream.
 *  - Accepted, SnapshotBegin and SnapshotEnd are in a message of their own, with a position at most.
 *
 * Before and within a snapshot, Progress without a position is a heartbeat.
 *
 * The event_ids of a worker that is removed and added again are not compared, since the server remembers those of a bounded
 * number of removed workers. The seqs still show that no entry is missing.
 */
export class Validator {
  /** Seqs may have holes. */
  readonly #filtered: boolean;
  /** event_ids may have holes. */
  readonly #tierFiltered: boolean;
  /** A snapshot must not replace entries. */
  readonly #failOnGap: boolean;
  #delivered: Delivered = "nothing";
  #phase: Phase = "start";
  #epoch = "";
  /** The seq of the last position, and of the last entry in a snapshot. */
  #seq = 0n;
  #snapshotSeq = 0n;
  /** All existing workers were delivered. */
  #workersKnown = false;
  /** The last event_id, by worker. */
  readonly #lastEventIds = new Map<string, bigint>();
  /** What was requested for the current stream, and the epoch of its Accepted. */
  #start: Start = { mode: "snapshot" };
  #acceptedEpoch = "";

  constructor(filter: Filter | undefined, failOnGap: boolean) {
    this.#tierFiltered = (filter?.tiers.length ?? 0) > 0;
    this.#filtered = this.#tierFiltered || (filter?.workers.length ?? 0) > 0 || (filter?.models.length ?? 0) > 0;
    this.#failOnGap = failOnGap;
  }

  get delivered(): Delivered {
    return this.#delivered;
  }

  get phase(): Phase {
    return this.#phase;
  }

  /** The position from which to resume; undefined if the delivered state is incomplete. */
  get position(): Position | undefined {
    return this.#delivered === "all" ? new Position(this.#epoch, this.#seq) : undefined;
  }

  /** The position that the caller may store with its state: none while a snapshot is expected that replaces the state. */
  get stored(): Position | undefined {
    return this.#phase === "awaitingSnapshot" ? undefined : this.position;
  }

  /** Makes an Accepted the only valid next message. */
  startStream(start: Start): void {
    this.#phase = "start";
    this.#start = start;
    this.#acceptedEpoch = "";
  }

  /** Checks the next message of the stream. It throws a ViolationError. */
  validate(m: SubscribeResponse): void {
    const at = this.position;
    const violation = this.#message(m);
    if (violation !== undefined) {
      throw new ViolationError(violation, at);
    }
  }

  /** Checks a message and returns what is wrong, as the methods below do; undefined: nothing. */
  #message(m: SubscribeResponse): string | undefined {
    if (this.#phase !== "start" && isUnknownKind(m)) {
      return undefined;
    }
    if (isMixed(m)) {
      return "Accepted, SnapshotBegin or SnapshotEnd in a message with other contents";
    }
    if (this.#phase === "start") {
      return m.accepted === undefined ? "the first message has no Accepted" : this.#accept(m);
    }
    if (m.accepted !== undefined) {
      return "a second Accepted";
    }
    if (m.snapshotBegin !== undefined) {
      return this.#beginSnapshot(m.snapshotBegin);
    }
    if (this.#phase !== "following" && isHeartbeat(m)) {
      return undefined;
    }
    if (this.#phase === "awaitingSnapshot") {
      return "another message instead of the announced snapshot";
    }
    if (this.#phase === "snapshot") {
      return m.progress === undefined ? this.#snapshotPart(m) : "Progress within a snapshot that is not a heartbeat";
    }
    if (m.snapshotEnd !== undefined || m.snapshotWorker !== undefined || m.snapshotBlocks.length > 0) {
      return "part of a snapshot that has not begun";
    }
    return this.#follow(m);
  }

  #accept(m: SubscribeResponse): string | undefined {
    const mode = m.accepted!.mode;
    const want = modes[this.#start.mode];
    const at = { epoch: m.position?.epoch ?? "", seq: m.position?.seq ?? 0n };
    this.#acceptedEpoch = m.accepted!.epoch;
    if (this.#acceptedEpoch === "") {
      return "an Accepted without an epoch";
    }
    if (mode === Accepted_Mode.SNAPSHOT && (want === mode || (want === Accepted_Mode.RESUME && !this.#failOnGap))) {
      this.#phase = "awaitingSnapshot";
      return undefined;
    }
    if (mode !== want) {
      return `requested ${modeName(want)}, got ${modeName(mode)}`;
    }
    if (at.epoch !== this.#acceptedEpoch) {
      return `an Accepted of epoch ${quoted(this.#acceptedEpoch)} with a position of epoch ${quoted(at.epoch)}`;
    }
    if (this.#start.mode === "resume") {
      const { epoch, seq } = this.#start.after;
      if ((epoch !== "" && epoch !== this.#acceptedEpoch) || seq !== at.seq) {
        return `requested to resume after ${this.#start.after}, got ${at.epoch}:${at.seq}`;
      }
    }
    if (this.#delivered === "nothing") {
      this.#workersKnown = at.seq === 0n;
    }
    this.#delivered = "all";
    this.#epoch = this.#acceptedEpoch;
    this.#seq = at.seq;
    this.#phase = "following";
    return undefined;
  }

  #beginSnapshot(b: SnapshotBegin): string | undefined {
    if (b.epoch !== this.#acceptedEpoch) {
      return `a snapshot of epoch ${quoted(b.epoch)} in a stream of epoch ${quoted(this.#acceptedEpoch)}`;
    }
    if (this.#phase === "following" && this.#failOnGap) {
      return "a snapshot in a stream that must continue or fail";
    }
    this.#phase = "snapshot";
    this.#delivered = "part";
    this.#epoch = this.#acceptedEpoch;
    this.#seq = 0n;
    this.#snapshotSeq = 0n;
    this.#workersKnown = false;
    this.#lastEventIds.clear();
    return undefined;
  }

  #snapshotPart(m: SubscribeResponse): string | undefined {
    const w = m.snapshotWorker;
    if (w !== undefined) {
      if (this.#lastEventIds.has(w.worker)) {
        return `worker ${quoted(w.worker)} twice in a snapshot`;
      }
      this.#lastEventIds.set(w.worker, w.lastEventId);
    }
    for (const e of m.entries) {
      if (e.seq <= this.#snapshotSeq) {
        return `entry ${e.seq} after ${this.#snapshotSeq}`;
      }
      this.#snapshotSeq = e.seq;
      const violation = this.#events(e);
      if (violation !== undefined) {
        return violation;
      }
    }
    if (m.snapshotEnd === undefined) {
      return undefined;
    }
    const at = { epoch: m.position?.epoch ?? "", seq: m.position?.seq ?? 0n };
    if (at.epoch !== this.#epoch) {
      return `a snapshot of epoch ${quoted(this.#epoch)} ends in epoch ${quoted(at.epoch)}`;
    }
    if (at.seq < this.#snapshotSeq || m.prevSeq !== at.seq) {
      return `a snapshot with entry ${this.#snapshotSeq} ends at ${at.seq} with prev_seq ${m.prevSeq}`;
    }
    this.#phase = "following";
    this.#delivered = "all";
    this.#seq = at.seq;
    this.#workersKnown = true;
    return undefined;
  }

  /** Checks entries and Progress. */
  #follow(m: SubscribeResponse): string | undefined {
    const at = { epoch: m.position?.epoch ?? "", seq: m.position?.seq ?? 0n };
    if (at.epoch !== this.#epoch) {
      return `a message of epoch ${quoted(at.epoch)} in a stream of epoch ${quoted(this.#epoch)}`;
    }
    if (m.prevSeq !== this.#seq) {
      return `a message with prev_seq ${m.prevSeq} after one at ${this.#seq}: a message is missing`;
    }
    let last = this.#seq;
    for (const e of m.entries) {
      if (e.seq <= last || (!this.#filtered && e.seq !== last + 1n)) {
        return `entry ${e.seq} after ${last}`;
      }
      last = e.seq;
      const violation = this.#events(e);
      if (violation !== undefined) {
        return violation;
      }
    }
    if (at.seq < last || (!this.#filtered && at.seq !== last)) {
      return `position ${at.seq} after entry ${last}`;
    }
    this.#seq = at.seq;
    return undefined;
  }

  /** Checks the event_ids of an entry. */
  #events(e: Entry): string | undefined {
    let last = this.#lastEventIds.get(e.worker);
    for (const event of e.events) {
      const id = event.eventId;
      const isAdded = event.event.case === "workerAdded";
      if (last === undefined) {
        if (this.#workersKnown && !isAdded) {
          return `entry ${e.seq} of unknown worker ${quoted(e.worker)}`;
        }
      } else if (id <= last) {
        return `event ${id} of worker ${quoted(e.worker)} in entry ${e.seq} after event ${last}`;
      } else if (id !== last + 1n && !this.#tierFiltered && !isAdded) {
        return `event ${id} of worker ${quoted(e.worker)} in entry ${e.seq} instead of event ${last + 1n}`;
      }
      last = event.event.case === "workerRemoved" ? undefined : id;
    }
    if (last === undefined) {
      this.#lastEventIds.delete(e.worker);
    } else {
      this.#lastEventIds.set(e.worker, last);
    }
    return undefined;
  }
}

function quoted(text: string): string {
  return JSON.stringify(text);
}

function modeName(mode: Accepted_Mode): string {
  return `MODE_${Accepted_Mode[mode] ?? mode}`;
}

/** Reports whether a message has entries, or a worker or blocks of a snapshot. */
function hasContents(m: SubscribeResponse): boolean {
  return m.entries.length > 0 || m.snapshotWorker !== undefined || m.snapshotBlocks.length > 0;
}

/** Reports whether a message has an Accepted, SnapshotBegin or SnapshotEnd, and another field except for the position. */
function isMixed(m: SubscribeResponse): boolean {
  const alone = [m.accepted, m.snapshotBegin, m.snapshotEnd].filter((part) => part !== undefined).length;
  return alone > 1 || (alone === 1 && (hasContents(m) || m.progress !== undefined));
}

/**
 * Reports whether a message has only fields of later versions of the contract. The message can be ignored since it has no
 * position.
 */
function isUnknownKind(m: SubscribeResponse): boolean {
  return (m.$unknown?.length ?? 0) > 0 && m.position === undefined && m.prevSeq === 0n && m.accepted === undefined &&
    m.progress === undefined && m.snapshotBegin === undefined && m.snapshotEnd === undefined && !hasContents(m);
}

/** Reports whether a message is Progress without a position. */
function isHeartbeat(m: SubscribeResponse): boolean {
  return m.progress !== undefined && m.position === undefined && m.prevSeq === 0n && !hasContents(m);
}
