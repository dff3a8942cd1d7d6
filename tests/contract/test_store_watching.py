"""Watching: committed events, in order, from every process, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.errors import PostroomError, QueueFull
from postroom.ports.store import Tx
from postroom.scripts.log import delete_session
from postroom.stores import postgres_watch
from tests.contract.store_world import SESSION, Engine, Gate, Hand, Heard, actor, until
from tests.support import bounded

pytestmark = pytest.mark.contract("STO-01")

OTHER = SessionId("session_other")


async def test_the_events_of_every_store_are_heard_in_order_and_once(engine: Engine) -> None:
    stores = [await engine.open() for _ in range(3)]
    hands = [await Hand(store).create() for store in stores]
    heard = [Heard(store) for store in stores]
    everything = [Heard(store, None) for store in stores]
    others = [
        await Hand(store, SessionId(f"session_{n}")).create() for n, store in enumerate(stores)
    ]
    await asyncio.gather(
        *[hands[n % 3].queue(f"message {n}") for n in range(60)],
        *[others[n % 3].queue(f"message {n}") for n in range(30)],
    )
    head = (await hands[0].log())[-1].seq
    for each in heard:
        await each.reach(head)
        assert each.seqs == list(range(each.seqs[0], head + 1))
        assert each.seqs[0] <= 2
    for each in everything:
        for hand in (hands[0], *others):
            log = await hand.log()
            await each.until(
                lambda events, log=log, hand=hand: any(  # type: ignore[misc]
                    e.session_id == hand.id and e.seq == log[-1].seq for e in events
                )
            )
            told = [e for e in each.events if e.session_id == hand.id]
            assert told == log[-len(told) :]
            assert len(told) >= len(log) - 1


async def test_another_process_is_heard_in_bounded_time(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    heard = Heard(store)
    async with actor(engine) as process:
        for n in range(10):
            receipt = await process.ask("queue", SESSION, f"theirs {n}")
            await heard.reach(receipt["seq"], seconds=10)
            mine = await hand.queue(f"mine {n}")
            await heard.reach(mine.seq, seconds=10)
    assert heard.seqs == list(range(2, heard.seqs[-1] + 1))


async def test_two_processes_at_full_speed_hear_everything_of_each_other(engine: Engine) -> None:
    """Also what was committed in the moment between our own COMMIT and our next look.

    A thread that computes makes that moment long: the writer waits for the interpreter's lock.
    """
    store = await engine.open()
    hand, other = await Hand(store).create(), await Hand(store, OTHER).create()
    heard = Heard(store, None)
    over = threading.Event()
    computing = threading.Thread(target=_compute, args=(over,))
    async with actor(engine) as process:
        theirs = asyncio.ensure_future(process.ask("queue_many", OTHER, 400, seconds=60))
        computing.start()
        try:
            while not theirs.done():
                await hand.queue("mine")
        finally:
            over.set()
            computing.join()
        last = (await theirs)["seq"]
    await heard.until(lambda events: (OTHER, last) in {(e.session_id, e.seq) for e in events})
    log = [e.seq for e in heard.events if e.session_id == OTHER and e.seq > 1]
    assert log == list(range(2, last + 1))
    assert len(await other.pending()) == 400


def _compute(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


async def test_what_is_heard_is_what_the_log_says(engine: Engine) -> None:
    first, second = await engine.open(), await engine.open()
    hand = await Hand(first).create()
    mine, theirs = Heard(first), Heard(second)
    await hand.queue("hello")
    await hand.one_turn(1)
    log = (await hand.log())[1:]
    for heard in (mine, theirs):
        await heard.reach(log[-1].seq)
        assert heard.since(2) == log
        assert [type(e.data) for e in heard.since(2)] == [type(e.data) for e in log]


async def test_a_subscription_starts_now_and_ends_when_it_is_closed(engine: Engine) -> None:
    first, second = await engine.open(), await engine.open()
    hand, other = await Hand(first).create(), Hand(second)
    await hand.queue("long before")
    await other.queue("before")
    heard = [Heard(store) for store in (first, second)]
    receipt = await hand.queue("now")
    for each in heard:
        await each.reach(receipt.seq)
    # What another process wrote just before may still come; what this one wrote does not.
    assert heard[0].seqs[0] >= receipt.seq - 1
    for each in heard:
        each.subscription.close()
        each.subscription.close()
    again = [Heard(store) for store in (first, second)]
    last = await other.queue("after")
    for each in again:
        await each.reach(last.seq)
    assert [each.seqs[-1] for each in heard] == [receipt.seq] * 2


async def test_a_subscription_closed_by_another_listener_gets_no_further_call(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    calls: list[str] = []

    def first(_: Sequence[Event]) -> None:
        calls.append("first")
        second.close()

    store.subscribe(SESSION, first)
    second = store.subscribe(SESSION, lambda _: calls.append("second"))
    await hand.queue()
    heard = Heard(store)
    receipt = await hand.queue()
    await heard.reach(receipt.seq)
    assert "second" not in calls
    assert "first" in calls


async def test_one_listener_closed_twice_takes_no_other_with_it(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    heard: list[Event] = []
    take = heard.extend
    one, _ = store.subscribe(SESSION, take), store.subscribe(SESSION, take)
    one.close()
    one.close()
    witness = Heard(store)
    receipt = await hand.queue()
    await witness.reach(receipt.seq)
    assert [e.seq for e in heard] == [receipt.seq, receipt.seq + 1]


async def test_a_listener_that_fails_costs_nobody_else_anything(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()

    def fail(_: Sequence[Event]) -> None:
        raise ZeroDivisionError

    store.subscribe(SESSION, fail)
    store.subscribe(None, fail)
    heard = Heard(store)
    receipt = await hand.queue()
    await heard.reach(receipt.seq)
    assert "a listener failed" in caplog.text


async def test_a_caller_has_its_answer_before_its_events_are_told(engine: Engine) -> None:
    """PROTOCOL rule 28: futures first, then events, in one callback."""
    store = await engine.open()
    hand = await Hand(store).create()
    loop = asyncio.get_running_loop()
    order: list[str] = []
    store.subscribe(SESSION, lambda _: loop.call_soon(order.append, "events"))
    for _ in range(20):
        await hand.queue()
        order.append("answer")
        await until(lambda: "events" in order)
        assert order == ["answer", "events"]
        order.clear()


async def test_nothing_is_told_before_it_is_committed(engine: Engine) -> None:
    gate = Gate()
    store = await engine.open(on_commit=gate)
    hand = await Hand(store).create()
    heard = [Heard(store), Heard(await engine.open())]
    gate.hold()
    writing = asyncio.ensure_future(hand.queue())
    await gate.reached()
    await hand.pending()
    assert [each.events for each in heard] == [[], []]
    gate.open()
    receipt = await bounded(writing)
    for each in heard:
        await each.reach(receipt.seq)


async def test_what_was_refused_is_never_told(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    heard = Heard(store)
    await hand.queue("kept")
    for _ in range(3):
        with pytest.raises(QueueFull):
            await hand.queue("refused", pending_max=1)
    last = await hand.queue("kept too")
    await heard.reach(last.seq)
    assert heard.seqs == list(range(2, last.seq + 1))


async def test_events_of_others_are_told_though_our_own_transaction_is_lost(
    engine: Engine,
) -> None:
    """They were seen on the way into it, and are committed, whatever becomes of ours."""
    first, second = await engine.open(), await engine.open()
    hand = await Hand(first).create()
    heard = Heard(second)
    for n in range(10):
        receipt = await hand.queue(f"theirs {n}")
        with pytest.raises(PostroomError):
            await second.write(_fill, SESSION, engine)
    await heard.reach(receipt.seq)
    assert [e.seq for e in heard.since(2)] == list(range(2, receipt.seq + 1))


def _fill(tx: Tx, _: SessionId, engine: Engine) -> None:
    engine.fill(tx)


async def test_events_committed_between_ours_are_told_too(engine: Engine) -> None:
    """One held back until after our own COMMIT, another's commit made in just that moment."""
    gate = Gate()
    first, second = await engine.open(on_commit=gate), await engine.open()
    mine, theirs = await Hand(first).create(), await Hand(second, OTHER).create()
    heard = Heard(first, None)
    for _ in range(3):
        gate.hold("after")
        writing = asyncio.ensure_future(mine.queue())
        await gate.reached()
        other = await theirs.queue()
        gate.open()
        own = await bounded(writing)
        await heard.until(
            lambda events, other=other, own=own: (
                {(OTHER, other.seq), (SESSION, own.seq)}  # type: ignore[misc]
                <= {(e.session_id, e.seq) for e in events}
            )
        )


async def test_a_session_made_again_under_its_old_name_is_heard_from_its_beginning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_watch, "SWEEP_S", 0.2)  # it is the sweep that sees it
    first, second = await engine.open(), await engine.open()
    hand = await Hand(first).create()
    heard = [Heard(first), Heard(second)]
    await hand.queue()
    await hand.one_turn(1)
    head = (await hand.log())[-1].seq
    for each in heard:
        await each.reach(head)
    await first.write(delete_session, SESSION)
    await Hand(first).create()
    receipt = await hand.queue("in the new one")
    for each in heard:
        await each.until(lambda events: [e.seq for e in events[-3:]] == [1, 2, 3])
        assert each.events[-2].seq == receipt.seq
