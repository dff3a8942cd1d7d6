"""What a person can say to the host in a chat: answered without the model, through the outbox, once."""

from __future__ import annotations

import asyncio

import pytest

from postroom.domain.event import InboxCancelled, TurnCancel, UserMessage
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.message import Image
from postroom.flow import commands
from postroom.flow.commands import HELP, parse
from postroom.mint import claim_token
from postroom.scripts.inbox import cancel
from postroom.scripts.log import delete_session
from postroom.scripts.routes import bound_session
from postroom.testing import PuppetModel, PuppetTool, scripted
from tests.flow.support import ends, entered, idle, log_of, of, pending, said
from tests.flow.support_channel import (
    BOB,
    Line,
    agent_of,
    deliveries,
    dm,
    room_with,
    settled,
)
from tests.support import bounded

CORE = CoreId("default")
PICTURE = Image(artifact="sha256:" + "0" * 64, media_type="image/png", size=1)


async def bound(room, line: Line, to=None) -> SessionId | None:  # type: ignore[no-untyped-def]
    return await room.store.read(bound_session, CORE, line.name, to or dm())


# ---- what is a command ----


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("/help", ("help", "")),
        ("  /new  ", ("new", "")),
        ("/New", ("new", "")),
        ("/stop@the_bot", ("stop", "")),
        ("/steer go left\nand on", ("steer", "go left\nand on")),
        ("/steer\nleft", ("steer", "left")),
        ("/queue   edit 1 x", ("queue", "edit 1 x")),
    ],
)
def test_a_slash_and_a_known_word_are_a_command(text: str, asked: tuple[str, str]) -> None:
    found = parse(text)
    assert found is not None
    assert (found.name, found.rest) == asked


@pytest.mark.parametrize(
    "text", ["/unknown", "/etc/hosts is a file", "/", "/newer", "say /help", "/ help", "//new", ""]
)
def test_anything_else_is_for_the_model(text: str) -> None:
    assert parse(text) is None


async def test_an_unknown_word_with_a_slash_goes_to_the_model(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted(then="echo")):
        assert (await line.say("/etc/hosts please")).outcome == "queued"
        await line.hears("/etc/hosts please")


async def test_help_names_every_command(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        assert await line.asks("/help") == HELP
        for name in commands._COMMANDS:  # pyright: ignore[reportPrivateUsage]
            assert f"/{name}" in HELP
        accepted = await line.say("/help")
        assert accepted.outcome == "command"
        await settled(room, accepted.session_id, "sent", 2)
        assert model.asks == []
        kinds = {d.kind for d in await deliveries(room, accepted.session_id)}
        assert kinds == {"notice"}, "it is no history"


async def test_a_command_that_comes_again_is_answered_once(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted()) as room:
        first = await line.say("/new", dedupe="1")
        await line.count(1)
        copies = await asyncio.gather(*[line.say("/new", dedupe="1") for _ in range(3)])
        assert {c.outcome for c in copies} == {"duplicate"}
        assert await bound(room, line) == first.session_id
        assert await line.asks("/status")
        assert len(line.parts) == 2


async def test_a_command_is_answered_while_the_model_works(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model):
        await line.say("hello")
        asked = await bounded(model.asked())
        status = await line.asks("/status")
        assert status.startswith("I am working.")
        assert asked.open
        await line.say("behind it")
        await line.count(2)
        assert "1 waiting" in await line.asks("/status")
        asked.say("done")
        await line.hears("done")


async def test_the_status_of_an_idle_chat(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted("hello")) as room:
        accepted = await line.say("hello")
        await line.hears("hello")
        await idle(agent_of(room, accepted))
        status = await line.asks("/status")
        assert status == f"I am idle.\nSession {accepted.session_id}, 1 turns."


# ---- /stop ----


async def test_stop_ends_a_running_turn_and_drops_what_waits(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        accepted = await line.say("a long work")
        asked = await bounded(model.asked())
        await line.say("behind it")
        await line.count(1)
        assert await line.asks("/stop") == "Stopped. 1 that waited are dropped."
        await bounded(asked.dropped.wait())
        agent = agent_of(room, accepted)
        await idle(agent)
        log = await log_of(room, agent.session_id)
        assert ends(log) == ["cancelled"]
        assert [c.cause for c in of(log, TurnCancel)] == ["user"]
        assert len(of(log, InboxCancelled)) == 1
        assert await pending(agent) == []
        assert await line.asks("/stop") == "There is nothing to stop."
        await line.say("go on")
        (await bounded(model.asked())).say("gladly")
        await line.hears("gladly")
        assert len(line.parts) == 4


async def test_stop_ends_a_running_tool(database: str) -> None:
    line, model, tool = Line(), PuppetModel(), PuppetTool("look")
    async with room_with(database, [line], model, tools=[tool]) as room:
        accepted = await line.say("look")
        asked = await bounded(model.asked())
        asked.call("look")
        call = await bounded(tool.called())
        assert await line.asks("/stop") == "Stopped."
        await bounded(call.stopped.wait())
        await idle(agent_of(room, accepted))
        assert ends(await log_of(room, str(accepted.session_id))) == ["cancelled"]


@pytest.mark.contract("SEC-03")
async def test_stop_in_one_chat_stops_no_other(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        await line.say("ann's work")
        asked = await bounded(model.asked())
        bob = await line.say("/stop", to=dm("bob"), sender=BOB)
        await line.hears("There is nothing to stop.")
        assert asked.open
        assert bob.session_id != await bound(room, line)
        asked.say("done")
        await line.hears("done")


# ---- /new, /sessions, /resume ----


@pytest.mark.contract("RTR-05")
async def test_new_starts_another_conversation_and_resume_goes_back_for_good(
    database: str,
) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        old = await line.say("tell me about whales")
        (await bounded(model.asked())).say("whales are large")
        await line.hears("whales are large")
        await idle(agent_of(room, old))
        new = await line.say("/new")
        await line.hears("A new conversation.")
        assert new.session_id != old.session_id
        fresh = await line.say("and ants?")
        assert fresh.session_id == new.session_id
        asked = await bounded(model.asked())
        assert not any("whales" in text for text in asked.texts), "the new one knows nothing of it"
        asked.say("ants are small")
        await line.hears("ants are small")
        await idle(agent_of(room, new))
        assert await line.asks("/resume") == "Back in tell me about whales."
        back = await line.say("how large?")
        assert back.session_id == old.session_id
        asked = await bounded(model.asked())
        assert any("whales" in text for text in asked.texts)
        asked.say("very")
        await line.hears("very")
        await settled(room, old.session_id, "sent", 3)
    restarted = Line()
    async with room_with(database, [restarted], scripted(then="echo")):
        later = await restarted.say("and now?")
        assert later.session_id == old.session_id
        part = await restarted.hears("and now?")
        assert part.session_id == old.session_id


@pytest.mark.contract("RTR-05", "RTR-08")
async def test_what_the_old_conversation_still_says_after_new_is_not_said_in_the_new_one(
    database: str,
) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        old = await line.say("a long work")
        asked = await bounded(model.asked())
        told = await line.asks("/new")
        assert "The earlier one still works" in told
        asked.say("the late answer")
        await settled(room, old.session_id, "unrouted")
        assert line.texts == [told]


@pytest.mark.contract("RTR-05", "RTR-08")
async def test_resuming_before_the_answer_comes_hears_it(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        old = await line.say("a long work")
        asked = await bounded(model.asked())
        await line.asks("/new")
        await line.asks("/resume")
        asked.say("the answer")
        part = await line.hears("the answer")
        assert part.session_id == old.session_id
        assert await bound(room, line) == old.session_id


@pytest.mark.contract("BND-02", "SEC-03")
async def test_a_chat_lists_and_resumes_its_own_conversations_by_their_first_words(
    database: str,
) -> None:
    line = Line()
    async with room_with(database, [line], scripted(then="echo")) as room:
        secret = await line.say("bob's secret", to=dm("bob"), sender=BOB)
        first = await line.say("whales  and\nother large animals")
        await line.hears("whales")
        await line.say("/new")
        second = await line.say("ants")
        await line.count(4)
        listed = await line.asks("/sessions")
        assert listed == (
            "1. ants (this one)\n2. whales and other large animals\n/resume N goes on with one."
        )
        assert (await line.asks("/resume 2")) == "Back in whales and other large animals."
        assert await bound(room, line) == first.session_id
        listed = await line.asks("/sessions")
        assert listed.startswith("1. ants\n2. whales and other large animals (this one)")
        assert await line.asks("/resume 2") == "This is the one you are in."
        for foreign in (str(secret.session_id), "3", "0", "-1", "²", "9" * 5000):
            assert "has no conversation" in await line.asks(f"/resume {foreign}")
        assert await bound(room, line) == first.session_id
        assert (await line.asks(f"/resume {second.session_id}")) == "Back in ants."
        bobs = await line.asks("/sessions", to=dm("bob"), sender=BOB)
        assert bobs.startswith("1. bob's secret (this one)\n/resume")


async def test_a_chat_with_one_conversation_has_none_to_resume(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted()):
        assert await line.asks("/resume") == "There is no earlier conversation here."


# ---- /queue ----


async def test_the_queue_is_shown_edited_and_emptied(database: str) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        accepted = await line.say("first")
        asked = await bounded(model.asked())
        assert await line.asks("/queue") == "Nothing waits."
        for text in ("secnod", "x" * 100, "fourth"):
            await line.say(text)
        await line.count(4)
        shown = await line.asks("/queue")
        assert shown == f"1. secnod\n2. {'x' * 59}…\n3. fourth"
        assert await line.asks("/queue edit 1 the  second") == "Changed."
        assert await line.asks("/queue remove 2") == "Removed."
        agent = agent_of(room, accepted)
        assert await pending(agent) == ["the  second", "fourth"]
        for wrong, answer in (
            ("/queue edit 3 x", "Nothing waits as number 3"),
            ("/queue remove 0", "Nothing waits as number 0"),
            ("/queue remove ²", "/queue, /queue edit N TEXT, or /queue remove N"),
            (f"/queue remove {'9' * 5000}", "/queue, /queue edit N TEXT"),
            ("/queue edit 1", "/queue edit N TEXT"),
            ("/queue edit", "/queue, /queue edit N TEXT"),
            ("/queue drop 1", "/queue, /queue edit N TEXT"),
        ):
            assert (await line.asks(wrong)).startswith(answer)
        assert await pending(agent) == ["the  second", "fourth"]
        asked.say("one")
        asked = await bounded(model.asked())
        assert "the  second" in asked.texts[-1]
        asked.say("two")
        (await bounded(model.asked())).say("four")
        await idle(agent)
        assert len(entered(await log_of(room, agent.session_id))) == 3


async def test_removing_the_last_that_waits_for_a_lost_turn_leaves_no_one_running(
    database: str,
) -> None:
    line, model = Line(), PuppetModel()
    async with room_with(database, [line], model) as room:
        accepted = await line.say("first")
        asked = await bounded(model.asked())
        await line.say("second")
        await line.count(1)
        await line.asks("/queue remove 1")
        asked.say("done")
        await idle(agent_of(room, accepted))
        await line.hears("done")
        assert len(model.asks) == 1


# ---- /steer, /retry ----


async def test_steer_joins_the_work_that_goes_on_with_its_files(database: str) -> None:
    line, model, tool = Line(), PuppetModel(), PuppetTool("look")
    async with room_with(database, [line], model, tools=[tool]) as room:
        accepted = await line.say("look")
        asked = await bounded(model.asked())
        asked.call("look")
        call = await bounded(tool.called())
        steered = await line.say("/steer to the left", PICTURE)
        assert steered.message_id is not None
        call.answer("seen")
        asked = await bounded(model.asked())
        assert asked.texts[-1].endswith("to the left")
        asked.say("looked left")
        await line.hears("looked left")
        agent = agent_of(room, accepted)
        await idle(agent)
        log = await log_of(room, agent.session_id)
        assert [(turn, step, text) for turn, step, text in entered(log)] == [
            (1, 1, "look"),
            (1, 2, "to the left"),
        ]
        assert of(log, UserMessage)[-1].message.content[-1] == PICTURE
        assert line.texts == ["looked left"], "a steer is not answered by the host"
        assert await line.asks("/steer") == "/steer TEXT"


async def test_steering_an_idle_agent_opens_a_turn_and_names_the_conversation(
    database: str,
) -> None:
    line = Line()
    async with room_with(database, [line], scripted("gladly")):
        await line.say("/steer say something")
        await line.hears("gladly")
        assert (await line.asks("/sessions")).startswith("1. say something (this one)")


async def test_retry_asks_again_what_failed(database: str) -> None:
    line = Line()
    model = scripted({"error": {"status": 400, "code": "bad"}}, "now it works")
    async with room_with(database, [line], model) as room:
        accepted = await line.say("hello")
        await line.hears("/retry asks again")
        agent = agent_of(room, accepted)
        await idle(agent)
        assert await line.asks("/retry") == "Trying again."
        await line.hears("now it works")
        await idle(agent)
        log = await log_of(room, agent.session_id)
        assert (ends(log), said(log)) == (["error", "completed"], ["now it works"])
        assert await line.asks("/retry") == "Nothing failed since the last answer."


async def test_a_command_in_a_session_that_is_gone_makes_a_new_one(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted("hello")) as room:
        accepted = await line.say("hello")
        assert accepted.session_id is not None
        await line.hears("hello")
        await idle(agent_of(room, accepted))
        await room.store.write(
            cancel, accepted.session_id, "user", keep_inbox=False, ref=claim_token()
        )
        await settled(room, accepted.session_id, "sent")
        await room.store.write(delete_session, accepted.session_id)
        assert (await line.asks("/status")).startswith("I am idle.")
        assert await bound(room, line) != accepted.session_id
