// A daemon over a web socket: what survives a lost connection, and what does not.

import assert from "node:assert/strict";
import { createServer, connect as dial } from "node:net";
import { test } from "node:test";
import { connect, Disconnected, NotAllowed, RunOverlap } from "../dist/index.js";
import { end, House, promised, seqs, TOKEN } from "./support.mjs";

/** Passes bytes on to a port, and cuts all its connections when told. */
async function cable(test, port) {
  const open = new Set();
  const server = createServer((near) => {
    const far = dial(port, "127.0.0.1");
    for (const [one, other] of [[near, far], [far, near]]) {
      open.add(one);
      one.on("error", () => undefined);
      one.on("close", () => {
        open.delete(one);
        other.destroy();
      });
      one.pipe(other);
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const cut = () => open.forEach((socket) => socket.destroy());
  test.after(() => {
    cut();
    server.close();
  });
  return { port: server.address().port, cut, open };
}

test("a wrong token is refused, and it is said so", async (t) => {
  const house = new House(t);
  await house.daemon();
  await assert.rejects(house.client({ token: "a-wrong-token-of-enough-letters" }), NotAllowed);
  const room = await house.client();
  await assert.rejects(room.shutdown(), NotAllowed);
  await assert.rejects(connect("ws://127.0.0.1:9", { token: TOKEN }), Disconnected);
});

test("two clients share a session: a second exclusive run is refused, a shared one is not", async (t) => {
  const house = new House(t);
  await house.daemon(house.script({ text: "one", delay_ms: 1_200 }, { text: "two" }));
  const [a, b] = [await house.client(), await house.client()];
  const [mine, theirs] = [await a.session("s"), await b.session("s")];
  const started = promised();
  const running = mine.run("1", { onEvent: (event) => event.type === "turn/start" && started.resolve() });
  await started.promise;
  await assert.rejects(theirs.run("2"), RunOverlap);
  assert.deepEqual(await theirs.inbox(), []);
  const shared = await theirs.run("2", { mode: "share" });
  const first = await running;
  assert.equal(first.finalResponse, "two");
  assert.equal(shared.finalResponse, "two");
  assert.ok(first.firstSeq < shared.firstSeq);
  assert.equal(first.lastSeq, shared.lastSeq);
});

test("events come without gap or duplicate over lost connections", async (t) => {
  const house = new House(t);
  await house.daemon();
  const line = await cable(t, house.port);
  const room = await house.client();
  const far = await connect(`ws://127.0.0.1:${line.port}`, { token: TOKEN });
  t.after(() => far.close());
  const heard = [];
  let cuts = 0;
  const following = (async () => {
    for await (const event of (await far.session("s")).events()) {
      heard.push(event);
      if (event.seq % 7 === 0) cuts += line.open.size > 0 ? 1 : 0;
      if (event.seq % 7 === 0) line.cut();
      if (event.type === "agent/idle" && event.seq > 60) return;
    }
  })();
  const session = await room.session("s");
  for (let count = 0; count < 8; count++) await session.run(`message ${count}`);
  await following;
  assert.ok(cuts >= 5, `${cuts} cuts`);
  assert.deepEqual(seqs(heard), heard.map((_, index) => index + 1));
});

test("a message that is sent as the connection goes is queued once", async (t) => {
  const house = new House(t);
  await house.daemon();
  const line = await cable(t, house.port);
  const far = await connect(`ws://127.0.0.1:${line.port}`, { token: TOKEN });
  t.after(() => far.close());
  const session = await far.session("s");
  const sending = Array.from({ length: 6 }, (_, index) => session.prompt(`message ${index}`));
  setImmediate(line.cut);
  const receipts = await Promise.all(sending);
  const queued = (await session.log()).filter((event) => event.type === "inbox/queued");
  assert.deepEqual(queued.map((event) => event.data.message.id).sort(), receipts.map((one) => one.messageId).sort());
});

test("a run survives the kill of its daemon", async (t) => {
  const house = new House(t);
  const daemon = await house.daemon(house.script({ text: "never said", delay_ms: 60_000 }));
  const room = await house.client();
  const session = await room.session("s");
  const started = promised();
  const heard = [];
  const running = session.run("hello", {
    onEvent: (event) => {
      heard.push(event);
      if (event.type === "step/start") started.resolve();
    },
  });
  await started.promise;
  await end(daemon, "SIGKILL");
  await house.daemon();
  const result = await running;
  assert.equal(result.finishReason, "completed");
  assert.equal(result.finalResponse, "hello");
  assert.deepEqual(heard, result.events);
  assert.deepEqual(result.events, (await session.log()).slice(1));
  assert.ok(result.events.some((event) => event.data.reason?.kind === "interrupted"));
});

test("what is sent to a daemon that shuts down goes to the next one", async (t) => {
  const house = new House(t);
  const slow = house.script({ text: "never said", delay_ms: 60_000 });
  const daemon = await house.daemon(slow);
  const room = await house.client();
  const session = await room.session("s");
  await session.prompt("first");
  for await (const event of session.events()) if (event.type === "step/start") break;
  const ended = end(daemon, "SIGTERM"); // it drains for half a second
  const sent = Promise.all(Array.from({ length: 5 }, (_, index) => session.prompt(`later ${index}`)));
  await ended;
  await house.daemon();
  assert.equal(new Set((await sent).map((receipt) => receipt.seq)).size, 5);
});

test("who cannot reconnect in time is told, and the next call tries again", async (t) => {
  const house = new House(t);
  const daemon = await house.daemon();
  const room = await house.client({ reconnectTimeout: 200 });
  const session = await room.session("s");
  const following = assert.rejects(async () => {
    for await (const _event of session.events());
  }, Disconnected);
  await session.inbox();
  await end(daemon, "SIGKILL");
  await following;
  await assert.rejects(session.inbox(), Disconnected);
  await house.daemon();
  assert.equal((await session.run("back")).finalResponse, "back");
});

test("a route is bound again after a loss", async (t) => {
  const house = new House(t);
  const daemon = await house.daemon();
  const room = await house.client();
  const session = await room.session("s");
  const texts = [];
  let got = promised();
  const binding = await session.bind({
    onDelivery: (note) => {
      texts.push(note.text);
      got.resolve();
    },
  });
  await session.run("before");
  await got.promise;
  got = promised();
  await end(daemon, "SIGKILL");
  await house.daemon();
  await room.sessions(); // on the new connection; the route is asked for before it
  await session.run("after");
  await got.promise;
  assert.deepEqual(texts, ["before", "after"]);
  binding.close();
});

test("close ends the connection and what waits on it", async (t) => {
  const house = new House(t);
  await house.daemon(house.script({ text: "never said", delay_ms: 60_000 }));
  const line = await cable(t, house.port);
  const room = await connect(`ws://127.0.0.1:${line.port}`, { token: TOKEN });
  const session = await room.session("s");
  const started = promised();
  const running = assert.rejects(session.run("hello", { onEvent: started.resolve }), Disconnected);
  await started.promise;
  await Promise.all([room.close(), room.close()]);
  await running;
  assert.equal(await (await house.client()).session("s").then((same) => same.created), false);
});

test("Node's own web socket serves as well", async (t) => {
  const house = new House(t);
  await house.daemon();
  const { execFile } = await import("node:child_process");
  const code = `
    import { connect } from ${JSON.stringify(new URL("../dist/index.js", import.meta.url).href)};
    if (!globalThis.WebSocket) throw new Error("there is none");
    for (const token of ${JSON.stringify([TOKEN, "wrong-but-long-enough"])}) {
      const room = await connect("ws://127.0.0.1:${house.port}", { token });
      console.log((await (await room.session("s")).run("hello")).finalResponse);
      await room.close();
    }`;
  const flags = globalThis.WebSocket ? [] : ["--experimental-websocket"];
  const { stdout, stderr } = await new Promise((resolve) => {
    execFile(process.execPath, [...flags, "--input-type=module", "-e", code], (_error, stdout, stderr) => resolve({ stdout, stderr }));
  });
  assert.equal(stdout, "hello\n", stderr);
  assert.match(stderr, /NotAllowed/);
});
