"""The Python SDK: one client over three transports, speaking the same protocol over each.

::

    async with postroom.connect(database="notes.db", model="scripted:echo") as room:
        session = await room.session("notes")
        receipt = await session.prompt("Hello")     # it is durably queued, and that is all
        result = await session.run("And now?")      # owns the interval to the next idle

`connect` chooses the transport by its arguments; `connect_sync` is its synchronous twin. The errors
are those of `postroom.errors`, whichever transport they came over.
"""

from postroom.client.binding import Binding
from postroom.client.connect import connect, connect_sync
from postroom.client.room import Room
from postroom.client.session import Session
from postroom.client.sync import SyncRoom, SyncSession
from postroom.domain.event import Event
from postroom.domain.run import RunResult

__all__ = [
    "Binding",
    "Event",
    "Room",
    "RunResult",
    "Session",
    "SyncRoom",
    "SyncSession",
    "connect",
    "connect_sync",
]
