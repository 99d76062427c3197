import assert from "node:assert/strict";
import { test } from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Tier, type RouterEventSchema } from "../src/gen/kvcast/v1/event_pb.js";
import { Accepted_Mode, FilterSchema, SubscribeResponseSchema } from "../src/gen/kvcast/v1/router_event_service_pb.js";
import { Position, ViolationError } from "../src/index.js";
import type { Start } from "../src/subscribe_options.js";
import { Validator } from "../src/validator.js";
import type { Response } from "./server.js";

type Event = MessageInitShape<typeof RouterEventSchema>;

const at = (seq: bigint, epoch = "e"): Response => ({ position: { epoch, seq } });
const accepted = (mode: Accepted_Mode, seq?: bigint, epoch = "e"): Response => ({
  accepted: { epoch, mode, oldestSeq: 1n, newestSeq: 100n }, ...(seq === undefined ? {} : { position: { epoch, seq }, prevSeq: seq }),
});
const begin = (epoch = "e"): Response => ({ snapshotBegin: { epoch } });
const worker = (name: string, lastEventId: bigint): Response => ({ snapshotWorker: { worker: name, added: { model: "m" }, lastEventId } });
const end = (seq: bigint, prevSeq = seq, epoch = "e"): Response => ({ snapshotEnd: { position: { epoch, seq } }, ...at(seq, epoch), prevSeq });
const heartbeat: Response = { progress: {} };
const progress = (seq: bigint, prevSeq = seq, epoch = "e"): Response => ({ progress: {}, ...at(seq, epoch), prevSeq });
const added = (eventId: bigint): Event => ({ eventId, event: { case: "workerAdded", value: { model: "m" } } });
const removed = (eventId: bigint): Event => ({ eventId, event: { case: "workerRemoved", value: {} } });
const stored = (eventId: bigint): Event => ({ eventId, dpRank: 0, tier: Tier.DEVICE, event: { case: "stored", value: { blockHashes: [1n] } } });
const entry = (seq: bigint, events: Event[] = [], name = "w") => ({ seq, worker: name, model: "m", events });
const entries = (prevSeq: bigint, all: ReturnType<typeof entry>[], seq = all.at(-1)!.seq, epoch = "e"): Response =>
  ({ entries: all, ...at(seq, epoch), prevSeq });

const resume: Start = { mode: "resume", after: new Position("e", 4n) };
const snapshot: Start = { mode: "snapshot" };
const accept4 = accepted(Accepted_Mode.RESUME, 4n);
const acceptSnapshot = accepted(Accepted_Mode.SNAPSHOT);
/** A snapshot with worker w, whose last event is 3, at seq 5. */
const complete = [acceptSnapshot, begin(), worker("w", 3n), end(5n)];

interface Case {
  start?: Start;
  filter?: { workers?: string[]; tiers?: Tier[] };
  fail?: boolean;
  messages: Response[];
  /** What the violation of the last message has; undefined: there is none. */
  violation?: RegExp;
  position?: string | undefined;
  /** The position to store, if it is another. */
  stored?: string | undefined;
}

const cases: Record<string, Case> = {
  "resumes": { messages: [accept4, entries(4n, [entry(5n, [added(1n)]), entry(6n, [stored(2n)])]), progress(6n)], position: "e:6" },
  "resumes after a seq of any epoch": { start: { mode: "resume", after: new Position("", 4n) }, messages: [accept4], position: "e:4" },
  "an entry without events": { messages: [accept4, entries(4n, [entry(5n)])], position: "e:5" },
  "no Accepted": { messages: [progress(4n)], violation: /no Accepted/ },
  "no epoch": { messages: [accepted(Accepted_Mode.RESUME, 4n, "")], violation: /without an epoch/ },
  "another mode": { messages: [accepted(Accepted_Mode.LATEST, 4n)], violation: /requested MODE_RESUME, got MODE_LATEST/ },
  "an unknown mode": { messages: [accepted(9 as Accepted_Mode, 4n)], violation: /got MODE_9/ },
  "another seq": { messages: [accepted(Accepted_Mode.RESUME, 5n)], violation: /resume after e:4, got e:5/ },
  "another epoch": { messages: [accepted(Accepted_Mode.RESUME, 4n, "f")], violation: /resume after e:4, got f:4/ },
  "no position": { messages: [accepted(Accepted_Mode.RESUME)], violation: /position of epoch ""/ },
  "a second Accepted": { messages: [accept4, accept4], violation: /second Accepted/, position: "e:4" },
  "a snapshot in place of entries": { messages: complete, position: "e:5" },
  "a snapshot that must not be": { fail: true, messages: [acceptSnapshot], violation: /got MODE_SNAPSHOT/ },
  "a snapshot that was requested": { start: snapshot, fail: true, messages: complete, position: "e:5" },
  "latest": { start: { mode: "latest" }, messages: [accepted(Accepted_Mode.LATEST, 9n), entries(9n, [entry(10n, [stored(7n)])])], position: "e:10" },
  "latest gets a snapshot": { start: { mode: "latest" }, messages: [acceptSnapshot], violation: /requested MODE_LATEST/ },
  "earliest from the first entry": {
    start: { mode: "earliest" }, messages: [accepted(Accepted_Mode.EARLIEST, 0n), entries(0n, [entry(1n, [stored(1n)])])],
    violation: /unknown worker/, position: "e:0",
  },
  "a missing message": { messages: [accept4, entries(5n, [entry(6n)])], violation: /prev_seq 5 after one at 4/, position: "e:4" },
  "a hole": { messages: [accept4, entries(4n, [entry(6n)])], violation: /entry 6 after 4/, position: "e:4" },
  "a hole with a filter": { filter: { workers: ["w"] }, messages: [accept4, entries(4n, [entry(6n)], 8n)], position: "e:8" },
  "a repeated entry": { messages: [accept4, entries(4n, [entry(5n), entry(5n)])], violation: /entry 5 after 5/, position: "e:4" },
  "a repeated entry with a filter": { filter: { workers: ["w"] }, messages: [accept4, entries(4n, [entry(4n)])], violation: /entry 4 after 4/, position: "e:4" },
  "a position before its entries": { filter: { workers: ["w"] }, messages: [accept4, entries(4n, [entry(6n)], 5n)], violation: /position 5 after entry 6/, position: "e:4" },
  "a position after its entries": { messages: [accept4, entries(4n, [entry(5n)], 6n)], violation: /position 6 after entry 5/, position: "e:4" },
  "a message of another epoch": { messages: [accept4, progress(4n, 4n, "f")], violation: /of epoch "f"/, position: "e:4" },
  "Progress that skips": { messages: [accept4, progress(5n, 4n)], violation: /position 5 after entry 4/, position: "e:4" },
  "Progress without a position": { messages: [accept4, heartbeat], violation: /of epoch ""/, position: "e:4" },
  "a lost event": { messages: [accept4, entries(4n, [entry(5n, [stored(7n)])]), entries(5n, [entry(6n, [stored(9n)])])], violation: /event 9 .* instead of event 8/, position: "e:5" },
  "a hole of events with a filter by tier": { filter: { tiers: [Tier.DISK] }, messages: [accept4, entries(4n, [entry(5n, [stored(7n)]), entry(6n, [stored(9n)])])], position: "e:6" },
  "a repeated event": { messages: [accept4, entries(4n, [entry(5n, [stored(7n)]), entry(6n, [stored(7n)])])], violation: /event 7 .* after event 7/, position: "e:4" },
  "a worker comes back": { messages: [accept4, entries(4n, [entry(5n, [stored(7n), removed(8n)]), entry(6n, [added(20n), stored(21n)])])], position: "e:6" },
  "a removed worker has events": { messages: [...complete, entries(5n, [entry(6n, [removed(4n)]), entry(7n, [stored(5n)])])], violation: /unknown worker "w"/, position: "e:5" },
  "an unknown worker": { messages: [...complete, entries(5n, [entry(6n, [stored(1n)], "x")])], violation: /unknown worker "x"/, position: "e:5" },
  "a new worker": { messages: [...complete, entries(5n, [entry(6n, [added(1n), stored(2n)], "x")])], position: "e:6" },
  "heartbeats before and in a snapshot": { messages: [acceptSnapshot, heartbeat, begin(), heartbeat, worker("w", 3n), heartbeat, end(5n)], position: "e:5" },
  "entries before the snapshot": { messages: [acceptSnapshot, entries(4n, [entry(5n)])], violation: /instead of the announced snapshot/ },
  "Progress in a snapshot": { messages: [acceptSnapshot, begin(), progress(5n)], violation: /not a heartbeat/ },
  "a snapshot of another epoch": { messages: [acceptSnapshot, begin("f")], violation: /snapshot of epoch "f"/ },
  "a snapshot ends in another epoch": { messages: [acceptSnapshot, begin(), end(5n, 5n, "f")], violation: /ends in epoch "f"/ },
  "a snapshot ends before its entries": { messages: [acceptSnapshot, begin(), { entries: [entry(6n)] }, end(5n)], violation: /with entry 6 ends at 5/ },
  "a snapshot ends with another prev_seq": { messages: [acceptSnapshot, begin(), end(5n, 4n)], violation: /with prev_seq 4/ },
  "entries in a snapshot": { messages: [acceptSnapshot, begin(), worker("w", 3n), { entries: [entry(7n, [stored(4n)])] }, end(8n)], position: "e:8" },
  "an event in a snapshot that its worker has": { messages: [acceptSnapshot, begin(), worker("w", 3n), { entries: [entry(7n, [stored(3n)])] }], violation: /event 3 .* after event 3/ },
  "a worker twice": { messages: [acceptSnapshot, begin(), worker("w", 3n), worker("w", 3n)], violation: /twice in a snapshot/ },
  "a snapshot begins again": { messages: [acceptSnapshot, begin(), worker("w", 3n), begin(), worker("w", 3n), end(5n)], position: "e:5" },
  "a snapshot in a stream": { messages: [accept4, begin()], position: undefined },
  "a snapshot in a stream that must fail": { fail: true, messages: [accept4, begin()], violation: /must continue or fail/, position: "e:4" },
  "parts without a begin": { messages: [accept4, worker("w", 3n)], violation: /has not begun/, position: "e:4" },
  "mixed with contents": { messages: [{ ...accept4, entries: [entry(5n)] }], violation: /with other contents/ },
  "mixed with each other": { messages: [{ ...acceptSnapshot, ...begin() }], violation: /with other contents/ },
};

for (const [name, c] of Object.entries(cases)) {
  test(name, () => {
    const v = new Validator(c.filter && create(FilterSchema, c.filter), c.fail ?? false);
    v.startStream(c.start ?? resume);
    c.messages.forEach((m, i) => {
      const check = (): void => v.validate(create(SubscribeResponseSchema, m));
      if (c.violation === undefined || i < c.messages.length - 1) {
        check();
      } else {
        assert.throws(check, (e) => e instanceof ViolationError && c.violation!.test(e.message));
      }
    });
    assert.equal(v.position?.toString(), c.position);
  });
}

test("a message of a later version is ignored, but not as the first", () => {
  const unknown = create(SubscribeResponseSchema);
  unknown.$unknown = [{ no: 1000, wireType: 0, data: Uint8Array.of(1) }];
  const v = new Validator(undefined, false);
  v.startStream(resume);
  assert.throws(() => v.validate(unknown), ViolationError);
  v.startStream(resume);
  v.validate(create(SubscribeResponseSchema, accept4));
  v.validate(unknown);
  assert.equal(v.position?.toString(), "e:4");
});

test("no position can be stored while a snapshot is expected that replaces the state", () => {
  const v = new Validator(undefined, false);
  v.startStream(resume);
  v.validate(create(SubscribeResponseSchema, accept4));
  v.startStream(resume);
  v.validate(create(SubscribeResponseSchema, acceptSnapshot));
  assert.equal(v.stored, undefined);
  assert.equal(v.position?.toString(), "e:4"); // from which another stream can still resume
  v.validate(create(SubscribeResponseSchema, begin()));
  assert.equal(v.position, undefined);
});

test("the events of a worker are compared over streams", () => {
  const v = new Validator(undefined, false);
  v.startStream(resume);
  v.validate(create(SubscribeResponseSchema, accept4));
  v.validate(create(SubscribeResponseSchema, entries(4n, [entry(5n, [stored(7n)])])));
  v.startStream({ mode: "resume", after: v.position! });
  v.validate(create(SubscribeResponseSchema, accepted(Accepted_Mode.RESUME, 5n)));
  assert.throws(() => v.validate(create(SubscribeResponseSchema, entries(5n, [entry(6n, [stored(9n)])]))), ViolationError);
});
