// The parts that need no runtime: the fold, the frames, the errors, and a feed in bad weather.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Connection } from "../dist/connection.js";
import { ERRORS, errorFrom } from "../dist/errors.js";
import { Disconnected, ERROR_NUMBERS, foldRun, interval, PostroomError, RunOverlap, StoreClosed, VERSION } from "../dist/index.js";
import { Lines } from "../dist/lines.js";
import { Session } from "../dist/session.js";
import { generate } from "../scripts/generate.mjs";
import { ROOT, seqs } from "./support.mjs";

// ---- the protocol ----

test("the types are those of the schema", () => {
  const schema = JSON.parse(readFileSync(join(ROOT, "protocol", "schema.json"), "utf8"));
  const source = readFileSync(new URL("../src/protocol.ts", import.meta.url), "utf8");
  assert.ok(source === generate(schema), "src/protocol.ts is stale: npm run generate");
});

test("the generator refuses a form that it does not know", () => {
  const schema = JSON.parse(readFileSync(join(ROOT, "protocol", "schema.json"), "utf8"));
  schema.$defs.Peer.properties.name = { type: "string", contentEncoding: "base64" };
  assert.throws(() => generate(schema), /Peer\.name/);
});

test("every error has a class, and keeps its own code", () => {
  for (const [name, number] of Object.entries(ERROR_NUMBERS)) {
    const error = errorFrom(number, "no", { code: name, hint: "do this", path: "a.b" });
    assert.equal(error.constructor, ERRORS[name]);
    assert.deepEqual([error.code, error.path, error.message], [name, "a.b", "no (do this)"]);
  }
  assert.ok(errorFrom(ERROR_NUMBERS.run_overlap, "no") instanceof RunOverlap);
  const finer = errorFrom(ERROR_NUMBERS.shutting_down, "no", { code: "store_closed" });
  assert.ok(finer instanceof StoreClosed && finer.code === "store_closed");
  assert.ok(errorFrom(-39999, "new", { code: "newer" }) instanceof PostroomError);
});

test("the version is that of the package", () => {
  const { version } = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8"));
  assert.equal(version, VERSION);
});

test("the lock file tells versions and hashes and no address", () => {
  const text = readFileSync(new URL("../package-lock.json", import.meta.url), "utf8");
  for (const one of Object.values(JSON.parse(text).packages)) assert.equal(one.resolved, undefined);
});

// ---- frames ----

test("lines come whole however the bytes are cut", () => {
  const said = ['{"text":"Grüße 👋 日本"}', '{"a":1}', "", '{"b":"\u2028"}'];
  const bytes = Buffer.from(said.map((line) => `${line}\n`).join(""));
  for (let size = 1; size <= bytes.length; size++) {
    const lines = new Lines(1_000);
    const out = [];
    for (let at = 0; at < bytes.length; at += size) out.push(...lines.feed(bytes.subarray(at, at + size)));
    assert.deepEqual(out, said.filter((line) => line !== ""));
  }
});

test("a line over the limit is refused before it is held", () => {
  const lines = new Lines(10);
  assert.deepEqual(lines.feed(Buffer.from("0123456789\n01234")), ["0123456789"]);
  assert.throws(() => lines.feed(Buffer.from("567890")), RangeError);
});

// ---- the fold ----

const vectors = join(ROOT, "protocol", "vectors");

test("recorded logs fold to the recorded results", () => {
  const files = readdirSync(vectors).filter((name) => name.endsWith(".json"));
  assert.ok(files.length > 0);
  for (const file of files) {
    const { log, messageId, until, result } = JSON.parse(readFileSync(join(vectors, file), "utf8"));
    const { events, ...rest } = foldRun(log[0].sessionId, messageId, interval(log, messageId, until), until);
    assert.deepEqual(rest, result, file);
    assert.deepEqual(events, log.filter(({ seq }) => result.firstSeq <= seq && seq <= result.lastSeq), file);
  }
});

const event = (seq, type, data = {}) => ({ sessionId: "s", seq, type, at: seq, data });
const queued = (seq, id) => event(seq, "inbox/queued", { message: { id, content: [], source: {} }, target: "next_turn", wakes: true });
const reply = (seq, ...content) =>
  event(seq, "assistant/message", { message: { id: "r", content }, usage: { inputTokens: 2, outputTokens: 1 } });
const text = (said) => ({ type: "text", text: said });

test("a run begins at its own receipt and ends at the first idle", () => {
  const log = [queued(1, "a"), reply(2, text("early")), queued(3, "b"), event(4, "agent/idle"), event(5, "agent/idle")];
  assert.deepEqual(seqs(interval(log, "b")), [3, 4]);
  assert.deepEqual(interval(log, "c"), []);
  const result = foldRun("s", "b", interval(log, "b"));
  assert.deepEqual([result.finalResponse, result.finishReason, result.complete], [null, null, true]);
});

test("the last reply counts, also if it has no text", () => {
  const log = [queued(1, "a"), reply(2, text("one"), text("more")), reply(3, { type: "reasoning", text: "hm" })];
  assert.equal(foldRun("s", "a", log).finalResponse, null);
  assert.equal(foldRun("s", "a", log.slice(0, 2)).finalResponse, "onemore");
  assert.deepEqual(foldRun("s", "a", log).usage, { inputTokens: 4, outputTokens: 2, cachedTokens: 0, reasoningTokens: 0 });
  assert.equal(foldRun("s", "a", log).complete, false);
});

test("a replaced message starts a run under its new id", () => {
  const log = [queued(1, "a"), event(2, "inbox/replaced", { messageId: "a", message: { id: "b" } }), event(3, "agent/idle")];
  assert.deepEqual(seqs(interval(log, "b")), [2, 3]);
});

test("quiescent is the first idle without a pending child", () => {
  const idle = (seq, ...pendingChildren) => event(seq, "agent/idle", { pendingChildren });
  const log = [queued(1, "a"), idle(2, "child"), event(3, "agent/running"), idle(4)];
  assert.deepEqual(seqs(interval(log, "a")), [1, 2]);
  assert.deepEqual(foldRun("s", "a", interval(log, "a")).pendingChildren, ["child"]);
  assert.deepEqual(seqs(interval(log, "a", "quiescent")), [1, 2, 3, 4]);
  assert.equal(foldRun("s", "a", log.slice(0, 2), "quiescent").complete, false);
});

test("an error is told whole, and nothing else is", () => {
  const end = (reason) => foldRun("s", "a", [queued(1, "a"), event(2, "turn/end", { turn: 1, reason })]);
  const reason = { kind: "error", code: "server", message: "no", status: 500 };
  assert.deepEqual(end({ ...reason, cause: null }).error, reason);
  assert.equal(end({ kind: "max_tokens" }).error, null);
  assert.equal(end({ kind: "max_tokens" }).finishReason, "max_tokens");
});

// ---- a feed in bad weather ----

/** A runtime in a few lines: one log, and a wire that is cut, repeats itself, or lags. */
class Weather {
  log = [];
  held = 0;
  #receiver;
  #subscriptions = new Map();
  #count = 0;

  open = async (receiver) => {
    this.#receiver = receiver;
    this.#subscriptions.clear();
    return { send: (frame) => this.#take(JSON.parse(frame)), close: async () => undefined };
  };

  #take({ id, method, params }) {
    let result = {};
    if (method === "session/subscribe") {
      result = { subscription: ++this.#count, headSeq: this.log.length };
      this.#subscriptions.set(this.#count, params.after);
    } else if (method === "session/unsubscribe") {
      this.#subscriptions.delete(params.subscription);
    }
    this.#say({ id, result });
    this.flow();
  }

  append() {
    this.log.push(event(this.log.length + 1, "agent/running"));
    this.flow();
  }

  flow() {
    for (const [subscription, after] of this.#subscriptions) {
      this.#subscriptions.set(subscription, this.log.length);
      for (const one of this.log.slice(after)) this.#note("session.event", { subscription, event: one });
    }
  }

  repeat() {
    for (const subscription of this.#subscriptions.keys()) {
      this.#note("session.event", { subscription, event: this.log.at(-1) });
    }
  }

  /** The last event is not sent; it is told that it was not. */
  lag() {
    this.log.push(event(this.log.length + 1, "agent/running"));
    for (const subscription of this.#subscriptions.keys()) {
      this.#note("session.lagged", { sessionId: "s", subscription, fromSeq: this.log.length });
    }
    this.#subscriptions.clear();
  }

  cut() {
    this.#receiver.gone(new Disconnected("cut"));
  }

  get subscribed() {
    return this.#subscriptions.size;
  }

  #note(method, params) {
    this.#say({ method, params });
  }

  #say(frame) {
    this.#receiver.frame(JSON.stringify({ jsonrpc: "2.0", ...frame }));
  }
}

function connected(weather, options = {}) {
  const client = { name: "test", version: "0" };
  const onError = (error) => assert.fail(error);
  const connection = new Connection({
    ...{ open: weather.open, resumes: true, client, connectMs: 5_000, reconnectMs: 5_000, onError },
    ...options,
  });
  const opened = { sessionId: "s", created: true, headSeq: 0, status: "idle", coreId: "default" };
  return { connection, session: new Session(connection, opened) };
}

test("a feed gives every event once, in order, whatever happens to the wire", async () => {
  const weather = new Weather();
  const { connection, session } = connected(weather);
  const last = 300;
  const heard = [];
  const following = (async () => {
    for await (const one of session.events(0)) {
      heard.push(one.seq);
      if (one.seq >= last) break;
    }
  })();
  const happenings = [() => weather.append(), () => weather.repeat(), () => weather.lag(), () => weather.cut()];
  weather.append();
  for (let step = 0; weather.log.length < last; step++) {
    happenings[[0, 0, 1, 0, 2, 0, 0, 1, 0, step % 45 === 0 ? 3 : 0][step % 10]]();
    await new Promise(setImmediate);
  }
  await following;
  assert.deepEqual(heard, Array.from({ length: last }, (_, index) => index + 1));
  await connection.close();
});

test("who reads slowly misses nothing, and little is held for them", async () => {
  const weather = new Weather();
  const { connection, session } = connected(weather);
  const slow = session.events(0);
  weather.append();
  assert.equal((await slow.next()).value.seq, 1);
  for (let count = 0; count < 5_000; count++) weather.append();
  assert.equal(weather.subscribed, 0); // it asked for no more
  let next = 2;
  for await (const one of slow) {
    assert.equal(one.seq, next++);
    if (one.seq === 5_001) break;
  }
  await connection.close();
});

test("a wire that fell silent is given up, and one that answers is not", async (t) => {
  t.mock.timers.enable({ apis: ["setInterval"] });
  const weather = new Weather();
  let opened = 0;
  let silent = false;
  const open = async (receiver) => {
    const wire = await weather.open(receiver);
    opened++;
    silent = false;
    return { ...wire, send: (frame) => silent || wire.send(frame) };
  };
  const { connection, session } = connected(weather, { open, silentMs: 1_000 });
  const heard = session.events(0);
  weather.append();
  assert.equal((await heard.next()).value.seq, 1);
  t.mock.timers.tick(5_000);
  assert.equal(opened, 1);
  silent = true;
  weather.log.push(event(2, "agent/idle"));
  t.mock.timers.tick(2_000);
  assert.equal((await heard.next()).value.seq, 2);
  assert.equal(opened, 2);
  await connection.close();
});

test("a loop that is left, and a session that is closed, end the subscription", async () => {
  const weather = new Weather();
  const { connection, session } = connected(weather);
  weather.append();
  for await (const _event of session.events(0)) break;
  assert.equal(weather.subscribed, 0);
  const following = (async () => {
    for await (const _event of session.events(0));
  })();
  await new Promise(setImmediate);
  assert.equal(weather.subscribed, 1);
  session.close();
  session.close();
  await following;
  assert.equal(weather.subscribed, 0);
  await connection.close();
});

test("an answer that was lost with the wire is asked for again only where that changes nothing", async () => {
  const weather = new Weather();
  const { connection, session } = connected(weather);
  await connection.live();
  const take = weather.open;
  let sent = [];
  weather.open = undefined;
  connection.options.open = async (receiver) => {
    const wire = await take(receiver);
    return {
      ...wire,
      send: (frame) => {
        const { method } = JSON.parse(frame);
        sent.push(method);
        if (sent.filter((one) => one === method).length > 1 || method === "initialize") wire.send(frame);
        else queueMicrotask(() => weather.cut());
      },
    };
  };
  weather.cut();
  await session.prompt("hello", { messageId: "msg_1" });
  assert.deepEqual(sent.filter((one) => one !== "initialize"), ["session/prompt", "session/prompt"]);
  sent = [];
  await assert.rejects(session.cancel(), Disconnected);
  assert.deepEqual(sent, ["session/cancel"]);
  await connection.close();
});
