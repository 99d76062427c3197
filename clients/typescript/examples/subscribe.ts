// Follows a server until it is interrupted, and prints what it streams: node subscribe.js [HOST:PORT[,HOST:PORT..]]
import { Client, View } from "@kvcast/client";

const abort = new AbortController();
process.once("SIGINT", () => abort.abort());
process.once("SIGTERM", () => abort.abort());

const client = new Client(process.argv[2] ?? "localhost:50051", { clientId: "subscribe.ts" });
const view = new View();
for await (const update of client.subscribe({ signal: abort.signal })) {
  view.apply(update);
  if (update.kind === "interruption") {
    console.log(`interrupted: ${update.error.message}; another stream follows in ${Math.round(update.waitMs)} ms`);
  } else {
    // A program with its own state stores the position here, together with the state.
    console.log(update.kind, update.position?.toString() ?? "-", `${view.workers().length} workers`);
  }
}
console.log("the subscription has ended");
