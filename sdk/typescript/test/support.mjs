// A home of its own for each test, runtimes in it, and waiting that ends.

import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { connect } from "../dist/index.js";

export const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const own = join(ROOT, ".venv", "bin", "postroom");
export const COMMAND = process.env.POSTROOM_COMMAND ?? (existsSync(own) ? own : "postroom");
/** A runtime whose core asks before it runs a command. */
export const ASKING = [join(dirname(COMMAND), "python"), join(ROOT, "examples", "typescript", "asking.py")];
export const TOKEN = "a-token-for-tests-only";

/** Folders, rooms and daemons that end with the test. */
export class House {
  #rooms = [];
  #daemons = [];

  constructor(test) {
    this.folder = mkdtempSync(join(tmpdir(), "postroom-"));
    this.database = join(this.folder, "room.db");
    this.env = { ...process.env, POSTROOM_HOME: this.folder, POSTROOM_TOKEN: TOKEN };
    test.after(() => this.close());
  }

  /** A script of the scripted model. */
  script(...replies) {
    const file = join(this.folder, `script${Math.random()}.json`);
    writeFileSync(file, JSON.stringify({ replies, then: "echo" }));
    return `scripted:${file}`;
  }

  /** A runtime of our own. */
  async room(options = {}) {
    const { database, env, folder: cwd } = this;
    const room = await connect({ command: COMMAND, model: "scripted:echo", database, env, cwd, ...options });
    this.#rooms.push(room);
    return room;
  }

  /** A daemon; always at the same port of this house. */
  async daemon(model = "scripted:echo") {
    this.port ??= await freePort();
    const words = ["serve", "--port", String(this.port), "--model", model, "--db", this.database, "--drain", "0.5"];
    const child = spawn(COMMAND, words, { env: this.env, cwd: this.folder, stdio: ["ignore", "ignore", "pipe"] });
    this.#daemons.push(child);
    await new Promise((resolve, reject) => {
      let said = "";
      child.stderr.setEncoding("utf8").on("data", (text) => {
        said += text;
        if (said.includes("serving http")) resolve();
      });
      child.once("exit", (code) => reject(new Error(`the daemon ended with ${code}: ${said}`)));
    });
    return child;
  }

  freePort() {
    return freePort();
  }

  /** A client of the daemon. */
  async client(options = {}) {
    const room = await connect(`ws://127.0.0.1:${this.port}`, { token: TOKEN, ...options });
    this.#rooms.push(room);
    return room;
  }

  async close() {
    await Promise.all(this.#rooms.map((room) => room.close()));
    await Promise.all(this.#daemons.map((child) => end(child, "SIGKILL")));
    rmSync(this.folder, { recursive: true, force: true, maxRetries: 3 });
  }
}

export async function end(child, signal) {
  if (child.exitCode !== null || child.signalCode !== null) return;
  const ended = new Promise((resolve) => child.once("exit", resolve));
  child.kill(signal);
  await ended;
}

function freePort() {
  return new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}

/** A promise and what settles it. */
export function promised() {
  let settle;
  const promise = new Promise((resolve) => {
    settle = resolve;
  });
  return { promise, resolve: settle };
}

export const types = (events) => events.map((event) => event.type);
export const seqs = (events) => events.map((event) => event.seq);
