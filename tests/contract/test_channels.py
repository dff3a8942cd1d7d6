"""What every channel does, whatever its platform: proven over each world in `WORLDS`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec
import pytest

from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.errors import NotCommitted, StoreLocked
from postroom.ports.channel import Channel, OutPart
from postroom.testing.clock import ManualClock
from postroom.testing.file_platform import FilePlatform
from postroom.testing.loopback import PROFILES, WINDOW
from postroom.testing.platform import Platform
from tests.contract.channel_webhook import WebhookWorld
from tests.contract.channel_world import WAIT_MS, LoopbackWorld, Treatment, World
from tests.support import bounded

MakeWorld = Callable[[Path], World]


def loopback(profile: str, *, echoes: bool = False, pulls: bool = False) -> MakeWorld:
    def make(_: Path) -> World:
        clock = ManualClock()
        platform = Platform(PROFILES[profile], clock=clock, echoes=echoes, pulls=pulls)
        return LoopbackWorld(platform, clock)

    return make


def loopback_in_a_file(folder: Path) -> World:
    clock = ManualClock()
    return LoopbackWorld(FilePlatform(folder / "platform.jsonl", WINDOW, clock=clock), clock)


def webhook(*, promised: bool) -> MakeWorld:
    return lambda _: WebhookWorld(promised=promised)


WORLDS: dict[str, MakeWorld] = {
    "reads_back": loopback("reads_back"),
    "window": loopback("window"),
    "blind": loopback("blind"),
    "pulling": loopback("reads_back", pulls=True),
    "like telegram": loopback("telegram"),
    "like slack": loopback("slack", echoes=True),
    "like matrix": loopback("matrix", echoes=True, pulls=True),
    "like discord": loopback("discord"),
    "in a file": loopback_in_a_file,
    "webhook": webhook(promised=False),
    "webhook with a promise": webhook(promised=True),
}


@pytest.fixture(params=list(WORLDS))
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[World]:
    made = WORLDS[request.param](tmp_path)
    async with made:
        yield made


# ---- sending ----


async def test_a_part_that_is_taken_is_sent_once_and_seen(world: World) -> None:
    channel = world.channel()
    first, second = world.part(), world.part()
    assert isinstance(await bounded(channel.send(first)), Sent)
    assert isinstance(await bounded(channel.send(second)), Sent)
    assert world.seen() == [first.text, second.text]
    assert (world.copies(first.key), world.calls()) == (1, 2)


@pytest.mark.parametrize(
    ("treatment", "kind", "copies"),
    [
        ("refuse", Refused, 0),
        ("refuse_for_now", Refused, 0),
        ("wait", RetryAfter, 0),
        ("no_connection", NotStarted, 0),
        ("lose_answer", Uncertain, 1),
        ("lose_message", Uncertain, 0),
    ],
)
async def test_each_end_of_a_call_is_told_for_what_it_is_and_none_is_raised(
    world: World, treatment: Treatment, kind: type[object], copies: int
) -> None:
    await world.treat(treatment)
    part = world.part()
    outcome = await bounded(world.channel().send(part))
    assert type(outcome) is kind
    if isinstance(outcome, Refused):
        assert outcome.retryable == (treatment == "refuse_for_now")
    if isinstance(outcome, RetryAfter):
        assert outcome.delay_ms == WAIT_MS
    assert world.copies(part.key) == copies


async def test_an_attempt_is_one_attempt(world: World) -> None:
    channel = world.channel()
    treatments: tuple[Treatment, ...] = ("refuse_for_now", "wait", "lose_answer", "lose_message")
    for number, treatment in enumerate(treatments, start=1):
        await world.treat(treatment)
        await bounded(channel.send(world.part()))
        assert world.calls() == number


async def test_a_call_that_hangs_and_is_cancelled_leaves_nothing_behind(world: World) -> None:
    channel = world.channel()
    await world.treat("hang")
    part = world.part()
    sending = asyncio.create_task(channel.send(part))
    await world.hanging()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(sending)
    await world.nothing_left()
    assert world.copies(part.key) == 0
    await world.treat("accept")
    assert isinstance(await bounded(channel.send(world.part())), Sent)


async def test_what_is_not_for_this_platform_is_refused_before_anything_leaves(
    world: World,
) -> None:
    channel = world.channel()
    for conversation in (world.foreign, None):
        outcome = await bounded(channel.send(world.part(conversation=conversation)))
        assert isinstance(outcome, Refused)
        assert not outcome.retryable
    assert world.calls() == 0


async def test_a_closed_channel_starts_nothing_and_may_be_closed_again(world: World) -> None:
    channel = world.channel()
    await bounded(channel.send(world.part()))
    await channel.aclose()
    await channel.aclose()
    assert isinstance(await bounded(channel.send(world.part())), NotStarted)
    assert len(world.seen()) == 1


async def test_typing_is_no_message(world: World) -> None:
    channel = world.channel()
    await bounded(channel.typing(world.conversation))
    await bounded(channel.typing(world.foreign))
    assert world.seen() == []


# ---- asking ----


async def in_doubt(world: World, channel: Channel, treatment: Treatment) -> OutPart:
    """A part whose call ended in doubt; the platform works again."""
    part = world.tried(world.part())
    await world.treat(treatment)
    assert isinstance(await bounded(channel.send(part)), Uncertain)
    await world.treat("accept")
    return part


@pytest.mark.contract("CHN-09", "OUT-03")
async def test_of_a_part_that_arrived_it_says_so_if_it_can(world: World) -> None:
    channel = world.channel()
    part = await in_doubt(world, channel, "lose_answer")
    verdict = await bounded(channel.reconcile(part))
    assert isinstance(verdict, Found if world.reads or world.repeats else CannotTell)
    assert world.copies(part.key) == 1


@pytest.mark.contract("CHN-09", "OUT-04")
async def test_a_part_that_did_not_arrive_is_absent_or_arrives_by_the_repeat(
    world: World,
) -> None:
    channel = world.channel()
    part = await in_doubt(world, channel, "lose_message")
    verdict = await bounded(channel.reconcile(part))
    expected = Absent if world.reads else Found if world.repeats else CannotTell
    assert type(verdict) is expected
    assert world.copies(part.key) == (1 if world.repeats else 0)
    assert await bounded(channel.reconcile(part)) == verdict
    assert world.copies(part.key) == (1 if world.repeats else 0)


@pytest.mark.contract("CHN-09")
async def test_a_repeat_that_is_refused_for_what_it_is_proves_that_nothing_arrived(
    world: World,
) -> None:
    channel = world.channel()
    part = await in_doubt(world, channel, "lose_message")
    await world.treat("refuse")
    verdict = await bounded(channel.reconcile(part))
    assert type(verdict) is (Absent if world.repeats else CannotTell)
    assert world.copies(part.key) == 0


@pytest.mark.contract("CHN-09")
async def test_a_part_that_arrived_is_not_absent_though_its_like_is_refused_now(
    world: World,
) -> None:
    channel = world.channel()
    part = await in_doubt(world, channel, "lose_answer")
    await world.treat("refuse")
    verdict = await bounded(channel.reconcile(part))
    assert type(verdict) is (Found if world.repeats else CannotTell)
    assert world.copies(part.key) == 1


@pytest.mark.contract("CHN-09")
@pytest.mark.parametrize(
    "treatment",
    ["no_connection", "wait", "refuse_for_now", "lose_answer"],
)
@pytest.mark.parametrize("arrived", [True, False])
async def test_a_platform_that_cannot_say_now_proves_nothing(
    world: World, treatment: Treatment, arrived: bool
) -> None:
    channel = world.channel()
    part = await in_doubt(world, channel, "lose_answer" if arrived else "lose_message")
    await world.treat(treatment)
    assert isinstance(await bounded(channel.reconcile(part)), CannotTell)
    assert world.copies(part.key) <= 1
    await world.treat("accept")
    again = await bounded(channel.reconcile(part))
    assert isinstance(again, Found | Absent) == (world.reads or world.repeats)
    assert world.copies(part.key) <= 1


@pytest.mark.contract("OUT-04")
async def test_after_half_of_the_window_nothing_is_repeated(world: World) -> None:
    channel = world.channel()
    if not world.repeats:  # then nothing is ever repeated
        part = await in_doubt(world, channel, "lose_message")
        await bounded(channel.reconcile(part))
        assert world.copies(part.key) == 0
        return
    part = await in_doubt(world, channel, "lose_message")
    half_ms = world.profile.repeat_window_ms // 2
    for moved_ms in (half_ms, half_ms, -2 * half_ms - 1):  # and it is before the first attempt
        world.clock.advance(moved_ms)
        before = world.calls()
        assert isinstance(await bounded(channel.reconcile(part)), CannotTell)
        assert world.calls() == before
    never_tried = msgspec.structs.replace(part, first_attempt_at=None)
    assert isinstance(await bounded(channel.reconcile(never_tried)), CannotTell)
    assert world.copies(part.key) == 0
    world.clock.advance(half_ms)  # one millisecond before the half is over
    assert isinstance(await bounded(channel.reconcile(part)), Found)
    assert world.copies(part.key) == 1


@pytest.mark.contract("CHN-10")
@pytest.mark.parametrize("treatment", ["lose_answer", "lose_message"])
async def test_a_new_object_gives_the_verdict_that_the_old_one_would_have_given(
    world: World, treatment: Treatment
) -> None:
    verdicts: list[tuple[type[Verdict], int]] = []
    for dropped in (False, True):
        channel = world.channel()
        part = await in_doubt(world, channel, treatment)
        if dropped:
            await channel.aclose()
            channel = world.channel()
        verdict = await bounded(channel.reconcile(part))
        verdicts.append((type(verdict), world.copies(part.key)))
    assert verdicts[0] == verdicts[1]


@pytest.mark.contract("CHN-10")
async def test_a_new_object_repeats_no_part_that_the_old_one_sent(world: World) -> None:
    if not (world.reads or world.repeats):
        return
    part = world.tried(world.part())
    old = world.channel()
    sent = await bounded(old.send(part))
    await old.aclose()
    assert isinstance(sent, Sent)
    assert await bounded(world.channel().reconcile(part)) == Found(sent.reference)
    assert world.copies(part.key) == 1


# ---- receiving ----


@pytest.mark.contract("CHN-01")
async def test_an_event_is_acknowledged_only_after_the_sink_returned(world: World) -> None:
    world.desk.may_commit.clear()
    async with world.receiving() as desk:
        event = world.say("hello")
        await bounded(desk.arrived.wait())
        await world.turns()
        assert world.acked() == []
        desk.may_commit.set()
        await world.until(lambda: world.acked() == [event])
    (inbound,) = desk.taken
    assert desk.texts == ["hello"]
    assert inbound.channel == world.channel().name
    assert inbound.conversation == world.conversation
    assert (inbound.sender.id, inbound.sender.name) == ("u1", "Ann")
    assert not inbound.automatic


@pytest.mark.contract("CHN-01")
@pytest.mark.parametrize("fault", [StoreLocked("locked"), NotCommitted("full"), KeyError("bug")])
async def test_what_the_sink_did_not_take_is_not_acknowledged_and_comes_again(
    world: World, fault: Exception
) -> None:
    world.desk.faults = [fault, fault]
    async with world.receiving() as desk:
        event = world.say("hello")
        await world.until(lambda: event in world.acked())
    assert world.acked() == [event]
    assert len(desk.order) == 3
    assert len(set(desk.order)) == 1
    assert desk.texts == ["hello"]


async def test_events_reach_the_sink_in_order_one_after_the_other(world: World) -> None:
    async with world.receiving() as desk:
        events = [world.say(text) for text in ("one", "two", "three")]
        await world.until(lambda: len(world.acked()) == 3)
    assert world.acked() == events
    assert desk.texts == ["one", "two", "three"]
    assert desk.at_once_max == 1


@pytest.mark.contract("CHN-01")
@pytest.mark.parametrize("relabelled", [False, True])
@pytest.mark.parametrize("concurrently", [False, True])
async def test_an_event_that_comes_again_has_the_same_dedupe_key(
    world: World, relabelled: bool, concurrently: bool
) -> None:
    async with world.receiving() as desk:
        event = world.say("hello")
        if not concurrently:
            await world.until(lambda: world.acked() == [event])
        world.redeliver(event, relabelled=relabelled, concurrently=concurrently)
        await world.until(lambda: world.acked() == [event, event])
    assert len(desk.taken) == 1
    assert desk.duplicates == [desk.taken[0].dedupe]


@pytest.mark.contract("CHN-01")
async def test_an_event_that_came_twice_at_once_and_was_never_taken_comes_again(
    world: World,
) -> None:
    world.desk.faults = [StoreLocked("locked"), StoreLocked("locked")]
    async with world.receiving() as desk:
        event = world.say("hello")
        world.redeliver(event, concurrently=True)
        await world.until(lambda: world.acked().count(event) == 2)
    assert desk.texts == ["hello"]
    assert len(desk.order) == 4


@pytest.mark.contract("CHN-01")
async def test_two_events_never_have_the_same_dedupe_key(world: World) -> None:
    async with world.receiving() as desk:
        for _ in range(3):
            world.say("the same text")
        await world.until(lambda: len(world.acked()) == 3)
    assert len(desk.taken) == 3


@pytest.mark.contract("CHN-01", "CHN-10")
async def test_a_new_object_gives_an_event_the_same_dedupe_key(world: World) -> None:
    async with world.receiving() as desk:
        event = world.say("hello")
        await world.until(lambda: world.acked() == [event])
    world.redeliver(event)
    async with world.receiving():
        await world.until(lambda: world.acked() == [event, event])
    assert desk.duplicates == [desk.taken[0].dedupe]


async def test_what_came_while_nobody_received_comes_when_somebody_does(world: World) -> None:
    event = world.say("early")
    await world.turns()
    assert world.acked() == []
    async with world.receiving() as desk:
        await world.until(lambda: world.acked() == [event])
    assert desk.texts == ["early"]


@pytest.mark.contract("CHN-06")
async def test_a_malformed_event_is_kept_and_those_behind_it_flow(world: World) -> None:
    async with world.receiving() as desk:
        before, bad, after = world.say("before"), world.garble(), world.say("after")
        await world.until(lambda: len(world.acked()) == 3)
        world.redeliver(bad)
        await world.until(lambda: len(world.acked()) == 4)
    assert world.acked() == [before, bad, after, bad]
    assert desk.texts == ["before", "after"]
    (name, dedupe, raw), again = desk.kept
    assert name == world.channel().name
    assert raw
    assert again[1] == dedupe
    assert dedupe not in [one.dedupe for one in desk.taken]


@pytest.mark.contract("CHN-01", "CHN-06")
async def test_a_malformed_event_that_could_not_be_kept_is_not_acknowledged(
    world: World,
) -> None:
    world.desk.faults = [StoreLocked("locked")]
    async with world.receiving() as desk:
        bad = world.garble()
        await world.until(lambda: world.acked() == [bad])
    assert len(desk.kept) == 1
    assert len(desk.order) == 2


@pytest.mark.contract("CHN-05")
async def test_what_no_person_said_is_marked_as_automatic(world: World) -> None:
    async with world.receiving() as desk:
        world.say("out of office", automatic=True)
        world.say("I am here")
        await world.until(lambda: len(world.acked()) == 2)
    assert [one.automatic for one in desk.taken] == [True, False]


@pytest.mark.contract("CHN-05")
async def test_its_own_messages_do_not_come_back_as_a_person_s(world: World) -> None:
    channel = world.channel()
    async with world.receiving(channel) as desk:
        await bounded(channel.send(world.part()))
        event = world.say("thanks")
        await world.until(lambda: event in world.acked())
    assert len(desk.taken) == (2 if world.echoes else 1)
    assert [one.automatic for one in desk.taken] == ([True, False] if world.echoes else [False])


async def test_stopping_to_receive_leaves_nothing_behind(world: World) -> None:
    world.desk.may_commit.clear()
    async with world.receiving() as desk:
        event = world.say("hello")
        world.redeliver(event, concurrently=True)
        await bounded(desk.arrived.wait())
    await world.nothing_left()
    assert world.acked() == []
