// Approve a tool: the runtime asks whoever is bound to the session before it runs a command.
// `asking.py` is a runtime whose core asks; the operator's own default core does not.

import { fileURLToPath } from "node:url";
import { connect } from "@postroom/sdk";

const here = (name) => fileURLToPath(new URL(name, import.meta.url));
const room = await connect({
  command: [process.env.PYTHON ?? "python3", here("asking.py")],
  model: `scripted:${here("approve.json")}`,
  database: "approve.db",
});
const session = await room.session(undefined, { cwd: process.cwd() });

await session.bind({
  onApproval: ({ subject }) => {
    const allow = !subject.includes("rm ");
    console.log(allow ? "allowed:" : "denied:", subject);
    return allow;
  },
});

const result = await session.run("Tidy up");
console.log(result.finalResponse);
const outcomes = result.events.filter((event) => event.type === "tool/result").map((event) => event.data.outcome);
console.log(outcomes.join(", "));
await room.close();
