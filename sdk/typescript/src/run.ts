/**
 * A run: an interval of activity that one caller owns, and what it says of that interval.
 *
 * The exact twin of the runtime's own fold, checked by the same recorded logs. The interval goes from
 * `inbox/queued` of the caller's message to the first `agent/idle` after it. The result describes the
 * interval, and names its message only to say where the interval starts.
 */

import { is, type Event } from "./event.js";
import type { EndReason } from "./protocol.js";

/** `quiescent`: idle, and no child is pending that will report back. */
export type Until = "idle" | "quiescent";

export interface RunUsage {
  inputTokens: number;
  outputTokens: number;
  cachedTokens: number;
  reasoningTokens: number;
}

export interface RunResult {
  sessionId: string;
  /** The message that the interval starts with. */
  messageId: string;
  /** The text of the last assistant message; null if there is none, or if it has no text. */
  finalResponse: string | null;
  /** The kind of the last turn's end; null if no turn ended. */
  finishReason: EndReason["kind"] | null;
  /** All of that end, where it is an error. */
  error: EndReason | null;
  usage: RunUsage;
  /** 0: there is no event. */
  firstSeq: number;
  lastSeq: number;
  pendingChildren: string[];
  events: Event[];
  /** False while the interval is still open. */
  complete: boolean;
}

/** Whether this is the event that put the message into the inbox. */
export function starts(event: Event, messageId: string): boolean {
  return (is(event, "inbox/queued") || is(event, "inbox/replaced")) && event.data.message.id === messageId;
}

/** Whether an interval ends here: at idle, or at the first idle with no child pending. */
export function ends(event: Event, until: Until = "idle"): boolean {
  return is(event, "agent/idle") && (until === "idle" || !event.data.pendingChildren?.length);
}

/** The run's events, cut from a session's log in order; all to its end if it is still open. */
export function interval(log: Iterable<Event>, messageId: string, until: Until = "idle"): Event[] {
  const out: Event[] = [];
  for (const event of log) {
    if (out.length > 0) {
      out.push(event);
      if (ends(event, until)) break;
    } else if (starts(event, messageId)) {
      out.push(event);
    }
  }
  return out;
}

/** Folds an interval, as `interval` cuts it, to its result. */
export function foldRun(
  sessionId: string,
  messageId: string,
  events: readonly Event[],
  until: Until = "idle",
): RunResult {
  let final: string | null = null;
  let end: EndReason | null = null;
  let children: string[] = [];
  const usage = { inputTokens: 0, outputTokens: 0, cachedTokens: 0, reasoningTokens: 0 };
  for (const event of events) {
    if (is(event, "assistant/message")) {
      final = textOf(event.data.message.content) || null;
      const used = event.data.usage;
      usage.inputTokens += used.inputTokens ?? 0;
      usage.outputTokens += used.outputTokens ?? 0;
      usage.cachedTokens += used.cachedTokens ?? 0;
      usage.reasoningTokens += used.reasoningTokens ?? 0;
    } else if (is(event, "turn/end")) {
      end = event.data.reason;
    } else if (is(event, "agent/idle")) {
      children = [...(event.data.pendingChildren ?? [])];
    }
  }
  const last = events.at(-1);
  return {
    sessionId,
    messageId,
    finalResponse: final,
    finishReason: end?.kind ?? null,
    error: end?.kind === "error" ? known(end) : null,
    usage,
    firstSeq: events[0]?.seq ?? 0,
    lastSeq: last?.seq ?? 0,
    pendingChildren: children,
    events: [...events],
    complete: last !== undefined && ends(last, until),
  };
}

/** The text blocks, joined as they stand; empty if there is none. */
export function textOf(content: readonly { type: string; text?: string }[]): string {
  return content.map((block) => (block.type === "text" ? (block.text ?? "") : "")).join("");
}

/** What is null says nothing, and what this version does not know is left out, as the runtime does. */
function known(end: EndReason): EndReason {
  const { kind, cause, code, message, status, retryAfterMs, providerRequestId, attempt } = end;
  const all = { kind, cause, code, message, status, retryAfterMs, providerRequestId, attempt };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value != null)) as unknown as EndReason;
}
