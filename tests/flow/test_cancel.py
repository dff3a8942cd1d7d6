"""Cancelling and closing: what stops, what is kept, what runs afterwards, what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import Any, Literal

import pytest

from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.event import CancelCause
from postroom.domain.ids import SessionId
from postroom.errors import CommitUncertain, StoreClosed
from postroom.ports.model import CallDelta, ReasoningDelta
from postroom.ports.policy import Admit, Verdict
from postroom.testing import (
    FaultyStore,
    ManualClock,
    PuppetModel,
    PuppetTool,
    scripted,
)
from tests.flow.audit import audit, outcomes
from tests.flow.support import (
    SESSION,
    ends,
    entered,
    idle,
    log_of,
    moved,
    of,
    opened,
    pending,
    results,
    said,
    seen,
    types,
)
from tests.support import bounded

CAUSES: tuple[CancelCause, ...] = ("user", "parent", "disposed")


@pytest.mark.contract("CAN-01")
@pytest.mark.parametrize("cause", CAUSES)
async def test_a_cancel_stops_the_model_and_empties_both_lists(
    database: str, cause: CancelCause
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("waits")
        await agent.steer("steers")
        await agent.inject("injects")
        await agent.cancel(cause)
        assert await agent.inbox() == []
        await bounded(asked.dropped.wait())
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert of(log, e.TurnEnd)[0].reason == e.EndReason("cancelled", cause=cause)
        assert [data.cause for data in of(log, e.InboxCancelled)] == [cause] * 3
        assert sorted(outcomes(log).values()) == ["cancelled"] * 3 + ["entered"]
        assert len(model.asks) == 1


@pytest.mark.contract("CAN-01")
async def test_a_cancel_stops_the_running_tools_and_pairs_every_call(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], limits=Limits(tools_at_once_max=2)) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look", "look", "look")
        one, two = await bounded(tool.called()), await bounded(tool.called())
        await agent.cancel()
        await bounded(one.stopped.wait())
        await bounded(two.stopped.wait())
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled"]
        assert [outcome for outcome, _ in results(log)] == ["cancelled"] * 3
        assert len(of(log, e.ToolCallStarted)) == 2
        await agent.followup("second")
        asked = await bounded(model.asked())
        assert [text.partition(":")[0] for text in asked.texts] == [
            "user",
            "assistant",
            *["tool"] * 3,
            "user",
        ]


@pytest.mark.contract("CAN-01")
async def test_what_a_tool_had_answered_before_the_cancel_is_kept(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look", "look")
        one, two = await bounded(tool.called()), await bounded(tool.called())
        two.answer("seen")
        await agent.cancel()
        await bounded(one.stopped.wait())
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert sorted(outcome for outcome, _ in results(log)) == ["cancelled", "ok"]
        assert ("ok", "seen") in results(log)


@pytest.mark.contract("CAN-01")
async def test_the_first_cause_of_a_cancel_wins(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        await bounded(model.asked())
        await asyncio.gather(agent.cancel("parent"), agent.cancel("user"), agent.cancel())
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [data.cause for data in of(log, e.TurnCancel)] == ["parent"]
        assert of(log, e.TurnEnd)[0].reason.cause == "parent"


@pytest.mark.contract("CAN-02")
async def test_keep_inbox_only_aborts_and_what_was_pending_runs(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("second")
        await agent.steer("steer")
        await agent.cancel(keep_inbox=True)
        await bounded(asked.dropped.wait())
        asked = await bounded(model.asked())
        assert asked.news[-2:] == ["steer", "second"]
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled", "completed"]
        assert set(outcomes(log).values()) == {"entered"}


@pytest.mark.contract("CAN-03")
@pytest.mark.parametrize("operation", ["followup", "steer"])
async def test_a_message_queued_after_the_cancel_runs_when_the_rest_has_settled(
    database: str, operation: str
) -> None:
    model, tool = PuppetModel(), PuppetTool(stubborn=1)
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=5_000)) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await agent.cancel()
        await bounded(called.stopped.wait())
        await getattr(agent, operation)("after")
        assert len(model.asks) == 1  # the tool has not stopped yet
        called.answer("so be it")
        asked = await bounded(model.asked())
        assert asked.news[-1] == "after"
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled", "completed"]
        assert entered(log) == [(1, 1, "first"), (2, 1, "after")]


@pytest.mark.contract("CAN-04")
async def test_a_cancel_without_a_turn_empties_what_is_pending_and_nothing_else(
    database: str,
) -> None:
    async with opened(database, PuppetModel(), drive=False) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        await agent.steer("second")
        before = await log_of(room)
        await agent.cancel()
        log = await log_of(room)
        assert types(log[len(before) :]) == ["inbox/cancelled", "inbox/cancelled", "agent/idle"]
        assert audit(log) == []
    model = scripted(then="echo")
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("later")
        await idle(agent)
        log = await log_of(room)
        assert said(log) == ["later"]
        assert ends(log) == ["completed"]


@pytest.mark.contract("CAN-04")
@pytest.mark.parametrize("keep_inbox", [True, False])
async def test_a_cancel_of_a_quiescent_agent_does_nothing(database: str, keep_inbox: bool) -> None:
    model = scripted("one", "two")
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.cancel(keep_inbox=keep_inbox)
        assert types(await log_of(room)) == ["session/created"]
        await agent.followup("first")
        await idle(agent)
        before = await log_of(room)
        await agent.cancel(keep_inbox=keep_inbox)
        assert await log_of(room) == before
        await agent.followup("second")
        await idle(agent)
        assert ends(await log_of(room)) == ["completed", "completed"]


@pytest.mark.contract("CAN-04")
async def test_a_cancel_of_an_idle_agent_takes_an_inject_out(database: str) -> None:
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        await agent.inject("a note")
        await agent.cancel(keep_inbox=True)
        assert await pending(agent) == ["a note"]
        await agent.cancel()
        assert await pending(agent) == []
        log = await log_of(room)
        assert types(log) == ["session/created", "inbox/queued", "inbox/cancelled"]


@pytest.mark.contract("CAN-04", "CAN-07")
@pytest.mark.parametrize("when", ["turn", "step"])
async def test_a_cancel_does_not_wait_for_a_policy_that_never_answers(
    database: str, when: Literal["turn", "step"]
) -> None:
    """C-63: an await that answers never does not keep the agent from settling."""
    judging = asyncio.Event()

    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        if batch[0].content[0].text == "judge me":
            judging.set()
            await asyncio.Event().wait()
        return Admit()

    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], policy=judge) as room:
        agent = await room.session(SESSION)
        if when == "turn":
            await agent.followup("judge me")
        else:
            await agent.followup("first")
            (await bounded(model.asked())).call("look")
            called = await bounded(tool.called())
            await agent.steer("judge me")
            called.answer()
        await bounded(judging.wait())
        await agent.cancel()
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ([] if when == "turn" else ["cancelled"])
        await agent.followup("next")
        (await bounded(model.asked())).say("fine")
        await idle(agent)
        assert ends(await log_of(room))[-1] == "completed"


async def test_a_policy_that_never_answers_refuses_at_its_limit(database: str) -> None:
    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        await asyncio.Event().wait()
        return Admit()

    limits = Limits(policy_timeout_ms=20)
    async with opened(database, PuppetModel(), policy=judge, limits=limits) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        await idle(agent)
        assert ends(await log_of(room)) == ["rejected"]


@pytest.mark.contract("CAN-06")
async def test_text_streamed_before_the_cancel_is_kept_and_partial_calls_are_not(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("tell me"))
        asked = await bounded(model.asked())
        asked.delta(ReasoningDelta("hm"))
        asked.stream("Once upon", " a time")
        asked.delta(CallDelta("look"))
        await agent.cancel()
        result = await bounded(running)
        assert result.final_response == "Once upon a time"
        assert result.finish_reason == "cancelled"
        log = await log_of(room)
        assert audit(log) == []
        [reply] = of(log, e.AssistantReply)
        assert reply.interrupted
        assert [block.__class__.__name__ for block in reply.message.content] == [
            "Reasoning",
            "Text",
        ]
        await agent.followup("go on")
        asked = await bounded(model.asked())
        assert asked.texts == [
            "user: tell me",
            "assistant: Once upon a time",
            "user: go on",
        ]


@pytest.mark.contract("CAN-06")
async def test_nothing_streamed_leaves_no_message(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("tell me"))
        await bounded(model.asked())
        await agent.cancel()
        result = await bounded(running)
        assert result.final_response is None
        assert said(await log_of(room)) == []


async def test_an_adapter_that_answers_in_spite_of_a_cancel_confuses_no_later_turn(
    database: str,
) -> None:
    class Deaf(PuppetModel):
        """To the first cancel."""

        async def respond(self, request: Any, on_delta: Any) -> Any:
            task = asyncio.ensure_future(super().respond(request, on_delta))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if len(self.asks) > 1:
                    task.cancel()
                    raise
                self.asks[-1].say("anyway")
                return await task

    model = Deaf()
    faults: list[FaultyStore] = []

    def wrap(store: Any) -> Any:
        faults.append(FaultyStore(store))
        return faults[0]

    async with opened(database, model, wrap=wrap) as room:
        agent = await room.session(SESSION)
        for number in range(3):
            await agent.followup(f"message {number}")
        for _ in range(3):  # one driver's three turns
            await bounded(model.asked())
            await agent.cancel(keep_inbox=True)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled"] * 3
        assert said(log) == ["anyway"]
        # The driver never took a cancel of a turn for its own.
        assert "give_back_drive" not in faults[0].writes


# ---- waiting for idle ----


@pytest.mark.contract("CAN-07")
@pytest.mark.parametrize("how", ["cancel", "error", "rejected", "tools", "closed"])
async def test_when_idle_returns_whatever_ends_the_activity(database: str, how: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], drain_ms=0) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        waiting = [asyncio.ensure_future(agent.when_idle()) for _ in range(3)]
        asked = await bounded(model.asked())
        match how:
            case "cancel":
                await agent.cancel()
            case "error":
                asked.fail("auth")
            case "rejected":
                asked.fail("refused")
            case "tools":
                asked.call("look")
                await bounded(tool.called())
                await agent.cancel()
            case _:
                await bounded(room.aclose(drain_ms=0))
        await bounded(asyncio.gather(*waiting))
        await bounded(agent.when_idle())


@pytest.mark.contract("CAN-07")
async def test_when_idle_returns_at_once_when_idle_also_with_an_inject_pending(
    database: str,
) -> None:
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        await bounded(agent.when_idle())
        await agent.inject("note")
        await bounded(agent.when_idle())


@pytest.mark.contract("CAN-07")
async def test_a_cancelled_wait_leaves_no_listener(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        waiting = asyncio.ensure_future(agent.when_idle())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        asked.say("fine")
        await idle(agent)


# ---- closing ----


def _open_files() -> list[str]:
    names: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(names)


class _Left:
    """What is there before, to see what is there more afterwards."""

    def __init__(self) -> None:
        self.tasks = asyncio.all_tasks()
        self.threads = set(threading.enumerate())
        self.files = _open_files()

    async def more(self) -> list[object]:
        # The loop's own pool for blocking calls lives as long as the loop.
        pool = [t for t in threading.enumerate() if t.name.startswith("asyncio_")]
        gc.collect()
        files = _open_files()
        for name in self.files:
            if name in files:
                files.remove(name)
        return [
            *(asyncio.all_tasks() - self.tasks),
            *(set(threading.enumerate()) - self.threads - set(pool)),
            *files,
        ]


@pytest.mark.contract("CAN-08")
@pytest.mark.parametrize("busy", ["idle", "model", "tool", "retry", "watched", "run", "queueing"])
async def test_closing_leaves_no_task_thread_or_file_behind(database: str, busy: str) -> None:
    clock, model, tool = ManualClock(), PuppetModel(), PuppetTool()
    left = _Left()
    waiting: list[asyncio.Future[Any]] = []
    async with opened(database, model, tools=[tool], clock=clock) as room:
        agent = await room.session(SESSION)
        match busy:
            case "idle":
                await agent.followup("hello")
                (await bounded(model.asked())).say("hi")
                await idle(agent)
            case "model":
                await agent.followup("hello")
                (await bounded(model.asked())).stream("half")
            case "tool":
                await agent.followup("hello")
                (await bounded(model.asked())).call("look", "look")
                await bounded(tool.called())
            case "retry":
                await agent.followup("hello")
                (await bounded(model.asked())).fail("server")
                await bounded(clock.sleeping())
            case "watched":
                waiting.append(asyncio.ensure_future(_watch(agent)))
                await agent.followup("hello")
                waiting.append(asyncio.ensure_future(agent.when_idle()))
                await bounded(model.asked())
            case "run":
                waiting.append(asyncio.ensure_future(agent.run("hello")))
                waiting.append(asyncio.ensure_future(agent.run("behind it")))
                await bounded(model.asked())
            case _:
                for number in range(20):
                    waiting.append(asyncio.ensure_future(agent.followup(f"message {number}")))
                await asyncio.sleep(0)
    for outcome in await bounded(asyncio.gather(*waiting, return_exceptions=True)):
        assert outcome is None or isinstance(outcome, StoreClosed)
    assert await left.more() == []


async def _watch(agent: Any) -> None:
    async for _ in agent.events():
        pass


@pytest.mark.contract("CAN-08")
async def test_closing_waits_for_a_tool_that_takes_its_time_to_stop(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool(stubborn=1)
    left = _Left()
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=5_000)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        closing = asyncio.ensure_future(room.aclose(drain_ms=0))
        await bounded(called.stopped.wait())
        assert not closing.done()
        called.answer("at last")
        await bounded(closing)
        assert await left.more() == []


@pytest.mark.contract("CAN-08")
@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_closing_waits_for_a_tool_that_outlived_its_turn(database: str, how: str) -> None:
    model = PuppetModel()
    tool = PuppetTool(stubborn=2, timeout_ms=10 if how == "timeout" else None)
    left = _Left()
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=200)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        if how == "timeout":
            (await bounded(model.asked())).say("so be it")
        else:
            await agent.cancel()
        await idle(agent)
        assert called.open
        closing = asyncio.ensure_future(room.aclose(drain_ms=0))
        await moved()
        assert await agent.status() == "idle"  # the store is still open
        called.answer("at last")
        await bounded(closing)
        assert await left.more() == []


@pytest.mark.contract("CAN-08")
async def test_closing_is_bounded_by_a_tool_that_never_stops(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool(stubborn=9)
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=10)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await bounded(room.aclose(drain_ms=0))
        called.answer()
        await asyncio.sleep(0)


async def test_an_open_turn_is_left_open_and_goes_on_with_the_next_start(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        await bounded(tool.called())
        await agent.followup("waits")
    model = PuppetModel()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        asked = await bounded(model.asked())
        assert asked.texts[:2] == ["user: hello", "assistant: "]
        assert "unknown" in asked.texts[2]
        asked.say("recovered")
        asked = await bounded(model.asked())
        assert asked.news == ["waits"]
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["interrupted", "completed", "completed"]
        # Let go of in good order, it cost no attempt.
        assert of(log, e.TurnEnd)[0].reason.attempt == 0


@pytest.mark.contract("CAN-08")
async def test_a_turn_may_finish_while_the_room_drains(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model, drain_ms=10_000) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        await agent.followup("waits")
        closing = asyncio.ensure_future(room.aclose())
        await moved()
        asked.say("hi")
        await bounded(closing)
    async with opened(database, scripted("and", "hi"), drive=False) as room:
        log = await log_of(room)
        assert said(log) == ["hi"]
        assert ends(log) == ["completed"]
        assert [how for how in outcomes(log).values()] == ["entered", "pending"]
    async with opened(database, scripted("no", "two")) as room:
        await idle(await room.session(SESSION))
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["completed", "completed"]


async def test_closing_twice_or_at_once_is_the_same(database: str) -> None:
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(asyncio.gather(*(room.aclose(drain_ms=0) for _ in range(3))))
        await bounded(room.aclose())


# ---- a cancel and the store's faults ----


@pytest.mark.contract("CAN-09")
@pytest.mark.parametrize("script", ["record_reply", "next_step", "finish_turn", "record_results"])
@pytest.mark.parametrize("written", [True, False], ids=["written", "not-written"])
async def test_a_cancel_while_an_answer_of_the_store_is_lost_is_not_lost(
    database: str, script: str, written: bool
) -> None:
    clock, model = ManualClock(), PuppetModel()
    tool = PuppetTool()
    faults: list[FaultyStore] = []

    def wrap(store: Any) -> Any:
        faults.append(FaultyStore(store))
        return faults[0]

    async with opened(database, model, tools=[tool], clock=clock, wrap=wrap) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        faults[0].lose(script, written=written)
        asked = await bounded(model.asked())
        if script == "finish_turn":
            asked.say("done")
        else:
            asked.call("look", "look")
            if script != "record_reply":
                one, two = await bounded(tool.called()), await bounded(tool.called())
                one.answer()
                if script == "record_results":
                    await bounded(clock.sleeping())
                two.answer()
        await bounded(clock.sleeping())
        await agent.cancel()
        clock.advance(100)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        done = script == "finish_turn" and written
        assert ends(log) == (["completed"] if done else ["cancelled"])
        await agent.followup("next")
        while not model.open:
            await bounded(model.asked())
        model.open[-1].say("fine")
        await idle(agent)
        assert ends(await log_of(room))[-1] == "completed"


@pytest.mark.contract("CAN-09")
async def test_a_cancel_of_interrupted_work_withdraws_its_recovery(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(model.asked())
    async with opened(database, model, drive=False) as room:
        agent = await room.session(SESSION)
        await agent.cancel()
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled"]
        assert model.asks == []


async def test_a_cancel_lost_on_the_way_can_be_asked_for_again(database: str) -> None:
    model = PuppetModel()
    faults: list[FaultyStore] = []

    def wrap(store: Any) -> Any:
        faults.append(FaultyStore(store))
        return faults[0]

    async with opened(database, model, wrap=wrap) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(model.asked())
        faults[0].lose("cancel")
        with pytest.raises(CommitUncertain):
            await agent.cancel()
        await agent.cancel()
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert len(of(log, e.TurnCancel)) == 1


async def test_events_of_a_closed_room_end(database: str) -> None:
    async with opened(database, scripted("hi")) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await seen(agent, e.AgentIdle)
        watching = asyncio.ensure_future(_watch(agent))
        await asyncio.sleep(0)
        await room.aclose()
        await bounded(watching)
        await bounded(_watch(agent))
