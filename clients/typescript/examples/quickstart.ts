import { Client, Trust } from "@kvcast/client";

const client = new Client(process.argv[2] ?? "localhost:50051", { clientId: "router-1" });
for (const w of await client.workers()) console.log(w.name, w.model, w.blockSize);

const tokens = Array.from({ length: 64 }, (_, i) => i);
const { position, matches: [best = []] } = await client.match({ prompts: [{ tokens, excludeLastToken: true }] });
for (const m of best) console.log(`${m.worker}/${m.rank} holds ${m.tokens} tokens: ${Trust[m.trust]}`);

for await (const u of client.subscribe({ after: position })) {
  console.log(u.kind, u.position?.toString());
  if (u.kind === "entries") break;
}
