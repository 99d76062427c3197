import assert from "node:assert/strict";
import { test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { Code } from "@connectrpc/connect";
import { Client } from "../src/index.js";
import { contractError, progress, resumed, TestServer } from "./server.js";

/** Some seconds on a fast machine; KVCAST_TEST_RECONNECTS=10000 for more. */
const reconnects = Number(process.env["KVCAST_TEST_RECONNECTS"] ?? 1000);

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;

function heap(): number {
  collect();
  return process.memoryUsage().heapUsed;
}

/** The resources that keep a process alive, by kind. */
function resources(): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const name of process.getActiveResourcesInfo()) {
    counts[name] = (counts[name] ?? 0) + 1;
  }
  return counts;
}

test(`${reconnects} streams leave nothing behind`, async (t) => {
  let n = 0;
  const server = await TestServer.start({
    subscribe: async function* () {
      yield resumed(4n);
      yield progress(4n);
      switch (n++ % 4) {
        case 0:
          throw contractError(Code.Unavailable, "SHUTTING_DOWN");
        case 1:
          server.cut();
          return;
        case 2:
          yield progress(9n); // a filter permits it
          yield progress(4n); // a violation
          return;
        default:
      }
    },
  });
  const abort = new AbortController();
  const before = resources();
  const warm = Math.min(200, reconnects / 5);
  let streams = 0;
  let least = 0;
  let most = 0;
  const options = { after: "e:4", backoffMinMs: 1, backoffMaxMs: 1, filter: { workers: ["w"] }, signal: abort.signal };
  for await (const u of new Client(server.address).subscribe(options)) {
    if (u.kind !== "interruption") {
      continue;
    }
    if (++streams === warm) {
      least = heap();
    }
    if (streams === reconnects) {
      most = heap();
      break;
    }
  }
  assert.ok(server.connections >= reconnects, `${server.connections} connections`);
  await server.until(() => server.sessions.size === 0);
  const after = resources();
  for (const kind of ["TCPSocketWrap", "TCPWRAP", "TCPClientWrap", "Timeout", "TLSWRAP", "HTTP2SESSION"]) {
    assert.ok((after[kind] ?? 0) <= (before[kind] ?? 0), `${kind}: ${after[kind]} after ${before[kind] ?? 0}`);
  }
  t.diagnostic(`${streams} streams; heap ${(least / 1e6).toFixed(1)} MB after ${warm}, ${(most / 1e6).toFixed(1)} MB at the end`);
  assert.ok(most - least < 1e6 + 1500 * (streams - warm), `the heap has grown by ${most - least} bytes`);
  await server.stop();
});

test("many refused connections leave nothing behind", { timeout: 60_000 }, async () => {
  const server = await TestServer.start({});
  const dead = server.address;
  await server.stop();
  let failures = 0;
  for await (const u of new Client(`${dead},${dead}`).subscribe({ backoffMinMs: 1, backoffMaxMs: 1 })) {
    assert.equal(u.kind, "interruption");
    if (++failures === 300) {
      break;
    }
  }
  // The last socket is released after the event of its failure.
  while (resources()["TCPSocketWrap"] !== undefined) {
    await new Promise(setImmediate);
  }
});
