"""How the tests of the turn loop open a room and look at what happened in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from postroom.app import Room, one_core, open_room, open_store
from postroom.config import Limits
from postroom.domain.event import (
    AssistantReply,
    Event,
    EventData,
    InboxQueued,
    ToolResult,
    TurnEnd,
    UserMessage,
)
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.message import text_of
from postroom.flow.agent import Agent
from postroom.flow.core import Core
from postroom.ports.clock import Clock
from postroom.ports.model import Model
from postroom.ports.policy import Policy
from postroom.ports.store import Store
from postroom.ports.tool import Tool
from postroom.scripts.log import read_events
from tests.support import bounded

E = TypeVar("E", bound=EventData)

SESSION = "session_one"


def core_of(
    *models: Model, tools: Iterable[Tool] = (), policy: Policy | None = None, **more: Any
) -> Core:
    return Core(
        id=CoreId("default"),
        revision="test-1",
        models=models,
        persona="You are being tested.",
        tools={tool.spec.name: tool for tool in tools},
        policy=policy,
        **more,
    )


@contextlib.asynccontextmanager
async def opened(
    database: str,
    *models: Model,
    tools: Iterable[Tool] = (),
    policy: Policy | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    wrap: Callable[[Store], Store] | None = None,
    drive: bool = True,
    drain_ms: int = 0,
    **more: Any,
) -> AsyncGenerator[Room]:
    """A room with one core. ``wrap`` puts a store of the test's over the real one.

    Leaving it does not wait for an open turn (``drain_ms`` 0), and is itself bounded.
    """
    core = core_of(*models, tools=tools, policy=policy, **more)
    store = await open_store(database, clock=clock, limits=limits)
    room = open_room(
        one_core(core),
        database=database,
        store=wrap(store) if wrap is not None else store,
        clock=clock,
        limits=limits,
        drive=drive,
        drain_ms=drain_ms,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(lambda *error: bounded(room.__aexit__(*error)))
        yield await room.__aenter__()


async def log_of(room: Room, session_id: str = SESSION, after: int = 0) -> list[Event]:
    """The session's whole log."""
    return await room.store.read(read_events, SessionId(session_id), after, 100_000)


async def seen(
    agent: Agent, kind: type[E], *, after: int = 0, where: Callable[[E], bool] = lambda _: True
) -> Event:
    """The first committed event of this kind; waits for it, bounded."""

    async def first() -> Event:
        async with contextlib.aclosing(agent.events(after)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event.data, kind) and where(event.data):
                    return event
        raise AssertionError("the stream of events ended")

    return await bounded(first())


def of(events: Iterable[Event], kind: type[E]) -> list[E]:
    """The data of the events of one kind, in order."""
    return [event.data for event in events if isinstance(event.data, kind)]


def types(events: Iterable[Event]) -> list[str]:
    return [event.type for event in events]


def said(events: Iterable[Event]) -> list[str]:
    """The assistant's texts."""
    return [text_of(data.message.content) for data in of(events, AssistantReply)]


def ends(events: Iterable[Event]) -> list[str]:
    """The kinds of the turns' ends."""
    return [data.reason.kind for data in of(events, TurnEnd)]


def queued(events: Iterable[Event]) -> list[str]:
    return [text_of(data.message.content) for data in of(events, InboxQueued)]


def entered(events: Iterable[Event]) -> list[tuple[int, int, str]]:
    """``(turn, step, text)`` of each message that entered."""
    return [
        (data.turn, data.step, text_of(data.message.content)) for data in of(events, UserMessage)
    ]


def results(events: Iterable[Event]) -> list[tuple[str, str]]:
    """``(outcome, text)`` of each tool result."""
    return [(data.outcome, text_of(data.content)) for data in of(events, ToolResult)]


async def pending(agent: Agent) -> list[str]:
    return [text_of(info.message.content) for info in await agent.inbox()]


async def idle(*agents: Agent) -> None:
    """Returns when all are idle; bounded."""
    for agent in agents:
        await bounded(agent.when_idle())


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
    """Returns once the condition holds, for what nobody announces (a lease, say)."""

    async def look() -> None:
        while not await condition():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)

    await bounded(look(), seconds)


async def moved() -> None:
    """Lets everything that only the event loop has to move go as far as it gets."""
    for _ in range(100):
        await asyncio.sleep(0)


async def waits(agent: Agent, count: int) -> None:
    """Returns once so many messages are pending."""

    async def there() -> bool:
        return len(await agent.inbox()) >= count

    await until(there)


def in_order(wanted: Sequence[str], got: Sequence[str]) -> bool:
    """Whether the wanted stand in ``got`` in this order, others between them allowed."""
    rest = iter(got)
    return all(any(each == item for item in rest) for each in wanted)
