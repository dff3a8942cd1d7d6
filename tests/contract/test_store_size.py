"""What a long log costs: appending nothing more, opening only what is active."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from postroom.domain.event import HistoryCompacted
from postroom.domain.ids import SessionId
from postroom.ports.store import Row, SqlValue, Tx
from postroom.scripts.inbox import queue_message
from postroom.scripts.log import read_events, read_history
from postroom.scripts.session import lock_session
from tests.contract.store_world import SESSION, Engine, Hand, SqliteEngine, message

pytestmark = pytest.mark.contract("STO-01")

SHORT = SessionId("session_short")
LONG = 20_000
SLOWER_MAX = 5.0


def _lengthen(tx: Tx, session_id: SessionId, events: int, type_: str, data: str) -> None:
    """Appends so many events in one statement."""
    session = lock_session(tx, session_id)
    tx.execute(
        "INSERT INTO event (sid, seq, type, at, data)"
        " WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < :events)"
        " SELECT CAST(:sid AS BIGINT), :head + n, :type, CAST(:now AS BIGINT), :data FROM number",
        {
            "events": events,
            "sid": session.sid,
            "head": session.head,
            "type": type_,
            "now": tx.now(),
            "data": data,
        },
    )
    tx.execute(
        "UPDATE session SET head = head + :events WHERE sid = :sid",
        {"events": events, "sid": session.sid},
    )


def _analyze(engine: Engine) -> None:
    engine.rows("ANALYZE event")


class Counting:
    """A transaction that counts what a script asks of it."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self.for_update, self.skip_locked = tx.for_update, tx.skip_locked
        self.statements = 0
        self.rows = 0
        self.now, self.publish, self.wake = tx.now, tx.publish, tx.wake

    def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Row]:
        rows = self._tx.execute(sql, params)
        self.statements += 1
        self.rows += len(rows)
        return rows

    def execute_many(self, sql: str, rows: Sequence[Mapping[str, SqlValue]]) -> None:
        self.statements += len(rows)
        self._tx.execute_many(sql, rows)


def _counted_queue(tx: Tx, session_id: SessionId) -> tuple[int, int]:
    counting = Counting(tx)
    queue_message(counting, session_id, message(), "followup", pending_max=10_000)
    return counting.statements, counting.rows


async def _median_s(call: Callable[[], Awaitable[Any]], times: int = 40) -> float:
    taken: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


async def _short_and_long(engine: Engine, type_: str, data: str) -> tuple[Hand, Hand]:
    """Two sessions alike but for a great many events of a type."""
    store = await engine.open()
    short, long = await Hand(store, SHORT).create(), await Hand(store).create()
    for hand in (short, long):
        await hand.queue("first")
        await hand.one_turn(1)
    await store.write(_lengthen, SESSION, LONG, type_, data)
    await asyncio.to_thread(_analyze, engine)
    return short, long


@pytest.mark.contract("STO-03")
async def test_appending_costs_the_same_however_long_the_log(engine: Engine) -> None:
    """C-136: the statements, the rows and the time of an append do not grow with the session."""
    short, long = await _short_and_long(engine, "model/retry", "{}")
    store = short.store
    counts = [await store.write(_counted_queue, hand.id) for hand in (short, long)]
    assert counts[0] == counts[1]
    quick, slow = [await _median_s(hand.queue) for hand in (short, long)]
    assert slow < SLOWER_MAX * quick


@pytest.mark.contract("STO-03")
async def test_twenty_appends_at_once_to_a_long_session_wait_for_no_history(
    engine: Engine,
) -> None:
    """C-136."""
    short, long = await _short_and_long(engine, "tool/result", '{"turn":1}')
    times: list[float] = []
    for hand in (short, long):
        started = time.perf_counter()
        await asyncio.gather(*[hand.queue(f"{n}") for n in range(20)])
        times.append(time.perf_counter() - started)
    assert times[1] < SLOWER_MAX * times[0] + 0.05
    assert len(await long.pending()) == 20


@pytest.mark.contract("STO-03")
async def test_opening_reads_the_active_history_and_not_the_log(engine: Engine) -> None:
    """Twenty thousand events that are no history, and none of them is looked at."""
    short, long = await _short_and_long(engine, "model/retry", "{}")
    store = short.store
    pages = [await store.read(read_history, hand.id) for hand in (short, long)]
    assert [[e.type for e in page] for page in pages] == [["user/message", "assistant/message"]] * 2
    quick, slow = [
        await _median_s(lambda hand=hand: store.read(read_history, hand.id))  # type: ignore[misc]
        for hand in (short, long)
    ]
    assert slow < SLOWER_MAX * quick


@pytest.mark.contract("STO-03")
async def test_what_a_compaction_covers_is_not_read_again(engine: Engine) -> None:
    short, long = await _short_and_long(engine, "user/message", "{}")
    store = short.store
    head = (await store.read(read_events, SESSION, LONG, 10_000))[-1].seq
    await store.write(_compact, SESSION, head)
    pages = [await store.read(read_history, SESSION)]
    assert [e.type for e in pages[0]] == ["history/compacted"]
    quick, slow = [
        await _median_s(lambda hand=hand: store.read(read_history, hand.id))  # type: ignore[misc]
        for hand in (short, long)
    ]
    assert slow < SLOWER_MAX * quick


def _compact(tx: Tx, session_id: SessionId, to_seq: int) -> None:
    session = lock_session(tx, session_id)
    session.append((HistoryCompacted(1, to_seq, "what was said"),))
    session.save()


@pytest.mark.contract("STO-03")
async def test_opening_uses_the_index_made_for_it(sqlite_engine: SqliteEngine) -> None:
    """SQLite takes a partial index only for the very words it was made with."""
    store = await sqlite_engine.open()
    plans: list[str] = []

    class Explaining(Counting):
        def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Row]:
            plan = self._tx.execute("EXPLAIN QUERY PLAN " + sql, params)
            plans.extend(str(row[3]) for row in plan)
            return []

    await store.read(lambda tx: read_history(Explaining(tx), SESSION))
    assert any("event_history" in plan for plan in plans), plans
