"""Tells those who listen what was committed. It knows nothing of what the events mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.ports.store import EventListener, WorkListener

log = logging.getLogger("postroom.store")

L = TypeVar("L", bound=Callable[..., None])


class _Subscription(Generic[L]):
    __slots__ = ("_among", "_on_empty", "listener")

    def __init__(
        self,
        among: list[_Subscription[L]],
        listener: L,
        on_empty: Callable[[], None] | None = None,
    ) -> None:
        self.listener: L | None = listener
        self._among = among
        self._on_empty = on_empty
        among.append(self)

    def close(self) -> None:
        if self.listener is not None:
            self.listener = None
            self._among.remove(self)
            if not self._among and self._on_empty is not None:
                self._on_empty()


class Hub:
    """Lives on the event loop; every method is called there.

    ``forgotten`` is called with a session that nobody listens to any more (None: nobody listens
    to all of them).
    """

    def __init__(self, forgotten: Callable[[SessionId | None], None] | None = None) -> None:
        self._sessions: dict[SessionId, list[_Subscription[EventListener]]] = {}
        self._all: list[_Subscription[EventListener]] = []
        self._work: list[_Subscription[WorkListener]] = []
        self._lost: list[_Subscription[Callable[[], None]]] = []
        self._forgotten = forgotten

    def listens(self, session_id: SessionId | None) -> bool:
        """Whether somebody subscribed to this session itself (None: to all)."""
        return bool(self._all) if session_id is None else session_id in self._sessions

    def subscribe(
        self, session_id: SessionId | None, listener: EventListener
    ) -> _Subscription[EventListener]:
        listeners = self._all if session_id is None else self._sessions.setdefault(session_id, [])
        return _Subscription(listeners, listener, lambda: self._forget(session_id))

    def _forget(self, session_id: SessionId | None) -> None:
        if session_id is not None and not self._sessions.get(session_id, True):
            del self._sessions[session_id]
        if self._forgotten is not None:
            self._forgotten(session_id)

    def on_work(self, listener: WorkListener) -> _Subscription[WorkListener]:
        return _Subscription(self._work, listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> _Subscription[Callable[[], None]]:
        return _Subscription(self._lost, listener)

    def publish(self, events: Sequence[Event]) -> None:
        """Events in commit order, so in ``seq`` order within each session."""
        if not events:
            return
        _tell(self._all, events)
        if not self._sessions:
            return
        start = 0
        for end in range(1, len(events) + 1):
            if end == len(events) or events[end].session_id != events[start].session_id:
                _tell(self._sessions.get(events[start].session_id, ()), events[start:end])
                start = end

    def wake(self, hints: Iterable[tuple[str, str]]) -> None:
        for kind, key in hints:
            _tell(self._work, kind, key)

    def lease_lost(self) -> None:
        _tell(self._lost)


def _tell(subscriptions: Sequence[_Subscription[L]], *args: object) -> None:
    """One listener's mistake must not cost the others their events."""
    for subscription in list(subscriptions):
        listener = subscription.listener
        if listener is None:  # closed by one that was told before it
            continue
        try:
            listener(*args)
        except Exception:
            log.exception("a listener failed")
