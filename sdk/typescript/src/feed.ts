/**
 * The events of one session in order, from a seq on, then live: without a gap or a repeat.
 *
 * A feed lives longer than a subscription of the runtime's. When the connection was lost, when the runtime
 * says that we lag, or when nobody takes what comes, it subscribes again after the last event it holds.
 * It never holds more than a bounded number of events.
 */

import type { Connection } from "./connection.js";
import type { Event } from "./event.js";

const HELD_MAX = 1_000;

export interface FeedOptions {
  /** Events above this seq. */
  after: number;
  /** Only these types; undefined: all. */
  types?: readonly string[] | undefined;
  /** Live tokens too; the connection hands them out. */
  deltas?: boolean | undefined;
}

type State = "stale" | "subscribing" | "live" | "over";

export class Feed {
  #state: State = "stale";
  #number: number | undefined;
  #cursor: number;
  #error: unknown;
  #held: Event[] = [];
  #waiting: (() => void) | undefined;

  constructor(
    private readonly connection: Connection,
    private readonly sessionId: string,
    private readonly options: FeedOptions,
  ) {
    this.#cursor = options.after;
    connection.feeds.add(this);
    if (connection.closed.aborted) this.close();
  }

  /** The next event; undefined: the feed was closed. One call at a time. */
  async next(signal?: AbortSignal): Promise<Event | undefined> {
    const abort = (): void => this.wake();
    signal?.addEventListener("abort", abort);
    try {
      for (;;) {
        signal?.throwIfAborted();
        const event = this.#held.shift();
        if (event !== undefined) return event;
        if (this.#state === "over") {
          if (this.#error !== undefined) throw this.#error;
          return undefined;
        }
        if (this.#state === "stale") void this.subscribe();
        await new Promise<void>((resolve) => {
          this.#waiting = resolve;
        });
      }
    } finally {
      signal?.removeEventListener("abort", abort);
    }
  }

  /** Ends it; what it still holds is thrown away. Idempotent. */
  close(): void {
    this.#held = [];
    this.#end(undefined);
  }

  /** Asks the runtime for what comes after the last event held. It never rejects. */
  async subscribe(): Promise<void> {
    if (this.#state !== "stale") return;
    this.#state = "subscribing";
    const { types, deltas } = this.options;
    try {
      await this.connection.call(
        "session/subscribe",
        { sessionId: this.sessionId, after: this.#cursor, types: types && [...types], deltas: deltas ?? false },
        {
          again: true,
          accept: ({ subscription }, wire) => {
            if (this.#state !== "subscribing") {
              wire.forget("session/unsubscribe", { subscription });
              return;
            }
            this.#number = subscription;
            this.#state = "live";
            this.connection.join(wire, subscription, this);
          },
        },
      );
    } catch (error) {
      this.fail(error);
    }
  }

  // ---- what the connection tells ----

  push(event: Event): void {
    if (event.seq <= this.#cursor || this.#state !== "live") return;
    if (this.#held.length >= HELD_MAX) {
      this.#leave(); // nobody takes them; the log keeps them
      this.#state = "stale";
      return;
    }
    this.#cursor = event.seq;
    this.#held.push(event);
    this.wake();
  }

  lagged(fromSeq: number): void {
    this.#cursor = Math.max(this.#cursor, fromSeq - 1);
    this.lost(undefined);
  }

  /** Its subscription is gone. With an error the feed ends, else it goes on from where it is. */
  lost(error: unknown): void {
    this.#number = undefined;
    if (this.#state === "live") this.#state = "stale";
    if (error !== undefined) this.#end(error);
    this.wake();
  }

  fail(error: unknown): void {
    this.#end(error);
  }

  wake(): void {
    const waiting = this.#waiting;
    this.#waiting = undefined;
    waiting?.();
  }

  #end(error: unknown): void {
    if (this.#state !== "over") {
      this.#leave();
      this.#state = "over";
      this.#error = this.connection.closed.aborted ? undefined : error;
      this.connection.feeds.delete(this);
    }
    this.wake();
  }

  #leave(): void {
    if (this.#number !== undefined) this.connection.leave(this.#number, this);
    this.#number = undefined;
  }
}
