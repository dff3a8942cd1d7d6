"""Claims, leases and fences: who may go on, who may take over, and what a zombie can still do."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from postroom import mint
from postroom.domain.event import ErrorInfo, ModelRetry
from postroom.domain.ids import CallId, NodeId
from postroom.domain.work import Fence
from postroom.errors import StaleClaim
from postroom.ports.store import Store, Tx
from postroom.scripts.drive import (
    Drive,
    Offer,
    drives_to_claim,
    give_back_drive,
    next_step,
    peek_turn,
    queue_and_claim,
    record_late,
    record_reply,
    record_results,
    record_retry,
    start_calls,
)
from postroom.scripts.session import DRIVE
from postroom.stores.node import bury_nodes
from tests.contract.store_world import (
    HEADER,
    SESSION,
    Engine,
    Hand,
    Heard,
    actor,
    eventually,
    message,
    reply,
    result,
    until,
)
from tests.support import bounded

pytestmark = pytest.mark.contract("STO-01")

LEASE_MS = 1_000
FAR_AHEAD_MS = 3_600_000


async def _taken_over(hand: Hand) -> Drive:
    """The drive, as soon as it can be had."""
    return await eventually(hand.claim)


# Fences


@pytest.mark.contract("INB-17")
async def test_after_a_take_over_the_old_claim_can_write_nothing(engine: Engine) -> None:
    """C-134: to the second node the first one's lease has lapsed; the first knows nothing of it."""
    first = await Hand(await engine.open()).create()
    second = Hand(await engine.open(ahead_ms=FAR_AHEAD_MS))
    await first.queue("work")
    old = (await first.claimed()).fence
    await first.begin(old, 1)
    await first.store.write(record_reply, SESSION, old, reply(1, calls=["call_a"]), ())

    new = await second.claimed()
    assert new.progress.state.owed, "the open turn is recovered by who took it over"
    log = await second.log()
    for write in _everything_a_driver_writes(first.store, old):
        with pytest.raises(StaleClaim):
            await write
    with pytest.raises(StaleClaim):
        await first.store.read(peek_turn, SESSION, old)
    assert not await first.store.write(give_back_drive, SESSION, old)
    assert await second.log() == log

    await second.begin(new.fence, 2)
    assert (await second.finish(new.fence, 2)).idle
    log = await second.log()
    assert [event.seq for event in log] == list(range(1, len(log) + 1))


def _everything_a_driver_writes(store: Store, fence: Fence) -> list[object]:
    hand = Hand(store)
    retry = ModelRetry(1, 1, 1, 0, ErrorInfo("server", "it failed"))
    results = (result(1, "call_a"),)
    return [
        hand.begin(fence, 2),
        store.write(record_retry, SESSION, fence, retry),
        store.write(start_calls, SESSION, fence, 1, (CallId("call_a"),)),
        store.write(record_results, SESSION, fence, 1, results),
        store.write(record_late, SESSION, fence, results[0]),
        store.write(next_step, SESSION, fence, 1, 1, results, HEADER),
        store.write(record_reply, SESSION, fence, reply(1), ()),
        hand.finish(fence, 1),
    ]


@pytest.mark.contract("INB-17")
async def test_a_fence_is_the_epoch_and_the_token(engine: Engine) -> None:
    hand = await Hand(await engine.open()).create()
    await hand.queue("work")
    fence = (await hand.claimed()).fence
    for wrong in (Fence(fence.epoch + 1, fence.token), Fence(fence.epoch, mint.claim_token())):
        with pytest.raises(StaleClaim):
            await hand.begin(wrong, 1)
    await hand.begin(fence, 1)


async def test_a_claim_released_at_idle_is_void_though_nobody_else_claimed(engine: Engine) -> None:
    hand = await Hand(await engine.open()).create()
    await hand.queue("work")
    fence = (await hand.claimed()).fence
    await hand.begin(fence, 1)
    await hand.finish(fence, 1)
    await hand.queue("more work")
    with pytest.raises(StaleClaim):
        await hand.begin(fence, 2)


# Leases


@pytest.mark.contract("INB-17")
async def test_a_claim_longer_than_its_lease_is_kept_by_the_heartbeat(engine: Engine) -> None:
    """C-137: while the owner lives nobody gets the claim, however long the turn takes."""
    first = await Hand(await engine.open(lease_ms=LEASE_MS)).create()
    second = Hand(await engine.open(lease_ms=LEASE_MS))
    await first.queue("long work")
    fence = (await first.claimed()).fence
    await first.begin(fence, 1)
    end = time.monotonic() + 2 * LEASE_MS / 1000
    while time.monotonic() < end:
        assert await second.claim() is None
        assert await second.store.read(drives_to_claim, second.store.node, 10) == []
        await asyncio.sleep(0.02)
    assert (await first.finish(fence, 1)).idle


@pytest.mark.contract("INB-17")
async def test_a_process_stopped_past_its_lease_can_do_nothing_when_it_goes_on(
    engine: Engine,
) -> None:
    """C-138: SIGSTOP, take-over, SIGCONT."""
    hand = await Hand(await engine.open(lease_ms=LEASE_MS)).create()
    await hand.queue("work")
    async with actor(engine, lease_ms=LEASE_MS) as zombie:
        assert await zombie.ask("claim", SESSION) is not None
        assert "turn/start" in await zombie.ask("begin", SESSION, 1)
        _, old, token, _ = await zombie.ask("node")
        zombie.signal(signal.SIGSTOP)
        await bounded(_stopped(zombie.process.pid))
        drive = await _taken_over(hand)
        await hand.begin(drive.fence, 2)
        log = await hand.log()
        zombie.signal(signal.SIGCONT)

        assert await zombie.ask("finish", SESSION, 1) == {"error": "stale_claim"}
        assert await zombie.ask("begin", SESSION, 2) == {"error": "stale_claim"}
        assert await zombie.ask("renew", token) is False
        assert await zombie.ask("claim", SESSION) is None
        assert await hand.log() == log
        assert (await hand.finish(drive.fence, 2)).idle
        await hand.queue("more work")
        assert await zombie.ask("claim", SESSION) is None, "not even what is free, as who it was"

        async def known() -> list[object] | None:
            now, was, _, lost = await zombie.ask("node")
            return [was, lost] if now != was else None

        assert await eventually(known) == [old, 1], "it goes on as somebody else, and was told"


async def _stopped(pid: int) -> None:
    while True:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: ASYNC230
            if stat.read().rpartition(")")[2].split()[0] == "T":
                return
        await asyncio.sleep(0.005)


@pytest.mark.contract("INB-17")
async def test_a_killed_process_is_succeeded_at_once_however_long_its_lease(engine: Engine) -> None:
    """PROTOCOL rule 16: its lock is free, and that proves it dead."""
    hand = await Hand(await engine.open(lease_ms=600_000)).create()
    await hand.queue("work")
    async with actor(engine, lease_ms=600_000) as victim:
        assert await victim.ask("claim", SESSION) is not None
        await victim.ask("begin", SESSION, 1)
        assert await hand.claim() is None
        await victim.tell("kill")
        await victim.wait()
        drive = await _taken_over(hand)
        assert drive.progress.state.attempts == 1
    restarted = Hand(await engine.open())
    await hand.begin(drive.fence, 2)
    assert await restarted.claim() is None


@pytest.mark.contract("INB-17")
async def test_a_restart_after_kill_9_needs_no_waiting_at_all(engine: Engine) -> None:
    await (await engine.open()).aclose()
    async with actor(engine, lease_ms=600_000) as victim:
        await victim.ask("create", SESSION)
        await victim.ask("queue", SESSION, "work")
        await victim.ask("claim", SESSION)
        await victim.tell("kill")
        await victim.wait()
        # The server sees a connection end a moment after its process.
        await until(lambda: not engine.open_handles())
    restarted = Hand(await engine.open(lease_ms=600_000))
    assert await restarted.claim() is not None


async def test_a_clean_goodbye_leaves_nothing_to_wait_for(engine: Engine) -> None:
    first = await Hand(await engine.open(lease_ms=600_000)).create()
    second = Hand(await engine.open())
    await first.queue("work")
    fence = (await first.claimed()).fence
    await first.begin(fence, 1)
    await first.store.aclose()
    assert await second.claim() is not None


async def test_a_node_given_up_for_dead_goes_on_as_another_and_says_so(engine: Engine) -> None:
    mistaken = await engine.open()
    store = await engine.open(lease_ms=LEASE_MS)
    hand = await Hand(store).create()
    lost: list[NodeId] = []
    looks = asyncio.Event()
    store.on_lease_lost(lambda: lost.append(store.node))
    store.on_work(lambda _, key: looks.set() if lost and key == "*" else None)
    await hand.queue("work")
    old, fence = store.node, (await hand.claimed()).fence
    await mistaken.write(bury_nodes, [old])
    assert await hand.claim(old) is None
    await bounded(looks.wait())
    assert lost == [store.node]
    assert store.node != old
    # Its own claim is lapsed like any dead node's, to itself too.
    again = await hand.claimed()
    assert again.fence.epoch == fence.epoch + 1
    with pytest.raises(StaleClaim):
        await hand.begin(fence, 1)
    await hand.begin(again.fence, 1)


async def test_who_was_given_up_for_dead_queues_and_does_not_claim(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    offer = Offer(NodeId("node_gone"), mint.claim_token(), 3, HEADER)
    receipt, drive = await store.write(
        queue_and_claim, SESSION, message(), "followup", pending_max=9, run=None, offer=offer
    )
    assert drive is None
    assert receipt.seq == 2
    assert await store.read(drives_to_claim, store.node, 10) == [SESSION]
    assert await hand.claim() is not None


@pytest.mark.contract("INB-17")
async def test_a_process_whose_event_loop_hangs_loses_its_lease(engine: Engine) -> None:
    """PROTOCOL rule 16: what a hanging loop has claimed is better done by another.

    The heartbeat stops when the loop has hung for a lease, and the lease ends one later.
    """
    store = await engine.open(lease_ms=LEASE_MS // 2)
    hand = await Hand(store).create()
    await hand.queue("work")
    fence = (await hand.claimed()).fence
    node = store.node
    async with actor(engine, lease_ms=60_000) as other:
        await other.tell("claim_soon", SESSION)
        time.sleep(1.5 * LEASE_MS / 1000)  # noqa: ASYNC251 - the hanging itself, three leases
        assert await other.heard() is not None
    with pytest.raises(StaleClaim):
        await hand.begin(fence, 1)

    async def another() -> NodeId | None:
        return store.node if store.node != node else None

    await eventually(another)


async def test_a_lease_is_judged_by_the_database_s_clock(engine: Engine) -> None:
    """A node that believes it is tomorrow sees every lease lapsed; one of yesterday sees none."""
    first = await Hand(await engine.open()).create()
    ahead = Hand(await engine.open(ahead_ms=FAR_AHEAD_MS))
    behind = Hand(await engine.open(ahead_ms=-FAR_AHEAD_MS))
    await first.queue("work")
    await first.claimed()
    assert await behind.claim() is None
    assert await ahead.claim() is not None


async def test_work_is_announced_to_the_other_nodes(engine: Engine) -> None:
    first, second = await engine.open(), await engine.open()
    heard: list[tuple[str, str]] = []
    news = asyncio.Event()

    def hear(kind: str, key: str) -> None:
        heard.append((kind, key))
        news.set()

    hand = await Hand(first).create()
    subscription = second.on_work(hear)
    await hand.queue("work")

    async def told() -> None:
        while not any(key in (SESSION, "*") and kind in (DRIVE, "*") for kind, key in heard):
            news.clear()
            await news.wait()

    await bounded(told())
    subscription.close()
    subscription.close()


async def test_the_events_of_others_are_heard_across_a_lost_lease(engine: Engine) -> None:
    """A process stopped long enough to lose its lease has much to catch up with, and nothing to lose."""
    other = await Hand(await engine.open()).create()
    store = await engine.open(lease_ms=LEASE_MS)
    heard = Heard(store)
    lost = asyncio.Event()
    store.on_lease_lost(lost.set)
    receipts = []
    for n in range(3):
        receipts.append(await other.queue(f"before {n}"))
        await other.store.write(_queue_and_bury, store.node)
        await bounded(lost.wait())
        lost.clear()
    last = await other.queue("after")
    await heard.reach(last.seq)
    assert heard.seqs == list(range(heard.seqs[0], last.seq + 1))
    assert heard.seqs[0] <= receipts[0].seq


def _queue_and_bury(tx: Tx, node: NodeId) -> None:
    bury_nodes(tx, [node])
