/** What carries frames to a runtime and back: one JSON text a frame. */

import type { Disconnected } from "./errors.js";

export interface Receiver {
  frame(text: string): void;
  /** Nothing comes after this. It is said once. */
  gone(why: Disconnected): void;
}

export interface Transport {
  /** Sends a frame; after the end it does nothing. */
  send(frame: string): void;
  /** Ends the connection and waits until it has ended; bounded, never rejects, may be called again. */
  close(): Promise<void>;
}

/** Opens a transport. It rejects if there is none, and gives up with the signal. */
export type Opener = (receiver: Receiver, signal: AbortSignal) => Promise<Transport>;
