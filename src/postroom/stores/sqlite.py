"""The SQLite engine: one writer thread, group commit, a few readers.

One thread owns the writing connection. It takes what is queued, runs the scripts in one ``BEGIN
IMMEDIATE … COMMIT``, and resolves the callers after the commit. Several processes
may share the file: another's commit is noticed by ``PRAGMA data_version``.

The rules it keeps, and what goes wrong without them:

- A script that fails has nearly always refused before it wrote: then there is nothing to undo. If it
  had written, or its error ended the transaction (a full disk does), nothing of the group is taken
  for written: the innocent scripts run again, one transaction each. Savepoints would cost every
  script what only a failing one needs (measured: a tenth of the turns).
- A COMMIT that failed may still lie in the log file and come back. So the connection is replaced
  and one more commit is made over it before anybody is told "not written". If that fails too the
  outcome is called uncertain, and nothing more is accepted until a commit succeeds again.
- The wait for another process's lock is our own short, jittered retry: the library's starves.
- The lease is renewed here, ahead of queued scripts: never behind a busy event loop. It stops if
  that loop has not moved for a whole lease. What lapsed is not renewed: the process goes on under
  another identity.
- What other processes committed is told up to the newest event seen *inside* our own transaction:
  one read after its COMMIT would leave out what they wrote in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import apsw

from postroom import mint
from postroom.domain.event import Event
from postroom.domain.ids import NodeId, SessionId
from postroom.errors import (
    CommitUncertain,
    Corrupt,
    DeadlinePassed,
    NotCommitted,
    PostroomError,
    SchemaMismatch,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
)
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.store import EventListener, Row, SqlValue, Subscription, Tx, WorkListener
from postroom.stores.check import lost_commits, torn
from postroom.stores.hub import Hub
from postroom.stores.node import (
    NodeLock,
    bury_nodes,
    forget_nodes,
    other_nodes,
    proven_dead,
    register_node,
    remove_node,
    renew_node,
)
from postroom.stores.schema import MIGRATIONS, VERSION

P = ParamSpec("P")
R = TypeVar("R")

_BATCH_MAX = 512
_BATCHES_BEFORE_PAUSE_S = 0.05
_PAUSE_S = 0.001
_POLL_ACTIVE_S = 0.02
_POLL_IDLE_S = 0.05
_BURY_EVERY_S = 0.5
_RETRY_S = (0.0005, 0.0015)
_CHECKPOINT_PAGES = 8000
_DAY_MS = 86_400_000
_UNSEEN = -1

APPLICATION_ID = 0x50535452  # "PSTR"


class SqliteTx:
    """What a script sees. One is made for each run of a script."""

    for_update = ""
    skip_locked = ""

    __slots__ = ("_connection", "_now", "events", "hints")

    def __init__(self, connection: apsw.Connection, now: Callable[[], int]) -> None:
        self._connection = connection
        self._now: int | Callable[[], int] = now
        self.events: list[Event] = []
        self.hints: list[tuple[str, str]] = []

    def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Row]:
        return _run(self._connection, sql, params)

    def execute_many(self, sql: str, rows: Sequence[Mapping[str, SqlValue]]) -> None:
        cast("Any", self._connection).executemany(sql, rows)

    def now(self) -> int:
        if not isinstance(self._now, int):
            self._now = self._now()
        return self._now

    def publish(self, event: Event) -> None:
        self.events.append(event)

    def wake(self, kind: str, key: str) -> None:
        self.hints.append((kind, key))


def _run(
    connection: apsw.Connection,
    sql: str,
    params: Mapping[str, SqlValue] | tuple[SqlValue, ...] | None = None,
) -> list[Row]:
    """One statement's rows. The library's own types are left here."""
    return cast("Any", connection).execute(sql, params).fetchall()


class _Job:
    __slots__ = (
        "args",
        "deadline",
        "error",
        "future",
        "kwargs",
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
    ) -> None:
        self.script = script
        self.args = args
        self.kwargs = kwargs
        self.future = future
        self.deadline = deadline
        self.taken = False
        self.withdrawn = False
        self.result: Any = None
        self.error: BaseException | None = None


class _GroupLost(Exception):
    """The transaction ended under a script; ``job`` is the one whose error did it."""

    def __init__(self, job: _Job) -> None:
        self.job = job


class SqliteStore:
    """See the module. Make it with `SqliteStore.open`, end it with `aclose`.

    ``on_commit`` is called in the writer thread just before (``"before"``) and after
    (``"after"``) each COMMIT; crash tests hang on to it.
    """

    can_notify = False

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock,
        lease_ms: int,
        lock_wait_ms: int,
        vfs: str | None,
        on_commit: Callable[[str], None] | None,
    ) -> None:
        self.path = path
        self.lease_ms = lease_ms
        self.commits = 0
        self._clock = clock
        self._lock_wait_s = lock_wait_ms / 1000
        self._vfs = vfs
        self._on_commit = on_commit
        self._hub = Hub()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._accepting = True
        self._broken: CommitUncertain | None = None
        self._tick = _lease_clock()
        self._ticker: asyncio.TimerHandle | None = None
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="postroom-read")
        self._reading = threading.local()
        self._read_connections: list[apsw.Connection] = []
        self._nodes = path.with_name(path.name + "-nodes")
        self._node = mint.node_id()
        self._node_token = mint.claim_token()
        self._node_lock: NodeLock | None = None
        self._renewed_at = 0.0
        self._last_event = 0
        self._data_version = _UNSEEN
        self._thread = threading.Thread(target=self._main, name="postroom-write", daemon=True)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    async def open(
        cls,
        path: Path | str,
        *,
        clock: Clock | None = None,
        lease_ms: int = 90_000,
        lock_wait_ms: int = 30_000,
        vfs: str | None = None,
        on_commit: Callable[[str], None] | None = None,
    ) -> SqliteStore:
        """Opens or makes the database file, brings its schema up to date, and takes a lease.

        Raises:
            SchemaMismatch: a newer Postroom wrote it, or it is another program's.
            StoreReadOnly: the file or its folder cannot be written.
            StoreLocked: another process held it for ``lock_wait_ms``.
            Corrupt: it is no database, or a damaged one.
        """
        path = Path(path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreReadOnly(
                f"the folder {path.parent} cannot be made: {error.strerror}",
                hint="choose another place with --db",
            ) from error
        store = cls(
            path,
            clock=clock or SystemClock(),
            lease_ms=lease_ms,
            lock_wait_ms=lock_wait_ms,
            vfs=vfs,
            on_commit=on_commit,
        )
        store._thread.start()
        try:
            await asyncio.shield(store._ready)
        except BaseException:
            await store.aclose()
            raise
        store._keep_ticking()
        return store

    # ---- the port ----

    @property
    def node(self) -> NodeId:
        return self._node

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if not self._accepting:
            raise StoreClosed("the store is shutting down", hint="send it again later")
        job = _Job(
            script,
            args,
            kwargs,
            self._loop.create_future(),
            time.monotonic() + self._lock_wait_s,
        )
        self._queue.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.withdrawn = True
            raise

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if not self._accepting:
            raise StoreClosed("the store is closed")

        def snapshot() -> R:
            try:
                connection = self._reader()
                tx = SqliteTx(connection, self._clock.now_ms)
                _run(connection, "BEGIN")
                try:
                    return script(tx, *args, **kwargs)
                finally:
                    # On a damaged file this raises too, and would hide what went wrong first.
                    with contextlib.suppress(apsw.Error):
                        _run(connection, "ROLLBACK")
            except apsw.Error as error:
                raise _translate(error, self.path) from error

        return await self._loop.run_in_executor(self._readers, snapshot)

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        return self._hub.subscribe(session_id, listener)

    def on_work(self, listener: WorkListener) -> Subscription:
        return self._hub.on_work(listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> Subscription:
        return self._hub.on_lease_lost(listener)

    async def aclose(self) -> None:
        first, self._accepting = self._accepting, False
        if self._ticker is not None:
            self._ticker.cancel()
        try:
            # Readers first: the log is emptied into the file by the last connection to close, if
            # that one may write.
            await self._loop.run_in_executor(None, self._close_readers)
        finally:
            if first:
                self._queue.put(None)
        await asyncio.shield(self._ended)
        await self._loop.run_in_executor(None, self._thread.join)
        if not self._ready.done():
            self._ready.cancel()
        elif not self._ready.cancelled():
            self._ready.exception()

    def _close_readers(self) -> None:
        self._readers.shutdown()
        for connection in self._read_connections:
            connection.close()
        self._read_connections.clear()

    # ---- the event loop's side ----

    def _keep_ticking(self) -> None:
        self._tick = _lease_clock()
        self._ticker = self._loop.call_later(self.lease_ms / 12_000, self._keep_ticking)

    def _deliver(
        self,
        jobs: Sequence[_Job],
        events: Sequence[Event],
        hints: Sequence[tuple[str, str]],
        lease_lost: bool,
    ) -> None:
        """Futures first, then events, in one callback."""
        for job in jobs:
            if job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)
        if lease_lost:
            self._hub.lease_lost()
        if events:
            self._hub.publish(events)
        if hints:
            self._hub.wake(dict.fromkeys(hints))

    def _settle(self, future: asyncio.Future[None], error: BaseException | None = None) -> None:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _reader(self) -> apsw.Connection:
        connection = getattr(self._reading, "connection", None)
        if connection is None:
            connection = apsw.Connection(
                str(self.path), flags=apsw.SQLITE_OPEN_READONLY, vfs=self._vfs
            )
            connection.set_busy_timeout(int(self._lock_wait_s * 1000))
            _run(connection, "PRAGMA temp_store = MEMORY")
            self._reading.connection = connection
            self._read_connections.append(connection)
        return cast("apsw.Connection", connection)

    # ---- the writer thread ----

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, *args)

    def _main(self) -> None:
        try:
            self._refuse_torn()
            self._writer = self._connect()
            self._refuse_shortened_log()
            self._migrate()
            self._introduce()
            self._last_event = self._newest_event()
        except BaseException as error:
            self._accepting = False
            writer = getattr(self, "_writer", None)
            if writer is not None:
                # What is not to be opened is not to be touched: closing would empty the log.
                with contextlib.suppress(apsw.Error):
                    writer.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                writer.close()
            if self._node_lock is not None:
                self._node_lock.release()
            translated = _translate(error, self.path) if isinstance(error, apsw.Error) else error
            self._call(self._settle, self._ready, translated)
            self._refuse_rest()
            self._call(self._settle, self._ended)
            return
        self._call(self._settle, self._ready)
        try:
            self._serve()
        finally:
            self._refuse_rest()
            with contextlib.suppress(Exception):
                self._alone(remove_node, self._node, self._node_token)
            with contextlib.suppress(Exception):
                self._writer.close()
            if self._node_lock is not None:
                self._node_lock.release()
            self._call(self._settle, self._ended)

    def _refuse_rest(self) -> None:
        refused: list[_Job] = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    job.error = StoreClosed(
                        "the store is shutting down", hint="send it again later"
                    )
                    refused.append(job)
        if refused:
            self._call(self._deliver, refused, (), (), False)

    def _refuse_torn(self) -> None:
        """SQLite would fill up a page that was cut off with zeros, and go on."""
        finding = torn(self.path)
        if finding is not None:
            raise _damaged(self.path, str(finding))

    def _refuse_shortened_log(self) -> None:
        """SQLite would begin the log anew at a damaged frame, and drop the commits behind it."""
        before = -1
        for _ in range(10):
            frames = _run(self._writer, "PRAGMA wal_checkpoint(NOOP)")[0][1]
            finding = lost_commits(self.path, max(frames, 0))
            if finding is None:
                return
            if frames == before:  # else another process appended them after the count
                raise _damaged(self.path, str(finding))
            before = frames

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path), vfs=self._vfs, statementcachesize=256)
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: apsw.Connection) -> None:
        connection.set_busy_timeout(0)
        deadline = time.monotonic() + self._lock_wait_s
        self._patiently(lambda: _check_ours(connection, self.path), deadline)
        for pragma in (
            "PRAGMA journal_mode = WAL",
            "PRAGMA synchronous = FULL",
            "PRAGMA temp_store = MEMORY",
            f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            "PRAGMA cache_size = -8192",
        ):
            self._patiently(lambda p=pragma: _run(connection, p), deadline)

    def _patiently(self, action: Callable[[], R], deadline: float) -> R:
        """Repeats an action that another process's lock refuses, until the deadline."""
        while True:
            try:
                return action()
            except (apsw.BusyError, apsw.LockedError) as error:
                if time.monotonic() >= deadline:
                    raise StoreLocked(
                        f"another process has held the write lock of {self.path} for"
                        f" {self._lock_wait_s:g} s",
                        hint="end that process or wait for it, then send the same again",
                    ) from error
                time.sleep(random.uniform(*_RETRY_S))

    def _begin(self, deadline: float | None = None) -> None:
        if deadline is None:
            deadline = time.monotonic() + self._lock_wait_s
        self._patiently(lambda: _run(self._writer, "BEGIN IMMEDIATE"), deadline)

    def _rollback(self) -> None:
        if self._writer.in_transaction:
            with contextlib.suppress(apsw.Error):
                _run(self._writer, "ROLLBACK")

    def _migrate(self) -> None:
        self._begin()
        try:
            made = migrate(self._writer, self.path, begun=True)
        except BaseException:
            self._rollback()
            raise
        if made and os.name == "posix":
            with contextlib.suppress(OSError):
                os.chmod(self.path, 0o600)

    def _introduce(self) -> None:
        """Takes a node identity: lock file first, so that a row without a living lock is dead."""
        lock = NodeLock(self._nodes, self._node)
        previous, self._node_lock = self._node_lock, lock
        if previous is not None:
            previous.release()
        self._bury_at = 0.0
        now = _lease_clock()
        about = f"pid {os.getpid()}"
        self._alone(register_node, self._node, self._node_token, self.lease_ms, about)
        self._renewed(now)

    def _renewed(self, at: float) -> None:
        self._renewed_at = at
        self._renew_at = at + self.lease_ms / 6000

    def _newest_event(self) -> int:
        return _run(self._writer, "SELECT coalesce(max(id), 0) FROM event")[0][0]

    def _version(self) -> int:
        return _run(self._writer, "PRAGMA data_version")[0][0]

    def _alone(self, script: Callable[..., R], *args: object) -> R:
        """Runs one of the engine's own scripts in a transaction of its own."""
        self._begin()
        try:
            result = script(SqliteTx(self._writer, self._clock.now_ms), *args)
            _run(self._writer, "COMMIT")
            return result
        except BaseException:
            self._rollback()
            raise

    def _serve(self) -> None:
        active = False
        busy_since: float | None = None
        while True:
            now = time.monotonic()
            if _lease_clock() >= self._renew_at:
                self._renew()
            if now >= self._bury_at:
                self._bury()
            try:
                job = self._queue.get(timeout=_POLL_ACTIVE_S if active else _POLL_IDLE_S)
            except queue.Empty:
                active = self._notice_others()
                busy_since = None
                continue
            if job is None:
                return
            if _lease_clock() >= self._renew_at:  # stopped or asleep while it waited for the job
                self._renew()
            if busy_since is None or self._queue.empty():
                busy_since = now
            elif now - busy_since > _BATCHES_BEFORE_PAUSE_S:
                # Another process retries every millisecond or so: leave it a gap.
                time.sleep(_PAUSE_S)
                busy_since = None
            active = True
            if not self._group(job):
                return

    def _notice_others(self) -> bool:
        """Publishes what other processes have committed since the last look."""
        try:
            if self._version() == self._data_version:
                return False
            self._data_version = self._version()
            events = self._foreign_events()
        except apsw.Error:
            return False
        self._call(self._deliver, (), events, (("*", "*"),), False)
        return True

    def _foreign_events(self) -> list[Event]:
        rows = _run(
            self._writer,
            "SELECT event.id, session.id, seq, type, at, data FROM event"
            " JOIN session ON session.sid = event.sid WHERE event.id > ? ORDER BY event.id",
            (self._last_event,),
        )
        if rows:
            self._last_event = rows[-1][0]
        return [Event(SessionId(r[1]), r[2], r[3], r[4], r[5]) for r in rows]

    def _renew(self) -> None:
        now, lease = _lease_clock(), self.lease_ms / 1000
        if now - self._tick > lease and now - self._renewed_at <= lease:
            self._renew_at = now + lease / 60
            return  # the event loop hangs: what it claimed is better done by another
        self._renew_at = now + lease / 6
        try:
            if self._alone(renew_node, self._node, self._node_token, self.lease_ms):
                self._renewed(now)
                return
            self._alone(remove_node, self._node, self._node_token)
            self._node = mint.node_id()
            self._node_token = mint.claim_token()
            self._introduce()
        except (apsw.Error, StoreError):
            return
        self._call(self._deliver, (), (), (("*", "*"),), True)

    def _bury(self) -> None:
        self._bury_at = time.monotonic() + _BURY_EVERY_S
        try:
            tx = SqliteTx(self._writer, self._clock.now_ms)
            dead = [n for n in other_nodes(tx, self._node) if proven_dead(self._nodes, n)]
            if not dead:
                return
            self._alone(bury_nodes, dead)
            self._alone(forget_nodes, self._clock.now_ms() - _DAY_MS)
        except (apsw.Error, StoreError):
            return
        for node in dead:
            with contextlib.suppress(OSError):
                (self._nodes / node).unlink()
        self._call(self._deliver, (), (), (("*", "*"),), False)

    def _group(self, first: _Job) -> bool:
        """One group commit; False if the store is to end after it."""
        jobs = [first]
        if self._broken is not None and not self._probe():
            first.taken = True
            first.error = NotCommitted(
                f"nothing is written until the database can be again: {self._broken.message}",
                hint="free the disk or mend it, then send it again",
            )
            self._call(self._deliver, jobs, (), (), False)
            return True
        try:
            self._begin(max(first.deadline, time.monotonic()))
        except (StoreError, apsw.Error) as error:
            first.taken = True
            first.error = _translate(error, self.path)
            self._call(self._deliver, jobs, (), (), False)
            return True
        go_on = True
        with contextlib.suppress(queue.Empty):
            while len(jobs) < _BATCH_MAX:
                job = self._queue.get_nowait()
                if job is None:
                    go_on = False
                    break
                jobs.append(job)
        try:
            self._run(jobs)
        except _GroupLost as lost:
            rest = [j for j in jobs if j is not lost.job]
            self._call(self._deliver, [lost.job], (), (), False)
            for job in rest:
                self._run_alone(job)
        except apsw.Error as error:  # not of a script, nor of the COMMIT: the file cannot be read
            self._rollback()
            for job in jobs:
                job.error = job.error or _translate(error, self.path)
            self._call(self._deliver, jobs, (), (), False)
        return go_on

    def _run_alone(self, job: _Job) -> None:
        job.error = None
        try:
            self._begin()
            self._run([job])
        except _GroupLost:
            self._call(self._deliver, [job], (), (), False)
        except (StoreError, apsw.Error) as error:
            job.error = _translate(error, self.path)
            self._call(self._deliver, [job], (), (), False)

    def _run(self, jobs: list[_Job]) -> None:
        """Runs the scripts in the open transaction, commits, and tells everybody."""
        writer = self._writer
        events: list[Event] = []
        hints: list[tuple[str, str]] = []
        now = time.monotonic()
        if self._version() != self._data_version:
            # Others committed first: their events go out before ours, whatever becomes of ours.
            self._data_version = self._version()
            self._call(self._deliver, (), self._foreign_events(), (("*", "*"),), False)
        wrote = False
        for job in jobs:
            job.taken = True
            if job.withdrawn:
                continue
            if now > job.deadline:
                job.error = DeadlinePassed("it waited too long to be written", hint="send it again")
                continue
            tx = SqliteTx(writer, self._clock.now_ms)
            changes = writer.total_changes()
            try:
                job.result = job.script(tx, *job.args, **job.kwargs)
            except Exception as error:
                job.error = _translate(error, self.path) if isinstance(error, apsw.Error) else error
                if not writer.in_transaction or writer.total_changes() != changes:
                    self._rollback()
                    raise _GroupLost(job) from error
                continue
            wrote = wrote or writer.total_changes() != changes
            events.extend(tx.events)
            hints.extend(tx.hints)
        try:
            newest = self._newest_event() if wrote else self._last_event
            if self._on_commit is not None:
                self._on_commit("before")
            _run(writer, "COMMIT")
        except apsw.Error as error:
            self._commit_failed(jobs, error)
            return
        if wrote:
            self.commits += 1
            self._last_event = newest
        if self._on_commit is not None:
            self._on_commit("after")
        self._call(self._deliver, jobs, events, hints, False)

    def _commit_failed(self, jobs: list[_Job], cause: apsw.Error) -> None:
        """The frames of a failed COMMIT may still be in the log: one more commit goes over them.

        Not where a write found no room: the frame that would make them count is the last one.
        """
        try:
            self._rollback()
            if not isinstance(cause, apsw.FullError) or self._writer.in_transaction:
                self._replace_writer()
        except (apsw.Error, StoreError):
            self._broken = CommitUncertain(
                f"the database could not be written, and it is unknown whether it was: {cause}",
                hint="free the disk or mend it, then send the same again",
            )
            error: PostroomError = self._broken
        else:
            error = _translate(cause, self.path)
            if not isinstance(error, NotCommitted):
                error = NotCommitted(f"nothing was written: {cause}")
        for job in jobs:
            if job.error is None:
                job.error = error
        self._call(self._deliver, jobs, (), (), False)

    def _replace_writer(self) -> None:
        fresh = self._connect()  # before the old one closes: the log's index must not be lost
        old, self._writer = self._writer, fresh
        self._data_version = _UNSEEN  # each connection counts for itself
        with contextlib.suppress(apsw.Error):
            old.close()
        self._scrub()

    def _scrub(self) -> None:
        self._begin()
        try:
            _run(self._writer, "UPDATE meta SET value = value + 1 WHERE key = 'scrub'")
            _run(self._writer, "COMMIT")
        except BaseException:
            self._rollback()
            raise

    def _probe(self) -> bool:
        """After an uncertain commit: whether a commit succeeds again."""
        try:
            self._rollback()
            self._scrub()
        except (apsw.Error, StoreError):
            return False
        self._broken = None
        return True


def migrate(connection: apsw.Connection, path: Path, *, begun: bool = False) -> bool:
    """Brings a database's schema up to date in one transaction; whether the database is new.

    Raises:
        SchemaMismatch: it is another program's, or a newer Postroom's.
    """
    if not begun:
        _run(connection, "BEGIN IMMEDIATE")
    version = _check_ours(connection, path)
    words = {
        "identity": "INTEGER PRIMARY KEY",
        "lasting_identity": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "without_rowid": "WITHOUT ROWID",
    }
    for migration in MIGRATIONS[version:]:
        for statement in migration:
            _run(connection, statement.format_map(words))
    if version < VERSION:
        _run(connection, f"PRAGMA application_id = {APPLICATION_ID}")
        _run(connection, f"PRAGMA user_version = {VERSION}")
    _run(connection, "COMMIT")
    return version == 0


def _check_ours(connection: apsw.Connection, path: Path) -> int:
    """The schema version (0: a new database), found before anything is changed.

    Raises:
        SchemaMismatch: it is another program's, or a newer Postroom's.
    """
    # One statement, one snapshot: another process may be making the tables meanwhile.
    [(application, version, tables)] = _run(
        connection,
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)"
        " FROM pragma_application_id, pragma_user_version",
    )
    if application not in (0, APPLICATION_ID) or (application == 0 and tables > 0):
        raise SchemaMismatch(
            f"{path} is another program's database", hint="choose another file with --db"
        )
    if version > VERSION:
        raise SchemaMismatch(
            f"{path} has schema version {version}, this Postroom knows {VERSION}",
            hint="upgrade Postroom; nothing was changed",
        )
    return version


def _lease_clock() -> float:
    """Seconds that pass while the machine sleeps too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_WHAT = re.compile(r"^\w+Error: ")


def _damaged(path: Path, what: str) -> Corrupt:
    return Corrupt(
        f"{path} is damaged or no database: {what}",
        hint="`postroom doctor` says where; restore a backup with `postroom db restore`",
    )


def _translate(error: BaseException, path: Path) -> PostroomError:
    """The library's errors as ours."""
    if isinstance(error, PostroomError):
        return error
    text = _WHAT.sub("", str(error))
    match error:
        case apsw.FullError():
            return StoreFull(
                f"the disk is full: {path}", hint="free some space, then send it again"
            )
        case (
            apsw.ReadOnlyError() | apsw.CantOpenError() | apsw.PermissionsError() | apsw.AuthError()
        ):
            return StoreReadOnly(
                f"{path} cannot be opened for writing: {text}",
                hint="check the permissions of the file and its folder, or choose another with --db",
            )
        case apsw.BusyError() | apsw.LockedError():
            return StoreLocked(f"another process holds the write lock of {path}")
        case apsw.CorruptError() | apsw.NotADBError():
            return _damaged(path, text)
        case _:
            return NotCommitted(f"the database refused: {text}")
