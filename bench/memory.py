"""Memory: with many sessions at work, and what an idle one leaves behind."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from pathlib import Path

import apsw

from bench import rooms
from bench.figures import Figures, Stretch, Task

_AT_ONCE = 50
MIB = 1024 * 1024


def _status(name: str) -> int:
    """A line of the process's own status file, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


async def active(task: Task) -> Figures:
    """The most resident memory of a process whose sessions all work at once."""
    folder = Path(task.folder)
    text = rooms.prompt(task.tools)
    async with rooms.open_bench_room(folder, task.url) as room:
        agents = await asyncio.gather(*[room.session() for _ in range(task.sessions)])
        with room.stretch() as counts:
            until = time.perf_counter() + task.seconds

            async def loop(session: int) -> None:
                while True:
                    await agents[session].run(text)
                    if time.perf_counter() >= until:
                        return

            await asyncio.gather(*map(loop, range(task.sessions)))
        own = await room.synchronous()
    return {"peak": counts.figure(_status("VmHWM") / MIB, own)}


async def active_floor(task: Task) -> Figures:
    """The same for the bare turn loop."""
    from bench.floor import Floor

    floor = Floor(task.url, str(Path(task.folder) / "floor.db"))
    text = rooms.prompt(task.tools)
    with Stretch(lambda: floor.group.commits) as counts:
        until = time.perf_counter() + task.seconds

        async def loop(session: int) -> None:
            while True:
                await floor.turn(session, text)
                if time.perf_counter() >= until:
                    return

        await asyncio.gather(*map(loop, range(task.sessions)))
    level = floor.group.synchronous
    await floor.aclose()
    return {"peak": counts.figure(_status("VmHWM") / MIB, level)}


async def idle(task: Task) -> Figures:
    """How much each further session that has had its turn adds to the process.

    The slope is taken from a third of the sessions to all of them. SQLite's page cache is bounded
    and fills up by the way; it is not counted.
    """
    marks = [sessions // _AT_ONCE * _AT_ONCE for sessions in (task.sessions // 3, task.sessions)]
    sizes: list[int] = []
    async with rooms.open_bench_room(Path(task.folder), task.url) as room:

        async def one(_: int) -> None:
            agent = await room.session()
            await agent.run(rooms.PROMPT)

        with room.stretch() as counts:
            for first in range(0, marks[-1], _AT_ONCE):
                await asyncio.gather(*map(one, range(_AT_ONCE)))
                if first + _AT_ONCE in marks:
                    gc.collect()
                    used, _ = apsw.status(apsw.SQLITE_STATUS_MEMORY_USED)
                    sizes.append(_status("RssAnon") - used)
        own = await room.synchronous()
    slope = (sizes[1] - sizes[0]) / (marks[1] - marks[0])
    return {"idle": counts.figure(slope, own)}
