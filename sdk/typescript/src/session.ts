/**
 * One session, as a program uses it. Every call that takes a `signal` can be given up; what was already
 * committed stays.
 */

import { Binding, type Callbacks } from "./binding.js";
import type { CallOptions, Connection } from "./connection.js";
import { RunTimeout } from "./errors.js";
import type { Event } from "./event.js";
import { Feed } from "./feed.js";
import { newMessageId, newSessionId } from "./ids.js";
import type { Audio, File, Image, Pending, Receipt, SessionDelta, SessionOpened, Text, Video } from "./protocol.js";
import { ends, foldRun, starts, type RunResult, type Until } from "./run.js";

export type { CallOptions };

/** A text, or a list of content blocks. */
export type Content = string | readonly (Text | Image | Audio | Video | File)[];

export interface QueueOptions extends CallOptions {
  /** `msg_` and a ULID. The same id again gives the same receipt and queues nothing. Default: a new one. */
  messageId?: string;
}

export interface RunOptions extends QueueOptions {
  /** In ms, with the wait for earlier runs of this client. Default: no limit. */
  timeout?: number;
  /** When the time is over: takes the message out of the inbox, or else ends the open turn. Default: false. */
  cancelOnTimeout?: boolean;
  /** Where the run ends. Default: `idle`. */
  until?: Until;
  /** `exclusive` (the default) is refused where another client owns the interval; `share` is not. */
  mode?: "exclusive" | "share";
  /** Hears each event of the interval, in order. */
  onEvent?: (event: Event) => unknown;
  /** Hears live tokens. Some may be dropped: the events have the whole text. */
  onDelta?: (delta: SessionDelta) => unknown;
}

export interface EventsOptions extends CallOptions {
  /** Only these types. Default: all. */
  types?: readonly string[];
  /** Goes on with what comes live (the default); false: ends with the log as it stands. */
  follow?: boolean;
}

export interface SubscribeOptions {
  /** Events above this seq. Default: 0, from the beginning. */
  after?: number;
  types?: readonly string[];
  onEvent?: (event: Event) => unknown;
  onDelta?: (delta: SessionDelta) => unknown;
  /** Called once: with what went wrong, or with undefined when it was closed. */
  onEnd?: (error: unknown) => unknown;
}

export interface Subscription {
  /** Idempotent. */
  close(): void;
  [Symbol.dispose](): void;
}

export class Session {
  readonly id: string;
  readonly coreId: string;
  /** Whether opening it made it. */
  readonly created: boolean;
  readonly #connection: Connection;
  readonly #held = new Set<{ close(): void }>();
  #seen: number;

  /** @internal */
  constructor(connection: Connection, opened: SessionOpened) {
    this.#connection = connection;
    this.id = opened.sessionId;
    this.coreId = opened.coreId;
    this.created = opened.created;
    this.#seen = opened.headSeq;
  }

  // ---- the inbox ----

  /** Queues a message for a turn of its own. The receipt proves that it is on disk, and nothing else. */
  prompt(content: Content, options: QueueOptions = {}): Promise<Receipt> {
    return this.#queue("session/prompt", content, options);
  }

  /** Queues a message for the next step of the open turn; it opens a turn if there is none. */
  steer(content: Content, options: QueueOptions = {}): Promise<Receipt> {
    return this.#queue("session/steer", content, options);
  }

  /** As `steer`, but wakes nobody. */
  inject(content: Content, options: QueueOptions = {}): Promise<Receipt> {
    return this.#queue("session/inject", content, options);
  }

  /** What is pending, in order. */
  async inbox(options: CallOptions = {}): Promise<Pending[]> {
    const { pending } = await this.#connection.call("session/inbox", { sessionId: this.id }, again(options));
    return pending;
  }

  /** Puts other content in a pending message's place. The new id; null: it was not pending any more. */
  async replace(messageId: string, content: Content, options: CallOptions = {}): Promise<string | null> {
    const params = { sessionId: this.id, messageId, content: said(content) };
    return (await this.#connection.call("session/inbox/replace", params, options)).messageId;
  }

  /** Takes a pending message out; false: it was not pending any more. */
  async remove(messageId: string, options: CallOptions = {}): Promise<boolean> {
    const params = { sessionId: this.id, messageId };
    return (await this.#connection.call("session/inbox/remove", params, options)).removed;
  }

  /** Ends the open turn and, unless `keepInbox`, empties the inbox. It resolves when that is recorded. */
  async cancel(options: CallOptions & { keepInbox?: boolean } = {}): Promise<void> {
    const { keepInbox = false, signal } = options;
    await this.#connection.call("session/cancel", { sessionId: this.id, keepInbox }, { signal });
  }

  async #queue(
    method: "session/prompt" | "session/steer" | "session/inject",
    content: Content,
    options: QueueOptions & { run?: "exclusive" | "share" },
  ): Promise<Receipt> {
    const { messageId = newMessageId(), run, signal } = options;
    const params = { sessionId: this.id, content: said(content), messageId, ...(run && { run }) };
    const receipt = await this.#connection.call(method, params, again({ signal }));
    this.#saw(receipt.seq);
    return receipt;
  }

  // ---- runs ----

  /**
   * Queues a message and owns the interval from its receipt to the next idle. Runs of one client on one
   * session wait for each other.
   *
   * @throws RunTimeout the time is over; the agent goes on, unless `cancelOnTimeout`.
   * @throws RunOverlap another client owns the present interval; nothing was queued.
   * @throws Disconnected the runtime died (its exit code and its last words), or could not be reached again.
   */
  async run(content: Content, options: RunOptions = {}): Promise<RunResult> {
    const { timeout, cancelOnTimeout = false, until = "idle", messageId = newMessageId() } = options;
    const limit = new AbortController();
    const timer = timeout === undefined ? undefined : setTimeout(() => limit.abort(), timeout);
    const signals = [limit.signal, ...(options.signal ? [options.signal] : [])];
    const signal = AbortSignal.any(signals);
    const events: Event[] = [];
    try {
      return await this.#connection.runs.take(this.id, signal, () =>
        this.#run(content, { ...options, messageId, until, signal }, events),
      );
    } catch (error) {
      if (!limit.signal.aborted || error !== limit.signal.reason) throw error;
      if (cancelOnTimeout) await this.#giveUp(messageId);
      const partial = foldRun(this.id, messageId, events, until);
      throw new RunTimeout(`the run was not over after ${timeout} ms`, partial);
    } finally {
      clearTimeout(timer);
    }
  }

  async #run(
    content: Content,
    options: RunOptions & { messageId: string; until: Until },
    events: Event[],
  ): Promise<RunResult> {
    const { messageId, until, signal, mode = "exclusive", onEvent, onDelta } = options;
    const undo = onDelta && this.#live(this.#seen, onDelta);
    let feed: Feed | undefined;
    try {
      const receipt = await this.#queue("session/prompt", content, { messageId, signal, run: mode });
      feed = this.#feed({ after: receipt.seq - 1 });
      for (;;) {
        const event = await feed.next(signal);
        if (event === undefined) throw this.#connection.closed.reason ?? new Error("the session was closed");
        events.push(event);
        this.#saw(event.seq);
        this.#connection.tell(onEvent, event);
        if (ends(event, until)) return foldRun(this.id, messageId, events, until);
      }
    } finally {
      undo?.();
      if (feed !== undefined) this.#release(feed);
    }
  }

  async #giveUp(messageId: string): Promise<void> {
    try {
      if (!(await this.remove(messageId))) await this.cancel({ keepInbox: true });
    } catch (error) {
      this.#connection.report(error);
    }
  }

  /** The run that started with this message, from the log; `complete` tells whether it is over. */
  async fold(messageId: string, options: CallOptions & { until?: Until } = {}): Promise<RunResult> {
    const { until = "idle", signal } = options;
    const events: Event[] = [];
    for await (const event of this.events(0, { follow: false, signal })) {
      if (events.length === 0 && !starts(event, messageId)) continue;
      events.push(event);
      if (ends(event, until)) break;
    }
    return foldRun(this.id, messageId, events, until);
  }

  // ---- the log ----

  /**
   * The events above a seq, in order, then live: without gap or duplicate, also over a reconnect.
   * It ends when the room or the session is closed; leave the loop, or abort the signal, to end it before.
   */
  async *events(after = 0, options: EventsOptions = {}): AsyncGenerator<Event, void, undefined> {
    const { types, signal, follow = true } = options;
    if (!follow) {
      yield* this.#pages(after, types && new Set(types), signal);
      return;
    }
    const feed = this.#feed({ after, types });
    try {
      for (let event = await feed.next(signal); event !== undefined; event = await feed.next(signal)) {
        this.#saw(event.seq);
        yield event;
      }
    } finally {
      this.#release(feed);
    }
  }

  /** The log as it stands now, above a seq. */
  async log(after = 0, options: CallOptions = {}): Promise<Event[]> {
    const out: Event[] = [];
    for await (const event of this.#pages(after, undefined, options.signal)) out.push(event);
    return out;
  }

  /** What the whole agent does. */
  async status(options: CallOptions = {}): Promise<"running" | "idle"> {
    return (await this.#connection.call("session/open", { sessionId: this.id }, again(options))).status;
  }

  async *#pages(after: number, types: Set<string> | undefined, signal: AbortSignal | undefined): AsyncGenerator<Event> {
    for (let more = true; more; ) {
      const page = await this.#connection.call("session/events", { sessionId: this.id, after }, again({ signal }));
      for (const event of page.events) {
        after = event.seq;
        if (types === undefined || types.has(event.type)) yield event;
      }
      more = page.more && page.events.length > 0;
    }
  }

  /** As `events`, by callbacks. What a callback throws goes to `onError` of the room, and no further. */
  subscribe(options: SubscribeOptions): Subscription {
    const { after = 0, types, onEvent, onDelta, onEnd } = options;
    const connection = this.#connection;
    const feed = this.#feed({ after, types });
    const undo = onDelta && this.#live(after, onDelta);
    const close = (): void => {
      undo?.();
      this.#release(feed);
    };
    const follow = async (): Promise<void> => {
      let why: unknown;
      try {
        for (let event = await feed.next(); event !== undefined; event = await feed.next()) {
          this.#saw(event.seq);
          connection.tell(onEvent, event);
        }
      } catch (error) {
        why = error;
      }
      close();
      connection.tell(onEnd, why);
    };
    void follow();
    return { close, [Symbol.dispose]: close };
  }

  #live(after: number, onDelta: (delta: SessionDelta) => unknown): () => void {
    return this.#connection.hearDeltas(this.id, after, (delta) => this.#connection.tell(onDelta, delta));
  }

  // ---- attached ----

  /**
   * Makes this program the session's route: it gets what is delivered, and is asked. The last one bound is
   * the one. An approval without `onApproval` stays open, to be decided by its id.
   */
  async bind(callbacks: Callbacks = {}, options: CallOptions = {}): Promise<Binding> {
    const binding: Binding = new Binding(this.#connection, this.id, callbacks, () => this.#held.delete(binding));
    this.#connection.addBinding(binding);
    this.#held.add(binding);
    try {
      await binding.bind(options.signal);
    } catch (error) {
      binding.close();
      throw error;
    }
    return binding;
  }

  /** A new session with this one's history, up to a seq; by default up to the end of the last closed turn. */
  async fork(options: CallOptions & { atSeq?: number; sessionId?: string } = {}): Promise<Session> {
    const { atSeq, sessionId: forkId = newSessionId(), signal } = options;
    const params = { sessionId: this.id, forkId, ...(atSeq !== undefined && { atSeq }) };
    const { sessionId, headSeq } = await this.#connection.call("session/fork", params, again({ signal }));
    return new Session(this.#connection, { sessionId, headSeq, coreId: this.coreId, created: true, status: "idle" });
  }

  /** Ends what this object holds: its iterators, subscriptions and routes. The session itself goes on. */
  close(): void {
    for (const one of [...this.#held]) one.close();
    this.#held.clear();
  }

  #feed(options: ConstructorParameters<typeof Feed>[2]): Feed {
    const feed = new Feed(this.#connection, this.id, options);
    this.#held.add(feed);
    return feed;
  }

  #release(feed: Feed): void {
    feed.close();
    this.#held.delete(feed);
  }

  #saw(seq: number): void {
    this.#seen = Math.max(this.#seen, seq);
  }
}

function again(options: CallOptions): CallOptions & { again: true } {
  return { ...options, again: true };
}

function said(content: Content): string | Record<string, unknown>[] {
  return typeof content === "string" ? content : content.map((block) => ({ ...block }));
}
