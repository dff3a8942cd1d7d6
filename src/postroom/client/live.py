"""Live tokens: one subscription a session and connection, however many listen in this client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from postroom.client.callbacks import log
from postroom.client.connection import Connection
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.room import Room

DeltaListener: TypeAlias = Callable[[said.SessionDelta], object]


class Deltas:
    """Listens inside ``async with``. What it hears may be missing pieces: it is for showing."""

    def __init__(self, room: Room, session_id: str, listener: DeltaListener | None) -> None:
        self._room = room
        self._session_id = session_id
        self._listener = listener

    async def __aenter__(self) -> None:
        if self._listener is not None:
            streams = self._room.streams
            stream = streams.setdefault(self._session_id, Stream(self._session_id))
            stream.listeners.append(self._listener)
            try:
                await self._room.over(stream.restore, again=True)
            except BaseException:
                self._leave()
                raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        stream = self._room.streams.get(self._session_id)
        if self._listener is None or stream is None:
            return
        stream.listeners.remove(self._listener)
        if not stream.listeners:
            del self._room.streams[self._session_id]
            if stream.bound is not None:
                self._room.unfollow(*stream.bound)


class Stream:
    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.listeners: list[DeltaListener] = []
        self.bound: tuple[Connection, int] | None = None

    async def restore(self, connection: Connection) -> None:
        """Subscribes on this connection, if it has not; to no event, from the log's end on."""
        if self.bound is not None and self.bound[0] is connection:
            return
        opened = await connection.call(
            "session/open", said.SessionOpen(self.session_id), said.SessionOpened
        )
        asked = said.SessionSubscribe(self.session_id, opened.head_seq, [], deltas=True)
        answer = await connection.call("session/subscribe", asked, said.Subscribed)
        self.bound = (connection, answer.subscription)

    def hear(self, delta: said.SessionDelta) -> None:
        for listener in list(self.listeners):
            try:
                listener(delta)
            except Exception:
                log.exception("on_delta raised")
