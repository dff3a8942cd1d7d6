"""A client's view of one session: its events from a seq on, then live, without a gap or a repeat.

It holds no event. While the client reads, what is committed is sent in the moment it is told; while
it does not, nothing is kept, and what it missed is read from the log by the page once there is room.
A client that has fallen far behind is told from where (`session.lagged`), and asks again itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    Event,
    InboxCancelled,
    InboxQueued,
    InboxRejected,
    UserMessage,
)
from postroom.domain.ids import SessionId
from postroom.errors import StoreError, UnknownSession
from postroom.flow.live import Live, LiveHub
from postroom.ports.store import Store
from postroom.scripts.attach import read_page, standing
from postroom.wire.protocol import Lagged, SessionDelta, SessionStatus, Status
from postroom.wire.rpc import Wire

# So many events may be waiting for a client that was up to date, before it is told that it lags.
LAG_EVENTS_MAX = 1000
# Live tokens are dropped while more than this is queued towards the client.
DELTA_BYTES_HIGH = 64 * 1024

PAGE_EVENTS = 500
PAGE_CHARS = 1024 * 1024

_PENDING = {
    InboxQueued.TYPE: 1,
    InboxRejected.TYPE: -1,
    InboxCancelled.TYPE: -1,
    UserMessage.TYPE: -1,
}
_STATUS: dict[str, Status] = {AgentRunning.TYPE: "running", AgentIdle.TYPE: "idle"}
_encode = msgspec.json.Encoder().encode


class Subscription:
    """``tells_status``: whether this one says `session.status`, where a connection has several."""

    def __init__(
        self,
        number: int,
        session_id: SessionId,
        wire: Wire,
        store: Store,
        live: LiveHub,
        *,
        after: int,
        types: frozenset[str] | None,
        deltas: bool,
        tells_status: Callable[[], bool],
        on_end: Callable[[], None],
        lag_events_max: int = LAG_EVENTS_MAX,
    ) -> None:
        self.number = number
        self.session_id = session_id
        self._wire = wire
        self._store = store
        self._types = types
        self._tells_status = tells_status
        self._on_end = on_end
        self._lag_events_max = lag_events_max
        self._cursor = after
        self._newest = after
        self._up_to_date = False
        self._was_up_to_date = False
        self._standing: tuple[Status, int, int] | None = None
        self._counted_from: int | None = None
        self._pending = 0
        self._news = asyncio.Event()
        self._prefix = b'{"subscription":%d,"event":' % number
        self._subscription = store.subscribe(session_id, self._heard)
        self._unwatch = live.watch(session_id, self._delta) if deltas else None
        self._task = asyncio.ensure_future(self._run())

    def close(self) -> None:
        """Nothing of it is sent from now on. Idempotent."""
        self._subscription.close()
        if self._unwatch is not None:
            self._unwatch()
        self._task.cancel()

    # ---- live ----

    def _heard(self, events: Sequence[Event]) -> None:
        for event in events:
            self._newest = max(self._newest, event.seq)
            if self._up_to_date and event.seq == self._cursor + 1 and not self._wire.pressed:
                self._send(event)
            elif event.seq > self._cursor:
                self._up_to_date = False
                self._news.set()

    def _delta(self, live: Live) -> None:
        # Where no event is wanted there is none that a token must not overtake.
        in_step = self._up_to_date or self._types == frozenset()
        if not in_step or self._wire.queued_bytes > DELTA_BYTES_HIGH:
            return
        delta = SessionDelta(
            live.session_id, live.turn, live.step, live.kind, live.text, live.name, live.call_id
        )
        self._wire.notify("session.delta", _encode(delta))

    # ---- from the log ----

    async def _run(self) -> None:
        with contextlib.suppress(StoreError, UnknownSession):
            while not self._wire.over:
                if not self._up_to_date:
                    if not await self._catch_up():
                        break
                else:
                    self._news.clear()
                    await self._news.wait()
        self.close()
        self._on_end()

    async def _catch_up(self) -> bool:
        """Sends what the log has and the client has not; False: that is too much, it was told."""
        while True:
            await self._wire.room()
            if self._was_up_to_date and self._newest - self._cursor > self._lag_events_max:
                self._wire.notify(
                    "session.lagged",
                    _encode(Lagged(self.session_id, self.number, self._cursor + 1)),
                )
                return False
            page, more = await self._store.read(
                read_page, self.session_id, self._cursor, PAGE_EVENTS, PAGE_CHARS
            )
            for event in page:
                if self._wire.pressed:
                    break
                self._send(event)
            else:
                if more:
                    continue
                if self._counted_from is None:
                    self._standing = await self._store.read(standing, self.session_id)
                    _, self._counted_from, self._pending = self._standing
                    self._newest = max(self._newest, self._counted_from)
                if self._newest <= self._cursor:
                    self._say_standing()
                    self._up_to_date = self._was_up_to_date = True
                    return True

    # ---- what is said ----

    def _send(self, event: Event) -> None:
        self._cursor = event.seq
        if self._types is None or event.type in self._types:
            self._wire.notify("session.event", self._prefix + event.to_json().encode() + b"}")
        if self._counted_from is None or event.seq <= self._counted_from:
            return
        self._say_standing()
        self._pending += _PENDING.get(event.type, 0)
        status = _STATUS.get(event.type)
        if status is not None:
            self._say_status(status, event.seq, self._pending)

    def _say_standing(self) -> None:
        if self._standing is not None:
            status, seq, pending = self._standing
            self._standing = None
            self._say_status(status, seq, pending)

    def _say_status(self, status: Status, seq: int, pending: int) -> None:
        if self._tells_status():
            said = SessionStatus(self.session_id, status, seq, pending)
            self._wire.notify("session.status", _encode(said))
