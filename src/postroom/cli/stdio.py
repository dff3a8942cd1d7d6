"""`postroom serve --stdio`: a runtime for the one program that started it.

It speaks the protocol on standard input and output and logs to standard error. It listens on no
address and runs no channel. The end of input, `shutdown`, SIGINT and SIGTERM drain it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

_LAST_CHANCE_S = 0.5


def serve_one(*, model: str | None, drain_s: float | None, database: str) -> None:
    asyncio.run(_to_the_end(model, None if drain_s is None else int(drain_s * 1000), database))


async def _to_the_end(model: str | None, drain_ms: int | None, database: str) -> None:
    """Leaves also when a tool refuses to be stopped: the interpreter would wait for it for ever."""
    await _serve(model, drain_ms, database)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left and (await asyncio.wait(left, timeout=_LAST_CHANCE_S))[1]:
        sys.stderr.flush()
        os._exit(0)  # everything of ours is closed by now


async def _serve(model: str | None, drain_ms: int | None, database: str) -> None:
    from postroom.app import open_room
    from postroom.cores import builtin_cores
    from postroom.home import environment
    from postroom.server.stdio import serve_stdio

    stop = asyncio.Event()
    _catch_signals(stop)
    cores = builtin_cores(model=model, environ=environment())
    async with open_room(cores, database=database, drain_ms=drain_ms) as room:
        await serve_stdio(room, stop=stop, drain_ms=drain_ms)


def _catch_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def caught(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)  # asked twice: at once
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, caught, number)
