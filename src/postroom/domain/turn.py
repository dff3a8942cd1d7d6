"""A session's agent as a state machine: running and idle, turns, steps, calls, recovery.

::

              queue a waking message                     begin
      IDLE ───────────────────────────> RUNNING ──────────────────> TURN OPEN
       ^                                 │   ^                      │  step ⟳
       │  nothing waking, nothing owed   │   │  something waking    │
       └─────────────────────────────────┴───┴──────── finish ──────┘
                                             ^                      │ the driver died
                                             └── recovery owed <── take over

`decide` looks at a state and a command and says which facts follow; `evolve` folds one fact into
the state. Both are pure, so the store, the crash tests and the explorer share them. A state is
exactly the fold of its log. Whether a driver may ask at all (its claim) is `domain.work`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import msgspec

from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    ApprovalAsked,
    ApprovalDecided,
    AssistantReply,
    CancelCause,
    EndReason,
    EventData,
    InboxCancelled,
    InboxQueued,
    InboxRejected,
    InboxReplaced,
    ModelRetry,
    StepEnd,
    StepStart,
    Target,
    ToolCallStarted,
    ToolResult,
    TurnCancel,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from postroom.domain.ids import ApprovalId, CallId, MessageId, SessionId
from postroom.domain.inbox import EMPTY, Inbox, Pending, step_batch, turn_batch
from postroom.domain.message import AssistantMessage, Message, Text, ToolCall

Status: TypeAlias = Literal["idle", "running"]


class OpenCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of the last reply that has no result yet. ``started``: its tool/call is logged."""

    call_id: CallId
    name: str
    arguments: str
    started: bool = False


class OpenTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """``step`` 0: before the first. ``replied`` and ``retries`` are of the open step.

    ``truncated``: a reply of this turn hit the token limit.
    """

    number: int
    step: int = 0
    step_open: bool = False
    replied: bool = False
    retries: int = 0
    recovery: bool = False
    cancel: CancelCause | None = None
    truncated: bool = False
    calls: tuple[OpenCall, ...] = ()


class AgentState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is folded from a session's log.

    ``turns`` is the number of the last turn, ``requests`` how many model requests were started,
    ``owed`` that interrupted work waits for its recovery turn, ``attempts`` how many recoveries
    were tried since a turn last ended by itself. ``header`` is the seq of the last
    request/header. ``asking`` are the open turn's undecided approvals. ``inbox`` is kept apart by
    the store and joined when a decision needs it.
    """

    status: Status = "idle"
    turns: int = 0
    requests: int = 0
    header: int = 0
    owed: bool = False
    attempts: int = 0
    turn: OpenTurn | None = None
    children: tuple[SessionId, ...] = ()
    asking: tuple[ApprovalId, ...] = ()
    inbox: Inbox = EMPTY

    @property
    def settled(self) -> bool:
        """Nothing to do: no open turn, no owed recovery, nothing waking pending."""
        return self.turn is None and not self.owed and not self.inbox.waking


# ---- commands: what may be asked of a session ----


class Queue(msgspec.Struct, frozen=True):
    message: Message
    target: Target
    wakes: bool


class Remove(msgspec.Struct, frozen=True):
    """``driven``: somebody holds the session's drive, and will settle it."""

    message_id: MessageId
    driven: bool
    ref: str | None = None


class Replace(msgspec.Struct, frozen=True):
    message_id: MessageId
    message: Message


class Cancel(msgspec.Struct, frozen=True):
    cause: CancelCause
    keep_inbox: bool
    driven: bool
    ref: str | None = None


class BeginTurn(msgspec.Struct, frozen=True):
    """Opens a turn, or settles. ``rejected`` are those of the batch that the policy refused."""

    rejected: tuple[MessageId, ...] = ()
    reason: str = ""


class NextStep(msgspec.Struct, frozen=True):
    """Closes the step with the results still missing and opens the next one."""

    results: tuple[ToolResult, ...]
    rejected: tuple[MessageId, ...] = ()
    reason: str = ""


class RecordReply(msgspec.Struct, frozen=True):
    """A reply that calls tools, and the calls that start at once."""

    reply: AssistantReply
    start: tuple[CallId, ...]


class StartCalls(msgspec.Struct, frozen=True):
    call_ids: tuple[CallId, ...]


class RecordResults(msgspec.Struct, frozen=True):
    results: tuple[ToolResult, ...]


class RecordRetry(msgspec.Struct, frozen=True):
    retry: ModelRetry


class Finish(msgspec.Struct, frozen=True):
    """Ends the turn. An accepted cancel overrules ``reason``; the token limit sticks."""

    reason: EndReason
    reply: AssistantReply | None = None
    results: tuple[ToolResult, ...] = ()


class TakeOver(msgspec.Struct, frozen=True):
    """The claim found a turn open. ``charged``: its driver died or lost its lease."""

    charged: bool
    attempts_max: int


Command: TypeAlias = (
    Queue
    | Remove
    | Replace
    | Cancel
    | BeginTurn
    | NextStep
    | RecordReply
    | StartCalls
    | RecordResults
    | RecordRetry
    | Finish
    | TakeOver
)


def decide(state: AgentState, command: Command) -> tuple[EventData, ...]:
    """The facts that follow from a command; none if there is nothing to do.

    The caller has checked that the command fits the state (the message is pending, the turn and
    step are the open ones): a command that cannot fit is a bug and is asserted.
    """
    match command:
        case Queue(message, target, wakes):
            queued = InboxQueued(message, target, wakes)
            if wakes and state.status == "idle":
                return queued, AgentRunning()
            return (queued,)
        case Remove(message_id, driven, ref):
            facts = _Facts(state)
            facts.add(InboxCancelled(message_id, "removed", ref))
            if not driven:
                facts.settle()
            return facts.done()
        case Replace(message_id, message):
            return (InboxReplaced(message_id, message),)
        case Cancel():
            return _cancel(state, command)
        case BeginTurn():
            return _begin(state, command)
        case NextStep():
            return _next_step(state, command)
        case RecordReply():
            return _record_reply(state, command)
        case StartCalls(call_ids):
            return _start(_turn(state), call_ids)
        case RecordResults(results):
            return results
        case RecordRetry(retry):
            return (retry,)
        case Finish():
            return _finish(state, command)
        case TakeOver():
            return _take_over(state, command)
        case _:
            assert_never(command)


def evolve(state: AgentState, event: EventData) -> AgentState:
    """The state after one more fact. Facts that say nothing about the agent change nothing."""
    change = msgspec.structs.replace
    match event:
        case InboxQueued(message, target, wakes):
            return change(state, inbox=state.inbox.add(Pending(message, wakes), target))
        case UserMessage(_, _, message):
            return change(state, inbox=state.inbox.without(message.id))
        case InboxCancelled(message_id) | InboxRejected(message_id):
            return change(state, inbox=state.inbox.without(message_id))
        case InboxReplaced(message_id, message):
            return change(state, inbox=state.inbox.replace(message_id, message))
        case AgentRunning():
            return change(state, status="running")
        case AgentIdle():
            return change(state, status="idle")
        case TurnStart(number, recovery):
            turn = OpenTurn(number, recovery=recovery)
            return change(state, turns=number, turn=turn, owed=False)
        case TurnEnd(_, reason):
            interrupted = reason.kind == "interrupted"
            attempts = (reason.attempt or 0) if interrupted else 0
            return change(state, turn=None, owed=interrupted, attempts=attempts)
        case TurnCancel(cause=cause):
            if state.turn is None:
                return change(state, owed=False, attempts=0)
            return change(state, turn=change(state.turn, cancel=state.turn.cancel or cause))
        case StepStart(_, step):
            turn = change(_turn(state), step=step, step_open=True, replied=False, retries=0)
            return change(state, turn=turn, requests=state.requests + 1)
        case StepEnd():
            return change(state, turn=change(_turn(state), step_open=False))
        case ModelRetry(attempt=attempt):
            turn = change(_turn(state), retries=attempt)
            return change(state, turn=turn, requests=state.requests + 1)
        case AssistantReply(message=message, finish=finish):
            calls = tuple(
                OpenCall(CallId(b.call_id), b.name, b.arguments)
                for b in message.content
                if isinstance(b, ToolCall)
            )
            turn = _turn(state)
            truncated = turn.truncated or finish == "length"
            turn = change(turn, calls=calls, replied=True, truncated=truncated)
            return change(state, turn=turn)
        case ToolCallStarted(call_id=call_id):
            turn = _turn(state)
            calls = tuple(
                change(c, started=True) if c.call_id == call_id else c for c in turn.calls
            )
            return change(state, turn=change(turn, calls=calls))
        case ApprovalAsked(approval_id=approval_id):
            return change(state, asking=(*state.asking, approval_id))
        case ApprovalDecided(approval_id=approval_id):
            return change(state, asking=tuple(i for i in state.asking if i != approval_id))
        case ToolResult(outcome="late"):
            return state
        case ToolResult(call_id=call_id):
            turn = _turn(state)
            calls = tuple(c for c in turn.calls if c.call_id != call_id)
            return change(state, turn=change(turn, calls=calls))
        case _:
            return state


# ---- the decisions ----

NOT_STARTED = "This call was not started: the process stopped before it."
UNKNOWN = (
    "The process stopped while this call was running. Its outcome is unknown: "
    "verify what it did before repeating it."
)
CANCELLED = "This call was cancelled before it finished."


class _Facts:
    """Facts so far, and the state after them."""

    def __init__(self, state: AgentState) -> None:
        self.state = state
        self.events: list[EventData] = []

    def add(self, *events: EventData) -> None:
        for event in events:
            self.events.append(event)
            self.state = evolve(self.state, event)

    def settle(self) -> None:
        """Writes agent/idle if the agent runs and there is nothing left to do."""
        if self.state.status == "running" and self.state.settled:
            self.add(AgentIdle(self.state.children))

    def done(self) -> tuple[EventData, ...]:
        return tuple(self.events)


def _turn(state: AgentState) -> OpenTurn:
    assert state.turn is not None, "no turn is open"
    return state.turn


def _cancel(state: AgentState, command: Cancel) -> tuple[EventData, ...]:
    facts = _Facts(state)
    if not command.keep_inbox:
        for pending in state.inbox.next_step + state.inbox.next_turn:
            facts.add(InboxCancelled(pending.message.id, command.cause, command.ref))
    if state.turn is not None:
        if state.turn.cancel is None:
            facts.add(TurnCancel(state.turn.number, command.cause, command.ref))
    elif state.owed:
        facts.add(TurnCancel(state.turns, command.cause, command.ref))
    if not command.driven:
        facts.settle()
    return facts.done()


def _begin(state: AgentState, command: BeginTurn) -> tuple[EventData, ...]:
    assert state.turn is None, "two turns open"
    facts = _Facts(state)
    if not state.owed and not state.inbox.waking:
        facts.settle()
        return facts.done()
    number = state.turns + 1
    recovery = state.owed
    batch = step_batch(state.inbox) if recovery else turn_batch(state.inbox)
    facts.add(TurnStart(number, recovery))
    for message_id in command.rejected:
        facts.add(InboxRejected(message_id, command.reason))
    admitted = [p for p in batch if p.message.id not in command.rejected]
    if not recovery and not any(p.wakes for p in admitted):
        facts.add(TurnEnd(number, EndReason("rejected", message=command.reason)))
        facts.settle()
        return facts.done()
    facts.add(StepStart(number, 1))
    for pending in admitted:
        facts.add(UserMessage(number, 1, pending.message))
    return facts.done()


def _next_step(state: AgentState, command: NextStep) -> tuple[EventData, ...]:
    turn = _turn(state)
    if turn.cancel is not None:
        return _finish(state, Finish(EndReason("completed"), results=command.results))
    facts = _Facts(state)
    facts.add(*command.results, StepEnd(turn.number, turn.step))
    assert not _turn(facts.state).calls, "a step closes with every call paired"
    for message_id in command.rejected:
        facts.add(InboxRejected(message_id, command.reason))
    facts.add(StepStart(turn.number, turn.step + 1))
    for pending in step_batch(state.inbox):
        if pending.message.id not in command.rejected:
            facts.add(UserMessage(turn.number, turn.step + 1, pending.message))
    return facts.done()


def _record_reply(state: AgentState, command: RecordReply) -> tuple[EventData, ...]:
    turn = _turn(state)
    if turn.cancel is not None:
        return _finish(state, Finish(EndReason("completed"), reply=command.reply))
    after = evolve(state, command.reply)
    return command.reply, *_start(_turn(after), command.start)


def _start(turn: OpenTurn, call_ids: tuple[CallId, ...]) -> tuple[EventData, ...]:
    if turn.cancel is not None:
        return ()
    return tuple(
        ToolCallStarted(turn.number, turn.step, call.call_id, call.name, call.arguments)
        for call in turn.calls
        if call.call_id in call_ids and not call.started
    )


def _finish(state: AgentState, command: Finish) -> tuple[EventData, ...]:
    turn = _turn(state)
    reason = command.reason
    reply = command.reply
    if turn.cancel is not None:
        reason = EndReason("cancelled", cause=turn.cancel)
        reply = interrupted(reply) if reply is not None else None
    facts = _Facts(state)
    if reply is not None:
        facts.add(reply)
    facts.add(*_undecided(state, "cancelled" if turn.cancel is not None else "the turn is over"))
    facts.add(*command.results)
    facts.add(*_closers(_turn(facts.state), died=False))
    if turn.step_open:
        facts.add(StepEnd(turn.number, turn.step))
    if _turn(facts.state).truncated and reason.kind in ("completed", "max_steps"):
        reason = EndReason("max_tokens")
    facts.add(TurnEnd(turn.number, reason))
    facts.settle()
    return facts.done()


def _take_over(state: AgentState, command: TakeOver) -> tuple[EventData, ...]:
    turn = _turn(state)
    facts = _Facts(state)
    facts.add(*_undecided(state, "the process stopped"))
    facts.add(*_closers(turn, died=True))
    if turn.step_open:
        facts.add(StepEnd(turn.number, turn.step))
    attempt = state.attempts + (1 if command.charged else 0)
    if turn.cancel is not None:
        reason = EndReason("cancelled", cause=turn.cancel)
    elif attempt > command.attempts_max:
        reason = EndReason(
            "error",
            code="recovery_exhausted",
            message=f"the work was interrupted {attempt} times and is given up",
        )
    else:
        reason = EndReason("interrupted", attempt=attempt)
    facts.add(TurnEnd(turn.number, reason))
    return facts.done()


def _undecided(state: AgentState, by: str) -> tuple[EventData, ...]:
    """What nobody decided is denied: an old button decides nothing any more."""
    return tuple(ApprovalDecided(approval_id, "deny", by) for approval_id in state.asking)


def _closers(turn: OpenTurn, *, died: bool) -> tuple[ToolResult, ...]:
    """A result for every call that has none, so that the history stays well formed."""

    def close(call: OpenCall) -> ToolResult:
        if not died:
            text, outcome = CANCELLED, "cancelled"
        elif call.started:
            text, outcome = UNKNOWN, "unknown"
        else:
            text, outcome = NOT_STARTED, "not_started"
        return ToolResult(turn.number, turn.step, call.call_id, (Text(text),), outcome)

    return tuple(map(close, turn.calls))


def interrupted(reply: AssistantReply) -> AssistantReply | None:
    """What is kept of a reply when its turn is cancelled: its text, not its calls.

    None if there was no text.
    """
    content = tuple(b for b in reply.message.content if not isinstance(b, ToolCall))
    if not any(isinstance(b, Text) and b.text for b in content):
        return None
    message = AssistantMessage(reply.message.id, content)
    return msgspec.structs.replace(reply, message=message, interrupted=True)
