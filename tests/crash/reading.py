"""What a database holds, read from outside: no runtime, no claim, no lease, and nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import apsw

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from tests.crash.actor import SESSION


@dataclass
class Record:
    """One session. ``pending`` are ``(id, wakes)`` in the order they will be claimed."""

    events: list[Event]
    status: str
    pending: list[tuple[str, bool]]
    work: tuple[Any, ...] | None

    def of(self, *types: str) -> list[Any]:
        """The data of the events of some types, in order."""
        return [e.data for e in self.events if e.type in types]

    @property
    def ends(self) -> list[str]:
        """The kinds of the turns' ends."""
        return [end.reason.kind for end in self.of("turn/end")]

    @property
    def entered(self) -> list[str]:
        """The ids of the messages in the history."""
        return [user.message.id for user in self.of("user/message")]


_QUERIES = (
    "SELECT seq, type, at, data FROM event WHERE sid = {sid} ORDER BY seq",
    "SELECT status FROM session WHERE sid = {sid}",
    "SELECT id, wakes FROM inbox WHERE sid = {sid} ORDER BY lane, pos",
    "SELECT status, epoch, token, owner FROM work WHERE kind = 'session.drive' AND key = {key}",
)


def rows(database: str, sql: str) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    return _all(database, sql)[0]


def read(database: str, session: str = SESSION) -> Record:
    """One session; an empty record if it is not there yet."""
    sid = f"(SELECT sid FROM session WHERE id = '{session}')"
    events, status, pending, work = _all(
        database, *(q.format(sid=sid, key=f"'{session}'") for q in _QUERIES)
    )
    return Record(
        [Event(SessionId(session), *row) for row in events],
        status[0][0] if status else "none",
        [(row[0], bool(row[1])) for row in pending],
        work[0] if work else None,
    )


def _all(database: str, *statements: str) -> list[list[tuple[Any, ...]]]:
    """The answers to some statements, all from one snapshot; empty ones if there are no tables."""
    if database.startswith("postgresql://"):
        import psycopg

        with psycopg.connect(database) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            if connection.execute("SELECT to_regclass('work')").fetchone() == (None,):
                return [[] for _ in statements]
            return [connection.execute(s.encode()).fetchall() for s in statements]
    flags = apsw.SQLITE_OPEN_READONLY
    try:
        connection = apsw.Connection(database, flags=flags)
    except apsw.CantOpenError:
        return [[] for _ in statements]
    try:
        connection.set_busy_timeout(10_000)
        with connection:
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'work'").fetchall():
                return [[] for _ in statements]
            return [connection.execute(s).fetchall() for s in statements]
    finally:
        connection.close()
