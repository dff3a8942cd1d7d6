"""Postroom: a durable runtime for AI agents.

The public names, each loaded when it is first asked for, so that ``import postroom`` costs nothing::

    async with postroom.open_room(cores) as room:
        agent = await room.session("notes")
        result = await agent.run("Hello")

`postroom.errors` holds the exceptions, `postroom.testing` the parts to test with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postroom.app import Room, one_core, open_room
    from postroom.client import connect, connect_sync
    from postroom.config import Limits
    from postroom.cores import builtin_cores
    from postroom.domain.run import RunResult
    from postroom.errors import PostroomError
    from postroom.flow.agent import Agent
    from postroom.flow.core import Core

__version__ = "0.1.0.dev0"

__all__ = [
    "Agent",
    "Core",
    "Limits",
    "PostroomError",
    "Room",
    "RunResult",
    "__version__",
    "builtin_cores",
    "connect",
    "connect_sync",
    "one_core",
    "open_room",
]

_HOMES = {
    "Agent": "postroom.flow.agent",
    "Core": "postroom.flow.core",
    "Limits": "postroom.config",
    "PostroomError": "postroom.errors",
    "Room": "postroom.app",
    "RunResult": "postroom.domain.run",
    "builtin_cores": "postroom.cores",
    "connect": "postroom.client",
    "connect_sync": "postroom.client",
    "one_core": "postroom.app",
    "open_room": "postroom.app",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'postroom' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
