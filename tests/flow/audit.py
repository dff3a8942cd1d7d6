"""What is true of every session's log, whatever happened: read from the log alone.

`audit` walks a log and lists what is wrong with it. It keeps its own account of what is pending
and open; it uses none of the state machine that it checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from postroom.domain import event as e
from postroom.domain.context import fold
from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.domain.message import Message, ToolCall
from postroom.models.chat import CHAT, body_of
from postroom.ports.model import ModelRequest
from tests.servers.strict_chat import as_anthropic, validate_anthropic, validate_openai

_WHILE_IDLE = (
    "session/created",
    "agent/running",
    "delivery/queued",
    "delivery/status",
    "history/replaced",
)


class _Auditor:
    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.where = ""
        self.pending: dict[str, tuple[str, bool]] = {}
        self.ended: dict[str, str] = {}
        self.running = False
        self.turns = 0
        self.turn: int | None = None
        self.recovery = False
        self.steps = 0
        self.step: int | None = None
        self.owed = False
        self.cancelled = False
        self.follow_ups = 0
        self.entered_waking = False
        self.messages_over = False
        self.replied = False
        self.calls: dict[str, str] = {}
        self.paired: list[str] = []

    def need(self, condition: bool, what: str) -> None:
        if not condition:
            self.wrong.append(f"{self.where}: {what}")

    def take(self, event: Event) -> None:
        self.where = f"{event.seq} {event.type}"
        if not self.running:
            self.need(event.type in _WHILE_IDLE or event.type.startswith("inbox/"), "while idle")
        data = event.data
        match data:
            case e.InboxQueued(message, target, wakes):
                self.put(message, target, wakes)
            case e.InboxReplaced(old, message):
                if old in self.pending:
                    self.put(message, *self.pending[old])
                    # The newcomer takes the old one's place in the line.
                    line = list(self.pending)
                    newcomer = line.pop()
                    line[line.index(old)] = newcomer
                    self.pending = {m: self.pending[m] for m in [*line, old]}
                self.end(old, "replaced")
            case e.InboxCancelled(message_id):
                self.end(message_id, "cancelled")
            case e.InboxRejected(message_id):
                self.need(self.turn is not None, "rejected outside a turn")
                self.end(message_id, "rejected")
            case e.UserMessage(turn, step, message):
                self.enter(turn, step, message)
            case e.AgentRunning():
                self.need(not self.running, "running twice")
                self.running = True
            case e.AgentIdle():
                self.need(self.turn is None, "idle with a turn open")
                self.need(not self.owed, "idle with a recovery owed")
                self.need(not self.waking, "idle with a waking message pending")
                self.running = False
            case e.TurnStart(turn, recovery):
                self.need(self.turn is None, "two turns open")
                self.need(turn == self.turns + 1, "turns are not counted from 1 without gaps")
                self.need(recovery == self.owed, "a recovery turn that nobody owed, or none")
                self.turns = self.turn = turn
                self.recovery, self.owed = recovery, False
                self.steps, self.step, self.cancelled = 0, None, False
                self.calls, self.follow_ups, self.entered_waking = {}, 0, False
            case e.TurnCancel(turn):
                if self.turn is not None:
                    self.need(turn == self.turn, "cancels another turn")
                    self.need(not self.cancelled, "cancelled twice")
                    self.cancelled = True
                else:
                    self.need(self.owed and turn == self.turns, "cancels no turn")
                    self.owed = False
            case e.TurnEnd(turn, reason):
                self.need(turn == self.turn, "ends a turn that is not open")
                self.need(self.step is None, "a step is open")
                self.need(not self.open_calls, "calls are not paired")
                if self.cancelled:
                    self.need(reason.kind == "cancelled", "a cancel was lost")
                else:
                    self.need(reason.kind != "cancelled", "cancelled by nobody")
                if reason.kind == "rejected":
                    self.need(self.steps == 0, "a rejected turn with a step")
                self.turn = None
                self.owed = reason.kind == "interrupted"
            case e.StepStart(turn, step):
                self.in_turn(turn)
                self.need(self.step is None, "two steps open")
                self.need(step == self.steps + 1, "steps are not counted from 1 without gaps")
                self.need(not self.cancelled, "a step of a cancelled turn")
                self.need(not self.open_calls, "calls of the step before are not paired")
                self.steps = self.step = step
                self.messages_over = self.replied = False
                self.calls, self.paired = {}, []
            case e.StepEnd(turn, step):
                self.in_step(turn, step)
                self.need(not self.open_calls, "calls are not paired")
                if step == 1 and not self.recovery:
                    self.need(self.entered_waking, "a turn that nothing opened")
                self.step = None
            case e.RequestHeader(turn):
                self.in_turn(turn)
                self.messages_over = True if self.step is not None else self.messages_over
            case e.ModelRetry(turn, step):
                self.in_step(turn, step)
                self.need(not self.replied, "a retry after the reply")
                self.messages_over = True
            case e.AssistantReply(turn, step, message):
                self.in_step(turn, step)
                self.need(not self.replied, "two replies in a step")
                if data.interrupted:
                    self.need(self.cancelled, "interrupted by nobody")
                self.replied = self.messages_over = True
                for block in message.content:
                    if isinstance(block, ToolCall):
                        self.need(block.call_id not in self.calls, "a call id twice")
                        self.calls[block.call_id] = "open"
            case e.ToolCallStarted(turn, step, call_id):
                self.in_step(turn, step)
                self.need(self.calls.get(call_id) == "open", "starts a call that is not waiting")
                self.need(not self.cancelled, "starts a call of a cancelled turn")
                self.calls[call_id] = "started"
            case e.ToolResult(turn, step, call_id, _, outcome):
                if outcome == "late":
                    return
                self.in_step(turn, step)
                state = self.calls.get(call_id, "unknown to this step")
                self.need(state in ("open", "started"), f"the result of a call that is {state}")
                if outcome in ("ok", "error", "unknown"):
                    self.need(state == "started", "the result of a call that did not start")
                self.calls[call_id] = "paired"
                self.paired.append(call_id)
                if outcome in ("ok", "error") and not self.cancelled:
                    order = [c for c in self.calls if c in self.paired]
                    self.need(self.paired == order, "results are not in call order")
            case _:
                pass

    @property
    def waking(self) -> bool:
        return any(wakes for _, wakes in self.pending.values())

    @property
    def open_calls(self) -> list[str]:
        return [call_id for call_id, state in self.calls.items() if state != "paired"]

    def put(self, message: Message, target: str, wakes: bool) -> None:
        known = message.id in self.pending or message.id in self.ended
        self.need(not known, f"{message.id} is queued twice")
        self.pending[message.id] = (target, wakes)

    def end(self, message_id: str, how: str) -> None:
        if self.pending.pop(message_id, None) is None:
            self.need(False, f"{message_id} is {how}, and it was {self.ended.get(message_id)}")
        self.ended[message_id] = how

    def enter(self, turn: int, step: int, message: Message) -> None:
        self.in_step(turn, step)
        self.need(not self.messages_over, "a message entered after the request")
        target, wakes = self.pending.get(message.id, ("next_step", False))
        first = next((m for m, (t, _) in self.pending.items() if t == target), message.id)
        self.need(first == message.id, "overtook an older message")
        if target == "next_turn":
            self.need(step == 1 and not self.recovery, "a follow-up without a turn of its own")
            self.follow_ups += 1
            self.need(self.follow_ups == 1, "two follow-ups share a turn")
            steered = any(t == "next_step" for t, _ in self.pending.values())
            self.need(not steered, "next-turn came before next-step")
        self.entered_waking = self.entered_waking or wakes
        self.end(message.id, "entered")

    def in_turn(self, turn: int) -> None:
        self.need(turn == self.turn, f"turn {self.turn} is open, not {turn}")

    def in_step(self, turn: int, step: int) -> None:
        self.in_turn(turn)
        self.need(step == self.step, f"step {self.step} is open, not {step}")


def audit(events: Sequence[Event], *, at_rest: bool = True) -> list[str]:
    """What is wrong with this log; empty if nothing. ``at_rest``: the agent should be idle."""
    auditor = _Auditor()
    for number, event in enumerate(events, 1):
        auditor.take(event)
        auditor.need(event.seq == number, f"the seq is not {number}")
    auditor.where = "at the end"
    if at_rest:
        auditor.need(not auditor.running, "the agent is not idle")
        auditor.need(not auditor.waking, "a waking message is parked")
        auditor.wrong += unsound(events)
    return auditor.wrong


def unsound(events: Iterable[Event]) -> list[str]:
    """What strict providers would refuse in the history, asked to go on from it."""
    history = fold(events).view()
    if not history:
        return []
    request = ModelRequest(SessionId("session_audit"), 1, "", history, (), e.Params())
    messages = json.loads(body_of("audit", CHAT, frozenset(), request))["messages"]
    asked = [*messages, {"role": "user", "content": "go on"}]
    return validate_openai(asked) + validate_anthropic(as_anthropic(asked))


def outcomes(events: Iterable[Event]) -> dict[str, str]:
    """How each message ended: entered, rejected, cancelled, replaced, or pending."""
    auditor = _Auditor()
    for event in events:
        auditor.take(event)
    return auditor.ended | dict.fromkeys(auditor.pending, "pending")
