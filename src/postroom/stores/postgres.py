"""The PostgreSQL engine: the same scripts, on a pool of connections in threads, on many machines.

::

    write ──> lane of its session ──> a worker and a connection ──> COMMIT ──> future, then events
                                                                       └─────> notice to the others

The rules it keeps, and what goes wrong without them:

- Scripts of one session (their first argument) run one after another, as they were asked for. Else
  two messages of one producer would change places, and workers would queue at one row's lock.
- What the server may undo by itself (a serialization failure, a deadlock, a lock not had in time,
  a row made in the meantime) and a lost connection are no errors: the script runs again until its
  deadline.
- A connection lost during COMMIT leaves it open whether it was written. The script runs once more:
  it finds what it did. If that cannot be had either, the outcome is called uncertain.
- A callers' future is settled before its events are told, in one call on the loop. Events of a
  session are told in the order of their ``seq``, whoever wrote them (`order`).

`postgres_link` speaks to the server, `postgres_lease` keeps the lease, `postgres_watch` hears of
other processes' commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg

from postroom import mint
from postroom.domain.event import Event
from postroom.domain.ids import NodeId, SessionId
from postroom.errors import (
    CommitUncertain,
    DeadlinePassed,
    NotCommitted,
    PostroomError,
    StoreClosed,
)
from postroom.ports.store import EventListener, Subscription, Tx, WorkListener
from postroom.stores.hub import Hub
from postroom.stores.order import Found, Order
from postroom.stores.postgres_lease import Lease, now_ms
from postroom.stores.postgres_link import (
    Address,
    Attempt,
    Connection,
    Fate,
    fate_of,
    is_idle,
    is_undecided,
)
from postroom.stores.postgres_watch import Watch

P = ParamSpec("P")
R = TypeVar("R")

_READERS = 2
_PAUSE_S = (0.001, 0.25)
_DUPLICATES_MAX = 3
_EVERYTHING = ("*", "*")


class _Job:
    """One call of `write` or `read`. ``events`` and ``hints`` are those of its committed run;
    ``doubtful`` says how far the sessions' logs reach if a run of which that is not known was
    committed.
    """

    __slots__ = (
        "args",
        "deadline",
        "doubtful",
        "error",
        "events",
        "future",
        "hints",
        "kwargs",
        "reading",
        "result",
        "script",
        "taken",
        "withdrawn",
    )

    def __init__(
        self,
        script: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        future: asyncio.Future[Any],
        deadline: float,
        *,
        reading: bool,
    ) -> None:
        self.script = script
        self.args = args
        self.kwargs = kwargs
        self.future = future
        self.deadline = deadline
        self.reading = reading
        self.taken = False
        self.withdrawn = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.events: list[Event] = []
        self.hints: dict[tuple[str, str], None] = {}
        self.doubtful: dict[SessionId, int] = {}

    @property
    def lane(self) -> str | None:
        """What this must not overtake: the other jobs of its session."""
        first = self.args[0] if self.args and not self.reading else None
        return first if isinstance(first, str) else None


class _Workers:
    """Threads that do jobs, at most ``limit`` at once, those of one lane in the order they came."""

    def __init__(self, name: str, limit: int, do: Callable[[_Job], None]) -> None:
        self._name = name
        self._limit = limit
        self._do = do
        self._lock = threading.Lock()
        self._lanes: dict[str, deque[_Job]] = {}
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy = 0
        self._threads: list[threading.Thread] = []

    def put(self, job: _Job) -> None:
        with self._lock:
            lane = job.lane
            if lane is not None:
                waiting = self._lanes.get(lane)
                if waiting is not None:
                    waiting.append(job)
                    return
                self._lanes[lane] = deque()
            self._give(job)

    def _give(self, job: _Job) -> None:
        self._busy += 1
        self._ready.put(job)
        if len(self._threads) < min(self._busy, self._limit):
            thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _main(self) -> None:
        while (job := self._ready.get()) is not None:
            self._do(job)
            with self._lock:
                self._busy -= 1
                lane = job.lane
                if lane is None:
                    continue
                waiting = self._lanes[lane]
                if waiting:
                    self._give(waiting.popleft())
                else:
                    del self._lanes[lane]

    def stop(self) -> None:
        """Blocks until the threads have ended. There must be no job left."""
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()


class _Pool:
    """Connections at rest; the one used last is the first to be used again."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def take(self) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._address.connect()

    def give(self, connection: Connection) -> None:
        if is_idle(connection):
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()

    def clear(self) -> None:
        """Closes those at rest: when one is lost, the others most likely are too."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class PostgresStore:
    """See the module. Make it with `PostgresStore.open`, end it with `aclose`.

    ``on_commit`` is called in a worker thread just before (``"before"``) and after (``"after"``)
    each COMMIT of a script; crash tests hang on to it.
    """

    can_notify = True

    def __init__(
        self,
        address: Address,
        *,
        lease_ms: int,
        lock_wait_ms: int,
        clock_offset_ms: int,
        pool_size: int,
        on_commit: Callable[[str], None] | None,
    ) -> None:
        self.lease_ms = lease_ms
        self.commits = 0
        self._address = address
        self._offset_ms = clock_offset_ms
        self._lock_wait_s = lock_wait_ms / 1000
        self._on_commit = on_commit
        self._loop = asyncio.get_running_loop()
        self._accepting = True
        self._closed: asyncio.Task[None] | None = None
        self._tick_ms = now_ms()
        self._ticker: asyncio.TimerHandle | None = None
        self._jobs: set[_Job] = set()
        self._job_ended = asyncio.Event()
        self._hub = Hub(self._forgotten)
        self._pool = _Pool(address)
        self._writers = _Workers("postroom-write", pool_size, self._do)
        self._readers = _Workers("postroom-read", _READERS, self._do)
        self._ready: list[asyncio.Future[None]] = []
        self._lease = Lease(
            address,
            lease_ms=lease_ms,
            offset_ms=clock_offset_ms,
            tick_ms=lambda: self._tick_ms,
            on_ready=self._when_ready(),
            on_lost=partial(self._call, self._hub.lease_lost),
            on_found_work=self._found_work,
        )
        self._watch = Watch(
            address,
            origin=mint.claim_token(),
            offset_ms=clock_offset_ms,
            on_ready=self._when_ready(),
            on_notice=partial(self._call, self._noticed),
            on_found=partial(self._call, self._found),
            on_sweep=partial(self._call, self._sweep),
        )
        self._order = Order(self._hub, self._watch.want, now_ms)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        lease_ms: int = 30_000,
        lock_wait_ms: int = 30_000,
        clock_offset_ms: int = 0,
        pool_size: int = 8,
        on_commit: Callable[[str], None] | None = None,
    ) -> PostgresStore:
        """Connects, brings the schema up to date, and takes a lease.

        ``pool_size`` scripts that write run at once; four more connections read, listen, and keep
        the lease. ``clock_offset_ms`` is added to the server's clock, for tests. The connections
        are sessions of the server's own: a pooler in between must not share them out by
        transaction.

        Raises:
            ConfigError: the URL cannot be read, or the database cannot hold Postroom's tables.
            SchemaMismatch: a newer Postroom made it, or it is another program's.
            NotCommitted: it cannot be reached, or it was locked for ``lock_wait_ms``.
            StoreReadOnly: it cannot be written.
        """
        address = Address(url, lock_wait_ms=lock_wait_ms, lease_ms=lease_ms)
        store = cls(
            address,
            lease_ms=lease_ms,
            lock_wait_ms=lock_wait_ms,
            clock_offset_ms=clock_offset_ms,
            pool_size=pool_size,
            on_commit=on_commit,
        )
        leased, listening = store._ready
        store._keep_ticking()
        try:
            store._lease.start()
            await asyncio.shield(leased)
            store._watch.start()
            await asyncio.shield(listening)
        except BaseException:
            await store.aclose()
            raise
        return store

    # ---- the port ----

    @property
    def node(self) -> NodeId:
        return self._lease.node

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._run(script, args, kwargs, reading=False)

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._run(script, args, kwargs, reading=True)

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        subscription = self._hub.subscribe(session_id, listener)
        self._order.follow(session_id)
        if session_id is None and self._watch.all_since_ms is None:
            self._watch.all_since_ms = now_ms()
        return subscription

    def on_work(self, listener: WorkListener) -> Subscription:
        return self._hub.on_work(listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> Subscription:
        return self._hub.on_lease_lost(listener)

    async def aclose(self) -> None:
        if self._closed is None:
            self._accepting = False
            self._closed = self._loop.create_task(self._close(), name="close the store")
        await asyncio.shield(self._closed)

    # ---- the event loop's side ----

    async def _run(
        self,
        script: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        reading: bool,
    ) -> Any:
        if not self._accepting:
            raise StoreClosed("the store is shutting down", hint="send it again later")
        deadline = time.monotonic() + self._lock_wait_s
        future: asyncio.Future[Any] = self._loop.create_future()
        job = _Job(script, args, kwargs, future, deadline, reading=reading)
        self._jobs.add(job)
        (self._readers if reading else self._writers).put(job)
        try:
            return await future
        except asyncio.CancelledError:
            job.withdrawn = True
            raise

    async def _close(self) -> None:
        while self._jobs:  # each has a deadline
            self._job_ended.clear()
            await self._job_ended.wait()
        if self._ticker is not None:
            self._ticker.cancel()
        ended: asyncio.Future[None] = self._loop.create_future()
        thread = threading.Thread(
            target=self._end_threads, args=(ended,), name="postroom-close", daemon=True
        )
        thread.start()
        await ended
        thread.join()
        for future in self._ready:
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()

    def _end_threads(self, ended: asyncio.Future[None]) -> None:
        try:
            self._writers.stop()
            self._readers.stop()
            self._pool.clear()
            self._lease.close()
            self._watch.close()
        finally:
            self._call(ended.set_result, None)

    def _keep_ticking(self) -> None:
        self._tick_ms = now_ms()
        self._ticker = self._loop.call_later(self.lease_ms / 12_000, self._keep_ticking)

    def _forgotten(self, session_id: SessionId | None) -> None:
        self._order.forget(session_id)
        if session_id is None:
            self._watch.all_since_ms = None

    def _deliver(self, job: _Job) -> None:
        """The future first, then the events, in one call."""
        self._jobs.discard(job)
        self._job_ended.set()
        if job.taken and not job.reading and job.error is None:
            self.commits += 1
        if not job.future.done():
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)
        self._order.committed(job.events)
        for session_id in job.doubtful:
            self._order.suspect(session_id)
        self._hub.wake(job.hints)

    def _noticed(self, heads: Mapping[SessionId, int], work: Sequence[tuple[str, str]]) -> None:
        for session_id, seq in heads.items():
            self._order.heard(session_id, seq)
        self._hub.wake(work)

    def _found(self, found: Sequence[Found]) -> None:
        for each in found:
            self._order.found(each)

    def _sweep(self) -> None:
        self._order.look()
        self._hub.wake((_EVERYTHING,))

    # ---- from the threads ----

    def _when_ready(self) -> Callable[[BaseException | None], None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._ready.append(future)

        def settle(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        return partial(self._call, settle)

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)

    def _found_work(self) -> None:
        self._call(self._hub.wake, (_EVERYTHING,))
        self._watch.announce({}, (_EVERYTHING,))

    # ---- a worker ----

    def _do(self, job: _Job) -> None:
        try:
            if job.reading:
                self._read(job)
            else:
                self._write(job)
        except BaseException as error:
            job.error = error
        if job.events or job.hints or job.doubtful:
            heads = job.doubtful | _heads(job.events)
            work = [*job.hints, *((_EVERYTHING,) if job.doubtful else ())]
            self._watch.announce(heads, work)
        self._call(self._deliver, job)

    def _read(self, job: _Job) -> None:
        pauses = _Pauses()
        while not job.withdrawn:
            error, _ = self._attempt(job, job.deadline)
            if error is None:
                return
            if error.fate is Fate.FINAL or self._is_over(error, job.deadline):
                raise error.meaning
            pauses.take()

    def _write(self, job: _Job) -> None:
        """Until it is committed, or certainly not, or the doubt can no longer be settled."""
        if job.withdrawn:
            return
        if time.monotonic() > job.deadline:
            raise DeadlinePassed("it waited too long to be written", hint="send it again")
        until = job.deadline
        in_doubt = False
        duplicates = 0
        pauses = _Pauses()
        while True:
            error, attempt = self._attempt(job, until)
            if error is None:
                return
            if error.is_undecided and attempt is not None:
                if in_doubt:
                    raise _uncertain(error)
                in_doubt, until = True, time.monotonic() + self._lock_wait_s
                job.doubtful.update(_heads(attempt.tx.events))
                job.hints.update(dict.fromkeys(attempt.tx.hints))
            duplicates += error.is_duplicate
            final = error.fate is Fate.FINAL or duplicates > _DUPLICATES_MAX
            if final or self._is_over(error, until):
                raise _uncertain(error) if in_doubt else error.meaning
            if job.withdrawn and not in_doubt:
                return
            pauses.take()

    def _is_over(self, error: _Trouble, until: float) -> bool:
        """Whether no further attempt is made: for want of time, or of a server while closing."""
        closing = not self._accepting and error.fate is Fate.LOST
        return closing or time.monotonic() >= until

    def _attempt(self, job: _Job, until: float) -> tuple[_Trouble | None, Attempt | None]:
        """One run of the script. What it raises itself is raised; the database's troubles are not."""
        if not job.reading and not self._lease.in_force(until):
            lapsed = NotCommitted("this process has lost its lease and cannot get another yet")
            return _Trouble(Fate.LOST, lapsed), None
        connection: Connection | None = None
        attempt: Attempt | None = None
        try:
            connection = self._pool.take()
            attempt = Attempt(connection, self._offset_ms, reading=job.reading)
            job.taken = True
            left = until - time.monotonic()
            job.result = attempt.run(
                connection,
                lambda tx: job.script(tx, *job.args, **job.kwargs),
                lock_wait_ms=int(left * 1000) if left < 0.9 * self._lock_wait_s else None,
                on_commit=None if job.reading else self._on_commit,
            )
        except psycopg.Error as error:
            trouble = _Trouble(fate_of(error, connection), self._address.means(error))
            trouble.is_duplicate = error.sqlstate == "23505"
            if trouble.fate is Fate.LOST:
                self._pool.clear()
            if connection is not None:
                committing = attempt is not None and attempt.committing
                trouble.is_undecided = committing and is_undecided(error, connection)
                # After an error in a pipeline the library believes statements prepared that the
                # server passed over.
                connection.close()
            return trouble, attempt
        finally:
            if connection is not None:
                self._pool.give(connection)
        if not job.reading:
            job.events = attempt.tx.events
            job.hints.update(dict.fromkeys(attempt.tx.hints))
            if self._on_commit is not None:
                self._on_commit("after")
        return None, attempt


class _Trouble:
    """An error of the database: what to do about it, and what it means to the caller."""

    __slots__ = ("fate", "is_duplicate", "is_undecided", "meaning")

    def __init__(self, fate: Fate, meaning: PostroomError) -> None:
        self.fate = fate
        self.meaning = meaning
        self.is_duplicate = False
        self.is_undecided = False


class _Pauses:
    """Waits between attempts: each up to twice as long as the one before, with jitter."""

    __slots__ = ("_longest",)

    def __init__(self) -> None:
        self._longest = _PAUSE_S[0]

    def take(self) -> None:
        time.sleep(self._longest * random.uniform(0.5, 1))
        self._longest = min(2 * self._longest, _PAUSE_S[1])


def _heads(events: Sequence[Event]) -> dict[SessionId, int]:
    return {event.session_id: event.seq for event in events}


def _uncertain(trouble: _Trouble) -> CommitUncertain:
    return CommitUncertain(
        f"the answer to a commit was lost: {trouble.meaning.message}",
        hint="send the same again; that settles it",
    )
