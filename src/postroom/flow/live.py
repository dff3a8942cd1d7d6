"""What is shown while it happens and never kept: token deltas, tool progress, retries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from postroom.domain.ids import SessionId


class Live(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One moment of a running step. ``reset``: what was streamed of this step is void.

    ``kind`` ``call`` says that the model begins to call ``name``; ``progress`` is a line from the
    tool that runs as ``call_id``.
    """

    session_id: SessionId
    turn: int
    step: int
    kind: Literal["text", "reasoning", "call", "progress", "reset"]
    text: str = ""
    name: str | None = None
    call_id: str | None = None


LiveListener: TypeAlias = Callable[[Live], None]


class LiveHub:
    def __init__(self) -> None:
        self._listeners: dict[SessionId | None, list[LiveListener]] = {}

    def watch(self, session_id: SessionId | None, listener: LiveListener) -> Callable[[], None]:
        """Calls the listener for one session (None: for all); the answer ends it."""
        self._listeners.setdefault(session_id, []).append(listener)

        def end() -> None:
            listeners = self._listeners.get(session_id, [])
            if listener in listeners:
                listeners.remove(listener)
            if not listeners:
                self._listeners.pop(session_id, None)

        return end

    def watched(self, session_id: SessionId) -> bool:
        return bool(self._listeners) and (session_id in self._listeners or None in self._listeners)

    def send(self, live: Live) -> None:
        for key in (live.session_id, None):
            for listener in list(self._listeners.get(key, ())):
                with contextlib.suppress(Exception):
                    listener(live)
