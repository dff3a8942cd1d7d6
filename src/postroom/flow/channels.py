"""Runs channels: each in a task of its own, started again alone, with backoff, when it fails.

It also shows in a chat that the agent works there. Neither ever stops another channel, a session,
or the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

import msgspec

from postroom.domain.event import AgentIdle, AgentRunning, Event
from postroom.domain.ids import SessionId
from postroom.ports.channel import Channel, Sink
from postroom.ports.clock import Clock
from postroom.ports.store import Store
from postroom.scripts.routes import ToConversation, session_address

log = logging.getLogger("postroom.channels")

_AGAIN_MS = (1_000, 5_000, 15_000, 60_000, 300_000)
_TYPING_EVERY_MS = 4_000
_CLOSE_S = 5.0


class Health(msgspec.Struct, rename="camel"):
    """How a channel fares. ``state``: ``running``, ``resting`` (failed, tried again), ``ended``."""

    state: str = "running"
    failures: int = 0
    error: str | None = None


class Channels:
    """The channels of one process."""

    def __init__(
        self, channels: Mapping[str, Channel], sink: Sink, store: Store, clock: Clock
    ) -> None:
        self._channels = channels
        self._sink = sink
        self._store = store
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._typing: dict[SessionId, asyncio.Task[None]] = {}
        self.health: dict[str, Health] = {name: Health() for name in channels}
        self._subscription = store.subscribe(None, self._on_events)

    def start(self) -> None:
        for name, channel in self._channels.items():
            self._tasks[name] = asyncio.create_task(self._run(channel), name=f"channel {name}")

    async def _run(self, channel: Channel) -> None:
        health = self.health[channel.name]
        while True:
            try:
                health.state = "running"
                await channel.run(self._sink)
                health.state = "ended"
                return
            except Exception as error:
                log.warning("channel %s failed: %s: %s", channel.name, type(error).__name__, error)
                health.state = "resting"
                health.error = f"{type(error).__name__}: {error}"
                pause = _AGAIN_MS[min(health.failures, len(_AGAIN_MS) - 1)]
                health.failures += 1
                await self._clock.sleep_ms(pause)

    # ---- typing ----

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.type == AgentRunning.TYPE and event.session_id not in self._typing:
                self._typing[event.session_id] = asyncio.ensure_future(
                    self._show_work(event.session_id)
                )
            elif event.type == AgentIdle.TYPE:
                task = self._typing.pop(event.session_id, None)
                if task is not None:
                    task.cancel()

    async def _show_work(self, session_id: SessionId) -> None:
        with contextlib.suppress(Exception):
            while True:
                address = await self._store.read(session_address, session_id)
                if not isinstance(address, ToConversation):
                    return
                channel = self._channels.get(address.channel)
                if channel is None:
                    return
                await channel.typing(address.conversation)
                await self._clock.sleep_ms(_TYPING_EVERY_MS)

    # ---- ending ----

    async def stop_receiving(self) -> None:
        """Takes nothing more in; what was taken is on disk."""
        self._subscription.close()
        tasks = {*self._tasks.values(), *self._typing.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    async def aclose(self) -> None:
        for channel in self._channels.values():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await channel.aclose()
            except Exception:
                log.exception("channel %s could not be closed", channel.name)
