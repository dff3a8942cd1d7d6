/**
 * The daemon's web socket: one text frame is one frame.
 *
 * Node 22 has web sockets of its own; before it the package `ws` is used. Neither tells why a connection
 * was refused, so a refusal is asked for once more, as plain HTTP.
 */

import { readFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { ConfigError, Disconnected, NotAllowed } from "./errors.js";
import type { Opener, Receiver, Transport } from "./transport.js";
import { settledWithin } from "./waiting.js";

const ASK_MS = 2_000;
/** What a protocol name of a web socket may be made of; other tokens need a header. */
const TOKEN = /^[!#$%&'*+\-.^_`|~0-9A-Za-z]+$/;

export interface SocketOptions {
  /** Where the daemon listens, as `ws://127.0.0.1:8321/ws`. Without a path it is `/ws`. */
  url: string | URL;
  /** The daemon's token. Default: POSTROOM_TOKEN, or the file in the home folder of this machine. */
  token?: string;
}

/** The part of a web socket that both implementations share. */
interface Socket {
  readonly readyState: number;
  send(text: string): void;
  close(code?: number): void;
  addEventListener(type: string, listener: (event: { data?: unknown; code?: number }) => void): void;
}
type SocketClass = new (url: string, options: unknown, more?: unknown) => Socket;

export function socket(options: SocketOptions, stageMs: number): Opener {
  const url = addressOf(options.url);
  return async (receiver, signal) => {
    const token = options.token ?? process.env.POSTROOM_TOKEN ?? (await keptToken(new URL(url).hostname));
    const opened = await open(url, token, signal);
    return new Connected(opened, receiver, stageMs);
  };
}

function addressOf(given: string | URL): string {
  let url: URL;
  try {
    url = new URL(given);
  } catch (cause) {
    throw new ConfigError(`${String(given)} is no address`, { code: "config", cause });
  }
  url.protocol = url.protocol.replace(/^http/, "ws");
  if (url.protocol !== "ws:" && url.protocol !== "wss:") {
    throw new ConfigError(`${url.href} is no address of a web socket`, { code: "config", hint: "as ws://127.0.0.1:8321/ws" });
  }
  if (url.pathname === "/") url.pathname = "/ws";
  return url.href;
}

/** The token that a daemon of this machine made at its first start. It is shown to no other machine. */
async function keptToken(host: string): Promise<string> {
  const none = "there is no token";
  const hint = "set `token` or POSTROOM_TOKEN; the daemon says where its token is kept";
  if (!/^(localhost|127(\.\d+){3}|\[::1\])$/.test(host)) throw new ConfigError(none, { code: "config", hint });
  const { POSTROOM_HOME, XDG_DATA_HOME } = process.env;
  const data =
    process.platform === "darwin"
      ? join(homedir(), "Library", "Application Support")
      : XDG_DATA_HOME || join(homedir(), ".local", "share");
  const file = join(POSTROOM_HOME || join(data, "postroom"), "socket.token");
  try {
    return (await readFile(file, "utf8")).trim();
  } catch (cause) {
    throw new ConfigError(none, { code: "config", hint, cause });
  }
}

async function open(url: string, token: string, signal: AbortSignal): Promise<Socket> {
  signal.throwIfAborted();
  const headers = { Authorization: `Bearer ${token}` };
  const own = (globalThis as { WebSocket?: SocketClass }).WebSocket;
  let socket: Socket;
  if (own !== undefined) {
    socket = new own(url, TOKEN.test(token) ? ["postroom.1", `bearer.${token}`] : { headers });
  } else {
    const Other = await besides();
    socket = new Other(url, [], { headers, maxPayload: 0, perMessageDeflate: false });
  }
  const abort = (): void => socket.close();
  signal.addEventListener("abort", abort, { once: true });
  try {
    await new Promise<void>((resolve, reject) => {
      socket.addEventListener("open", () => resolve());
      socket.addEventListener("error", () => reject(new Disconnected(`nobody answers at ${url}`)));
      socket.addEventListener("close", () => reject(new Disconnected(`nobody answers at ${url}`)));
    });
  } catch (error) {
    signal.throwIfAborted();
    throw (await whyRefused(url, headers)) ?? error;
  } finally {
    signal.removeEventListener("abort", abort);
  }
  return socket;
}

async function besides(): Promise<SocketClass> {
  try {
    return (await import("ws")).WebSocket as unknown as SocketClass;
  } catch (cause) {
    throw new ConfigError("this Node has no web socket", { code: "config", hint: "use Node 22, or install ws", cause });
  }
}

async function whyRefused(url: string, headers: Record<string, string>): Promise<Error | undefined> {
  try {
    const answer = await fetch(url.replace(/^ws/, "http"), { headers, signal: AbortSignal.timeout(ASK_MS) });
    const said = (await answer.json().catch(() => null)) as { error?: { message?: string } } | null;
    const why = said?.error?.message ?? `it answered ${answer.status}`;
    if (answer.status === 401 || answer.status === 403) {
      return new NotAllowed(`the daemon refused the connection: ${why}`, { code: "unauthorized" });
    }
    return new Disconnected(`the daemon took no connection: ${why}`);
  } catch {
    return undefined;
  }
}

class Connected implements Transport {
  readonly #ended: Promise<void>;

  constructor(
    private readonly socket: Socket,
    receiver: Receiver,
    private readonly stageMs: number,
  ) {
    socket.addEventListener("message", ({ data }) => {
      if (typeof data === "string") receiver.frame(data);
    });
    this.#ended = new Promise((resolve) => {
      socket.addEventListener("close", ({ code }) => {
        resolve();
        receiver.gone(new Disconnected(`the connection was lost (${code ?? "no code"})`));
      });
    });
  }

  send(frame: string): void {
    if (this.socket.readyState === 1) this.socket.send(frame);
  }

  async close(): Promise<void> {
    this.socket.close(1000);
    if (!(await settledWithin(this.#ended, this.stageMs))) {
      (this.socket as { terminate?: () => void }).terminate?.(); // the other side does not answer
    }
  }
}
