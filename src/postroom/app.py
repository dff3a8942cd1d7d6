"""The composition root: the one file that knows which adapters exist.

`open_room` joins a store, an artifact store, cores and a supervisor into a `Room`: the runtime
in one process. Everything is a parameter, so a test builds the whole system in one call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


from postroom import mint
from postroom.config import Limits, data_dir, default_database
from postroom.domain.ids import CoreId, SessionId, session_id as checked_session_id
from postroom.domain.message import Source
from postroom.flow.agent import Agent
from postroom.flow.context import Contexts
from postroom.flow.core import Core, CoreSource
from postroom.flow.live import LiveHub
from postroom.flow.supervisor import Supervisor
from postroom.flow.turn import Parts
from postroom.ports.artifact import ArtifactStore
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.store import Store
from postroom.scripts.session import create_session

OPERATOR = "operator"
DEFAULT_CORE = CoreId("default")


class Room:
    """The runtime of one process: sessions are opened here and driven from here."""

    def __init__(
        self,
        store: Store,
        artifacts: ArtifactStore,
        cores: CoreSource,
        *,
        clock: Clock,
        limits: Limits,
        only: SessionId | None = None,
    ) -> None:
        self.store = store
        self.artifacts = artifacts
        self.cores = cores
        self.clock = clock
        self.limits = limits
        self.live = LiveHub()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run_locks: weakref.WeakValueDictionary[SessionId, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        parts = Parts(
            store,
            clock,
            artifacts,
            cores,
            Contexts(store, limits.context_cache_bytes_max),
            self.live,
            limits,
        )
        self.supervisor = Supervisor(parts, only=only)

    def agent(self, session_id: SessionId, *, source: Source | None = None) -> Agent:
        """The agent of a session that exists."""
        return Agent(
            self.store,
            session_id,
            self.limits,
            closing=self._closing,
            source=source,
            run_lock=self._run_lock,
        )

    async def session(
        self,
        session_id: str | None = None,
        *,
        core_id: CoreId = DEFAULT_CORE,
        owner: str = OPERATOR,
        cwd: str | None = None,
        source: Source | None = None,
    ) -> Agent:
        """Attaches to a session, making it first if there is none of that id (None: a new one).

        ``core_id``, ``owner`` and ``cwd`` are those of a new session; an old one keeps its own.
        """
        name = mint.session_id() if session_id is None else checked_session_id(session_id)
        await self.store.write(create_session, name, core_id=core_id, owner=owner, cwd=cwd)
        return self.agent(name, source=source)

    def _run_lock(self, session_id: SessionId) -> asyncio.Lock:
        lock = self._run_locks.get(session_id)
        if lock is None:
            lock = self._run_locks[session_id] = asyncio.Lock()
        return lock

    async def aclose(self, *, drain_ms: int | None = None) -> None:
        """Drains, settles every wait, and closes the store. Idempotent."""
        if self._closing.done():
            return
        await self.supervisor.drain(self.limits.drain_ms if drain_ms is None else drain_ms)
        self._closing.set_result(None)
        await self.store.aclose()


def one_core(core: Core) -> CoreSource:
    """Every session runs this core, whatever its id says."""
    return lambda _: core


async def open_store(
    database: str, *, clock: Clock | None = None, limits: Limits | None = None
) -> Store:
    """A database by path, or a PostgreSQL one by URL."""
    limits = limits or Limits()
    if database.startswith(("postgresql://", "postgres://")):
        from postroom.stores.postgres import PostgresStore

        return await PostgresStore.open(
            database, lease_ms=limits.lease_postgres_ms, lock_wait_ms=limits.lock_wait_ms
        )
    from postroom.stores.sqlite import SqliteStore

    return await SqliteStore.open(
        Path(database),
        clock=clock,
        lease_ms=limits.lease_sqlite_ms,
        lock_wait_ms=limits.lock_wait_ms,
    )


def artifacts_beside(database: str) -> Path:
    """Where the artifacts of a database lie by default: in a folder beside its file."""
    if "://" in database:
        return data_dir() / "artifacts"
    path = Path(database)
    return path.with_name(path.name + "-artifacts")


@asynccontextmanager
async def open_room(
    cores: CoreSource,
    *,
    database: str | None = None,
    store: Store | None = None,
    artifacts: ArtifactStore | None = None,
    clock: Clock | None = None,
    limits: Limits | None = None,
    only: SessionId | None = None,
    drive: bool = True,
    drain_ms: int | None = None,
) -> AsyncIterator[Room]:
    """A running room; leaving the block drains and closes it.

    ``store`` wins over ``database``; with neither the default database is used. ``drive`` False:
    this process only queues and watches.
    """
    clock = clock or SystemClock()
    limits = limits or Limits()
    database = database or default_database()
    if store is None:
        store = await open_store(database, clock=clock, limits=limits)
    if artifacts is None:
        from postroom.stores.artifacts import LocalArtifacts

        artifacts = LocalArtifacts(artifacts_beside(database))
    room = Room(store, artifacts, cores, clock=clock, limits=limits, only=only)
    try:
        if drive:
            room.supervisor.start()
        yield room
    finally:
        await room.aclose(drain_ms=drain_ms)


