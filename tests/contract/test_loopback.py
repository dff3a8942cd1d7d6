"""The loopback channel's own platform: its script, its limits, its people, and the file it may be."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from postroom.domain.ids import DeliveryId, SessionId
from postroom.domain.message import File
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    Sent,
    Uncertain,
)
from postroom.ports.channel import OutPart, Profile
from postroom.testing.clock import ManualClock
from postroom.testing.file_platform import FilePlatform
from postroom.testing.loopback import BLIND, PLAIN, PROFILES, READS_BACK, WINDOW, Loopback, dm
from postroom.testing.platform import Platform
from postroom.testing.platform_facts import (
    Accept,
    AskToWait,
    Behaviour,
    Hang,
    Late,
    Lose,
    Moment,
    NoConnection,
    Refuse,
    RefuseMarkup,
    Verb,
)
from tests.contract.channel_world import Desk
from tests.support import ROOT, bounded


def part(key: str = "k1", text: str = "hello", to: str = "ann", **more: object) -> OutPart:
    made = OutPart(
        session_id=SessionId("session_1"),
        delivery_id=DeliveryId("dlv_1"),
        index=0,
        count=1,
        kind="text",
        conversation=dm(to),
        key=key,
        text=text,
    )
    return msgspec.structs.replace(made, **more)


def over(
    profile: Profile, *behaviours: Behaviour, **more: bool
) -> tuple[Platform, Loopback, ManualClock]:
    clock = ManualClock()
    platform = Platform(profile, clock=clock, **more)
    platform.script(*behaviours)
    return platform, Loopback(platform, clock=clock), clock


# ---- the script ----


async def test_each_call_is_treated_as_the_script_says_and_the_rest_is_accepted() -> None:
    platform, channel, clock = over(BLIND, NoConnection(), AskToWait(500), Refuse("no"), Lose())
    ends = [await channel.send(part(f"k{n}")) for n in range(5)]
    assert ends == [
        NotStarted("no connection"),
        RetryAfter(500),
        Refused("no"),
        Uncertain("the connection broke before an answer"),
        Sent("m2"),
    ]
    calls = platform.calls("send")
    assert [call.answer for call in calls] == ends
    assert [call.key for call in calls] == ["k0", "k1", "k2", "k3", "k4"]
    assert {call.at for call in calls} == {clock.now_ms()}
    assert platform.messages()[1].at == clock.now_ms()


async def test_a_script_for_one_conversation_holds_up_no_other() -> None:
    platform, channel, _ = over(BLIND)
    platform.script(Hang(), conversation="ann")
    slow = asyncio.create_task(channel.send(part("k1")))
    await bounded(platform.until(lambda: platform.count("send") == 1))
    assert await bounded(channel.send(part("k2", to="bob"))) == Sent("m1")
    assert platform.seen("ann") == []
    platform.release()
    assert await bounded(slow) == Sent("m2")
    assert (platform.seen("ann"), platform.seen("bob")) == (["hello"], ["hello"])


async def test_what_is_always_done_is_done_until_it_is_ended() -> None:
    platform, channel, _ = over(BLIND)
    platform.always(NoConnection("down"))
    for _ in range(3):
        assert await channel.send(part()) == NotStarted("down")
    platform.always(Accept())
    assert await channel.send(part()) == Sent("m1")


async def test_a_call_that_hangs_may_have_been_accepted_already() -> None:
    platform, channel, _ = over(BLIND, Hang(accepted=True))
    sending = asyncio.create_task(channel.send(part()))
    await bounded(platform.until(lambda: platform.copies("k1") == 1))
    sending.cancel()
    await asyncio.wait([sending])
    assert platform.seen() == ["hello"]
    (call,) = platform.calls()
    assert call.answer is None
    assert call.ended_at is not None


async def test_an_adapter_with_a_fault_raises_after_the_message_was_taken() -> None:
    platform, channel, _ = over(BLIND, Lose(raises=True))
    with pytest.raises(ConnectionResetError):
        await channel.send(part())
    assert platform.copies("k1") == 1


async def test_a_message_under_way_arrives_after_its_call_was_given_up() -> None:
    platform, channel, clock = over(READS_BACK, Late(after_ms=3_000), Late(hangs=True))
    first = part("k1", "first", first_attempt_at=clock.now_ms())
    assert isinstance(await channel.send(first), Uncertain)
    assert await channel.reconcile(first) == Absent()  # too early to mean anything
    second = asyncio.create_task(channel.send(part("k2", "second")))
    await bounded(platform.until(lambda: len(platform.under_way) == 2))
    second.cancel()
    await asyncio.wait([second])

    clock.advance(2_999)
    assert platform.seen() == []
    clock.advance(1)
    assert platform.seen() == ["first"]
    assert await channel.reconcile(first) == Found("m1")
    platform.arrive()
    assert platform.seen() == ["first", "second"]
    assert platform.under_way == []


async def test_the_window_holds_for_what_arrives_late_too() -> None:
    platform, channel, clock = over(WINDOW, Late(after_ms=1_000))
    sent = part(first_attempt_at=clock.now_ms())
    assert isinstance(await channel.send(sent), Uncertain)
    assert await channel.reconcile(sent) == Found("m1")
    clock.advance(1_000)
    assert platform.copies("k1") == 1


async def test_after_the_window_a_repeat_is_another_message() -> None:
    platform, channel, clock = over(WINDOW)
    await channel.send(part())
    clock.advance(WINDOW.repeat_window_ms - 1)
    assert await channel.send(part()) == Sent("m1")
    clock.advance(1)
    assert await channel.send(part()) == Sent("m2")
    assert platform.copies("k1") == 2


@pytest.mark.contract("CHN-03")
async def test_where_the_markup_is_refused_the_plain_text_is_sent_and_the_receipt_says_so() -> None:
    platform, channel, _ = over(BLIND, RefuseMarkup())
    assert await channel.send(part(text="*hello*")) == Sent("m1", PLAIN)
    (message,) = platform.messages()
    assert message.plain
    assert message.text == "*hello*"
    assert platform.count("send") == 2


async def test_doubt_about_the_plain_text_is_doubt() -> None:
    platform, channel, _ = over(BLIND, RefuseMarkup(), Lose())
    assert isinstance(await channel.send(part()), Uncertain)
    assert platform.copies("k1") == 1


@pytest.mark.parametrize(
    ("name", "longest", "too_long"),
    [
        ("telegram", "😀" * 2_048, "😀" * 2_048 + "a"),
        ("slack", "😀" * 4_000, "a" * 4_001),
        ("matrix", "é" * 30_000, "é" * 30_001),
        ("discord", "é" * 2_000, "a" * 2_001),
    ],
)
async def test_a_text_is_measured_in_the_platform_s_own_unit(
    name: str, longest: str, too_long: str
) -> None:
    platform, channel, _ = over(PROFILES[name])
    assert await channel.send(part(text=longest)) == Sent("m1")
    assert await channel.send(part("k2", too_long)) == Refused("the text is too long")
    assert platform.seen() == [longest]


async def test_asking_can_fail_as_sending_can() -> None:
    platform, channel, _ = over(READS_BACK)
    await channel.send(part())
    platform.script(NoConnection(), AskToWait(1), Refuse(), Lose(), Hang(), verb="reconcile")
    for _ in range(4):
        assert isinstance(await channel.reconcile(part()), CannotTell)
    asking = asyncio.create_task(channel.reconcile(part()))
    await bounded(platform.until(lambda: platform.count("reconcile") == 5))
    platform.release()
    assert await bounded(asking) == Found("m1")


async def test_a_blind_platform_is_asked_and_sends_nothing() -> None:
    platform, channel, clock = over(BLIND)
    tried = part(first_attempt_at=clock.now_ms())
    assert isinstance(await channel.reconcile(tried), CannotTell)
    assert platform.count("reconcile") == 1
    assert platform.seen() == []


async def test_what_the_people_see_has_its_file_and_what_it_answers() -> None:
    platform, channel, _ = over(BLIND)
    file = File(artifact="sha256:00", media_type="text/plain", size=3)
    await channel.send(part(kind="media", media=file, reply_to="e1"))
    (message,) = platform.messages("ann")
    assert (message.media, message.reply_to, message.kind) == ("sha256:00", "e1", "media")


async def test_typing_is_on_record_with_its_time() -> None:
    platform, channel, clock = over(BLIND)
    await channel.typing(dm("ann"))
    clock.advance(4_000)
    await channel.typing(dm("ann"))
    assert [(t.conversation, t.at - platform.typed[0].at) for t in platform.typed] == [
        ("ann", 0),
        ("ann", 4_000),
    ]


# ---- the people ----


async def received(platform: Platform, channel: Loopback, desk: Desk, acks: int) -> None:
    """Receives until so many updates were acknowledged."""
    running = asyncio.create_task(channel.run(desk))
    await bounded(platform.until(lambda: len(platform.acks) >= acks or running.done()))
    running.cancel()
    await asyncio.wait([running])


async def test_events_come_in_the_order_that_the_platform_gives_them() -> None:
    platform, channel, _ = over(BLIND)
    desk = Desk()
    one, two, three = (platform.say("ann", "u1", text) for text in ("one", "two", "three"))
    platform.reorder(three, one)
    await received(platform, channel, desk, 3)
    assert desk.texts == ["three", "two", "one"]
    assert [inbound.dedupe for inbound in desk.taken] == [three, two, one]


@pytest.mark.contract("CHN-01")
async def test_events_that_come_at_once_are_with_the_sink_at_once() -> None:
    platform, channel, _ = over(BLIND)
    desk = Desk()
    event = platform.say("ann", "u1", "hello")
    platform.redeliver(event, relabelled=True, concurrently=True)
    platform.redeliver(event, concurrently=True)
    platform.say("ann", "u1", "later")
    await received(platform, channel, desk, 4)
    assert desk.at_once_max == 3
    assert desk.texts == ["hello", "later"]
    assert desk.duplicates == [event, event]
    assert [update.label for update in platform.updates] == ["u1", "u2", "u2", "u3"]


@pytest.mark.contract("CHN-01")
@pytest.mark.parametrize("pulls", [False, True])
async def test_when_the_cursor_is_forgotten_everything_comes_again_as_the_same(
    pulls: bool,
) -> None:
    platform, channel, _ = over(BLIND, pulls=pulls)
    desk = Desk()
    platform.say("ann", "u1", "one")
    await received(platform, channel, desk, 1)
    platform.say("ann", "u1", "two")
    await received(platform, channel, desk, 2)
    assert desk.duplicates == []
    platform.forget_cursor()
    await received(platform, channel, desk, 4)
    assert desk.texts == ["one", "two"]
    assert desk.duplicates == [inbound.dedupe for inbound in desk.taken]
    assert platform.resumed == [None, "0.1", "0.2"]


@pytest.mark.contract("CHN-01")
async def test_where_the_cursor_was_committed_a_pulled_event_does_not_come_again() -> None:
    platform, channel, _ = over(BLIND, pulls=True)
    desk = Desk()
    platform.say("ann", "u1", "one")

    def stop(verb: Verb, number: int, moment: Moment) -> None:
        if (verb, number, moment) == ("receive", 1, "accepted"):
            raise RuntimeError("stopped")

    platform.on_moment = stop
    with pytest.raises(RuntimeError, match="stopped"):
        await bounded(channel.run(desk))
    assert platform.acks == []
    platform.say("ann", "u1", "two")
    await received(platform, channel, desk, 1)
    assert desk.order == ["e1", "e2"]


@pytest.mark.contract("CHN-01", "CHN-10")
async def test_an_event_whose_acknowledgement_was_lost_comes_again_as_the_same() -> None:
    platform, channel, _ = over(BLIND)
    desk = Desk()
    event = platform.say("ann", "u1", "hello")

    def stop(verb: Verb, number: int, moment: Moment) -> None:
        if (verb, number, moment) == ("receive", 1, "accepted"):
            raise RuntimeError("stopped")

    platform.on_moment = stop
    with pytest.raises(RuntimeError, match="stopped"):
        await bounded(channel.run(desk))
    assert (len(desk.taken), platform.acks) == (1, [])
    await received(platform, Loopback(platform), desk, 1)
    assert (len(desk.taken), desk.duplicates) == (1, [event])


async def test_edits_and_deletions_name_the_event_they_are_about() -> None:
    platform, channel, _ = over(BLIND)
    desk = Desk()
    event = platform.say("ann", "u1", "hello", group=True)
    platform.say("ann", "u1", "hello again", replaces=event)
    platform.delete(event)
    await received(platform, channel, desk, 3)
    said, edited, deleted = desk.taken
    assert (said.group, said.replaces, said.deletes) == (True, None, None)
    assert (edited.replaces, edited.deletes) == (event, None)
    assert (deleted.deletes, deleted.content, deleted.sender.id) == (event, (), "u1")
    assert len({inbound.dedupe for inbound in desk.taken}) == 3


@pytest.mark.contract("CHN-06")
@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "{}",
        '{"id": "e", "conversation": "", "sender": {"id": "u1"}, "text": "x"}',
        '{"id": "e", "conversation": "ann", "sender": {"id": "u1"}, "text": 7}',
        '{"id": "e", "conversation": "ann", "sender": {"id": "u1"}, "more": 1}',
    ],
)
async def test_whatever_is_malformed_goes_aside(body: str) -> None:
    platform, channel, _ = over(BLIND)
    desk = Desk()
    label = platform.garble(body)
    platform.say("ann", "u1", "fine")
    await received(platform, channel, desk, 2)
    assert desk.kept == [("loopback", f"update:{label}", body.encode())]
    assert desk.texts == ["fine"]


# ---- the file ----


def child(path: Path, verb: str, key: str = "k1") -> tuple[int, str]:
    """How a process over this platform ended, and what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.contract.loopback_child", str(path), verb, key],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout.decode().strip()


@pytest.mark.contract("OUT-03", "CHN-09")
@pytest.mark.parametrize(
    ("moment", "seen", "verdict"),
    [("before_call", 0, Absent), ("accepted", 1, Found), ("answered", 1, Found)],
)
async def test_a_sender_killed_at_a_call_leaves_what_the_platform_had_taken(
    tmp_path: Path, moment: Moment, seen: int, verdict: type[object]
) -> None:
    path = tmp_path / "platform.jsonl"
    platform = FilePlatform(path, READS_BACK)
    platform.die_at("send", 2, moment)
    assert child(path, "send", "k0") == (0, "Sent")
    assert child(path, "send") == (-signal.SIGKILL, "")
    assert platform.copies("k1") == seen
    assert platform.calls("send")[1].ended_at is None or moment == "answered"
    assert type(await Loopback(platform).reconcile(part())) is verdict
    assert platform.seen() == ["hello"] * (1 + seen)


@pytest.mark.contract("OUT-03")
@pytest.mark.parametrize("moment", ["before_call", "accepted", "answered"])
def test_killed_again_while_it_asks_there_is_still_one_copy(tmp_path: Path, moment: Moment) -> None:
    path = tmp_path / "platform.jsonl"
    platform = FilePlatform(path, WINDOW)
    platform.die_at("send", 1, "accepted")
    platform.die_at("reconcile", 1, moment)
    assert child(path, "send")[0] == -signal.SIGKILL
    assert child(path, "reconcile")[0] == -signal.SIGKILL
    assert child(path, "reconcile") == (0, "Found")
    assert platform.copies("k1") == 1


@pytest.mark.contract("CHN-01")
@pytest.mark.parametrize(
    ("moment", "again"), [("before_call", True), ("accepted", True), ("answered", False)]
)
def test_a_receiver_killed_at_an_event_gets_it_again_unless_it_acknowledged(
    tmp_path: Path, moment: Moment, again: bool
) -> None:
    path = tmp_path / "platform.jsonl"
    platform = FilePlatform(path)
    platform.say("ann", "u1", "one")
    event = platform.say("ann", "u1", "two")
    platform.die_at("receive", 2, moment)
    assert child(path, "receive")[0] == -signal.SIGKILL
    assert child(path, "receive") == (0, event if again else "")
    assert platform.unacknowledged == []


async def test_a_script_in_the_file_is_another_process_s_too(tmp_path: Path) -> None:
    platform = FilePlatform(tmp_path / "platform.jsonl", WINDOW)
    platform.script(Refuse("no"), Hang())
    other = FilePlatform(platform.path)
    assert other.profile == WINDOW
    channel = Loopback(other)
    assert await bounded(channel.send(part())) == Refused("no")
    sending = asyncio.create_task(channel.send(part()))
    await bounded(platform.until(lambda: platform.count("send") == 2))
    platform.release()
    assert await bounded(sending) == Sent("m1")
    assert platform.seen() == ["hello"]


def test_a_line_that_was_not_finished_is_no_fact(tmp_path: Path) -> None:
    platform = FilePlatform(tmp_path / "platform.jsonl")
    platform.say("ann", "u1", "one")
    whole = platform.path.read_bytes()
    platform.say("ann", "u1", "two")
    torn = platform.path.read_bytes()[:-1]
    for cut in (torn, whole + torn[len(whole) :][:10]):
        platform.path.write_bytes(cut)
        opened = FilePlatform(platform.path)
        assert len(opened.updates) == 1
        assert opened.say("ann", "u1", "three") == "e2"
        assert len(FilePlatform(platform.path).updates) == 2


def test_writers_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "platform.jsonl"

    def talk(name: str) -> None:
        platform = FilePlatform(path)
        for number in range(50):
            platform.say("ann", name, f"{number}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(talk, "abcd"))
    updates = FilePlatform(path).updates
    assert [update.position for update in updates] == list(range(1, 201))
    assert len({update.label for update in updates}) == 200


def test_many_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "platform.jsonl"
    platform = FilePlatform(path, READS_BACK)
    senders = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.loopback_child", str(path), "send", f"k{n}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        for n in range(3)
    ]
    assert [sender.wait(60) for sender in senders] == [0, 0, 0]
    assert sorted(message.key for message in platform.messages()) == ["k0", "k1", "k2"]
    assert [message.reference for message in platform.messages()] == ["m1", "m2", "m3"]
    assert [call.number for call in platform.calls()] == [1, 2, 3]
