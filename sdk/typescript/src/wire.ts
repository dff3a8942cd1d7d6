/**
 * JSON-RPC 2.0 over one transport: requests and their answers, both ways. It knows no method.
 *
 * When the transport goes, every open request is rejected with the reason, and `signal` is aborted.
 */

import { Disconnected, errorFrom, PostroomError, ProtocolError } from "./errors.js";
import { ERROR_NUMBERS, FRAME_BYTES_MAX, type ErrorData } from "./protocol.js";
import type { Transport } from "./transport.js";

export interface Handler {
  notification(method: string, params: unknown): void;
  /** Answers a request of the other side. What it throws is answered as an error. */
  request(method: string, params: unknown): Promise<unknown>;
}

interface Call {
  /** Runs before any later frame is looked at. */
  accept(result: unknown): void;
  reject(error: unknown): void;
}

interface Frame {
  id?: number | string | null;
  method?: string;
  params?: unknown;
  result?: unknown;
  error?: { code: number; message: string; data?: Partial<ErrorData> };
}

export class Wire {
  readonly #calls = new Map<number, Call>();
  readonly #gone = new AbortController();
  #transport: Transport | undefined;
  #called = 0;
  /** How many frames have come. */
  heard = 0;

  constructor(private readonly handler: Handler) {}

  /** Aborted with a `Disconnected` when the connection has ended. */
  get signal(): AbortSignal {
    return this.#gone.signal;
  }

  attach(transport: Transport): void {
    this.#transport = transport;
  }

  async close(): Promise<void> {
    this.gone(new Disconnected("the connection was closed"));
    await this.#transport?.close();
  }

  /**
   * Asks the other side. `accept` is called with the result at once, before anything else that comes.
   * An abort forgets the question; the other side may still do what was asked.
   */
  request(
    method: string,
    params: unknown,
    options: { signal?: AbortSignal | undefined; accept?: ((result: unknown) => void) | undefined } = {},
  ): Promise<unknown> {
    const { signal, accept } = options;
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      this.#gone.signal.throwIfAborted();
      const id = ++this.#called;
      const frame = JSON.stringify({ jsonrpc: "2.0", id, method, params });
      const size = Buffer.byteLength(frame);
      if (size > FRAME_BYTES_MAX) {
        // It could not be answered: who reads it throws it away with its id.
        const hint = "send it as a file, or in parts";
        throw new ProtocolError(`the frame is larger than ${FRAME_BYTES_MAX} bytes`, { code: "frame_too_large", hint });
      }
      const forget = (): void => {
        this.#calls.delete(id);
        signal?.removeEventListener("abort", abort);
      };
      const abort = (): void => {
        forget();
        reject(signal?.reason);
      };
      signal?.addEventListener("abort", abort, { once: true });
      this.#calls.set(id, {
        accept: (result) => {
          forget();
          accept?.(result);
          resolve(result);
        },
        reject: (error) => {
          forget();
          reject(error);
        },
      });
      this.#transport?.send(frame);
    });
  }

  /** Says something nobody answers for: a request whose answer is not waited for. */
  forget(method: string, params: unknown): void {
    if (!this.#gone.signal.aborted) this.request(method, params).catch(() => undefined);
  }

  // ---- what comes in ----

  frame(text: string): void {
    this.heard++;
    let frame: Frame;
    try {
      frame = JSON.parse(text) as Frame;
    } catch {
      return; // no frame of ours; there is nobody to tell
    }
    if (typeof frame !== "object" || frame === null) return;
    if (typeof frame.method === "string") {
      if (frame.id === undefined) this.handler.notification(frame.method, frame.params);
      else void this.#answer(frame.id, frame.method, frame.params);
      return;
    }
    const call = typeof frame.id === "number" ? this.#calls.get(frame.id) : undefined;
    if (call === undefined) return;
    if (frame.error) call.reject(errorFrom(frame.error.code, frame.error.message, frame.error.data));
    else call.accept(frame.result);
  }

  gone(why: Disconnected): void {
    if (this.#gone.signal.aborted) return;
    this.#gone.abort(why);
    for (const call of [...this.#calls.values()]) call.reject(why);
  }

  async #answer(id: number | string | null, method: string, params: unknown): Promise<void> {
    let answer: { result: unknown } | { error: Frame["error"] };
    try {
      answer = { result: await this.handler.request(method, params) };
    } catch (error) {
      const code = error instanceof PostroomError ? error.code : "internal_error";
      const number = ERROR_NUMBERS[code as keyof typeof ERROR_NUMBERS] ?? ERROR_NUMBERS.internal_error;
      answer = { error: { code: number, message: "the client failed to answer", data: { code } } };
    }
    this.#transport?.send(JSON.stringify({ jsonrpc: "2.0", id, ...answer }));
  }
}
