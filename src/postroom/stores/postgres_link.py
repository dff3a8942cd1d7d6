"""Speaks to PostgreSQL: its address, a connection, a statement, a transaction, an error.

The one place that knows the library's ways. It decides nothing about sessions, threads or retries.

- The address holds a password, so it is never shown; nor is a text of the library that may quote it.
- Scripts write ``:name``; the library wants ``%(name)s``. Each text is translated once.
- A transaction runs in the library's pipeline: only a statement whose rows are wanted is waited
  for, so the writes at a script's end travel with the COMMIT. Each wait is a Sync, after which the
  server counts the transaction as idle: one whose process stands still is ended.
- The clock is read behind the lock, on the same way to the server.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import Int8Dumper

from postroom.domain.event import Event
from postroom.errors import (
    ConfigError,
    Corrupt,
    NotCommitted,
    PostroomError,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
)
from postroom.ports.store import Row, SqlValue

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]
R = TypeVar("R")

_HINT = "check the address, and that the server runs and takes connections from here"

_TIMES_TRANSACTIONS = 170_000

# Of one type whatever the value, so that a statement is prepared once and not once a size.
_adapters = AdaptersMap(psycopg.adapters)
_adapters.register_dumper(int, Int8Dumper)

_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "fallback_application_name": "postroom",
}


class Address:
    """Where a database is. Its text and its errors name host and database, and no secret.

    Raises:
        ConfigError: the URL cannot be read.
    """

    def __init__(self, url: str, *, lock_wait_ms: int, lease_ms: int) -> None:
        parsed = _parsed(url)
        if parsed is None:
            raise ConfigError(
                "the database's URL cannot be read",
                hint="it looks like postgresql://USER:PASSWORD@HOST/DATABASE",
            )
        parts = {name: str(value) for name, value in parsed.items() if value is not None}
        secrets = [parts[name] for name in ("password", "sslpassword") if parts.get(name)]
        self._secrets = [form for s in secrets for form in (s, quote(s), quote(s, safe=""))]
        self._text = f"{parts.get('host') or 'localhost'}/{parts.get('dbname') or ''}"
        silent_ms = max(lease_ms // 3, 1000)
        defaults = _DEFAULTS | {"tcp_user_timeout": str(silent_ms)}
        self._conninfo = make_conninfo("", **(defaults | parts | {"client_encoding": "UTF8"}))
        # A receipt means "on disk", whatever the role's default is. And a process that stopped in
        # the middle of a transaction must not hold a session's lock until others give up.
        self._settings = (
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') = 'off';"
            f"SET lock_timeout = {lock_wait_ms};"
            f"SET idle_in_transaction_session_timeout = {silent_ms};"
            "SET client_min_messages = error"
        ).encode()
        self._longest = f"SET transaction_timeout = {lock_wait_ms + silent_ms}".encode()

    def __repr__(self) -> str:
        return f"Address({self._text})"

    def __str__(self) -> str:
        return self._text

    def connect(self) -> Connection:
        """A new connection, each statement its own transaction until one is begun.

        Raises:
            psycopg.Error: see `means`.
        """
        connection = psycopg.connect(self._conninfo, autocommit=True, context=_adapters)
        try:
            connection.execute(self._settings)
            if connection.info.server_version >= _TIMES_TRANSACTIONS:
                connection.execute(self._longest)
        except BaseException:
            connection.close()
            raise
        return connection

    def shown(self, error: BaseException) -> str:
        """The library's text without secrets and without the server's details."""
        primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
        lines = (primary or str(error)).splitlines()
        text = lines[0] if lines else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def means(self, error: psycopg.Error) -> PostroomError:
        """The library's error as ours; of one that came before the COMMIT was sent."""
        text = self.shown(error)
        kind = MEANS.get(error.sqlstate or "", NotCommitted)
        if kind is StoreFull:
            return StoreFull(
                f"the disk of {self} is full: {text}", hint="free some space, then send it again"
            )
        if kind is StoreLocked:
            return StoreLocked(
                f"another transaction at {self} has held the lock past the limit",
                hint="end it or wait for it, then send the same again",
            )
        if kind is StoreReadOnly:
            return StoreReadOnly(
                f"{self} cannot be written: {text}",
                hint="connect to the primary server, as a user who may write there",
            )
        if kind is Corrupt:
            return Corrupt(f"{self} is damaged: {text}", hint="restore a backup")
        if is_lost(error):
            return NotCommitted(f"{self} cannot be reached: {text}", hint=_HINT)
        return NotCommitted(f"{self} refused: {text}")


def _parsed(url: str) -> Mapping[str, str | int | None] | None:
    """None if the library does not understand it; what it says of that would quote the URL."""
    try:
        parts = conninfo_to_dict(url)
        make_conninfo("", **parts)
    except psycopg.Error:
        return None
    return parts


# ---- errors ----


class Fate(Enum):
    """What to do about an error: run the script again, connect and run it again, or give up."""

    AGAIN = "again"
    LOST = "lost"
    FINAL = "final"


MEANS: dict[str, type[PostroomError]] = {
    "53100": StoreFull,  # disk full
    "55P03": StoreLocked,  # lock not available
    "25006": StoreReadOnly,  # read-only transaction
    "42501": StoreReadOnly,  # insufficient privilege
    "XX001": Corrupt,  # data corrupted
    "XX002": Corrupt,  # index corrupted
}

# Serialization failure, deadlock, lock not available; and a row that another transaction made in
# the meantime, which the script finds when it runs again.
AGAIN = frozenset({"40001", "40P01", "55P03", "23505"})

# The server or somebody ended the connection, or the server does not take one yet; a read-only
# server was the primary until a moment ago.
LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300"})
_CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)


def is_lost(error: psycopg.Error) -> bool:
    state = error.sqlstate
    if state is None:
        came_to_nothing = isinstance(error, psycopg.errors.PipelineAborted)
        return isinstance(error, _CONNECTION_ERRORS) and not came_to_nothing
    return state in LOST or state.startswith("08")


def is_undecided(error: psycopg.Error, connection: Connection) -> bool:
    """Whether a COMMIT that was sent may have been done: the server did not answer, or ended."""
    ended = error.diag.severity_nonlocalized in ("FATAL", "PANIC")
    return connection.closed or ended or error.sqlstate is None


def fate_of(error: psycopg.Error, connection: Connection | None) -> Fate:
    if connection is None or connection.closed or is_lost(error):
        return Fate.LOST
    return Fate.AGAIN if error.sqlstate in AGAIN else Fate.FINAL


# ---- statements ----

_TOKEN = re.compile(
    r"'(?:[^']|'')*'"  # a text
    r'|"(?:[^"]|"")*"'  # a quoted name
    r"|--[^\n]*|/\*.*?\*/"  # a comment
    r"|::"  # a cast
    r"|:(?P<name>[A-Za-z_]\w*)"
    r"|%",
    re.DOTALL,
)
_GIVES_ROWS = re.compile(r"\s*(?:SELECT|WITH|VALUES|SHOW|TABLE)\b|.*\bRETURNING\b", re.I | re.S)


@lru_cache(maxsize=2048)
def translated(sql: str) -> tuple[bytes, bool]:
    """The statement as the library wants it, and whether it gives rows."""

    def swap(match: re.Match[str]) -> str:
        name = match["name"]
        return f"%({name})s" if name else match[0].replace("%", "%%")

    return _TOKEN.sub(swap, sql).encode(), bool(_GIVES_ROWS.match(sql))


_CLOCK = b"SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_BEGIN_READ = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_FOR_UPDATE = " FOR UPDATE"


def read_clock(connection: Connection) -> int:
    """The server's clock in Unix milliseconds."""
    return int(connection.execute(_CLOCK).fetchall()[0][0])


class PostgresTx:
    """What a script sees. One is made for each run of a script."""

    __slots__ = (
        "_connection",
        "_now",
        "_offset_ms",
        "events",
        "for_update",
        "hints",
        "settle",
        "skip_locked",
    )

    def __init__(self, connection: Connection, offset_ms: int, *, reading: bool = False) -> None:
        self._connection = connection
        self._offset_ms = offset_ms
        self._now: int | None = None
        self.settle: Callable[[], None] = _nothing
        self.for_update = "" if reading else _FOR_UPDATE
        self.skip_locked = "" if reading else " SKIP LOCKED"
        self.events: list[Event] = []
        self.hints: list[tuple[str, str]] = []

    def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Row]:
        text, gives_rows = translated(sql)
        cursor = self._connection.execute(text, _sendable(params or {}))
        clock = None
        if self._now is None and _FOR_UPDATE in sql:
            clock = self._connection.execute(_CLOCK)
        if gives_rows:
            self.settle()
        rows: list[Row] = cursor.fetchall() if gives_rows else []
        if clock is not None:
            self._now = int(clock.fetchall()[0][0]) + self._offset_ms
        return rows

    def execute_many(self, sql: str, rows: Sequence[Mapping[str, SqlValue]]) -> None:
        text, _ = translated(sql)
        for row in rows:
            self._connection.execute(text, _sendable(row))

    def now(self) -> int:
        now = self._now
        if now is None:
            now = self._now = read_clock(self._connection) + self._offset_ms
        return now

    def publish(self, event: Event) -> None:
        self.events.append(event)

    def wake(self, kind: str, key: str) -> None:
        self.hints.append((kind, key))


def _sendable(params: Mapping[str, SqlValue]) -> Mapping[str, SqlValue]:
    """The values as the server takes them: its texts have no NUL, so one becomes U+FFFD."""
    for value in params.values():
        if isinstance(value, str) and "\0" in value:
            return {
                name: each.replace("\0", "\ufffd") if isinstance(each, str) else each
                for name, each in params.items()
            }
    return params


def _nothing() -> None:
    pass


class Attempt:
    """One run of a script in one transaction. ``committing``: its COMMIT may have been sent."""

    __slots__ = ("committing", "tx")

    def __init__(self, connection: Connection, offset_ms: int, *, reading: bool = False) -> None:
        self.tx = PostgresTx(connection, offset_ms, reading=reading)
        self.committing = False

    def run(
        self,
        connection: Connection,
        script: Callable[[PostgresTx], R],
        *,
        lock_wait_ms: int | None = None,
        on_commit: Callable[[str], None] | None = None,
    ) -> R:
        """The script's answer, committed. ``lock_wait_ms`` None: as long as the connection's own.

        Raises:
            psycopg.Error: see `fate_of`. Nothing was written unless it is lost and ``committing``.
            Exception: the script's own; nothing was written.
        """
        reading = self.tx.for_update == ""
        try:
            with pipelined(connection) as pipeline:
                self.tx.settle = pipeline.sync
                connection.execute(_BEGIN_READ if reading else _BEGIN)
                if lock_wait_ms is not None:
                    connection.execute(b"SET LOCAL lock_timeout = %d" % max(lock_wait_ms, 1))
                answer = script(self.tx)
                if on_commit is not None:
                    pipeline.sync()
                    on_commit("before")
                self.committing = not reading
                connection.execute(b"COMMIT")
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                if not connection.closed and not is_idle(connection):
                    connection.execute(b"ROLLBACK")
            raise
        return answer


@contextlib.contextmanager
def pipelined(connection: Connection) -> Generator[psycopg.Pipeline]:
    """Statements are sent on and waited for only where their rows are wanted, and at the end."""
    end = contextlib.ExitStack()
    pipeline = end.enter_context(connection.pipeline())
    try:
        yield pipeline
        end.close()
    except BaseException:
        # Left by an error, the library would write a second one into its own log.
        with contextlib.suppress(psycopg.Error):
            end.close()
        raise


def is_idle(connection: Connection) -> bool:
    """Whether another transaction may begin on it."""
    return not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE
