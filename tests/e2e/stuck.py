"""`postroom` with a core whose tools never return: one in a thread, one that refuses to be stopped.

Run as ``python stuck.py run …``; everything but the core is the real command.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping

from postroom import cores
from postroom.cli.main import main
from postroom.domain.ids import CoreId
from postroom.flow.core import Core, CoreSource
from postroom.models.catalog import open_model
from postroom.tools.registry import Registry, tool


@tool(effects="none")
def blocks() -> str:
    """Blocks its thread for ever."""
    threading.Event().wait()
    return "never"


@tool(effects="none")
async def refuses() -> str:
    """Goes on however often it is cancelled."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def stuck_cores(*, model: str | None, environ: Mapping[str, str], **_: object) -> CoreSource:
    core = Core(
        id=CoreId("default"),
        revision="stuck",
        models=(open_model(model or "scripted:echo", environ),),
        tools=Registry([blocks, refuses]),
    )
    return lambda _: core


if __name__ == "__main__":
    cores.builtin_cores = stuck_cores
    main()
