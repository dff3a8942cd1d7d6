"""The delivery runtime: claimed before it is called, in order, bounded, and never twice in doubt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import apsw
import pytest

import postroom.flow.outbox as runtime
from postroom import mint
from postroom.app import Room, open_store
from postroom.config import Limits
from postroom.domain.ids import ClaimToken, CoreId, DeliveryId, SessionId
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    SendOutcome,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.domain.parcel import Parcel, Piece
from postroom.ports.channel import OutPart, Profile
from postroom.ports.route import dispatch_status
from postroom.ports.store import Store
from postroom.scripts.log import delete_session
from postroom.scripts.outbox import (
    DeliveryView,
    abandon,
    list_deliveries,
    resolve_delivery,
    send,
)
from postroom.scripts.routes import target_of
from postroom.scripts.session import create_session
from postroom.testing import FaultyStore, ManualClock, scripted
from tests.flow.support import SESSION, moved, until
from tests.flow.support_channel import Line, deliveries, dm, never, room_with, settled
from tests.support import bounded

LIMITS = Limits(
    lease_sqlite_ms=10**9,  # the clock jumps, and ends no lease
    delivery_attempts_max=3,
    delivery_retry_first_ms=1_000,
    reconciles_max=3,
    reconcile_first_ms=1_000,
    reconcile_wait_ms=10_000,
)
ASKS = Profile(text_max=40, reconciles=True, settle_ms=0)
BLIND = Profile(text_max=40)


class Post(Line):
    """A platform: what it says of a part is the test's, and what it took is counted by key."""

    def __init__(self, profile: Profile = ASKS, name: str = "line") -> None:
        super().__init__(name, profile)
        self.says: Callable[[OutPart], Awaitable[SendOutcome]] | None = None
        self.verdicts: list[Verdict] = []
        self.calls: list[OutPart] = []
        self.asked: list[OutPart] = []

    async def send(self, part: OutPart) -> SendOutcome:
        self.calls.append(part)
        outcome = await self.says(part) if self.says is not None else Sent(f"ref {part.key}")
        if isinstance(outcome, Sent):
            self.take(part)
        return outcome

    async def reconcile(self, part: OutPart) -> Verdict:
        self.asked.append(part)
        return self.verdicts.pop(0) if self.verdicts else CannotTell()


def answers(*outcomes: SendOutcome) -> Callable[[OutPart], Awaitable[SendOutcome]]:
    """One after the other; then all is sent."""
    left = list(outcomes)

    async def says(part: OutPart) -> SendOutcome:
        return left.pop(0) if left else Sent(part.key)

    return says


@contextlib.asynccontextmanager
async def working(
    database: str, *posts: Post, limits: Limits = LIMITS, **more: Any
) -> AsyncGenerator[Room]:
    async with room_with(database, posts, scripted(), limits=limits, **more) as room:
        yield room


async def owe(
    store: Store, *texts: str, to: str = SESSION, line: str = "line", **more: Any
) -> list[DeliveryId]:
    """Deliveries of a session whose target is a conversation of this channel."""
    name = SessionId(to)
    target = target_of(line, dm(to))
    await store.write(
        create_session, name, core_id=CoreId("default"), owner="operator", target=target
    )
    made: list[DeliveryId] = []
    for text in texts:
        fields = {"kind": "text", "pieces": (Piece(text),), "policy": "transient"} | more
        parcel = Parcel(id=mint.delivery_id(), **fields)
        await bounded(store.write(send, name, parcel))
        made.append(parcel.id)
    return made


async def rests(clock: ManualClock) -> int:
    """How long until somebody is due, once all that can move has moved."""
    await moved()
    return await bounded(clock.sleeping())


async def passes(room: Room, clock: ManualClock) -> None:
    """Lets the time pass that a queued delivery of the session has to wait, once its lane does."""

    async def waits() -> bool:
        left = {d.due - clock.now_ms() for d in await deliveries(room, SESSION) if not_sent(d)}
        return bool(left) and await bounded(clock.sleeping()) in left

    await until(waits)
    clock.advance(await bounded(clock.sleeping()))


def not_sent(view: DeliveryView) -> bool:
    return view.status == "queued"


async def one(room: Room) -> DeliveryView:
    (view,) = await deliveries(room, SESSION)
    return view


# ---- claimed first ----


@pytest.mark.contract("OUT-02", "OUT-17")
async def test_the_claim_is_on_disk_before_the_platform_is_called(database: str) -> None:
    post = Post()
    found: list[tuple[Any, ...]] = []

    async def looks(part: OutPart) -> SendOutcome:
        reading = apsw.Connection(database, flags=apsw.SQLITE_OPEN_READONLY)
        found.extend(
            reading.execute(
                "SELECT part.status, attempts, work.status FROM part JOIN work ON key = delivery"
                " WHERE delivery = ? AND idx = ?",
                (part.delivery_id, part.index),
            )
        )
        reading.close()
        return Sent("there")

    post.says = looks
    async with working(database, post) as room:
        await owe(room.store, "hello and a second part, for it is too long for one")
        await settled(room, SESSION, "sent")
        view = await one(room)
    assert len(view.parts) >= 2
    assert found == [("sending", 1, "claimed")] * len(view.parts)
    assert dispatch_status(view.status) == "delivered"  # type: ignore[arg-type]


@pytest.mark.contract("OUT-03", "OUT-13")
async def test_a_process_that_vanished_in_a_call_leaves_doubt_and_no_second_copy(
    database: str,
) -> None:
    first, second = Post(), Post()
    called = asyncio.Event()

    async def hangs(_: OutPart) -> SendOutcome:
        called.set()
        return await never()

    first.says = hangs
    second.verdicts = [Found("it was there")]
    store = FaultyStore(await open_store(database, limits=LIMITS), closes=False)
    async with working(database, first, store=store):
        await owe(store, "hello", "after it")
        await bounded(called.wait())
        store.stop_after(0)  # as if killed here: nothing it does is written any more
    await store.inner.aclose()
    async with working(database, second) as room:
        await settled(room, SESSION, "sent", 2)
    assert second.texts == ["after it"]
    assert [part.text for part in second.asked] == ["hello"]


# ---- what a platform says ----


@pytest.mark.contract("OUT-05")
async def test_a_part_that_fails_repeats_none_before_it_and_all_bear_the_thread(
    database: str,
) -> None:
    post = Post(Profile(text_max=4))
    post.says = answers(Sent("r0"), Refused("busy", retryable=True))
    clock = ManualClock()
    async with working(database, post, clock=clock) as room:
        await owe(room.store, "aaa bbb ccc", reply_to="m7")
        await passes(room, clock)
        await settled(room, SESSION, "sent")
    tried = [(part.index, part.attempt) for part in post.calls]
    assert tried == [(0, 1), (1, 1), (1, 2), *((n, 1) for n in range(2, post.calls[0].count))]
    assert {part.conversation for part in post.calls} == {dm(SESSION)}
    assert [part.reply_to for part in post.parts] == ["m7", *[None] * (len(post.parts) - 1)]
    assert len({part.key for part in post.parts}) == len(post.parts)


@pytest.mark.contract("OUT-06")
async def test_a_channel_that_is_missing_for_five_starts_costs_nothing(database: str) -> None:
    store = await open_store(database, limits=LIMITS)
    await owe(store, "hello")
    await store.aclose()
    for _ in range(5):
        async with working(database, Post(name="another")) as room:
            await moved()
            view = await one(room)
            assert (view.status, view.parts[0].attempts) == ("queued", 0)
    post = Post()
    async with working(database, post) as room:
        await settled(room, SESSION, "sent")
    assert [(part.text, part.attempt) for part in post.calls] == [("hello", 1)]


@pytest.mark.contract("OUT-07")
async def test_a_wait_that_is_asked_for_is_kept_to_the_second_and_over_a_restart(
    database: str,
) -> None:
    """C-114, C-115: nothing at all is called until the penalty ends."""
    clock, post = ManualClock(), Post()
    post.says = answers(RetryAfter(37_000))
    async with working(database, post, clock=clock) as room:
        await owe(room.store, "hello", "and this")
        await settled(room, SESSION, "queued", 2)
        await moved()
        clock.advance(30_000)
        await moved()
    async with working(database, post, clock=clock) as room:
        clock.advance(6_999)
        await moved()
        assert len(post.calls) == 1
        assert [d.parts[0].attempts for d in await deliveries(room, SESSION)] == [0, 0]
        await rests(clock)
        clock.advance(1)
        await settled(room, SESSION, "sent", 2)
    assert post.texts == ["hello", "and this"]


@pytest.mark.contract("OUT-08")
async def test_attempts_are_bounded_over_restarts_and_then_it_has_failed(database: str) -> None:
    """C-31: the calls are no more than the attempts, however often it is started."""
    clock, post = ManualClock(), Post()
    post.says = answers(*[Refused("busy", retryable=True)] * 50)
    store = await open_store(database, limits=LIMITS, clock=clock)
    await owe(store, "hello")
    await store.aclose()
    for _ in range(LIMITS.delivery_attempts_max - 1):
        async with working(database, post, clock=clock) as room:
            await passes(room, clock)
        clock.advance(60_000)
    for _ in range(3):
        async with working(database, post, clock=clock) as room:
            await settled(room, SESSION, "failed")
    assert len(post.calls) == LIMITS.delivery_attempts_max


# ---- lanes ----


@pytest.mark.contract("OUT-09")
async def test_a_session_is_served_in_order_and_a_slow_one_holds_no_other(database: str) -> None:
    """C-206."""
    post, go, slow = Post(), asyncio.Event(), asyncio.Event()

    async def waits(part: OutPart) -> SendOutcome:
        if part.text == "0":
            slow.set()
            await go.wait()
        return Sent(part.key)

    post.says = waits
    async with working(database, post) as room:
        await owe(room.store, *"0123")
        await bounded(slow.wait())
        await owe(room.store, "meanwhile", to="session_other")
        await post.hears("meanwhile")
        go.set()
        await settled(room, SESSION, "sent", 4)
    assert post.texts == ["meanwhile", *"0123"]


@pytest.mark.contract("OUT-10", "RTR-06")
async def test_a_poisonous_delivery_stops_neither_its_lane_nor_another(database: str) -> None:
    post = Post(Profile(text_max=40, send_timeout_ms=50))

    async def breaks(part: OutPart) -> SendOutcome:
        if part.text == "raises":
            raise ZeroDivisionError
        if part.text == "hangs":
            await never()
        if part.text == "is refused":
            return Refused("no")
        return Sent(part.key)

    post.says = breaks
    async with working(database, post) as room:
        await owe(room.store, "raises", "hangs", "is refused", "arrives")
        await settled(room, SESSION, "sent")
        found = [d.status for d in await deliveries(room, SESSION)]
    assert found == ["unknown", "unknown", "failed", "sent"]
    assert len(post.calls) == 4


async def test_a_session_that_is_deleted_during_a_call_leaves_nothing_to_do(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    post, called, go = Post(), asyncio.Event(), asyncio.Event()

    async def waits(part: OutPart) -> SendOutcome:
        called.set()
        await go.wait()
        return Sent(part.key)

    post.says = waits
    async with working(database, post) as room:
        await owe(room.store, "hello")
        await bounded(called.wait())
        await room.store.write(delete_session, SessionId(SESSION))
        go.set()
        await post.count(1)
        await owe(room.store, "other", to="session_other")
        await post.hears("other")
        await moved()
    assert caplog.records == []


# ---- doubt ----


@pytest.mark.contract("OUT-04", "OUT-03")
@pytest.mark.parametrize("verdict", [Found("there"), Absent()])
async def test_what_is_in_doubt_is_asked_about_and_sent_again_only_if_it_is_absent(
    database: str, verdict: Verdict
) -> None:
    post = Post()
    post.says, post.verdicts = answers(Uncertain("lost")), [verdict]
    async with working(database, post) as room:
        await owe(room.store, "hello")
        await settled(room, SESSION, "sent")
    assert len(post.calls) == (2 if verdict == Absent() else 1)
    assert len({part.key for part in post.calls}) == 1


@pytest.mark.contract("OUT-14")
async def test_a_platform_that_never_can_tell_is_asked_so_often_and_then_an_operator_settles_it(
    database: str,
) -> None:
    """C-27."""
    clock, post = ManualClock(), Post()
    post.says = answers(Uncertain("lost"))
    async with working(database, post, clock=clock) as room:
        (first,) = await owe(room.store, "hello")
        await settled(room, SESSION, "unknown")
        for _ in range(LIMITS.reconciles_max + 2):
            if (await one(room)).handed_over:
                break
            clock.advance(await rests(clock))
            await moved()

        async def handed() -> bool:
            return (await one(room)).handed_over

        await until(handed)
        assert len(post.asked) == LIMITS.reconciles_max
        clock.advance(3_600_000)
        await moved()
        assert len(post.calls) == 1, "it is never sent again by itself"
        by_ann = ("ann", ClaimToken("op"))
        await room.store.write(resolve_delivery, first, "queued", *by_ann)
        await settled(room, SESSION, "sent")
    assert len(post.calls) == 2


@pytest.mark.contract("OUT-04")
async def test_a_lane_waits_for_a_verdict_no_longer_than_its_bound(database: str) -> None:
    clock, post = ManualClock(), Post()
    post.says = answers(Uncertain("lost"))
    async with working(database, post, clock=clock) as room:
        await owe(room.store, "hello", "after it")
        await settled(room, SESSION, "unknown")
        clock.advance(LIMITS.reconcile_wait_ms - 1)
        await moved()
        assert post.texts == []
        clock.advance(1)
        await post.hears("after it")


# ---- the operator, time ----


@pytest.mark.contract("OUT-18")
async def test_what_became_too_old_has_failed_and_what_is_behind_it_goes_on(database: str) -> None:
    clock, post = ManualClock(), Post()
    post.says = answers(RetryAfter(10_000_000))
    limits = Limits(lease_sqlite_ms=10**9, delivery_expiry_ms=60_000)
    async with working(database, post, clock=clock, limits=limits) as room:
        await owe(room.store, "old")

        async def told_to_wait() -> bool:
            (old,) = await deliveries(room, SESSION)
            return bool(post.calls) and old.status == "queued"

        await until(told_to_wait)
        await rests(clock)
        clock.advance(60_000)
        await settled(room, SESSION, "failed")
        await owe(room.store, "new")
        await post.hears("new")
        assert (await deliveries(room, SESSION))[0].parts[0].error == "expired"


@pytest.mark.contract("OUT-18")
async def test_giving_up_what_waits_lets_the_lane_go_on_at_once(database: str) -> None:
    clock, post = ManualClock(), Post()
    post.says = answers(RetryAfter(3_600_000))
    async with working(database, post, clock=clock) as room:
        first, _ = await owe(room.store, "first", "second")
        await settled(room, SESSION, "queued", 2)
        await moved()
        await room.store.write(abandon, first, "ann", ClaimToken("op"))
        await post.hears("second")
    assert len(post.calls) == 2


# ---- ending ----


@pytest.mark.contract("OUT-02", "OUT-03")
async def test_draining_waits_for_a_call_records_it_and_begins_no_other(database: str) -> None:
    post, called, go = Post(), asyncio.Event(), asyncio.Event()

    async def waits(part: OutPart) -> SendOutcome:
        called.set()
        await go.wait()
        return Sent(part.key)

    post.says = waits
    async with working(database, post, drain_ms=8_000) as room:
        await owe(room.store, "a long text that needs two parts over there", "another")
        await bounded(called.wait())
        closing = asyncio.ensure_future(room.aclose())
        await moved()
        go.set()
        await bounded(closing)
    assert len(post.calls) == 1
    store = await open_store(database, limits=LIMITS)
    second, first = await store.read(list_deliveries)
    assert [p.status for p in first.parts] == ["sent", "queued"]
    assert (first.claim, second.status) == ("ready", "queued")
    await store.aclose()


@pytest.mark.contract("OUT-03")
async def test_a_call_cut_off_by_the_end_is_in_doubt_and_nothing_is_left_half_done(
    database: str,
) -> None:
    post, called = Post(), asyncio.Event()

    async def hangs(_: OutPart) -> SendOutcome:
        called.set()
        return await never()

    post.says = hangs
    async with working(database, post) as room:
        await owe(room.store, "hello", "another")
        await bounded(called.wait())
    store = await open_store(database, limits=LIMITS)
    second, first = await store.read(list_deliveries)
    assert (first.status, first.claim) == ("unknown", "none")
    assert (second.status, second.parts[0].attempts) == ("queued", 0)
    await store.aclose()


async def test_ending_at_any_moment_leaves_no_part_in_the_middle_of_being_sent(
    database: str,
) -> None:
    """No budget, platforms that answer at once: whatever was claimed was called, or given back."""
    for number in range(12):
        post = Post()
        async with working(database, post) as room:
            await owe(room.store, *[f"{number} {n}" for n in range(5)])
            for _ in range(number * 3):
                await asyncio.sleep(0)
        store = await open_store(database, limits=LIMITS)
        views = await store.read(list_deliveries, limit=1000)
        await store.aclose()
        assert {p.status for view in views for p in view.parts} <= {"sent", "queued"}
        assert "claimed" not in {view.claim for view in views}


# ---- faults of the store ----


@pytest.mark.parametrize("script", ["claim_delivery", "record_outcome"])
@pytest.mark.parametrize("fault", ["refused", "lost", "committed"])
@pytest.mark.contract("OUT-03", "OUT-13")
async def test_a_write_that_failed_or_whose_answer_was_lost_sends_nothing_twice(
    database: str, script: str, fault: str
) -> None:
    post = Post()
    store = FaultyStore(await open_store(database, limits=LIMITS))
    if fault == "refused":
        store.refuse(script, times=2)
    else:
        store.lose(script, times=2, written=fault == "committed")
    async with working(database, post, store=store) as room:
        await owe(room.store, "one", "two")
        await settled(room, SESSION, "sent", 2)
    assert post.texts == ["one", "two"]
    assert len(post.calls) == 2


@pytest.mark.parametrize("script", ["claim_question", "record_verdict"])
@pytest.mark.parametrize("fault", ["refused", "lost", "committed"])
async def test_a_verdict_is_kept_though_the_store_fails(
    database: str, script: str, fault: str
) -> None:
    post = Post()
    post.says, post.verdicts = answers(Uncertain("lost")), [Found("there")]
    store = FaultyStore(await open_store(database, limits=LIMITS))
    if fault == "refused":
        store.refuse(script, times=2)
    else:
        store.lose(script, times=2, written=fault == "committed")
    async with working(database, post, store=store) as room:
        await owe(room.store, "one")
        await settled(room, SESSION, "sent")
    assert len(post.calls) == 1


async def test_an_answer_is_kept_however_long_the_store_refuses_it(database: str) -> None:
    clock, post = ManualClock(), Post()
    store = FaultyStore(await open_store(database, limits=LIMITS, clock=clock))
    store.refuse("record_outcome", times=8)
    async with working(database, post, store=store, clock=clock) as room:
        await owe(room.store, "one")
        await post.count(1)
        for _ in range(8):
            await rests(clock)
            clock.advance(30_000)
        await settled(room, SESSION, "sent")
    assert len(post.calls) == 1


class Deaf(FaultyStore):
    """Says of no work that it is ready."""

    def on_work(self, listener: Any) -> Any:
        return super().on_work(lambda kind, key: None)


async def test_work_that_nobody_spoke_of_is_found_by_looking(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_LOOK_EVERY_S", 0.02)
    post = Post()
    post.says, post.verdicts = answers(Uncertain("lost")), [Absent()]
    store = Deaf(await open_store(database, limits=LIMITS))
    async with working(database, post, store=store) as room:
        await owe(room.store, "hello")
        await settled(room, SESSION, "sent")
    assert len(post.calls) == 2


@pytest.mark.contract("OUT-13")
async def test_no_call_is_made_under_a_claim_that_became_too_old(database: str) -> None:
    """The process slept between its claim and the call: another may have taken it for dead."""
    clock, post = ManualClock(), Post()

    class Slept(FaultyStore):
        async def write(self, script: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await super().write(script, *args, **kwargs)
            if script.__name__ == "claim_delivery" and not slept:
                slept.append(1)
                clock.advance(LIMITS.lease_sqlite_ms * 2 // 3)
            return answer

    slept: list[int] = []
    limits = LIMITS
    store = Slept(await open_store(database, limits=limits, clock=clock))
    expiry = Limits(lease_sqlite_ms=10**9, delivery_expiry_ms=10**10)
    async with working(database, post, store=store, clock=clock, limits=expiry) as room:
        await owe(room.store, "hello")

        async def told() -> bool:
            return (await one(room)).parts[0].error is not None

        await until(told)
        assert post.calls == []
        view = await one(room)
        assert (view.status, view.parts[0].attempts) == ("queued", 0)
        clock.advance(await rests(clock))
        await settled(room, SESSION, "sent")


async def test_not_started_is_tried_again_later_and_later(database: str) -> None:
    clock, post = ManualClock(), Post()
    post.says = answers(NotStarted("no line"), NotStarted("no line"))
    async with working(database, post, clock=clock) as room:
        await owe(room.store, "hello")
        await passes(room, clock)
        await passes(room, clock)
        await settled(room, SESSION, "sent")
    assert [part.attempt for part in post.calls] == [1, 1, 1]
