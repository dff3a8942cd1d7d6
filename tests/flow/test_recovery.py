"""Claims that change hands: what a new owner closes and goes on with, what an old one may not do.

Another node is another room on the same database. Its clock may be ahead: then the first node's
lease is over for it, although the first one is alive and knows of nothing, as one that was stopped
for a while and continued.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from postroom.app import Room
from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.ids import CoreId, SessionId
from postroom.ports.store import Store, Tx
from postroom.scripts.drive import give_back_drive
from postroom.scripts.session import lock_session
from postroom.testing import FaultyStore, ManualClock, PuppetModel, PuppetTool
from tests.flow.audit import audit, outcomes
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
    until,
)
from tests.support import bounded

LEASE_MS = Limits().lease_sqlite_ms


@contextlib.asynccontextmanager
async def successor(database: str, model: PuppetModel, **more: Any) -> AsyncGenerator[Room]:
    """A node for which everybody else's lease is over."""
    clock = ManualClock()
    clock.advance(10 * LEASE_MS)
    async with opened(database, model, clock=clock, **more) as room:
        yield room


# ---- a lease is liveness ----


@pytest.mark.contract("INB-17")
async def test_a_turn_longer_than_the_lease_goes_on_and_nobody_takes_it(database: str) -> None:
    """C-137: a slow but living worker keeps its claim."""
    limits = Limits(lease_sqlite_ms=150)
    mine, theirs = PuppetModel(), PuppetModel()
    async with (
        opened(database, mine, limits=limits) as room,
        opened(database, theirs, limits=limits) as other,
    ):
        agent = await room.session(SESSION)
        await agent.followup("take your time")
        asked = await bounded(mine.asked())
        first = await other.store.read(_lease_of, room.store.node)

        async def long_over() -> bool:
            return await other.store.read(_lease_of, room.store.node) > first + 2 * 150

        await until(long_over)
        asked.say("here I am")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["completed"]
        assert theirs.asks == []


def _lease_of(tx: Tx, node: str) -> int:
    return tx.execute("SELECT expires_at FROM node WHERE id = :id", {"id": node})[0][0]


@pytest.mark.contract("INB-17")
@pytest.mark.parametrize("where", ["model", "tool"])
async def test_a_driver_that_lost_its_claim_writes_nothing_more(database: str, where: str) -> None:
    """C-138: what it still has in hand is refused by the token."""
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        if where == "tool":
            asked.call("look")
            called = await bounded(tool.called())
        other_model = PuppetModel()
        async with successor(database, other_model) as other:
            recovered = await bounded(other_model.asked())
            mark = (await log_of(other))[-1].seq
            if where == "tool":
                assert "unknown" in recovered.texts[-1]
                called.answer("too late")
            else:
                asked.say("too late")
            fence = await other.store.read(_epoch)
            await _driver_gone(room)
            assert types(await log_of(other, after=mark)) == []
            assert await other.store.read(_epoch) == fence
            recovered.say("from the new owner")
            await idle(agent)
            log = await log_of(other)
            assert audit(log) == []
            assert ends(log) == ["interrupted", "completed"]
            assert said(log)[-1] == "from the new owner"
            assert "too late" not in "".join(event.raw for event in log)


def _epoch(tx: Tx) -> list[tuple[Any, ...]]:
    return tx.execute("SELECT status, epoch, token, owner FROM work")


async def _driver_gone(room: Room) -> None:
    await bounded(room.supervisor.wait_drivers(10))


@pytest.mark.contract("INB-17")
async def test_an_old_fence_neither_writes_nor_gives_back(database: str) -> None:
    model = PuppetModel()
    held: list[Any] = []

    class Overheard(FaultyStore):
        async def write(self, script: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await self.inner.write(script, *args, **kwargs)
            if script.__name__ == "queue_and_claim":
                held.append(answer[1].fence)
            return answer

    async with opened(database, model, wrap=Overheard) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(model.asked())
        other_model = PuppetModel()
        async with successor(database, other_model) as other:
            await bounded(other_model.asked())
            session = SessionId(SESSION)
            assert await room.store.write(give_back_drive, session, held[0]) is False
            with pytest.raises(Exception, match="no longer held"):
                await room.store.write(lock_session, session, held[0])
            assert await other.store.read(_epoch) != []


# ---- late results ----


@pytest.mark.contract("REC-04")
@pytest.mark.parametrize("closed_by", ["timeout", "cancel"])
async def test_a_result_after_its_call_was_closed_is_recorded_as_late_and_not_shown(
    database: str, closed_by: str
) -> None:
    model = PuppetModel()
    tool = PuppetTool(stubborn=1, timeout_ms=20 if closed_by == "timeout" else None)
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=20)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        if closed_by == "cancel":
            await agent.followup("next")
            await agent.cancel(keep_inbox=True)
        asked = await bounded(model.asked())
        assert called.stopped.is_set()
        shown = asked.texts
        called.answer("the late answer")
        late = await seen(agent, e.ToolResult, where=lambda data: data.late)
        assert isinstance(late.data, e.ToolResult)
        assert (late.data.turn, late.data.step) == (1, 1)
        assert late.data.call_id == of(await log_of(room), e.ToolCallStarted)[0].call_id
        asked.call("look")
        again = await bounded(tool.called())
        again.answer("in time")
        asked = await bounded(model.asked())
        assert asked.texts[: len(shown)] == shown
        assert "the late answer" not in str(asked.texts)
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        first = "error" if closed_by == "timeout" else "cancelled"
        assert [outcome for outcome, _ in results(log)] == [first, "late", "ok"]
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        await agent.followup("and now?")
        asked = await bounded(_model_of(room).asked())
        assert "the late answer" not in str(asked.texts)


def _model_of(room: Room) -> PuppetModel:
    model = room.cores(CoreId("default")).models[0]
    assert isinstance(model, PuppetModel)
    return model


@pytest.mark.contract("REC-04")
async def test_a_late_result_of_a_stale_claim_stays_out_of_the_log(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool(stubborn=1, timeout_ms=20)
    async with opened(database, model, tools=[tool], limits=Limits(tool_grace_ms=20)) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await bounded(model.asked())
        other_model = PuppetModel()
        async with successor(database, other_model) as other:
            recovered = await bounded(other_model.asked())
            called.answer("from a past life")
            recovered.say("done")
            await idle(agent)
            model.open[0].say("me too")
            await _driver_gone(room)
            log = await log_of(other)
            assert audit(log) == []
            assert [outcome for outcome, _ in results(log)] == ["error"]
            assert "past life" not in "".join(event.raw for event in log)


@pytest.mark.contract("REC-04")
async def test_a_late_result_is_recorded_once_though_its_script_runs_twice(database: str) -> None:
    clock, model = ManualClock(), PuppetModel()
    tool = PuppetTool(stubborn=1, timeout_ms=20)
    faults: list[FaultyStore] = []

    def wrap(store: Store) -> Store:
        faults.append(FaultyStore(store))
        return faults[0]

    limits = Limits(tool_grace_ms=20)
    async with opened(database, model, tools=[tool], limits=limits, clock=clock, wrap=wrap) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        asked = await bounded(model.asked())
        faults[0].lose("record_late", times=2)
        called.answer("late")
        clock.advance(await bounded(clock.sleeping()))
        clock.advance(await bounded(clock.sleeping()))

        async def three() -> bool:
            return faults[0].writes.count("record_late") == 3

        await until(three)
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [outcome for outcome, _ in results(log)] == ["error", "late"]


# ---- recovery ----


@pytest.mark.contract("REC-03")
async def test_calls_that_started_and_calls_that_did_not_are_told_apart(database: str) -> None:
    """C-143: the model is told that a write may be in flight; nothing is pruned."""
    model, look, write = PuppetModel(), PuppetTool(), PuppetTool("write", exclusive=True)
    async with opened(database, model, tools=[look, write]) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        (await bounded(model.asked())).call("look", "look", "write", "look")
        one, _two = await bounded(look.called()), await bounded(look.called())
        one.answer("seen")
        await seen(agent, e.ToolResult)
    model = PuppetModel()
    async with opened(database, model, tools=[look, write]) as room:
        agent = await room.session(SESSION)
        asked = await bounded(model.asked())
        shown = [text.removeprefix("tool: ") for text in asked.texts if text.startswith("tool")]
        assert shown[0] == "seen"
        assert "unknown" in shown[1]
        assert "verify" in shown[1]
        assert all("not started" in text for text in shown[2:])
        asked.say("I see")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert [outcome for outcome, _ in results(log)] == [
            "ok",
            "unknown",
            "not_started",
            "not_started",
        ]


@pytest.mark.contract("REC-02")
async def test_a_recovery_turn_takes_what_steers_and_leaves_the_follow_ups(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(model.asked())
        await agent.followup("next")
        await agent.steer("hurry")
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        asked = await bounded(model.asked())
        assert asked.news == ["hello", "hurry"]
        asked.say("recovered")
        asked = await bounded(model.asked())
        assert asked.news == ["next"]
        asked.say("done")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert entered(log) == [(1, 1, "hello"), (2, 1, "hurry"), (3, 1, "next")]
        assert [start.recovery for start in of(log, e.TurnStart)] == [False, True, False]


@pytest.mark.contract("REC-02")
async def test_interrupted_too_often_the_work_is_given_up_and_the_queue_goes_on(
    database: str,
) -> None:
    limits = Limits(recovery_attempts_max=2)
    async with contextlib.AsyncExitStack() as stack:
        clock = ManualClock()
        room = await stack.enter_async_context(
            opened(database, PuppetModel(), clock=clock, limits=limits)
        )
        agent = await room.session(SESSION)
        await agent.followup("poison")
        await bounded(_model_of(room).asked())
        await agent.followup("next")
        for life in range(1, 4):  # each for which the one before is long dead
            clock = ManualClock()
            clock.advance(10 * life * LEASE_MS)
            room = await stack.enter_async_context(
                opened(database, PuppetModel(), clock=clock, limits=limits)
            )
            asked = await bounded(_model_of(room).asked())
        assert asked.news[-1] == "next"
        asked.say("done")
        agent = await room.session(SESSION)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert ends(log) == ["interrupted", "interrupted", "error", "completed"]
        last = of(log, e.TurnEnd)[2].reason
        assert last.code == "recovery_exhausted"
        assert set(outcomes(log).values()) == {"entered"}


async def test_a_driver_that_gives_up_on_the_store_is_followed_by_another(database: str) -> None:
    """The session is not stuck with it: a new claim closes the turn and goes on."""
    clock, model = ManualClock(), PuppetModel()
    faults: list[FaultyStore] = []

    def wrap(store: Store) -> Store:
        faults.append(FaultyStore(store))
        return faults[0]

    async with opened(database, model, clock=clock, wrap=wrap) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        asked = await bounded(model.asked())
        faults[0].refuse("finish_turn", times=5)
        asked.say("never written")
        for _ in range(4):
            clock.advance(await bounded(clock.sleeping()))
        (await bounded(model.asked())).say("written")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert said(log) == ["written"]
        assert ends(log) == ["interrupted", "completed"]


async def test_a_room_that_only_watches_takes_nothing_over(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("hello")
        await bounded(model.asked())
    async with opened(database, model, drive=False) as room:
        log = await log_of(room)
        for _ in range(20):
            await asyncio.sleep(0)
        assert await log_of(room) == log
