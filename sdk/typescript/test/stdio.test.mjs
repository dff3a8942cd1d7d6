// A runtime of our own: what is said, what is owned, and what happens when it dies.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import {
  connect,
  ConfigError,
  Disconnected,
  InputError,
  InvalidContent,
  MessageConflict,
  newMessageId,
  NotAsked,
  ProtocolError,
  RunTimeout,
  UnknownSession,
} from "../dist/index.js";
import { ASKING, COMMAND, House, promised, seqs, types } from "./support.mjs";

const SLOW = { text: "slow", delay_ms: 60_000 };

test("a run answers and describes its interval", async (t) => {
  const house = new House(t);
  // It thinks for a moment: tokens may be missed by who has only just asked for them.
  const room = await house.room({ model: house.script({ text: "Grüße 👋", delay_ms: 300, chunks: 3 }) });
  const session = await room.session("s");
  const heard = [];
  const tokens = [];
  const result = await session.run("hello", {
    onEvent: (event) => heard.push(event),
    onDelta: (delta) => tokens.push(delta.text),
  });
  assert.equal(result.finalResponse, "Grüße 👋");
  assert.equal(result.finishReason, "completed");
  assert.equal(result.complete, true);
  assert.equal(result.error, null);
  assert.ok(result.usage.inputTokens > 0);
  assert.deepEqual(heard, result.events);
  assert.equal(result.events[0].type, "inbox/queued");
  assert.equal(result.events.at(-1).type, "agent/idle");
  assert.equal(tokens.join(""), "Grüße 👋");
  assert.deepEqual(await session.fold(result.messageId), result);
});

test("a receipt comes at once, and the same id again is the same receipt", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script(SLOW), closeTimeout: 500 });
  const session = await room.session();
  const messageId = newMessageId();
  const receipt = await session.prompt("hello", { messageId });
  assert.deepEqual(receipt, await session.prompt("hello", { messageId }));
  await assert.rejects(session.prompt("other", { messageId }), MessageConflict);
});

test("what is pending can be seen, replaced and removed", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script(SLOW), closeTimeout: 500 });
  const session = await room.session();
  await session.prompt("first");
  for await (const event of session.events(0)) if (event.type === "user/message") break;
  const second = await session.prompt("second");
  const third = await session.prompt("third");
  await session.steer("steered");
  await session.inject("injected");
  assert.equal((await session.inbox()).length, 4);
  const replaced = await session.replace(second.messageId, "second, better");
  assert.notEqual(replaced, second.messageId);
  assert.equal(await session.replace(second.messageId, "again"), null);
  assert.equal(await session.remove(third.messageId), true);
  assert.equal(await session.remove(third.messageId), false);
  const texts = (await session.inbox()).map((one) => one.message.content[0].text);
  assert.deepEqual(texts.sort(), ["injected", "second, better", "steered"]);
  await session.cancel();
  assert.deepEqual(await session.inbox(), []);
});

test("overlapping runs of one client on one session take turns", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script({ text: "one", delay_ms: 100 }, { text: "two" }) });
  const [a, b] = [await room.session("s"), await room.session("s")];
  const [one, two] = await Promise.all([a.run("1"), b.run("2")]);
  assert.deepEqual([one.finalResponse, two.finalResponse], ["one", "two"]);
  assert.ok(one.lastSeq < two.firstSeq);
});

test("a run that is over its time tells what there is, and the agent goes on", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script({ text: "warm" }, { text: "late", delay_ms: 1_500 }) });
  const session = await room.session();
  const { lastSeq } = await session.run("hello");
  const error = await session.run("hello", { timeout: 700 }).catch((error) => error);
  assert.ok(error instanceof RunTimeout, String(error));
  assert.equal(error.partial.complete, false);
  assert.equal(error.partial.firstSeq, lastSeq + 1);
  for await (const event of session.events(error.partial.lastSeq)) if (event.type === "agent/idle") break;
  assert.equal((await session.fold(error.partial.messageId)).finalResponse, "late");
});

test("a run that is over its time is cancelled where that was asked for", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script(SLOW), closeTimeout: 500 });
  const session = await room.session();
  const error = await session.run("hello", { timeout: 200, cancelOnTimeout: true }).catch((error) => error);
  assert.ok(error instanceof RunTimeout, String(error));
  for await (const event of session.events()) if (event.type === "agent/idle") break;
  assert.equal((await session.fold(error.partial.messageId)).finishReason, "cancelled");
});

test("a signal gives up each way of waiting, with its own reason", async (t) => {
  const house = new House(t);
  const room = await house.room({ model: house.script(SLOW), closeTimeout: 500 });
  const session = await room.session();
  const stop = new AbortController();
  const running = session.run("hello", {
    signal: stop.signal,
    onEvent: (event) => event.type === "user/message" && stop.abort(new Error("enough")),
  });
  await assert.rejects(running, /enough/);
  const given = { signal: stop.signal };
  await assert.rejects(session.prompt("more", given), /enough/);
  await assert.rejects(session.inbox(given), /enough/);
  await assert.rejects(session.events(0, given).next(), /enough/);
  await assert.rejects(room.session("other", given), /enough/);
  await assert.rejects(house.room(given), /enough/);
  await room.sessions(); // the connection is as it was
});

test("errors are typed and say what to do", async (t) => {
  const room = await new House(t).room();
  const session = await room.session();
  await assert.rejects(room.session("no/such"), InputError);
  await assert.rejects(session.prompt(""), (error) => error instanceof InvalidContent && error.path !== undefined);
  await assert.rejects(session.fork({ atSeq: 99 }), InputError);
  await assert.rejects(room.approvals.decide("apr_none", "allow"), NotAsked);
  await assert.rejects(room.outbox.list({ sessionId: "session_none" }), UnknownSession);
  const bad = room.session(undefined, { coreId: 5 });
  await assert.rejects(bad, (error) => error instanceof ProtocolError && error.path === "coreId");
  await assert.rejects(session.prompt("x".repeat(33 * 1024 * 1024)), { code: "frame_too_large" });
});

test("a runtime that cannot start says why", async (t) => {
  const house = new House(t);
  await assert.rejects(house.room({ command: join(house.folder, "nothing") }), ConfigError);
  const error = await house.room({ args: ["--no-such-option"] }).catch((error) => error);
  assert.ok(error instanceof Disconnected);
  assert.equal(error.exitCode, 2);
  assert.match(error.stderrTail, /no-such-option/);
  await assert.rejects(connect({ url: "ftp://nowhere" }), ConfigError);
});

// A shell that tells its own process id, as the runtime's.
function known(house) {
  const wrapped = `echo $$ > ${house.folder}/pid; exec ${COMMAND} "$@"`;
  const pid = () => Number(execFileSync("cat", [join(house.folder, "pid")], { encoding: "utf8" }));
  return { command: ["sh", "-c", wrapped, "sh"], pid };
}

function alive(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch {
    return false;
  }
}

test("the death of the runtime fails every pending call within a second, and a retry starts another", async (t) => {
  const house = new House(t);
  const { command, pid } = known(house);
  const room = await house.room({ command, model: house.script(SLOW) });
  const session = await room.session("s");
  const started = promised();
  const waiting = [
    session.run("hello", { onEvent: (event) => event.type === "user/message" && started.resolve() }),
    session.run("waits for the first"),
    (async () => {
      for await (const _event of session.events(0));
    })(),
  ];
  const all = Promise.allSettled(waiting);
  await started.promise;
  const since = Date.now();
  process.kill(pid(), "SIGKILL");
  // The second run may begin only now, and in a runtime that lives: it is given up by hand.
  const first = await Promise.allSettled([waiting[0], waiting[2]]);
  assert.ok(Date.now() - since < 1_000, `${Date.now() - since} ms`);
  for (const { reason } of first) {
    assert.ok(reason instanceof Disconnected, String(reason));
    assert.equal(reason.exitCode, -9);
    assert.equal(typeof reason.stderrTail, "string");
  }
  const again = await room.session("s");
  assert.equal(again.created, false);
  await again.cancel();
  await all;
  assert.equal(alive(pid()), true);
});

test("close is idempotent, ends what waits, and reaps the runtime", async (t) => {
  const house = new House(t);
  const { command, pid } = known(house);
  const room = await house.room({ command });
  const session = await room.session("s");
  await session.run("hello");
  const ending = (async () => {
    const events = [];
    for await (const event of session.events(0)) events.push(event);
    return events;
  })();
  await session.inbox();
  const running = assert.rejects(room.session("t").then((other) => other.run("hello")), Disconnected);
  await Promise.all([room.close(), room.close()]);
  await room.close();
  await running;
  await ending;
  assert.equal(alive(pid()), false);
  await assert.rejects(session.prompt("more"), Disconnected);
});

for (const [ignored, way] of [
  ["", "the end of its input"],
  ["TERM", "TERM"],
]) {
  test(`close also reaps a runtime that does not hear ${way}`, async (t) => {
    const house = new House(t);
    // It answers one request, and then only waits.
    const program = join(house.folder, "deaf");
    const answer = '{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1,"server":{},"capabilities":{}}}';
    const trap = ignored && `trap '' ${ignored};`;
    const command = ["sh", "-c", `${trap} echo $$ > ${program}; read line; echo '${answer}'; while :; do sleep 0.05; done`];
    const room = await house.room({ command, closeTimeout: 300 });
    const pid = Number(execFileSync("cat", [program], { encoding: "utf8" }));
    const since = Date.now();
    await room.close();
    assert.equal(alive(pid), false);
    assert.ok(Date.now() - since < 3_000);
  });
}

test("a callback that throws breaks neither the connection nor other subscribers", async (t) => {
  const house = new House(t);
  const thrown = [];
  const room = await house.room({
    model: house.script({ text: "hello", delay_ms: 300 }),
    onError: (error) => {
      thrown.push(error.message);
      throw error;
    },
  });
  const session = await room.session("s");
  const heard = [];
  const done = promised();
  session.subscribe({
    onEvent: () => {
      throw new Error("from a subscriber");
    },
  });
  session.subscribe({
    onEvent: (event) => {
      heard.push(event);
      if (event.type === "agent/idle") done.resolve();
    },
  });
  await session.bind({
    onDelivery: () => {
      throw new Error("from a route");
    },
  });
  const result = await session.run("hello", {
    onEvent: async () => {
      throw new Error("from a run");
    },
    onDelta: () => {
      throw new Error("from a token");
    },
  });
  assert.equal(result.finalResponse, "hello");
  await done.promise;
  assert.deepEqual(seqs(heard), heard.map((_, index) => index + 1));
  assert.equal((await session.run("again")).finalResponse, "again");
  assert.deepEqual([...new Set(thrown)].sort(), ["from a route", "from a run", "from a subscriber", "from a token"]);
});

const WRITES = { tool_calls: [{ name: "bash", arguments: { command: "touch made" } }] };

for (const [name, answer, made] of [
  ["allowed", () => true, true],
  ["denied", async () => false, false],
  [
    "denied where the callback throws",
    () => {
      throw new Error("cannot decide");
    },
    false,
  ],
]) {
  test(`a tool is ${name}`, async (t) => {
    const house = new House(t);
    const model = house.script(WRITES, { text: "done" });
    const room = await house.room({ command: ASKING, model, onError: () => undefined });
    const session = await room.session("s", { cwd: house.folder });
    const asked = [];
    const binding = await session.bind({
      onApproval: (request) => {
        asked.push(request.subject);
        return answer();
      },
    });
    const result = await session.run("make it");
    assert.equal(result.finalResponse, "done");
    assert.match(asked.join(), /touch made/);
    assert.equal(existsSync(join(house.folder, "made")), made);
    binding.close();
    binding.close();
  });
}

test("a tool that is not decided on the spot is decided by its id", async (t) => {
  const house = new House(t);
  const room = await house.room({ command: ASKING, model: house.script(WRITES, { text: "done" }) });
  const session = await room.session("s", { cwd: house.folder });
  await session.bind({ onApproval: () => null });
  const running = session.run("make it");
  for await (const event of session.events()) if (event.type === "approval/asked") break;
  const [open] = await room.approvals.list();
  assert.match(open.subject, /touch made/);
  await room.approvals.decide(open.approvalId, "allow");
  assert.equal((await running).finalResponse, "done");
  assert.equal(existsSync(join(house.folder, "made")), true);
});

test("what a session delivers comes to who is bound", async (t) => {
  const room = await new House(t).room();
  const session = await room.session();
  const got = promised();
  await session.bind({ onDelivery: got.resolve });
  await session.run("hello");
  assert.equal((await got.promise).text, "hello");
  const [sent] = await room.outbox.list({ sessionId: session.id });
  assert.equal(sent.parts[0].text, "hello");
});

test("a fork goes its own way, and sessions are listed", async (t) => {
  const room = await new House(t).room();
  const session = await room.session();
  await session.run("hello");
  const fork = await session.fork();
  assert.equal((await fork.run("from here")).finalResponse, "from here");
  assert.deepEqual((await room.sessions()).map((one) => one.sessionId).sort(), [session.id, fork.id].sort());
});

test("a log can be read to its end, and by type", async (t) => {
  const room = await new House(t).room();
  const session = await room.session();
  await session.run("hello");
  assert.equal(await session.status(), "idle");
  const read = await session.log();
  assert.deepEqual(seqs(read), read.map((_, index) => index + 1));
  const ends = [];
  for await (const event of session.events(0, { follow: false, types: ["turn/end"] })) ends.push(event);
  assert.deepEqual(types(ends), ["turn/end"]);
});
