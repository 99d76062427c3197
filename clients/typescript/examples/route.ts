// Sends prompts to the engines that hold most of them, as far as a router does that: node route.js [HOST:PORT[,HOST:PORT..]]
import { Client, KvcastError, outcomeOf, Trust, type Match, type Matcher, type Position } from "@kvcast/client";

/** Where to send a prompt, and what was predicted. */
interface Choice {
  worker: string;
  rank: number;
  match?: Match;
  position?: Position;
}

/** Chooses the dp rank that holds most of a prompt, or any if none does or the server does not answer. */
async function choose(matcher: Matcher, tokens: number[], workers: string[]): Promise<Choice> {
  const any = { worker: workers[Math.floor(Math.random() * workers.length)]!, rank: 0 };
  try {
    const { position, matches } = await matcher.match({ prompts: [{ tokens, excludeLastToken: true }], limit: 1 }, { timeoutMs: 200 });
    const match = matches[0]?.[0];
    return match === undefined ? any : { worker: match.worker, rank: match.rank, match, position };
  } catch (e) {
    if (e instanceof KvcastError) {
      return any; // a request is never refused because its best place is unknown
    }
    throw e;
  }
}

const client = new Client(process.argv[2] ?? "localhost:50051", { clientId: "route.ts" });
const workers = (await client.workers()).map((w) => w.name);
if (workers.length === 0) {
  throw new Error("there are no workers");
}
const matcher = client.matcher();
for (let i = 0; i < 10; i++) {
  const tokens = Array.from({ length: 256 }, (_, n) => 1000 * i + n);
  const { worker, rank, match, position } = await choose(matcher, tokens, workers);
  console.log(`prompt ${i} to ${worker}/${rank}: ${match ? `${match.tokens} tokens, ${Trust[match.trust]}` : "nothing is held"}`);
  // Later prompts that begin in the same way go to the same engine, before it reports that it has stored the blocks.
  await matcher.noteRouted([{ worker, rank, prompt: { tokens } }]);
  // When the engine has answered, report how much it has reused: usage.prompt_tokens_details.cached_tokens.
  if (match !== undefined && position !== undefined) {
    await client.reportOutcomes([outcomeOf(match, position, match.tokens)]);
  }
}
await matcher.close();
