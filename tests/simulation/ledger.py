"""A second reader of the log: what a session's events must add up to, said in other words.

`postroom.domain.turn` decides and folds. The ledger never asks it: it reads each transaction's
events against the command that caused them, keeps its own account of what is pending, open and
owed, and names every rule that an event breaks by its contract id. Where the account and the
folded state part, one of the two is wrong, and that is reported too.

Turn numbers are *relative*: before and after a transaction the last turn has the number `LAST`.
Two sessions that differ only in how many turns lie behind them are then one state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    AssistantReply,
    Event,
    EventData,
    InboxCancelled,
    InboxQueued,
    InboxRejected,
    InboxReplaced,
    ModelRetry,
    StepEnd,
    StepStart,
    ToolCallStarted,
    ToolResult,
    TurnCancel,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.message import Message, Source, Text, ToolCall
from postroom.domain.run import ends, starts
from postroom.domain.turn import (
    AgentState,
    BeginTurn,
    Cancel,
    Command,
    Finish,
    NextStep,
    Queue,
    RecordReply,
    Remove,
    Replace,
    TakeOver,
)

LAST = 1
SESSION = SessionId("session_world")

UNKNOWN, PENDING, ENTERED, REJECTED, CANCELLED, REPLACED = "-pejxr"
NONE, OPEN, CLOSED = "-oc"


class Parcel(NamedTuple):
    """One message of the world. ``kind``: F a follow-up, S a steer, I an inject."""

    kind: str
    message: Message

    @property
    def target(self) -> str:
        return "next_turn" if self.kind == "F" else "next_step"

    @property
    def wakes(self) -> bool:
        return self.kind != "I"


def parcels(kinds: str) -> tuple[Parcel, ...]:
    """The messages of the world, then for each of them the one that may replace it."""

    def make(kind: str, name: str) -> Parcel:
        return Parcel(kind, Message(MessageId(f"msg_{name}"), (Text(name),), Source()))

    first = [make(k, f"{k}{i}") for i, k in enumerate(kinds)]
    return (*first, *(make(k, f"{k}{i}_new") for i, k in enumerate(kinds)))


class LedgerTurn(NamedTuple):
    """The open turn. ``calls``: those without a result, and whether they were started."""

    recovery: bool = False
    cancelled: bool = False
    followup: bool = False
    step: int = 0
    step_open: bool = False
    replied: bool = False
    retries: int = 0
    calls: tuple[tuple[str, bool], ...] = ()


class Ledger(NamedTuple):
    """``facts`` and ``spans`` have a letter a message: how it ended, and how its run's interval."""

    facts: str
    spans: str
    running: bool = False
    turn: LedgerTurn | None = None
    owed: bool = False
    attempts: int = 0
    next_step: tuple[int, ...] = ()
    next_turn: tuple[int, ...] = ()


class Auditor:
    """Knows the messages of one world, and reads."""

    def __init__(self, messages: Sequence[Parcel], attempts_max: int) -> None:
        self.messages = messages
        self.attempts_max = attempts_max
        self.index = {p.message.id: i for i, p in enumerate(messages)}

    def blank(self) -> Ledger:
        return Ledger(UNKNOWN * len(self.messages), NONE * len(self.messages))

    def waking(self, ledger: Ledger) -> bool:
        return bool(ledger.next_turn) or any(self.messages[m].wakes for m in ledger.next_step)

    def read(
        self, ledger: Ledger, command: Command, events: Iterable[EventData]
    ) -> tuple[Ledger, list[str]]:
        """The account after one transaction, and the rules it broke."""
        reading = _Reading(self, ledger, command)
        for event in events:
            reading.event(event)
        after = reading.ledger()
        reading.outcome(ledger, after)
        return after, reading.broken

    def sound(self, ledger: Ledger, work: str) -> list[str]:
        """What may never be seen between two transactions. ``work`` is the drive's status."""
        out: list[str] = []
        waking = self.waking(ledger)
        if not ledger.running:
            if waking:
                out.append("INB-11 parked: a waking message is pending while the agent is idle")
            if ledger.turn is not None or ledger.owed:
                out.append("INB-11 idle with a turn open or a recovery owed")
            if work != "none":
                out.append("INB-11 the drive outlives agent/idle")
        elif work == "none":
            out.append("INB-11 parked: the agent runs and there is no drive to be had")
        return out

    def settled(self, ledger: Ledger) -> list[str]:
        """What must have come about when nothing more happens by itself."""
        out: list[str] = []
        for m in ledger.next_turn + ledger.next_step:
            kind = self.messages[m].kind
            if kind == "S":
                out.append("INB-05 stuck: a steer stays parked")
            elif kind == "F":
                out.append("INB-07 stuck: a receipt is never entered, rejected or cancelled")
        listed = ledger.next_turn + ledger.next_step
        if any(f == PENDING and m not in listed for m, f in enumerate(ledger.facts)):
            out.append("INB-07 stuck: a message was claimed and lost")
        if ledger.running:
            out.append("RUN-06 stuck: the agent never becomes idle")
        if ledger.owed:
            out.append("REC-02 stuck: an owed recovery is never begun")
        if ledger.turn is not None:
            out.append("TRN-01 stuck: a turn never ends")
        for parcel, fact, span in zip(self.messages, ledger.facts, ledger.spans, strict=True):
            if parcel.wakes and fact != UNKNOWN and span != CLOSED:
                out.append("RUN-05 stuck: a run's interval never ends")
                break
        return out

    def differs(self, ledger: Ledger, state: AgentState) -> list[str]:
        """Where the folded state says something else than the account."""
        turn, mine = state.turn, ledger.turn
        pairs: list[tuple[str, object, object]] = [
            ("status", state.status == "running", ledger.running),
            ("owed", state.owed, ledger.owed),
            ("attempts", state.attempts, ledger.attempts),
            ("next-step", self._ids(ledger.next_step), _pending(state.inbox.next_step)),
            ("next-turn", self._ids(ledger.next_turn), _pending(state.inbox.next_turn)),
            ("turn", turn is not None, mine is not None),
        ]
        if turn is not None and mine is not None:
            calls = tuple((c.call_id, c.started) for c in turn.calls)
            pairs += [
                ("step", (turn.step, turn.step_open), (mine.step, mine.step_open)),
                ("cancel", turn.cancel is not None, mine.cancelled),
                ("recovery", turn.recovery, mine.recovery),
                ("replied", (turn.replied, turn.retries), (mine.replied, mine.retries)),
                ("calls", calls, mine.calls),
            ]
        return [f"FOLD the state is not the fold of the log: {n}" for n, a, b in pairs if a != b]

    def _ids(self, indices: tuple[int, ...]) -> list[str]:
        return [self.messages[m].message.id for m in indices]


def _pending(pending: Iterable[object]) -> list[str]:
    return [p.message.id for p in pending]  # type: ignore[attr-defined]


def _put(letters: str, index: int, letter: str) -> str:
    return letters[:index] + letter + letters[index + 1 :]


class _Reading:
    """One transaction, event by event."""

    def __init__(self, auditor: Auditor, ledger: Ledger, command: Command) -> None:
        self.auditor = auditor
        self.messages = auditor.messages
        self.command = command
        self.facts = ledger.facts
        self.spans = ledger.spans
        self.running = ledger.running
        self.turn = ledger.turn
        self.owed = ledger.owed
        self.attempts = ledger.attempts
        self.next_step = ledger.next_step
        self.next_turn = ledger.next_turn
        self.last = LAST
        self.steps_begun = 0
        self.refused = 0
        self.woken = False
        self.broken: list[str] = []

    def ledger(self) -> Ledger:
        return Ledger(
            self.facts,
            self.spans,
            self.running,
            self.turn,
            self.owed,
            self.attempts,
            self.next_step,
            self.next_turn,
        )

    def expect(self, holds: bool, rule: str) -> None:
        if not holds and rule not in self.broken:
            self.broken.append(rule)

    def open_turn(self, number: int) -> LedgerTurn:
        fits = self.turn is not None and number == self.last
        self.expect(fits, "TRN-01 an event names a turn that is not open")
        return self.turn or LedgerTurn()

    def end_message(self, message_id: str, letter: str) -> None:
        m = self.auditor.index[MessageId(message_id)]
        self.expect(self.facts[m] == PENDING, "INB-07 a message ended that was not pending")
        self.facts = _put(self.facts, m, letter)
        self.next_step = tuple(x for x in self.next_step if x != m)
        self.next_turn = tuple(x for x in self.next_turn if x != m)

    def span(self, event: EventData) -> None:
        """Opens and closes the intervals of runs, as `domain.run` cuts them from a log."""
        told = Event(SESSION, 1, event.TYPE, 0, "", event)
        for m, parcel in enumerate(self.messages):
            if parcel.wakes and starts(told, parcel.message.id):
                self.spans = _put(self.spans, m, OPEN)
        if ends(told):
            self.spans = self.spans.replace(OPEN, CLOSED)

    def event(self, event: EventData) -> None:
        match event:
            case InboxQueued(message, target, wakes):
                self.span(event)
                m = self.auditor.index[message.id]
                self.expect(isinstance(self.command, Queue), "INB-07 queued without a producer")
                self.expect(self.facts[m] == UNKNOWN, "INB-09 an id was queued a second time")
                parcel = self.messages[m]
                fits = (target, wakes) == (parcel.target, parcel.wakes)
                self.expect(fits, "INB-05 a message is in the wrong list")
                self.facts = _put(self.facts, m, PENDING)
                if target == "next_turn":
                    self.next_turn += (m,)
                else:
                    self.next_step += (m,)
            case InboxReplaced(old, message):
                self.span(event)
                self.expect(isinstance(self.command, Replace), "INB-08 replaced by nobody")
                before, new = self.auditor.index[old], self.auditor.index[message.id]
                places = self.next_step, self.next_turn
                self.end_message(old, REPLACED)
                self.facts = _put(self.facts, new, PENDING)
                swap = (tuple(new if x == before else x for x in place) for place in places)
                self.next_step, self.next_turn = swap
            case InboxCancelled(old):
                self.expect(isinstance(self.command, Cancel | Remove), "INB-07 cancelled by nobody")
                self.end_message(old, CANCELLED)
            case InboxRejected(old):
                self.expect(self.turn is not None, "TRN-01 a claim before its turn/start")
                asked = isinstance(self.command, BeginTurn | NextStep)
                fits = asked and old in self.command.rejected  # type: ignore[union-attr]
                self.expect(fits, "INB-07 rejected by nobody")
                self.refused += 1
                self.end_message(old, REJECTED)
            case AgentRunning():
                self.expect(not self.running, "INB-11 agent/running written twice")
                woken = self.auditor.waking(self.ledger())
                self.expect(woken, "INB-06 the agent runs for nothing that wakes it")
                self.running = True
            case AgentIdle():
                self.span(event)
                self.expect(self.running, "INB-11 agent/idle written twice")
                waking = self.auditor.waking(self.ledger())
                self.expect(not waking, "INB-11 agent/idle with a waking message pending")
                quiet = self.turn is None and not self.owed
                self.expect(quiet, "INB-11 agent/idle with a turn open or a recovery owed")
                self.running = False
            case TurnStart(number, recovery):
                self.expect(self.turn is None, "TRN-01 two turns open")
                self.expect(number == self.last + 1, "TRN-01 turn numbers have a gap")
                self.expect(recovery == self.owed, "REC-02 a recovery turn is not the owed one")
                self.expect(self.running, "INB-11 a turn opens while the agent is idle")
                woken = recovery or self.auditor.waking(self.ledger())
                self.expect(woken, "INB-06 a turn opens for nothing that wakes it")
                self.last = number
                self.owed = False
                self.turn = LedgerTurn(recovery)
            case TurnCancel(number):
                self.expect(isinstance(self.command, Cancel), "CAN-09 cancelled by nobody")
                if self.turn is None:
                    fits = self.owed and number == self.last
                    self.expect(fits, "CAN-09 a cancel of a turn that is over")
                    self.owed, self.attempts = False, 0
                else:
                    turn = self.open_turn(number)
                    self.expect(not turn.cancelled, "CAN-01 a second cause replaces the first")
                    self.turn = turn._replace(cancelled=True)
            case TurnEnd(number, reason):
                turn = self.open_turn(number)
                self.expect(not turn.step_open, "TRN-01 a turn ends inside a step")
                self.expect(not turn.calls, "TRN-07 a turn ends with a call unpaired")
                cancelled = reason.kind == "cancelled"
                self.expect(cancelled or not turn.cancelled, "CAN-09 an accepted cancel is lost")
                self.expect(turn.cancelled or not cancelled, "CAN-09 a turn nobody cancelled")
                if reason.kind == "rejected":
                    self.expect(turn.step == 0, "TRN-03 a rejected turn has a step")
                    fits = self.refused > 0 and not turn.recovery
                    self.expect(fits, "TRN-03 a turn is rejected that the policy did not refuse")
                self.attempts = self._attempts(reason.kind, reason.code)
                self.owed = reason.kind == "interrupted"
                self.turn = None
            case StepStart(number, step):
                turn = self.open_turn(number)
                fits = step == turn.step + 1 and not turn.step_open
                self.expect(fits, "TRN-01 step numbers have a gap, or two steps are open")
                self.expect(not turn.calls, "TRN-07 a step starts before every call has a result")
                self.expect(not turn.cancelled, "CAN-09 a step starts in a cancelled turn")
                self.steps_begun += 1
                self.turn = turn._replace(step=step, step_open=True, replied=False, retries=0)
            case StepEnd(number, step):
                turn = self.open_turn(number)
                self.expect(turn.step_open and step == turn.step, "TRN-01 a step ends twice")
                self.expect(not turn.calls, "TRN-07 a step ends with a call unpaired")
                self.turn = turn._replace(step_open=False)
            case UserMessage(number, step, message):
                self._enter(self.open_turn(number), step, message)
            case ModelRetry(number, step, attempt):
                turn = self.open_turn(number)
                self._in_step(turn, step)
                self.expect(attempt == turn.retries + 1, "TRN-04 retries are not counted")
                self.turn = turn._replace(retries=attempt)
            case AssistantReply(turn=number, step=step, message=message):
                turn = self.open_turn(number)
                self._in_step(turn, step)
                self.expect(not turn.replied, "TRN-01 a step has two replies")
                self.expect(event.interrupted == turn.cancelled, "CAN-06 interrupted or not")
                calls = tuple(
                    (b.call_id, False) for b in message.content if isinstance(b, ToolCall)
                )
                self.expect(not (calls and turn.cancelled), "CAN-06 calls of a cancelled reply")
                self.turn = turn._replace(replied=True, calls=calls)
            case ToolCallStarted(turn=number, step=step, call_id=call_id):
                turn = self.open_turn(number)
                self._in_step(turn, step)
                fits = (call_id, False) in turn.calls
                self.expect(fits, "TRN-07 a call starts that is not waiting to")
                self.expect(not turn.cancelled, "CAN-09 a call starts in a cancelled turn")
                started = tuple((c, s or c == call_id) for c, s in turn.calls)
                self.turn = turn._replace(calls=started)
            case ToolResult(turn=number, step=step, call_id=call_id, outcome=outcome):
                turn = self.open_turn(number)
                self._in_step(turn, step)
                known = dict(turn.calls)
                self.expect(call_id in known, "TRN-07 a call has two results, or was never made")
                if isinstance(self.command, TakeOver):
                    right = "unknown" if known.get(call_id) else "not_started"
                    self.expect(outcome == right, "REC-03 not started and unknown are mixed up")
                self.turn = turn._replace(calls=tuple(c for c in turn.calls if c[0] != call_id))
            case _:
                self.expect(False, f"FOLD an event this world does not know: {event.TYPE}")

    def _in_step(self, turn: LedgerTurn, step: int) -> None:
        fits = turn.step_open and step == turn.step
        self.expect(fits, "TRN-01 an event names a step that is not open")

    def _enter(self, turn: LedgerTurn, step: int, message: Message) -> None:
        self._in_step(turn, step)
        m = self.auditor.index[message.id]
        self.expect(not turn.cancelled, "CAN-09 a message enters a cancelled turn")
        if self.messages[m].kind == "F":
            first = self.next_turn[:1] == (m,)
            self.expect(not self.next_step, "INB-04 a follow-up enters before next-step")
            self.expect(step == 1, "INB-04 a follow-up enters between steps")
            self.expect(not turn.followup, "INB-04 two follow-ups share a turn")
            self.expect(not turn.recovery, "INB-04 a recovery turn takes a follow-up")
            turn = turn._replace(followup=True)
        else:
            first = self.next_step[:1] == (m,)
        self.expect(first or self.facts[m] != PENDING, "INB-03 messages enter out of order")
        self.woken |= self.messages[m].wakes
        self.turn = turn
        self.end_message(message.id, ENTERED)

    def _attempts(self, kind: str, code: str | None) -> int:
        """Counts recoveries, by the take-overs alone."""
        command = self.command
        exhausted = code == "recovery_exhausted"
        if not isinstance(command, TakeOver):
            fits = kind != "interrupted" and not exhausted
            self.expect(fits, "REC-02 a recovery's ending without a take-over")
            return 0
        tried = self.attempts + int(command.charged)
        fits = kind == "cancelled" or exhausted == (tried > self.auditor.attempts_max)
        self.expect(fits, "REC-02 recovery is given up too early, or too late")
        return tried if kind == "interrupted" else 0

    def outcome(self, before: Ledger, after: Ledger) -> None:
        """What the transaction as a whole owes its command."""
        if self.steps_begun:
            self.expect(not after.next_step, "INB-04 a boundary leaves next-step behind")
            turn = after.turn or LedgerTurn()
            if isinstance(self.command, BeginTurn) and not turn.recovery:
                claimed = before.next_turn[:1]
                fits = not set(claimed) & set(after.next_turn)
                self.expect(fits, "INB-04 a turn boundary leaves the first follow-up behind")
                self.expect(self.woken, "INB-06 a turn is opened by nothing that wakes")
        command = self.command
        idle = after.turn is None and not after.owed and not self.auditor.waking(after)
        if isinstance(command, Cancel | Remove):
            went_idle = before.running and not after.running
            at_once = before.running and idle and not command.driven
            self.expect(went_idle == at_once, "RUN-05 idle comes too late, or under a driver")
        elif isinstance(command, BeginTurn | NextStep | RecordReply | Finish):
            # One ending: whatever leaves nothing to do says so in its own transaction.
            self.expect(after.running != idle, "RUN-06 a turn ends without the idle it owes")
        if isinstance(command, Cancel):
            if before.turn is not None:
                marked = after.turn is not None and after.turn.cancelled
                self.expect(marked, "CAN-09 a cancel leaves the open turn unmarked")
            self.expect(not after.owed, "CAN-09 a cancel leaves the recovery owed")
            pending = after.next_step + after.next_turn
            if command.keep_inbox:
                kept = pending == before.next_step + before.next_turn
                self.expect(kept, "CAN-02 a cancel that keeps the inbox changes it")
            else:
                self.expect(not pending, "CAN-01 a cancel leaves a message pending")
