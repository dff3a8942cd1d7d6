"""`postroom serve --stdio`: a runtime for the one program that started it.

It speaks the protocol on standard input and output and logs to standard error. It listens on no
address and runs no channel. The end of input, `shutdown`, SIGINT and SIGTERM drain it.
"""

from __future__ import annotations

import asyncio

from postroom.cli.ending import Signals, to_the_end


def serve_one(*, model: str | None, drain_s: float | None, database: str) -> None:
    drain_ms = None if drain_s is None else int(drain_s * 1000)
    asyncio.run(to_the_end(_serve(model, drain_ms, database)))


async def _serve(model: str | None, drain_ms: int | None, database: str) -> int:
    from postroom.app import open_room
    from postroom.cores import builtin_cores
    from postroom.home import environment
    from postroom.server.stdio import serve_stdio

    signals = Signals()
    cores = builtin_cores(model=model, environ=environment())
    async with open_room(cores, database=database, drain_ms=drain_ms) as room:
        await serve_stdio(room, stop=signals.stop, drain_ms=drain_ms)
    return 0
