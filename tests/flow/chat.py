"""A chat in a test: a channel that answers at once, and a person who talks on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from postroom.app import Room, one_core, open_room
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.ids import CoreId
from postroom.domain.message import Text
from postroom.domain.outbox import CannotTell, SendOutcome, Sent, Verdict
from postroom.flow.inbound import Access, Connected
from postroom.ports.channel import Accepted, Inbound, OutPart, Profile, Sender, Sink
from postroom.ports.model import Model
from postroom.ports.tool import Tool
from tests.flow.support import core_of
from tests.support import bounded

NAME = "loopback"


class Chat:
    """``parts`` are those sent, in order; `answer` replaces what the platform says."""

    def __init__(self, profile: Profile | None = None, *, first: int = 1) -> None:
        self.name = NAME
        self.profile = profile or Profile()
        self.parts: list[OutPart] = []
        self.typed = 0
        self._sink: asyncio.Future[Sink] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()
        self._events = first - 1

    async def run(self, sink: Sink) -> None:
        if not self._sink.done():
            self._sink.set_result(sink)
        await asyncio.Event().wait()

    async def send(self, part: OutPart) -> SendOutcome:
        self.parts.append(part)
        self._news.set()
        return Sent(f"m{len(self.parts)}")

    async def reconcile(self, part: OutPart) -> Verdict:
        return CannotTell()

    async def typing(self, conversation: ConversationKey) -> None:
        self.typed += 1

    async def aclose(self) -> None:
        pass

    # ---- the person ----

    async def say(self, text: str, *, who: str = "ann", **more: Any) -> Accepted:
        self._events += 1
        inbound = Inbound(
            channel=NAME,
            conversation=conversation_key("loopback", "dm", who),
            sender=Sender(id=who, name=who.title()),
            content=(Text(text),),
            dedupe=f"event-{self._events}",
            **more,
        )
        return await bounded((await bounded(self._sink))(inbound))

    @property
    def seen(self) -> list[str]:
        return [part.text for part in self.parts]

    async def sees(self, count: int) -> list[str]:
        """The texts, once there are so many."""

        async def there() -> None:
            while len(self.parts) < count:
                self._news.clear()
                await self._news.wait()

        await bounded(there())
        return self.seen


@contextlib.asynccontextmanager
async def chatting(
    database: str,
    chat: Chat,
    *models: Model,
    tools: Iterable[Tool] = (),
    senders: frozenset[str] | None = None,
    drain_ms: int = 0,
    core: dict[str, Any] | None = None,
    cwd: str | None = None,
    **more: Any,
) -> AsyncGenerator[Room]:
    """A room with this chat connected. ``senders`` None: everybody may talk."""
    access = Access(everyone=True) if senders is None else Access(senders)
    room = open_room(
        one_core(core_of(*models, tools=tools, **(core or {}))),
        database=database,
        channels={NAME: chat},
        connected={NAME: Connected(CoreId("default"), access, cwd)},
        drain_ms=drain_ms,
        **more,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(lambda *error: bounded(room.__aexit__(*error)))
        yield await room.__aenter__()
