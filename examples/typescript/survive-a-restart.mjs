// Survive a restart: the daemon is killed in the middle of a run, another is started, and the run ends.
// It starts the daemons itself, on a port of its own.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { fileURLToPath } from "node:url";
import { connect } from "@postroom/sdk";

const port = process.env.POSTROOM_PORT ?? "8399";
process.env.POSTROOM_TOKEN ??= "only-for-this-example";

async function daemon(model) {
  const words = ["serve", "--port", port, "--model", model, "--db", "restart.db"];
  const child = spawn(process.env.POSTROOM_COMMAND ?? "postroom", words, { stdio: ["ignore", "ignore", "pipe"] });
  for await (const text of child.stderr.setEncoding("utf8").iterator({ destroyOnReturn: false })) {
    if (text.includes("serving http")) break;
  }
  child.stderr.resume();
  return child;
}

const first = await daemon(`scripted:${fileURLToPath(new URL("slow.json", import.meta.url))}`);
const room = await connect(`ws://127.0.0.1:${port}`);
const session = await room.session();

let second;
const result = await session.run("Are you still there?", {
  onEvent: async (event) => {
    if (event.type !== "step/start" || second) return;
    first.kill("SIGKILL");
    second = once(first, "exit").then(() => daemon("scripted:echo"));
  },
});

const ends = result.events.filter((event) => event.type === "turn/end").map((event) => event.data.reason.kind);
console.log("turns ended:", ends.join(", then "));
console.log(result.finalResponse);
await room.close();
(await second).kill("SIGTERM");
