// Two programs on one session: each sees all that happens, and only one owns the interval.
// Needs a daemon: `postroom serve --model scripted:echo`.

import { connect, RunOverlap } from "@postroom/sdk";

const url = process.env.POSTROOM_URL ?? "ws://127.0.0.1:8321";
const [worker, watcher] = [await connect(url), await connect(url)];

const seen = [];
const watched = await watcher.session("shared");
const watching = (async () => {
  for await (const event of watched.events()) {
    seen.push(event.type);
    if (event.type === "agent/idle") return;
  }
})();

const session = await worker.session("shared");
const running = session.run("Who owns this?", {
  onEvent: async (event) => {
    if (event.type !== "turn/start") return;
    try {
      await watched.run("May I?");
      console.log("the first run was already over");
    } catch (error) {
      if (!(error instanceof RunOverlap)) throw error;
      console.log("the other program was refused, and queued nothing");
    }
  },
});

console.log((await running).finalResponse);
await watching;
console.log("the watcher saw", seen.filter((type) => type.startsWith("turn/")).join(", "));
await Promise.all([worker.close(), watcher.close()]);
