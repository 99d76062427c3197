import { create } from "@bufbuild/protobuf";
import { PositionSchema, type Position as PositionMessage } from "./gen/kvcast/v1/event_pb.js";

const maxSeq = (1n << 64n) - 1n;

/**
 * A point in the stream: all entries up to and including seq are applied. It is valid only for a subscription with the
 * same filter.
 */
export class Position {
  /** Random name of the journal's history. Empty means the server's current epoch: a lost journal is then not noticed. */
  readonly epoch: string;
  /** Number of the last entry applied; 0 is before the first entry. */
  readonly seq: bigint;

  constructor(epoch: string, seq: bigint) {
    this.epoch = epoch;
    this.seq = seq;
  }

  /** Parses EPOCH:SEQ, or :SEQ for an empty epoch. It throws a SyntaxError. */
  static parse(text: string): Position {
    const colon = text.lastIndexOf(":"); // an epoch may contain colons
    const digits = text.slice(colon + 1);
    if (colon < 0 || !/^[0-9]+$/.test(digits) || BigInt(digits) > maxSeq) {
      throw new SyntaxError(`position ${JSON.stringify(text)} is not allowed: want EPOCH:SEQ, or :SEQ`);
    }
    return new Position(text.slice(0, colon), BigInt(digits));
  }

  /** Returns EPOCH:SEQ, the form that parse and kvcast subscribe --after accept. */
  toString(): string {
    return `${this.epoch}:${this.seq}`;
  }

  toJSON(): string {
    return this.toString();
  }

  equals(other: Position | undefined): boolean {
    return other !== undefined && this.epoch === other.epoch && this.seq === other.seq;
  }
}

/** Returns the position of a message. */
export function positionFrom(m: PositionMessage | undefined): Position {
  return new Position(m?.epoch ?? "", m?.seq ?? 0n);
}

/** Returns a position as a message. */
export function positionMessage(p: Position): PositionMessage {
  return create(PositionSchema, { epoch: p.epoch, seq: p.seq });
}

/** Returns the position that a caller gives as a Position or as text. */
export function toPosition(p: Position | string): Position {
  return typeof p === "string" ? Position.parse(p) : p;
}
