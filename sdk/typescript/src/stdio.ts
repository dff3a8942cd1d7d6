/**
 * A runtime of one's own: `postroom serve --stdio` as a child process, one frame a line.
 *
 * Its death is told within a second, with its exit code and the end of what it wrote to standard error.
 */

import { spawn, type ChildProcessWithoutNullStreams } from "node:child_process";
import { constants } from "node:os";
import { ConfigError, Disconnected } from "./errors.js";
import { Lines } from "./lines.js";
import { FRAME_BYTES_MAX } from "./protocol.js";
import type { Opener, Receiver, Transport } from "./transport.js";
import { settledWithin } from "./waiting.js";

const TAIL_BYTES = 8 * 1024;
/** What a dead runtime has written is read for so long; a process it left behind may hold the pipe. */
const LAST_WORDS_MS = 200;
/** How much of the first stage of closing open turns may take to end. */
const DRAIN_SHARE = 0.8;

export interface StdioOptions {
  /** The program, and words that come before ours. Default: POSTROOM_COMMAND, or `postroom`. */
  command?: string | readonly string[];
  /** `PROVIDER:NAME` for every core, whatever it names. */
  model?: string;
  /** The database: a path, or a `postgresql://` address. Default: the runtime's own. */
  database?: string;
  /** More words for the command line. */
  args?: readonly string[];
  /** The folder that the runtime starts in. */
  cwd?: string;
  /** Its environment. Default: this process's own. */
  env?: Record<string, string | undefined>;
  /** Hears what the runtime writes to its standard error, as it comes. */
  onStderr?: (text: string) => void;
}

/** `stageMs`: how long each stage of closing may take: end of input, TERM, KILL. */
export function stdio(options: StdioOptions, stageMs: number): Opener {
  const env = options.env ?? process.env;
  const [program, ...before] = [options.command ?? env.POSTROOM_COMMAND ?? "postroom"].flat();
  if (!program) throw new ConfigError("the command is empty", { code: "config" });
  const words = [...before, "serve", "--stdio"];
  if (options.model !== undefined) words.push("--model", options.model);
  if (options.database !== undefined) words.push("--db", options.database);
  words.push("--drain", String((DRAIN_SHARE * stageMs) / 1000), ...(options.args ?? []));
  return async (receiver, signal) => {
    signal.throwIfAborted();
    // In a session of its own a Ctrl-C at the terminal reaches this program alone, which closes it in order.
    const child = spawn(program, words, { cwd: options.cwd, env, stdio: "pipe", detached: true });
    const runtime = new Runtime(child, receiver, stageMs, options.onStderr);
    await runtime.started(program);
    return runtime;
  };
}

class Runtime implements Transport {
  readonly #ended: Promise<void>;
  #closing: Promise<void> | undefined;
  #gone = false;
  #tail = "";

  constructor(
    private readonly child: ChildProcessWithoutNullStreams,
    private readonly receiver: Receiver,
    private readonly stageMs: number,
    onStderr: ((text: string) => void) | undefined,
  ) {
    const lines = new Lines(2 * FRAME_BYTES_MAX);
    child.stdout.on("data", (chunk: Buffer) => {
      try {
        for (const line of lines.feed(chunk)) receiver.frame(line);
      } catch (error) {
        this.#tell(new Disconnected("the runtime wrote a line without an end", { cause: error }));
        child.kill("SIGKILL");
      }
    });
    child.stderr.setEncoding("utf8").on("data", (text: string) => {
      this.#tail = (this.#tail + text).slice(-TAIL_BYTES);
      onStderr?.(text);
    });
    child.stdin.on("error", () => undefined); // it is gone: that is told by its end
    this.#ended = new Promise((resolve) => {
      child.once("error", () => resolve());
      child.once("exit", (code, name) => {
        resolve();
        const said = new Promise((done) => child.once("close", done));
        void settledWithin(said, LAST_WORDS_MS).then(() => this.#died(code, name));
      });
    });
  }

  async started(program: string): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      this.child.once("spawn", resolve);
      this.child.once("error", (cause) => {
        const hint = "install it, or set `command` or POSTROOM_COMMAND";
        reject(new ConfigError(`${program} could not be started: ${cause.message}`, { code: "config", hint, cause }));
      });
    });
  }

  send(frame: string): void {
    if (this.child.stdin.writable) this.child.stdin.write(`${frame}\n`);
  }

  close(): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  async #close(): Promise<void> {
    this.child.stdin.end();
    if (!(await settledWithin(this.#ended, this.stageMs))) {
      this.child.kill("SIGTERM");
      if (!(await settledWithin(this.#ended, this.stageMs))) {
        this.child.kill("SIGKILL");
        await settledWithin(this.#ended, this.stageMs);
      }
    }
    // A process that it left behind may hold the pipes, and would keep this one alive.
    this.child.stdout.destroy();
    this.child.stderr.destroy();
    this.child.unref();
  }

  #died(code: number | null, name: NodeJS.Signals | null): void {
    const how = name === null ? `ended with code ${code}` : `was ended by ${name}`;
    const last = this.#tail.trimEnd();
    this.#tell(
      new Disconnected(`the runtime ${how}${last && `; it said last:\n${last}`}`, {
        exitCode: name === null ? code : -constants.signals[name],
        stderrTail: this.#tail,
      }),
    );
  }

  #tell(why: Disconnected): void {
    if (this.#gone) return;
    this.#gone = true;
    this.receiver.gone(why);
  }
}
