import assert from "node:assert/strict";
import { test } from "node:test";
import { Code } from "@connectrpc/connect";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { Client, ClosedError, KvcastError, ViolationError, type MatchRequest } from "../src/index.js";
import type { MatchPrefixesRequest, MatchPrefixesResponseSchema } from "../src/gen/kvcast/v1/match_pb.js";
import { maxInFlight } from "../src/matcher.js";
import { contractError, latch, TestServer, type Handlers } from "./server.js";

type Answer = MessageInitShape<typeof MatchPrefixesResponseSchema>;

const request = (token = 1): MatchRequest => ({ prompts: [{ tokens: [token] }] });

/** Answers a request with its token as the seq. */
function answer(r: MatchPrefixesRequest): Answer {
  return { id: r.id, response: { position: { epoch: "e", seq: BigInt(r.request!.prompts[0]!.tokenIds[0]!) }, prompts: [{}] } };
}

const answering: Handlers = {
  matchPrefixes: async function* (requests) {
    for await (const r of requests) {
      yield answer(r);
    }
  },
};

test("each request gets its own answer, over one connection", async () => {
  const server = await TestServer.start(answering);
  const matcher = new Client(server.address).matcher();
  const results = await Promise.all(Array.from({ length: 300 }, (_, i) => matcher.match(request(i))));
  results.forEach((r, i) => assert.equal(r.position.seq, BigInt(i)));
  assert.equal(server.connections, 1);
  await matcher.close();
  await server.stop();
});

test(`at most ${maxInFlight} requests are in flight`, async () => {
  const all = latch();
  let received = 0;
  let inFlight = 0;
  let most = 0;
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      const waiting: MatchPrefixesRequest[] = [];
      for await (const r of requests) {
        waiting.push(r);
        most = Math.max(most, ++inFlight);
        if (++received === maxInFlight) {
          all.open();
        }
        if (received < maxInFlight) {
          continue; // the first answer waits until no more requests can come
        }
        for (const w of waiting.splice(0)) {
          inFlight--;
          yield answer(w);
        }
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  const results = Promise.all(Array.from({ length: 3 * maxInFlight }, (_, i) => matcher.match(request(i))));
  await all.done;
  assert.equal((await results).length, 3 * maxInFlight);
  assert.ok(most <= maxInFlight, String(most));
  await matcher.close();
  await server.stop();
});

test("close ends requests without an answer, and those that wait", async () => {
  const begun = latch();
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      for await (const _ of requests) {
        begun.open();
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  const results = Promise.allSettled(Array.from({ length: maxInFlight + 5 }, () => matcher.match(request())));
  await begun.done;
  await matcher.close();
  for (const r of await results) {
    assert.ok(r.status === "rejected" && r.reason instanceof ClosedError);
  }
  await assert.rejects(matcher.match(request()), ClosedError);
  await matcher.close();
  await server.stop();
});

test("close while it connects, and without a stream", async () => {
  const server = await TestServer.start(answering);
  const matcher = new Client(server.address).matcher();
  const result = matcher.match(request());
  await Promise.all([assert.rejects(result, ClosedError), matcher[Symbol.asyncDispose]()]);
  await new Client(server.address).matcher().close();
  await server.stop();
});

test("a signal and a time limit end a request, and no other", async () => {
  const two = latch();
  let n = 0;
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      for await (const _ of requests) {
        if (++n === 2) {
          two.open();
        }
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  const abort = new AbortController();
  // Each promise has its handler before it can be rejected.
  const aborted = assert.rejects(matcher.match(request(1), { signal: abort.signal }), /of the caller/);
  const second = assert.rejects(matcher.match(request(2)), ClosedError);
  await two.done;
  abort.abort(new Error("of the caller"));
  await aborted;
  await assert.rejects(matcher.match(request(3), { timeoutMs: 20 }), (e) => e instanceof KvcastError && e.code === "DEADLINE_EXCEEDED");
  await assert.rejects(matcher.match(request(4), { signal: abort.signal }), /of the caller/);
  await matcher.close();
  await second;
  await server.stop();
});

test("a request that cannot be answered gets the error, and the others are sent again", async () => {
  let streams = 0;
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      const isFirst = streams++ === 0;
      let n = 0;
      for await (const r of requests) {
        if (isFirst && ++n === 3) {
          throw contractError(Code.InvalidArgument, "INVALID_ARGUMENT");
        }
        if (!isFirst) {
          yield answer(r);
        }
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  const results = await Promise.allSettled([1, 2, 3].map((i) => matcher.match(request(i))));
  assert.deepEqual(results.map((r) => r.status), ["rejected", "fulfilled", "fulfilled"]);
  assert.equal(streams, 2);
  await matcher.close();
  await server.stop();
});

test("a request is sent at most once more for each server", async () => {
  let streams = 0;
  const handlers: Handlers = {
    matchPrefixes: async function* (requests) {
      streams++;
      for await (const _ of requests) {
        throw contractError(Code.Unavailable, "SHUTTING_DOWN");
      }
    },
  };
  const servers = [await TestServer.start(handlers), await TestServer.start(handlers)];
  const matcher = new Client(servers.map((s) => s.address).join()).matcher();
  await assert.rejects(matcher.match(request()), (e) => e instanceof KvcastError && e.reason === "SHUTTING_DOWN");
  assert.equal(streams, 3);
  await matcher.close();
  await Promise.all(servers.map((s) => s.stop()));
});

test("an answer without a request, or to another one, is a violation", async () => {
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      for await (const r of requests) {
        yield { id: r.id + 1n };
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  await assert.rejects(matcher.match(request()), ViolationError);
  await matcher.close();
  await server.stop();
});

test("a cut stream is opened again", async () => {
  let streams = 0;
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      streams++;
      for await (const r of requests) {
        if (streams === 1) {
          server.cut();
          return;
        }
        yield answer(r);
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  assert.equal((await matcher.match(request(7))).position.seq, 7n);
  await matcher.close();
  await server.stop();
});

test("routed prompts are sent in parts", async () => {
  const parts: number[] = [];
  const server = await TestServer.start({
    matchPrefixes: async function* (requests) {
      for await (const r of requests) {
        parts.push(r.routed.length);
        yield { id: r.id };
      }
    },
  });
  const matcher = new Client(server.address).matcher();
  await matcher.noteRouted(Array.from({ length: 65 }, () => ({ worker: "w", prompt: { tokens: [1] } })));
  assert.deepEqual(parts, [64, 1]);
  await matcher.close();
  await server.stop();
});

test("calls: the next server, a signal, a time limit, and many outcomes", async () => {
  const never = latch();
  const parts: number[] = [];
  const server = await TestServer.start({
    matchPrefix: async () => never.done.then(() => ({})),
    listWorkers: () => ({ workers: [{ name: "w" }] }),
    reportOutcome: (r) => {
      parts.push(r.outcomes.length);
      return { ignored: 1 };
    },
  });
  const other = await TestServer.start({});
  const dead = other.address;
  await other.stop();
  const client = new Client(`${dead},${server.address}`);
  assert.equal((await client.workers())[0]!.name, "w");
  const outcome = { worker: "w", position: "e:1", predicted: 1, reused: 1 };
  assert.equal(await client.reportOutcomes(Array.from({ length: 1001 }, () => outcome)), 2);
  assert.deepEqual(parts, [1000, 1]);
  assert.equal(server.connections, 3);
  await assert.rejects(client.match(request(), { timeoutMs: 50 }), (e) => e instanceof KvcastError && e.code === "DEADLINE_EXCEEDED");
  await assert.rejects(client.match(request(), { signal: AbortSignal.abort(new Error("of the caller")) }), /of the caller/);
  await assert.rejects(new Client(dead).match(request()), (e) => e instanceof KvcastError && e.code === "UNAVAILABLE" && e.reason === undefined);
  await assert.rejects(client.noteRouted([{ worker: "w", prompt: {} }]), (e) => e instanceof KvcastError && e.code === "UNIMPLEMENTED");
  never.open();
  await server.stop();
});
