"""How a long command ends: told by a signal, and whole, also where a tool refuses to be stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine

_LAST_CHANCE_S = 0.5


class Signals:
    """SIGINT and SIGTERM: the first asks to stop, a second ends the process at once.

    Made inside the running loop. ``number`` is the signal that came (None: none did).
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._came, number)

    def _came(self, number: signal.Signals) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        self.stop.set()


async def to_the_end(work: Coroutine[None, None, int]) -> int:
    """The exit code of a command's work.

    Leaves also when a tool refuses to be stopped: the interpreter would wait for it for ever.
    """
    code = await work
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left and (await asyncio.wait(left, timeout=_LAST_CHANCE_S))[1]:
        # Everything of ours is closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
