"""This client as a session's route: what is delivered to it, and what its person is asked.

The latest binding of a session hears what the server sends to it. A binding is the client's: on a new
connection it is bound again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from postroom.client.callbacks import Callback, ask, log
from postroom.client.connection import Connection
from postroom.errors import PostroomError
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.room import Room

DELIVERIES_HELD_MAX = 1000


class Binding:
    """``async with session.bind(…)``, or ``await session.bind(…)`` and `aclose`.

    ``on_delivery`` hears each part that is delivered, in order. ``on_approval`` answers True, False,
    or None: not decided here. ``on_question`` answers with a text, or None. Each may be asynchronous;
    one that raises denies, or answers nothing.
    """

    def __init__(
        self,
        room: Room,
        session_id: str,
        on_delivery: Callback[said.DeliveryNote, None] | None,
        on_approval: Callback[said.ApprovalRequest, bool | None] | None,
        on_question: Callback[said.UserPrompt, str | None] | None,
    ) -> None:
        self.session_id = session_id
        self._room = room
        self._on_delivery = on_delivery
        self._on_approval = on_approval
        self._on_question = on_question
        self._bound: tuple[Connection, str] | None = None
        self._parts: deque[said.DeliveryNote] = deque()
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> Binding:
        """Binds it; what is delivered from now on comes here."""
        self._room.bindings.append(self)
        try:
            await self._room.over(self.restore, again=True)
        except BaseException:
            self._room.bindings.remove(self)
            raise
        return self

    async def restore(self, connection: Connection) -> None:
        """Binds it on this connection, if it is not."""
        if self._bound is None or self._bound[0] is not connection:
            asked = said.SessionBind(self.session_id)
            answer = await connection.call("session/bind", asked, said.Bound)
            self._bound = (connection, answer.token)

    async def aclose(self) -> None:
        """Gives the route back to whoever had it before. Idempotent."""
        if self not in self._room.bindings:
            return
        self._room.bindings.remove(self)
        if self._bound is not None and not self._bound[0].lost and not self._room.closed:
            connection, token = self._bound
            with contextlib.suppress(PostroomError):
                await connection.call("session/unbind", said.SessionUnbind(token), said.Done)

    def __await__(self) -> Generator[object, None, Binding]:
        return self.open().__await__()

    async def __aenter__(self) -> Binding:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- what the server says ----

    def deliver(self, note: said.DeliveryNote) -> None:
        if self._on_delivery is None:
            return
        if len(self._parts) >= DELIVERIES_HELD_MAX:
            log.warning("on_delivery of %s is too slow: one part was dropped", self.session_id)
            return
        self._parts.append(note)
        if self._telling is None or self._telling.done():
            self._telling = self._room.spawn(self._tell(self._on_delivery))

    async def _tell(self, callback: Callback[said.DeliveryNote, None]) -> None:
        while self._parts:
            await ask(callback, self._parts.popleft(), None)

    async def approve(self, request: said.ApprovalRequest) -> bool | None:
        return None if self._on_approval is None else await ask(self._on_approval, request, False)

    async def answer(self, prompt: said.UserPrompt) -> str | None:
        return None if self._on_question is None else await ask(self._on_question, prompt, None)
