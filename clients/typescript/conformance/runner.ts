// The runner of the TypeScript client: see test/conformance/README.md.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { fromJson, toJson, type DescMessage, type JsonValue, type MessageShape } from "@bufbuild/protobuf";
import { BlockHolderSchema, FilterSchema } from "../src/gen/kvcast/v1/router_event_service_pb.js";
import { WorkerStatusSchema } from "../src/gen/kvcast/v1/worker_pb.js";
import {
  Accepted_Mode, Client, ConfigError, DegradedReason, EndedError, IdleError, KvcastError, Position, Tier, tokensHashes, Trust, View,
  ViolationError, type Filter, type Match, type MatchRequest, type MatchResult, type Outcome, type Prompt, type Routed,
  type SubscribeOptions, type Update,
} from "../src/index.js";

/** What the client is asked to do. */
interface Job {
  targets: string;
  ca_file?: string;
  token?: string;
  client_id?: string;
  calls: Call[];
}

/** One part of a job, with the fields of its kind. */
interface Call {
  call: string;
  options?: Options;
  updates?: number;
  resnapshot_after?: number;
  wait_ms?: number;
  prompts?: PromptJson[];
  request?: RequestJson;
  requests?: RequestJson[];
  block_hashes?: string[];
  tokens_hashes?: string[];
  filter?: JsonValue;
  outcomes?: (Omit<Outcome, "trust"> & { trust?: string })[];
  routed?: { worker: string; rank?: number; prompt: PromptJson; ttl_ms?: number }[];
  tokens?: number[];
  block_size?: number;
  lora?: string;
  salt?: string;
  text?: string;
}

interface Options {
  after?: string;
  start?: "latest" | "earliest";
  gap_policy?: "fail";
  filter?: JsonValue;
  idle_timeout_ms?: number;
  backoff_min_ms?: number;
  backoff_max_ms?: number;
}

interface PromptJson {
  model?: string;
  tokens?: number[];
  block_size?: number;
  lora?: string;
  salt?: string;
  eagle?: boolean;
  exclude_last_token?: boolean;
  tokens_hashes?: string[];
  block_hashes?: string[];
}

interface RequestJson {
  model?: string;
  prompts: PromptJson[];
  workers?: string[];
  limit?: number;
  after?: string;
  max_wait_ms?: number;
  max_block_hashes?: number;
}

class RejectedError extends Error {}

/** Writes a line, without values that say nothing. */
function report(line: Record<string, unknown>): void {
  const left = Object.entries(line).filter(([, value]) => value !== undefined && value !== "" && value !== 0 && value !== false);
  process.stdout.write(`${JSON.stringify(Object.fromEntries(left))}\n`);
}

function numbers(all: string[] | undefined): bigint[] | undefined {
  return all?.map(BigInt);
}

function promptFrom(p: PromptJson, model?: string): Prompt {
  return {
    model: p.model ?? model, tokens: p.tokens, blockSize: p.block_size, lora: p.lora, salt: p.salt, eagle: p.eagle,
    excludeLastToken: p.exclude_last_token, tokensHashes: numbers(p.tokens_hashes), blockHashes: numbers(p.block_hashes),
  };
}

function requestFrom(r: RequestJson): MatchRequest {
  return {
    model: r.model, prompts: r.prompts.map((p) => promptFrom(p, r.model)), workers: r.workers, limit: r.limit, after: r.after,
    maxWaitMs: r.max_wait_ms, maxBlockHashes: r.max_block_hashes,
  };
}

function filterFrom(filter: JsonValue | undefined): Filter | undefined {
  return filter === undefined ? undefined : fromJson(FilterSchema, filter);
}

function optionsFrom(o: Options = {}): SubscribeOptions {
  return {
    after: o.after, start: o.start, gapPolicy: o.gap_policy, filter: filterFrom(o.filter), idleTimeoutMs: o.idle_timeout_ms,
    backoffMinMs: o.backoff_min_ms, backoffMaxMs: o.backoff_max_ms,
  };
}

/** Names an error. */
function why(error: unknown): string {
  if (error instanceof KvcastError) {
    return error.reason ? `${error.code}/${error.reason}` : error.code;
  }
  const names = [[ViolationError, "VIOLATION"], [ConfigError, "CONFIG"], [IdleError, "IDLE"], [EndedError, "ENDED"], [RejectedError, "REJECTED"]] as const;
  return names.find(([type]) => error instanceof type)?.[1] ?? `OTHER: ${String(error)}`;
}

function fail(error: unknown): void {
  const e = error instanceof KvcastError && error.reason ? error : undefined;
  report({
    error: why(error), epoch: e?.epoch, oldest: e?.oldest?.toString(), newest: e?.newest?.toString(),
    retry_after_ms: e?.retryAfterMs === undefined ? undefined : Math.trunc(e.retryAfterMs),
  });
}

const kinds = {
  accepted: "accepted", progress: "progress", snapshotBegin: "snapshot_begin", snapshotWorker: "snapshot_worker",
  snapshotBlocks: "snapshot_blocks", snapshotEnd: "snapshot_end", entries: "entries", unknown: "unknown",
};

function reportUpdate(u: Update): void {
  const position = u.position?.toString();
  if (u.kind === "interruption") {
    report({ interruption: why(u.error), snapshot: u.snapshot, failures: u.failures, position });
    return;
  }
  const m = u.message;
  report({
    update: kinds[u.kind], position, mode: m.accepted && `MODE_${Accepted_Mode[m.accepted.mode]}`, worker: m.snapshotWorker?.worker,
    seqs: u.kind === "entries" ? m.entries.map((e) => e.seq.toString()) : undefined,
  });
}

function matchJson(m: Match): Record<string, unknown> {
  const line = {
    worker: m.worker, rank: m.rank, blocks: m.blocks, tokens: m.tokens, endpoint: m.endpoint, expected_blocks: m.expectedBlocks,
    trust: `TRUST_${Trust[m.trust]}`,
    reasons: m.reasons.length > 0 ? m.reasons.map((r) => `DEGRADED_REASON_${DegradedReason[r]}`) : undefined,
    tiers: m.tiers.length > 0 ? Object.fromEntries(m.tiers.map((t) => [`TIER_${Tier[t.tier]}`, t.blocks])) : undefined,
  };
  return Object.fromEntries(Object.entries(line).filter(([, value]) => value !== undefined && value !== "" && value !== 0));
}

function reportResult(r: MatchResult): void {
  report({ position: r.position.toString(), matches: r.matches.map((all) => all.map(matchJson)) });
}

function messages<D extends DescMessage>(schema: D, all: MessageShape<D>[]): JsonValue[] {
  return all.map((m) => toJson(schema, m, { useProtoFieldName: true }));
}

async function subscribe(client: Client, call: Call): Promise<void> {
  let n = 0;
  for await (const u of client.subscribe(optionsFrom(call.options))) {
    reportUpdate(u);
    if (++n === call.resnapshot_after) {
      u.resnapshot(new RejectedError());
    }
    if (n === call.updates) {
      break;
    }
  }
}

async function view(client: Client, call: Call): Promise<void> {
  const v = new View();
  let n = 0;
  for await (const u of client.subscribe(optionsFrom(call.options))) {
    v.apply(u);
    if (++n === call.updates) {
      break;
    }
  }
  await sleep(call.wait_ms ?? 0);
  report({ matches: (call.prompts ?? []).map((p) => v.match(promptFrom(p)).map(matchJson)) });
}

async function matches(client: Client, call: Call): Promise<void> {
  const matcher = client.matcher();
  const results = await Promise.allSettled((call.requests ?? []).map((r) => matcher.match(requestFrom(r))));
  await matcher.close();
  for (const r of results) {
    if (r.status === "fulfilled") {
      reportResult(r.value);
    } else {
      fail(r.reason);
    }
  }
}

function position(text: string): void {
  try {
    const p = Position.parse(text);
    report({ epoch: p.epoch, seq: p.seq.toString(), text: p.toString() });
  } catch {
    report({ error: "POSITION" });
  }
}

async function make(client: Client, call: Call): Promise<void> {
  switch (call.call) {
    case "subscribe":
      return subscribe(client, call);
    case "view":
      return view(client, call);
    case "match":
      return reportResult(await client.match(requestFrom(call.request!)));
    case "matches":
      return matches(client, call);
    case "lookup": {
      const holders = await client.lookupBlocks({
        blockHashes: numbers(call.block_hashes), tokensHashes: numbers(call.tokens_hashes), filter: filterFrom(call.filter),
      });
      return report({ holders: messages(BlockHolderSchema, holders) });
    }
    case "workers":
      return report({ workers: messages(WorkerStatusSchema, await client.workers(filterFrom(call.filter))) });
    case "report_outcomes": {
      const outcomes = call.outcomes!.map((o) => ({ ...o, trust: Trust[(o.trust ?? "TRUST_UNSPECIFIED").slice(6) as keyof typeof Trust] }));
      return report({ ignored: String(await client.reportOutcomes(outcomes)) });
    }
    case "note_routed": {
      const routed: Routed[] = call.routed!.map((r) => ({ worker: r.worker, rank: r.rank, prompt: promptFrom(r.prompt), ttlMs: r.ttl_ms }));
      return report({ ignored: String(await client.noteRouted(routed)) });
    }
    case "tokens_hashes": {
      const hashes = tokensHashes(call.tokens!, call.block_size!, { lora: call.lora, salt: call.salt });
      return report({ tokens_hashes: hashes.map(String) });
    }
    case "position":
      return position(call.text ?? "");
    default:
      throw new Error(`call ${JSON.stringify(call.call)} is not known`);
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const job = JSON.parse(line) as Job;
  const client = new Client(job.targets, {
    token: job.token, clientId: job.client_id, tls: job.ca_file === undefined ? undefined : { ca: readFileSync(job.ca_file) },
  });
  for (const call of job.calls) {
    await make(client, call).catch(fail);
  }
  report({ end: true });
}
