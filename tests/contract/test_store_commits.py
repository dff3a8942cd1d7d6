"""What a caller is told when a commit fails, waits or is withdrawn: always the truth."""

from __future__ import annotations

import asyncio
import threading

import apsw
import pytest

from postroom.domain.ids import SessionId
from postroom.errors import (
    CommitUncertain,
    DeadlinePassed,
    NotCommitted,
    StoreClosed,
    StoreFull,
    StoreLocked,
)
from postroom.ports.clock import SystemClock
from postroom.ports.store import Tx
from postroom.scripts.log import list_sessions
from postroom.testing.faults import FaultyVFS
from tests.contract.store_world import (
    SESSION,
    Engine,
    Gate,
    Hand,
    PostgresEngine,
    SqliteEngine,
    actor,
    until,
)
from tests.support import bounded

OTHER = SessionId("session_other")


# A commit that fails


@pytest.mark.contract("STO-01", "INB-01")
async def test_a_message_for_which_the_disk_has_no_room_is_not_queued(engine: Engine) -> None:
    with engine.disk() as disk:
        hand = await Hand(await engine.open(**disk.options)).create()
        await hand.queue("before")
        disk.set_full(True)
        for _ in range(2):
            with pytest.raises(NotCommitted) as refused:
                await bounded(hand.queue("refused", name="refused"))
        assert "full" in str(refused.value)
        assert await hand.pending() == ["before"]
        disk.set_full(False)
        await hand.queue("refused", name="refused")
        assert await hand.pending() == ["before", "refused"]


@pytest.mark.contract("STO-01", "INB-01")
async def test_a_message_whose_commit_fails_is_not_queued(engine: Engine) -> None:
    with engine.disk() as disk:
        hand = await Hand(await engine.open(**disk.options)).create()
        disk.fail_commit()
        with pytest.raises(NotCommitted):
            await bounded(hand.queue("refused"))
        assert await hand.pending() == []
        await hand.queue("after")
        assert await hand.pending() == ["after"]
        log = await hand.log()
        assert [event.seq for event in log] == list(range(1, len(log) + 1))


@pytest.mark.contract("STO-01", "STO-07")
async def test_what_was_told_not_committed_does_not_come_back_after_kill_9(engine: Engine) -> None:
    """The frames of a commit whose sync failed lie in the log file, complete. They must not count."""
    with engine.disk() as disk:
        await (await engine.open()).aclose()
        async with actor(engine, **({"faulty": True} if _is_file(engine) else {})) as process:
            await process.ask("create", SESSION)
            assert "error" not in await process.ask("queue", SESSION, "kept")
            if _is_file(engine):
                told = await process.ask("fail_commit", SESSION, "refused", "refused")
            else:
                disk.fail_commit()
                told = await process.ask("queue", SESSION, "refused", "refused")
            assert told == {"error": "not_committed"}
            await process.tell("kill")
            assert await process.wait() == -9
    hand = Hand(await engine.open())
    assert await hand.pending() == ["kept"]
    assert "refused" not in str(await hand.log())


def _is_file(engine: Engine) -> bool:
    return isinstance(engine, SqliteEngine)


@pytest.mark.contract("INB-01")
async def test_an_unanswered_commit_is_called_uncertain_and_the_same_id_settles_it(
    sqlite_engine: SqliteEngine,
) -> None:
    """Not even one more commit could be made over the failed one: then nobody knows."""
    with FaultyVFS() as disk:
        hand = await Hand(await sqlite_engine.open(vfs=disk.name)).create()
        disk.syncs_fail = True
        with pytest.raises(CommitUncertain):
            await bounded(hand.queue("in doubt", name="doubt"))
        # Nothing more is tried until a commit succeeds again, and what was not tried is certain.
        with pytest.raises(NotCommitted):
            await bounded(hand.queue("not tried", name="later"))
        disk.syncs_fail = False
        receipt = await hand.queue("in doubt", name="doubt")
        assert await hand.queue("in doubt", name="doubt") == receipt
        assert await hand.pending() == ["in doubt"]


@pytest.mark.contract("INB-01")
async def test_a_full_database_is_told_apart_from_a_failing_disk(
    sqlite_engine: SqliteEngine,
) -> None:
    hand = await Hand(await sqlite_engine.open()).create()
    with pytest.raises(StoreFull):
        await bounded(hand.store.write(sqlite_engine.fill))
    await hand.queue("after")
    assert await hand.pending() == ["after"]


# A group of scripts


@pytest.mark.contract("STO-01", "STO-06")
async def test_a_script_that_ends_the_transaction_costs_the_others_of_its_group_nothing(
    engine: Engine,
) -> None:
    """All wait behind one commit, so that an engine that groups them makes them one group."""
    gate = Gate()
    store = await engine.open(on_commit=gate)
    hand = await Hand(store).create()
    gate.hold()
    holding = asyncio.ensure_future(hand.queue("holding"))
    await gate.reached()
    calls = [
        asyncio.ensure_future(hand.queue("innocent before")),
        asyncio.ensure_future(store.write(_fill, SESSION, engine)),
        asyncio.ensure_future(hand.queue("innocent after")),
        asyncio.ensure_future(store.write(_wrong, SESSION)),
        asyncio.ensure_future(hand.queue("innocent last")),
    ]
    await asyncio.sleep(0)
    gate.open()
    await bounded(holding)
    answers = await bounded(asyncio.gather(*calls, return_exceptions=True))
    assert [type(each).__name__ for each in answers] == [
        "Receipt",
        "StoreFull",
        "Receipt",
        "ZeroDivisionError",
        "Receipt",
    ]
    assert await hand.pending() == [
        "holding",
        *("innocent before", "innocent after", "innocent last"),
    ]
    log = {event.seq: event for event in await hand.log()}
    assert list(log) == list(range(1, len(log) + 1))
    assert [log[answers[i].seq].type for i in (0, 2, 4)] == ["inbox/queued"] * 3  # type: ignore[union-attr]


def _fill(tx: Tx, _: SessionId, engine: Engine) -> None:
    engine.fill(tx)


def _wrong(tx: Tx, _: SessionId) -> None:
    tx.execute("UPDATE session SET title = 'half done'")
    raise ZeroDivisionError


# A lock held elsewhere


@pytest.mark.contract("STO-01", "STO-02", "INB-01")
async def test_a_lock_held_past_the_limit_is_told_and_breaks_nothing(engine: Engine) -> None:
    """C-130: one refused write, and no degraded mode after it."""
    hand = await Hand(await engine.open(lock_wait_ms=250)).create()
    with engine.locked():
        with pytest.raises(StoreLocked):
            await bounded(hand.queue("refused"))
        assert await hand.pending() == []
    await hand.queue("after")
    assert await hand.pending() == ["after"]


@pytest.mark.contract("STO-01", "STO-02")
async def test_another_process_that_holds_the_lock_delays_writes_and_no_reads(
    engine: Engine,
) -> None:
    """C-130, with one second in place of ten."""
    hand = await Hand(await engine.open()).create()
    async with actor(engine) as process:
        await process.tell("hold", SESSION, 1.0)
        assert await process.heard() == "held"
        writes = [asyncio.ensure_future(hand.queue(f"message {n}")) for n in range(20)]
        released = asyncio.ensure_future(process.heard())
        for _ in range(20):
            assert await bounded(hand.pending(), 0.9) == []
        assert not released.done()
        assert not any(write.done() for write in writes)
        assert await released == "released"
        await bounded(asyncio.gather(*writes))
        assert "error" not in await process.ask("queue", SESSION, "theirs")
    assert await hand.pending() == [*(f"message {n}" for n in range(20)), "theirs"]


@pytest.mark.contract("STO-01", "STO-02")
async def test_a_busy_process_does_not_contend_with_itself(engine: Engine) -> None:
    """C-131: fifty sessions, somebody who looks all the time, and a copy being made."""
    store = await engine.open()
    hands = [Hand(store, SessionId(f"session_{n}")) for n in range(50)]
    await asyncio.gather(*[hand.create() for hand in hands])
    done = asyncio.Event()

    async def look() -> int:
        looks = 0
        while not done.is_set():
            assert len(await store.read(list_sessions, limit=100)) == 50
            looks += 1
        return looks

    looking = [asyncio.ensure_future(look()) for _ in range(3)]
    copying = asyncio.ensure_future(asyncio.to_thread(_copy, engine))
    await bounded(asyncio.gather(*[hand.queue(f"{n}") for n in range(6) for hand in hands]), 30)
    done.set()
    assert min(await bounded(asyncio.gather(*looking))) > 0
    assert await bounded(copying) >= 50
    assert [await hand.pending() for hand in hands] == [[str(n) for n in range(6)]] * 50


def _copy(engine: Engine) -> int:
    """Reads the whole database from one snapshot; how many events it had."""
    if isinstance(engine, SqliteEngine):
        source, copy = apsw.Connection(engine.address), apsw.Connection(":memory:")
        with copy.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(10)
        count = copy.execute("SELECT count(*) FROM event").fetchall()[0][0]
        source.close()
        copy.close()
        return count
    return engine.rows("SELECT count(*) FROM event AS a, generate_series(1, 100)")[0][0] // 100


@pytest.mark.contract("STO-01")
async def test_a_long_read_sees_one_moment_and_blocks_no_writer(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("before")
    reading, go_on = threading.Event(), threading.Event()

    def count_twice(tx: Tx) -> list[int]:
        counts = [tx.execute("SELECT count(*) FROM inbox")[0][0]]
        reading.set()
        assert go_on.wait(15)
        counts.append(tx.execute("SELECT count(*) FROM inbox")[0][0])
        return counts

    counting = asyncio.ensure_future(store.read(count_twice))
    assert await asyncio.to_thread(reading.wait, 15)
    for n in range(5):
        await bounded(hand.queue(f"meanwhile {n}"))
    assert len(await hand.pending()) == 6
    go_on.set()
    assert await bounded(counting) == [1, 1]


@pytest.mark.contract("STO-01")
async def test_time_is_read_behind_the_lock(engine: Engine) -> None:
    """PROTOCOL rule 5: what waited long for the lock is not dated before those it waited for."""
    hand = await Hand(await engine.open()).create()
    with engine.locked():
        waiting = asyncio.ensure_future(hand.queue("waits"))
        await asyncio.sleep(0.25)  # the waiting itself
        before = SystemClock().now_ms()
    receipt = await bounded(waiting)
    assert (await hand.log())[receipt.seq - 1].at >= before


@pytest.mark.contract("STO-01")
async def test_a_script_past_its_deadline_is_refused_before_it_runs(engine: Engine) -> None:
    """PROTOCOL rule 30."""
    gate = Gate()
    hand = await Hand(await engine.open(lock_wait_ms=200, on_commit=gate)).create()
    gate.hold()
    first = asyncio.ensure_future(hand.queue("in time"))
    await gate.reached()
    late = asyncio.ensure_future(hand.queue("too late"))
    await asyncio.sleep(0.3)  # the limit is of real time
    gate.open()
    await bounded(first)
    with pytest.raises(DeadlinePassed):
        await bounded(late)
    assert await hand.pending() == ["in time"]


# A caller that goes away


@pytest.mark.contract("STO-01")
async def test_a_write_cancelled_before_it_was_taken_is_withdrawn(engine: Engine) -> None:
    """PROTOCOL rule 30."""
    gate = Gate()
    hand = await Hand(await engine.open(on_commit=gate)).create()
    gate.hold()
    first = asyncio.ensure_future(hand.queue("first"))
    await gate.reached()
    waiting = asyncio.ensure_future(hand.queue("withdrawn"))
    await asyncio.sleep(0)
    waiting.cancel()
    last = asyncio.ensure_future(hand.queue("last"))
    await asyncio.sleep(0)
    gate.open()
    await bounded(asyncio.gather(first, last))
    assert waiting.cancelled()
    assert await hand.pending() == ["first", "last"]


@pytest.mark.contract("STO-01")
async def test_a_write_cancelled_after_it_was_taken_commits_all_the_same(engine: Engine) -> None:
    """PROTOCOL rule 30."""
    gate = Gate()
    hand = await Hand(await engine.open(on_commit=gate)).create()
    gate.hold()
    taken = asyncio.ensure_future(hand.queue("taken", name="taken"))
    await gate.reached()
    taken.cancel()
    await asyncio.sleep(0)
    gate.open()
    await bounded(hand.queue("last"))
    assert taken.cancelled()
    assert await hand.pending() == ["taken", "last"]
    await hand.queue("taken", name="taken")
    assert await hand.pending() == ["taken", "last"]


# Closing


@pytest.mark.contract("STO-01", "INB-01")
async def test_a_closing_store_finishes_what_it_accepted_and_refuses_the_rest(
    engine: Engine,
) -> None:
    gate = Gate()
    store = await engine.open(on_commit=gate)
    hand = await Hand(store).create()
    gate.hold()
    accepted = [asyncio.ensure_future(hand.queue(f"message {n}")) for n in range(3)]
    await gate.reached()
    closing = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0)
    with pytest.raises(StoreClosed):
        await hand.queue("too late")
    with pytest.raises(StoreClosed):
        await hand.pending()
    gate.open()
    await bounded(asyncio.gather(closing, *accepted))
    assert await Hand(await engine.open()).pending() == ["message 0", "message 1", "message 2"]


@pytest.mark.contract("STO-01")
async def test_a_closed_store_leaves_no_thread_file_connection_or_lease(engine: Engine) -> None:
    before = _threads()
    store = await engine.open()
    hand = await Hand(store).create()
    await asyncio.gather(*[hand.queue(f"{n}") for n in range(10)])
    await asyncio.gather(*[hand.pending() for _ in range(5)])
    assert engine.open_handles()
    await bounded(asyncio.gather(*[store.aclose() for _ in range(3)]))
    await bounded(store.aclose())
    assert _threads() == before
    await until(lambda: not engine.open_handles())
    assert engine.rows("SELECT count(*) FROM node") == [(0,)]


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("postroom")}


@pytest.mark.contract("STO-01")
async def test_a_store_that_could_not_be_opened_leaves_nothing_either(engine: Engine) -> None:
    before = _threads()
    await (await engine.open()).aclose()
    engine.set_version(999)
    for _ in range(3):
        with pytest.raises(Exception, match="999"):
            await engine.open()
    assert _threads() == before
    await until(lambda: not engine.open_handles())


@pytest.mark.contract("STO-01")
async def test_closing_does_not_wait_for_a_database_that_is_gone(
    postgres_engine: PostgresEngine,
) -> None:
    store = await postgres_engine.open()
    hand = await Hand(store).create()
    postgres_engine.rows("ALTER TABLE session RENAME TO elsewhere")
    with pytest.raises(NotCommitted):
        await bounded(hand.queue("refused"))
    await bounded(store.aclose(), 5)
