"""What the suite of the store port stands on: databases of either kind, and hands to drive scripts.

`Engine` is a database with the stores a test opens on it: several on one database are several
nodes. Where the kinds differ in how something is *brought about* (a lock held, a full disk), the
engine does it, so that a test says only what must then be true.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import apsw
import psycopg

from postroom import mint
from postroom.domain.event import (
    AssistantReply,
    EndReason,
    Event,
    Params,
    RequestHeader,
    ToolResult,
)
from postroom.domain.ids import CallId, ClaimToken, CoreId, MessageId, NodeId, SessionId
from postroom.domain.message import AssistantMessage, Message, Source, Text, ToolCall, Usage
from postroom.domain.work import Fence
from postroom.ports.clock import SystemClock
from postroom.ports.store import Store, Tx
from postroom.scripts.drive import Drive, Header, Progress, begin_turn, claim_drive, finish_turn
from postroom.scripts.inbox import Operation, Receipt, RunMode, queue_message
from postroom.scripts.log import list_pending, read_events
from postroom.scripts.session import create_session
from postroom.stores.postgres import PostgresStore
from postroom.stores.sqlite import SqliteStore
from postroom.testing.faults import FaultyVFS
from tests.support import ROOT, bounded

T = TypeVar("T")

SESSION = SessionId("session_one")
CORE = CoreId("default")
OWNER = "operator"
PENDING_MAX = 1000
HEADER = Header("header-1", RequestHeader(0, "revision-1", "scripted:echo", Params()))


class ShiftedClock(SystemClock):
    """The system's clock, some milliseconds ahead."""

    def __init__(self, ahead_ms: int) -> None:
        self._ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


class Engine(ABC):
    """One database. ``address`` is what an actor process opens it by."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._stores: list[Store] = []
        self._joined: list[Engine] = []
        self._gates: list[Gate] = []

    async def open(
        self,
        *,
        ahead_ms: int = 0,
        lease_ms: int = 30_000,
        lock_wait_ms: int = 10_000,
        on_commit: Callable[[str], None] | None = None,
        **more: Any,
    ) -> Store:
        """One more node on this database, its clock ``ahead_ms`` ahead. Closed by `close`."""
        store = await bounded(
            self._open(
                ahead_ms=ahead_ms,
                lease_ms=lease_ms,
                lock_wait_ms=lock_wait_ms,
                on_commit=on_commit,
                **more,
            )
        )
        self.adopt(store)
        if isinstance(on_commit, Gate):
            self._gates.append(on_commit)
        return store

    def adopt(self, store: Store) -> None:
        """A store opened otherwise, to be closed with the rest."""
        self._stores.append(store)

    def joined(self, other: Engine) -> Engine:
        """The other one, closed with this."""
        self._joined.append(other)
        return other

    async def close(self) -> None:
        for gate in self._gates:
            gate.open()
        for store in self._stores:
            await bounded(store.aclose(), 20)
        for other in self._joined:
            await other.close()

    @abstractmethod
    async def _open(self, **options: Any) -> Store: ...

    @abstractmethod
    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """One statement from outside, committed; its rows."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Says that a Postroom of this schema version wrote the database."""

    @abstractmethod
    def locked(self, session_id: SessionId = SESSION) -> contextlib.AbstractContextManager[None]:
        """Another connection holds what a script of this session has to wait for."""

    @abstractmethod
    def open_handles(self) -> list[str]:
        """What a store leaves open: files of this process, connections at the server."""

    @abstractmethod
    def disk(self) -> contextlib.AbstractContextManager[Disk]:
        """Something that makes writing fail; open the stores it is for with its ``options``."""

    @abstractmethod
    def fill(self, tx: Tx) -> None:
        """Called in a script: writes until the disk is full, which ends the transaction."""


class Disk(ABC):
    """What makes writing a message fail."""

    options: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def set_full(self, full: bool) -> None:
        """No further message finds room."""

    @abstractmethod
    def fail_commit(self) -> None:
        """The next COMMIT of a message fails at the very end."""


class _File(Disk):
    def __init__(self, vfs: FaultyVFS) -> None:
        self.vfs = vfs
        self.options = {"vfs": vfs.name}

    def set_full(self, full: bool) -> None:
        self.vfs.full = full

    def fail_commit(self) -> None:
        self.vfs.wal_syncs_to_fail = 1


class _Server(Disk):
    """Triggers raise what the server would. They are made with the first fault: once there are tables."""

    _MAKE = (
        "CREATE SEQUENCE fault_commits",
        "CREATE TABLE fault (kind TEXT, code TEXT, commits BIGINT)",
        """CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE fault_code TEXT;
        BEGIN
            SELECT code INTO fault_code FROM fault WHERE kind = TG_ARGV[0]
                AND (commits IS NULL OR nextval('fault_commits') <= commits);
            IF fault_code IS NOT NULL THEN
                RAISE EXCEPTION 'it was told to fail' USING ERRCODE = fault_code;
            END IF;
            RETURN NULL;
        END $$""",
        "CREATE TRIGGER fail_now AFTER INSERT ON inbox FOR EACH ROW EXECUTE FUNCTION fail('now')",
        "CREATE CONSTRAINT TRIGGER fail_at_commit AFTER INSERT ON inbox DEFERRABLE INITIALLY"
        " DEFERRED FOR EACH ROW EXECUTE FUNCTION fail('commit')",
    )

    def __init__(self, engine: PostgresEngine) -> None:
        self._engine = engine
        self._made = False

    def _clear(self) -> None:
        if not self._made:
            self._made = True
            for statement in self._MAKE:
                self._engine.rows(statement)
        self._engine.rows("DELETE FROM fault")

    def set_full(self, full: bool) -> None:
        self._clear()
        if full:
            self._engine.rows("INSERT INTO fault VALUES ('now', '53100', NULL)")

    def fail_commit(self) -> None:
        self._clear()
        done = self._engine.rows("SELECT nextval('fault_commits')")[0][0]
        self._engine.rows(f"INSERT INTO fault VALUES ('commit', '58030', {done + 1})")


class SqliteEngine(Engine):
    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    async def _open(self, *, ahead_ms: int, **options: Any) -> Store:
        return await SqliteStore.open(self.path, clock=ShiftedClock(ahead_ms), **options)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[apsw.Connection]:
        connection = apsw.Connection(self.address)
        try:
            connection.set_busy_timeout(10_000)
            yield connection
        finally:
            connection.close()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self._connection() as connection:
            return connection.execute(sql).fetchall()

    def set_version(self, version: int) -> None:
        self.rows(f"PRAGMA user_version = {version}")

    @contextlib.contextmanager
    def locked(self, session_id: SessionId = SESSION) -> Iterator[None]:
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE").fetchall()
            yield
            connection.execute("ROLLBACK").fetchall()

    def open_handles(self) -> list[str]:
        folder = Path("/proc/self/fd")
        names: list[str] = []
        for each in folder.iterdir():
            with contextlib.suppress(OSError):
                names.append(os.readlink(each))
        return [name for name in names if name.startswith(self.address)]

    @contextlib.contextmanager
    def disk(self) -> Iterator[Disk]:
        with FaultyVFS(writes=True) as vfs:
            yield _File(vfs)

    def fill(self, tx: Tx) -> None:
        pages = tx.execute("PRAGMA page_count")[0][0]
        tx.execute(f"PRAGMA max_page_count = {pages + 8}")
        try:
            for _ in range(100):
                tx.execute("INSERT INTO meta VALUES (hex(randomblob(8)), hex(randomblob(3000)))")
        finally:
            tx.execute("PRAGMA max_page_count = 1073741823")


class PostgresEngine(Engine):
    async def _open(self, *, ahead_ms: int, **options: Any) -> Store:
        return await PostgresStore.open(self.address, clock_offset_ms=ahead_ms, **options)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.address, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def set_version(self, version: int) -> None:
        self.rows(f"UPDATE meta SET value = '{version}' WHERE key = 'postroom schema'")

    @contextlib.contextmanager
    def locked(self, session_id: SessionId = SESSION) -> Iterator[None]:
        with psycopg.connect(self.address) as connection:
            connection.execute("SELECT 1 FROM session WHERE id = %s FOR UPDATE", (session_id,))
            yield
            connection.rollback()

    def open_handles(self) -> list[str]:
        rows = self.rows(
            "SELECT application_name || ': ' || query FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return [row[0] for row in rows]

    def empty(self) -> None:
        """As a new database is."""
        self.rows("DROP SCHEMA public CASCADE")
        self.rows("CREATE SCHEMA public")

    @contextlib.contextmanager
    def disk(self) -> Iterator[Disk]:
        yield _Server(self)

    def fill(self, tx: Tx) -> None:
        tx.execute("INSERT INTO meta SELECT 'filler', 'lost'")
        tx.execute("DO $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53100'; END $$")


class Gate:
    """Holds an engine at a COMMIT: pass it as ``on_commit``. It holds once, then lets all through."""

    def __init__(self) -> None:
        self._at: str | None = None
        self._reached = threading.Event()
        self._go = threading.Event()

    def __call__(self, phase: str) -> None:
        if phase == self._at:
            self._at = None
            self._reached.set()
            assert self._go.wait(30)

    def hold(self, phase: str = "before") -> None:
        self._reached.clear()
        self._go.clear()
        self._at = phase

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 15)

    def open(self) -> None:
        self._go.set()


# ---- hands ----


def message(text: str = "hello", name: str | None = None) -> Message:
    message_id = mint.message_id() if name is None else MessageId(f"msg_{name}")
    return Message(message_id, (Text(text),), Source())


def reply(
    turn: int,
    step: int = 1,
    text: str = "done",
    calls: Iterable[str] = (),
    of: SessionId = SESSION,
) -> AssistantReply:
    """A reply with a text and calls of these ids."""
    blocks = (Text(text), *(ToolCall(call, "look", "{}") for call in calls))
    finish = "tool_calls" if len(blocks) > 1 else "stop"
    content = AssistantMessage(f"reply_{of}_{turn}_{step}", blocks)
    return AssistantReply(turn, step, content, "scripted:echo", finish, Usage(10, 5))


def result(turn: int, call: str, step: int = 1) -> ToolResult:
    return ToolResult(turn, step, CallId(call), (Text(f"result of {call}"),), "ok")


class Hand:
    """One session, driven script by script through one store."""

    def __init__(self, store: Store, session_id: SessionId = SESSION) -> None:
        self.store = store
        self.id = session_id
        self._claims: list[ClaimToken] = []

    async def create(self) -> Hand:
        await self.store.write(create_session, self.id, core_id=CORE, owner=OWNER)
        return self

    async def queue(
        self,
        text: str = "hello",
        operation: Operation = "followup",
        *,
        name: str | None = None,
        run: RunMode | None = None,
        pending_max: int = PENDING_MAX,
    ) -> Receipt:
        return await self.store.write(
            queue_message,
            self.id,
            message(text, name),
            operation,
            pending_max=pending_max,
            run=run,
        )

    async def claim(self, node: NodeId | None = None, token: str | None = None) -> Drive | None:
        """Claims the drive, over an earlier claim of this hand's too: it drives under one only."""
        abandoned = tuple(self._claims)
        self._claims.append(ClaimToken(token) if token else mint.claim_token())
        return await self.store.write(
            claim_drive,
            self.id,
            node or self.store.node,
            self._claims[-1],
            attempts_max=3,
            abandoned=abandoned,
        )

    async def claimed(self) -> Drive:
        drive = await self.claim()
        assert drive is not None
        return drive

    async def begin(self, fence: Fence, turn: int) -> Progress:
        return await self.store.write(begin_turn, self.id, fence, turn, HEADER)

    async def finish(self, fence: Fence, turn: int, text: str = "done") -> Progress:
        return await self.store.write(
            finish_turn,
            self.id,
            fence,
            turn,
            EndReason("completed"),
            reply(turn, text=text, of=self.id),
        )

    async def finish_step(self, fence: Fence, turn: int, step: int) -> Progress:
        """Ends the turn in a later step than its first."""
        last = reply(turn, step, of=self.id)
        return await self.store.write(
            finish_turn, self.id, fence, turn, EndReason("completed"), last
        )

    async def fail(self, fence: Fence, turn: int) -> Progress:
        """Ends the turn with an error."""
        reason = EndReason("error", code="server", message="the model failed")
        return await self.store.write(finish_turn, self.id, fence, turn, reason)

    async def one_turn(self, turn: int) -> Progress:
        """Claims what is pending and answers it; the drive is kept if there is more."""
        drive = await self.claimed()
        await self.begin(drive.fence, turn)
        return await self.finish(drive.fence, turn)

    async def log(self) -> list[Event]:
        return await self.store.read(read_events, self.id, 0, 1_000_000)

    async def types(self, after: int = 0) -> list[str]:
        return [e.type for e in await self.log() if e.seq > after]

    async def pending(self) -> list[str]:
        """The texts of what is pending, in the order of the lists."""
        waiting = await self.store.read(list_pending, self.id)
        return ["".join(b.text for b in p.message.content if isinstance(b, Text)) for p in waiting]


class Heard:
    """Gathers the events a subscription gives."""

    def __init__(self, store: Store, session_id: SessionId | None = SESSION) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self.subscription = store.subscribe(session_id, self._take)

    def _take(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
        self._news.set()

    @property
    def seqs(self) -> list[int]:
        return [event.seq for event in self.events]

    def since(self, seq: int) -> list[Event]:
        """What was heard from a seq on: of another process a little more may come from before."""
        return [event for event in self.events if event.seq >= seq]

    async def until(self, done: Callable[[list[Event]], bool], seconds: float = 15) -> None:
        """Returns when what was heard suffices; fails the test if it does not come."""

        async def wait() -> None:
            while not done(self.events):
                self._news.clear()
                await self._news.wait()

        try:
            await bounded(wait(), seconds)
        except AssertionError as error:
            error.add_note(f"heard {[(e.session_id, e.seq) for e in self.events][-20:]}")
            raise

    async def reach(self, seq: int, seconds: float = 15) -> None:
        await self.until(lambda events: bool(events) and events[-1].seq >= seq, seconds)


async def eventually(attempt: Callable[[], Awaitable[T | None]], seconds: float = 15) -> T:
    """The first answer that is not None; asks again and again, bounded. For what tells nobody."""

    async def ask() -> T:
        for wait in itertools.chain((0.0, 0.001, 0.003), itertools.repeat(0.01)):
            answer = await attempt()
            if answer is not None:
                return answer
            await asyncio.sleep(wait)
        raise AssertionError

    return await bounded(ask(), seconds)


async def until(done: Callable[[], object], seconds: float = 15) -> None:
    """Returns when something that tells nobody has become true."""

    async def look() -> bool | None:
        return True if done() else None

    await eventually(look, seconds)


# ---- another process ----


class Actor:
    """A process of its own with a store on the same database; told what to do line by line.

    See `tests.contract.store_actor` for what it understands.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, verb: str, *args: Any, seconds: float = 20) -> Any:
        """What it answers; an error it met is an answer too, ``{"error": code}``."""
        await self.tell(verb, *args)
        return await self.heard(seconds)

    async def tell(self, verb: str, *args: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *args]).encode() + b"\n")
        await self.process.stdin.drain()

    async def heard(self, seconds: float = 20) -> Any:
        assert self.process.stdout is not None
        line = await bounded(self.process.stdout.readline(), seconds)
        assert line, "the actor has ended"
        return json.loads(line)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def wait(self) -> int:
        return await bounded(self.process.wait(), 20)


@contextlib.asynccontextmanager
async def actor(engine: Engine, **options: Any) -> AsyncGenerator[Actor]:
    """An actor that has opened its store; killed at the end if it still lives."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.contract.store_actor",
        engine.address,
        json.dumps(options),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Actor(process)
    try:
        assert await one.heard() == "open"
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await bounded(process.wait())
        # Reads the pipe to its end, so that its transport is closed with the process.
        assert process.stdout is not None
        await bounded(process.stdout.read())
