"""Tells those who listen what was committed. It knows nothing of what the events mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.ports.store import EventListener, WorkListener

log = logging.getLogger("postroom.store")

L = TypeVar("L")


class _Subscription(Generic[L]):
    __slots__ = ("_listener", "_listeners", "_on_empty")

    def __init__(
        self, listeners: list[L], listener: L, on_empty: Callable[[], None] | None = None
    ) -> None:
        self._listeners = listeners
        self._listener = listener
        self._on_empty = on_empty

    def close(self) -> None:
        if self._listener in self._listeners:
            self._listeners.remove(self._listener)
            if not self._listeners and self._on_empty is not None:
                self._on_empty()


class Hub:
    """Lives on the event loop; every method is called there."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, list[EventListener]] = {}
        self._all: list[EventListener] = []
        self._work: list[WorkListener] = []
        self._lost: list[Callable[[], None]] = []

    def subscribe(
        self, session_id: SessionId | None, listener: EventListener
    ) -> _Subscription[EventListener]:
        if session_id is None:
            self._all.append(listener)
            return _Subscription(self._all, listener)
        listeners = self._sessions.setdefault(session_id, [])
        listeners.append(listener)
        return _Subscription(listeners, listener, lambda: self._forget(session_id))

    def _forget(self, session_id: SessionId) -> None:
        if not self._sessions.get(session_id, True):
            del self._sessions[session_id]

    def on_work(self, listener: WorkListener) -> _Subscription[WorkListener]:
        self._work.append(listener)
        return _Subscription(self._work, listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> _Subscription[Callable[[], None]]:
        self._lost.append(listener)
        return _Subscription(self._lost, listener)

    def publish(self, events: Sequence[Event]) -> None:
        """Events in commit order, so in ``seq`` order within each session."""
        for listener in list(self._all):
            _guarded(listener, events)
        if not self._sessions or not events:
            return
        start = 0
        for end in range(1, len(events) + 1):
            if end == len(events) or events[end].session_id != events[start].session_id:
                for listener in list(self._sessions.get(events[start].session_id, ())):
                    _guarded(listener, events[start:end])
                start = end

    def wake(self, hints: Iterable[tuple[str, str]]) -> None:
        for kind, key in hints:
            for listener in list(self._work):
                _guarded(listener, kind, key)

    def lease_lost(self) -> None:
        for listener in list(self._lost):
            _guarded(listener)


def _guarded(listener: Callable[..., None], *args: object) -> None:
    """One listener's mistake must not cost the others their events."""
    try:
        listener(*args)
    except Exception:
        log.exception("a listener failed")
