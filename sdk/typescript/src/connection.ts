/**
 * A connection that outlives its wires: it opens one when it is needed, and again when it was lost.
 *
 * Over a socket what may be said twice is said again on the next wire, and feeds and routes are taken up
 * where they were. A runtime of one's own that died fails everything that waits; the next call starts
 * another. It knows the methods of the connection itself, and what must be held for the others.
 */

import { Disconnected, PostroomError, StoreClosed } from "./errors.js";
import type { Binding } from "./binding.js";
import { Feed } from "./feed.js";
import type {
  ApprovalAnswer,
  ApprovalRequest,
  ClientMethods,
  DeliveryNote,
  EventNote,
  Initialized,
  Lagged,
  Methods,
  Notifications,
  SessionDelta,
  UserAnswer,
  UserPrompt,
} from "./protocol.js";
import { PROTOCOL_VERSION } from "./protocol.js";
import type { Opener } from "./transport.js";
import { orAborted, settledWithin, Turns } from "./waiting.js";
import { Wire } from "./wire.js";

const WAIT_FIRST_MS = 50;
const WAIT_MAX_MS = 2_000;
/** A wire that has been silent for so long is asked whether it is still there, and has as long to answer. */
const SILENT_MS = 30_000;
/** How often one call is said again. */
const AGAIN_MAX = 20;

export interface ConnectionOptions {
  open: Opener;
  /** Whether a lost wire is followed by another without being asked. */
  resumes: boolean;
  client: { name: string; version: string };
  /** How long one attempt to connect may take, in ms. */
  connectMs: number;
  /** How long it is tried after a loss, in ms. */
  reconnectMs: number;
  /** Hears what a callback threw. */
  onError: (error: unknown) => void;
  /** How long a wire may be silent before it is asked, in ms. */
  silentMs?: number;
}

export interface CallOptions {
  signal?: AbortSignal | undefined;
}

interface Said<M extends keyof Methods> extends CallOptions {
  /** Saying it twice is the same as saying it once. */
  again?: boolean;
  /** Called with the result before anything else that comes on this wire. */
  accept?: (result: Methods[M]["result"], wire: Wire) => void;
}

export class Connection {
  readonly runs = new Turns();
  readonly feeds = new Set<Feed>();
  readonly #bindings = new Set<Binding>();
  readonly #deltas = new Map<string, { feed: Feed; all: Set<(delta: SessionDelta) => void> }>();
  readonly #closed = new AbortController();
  #wire: { wire: Wire; said: Initialized; at: number; feeds: Map<number, Feed> } | undefined;
  #opening: Promise<void> | undefined;
  #ending: Promise<void> | undefined;
  #lost = false;

  constructor(private readonly options: ConnectionOptions) {}

  get resumes(): boolean {
    return this.options.resumes;
  }

  /** What the runtime said of itself; undefined while there is no connection. */
  get said(): Initialized | undefined {
    return this.#wire?.said;
  }

  /** Aborted by `close`. */
  get closed(): AbortSignal {
    return this.#closed.signal;
  }

  report(error: unknown): void {
    try {
      this.options.onError(error);
    } catch {
      // who reports errors by throwing them is not heard
    }
  }

  /** Calls a callback of the user's. What it throws, or rejects with, goes to `onError` and no further. */
  tell<T>(callback: ((value: T) => unknown) | undefined, value: T): void {
    try {
      const answer = callback?.(value);
      if (answer instanceof Promise) answer.catch((error: unknown) => this.report(error));
    } catch (error) {
      this.report(error);
    }
  }

  // ---- calls ----

  async call<M extends keyof Methods>(
    method: M,
    params: Methods[M]["params"],
    said: Said<M> = {},
  ): Promise<Methods[M]["result"]> {
    const { signal, again = false, accept } = said;
    for (let count = 0; ; count++) {
      const { wire } = await this.live(signal);
      try {
        const heard = accept && ((result: unknown) => accept(result as Methods[M]["result"], wire));
        return (await wire.request(method, params, { signal, accept: heard })) as Methods[M]["result"];
      } catch (error) {
        signal?.throwIfAborted();
        this.#closed.signal.throwIfAborted();
        const repeat = again && this.resumes && count < AGAIN_MAX;
        if (repeat && error instanceof StoreClosed) await this.#end(wire, signal);
        else if (!(repeat && error instanceof Disconnected)) throw error;
      }
    }
  }

  /** A runtime that shuts down takes nothing more: the wire's end is near. */
  async #end(wire: Wire, signal: AbortSignal | undefined): Promise<void> {
    const ended = new Promise<void>((resolve) => {
      if (wire.signal.aborted) resolve();
      wire.signal.addEventListener("abort", () => resolve(), { once: true });
    });
    await orAborted(settledWithin(ended, this.options.reconnectMs), signal);
  }

  /** The present wire; opened if there is none. */
  async live(signal?: AbortSignal): Promise<{ wire: Wire; feeds: Map<number, Feed> }> {
    for (;;) {
      signal?.throwIfAborted();
      this.#closed.signal.throwIfAborted();
      if (this.#wire !== undefined) return this.#wire;
      this.#opening ??= this.#reopen().finally(() => {
        this.#opening = undefined;
      });
      await orAborted(this.#opening, signal);
    }
  }

  close(): Promise<void> {
    this.#ending ??= this.#close();
    return this.#ending;
  }

  async #close(): Promise<void> {
    this.#closed.abort(new Disconnected("the room was closed"));
    for (const feed of [...this.feeds]) feed.close();
    await this.#opening?.catch(() => undefined);
    const wire = this.#wire?.wire;
    this.#wire = undefined;
    await wire?.close();
  }

  // ---- wires ----

  async #reopen(): Promise<void> {
    const until = Date.now() + this.options.reconnectMs;
    const tries = this.#lost && this.resumes;
    for (let wait = WAIT_FIRST_MS; ; wait = Math.min(2 * wait, WAIT_MAX_MS)) {
      try {
        await this.#open();
        this.#lost = false;
        return;
      } catch (error) {
        this.#closed.signal.throwIfAborted();
        if (!tries || !(error instanceof Disconnected) || Date.now() + wait > until) throw error;
      }
      await this.#pause(wait * (0.5 + Math.random() / 2));
    }
  }

  async #pause(ms: number): Promise<void> {
    const over = new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#closed.signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
    });
    await orAborted(over, this.#closed.signal);
  }

  async #open(): Promise<void> {
    const wire: Wire = new Wire({
      notification: (method, params) => this.#hear(method as keyof Notifications, params),
      request: (method, params) => this.#asked(method as keyof ClientMethods, params, wire.signal),
    });
    const late = new AbortController();
    const timer = setTimeout(
      () => late.abort(new Disconnected(`no connection within ${this.options.connectMs} ms`)),
      this.options.connectMs,
    );
    const signal = AbortSignal.any([late.signal, this.#closed.signal]);
    try {
      wire.attach(await this.options.open(wire, signal));
      const said = (await wire.request(
        "initialize",
        { protocolVersion: PROTOCOL_VERSION, client: this.options.client },
        { signal },
      )) as Initialized;
      wire.signal.throwIfAborted();
      this.#wire = { wire, said, at: Date.now(), feeds: new Map() };
      wire.signal.addEventListener("abort", () => this.#wireLost(wire), { once: true });
      if (this.resumes) this.#watch(wire);
    } catch (error) {
      await wire.close();
      throw error;
    } finally {
      clearTimeout(timer);
    }
    for (const binding of this.#bindings) binding.renew();
    for (const feed of this.feeds) feed.wake();
  }

  /** A network that went away says nothing: without this a run would wait for it for ever. */
  #watch(wire: Wire): void {
    const { silentMs = SILENT_MS } = this.options;
    let heard = -1;
    const timer = setInterval(() => {
      if (heard === wire.heard) {
        wire.gone(new Disconnected(`nothing came within ${silentMs} ms`));
      } else if (!wire.signal.aborted) {
        heard = wire.heard;
        wire.forget("session/unsubscribe", { subscription: 0 }); // there is none of that number
      }
    }, silentMs);
    wire.signal.addEventListener("abort", () => clearInterval(timer), { once: true });
  }

  #wireLost(wire: Wire): void {
    const lost = this.#wire;
    if (lost?.wire !== wire) return;
    this.#wire = undefined;
    this.#lost = true;
    void wire.close(); // also of a transport that only fell silent
    const why = wire.signal.reason as Disconnected;
    for (const feed of lost.feeds.values()) feed.lost(this.resumes ? undefined : why);
    if (!this.resumes || (this.feeds.size === 0 && this.#bindings.size === 0)) return;
    // Who is bound wants to be asked, and who follows to hear, before the next call.
    void (Date.now() - lost.at < WAIT_MAX_MS ? this.#pause(WAIT_FIRST_MS) : Promise.resolve())
      .then(() => this.live())
      .catch((error: unknown) => {
        for (const feed of this.feeds) feed.fail(error);
        if (this.#bindings.size > 0 && !this.#closed.signal.aborted) this.report(error);
      });
  }

  // ---- feeds ----

  /** Where events of the feed's subscription come in from now on. */
  join(wire: Wire, number: number, feed: Feed): void {
    if (this.#wire?.wire === wire) this.#wire.feeds.set(number, feed);
  }

  /** Ends the feed's subscription, if it is one of the present wire. */
  leave(number: number, feed: Feed): void {
    if (this.#wire?.feeds.get(number) !== feed) return;
    this.#wire.feeds.delete(number);
    this.#wire.wire.forget("session/unsubscribe", { subscription: number });
  }

  /**
   * Hears live tokens of a session; the answer undoes it. The runtime tells a token once for each
   * subscription that asks for them, and not to which: so all that listen here share one.
   */
  hearDeltas(sessionId: string, after: number, hear: (delta: SessionDelta) => void): () => void {
    const shared = this.#deltas.get(sessionId) ?? {
      feed: new Feed(this, sessionId, { after, types: [], deltas: true }),
      all: new Set<(delta: SessionDelta) => void>(),
    };
    if (shared.all.size === 0) {
      this.#deltas.set(sessionId, shared);
      void shared.feed.next().catch(() => undefined); // no event comes, but it keeps up the subscription
    }
    const one = (delta: SessionDelta): void => hear(delta);
    shared.all.add(one);
    return () => {
      shared.all.delete(one);
      if (shared.all.size > 0 || this.#deltas.get(sessionId) !== shared) return;
      this.#deltas.delete(sessionId);
      shared.feed.close();
    };
  }

  // ---- routes ----

  addBinding(binding: Binding): void {
    this.#bindings.add(binding);
  }

  dropBinding(binding: Binding, token: string | undefined): void {
    this.#bindings.delete(binding);
    if (token !== undefined) this.#wire?.wire.forget("session/unbind", { token });
  }

  /** The one that was bound last. */
  #boundTo(sessionId: string): Binding | undefined {
    return [...this.#bindings].findLast((binding) => binding.sessionId === sessionId);
  }

  // ---- what the runtime says and asks ----

  #hear(method: keyof Notifications, params: unknown): void {
    switch (method) {
      case "session.event": {
        const { subscription, event } = params as EventNote;
        this.#wire?.feeds.get(subscription)?.push(event);
        break;
      }
      case "session.lagged": {
        const { subscription, fromSeq } = params as Lagged;
        const feed = this.#wire?.feeds.get(subscription);
        this.#wire?.feeds.delete(subscription);
        feed?.lagged(fromSeq);
        break;
      }
      case "session.delta": {
        const delta = params as SessionDelta;
        for (const hear of [...(this.#deltas.get(delta.sessionId)?.all ?? [])]) hear(delta);
        break;
      }
      case "session.delivery": {
        const note = params as DeliveryNote;
        this.#boundTo(note.sessionId)?.delivered(note);
        break;
      }
      case "session.status":
        break; // the log says it too
    }
  }

  async #asked(
    method: keyof ClientMethods,
    params: unknown,
    signal: AbortSignal,
  ): Promise<ApprovalAnswer | UserAnswer> {
    if (method === "approval/request") {
      const request = params as ApprovalRequest;
      return { allow: (await this.#boundTo(request.sessionId)?.approve(request, signal)) ?? null };
    }
    if (method === "user/prompt") {
      const prompt = params as UserPrompt;
      return { answer: (await this.#boundTo(prompt.sessionId)?.answer(prompt, signal)) ?? null };
    }
    const code = "method_not_found";
    throw new PostroomError(`there is no method ${String(method)}`, { code });
  }
}
