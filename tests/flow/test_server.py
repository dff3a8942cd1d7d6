"""The protocol's server: what a client is told, when, and what becomes of it when it goes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from postroom.app import Room
from postroom.config import Limits
from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.errors import ConfigError, PostroomError
from postroom.flow.agent import Agent
from postroom.ports.route import Question
from postroom.ports.store import EventListener, Store, Subscription, Tx
from postroom.scripts.attach import standing
from postroom.scripts.log import read_events
from postroom.server.connection import Connection
from postroom.server.failures import as_rpc_error
from postroom.server.schema import schema, schema_text
from postroom.server.socket import SocketServer
from postroom.server.stdio import serve_link
from postroom.server.token import socket_token
from postroom.testing import PlainTool, PuppetModel, StoreWrapper, calling, scripted
from postroom.wire.protocol import (
    CLIENT_METHODS,
    CODES,
    INVALID_PARAMS,
    METHODS,
    NOTIFICATIONS,
    STANDARD,
)
from postroom.wire.rpc import StreamLink
from tests.flow.client import HELLO, TOKEN, Client, Failed, Server, SocketClient, StreamClient
from tests.flow.support import SESSION, idle, log_of, opened, results, waits
from tests.support import ROOT, bounded

P = ParamSpec("P")
R = TypeVar("R")

BOTH = pytest.mark.parametrize("kind", ["stream", "socket"])
OTHER = "session_other"


async def failure(calling: Any) -> Failed:
    with pytest.raises(Failed) as caught:
        await calling
    return caught.value


def seqs(events: list[dict[str, Any]]) -> list[int]:
    return [event["seq"] for event in events]


async def burst(room: Room, count: int, size: int = 10) -> int:
    """Writes so many events, as fast as the store takes them; the log's head after it."""
    agent = room.agent(SessionId(SESSION))
    for start in range(0, count, 100):
        texts = [f"{n} {'x' * size}" for n in range(start, min(start + 100, count))]
        await asyncio.gather(*(agent.inject(text) for text in texts))
    return await agent.head()


MANY = Limits(pending_messages_max=100_000)


# ---- the connection ----


@BOTH
@pytest.mark.contract("PRO-04")
async def test_an_unsupported_version_is_told_the_supported_ones_and_may_try_again(
    database: str, kind: str
) -> None:
    async with opened(database, scripted()) as room, Server(room, kind) as server:
        client = await server.connect(say_hello=False)
        error = await failure(client.call("initialize", **{**HELLO, "protocolVersion": 2}))
        assert (error.number, error.name) == (CODES["unsupported_version"], "unsupported_version")
        assert error.data["versions"] == [1]
        assert (await failure(client.call("session/list"))).name == "not_initialized"
        assert (await client.hello())["protocolVersion"] == 1
        assert await client.call("session/list") == {"sessions": []}


@BOTH
@pytest.mark.contract("PRO-04", "PRO-07")
async def test_after_every_bad_frame_the_connection_is_usable(database: str, kind: str) -> None:
    bad: list[tuple[str, str]] = [
        ("{", "parse_error"),
        ("[]", "invalid_request"),
        ('{"params":' * 100_000, "parse_error"),
        ('{"jsonrpc":"2.0","id":null,"method":"session/list"}', "invalid_request"),
        ('{"jsonrpc":"2.0","id":null}', "invalid_request"),
        ("x" * 50_000_000, "frame_too_large"),
    ]
    async with opened(database, scripted()) as room, Server(room, kind) as server:
        client = await server.connect()
        for frame, code in bad:
            client.heard.clear()
            await client.send(frame)
            assert (await failure(client.answer_to(None))).name == code
        error = await failure(client.call("session/finish"))
        assert (error.number, error.name) == (-32601, "method_not_found")
        assert await client.call("session/list") == {"sessions": []}


@pytest.mark.contract("PRO-04")
@pytest.mark.parametrize(
    ("method", "params", "path"),
    [
        ("session/prompt", {"content": "x"}, "sessionId"),
        ("session/prompt", {"sessionId": 3, "content": "x"}, "sessionId"),
        ("session/prompt", {"sessionId": "session_one", "content": 3}, "content"),
        ("session/prompt", {"sessionId": "session_one", "content": "x", "until": 1}, "until"),
        ("session/prompt", {"sessionId": "session_one", "content": "x", "run": "no"}, "run"),
        ("session/events", {"sessionId": "session_one", "after": -1}, "after"),
        ("session/events", {"sessionId": "session_one", "after": 2**70}, "after"),
        ("session/events", {"sessionId": "session_one", "limit": 0}, "limit"),
        ("session/open", {"sessionId": "a\0b"}, "sessionId"),
        ("session/open", {"coreId": "../elsewhere"}, "coreId"),
        ("initialize", {"protocolVersion": 1, "client": {"name": "x"}}, "client.version"),
        ("outbox/resolve", {"deliveryId": "x", "decision": "sent", "by": ""}, "by"),
    ],
)
async def test_bad_parameters_are_refused_with_the_path_of_the_field(
    database: str, method: str, params: dict[str, Any], path: str
) -> None:
    async with opened(database, scripted()) as room, Server(room, "stream") as server:
        client = await server.connect()
        error = await failure(client.call(method, **params))
        assert (error.number, error.name, error.path) == (INVALID_PARAMS, "invalid_params", path)


async def test_bad_content_is_refused_with_its_path_and_parameters_by_position_are_not_taken(
    database: str,
) -> None:
    async with opened(database, scripted()) as room, Server(room, "stream") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        content = [{"type": "text", "text": "fine"}, {"type": "text", "text": 3}]
        error = await failure(client.call("session/prompt", sessionId=SESSION, content=content))
        assert (error.name, error.path) == ("invalid_content", "content[1].text")
        assert (await failure(client.call("session/open", cwd="here"))).path == "cwd"
        error = await failure(client.call("session/subscribe", sessionId=SESSION, after=9))
        assert (error.name, error.path) == ("input", "after")
        await client.send('{"jsonrpc":"2.0","id":"p","method":"session/list","params":[1]}')
        assert (await failure(client.answer_to("p"))).name == "invalid_params"


FOREIGN: dict[str, dict[str, Any]] = {
    "session/prompt": {"content": "x"},
    "session/steer": {"content": "x"},
    "session/inject": {"content": "x"},
    "session/cancel": {},
    "session/inbox": {},
    "session/inbox/replace": {"messageId": "msg_a", "content": "x"},
    "session/inbox/remove": {"messageId": "msg_a"},
    "session/events": {},
    "session/subscribe": {},
    "session/bind": {},
    "session/fork": {},
    "approval/list": {},
    "outbox/list": {},
}


@pytest.mark.contract("PRO-04")
@pytest.mark.parametrize("method", FOREIGN)
async def test_a_session_that_is_not_there_and_one_that_is_not_mine_are_the_same_to_me(
    database: str, method: str
) -> None:
    async with opened(database, scripted()) as room, Server(room, "stream") as server:
        await room.session(SESSION)
        operator = await server.connect()
        stranger = await server.connect(principal="sdk:ann")
        error = await failure(operator.call(method, sessionId="session_none", **FOREIGN[method]))
        assert (error.number, error.name) == (CODES["unknown_session"], "unknown_session")
        foreign = await failure(stranger.call(method, sessionId=SESSION, **FOREIGN[method]))
        nowhere = await failure(stranger.call(method, sessionId="session_none", **FOREIGN[method]))
        assert str(foreign).replace(SESSION, "session_none") == str(nowhere)
        assert foreign.data == nowhere.data
        assert len(await log_of(room)) == 1


async def test_a_principal_opens_and_lists_its_own_and_settles_no_delivery(database: str) -> None:
    async with opened(database, scripted("hi", then="echo")) as room, Server(room, "x") as server:
        await room.session(SESSION)
        ann = await server.connect(principal="sdk:ann")
        mine = await ann.call("session/open", sessionId="session_ann")
        assert mine["created"]
        listed = (await ann.call("session/list"))["sessions"]
        assert [(s["sessionId"], s["owner"]) for s in listed] == [("session_ann", "sdk:ann")]
        await ann.call("session/prompt", sessionId="session_ann", content="hello")
        assert (await failure(ann.call("session/open", sessionId=SESSION))).name == (
            "unknown_session"
        )
        for method in ("outbox/redeliver", "outbox/abandon"):
            error = await failure(ann.call(method, deliveryId="dlv_a", by="ann"))
            assert error.name == "not_yours"
        assert (await failure(ann.call("outbox/list"))).name == "not_yours"
        operator = await server.connect()
        assert len((await operator.call("session/list"))["sessions"]) == 2
        await idle(room.agent(SessionId("session_ann")))


# ---- saying something ----


@BOTH
@pytest.mark.contract("PRO-01")
async def test_a_prompt_is_answered_when_it_is_on_disk_and_before_any_model_work(
    database: str, kind: str
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, Server(room, kind) as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        receipt = await client.call("session/prompt", sessionId=SESSION, content="hello")
        assert set(receipt) == {"messageId", "seq"}
        (found,) = await room.store.read(read_events, SessionId(SESSION), receipt["seq"] - 1, 1)
        assert found.type == "inbox/queued"
        assert receipt["messageId"] in found.raw
        (await bounded(model.asked())).say("hi")  # open all the while: nobody waited for it
        await idle(room.agent(SessionId(SESSION)))


@BOTH
@pytest.mark.contract("PRO-01")
async def test_the_answer_to_a_prompt_leaves_before_the_first_token_however_fast_the_model_is(
    database: str, kind: str
) -> None:
    async with opened(database, scripted("hi")) as room, Server(room, kind) as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/subscribe", sessionId=SESSION, deltas=True)
        await client.until(lambda: client.notes("session.status"))
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        await client.event("agent/idle")
        order = [frame.get("id") or frame["method"] for frame in client.heard]
        assert order.index(4) < order.index("session.delta")


@BOTH
@pytest.mark.contract("INB-09")
async def test_the_same_message_id_again_gives_the_same_receipt_and_one_message(
    database: str, kind: str
) -> None:
    async with opened(database, PuppetModel()) as room, Server(room, kind) as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        said = {"sessionId": SESSION, "content": "hello", "messageId": "msg_mine"}
        first = await client.call("session/prompt", **said)
        assert first["messageId"] == "msg_mine"
        assert await client.call("session/prompt", **said) == first
        other = await server.connect()
        assert await other.call("session/prompt", **said) == first
        error = await failure(client.call("session/prompt", **{**said, "content": "bye"}))
        assert (error.number, error.name) == (CODES["message_conflict"], "message_conflict")
        log = await log_of(room)
        assert [e.type for e in log].count("inbox/queued") == 1


async def test_what_one_client_says_in_a_session_is_queued_in_the_order_it_was_said(
    database: str,
) -> None:
    async with opened(database, scripted(), drive=False) as room, Server(room, "x") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        names = [
            await client.ask("session/prompt", sessionId=SESSION, content=f"number {n}")
            for n in range(200)
        ]
        told = [(await client.answer_to(name))["seq"] for name in names]
        assert told == sorted(told)
        pending = (await client.call("session/inbox", sessionId=SESSION))["pending"]
        assert [p["message"]["content"][0]["text"] for p in pending] == [
            f"number {n}" for n in range(200)
        ]


async def test_what_is_pending_is_seen_replaced_removed_and_cancelled(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, Server(room, "stream") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="one")
        await bounded(model.asked())
        two = await client.call("session/prompt", sessionId=SESSION, content="two")
        three = await client.call("session/prompt", sessionId=SESSION, content="three")
        steer = await client.call("session/steer", sessionId=SESSION, content="now")
        inbox = (await client.call("session/inbox", sessionId=SESSION))["pending"]
        assert [(p["message"]["id"], p["list"], p["wakes"]) for p in inbox] == [
            (steer["messageId"], "next_step", True),
            (two["messageId"], "next_turn", True),
            (three["messageId"], "next_turn", True),
        ]
        replaced = await client.call(
            "session/inbox/replace", sessionId=SESSION, messageId=two["messageId"], content="2"
        )
        assert replaced["messageId"] not in (None, two["messageId"])
        again = await client.call(
            "session/inbox/replace", sessionId=SESSION, messageId=two["messageId"], content="3"
        )
        assert again == {"messageId": None}
        name = three["messageId"]
        for removed in (True, False):
            answer = await client.call("session/inbox/remove", sessionId=SESSION, messageId=name)
            assert answer == {"removed": removed}
        await client.call("session/cancel", sessionId=SESSION, keepInbox=True)
        await bounded(model.asked())
        await client.call("session/cancel", sessionId=SESSION)
        await idle(room.agent(SessionId(SESSION)))
        assert (await client.call("session/inbox", sessionId=SESSION)) == {"pending": []}


@BOTH
@pytest.mark.contract("RUN-09")
async def test_a_second_exclusive_run_is_refused_and_queues_nothing(
    database: str, kind: str
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, Server(room, kind) as server:
        one, two = await server.connect(), await server.connect()
        await one.call("session/open", sessionId=SESSION, after=0)
        await one.call("session/prompt", sessionId=SESSION, content="mine", run="exclusive")
        head = len(await log_of(room))
        asked = await bounded(model.asked())
        error = await failure(
            two.call("session/prompt", sessionId=SESSION, content="yours", run="exclusive")
        )
        assert (error.number, error.name) == (CODES["run_overlap"], "run_overlap")
        log = await log_of(room)
        assert [e.type for e in log].count("inbox/queued") == 1
        assert len(log) >= head
        await two.call("session/prompt", sessionId=SESSION, content="along", run="share")
        await two.call("session/prompt", sessionId=SESSION, content="plain")
        for _ in range(3):
            asked.say("hi")
            if _ < 2:
                asked = await bounded(model.asked())
        await one.event("agent/idle")
        await two.call("session/prompt", sessionId=SESSION, content="yours", run="exclusive")
        (await bounded(model.asked())).say("hi")
        await idle(room.agent(SessionId(SESSION)))


# ---- following ----


@pytest.mark.contract("PRO-02")
def test_no_prompt_has_an_outcome_of_its_own() -> None:
    document = schema()
    assert set(document["notifications"]) == {
        "session.event",
        "session.status",
        "session.delta",
        "session.lagged",
        "session.delivery",
    }
    assert not any("finish" in name for name in (*document["methods"], *document["notifications"]))
    receipt = document["$defs"]["Receipt"]
    assert set(receipt["properties"]) == {"messageId", "seq"}
    for name in document["notifications"].values():
        properties = document["$defs"][name["$ref"].rpartition("/")[2]]["properties"]
        assert "messageId" not in properties
        assert "message_id" not in properties


def _waking(events: list[dict[str, Any]]) -> tuple[int, int]:
    """How many messages are pending after these events, and how many of them wake."""
    pending: dict[str, bool] = {}
    for event in events:
        data = event["data"]
        if event["type"] == "inbox/queued":
            pending[data["message"]["id"]] = data["wakes"]
        elif event["type"] == "user/message":
            pending.pop(data["message"]["id"])
        elif event["type"] in ("inbox/cancelled", "inbox/rejected"):
            pending.pop(data["messageId"])
        elif event["type"] == "inbox/replaced":
            pending[data["message"]["id"]] = pending.pop(data["messageId"])
    return len(pending), sum(pending.values())


@BOTH
@pytest.mark.contract("PRO-03")
async def test_status_says_what_the_whole_agent_does_and_idle_means_nothing_waking_is_pending(
    database: str, kind: str
) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, Server(room, kind) as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/inject", sessionId=SESSION, content="by the way")
        await client.call("session/subscribe", sessionId=SESSION)
        await client.call("session/subscribe", sessionId=SESSION, types=["nothing"])
        first = await client.until(lambda: client.notes("session.status"))
        assert first == [{"sessionId": SESSION, "status": "idle", "seq": 2, "pending": 1}]
        await client.call("session/prompt", sessionId=SESSION, content="one")
        asked = await bounded(model.asked())
        await client.call("session/prompt", sessionId=SESSION, content="two")
        await client.call("session/prompt", sessionId=SESSION, content="three")
        three = (await client.call("session/inbox", sessionId=SESSION))["pending"][-1]
        await client.call(
            "session/inbox/remove", sessionId=SESSION, messageId=three["message"]["id"]
        )
        asked.say("1")
        asked = await bounded(model.asked())
        await client.event("turn/end")
        assert [s["status"] for s in client.notes("session.status")] == ["idle", "running"]
        asked.say("2")
        await client.event("agent/idle")
        await client.call("session/inject", sessionId=SESSION, content="and")
        await client.call("session/prompt", sessionId=SESSION, content="four")
        (await bounded(model.asked())).say("4")
        await client.until(lambda: len(client.notes("session.status")) == 5)
        events = client.events(1)
        assert seqs(events) == list(range(1, len(events) + 1))
        for said in client.notes("session.status"):
            pending, waking = _waking(events[: said["seq"]])
            assert said["pending"] == pending
            assert said["status"] == "running" or waking == 0


class _Busy(StoreWrapper):
    """Something is queued just before it is looked where the session stands."""

    agent: Agent | None = None

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if script is standing and self.agent is not None:
            await self.agent.inject("meanwhile")
        return await super().read(script, *args, **kwargs)


@pytest.mark.contract("PRO-03")
async def test_what_comes_while_it_catches_up_is_counted_once(database: str) -> None:
    stores: list[_Busy] = []

    def wrap(store: Store) -> Store:
        stores.append(_Busy(store))
        return stores[0]

    async with (
        opened(database, scripted(), drive=False, wrap=wrap) as room,
        Server(room, "stream") as server,
    ):
        stores[0].agent = agent = await room.session(SESSION)
        client = await server.connect()
        await client.call("session/subscribe", sessionId=SESSION)
        await agent.inject("and more")
        await client.until(lambda: client.notes("session.status"))
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        await client.until(lambda: len(client.notes("session.status")) == 2)
        for said in client.notes("session.status"):
            assert said["pending"] == _waking(client.events()[: said["seq"]])[0]


@BOTH
@pytest.mark.contract("PRO-05")
async def test_every_event_comes_once_and_in_order_while_thousands_are_written(
    database: str, kind: str
) -> None:
    async with (
        opened(database, scripted(), drive=False, limits=MANY) as room,
        Server(room, kind) as server,
    ):
        await room.session(SESSION)
        before = await burst(room, 1500)
        clients = [await server.connect() for _ in range(4)]
        afters = [0, 700, before, 1]
        writing = asyncio.ensure_future(burst(room, 3000))
        for client, after in zip(clients, afters, strict=True):
            await client.call("session/subscribe", sessionId=SESSION, after=after)
        head = await bounded(writing, 60)
        for client, after in zip(clients, afters, strict=True):
            await client.until(lambda c=client: c.events() and c.events()[-1]["seq"] == head)
            assert seqs(client.events()) == list(range(after + 1, head + 1))
        assert head == before + 3000


class _Patchy(StoreWrapper):
    """Tells of every third event never, of some late, and of some twice."""

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        loop = asyncio.get_running_loop()

        def told(events: Sequence[Event]) -> None:
            some = [event for event in events if event.seq % 3]
            if some and some[0].seq % 2:
                loop.call_soon(loop.call_soon, listener, some)
            else:
                listener(some + some)

        return super().subscribe(session_id, told)


@pytest.mark.contract("PRO-05")
async def test_what_the_store_tells_not_or_late_or_twice_still_comes_once_and_in_order(
    database: str,
) -> None:
    async with (
        opened(database, scripted(), drive=False, limits=MANY, wrap=_Patchy) as room,
        Server(room, "stream") as server,
    ):
        agent = await room.session(SESSION)
        client = await server.connect()
        await client.call("session/subscribe", sessionId=SESSION)
        for n in range(61):
            await agent.inject(f"number {n}")
        head = await agent.head()
        assert head % 3
        await client.until(lambda: client.events() and client.events()[-1]["seq"] == head)
        assert seqs(client.events()) == list(range(1, head + 1))


async def test_fifty_clients_of_one_session_each_see_every_event_once_and_in_order(
    database: str,
) -> None:
    async with (
        opened(database, scripted(then="echo"), limits=MANY) as room,
        Server(room, "stream") as server,
    ):
        await room.session(SESSION)
        clients = [await server.connect() for _ in range(50)]
        for client in clients:
            await client.call("session/subscribe", sessionId=SESSION)
        await asyncio.gather(
            *(
                client.call("session/prompt", sessionId=SESSION, content=f"from {n}")
                for n, client in enumerate(clients)
            )
        )
        await idle(room.agent(SessionId(SESSION)))
        log = [json.loads(e.to_json()) for e in await log_of(room)]
        for client in clients:
            await client.until(lambda c=client: len(c.events()) >= len(log))
            assert client.events() == log
            assert client.notes("session.status")[-1]["status"] == "idle"


async def test_types_are_filtered_in_the_server_and_what_is_given_up_is_heard_no_more(
    database: str,
) -> None:
    async with opened(database, scripted(then="echo")) as room, Server(room, "x") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        some = await client.call(
            "session/subscribe", sessionId=SESSION, types=["assistant/message", "agent/idle"]
        )
        gone = await client.call("session/subscribe", sessionId=SESSION)
        await client.call("session/unsubscribe", subscription=gone["subscription"])
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        await client.event("agent/idle")
        heard = client.events(some["subscription"])
        assert [e["type"] for e in heard] == ["assistant/message", "agent/idle"]
        assert len(client.events(gone["subscription"])) <= 1
        await client.call("session/close", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="again")
        await idle(room.agent(SessionId(SESSION)))
        await client.call("session/list")
        assert len(client.events(some["subscription"])) == 2


async def test_live_tokens_come_to_who_asked_for_them(database: str) -> None:
    model = PuppetModel()
    async with opened(database, model) as room, Server(room, "stream") as server:
        client, quiet = await server.connect(), await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/subscribe", sessionId=SESSION, deltas=True)
        await client.until(lambda: client.notes("session.status"))
        await quiet.call("session/subscribe", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        asked = await bounded(model.asked())
        asked.stream("Good ", "morning")
        await client.until(lambda: len(client.notes("session.delta")) == 2)
        asked.say("Good morning")
        await client.event("agent/idle")
        await quiet.event("agent/idle")
        texts = [d["text"] for d in client.notes("session.delta") if d["kind"] == "text"]
        assert "".join(texts) == "Good morning"
        assert quiet.notes("session.delta") == []


@pytest.mark.contract("PRO-06")
async def test_a_client_that_stops_reading_costs_bounded_memory_is_told_it_lags_and_catches_up(
    database: str,
) -> None:
    async with (
        opened(database, scripted(), drive=False, limits=MANY) as room,
        Server(room, "stream") as server,
    ):
        await room.session(SESSION)
        client = await server.stream(small=True, queue_bytes_high=20_000, lag_events_max=100)
        (connection,) = server.connections
        await client.send(_frame("a", "initialize", HELLO))
        await client.send(_frame("b", "session/subscribe", {"sessionId": SESSION}))
        assert b'"a"' in (await bounded(client.receive()) or b"")
        assert b'"b"' in (await bounded(client.receive()) or b"")
        while b"session.status" not in (await bounded(client.receive()) or b""):
            pass
        # From here on it reads nothing.
        most = 0
        for _ in range(20):
            head = await burst(room, 100, size=1000)
            most = max(most, connection.wire.queued_bytes)
        assert most < 20_000 + 10_000
        client.start()
        (lagged,) = await client.until(lambda: client.notes("session.lagged"))
        first = client.events()
        assert seqs(first) == list(range(2, lagged["fromSeq"]))
        assert lagged["subscription"] == 1
        await client.call("session/subscribe", sessionId=SESSION, after=lagged["fromSeq"] - 1)
        await client.until(lambda: client.events()[-1]["seq"] == head)
        assert seqs(client.events()) == list(range(2, head + 1))
        await burst(room, 1)
        await client.until(lambda: client.events()[-1]["seq"] == head + 1)
        await client.close()


async def test_who_replays_slowly_is_no_laggard_and_drops_only_live_tokens(database: str) -> None:
    async with (
        opened(database, scripted(), drive=False, limits=MANY) as room,
        Server(room, "stream") as server,
    ):
        await room.session(SESSION)
        head = await burst(room, 800, size=500)
        client = await server.stream(small=True, queue_bytes_high=20_000, lag_events_max=10)
        (connection,) = server.connections
        await client.send(_frame("a", "initialize", HELLO))
        await client.send(_frame("b", "session/subscribe", {"sessionId": SESSION, "deltas": True}))

        async def pressed() -> None:
            while not connection.wire.pressed:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0)

        await bounded(pressed())
        from postroom.flow.live import Live

        room.live.send(Live(SessionId(SESSION), 1, 1, "text", "lost"))
        assert connection.wire.queued_bytes < 30_000
        client.start()
        await client.until(lambda: client.events() and client.events()[-1]["seq"] == head)
        assert seqs(client.events()) == list(range(1, head + 1))
        assert client.notes("session.lagged") == client.notes("session.delta") == []
        await client.close()


def _frame(name: str, method: str, params: dict[str, Any]) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": name, "method": method, "params": params})


async def test_the_log_is_read_by_the_page_and_forked(database: str) -> None:
    async with opened(database, scripted(then="echo")) as room, Server(room, "x") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        await idle(room.agent(SessionId(SESSION)))
        got: list[dict[str, Any]] = []
        more = True
        while more:
            page = await client.call("session/events", sessionId=SESSION, after=len(got), limit=3)
            got += page["events"]
            more = page["more"]
        assert got == [json.loads(e.to_json()) for e in await log_of(room)]
        forked = await client.call("session/fork", sessionId=SESSION, forkId="session_fork")
        assert forked["sessionId"] == "session_fork"
        opened_again = await client.call("session/open", sessionId="session_fork")
        assert (opened_again["created"], opened_again["headSeq"]) == (False, forked["headSeq"])


async def test_a_page_of_large_events_is_cut_by_its_size_and_never_empty(database: str) -> None:
    async with opened(database, scripted(), drive=False) as room, Server(room, "x") as server:
        agent = await room.session(SESSION)
        for _ in range(3):
            await agent.inject("x" * 1_500_000)
        client = await server.connect()
        for after in range(4):
            page = await client.call("session/events", sessionId=SESSION, after=after)
            wanted = [1] if after == 0 else [after + 1]
            assert seqs(page["events"]) == wanted
            assert page["more"] == (after < 3)
        await client.call("session/subscribe", sessionId=SESSION)
        await client.until(lambda: len(client.events()) == 4)


# ---- the session's route ----


@BOTH
async def test_a_bound_connection_gets_the_deliveries_of_its_session_and_no_others(
    database: str, kind: str
) -> None:
    async with opened(database, scripted(then="echo")) as room, Server(room, kind) as server:
        client, other = await server.connect(), await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await other.call("session/open", sessionId=OTHER)
        await other.call("session/bind", sessionId=OTHER)
        bound = await client.call("session/bind", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="hello")
        (note,) = await client.until(lambda: client.notes("session.delivery"))
        assert (note["sessionId"], note["kind"], note["text"]) == (SESSION, "text", "hello")
        assert (note["index"], note["count"]) == (0, 1)

        async def sent() -> list[dict[str, Any]]:
            return (await client.call("outbox/list", sessionId=SESSION, status=["sent"]))[
                "deliveries"
            ]

        while not (found := await bounded(sent())):
            pass
        assert found[0]["deliveryId"] == note["deliveryId"]
        await client.call("session/unbind", token=bound["token"])
        await client.call("session/prompt", sessionId=SESSION, content="to nobody")
        await idle(room.agent(SessionId(SESSION)))
        assert len(client.notes("session.delivery")) == 1
        assert other.notes("session.delivery") == []


async def test_a_question_is_asked_of_the_bound_connection_and_its_answer_returns(
    database: str,
) -> None:
    async with opened(database, scripted()) as room, Server(room, "stream") as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/bind", sessionId=SESSION)
        question = Question("q1", SessionId(SESSION), "Which?", ("a", "b"))
        asking = asyncio.ensure_future(room.router.prompt_user(question))
        asked = await client.asked("user/prompt")
        assert asked["params"] == {
            "id": "q1",
            "sessionId": SESSION,
            "text": "Which?",
            "choices": ["a", "b"],
        }
        await client.answer(asked["id"], {"answer": "b"})
        assert await bounded(asking) == "b"


def danger(ran: list[str]) -> PlainTool:
    return PlainTool("danger", lambda a: ran.append(str(a)) or "it is done", effects="outside")


ASK: dict[str, Any] = {"permissions": {"danger": "ask"}}


@pytest.mark.parametrize("allow", [True, False])
@BOTH
async def test_a_client_decides_what_it_is_asked(database: str, kind: str, allow: bool) -> None:
    ran: list[str] = []
    model = scripted(calling("danger"), "done")
    async with (
        opened(database, model, tools=[danger(ran)], **ASK) as room,
        Server(room, kind) as server,
    ):
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION, after=0)
        await client.call("session/bind", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="do it")
        asked = await client.asked("approval/request")
        (waiting,) = (await client.call("approval/list"))["approvals"]
        assert waiting["approvalId"] == asked["params"]["approvalId"]
        assert ran == []
        await client.answer(asked["id"], {"allow": allow})
        await client.event("agent/idle")
        assert len(ran) == int(allow)
        ((outcome, _),) = results(await log_of(room))
        assert outcome == ("ok" if allow else "not_started")


async def test_somebody_else_may_decide_by_the_approval_s_id_and_it_is_decided_once(
    database: str,
) -> None:
    ran: list[str] = []
    model = scripted(calling("danger"), "done")
    async with (
        opened(database, model, tools=[danger(ran)], **ASK) as room,
        Server(room, "stream") as server,
    ):
        client, other = await server.connect(), await server.connect()
        await client.call("session/open", sessionId=SESSION, after=0)
        await client.call("session/bind", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="do it")
        asked = await client.asked("approval/request")
        name = asked["params"]["approvalId"]
        await other.call("approval/decide", approvalId=name, decision="allow")
        await client.event("agent/idle")
        assert len(ran) == 1
        error = await failure(other.call("approval/decide", approvalId=name, decision="deny"))
        assert error.name == "not_asked"


@BOTH
@pytest.mark.contract("PRO-08", "APR-03")
async def test_what_a_client_is_asked_is_denied_when_it_goes_and_the_turn_goes_on(
    database: str, kind: str
) -> None:
    ran: list[str] = []
    model = scripted(calling("danger"), "then not")
    async with (
        opened(database, model, tools=[danger(ran)], **ASK) as room,
        Server(room, kind) as server,
    ):
        client, watcher = await server.connect(), await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await client.call("session/bind", sessionId=SESSION)
        await watcher.call("session/subscribe", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="do it")
        await client.asked("approval/request")
        await client.close()
        await watcher.event("agent/idle")
        assert ran == []
        ((outcome, text),) = results(await log_of(room))
        assert outcome == "not_started"
        assert "connection was lost" in text


@pytest.mark.contract("PRO-08", "APR-03")
async def test_who_ends_its_input_answers_nothing_more_and_hears_how_its_turn_ends(
    database: str,
) -> None:
    ran: list[str] = []
    model = scripted(calling("danger"), "then not")
    async with opened(database, model, tools=[danger(ran)], **ASK) as room:
        here, there = socket.socketpair()
        link = StreamLink(*await asyncio.open_connection(sock=here))
        serving = asyncio.ensure_future(serve_link(room, link))
        client = StreamClient(*await asyncio.open_connection(sock=there))
        client.start()
        await client.hello()
        await client.call("session/open", sessionId=SESSION, after=0)
        await client.call("session/bind", sessionId=SESSION)
        await client.call("session/prompt", sessionId=SESSION, content="do it")
        await client.asked("approval/request")
        client.writer.write_eof()
        await client.event("agent/idle")
        await bounded(serving)
        await bounded(client.gone.wait())
        await client.close()
        assert ran == []
        (told,) = [e["data"] for e in client.events() if e["type"] == "tool/result"]
        assert told["outcome"] == "not_started"
        assert "connection was lost" in told["content"][0]["text"]


@BOTH
@pytest.mark.contract("PRO-08")
async def test_a_client_that_goes_before_its_answer_finds_its_message_once(
    database: str, kind: str
) -> None:
    async with opened(database, PuppetModel()) as room, Server(room, kind) as server:
        agent = await room.session(SESSION)
        said = {"sessionId": SESSION, "content": "hello", "messageId": "msg_mine"}
        client = await server.connect()
        await client.ask("session/prompt", **said)
        await client.close()
        again = await server.connect()
        receipt = await again.call("session/prompt", **said)
        assert await again.call("session/prompt", **said) == receipt
        await waits(agent, 0)
        log = await log_of(room)
        assert [e.type for e in log].count("inbox/queued") == 1


# ---- who may connect ----


@pytest.mark.contract("SEC-01")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "null"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "http://localhost:1"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "localhost.evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "192.0.2.1"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "[bad"}, 403),
        ({"Authorization": f"Bearer {TOKEN}"}, None),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "localhost:8"}, None),
        (
            {"Authorization": f"bearer {TOKEN}", "Host": "[::1]:8", "Origin": "http://[::1]:8"},
            None,
        ),
        ({"Sec-WebSocket-Protocol": f"postroom.1, bearer.{TOKEN}"}, None),
        ({"Sec-WebSocket-Protocol": "postroom.1, bearer.wrong"}, 401),
    ],
)
async def test_who_has_no_token_or_comes_from_elsewhere_is_refused(
    database: str, headers: dict[str, str], status: int | None
) -> None:
    async with opened(database, scripted()) as room:
        sockets = SocketServer(room, TOKEN)
        app = web.Application()
        app.add_routes([sockets.route()])
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = server.make_url("/ws")
            if status is None:
                async with http.ws_connect(url, headers=headers) as ws:
                    await ws.send_str(_frame("a", "initialize", HELLO))
                    assert "result" in await bounded(ws.receive_json())
            else:
                with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                    await http.ws_connect(url, headers=headers)
                assert caught.value.status == status
            await sockets.aclose()


@pytest.mark.contract("SEC-01")
@pytest.mark.parametrize(
    ("host", "named", "ours"),
    [
        ("0.0.0.0", "192.0.2.1:80", True),
        ("0.0.0.0", "evil.example", False),
        ("::", "[2001:db8::1]:80", True),
        ("agents.example", "agents.example:80", True),
        ("agents.example", "evil.example", False),
    ],
)
async def test_told_to_listen_elsewhere_it_is_reached_by_that_name_or_an_address(
    database: str, host: str, named: str, ours: bool
) -> None:
    async with opened(database, scripted()) as room:
        sockets = SocketServer(room, TOKEN, host=host)
        app = web.Application()
        app.add_routes([sockets.route()])
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {TOKEN}", "Host": named}
            async with http.get(server.make_url("/ws"), headers=headers) as response:
                assert response.status == (400 if ours else 403)  # a plain GET, past the guard


@pytest.mark.contract("SEC-01")
def test_the_token_is_random_kept_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    first = socket_token({}, tmp_path / "one")
    assert socket_token({}, tmp_path / "one") == first
    assert socket_token({}, tmp_path / "two") != first
    file = tmp_path / "one" / "socket.token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["socket.token"]
    assert socket_token({"POSTROOM_TOKEN": TOKEN}, tmp_path) == TOKEN
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        socket_token({}, tmp_path / "one")
    with pytest.raises(ConfigError, match="no token"):
        socket_token({"POSTROOM_TOKEN": "short"}, tmp_path)


# ---- a process of its own ----


class Process(Client):
    """`postroom serve --stdio`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self.process = process

    async def send(self, text: str | bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
        await self.process.stdin.drain()

    async def receive(self) -> bytes | None:
        assert self.process.stdout is not None
        return await self.process.stdout.readline() or None

    async def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
async def process(database: str, tmp_path: Path) -> AsyncGenerator[Process]:
    script = tmp_path / "script.json"
    slow = {"text": "word " * 40, "chunks": 40, "delay_ms": 5}
    script.write_text(json.dumps({"replies": [slow], "then": "repeat"}))
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "postroom.cli.main",
        "serve",
        "--stdio",
        "--model",
        f"scripted:{script}",
        "--db",
        database,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=64 * 1024 * 1024,
        env={**os.environ, "POSTROOM_HOME": str(tmp_path / "home"), "POSTROOM_LOG": "debug"},
    )
    client = Process(running)
    client.start()
    await client.hello()
    yield client
    if running.returncode is None:
        running.kill()
    assert running.stderr is not None
    await bounded(running.stderr.read())
    await bounded(running.wait())
    await bounded(client.gone.wait())


@pytest.mark.contract("PRO-09")
async def test_what_a_client_has_seen_is_in_the_log_after_kill_9(
    process: Process, database: str
) -> None:
    await process.call("session/open", sessionId=SESSION, after=0)
    for n in range(20):
        await process.ask("session/prompt", sessionId=SESSION, content=f"say {n}")
    await process.until(lambda: len(process.events()) >= 60)
    process.process.send_signal(signal.SIGKILL)
    await bounded(process.process.wait())
    await bounded(process.gone.wait())
    seen = process.events()
    receipts = [f["result"] for f in process.heard if "messageId" in (f.get("result") or {})]
    async with opened(database, scripted(), drive=False) as room:
        log = [json.loads(e.to_json()) for e in await log_of(room)]
    assert log[: len(seen)] == seen
    for receipt in receipts:
        event = log[receipt["seq"] - 1]
        assert (event["type"], event["data"]["message"]["id"]) == (
            "inbox/queued",
            receipt["messageId"],
        )


@pytest.mark.contract("PRO-08")
async def test_the_end_of_input_drains_and_the_client_hears_of_it(
    process: Process, database: str
) -> None:
    await process.call("session/open", sessionId=SESSION, after=0)
    name = await process.ask("session/prompt", sessionId=SESSION, content="hello")
    await process.hang_up()
    receipt = await process.answer_to(name)
    assert await bounded(process.process.wait(), 30) == 0
    await bounded(process.gone.wait())
    types = [e["type"] for e in process.events()]
    async with opened(database, scripted(), drive=False) as room:
        log = [json.loads(e.to_json()) for e in await log_of(room)]
    assert log[: len(types)] == process.events()
    assert log[receipt["seq"] - 1]["type"] == "inbox/queued"


_NOISY = """
import asyncio, os, sys
from postroom.app import open_room
from postroom.cores import builtin_cores
from postroom.server.stdio import serve_stdio

async def main():
    cores = builtin_cores(model="scripted:echo", environ={})
    async with open_room(cores, database=sys.argv[1]) as room:
        asyncio.get_running_loop().call_soon(lambda: print("noise", flush=True))
        asyncio.get_running_loop().call_soon(os.system, "echo more noise")
        await serve_stdio(room)

asyncio.run(main())
"""


async def test_files_serve_as_well_and_what_prints_by_itself_is_kept_out_of_the_frames(
    database: str, tmp_path: Path
) -> None:
    frames = [_frame("a", "initialize", HELLO), _frame("b", "session/list", {})]
    (tmp_path / "in").write_text("\n".join(frames))
    with (tmp_path / "in").open() as source, (tmp_path / "out").open("w") as target:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _NOISY, database),
            stdin=source,
            stdout=target,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "POSTROOM_HOME": str(tmp_path)},
        )
    _, noise = await bounded(running.communicate(), 30)
    assert running.returncode == 0
    assert noise.split(b"\n") == [b"noise", b"more noise", b""]
    heard = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [frame["id"] for frame in heard] == ["a", "b"]
    assert heard[1]["result"] == {"sessions": []}


async def test_shutdown_is_answered_and_ends_the_process(process: Process) -> None:
    assert await process.call("shutdown") == {}
    assert await bounded(process.process.wait(), 30) == 0


async def test_sigterm_drains(process: Process) -> None:
    await process.call("session/open", sessionId=SESSION)
    process.process.send_signal(signal.SIGTERM)
    assert await bounded(process.process.wait(), 30) == 0


async def test_a_client_over_a_socket_does_not_stop_a_runtime_that_serves_others(
    database: str,
) -> None:
    async with opened(database, scripted()) as room, Server(room, "socket") as server:
        client = await server.connect()
        assert (await failure(client.call("shutdown"))).name == "not_yours"
        assert await client.call("session/list") == {"sessions": []}


@BOTH
async def test_while_the_runtime_closes_a_client_is_told_so(database: str, kind: str) -> None:
    async with opened(database, scripted()) as room, Server(room, kind) as server:
        client = await server.connect()
        await client.call("session/open", sessionId=SESSION)
        await bounded(room.aclose())
        error = await failure(client.call("session/prompt", sessionId=SESSION, content="hello"))
        assert (error.number, error.name) == (CODES["shutting_down"], "shutting_down")


@pytest.mark.contract("SEC-01")
async def test_the_daemon_takes_programs_that_know_its_token_and_drains_before_it_hangs_up(
    database: str, tmp_path: Path
) -> None:
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "postroom.cli.main", "serve", "--port", "0"),
        *("--model", "scripted:echo", "--db", database),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "POSTROOM_HOME": str(tmp_path)},
    )
    assert daemon.stderr is not None
    try:
        url = None
        while url is None:
            line = await bounded(daemon.stderr.readline(), 30)
            assert line, "it has ended"
            url = re.search(r"ws://127\.0\.0\.1:\d+/ws", line.decode())
        token = (tmp_path / "socket.token").read_text().strip()
        assert token.encode() not in line  # this is no terminal
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await http.ws_connect(url[0])
            ws = await http.ws_connect(url[0], headers={"Authorization": f"Bearer {token}"})
            client = SocketClient(ws)
            client.start()
            await client.hello()
            await client.call("session/open", sessionId=SESSION, after=0)
            receipt = await client.call("session/prompt", sessionId=SESSION, content="hello")
            reply = await client.event("assistant/message", after=receipt["seq"])
            assert reply["data"]["message"]["content"] == [{"type": "text", "text": "hello"}]
            await client.event("agent/idle")
            daemon.send_signal(signal.SIGTERM)
            await bounded(client.gone.wait(), 30)
            await client.close()
        assert await bounded(daemon.wait(), 30) == 0
    finally:
        if daemon.returncode is None:
            daemon.kill()
        await bounded(daemon.stderr.read())
        await bounded(daemon.wait())


# ---- what is written down ----


def test_the_schema_that_is_checked_in_is_that_of_the_types() -> None:
    text = (ROOT / "protocol" / "schema.json").read_text()
    assert text == schema_text(), "run `postroom protocol schema > protocol/schema.json`"


def test_every_reference_of_the_schema_is_defined_in_it() -> None:
    text = schema_text()
    document = json.loads(text)
    for piece in text.split('"$ref": "#/$defs/')[1:]:
        assert piece.partition('"')[0] in document["$defs"]


async def test_every_method_is_served(database: str) -> None:
    async with opened(database, scripted()) as room, Server(room, "stream") as server:
        client = await server.connect()
        for method in METHODS:
            if method != "shutdown":
                await client.send(_frame(method, method, {"nonsense": 1}))
                error = await failure(client.answer_to(method))
                assert (error.name, error.path) == ("invalid_params", "nonsense")


def _descendants(cls: type[PostroomError]) -> list[type[PostroomError]]:
    return [cls, *(d for sub in cls.__subclasses__() for d in _descendants(sub))]


@pytest.mark.parametrize("cls", _descendants(PostroomError), ids=lambda c: c.__name__)
def test_every_error_of_ours_has_a_number(cls: type[PostroomError]) -> None:
    error = cls.__new__(cls)
    PostroomError.__init__(error, "it did not work", hint="try again")
    if hasattr(cls, "path") or cls.__name__ in ("RpcError", "InvalidContent"):
        return
    answered = as_rpc_error(error)
    assert answered.number in CODES.values()
    assert answered.data.hint == "try again" or answered.data.code == "shutting_down"


def test_the_reference_names_every_method_notification_and_error() -> None:
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text()
    for name, (params, answer) in METHODS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for field in (*params.__struct_encode_fields__, *answer.__struct_encode_fields__):
            assert f"`{field}`" in row, f"{name} does not tell of {field}"
    for name in (*NOTIFICATIONS, *CLIENT_METHODS):
        assert f"| `{name}` |" in text
    for name, number in {**STANDARD, **CODES}.items():
        assert f"| `{name}` | {number} |" in text


def test_a_connection_is_made_for_the_operator_unless_told_otherwise() -> None:
    import inspect

    assert inspect.signature(Connection).parameters["principal"].default == "operator"
