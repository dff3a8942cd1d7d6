"""The parts that these tests are made of do what they say."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from postroom.errors import CommitUncertain, NotCommitted, StoreClosed
from postroom.ports.store import Tx
from postroom.testing import (
    FaultyStore,
    ManualClock,
    MemoryStore,
    ScheduledStore,
    Scheduler,
    StoreWrapper,
    every_schedule,
    random_schedules,
)
from tests.support import bounded


async def walk(scheduler: Scheduler, name: str, steps: int) -> None:
    for step in range(steps):
        await scheduler.gate(f"{name}{step}")


async def test_every_order_of_two_parties_is_tried_once() -> None:
    orders: list[tuple[str, ...]] = []
    for scheduler in every_schedule(limit=1_000):
        await bounded(scheduler.run(walk(scheduler, "a", 3), walk(scheduler, "b", 2)))
        orders.append(tuple(scheduler.trail))
    assert len(orders) == len(set(orders)) == 10  # 5 over 2
    for order in orders:
        assert [step for step in order if step[0] == "a"] == ["a0", "a1", "a2"]


async def test_more_orders_than_expected_are_a_failure() -> None:
    schedulers = every_schedule(limit=9)
    for _ in range(9):
        scheduler = next(schedulers)
        await bounded(scheduler.run(walk(scheduler, "a", 3), walk(scheduler, "b", 2)))
    with pytest.raises(AssertionError, match="more than 9"):
        next(schedulers)


async def test_a_seed_gives_the_same_orders_again() -> None:
    async def trails(seed: int) -> list[list[str]]:
        out: list[list[str]] = []
        for scheduler in random_schedules(20, seed):
            await bounded(scheduler.run(walk(scheduler, "a", 4), walk(scheduler, "b", 4)))
            out.append(scheduler.trail)
        return out

    assert await trails(1) == await trails(1)
    assert await trails(1) != await trails(2)


async def test_what_can_never_go_on_is_a_failure_that_shows_its_trail() -> None:
    scheduler = next(every_schedule(limit=1))
    with pytest.raises(AssertionError, match="a0"):
        await bounded(scheduler.run(walk(scheduler, "a", 1), asyncio.Event().wait()))


async def test_a_write_stands_before_its_commit_and_before_its_answer() -> None:
    scheduler = next(every_schedule(limit=1))
    async with contextlib.aclosing(MemoryStore()) as store:
        scheduled = ScheduledStore(store, scheduler)
        await bounded(scheduler.run(scheduled.write(count_up)))
        assert scheduler.trail == ["count_up", "count_up answers"]
        assert await store.read(count) == 1


def count(tx: Tx) -> int:
    return int(tx.execute("SELECT value FROM meta WHERE key = 'scrub'")[0][0])


def count_up(tx: Tx) -> int:
    tx.execute("UPDATE meta SET value = value + 1 WHERE key = 'scrub'")
    return count(tx)


def count_up_and_fail(tx: Tx) -> int:
    count_up(tx)
    raise ValueError("too bad")


async def test_faults_come_to_the_script_they_are_meant_for_as_often_as_they_should() -> None:
    async with contextlib.aclosing(FaultyStore(MemoryStore())) as store:
        store.refuse("count_up", times=2)
        store.lose("another")
        for _ in range(2):
            with pytest.raises(NotCommitted):
                await store.write(count_up)
        assert await store.write(count_up) == 1
        store.lose()
        with pytest.raises(CommitUncertain):
            await store.write(count_up)
        store.lose(written=False)
        with pytest.raises(CommitUncertain):
            await store.write(count_up)
        assert await store.read(count) == 2
        store.clear()
        store.stop_after(1)
        assert await store.write(count_up) == 3
        await bounded(store.stopped())
        with pytest.raises(StoreClosed):
            await store.write(count_up)
        assert store.writes == ["count_up"] * 3


async def test_a_wrapper_that_was_closed_lets_nothing_through() -> None:
    async with contextlib.aclosing(MemoryStore()) as store:
        wrapper = StoreWrapper(store, closes=False)
        await wrapper.aclose()
        for call in (wrapper.write(count_up), wrapper.read(count)):
            with pytest.raises(StoreClosed):
                await call
        assert await store.write(count_up) == 1


async def test_in_memory_a_script_that_fails_leaves_nothing_and_a_withdrawn_one_never_runs() -> (
    None
):
    async with contextlib.aclosing(MemoryStore()) as store:
        with pytest.raises(ValueError, match="too bad"):
            await store.write(count_up_and_fail)
        withdrawn = asyncio.ensure_future(store.write(count_up))
        await asyncio.sleep(0)
        withdrawn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await withdrawn
        assert await store.read(count) == 0


async def test_nodes_beside_each_other_share_what_is_written() -> None:
    async with (
        contextlib.aclosing(MemoryStore()) as one,
        contextlib.aclosing(MemoryStore(beside=one)) as two,
    ):
        heard: list[tuple[str, str]] = []
        two.on_work(lambda kind, key: heard.append((kind, key)))
        await one.write(count_up)
        assert await two.read(count) == 1
        await asyncio.sleep(0)
        assert heard == [("*", "*")]
        assert one.node != two.node
    with pytest.raises(StoreClosed):
        await two.read(count)


async def test_a_driven_clock_wakes_who_is_due_and_nobody_else() -> None:
    clock = ManualClock()
    woken: list[int] = []

    async def sleep(ms: int) -> None:
        await clock.sleep_ms(ms)
        woken.append(ms)

    tasks = [asyncio.ensure_future(sleep(ms)) for ms in (300, 100, 200)]
    await asyncio.sleep(0)
    assert await bounded(clock.sleeping()) == 100
    clock.advance(200)
    assert await bounded(clock.sleeping()) == 100  # those who were woken count no more
    await asyncio.sleep(0)
    assert sorted(woken) == [100, 200]
    clock.advance(100)
    await bounded(asyncio.gather(*tasks))
