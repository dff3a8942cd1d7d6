/** Connects to a runtime: one of our own, as a child process, or a daemon, over a web socket. */

import { Connection } from "./connection.js";
import { Room } from "./room.js";
import { socket, type SocketOptions } from "./socket.js";
import { stdio, type StdioOptions } from "./stdio.js";

export const VERSION = "0.1.0";

export interface CommonOptions {
  /** Who we say we are. */
  client?: { name: string; version: string };
  /** How long an attempt to connect, or the start of a runtime, may take, in ms. Default: 30 s. */
  connectTimeout?: number;
  /** How long each stage of closing may take, in ms: end of input, TERM, KILL. Default: 5 s. */
  closeTimeout?: number;
  /** Hears what a callback threw. Default: a warning of the process. */
  onError?: (error: unknown) => void;
  /** Gives up connecting. */
  signal?: AbortSignal;
}

/** With a `url` it is the daemon there, else a runtime of our own, as a child process. */
export type ConnectOptions = OwnOptions | DaemonOptions;

export interface OwnOptions extends CommonOptions, StdioOptions {
  url?: undefined;
}

export interface DaemonOptions extends CommonOptions, SocketOptions {
  /** How long it is tried to connect again after a loss, in ms. Default: 60 s. */
  reconnectTimeout?: number;
}

/**
 * `connect({ model, database })` starts a runtime of our own; `connect("ws://127.0.0.1:8321", { token })`
 * talks to a daemon.
 *
 * @throws ConfigError the options are wrong, or the program cannot be started.
 * @throws NotAllowed the daemon refuses the token.
 * @throws Disconnected nobody answers, or the runtime did not start.
 */
export function connect(options?: ConnectOptions): Promise<Room>;
export function connect(url: string, options?: Omit<DaemonOptions, "url">): Promise<Room>;
export async function connect(
  first: ConnectOptions | string = {},
  second: Omit<DaemonOptions, "url"> = {},
): Promise<Room> {
  const options: ConnectOptions = typeof first === "string" ? { ...second, url: first } : first;
  const { client, connectTimeout = 30_000, closeTimeout = 5_000, onError = warn, signal } = options;
  const connection = new Connection({
    open:
      options.url === undefined
        ? stdio({ ...options, onStderr: (text) => connection.tell(options.onStderr, text) }, closeTimeout)
        : socket(options, closeTimeout),
    resumes: options.url !== undefined,
    client: client ?? { name: "@postroom/sdk", version: VERSION },
    connectMs: connectTimeout,
    reconnectMs: options.url === undefined ? 0 : (options.reconnectTimeout ?? 60_000),
    onError,
  });
  try {
    await connection.live(signal);
  } catch (error) {
    await connection.close();
    throw error;
  }
  return new Room(connection);
}

function warn(error: unknown): void {
  process.emitWarning(error instanceof Error ? error : String(error));
}
