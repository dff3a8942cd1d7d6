"""The rules every log keeps, however often its process was killed: each check names its contract.

They know the log alone. What a certain scenario must lead to is the scenario's own test.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from postroom.domain.context import Context, fold
from postroom.domain.event import (
    AssistantReply,
    Event,
    InboxCancelled,
    InboxQueued,
    InboxRejected,
    InboxReplaced,
    Params,
    ToolCallStarted,
    ToolResult,
    UserMessage,
)
from postroom.domain.ids import SessionId
from postroom.domain.message import ToolCall, text_of
from postroom.domain.turn import NOT_STARTED, UNKNOWN, AgentState, OpenTurn, evolve
from postroom.models.scripted import Script, ScriptedModel
from postroom.ports.model import ModelRequest
from tests.crash.reading import Record
from tests.servers.strict_chat import as_anthropic, validate_anthropic, validate_openai


def check(record: Record) -> None:
    """Everything that holds at any moment, also just after a kill."""
    assert [e.seq for e in record.events] == list(range(1, len(record.events) + 1)), "seq has gaps"
    check_inbox(record)
    check_turns(record)
    check_calls(record)
    check_states(record)
    check_requests(record.events)


def check_rest(record: Record) -> None:
    """What holds besides once all work is done: idle, nothing waking, everything closed."""
    assert record.status == "idle"
    assert record.events[-1].type == "agent/idle"
    assert [name for name, wakes in record.pending if wakes] == []
    assert record.work is None or record.work[0] == "none", "the drive was not released"
    types = Counter(e.type for e in record.events)
    assert types["turn/start"] == types["turn/end"]
    assert types["step/start"] == types["step/end"]
    assert types["agent/running"] == types["agent/idle"]
    terminal = terminals(record.events)
    pending = {name for name, _ in record.pending}
    assert [
        name for name in _messages(record.events) if name not in terminal.keys() | pending
    ] == []


# ---- the inbox ----


def check_inbox(record: Record) -> None:
    """INB-07, INB-10, INB-04: one ending each, claim is entry, arrival order, one follow-up a turn."""
    events = record.events
    messages, terminal = _messages(events), terminals(events)
    pending = {name for name, _ in record.pending}
    assert [name for name, times in Counter(messages).items() if times > 1] == [], "queued twice"
    for name in messages:
        count = len(terminal.get(name, ()))
        assert count + (name in pending) == 1, f"{name}: {terminal.get(name)}, pending: {pending}"
    place = {name: place for place, name in enumerate(_in_order(events))}
    followups = _followups(events)
    entered = [e.data for e in events if isinstance(e.data, UserMessage)]
    for lane in (True, False):
        order = [place[u.message.id] for u in entered if (u.message.id in followups) is lane]
        assert order == sorted(order), "not entered in order"
    turns = Counter(u.turn for u in entered if u.message.id in followups)
    assert [turn for turn, count in turns.items() if count > 1] == [], "follow-ups share a turn"


def _messages(events: Iterable[Event]) -> list[str]:
    data = [e.data for e in events]
    return [d.message.id for d in data if isinstance(d, InboxQueued | InboxReplaced)]


def _in_order(events: Iterable[Event]) -> list[str]:
    """Messages by their place in the queue: a replacement has the place of what it replaced."""
    order: list[str] = []
    for event in events:
        data = event.data
        if isinstance(data, InboxQueued):
            order.append(data.message.id)
        elif isinstance(data, InboxReplaced):
            order.insert(order.index(data.message_id) + 1, data.message.id)
    return order


def _followups(events: Iterable[Event]) -> set[str]:
    out: set[str] = set()
    for event in events:
        data = event.data
        if isinstance(data, InboxQueued):
            fits = data.target == "next_turn"
        else:
            fits = isinstance(data, InboxReplaced) and data.message_id in out
        if fits:
            out.add(data.message.id)
    return out


def terminals(events: Iterable[Event]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for event in events:
        data = event.data
        if isinstance(data, UserMessage):
            out.setdefault(data.message.id, []).append(event.type)
        elif isinstance(data, InboxCancelled | InboxRejected | InboxReplaced):
            out.setdefault(data.message_id, []).append(event.type)
    return out


# ---- turns, steps, calls ----


def check_turns(record: Record) -> None:
    """Turns and steps count up without gaps, one open at a time, and a dead one goes on."""
    turn = step = 0
    turn_open = step_open = owed = False
    for event in record.events:
        data: Any = event.data
        match event.type:
            case "turn/start":
                assert not turn_open, f"{event}: two turns open"
                assert data.turn == turn + 1
                assert data.recovery == owed, f"{event}: recovery was owed: {owed}"
                turn, step, turn_open, owed = data.turn, 0, True, False
            case "step/start":
                assert turn_open, f"{event}: no turn is open"
                assert not step_open, f"{event}: two steps open"
                assert (data.turn, data.step) == (turn, step + 1)
                step, step_open = data.step, True
            case "step/end":
                assert step_open, f"{event}: no step is open"
                assert (data.turn, data.step) == (turn, step)
                step_open = False
            case "turn/end":
                assert turn_open, f"{event}: no turn is open"
                assert not step_open, f"{event}: a step is open"
                assert data.turn == turn
                turn_open, owed = False, data.reason.kind == "interrupted"
            case "turn/cancel":
                owed = False
            case "user/message" | "assistant/message" | "tool/call" | "tool/result":
                if event.type != "tool/result" or not data.late:
                    assert step_open, f"{event}: outside a step"
                    assert (data.turn, data.step) == (turn, step)
            case _:
                pass


def check_calls(record: Record) -> None:
    """REC-03, C-142: every call of a closed step has one result, and it says the truth of its start."""
    results: dict[str, list[ToolResult]] = {}
    started = {e.data.call_id for e in record.events if isinstance(e.data, ToolCallStarted)}
    for event in record.events:
        if isinstance(event.data, ToolResult) and not event.data.late:
            results.setdefault(event.data.call_id, []).append(event.data)
    closed = {(e.data.turn, e.data.step) for e in record.events if e.type == "step/end"}  # pyright: ignore
    calls: set[str] = set()
    for event in record.events:
        data = event.data
        if not isinstance(data, AssistantReply):
            continue
        for block in data.message.content:
            if isinstance(block, ToolCall):
                calls.add(block.call_id)
                count = len(results.get(block.call_id, ()))
                done = (data.turn, data.step) in closed
                assert count == 1 if done else count <= 1, f"{block.call_id}: {count} results"
    assert results.keys() <= calls, "a result without a call"
    assert started <= calls, "a start without a call"
    for name, (result,) in results.items():
        text = text_of(result.content)
        if result.outcome == "not_started":
            assert name not in started
            assert text == NOT_STARTED
        elif result.outcome == "unknown":
            assert name in started
            assert text == UNKNOWN
        elif result.outcome in ("ok", "error"):
            assert name in started


def check_notes(record: Record, notes: str) -> None:
    """PROTOCOL 14: no call runs before its start is committed, and none runs twice."""
    begun = Counter(line.split()[1] for line in notes.splitlines() if line.startswith("start"))
    ended = {line.split()[1] for line in notes.splitlines() if line.startswith("end")}
    assert [name for name, times in begun.items() if times > 1] == [], "ran twice"
    started = {data.call_id for data in record.of("tool/call")}
    assert begun.keys() <= started, "ran before its start was committed"
    for result in record.of("tool/result"):
        if result.outcome == "ok":
            assert result.call_id in ended
        if result.outcome == "not_started":
            assert result.call_id not in begun


# ---- the agent ----


def open_turn(events: Iterable[Event]) -> OpenTurn | None:
    """The turn that is open after these events."""
    state = AgentState()
    for event in events:
        state = evolve(state, event.data)
    return state.turn


def check_states(record: Record) -> None:
    """INB-11, INB-16: never idle with something waking; running and idle take turns."""
    state = AgentState()
    last = "agent/idle"
    for event, after in itertools.pairwise([*record.events, None]):
        assert event is not None
        state = evolve(state, event.data)
        if event.type in ("agent/running", "agent/idle"):
            assert event.type != last, f"{event}: twice"
            last = event.type
        # A waking inbox/queued and its agent/running are one transaction.
        if after is None or after.type != "agent/running":
            parked = state.status == "idle" and (state.inbox.waking or state.turn or state.owed)
            assert not parked, f"{event}: idle with work to do"
    assert state.status == record.status or not record.events


# ---- what the model is sent ----


def check_requests(events: Sequence[Event]) -> None:
    """REC-05, C-142: each request made, and one made now, is a history that both styles take."""
    context = Context()
    for event, after in itertools.pairwise([*events, None]):
        assert event is not None
        context.add(event)
        if event.type in ("step/start", "user/message") and (
            after is None or after.type != "user/message"
        ):
            _check_request(rendered(events[: event.seq]))
    if context.messages:
        now = rendered(events)
        _check_request([*now, {"role": "user", "content": "and now?"}])


def rendered(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The messages of a request made after these events, as Chat Completions has them."""
    context = fold(events)
    request = ModelRequest(SessionId("session_x"), 1, "", context.view(), (), Params())
    return json.loads(ScriptedModel("scripted:echo", Script(then="echo")).render(request))[
        "messages"
    ]


def _check_request(messages: list[dict[str, Any]]) -> None:
    assert validate_openai(messages) == []
    assert validate_anthropic(as_anthropic(messages)) == []
