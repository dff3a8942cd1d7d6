"""Whether a call may run: policy, asking, deciding, and what a restart or a cancel makes of it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from postroom.config import Limits
from postroom.domain.event import ApprovalAsked, ApprovalDecided
from postroom.domain.ids import ApprovalId, SessionId
from postroom.domain.outbox import Sent
from postroom.mint import claim_token
from postroom.ports.channel import Profile
from postroom.ports.route import InteractionOutbound, Question
from postroom.scripts.approvals import NotAsked, decide_approval, open_approvals
from postroom.testing import ManualClock, PlainTool, calling, scripted
from tests.flow.audit import audit
from tests.flow.chat import Chat, chatting
from tests.flow.support import SESSION, ends, idle, log_of, of, opened, results, said
from tests.support import bounded

_ID = re.compile(r"/allow (apr_[0-9a-f]{32})")


def danger(ran: list[str]) -> PlainTool:
    return PlainTool("danger", lambda a: ran.append(str(a)) or "it is done", effects="outside")


def asked_for(text: str) -> str:
    match = _ID.search(text)
    assert match is not None
    return match[1]


async def _session(chat: Chat, room: Any, text: str = "do it") -> SessionId:
    accepted = await chat.say(text)
    assert accepted.session_id is not None
    return accepted.session_id


@pytest.mark.contract("APR-01", "SEC-06")
async def test_a_tool_with_effects_is_asked_about_in_the_chat_and_runs_once_allowed(
    database: str,
) -> None:
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), "well done"), tools=[danger(ran)]
    ) as room:
        session_id = await _session(chat, room)
        (question,) = await chat.sees(1)
        assert "danger" in question
        assert ran == []
        assert chat.parts[0].kind == "approval"
        await chat.say(f"/allow {asked_for(question)}")
        await idle(room.agent(session_id))
        log = await log_of(room, session_id)
        assert audit(log) == []
        assert len(ran) == 1
        assert results(log) == [("ok", "it is done")]
        assert [d.decision for d in of(log, ApprovalDecided)] == ["allow"]
        assert sorted((await chat.sees(3))[1:]) == ["Allowed.", "well done"]


@pytest.mark.contract("APR-02")
async def test_a_denied_call_never_runs_and_the_model_is_told(database: str) -> None:
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), "then not"), tools=[danger(ran)]
    ) as room:
        session_id = await _session(chat, room)
        await chat.sees(1)
        await chat.say("/deny")
        await idle(room.agent(session_id))
        log = await log_of(room, session_id)
        assert audit(log) == []
        assert ran == []
        ((outcome, text),) = results(log)
        assert outcome == "not_started"
        assert "denied by Ann" in text


@pytest.mark.contract("APR-01", "APR-02")
async def test_an_approval_is_single_use_and_an_old_button_gets_a_clear_answer(
    database: str,
) -> None:
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), "done"), tools=[danger(ran)]
    ) as room:
        session_id = await _session(chat, room)
        approval = asked_for((await chat.sees(1))[0])
        await chat.say(f"/allow {approval}")
        await idle(room.agent(session_id))
        await chat.sees(3)
        await chat.say(f"/deny {approval}")
        assert (await chat.sees(4))[3] == "This was allowed already (Ann)."
        assert len(ran) == 1


@pytest.mark.contract("APR-02", "SEC-03")
async def test_a_guessed_and_a_foreign_id_decide_nothing_and_get_the_same_answer(
    database: str,
) -> None:
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), "done"), tools=[danger(ran)]
    ) as room:
        await _session(chat, room)
        approval = asked_for((await chat.sees(1))[0])
        await chat.say(f"/allow {approval}", who="mallory")
        await chat.say("/allow apr_00000000000000000000000000000000", who="mallory")
        assert (await chat.sees(3))[1:] == ["Nobody asked that."] * 2
        for principal in ("conversation:loopback:loopback:dm:mallory", ""):
            with pytest.raises(NotAsked):
                await room.store.write(
                    decide_approval,
                    ApprovalId(approval),
                    "allow",
                    by="x",
                    principal=principal,
                    ref=claim_token(),
                )
        assert ran == []
        assert len(await room.store.read(open_approvals)) == 1


@pytest.mark.contract("APR-03")
async def test_nobody_answers_in_time_and_the_call_is_denied(database: str) -> None:
    ran: list[str] = []
    chat, clock = Chat(), ManualClock()
    limits = Limits(approval_wait_ms=60_000)
    async with chatting(
        database,
        chat,
        scripted(calling("danger"), "then not"),
        tools=[danger(ran)],
        clock=clock,
        limits=limits,
    ) as room:
        session_id = await _session(chat, room)
        approval = asked_for((await chat.sees(1))[0])
        clock.advance(61_000)
        await idle(room.agent(session_id))
        log = await log_of(room, session_id)
        assert audit(log) == []
        assert ran == []
        assert "nobody answered in time" in results(log)[0][1]
        await chat.say(f"/allow {approval}")
        assert "denied already" in (await chat.sees(3))[-1]


@pytest.mark.contract("APR-03")
async def test_a_cancel_denies_what_is_asked_and_the_next_message_runs(database: str) -> None:
    """C-93."""
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), "hello again"), tools=[danger(ran)]
    ) as room:
        session_id = await _session(chat, room)
        await chat.sees(1)
        await chat.say("/stop")
        await idle(room.agent(session_id))
        await chat.say("next")
        await idle(room.agent(session_id))
        log = await log_of(room, session_id)
        assert audit(log) == []
        assert ran == []
        assert ends(log) == ["cancelled", "completed"]
        assert [d.by for d in of(log, ApprovalDecided)] == ["cancelled"]
        assert said(log)[-1] == "hello again"


@pytest.mark.contract("APR-01")
async def test_a_restart_asks_again_once_and_the_old_button_says_so(database: str) -> None:
    """C-94: the call had not started, so the recovery turn makes it, and asks, anew."""
    ran: list[str] = []
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("danger"), then="repeat"), tools=[danger(ran)]
    ) as room:
        session_id = await _session(chat, room)
        old = asked_for((await chat.sees(1))[0])
    chat = Chat(first=100)
    async with chatting(
        database, chat, scripted("x", calling("danger"), "done"), tools=[danger(ran)]
    ) as room:
        new = asked_for((await chat.sees(1))[0])
        assert new != old
        await chat.say(f"/allow {old}")
        assert (await chat.sees(2))[1] == "This was denied already (the process stopped)."
        assert ran == []
        await chat.say(f"/allow {new}")
        await idle(room.agent(session_id))
        log = await log_of(room, session_id)
        assert audit(log) == []
        assert len(ran) == 1
        assert len(of(log, ApprovalAsked)) == 2
        assert [outcome for outcome, _ in results(log)] == ["not_started", "ok"]


@pytest.mark.contract("SEC-06", "RTR-04")
async def test_what_is_to_be_asked_where_nobody_can_answer_is_denied(database: str) -> None:
    ran: list[str] = []
    async with opened(
        database,
        scripted(calling("danger"), "then not"),
        tools=[danger(ran)],
        permissions={"danger": "ask"},
    ) as room:
        agent = await room.session(SESSION)
        await agent.followup("do it")
        await idle(agent)
        log = await log_of(room)
        assert ran == []
        assert "nobody is attached" in results(log)[0][1]
        assert of(log, ApprovalAsked) == []


@pytest.mark.contract("SEC-06")
async def test_the_operator_is_not_asked_and_a_denying_policy_denies_everybody(
    database: str,
) -> None:
    ran: list[str] = []
    denied = PlainTool("denied", lambda _: ran.append("denied") or "x")
    async with opened(
        database,
        scripted(calling("danger"), calling("denied"), "done"),
        tools=[danger(ran), denied],
        permissions={"denied": "deny"},
    ) as room:
        agent = await room.session(SESSION)
        await agent.followup("do it")
        await idle(agent)
        assert ran == ["{}"]
        first, second = results(await log_of(room))
        assert first == ("ok", "it is done")
        assert "policy denies" in second[1]


class Terminal:
    """A live route whose person's decision the test gives."""

    channel = "terminal"
    profile = Profile()

    def __init__(self, session_id: str) -> None:
        self.session_id = SessionId(session_id)
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self.answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

    async def deliver(self, outbound: InteractionOutbound) -> Sent:
        return Sent(None)

    async def prompt_user(self, prompt: Question) -> str | None:
        return None

    async def request_approval(self, request: Question) -> bool | None:
        self.questions.put_nowait(request)
        return await self.answer


@pytest.mark.contract("APR-03", "RTR-04")
@pytest.mark.parametrize("answer", [True, False, ConnectionError("gone")])
async def test_a_connection_is_asked_directly_and_losing_it_denies(
    database: str, answer: bool | Exception
) -> None:
    ran: list[str] = []
    async with opened(
        database,
        scripted(calling("danger"), "done"),
        tools=[danger(ran)],
        permissions={"danger": "ask"},
    ) as room:
        agent = await room.session(SESSION)
        terminal = Terminal(SESSION)
        await room.router.bind(SessionId(SESSION), terminal)
        await agent.followup("do it")
        question = await bounded(terminal.questions.get())
        assert "danger" in question.text
        if isinstance(answer, Exception):
            terminal.answer.set_exception(answer)
        else:
            terminal.answer.set_result(answer)
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert bool(ran) == (answer is True)
        assert len(of(log, ApprovalDecided)) == 1
