"""The Python SDK: the same behaviour over each of its transports, and what becomes of it in bad weather."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

import postroom
from postroom import mint
from postroom.app import Room as Runtime
from postroom.client import Room, Session, connect, connect_sync, follower
from postroom.client.child import Child, ChildTransport, default_command
from postroom.client.failures import as_error
from postroom.client.live import Deltas
from postroom.client.memory import MemoryLink, memory_links
from postroom.domain.event import Event
from postroom.errors import (
    ConfigError,
    Disconnected,
    InputError,
    InvalidContent,
    MessageConflict,
    PostroomError,
    RunOverlap,
    RunTimeout,
    StoreClosed,
    UnknownSession,
    UsageError,
)
from postroom.ports.route import Question
from postroom.server.connection import Connection
from postroom.server.failures import as_rpc_error
from postroom.server.socket import SocketServer
from postroom.testing import PlainTool, PuppetModel, PuppetTool, scripted
from postroom.wire import protocol as said
from postroom.wire.rpc import RpcError
from tests.flow.support import core_of, ends, opened, queued, types
from tests.flow.support import said as texts
from tests.support import bounded

S = "session_one"
TOKEN = "a-token-for-the-tests"
SLOW = {"text": "too late", "delay_ms": 60_000}
KINDS = ["embedded", "stdio", "socket"]

Reply = str | Mapping[str, object]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that are started know nothing of this machine's own settings."""
    monkeypatch.setenv("POSTROOM_HOME", str(tmp_path / "home"))
    for name in ("POSTROOM_TOKEN", "POSTROOM_MODEL", "POSTROOM_DB"):
        monkeypatch.delenv(name, raising=False)


class World:
    """Runtimes of one kind over one database, and clients of them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.database = str(folder / "postroom.db")
        self.folder = folder
        self.daemon: Daemon | None = None
        self._stack = contextlib.AsyncExitStack()

    async def arguments(self, *replies: Reply) -> dict[str, Any]:
        """What `connect` takes for a runtime that plays these replies and then echoes."""
        if self.kind == "embedded":
            core = core_of(scripted(*replies, then="echo"))
            return {"core": core, "database": self.database, "drain": 0}
        if self.kind == "stdio":
            return self.child(*replies)
        self.daemon = await self.serve(core_of(scripted(*replies, then="echo")))
        return {"address": self.daemon.url, "token": TOKEN}

    def child(self, *replies: Reply) -> dict[str, Any]:
        path = self.folder / "script.json"
        plain = [{"text": each} if isinstance(each, str) else each for each in replies]
        path.write_text(json.dumps({"replies": plain, "then": "echo"}))
        return {
            "command": None,
            "database": self.database,
            "model": f"scripted:{path}",
            "drain": 0,
        }

    async def serve(self, core: Any) -> Daemon:
        daemon = Daemon(self.database, core)
        await daemon.start()
        self._stack.push_async_callback(daemon.stop)
        return daemon

    async def room(self, *replies: Reply) -> Room:
        return await self.open(connect(**await self.arguments(*replies)))

    async def open(self, room: Room) -> Room:
        self._stack.push_async_callback(lambda: bounded(room.aclose(), 30))
        return await bounded(room.open(), 30)

    async def close(self) -> None:
        await self._stack.aclose()


class Daemon:
    """A runtime behind a web socket, which can go and come back at the same address."""

    def __init__(self, database: str, core: Any) -> None:
        self._database = database
        self._core = core
        self._port = 0
        self._stack = contextlib.AsyncExitStack()
        self.sockets: SocketServer
        self.runtime: Runtime

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._port}/ws"

    async def start(self) -> None:
        self.runtime = await self._stack.enter_async_context(
            opened(
                self._database,
                *self._core.models,
                tools=self._core.tools.values(),
                permissions=self._core.permissions,
            )
        )
        self.sockets = SocketServer(self.runtime, TOKEN)
        app = web.Application()
        app.add_routes([self.sockets.route()])
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = runner.addresses[0][1]
        self._stack.push_async_callback(self.sockets.aclose)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def cut(self) -> None:
        """Every connection goes, and the runtime goes on."""
        await self.sockets.aclose()
        self.sockets._closing = False  # pyright: ignore[reportPrivateUsage]


@pytest_asyncio.fixture
async def worlds(tmp_path: Path) -> AsyncGenerator[Callable[[str], World]]:
    made: list[World] = []

    def make(kind: str) -> World:
        made.append(World(kind, tmp_path))
        return made[-1]

    yield make
    for world in made:
        await world.close()


@pytest_asyncio.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    return worlds(request.param)


async def first(session: Session, type_: str, after: int = 0) -> Event:
    """The first event of a type; waits for it."""

    async def find() -> Event:
        async with contextlib.aclosing(session.events(after)) as events:
            async for event in events:
                if event.type == type_:
                    return event
        raise AssertionError("the events ended")

    return await bounded(find())


# ---- over every transport ----


@pytest.mark.contract("RUN-01", "RUN-02", "RUN-03", "RUN-04")
async def test_a_run_is_the_interval_from_its_receipt_to_idle_and_can_be_folded_again(
    world: World,
) -> None:
    room = await world.room("one", {"text": "cut", "finish": "length"})
    session = await room.session(S)
    await session.prompt("before")
    idle = await first(session, "agent/idle")
    result = await bounded(session.run("mine"))
    assert (result.final_response, result.finish_reason) == ("cut", "max_tokens")
    assert result.first_seq == idle.seq + 1
    assert types(result.events)[0] == "inbox/queued"
    assert types(result.events)[-1] == "agent/idle"
    assert result.complete
    assert await session.fold(result.message_id) == result
    log = await session.log()
    assert tuple(log[result.first_seq - 1 :]) == result.events
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    assert (await session.fold("msg_nobody")).first_seq == 0


@pytest.mark.contract("INB-09")
async def test_the_same_id_again_gives_the_same_receipt_and_other_content_is_a_conflict(
    world: World,
) -> None:
    session = await (await world.room()).session(S)
    name = mint.message_id()
    receipts = [await session.prompt("once", message_id=name) for _ in range(3)]
    assert receipts == [receipts[0]] * 3
    with pytest.raises(MessageConflict):
        await session.prompt("another", message_id=name)
    result = await bounded(session.run("once", message_id=name))
    assert result.first_seq == receipts[0].seq
    assert queued(await session.log()) == ["once"]


async def test_errors_are_of_the_same_classes_as_in_one_process(world: World) -> None:
    room = await world.room()
    session = await room.session(S)
    with pytest.raises(InvalidContent) as caught:
        await session.prompt("  ")
    assert caught.value.path == "content"
    with pytest.raises(InputError):
        await room.session("no/id")
    with pytest.raises(InputError) as found:
        await room.session("another", cwd="relative")
    assert "absolute" in str(found.value)
    with pytest.raises(UnknownSession):
        await room.call("session/inbox", said.SessionRef("nobody"), said.Inbox)
    assert (await bounded(session.run("fine"))).final_response == "fine"


async def test_what_waits_can_be_seen_replaced_removed_and_cancelled(world: World) -> None:
    session = await (await world.room(SLOW)).session(S)
    await session.prompt("running")
    await first(session, "step/start")
    assert await session.status() == "running"
    one = await session.prompt("one")
    two = await session.prompt("two")
    await session.inject("three")
    pending = await session.inbox()
    assert {p.message["content"][0]["text"]: p.list for p in pending} == {
        "one": "next_turn",
        "two": "next_turn",
        "three": "next_step",
    }
    assert await session.remove(one.message_id)
    assert not await session.remove(one.message_id)
    new = await session.replace(two.message_id, "two again")
    assert new is not None
    assert await session.replace(two.message_id, "too late") is None
    await session.cancel(keep_inbox=True)
    await first(session, "agent/idle")
    assert texts(await session.log()) == ["two again"]
    assert await session.inbox() == []
    assert await session.status() == "idle"


@pytest.mark.contract("SDK-02")
async def test_events_go_on_after_any_seq_without_a_gap(world: World) -> None:
    session = await (await world.room()).session(S)
    for text in ("one", "two"):
        await bounded(session.run(text))
    log = await session.log()
    for after in range(len(log)):
        assert await session.log(after) == log[after:]
    seen: list[Event] = []

    async def follow() -> None:
        async for event in session.events(3):
            seen.append(event)
            if event.type == "agent/idle" and event.seq > len(log):
                return

    following = asyncio.ensure_future(follow())
    await bounded(session.run("three"))
    await bounded(following)
    assert seen == (await session.log())[3:]


@pytest.mark.contract("SDK-02")
async def test_a_slow_reader_costs_bounded_memory_and_misses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "HELD_EVENTS_MAX", 3)
    session = await (await world.room()).session(S)
    seen: list[Event] = []
    async with contextlib.aclosing(session.events()) as events:
        seen.append(await anext(events))
        for n in range(6):
            await bounded(session.run(f"{n}"))
        log = await session.log()
        while len(seen) < len(log):
            seen.append(await bounded(anext(events)))
    assert seen == log


@pytest.mark.contract("SDK-02")
async def test_a_reader_that_lags_is_served_from_where_it_was(
    worlds: Callable[[str], World],
) -> None:
    room = await worlds("embedded").room()
    session = await room.session(S)
    seen: list[Event] = []

    async def follow() -> None:
        async for event in session.events():
            seen.append(event)

    following = asyncio.ensure_future(follow())
    for n in range(5):
        await bounded(session.run(f"{n}"))
        (connection, number) = next(iter(room._heard))  # pyright: ignore[reportPrivateUsage]
        lagged = {"sessionId": S, "subscription": number, "fromSeq": seen[-1].seq + 1}
        room.noted(connection, "session.lagged", json.dumps(lagged).encode())
    log = await session.log()
    await _eventually(lambda: len(seen) >= len(log))
    assert seen == log
    following.cancel()


@pytest.mark.contract("RUN-09")
async def test_overlapping_runs_of_one_client_wait_for_each_other(world: World) -> None:
    room = await world.room()
    sessions = [await room.session(S) for _ in range(3)]
    results = await bounded(asyncio.gather(*(sessions[n % 3].run(f"{n}") for n in range(6))))
    assert [result.final_response for result in results] == [f"{n}" for n in range(6)]
    assert [queued(result.events) for result in results] == [[f"{n}"] for n in range(6)]


@pytest.mark.contract("RUN-07")
async def test_a_timeout_carries_what_there_is_and_cancels_nothing(world: World) -> None:
    session = await (await world.room(SLOW)).session(S)
    with pytest.raises(RunTimeout) as caught:
        await bounded(session.run("mine", timeout=0.3))
    partial = caught.value.partial
    assert not partial.complete
    assert partial.first_seq > 0
    assert partial.finish_reason is None
    assert await session.status() == "running"
    assert "turn/cancel" not in types(await session.log())


@pytest.mark.contract("RUN-07")
async def test_a_timeout_cancels_when_asked_and_what_others_queued_runs(world: World) -> None:
    session = await (await world.room(SLOW)).session(S)
    running = asyncio.ensure_future(session.run("A", timeout=0.5, cancel_on_timeout=True))
    await first(session, "step/start")
    await session.prompt("B")
    with pytest.raises(RunTimeout):
        await bounded(running)
    await first(session, "agent/idle")
    assert ends(await session.log()) == ["cancelled", "completed"]
    assert texts(await session.log())[-1] == "B"


@pytest.mark.contract("SDK-04")
async def test_a_callback_that_throws_breaks_neither_the_connection_nor_other_listeners(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    room = await world.room({"text": "a b c", "chunks": 3})
    session = await room.session(S)
    heard: list[str] = []

    def throw(_: object) -> None:
        raise ValueError("a bug of the user's")

    async def throw_later(_: object) -> None:
        raise TimeoutError("another")

    async def listen() -> None:
        async for event in session.events():
            heard.append(event.type)
            if event.type == "agent/idle":
                return

    listening = asyncio.ensure_future(listen())
    result = await bounded(session.run("go", on_event=throw, on_delta=throw))
    assert result.final_response == "a b c"
    await bounded(listening)
    assert heard[-1] == "agent/idle"
    pieces: list[str] = []
    later = session.run("so so", on_event=throw_later, on_delta=lambda d: pieces.append(d.text))
    async with Deltas(room, S, throw):  # who heard it first has thrown
        assert (await bounded(later)).final_response == "so so"
    assert "".join(pieces) == "so so"
    assert "a bug of the user's" in caplog.text


async def test_a_cancelled_task_leaves_the_connection_as_it_was(world: World) -> None:
    room = await world.room()
    session = await room.session(S)
    for n in range(30):
        work = [session.run(f"{n}"), session.log(), session.prompt(f"p{n}"), session.status()]
        tasks = [asyncio.ensure_future(each) for each in work]
        for _ in range(n):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await bounded(asyncio.gather(*tasks, return_exceptions=True))

    async def last() -> str | None:
        while True:
            with contextlib.suppress(RunOverlap):
                return (await session.run("last", mode="share")).final_response

    assert await bounded(last()) is not None
    log = await session.log()
    assert [event.seq for event in log] == list(range(1, len(log) + 1))


@pytest.mark.contract("SDK-03")
async def test_closing_ends_what_waits_and_may_be_done_again(world: World) -> None:
    room = await world.room(SLOW)
    session = await room.session(S)
    seen: list[str] = []

    async def follow() -> None:
        async for event in session.events():
            seen.append(event.type)

    following = asyncio.ensure_future(follow())
    running = asyncio.ensure_future(session.run("mine"))
    await first(session, "step/start")
    await _eventually(lambda: bool(seen))
    await bounded(asyncio.gather(room.aclose(), room.aclose()), 20)
    await bounded(room.aclose())
    await bounded(following)
    assert seen[0] == "session/created"
    with pytest.raises(Disconnected):
        await bounded(running)
    with pytest.raises(Disconnected):
        await session.prompt("too late")


async def test_sessions_are_listed_forked_and_made(world: World) -> None:
    room = await world.room()
    session = await room.session(S)
    assert session.created
    assert not (await room.session(S)).created
    result = await bounded(session.run("one"))
    await bounded(session.run("two"))
    fork = await session.fork(at_seq=result.last_seq)
    assert texts(await fork.log()) == ["one"]
    made = await room.session()
    assert {info.session_id for info in await room.sessions()} == {S, fork.id, made.id}
    assert len(await room.sessions(limit=1)) == 1
    assert await room.approvals() == []
    with pytest.raises(PostroomError):
        await room.outbox.resolve("dlv_nothing", "sent", by="me")


async def test_what_reached_nobody_is_sent_again_once_somebody_is_there(world: World) -> None:
    room = await world.room()
    session = await room.session(S)
    await bounded(session.run("one"))
    (lost,) = await room.outbox.list(S, status=["unrouted"])
    assert [part.text for part in lost.parts] == ["one"]
    with pytest.raises(InputError):
        await room.outbox.redeliver(lost.delivery_id, by="me")
    parts: list[said.DeliveryNote] = []
    async with session.bind(on_delivery=parts.append):
        again = await room.outbox.redeliver(lost.delivery_id, by="me")
        assert again.delivery_id == lost.delivery_id
        await _eventually(lambda: bool(parts))
    assert [part.text for part in parts] == ["one"]


@pytest.mark.contract("RUN-01")
async def test_steers_and_injections_join_the_run(world: World) -> None:
    session = await (await world.room({"text": "first", "delay_ms": 300}, "second")).session(S)
    running = asyncio.ensure_future(session.run("mine"))
    await first(session, "step/start")
    await session.inject("by the way")
    await session.steer("and quickly")
    result = await bounded(running)
    assert queued(result.events) == ["mine", "by the way", "and quickly"]
    assert result.final_response == "second"


# ---- the synchronous twin ----


def test_the_synchronous_twin_does_the_same(world: World) -> None:
    arguments = asyncio.run(world.arguments()) if world.kind == "stdio" else None
    if arguments is None:
        arguments = {"database": world.database, "model": "scripted:echo", "drain": 0}
    _use_sync(arguments)


async def test_the_synchronous_twin_works_inside_a_running_loop(world: World) -> None:
    """It blocks this loop for as long as it takes; a daemon in this very loop could not answer."""
    if world.kind == "socket":
        await asyncio.to_thread(_use_sync, await world.arguments())
    else:
        _use_sync({"database": world.database, "model": "scripted:echo", "drain": 0})


def _use_sync(arguments: dict[str, Any]) -> None:
    with connect_sync(**arguments) as room:
        session = room.session(S)
        receipt = session.prompt("hello")
        assert receipt.seq == 2
        seen: list[str] = []
        for event in session.events():
            seen.append(event.type)
            if event.type == "agent/idle":
                break
        assert seen[0] == "session/created"
        refused: list[BaseException] = []

        def calls_back(_: Event) -> None:
            try:
                session.status()
            except UsageError as error:
                refused.append(error)

        result = session.run("again", timeout=20, on_event=calls_back)
        assert result.final_response == "again"
        assert len(refused) == len(result.events)
        assert session.fold(result.message_id) == result
        assert session.log()[-1] == result.events[-1]
        with pytest.raises(InvalidContent):
            session.prompt("")
        assert [info.session_id for info in room.sessions()] == [S]
        with session.bind():
            pass
    room.close()
    with pytest.raises(Disconnected):
        session.prompt("too late")
    assert not [t for t in threading.enumerate() if t.name == "postroom-client"]


# ---- routes: who is asked, and what is delivered ----


@pytest_asyncio.fixture(params=["embedded", "socket"])
async def puppets(
    request: pytest.FixtureRequest, worlds: Callable[[str], World]
) -> AsyncGenerator[Callable[..., Any]]:
    """Opens a client of a runtime whose model and tools the test plays by hand."""
    world = worlds(request.param)

    async def make(model: PuppetModel, *tools: PlainTool) -> tuple[Room, Any]:
        core = core_of(model, tools=tools, permissions={"act": "ask"})
        if world.kind == "embedded":
            return await world.open(connect(core=core, database=world.database, drain=0)), None
        daemon = await world.serve(core)
        return await world.open(connect(daemon.url, token=TOKEN)), daemon

    yield make


@pytest.mark.parametrize("answer", [True, False, "throws"])
async def test_a_tool_s_call_is_approved_by_the_client_that_is_the_route(
    puppets: Any, answer: bool | str
) -> None:
    model = PuppetModel()
    ran: list[str] = []

    def act(_: dict[str, object]) -> str:
        ran.append("ran")
        return "done"

    room, _ = await puppets(model, PlainTool("act", act, effects="outside"))
    session = await room.session(S)
    asked: list[said.ApprovalRequest] = []

    async def approve(request: said.ApprovalRequest) -> bool:
        asked.append(request)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    async with session.bind(on_approval=approve):
        running = asyncio.ensure_future(session.run("go"))
        (await bounded(model.asked())).call("act")
        (await bounded(model.asked())).say("fine")
        await bounded(running)
    assert [request.session_id for request in asked] == [S]
    assert ran == (["ran"] if answer is True else [])


async def test_more_questions_than_are_answered_at_once_are_all_answered(puppets: Any) -> None:
    """Those beyond are decided by their ids; nothing else on the connection waits for them."""
    count, model = 40, PuppetModel()
    room, _ = await puppets(model, PlainTool("act", effects="outside"))
    sessions = [await room.session(f"session_{n}") for n in range(count)]
    waiting = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def approve(_: said.ApprovalRequest) -> bool:
        waiting.release()
        await go.wait()
        return True

    async with contextlib.AsyncExitStack() as stack:
        for session in sessions:
            await stack.enter_async_context(session.bind(on_approval=approve))
        runs = [asyncio.ensure_future(session.run("go")) for session in sessions]
        for _ in sessions:
            (await bounded(model.asked())).call("act")
        for _ in sessions:
            await bounded(waiting.acquire())
        assert await bounded(sessions[0].status()) == "running"
        go.set()
        for _ in sessions:
            (await bounded(model.asked())).say("fine")
        for result in await bounded(asyncio.gather(*runs), 20):
            outcomes = [e.data.outcome for e in result.events if e.type == "tool/result"]  # type: ignore[union-attr]
            assert outcomes == ["ok"]


async def test_what_is_delivered_and_asked_comes_to_the_latest_binding(puppets: Any) -> None:
    model = PuppetModel()
    room, daemon = await puppets(model)
    session = await room.session(S)
    parts: list[str] = []

    def deliver(note: said.DeliveryNote) -> None:
        parts.append(note.text)
        raise ValueError("a bug of the user's")

    async with session.bind(on_delivery=lambda note: parts.append(f"first {note.text}")):
        async with session.bind(on_delivery=deliver, on_question=lambda p: p.text.upper()):
            for text in ("one", "two"):
                running = asyncio.ensure_future(session.run("go"))
                (await bounded(model.asked())).say(text)
                await bounded(running)
            await _eventually(lambda: len(parts) == 2)
            if daemon is not None:
                question = Question("q1", session.id, "who?")
                assert await bounded(daemon.runtime.router.prompt_user(question)) == "WHO?"
        running = asyncio.ensure_future(session.run("go"))
        (await bounded(model.asked())).say("three")
        await bounded(running)
        await _eventually(lambda: len(parts) == 3)
    assert parts == ["one", "two", "first three"]


async def _eventually(true: Callable[[], bool]) -> None:
    async def look() -> None:
        while not true():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.001)

    await bounded(look())


@pytest.mark.contract("RUN-09")
async def test_a_second_client_s_exclusive_run_is_refused_and_a_shared_one_is_not(
    worlds: Callable[[str], World],
) -> None:
    world, model = worlds("socket"), PuppetModel()
    daemon = await world.serve(core_of(model))
    mine = await (await world.open(connect(daemon.url, token=TOKEN))).session(S)
    theirs = await (await world.open(connect(daemon.url, token=TOKEN))).session(S)
    running = asyncio.ensure_future(mine.run("mine"))
    asked = await bounded(model.asked())
    before = await mine.log()
    with pytest.raises(RunOverlap):
        await bounded(theirs.run("theirs"))
    assert await mine.log() == before
    sharing = asyncio.ensure_future(theirs.run("shared", mode="share"))
    await first(theirs, "inbox/queued", after=before[-1].seq)
    asked.say("one")
    (await bounded(model.asked())).say("two")
    one, two = await bounded(running), await bounded(sharing)
    assert one.last_seq == two.last_seq
    assert one.first_seq < two.first_seq


# ---- a connection that goes ----


@pytest.mark.contract("SDK-02")
async def test_a_run_and_its_events_survive_each_loss_of_the_socket(
    worlds: Callable[[str], World],
) -> None:
    world, model, tool = worlds("socket"), PuppetModel(), PuppetTool()
    daemon = await world.serve(core_of(model, tools=[tool]))
    session = await (await world.open(connect(daemon.url, token=TOKEN))).session(S)
    seen: list[Event] = []
    delivered: list[str] = []

    async def follow() -> None:
        async for event in session.events():
            seen.append(event)
            if event.type == "agent/idle":
                return

    following = asyncio.ensure_future(follow())
    async with session.bind(on_delivery=lambda note: delivered.append(note.text)):
        running = asyncio.ensure_future(session.run("mine"))
        for n in range(5):
            asked = await bounded(model.asked())
            await daemon.cut()
            asked.call("look", text=f"step {n}")
            called = await bounded(tool.called())
            await daemon.cut()
            called.answer("seen")
        asked = await bounded(model.asked())
        await daemon.cut()
        await bounded(session.steer("quick"))  # a call of its own has to connect again
        asked.say("done")
        (await bounded(model.asked())).say("quickly")
        result = await bounded(running)
        assert (result.final_response, result.finish_reason) == ("quickly", "completed")
        await bounded(following)
        await _eventually(lambda: "quickly" in delivered)
    log = await session.log()
    assert seen == log[: len(seen)]
    assert result.events == tuple(seen[1:])
    assert queued(log) == ["mine", "quick"]


async def test_a_run_survives_the_restart_of_its_daemon(worlds: Callable[[str], World]) -> None:
    """The open turn is recovered by the next one, and the result says how it went."""
    world, model = worlds("socket"), PuppetModel()
    daemon = await world.serve(core_of(model))
    session = await (await world.open(connect(daemon.url, token=TOKEN))).session(S)
    running = asyncio.ensure_future(session.run("mine"))
    (await bounded(model.asked())).stream("half")
    await bounded(daemon.stop())
    late = asyncio.ensure_future(session.prompt("while it is down"))
    await daemon.start()
    asked = await bounded(model.asked())
    await bounded(late)
    asked.say("whole")
    (await bounded(model.asked())).say("and that")
    result = await bounded(running)
    assert ends(result.events) == ["interrupted", "completed", "completed"]
    assert await session.fold(result.message_id) == result


class CutLink:
    """A link that ends after so many frames, in either direction."""

    def __init__(self, link: MemoryLink, frames: int) -> None:
        self._link = link
        self._left = frames

    async def read(self) -> bytes | None:
        frame = await self._link.read()
        return None if frame is None or not await self._passes() else frame

    async def write(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            if not await self._passes():
                raise BrokenPipeError
            await self._link.write([frame])

    async def _passes(self) -> bool:
        self._left -= 1
        if self._left < 0:
            await self._link.aclose()
        return self._left >= 0

    async def aclose(self) -> None:
        await self._link.aclose()


class Cuts:
    """A transport whose first links are cut early. What was written last may have arrived."""

    survives = True

    def __init__(self, runtime: Runtime, *cuts: int) -> None:
        self._runtime = runtime
        self._cuts = iter([*cuts, *[10**9] * 1000])
        self.serving: list[asyncio.Task[None]] = []

    async def open(self) -> Any:
        here, there = memory_links()
        server = Connection(self._runtime, there, kind="socket")

        async def serve() -> None:
            await server.serve()
            await server.aclose()

        self.serving.append(asyncio.ensure_future(serve()))
        return Cut(CutLink(here, next(self._cuts)))


class Cut:
    def __init__(self, link: CutLink) -> None:
        self.link = link

    async def obituary(self) -> Disconnected:
        return Disconnected("it was cut")

    async def aclose(self) -> None:
        pass


@pytest.mark.contract("INB-09", "SDK-02")
async def test_wherever_the_link_is_cut_there_is_one_message_and_one_result(tmp_path: Path) -> None:
    """Before the request, between the commit and its answer, between any two events."""
    database = str(tmp_path / "postroom.db")
    async with opened(database, scripted(then="echo")) as runtime:
        for cut in range(40):
            transport = Cuts(runtime, 2 + cut, 3 + cut % 5)
            async with Room(transport, client="test", reconnect_s=20) as room:
                session = await bounded(room.session(f"session_{cut}"))
                seen: list[Event] = []
                result = await bounded(session.run("mine", on_event=seen.append))
                assert result.final_response == "mine", cut
                assert result.events == tuple(seen)
                log = await bounded(session.log())
                assert queued(log) == ["mine"]
                assert result.events == tuple(log[1 : result.last_seq])
            await bounded(asyncio.gather(*transport.serving))


async def test_what_may_not_be_asked_twice_fails_when_the_link_goes(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "postroom.db"), scripted(then="echo")) as runtime:
        transport = Cuts(runtime, 5)  # hello and its answer, open and its answer, the request
        async with Room(transport, client="test", reconnect_s=20) as room:
            session = await room.session(S)
            with pytest.raises(Disconnected):
                await bounded(session.cancel())
            await bounded(session.cancel())
        await bounded(asyncio.gather(*transport.serving))


async def test_a_daemon_that_does_not_come_back_is_waited_for_so_long_and_no_longer(
    worlds: Callable[[str], World],
) -> None:
    world, model = worlds("socket"), PuppetModel()
    daemon = await world.serve(core_of(model))
    room = await world.open(connect(daemon.url, token=TOKEN, reconnect=0.3))
    session = await room.session(S)
    running = asyncio.ensure_future(session.run("mine"))
    await bounded(model.asked())
    await bounded(daemon.stop())
    with pytest.raises(Disconnected):
        await bounded(running)
    with pytest.raises(Disconnected):
        await bounded(session.status())


async def test_a_wrong_token_or_address_says_what_is_wrong(worlds: Callable[[str], World]) -> None:
    world = worlds("socket")
    daemon = await world.serve(core_of(scripted()))
    with pytest.raises(ConfigError, match="token"):
        await bounded(connect(daemon.url, token="another-token-entirely").open())
    with pytest.raises(UsageError, match="404"):
        await bounded(connect(daemon.url + "x", token=TOKEN).open())
    url = daemon.url
    await daemon.stop()
    with pytest.raises(Disconnected, match="cannot reach"):
        await bounded(connect(url, token=TOKEN).open())


# ---- a runtime that dies ----


class Watched(ChildTransport):
    """Knows the processes it has started."""

    def __init__(self, command: Sequence[str], **bounds: float) -> None:
        super().__init__(command, **{"drain_s": 5.0, **bounds})
        self.children: list[Child] = []

    async def open(self) -> Child:
        child = await super().open()
        self.children.append(child)
        return child


def _gone(pid: int) -> bool:
    """Whether there is no such process, not even one that nobody has reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _command(world: World, *replies: Reply) -> list[str]:
    arguments = world.child(*replies)
    return default_command(database=world.database, model=arguments["model"], drain_s=0)


async def _kill_and_retry(world: World, points: Iterator[float], tries: int) -> None:
    transport = Watched(_command(world))
    async with Room(transport, client="test", reconnect_s=5) as room:
        session = await bounded(room.session(S), 30)
        for n in range(tries):
            name = mint.message_id()
            work = [
                asyncio.ensure_future(session.run(f"text {n}", message_id=name)),
                asyncio.ensure_future(session.log()),
                asyncio.ensure_future(_last(session)),
            ]
            await asyncio.sleep(next(points))
            os.kill(transport.children[-1].pid, signal.SIGKILL)
            died = time.monotonic()
            done = await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 5)
            assert time.monotonic() - died < 1
            for outcome in done:
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, Disconnected), repr(outcome)
                    assert outcome.exit_code == -signal.SIGKILL
                    assert outcome.stderr_tail is not None
            assert isinstance(done[2], Disconnected)
            # Right after: another runtime, and the same id settles what became of the message.
            result = await bounded(session.run(f"text {n}", message_id=name), 30)
            assert result.final_response == f"text {n}"
            assert queued(await bounded(session.log())).count(f"text {n}") == 1
    assert len(transport.children) == tries + 1
    for child in transport.children:
        assert _gone(child.pid)


async def _last(session: Session) -> None:
    async for _ in session.events():
        pass


@pytest.mark.contract("RUN-08")
async def test_killed_at_any_moment_everything_that_waits_fails_and_a_retry_works(
    worlds: Callable[[str], World],
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    await _kill_and_retry(worlds("stdio"), (chance.uniform(0, 0.04) for _ in itertools.count()), 12)


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.contract("RUN-08")
async def test_killed_at_many_moments(worlds: Callable[[str], World]) -> None:
    chance = random.Random(8)
    await _kill_and_retry(worlds("stdio"), (chance.uniform(0, 0.08) for _ in itertools.count()), 50)


@pytest.mark.contract("RUN-08")
async def test_a_runtime_that_cannot_start_says_why(worlds: Callable[[str], World]) -> None:
    world = worlds("stdio")
    room = connect(command=[*_command(world), "--no-such-option"])
    with pytest.raises(Disconnected) as caught:
        await bounded(room.open(), 30)
    assert caught.value.exit_code == 2
    assert "--no-such-option" in (caught.value.stderr_tail or "")
    await bounded(room.aclose())
    with pytest.raises(UsageError, match="cannot start"):
        await connect(command=["/no/such/program"]).open()


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked twice", file=sys.stderr, flush=True))
for line in sys.stdin:
    print('{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1,"server":{"name":"x","version":"1"},'
          '"capabilities":{}}}', flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.contract("SDK-03")
async def test_a_runtime_that_does_not_want_to_end_is_told_twice_and_then_killed() -> None:
    transport = Watched([sys.executable, "-c", STUBBORN], drain_s=0.2, term_s=0.2, kill_s=5)
    room = Room(transport, client="test", reconnect_s=0)
    await bounded(room.open())
    (child,) = transport.children
    began = time.monotonic()
    await bounded(asyncio.gather(room.aclose(), room.aclose()))
    assert 0.4 <= time.monotonic() - began < 5
    assert _gone(child.pid)
    obituary = await child.obituary()
    assert obituary.exit_code == -signal.SIGKILL
    assert "asked twice" in (obituary.stderr_tail or "")
    await bounded(room.aclose())


@pytest.mark.contract("SDK-03")
async def test_a_child_ends_with_its_input_and_nothing_is_left_of_it(
    worlds: Callable[[str], World],
) -> None:
    transport = Watched(_command(worlds("stdio")))
    async with Room(transport, client="test", reconnect_s=0) as room:
        await bounded((await room.session(S)).run("hello"))
    (child,) = transport.children
    assert _gone(child.pid)
    assert (await child.obituary()).exit_code == 0


async def test_a_client_that_is_cancelled_while_it_connects_leaves_no_process(
    worlds: Callable[[str], World],
) -> None:
    transport = Watched(_command(worlds("stdio")))
    room = Room(transport, client="test", reconnect_s=0)
    opening = asyncio.ensure_future(room.open())
    await _eventually(lambda: bool(transport.children))
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await bounded(room.aclose(), 20)
    assert all(_gone(child.pid) for child in transport.children)


# ---- the rest ----


def test_every_error_of_the_protocol_becomes_the_class_it_was() -> None:
    for cls in _leaves(PostroomError):
        if cls.code in ("model", "run_timeout", "disconnected", "invalid_content"):
            continue
        rpc = as_rpc_error(cls("what happened", hint="what to do"))
        back = as_error(rpc)
        assert type(back) is cls or (cls is StoreClosed and type(back) is StoreClosed), cls
        if cls is not StoreClosed:
            assert (back.message, back.hint) == ("what happened", "what to do")
    content = as_error(as_rpc_error(InvalidContent("it is empty", path="content[0].text")))
    assert isinstance(content, InvalidContent)
    assert str(content) == "content[0].text: it is empty"
    assert content.path == "content[0].text"
    for name, number in {**said.CODES, **said.STANDARD}.items():
        by_name = as_error(RpcError(number, "text", said.ErrorData(name)))
        by_number = as_error(RpcError(number, "text", said.ErrorData("of_a_later_version")))
        assert type(by_name) is type(by_number), name


def _leaves(root: type[PostroomError]) -> Iterator[type[PostroomError]]:
    if root.__module__ == "postroom.errors":
        yield root
        for cls in root.__subclasses__():
            yield from _leaves(cls)


@pytest.mark.parametrize(
    "arguments",
    [
        {"token": "x"},
        {"address": "http://127.0.0.1/ws", "token": "x"},
        {"address": "ws://127.0.0.1/ws", "database": "x.db", "token": "x"},
        {"address": "ws://127.0.0.1/ws", "command": None, "token": "x"},
        {"address": "ws://somewhere.example/ws"},
        {"command": "postroom serve --stdio"},
        {"command": ["postroom"], "database": "x.db"},
        {"command": None, "core": core_of(scripted())},
        {"core": core_of(scripted()), "model": "scripted:echo"},
    ],
)
def test_arguments_that_do_not_go_together_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        connect(**arguments)


def test_the_names_are_in_the_package_and_cost_no_part_of_the_server() -> None:
    assert postroom.connect is connect
    assert postroom.connect_sync is connect_sync
    code = (
        "import sys, postroom.client;"
        "heavy = {'aiohttp', 'apsw', 'typer', 'rich', 'obstore', 'regex', 'postroom.app',"
        " 'postroom.flow', 'postroom.server', 'postroom.stores', 'postroom.tools'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
