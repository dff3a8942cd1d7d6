/** Talks to a Postroom runtime. */

export { connect, VERSION, type CommonOptions, type ConnectOptions, type DaemonOptions, type OwnOptions } from "./connect.js";
export { Room, type By, type SessionOptions } from "./room.js";
export { Session } from "./session.js";
export type {
  CallOptions,
  Content,
  EventsOptions,
  QueueOptions,
  RunOptions,
  SubscribeOptions,
  Subscription,
} from "./session.js";
export type { Asked, Binding, Callbacks } from "./binding.js";
export type { SocketOptions } from "./socket.js";
export type { StdioOptions } from "./stdio.js";
export { ends, foldRun, interval, starts, textOf, type RunResult, type RunUsage, type Until } from "./run.js";
export { is, type EventOf } from "./event.js";
export { newMessageId, newSessionId } from "./ids.js";
export {
  CommitUncertain,
  ConfigError,
  Disconnected,
  InputError,
  InvalidContent,
  MessageConflict,
  MissingKey,
  NoModel,
  NotAllowed,
  NotAsked,
  NotCommitted,
  PostroomError,
  ProtocolError,
  QueueFull,
  RunOverlap,
  RunTimeout,
  SessionExists,
  StoreClosed,
  StoreError,
  UnknownModel,
  UnknownSession,
  UsageError,
} from "./errors.js";
export { ERROR_NUMBERS, FRAME_BYTES_MAX, PROTOCOL_VERSION } from "./protocol.js";
export type * from "./protocol.js";
