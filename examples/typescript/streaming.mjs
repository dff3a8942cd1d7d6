// Streaming: live tokens as they come, and every durable event of the run.

import { connect, is } from "@postroom/sdk";

const room = await connect({ model: "scripted:echo", database: "streaming.db" });
const session = await room.session();

const result = await session.run("Tokens are live; events are durable.", {
  onDelta: (delta) => process.stderr.write(delta.text),
  onEvent: (event) => {
    if (is(event, "turn/end")) console.log(`turn ${event.data.turn} ended: ${event.data.reason.kind}`);
  },
});

// A token may be dropped. What counts is in the log.
console.log(result.finalResponse);
await room.close();
