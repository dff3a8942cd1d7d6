"""A session's committed events as one stream, across as many connections as it takes.

It knows the last event it gave and asks each new connection for what comes after it, so nothing is
missing and nothing comes twice. A reader that is slow costs bounded memory: what does not fit is let
go, and asked for again once the rest is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from postroom.client.connection import Connection
from postroom.domain.event import Event
from postroom.errors import PostroomError
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.room import Room

HELD_EVENTS_MAX = 2000
HELD_CHARS_MAX = 16 * 1024 * 1024


class Follower:
    """Iterate it inside ``async with``. It ends when the room is closed.

    ``to_head``: it ends with what was there when it began.
    """

    def __init__(self, room: Room, session_id: str, after: int, *, to_head: bool = False) -> None:
        self._room = room
        self._session_id = session_id
        self._given = after
        self._heard = after
        self._held: deque[Event] = deque()
        self._held_chars = 0
        self._connection: Connection | None = None
        self._number: int | None = None
        self._dead: Connection | None = None
        self._news = asyncio.Event()
        self._to_head = to_head
        self._head: int | None = None

    # ---- what the connection says ----

    def hear(self, event: Event) -> None:
        if event.seq <= self._heard:
            return
        full = len(self._held) >= HELD_EVENTS_MAX or self._held_chars > HELD_CHARS_MAX
        if full or event.seq > self._heard + 1:
            self._let_go()
        else:
            self._heard = event.seq
            self._held.append(event)
            self._held_chars += len(event.raw)
            self._news.set()

    def lagged(self) -> None:
        """The server has ended the subscription; what it did not send is asked for again."""
        self._forget()

    def lost(self, connection: Connection) -> None:
        self._forget()
        if not self._room.survives:
            self._dead = connection

    def wake(self) -> None:
        """The room is closed."""
        self._news.set()

    # ---- what the reader asks ----

    async def __aenter__(self) -> Follower:
        self._room.followers.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._room.followers.discard(self)
        self._let_go()

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Event:
        """Raises `Disconnected` where the runtime is gone and takes its sessions with it."""
        while True:
            if self._held:
                event = self._held.popleft()
                self._held_chars -= len(event.raw)
                self._given = event.seq
                return event
            if self._room.closed or (self._head is not None and self._given >= self._head):
                raise StopAsyncIteration
            if self._dead is not None:
                dead, self._dead = self._dead, None
                raise await dead.obituary()
            if self._number is None:
                await self._subscribe()
            else:
                self._news.clear()
                await self._news.wait()

    async def _subscribe(self) -> None:
        async def subscribe(connection: Connection) -> None:
            asked = said.SessionSubscribe(self._session_id, self._given)
            answer = await connection.call("session/subscribe", asked, said.Subscribed)
            # Nothing is awaited since the answer was read: no event of it can have come before.
            self._connection, self._number = connection, answer.subscription
            self._heard = self._given
            self._room.follow(connection, answer.subscription, self)
            if self._to_head and self._head is None:
                self._head = answer.head_seq

        try:
            await self._room.over(subscribe, again=True)
        except PostroomError:
            if not self._room.closed:
                raise

    def _let_go(self) -> None:
        connection, number = self._connection, self._number
        self._forget()
        if connection is not None and number is not None:
            self._room.unfollow(connection, number)

    def _forget(self) -> None:
        self._connection = self._number = None
        self._news.set()


class Noted(msgspec.Struct):
    """`protocol.EventNote` as it is read here: the event as text, decoded when it is looked at."""

    subscription: int
    event: msgspec.Raw
