"""Hears of other processes' commits in a PostgreSQL database, and lets them hear of ours.

A thread of its own with one connection: it listens, sends what was committed here, reads what of
the log is missing, and looks every few seconds for what a lost notice left unseen.

- A notice is sent after its commit, many commits' worth at once: inside the transaction it would
  make every commit wait for every other.
- A notice names sessions and how far their logs reach, and work that became ready. It carries no
  event: what is told comes from the log, so a lost or a doubled notice changes nothing.
- After a break it listens first and looks second, so that nothing falls between the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import psycopg

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.ports.clock import SystemClock
from postroom.stores.order import Found, Want
from postroom.stores.postgres_link import Address, Connection, pipelined, read_clock

log = logging.getLogger("postroom.store")

CHANNEL = "postroom"
SWEEP_S = 5.0

_NOTICE_BYTES_MAX = 7000  # the server takes 8000
_KEY_BYTES_MAX = 1000
_PAGE = 500
_RETRY_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_OVERLAP_MS = 60_000

now_ms = SystemClock().monotonic_ms


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """``heads`` says how far sessions' logs reach; ``work`` is kind and key (``*``: look)."""

    origin: str
    heads: dict[SessionId, int]
    work: list[tuple[str, str]]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Notice).decode


class Watch:
    """The callbacks are called in the thread. ``on_sweep`` comes every `SWEEP_S`, and after a break.

    ``origin`` tells our own notices from others'. While ``all_since_ms`` is set (a time of the
    process's growing clock) a sweep looks at every session that changed, not at those wanted only.
    """

    def __init__(
        self,
        address: Address,
        *,
        origin: str,
        offset_ms: int,
        on_ready: Callable[[BaseException | None], None],
        on_notice: Callable[[Mapping[SessionId, int], Sequence[tuple[str, str]]], None],
        on_found: Callable[[Sequence[Found]], None],
        on_sweep: Callable[[], None],
    ) -> None:
        self.all_since_ms: int | None = None
        self._address = address
        self._origin = origin
        self._offset_ms = offset_ms
        self._on_ready = on_ready
        self._on_notice = on_notice
        self._on_found = on_found
        self._on_sweep = on_sweep
        self._lock = threading.Lock()
        self._heads: dict[SessionId, int] = {}
        self._work: dict[tuple[str, str], None] = {}
        self._wants: dict[SessionId, Want] = {}
        self._ready = False
        self._tries = 0
        self._closing = False
        self._swept_ms: int | None = None
        self._sweep_at = 0.0
        self._ear, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._main, name="postroom-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- from any thread ----

    def announce(self, heads: Mapping[SessionId, int], work: Iterable[tuple[str, str]]) -> None:
        """Tells the other processes, soon."""
        with self._lock:
            for session_id, seq in heads.items():
                if seq > self._heads.get(session_id, 0):
                    self._heads[session_id] = seq
            self._work.update(dict.fromkeys(work))
        self._ring()

    def want(self, want: Want) -> None:
        """Reads it and answers by ``on_found``."""
        with self._lock:
            self._wants[want.session_id] = want
        self._ring()

    def close(self) -> None:
        """Sends what is left and ends the thread; blocks until it has ended."""
        self._closing = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join()
        for end in (self._ear, self._bell):
            os.close(end)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b"!")

    # ---- the thread ----

    def _main(self) -> None:
        while True:
            connection = None
            try:
                connection = self._address.connect()
                self._serve(connection)
            except psycopg.Error as error:
                if not self._ready:
                    self._on_ready(self._address.means(error))
                    return
                if self._tries == 0:
                    shown = self._address.shown(error)
                    log.warning("listening at %s failed: %s; trying again", self._address, shown)
            finally:
                if connection is not None:
                    connection.close()
            if self._closing:
                return
            self._sleep(_RETRY_S[min(self._tries, len(_RETRY_S) - 1)])
            self._tries += 1

    def _serve(self, connection: Connection) -> None:
        """Until it is closed, or the connection breaks."""
        connection.add_notify_handler(lambda notice: self._hear(notice.payload))
        connection.execute(f"LISTEN {CHANNEL}".encode())
        self._sweep(connection)
        self._tries = 0
        if not self._ready:
            self._ready = True
            self._on_ready(None)
        while True:
            closing = self._closing
            self._send(connection)
            self._read(connection)
            if closing:
                return
            if time.monotonic() >= self._sweep_at:
                self._sweep(connection)
            self._sleep(self._sweep_at - time.monotonic(), connection)
            connection.pgconn.consume_input()
            while (notice := connection.pgconn.notifies()) is not None:
                self._hear(notice.extra.decode("utf-8", "replace"))

    def _sleep(self, seconds: float, connection: Connection | None = None) -> None:
        """Until somebody rings, the server says something, or the time is over."""
        files: list[Any] = [self._ear] if connection is None else [self._ear, connection]
        select.select(files, (), (), max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._ear, 1024):
                pass

    def _hear(self, payload: str) -> None:
        try:
            notice = _decode(payload)
        except msgspec.MsgspecError:  # not one of ours
            return
        if notice.origin != self._origin:
            self._on_notice(notice.heads, notice.work)

    def _send(self, connection: Connection) -> None:
        with self._lock:
            heads, self._heads = self._heads, {}
            work, self._work = self._work, {}
        if not heads and not work:
            return
        try:
            with pipelined(connection):
                for payload in payloads(self._origin, heads, work):
                    connection.execute(b"SELECT pg_notify(%s, %s)", (CHANNEL, payload))
        except psycopg.Error:
            self.announce(heads, work)  # again on the next connection
            raise

    # ---- reading the log ----

    def _sweep(self, connection: Connection) -> None:
        self._sweep_at = time.monotonic() + SWEEP_S
        now = read_clock(connection)
        if self.all_since_ms is not None and self._swept_ms is not None:
            since = self._swept_ms - _OVERLAP_MS + self._offset_ms
            rows = connection.execute(
                b"SELECT id, head FROM session WHERE updated_at >= %s", (since,)
            ).fetchall()
            self._on_notice({SessionId(row[0]): int(row[1]) for row in rows}, ())
        self._swept_ms = now
        self._on_sweep()

    def _read(self, connection: Connection) -> None:
        with self._lock:
            wants, self._wants = self._wants, {}
        if not wants:
            return
        try:
            self._on_found(_find(connection, list(wants.values()), self._offset_ms))
        except psycopg.Error:
            with self._lock:
                self._wants = wants | self._wants
            raise


def _find(connection: Connection, wants: Sequence[Want], offset_ms: int) -> list[Found]:
    """Answers from the log, all asked for at once."""
    with pipelined(connection):
        clock = read_clock(connection) + offset_ms
        asked_ms = now_ms()
        rows = connection.execute(
            b"SELECT id, sid, head FROM session WHERE id = ANY(%s)",
            ([want.session_id for want in wants],),
        ).fetchall()
        known: dict[SessionId, tuple[int, int]] = {SessionId(r[0]): (r[1], r[2]) for r in rows}
        bases = {
            want.session_id: connection.execute(
                b"SELECT seq FROM event WHERE sid = %s AND at < %s ORDER BY seq DESC LIMIT 1",
                (known[want.session_id][0], clock - (asked_ms - want.since_ms) - 1),
            )
            for want in wants
            if want.after is None and want.session_id in known
        }
        after: dict[SessionId, int] = {}
        for want in wants:
            cursor = bases.get(want.session_id)
            before = cursor.fetchall() if cursor is not None else []
            base = before[0][0] if before else 0
            after[want.session_id] = base if want.after is None else want.after
        pages = {
            name: connection.execute(
                b"SELECT seq, type, at, data FROM event WHERE sid = %s AND seq > %s"
                b" ORDER BY seq LIMIT %s",
                (sid, after[name], _PAGE),
            )
            for name, (sid, head) in known.items()
            if head > after[name]
        }
        out: list[Found] = []
        for want in wants:
            name = want.session_id
            page = pages[name].fetchall() if name in pages else []
            events = [Event(name, r[0], r[1], r[2], r[3]) for r in page]
            head = known[name][1] if name in known else None
            out.append(Found(want, head, after[name], events, len(page) == _PAGE))
    return out


def payloads(
    origin: str, heads: Mapping[SessionId, int], work: Iterable[tuple[str, str]]
) -> list[str]:
    """Notices of what is to be told, each within the server's limit."""
    out: list[str] = []
    notice, size = Notice(origin, {}, []), 0

    def fits(bytes_more: int) -> None:
        nonlocal notice, size
        if size + bytes_more > _NOTICE_BYTES_MAX:
            out.append(_encode(notice).decode())
            notice, size = Notice(origin, {}, []), 0
        size += bytes_more

    for session_id, seq in heads.items():
        fits(len(session_id) + 24)
        notice.heads[session_id] = seq
    for kind, key in work:
        # In the JSON a character may take six bytes.
        known = key if 6 * len(key) <= _KEY_BYTES_MAX else "*"
        fits(6 * (len(kind) + len(known)) + 8)
        notice.work.append((kind, known))
    out.append(_encode(notice).decode())
    return out
