/**
 * What can go wrong, one tree, with the names of the Python package.
 *
 *     PostroomError
 *     ├── UsageError          the call or the configuration is wrong; nothing was tried
 *     │   └── ConfigError, UnknownModel, MissingKey, NoModel
 *     ├── InputError          a message or id was refused; nothing was queued
 *     │   └── InvalidContent, QueueFull, MessageConflict, UnknownSession, SessionExists, RunOverlap, NotAsked
 *     ├── NotAllowed          the token is wrong, or this is somebody else's to do
 *     ├── StoreError
 *     │   ├── NotCommitted    certainly not written; StoreClosed: the runtime is shutting down
 *     │   └── CommitUncertain the answer of the commit was lost; send the same id again
 *     ├── ProtocolError       one side said what the other does not take
 *     ├── RunTimeout          `run({ timeout })` ran out; carries the partial result
 *     └── Disconnected        the runtime or the connection is gone
 *
 * An aborted call rejects with the reason of its signal, as everywhere in Node.
 */

import { ERROR_NUMBERS, type ErrorData } from "./protocol.js";
import type { RunResult } from "./run.js";

export interface Details {
  /** The stable name of the error. */
  code?: string | undefined;
  /** What to do about it. */
  hint?: string | undefined;
  /** The bad field of the parameters. */
  path?: string | undefined;
  /** The protocol versions that are spoken (only where ours is not). */
  versions?: readonly number[] | undefined;
  cause?: unknown;
}

export class PostroomError extends Error {
  readonly code: string;
  readonly hint: string | undefined;
  readonly path: string | undefined;
  readonly versions: readonly number[];

  constructor(message: string, details: Details = {}) {
    const { code = "error", hint, path, versions = [], cause } = details;
    super(hint ? `${message} (${hint})` : message, cause === undefined ? undefined : { cause });
    this.name = new.target.name;
    this.code = code;
    this.hint = hint;
    this.path = path;
    this.versions = versions;
  }
}

export class UsageError extends PostroomError {}
export class ConfigError extends UsageError {}
export class UnknownModel extends UsageError {}
export class MissingKey extends UsageError {}
export class NoModel extends UsageError {}

export class InputError extends PostroomError {}
export class InvalidContent extends InputError {}
export class QueueFull extends InputError {}
export class MessageConflict extends InputError {}
export class UnknownSession extends InputError {}
export class SessionExists extends InputError {}
export class RunOverlap extends InputError {}
export class NotAsked extends InputError {}

export class NotAllowed extends PostroomError {}

export class StoreError extends PostroomError {}
export class NotCommitted extends StoreError {}
export class StoreClosed extends NotCommitted {}
export class CommitUncertain extends StoreError {}

export class ProtocolError extends PostroomError {}

/** The time of a run is over. The agent goes on, unless `cancelOnTimeout` was set. */
export class RunTimeout extends PostroomError {
  constructor(
    message: string,
    /** What there is so far. `firstSeq` 0: no receipt had come. */
    readonly partial: RunResult,
  ) {
    super(message, { code: "run_timeout" });
  }
}

export class Disconnected extends PostroomError {
  /** How the runtime ended: its exit code, or minus the number of the signal; null: not known. */
  readonly exitCode: number | null;
  /** The end of what the runtime wrote to its standard error; null: not known. */
  readonly stderrTail: string | null;

  constructor(
    message: string,
    details: { exitCode?: number | null; stderrTail?: string | null; hint?: string; cause?: unknown } = {},
  ) {
    super(message, { code: "disconnected", hint: details.hint, cause: details.cause });
    this.exitCode = details.exitCode ?? null;
    this.stderrTail = details.stderrTail ?? null;
  }
}

type Made = new (message: string, details?: Details) => PostroomError;

/** The class of every error that the protocol numbers. */
export const ERRORS: Readonly<Record<keyof typeof ERROR_NUMBERS, Made>> = {
  parse_error: ProtocolError,
  invalid_request: ProtocolError,
  method_not_found: ProtocolError,
  invalid_params: ProtocolError,
  internal_error: ProtocolError,
  unsupported_version: ProtocolError,
  not_initialized: ProtocolError,
  frame_too_large: ProtocolError,
  unauthorized: NotAllowed,
  not_yours: NotAllowed,
  shutting_down: StoreClosed,
  unknown_session: UnknownSession,
  session_exists: SessionExists,
  input: InputError,
  invalid_content: InvalidContent,
  queue_full: QueueFull,
  message_conflict: MessageConflict,
  run_overlap: RunOverlap,
  not_asked: NotAsked,
  not_committed: NotCommitted,
  commit_uncertain: CommitUncertain,
  store: StoreError,
  config: ConfigError,
  unknown_model: UnknownModel,
  missing_key: MissingKey,
  no_model: NoModel,
  error: PostroomError,
};

const BY_NUMBER = new Map<number, Made>(
  Object.entries(ERROR_NUMBERS).map(([name, number]) => [number, ERRORS[name as keyof typeof ERRORS]]),
);

/** An error as it came over the wire. The number says the class, the data the exact code. */
export function errorFrom(number: number, message: string, data?: Partial<ErrorData> | null): PostroomError {
  const Kind = BY_NUMBER.get(number) ?? PostroomError;
  return new Kind(message, {
    code: data?.code,
    hint: data?.hint ?? undefined,
    path: data?.path ?? undefined,
    versions: data?.versions,
  });
}
