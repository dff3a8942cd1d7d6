/** A runtime, as a program sees it: its sessions, its open approvals, its outbox. */

import type { CallOptions, Connection } from "./connection.js";
import { newSessionId } from "./ids.js";
import type { Approval, Delivery, Initialized, SessionInfo } from "./protocol.js";
import { Session } from "./session.js";

export interface SessionOptions extends CallOptions {
  /** The core of a new session. Default: `default`. */
  coreId?: string;
  /** The folder that a new session works in, as an absolute path. Default: none. */
  cwd?: string;
}

/** A named operator: who decides what is in doubt. */
export interface By extends CallOptions {
  by: string;
}

export class Room {
  readonly approvals: ApprovalDesk;
  readonly outbox: Outbox;
  readonly #connection: Connection;

  /** @internal */
  constructor(connection: Connection) {
    this.#connection = connection;
    this.approvals = new ApprovalDesk(connection);
    this.outbox = new Outbox(connection);
  }

  /** What the runtime said of itself; undefined while there is no connection. */
  get server(): Initialized | undefined {
    return this.#connection.said;
  }

  /** Opens a session: makes it if there is none of that id. Without an id it is a new one. */
  async session(id?: string, options: SessionOptions = {}): Promise<Session> {
    const { coreId, cwd, signal } = options;
    const params = { sessionId: id ?? newSessionId(), coreId, cwd };
    return new Session(this.#connection, await this.#connection.call("session/open", params, { signal, again: true }));
  }

  /** Those that are ours, the newest first. `before`: created before this time, in Unix ms. */
  async sessions(options: CallOptions & { limit?: number; before?: number } = {}): Promise<SessionInfo[]> {
    const { limit, before, signal } = options;
    return (await this.#connection.call("session/list", { limit, before }, { signal, again: true })).sessions;
  }

  /** Ends the runtime, where it is ours alone. A daemon refuses it. */
  async shutdown(options: CallOptions = {}): Promise<void> {
    await this.#connection.call("shutdown", {}, options);
  }

  /**
   * Ends the connection, and a runtime of our own with it: end of input, then TERM, then KILL. What still
   * waits is rejected, iterators end. Idempotent; it never rejects.
   */
  close(): Promise<void> {
    return this.#connection.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

/** Calls of tools that wait for a person. */
export class ApprovalDesk {
  readonly #connection: Connection;

  /** @internal */
  constructor(connection: Connection) {
    this.#connection = connection;
  }

  async list(options: CallOptions & { sessionId?: string } = {}): Promise<Approval[]> {
    const { sessionId, signal } = options;
    return (await this.#connection.call("approval/list", { sessionId }, { signal, again: true })).approvals;
  }

  /** @throws NotAsked it is not open any more. */
  async decide(approvalId: string, decision: "allow" | "deny", options: CallOptions = {}): Promise<void> {
    await this.#connection.call("approval/decide", { approvalId, decision }, options);
  }
}

/** The durable deliveries, and what an operator may do about them. */
export class Outbox {
  readonly #connection: Connection;

  /** @internal */
  constructor(connection: Connection) {
    this.#connection = connection;
  }

  /** `open`: only those that are not done with. */
  async list(
    options: CallOptions & { sessionId?: string; status?: string[]; open?: boolean; limit?: number } = {},
  ): Promise<Delivery[]> {
    const { signal, ...params } = options;
    return (await this.#connection.call("outbox/list", params, { signal, again: true })).deliveries;
  }

  /** Settles what is in doubt. `queued` sends it again: it may arrive twice. */
  resolve(deliveryId: string, decision: "sent" | "failed" | "queued", { by, signal }: By): Promise<Delivery> {
    return this.#connection.call("outbox/resolve", { deliveryId, decision, by }, { signal });
  }

  /** Sends again what failed or had no route. */
  redeliver(deliveryId: string, { by, signal }: By): Promise<Delivery> {
    return this.#connection.call("outbox/redeliver", { deliveryId, by }, { signal });
  }

  /** Gives up what is queued. */
  abandon(deliveryId: string, { by, signal }: By): Promise<Delivery> {
    return this.#connection.call("outbox/abandon", { deliveryId, by }, { signal });
  }
}
