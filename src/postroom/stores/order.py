"""Puts commits into order: each session's events by ``seq``, none twice, none left out.

Where connections commit beside each other, and other processes' commits are heard of by a notice
that names only a session, commits become known in any order. This holds back what came too early
and asks for what is missing. It reads nothing itself: it hands out a `Want` and is given back what
was `Found`. It keeps this only for sessions that somebody listens to.

::

    committed here ──┐                   ┌── in order ──> published
    heard of a seq ──┼──> held by seq ───┤
    found in the log ┘                   └── a gap ─────> Want ──> read from the log ──> Found

A session that was not followed before has no known place to go on from. It is found by time: what
was decided before the subscription is not told. So no read is needed until something happens.
It lives on the event loop; every method is called there.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.stores.hub import Hub

log = logging.getLogger("postroom.store")

_HELD_MAX = 1000
_FRUITLESS_MAX = 50
_SEEN_MAX = 10_000


class Want(NamedTuple):
    """What is missing of a session: its events after ``after``; None: those since ``since_ms``.

    ``since_ms`` is of the process's own growing clock.
    """

    session_id: SessionId
    after: int | None
    since_ms: int


class Found(NamedTuple):
    """The log's answer. ``head`` is its last seq (None: there is no such session).

    ``base`` is the seq that ``events`` follow on; ``more``: there are further ones.
    """

    want: Want
    head: int | None
    base: int
    events: Sequence[Event]
    more: bool


class _Line:
    """One session's place: ``last`` is the seq published last (None: not known yet)."""

    __slots__ = ("again", "asked", "at", "fruitless", "held", "last", "since_ms")

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self.last: int | None = None
        self.at = 0
        self.held: dict[int, Event] = {}
        self.asked: Want | None = None
        self.again = False
        self.fruitless = 0

    def hold(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.last is None or event.seq > self.last:
                self.held[event.seq] = event
        if len(self.held) > _HELD_MAX:
            self.held.clear()  # they are in the log, and are read from there
            self.again = True

    def release(self) -> list[Event]:
        """What may be published now."""
        out: list[Event] = []
        if self.last is None or not self.held:
            return out
        while (event := self.held.pop(self.last + 1, None)) is not None:
            out.append(event)
            self.last, self.at = event.seq, event.at
        if self.held:
            last = self.last
            self.held = {seq: event for seq, event in self.held.items() if seq > last}
        return out


class Order:
    """``ask`` gets what is wanted, from the log; `found` is to be called with the answer."""

    def __init__(self, hub: Hub, ask: Callable[[Want], None], now_ms: Callable[[], int]) -> None:
        self._hub = hub
        self._ask_for = ask
        self._now_ms = now_ms
        self._lines: dict[SessionId, _Line] = {}
        self._all_since_ms: int | None = None
        self._seen: OrderedDict[SessionId, int] = OrderedDict()

    # ---- who listens ----

    def follow(self, session_id: SessionId | None) -> None:
        """Somebody listens from now on, to one session or (None) to all."""
        if session_id is None:
            if self._all_since_ms is None:
                self._all_since_ms = self._now_ms()
        elif session_id not in self._lines:
            self._lines[session_id] = _Line(self._now_ms())

    def forget(self, session_id: SessionId | None) -> None:
        """The last listener of a session, or (None) of all, has gone."""
        if session_id is None:
            self._all_since_ms = None
            for each in [s for s in self._lines if not self._hub.listens(s)]:
                self._drop(each)
        elif self._all_since_ms is None:
            self._drop(session_id)

    def _drop(self, session_id: SessionId) -> None:
        line = self._lines.pop(session_id, None)
        if line is not None and line.last is not None:
            self._see(session_id, line.last)

    def _see(self, session_id: SessionId, seq: int) -> None:
        """Remembers how far a session is known that nobody listens to: that much is not news."""
        self._seen[session_id] = seq
        self._seen.move_to_end(session_id)
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)

    def _line(self, session_id: SessionId) -> _Line | None:
        line = self._lines.get(session_id)
        if line is None and self._all_since_ms is not None:
            line = self._lines[session_id] = _Line(self._all_since_ms)
        return line

    # ---- what becomes known ----

    def committed(self, events: Sequence[Event]) -> None:
        """Events of one transaction of this process."""
        out: list[Event] = []
        start = 0
        for end in range(1, len(events) + 1):
            if end == len(events) or events[end].session_id != events[start].session_id:
                self._take(events[start:end], out)
                start = end
        self._hub.publish(out)

    def _take(self, events: Sequence[Event], out: list[Event]) -> None:
        first = events[0]
        session_id = first.session_id
        line = self._line(session_id)
        if line is None:
            self._see(session_id, events[-1].seq)
            return
        if first.seq == 1 and (line.last is None or first.at > line.at):
            line.last = 0  # a new log, perhaps after another of the same name
            line.held.clear()
        elif line.last is None and self._seen.get(session_id) == first.seq - 1:
            line.last = first.seq - 1
        line.hold(events)
        out.extend(line.release())
        if line.held or line.again:
            self._ask(session_id, line)

    def heard(self, session_id: SessionId, seq: int) -> None:
        """Another process says that a session's log has reached a seq."""
        line = self._line(session_id)
        if line is not None and (line.last is None or seq > line.last):
            self._ask(session_id, line)

    def suspect(self, session_id: SessionId) -> None:
        """A session's log may have grown by something that is not known here."""
        line = self._line(session_id)
        if line is not None:
            self._ask(session_id, line)

    def look(self) -> None:
        """Asks after every session that is followed: a notice may have been lost."""
        for session_id, line in self._lines.items():
            self._ask(session_id, line)

    def _ask(self, session_id: SessionId, line: _Line) -> None:
        if line.asked is not None:
            line.again = True
            return
        line.again = False
        line.asked = Want(session_id, line.last, line.since_ms)
        self._ask_for(line.asked)

    def found(self, found: Found) -> None:
        """The log's answer to a `Want`."""
        want = found.want
        line = self._lines.get(want.session_id)
        if line is None or line.asked is not want:
            return
        line.asked = None
        if found.head is None:
            self._gone(line)
        elif want.after is not None and found.head < want.after:
            line.last = 0  # the log was deleted, and another begun under its name
            line.held.clear()
            self._ask(want.session_id, line)
        else:
            self._join(line, found, found.head)

    def _gone(self, line: _Line) -> None:
        """Deleted: what was committed before is still told."""
        out = [line.held[seq] for seq in sorted(line.held)]
        line.held.clear()
        line.last = 0
        self._hub.publish(out)

    def _join(self, line: _Line, found: Found, head: int) -> None:
        session_id = found.want.session_id
        if line.last is None:
            seen = self._seen.pop(session_id, 0)
            line.last = max(found.base, seen if seen <= head else 0)
            if line.held:
                line.last = min(line.last, min(line.held) - 1)
        out: list[Event] = []
        for event in found.events:
            if event.seq > line.last:
                out.append(event)
                line.last, line.at = event.seq, event.at
        out.extend(line.release())
        if out or not line.held:
            line.fruitless = 0
        else:
            line.fruitless += 1
            if line.fruitless > _FRUITLESS_MAX:
                log.error("%s: the log lacks events after %d", session_id, line.last)
                line.last = min(line.held) - 1
                out.extend(line.release())
        self._hub.publish(out)
        if found.more or line.again or line.held:
            self._ask(session_id, line)
