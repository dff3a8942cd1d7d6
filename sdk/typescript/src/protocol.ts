// Generated from protocol/schema.json by scripts/generate.mjs. Do not edit: `npm run generate`.

export const PROTOCOL_VERSION = 1;

/** The largest frame either side takes, in bytes of UTF-8. */
export const FRAME_BYTES_MAX = 33554432;

/** The number of each error, by its stable name. */
export const ERROR_NUMBERS = {
  parse_error: -32700,
  invalid_request: -32600,
  method_not_found: -32601,
  invalid_params: -32602,
  internal_error: -32603,
  unsupported_version: -31000,
  not_initialized: -31001,
  unauthorized: -31002,
  shutting_down: -31003,
  frame_too_large: -31004,
  unknown_session: -31010,
  session_exists: -31011,
  not_yours: -31012,
  input: -31020,
  invalid_content: -31021,
  queue_full: -31022,
  message_conflict: -31023,
  run_overlap: -31024,
  not_committed: -31030,
  commit_uncertain: -31031,
  store: -31032,
  config: -31040,
  unknown_model: -31041,
  missing_key: -31042,
  no_model: -31043,
  not_asked: -31050,
  error: -31099,
} as const;

export interface Initialize {
  protocolVersion: number;
  client: Peer;
}

export interface Peer {
  name: string;
  version: string;
}

export interface Initialized {
  protocolVersion: number;
  server: Peer;
  capabilities: Record<string, boolean>;
}

export type Nothing = Record<string, never>;

export type Done = Record<string, never>;

/**
 * Creates or attaches. `coreId` and `cwd` (an absolute path) are those of a new session.
 *
 * `after`: also subscribes, to events above it. null: it does not.
 */
export interface SessionOpen {
  sessionId?: string | null;
  coreId?: string | null;
  cwd?: string | null;
  after?: number | null;
}

export interface SessionOpened {
  sessionId: string;
  created: boolean;
  headSeq: number;
  status: "idle" | "running";
  coreId: string;
  subscription?: number | null;
}

/** `content` is a text, or a list of content blocks. `run` marks the interval as owned. */
export interface SessionPrompt {
  sessionId: string;
  content: string | (Record<string, unknown>)[];
  messageId?: string | null;
  run?: "exclusive" | "share" | null;
}

/** The message is on disk as event `seq`. It says nothing of a result. */
export interface Receipt {
  messageId: string;
  seq: number;
}

export interface SessionSteer {
  sessionId: string;
  content: string | (Record<string, unknown>)[];
  messageId?: string | null;
}

export interface SessionCancel {
  sessionId: string;
  keepInbox?: boolean;
}

export interface SessionRef {
  sessionId: string;
}

export interface Inbox {
  pending: Pending[];
}

/** `message` is as in `inbox/queued`. */
export interface Pending {
  message: Record<string, unknown>;
  list: "next_step" | "next_turn";
  wakes: boolean;
  seq: number;
}

export interface InboxReplace {
  sessionId: string;
  messageId: string;
  content: string | (Record<string, unknown>)[];
}

/** `messageId` is the new one; null: the old one was not pending any more. */
export interface InboxReplaced {
  messageId: string | null;
}

export interface InboxRemove {
  sessionId: string;
  messageId: string;
}

export interface InboxRemoved {
  removed: boolean;
}

export interface SessionEvents {
  sessionId: string;
  after?: number;
  limit?: number;
}

export interface Events {
  events: Event[];
  more: boolean;
}

/** One durable event. `at` is Unix time in milliseconds. */
export interface Event {
  sessionId: string;
  seq: number;
  type: string;
  at: number;
  data: Record<string, unknown>;
}

/** Events from `after` on, then live, without a gap. `deltas`: live tokens too. */
export interface SessionSubscribe {
  sessionId: string;
  after?: number;
  types?: string[] | null;
  deltas?: boolean;
}

export interface Subscribed {
  subscription: number;
  headSeq: number;
}

export interface SessionUnsubscribe {
  subscription: number;
}

export interface SessionBind {
  sessionId: string;
}

export interface Bound {
  token: string;
}

export interface SessionUnbind {
  token: string;
}

export interface SessionList {
  limit?: number;
  before?: number | null;
}

export interface Sessions {
  sessions: SessionInfo[];
}

export interface SessionInfo {
  sessionId: string;
  coreId: string;
  owner: string;
  cwd: string | null;
  parent: string | null;
  title: string | null;
  status: "idle" | "running";
  headSeq: number;
  turns: number;
  pending: number;
  createdAt: number;
  updatedAt: number;
}

export interface SessionFork {
  sessionId: string;
  atSeq?: number | null;
  forkId?: string | null;
}

export interface Forked {
  sessionId: string;
  headSeq: number;
}

export interface ApprovalList {
  sessionId?: string | null;
}

export interface Approvals {
  approvals: Approval[];
}

export interface Approval {
  approvalId: string;
  sessionId: string;
  kind: string;
  subject: string;
  expiresAt: number;
}

export interface ApprovalDecide {
  approvalId: string;
  decision: "allow" | "deny";
}

export interface OutboxList {
  sessionId?: string | null;
  status?: string[];
  open?: boolean;
  limit?: number;
}

export interface Deliveries {
  deliveries: Delivery[];
}

export interface Delivery {
  deliveryId: string;
  sessionId: string;
  kind: string;
  status: string;
  claim: string;
  claimedBy: string | null;
  handedOver: boolean;
  address: string | null;
  ownerTurnId: number | null;
  policy: string;
  decidedBy: string | null;
  due: number;
  createdAt: number;
  updatedAt: number;
  expiresAt: number;
  parts: Part[];
}

export interface Part {
  index: number;
  kind: string;
  status: string;
  attempts: number;
  reference: string | null;
  note: string | null;
  error: string | null;
  text: string;
  artifact: string | null;
}

/** `by` names the operator. `queued` sends what is in doubt again: it may arrive twice. */
export interface OutboxResolve {
  deliveryId: string;
  decision: "failed" | "queued" | "sent";
  by: string;
}

export interface OutboxDecide {
  deliveryId: string;
  by: string;
}

export interface UserPrompt {
  id: string;
  sessionId: string;
  text: string;
  choices: string[];
}

/** `answer` null: there is none. */
export interface UserAnswer {
  answer: string | null;
}

export interface ApprovalRequest {
  approvalId: string;
  sessionId: string;
  subject: string;
}

/** `allow` null: not decided here; somebody may decide later, by its id. */
export interface ApprovalAnswer {
  allow: boolean | null;
}

export interface EventNote {
  subscription: number;
  event: Event;
}

/**
 * What the whole agent does, as of event `seq`; `pending` counts all pending messages then.
 *
 * Told to whoever is subscribed to the session: once when its stream has caught up, then right
 * after each `agent/running` and `agent/idle`.
 */
export interface SessionStatus {
  sessionId: string;
  status: "idle" | "running";
  seq: number;
  pending: number;
}

/**
 * Live tokens: never durable, dropped under pressure.
 *
 * `kind`: text, reasoning, call, progress; reset: what was streamed of this step is void.
 */
export interface SessionDelta {
  sessionId: string;
  turn: number;
  step: number;
  kind: string;
  text: string;
  name?: string | null;
  callId?: string | null;
}

/**
 * The client read too slowly: events from `fromSeq` on were not sent.
 *
 * The subscription is over. The client subscribes again, after `fromSeq` - 1.
 */
export interface Lagged {
  sessionId: string;
  subscription: number;
  fromSeq: number;
}

/**
 * One part of a delivery, for the connection that is the session's route.
 *
 * `key` is the part's own and the same in every attempt: who shows it knows a repeat by it.
 * `artifact` is the file of a media part, `text` its caption then.
 */
export interface DeliveryNote {
  sessionId: string;
  deliveryId: string;
  index: number;
  count: number;
  kind: string;
  key: string;
  text: string;
  artifact?: string | null;
  mediaType?: string | null;
  name?: string | null;
}

/** `code` is the stable name of the error, `hint` what to do about it, `path` the bad field. */
export interface ErrorData {
  code: string;
  hint?: string | null;
  path?: string | null;
  versions?: number[];
}

/**
 * `owner` is the principal the session belongs to, for ever. `cwd` null: no workspace.
 *
 * `ref` names the one call that made it, where its caller asked (null: it did not).
 */
export interface SessionCreated {
  coreId: string;
  owner: string;
  cwd?: string | null;
  parent?: string | null;
  forkedFrom?: ForkPoint | null;
  target?: string | null;
  ref?: string | null;
}

export interface ForkPoint {
  sessionId: string;
  seq: number;
}

export interface InboxQueued {
  message: Message;
  target: "next_step" | "next_turn";
  wakes: boolean;
}

export interface Message {
  id: string;
  content: (Text | Image | Audio | Video | File)[];
  source: Source;
}

export interface Text {
  type: "text";
  text: string;
}

export interface Image {
  type: "image";
  artifact: string;
  mediaType: string;
  size: number;
  name?: string | null;
}

export interface Audio {
  type: "audio";
  artifact: string;
  mediaType: string;
  size: number;
  name?: string | null;
}

export interface Video {
  type: "video";
  artifact: string;
  mediaType: string;
  size: number;
  name?: string | null;
}

export interface File {
  type: "file";
  artifact: string;
  mediaType: string;
  size: number;
  name?: string | null;
}

/**
 * Where a message came from.
 *
 * `kind` is `operator`, `conversation`, `sdk`, `schedule`, `goal`, `child`,
 * `tool` or `system`. `sender` is the person's display name and `senderId` the
 * platform's opaque id (null where there is no other person than the operator).
 */
export interface Source {
  kind?: string;
  principal?: string | null;
  sender?: string | null;
  senderId?: string | null;
  channel?: string | null;
  reference?: string | null;
}

export interface InboxRejected {
  messageId: string;
  reason: string;
}

/**
 * `cause` is a cancel's cause, or `removed` for one message taken out by hand.
 *
 * `ref` names the one removal or cancel that did it.
 */
export interface InboxCancelled {
  messageId: string;
  cause: "disposed" | "parent" | "user" | "removed";
  ref?: string | null;
}

/** `message` takes the place of `messageId` in the same list, under its own new id. */
export interface InboxReplacedData {
  messageId: string;
  message: Message;
}

export type AgentRunning = Record<string, never>;

export interface AgentIdle {
  pendingChildren?: string[];
}

/** `recovery` marks the turn that goes on with interrupted work. */
export interface TurnStart {
  turn: number;
  recovery?: boolean;
}

export interface TurnEnd {
  turn: number;
  reason: EndReason;
}

/**
 * Why a turn ended. Fields other than `kind` are null where they do not apply.
 *
 * `attempt` counts the recovery attempts used up so far (`interrupted` only).
 */
export interface EndReason {
  kind: "cancelled" | "completed" | "error" | "interrupted" | "max_steps" | "max_tokens" | "refused" | "rejected";
  cause?: "disposed" | "parent" | "user" | null;
  code?: string | null;
  message?: string | null;
  status?: number | null;
  retryAfterMs?: number | null;
  providerRequestId?: string | null;
  attempt?: number | null;
}

/**
 * A cancel was accepted for this turn: it is open, or its recovery was still owed.
 *
 * `ref` names the one cancel that did it.
 */
export interface TurnCancel {
  turn: number;
  cause: "disposed" | "parent" | "user";
  ref?: string | null;
}

export interface StepStart {
  turn: number;
  step: number;
}

export interface StepEnd {
  turn: number;
  step: number;
}

/**
 * All of a model request that is not history. Written when it differs from the last one.
 *
 * `system` and `tools` stand here, or by reference in `artifact` where they are large.
 */
export interface RequestHeader {
  turn: number;
  coreRevision: string;
  model: string;
  params: Params;
  system?: string;
  tools?: ToolSpec[];
  artifact?: string | null;
}

/** Request parameters. null: the provider's default. */
export interface Params {
  maxTokens?: number | null;
  temperature?: number | null;
  reasoningEffort?: string | null;
}

/** A tool as the model is told of it. `parameters` is a JSON Schema object, as JSON text. */
export interface ToolSpec {
  name: string;
  description: string;
  parameters: unknown;
}

export interface UserMessage {
  turn: number;
  step: number;
  message: Message;
}

/**
 * `model` is the reference it was asked by. `interrupted`: the text that had arrived when
 * the turn was cancelled.
 */
export interface AssistantReply {
  turn: number;
  step: number;
  message: AssistantMessage;
  model: string;
  finish: "content_filter" | "length" | "stop" | "tool_calls";
  usage: Usage;
  interrupted?: boolean;
}

export interface AssistantMessage {
  id: string;
  content: (Text | Reasoning | ToolCall | Image | Audio | Video | File)[];
}

/** What a model thought aloud. `signature` is the provider's seal, sent back unchanged. */
export interface Reasoning {
  type: "reasoning";
  text: string;
  signature?: string | null;
}

/** `arguments` is a JSON object as the model wrote it, kept as text. */
export interface ToolCall {
  type: "toolCall";
  callId: string;
  name: string;
  arguments: string;
}

/** Tokens of one model request. `cachedTokens` are part of `inputTokens`. */
export interface Usage {
  inputTokens?: number;
  outputTokens?: number;
  cachedTokens?: number;
  reasoningTokens?: number;
}

/** Committed just before the tool runs: from here on it may have had effects. */
export interface ToolCallStarted {
  turn: number;
  step: number;
  callId: string;
  name: string;
  arguments: string;
}

/** `late`: it came after its call was closed; it is recorded and shown to no model. */
export interface ToolResult {
  turn: number;
  step: number;
  callId: string;
  content: (Text | Reasoning | ToolCall | Image | Audio | Video | File)[];
  outcome: "cancelled" | "error" | "late" | "not_started" | "ok" | "unknown";
}

/** `model` is set where the next attempt goes to another (fallback) model. */
export interface ModelRetry {
  turn: number;
  step: number;
  attempt: number;
  delayMs: number;
  error: ErrorInfo;
  model?: string | null;
}

export interface ErrorInfo {
  code: string;
  message: string;
  status?: number | null;
  retryAfterMs?: number | null;
  providerRequestId?: string | null;
}

/** The model sees `summary` in place of the events `fromSeq` to `toSeq`. */
export interface HistoryCompacted {
  fromSeq: number;
  toSeq: number;
  summary: string;
}

/**
 * Something said other than by a reply: by a tool, an output module, a schedule, the host.
 *
 * `text` is what the history keeps of it, seen by the model where `policy` is `persist`.
 * `ownerTurnId` is the turn it was said in (null: outside of any).
 */
export interface DeliveryQueued {
  deliveryId: string;
  kind: string;
  text: string;
  policy: "model_hidden" | "persist" | "transient";
  ownerTurnId?: number | null;
  artifacts?: string[];
  source?: string | null;
  metadata?: Record<string, string>;
}

/** A delivery came to another status than queued or sending. `by`: a named operator did it. */
export interface DeliveryStatusChanged {
  deliveryId: string;
  status: string;
  parts: PartReceipt[];
  ownerTurnId?: number | null;
  by?: string | null;
}

/** How one part stands. `reference` is the platform's id of the message. */
export interface PartReceipt {
  status: string;
  reference?: string | null;
  note?: string | null;
  error?: string | null;
}

/** The model sees `text` in place of what this delivery put into the history. */
export interface HistoryReplaced {
  deliveryId: string;
  text: string;
}

/**
 * Somebody is asked whether a call may run, or a question. `subject` says what, in words.
 *
 * `kind` is `approval` or `question`; `callId` is the call that waits for it.
 */
export interface ApprovalAsked {
  approvalId: string;
  kind: string;
  subject: string;
  turn: number;
  step: number;
  callId: string;
  expiresAt: number;
  choices?: string[];
}

/** `decision` is `allow` or `deny`, or the answer to a question. `by`: who, or what. */
export interface ApprovalDecided {
  approvalId: string;
  decision: string;
  by: string;
}

/** The methods of the runtime. */
export interface Methods {
  "initialize": { params: Initialize; result: Initialized };
  "shutdown": { params: Nothing; result: Done };
  "session/open": { params: SessionOpen; result: SessionOpened };
  "session/prompt": { params: SessionPrompt; result: Receipt };
  "session/steer": { params: SessionSteer; result: Receipt };
  "session/inject": { params: SessionSteer; result: Receipt };
  "session/cancel": { params: SessionCancel; result: Done };
  "session/inbox": { params: SessionRef; result: Inbox };
  "session/inbox/replace": { params: InboxReplace; result: InboxReplaced };
  "session/inbox/remove": { params: InboxRemove; result: InboxRemoved };
  "session/events": { params: SessionEvents; result: Events };
  "session/subscribe": { params: SessionSubscribe; result: Subscribed };
  "session/unsubscribe": { params: SessionUnsubscribe; result: Done };
  "session/bind": { params: SessionBind; result: Bound };
  "session/unbind": { params: SessionUnbind; result: Done };
  "session/list": { params: SessionList; result: Sessions };
  "session/fork": { params: SessionFork; result: Forked };
  "session/close": { params: SessionRef; result: Done };
  "approval/list": { params: ApprovalList; result: Approvals };
  "approval/decide": { params: ApprovalDecide; result: Done };
  "outbox/list": { params: OutboxList; result: Deliveries };
  "outbox/resolve": { params: OutboxResolve; result: Delivery };
  "outbox/redeliver": { params: OutboxDecide; result: Delivery };
  "outbox/abandon": { params: OutboxDecide; result: Delivery };
}

/** The methods of the client. */
export interface ClientMethods {
  "user/prompt": { params: UserPrompt; result: UserAnswer };
  "approval/request": { params: ApprovalRequest; result: ApprovalAnswer };
}

/** What the runtime says by itself. */
export interface Notifications {
  "session.event": EventNote;
  "session.status": SessionStatus;
  "session.delta": SessionDelta;
  "session.lagged": Lagged;
  "session.delivery": DeliveryNote;
}

/** The data of each event type. */
export interface EventTypes {
  "session/created": SessionCreated;
  "inbox/queued": InboxQueued;
  "inbox/rejected": InboxRejected;
  "inbox/cancelled": InboxCancelled;
  "inbox/replaced": InboxReplacedData;
  "agent/running": AgentRunning;
  "agent/idle": AgentIdle;
  "turn/start": TurnStart;
  "turn/end": TurnEnd;
  "turn/cancel": TurnCancel;
  "step/start": StepStart;
  "step/end": StepEnd;
  "request/header": RequestHeader;
  "user/message": UserMessage;
  "assistant/message": AssistantReply;
  "tool/call": ToolCallStarted;
  "tool/result": ToolResult;
  "model/retry": ModelRetry;
  "history/compacted": HistoryCompacted;
  "delivery/queued": DeliveryQueued;
  "delivery/status": DeliveryStatusChanged;
  "history/replaced": HistoryReplaced;
  "approval/asked": ApprovalAsked;
  "approval/decided": ApprovalDecided;
}
