"""A run: an interval of activity that one caller owns, and what it says of that interval.

The interval goes from ``inbox/queued`` of the caller's message to the first ``agent/idle`` after
it. Everything that happens between belongs to the run: steers, injected context, tool
continuations, recovery, messages others queued. So the result describes the interval, and names
its message only to say where the interval starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from postroom.domain.event import (
    AgentIdle,
    AssistantReply,
    EndKind,
    EndReason,
    Event,
    InboxQueued,
    InboxReplaced,
    TurnEnd,
)
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.message import Usage, text_of


class RunResult(msgspec.Struct, frozen=True):
    """What happened between the receipt and the idle that ends the interval.

    ``final_response`` is the text of the last assistant message; None if there is none or it has
    no text. ``finish_reason`` is the kind of the last turn's end, ``end`` all of it; None if no
    turn ended. ``complete`` is False while the interval is still open.
    """

    session_id: SessionId
    message_id: MessageId
    final_response: str | None
    finish_reason: EndKind | None
    end: EndReason | None
    usage: Usage
    first_seq: int
    last_seq: int
    pending_children: tuple[SessionId, ...]
    events: tuple[Event, ...]
    complete: bool

    def to_json(self, *, events: bool = True) -> dict[str, object]:
        """The camelCase form of the protocol, the command line and the SDKs."""
        out: dict[str, object] = {
            "sessionId": self.session_id,
            "messageId": self.message_id,
            "finalResponse": self.final_response,
            "finishReason": self.finish_reason,
            "error": msgspec.to_builtins(self.end)
            if self.end is not None and self.end.kind == "error"
            else None,
            "usage": {
                "inputTokens": self.usage.input_tokens,
                "outputTokens": self.usage.output_tokens,
                "cachedTokens": self.usage.cached_tokens,
                "reasoningTokens": self.usage.reasoning_tokens,
            },
            "firstSeq": self.first_seq,
            "lastSeq": self.last_seq,
            "pendingChildren": list(self.pending_children),
        }
        if events:
            out["events"] = [msgspec.json.decode(e.to_json()) for e in self.events]
        return out


def starts(event: Event, message_id: MessageId) -> bool:
    """Whether this is the event that put the message into the inbox."""
    data = event.data
    if isinstance(data, InboxQueued | InboxReplaced):
        return data.message.id == message_id
    return False


def ends(event: Event, *, quiescent: bool = False) -> bool:
    """Whether an interval ends here: at idle, or at the first idle with no child pending."""
    if event.type != AgentIdle.TYPE:
        return False
    data = event.data
    assert isinstance(data, AgentIdle)
    return not quiescent or not data.pending_children


def interval(
    log: Iterable[Event], message_id: MessageId, *, quiescent: bool = False
) -> tuple[Event, ...]:
    """The run's events, cut from a session's log in order; all to its end if it is still open."""
    out: list[Event] = []
    for event in log:
        if out:
            out.append(event)
            if ends(event, quiescent=quiescent):
                break
        elif starts(event, message_id):
            out.append(event)
    return tuple(out)


def fold_run(
    session_id: SessionId,
    message_id: MessageId,
    events: Sequence[Event],
    *,
    quiescent: bool = False,
) -> RunResult:
    """Folds an interval, as `interval` cuts it, to its result."""
    final: str | None = None
    end: EndReason | None = None
    usage = Usage()
    children: tuple[SessionId, ...] = ()
    for event in events:
        if event.type == AssistantReply.TYPE:
            reply = event.data
            assert isinstance(reply, AssistantReply)
            final = text_of(reply.message.content) or None
            usage = usage + reply.usage
        elif event.type == TurnEnd.TYPE:
            data = event.data
            assert isinstance(data, TurnEnd)
            end = data.reason
        elif event.type == AgentIdle.TYPE:
            data = event.data
            assert isinstance(data, AgentIdle)
            children = data.pending_children
    return RunResult(
        session_id=session_id,
        message_id=message_id,
        final_response=final,
        finish_reason=end.kind if end else None,
        end=end,
        usage=usage,
        first_seq=events[0].seq if events else 0,
        last_seq=events[-1].seq if events else 0,
        pending_children=children,
        events=tuple(events),
        complete=bool(events) and ends(events[-1], quiescent=quiescent),
    )
