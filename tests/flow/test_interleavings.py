"""Every order in which what a client does and what the driver does can happen.

The tests let the named awaits of the driver and of the client go on one at a time, in each order
there is (`postroom.testing.every_schedule`), and look at the log afterwards. All orders of a test
share one database, a session each. It is in memory, where no thread decides anything; one test runs
the same over the real engine.

A path is how the turn is opened: *claimed* in the transaction of the receipt, *plain* by a driver
that claims first, *judged* by one that asks a policy, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from postroom import mint
from postroom.app import Room, one_core, open_room, open_store
from postroom.domain import event as e
from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.errors import StoreClosed
from postroom.flow.agent import Agent
from postroom.ports.model import DeltaSink, Model, ModelRequest, Reply
from postroom.ports.policy import Admit, Policy, Verdict
from postroom.ports.store import Store
from postroom.ports.tool import Tool
from postroom.scripts import inbox as scripts
from postroom.stores.artifacts import LocalArtifacts
from postroom.testing import (
    MemoryStore,
    PlainTool,
    PuppetModel,
    ScheduledModel,
    ScheduledStore,
    ScheduledTool,
    Scheduler,
    calling,
    every_schedule,
    random_schedules,
    scripted,
)
from tests.flow.audit import audit, outcomes
from tests.flow.support import core_of, ends, entered, idle, log_of, of, types
from tests.support import bounded

PATHS = ("claimed", "plain", "judged")


def _first(_: int) -> int:
    return 0


async def admit(_: SessionId, batch: object) -> Verdict:
    return Admit()


class Scene:
    """One order: a room over the scheduled store, and a session of its own."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        model: Model,
        *,
        tools: tuple[Tool, ...] = (),
        path: str = "claimed",
        policy: Policy | None = None,
        pauses: bool = True,
        drive: bool | None = None,
        name: str | None = None,
    ) -> None:
        reads = ("peek_turn", "peek_step")
        self.scheduler = scheduler
        self.path = path
        self.name = name or mint.session_id()
        core = core_of(
            ScheduledModel(model, scheduler),
            tools=[ScheduledTool(tool, scheduler) for tool in tools],
            policy=policy or (admit if path == "judged" else None),
        )
        self._room = open_room(
            one_core(core),
            database="unused",
            store=ScheduledStore(store, scheduler, reads=reads, pauses=pauses),
            artifacts=LocalArtifacts(Path("unused")),
            drive=path == "claimed" if drive is None else drive,
            drain_ms=0,
        )

    async def __aenter__(self) -> Scene:
        self.room: Room = await self._room.__aenter__()
        agent = await self.room.session(self.name)
        # An agent that knows no core claims nothing in the receipt's transaction.
        self.agent = self.room.agent(agent.session_id) if self.path == "plain" else agent
        return self

    async def start(self) -> None:
        """Begins to drive, where ``drive`` was False."""
        self.room.supervisor.start()

    async def first(self, text: str) -> Coroutine[Any, Any, object]:
        """Queues a message so that all that follows from it is in the scheduler's hand.

        The answer is to be run with what else happens.
        """
        if self.path == "claimed":
            return self.agent.followup(text)
        await self.agent.followup(text)
        return self.start()

    async def __aexit__(self, *error: Any) -> None:
        await bounded(self._room.__aexit__(*error))

    async def log(self) -> list[Event]:
        return await log_of(self.room, self.name)

    async def run(self, *acts: Coroutine[Any, Any, object]) -> None:
        """Lets all this happen in the scheduler's order, until the agent has nothing to do."""
        await bounded(self.scheduler.run(*acts))

    async def sound(self) -> list[Event]:
        """The log, looked at; the agent is idle."""
        log = await self.log()
        assert audit(log) == [], self.scheduler.trail
        assert await self.agent.status() == "idle", self.scheduler.trail
        return log


def with_a_tool() -> Model:
    """A turn of two steps, with a tool between them; later turns echo."""
    return scripted(calling("look", text="let me see"), "one", then="echo")


# ---- a steer is never parked ----


@pytest.mark.contract("INB-05")
@pytest.mark.parametrize("path", PATHS)
async def test_a_steer_in_any_order_with_the_driver_joins_or_opens_a_turn(path: str) -> None:
    """C-11: also between the last "is anything pending?" and idle."""
    count = 0
    seen: set[tuple[int, int]] = set()
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=1_000):
            count += 1
            tools = (PlainTool("look"),)
            async with Scene(store, scheduler, with_a_tool(), tools=tools, path=path) as scene:
                await scene.run(await scene.first("first"), scene.agent.steer("steer"))
                log = await scene.sound()
                assert set(outcomes(log).values()) == {"entered"}, scheduler.trail
                turn, step = next(where[:2] for where in entered(log) if where[2] == "steer")
                assert ends(log) == ["completed"] * turn or turn == 1
                seen.add((turn, step))
    # It came before, with, between and after: the orders reach all of these.
    assert {(1, 1), (1, 2), (2, 1)} <= seen
    assert count > 100


@pytest.mark.contract("INB-05")
async def test_a_steer_in_any_order_with_the_driver_over_the_real_engine(database: str) -> None:
    async with contextlib.aclosing(await open_store(database)) as store:
        for scheduler in every_schedule(limit=100):
            model = scripted(then="echo")
            async with Scene(store, scheduler, model, pauses=False) as scene:
                await scene.run(await scene.first("first"), scene.agent.steer("steer"))
                log = await scene.sound()
                assert set(outcomes(log).values()) == {"entered"}, scheduler.trail


@pytest.mark.contract("INB-05")
@pytest.mark.parametrize("path", PATHS)
async def test_two_steers_and_the_end_of_a_turn_in_any_order(path: str) -> None:
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=3_000):
            model = scripted(then="echo")
            async with Scene(store, scheduler, model, path=path, pauses=False) as scene:
                await scene.run(
                    await scene.first("first"),
                    scene.agent.steer("steer 1"),
                    scene.agent.steer("steer 2"),
                )
                log = await scene.sound()
                assert set(outcomes(log).values()) == {"entered"}, scheduler.trail


@pytest.mark.contract("INB-05", "INB-11")
async def test_a_thousand_random_orders_leave_nothing_parked() -> None:
    """C-11: one seed, one thousand orders; a failing one shows its trail."""
    async with contextlib.aclosing(MemoryStore()) as store:
        for number, scheduler in enumerate(random_schedules(1_000, seed=11)):
            # Every fourth turn has a tool; the way it is opened changes with each.
            model = with_a_tool() if number % 4 == 0 else scripted(then="echo")
            tools = (PlainTool("look"),)
            path = PATHS[number % len(PATHS)]
            async with Scene(store, scheduler, model, tools=tools, path=path, drive=True) as scene:
                agent = scene.agent
                acts = [agent.steer("steer 1"), agent.inject("inject")]
                acts += [agent.followup("follow")] if number % 2 else [agent.steer("steer 2")]
                await scene.run(*acts)
                log = await scene.sound()
                ended = outcomes(log)
                left = [info.message.id for info in await agent.inbox()]
                assert {m for m, how in ended.items() if how != "entered"} == set(left)
                # Only an inject may wait, and only if no step came after it.
                assert len(left) <= 1
                assert types(log).count("agent/idle") == types(log).count("agent/running")


# ---- an edit or the claim wins ----


class Held:
    """Answers the first request when it is told to; the others at once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    @property
    def ref(self) -> str:
        return self._model.ref

    @property
    def window(self) -> int | None:
        return None

    @property
    def accepts(self) -> frozenset[str]:
        return frozenset()

    def render(self, request: ModelRequest) -> bytes:
        return self._model.render(request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        if not self.go.is_set():
            self.asked.set()
            await self.go.wait()
        return await self._model.respond(request, on_delta)

    async def aclose(self) -> None:
        pass


@pytest.mark.contract("INB-08")
@pytest.mark.parametrize("path", ["claimed", "judged"])
@pytest.mark.parametrize("edit", ["remove", "replace"])
@pytest.mark.parametrize("operation", ["followup", "steer"])
async def test_an_edit_and_the_claim_in_any_order_one_wins_and_the_loser_is_told(
    path: str, edit: str, operation: str
) -> None:
    won: set[bool] = set()
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=500):
            model = Held(with_a_tool())
            tools = (PlainTool("look"),)
            async with Scene(store, scheduler, model, tools=tools, path=path, drive=True) as scene:
                agent, name = scene.agent, mint.message_id()
                await agent.followup("first")
                await bounded(model.asked.wait())
                await agent.queue("edit me", operation, message_id=name)  # type: ignore[arg-type]
                answers: list[object] = []

                async def editing(
                    agent: Agent = agent, name: Any = name, answers: list[object] = answers
                ) -> None:
                    done = agent.remove(name) if edit == "remove" else agent.replace(name, "new")
                    answers.append(await done)

                model.go.set()
                await scene.run(editing())
                log = await scene.sound()
                texts = [text for _, _, text in entered(log)]
                told = bool(answers[0])
                won.add(told)
                assert ("edit me" in texts) is not told, scheduler.trail
                assert ("new" in texts) is (told and edit == "replace"), scheduler.trail
                assert outcomes(log)[name] == (
                    "entered" if not told else "cancelled" if edit == "remove" else "replaced"
                )
    assert won == {True, False}


# ---- a cancel is never lost and reaches no later turn ----


@pytest.mark.contract("CAN-09")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep_inbox", [True, False], ids=["keep", "empty"])
async def test_a_cancel_in_any_order_with_the_driver_ends_the_open_turn_and_no_other(
    path: str, keep_inbox: bool
) -> None:
    """C-80: also in the moment of the receipt, before the driver has begun."""
    reached: set[str] = set()
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=1_000):
            tools = (PlainTool("look"),)
            async with Scene(store, scheduler, with_a_tool(), tools=tools, path=path) as scene:
                heads: list[int] = []
                await scene.run(
                    await scene.first("first"), cancelling(scene, heads, keep_inbox=keep_inbox)
                )
                log = await scene.sound()
                cancels = of(log, e.TurnCancel)
                before = log[: heads[0]]
                opened = len(of(before, e.TurnStart)) > len(of(before, e.TurnEnd)) or bool(cancels)
                assert bool(cancels) is opened, scheduler.trail
                if cancels:
                    assert ends(log) == ["cancelled"], scheduler.trail
                    after = scheduler.trail[scheduler.trail.index("cancel") :]
                    # Nothing slow goes on, and nothing slow begins.
                    assert not {"model", "model answers", "look"} & set(after), after
                if keep_inbox:
                    assert "cancelled" not in outcomes(log).values(), scheduler.trail
                reached.add(next(iter(ends(log)), "never began"))
                await scene.agent.followup("later")
                await idle(scene.agent)
                assert ends(await scene.sound())[-1] == "completed", scheduler.trail
    assert {"completed", "cancelled"} <= reached
    if not keep_inbox and path != "claimed":
        assert "never began" in reached


async def cancelling(scene: Scene, heads: list[int], *, keep_inbox: bool = False) -> None:
    """Cancels, and notes how far the log had come with it."""
    heads.append(
        await scene.room.store.write(
            scripts.cancel,
            SessionId(scene.name),
            "user",
            keep_inbox=keep_inbox,
            ref=mint.claim_token(),
        )
    )


@pytest.mark.contract("CAN-09", "CAN-03")
@pytest.mark.parametrize("path", ["claimed", "judged"])
async def test_a_cancel_and_a_message_after_it_in_any_order_with_the_driver(path: str) -> None:
    """C-84: what is queued after the cancel runs, whatever the driver was doing."""
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=3_000):
            tools = (PlainTool("look"),)
            async with Scene(
                store, scheduler, with_a_tool(), tools=tools, path=path, pauses=False
            ) as scene:
                name = mint.message_id()

                async def stop_and_ask(agent: Agent = scene.agent, name: Any = name) -> None:
                    await agent.cancel()
                    await agent.followup("after", message_id=name)

                await scene.run(await scene.first("first"), stop_and_ask())
                log = await scene.sound()
                assert outcomes(log)[name] == "entered", scheduler.trail
                turn = next(turn for turn, _, text in entered(log) if text == "after")
                assert ends(log)[turn - 1] == "completed", scheduler.trail


@pytest.mark.contract("CAN-09")
@pytest.mark.parametrize("keep_inbox", [True, False], ids=["keep", "empty"])
async def test_a_cancel_in_any_order_with_a_recovery_is_not_lost(keep_inbox: bool) -> None:
    """Between the take-over, the recovery turn and its end there is no gap to fall into."""
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=1_000):
            name = mint.session_id()
            puppet = PuppetModel()
            async with Scene(store, Scheduler(_first), puppet, name=name) as scene:
                await scene.agent.followup("first")
                await bounded(puppet.asked())
            model = scripted("unused", "recovered", then="echo")
            async with Scene(store, scheduler, model, name=name, drive=False) as scene:
                heads: list[int] = []
                await scene.run(scene.start(), cancelling(scene, heads, keep_inbox=keep_inbox))
                log = await scene.sound()
                cancelled = of(log, e.TurnCancel)
                recovered = ends(log) == ["interrupted", "completed"]
                assert len(cancelled) == (0 if recovered else 1), scheduler.trail
                if recovered:  # then it had ended before the cancel came
                    assert heads[0] == len(log), scheduler.trail
                else:
                    # Closed as cancelled itself; or interrupted, and then nothing more was owed;
                    # or in its recovery turn.
                    assert ends(log) in (
                        ["cancelled"],
                        ["interrupted"],
                        ["interrupted", "cancelled"],
                    ), scheduler.trail


# ---- closing at any moment ----


@pytest.mark.contract("CAN-08")
@pytest.mark.parametrize("path", PATHS)
async def test_a_close_in_any_order_with_the_driver_gives_the_drive_back_and_loses_nothing(
    path: str,
) -> None:
    """What an orderly close leaves unfinished costs no attempt and goes on at the next start."""
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=2_000):
            name = mint.session_id()
            tools = (PlainTool("look"),)
            async with Scene(
                store, scheduler, with_a_tool(), tools=tools, path=path, name=name, pauses=False
            ) as scene:
                kept: list[str] = []
                await scene.run(
                    sending(await scene.first("first"), "first", kept),
                    closing(scene),
                    sending(scene.agent.steer("steer"), "steer", kept),
                )
            async with Scene(
                store, Scheduler(_first), with_a_tool(), tools=tools, name=name
            ) as scene:
                await idle(scene.agent)
                log = await scene.sound()
                assert set(kept) <= {text for *_, text in entered(log)}, scheduler.trail
                assert set(outcomes(log).values()) <= {"entered"}, scheduler.trail
                attempts = [end.reason.attempt for end in of(log, e.TurnEnd)]
                assert not any(attempts), scheduler.trail


@pytest.mark.contract("CAN-08")
async def test_a_close_between_the_end_of_one_driver_and_the_claim_for_the_next() -> None:
    """A claim made in the moment in which the driver before it ends is given back, too."""
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=2_000):
            name = mint.session_id()
            held = Held(scripted(then="echo"))
            async with Scene(store, scheduler, held, name=name) as scene:
                agent = scene.agent
                await agent.followup("first")
                await bounded(held.asked.wait())
                held.go.set()
                kept: list[str] = []
                await scene.run(sending(agent.followup("second"), "second", kept), closing(scene))
            async with Scene(store, Scheduler(_first), scripted(then="echo"), name=name) as scene:
                await idle(scene.agent)
                log = await scene.sound()
                assert {"first", *kept} <= {text for *_, text in entered(log)}, scheduler.trail
                assert set(outcomes(log).values()) == {"entered"}, scheduler.trail
                assert not any(end.reason.attempt for end in of(log, e.TurnEnd)), scheduler.trail


async def sending(message: Coroutine[Any, Any, object], text: str, kept: list[str]) -> None:
    """Sends, and notes it if that was acknowledged; a closing room may refuse."""
    with contextlib.suppress(StoreClosed):
        await message
        kept.append(text)


async def closing(scene: Scene) -> None:
    await scene.scheduler.gate("close")
    await scene.room.aclose(drain_ms=0)


# ---- two nodes: one is taken for dead and knows of nothing ----


@pytest.mark.contract("INB-17")
async def test_a_zombie_and_its_successor_in_any_order_write_one_sound_log() -> None:
    """C-138: whatever the old owner had in hand when another took over, one of them writes it."""
    interrupted = 0
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in every_schedule(limit=3_000):
            interrupted += await _succession(store, scheduler, scripted("x", "y", then="echo"))
    assert interrupted


@pytest.mark.contract("INB-17")
async def test_a_zombie_with_tools_and_its_successor_in_random_orders() -> None:
    interrupted = 0
    async with contextlib.aclosing(MemoryStore()) as store:
        for scheduler in random_schedules(150, seed=138):
            model = scripted(calling("look", "look"), "a", calling("look"), then="echo")
            interrupted += await _succession(store, scheduler, model, PlainTool("look"))
    assert interrupted


async def _succession(store: MemoryStore, scheduler: Scheduler, model: Model, *tools: Tool) -> int:
    """A node is taken for dead at any moment; how many turns its successor closed."""
    name = mint.session_id()
    async with (
        contextlib.aclosing(MemoryStore(beside=store)) as first,
        contextlib.aclosing(MemoryStore(beside=store)) as second,
        Scene(first, scheduler, model, tools=tools, path="plain", name=name, pauses=False) as old,
        Scene(second, scheduler, model, tools=tools, path="plain", name=name, pauses=False) as new,
    ):
        await old.agent.followup("first")

        async def succeed() -> None:
            await scheduler.gate("lapse")
            first.lapse()
            await new.start()

        await old.run(old.start(), succeed())
        log = await new.sound()
        assert set(outcomes(log).values()) == {"entered"}, scheduler.trail
        assert ends(log)[-1] == "completed", scheduler.trail
        assert set(ends(log)[:-1]) <= {"interrupted"}, scheduler.trail
        return len(ends(log)) - 1


@pytest.mark.contract("INB-17")
@pytest.mark.parametrize("path", ["claimed", "plain"])
async def test_a_node_whose_lease_is_over_claims_nothing(path: str) -> None:
    """It may still queue: a producer needs no claim. Another node does the work."""
    async with (
        contextlib.aclosing(MemoryStore()) as first,
        contextlib.aclosing(MemoryStore(beside=first)) as second,
    ):
        old_model, new_model = PuppetModel("puppet:old"), PuppetModel("puppet:new")
        scheduler = Scheduler(_first)
        async with (
            Scene(first, scheduler, old_model, path=path, drive=True) as old,
            Scene(second, scheduler, new_model, name=old.name, drive=True) as new,
        ):
            first.lapse()
            await old.agent.followup("hello")
            (await bounded(new_model.asked())).say("hi")
            await idle(new.agent)
            assert old_model.asks == []
            assert ends(await new.sound()) == ["completed"]
