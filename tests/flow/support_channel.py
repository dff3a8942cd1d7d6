"""Channels, terminals and people for the tests of what comes in and where it goes.

A `Line` is a channel played by hand: people talk on it, it remembers what was sent, and it fails when
it is told to. A `Terminal` is a live route.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from postroom.app import Room, one_core, open_room
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.message import InputBlock, Text
from postroom.domain.outbox import CannotTell, SendOutcome, Sent, Verdict
from postroom.flow.agent import Agent
from postroom.flow.core import Core
from postroom.flow.inbound import Access, Connected
from postroom.ports.channel import Accepted, Inbound, OutPart, Profile, Sender, Sink
from postroom.ports.model import Model
from postroom.ports.route import InteractionOutbound, Question, RouteError
from postroom.scripts.outbox import DeliveryView, list_deliveries
from tests.flow.support import core_of, until
from tests.support import bounded

EVERYBODY = Access(everyone=True)
ANN = Sender(id="ann", name="Ann")
BOB = Sender(id="bob", name="Bob")
_numbers = itertools.count(1)


def dm(who: str = "ann") -> ConversationKey:
    return conversation_key("loopback", "dm", who)


class Heard:
    """What came out at one end, in order; `until` waits for it, bounded."""

    def __init__(self) -> None:
        self.parts: list[OutPart] = []
        self._news = asyncio.Event()

    def take(self, part: OutPart) -> None:
        self.parts.append(part)
        self._news.set()

    @property
    def texts(self) -> list[str]:
        return [part.text for part in self.parts]

    async def until(self, done: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not done():
                self._news.clear()
                await self._news.wait()

        try:
            await bounded(wait())
        except AssertionError as error:
            error.add_note(f"heard {self.texts}")
            raise

    async def hears(self, text: str) -> OutPart:
        """The first part that holds this text."""
        await self.until(lambda: any(text in each for each in self.texts))
        return next(part for part in self.parts if text in part.text)

    async def count(self, count: int) -> list[str]:
        await self.until(lambda: len(self.parts) >= count)
        return self.texts


class Line(Heard):
    """``send_with`` replaces what a send does. ``runs`` counts how often it was started."""

    def __init__(self, name: str = "line", profile: Profile | None = None) -> None:
        super().__init__()
        self.name = name
        self.profile = profile or Profile()
        self.runs = 0
        self.typed: list[ConversationKey] = []
        self.typing_error: Exception | None = None
        self.typing_news = asyncio.Event()
        self.started = asyncio.Event()
        self.closed = False
        self.send_with: Callable[[OutPart], Awaitable[SendOutcome]] | None = None
        self._sink: Sink | None = None
        self._failing: asyncio.Future[None] | None = None

    async def run(self, sink: Sink) -> None:
        self.runs += 1
        self._sink = sink
        self._failing = asyncio.get_running_loop().create_future()
        self.started.set()
        await self._failing

    def fail(self, error: BaseException | None = None) -> None:
        """What receives raises; None: it returns, as one that has nothing to receive."""
        assert self._failing is not None
        self.started.clear()
        if error is None:
            self._failing.set_result(None)
        else:
            self._failing.set_exception(error)

    async def send(self, part: OutPart) -> SendOutcome:
        outcome = await self.send_with(part) if self.send_with is not None else None
        self.take(part)
        return outcome or Sent(f"ref-{len(self.parts)}")

    async def reconcile(self, part: OutPart) -> Verdict:
        return CannotTell()

    async def typing(self, conversation: ConversationKey) -> None:
        self.typed.append(conversation)
        self.typing_news.set()
        if self.typing_error is not None:
            raise self.typing_error

    async def aclose(self) -> None:
        self.closed = True

    # ---- the people ----

    async def sink(self) -> Sink:
        await bounded(self.started.wait())
        assert self._sink is not None
        return self._sink

    async def say(
        self,
        *content: str | InputBlock,
        to: ConversationKey | None = None,
        sender: Sender = ANN,
        dedupe: str | None = None,
        **more: Any,
    ) -> Accepted:
        """Somebody says something; returns when the platform may be told that it was taken."""
        inbound = Inbound(
            channel=self.name,
            conversation=to or dm(),
            sender=sender,
            content=tuple(Text(c) if isinstance(c, str) else c for c in content),
            dedupe=dedupe or f"event-{next(_numbers)}",
            **more,
        )
        return await bounded((await self.sink())(inbound))

    async def asks(self, text: str, **more: Any) -> str:
        """Says something and waits for what is said back next."""
        before = len(self.parts)
        await self.say(text, **more)
        return (await self.count(before + 1))[before]


class Terminal(Heard):
    """A live route. ``deliver_with``, ``answer`` and ``allow`` say what it does when it is used."""

    channel = "terminal"
    profile = Profile()

    def __init__(self, session_id: str) -> None:
        super().__init__()
        self.session_id = SessionId(session_id)
        self.deliver_with: Callable[[OutPart], Awaitable[SendOutcome]] | None = None
        self.answer: Callable[[Question], Awaitable[str | None]] | None = None
        self.allow: Callable[[Question], Awaitable[bool | None]] | None = None
        self.asked: list[Question] = []
        self.asked_news = asyncio.Event()

    async def deliver(self, outbound: InteractionOutbound) -> SendOutcome:
        if outbound.session_id != self.session_id:
            raise RouteError(f"this terminal shows {self.session_id}, not {outbound.session_id}")
        (item,) = outbound.items
        outcome = await self.deliver_with(item.part) if self.deliver_with is not None else None
        self.take(item.part)
        return outcome or Sent(None)

    async def prompt_user(self, prompt: Question) -> str | None:
        self._was_asked(prompt)
        return await self.answer(prompt) if self.answer is not None else None

    async def request_approval(self, request: Question) -> bool | None:
        self._was_asked(request)
        return await self.allow(request) if self.allow is not None else None

    def _was_asked(self, question: Question) -> None:
        self.asked.append(question)
        self.asked_news.set()


async def never() -> Any:
    """Hangs until it is cancelled."""
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def room_with(
    database: str,
    lines: Sequence[Line],
    *models: Model,
    core: Core | None = None,
    access: Access = EVERYBODY,
    connected: dict[str, Connected] | None = None,
    tools: Iterable[Any] = (),
    **more: Any,
) -> AsyncGenerator[Room]:
    """A running room with these channels, all connected to one core."""
    one = core or core_of(*models, tools=tools)
    room = open_room(
        one_core(one),
        database=database,
        channels={line.name: line for line in lines},
        connected=connected or {line.name: Connected(CoreId("default"), access) for line in lines},
        **{"drain_ms": 0, **more},
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(lambda *error: bounded(room.__aexit__(*error)))
        yield await room.__aenter__()


def agent_of(room: Room, accepted: Accepted) -> Agent:
    assert accepted.session_id is not None
    return room.agent(accepted.session_id)


async def deliveries(room: Room, session_id: str | None) -> list[DeliveryView]:
    """Oldest first."""
    assert session_id is not None
    found = await room.store.read(list_deliveries, session_id=SessionId(session_id))
    return list(reversed(found))


async def settled(room: Room, session_id: str | None, status: str, count: int = 1) -> None:
    """Returns once so many of the session's deliveries have this status, bounded."""

    async def look() -> bool:
        return [d.status for d in await deliveries(room, session_id)].count(status) >= count

    try:
        await until(look)
    except AssertionError as error:
        found = [(d.status, d.kind) for d in await deliveries(room, session_id)]
        error.add_note(f"deliveries: {found}")
        raise
