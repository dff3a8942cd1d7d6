"""Turns and steps: what the model is asked, what its replies and its failures lead to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from postroom import mint
from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.ids import SessionId
from postroom.domain.message import Reasoning, Source, Text, ToolCall, text_of
from postroom.errors import ModelErrorKind, ToolFailure
from postroom.flow.live import Live
from postroom.ports.model import TextDelta
from postroom.ports.policy import Admit, Reject, Verdict
from postroom.ports.tool import ToolOutput
from postroom.testing import ManualClock, PlainTool, PuppetModel, PuppetTool, calling, scripted
from tests.flow.audit import audit
from tests.flow.support import (
    SESSION,
    ends,
    entered,
    idle,
    log_of,
    of,
    opened,
    results,
    said,
    seen,
    types,
)
from tests.support import bounded

RETRIED: tuple[ModelErrorKind, ...] = ("rate_limit", "server", "timeout", "transport", "empty")
FATAL: tuple[tuple[ModelErrorKind, int | None], ...] = (
    ("auth", 401),
    ("auth", 403),
    ("bad_request", 400),
    ("quota", 402),
    ("context_overflow", 400),
)


# ---- numbers, beginnings and ends ----


@pytest.mark.contract("TRN-01")
async def test_turns_and_steps_are_counted_and_closed_and_the_start_precedes_the_claim(
    database: str,
) -> None:
    model = scripted(calling("look", "look"), calling("look"), "one", calling("look"), then="echo")
    async with opened(database, model, tools=[PlainTool("look")]) as room:
        agent = await room.session(SESSION)
        for text in ("a", "b", "c"):
            await agent.followup(text)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [data.turn for data in of(log, e.TurnStart)] == [1, 2, 3]
        assert [(data.turn, data.step) for data in of(log, e.StepStart)] == [
            (1, 1),
            (1, 2),
            (1, 3),
            (2, 1),
            (2, 2),
            (3, 1),
        ]
        first = types(log)
        assert first.index("turn/start") < first.index("step/start") < first.index("user/message")
        assert len(of(log, e.StepStart)) == len(of(log, e.StepEnd))
        assert len(of(log, e.TurnStart)) == len(of(log, e.TurnEnd))


@pytest.mark.contract("TRN-02")
async def test_the_next_turn_sees_the_closed_result_of_the_one_before(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look", text="let me see")
        called = await bounded(tool.called())
        await agent.followup("second")
        called.answer("a cat")
        (await bounded(model.asked())).say("it is a cat")
        asked = await bounded(model.asked())
        assert asked.texts == [
            "user: first",
            "assistant: let me see",
            "tool: a cat",
            "assistant: it is a cat",
            "user: second",
        ]


# ---- the policy ----


@pytest.mark.contract("TRN-03")
async def test_a_rejected_batch_closes_its_turn_without_a_step_and_the_queue_goes_on(
    database: str,
) -> None:
    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        return Reject("not today") if text_of(batch[0].content) == "bad" else Admit()

    model = scripted(then="echo")
    async with opened(database, model, policy=judge) as room:
        agent = await room.session(SESSION)
        bad = mint.message_id()
        await agent.followup("bad", message_id=bad)
        await agent.followup("good")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["rejected", "completed"]
        assert [data.reason.message for data in of(log, e.TurnEnd)] == ["not today", None]
        assert of(log, e.InboxRejected) == [e.InboxRejected(bad, "not today")]
        assert entered(log) == [(2, 1, "good")]
        assert said(log) == ["good"]


@pytest.mark.contract("TRN-03")
async def test_between_steps_only_the_refused_messages_stay_out(database: str) -> None:
    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        refused = tuple(m.id for m in batch if text_of(m.content) == "bad")
        return Reject("no", refused) if refused else Admit()

    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], policy=judge) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await agent.steer("bad")
        await agent.steer("good")
        called.answer()
        asked = await bounded(model.asked())
        assert asked.news == ["good"]
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["completed"]


@pytest.mark.contract("TRN-03")
@pytest.mark.parametrize("boundary", ["turn", "step"])
@pytest.mark.parametrize("change", ["steer", "remove", "replace"])
async def test_a_batch_that_changes_while_it_is_judged_is_judged_again(
    database: str, boundary: str, change: str
) -> None:
    judging: asyncio.Queue[tuple[list[str], asyncio.Future[Verdict]]] = asyncio.Queue()

    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        judging.put_nowait(([text_of(m.content) for m in batch], verdict))
        return await verdict

    async def judged(verdict: Verdict) -> list[str]:
        texts, future = await bounded(judging.get())
        future.set_result(verdict)
        return texts

    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], policy=judge) as room:
        agent = await room.session(SESSION)
        name = mint.message_id()
        if boundary == "turn":
            await agent.steer("a", message_id=name)
        else:
            await agent.followup("first")
            assert await judged(Admit()) == ["first"]
            (await bounded(model.asked())).call("look")
            called = await bounded(tool.called())
            await agent.steer("a", message_id=name)
            called.answer()
        await agent.steer("b")
        texts, verdict = await bounded(judging.get())
        if texts == ["a"]:  # the first look came before the second message
            verdict.set_result(Admit())
            texts, verdict = await bounded(judging.get())
        assert texts == ["a", "b"]
        match change:
            case "steer":
                await agent.steer("c")
                expected = ["a", "b", "c"]
            case "remove":
                assert await agent.remove(name)
                expected = ["b"]
            case _:
                assert await agent.replace(name, "z")
                expected = ["z", "b"]
        if not verdict.done():  # an edit of the batch ends the judgement by itself
            verdict.set_result(Reject("of another batch"))
        assert await judged(Admit()) == expected
        asked = await bounded(model.asked())
        assert asked.news[-len(expected) :] == expected
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert of(log, e.InboxRejected) == []
        assert ends(log) == ["completed"]


@pytest.mark.contract("TRN-03")
@pytest.mark.parametrize("answer", ["raises", "nonsense"])
async def test_a_policy_that_fails_refuses(database: str, answer: str) -> None:
    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Any:
        if answer == "raises":
            raise ValueError("a mistake of the policy's author")
        return None

    model = PuppetModel()
    async with opened(database, model, policy=judge) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["rejected"]
        assert model.asks == []


# ---- failures of the model ----


@pytest.mark.contract("TRN-04")
@pytest.mark.parametrize("kind", RETRIED)
async def test_a_passing_failure_is_tried_again_within_the_step(
    database: str, kind: ModelErrorKind
) -> None:
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock) as room:
        agent = await room.session(SESSION)
        live: list[Live] = []
        room.live.watch(SessionId(SESSION), live.append)
        await agent.followup("hello")
        for delay in (500, 1_000):
            asked = await bounded(model.asked())
            if kind == "empty":
                asked.say("")
            else:
                asked.stream("half of ")
                asked.fail(kind, status=503 if kind == "server" else None, request_id="req_7")
            assert await bounded(clock.sleeping()) == delay
            assert len(model.open) == 0
            clock.advance(delay)
        asked = await bounded(model.asked())
        assert asked.texts == ["user: hello"]
        assert asked.request.number == 3
        asked.say("whole")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert said(log) == ["whole"]
        assert ends(log) == ["completed"]
        assert types(log).count("step/start") == 1
        retries = of(log, e.ModelRetry)
        assert [(r.attempt, r.delay_ms, r.error.code) for r in retries] == [
            (1, 500, kind),
            (2, 1_000, kind),
        ]
        if kind == "server":
            assert retries[0].error.status == 503
            assert retries[0].error.provider_request_id == "req_7"
        # Whoever watched the pieces of the failed attempts is told that they are void.
        assert [each.kind for each in live].count("reset") == 2
        assert live[-1].text == "whole"
        assert "half" not in json.dumps([event.raw for event in log])


@pytest.mark.contract("TRN-04")
async def test_the_provider_s_own_word_on_waiting_is_kept(database: str) -> None:
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).fail("rate_limit", status=429, retry_after_ms=37_000)
        assert await bounded(clock.sleeping()) == 37_000
        clock.advance(36_999)
        assert await bounded(clock.sleeping()) == 1
        assert model.open == []
        clock.advance(1)
        (await bounded(model.asked())).say("hi")
        await idle(agent)
        retry = of(await log_of(room), e.ModelRetry)[0]
        assert retry.delay_ms == 37_000
        assert retry.error.retry_after_ms == 37_000


@pytest.mark.contract("TRN-04")
async def test_the_wait_between_attempts_doubles_up_to_its_limit_and_is_spread(
    database: str,
) -> None:
    class Spread(ManualClock):
        def jitter(self) -> float:
            return 0.5

    clock, model = Spread(), PuppetModel()
    limits = Limits(model_retries_max=4, model_retry_first_ms=1_000, model_retry_longest_ms=3_000)
    async with opened(database, model, clock=clock, limits=limits) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        for delay in (750, 1_500, 2_250, 2_250):
            (await bounded(model.asked())).fail("server")
            assert await bounded(clock.sleeping()) == delay
            clock.advance(delay)
        (await bounded(model.asked())).fail("server", status=502, request_id="req_last")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        end = of(log, e.TurnEnd)[0].reason
        assert (end.kind, end.code, end.status) == ("error", "server", 502)
        assert end.provider_request_id == "req_last"


@pytest.mark.contract("TRN-04")
async def test_a_wait_longer_than_the_limit_ends_the_turn_and_says_how_long(database: str) -> None:
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).fail("rate_limit", status=429, retry_after_ms=3_600_000)
        await idle(agent)
        end = of(await log_of(room), e.TurnEnd)[0].reason
        assert (end.kind, end.code, end.retry_after_ms) == ("error", "rate_limit", 3_600_000)


@pytest.mark.contract("TRN-04")
@pytest.mark.parametrize("silence", ["nothing", "reasoning", "blank"])
async def test_empty_to_the_last_attempt_ends_completed_without_an_answer(
    database: str, silence: str
) -> None:
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock, limits=Limits(model_retries_max=2)) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("hello"))
        for attempt in range(3):
            asked = await bounded(model.asked())
            match silence:
                case "nothing":
                    asked.say("")
                case "reasoning":
                    asked.say("", reasoning="hm")
                case _:
                    asked.reply(Text(""))
            if attempt < 2:
                clock.advance(await bounded(clock.sleeping()))
        result = await bounded(running)
        assert result.finish_reason == "completed"
        assert result.final_response is None
        log = await log_of(room)
        assert audit(log) == []
        await agent.followup("again")
        asked = await bounded(model.asked())
        assert [text for text in asked.texts if text.startswith("user")] == [
            "user: hello",
            "user: again",
        ]


@pytest.mark.contract("TRN-04", "CAN-06")
async def test_a_cancel_while_waiting_for_the_next_attempt_keeps_nothing_of_the_failed_one(
    database: str,
) -> None:
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        asked.stream("half of a failed attempt")
        asked.fail("server")
        await bounded(clock.sleeping())
        await agent.cancel()
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled"]
        assert said(log) == []


@pytest.mark.contract("TRN-04")
async def test_a_second_model_is_asked_when_the_first_stays_down(database: str) -> None:
    clock, first, second = ManualClock(), PuppetModel("puppet:one"), PuppetModel("puppet:two")
    async with opened(
        database, first, second, clock=clock, limits=Limits(model_retries_max=1)
    ) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(first.asked())).fail("server")
        clock.advance(await bounded(clock.sleeping()))
        (await bounded(first.asked())).fail("server")
        (await bounded(second.asked())).say("hi")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [r.model for r in of(log, e.ModelRetry)] == [None, "puppet:two"]
        assert [h.model for h in of(log, e.RequestHeader)] == ["puppet:one", "puppet:two"]
        assert said(log) == ["hi"]


@pytest.mark.contract("TRN-05")
@pytest.mark.parametrize(("kind", "status"), FATAL)
async def test_a_fatal_failure_ends_the_turn_at_once_and_the_next_message_runs(
    database: str, kind: ModelErrorKind, status: int | None
) -> None:
    """C-64: over within seconds, with the error in the result."""
    clock, model = ManualClock(), PuppetModel()
    async with opened(database, model, clock=clock) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("second")
        asked.fail(kind, status=status, request_id="req_1")
        asked = await bounded(model.asked())
        assert asked.news == ["first", "second"]
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["error", "completed"]
        end = of(log, e.TurnEnd)[0].reason
        assert (end.code, end.status, end.provider_request_id) == (kind, status, "req_1")
        assert end.message
        assert of(log, e.ModelRetry) == []


@pytest.mark.contract("TRN-05")
@pytest.mark.parametrize("how", ["error", "finish"])
async def test_a_refusal_ends_the_turn_refused_and_is_not_asked_for_again(
    database: str, how: str
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        if how == "error":
            asked.fail("refused")
        else:
            asked.say("", finish="content_filter")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["refused"]
        assert len(model.asks) == 1


@pytest.mark.contract("TRN-05")
async def test_an_adapter_that_raises_what_it_should_not_ends_the_turn_and_not_the_agent(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("second")
        asked.crash(KeyError("a mistake of the adapter's author"))
        asked = await bounded(model.asked())
        assert asked.news == ["first", "second"]
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["error", "completed"]


# ---- what a reply may be ----


@pytest.mark.contract("TRN-06")
@pytest.mark.parametrize("text", ["half an ans", ""])
async def test_a_reply_cut_by_the_token_limit_keeps_its_text_and_runs_no_call(
    database: str, text: str
) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("second")
        asked.call("look", ("look", '{"at": "the sk'), text=text, finish="length")
        asked = await bounded(model.asked())
        assert asked.news[-1] == "second"
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        # The limit sticks to its own turn and to no other.
        assert ends(log) == ["max_tokens", "completed"]
        assert said(log) == [text, "fine"]
        assert tool.calls == []
        assert of(log, e.ToolCallStarted) == []
        assert not any(
            isinstance(block, ToolCall)
            for reply in of(log, e.AssistantReply)
            for block in reply.message.content
        )
        assert of(log, e.ModelRetry) == []


@pytest.mark.contract("TRN-07")
async def test_calls_run_side_by_side_up_to_the_cap_and_results_are_in_call_order(
    database: str,
) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], limits=Limits(tools_at_once_max=2)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call(*[("look", {"n": n}) for n in range(4)])
        running = [await bounded(tool.called()), await bounded(tool.called())]
        assert [called.arguments["n"] for called in running] == [0, 1]
        running[1].answer("one")
        third = await bounded(tool.called())
        assert third.arguments["n"] == 2
        assert len(tool.open) == 2
        third.answer("two")
        fourth = await bounded(tool.called())
        fourth.answer("three")
        running[0].answer("zero")
        (await bounded(model.asked())).say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert results(log) == [("ok", text) for text in ("zero", "one", "two", "three")]
        started = [data.call_id for data in of(log, e.ToolCallStarted)]
        assert started == [data.call_id for data in of(log, e.ToolResult)]


@pytest.mark.contract("TRN-07")
async def test_an_exclusive_tool_runs_alone(database: str) -> None:
    model, look, write = PuppetModel(), PuppetTool(), PuppetTool("write", exclusive=True)
    async with opened(database, model, tools=[look, write]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look", "write", "write", "look", "look")
        first = await bounded(look.called())
        await seen(agent, e.ToolCallStarted)
        assert write.calls == []
        first.answer()
        for _ in range(2):
            alone = await bounded(write.called())
            assert (len(look.open), len(write.open)) == (0, 1)
            alone.answer()
        last = [await bounded(look.called()), await bounded(look.called())]
        assert write.open == []
        for called in last:
            called.answer()
        (await bounded(model.asked())).say("done")
        await idle(agent)
        assert audit(await log_of(room)) == []


@pytest.mark.contract("TRN-07")
@pytest.mark.parametrize("ids", ["same", "none"])
async def test_calls_that_share_an_id_are_told_apart(database: str, ids: str) -> None:
    name = "call_0" if ids == "same" else ""
    model = PuppetModel()
    tool = PlainTool("look", lambda arguments: f"saw {arguments['at']}")
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        for turn in range(2):
            asked = await bounded(model.asked())
            asked.reply(
                ToolCall(name, "look", f'{{"at": "a{turn}"}}'),
                ToolCall(name, "look", f'{{"at": "b{turn}"}}'),
                finish="tool_calls",
            )
        (await bounded(model.asked())).say("done")
        await idle(agent)
        log = await log_of(room)
        # The audit asks strict providers, too: an id is used once in a whole history.
        assert audit(log) == []
        assert [text for _, text in results(log)] == ["saw a0", "saw b0", "saw a1", "saw b1"]


@pytest.mark.contract("TRN-07")
async def test_a_follow_up_during_a_batch_of_calls_cuts_nothing(database: str) -> None:
    """C-10: all three tools run and the reply is said."""
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look", "look", "look")
        calls = [await bounded(tool.called()) for _ in range(3)]
        calls[0].answer("1")
        await agent.followup("second")
        await agent.steer("third")
        await agent.inject("fourth")
        assert not any(called.stopped.is_set() for called in calls)
        calls[1].answer("2")
        calls[2].answer("3")
        asked = await bounded(model.asked())
        assert asked.texts[-5:-2] == ["tool: 1", "tool: 2", "tool: 3"]
        asked.say("seen")
        (await bounded(model.asked())).say("also")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert said(log) == ["", "seen", "also"]


async def _nothing(_: dict[str, object]) -> Any:
    return None


async def _an_object(_: dict[str, object]) -> Any:
    return object()


def _not_awaitable(_: dict[str, object]) -> Any:
    raise RuntimeError("raised before anything could be awaited")


async def _cancels_itself(_: dict[str, object]) -> Any:
    raise asyncio.CancelledError


async def _cancels_its_task(_: dict[str, object]) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def _fails(_: dict[str, object]) -> Any:
    raise ToolFailure("the cat is asleep", hint="try later")


async def _half_a_pair(_: dict[str, object]) -> Any:
    return ToolOutput("half \ud800 a pair")


MISBEHAVIOURS = {
    "raises": (_not_awaitable, "error", "RuntimeError"),
    "fails": (_fails, "error", "asleep (try later)"),
    "returns nothing": (_nothing, "error", ""),
    "returns an object": (_an_object, "error", ""),
    "cancels itself": (_cancels_itself, "error", ""),
    "cancels its task": (_cancels_its_task, "error", ""),
    "no unicode": (_half_a_pair, "ok", "half \ufffd a pair"),
    "says nothing": (lambda _: "", "ok", ""),
}


@pytest.mark.contract("TRN-08")
@pytest.mark.parametrize("what", MISBEHAVIOURS)
async def test_a_tool_that_misbehaves_gives_a_result_and_the_turn_goes_on(
    database: str, what: str
) -> None:
    function, outcome, part = MISBEHAVIOURS[what]
    model = PuppetModel()
    tools = [PlainTool("bad", function), PlainTool("good")]
    async with opened(database, model, tools=tools) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("good", "bad", "good")
        (await bounded(model.asked())).say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["completed"]
        assert [each[0] for each in results(log)] == ["ok", outcome, "ok"]
        assert part in results(log)[1][1]


@pytest.mark.contract("TRN-08")
@pytest.mark.parametrize("arguments", ["{", "[1]", "null", '"text"', '{"a": 1} {"b": 2}', "\ud800"])
async def test_arguments_that_are_no_object_are_an_error_and_the_tool_does_not_run(
    database: str, arguments: str
) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call(("look", arguments), "unknown")
        (await bounded(model.asked())).say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [each[0] for each in results(log)] == ["error", "error"]
        assert "look" in results(log)[1][1]
        assert tool.calls == []


@pytest.mark.contract("TRN-08")
async def test_a_tool_that_hangs_is_stopped_at_its_limit(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool(timeout_ms=30)
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        asked = await bounded(model.asked())
        assert called.stopped.is_set()
        assert "0.03 s" in asked.texts[-1]
        asked.say("done")
        await idle(agent)
        assert [each[0] for each in results(await log_of(room))] == ["error"]


@pytest.mark.contract("TRN-08")
async def test_an_enormous_output_leaves_a_bounded_preview_and_an_artifact(database: str) -> None:
    whole = "".join(f"line {number} é\n" for number in range(40_000))
    model = PuppetModel()
    tool = PlainTool("look", lambda _: whole)
    limits = Limits(tool_text_bytes_max=2_000)
    async with opened(database, model, tools=[tool], limits=limits) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        asked = await bounded(model.asked())
        shown = text_of(asked.request.messages[-1].content)
        assert len(shown.encode()) < 2_300
        assert shown.startswith("line 0 é\n")
        assert shown.endswith("line 39999 é\n")
        artifact = shown.partition("artifact ")[2].partition(",")[0]
        assert (await room.artifacts.get(artifact)).decode() == whole
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert max(len(event.raw) for event in log) < 5_000


# ---- limits and endings ----


@pytest.mark.contract("TRN-09")
@pytest.mark.parametrize("limit", ["room", "core"])
async def test_the_last_step_a_turn_may_have_pairs_its_calls_and_ends_it(
    database: str, limit: str
) -> None:
    tool = PlainTool("look")
    model = scripted(*[calling("look", "look")] * 3, then="echo")
    limits = Limits(turn_steps_max=3) if limit == "room" else Limits()
    more = {} if limit == "room" else {"turn_steps_max": 3}
    async with opened(database, model, tools=[tool], limits=limits, **more) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        await agent.followup("second")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["max_steps", "completed"]
        assert results(log) == [("ok", "done")] * 6
        assert [s.step for s in of(log, e.StepStart)] == [1, 2, 3, 1]


@pytest.mark.contract("TRN-12", "RUN-02")
async def test_an_empty_last_message_after_tools_is_no_answer_and_no_tool_runs_again(
    database: str,
) -> None:
    """C-71: nothing earlier stands in for the missing text, nothing is repeated."""
    model, tool = PuppetModel(), PuppetTool()
    clock = ManualClock()
    async with opened(
        database, model, tools=[tool], clock=clock, limits=Limits(model_retries_max=1)
    ) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("pay the bill"))
        (await bounded(model.asked())).call("look", text="paying")
        (await bounded(tool.called())).answer("paid")
        (await bounded(model.asked())).say("")
        clock.advance(await bounded(clock.sleeping()))
        (await bounded(model.asked())).say("")
        result = await bounded(running)
        assert result.final_response is None
        assert result.finish_reason == "completed"
        assert len(tool.calls) == 1
        log = await log_of(room)
        assert audit(log) == []
        assert said(log) == ["paying", ""]
        await agent.followup("and?")
        asked = await bounded(model.asked())
        assert asked.texts[-3:] == ["assistant: paying", "tool: paid", "user: and?"]


async def test_a_turn_that_ends_by_itself_is_called_completed(database: str) -> None:
    """C-75: a clean end leaves no word of an interruption."""
    model = scripted(calling("look"), "done")
    async with opened(database, model, tools=[PlainTool("look")]) as room:
        agent = await room.session(SESSION)
        result = await bounded(agent.run("hello"))
        assert result.finish_reason == "completed"
        text = json.dumps([event.to_json() for event in await log_of(room)])
        assert "interrupt" not in text
        assert "cancel" not in text


async def test_reasoning_is_kept_in_the_log_beside_the_text(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).say("hi", reasoning="they greet me")
        await idle(agent)
        [reply] = of(await log_of(room), e.AssistantReply)
        assert reply.message.content == (Reasoning("they greet me"), Text("hi"))
        assert reply.model == "puppet:one"


async def test_deltas_reach_whoever_watches_and_no_log(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        live: list[Live] = []
        end = room.live.watch(SessionId(SESSION), live.append)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        asked.stream("a", "b")
        asked.delta(TextDelta("c"))
        assert [(each.kind, each.text) for each in live] == [("text", c) for c in "abc"]
        end()
        asked.say("abcd")
        await idle(agent)
        assert len(live) == 3
        assert said(await log_of(room)) == ["abcd"]


async def test_the_message_of_somebody_else_is_marked_as_theirs(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(
            SESSION, source=Source("conversation", sender="Ada", sender_id="7")
        )
        await agent.followup("hello")
        asked = await bounded(model.asked())
        assert asked.texts == ["user: [message from Ada (id 7), not the operator]\nhello"]
