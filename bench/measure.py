"""One measurement in a process of its own: ``python -m bench.measure TASK``.

``TASK`` is a `bench.figures.Task` as JSON. The first line of standard output is the figures as JSON;
where a profile was asked for it follows.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec

from bench import counting, figures
from bench.figures import Figures, Task


def _measurement(name: str) -> Callable[[Task], Awaitable[Figures]]:
    """Each imports no more than it needs, so that its memory is its own."""
    if name in ("latency", "many"):
        from bench import commits

        return getattr(commits, name)
    if name in ("turns", "history", "opening", "requests"):
        from bench import turns

        return getattr(turns, name)
    if name in ("deliveries", "outbox_size"):
        from bench import deliveries

        return getattr(deliveries, name)
    if name in ("active", "active_floor", "idle"):
        from bench import memory

        return getattr(memory, name)
    if name == "whole":
        from bench import process

        return process.whole
    raise ValueError(f"there is no measurement {name!r}")


def main(argument: str) -> None:
    task = msgspec.json.decode(argument, type=Task)
    counting.install()
    if task.profile and task.name == "whole":
        from bench.process import imports

        print("{}")
        print(imports(task))
    elif task.profile:
        from bench.profiling import Profile

        profile = Profile()
        figures.profiled = profile.running
        print(msgspec.json.encode(asyncio.run(_run(task))).decode())
        print(profile.text())
    else:
        print(msgspec.json.encode(asyncio.run(_run(task))).decode())


async def _run(task: Task) -> Figures:
    return await _measurement(task.name)(task)


if __name__ == "__main__":
    main(sys.argv[1])
