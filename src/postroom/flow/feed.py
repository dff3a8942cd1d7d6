"""A session's committed events as one stream: from the log, then live, without a gap."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.errors import StoreClosed
from postroom.ports.store import Store, Subscription
from postroom.scripts.log import read_events

T = TypeVar("T")

_PAGE = 500
_BUFFER_MAX = 2000


class Feed:
    """Iterate it once; `close` ends the iteration. A reader that is slow costs bounded memory.

    What does not fit the buffer is read again from the log. It costs nothing before it is iterated.
    ``closing`` ends it, too, when it is done (None: nothing does).
    """

    def __init__(
        self,
        store: Store,
        session_id: SessionId,
        after: int,
        *,
        closing: asyncio.Future[None] | None = None,
    ) -> None:
        self._store = store
        self._session_id = session_id
        self.cursor = after
        self._buffer: deque[Event] = deque(maxlen=_BUFFER_MAX)
        self._news = asyncio.Event()
        self._closed = False
        self._closing = closing
        self._subscription: Subscription | None = None

    def _take(self, events: Sequence[Event]) -> None:
        self._buffer.extend(events)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        if self._subscription is not None:
            self._subscription.close()
        if self._closing is not None:
            self._closing.remove_done_callback(self._close)
        self._news.set()

    def _close(self, _: asyncio.Future[None]) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            if self._closing is not None:
                self._closing.add_done_callback(self._close)
            self._subscription = self._store.subscribe(self._session_id, self._take)
            behind = True
            while not self._closed:
                if behind:
                    page = await self._store.read(read_events, self._session_id, self.cursor, _PAGE)
                    for event in page:
                        self.cursor = event.seq
                        yield event
                    behind = len(page) == _PAGE
                    continue
                self._news.clear()
                while self._buffer:
                    event = self._buffer.popleft()
                    if event.seq <= self.cursor:
                        continue
                    if event.seq > self.cursor + 1:
                        behind = True
                        break
                    self.cursor = event.seq
                    yield event
                if not behind and not self._buffer:
                    await self._news.wait()
        except StoreClosed:
            return
        finally:
            self.close()
