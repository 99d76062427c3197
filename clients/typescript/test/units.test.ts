import assert from "node:assert/strict";
import { test } from "node:test";
import { Code, ConnectError } from "@connectrpc/connect";
import { Backoff, maxRetryDelayMs } from "../src/backoff.js";
import { Client, ConfigError, Position, type ClientOptions, type SubscribeOptions } from "../src/index.js";
import { errorFrom } from "../src/status.js";
import { contractError } from "./server.js";

test("positions", () => {
  for (const [text, epoch, seq] of [["e:5", "e", 5n], [":0", "", 0n], ["a:b:7", "a:b", 7n], ["e:18446744073709551615", "e", 18446744073709551615n]] as const) {
    const p = Position.parse(text);
    assert.deepEqual([p.epoch, p.seq, p.toString()], [epoch, seq, text]);
    assert.equal(JSON.stringify(p), JSON.stringify(text));
    assert.ok(p.equals(new Position(epoch, seq)));
  }
  for (const text of ["", "e", "e:", "e:-1", "e:+1", "e: 1", "e:1x", "e:0x1", "e:18446744073709551616"]) {
    assert.throws(() => Position.parse(text), SyntaxError, text);
  }
});

test("addresses and options that are not allowed", () => {
  const wrong: [string, ClientOptions, string][] = [
    ["", {}, "addresses"], ["host", {}, "addresses"], ["a:1,", {}, "addresses"], ["http://a:1", {}, "addresses"], ["a:1/x", {}, "addresses"],
    ["a:99999", {}, "addresses"], ["a:1", { clientId: "ä" }, "clientId"], ["a:1", { clientId: "x".repeat(129) }, "clientId"], ["a:1", { timeoutMs: 0 }, "timeoutMs"],
  ];
  for (const [addresses, options, field] of wrong) {
    assert.throws(() => new Client(addresses, options), (e) => e instanceof ConfigError && e.field === field, addresses);
  }
  new Client("a:1, b.example:2,[::1]:50051,127.0.0.1:4");
  const client = new Client("a:1");
  const wrongOptions: [SubscribeOptions, string][] = [
    [{ idleTimeoutMs: 9 }, "idleTimeoutMs"], [{ idleTimeoutMs: NaN }, "idleTimeoutMs"], [{ backoffMinMs: 0 }, "backoffMinMs"],
    [{ backoffMinMs: 10, backoffMaxMs: 9 }, "backoffMaxMs"], [{ after: "x" }, "after"], [{ after: "e:1", start: "latest" }, "start"],
    [{ gapPolicy: "other" as "fail" }, "gapPolicy"], [{ start: "other" as "latest" }, "start"],
  ];
  for (const [options, field] of wrongOptions) {
    assert.throws(() => client.subscribe(options), (e) => e instanceof ConfigError && e.field === field, field);
  }
});

test("prompts of a request have one model", async () => {
  await assert.rejects(new Client("a:1").match({ prompts: [{ model: "m", tokens: [1] }, { model: "n", tokens: [1] }] }), ConfigError);
});

/** A status as it is received: with the header that has it. */
function received(e: ConnectError): ConnectError {
  e.metadata.set("grpc-status", String(e.code));
  return e;
}

test("errors of servers", () => {
  const e = errorFrom(received(contractError(Code.OutOfRange, "POSITION_COMPACTED", {
    retryAfterMs: 1250, metadata: { epoch: "e", oldest: "5", newest: "18446744073709551615" },
  })));
  assert.deepEqual(
    [e.code, e.reason, e.epoch, e.oldest, e.newest, e.retryAfterMs],
    ["OUT_OF_RANGE", "POSITION_COMPACTED", "e", 5n, 18446744073709551615n, 1250],
  );
  assert.equal(e.message, "OUT_OF_RANGE: POSITION_COMPACTED: the server says so");
  const bad = errorFrom(received(contractError(Code.Internal, "INTERNAL", { metadata: { oldest: "x", newest: "-1" } })));
  assert.deepEqual([bad.epoch, bad.oldest, bad.newest, bad.retryAfterMs], [undefined, undefined, undefined, undefined]);
});

test("errors of others have no reason", () => {
  const other = new ConnectError("x", Code.Unavailable);
  other.details.push({ type: "google.rpc.ErrorInfo", value: Uint8Array.of(10, 1, 88, 18, 1, 121) }); // reason X, domain y
  assert.equal(errorFrom(received(other)).reason, undefined);
  const broken = new ConnectError("x", Code.NotFound);
  broken.details.push({ type: "google.rpc.ErrorInfo", value: Uint8Array.of(10, 99, 1) }, { type: "google.rpc.RetryInfo", value: Uint8Array.of(255) });
  assert.deepEqual([errorFrom(received(broken)).code, errorFrom(received(broken)).reason], ["NOT_FOUND", undefined]);
});

test("failures of the transport are UNAVAILABLE", () => {
  const all = [
    new Error("socket"), new ConnectError("http/2 stream closed with error code CANCEL (0x8)", Code.Canceled),
    new ConnectError("http/2 stream closed with error code ENHANCE_YOUR_CALM (0xb)", Code.ResourceExhausted),
    new ConnectError("protocol error: missing status", Code.Internal), new ConnectError("read ECONNRESET", Code.Aborted), "text",
  ];
  for (const reason of all) {
    assert.equal(errorFrom(reason).code, "UNAVAILABLE", String(reason));
    assert.equal(errorFrom(reason).reason, undefined);
  }
  assert.equal(errorFrom(new ConnectError("HTTP 404", Code.Unimplemented)).code, "UNIMPLEMENTED");
  assert.equal(errorFrom(new ConnectError("message size 5 is larger than configured readMaxBytes 4", Code.ResourceExhausted)).code, "RESOURCE_EXHAUSTED");
});

test("the backoff doubles, with jitter", () => {
  const b = new Backoff(100, 1000, 1);
  for (const most of [100, 200, 400, 800, 1000, 1000]) {
    const wait = b.next();
    assert.ok(wait >= most / 2 && wait <= most, `${wait} of ${most}`);
  }
  assert.equal(b.failures, 6);
  b.failures = 1e6;
  assert.ok(b.next() <= 1000);
});

test("the backoff waits for what the server requests, within bounds", () => {
  const b = new Backoff(1, 2, 1);
  for (const [requested, least] of [[700, 700], [1e9, maxRetryDelayMs]] as const) {
    const wait = b.next(requested);
    assert.ok(wait >= least && wait <= least * 1.25, String(wait));
  }
});

test("the next server is tried soon", () => {
  const b = new Backoff(100, 1000, 3);
  const waits = [b.next(700), b.next(), b.next(), b.next(), b.next(), b.next()];
  [10, 10, 100, 10, 10, 200].forEach((most, i) => assert.ok(waits[i]! <= most, `${i}: ${waits[i]}`));
  assert.ok(waits[2]! >= 50);
});
