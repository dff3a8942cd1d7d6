"""The facts of a session: one struct per event type, and the envelope they travel in.

The log is the session. An event is written once, in the transaction that decides it, and never
changed. ``seq`` counts from 1 without gaps within its session; ``at`` is Unix time in
milliseconds. On the wire and on disk keys are camelCase and enum values snake_case.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from postroom.domain.ids import ApprovalId, CallId, CoreId, DeliveryId, MessageId, SessionId
from postroom.domain.message import (
    AssistantMessage,
    Block,
    Finish,
    Message,
    Usage,
)

CancelCause: TypeAlias = Literal["user", "parent", "disposed"]
Target: TypeAlias = Literal["next_turn", "next_step"]
Outcome: TypeAlias = Literal["ok", "error", "not_started", "unknown", "cancelled", "late"]
EndKind: TypeAlias = Literal[
    "completed",
    "max_tokens",
    "max_steps",
    "refused",
    "rejected",
    "cancelled",
    "error",
    "interrupted",
]


class Data(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one event says. ``TYPE`` is its name in the log."""

    TYPE: ClassVar[str]


class ForkPoint(msgspec.Struct, frozen=True, rename="camel"):
    session_id: SessionId
    seq: int


class SessionCreated(Data, frozen=True):
    """``owner`` is the principal the session belongs to, for ever. ``cwd`` None: no workspace.

    ``ref`` names the one call that made it, where its caller asked (None: it did not).
    """

    TYPE = "session/created"
    core_id: CoreId
    owner: str
    cwd: str | None = None
    parent: SessionId | None = None
    forked_from: ForkPoint | None = None
    target: str | None = None
    ref: str | None = None


class InboxQueued(Data, frozen=True):
    TYPE = "inbox/queued"
    message: Message
    target: Target
    wakes: bool


class InboxRejected(Data, frozen=True):
    TYPE = "inbox/rejected"
    message_id: MessageId
    reason: str


class InboxCancelled(Data, frozen=True):
    """``cause`` is a cancel's cause, or ``removed`` for one message taken out by hand.

    ``ref`` names the one removal or cancel that did it.
    """

    TYPE = "inbox/cancelled"
    message_id: MessageId
    cause: CancelCause | Literal["removed"]
    ref: str | None = None


class InboxReplaced(Data, frozen=True):
    """``message`` takes the place of ``message_id`` in the same list, under its own new id."""

    TYPE = "inbox/replaced"
    message_id: MessageId
    message: Message


class AgentRunning(Data, frozen=True):
    TYPE = "agent/running"


class AgentIdle(Data, frozen=True, omit_defaults=False):
    TYPE = "agent/idle"
    pending_children: tuple[SessionId, ...] = ()


class TurnStart(Data, frozen=True):
    """``recovery`` marks the turn that goes on with interrupted work."""

    TYPE = "turn/start"
    turn: int
    recovery: bool = False


class EndReason(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Why a turn ended. Fields other than ``kind`` are None where they do not apply.

    ``attempt`` counts the recovery attempts used up so far (``interrupted`` only).
    """

    kind: EndKind
    cause: CancelCause | None = None
    code: str | None = None
    message: str | None = None
    status: int | None = None
    retry_after_ms: int | None = None
    provider_request_id: str | None = None
    attempt: int | None = None


class TurnEnd(Data, frozen=True):
    TYPE = "turn/end"
    turn: int
    reason: EndReason


class TurnCancel(Data, frozen=True):
    """A cancel was accepted for this turn: it is open, or its recovery was still owed.

    ``ref`` names the one cancel that did it.
    """

    TYPE = "turn/cancel"
    turn: int
    cause: CancelCause
    ref: str | None = None


class StepStart(Data, frozen=True):
    TYPE = "step/start"
    turn: int
    step: int


class StepEnd(Data, frozen=True):
    TYPE = "step/end"
    turn: int
    step: int


class ToolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """A tool as the model is told of it. ``parameters`` is a JSON Schema object, as JSON text."""

    name: str
    description: str
    parameters: msgspec.Raw


class Params(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Request parameters. None: the provider's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    reasoning_effort: str | None = None


class RequestHeader(Data, frozen=True):
    """All of a model request that is not history. Written when it differs from the last one.

    ``system`` and ``tools`` stand here, or by reference in ``artifact`` where they are large.
    """

    TYPE = "request/header"
    turn: int
    core_revision: str
    model: str
    params: Params
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()
    artifact: str | None = None


class UserMessage(Data, frozen=True):
    TYPE = "user/message"
    turn: int
    step: int
    message: Message


class AssistantReply(Data, frozen=True):
    """``model`` is the reference it was asked by. ``interrupted``: the text that had arrived when
    the turn was cancelled.
    """

    TYPE = "assistant/message"
    turn: int
    step: int
    message: AssistantMessage
    model: str
    finish: Finish
    usage: Usage
    interrupted: bool = False


class ToolCallStarted(Data, frozen=True):
    """Committed just before the tool runs: from here on it may have had effects."""

    TYPE = "tool/call"
    turn: int
    step: int
    call_id: CallId
    name: str
    arguments: str


class ToolResult(Data, frozen=True):
    """``late``: it came after its call was closed; it is recorded and shown to no model."""

    TYPE = "tool/result"
    turn: int
    step: int
    call_id: CallId
    content: tuple[Block, ...]
    outcome: Outcome

    @property
    def late(self) -> bool:
        return self.outcome == "late"


class ErrorInfo(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    code: str
    message: str
    status: int | None = None
    retry_after_ms: int | None = None
    provider_request_id: str | None = None


class ModelRetry(Data, frozen=True):
    """``model`` is set where the next attempt goes to another (fallback) model."""

    TYPE = "model/retry"
    turn: int
    step: int
    attempt: int
    delay_ms: int
    error: ErrorInfo
    model: str | None = None


class HistoryCompacted(Data, frozen=True):
    """The model sees ``summary`` in place of the events ``from_seq`` to ``to_seq``."""

    TYPE = "history/compacted"
    from_seq: int
    to_seq: int
    summary: str


HistoryPolicy: TypeAlias = Literal["persist", "model_hidden", "transient"]


class DeliveryQueued(Data, frozen=True):
    """Something said other than by a reply: by a tool, an output module, a schedule, the host.

    ``text`` is what the history keeps of it, seen by the model where ``policy`` is ``persist``.
    ``owner_turn_id`` is the turn it was said in (None: outside of any).
    """

    TYPE = "delivery/queued"
    delivery_id: DeliveryId
    kind: str
    text: str
    policy: HistoryPolicy
    owner_turn_id: int | None = None
    artifacts: tuple[str, ...] = ()
    source: str | None = None
    metadata: dict[str, str] = {}


class PartReceipt(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """How one part stands. ``reference`` is the platform's id of the message."""

    status: str
    reference: str | None = None
    note: str | None = None
    error: str | None = None


class DeliveryStatusChanged(Data, frozen=True):
    """A delivery came to another status than queued or sending. ``by``: a named operator did it."""

    TYPE = "delivery/status"
    delivery_id: DeliveryId
    status: str
    parts: tuple[PartReceipt, ...]
    owner_turn_id: int | None = None
    by: str | None = None


class HistoryReplaced(Data, frozen=True):
    """The model sees ``text`` in place of what this delivery put into the history."""

    TYPE = "history/replaced"
    delivery_id: DeliveryId
    text: str


class ApprovalAsked(Data, frozen=True):
    """Somebody is asked whether a call may run, or a question. ``subject`` says what, in words.

    ``kind`` is ``approval`` or ``question``; ``call_id`` is the call that waits for it.
    """

    TYPE = "approval/asked"
    approval_id: ApprovalId
    kind: str
    subject: str
    turn: int
    step: int
    call_id: CallId
    expires_at: int
    choices: tuple[str, ...] = ()


class ApprovalDecided(Data, frozen=True):
    """``decision`` is ``allow`` or ``deny``, or the answer to a question. ``by``: who, or what."""

    TYPE = "approval/decided"
    approval_id: ApprovalId
    decision: str
    by: str


class UnknownData(Data, frozen=True):
    """An event of a type this version does not know; kept as it stands."""

    TYPE = ""
    type: str
    raw: str


EventData: TypeAlias = (
    SessionCreated
    | InboxQueued
    | InboxRejected
    | InboxCancelled
    | InboxReplaced
    | AgentRunning
    | AgentIdle
    | TurnStart
    | TurnEnd
    | TurnCancel
    | StepStart
    | StepEnd
    | RequestHeader
    | UserMessage
    | AssistantReply
    | ToolCallStarted
    | ToolResult
    | ModelRetry
    | HistoryCompacted
    | DeliveryQueued
    | DeliveryStatusChanged
    | HistoryReplaced
    | ApprovalAsked
    | ApprovalDecided
    | UnknownData
)

TYPES: dict[str, type[EventData]] = {
    cls.TYPE: cls
    for cls in (
        SessionCreated,
        InboxQueued,
        InboxRejected,
        InboxCancelled,
        InboxReplaced,
        AgentRunning,
        AgentIdle,
        TurnStart,
        TurnEnd,
        TurnCancel,
        StepStart,
        StepEnd,
        RequestHeader,
        UserMessage,
        AssistantReply,
        ToolCallStarted,
        ToolResult,
        ModelRetry,
        HistoryCompacted,
        DeliveryQueued,
        DeliveryStatusChanged,
        HistoryReplaced,
        ApprovalAsked,
        ApprovalDecided,
    )
}

# Each is made with its first event: a program that starts needs few of them.
_DECODERS: dict[str, msgspec.json.Decoder[EventData]] = {}
_encode = msgspec.json.Encoder().encode


def encode_data(data: EventData) -> str:
    """One event's data as JSON text."""
    if isinstance(data, UnknownData):
        return data.raw
    return _encode(data).decode()


def decode_data(type_: str, raw: str) -> EventData:
    decoder = _DECODERS.get(type_)
    if decoder is None:
        kind = TYPES.get(type_)
        if kind is None:
            return UnknownData(type_, raw)
        decoder = _DECODERS[type_] = msgspec.json.Decoder(kind)
    return decoder.decode(raw)


class Event:
    """One committed event. ``data`` is decoded when it is first looked at."""

    __slots__ = ("_data", "at", "raw", "seq", "session_id", "type")

    def __init__(
        self,
        session_id: SessionId,
        seq: int,
        type_: str,
        at: int,
        raw: str,
        data: EventData | None = None,
    ) -> None:
        self.session_id = session_id
        self.seq = seq
        self.type = type_
        self.at = at
        self.raw = raw
        self._data = data

    @property
    def data(self) -> EventData:
        if self._data is None:
            self._data = decode_data(self.type, self.raw)
        return self._data

    def to_json(self) -> str:
        """The envelope ``{sessionId, seq, type, at, data}`` on one line."""
        return (
            f'{{"sessionId":"{self.session_id}","seq":{self.seq},"type":"{self.type}",'
            f'"at":{self.at},"data":{self.raw}}}'
        )

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Reads what `to_json` wrote.

        Raises:
            msgspec.ValidationError: it is not an event envelope.
        """
        envelope = _ENVELOPE.decode(line)
        return cls(
            envelope.session_id,
            envelope.seq,
            envelope.type,
            envelope.at,
            bytes(envelope.data).decode(),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.session_id, self.seq))

    def __repr__(self) -> str:
        return f"Event({self.to_json()})"


class _Envelope(msgspec.Struct, rename="camel"):
    session_id: SessionId
    seq: int
    type: str
    at: int
    data: msgspec.Raw


_ENVELOPE = msgspec.json.Decoder(_Envelope)
