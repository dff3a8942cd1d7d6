"""The composition root: the one file that knows which adapters exist.

`open_room` joins a store, an artifact store, cores and a supervisor into a `Room`: the runtime
in one process. Everything is a parameter, so a test builds the whole system in one call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from postroom import mint
from postroom.config import Limits
from postroom.domain.ids import ClaimToken, CoreId, SessionId
from postroom.domain.ids import session_id as checked_session_id
from postroom.domain.message import Source
from postroom.errors import PostroomError
from postroom.flow.agent import Agent
from postroom.flow.approvals import Approvals
from postroom.flow.context import Contexts
from postroom.flow.core import Core, CoreSource
from postroom.flow.live import LiveHub
from postroom.flow.outbox import DeliveryRuntime
from postroom.flow.router import SessionInteractionRouter
from postroom.flow.supervisor import Supervisor
from postroom.flow.turn import Parts
from postroom.home import default_database, environment, home
from postroom.ports.artifact import ArtifactStore
from postroom.ports.channel import Channel, Unit
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.policy import Policy
from postroom.ports.store import Store
from postroom.scripts.drive import Drive, Offer
from postroom.scripts.session import create_session
from postroom.tools.bounds import bound_output
from postroom.tools.workspace import read_workspace_file

if TYPE_CHECKING:
    from postroom.flow.channels import Channels
    from postroom.flow.inbound import Connected

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
        drives: bool = True,
        channels: Mapping[str, Channel] | None = None,
        connected: Mapping[str, Connected] | None = None,
    ) -> None:
        self.drives = drives
        self.store = store
        self.artifacts = artifacts
        self._cores = cores
        self._used: dict[int, tuple[Core, Core]] = {}
        self.clock = clock
        self.limits = limits
        self.live = LiveHub()
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None
        self._run_locks: weakref.WeakValueDictionary[SessionId, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self.router = SessionInteractionRouter(store, channels or {})
        parts = Parts(
            store,
            clock,
            artifacts,
            self.cores,
            Contexts(store, limits.context_cache_bytes_max),
            self.live,
            limits,
            bound_output,
            Approvals(store, self.router, clock, limits),
            read_workspace_file,
            self.router.shows_progress,
        )
        self.supervisor = Supervisor(parts, only=only)
        self.outbox = DeliveryRuntime(store, self.router, cut=_cut, clock=clock, limits=limits)
        self.channels: Channels | None = None
        self._guard: Callable[[Policy | None], Policy] | None = None
        if connected is not None:
            # A room without channels, as a one-shot command's, starts sooner without these.
            from postroom.flow.channels import Channels
            from postroom.flow.inbound import InteractionRuntime

            inbound = InteractionRuntime(store, limits, connected)
            self._guard = inbound.guarded
            self.channels = Channels(
                channels or {}, inbound, store, clock, kept_ms=limits.dedupe_kept_ms
            )

    def agent(
        self,
        session_id: SessionId,
        *,
        source: Source | None = None,
        core_id: CoreId | None = None,
    ) -> Agent:
        """The agent of a session that exists. ``core_id`` None: not known here."""
        drives = _Drives(self, session_id, core_id) if core_id is not None else None
        return Agent(
            self.store,
            session_id,
            self.limits,
            closing=self._closing,
            source=source,
            run_lock=self._run_lock,
            drives=drives,
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
        opened = await self.store.write(create_session, name, core_id=core_id, owner=owner, cwd=cwd)
        return self.agent(name, source=source, core_id=opened.core_id)

    def start(self) -> None:
        """Drives what there is to drive, delivers what waits, and opens the channels."""
        self.supervisor.start()
        self.outbox.start()
        if self.channels is not None:
            self.channels.start()

    def cores(self, core_id: CoreId) -> Core:
        """The core of this id as it is now; its models are closed with the room.

        Where channels are connected it asks, at each claim, whether the sender may still talk.
        """
        core = self._cores(core_id)
        used = self._used.get(id(core))
        if used is None:
            guarded = core
            if self._guard is not None:
                guarded = core.with_policy(self._guard(core.policy))
            used = self._used[id(core)] = (core, guarded)
        return used[1]

    def _run_lock(self, session_id: SessionId) -> asyncio.Lock:
        lock = self._run_locks.get(session_id)
        if lock is None:
            lock = self._run_locks[session_id] = asyncio.Lock()
        return lock

    async def aclose(self, *, drain_ms: int | None = None) -> None:
        """Drains, settles every wait, and closes the store. Again, it waits for the first time."""
        if self._ending is None:
            budget_ms = self.limits.drain_ms if drain_ms is None else drain_ms
            self._ending = asyncio.ensure_future(self._end(budget_ms))
        await asyncio.shield(self._ending)

    async def _end(self, budget_ms: int) -> None:
        if self.channels is not None:
            await self.channels.stop_receiving()
        self.router.close()
        # At once, so that both end within the budget. What a turn that ends now owes stays queued.
        await asyncio.gather(self.supervisor.drain(budget_ms), self.outbox.drain(budget_ms))
        self._closing.set_result(None)
        try:
            if self.channels is not None:
                await self.channels.aclose()
            for core, _ in self._used.values():
                for model in core.models:
                    await model.aclose()
        finally:
            await self.store.aclose()


class _Drives:
    """Lets an agent of this room claim in the transaction of its receipt."""

    __slots__ = ("_core_id", "_room", "_session_id")

    def __init__(self, room: Room, session_id: SessionId, core_id: CoreId) -> None:
        self._room = room
        self._session_id = session_id
        self._core_id = core_id

    def offer(self) -> Offer | None:
        if not self._room.drives:
            return None
        try:
            core = self._room.cores(self._core_id)
        except PostroomError:
            return None  # the driver says what is wrong with it
        return self._room.supervisor.offer(self._session_id, core)

    def settled(self, token: ClaimToken) -> None:
        self._room.supervisor.settled(token)

    def take(self, token: ClaimToken, drive: Drive | None) -> None:
        self._room.supervisor.drive(self._session_id, drive, token=token)


def _cut(text: str, limit: int, unit: Unit) -> Sequence[str]:
    from postroom.channels.split import split

    return split(text, limit, unit)


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
        return home() / "artifacts"
    path = Path(database)
    return path.with_name(path.name + "-artifacts")


def artifacts_for(database: str) -> ArtifactStore:
    """The artifact store that ``POSTROOM_ARTIFACTS`` names; without one, the database's own folder.

    Raises:
        ConfigError: what it names cannot be used, or a secret cannot be read.
    """
    from postroom.stores.artifacts import open_artifacts

    environ = environment()
    named = environ.get("POSTROOM_ARTIFACTS")
    return open_artifacts(named or artifacts_beside(database), environ)


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
    channels: Mapping[str, Channel] | None = None,
    connected: Mapping[str, Connected] | None = None,
) -> AsyncGenerator[Room]:
    """A running room; leaving the block drains and closes it.

    ``store`` wins over ``database``; with neither the default database is used. ``artifacts`` None:
    those that the environment names, or beside the database. ``drive`` False: this process only
    queues and watches. ``connected`` (None: there are no channels here) is asked again at each claim,
    whatever policies the cores have of their own.
    """
    clock = clock or SystemClock()
    limits = limits or Limits()
    database = database or default_database()
    if artifacts is None:
        artifacts = artifacts_for(database)
    if store is None:
        store = await open_store(database, clock=clock, limits=limits)
    room = Room(
        store,
        artifacts,
        cores,
        clock=clock,
        limits=limits,
        only=only,
        drives=drive,
        channels=channels,
        connected=connected,
    )
    try:
        if drive:
            room.start()
        yield room
    finally:
        await room.aclose(drain_ms=drain_ms)
