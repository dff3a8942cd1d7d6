"""Receipts, beside bare commits of the very statements that the queue script runs.

The statements are recorded from the script itself, on a copy of the database they are then
replayed on. The floor is that replay: alone, and through a bare writer with group commit.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from bench import figures, rooms
from bench.figures import Figure, Figures, Stretch, Task, median, percentile
from bench.floor import Group, synchronous
from postroom import mint
from postroom.domain.ids import SessionId
from postroom.domain.message import Message, Source, Text
from postroom.scripts.inbox import queue_message

if TYPE_CHECKING:
    from postroom.domain.event import Event
    from postroom.flow.agent import Agent
    from postroom.ports.store import SqlValue, Tx

_SETUP = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA wal_autocheckpoint = 8000",
    "PRAGMA cache_size = -8192",
)
_PENDING_MAX = 1000
_A_SESSION = 200  # receipts of one session before the next: few enough that none is refused
_RECEIPTS_A_SECOND = 3000  # more than any disk gives one producer


class Recorder:
    """A transaction that also writes down what it is asked to run."""

    for_update = ""
    skip_locked = ""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self.statements: list[tuple[str, Any]] = []

    def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Any]:
        self.statements.append((sql, params))
        return self._tx.execute(sql, params)

    def execute_many(self, sql: str, rows: Sequence[Mapping[str, SqlValue]]) -> None:
        self.statements.extend((sql, row) for row in rows)
        self._tx.execute_many(sql, rows)

    def now(self) -> int:
        return self._tx.now()

    def publish(self, event: Event) -> None:
        pass

    def wake(self, kind: str, key: str) -> None:
        pass


def _record(tx: Tx, session_id: SessionId, count: int) -> list[list[tuple[str, Any]]]:
    """The statements of so many receipts of one session, in order."""
    out: list[list[tuple[str, Any]]] = []
    for _ in range(count):
        recorder = Recorder(tx)
        message = Message(mint.message_id(), (Text(rooms.PROMPT),), Source())
        queue_message(recorder, session_id, message, "followup", pending_max=_PENDING_MAX)
        out.append(recorder.statements)
    return out


async def _prepare(folder: Path, sessions: int) -> tuple[Path, list[SessionId]]:
    """A database with sessions that nobody drives, closed; to be copied."""
    template = folder / "template"
    template.mkdir()
    async with rooms.open_bench_room(template, drive=False) as room:
        agents = await asyncio.gather(*[room.session() for _ in range(sessions)])
    return template / rooms.DATABASE, [agent.session_id for agent in agents]


def copy_of(database: Path, folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return Path(shutil.copy(database, folder / name / rooms.DATABASE))


async def _statements(
    database: Path, folder: Path, sessions: Sequence[SessionId], count: int
) -> list[list[list[tuple[str, Any]]]]:
    copied = copy_of(database, folder, "record")
    async with rooms.open_bench_room(copied.parent, drive=False) as room:
        found = [await room.room.store.write(_record, each, count) for each in sessions]
    shutil.rmtree(copied.parent)
    return found


async def latency(task: Task) -> Figures:
    """One producer, one receipt after the other; a bare commit between each two."""
    folder = Path(task.folder)
    database, ids = await _prepare(folder, 1 + int(task.seconds * _RECEIPTS_A_SECOND / _A_SESSION))
    recorded = await _statements(database, folder, ids, _A_SESSION)
    bare = apsw.Connection(str(copy_of(database, folder, "bare")), statementcachesize=256)
    for statement in _SETUP:
        bare.execute(statement).fetchall()
    level = synchronous(bare)
    bare_ms: list[float] = []
    receipt_ms: list[float] = []
    bare_counts = Stretch(lambda: len(bare_ms))
    copied = copy_of(database, folder, "receipts")
    async with rooms.open_bench_room(copied.parent, drive=False) as room:
        agents = [room.room.agent(each) for each in ids]
        counts = room.stretch()
        until = time.perf_counter() + task.seconds
        for agent, session in zip(agents, recorded, strict=True):
            for statements in session:
                if time.perf_counter() > until:
                    break
                with bare_counts:
                    started = time.perf_counter()
                    _commit(bare, statements)
                    bare_ms.append((time.perf_counter() - started) * 1000)
                with counts:
                    started = time.perf_counter()
                    await agent.queue(rooms.PROMPT)
                    receipt_ms.append((time.perf_counter() - started) * 1000)
        own = await room.synchronous()
    bare.close()
    return {
        "bare median": bare_counts.figure(median(bare_ms), level),
        "bare p99": bare_counts.figure(percentile(bare_ms, 99), level),
        "receipt median": counts.figure(median(receipt_ms), own),
        "receipt p99": counts.figure(percentile(receipt_ms, 99), own),
    }


def _commit(connection: apsw.Connection, statements: list[tuple[str, Any]]) -> None:
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    for sql, params in statements:
        execute(sql, params).fetchall()
    execute("COMMIT")


async def many(task: Task) -> Figures:
    """``task.sessions`` producers, each on its own session, each waiting for its receipt."""
    folder = Path(task.folder)
    each = max(4, int(task.seconds * 8))
    database, ids = await _prepare(folder, task.sessions)
    recorded = await _statements(database, folder, ids, each)
    floors: list[tuple[float, Figure]] = []
    ours: list[tuple[float, Figure]] = []
    for number in range(3):
        if not task.profile:
            floors.append(
                await replay_at_once(copy_of(database, folder, f"bare{number}"), recorded)
            )
        copied = copy_of(database, folder, f"receipts{number}")
        with figures.profiled():
            async with rooms.open_bench_room(copied.parent, drive=False) as room:
                with room.stretch() as counts:
                    await asyncio.gather(*[_produce(room.room.agent(one), each) for one in ids])
                rate = len(ids) * each / counts.seconds
                ours.append((rate, counts.figure(rate, await room.synchronous())))
    found = {"receipts": sorted(ours, key=_by_rate)[1][1]}
    if floors:
        found["bare"] = sorted(floors, key=_by_rate)[1][1]
    return found


def _by_rate(one: tuple[float, Figure]) -> float:
    return one[0]


async def _produce(agent: Agent, count: int) -> None:
    for _ in range(count):
        await agent.queue(rooms.PROMPT)


async def replay_at_once(
    database: Path, recorded: list[list[list[tuple[str, Any]]]]
) -> tuple[float, Figure]:
    """The recorded statements through a bare writer, a producer for each session."""
    group = Group(str(database), _SETUP)

    async def replay(messages: list[list[tuple[str, Any]]]) -> None:
        for statements in messages:
            await group.write(statements)

    with Stretch(lambda: group.commits) as counts:
        await asyncio.gather(*map(replay, recorded))
    group.close()
    rate = sum(map(len, recorded)) / counts.seconds
    return rate, counts.figure(rate, group.synchronous)
