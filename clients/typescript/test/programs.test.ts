import assert from "node:assert/strict";
import { execFile, spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { promisify } from "node:util";
import { TestServer, type Handlers } from "./server.js";

const root = new URL("../../", import.meta.url);
const limit = { timeout: 120_000 };

/** A server with a worker, which sends a snapshot, and an entry after a position. */
const handlers: Handlers = {
  listWorkers: () => ({ workers: [{ name: "w", model: "m", blockSize: 16 }] }),
  matchPrefix: () => ({
    position: { epoch: "e", seq: 5n },
    prompts: [{ matches: [{ worker: "w", blocks: 2, tokens: 32, trust: 1, tiers: [{ tier: 1, blocks: 2, tokens: 32 }] }] }],
  }),
  matchPrefixes: async function* (requests) {
    for await (const r of requests) {
      yield {
        id: r.id,
        ...(r.request === undefined ? {} : {
          response: { position: { epoch: "e", seq: 5n }, prompts: [{ matches: [{ worker: "w", blocks: 2, tokens: 32, trust: 1 }] }] },
        }),
      };
    }
  },
  reportOutcome: () => ({}),
  subscribe: async function* (r, context) {
    if (r.start.case === "after") {
      yield { accepted: { epoch: "e", mode: 1 }, position: { epoch: "e", seq: 5n }, prevSeq: 5n };
      yield { entries: [{ seq: 6n, worker: "w", model: "m" }], position: { epoch: "e", seq: 6n }, prevSeq: 5n };
    } else {
      yield { accepted: { epoch: "e", mode: 2 } };
      yield { snapshotBegin: { epoch: "e" } };
      yield { snapshotEnd: {}, position: { epoch: "e", seq: 5n }, prevSeq: 5n };
    }
    await new Promise((resolve) => context.signal.addEventListener("abort", resolve));
  },
};

function start(example: string, address: string): { program: ChildProcess; lines: AsyncIterableIterator<string> } {
  const program = spawn(process.execPath, [`build/examples/${example}.js`, address], { cwd: root, stdio: ["ignore", "pipe", "inherit"] });
  return { program, lines: createInterface({ input: program.stdout! })[Symbol.asyncIterator]() };
}

test("Ctrl-C ends a program that subscribes", limit, async () => {
  const server = await TestServer.start(handlers);
  const { program, lines } = start("subscribe", server.address);
  const seen: string[] = [];
  for await (const line of lines) {
    seen.push(line);
    if (line.startsWith("snapshotEnd")) {
      program.kill("SIGINT");
    }
  }
  const [code, signal] = program.exitCode === null ? await once(program, "exit") : [program.exitCode, program.signalCode];
  assert.deepEqual([code, signal], [0, null]);
  assert.deepEqual(seen, ["accepted - 0 workers", "snapshotBegin - 0 workers", "snapshotEnd e:5 0 workers", "the subscription has ended"]);
  await server.stop();
});

test("Ctrl-C ends a program whose server is away", limit, async () => {
  const server = await TestServer.start(handlers);
  const dead = server.address;
  await server.stop();
  const { program, lines } = start("subscribe", dead);
  let last = "";
  for await (const line of lines) {
    last = line;
    if (line.startsWith("interrupted")) {
      program.kill("SIGINT");
    }
  }
  const [code, signal] = program.exitCode === null ? await once(program, "exit") : [program.exitCode, program.signalCode];
  assert.deepEqual([code, signal, last], [0, null, "the subscription has ended"]);
});

for (const [example, want] of [
  ["quickstart", ["w m 16", "w/0 holds 32 tokens: EXACT", "accepted e:5", "entries e:6"]],
  ["route", Array.from({ length: 10 }, (_, i) => `prompt ${i} to w/0: 32 tokens, EXACT`)],
] as const) {
  test(`example ${example} ends by itself`, limit, async () => {
    const server = await TestServer.start(handlers);
    const { program, lines } = start(example, server.address);
    const seen: string[] = [];
    for await (const line of lines) {
      seen.push(line);
    }
    assert.deepEqual(seen, want);
    assert.equal(program.exitCode ?? (await once(program, "exit"))[0], 0);
    await server.stop();
  });
}

test("the README has the quickstart", () => {
  const readme = readFileSync(new URL("README.md", root), "utf8");
  const quickstart = readFileSync(new URL("examples/quickstart.ts", root), "utf8");
  assert.ok(readme.includes(`\`\`\`ts\n${quickstart}\`\`\``));
});

test("the package has what users need, and nothing else", limit, async () => {
  const { stdout } = await promisify(execFile)("npm", ["pack", "--dry-run", "--json", "--ignore-scripts"], { cwd: root });
  const [pack] = JSON.parse(stdout) as [{ files: { path: string }[] }];
  const paths = pack.files.map((f) => f.path);
  for (const needed of ["LICENSE", "README.md", "package.json", "dist/index.js", "dist/index.d.ts", "dist/gen/kvcast/v1/event_pb.js"]) {
    assert.ok(paths.includes(needed), needed);
  }
  assert.deepEqual(paths.filter((p) => !/^(LICENSE|README\.md|package\.json|dist\/.*\.(js|d\.ts))$/.test(p)), []);
});
