"""Tools to test a turn with: one that answers at once, and one whose answers the test gives."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import msgspec

from postroom.domain.event import ToolSpec
from postroom.errors import ToolFailure
from postroom.ports.tool import Effects, ToolContext, ToolOutput

Answer: TypeAlias = ToolOutput | str
_ANYTHING = msgspec.Raw(b'{"type":"object","properties":{}}')


class PlainTool:
    """A tool made of a function of its arguments, which may be asynchronous.

    What the function returns goes to the turn loop as it is, except that a text becomes a
    `ToolOutput`; what it raises comes out of the tool.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[dict[str, object]], Answer | Awaitable[Answer]] = lambda _: "done",
        *,
        exclusive: bool = False,
        effects: Effects = "none",
        timeout_ms: int | None = None,
    ) -> None:
        self._spec = ToolSpec(name, f"the tool {name}", _ANYTHING)
        self._function = function
        self._exclusive = exclusive
        self._effects: Effects = effects
        self._timeout_ms = timeout_ms

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    @property
    def exclusive(self) -> bool:
        return self._exclusive

    @property
    def effects(self) -> Effects:
        return self._effects

    @property
    def timeout_ms(self) -> int | None:
        return self._timeout_ms

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        output = self._function(arguments)
        if inspect.isawaitable(output):
            output = await output
        return ToolOutput(output) if isinstance(output, str) else output


class Called:
    """One call under way. ``stopped`` is set when it was cancelled."""

    def __init__(self, ctx: ToolContext, arguments: dict[str, object]) -> None:
        self.ctx = ctx
        self.arguments = arguments
        self.stopped = asyncio.Event()
        self.result: asyncio.Future[ToolOutput] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        """Whether an answer still counts."""
        return not self.result.done()

    def answer(self, text: str = "done") -> None:
        self.result.set_result(ToolOutput(text))

    def fail(self, text: str) -> None:
        """Answers with an error for the model."""
        self.result.set_exception(ToolFailure(text))


class PuppetTool(PlainTool):
    """A tool that a test plays by hand. ``calls`` holds every call there was, in order.

    ``stubborn`` is how many cancels of a call it ignores before it stops.
    """

    def __init__(
        self,
        name: str = "look",
        *,
        exclusive: bool = False,
        effects: Effects = "none",
        timeout_ms: int | None = None,
        stubborn: int = 0,
    ) -> None:
        super().__init__(name, exclusive=exclusive, effects=effects, timeout_ms=timeout_ms)
        self.calls: list[Called] = []
        self._stubborn = stubborn
        self._untaken: asyncio.Queue[Called] = asyncio.Queue()

    @property
    def open(self) -> list[Called]:
        """The calls that wait for an answer, oldest first."""
        return [called for called in self.calls if called.open]

    async def called(self) -> Called:
        """The next call that was not handed out yet; waits for it."""
        return await self._untaken.get()

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        called = Called(ctx, arguments)
        self.calls.append(called)
        self._untaken.put_nowait(called)
        ignored = 0
        while True:
            try:
                return await asyncio.shield(called.result)
            except asyncio.CancelledError:
                if called.result.done():
                    return called.result.result()
                called.stopped.set()
                if ignored >= self._stubborn:
                    called.result.cancel()
                    raise
                ignored += 1
