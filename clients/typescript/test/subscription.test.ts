import assert from "node:assert/strict";
import { test } from "node:test";
import { Code, type HandlerContext } from "@connectrpc/connect";
import { Client, EndedError, IdleError, KvcastError, ViolationError, type SubscribeOptions, type Update } from "../src/index.js";
import { contractError, latch, progress, resumed, TestServer, type Response } from "./server.js";

const fast: SubscribeOptions = { after: "e:4", backoffMinMs: 1, backoffMaxMs: 2 };

/** Waits until the client has ended a call. */
async function ended(context: HandlerContext): Promise<void> {
  if (!context.signal.aborted) {
    await new Promise((resolve) => context.signal.addEventListener("abort", resolve));
  }
}

/** Starts a server whose streams are those of a function, by number. */
async function scripted(stream: (n: number, context: HandlerContext) => AsyncIterable<Response>): Promise<TestServer> {
  let n = 0;
  return TestServer.start({ subscribe: (_, context) => stream(n++, context) });
}

async function take(updates: AsyncIterable<Update>, n: number): Promise<Update[]> {
  const all: Update[] = [];
  for await (const u of updates) {
    all.push(u);
    if (all.length === n) {
      break;
    }
  }
  return all;
}

test("break ends the stream", async () => {
  const over = latch();
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
    over.open();
  });
  const [first] = await take(new Client(server.address).subscribe(fast), 1);
  assert.equal(first!.kind, "accepted");
  await over.done;
  await server.stop();
});

for (const when of ["before", "while connecting", "while a message is awaited", "in the loop", "during the backoff"]) {
  test(`abort ${when} ends the loop without an error`, async () => {
    const abort = new AbortController();
    const server = await scripted(async function* (_, context) {
      if (when === "during the backoff") {
        throw contractError(Code.Unavailable, "STARTING", { retryAfterMs: 100_000 });
      }
      yield resumed(4n);
      if (when === "while a message is awaited") {
        abort.abort();
      }
      await ended(context);
    });
    if (when === "before") {
      abort.abort();
    }
    const kinds: string[] = [];
    const loop = (async () => {
      for await (const u of new Client(server.address).subscribe({ ...fast, signal: abort.signal })) {
        kinds.push(u.kind);
        if (when === "in the loop") {
          abort.abort();
        } else if (when === "during the backoff") {
          setImmediate(() => abort.abort());
        }
      }
    })();
    if (when === "while connecting") {
      abort.abort();
    }
    await loop;
    assert.ok(kinds.length <= 1, kinds.join());
    await server.stop();
  });
}

test("an iterator that is returned while it awaits ends", async () => {
  const open = latch();
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    open.open();
    await ended(context);
  });
  const updates = new Client(server.address).subscribe(fast)[Symbol.asyncIterator]();
  await updates.next();
  const next = updates.next();
  await open.done;
  await updates.return!();
  assert.equal((await next).done, true);
  await server.stop();
});

test("an exception in the loop ends the stream", async () => {
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
  });
  await assert.rejects(async () => {
    for await (const _ of new Client(server.address).subscribe(fast)) {
      throw new Error("of the caller");
    }
  }, /of the caller/);
  await server.stop();
});

test("each loop is a subscription of its own", async () => {
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
  });
  const subscription = new Client(server.address).subscribe(fast);
  for (let i = 0; i < 3; i++) {
    assert.equal((await take(subscription, 1)).length, 1);
  }
  assert.equal(server.connections, 3);
  await server.stop();
});

test("interruptions say why a stream has ended", async () => {
  const server = await scripted(async function* (n, context) {
    yield resumed(4n);
    if (n === 0) {
      return;
    }
    if (n === 1) {
      yield progress(5n);
    }
    await ended(context);
  });
  const errors: Error[] = [];
  for await (const u of new Client(server.address).subscribe(fast)) {
    if (u.kind === "interruption") {
      errors.push(u.error);
    }
    if (errors.length === 2) {
      break;
    }
  }
  assert.ok(errors[0] instanceof EndedError);
  assert.ok(errors[1] instanceof ViolationError);
  assert.equal(errors[1].at?.toString(), "e:4");
  await server.stop();
});

test("idle, and cut", async () => {
  const server = await scripted(async function* (n, context) {
    yield resumed(4n);
    if (n > 0) {
      server.cut();
    }
    await ended(context);
  });
  const errors: Error[] = [];
  for await (const u of new Client(server.address).subscribe({ ...fast, idleTimeoutMs: 1000 })) {
    if (u.kind === "interruption") {
      errors.push(u.error);
      if (u.error instanceof KvcastError) {
        break;
      }
    }
  }
  assert.ok(errors[0] instanceof IdleError);
  const cut = errors.at(-1) as KvcastError;
  assert.deepEqual([cut.code, cut.reason], ["UNAVAILABLE", undefined]);
  await server.stop();
});

test("a refused connection is UNAVAILABLE, and the next server is tried", async () => {
  const refused = await scripted(async function* () {});
  const dead = refused.address;
  await refused.stop();
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
  });
  const [interruption, accepted] = await take(new Client(`${dead},${server.address}`).subscribe(fast), 2);
  assert.ok(interruption?.kind === "interruption" && interruption.error instanceof KvcastError);
  assert.deepEqual([interruption.error.code, interruption.error.reason], ["UNAVAILABLE", undefined]);
  assert.equal(accepted!.kind, "accepted");
  await server.stop();
});

test("a caller that rejects its state gets a snapshot", async () => {
  const starts: (string | undefined)[] = [];
  let n = 0;
  const server = await TestServer.start({
    subscribe: async function* (request, context) {
      starts.push(request.start.case);
      if (n++ === 0) {
        yield resumed(4n);
      } else {
        yield { accepted: { epoch: "e", mode: 2 } };
      }
      await ended(context);
    },
  });
  const cause = new Error("the state is wrong");
  const seen: Update[] = [];
  for await (const u of new Client(server.address).subscribe(fast)) {
    seen.push(u);
    if (seen.length === 1) {
      u.resnapshot(cause);
    } else if (seen.length === 3) {
      break;
    }
  }
  const [, interruption] = seen;
  assert.ok(interruption?.kind === "interruption");
  assert.deepEqual([interruption.error, interruption.snapshot], [cause, true]);
  assert.deepEqual(starts, ["after", "snapshot"]);
  await assert.rejects(async () => {
    n = 0;
    for await (const u of new Client(server.address).subscribe({ ...fast, gapPolicy: "fail" })) {
      u.resnapshot(cause);
    }
  }, cause);
  await server.stop();
});

test("a permanent error is thrown", async () => {
  const server = await scripted(async function* () {
    throw contractError(Code.PermissionDenied, "PERMISSION_DENIED");
  });
  await assert.rejects(take(new Client(server.address).subscribe(fast), 1), (e) => e instanceof KvcastError && e.reason === "PERMISSION_DENIED");
  await server.stop();
});

test("a token is asked for before each stream", async () => {
  const tokens: (string | null)[] = [];
  const server = await TestServer.start({
    subscribe: async function* (_, context) {
      tokens.push(context.requestHeader.get("authorization"));
      yield resumed(4n);
      yield progress(4n);
      throw contractError(Code.Unauthenticated, "UNAUTHENTICATED");
    },
  });
  let n = 0;
  await take(new Client(server.address, { token: async () => `t${n++}` }).subscribe(fast), 6);
  assert.deepEqual(tokens, ["Bearer t0", "Bearer t1"]);
  await server.stop();
});

test("the caller's time does not count for the idle timeout, and messages are not read ahead", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    yield progress(4n);
    await ended(context);
  });
  const kinds: string[] = [];
  for await (const u of new Client(server.address).subscribe({ ...fast, idleTimeoutMs: 500 })) {
    kinds.push(u.kind);
    if (kinds.length === 3) {
      break;
    }
    if (kinds.length === 2) {
      setImmediate(() => t.mock.timers.tick(500)); // while the next message is awaited
    }
    t.mock.timers.tick(400_000);
  }
  assert.deepEqual(kinds, ["accepted", "progress", "interruption"]);
  await server.stop();
});

test("a silent connection is pinged", { timeout: 60_000 }, async () => {
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
  });
  const abort = new AbortController();
  const loop = take(new Client(server.address).subscribe({ ...fast, signal: abort.signal }), 2);
  await server.until(() => server.pings > 0);
  abort.abort();
  await loop;
  await server.stop();
});

test("messages beyond the usual limit of 4 MiB", async () => {
  const blockHashes = Array.from({ length: 1 << 20 }, (_, i) => BigInt(i)); // 8 MiB
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    yield {
      entries: [{ seq: 5n, worker: "w", model: "m", events: [{ eventId: 1n, dpRank: 0, tier: 1, event: { case: "removed", value: { blockHashes } } }] }],
      position: { epoch: "e", seq: 5n }, prevSeq: 4n,
    };
    await ended(context);
  });
  const [, entries] = await take(new Client(server.address).subscribe(fast), 2);
  assert.equal(entries!.position?.toString(), "e:5");
  await server.stop();
});

test("an abort at any time, with a server or without", async () => {
  const server = await scripted(async function* (_, context) {
    yield resumed(4n);
    await ended(context);
  });
  const gone = await scripted(async function* () {});
  const dead = gone.address;
  await gone.stop();
  for (let i = 0; i < 200; i++) {
    const abort = new AbortController();
    const loop = take(new Client(i % 2 === 0 ? server.address : dead).subscribe({ ...fast, signal: abort.signal }), 1000);
    for (let turn = 0; turn < i / 10; turn++) {
      await new Promise(setImmediate);
    }
    abort.abort();
    await loop;
  }
  await server.stop();
});
