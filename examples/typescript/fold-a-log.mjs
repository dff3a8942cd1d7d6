// Fold a run from yesterday's log: nothing but the message id and the log are needed.

import { connect, foldRun, interval } from "@postroom/sdk";

const options = { model: "scripted:echo", database: "yesterday.db" };

// Yesterday: a run. All that is kept of it here is the id of its message.
const yesterday = await connect(options);
const session = await yesterday.session("diary");
const { messageId, finalResponse } = await session.run("Remember this");
await yesterday.close();

// Today: another process, the same database.
const today = await connect(options);
const diary = await today.session("diary");
const log = await diary.log();
const result = foldRun(diary.id, messageId, interval(log, messageId));
console.log(result.finalResponse === finalResponse, result.finishReason, result.complete);
console.log(`events ${result.firstSeq} to ${result.lastSeq} of ${log.at(-1).seq}`);
await today.close();
