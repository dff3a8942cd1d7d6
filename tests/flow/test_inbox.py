"""Queueing: what a producer is told, what a boundary claims, and how every message ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import apsw
import pytest

from postroom import mint
from postroom.app import open_store
from postroom.config import Limits
from postroom.domain import event as e
from postroom.domain.event import Event
from postroom.domain.ids import MessageId, SessionId
from postroom.errors import (
    CommitUncertain,
    InputError,
    InvalidContent,
    MessageConflict,
    NotCommitted,
    QueueFull,
    StoreClosed,
    StoreFull,
    StoreLocked,
)
from postroom.flow.agent import Agent
from postroom.ports.policy import Admit, Reject, Verdict
from postroom.ports.store import Store, Tx
from postroom.scripts.log import fork_session
from postroom.stores.sqlite import SqliteStore
from postroom.testing import (
    FaultyStore,
    PlainTool,
    PuppetModel,
    PuppetTool,
    StoreWrapper,
    calling,
    scripted,
)
from tests.flow.audit import audit, outcomes
from tests.flow.support import (
    SESSION,
    ends,
    entered,
    idle,
    log_of,
    of,
    opened,
    pending,
    queued,
    said,
    seen,
    types,
)
from tests.support import bounded

OPERATIONS = ("followup", "steer", "inject")


def send(agent: Agent, operation: str, text: object, **more: Any) -> Any:
    return getattr(agent, operation)(text, **more)


# ---- a receipt stands for a commit, and for nothing else ----


@pytest.mark.contract("INB-01")
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_queueing_returns_nothing_and_only_after_the_commit(
    database: str, operation: str
) -> None:
    loop = asyncio.get_running_loop()
    reached, go_on = asyncio.Event(), threading.Event()
    held = threading.Event()

    def on_commit(when: str) -> None:
        if when == "before" and held.is_set():
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(10)

    store = await SqliteStore.open(database, on_commit=on_commit)
    async with (
        opened(database, PuppetModel(), wrap=lambda _: store) as room,
        contextlib.AsyncExitStack() as stack,
    ):
        other = await open_store(database)
        stack.push_async_callback(other.aclose)
        agent = await room.session(SESSION)
        held.set()
        sending = asyncio.ensure_future(send(agent, operation, "hello"))
        await bounded(reached.wait())
        # The script has run and the commit has not begun: nobody has been told anything.
        assert not sending.done()
        assert await other.read(_queued, SESSION) == []
        held.clear()
        go_on.set()
        assert await bounded(sending) is None
        assert await other.read(_queued, SESSION) == ["hello"]


def _queued(tx: Tx, session_id: str) -> list[str]:
    rows = tx.execute(
        "SELECT event.data FROM event JOIN session ON session.sid = event.sid"
        " WHERE session.id = :id AND event.type = 'inbox/queued'",
        {"id": session_id},
    )
    return [json.loads(row[0])["message"]["content"][0]["text"] for row in rows]


@pytest.mark.contract("INB-01")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_failed_commit_queues_nothing_and_says_so(
    database: str, operation: str, busy: bool
) -> None:
    """C-04: no receipt, an explicit refusal."""
    model = PuppetModel()
    faults: list[FaultyStore] = []
    async with opened(database, model, wrap=_faulty(faults)) as room:
        agent = await room.session(SESSION)
        if busy:
            await agent.followup("first")
            await bounded(model.asked())
        before = await log_of(room)
        faults[0].refuse()
        with pytest.raises(NotCommitted):
            await send(agent, operation, "lost")
        assert await agent.inbox() == []
        assert await log_of(room) == before
        assert await agent.status() == ("running" if busy else "idle")


def _faulty(into: list[FaultyStore]) -> Callable[[Store], Store]:
    def wrap(store: Store) -> Store:
        into.append(FaultyStore(store))
        return into[-1]

    return wrap


@pytest.mark.contract("INB-01")
async def test_a_database_locked_past_the_limit_refuses_and_nothing_is_queued(
    database: str,
) -> None:
    async with opened(database, PuppetModel(), limits=Limits(lock_wait_ms=30)) as room:
        agent = await room.session(SESSION)
        other = apsw.Connection(database)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreLocked):
            await bounded(agent.followup("lost"))
        other.execute("ROLLBACK")
        other.close()
        assert await agent.inbox() == []
        assert await agent.status() == "idle"


@pytest.mark.contract("INB-01")
async def test_a_full_disk_refuses_and_nothing_is_queued(database: str) -> None:
    """C-04, with the engine's own error: the file may not grow by one page."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await room.store.write(_no_more_pages)
        with pytest.raises(StoreFull):
            await bounded(agent.followup("x" * 100_000))
        assert await agent.inbox() == []
        assert await agent.status() == "idle"
        assert types(await log_of(room)) == ["session/created"]
        assert model.asks == []


def _no_more_pages(tx: Tx) -> None:
    tx.execute("PRAGMA max_page_count = 1")


@pytest.mark.contract("INB-01")
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_closing_room_refuses_and_nothing_is_queued(database: str, operation: str) -> None:
    """C-04: draining."""
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        await room.aclose()
        with pytest.raises(StoreClosed):
            await send(agent, operation, "lost")
    async with opened(database, PuppetModel()) as room:
        assert types(await log_of(room)) == ["session/created"]


@pytest.mark.contract("INB-01")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("written", [True, False], ids=["written", "not-written"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_lost_answer_is_uncertain_and_the_same_id_again_settles_it(
    database: str, operation: str, written: bool, busy: bool
) -> None:
    model = PuppetModel()
    faults: list[FaultyStore] = []
    async with opened(database, model, wrap=_faulty(faults)) as room:
        agent = await room.session(SESSION)
        if busy:
            await agent.followup("first")
            (await bounded(model.asked())).stream("w")
        name = mint.message_id()
        faults[0].lose(written=written)
        with pytest.raises(CommitUncertain):
            await send(agent, operation, "once", message_id=name)
        await send(agent, operation, "once", message_id=name)
        assert queued(await log_of(room))[-1:] == ["once"]
        with pytest.raises(MessageConflict):
            await send(agent, operation, "other", message_id=name)
        if busy:
            model.open[0].say("w")
        if operation != "inject":
            while not any("once" in asked.news for asked in model.asks):
                await bounded(model.asked())
            model.open[0].say("answer")
        await idle(agent)
        log = await log_of(room)
        assert queued(log).count("once") == 1
        assert [text for _, _, text in entered(log)].count("once") == int(operation != "inject")
        assert audit(log) == []


@pytest.mark.contract("INB-01")
async def test_a_message_whose_receipt_was_lost_runs_without_anybody_asking_again(
    database: str,
) -> None:
    model = PuppetModel()
    faults: list[FaultyStore] = []
    async with opened(database, model, wrap=_faulty(faults)) as room:
        agent = await room.session(SESSION)
        faults[0].lose()
        with pytest.raises(CommitUncertain):
            await agent.followup("hello")
        (await bounded(model.asked())).say("hi")
        await idle(agent)
        log = await log_of(room)
        assert said(log) == ["hi"]
        assert ends(log) == ["completed"]


async def test_a_producer_that_stops_waiting_leaves_one_message_or_none(database: str) -> None:
    """A cancelled await withdraws the message if it can, and never half of it."""
    model = scripted(then="echo")
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        for _ in range(20):
            sending = asyncio.ensure_future(agent.followup("maybe"))
            await asyncio.sleep(0)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        await agent.followup("last")
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        assert set(outcomes(log).values()) == {"entered"}


# ---- order ----


@pytest.mark.contract("INB-03")
async def test_followups_from_one_stack_from_tasks_listeners_and_tools_each_get_a_turn(
    database: str,
) -> None:
    """C-03: five texts at once during a busy turn, none replaces another."""
    agents: list[Agent] = []
    tasks: set[asyncio.Task[None]] = set()

    async def from_tool(_: dict[str, object]) -> str:
        await agents[0].followup("tool 1")
        await agents[0].followup("tool 2")
        return "queued two"

    def from_listener(events: Sequence[Event]) -> None:
        for event in events:
            if event.type == "tool/result":
                tasks.add(asyncio.ensure_future(agents[0].followup("listener")))

    model = scripted(calling("note"), then="echo")
    async with opened(database, model, tools=[PlainTool("note", from_tool)]) as room:
        agent = await room.session(SESSION)
        agents.append(agent)
        room.store.subscribe(SessionId(SESSION), from_listener)
        await agent.followup("first")
        for number in range(3):
            await agent.followup(f"stack {number}")
        await asyncio.gather(*(agent.followup(f"task {number}") for number in range(5)))
        await seen(agent, e.ToolResult)
        await bounded(asyncio.gather(*tasks))
        await idle(agent)
        log = await log_of(room)
        texts = queued(log)
        assert len(texts) == 1 + 3 + 5 + 2 + 1
        assert [text for _, _, text in entered(log)] == texts
        assert [turn for turn, _, _ in entered(log)] == list(range(1, len(texts) + 1))
        assert audit(log) == []


@pytest.mark.contract("INB-04")
async def test_a_turn_boundary_claims_all_of_next_step_and_then_one_follow_up(
    database: str,
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.followup("follow 1")
        await agent.steer("steer 1")
        await agent.followup("follow 2")
        await agent.inject("inject")
        await agent.steer("steer 2")
        assert await pending(agent) == ["steer 1", "inject", "steer 2", "follow 1", "follow 2"]
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["steer 1", "inject", "steer 2", "follow 1"]
        asked.say("two")
        asked = await bounded(model.asked())
        assert asked.news == ["follow 2"]
        asked.say("three")
        await idle(agent)
        log = await log_of(room)
        assert [turn for turn, _, _ in entered(log)] == [1, 2, 2, 2, 2, 3]
        assert audit(log) == []


@pytest.mark.contract("INB-04")
async def test_a_boundary_between_steps_claims_next_step_only(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await agent.followup("follow")
        await agent.inject("inject")
        await agent.steer("steer")
        called.answer()
        asked = await bounded(model.asked())
        assert asked.news == ["inject", "steer"]
        assert await pending(agent) == ["follow"]
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["follow"]
        asked.say("two")
        await idle(agent)
        log = await log_of(room)
        assert entered(log) == [
            (1, 1, "first"),
            (1, 2, "inject"),
            (1, 2, "steer"),
            (2, 1, "follow"),
        ]
        assert audit(log) == []


# ---- steering and injecting ----


@pytest.mark.contract("INB-05")
async def test_a_steer_to_an_idle_agent_opens_a_turn(database: str) -> None:
    """C-11, the idle half."""
    async with opened(database, scripted(then="echo")) as room:
        agent = await room.session(SESSION)
        await agent.steer("now")
        await idle(agent)
        log = await log_of(room)
        assert entered(log) == [(1, 1, "now")]
        assert said(log) == ["now"]


@pytest.mark.contract("INB-05")
async def test_a_steer_during_the_last_request_opens_the_next_turn(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        await agent.steer("late")
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["late"]
        asked.say("two")
        await idle(agent)
        log = await log_of(room)
        assert entered(log) == [(1, 1, "first"), (2, 1, "late")]
        assert types(log).count("agent/idle") == 1


@pytest.mark.contract("INB-06")
async def test_an_inject_to_an_idle_agent_is_one_event_and_starts_nothing(database: str) -> None:
    """C-70: an advisory note after the end wakes nobody and changes no answer."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        running = asyncio.ensure_future(agent.run("question"))
        (await bounded(model.asked())).say("answer")
        result = await bounded(running)
        before = await log_of(room)
        await agent.inject("by the way")
        after = await log_of(room)
        assert types(after[len(before) :]) == ["inbox/queued"]
        assert await agent.status() == "idle"
        assert len(model.asks) == 1
        assert await agent.fold(result.message_id) == result
        await agent.followup("next")
        asked = await bounded(model.asked())
        assert asked.news == ["by the way", "next"]
        asked.say("fine")
        await idle(agent)
        assert audit(await log_of(room)) == []


# ---- how messages end ----


@pytest.mark.contract("INB-07")
async def test_every_queued_message_ends_in_exactly_one_fact(database: str) -> None:
    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        refused = tuple(m.id for m in batch if "refuse" in m.content[0].text)
        return Reject("not that", refused) if refused else Admit()

    model = PuppetModel()
    async with opened(database, model, policy=judge) as room:
        agent = await room.session(SESSION)
        names = {
            text: mint.message_id()
            for text in ("first", "refuse me", "remove me", "replace me", "second", "cancel me")
        }
        for text, name in names.items():
            await agent.followup(text, message_id=name)
        asked = await bounded(model.asked())
        assert await agent.remove(names["remove me"])
        replacement = await agent.replace(names["replace me"], "replaced")
        assert replacement is not None
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["replaced"]
        asked.say("two")
        asked = await bounded(model.asked())
        assert asked.news == ["second"]
        await agent.cancel()
        await idle(agent)
        log = await log_of(room)
        assert audit(log) == []
        ended = outcomes(log)
        assert ended[replacement] == "entered"
        assert {text: ended[name] for text, name in names.items()} == {
            "first": "entered",
            "refuse me": "rejected",
            "remove me": "cancelled",
            "replace me": "replaced",
            "second": "entered",
            "cancel me": "cancelled",
        }
        causes = [data.cause for data in of(log, e.InboxCancelled)]
        assert causes == ["removed", "user"]


@pytest.mark.contract("INB-08")
async def test_edits_find_pending_messages_in_either_list_and_nothing_else(database: str) -> None:
    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool]) as room:
        agent = await room.session(SESSION)
        other = await room.session("session_other")
        first, follow, steer, foreign = (mint.message_id() for _ in range(4))
        await agent.followup("first", message_id=first)
        (await bounded(model.asked())).call("look")
        called = await bounded(tool.called())
        await agent.followup("follow", message_id=follow)
        await agent.steer("steer", message_id=steer)
        await other.inject("foreign", message_id=foreign)
        for wrong in (first, foreign, mint.message_id(), MessageId("msg_none")):
            assert await agent.remove(wrong) is False
            assert await agent.replace(wrong, "new") is None
        new_steer = await agent.replace(steer, "new steer")
        new_follow = await agent.replace(follow, "new follow")
        assert await pending(agent) == ["new steer", "new follow"]
        assert None not in (new_steer, new_follow)
        assert len({steer, follow, new_steer, new_follow}) == 4
        for gone in (steer, follow):
            assert await agent.remove(gone) is False
        assert new_follow is not None
        assert await agent.remove(new_follow)
        assert await agent.remove(new_follow) is False
        with pytest.raises(InvalidContent):
            await agent.replace(steer, "")
        called.answer()
        asked = await bounded(model.asked())
        assert asked.news == ["new steer"]
        assert new_steer is not None
        assert await agent.remove(new_steer) is False
        asked.say("done")
        await idle(agent)
        assert await pending(other) == ["foreign"]
        assert audit(await log_of(room)) == []


@pytest.mark.contract("INB-08")
async def test_a_replacement_keeps_its_place_in_the_line(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        name = mint.message_id()
        await agent.followup("a", message_id=name)
        await agent.followup("b")
        assert await agent.replace(name, "a, edited")
        assert await pending(agent) == ["a, edited", "b"]
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["a, edited"]


@pytest.mark.contract("INB-08")
@pytest.mark.parametrize("edit", ["remove_message", "replace_message"])
async def test_an_edit_whose_answer_was_lost_can_be_asked_for_again(
    database: str, edit: str
) -> None:
    """The engine may run a script twice: the second run gives the first one's answer."""

    class Twice(StoreWrapper):
        async def write(self, script: Any, *args: Any, **kwargs: Any) -> Any:
            answer = await self.inner.write(script, *args, **kwargs)
            if script.__name__ == edit:
                assert await self.inner.write(script, *args, **kwargs) == answer
            return answer

    async with opened(database, PuppetModel(), wrap=Twice) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        name = mint.message_id()
        await agent.followup("second", message_id=name)
        if edit == "remove_message":
            assert await agent.remove(name) is True
        else:
            assert await agent.replace(name, "new") is not None
        assert audit(await log_of(room), at_rest=False) == []


# ---- a claim is an entry ----


@pytest.mark.contract("INB-10")
@pytest.mark.parametrize("writes", range(8))
async def test_stopped_after_any_commit_a_message_is_pending_or_in_the_history(
    database: str, writes: int
) -> None:
    """C-06: no state in which a message is claimed and not in the history."""
    model, tool = scripted(calling("look"), then="echo"), PlainTool("look")
    faults: list[FaultyStore] = []
    async with opened(database, model, tools=[tool], wrap=_faulty(faults)) as room:
        agent = await room.session(SESSION)
        faults[0].stop_after(writes)
        with contextlib.suppress(StoreClosed):
            await agent.followup("one")
            await agent.steer("two")
            await agent.followup("three")
        await bounded(faults[0].stopped())
        log = await log_of(room)
        ended = outcomes(log)
        assert set(ended.values()) <= {"pending", "entered"}
        waiting = [info.message.id for info in await agent.inbox()]
        assert sorted(waiting) == sorted(m for m, how in ended.items() if how == "pending")
        before = queued(log)
    async with opened(database, model, tools=[tool]) as room:
        await idle(await room.session(SESSION))
        log = await log_of(room)
        assert audit(log) == []
        assert sorted(text for _, _, text in entered(log)) == sorted(before)
        assert set(outcomes(log).values()) <= {"entered"}


# ---- what is refused ----


@pytest.mark.contract("INB-12")
@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("", "content"),
        ("  \n\t", "content"),
        ([], "content"),
        (None, "content"),
        (17, "content"),
        ({"type": "text", "text": "x"}, "content"),
        (b"bytes", "content"),
        ("half a pair: \ud800", "content"),
        ("x" * 2_000, "content"),
        (["text"], "content[0]"),
        ([{"type": "text"}], "content[0]"),
        ([{"type": "text", "text": 5}], "content[0].text"),
        ([{"type": "text", "text": "fine"}, {"type": "hologram"}], "content[1].type"),
        ([{"type": "text", "text": "fine"}, {"text": "no type"}], "content[1]"),
        ([{"type": "toolCall", "callId": "a", "name": "b", "arguments": "{}"}], "content[0].type"),
        ([{"type": "image", "artifact": "sha256:0", "size": 1}], "content[0]"),
        ([object()], "content[0]"),
    ],
)
async def test_content_is_checked_before_anything_is_queued(
    database: str, content: object, path: str
) -> None:
    async with opened(database, PuppetModel(), limits=Limits(content_bytes_max=1_000)) as room:
        agent = await room.session(SESSION)
        for operation in OPERATIONS:
            with pytest.raises(InvalidContent) as caught:
                await send(agent, operation, content)
            assert caught.value.path == path
            assert path in str(caught.value)
        assert types(await log_of(room)) == ["session/created"]


@pytest.mark.contract("INB-12")
@pytest.mark.parametrize("name", ["", "x", "msg_", "msg_a b", "msg_" + "x" * 97, "MSG_a"])
async def test_a_message_id_of_another_shape_is_refused(database: str, name: str) -> None:
    async with opened(database, PuppetModel()) as room:
        agent = await room.session(SESSION)
        for operation in OPERATIONS:
            with pytest.raises(InputError):
                await send(agent, operation, "hello", message_id=name)
        assert types(await log_of(room)) == ["session/created"]


@pytest.mark.contract("INB-13")
async def test_over_its_cap_the_queue_refuses_with_a_reason(database: str) -> None:
    """C-04: cap reached."""
    model = PuppetModel()
    async with opened(database, model, limits=Limits(pending_messages_max=3)) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        name = mint.message_id()
        await agent.followup("1", message_id=name)
        await agent.steer("2")
        await agent.inject("3")
        before = await log_of(room)
        for operation in OPERATIONS:
            with pytest.raises(QueueFull) as caught:
                await send(agent, operation, "one too many")
            assert "3" in str(caught.value)
        await agent.followup("1", message_id=name)  # no new message: the receipt again
        assert await log_of(room) == before
        assert await agent.remove(name)
        await agent.followup("room again")
        asked.say("one")
        asked = await bounded(model.asked())
        assert asked.news == ["2", "3", "room again"]


@pytest.mark.contract("INB-14")
async def test_a_fork_does_not_inherit_what_is_pending(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        (await bounded(model.asked())).say("one")
        await idle(agent)
        await agent.followup("second")
        asked = await bounded(model.asked())
        await agent.followup("waits")
        await agent.inject("waits too")
        fork = SessionId("session_fork")
        await room.store.write(fork_session, SessionId(SESSION), fork, owner="operator")
        forked = await room.session(fork)
        assert await forked.inbox() == []
        assert await forked.status() == "idle"
        assert not any(kind.startswith("inbox/") for kind in types(await log_of(room, fork)))
        await forked.followup("in the fork")
        in_fork = await bounded(model.asked())
        assert in_fork.texts == ["user: first", "assistant: one", "user: in the fork"]
        in_fork.say("fine")
        await idle(forked)
        assert [turn for turn, _, _ in entered(await log_of(room, fork))] == [1, 2]
        assert await pending(agent) == ["waits too", "waits"]
        asked.say("two")
        asked = await bounded(model.asked())
        assert asked.news == ["waits too", "waits"]


# ---- nothing assigns output to a message ----


@pytest.mark.contract("INB-15", "INB-16")
async def test_outside_the_inbox_and_the_history_nothing_names_a_message(database: str) -> None:
    """Walks every event, every row and every field of the interface after a rich run."""

    async def judge(_: SessionId, batch: tuple[Any, ...]) -> Verdict:
        refused = tuple(m.id for m in batch if "refuse" in m.content[0].text)
        return Reject("not that", refused) if refused else Admit()

    model, tool = PuppetModel(), PuppetTool()
    async with opened(database, model, tools=[tool], policy=judge) as room:
        agent = await room.session(SESSION)
        names = [mint.message_id() for _ in range(6)]
        running = asyncio.ensure_future(agent.run("question", message_id=names[0]))
        asked = await bounded(model.asked())
        await agent.steer("steer", message_id=names[1])
        await agent.inject("inject", message_id=names[2])
        await agent.followup("refuse me", message_id=names[3])
        await agent.followup("last", message_id=names[4])
        await agent.followup("removed", message_id=names[5])
        assert await agent.remove(names[5])
        asked.call("look")
        (await bounded(tool.called())).answer()
        (await bounded(model.asked())).fail("server")
        (await bounded(model.asked())).say("one")
        (await bounded(model.asked())).say("two")
        result = await bounded(running)
        log = await log_of(room)
        assert ends(log) == ["completed", "rejected", "completed"]

        told = result.to_json()
        assert told.pop("messageId") == names[0]
        told["events"] = _nameless(told["events"])
        for text in (json.dumps(told), str(await agent.status()), str(await agent.inbox())):
            assert not any(name in text for name in names)
        for event in _nameless([json.loads(event.to_json()) for event in log]):
            assert not any(name in json.dumps(event) for name in names), event
        named = set()
        for table, row in await room.store.read(_rows):
            if any(name in str(value) for name in names for value in row):
                named.add(table)
        # `message` keeps ids for ever to know repeats; `event` was walked above; nothing pends.
        assert named == {"message", "event"}
        for kind in (e.AgentRunning, e.AgentIdle):
            assert all(
                set(json.loads(x.raw)) <= {"pendingChildren"} for x in log if x.type == kind.TYPE
            )


def _nameless(events: Any) -> list[Any]:
    """Events that may not name a message: all but the inbox's and the history's user messages."""
    return [
        event
        for event in events
        if not event["type"].startswith("inbox/") and event["type"] != "user/message"
    ]


def _rows(tx: Tx) -> list[tuple[str, tuple[Any, ...]]]:
    tables = tx.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
    return [(str(t[0]), row) for t in tables for row in tx.execute(f"SELECT * FROM {t[0]}")]


@pytest.mark.contract("INB-16")
async def test_idle_is_of_the_agent_and_settles_no_single_message(database: str) -> None:
    """`when_idle` outlasts the turn of the message that was there when it was called."""
    model = PuppetModel()
    async with opened(database, model) as room:
        agent = await room.session(SESSION)
        await agent.followup("first")
        asked = await bounded(model.asked())
        waiting = asyncio.ensure_future(agent.when_idle())
        await agent.followup("second")
        asked.say("one")
        asked = await bounded(model.asked())
        assert await agent.status() == "running"
        assert not waiting.done()
        asked.say("two")
        assert await bounded(waiting) is None
        assert await agent.status() == "idle"
        assert types(await log_of(room)).count("agent/idle") == 1


@pytest.mark.contract("INB-03")
async def test_two_sessions_do_not_wait_for_each_other(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room:
        one, two = await room.session(SESSION), await room.session("session_two")
        await one.followup("slow")
        slow = await bounded(model.asked())
        await two.followup("quick")
        (await bounded(model.asked())).say("done")
        await idle(two)
        assert await one.status() == "running"
        slow.say("done at last")
        await idle(one)
