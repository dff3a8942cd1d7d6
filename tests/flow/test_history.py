"""What the model is sent: rebuilt from the log byte for byte, and sound whatever happened to a log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.context import fold
from postroom.domain.event import Event, EventData, encode_data
from postroom.domain.ids import CallId, MessageId, SessionId
from postroom.domain.message import (
    AssistantMessage,
    Block,
    Media,
    Message,
    Source,
    Text,
    ToolCall,
    Usage,
    text_of,
)
from postroom.models.openai_compat import OpenAICompatModel
from postroom.ports.artifact import ArtifactStore
from postroom.ports.model import Model, ModelRequest
from postroom.testing import PlainTool, PuppetTool
from tests.flow.audit import audit, unsound
from tests.flow.support import SESSION, ends, idle, log_of, of, opened, seen
from tests.servers.strict_chat import (
    Answer,
    StrictChat,
    call_piece,
    chunk,
    ending,
    refused,
    spoken,
)
from tests.support import bounded

# ---- byte for byte ----


async def rebuilt(
    lines: Sequence[str], models: dict[str, Model], artifacts: ArtifactStore
) -> list[bytes]:
    """The bodies of all model requests of an exported log, in order, from the log alone.

    A step's request sees what stands before its reply (or its failure) in the log. A header inside
    a step is of the attempts after it.
    """
    bodies: list[bytes] = []
    header: e.RequestHeader | None = None
    following: e.RequestHeader | None = None
    log = [Event.from_json(line) for line in lines]
    waiting = False
    for index, event in enumerate(log):
        data = event.data
        if isinstance(data, e.RequestHeader):
            header, following = (header, data) if waiting else (data, None)
        elif isinstance(data, e.StepStart):
            waiting = True
        elif waiting and isinstance(data, e.ModelRetry | e.AssistantReply | e.StepEnd):
            assert header is not None
            model = models[header.model]
            history = fold(log[:index]).view()
            named = {
                block.artifact
                for message in history
                for block in message.content
                if isinstance(block, Media) and block.media_type in model.accepts
            }
            request = ModelRequest(
                SessionId(event.session_id),
                len(bodies) + 1,
                header.system,
                history,
                header.tools,
                header.params,
                {name: await artifacts.get(name) for name in named},
            )
            bodies.append(model.render(request))
            waiting = isinstance(data, e.ModelRetry)
            header = following or header
            following = None
    return bodies


def calls(*each: tuple[str, str, str], text: str = "") -> list[bytes]:
    """A stream that calls tools: ``(id, name, arguments)``."""
    pieces = [
        chunk(call_piece(index, id=call_id, name=name, arguments=arguments))
        for index, (call_id, name, arguments) in enumerate(each)
    ]
    return [chunk({"content": text})] * bool(text) + pieces + ending("tool_calls")


@pytest.mark.contract("TRN-10")
async def test_every_request_can_be_rebuilt_byte_for_byte_from_the_exported_log(
    database: str,
) -> None:
    """Over real HTTP, through failures, tools, pictures, other people's words, and a restart."""
    limits = Limits(model_retries_max=1, model_retry_first_ms=1)
    params = e.Params(max_tokens=512, temperature=0.5)
    tools = [
        PlainTool("look", lambda arguments: f"saw “{arguments.get('at')}” \n\t ☃"),
        PlainTool("fail", lambda _: 1 / 0),  # type: ignore[arg-type, return-value]
    ]
    async with StrictChat() as server:
        models: dict[str, Model] = {
            ref: OpenAICompatModel(ref, server.url, "key", ref, accepts=frozenset({"image/png"}))
            for ref in ("strict:one", "strict:two")
        }
        room = opened(
            database, *models.values(), tools=tools, limits=limits, params=params, drain_ms=0
        )
        async with room as first:
            agent = await first.session(SESSION)
            picture = await first.artifacts.put(b"not really a picture")
            server.will(
                calls(
                    ("call_1", "look", '{"at": "the \\u201csky\\u201d"}'), ("call_2", "fail", "{}")
                ),
                refused(503, {"error": {"message": "busy"}}),
                refused(503, {"error": {"message": "busy"}}),  # now the second model
                spoken("I ", "see ☃"),
            )
            await agent.followup(
                [
                    {"type": "text", "text": 'look at "this" \u2028 \U0001f600'},
                    {
                        "type": "image",
                        "artifact": picture,
                        "mediaType": "image/png",
                        "size": 20,
                        "name": "a.png",
                    },
                ]
            )
            await idle(agent)
            server.will(
                calls(("call_1", "look", "{}"), text="once more"),  # an id that was used before
                calls(("call_3", "look", '{"at":')),  # arguments cut off
                spoken("done"),
                refused(401, {"error": {"message": "no"}}),
            )
            await agent.queue("and I?", source=Source("conversation", sender="Ada", sender_id="7"))
            await idle(agent)
            await agent.inject("by the way")
            await agent.followup("will fail")
            await idle(agent)
            arrived = asyncio.Event()
            first.live.watch(SessionId(SESSION), lambda _: arrived.set())
            server.will(Answer([chunk({"content": "half an ans"})], end="hang"))
            await agent.followup("cut me off")
            await bounded(arrived.wait())
            await agent.cancel()
            await idle(agent)
            hung = server.will(Answer([], end="hang"))
            await agent.followup("the last before the restart")
            await bounded(hung.started.wait())
        models |= {
            ref: OpenAICompatModel(ref, server.url, "key", ref, accepts=frozenset({"image/png"}))
            for ref in models
        }
        room = opened(
            database, *models.values(), tools=tools, limits=limits, params=params, drain_ms=0
        )
        async with room as second:
            server.will(spoken("recovered"))
            agent = await second.session(SESSION)
            await idle(agent)
            server.will(spoken("hello again"))
            await agent.followup("hello")
            await idle(agent)
            log = await log_of(second)
            exported = [event.to_json() for event in log]
            bodies = await rebuilt(exported, models, second.artifacts)
    assert server.violations == []
    assert audit(log) == []
    assert ends(log) == [
        "completed",
        "completed",
        "error",
        "cancelled",
        "interrupted",
        "completed",
        "completed",
    ]
    assert len(server.requests) == 12
    assert bodies == [received.body for received in server.requests]


@pytest.mark.contract("TRN-10")
async def test_a_header_is_written_when_it_differs_and_only_then(database: str) -> None:
    async with StrictChat() as server:
        model = OpenAICompatModel("strict:one", server.url, None, "strict-1")
        async with opened(database, model) as room:
            agent = await room.session(SESSION)
            for text in ("a", "b"):
                await agent.followup(text)
                await idle(agent)
        model = OpenAICompatModel("strict:one", server.url, None, "strict-1")
        async with opened(database, model, params=e.Params(temperature=0)) as room:
            agent = await room.session(SESSION)
            for text in ("c", "d"):
                await agent.followup(text)
                await idle(agent)
            log = await log_of(room)
            bodies = await rebuilt(
                [x.to_json() for x in log], {"strict:one": model}, room.artifacts
            )
    assert [header.turn for header in of(log, e.RequestHeader)] == [1, 3]
    assert bodies == [received.body for received in server.requests]
    assert [json.loads(body).get("temperature") for body in bodies] == [None, None, 0, 0]


# ---- what a crash leaves ----


@pytest.mark.contract("REC-05")
@pytest.mark.parametrize("answered", range(4))
async def test_a_restart_within_a_batch_of_calls_leaves_a_history_that_providers_take(
    database: str, answered: int
) -> None:
    """C-142: stopped with none, some or all of three parallel calls answered."""
    async with StrictChat() as server, StrictChat() as after:
        server.will(calls(*((f"call_{n}", "look", "{}") for n in range(3))))
        tool = PuppetTool()
        model = OpenAICompatModel("strict:one", server.url, None, "strict-1")
        async with opened(
            database, model, tools=[tool], limits=Limits(tools_at_once_max=2)
        ) as room:
            agent = await room.session(SESSION)
            await agent.followup("look")
            running = [await bounded(tool.called()), await bounded(tool.called())]
            hung = server.will(Answer([], end="hang"))
            for number in range(answered):
                if number == 2:
                    running.append(await bounded(tool.called()))
                running[number].answer(str(number))
            if answered == 3:
                await bounded(hung.started.wait())
            elif answered:
                await seen(agent, e.ToolResult)
        model = OpenAICompatModel("strict:one", after.url, None, "strict-1")
        async with opened(database, model, tools=[tool]) as room:
            agent = await room.session(SESSION)
            await idle(agent)
            await agent.followup("and now?")
            await idle(agent)
            log = await log_of(room)
        assert audit(log) == []
        assert server.violations == after.violations == []
        assert ends(log) == ["interrupted", "completed", "completed"]


# ---- damaged logs ----


def event(seq: int, data: EventData) -> Event:
    return Event(SessionId("session_damaged"), seq, data.TYPE, 0, encode_data(data))


def user(text: str) -> e.UserMessage:
    return e.UserMessage(1, 1, Message(MessageId("msg_x"), (Text(text),), Source()))


def assistant(text: str, *call_ids: str) -> e.AssistantReply:
    content: list[Block] = [Text(text)] if text else []
    content += [ToolCall(call_id, "look", "{}") for call_id in call_ids]
    message = AssistantMessage("reply_x", tuple(content))
    return e.AssistantReply(1, 1, message, "m", "stop", Usage())


def result(call_id: str, outcome: e.Outcome = "ok") -> e.ToolResult:
    return e.ToolResult(1, 1, CallId(call_id), (Text("seen"),), outcome)


@st.composite
def sound_logs(draw: st.DrawFn) -> list[EventData]:
    """Histories as the driver writes them, each text and each call id its own."""
    log: list[EventData] = []
    number = 0
    for turn in range(draw(st.integers(1, 4))):
        log.append(user(f"user {turn}"))
        for step in range(draw(st.integers(0, 2))):
            ids = [f"call_{number + n}" for n in range(draw(st.integers(1, 3)))]
            number += len(ids)
            log.append(assistant(draw(st.sampled_from(["", f"assistant {turn} {step}"])), *ids))
            log += [
                result(i, draw(st.sampled_from(["ok", "error", "late", "unknown"]))) for i in ids
            ]
            if draw(st.booleans()):
                log.append(user(f"steer {turn} {step}"))
        log.append(assistant(draw(st.sampled_from(["", f"answer {turn}"]))))
    return log


@st.composite
def damaged_logs(draw: st.DrawFn) -> list[EventData]:
    """What is left of a log after losses, repetitions, swaps, strangers and wrong compactions."""
    log = draw(sound_logs())
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(log) - 1)))
        match draw(st.sampled_from(["lose", "swap", "stranger", "repeat result", "compact"])):
            case "lose" if len(log) > 1:
                del log[at]
            case "swap" if at + 1 < len(log):
                log[at], log[at + 1] = log[at + 1], log[at]
            case "stranger":
                log.insert(at, result("call_of_nobody"))
            case "repeat result":
                log += [data for data in log[at:] if isinstance(data, e.ToolResult)][:2]
            case "compact":
                first, last = draw(st.integers(0, 12)), draw(st.integers(0, 12))
                log.insert(at, e.HistoryCompacted(first, last, f"summary {at}"))
            case _:
                pass
    return log


def texts_of(events: Sequence[Event]) -> list[str]:
    return [text_of(message.content) for message in fold(events).view()]


@pytest.mark.contract("REC-05")
@settings(max_examples=400, derandomize=True, database=None, deadline=None)
@given(damaged_logs())
def test_whatever_a_log_has_lost_providers_take_its_history_and_no_person_s_text_is_missing(
    log: list[EventData],
) -> None:
    """C-145: the repair adds and leaves out the least; nothing is thrown away for an orphan."""
    events = [event(seq, data) for seq, data in enumerate(log, 1)]
    assert unsound(events) == []
    shown = texts_of(events)
    for at, said in enumerate(events):
        compacted = any(
            isinstance(later.data, e.HistoryCompacted)
            and later.data.from_seq <= said.seq <= later.data.to_seq
            for later in events[at:]
        )
        if isinstance(said.data, e.UserMessage) and not compacted:
            text = text_of(said.data.message.content)
            assert any(text in line for line in shown), (text, shown)


@pytest.mark.contract("REC-05")
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(sound_logs())
def test_a_sound_log_needs_no_repair(log: list[EventData]) -> None:
    """C-143: nothing is pruned, nothing is made up; the results stand as they were recorded."""
    events = [event(seq, data) for seq, data in enumerate(log, 1)]
    if not any(isinstance(data, e.ToolResult) and data.late for data in log):
        assert unsound(events) == []
    expected = [
        (
            data.TYPE,
            text_of(data.content if isinstance(data, e.ToolResult) else data.message.content),
        )
        for data in log
        if (isinstance(data, e.ToolResult) and not data.late)
        or (isinstance(data, e.AssistantReply) and data.message.content)
        or isinstance(data, e.UserMessage)
    ]
    roles = {"user": "user/message", "assistant": "assistant/message", "tool": "tool/result"}
    made_up = [
        data.call_id for data in log if isinstance(data, e.ToolResult) and data.outcome == "late"
    ]
    shown = [
        (roles[m.role], text_of(m.content))
        for m in fold(events).messages
        if m.call_id not in made_up
    ]
    assert shown == expected


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(damaged_logs(), st.data())
def test_a_history_grown_event_by_event_is_the_one_read_at_once(
    log: list[EventData], data: st.DataObject
) -> None:
    """Also where a request was made in between, which pairs what was open."""
    events = [event(seq, each) for seq, each in enumerate(log, 1)]
    cut = data.draw(st.integers(0, len(events)))
    context = fold(events[:cut])
    for each in events[cut:]:
        context.add(each)
    whole = fold(events)
    assert [repr(m) for m in context.view()] == [repr(m) for m in whole.view()]
