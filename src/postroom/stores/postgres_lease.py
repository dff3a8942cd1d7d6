"""This process's identity and lease in a PostgreSQL database, kept by a thread of its own.

The thread has a connection of its own, so that the lease waits behind no script. An advisory lock
of that connection proves the process alive: the server frees it when the connection ends, so a
node whose lock is free is buried at once, and a restart after ``kill -9`` waits for no lease.

A connection can break while its process lives, and then its lock is free too. So after this
connection broke, nobody is buried for a while: the others' broke perhaps as well, and are coming
back. What is buried by mistake loses its claims, and nothing else: every claim is fenced.

The lease is not renewed while the event loop hangs, and what lapsed is not renewed at all: the
process goes on under a new identity. A script never runs under a lease that may have lapsed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import psycopg

from postroom import mint
from postroom.domain.ids import NodeId
from postroom.errors import PostroomError
from postroom.ports.clock import SystemClock
from postroom.ports.store import Tx
from postroom.stores.node import (
    bury_nodes,
    forget_nodes,
    other_nodes,
    register_node,
    remove_node,
    renew_node,
)
from postroom.stores.postgres_link import Address, Attempt, Connection, Fate, fate_of
from postroom.stores.postgres_schema import migrate

log = logging.getLogger("postroom.store")

P = ParamSpec("P")
R = TypeVar("R")

_BURY_FIRST_MS = 40  # the server may need a moment to see that a killed client is gone
_BURY_EVERY_MS = 500
_BURY_AGAIN_AFTER_MS = 5_000
_DAY_MS = 86_400_000

now_ms = SystemClock().monotonic_ms


class Lease:
    """``on_lost`` and ``on_found_work`` are called in the thread; ``tick_ms`` when the loop moved.

    ``node`` changes when the lease was lost.
    """

    def __init__(
        self,
        address: Address,
        *,
        lease_ms: int,
        offset_ms: int,
        tick_ms: Callable[[], int],
        on_ready: Callable[[BaseException | None], None],
        on_lost: Callable[[], None],
        on_found_work: Callable[[], None],
    ) -> None:
        self.node = mint.node_id()
        self._token = mint.claim_token()
        self._address = address
        self._lease_ms = lease_ms
        self._offset_ms = offset_ms
        self._tick_ms = tick_ms
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_found_work = on_found_work
        self._connection: Connection | None = None
        self._locked = False
        self._lapsed = False
        self._renewed_ms = 0
        self._renew_at_ms = 0
        self._bury_at_ms = 0
        self._bury_every_ms = _BURY_FIRST_MS
        self._ear, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._settled = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="postroom-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Gives the lease up and ends the thread; blocks until it has ended."""
        self._closing = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join()
        for end in (self._ear, self._bell):
            os.close(end)

    def in_force(self, until: float) -> bool:
        """Whether scripts may run; waits for a lease that is being renewed, to a monotonic time."""
        if self._is_current():
            return True
        self._ring()
        with self._settled:
            while not self._is_current() and not self._closing:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._settled.wait(left)
        return self._is_current()

    def _is_current(self) -> bool:
        return not self._lapsed and now_ms() - self._renewed_ms <= self._lease_ms

    # ---- the thread ----

    def _main(self) -> None:
        try:
            connection = self._connect()
            migrate(connection, self._address)
            self._introduce(connection)
            self._bury(connection)  # a restart does not wait: the last run's lock is free
        except BaseException as error:
            self._disconnect()
            known = self._address.means(error) if isinstance(error, psycopg.Error) else error
            self._on_ready(known)
            return
        self._on_ready(None)
        shortest_ms = max(self._lease_ms // 12, 10)
        while not self._closing:
            self._sleep(min(self._bury_every_ms, shortest_ms) / 1000)
            if not self._closing:
                self._round()
        self._say_goodbye()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b"!")

    def _sleep(self, seconds: float) -> None:
        """Until somebody rings, the connection breaks, or the time is over."""
        files: list[Any] = [self._ear]
        if self._connection is not None:
            files.append(self._connection)
        select.select(files, (), (), seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._ear, 1024):
                pass

    def _round(self) -> None:
        try:
            self._keep()
        except psycopg.Error as error:
            if self._connection is not None:
                shown = self._address.shown(error)
                log.warning("the lease was not renewed at %s: %s", self._address, shown)
            if fate_of(error, self._connection) is Fate.LOST:
                self._disconnect()
        except PostroomError as error:
            log.warning("the lease was not renewed: %s", error)
        if not self._lapsed and now_ms() - self._renewed_ms > self._lease_ms:
            self._lapsed = True
            log.warning("the lease of %s has lapsed", self.node)
            self._on_lost()
        with self._settled:
            self._settled.notify_all()

    def _keep(self) -> None:
        if self._connection is not None:
            self._notice_break(self._connection)
        connection = self._connection
        if connection is None:
            connection = self._connect()
            self._bury_at_ms = now_ms() + _BURY_AGAIN_AFTER_MS
        if not self._locked:
            self._locked = self._lock(connection)
        hangs = now_ms() - self._tick_ms() > self._lease_ms
        over = self._lapsed or now_ms() - self._renewed_ms > self._lease_ms
        if over or (now_ms() >= self._renew_at_ms and not hangs):
            self._renew(connection)
        if now_ms() >= self._bury_at_ms:
            self._bury(connection)

    def _notice_break(self, connection: Connection) -> None:
        """The lock is gone with the connection: the sooner another is made, the better."""
        try:
            connection.pgconn.consume_input()
        except psycopg.Error as error:
            log.warning("connecting to %s again: %s", self._address, self._address.shown(error))
            self._disconnect()

    def _renew(self, connection: Connection) -> None:
        started_ms = now_ms()
        if not self._lapsed:
            if self._run(connection, renew_node, self.node, self._token, self._lease_ms):
                self._renewed(started_ms)
                return
            log.warning("the lease of %s was lost", self.node)
        told = self._lapsed
        self._become_another(connection)
        if not told:
            self._on_lost()
        self._on_found_work()

    def _renewed(self, at_ms: int) -> None:
        self._renewed_ms = at_ms
        self._renew_at_ms = at_ms + self._lease_ms // 6
        self._lapsed = False

    def _introduce(self, connection: Connection) -> None:
        """Takes the lock first, so that a row without a living lock is a dead node's."""
        self._locked = self._lock(connection)
        started_ms = now_ms()
        about = f"pid {os.getpid()}"
        self._run(connection, register_node, self.node, self._token, self._lease_ms, about)
        self._renewed(started_ms)

    def _become_another(self, connection: Connection) -> None:
        """Nothing that was claimed under the old identity is held any more."""
        old, old_token, was_locked = self.node, self._token, self._locked
        self.node, self._token = mint.node_id(), mint.claim_token()
        self._run(connection, remove_node, old, old_token)
        self._introduce(connection)
        if was_locked:
            connection.execute("SELECT pg_advisory_unlock(%s)", (lock_key(old),))

    def _bury(self, connection: Connection) -> None:
        self._bury_at_ms = now_ms() + self._bury_every_ms
        self._bury_every_ms = min(2 * self._bury_every_ms, _BURY_EVERY_MS)
        others = self._run(connection, other_nodes, self.node)
        if others and self._run(connection, _bury_dead, others):
            self._on_found_work()

    def _say_goodbye(self) -> None:
        """A clean end: what is still held is anybody's, and they are told to look."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error, PostroomError):
                self._run(self._connection, remove_node, self.node, self._token)
                self._on_found_work()
        self._disconnect()

    def _connect(self) -> Connection:
        connection = self._connection = self._address.connect()
        connection.prepare_threshold = None  # so that it can be used on after an error
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._locked = False
        if connection is not None:
            connection.close()

    def _lock(self, connection: Connection) -> bool:
        """False while the server still holds the lock for a connection of ours that broke."""
        return connection.execute(
            "SELECT pg_try_advisory_lock(%s)", (lock_key(self.node),)
        ).fetchall()[0][0]

    def _run(self, connection: Connection, script: Callable[..., R], *args: object) -> R:
        return Attempt(connection, self._offset_ms).run(connection, lambda tx: script(tx, *args))


def lock_key(node: NodeId) -> int:
    """The advisory lock of a node: 64 bits of its id's hash, as the server counts them."""
    digest = hashlib.blake2b(f"postroom node {node}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _bury_dead(tx: Tx, others: list[NodeId]) -> bool:
    """Buries those whose lock is free; whether there were any. The locks end with the transaction."""
    dead = [
        node
        for node in sorted(others)
        if tx.execute("SELECT pg_try_advisory_xact_lock(:key)", {"key": lock_key(node)})[0][0]
    ]
    if dead:
        bury_nodes(tx, dead)
        forget_nodes(tx, tx.now() - _DAY_MS)
    return bool(dead)
