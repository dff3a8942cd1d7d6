"""The embedded transport: the runtime lives in the client's own event loop, and ends with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from postroom.client.memory import MemoryLink, memory_links
from postroom.errors import Disconnected

if TYPE_CHECKING:
    from postroom.flow.core import Core

# Over the time that open turns may take to end: what must stop does so at its next await.
_MARGIN_S = 10.0


class EmbeddedTransport:
    """``core`` wins over ``model``; with neither the environment decides. ``drain_ms`` None: 20 s."""

    survives = False

    def __init__(
        self,
        *,
        database: str | None,
        model: str | None,
        core: Core | None,
        drain_ms: int | None,
    ) -> None:
        self._database = database
        self._model = model
        self._core = core
        self._drain_ms = drain_ms

    async def open(self) -> EmbeddedRuntime:
        here, there = memory_links()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._run(there, ready))
        try:
            await asyncio.wait({ready, task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=_MARGIN_S)
            raise
        if not ready.done():
            task.result()
        return EmbeddedRuntime(here, task, self._drain_ms)

    async def _run(self, link: MemoryLink, ready: asyncio.Future[None]) -> None:
        from postroom.app import one_core, open_room
        from postroom.cores import builtin_cores
        from postroom.home import environment
        from postroom.server.stdio import serve_link

        if self._core is not None:
            cores = one_core(self._core)
        else:
            cores = builtin_cores(model=self._model, environ=environment())
        drain_ms = self._drain_ms
        try:
            async with open_room(cores, database=self._database, drain_ms=drain_ms) as room:
                ready.set_result(None)
                await serve_link(room, link, drain_ms=drain_ms, kind="embedded")
        finally:
            await link.aclose()


class EmbeddedRuntime:
    def __init__(self, link: MemoryLink, task: asyncio.Task[None], drain_ms: int | None) -> None:
        self._link = link
        self._task = task
        self._drain_ms = drain_ms

    @property
    def link(self) -> MemoryLink:
        return self._link

    async def obituary(self) -> Disconnected:
        failed = (
            self._task.exception() if self._task.done() and not self._task.cancelled() else None
        )
        if failed is not None:
            return Disconnected(f"the runtime has failed: {failed}")
        return Disconnected("the runtime has ended")

    async def aclose(self) -> None:
        from postroom.config import Limits

        drain_ms = Limits().drain_ms if self._drain_ms is None else self._drain_ms
        await asyncio.wait({self._task}, timeout=drain_ms / 1000 + _MARGIN_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_MARGIN_S)
