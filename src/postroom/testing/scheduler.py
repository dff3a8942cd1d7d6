"""Decides in which order things happen, one at a time, so that a test can try every order.

A part that takes part stops at a *gate*, which has a name. `Scheduler.run` waits until nothing
moves any more, lets one of those that stand at a gate go on, and so forth until all is done::

    for scheduler in every_schedule(limit=500):
        room = Room(ScheduledStore(store, scheduler), …)
        …                                   # what comes before: no gate stops it
        await scheduler.run(agent.steer("now"))
        …                                   # what must be true after any order

`every_schedule` runs the body once for each order there is, depth first; `random_schedules` for so
many that a seed decides. A store's write has two gates: before its commit, and between the commit
and the moment in which its caller hears of it. Nothing is timed, so a schedule can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Generator, Iterator, Sized
from typing import Concatenate, ParamSpec, TypeVar

from postroom.domain.event import ToolSpec
from postroom.errors import ModelError
from postroom.ports.model import DeltaSink, Model, ModelRequest, Reply
from postroom.ports.store import Store, Tx
from postroom.ports.tool import Effects, Tool, ToolContext, ToolOutput
from postroom.testing.store import StoreWrapper, name_of

P = ParamSpec("P")
R = TypeVar("R")

# More turns of the event loop than any chain of tasks that wake each other needs.
_STILL = 25


class Scheduler:
    """``choose`` picks one of n things that could go on, by number from 0.

    ``trail`` names what went on, in order; a failing test shows it. Outside of `run` the gates
    stand open.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.trail: list[str] = []
        self._choose = choose
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._running = False
        self._working = 0
        self._moved = asyncio.Event()

    async def gate(self, name: str) -> None:
        """Stands until it is this one's turn."""
        if not self._running:
            return
        place = (name, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place[1]
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    @contextlib.contextmanager
    def working(self) -> Generator[None]:
        """While something real is under way in another thread: nobody is let go meanwhile."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._moved.set()

    async def run(self, *those: Awaitable[object]) -> None:
        """Lets one at a time go on until all of ``those`` are done and nobody stands at a gate.

        Raises:
            AssertionError: nothing can go on, and not all is done. Whatever one of ``those``
                raised is raised here.
        """
        tasks = [asyncio.ensure_future(each) for each in those]
        self._running = True
        try:
            while True:
                await self.still()
                if self._waiting:
                    count = len(self._waiting)
                    name, place = self._waiting.pop(self._choose(count) if count > 1 else 0)
                    self.trail.append(name)
                    place.set_result(None)
                elif all(task.done() for task in tasks):
                    break
                else:
                    raise AssertionError(f"nothing can go on after {self.trail}")
        finally:
            self._running = False
            for _, place in self._waiting:
                if not place.done():
                    place.set_result(None)
            self._waiting.clear()
            for task in tasks:
                task.cancel()
        for task in tasks:
            task.result()

    async def still(self) -> None:
        """Returns when nothing moves: no task has anything to do but wait."""
        # What the loop is about to run; one that does not show it is given many turns instead.
        ready: Sized | None = getattr(asyncio.get_running_loop(), "_ready", None)
        quiet = 0
        while quiet < (_STILL if ready is None else 2):
            await asyncio.sleep(0)
            quiet = 0 if ready else quiet + 1
            while self._working:
                quiet = 0
                self._moved.clear()
                await self._moved.wait()


def every_schedule(limit: int) -> Iterator[Scheduler]:
    """A scheduler for each order there is.

    Raises:
        AssertionError: there are more than ``limit``; a test says how many it expects at most,
            so that it does not grow unseen.
    """
    plan: list[int] = []
    for _ in range(limit):
        taken: list[tuple[int, int]] = []

        def choose(count: int, plan: list[int] = plan, taken: list[tuple[int, int]] = taken) -> int:
            pick = plan[len(taken)] if len(taken) < len(plan) else 0
            assert pick < count, "the same choices led elsewhere: the scenario is not repeatable"
            taken.append((pick, count))
            return pick

        yield Scheduler(choose)
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        plan = [pick for pick, _ in taken]
        plan[-1] += 1
    raise AssertionError(f"there are more than {limit} schedules")


def random_schedules(count: int, seed: int) -> Iterator[Scheduler]:
    """So many schedulers; the seed decides what they do."""
    source = random.Random(seed)
    for _ in range(count):
        yield Scheduler(random.Random(source.getrandbits(64)).randrange)


class ScheduledStore(StoreWrapper):
    """Every write waits at ``NAME`` before its commit and at ``NAME answers`` after it.

    ``reads`` lists the reading scripts that wait likewise; the others go through. ``pauses``
    False leaves out the second gate, where there would be too many orders.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        *,
        reads: tuple[str, ...] = (),
        pauses: bool = True,
        closes: bool = False,
    ) -> None:
        super().__init__(store, closes=closes)
        self._scheduler = scheduler
        self._reads = reads
        self._pauses = pauses

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        name = name_of(script)
        await self._scheduler.gate(name)
        with self._scheduler.working():
            answer = await super().write(script, *args, **kwargs)
        if self._pauses:
            await self._scheduler.gate(f"{name} answers")
        return answer

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        name = name_of(script)
        gated = name in self._reads
        if gated:
            await self._scheduler.gate(name)
        with self._scheduler.working():
            answer = await super().read(script, *args, **kwargs)
        if gated and self._pauses:
            await self._scheduler.gate(f"{name} answers")
        return answer


class ScheduledModel:
    """A model that waits at ``model`` before its deltas and at ``model answers`` (``fails``) after."""

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        self._model = model
        self._scheduler = scheduler

    @property
    def ref(self) -> str:
        return self._model.ref

    @property
    def window(self) -> int | None:
        return self._model.window

    @property
    def accepts(self) -> frozenset[str]:
        return self._model.accepts

    def render(self, request: ModelRequest) -> bytes:
        return self._model.render(request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        await self._scheduler.gate("model")
        try:
            reply = await self._model.respond(request, on_delta)
        except ModelError:
            await self._scheduler.gate("model fails")
            raise
        await self._scheduler.gate("model answers")
        return reply

    async def aclose(self) -> None:
        await self._model.aclose()


class ScheduledTool:
    """A tool that waits at its own name before it does anything."""

    def __init__(self, tool: Tool, scheduler: Scheduler) -> None:
        self._tool = tool
        self._scheduler = scheduler

    @property
    def spec(self) -> ToolSpec:
        return self._tool.spec

    @property
    def exclusive(self) -> bool:
        return self._tool.exclusive

    @property
    def effects(self) -> Effects:
        return self._tool.effects

    @property
    def timeout_ms(self) -> int | None:
        return self._tool.timeout_ms

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        await self._scheduler.gate(self._tool.spec.name)
        return await self._tool.call(ctx, arguments)
