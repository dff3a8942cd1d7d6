/**
 * This program as the route of a session: what is delivered there, and what its person is asked.
 *
 * A callback that throws denies an approval and answers no question. After a loss the session is bound
 * again by itself.
 */

import type { Connection } from "./connection.js";
import type { ApprovalRequest, DeliveryNote, UserPrompt } from "./protocol.js";

/** `signal` is aborted when the connection is lost: nobody waits for the answer any more. */
export interface Asked {
  signal: AbortSignal;
}

export interface Callbacks {
  /** May this call run? null or undefined: not decided here; somebody may decide later, by its id. */
  onApproval?: (
    request: ApprovalRequest,
    asked: Asked,
  ) => boolean | null | undefined | Promise<boolean | null | undefined>;
  /** A person's answer; null: there is none. */
  onQuestion?: (prompt: UserPrompt, asked: Asked) => string | null | undefined | Promise<string | null | undefined>;
  /** One part of a delivery. The same `key` again is a repeat. */
  onDelivery?: (note: DeliveryNote) => unknown;
}

export class Binding {
  #token: string | undefined;
  #closed = false;

  /** @internal */
  constructor(
    private readonly connection: Connection,
    readonly sessionId: string,
    private readonly callbacks: Callbacks,
    private readonly onClose: () => unknown,
  ) {}

  /** Takes the route away. Idempotent. */
  close(): void {
    if (this.#closed) return;
    this.#closed = true;
    this.connection.dropBinding(this, this.#token);
    this.onClose();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** @internal */
  async bind(signal?: AbortSignal): Promise<void> {
    await this.connection.call(
      "session/bind",
      { sessionId: this.sessionId },
      {
        signal,
        again: true,
        accept: ({ token }, wire) => {
          this.#token = token;
          if (this.#closed) wire.forget("session/unbind", { token });
        },
      },
    );
  }

  /** @internal The connection has a new wire. */
  renew(): void {
    if (this.#token === undefined) return; // its first call is said again by itself
    this.#token = undefined;
    this.bind().catch((error: unknown) => {
      if (!this.#closed && !this.connection.closed.aborted) this.connection.report(error);
    });
  }

  /** @internal */
  async approve(request: ApprovalRequest, signal: AbortSignal): Promise<boolean | null | undefined> {
    try {
      return await this.callbacks.onApproval?.(request, { signal });
    } catch (error) {
      this.connection.report(error);
      return false;
    }
  }

  /** @internal */
  async answer(prompt: UserPrompt, signal: AbortSignal): Promise<string | null | undefined> {
    try {
      return await this.callbacks.onQuestion?.(prompt, { signal });
    } catch (error) {
      this.connection.report(error);
      return null;
    }
  }

  /** @internal */
  delivered(note: DeliveryNote): void {
    this.connection.tell(this.callbacks.onDelivery, note);
  }
}
