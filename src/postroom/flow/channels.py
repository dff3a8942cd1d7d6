"""Runs channels: each in a task of its own, started again alone, with backoff, when it fails.

It also shows in a chat that the agent works there, and forgets what no platform repeats any more.
None of it ever stops another channel, a session, or the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

import msgspec

from postroom.domain.event import AgentIdle, AgentRunning, Event, TurnStart
from postroom.domain.ids import SessionId
from postroom.errors import ConfigError, StoreError
from postroom.ports.channel import Channel, Sink
from postroom.ports.clock import Clock
from postroom.ports.store import Store, Subscription
from postroom.scripts.inbound import forget_old
from postroom.scripts.routes import ToConversation, session_address

log = logging.getLogger("postroom.channels")

_WORKS = (AgentRunning.TYPE, TurnStart.TYPE)  # an interrupted session's next owner hears the latter

_AGAIN_MS = (1_000, 5_000, 15_000, 60_000, 300_000)
_WELL_AFTER_MS = 600_000
_TYPING_EVERY_MS = 4_000
_FORGET_EVERY_MS = 6 * 3_600_000
_CLOSE_S = 5.0


class Health(msgspec.Struct, rename="camel"):
    """How a channel fares.

    ``state``: ``waiting`` (not started), ``running``, ``resting`` (failed, will be tried again),
    ``ended``. ``failures`` are those in a row: a channel that ran for ten minutes starts from none.
    ``error`` is the last one.
    """

    state: str = "waiting"
    failures: int = 0
    error: str | None = None


class Channels:
    """The channels of one process, by name. ``kept_ms``: for how long a handled event is known.

    Raises:
        ConfigError: a channel is registered under another name than its own, or its name cannot be
            used.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        sink: Sink,
        store: Store,
        clock: Clock,
        *,
        kept_ms: int,
    ) -> None:
        for name, channel in channels.items():
            if not name or name != channel.name or any(c.isspace() for c in name):
                raise ConfigError(f"{name!r} is no name for the channel {channel.name!r}")
        self._channels = channels
        self._sink = sink
        self._store = store
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._typing: dict[SessionId, asyncio.Task[None]] = {}
        self._kept_ms = kept_ms
        self._forgetting: asyncio.Task[None] | None = None
        self._subscription: Subscription | None = None
        self.health: dict[str, Health] = {name: Health() for name in channels}

    def start(self) -> None:
        if not self._channels:
            return
        self._subscription = self._store.subscribe(None, self._on_events)
        self._forgetting = asyncio.create_task(self._forget(), name="forget old events")
        for name, channel in self._channels.items():
            self._tasks[name] = asyncio.create_task(self._run(channel), name=f"channel {name}")

    async def _run(self, channel: Channel) -> None:
        health = self.health[channel.name]
        while True:
            since = self._clock.monotonic_ms()
            try:
                health.state = "running"
                await channel.run(self._sink)
                health.state = "ended"
                return
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    raise  # it is us who are stopped; else something of the channel's own was
                log.warning("channel %s failed: %s: %s", channel.name, type(error).__name__, error)
                health.state = "resting"
                health.error = f"{type(error).__name__}: {error}"
                if self._clock.monotonic_ms() - since >= _WELL_AFTER_MS:
                    health.failures = 0
                pause = _AGAIN_MS[min(health.failures, len(_AGAIN_MS) - 1)]
                health.failures += 1
                await self._clock.sleep_ms(pause)

    async def _forget(self) -> None:
        while True:
            try:
                await self._store.write(forget_old, self._clock.now_ms() - self._kept_ms)
            except StoreError as error:
                log.warning("old events were not forgotten: %s", error)
            await self._clock.sleep_ms(_FORGET_EVERY_MS)

    # ---- typing ----

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.type in _WORKS and event.session_id not in self._typing:
                self._typing[event.session_id] = asyncio.ensure_future(
                    self._show_work(event.session_id)
                )
            elif event.type == AgentIdle.TYPE:
                task = self._typing.pop(event.session_id, None)
                if task is not None:
                    task.cancel()

    async def _show_work(self, session_id: SessionId) -> None:
        """Says so again and again until it is cancelled, at the latest when the agent is idle."""
        while True:
            try:
                address = await self._store.read(session_address, session_id)
            except StoreError:
                return
            channel = (
                self._channels.get(address.channel) if isinstance(address, ToConversation) else None
            )
            if channel is None or not isinstance(address, ToConversation):
                return
            with contextlib.suppress(Exception):  # it is a courtesy, and the next one may succeed
                async with asyncio.timeout(_CLOSE_S):
                    await channel.typing(address.conversation)
            await self._clock.sleep_ms(_TYPING_EVERY_MS)

    # ---- ending ----

    async def stop_receiving(self) -> None:
        """Takes nothing more in; what was taken is on disk."""
        if self._subscription is not None:
            self._subscription.close()
        tasks = {*self._tasks.values(), *self._typing.values()}
        if self._forgetting is not None:
            tasks.add(self._forgetting)
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
