"""Anything in any order: a machine that does what clients, models, tools and faults do.

Hypothesis chooses what happens next among all that can; after each choice everything is let run
until nothing moves, and then the log must be sound. The same choices give the same log, so a failure
can be repeated. Time stands still except where the machine moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postroom import mint
from postroom.app import Room, one_core, open_room
from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.event import Event
from postroom.domain.ids import MessageId
from postroom.domain.run import interval
from postroom.errors import CommitUncertain, NotCommitted, QueueFull, StoreClosed
from postroom.flow.agent import Agent
from postroom.ports.policy import Admit, Reject, Verdict
from postroom.scripts.log import read_events
from postroom.stores.artifacts import LocalArtifacts
from postroom.testing import (
    FaultyStore,
    ManualClock,
    MemoryStore,
    PuppetModel,
    PuppetTool,
    ScheduledStore,
    Scheduler,
)
from tests.flow.audit import audit, outcomes
from tests.flow.support import SESSION, core_of, of

LIMITS = Limits(
    pending_messages_max=6,
    tools_at_once_max=2,
    model_retries_max=2,
    recovery_attempts_max=1,
    turn_steps_max=4,
)
DRIVER = (
    "begin_turn",
    "record_reply",
    "start_calls",
    "record_results",
    "next_step",
    "record_retry",
    "finish_turn",
    "claim_drive",
)


async def judge(_: Any, batch: tuple[Any, ...]) -> Verdict:
    """Refuses what says so."""
    refused = tuple(m.id for m in batch if m.content[0].text.startswith("refuse"))
    return Reject("as it asks", refused) if refused else Admit()


class Life(RuleBasedStateMachine):
    """One session's life. ``judged`` decides whether a policy stands before each turn."""

    judged = False

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.number = 0
        self.told: dict[MessageId, str] = {}

    # ---- the machinery ----

    def do(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    @initialize()
    def open(self) -> None:
        self.do(self._open())

    async def _open(self) -> None:
        self.base = MemoryStore(clock=self.clock)
        await self._start()

    async def _start(self) -> None:
        self.model = PuppetModel()
        self.look = PuppetTool("look")
        self.write = PuppetTool("write", exclusive=True)
        self.scheduler = Scheduler(lambda _: 0)
        self.store = MemoryStore(clock=self.clock, beside=self.base)
        self.faults = FaultyStore(ScheduledStore(self.store, self.scheduler))
        core = core_of(
            self.model, tools=[self.look, self.write], policy=judge if self.judged else None
        )
        self.opened = open_room(
            one_core(core),
            database="unused",
            store=self.faults,
            artifacts=LocalArtifacts(Path("unused")),
            clock=self.clock,
            limits=LIMITS,
            drain_ms=0,
        )
        self.room: Room = await self.opened.__aenter__()
        self.agent: Agent = await self.room.session(SESSION)
        await self.scheduler.still()

    async def _stop(self) -> None:
        await self.opened.__aexit__(None, None, None)
        await self.store.aclose()

    async def _log(self) -> list[Event]:
        return await self.base.read(read_events, self.agent.session_id, 0, 100_000)

    @property
    def log(self) -> list[Event]:
        return self.do(self._log())

    @property
    def sleeps(self) -> bool:
        return bool(self.clock._sleepers)

    # ---- clients ----

    @rule(
        operation=st.sampled_from(["followup", "steer", "inject"]),
        fault=st.sampled_from([None, None, None, None, "refuse", "lose", "vanish"]),
        refused=st.booleans(),
    )
    def queue(self, operation: str, fault: str | None, refused: bool) -> None:
        self.number += 1
        text = f"{'refuse' if refused and self.judged else operation} {self.number}"
        self.do(self._queue(operation, fault, text))

    async def _queue(self, operation: str, fault: str | None, text: str) -> None:
        name = mint.message_id()
        match fault:
            case "refuse":
                self.faults.refuse()
            case "lose":
                self.faults.lose()
            case "vanish":
                self.faults.lose(written=False)
            case _:
                pass
        send = getattr(self.agent, operation)
        try:
            await send(text, message_id=name)
        except QueueFull:
            self.told[name] = "refused"
        except NotCommitted:
            self.told[name] = "refused"
            assert fault == "refuse"
        except CommitUncertain:
            assert fault in ("lose", "vanish")
            try:
                await send(text, message_id=name)
            except QueueFull:
                self.told[name] = "refused"
            else:
                self.told[name] = "queued"
        else:
            self.told[name] = "queued"
        self.faults.clear()
        await self.scheduler.still()

    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        names = [info.message.id for info in self.do(self.agent.inbox())]
        name = data.draw(st.sampled_from([*names, *list(self.told)[-2:], MessageId("msg_none")]))
        remove = data.draw(st.booleans())
        pending = name in names
        if remove:
            assert self.do(self.agent.remove(name)) is pending
        else:
            self.number += 1
            new = self.do(self.agent.replace(name, f"edited {self.number}"))
            assert (new is not None) is pending
            if new is not None:
                self.told[new] = "queued"
        self.do(self.scheduler.still())

    @rule(keep_inbox=st.booleans(), cause=st.sampled_from(["user", "parent", "disposed"]))
    def cancel(self, keep_inbox: bool, cause: Any) -> None:
        open_before = self._turn_open()
        self.do(self._cancel(keep_inbox, cause))
        if not self.sleeps:
            # Nothing is in the way of a cancel but a store that does not answer.
            assert self.model.open == [] or not open_before or self._turn_open()
        if not keep_inbox:
            assert [i for i in self.do(self.agent.inbox())] == []

    async def _cancel(self, keep_inbox: bool, cause: Any) -> None:
        await self.agent.cancel(cause, keep_inbox=keep_inbox)
        await self.scheduler.still()

    def _turn_open(self) -> bool:
        log = self.log
        return len(of(log, e.TurnStart)) > len(of(log, e.TurnEnd))

    # ---- the model and the tools ----

    @precondition(lambda self: self.model.open)
    @rule(
        how=st.sampled_from(["say", "say", "stream", "empty", "length", "refuse"]),
    )
    def answers(self, how: str) -> None:
        asked = self.model.open[0]
        match how:
            case "say":
                asked.say(f"answer {asked.request.number}")
            case "stream":
                asked.stream(f"piece {asked.request.number} ")
            case "empty":
                asked.reply()
            case "length":
                asked.say("cut", finish="length")
            case _:
                asked.say("", finish="content_filter")
        self.do(self.scheduler.still())

    @precondition(lambda self: self.model.open)
    @rule(
        tools=st.lists(st.sampled_from(["look", "write", "unknown"]), min_size=1, max_size=4),
        cut=st.sampled_from([False, False, False, True]),
    )
    def calls(self, tools: list[str], cut: bool) -> None:
        self.model.open[0].call(*tools, finish="length" if cut else "tool_calls")
        self.do(self.scheduler.still())

    @precondition(lambda self: self.model.open)
    @rule(kind=st.sampled_from(["rate_limit", "server", "timeout", "auth", "quota"]))
    def fails(self, kind: Any) -> None:
        self.model.open[0].fail(kind)
        self.do(self.scheduler.still())

    @precondition(lambda self: self.look.open or self.write.open)
    @rule(data=st.data(), ok=st.booleans())
    def tool_ends(self, data: st.DataObject, ok: bool) -> None:
        called = data.draw(st.sampled_from([*self.look.open, *self.write.open]), label="call")
        if ok:
            called.answer("seen")
        else:
            called.fail("not seen")
        self.do(self.scheduler.still())

    # ---- time and faults ----

    @precondition(lambda self: self.sleeps)
    @rule()
    def time_passes(self) -> None:
        self.do(self._time_passes())

    async def _time_passes(self) -> None:
        self.clock.advance(await self.clock.sleeping())
        await self.scheduler.still()

    @rule(
        script=st.sampled_from(DRIVER), written=st.booleans(), times=st.sampled_from([1, 1, 2, 4])
    )
    def an_answer_will_be_lost(self, script: str, written: bool, times: int) -> None:
        self.faults.lose(script, times=times, written=written)

    @rule()
    def closes_and_opens_again(self) -> None:
        self.do(self._stop())
        self.do(self._start())

    @rule()
    def is_killed_and_starts_again(self) -> None:
        """Nothing more is written, nothing is given back: an open turn costs an attempt."""
        self.faults.stop_after(0)
        self.do(self._stop())
        self.do(self._start())

    # ---- what is always true ----

    @invariant()
    def the_log_is_sound(self) -> None:
        if not hasattr(self, "room"):
            return
        log = self.log
        assert audit(log, at_rest=False) == []
        self._nothing_is_parked(log)
        self._everybody_was_told_the_truth(log)

    def _nothing_is_parked(self, log: list[Event]) -> None:
        """Who is not idle waits for the model, for a tool, or for time: never for nobody."""
        status = self.do(self.agent.status())
        if status == "running":
            waits_for = [*self.model.open, *self.look.open, *self.write.open]
            assert waits_for or self.sleeps, "the agent is parked"
        else:
            assert not any(info.wakes for info in self.do(self.agent.inbox()))

    def _everybody_was_told_the_truth(self, log: list[Event]) -> None:
        ended = outcomes(log)
        for name, told in self.told.items():
            assert (name in ended) is (told == "queued"), (name, told)
        pending = {info.message.id for info in self.do(self.agent.inbox())}
        assert pending == {name for name, how in ended.items() if how == "pending"}

    # ---- the end ----

    def teardown(self) -> None:
        try:
            if hasattr(self, "room"):
                self.do(self._settle())
        finally:
            with contextlib.suppress(StoreClosed):
                self.do(self._stop())
            self.runner.close()

    async def _settle(self) -> None:
        """Answers everything: the agent becomes idle, and each message has ended in one fact."""
        self.faults.clear()
        for _ in range(200):
            for asked in self.model.open:
                asked.say("at last")
            for called in [*self.look.open, *self.write.open]:
                called.answer("at last")
            await self.scheduler.still()
            if self.sleeps:
                await self._time_passes()
            if await self.agent.status() == "idle":
                break
        log = await self._log()
        assert audit(log) == []
        ended = outcomes(log)
        waiting = [info.wakes for info in await self.agent.inbox()]
        assert not any(waiting)
        assert sum(how == "pending" for how in ended.values()) == len(waiting)
        for name, told in self.told.items():
            if told == "queued":
                run = await self.agent.fold(name)
                assert run.events == interval(log, name)


class JudgedLife(Life):
    judged = True


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_a_session_stays_sound_whatever_happens() -> None:
    run_state_machine_as_test(Life, settings=SETTINGS)


def test_a_session_with_a_policy_stays_sound_whatever_happens() -> None:
    run_state_machine_as_test(JudgedLife, settings=SETTINGS)
