"""Owned intervals: what a run collects, when it ends, what its result says and does not say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from postroom import mint
from postroom.app import Room
from postroom.config import Limits
from postroom.domain.ids import SessionId
from postroom.domain.run import RunResult, fold_run, interval
from postroom.errors import CommitUncertain, RunOverlap, RunTimeout, StoreClosed
from postroom.ports.policy import Reject, Verdict
from postroom.ports.store import Store
from postroom.testing import (
    FaultyStore,
    ManualClock,
    PlainTool,
    PuppetModel,
    PuppetTool,
    StoreWrapper,
    calling,
    scripted,
)
from tests.flow.audit import audit
from tests.flow.support import (
    SESSION,
    ends,
    entered,
    idle,
    in_order,
    log_of,
    opened,
    pending,
    queued,
    said,
    types,
    waits,
)
from tests.support import bounded


@contextlib.asynccontextmanager
async def beside(database: str, model: Any) -> AsyncGenerator[Room]:
    """A second node on the same database, which only queues and watches."""
    async with opened(database, model, drive=False) as room:
        yield room


@pytest.mark.contract("RUN-01")
async def test_a_run_collects_all_that_happens_from_its_receipt_to_idle(database: str) -> None:
    """What others steer, inject and queue meanwhile is in it; what came before is not."""
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("long ago")
        (await bounded(model.asked())).say("old answer")
        await idle(agent)
        await agent.followup("before")
        asked = await bounded(model.asked())
        before = await log_of(room)
        running = asyncio.ensure_future(agent.run("mine"))
        await waits(agent, 1)
        asked.say("answer before")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await agent.steer("steered")
        await agent.inject("injected")
        await agent.followup("another's")
        called.answer("seen")
        (await bounded(model.asked())).say("mine answered")
        (await bounded(model.asked())).say("another's answered")
        result = await bounded(running)
        log = await log_of(room)
        assert audit(log) == []
        assert result.complete
        assert result.events == tuple(log[len(before) :])
        assert (result.first_seq, result.last_seq) == (len(before) + 1, len(log))
        assert types(result.events)[0] == "inbox/queued"
        assert types(result.events)[-1] == "agent/idle"
        assert queued(result.events) == ["mine", "steered", "injected", "another's"]
        assert said(result.events) == [
            "answer before",
            "",
            "mine answered",
            "another's answered",
        ]
        assert result.final_response == "another's answered"
        assert result.usage.output_tokens == 4 * 5
        assert result.pending_children == ()


@pytest.mark.contract("RUN-01")
async def test_recovered_work_is_in_the_run_that_began_before_the_crash(database: str) -> None:
    """C-90: the turn that was cut is closed, and the session goes on."""
    name = mint.message_id()
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("mine", message_id=name))
        (await bounded(model.asked())).stream("half")
        await room.aclose(drain_ms=0)
        with pytest.raises(StoreClosed):
            await bounded(running)
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        partial = await agent.fold(name)
        assert not partial.complete
        (await bounded(model.asked())).say("whole")
        await idle(agent)
        result = await agent.fold(name)
        assert result.complete
        assert result.final_response == "whole"
        assert result.finish_reason == "completed"
        assert ends(result.events) == ["interrupted", "completed"]
        assert audit(await log_of(room)) == []


@pytest.mark.contract("RUN-02")
async def test_the_final_response_is_the_last_message_s_text_and_no_other_stands_in(
    database: str,
) -> None:
    model = scripted(
        calling("look", text="working on it"),
        {"text": "cut off", "finish": "length"},
        {"error": {"status": 401}},
        "fine",
    )
    async with opened(database, model, tools=[PlainTool("look")]) as room:
        agent = await room.session(SESSION)
        cut = await bounded(agent.run("one"))
        assert (cut.final_response, cut.finish_reason) == ("cut off", "max_tokens")
        failed = await bounded(agent.run("two"))
        assert (failed.final_response, failed.finish_reason) == (None, "error")
        fine = await bounded(agent.run("three"))
        assert (fine.final_response, fine.finish_reason) == ("fine", "completed")


@pytest.mark.contract("RUN-03")
async def test_the_finish_reason_is_the_last_turn_s_and_no_message_has_one(database: str) -> None:
    """The message's own turn ends at the token limit, the one behind it completes."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("mine"))
        asked = await bounded(model.asked())
        await agent.followup("another's")
        asked.say("half", finish="length")
        (await bounded(model.asked())).say("whole")
        result = await bounded(running)
        assert ends(result.events) == ["max_tokens", "completed"]
        assert result.finish_reason == "completed"
        told = result.to_json(events=False)
        assert set(told) == {
            "sessionId",
            "messageId",
            "finalResponse",
            "finishReason",
            "error",
            "usage",
            "firstSeq",
            "lastSeq",
            "pendingChildren",
        }


@pytest.mark.contract("RUN-04")
async def test_the_interval_recomputed_later_or_elsewhere_is_the_same(database: str) -> None:
    model = scripted(calling("look"), "one", {"error": {"status": 400}}, "three", then="echo")
    results: list[RunResult] = []
    async with (
        opened(database, model, tools=[PlainTool("look")]) as room,
        beside(database, model) as other,
    ):
        agent = await room.session(SESSION)
        watcher = await other.session(SESSION)
        for text in ("a", "b", "c"):
            results.append(await bounded(agent.run(text)))
            assert await agent.fold(results[-1].message_id) == results[-1]
            assert await watcher.fold(results[-1].message_id) == results[-1]
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("much later")
        await idle(agent)
        log = await log_of(room)
        for result in results:
            assert await agent.fold(result.message_id) == result
            cut = interval(log, result.message_id)
            assert fold_run(SessionId(SESSION), result.message_id, cut) == result


@pytest.mark.contract("RUN-05")
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_run_whose_message_was_edited_away_ends_with_the_interval(
    database: str, how: str
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("before")
        asked = await bounded(model.asked())
        name = mint.message_id()
        running = asyncio.ensure_future(agent.run("mine", message_id=name))
        await waits(agent, 1)
        if how == "removed":
            assert await agent.remove(name)
        else:
            assert await agent.replace(name, "edited")
        asked.say("before answered")
        if how == "replaced":
            (await bounded(model.asked())).say("edited answered")
        result = await bounded(running)
        assert result.complete
        assert result.finish_reason == "completed"
        expected = "before answered" if how == "removed" else "edited answered"
        assert result.final_response == expected
        assert await agent.fold(name) == result


@pytest.mark.contract("RUN-05")
async def test_a_refused_message_s_run_describes_the_refusal(database: str) -> None:
    async def judge(_: SessionId, batch: Any) -> Verdict:
        return Reject("not you")

    async with opened(database, PuppetModel(), policy=judge) as room:
        agent = await room.session(SESSION)
        result = await bounded(agent.run("mine"))
        assert result.final_response is None
        assert result.finish_reason == "rejected"
        assert result.end is not None
        assert result.end.message == "not you"


@pytest.mark.contract("RUN-05")
@pytest.mark.parametrize("how", ["remove", "cancel"])
async def test_where_nothing_ran_the_idle_comes_at_once_and_both_fields_are_null(
    database: str, how: str
) -> None:
    async with opened(database, PuppetModel(), drive=False) as room:
        agent = await room.session(SESSION)
        name = mint.message_id()
        running = asyncio.ensure_future(agent.run("mine", message_id=name))
        await waits(agent, 1)
        if how == "remove":
            assert await agent.remove(name)
        else:
            await agent.cancel()
        result = await bounded(running)
        assert (result.final_response, result.finish_reason) == (None, None)
        assert types(result.events) == [
            "inbox/queued",
            "agent/running",
            "inbox/cancelled",
            "agent/idle",
        ]
        assert audit(await log_of(room)) == []


@pytest.mark.contract("RUN-06")
async def test_a_turn_that_failed_before_does_not_end_the_run_of_a_queued_message(
    database: str,
) -> None:
    """C-202: A fails with B queued. B's run describes B's interval, and C's describes C's."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("A")
        asked = await bounded(model.asked())
        run_b = asyncio.ensure_future(agent.run("B"))
        await waits(agent, 1)
        asked.fail("auth", status=401)
        asked = await bounded(model.asked())
        assert not run_b.done()
        assert asked.news[-1] == "B"
        asked.say("B answered")
        result = await bounded(run_b)
        assert ends(result.events) == ["error", "completed"]
        assert (result.final_response, result.finish_reason) == ("B answered", "completed")
        run_c = asyncio.ensure_future(agent.run("C"))
        (await bounded(model.asked())).say("C answered")
        result = await bounded(run_c)
        assert said(result.events) == ["C answered"]
        assert ends(result.events) == ["completed"]


@pytest.mark.contract("RUN-07")
async def test_a_timeout_raises_with_what_there_is_and_the_agent_goes_on(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("mine", timeout_ms=700))
        (await bounded(model.asked())).call("look", text="let me see")
        called = await bounded(tool.called())
        with pytest.raises(RunTimeout) as caught:
            await bounded(running)
        partial = caught.value.partial
        assert not partial.complete
        assert partial.final_response == "let me see"
        assert partial.finish_reason is None
        assert await agent.status() == "running"
        assert not called.stopped.is_set()
        called.answer()
        (await bounded(model.asked())).say("done")
        await idle(agent)
        result = await agent.fold(partial.message_id)
        assert (result.final_response, result.finish_reason) == ("done", "completed")
        assert result.events[: len(partial.events)] == partial.events


@pytest.mark.contract("RUN-07")
async def test_a_timeout_cancels_when_asked_and_what_others_queued_still_runs(
    database: str,
) -> None:
    """C-01: B waits behind a hung call; A's time is over; B runs, exactly once."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("A", timeout_ms=500, cancel_on_timeout=True))
        hung = await bounded(model.asked())
        await agent.followup("B")
        assert await pending(agent) == ["B"]
        with pytest.raises(RunTimeout):
            await bounded(running)
        await bounded(hung.dropped.wait())
        asked = await bounded(model.asked())
        assert asked.news == ["A", "B"]
        asked.say("B answered")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["cancelled", "completed"]
        assert entered(log) == [(1, 1, "A"), (2, 1, "B")]


@pytest.mark.contract("RUN-07")
async def test_a_message_still_waiting_at_the_timeout_is_taken_out_and_nobody_else_s_turn_ends(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("another's")
        asked = await bounded(model.asked())
        with pytest.raises(RunTimeout) as caught:
            await bounded(agent.run("mine", timeout_ms=50, cancel_on_timeout=True))
        assert not caught.value.partial.complete
        asked.say("fine")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["completed"]
        assert entered(log) == [(1, 1, "another's")]


@pytest.mark.contract("RUN-07")
async def test_the_time_spent_waiting_for_another_run_counts_and_nothing_was_queued(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        first = asyncio.ensure_future(agent.run("first"))
        asked = await bounded(model.asked())
        with pytest.raises(RunTimeout) as caught:
            await bounded(agent.run("second", timeout_ms=50))
        assert caught.value.partial.first_seq == 0
        assert await agent.inbox() == []
        asked.say("fine")
        assert (await bounded(first)).final_response == "fine"


@pytest.mark.contract("RUN-09")
async def test_overlapping_runs_of_one_client_wait_for_each_other(database: str) -> None:
    """C-203: neither gets the other's answer."""
    model = scripted(then="echo")
    async with opened(database, model) as room:
        agents = [await room.session(SESSION) for _ in range(3)]
        runs = [agents[n % 3].run(f"question {n}") for n in range(6)]
        results = await bounded(asyncio.gather(*runs))
        assert [result.final_response for result in results] == [f"question {n}" for n in range(6)]
        for result in results:
            assert queued(result.events) == [result.final_response]
        assert audit(await log_of(room)) == []


@pytest.mark.contract("RUN-09")
async def test_a_second_client_s_exclusive_run_is_refused_and_queues_nothing(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, beside(database, model) as other:
        agent, stranger = await room.session(SESSION), await other.session(SESSION)
        running = asyncio.ensure_future(agent.run("mine"))
        asked = await bounded(model.asked())
        before = await log_of(room)
        with pytest.raises(RunOverlap):
            await bounded(stranger.run("theirs"))
        assert await log_of(room) == before
        shared = asyncio.ensure_future(stranger.run("shared", mode="share"))
        await waits(agent, 1)
        await stranger.followup("never refused")
        asked.say("one")
        (await bounded(model.asked())).say("two")
        (await bounded(model.asked())).say("three")
        mine, theirs = await bounded(running), await bounded(shared)
        assert mine.last_seq == theirs.last_seq
        assert mine.first_seq < theirs.first_seq
        again = asyncio.ensure_future(stranger.run("theirs now"))
        (await bounded(model.asked())).say("yes")
        assert (await bounded(again)).final_response == "yes"


@pytest.mark.contract("RUN-09")
async def test_a_run_cut_off_by_a_closed_room_blocks_no_later_run_for_ever(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("mine"))
        await bounded(model.asked())
    with pytest.raises(StoreClosed):
        await bounded(running)
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        (await bounded(model.asked())).say("recovered")
        await idle(agent)
        later = asyncio.ensure_future(agent.run("later"))
        (await bounded(model.asked())).say("yes")
        assert (await bounded(later)).final_response == "yes"


# ---- runs and lost answers ----


class _Faults:
    def __init__(self) -> None:
        self.store: FaultyStore

    def wrap(self, store: Store) -> Store:
        self.store = FaultyStore(store)
        return self.store


@pytest.mark.contract("INB-01", "RUN-01")
@pytest.mark.parametrize("when", ["open", "over"])
async def test_a_run_whose_receipt_was_lost_is_taken_up_again_by_its_id(
    database: str, when: str
) -> None:
    """Also where the interval had ended before anybody listened again."""
    model, faults = PuppetModel(), _Faults()
    async with opened(database, model, wrap=faults.wrap) as room:
        agent = await room.session(SESSION)
        name = mint.message_id()
        faults.store.lose()
        with pytest.raises(CommitUncertain):
            await agent.run("mine", message_id=name)
        asked = await bounded(model.asked())
        if when == "over":
            asked.say("answer")
            await idle(agent)
        running = asyncio.ensure_future(agent.run("mine", message_id=name))
        if when == "open":
            await asyncio.sleep(0)
            asked.say("answer")
        result = await bounded(running)
        assert result.final_response == "answer"
        assert result == await agent.fold(name)
        assert len(model.asks) == 1


@pytest.mark.contract("RUN-04")
@pytest.mark.parametrize(
    "script", ["record_reply", "record_results", "start_calls", "next_step", "finish_turn"]
)
async def test_a_lost_answer_of_the_driver_leaves_no_trace_in_the_result(
    database: str, script: str
) -> None:
    """Every script of a driver may run twice, and nothing happens twice."""
    clock, faults = ManualClock(), _Faults()
    model = scripted(calling("look", "look", "write", "look"), "done", then="echo")
    tools = [PlainTool("look"), PlainTool("write", exclusive=True)]
    limits = Limits(tools_at_once_max=1)
    async with opened(
        database, model, tools=tools, clock=clock, wrap=faults.wrap, limits=limits
    ) as room:
        agent = await room.session(SESSION)
        faults.store.lose(script)
        running = asyncio.ensure_future(agent.run("mine"))
        await bounded(clock.sleeping())
        clock.advance(100)
        result = await bounded(running)
        log = await log_of(room)
        assert audit(log) == []
        assert said(log) == ["", "done"]
        assert types(log).count("tool/result") == 4
        assert result == await agent.fold(result.message_id)
        assert result.finish_reason == "completed"


@pytest.mark.contract("RUN-04")
async def test_every_script_run_twice_leaves_the_same_log(database: str) -> None:
    """What an engine may do with each of them, done with all of them."""

    class Twice(StoreWrapper):
        async def write(self, script: Any, *args: Any, **kwargs: Any) -> Any:
            await self.inner.write(script, *args, **kwargs)
            return await self.inner.write(script, *args, **kwargs)

    model = scripted(
        calling("look", "write"), {"error": {"status": 500}}, "one", calling("look"), then="echo"
    )
    tools = [PlainTool("look"), PlainTool("write", exclusive=True)]
    limits = Limits(model_retry_first_ms=1)
    logs: list[list[str]] = []
    for wrap in (Twice, None):
        async with opened(database, model, tools=tools, wrap=wrap, limits=limits) as room:
            name = f"session_{len(logs)}"
            agent = await room.session(name)
            await bounded(agent.run("first"))
            await bounded(agent.run("second"))
            await agent.inject("third")
            await agent.cancel()
            log = await log_of(room, name)
            assert audit(log) == []
            logs.append(types(log))
    assert logs[0] == logs[1]
    assert in_order(["model/retry", "agent/idle", "agent/idle", "inbox/cancelled"], logs[0])
