// Queue while busy: follow-ups get turns of their own, in order; what is pending can still be changed.

import { connect, is } from "@postroom/sdk";

const room = await connect({ model: "scripted:echo", database: "busy.db" });
const session = await room.session();

// One call after another, without waiting for any turn: a receipt says that the message is on disk.
const first = await session.prompt("first");
const second = await session.prompt("secnod");
console.log("queued as events", first.seq, "and", second.seq);

const better = await session.replace(second.messageId, "second");
console.log(better === null ? "too late to change it" : "changed while it was pending");

const result = await session.run("third");
console.log("the run owns only its interval:", result.finalResponse);
for (const event of await session.log()) {
  if (is(event, "user/message")) console.log(`turn ${event.data.turn}:`, event.data.message.content[0].text);
}
await room.close();
