// One prompt: a runtime of our own, one run, its answer.

import { connect } from "@postroom/sdk";

const room = await connect({ model: "scripted:echo", database: "prompt.db" });
try {
  const session = await room.session();
  const result = await session.run("Hello from Node");
  console.log(result.finalResponse);
  console.log(result.finishReason, result.usage.outputTokens > 0);
} finally {
  await room.close(); // in newer syntax: `await using room = await connect(…)`
}
