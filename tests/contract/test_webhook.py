"""The webhook channel over real HTTP, both ways: what is believed, what is acknowledged and when,
and what each end of one of our own posts is taken for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from rich.pretty import pretty_repr

import postroom.channels.webhook_call
from postroom.channels.signing import SigningKey, signed, verified
from postroom.channels.webhook import Endpoint, WebhookChannel
from postroom.domain.conversation import conversation_key
from postroom.domain.ids import DeliveryId, MessageId, SessionId
from postroom.domain.message import File, Image, Text
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
)
from postroom.errors import ConfigError, InvalidContent, NotCommitted, StoreLocked
from postroom.ports.channel import Accepted, Channel, Inbound, OutPart
from postroom.stores.artifacts import LocalArtifacts
from postroom.testing.clock import ManualClock
from tests.support import bounded

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
OTHER_SECRET = "whsec_" + base64.b64encode(b"o" * 32).decode()
KEY = SigningKey(SECRET)
BODY_MAX = 4_096
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
EVENT: dict[str, Any] = {"conversation": "ticket 7", "text": "hello"}


# ---- the two sides ----


class Desk:
    """A sink whose commit the test holds in its hand."""

    def __init__(self) -> None:
        self.taken: list[Inbound] = []
        self.kept: list[tuple[str, str, bytes, str]] = []
        self.arrived = asyncio.Event()
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.fault: Exception | None = None

    async def __call__(self, inbound: Inbound) -> Accepted:
        self.arrived.set()
        await self.may_commit.wait()
        if self.fault is not None:
            raise self.fault
        if inbound.dedupe in [one.dedupe for one in self.taken]:
            return Accepted("duplicate", SessionId("session_1"), MessageId("msg_1"))
        self.taken.append(inbound)
        return Accepted("queued", SessionId("session_1"), MessageId("msg_1"))

    async def cursor(self, channel: str, name: str) -> str | None:
        return None

    async def quarantine(
        self,
        channel: str,
        dedupe: str,
        raw: bytes,
        error: str,
        cursor: tuple[str, str] | None = None,
    ) -> None:
        if self.fault is not None:
            raise self.fault
        self.kept.append((channel, dedupe, raw, error))


class Answer(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: Any


class Door:
    """A channel mounted on a server, with a desk behind it."""

    def __init__(self, channel: WebhookChannel, desk: Desk, clock: ManualClock) -> None:
        self.channel = channel
        self.desk = desk
        self.clock = clock
        self.port = 0

    async def post(
        self,
        event: Any = EVENT,
        *,
        id_: str = "evt_1",
        headers: dict[str, str] | None = None,
        key: SigningKey = KEY,
    ) -> Answer:
        """Posts an event, signed as it should be unless ``headers`` says otherwise."""
        body = event if isinstance(event, bytes) else json.dumps(event).encode()
        if headers is None:
            headers = signed([key], id_, self.clock.now_ms(), body)
        return await self.deliver(body, headers)

    async def deliver(self, body: bytes, headers: dict[str, str]) -> Answer:
        sent = {"Content-Type": "application/json", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url, data=body, headers=sent) as response,
        ):
            return Answer(response.status, dict(response.headers), await response.json())

    async def speak(self, *pieces: bytes) -> bytes:
        """Writes raw bytes and gives the first line of what comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
            return (await bounded(reader.readline())).rstrip()
        finally:
            writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/webhook/{self.channel.name}"


@contextlib.asynccontextmanager
async def served(add: Callable[[web.Application], Any]) -> AsyncIterator[int]:
    application = web.Application()
    add(application)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def opened(
    *keys: SigningKey, artifacts: Path | None = None, **settings: Any
) -> AsyncIterator[Door]:
    clock = ManualClock()
    endpoint = Endpoint(name="ci", keys=keys or (KEY,), body_bytes_max=BODY_MAX, **settings)
    store = LocalArtifacts(artifacts) if artifacts else None
    channel = WebhookChannel(endpoint, clock=clock, artifacts=store)
    made = Door(channel, Desk(), clock)
    async with served(lambda application: application.add_routes(channel.routes())) as port:
        made.port = port
        running = asyncio.create_task(channel.run(made.desk))
        await asyncio.sleep(0)
        yield made
        running.cancel()
        await asyncio.wait([running])


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with opened() as made:
        yield made


Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """An endpoint that answers as the test says, and remembers what it was sent."""

    def __init__(self) -> None:
        self.port = 0
        self.script: Script = says(200)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.connections: list[Any] = []
        self.closing = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((headers, await request.read()))
        assert request.transport is not None
        self.connections.append(request.transport.get_extra_info("peername"))
        return await self.script(request)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def hang(self, _: web.Request) -> web.StreamResponse:
        await self.closing.wait()
        return web.Response()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with served(lambda app: app.router.add_route("*", "/{path:.*}", made.answer)) as port:
        made.port = port
        yield made
        made.closing.set()


def says(status: int, body: Any = None, **headers: str) -> Script:
    async def script(_: web.Request) -> web.StreamResponse:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, body=data, headers=named)

    return script


async def drops(request: web.Request) -> web.StreamResponse:
    """It has read the request; then the connection is gone."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


class Deduplicating:
    """A receiver that keeps its promise: one effect for one id, and the same answer again."""

    def __init__(self, *first: Script) -> None:
        self.effects: list[str] = []
        self.first = list(first)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        id_ = request.headers["webhook-id"]
        if id_ not in self.effects:
            self.effects.append(id_)
        if self.first:
            return await self.first.pop(0)(request)
        return web.json_response({"id": f"m{self.effects.index(id_)}"})


def part(**changes: Any) -> OutPart:
    made = OutPart(
        session_id=SessionId("session_1"),
        delivery_id=DeliveryId("dlv_1"),
        index=0,
        count=1,
        kind="text",
        conversation=conversation_key("webhook", "source", "ci", "ticket 7"),
        key="dlv_1/0",
        text="done ✓",
    )
    return msgspec.structs.replace(made, **changes)


@contextlib.asynccontextmanager
async def sender(
    url: str | None, *, clock: ManualClock | None = None, timeout_ms: int = 5_000, **more: Any
) -> AsyncIterator[WebhookChannel]:
    artifacts = more.pop("artifacts", None)
    endpoint = Endpoint(name="ci", keys=(KEY,), url=url, **more)
    channel = WebhookChannel(
        endpoint, clock=clock or ManualClock(), artifacts=artifacts, send_timeout_ms=timeout_ms
    )
    try:
        yield channel
    finally:
        await channel.aclose()


async def sent_to(url: str | None, **settings: Any) -> SendOutcome:
    async with sender(url, **settings) as channel:
        return await bounded(channel.send(part()))


# ---- signatures ----


def test_the_reference_vector_of_standard_webhooks_is_signed_and_believed() -> None:
    key = SigningKey("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    headers = signed([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330_000, body)
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert verified([key], headers, body, 1_614_265_330_000) == "msg_p5jXN8AQM9LWM0D4loKWxJek"


def test_while_keys_are_rotated_all_of_them_sign() -> None:
    headers = signed([SigningKey(OTHER_SECRET), KEY], "evt_1", 0, b"{}")
    assert verified([KEY], headers, b"{}", 0) == "evt_1"
    assert verified([SigningKey(OTHER_SECRET)], headers, b"{}", 0) == "evt_1"
    assert len(headers["webhook-signature"].split(" ")) == 2


@pytest.mark.parametrize("id_", ["", "a b", "a\r\nx: y", "é", "x" * 257])
def test_an_id_that_no_header_can_carry_is_not_signed(id_: str) -> None:
    with pytest.raises(ValueError, match="webhook id"):
        signed([KEY], id_, 0, b"{}")


@pytest.mark.contract("SEC-02")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "hunter2-hunter2-hunter2",
        base64.b64encode(b"k" * 32).decode(),
        "whsec_not/base64*at=all",
        "whsec_é" + "A" * 40,
        "whsec_" + base64.b64encode(b"k" * 23).decode(),
        "whsec_" + base64.b64encode(b"k" * 65).decode(),
    ],
)
def test_what_is_no_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SigningKey(text)
    assert raised.value.__context__ is None
    assert not text or text not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": ""},
        {"name": "a/b"},
        {"name": "{x}"},
        {"keys": ()},
        {"url": "ftp://host/"},
        {"url": "//host/hook"},
        {"url": "http:///hook"},
        {"url": "https://user:pass@host/"},
        {"url": "https://host/#part"},
        {"url": "http://host:99999/"},
        {"url": "http://host/a b"},
        {"repeats_window_s": -1},
        {"text_max": 0},
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Endpoint(**{"name": "ci", "keys": (KEY,), **settings})


# ---- inbound ----


@pytest.mark.contract("CHN-01")
async def test_an_event_is_acknowledged_only_after_it_is_committed(door: Door) -> None:
    door.desk.may_commit.clear()
    asking = asyncio.create_task(door.post())
    await bounded(door.desk.arrived.wait())
    done, _ = await asyncio.wait([asking], timeout=0.1)
    assert not done
    door.desk.may_commit.set()
    answer = await bounded(asking)
    assert answer.status == 200
    assert answer.body == {"outcome": "queued", "sessionId": "session_1", "messageId": "msg_1"}
    assert door.desk.taken == [
        Inbound(
            channel="ci",
            conversation=conversation_key("webhook", "source", "ci", "ticket 7"),
            sender=door.desk.taken[0].sender,
            content=(Text("hello"),),
            dedupe="evt_1",
            origin="evt_1",
        )
    ]
    assert door.desk.taken[0].sender.id == "ci"


@pytest.mark.contract("CHN-01")
@pytest.mark.parametrize("fault", [StoreLocked("locked"), NotCommitted("full"), KeyError("bug")])
async def test_what_was_not_committed_is_not_acknowledged_and_may_come_again(
    door: Door, fault: Exception
) -> None:
    door.desk.fault = fault
    answer = await bounded(door.post())
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert door.desk.taken == []

    door.desk.fault = None
    assert (await bounded(door.post())).body["outcome"] == "queued"
    again = await bounded(door.post())
    assert (again.status, again.body["outcome"]) == (200, "duplicate")
    assert [one.dedupe for one in door.desk.taken] == ["evt_1"]


@pytest.mark.contract("CHN-01")
async def test_a_sender_that_hangs_up_does_not_stop_the_commit(door: Door) -> None:
    door.desk.may_commit.clear()
    asking = asyncio.create_task(door.post())
    await bounded(door.desk.arrived.wait())
    asking.cancel()
    await asyncio.wait([asking])
    door.desk.may_commit.set()
    again = await bounded(door.post())
    assert again.body["outcome"] == "duplicate"
    assert len(door.desk.taken) == 1


async def test_while_the_channel_does_not_run_events_are_put_off() -> None:
    clock = ManualClock()
    channel = WebhookChannel(Endpoint(name="ci", keys=(KEY,)), clock=clock)
    made = Door(channel, Desk(), clock)
    async with served(lambda application: application.add_routes(channel.routes())) as port:
        made.port = port
        assert (await bounded(made.post())).status == 503
        running = asyncio.create_task(channel.run(made.desk))
        await asyncio.sleep(0)
        assert (await bounded(made.post())).status == 200
        running.cancel()
        await asyncio.wait([running])
        assert (await bounded(made.post(id_="evt_2"))).status == 503


def _mutations() -> Iterator[tuple[str, Callable[[dict[str, str]], dict[str, str]]]]:
    def but(**changes: str | None) -> Callable[[dict[str, str]], dict[str, str]]:
        named = {f"webhook-{name}": value for name, value in changes.items()}
        return lambda headers: {
            name: value for name, value in {**headers, **named}.items() if value is not None
        }

    yield "no id", but(id=None)
    yield "no timestamp", but(timestamp=None)
    yield "no signature", but(signature=None)
    yield "no headers", lambda _: {}
    yield "another id", but(id="evt_2")
    yield "an id no header should have", but(id="evt é")
    yield "another time", but(timestamp="1800000001")
    yield "a time that is no number", but(timestamp="now")
    yield "a negative time", but(timestamp="-1800000000")
    yield "a huge time", but(timestamp="9" * 400)
    yield "an empty signature", but(signature="")
    yield "a bare version", but(signature="v1,")
    yield "no base64", but(signature="v1,é*")
    yield (
        "another version",
        lambda h: {
            **h,
            "webhook-signature": h["webhook-signature"].replace("v1,", "v2,"),
        },
    )
    yield (
        "no version",
        lambda h: {
            **h,
            "webhook-signature": h["webhook-signature"].removeprefix("v1,"),
        },
    )
    yield "a part of it", lambda h: {**h, "webhook-signature": h["webhook-signature"][:-4]}


@pytest.mark.contract("SEC-04")
@pytest.mark.parametrize(("name", "change"), list(_mutations()))
async def test_a_request_whose_signature_is_not_right_is_refused_without_saying_why(
    door: Door, name: str, change: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    body = json.dumps(EVENT).encode()
    right = signed([KEY], "evt_1", door.clock.now_ms(), body)
    answer = await bounded(door.deliver(body, change(right)))
    stale = await bounded(door.deliver(body, signed([KEY], "evt_1", 0, body)))
    assert answer.status == stale.status == 401
    assert answer.body == stale.body
    assert door.desk.taken == []
    assert door.desk.kept == [], "only what is signed is worth keeping"


@pytest.mark.contract("SEC-04")
@pytest.mark.parametrize("seconds", [-300, 0, 300])
async def test_a_signature_is_believed_for_five_minutes_both_ways(door: Door, seconds: int) -> None:
    body = json.dumps(EVENT).encode()
    near = signed([KEY], "evt_1", door.clock.now_ms() + seconds * 1000, body)
    assert (await bounded(door.deliver(body, near))).status == 200
    if seconds:
        farther = door.clock.now_ms() + (seconds + (1 if seconds > 0 else -1)) * 1000
        far = signed([KEY], "evt_2", farther, body)
        assert (await bounded(door.deliver(body, far))).status == 401


@pytest.mark.contract("SEC-04")
async def test_the_signature_is_over_the_bytes_as_they_came(door: Door) -> None:
    body = b'{ "text":"hi",\n "conversation" : "7" }'
    headers = signed([KEY], "evt_1", door.clock.now_ms(), body)
    same_value = json.dumps(json.loads(body)).encode()
    assert (await bounded(door.deliver(same_value, headers))).status == 401
    assert (await bounded(door.deliver(body, headers))).status == 200


@pytest.mark.contract("SEC-04")
async def test_what_is_not_signed_is_not_even_parsed(door: Door) -> None:
    body = b"[" * 3_000
    headers = signed([SigningKey(OTHER_SECRET)], "evt_1", door.clock.now_ms(), body)
    assert (await bounded(door.deliver(body, headers))).status == 401
    assert door.desk.kept == []


@pytest.mark.contract("SEC-04")
async def test_each_key_of_a_rotation_is_believed_and_a_retired_one_is_not() -> None:
    new = SigningKey(OTHER_SECRET)
    async with opened(new, KEY) as door:
        assert (await bounded(door.post(key=KEY))).status == 200
        assert (await bounded(door.post(key=new, id_="evt_2"))).status == 200
    async with opened(new) as door:
        assert (await bounded(door.post(key=KEY))).status == 401


@pytest.mark.contract("SEC-04")
async def test_a_body_that_is_announced_too_large_is_refused_before_it_is_read(
    door: Door,
) -> None:
    head = (
        "POST /webhook/ci HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        f"Content-Length: {BODY_MAX + 1}\r\n"
    )
    # No byte of the body is ever sent: an answer is possible only without reading it.
    assert b" 413 " in await door.speak(head.encode() + b"\r\n")
    assert b" 413 " in await door.speak(head.encode() + b"Expect: 100-continue\r\n\r\n")


@pytest.mark.contract("SEC-04")
async def test_a_body_that_grows_too_large_is_cut_off_while_it_is_read(door: Door) -> None:
    head = (
        b"POST /webhook/ci HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"%x\r\n%s\r\n" % (BODY_MAX, b" " * BODY_MAX)
    assert b" 413 " in await door.speak(head, chunk, chunk)
    assert door.desk.kept == []


async def test_a_body_of_exactly_the_limit_is_read(door: Door) -> None:
    event = json.dumps(EVENT).encode()
    full = event + b" " * (BODY_MAX - len(event))
    assert (await bounded(door.post(full))).status == 200
    assert (await bounded(door.post(full + b" ", id_="evt_2"))).status == 413


async def test_a_sender_that_asks_first_is_told_to_go_on(door: Door) -> None:
    head = (
        b"POST /webhook/ci HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    assert b" 100 " in await door.speak(head)


async def test_a_body_that_does_not_come_is_not_waited_for(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.channels.webhook.READ_TIMEOUT_S", 0.05)
    head = (
        b"POST /webhook/ci HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Content-Length: 20\r\n\r\n{"
    )
    assert b" 408 " in await door.speak(head)


@pytest.mark.contract("SEC-04")
@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "text/plain"}, {"Content-Type": ""}, {"Content-Encoding": "gzip"}],
)
async def test_only_plain_json_is_read(door: Door, headers: dict[str, str]) -> None:
    body = gzip.compress(json.dumps(EVENT).encode())
    right = signed([KEY], "evt_1", door.clock.now_ms(), body)
    answer = await bounded(door.deliver(body, {**right, **headers}))
    assert answer.status == 415
    assert door.desk.taken == []


async def test_an_endpoint_answers_nothing_but_posts_to_its_own_name(door: Door) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(door.url) as response:
            assert response.status == 405
        async with session.post(door.url + "x") as response:
            assert response.status == 404


MALFORMED: list[tuple[Any, str]] = [
    (b"", "$"),
    (b"{", "$"),
    (b'{"text": "\xff"}', "$"),
    (b'{"conversation": "7", "text": "\\ud800"}', "$"),
    (b'{"content": [{"type": "text", "x": ' + b"[" * 3_000, "content[0].x"),
    ([], "$"),
    ({"text": "hi"}, "conversation"),
    ({"conversation": "", "text": "hi"}, "conversation"),
    ({"conversation": 7, "text": "hi"}, "conversation"),
    ({"conversation": "7" * 513, "text": "hi"}, "conversation"),
    ({"conversation": "7"}, "text"),
    ({"conversation": "7", "text": " \n"}, "text"),
    ({"conversation": "7", "text": ["hi"]}, "text"),
    ({"conversation": "7", "text": "hi", "session": "s"}, "session"),
    ({"conversation": "7", "text": "hi", "sender": {"name": "Ann"}}, "sender.id"),
    ({"conversation": "7", "text": "hi", "sender": {"id": "a", "admin": True}}, "sender.admin"),
    ({"conversation": "7", "content": [{"type": "text"}]}, "content[0].text"),
    ({"conversation": "7", "content": [{"type": "toolCall"}]}, "content[0].type"),
    (
        {"conversation": "7", "content": [{"type": "image", "artifact": "sha256:00"}]},
        "content[0].artifact",
    ),
    (
        {
            "conversation": "7",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "file", "mediaType": "text/plain", "data": "*"},
            ],
        },
        "content[1].data",
    ),
    ({"conversation": "7", "text": "hi", "replaces": "a b"}, "replaces"),
    ({"conversation": "7", "text": "hi", "deletes": "evt_0"}, "text"),
    ({"conversation": "7", "deletes": "evt_0", "replaces": "evt_0"}, "replaces"),
    ({"conversation": "7", "deletes": ""}, "deletes"),
]


@pytest.mark.contract("CHN-06")
@pytest.mark.parametrize(("event", "path"), MALFORMED)
async def test_a_signed_event_that_cannot_be_read_is_kept_aside_and_later_ones_flow(
    door: Door, event: Any, path: str
) -> None:
    answer = await bounded(door.post(event))
    assert answer.status == 400
    assert answer.body["error"]["code"] == "invalid_content"
    assert answer.body["error"]["path"] == path
    [(channel, dedupe, raw, error)] = door.desk.kept
    assert (channel, dedupe) == ("ci", "evt_1")
    assert raw == (event if isinstance(event, bytes) else json.dumps(event).encode())
    assert path in error
    assert (await bounded(door.post(id_="evt_2"))).status == 200
    assert [one.dedupe for one in door.desk.taken] == ["evt_2"]


@pytest.mark.contract("CHN-06")
async def test_an_event_that_could_not_be_kept_aside_is_not_answered_for_good(door: Door) -> None:
    door.desk.fault = StoreLocked("locked")
    assert (await bounded(door.post({"text": "hi"}))).status == 503
    door.desk.fault = None
    assert (await bounded(door.post({"text": "hi"}))).status == 400
    assert len(door.desk.kept) == 1


@pytest.mark.contract("CHN-06")
async def test_content_that_the_inbox_refuses_is_kept_aside_too(door: Door) -> None:
    class Strict(Desk):
        async def __call__(self, inbound: Inbound) -> Accepted:
            raise InvalidContent("too large", path="content")

    strict = Strict()
    running = asyncio.create_task(door.channel.run(strict))
    await asyncio.sleep(0)
    answer = await bounded(door.post())
    assert (answer.status, answer.body["error"]["path"]) == (400, "content")
    assert len(strict.kept) == 1
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.contract("CHN-12")
async def test_the_sender_an_edit_and_a_deletion_reach_the_sink(door: Door) -> None:
    sender_ = {"id": "U 7:x", "name": "Ann"}
    await bounded(door.post({**EVENT, "sender": sender_, "replaces": "evt_0"}))
    deletion = {"conversation": "ticket 7", "deletes": "evt_1"}
    assert (await bounded(door.post(deletion, id_="evt_2"))).status == 200
    edit, deleted = door.desk.taken
    assert (edit.sender.id, edit.sender.name, edit.replaces) == ("U 7:x", "Ann", "evt_0")
    assert (deleted.deletes, deleted.content) == ("evt_1", ())


@pytest.mark.contract("CHN-05")
async def test_an_auto_reply_is_marked_and_an_echo_of_our_own_message_is_no_event(
    door: Door, receiver: Receiver
) -> None:
    await bounded(door.post({**EVENT, "automatic": True}))
    assert [one.automatic for one in door.desk.taken] == [True]

    assert isinstance(await sent_to(receiver.url, clock=door.clock), Sent)
    headers, body = receiver.requests[0]
    echo = {name: value for name, value in headers.items() if name.startswith("webhook-")}
    assert (await bounded(door.deliver(body, echo))).status == 400
    assert len(door.desk.taken) == 1


@pytest.mark.contract("CHN-08")
async def test_a_file_over_the_limit_becomes_a_line_and_the_text_still_arrives(
    tmp_path: Path,
) -> None:
    small, large = base64.b64encode(PNG).decode(), base64.b64encode(b"x" * 101).decode()
    event = {
        "conversation": "7",
        "text": "see",
        "content": [
            {"type": "image", "mediaType": "image/png", "name": "a.png", "data": small},
            {"type": "file", "mediaType": "text/plain", "name": "b.txt", "data": large},
            {"type": "image", "mediaType": "image/png", "name": "c.png", "data": "YWJj"},
        ],
    }
    async with opened(artifacts=tmp_path, media_bytes_max=100) as door:
        assert (await bounded(door.post(event))).status == 200
        text, image, stub, no_image = door.desk.taken[0].content
    assert text == Text("see")
    assert isinstance(image, Image)
    assert (image.name, image.size, image.media_type) == ("a.png", len(PNG), "image/png")
    assert await LocalArtifacts(tmp_path).get(image.artifact) == PNG
    assert isinstance(stub, Text)
    assert all(word in stub.text for word in ("b.txt", "101 bytes", "limit is 100 bytes"))
    assert isinstance(no_image, File)
    assert (no_image.name, no_image.media_type) == ("c.png", "text/plain")


async def test_without_an_artifact_store_every_file_becomes_a_line(door: Door) -> None:
    file = {"type": "file", "mediaType": "text/plain", "data": "YWJj"}
    await bounded(door.post({"conversation": "7", "content": [file]}))
    [stub] = door.desk.taken[0].content
    assert isinstance(stub, Text)
    assert "not taken here" in stub.text


# ---- outbound ----


async def test_a_part_is_posted_signed_under_its_own_key(receiver: Receiver) -> None:
    clock = ManualClock()
    async with sender(receiver.url, clock=clock) as channel:
        await bounded(channel.send(part(index=1, count=3, reply_to="evt_1")))
    [(headers, body)] = receiver.requests
    assert verified([KEY], headers, body, clock.now_ms()) == "dlv_1/0"
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "type": "message",
        "conversation": "ticket 7",
        "text": "done ✓",
        "deliveryId": "dlv_1",
        "part": 2,
        "parts": 3,
        "kind": "text",
        "replyTo": "evt_1",
    }


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (says(200, {"id": "m1"}), "m1"),
        (says(201, {"id": 17}), "17"),
        (says(204), None),
        (says(200, {"id": True}), None),
        (says(200, {"id": ""}), None),
        (says(200, {"id": "x" * 257}), None),
        (says(200, b"OK"), None),
        (says(200, b"[" * 3_000), None),
        (says(200, b'{"id": "m1", "pad": "' + b"x" * 70_000 + b'"}'), None),
        (says(202, {}, x_message="h1"), "h1"),
        (says(202, {"id": "m1"}, x_message="h1"), "m1"),
    ],
)
async def test_a_2xx_is_sent_with_the_reference_that_the_endpoint_gives(
    receiver: Receiver, answer: Script, reference: str | None
) -> None:
    receiver.script = answer
    assert await sent_to(receiver.url, reference_header="X-Message") == Sent(reference)


async def test_a_2xx_whose_body_breaks_off_or_hangs_is_sent(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postroom.channels.webhook_call, "BODY_TIMEOUT_S", 0.05)
    hangs = False

    async def partial(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"id":')
        if hangs:
            await receiver.closing.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    receiver.script = partial
    assert await sent_to(receiver.url, timeout_ms=60_000) == Sent(None)
    hangs = True
    assert await sent_to(receiver.url, timeout_ms=60_000) == Sent(None)


NOW = ManualClock().now_ms()


@pytest.mark.parametrize(
    ("answer", "delay_ms"),
    [
        (says(429, retry_after="7"), 7_000),
        (says(503, retry_after=" 120 "), 120_000),
        (says(429, retry_after="0"), 1_000),
        (says(429, retry_after=formatdate(NOW / 1000 + 90, usegmt=True)), 90_000),
        (says(503, retry_after=formatdate(NOW / 1000 - 90, usegmt=True)), 1_000),
    ],
)
async def test_an_endpoint_that_says_when_to_come_back_is_waited_for(
    receiver: Receiver, answer: Script, delay_ms: int
) -> None:
    receiver.script = answer
    outcome = await sent_to(receiver.url)
    assert isinstance(outcome, RetryAfter)
    assert outcome.delay_ms == delay_ms


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 413, 422, 451])
async def test_a_refusal_is_for_good(receiver: Receiver, status: int) -> None:
    receiver.script = says(status, {"error": "no"}, retry_after="7")
    assert await sent_to(receiver.url) == Refused(f"the endpoint answered {status}")


@pytest.mark.parametrize(
    "answer",
    [
        says(408),
        says(425),
        says(429),
        says(429, retry_after="soon"),
        says(429, retry_after="9" * 30),
        says(429, retry_after="Wed, 99 Foo 2026 00:00:00 GMT"),
        says(429, retry_after="-5"),
    ],
)
async def test_a_refusal_for_now_without_a_time_is_worth_a_retry(
    receiver: Receiver, answer: Script
) -> None:
    receiver.script = answer
    outcome = await sent_to(receiver.url)
    assert isinstance(outcome, Refused)
    assert outcome.retryable


@pytest.mark.parametrize("status", [303, 500, 502, 503, 504, 599])
async def test_an_answer_behind_which_it_may_have_been_handled_is_uncertain(
    receiver: Receiver, status: int
) -> None:
    receiver.script = says(status, location="/elsewhere")
    assert await sent_to(receiver.url) == Uncertain(f"the endpoint answered {status}")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(receiver: Receiver, status: int) -> None:
    receiver.script = says(status, location=receiver.url + "/elsewhere")
    outcome = await sent_to(receiver.url)
    assert isinstance(outcome, Refused)
    assert not outcome.retryable
    assert len(receiver.requests) == 1


async def test_a_connection_dropped_after_the_request_is_uncertain_and_nothing_is_repeated(
    receiver: Receiver,
) -> None:
    async with sender(receiver.url) as channel:
        assert isinstance(await bounded(channel.send(part())), Sent)
        receiver.script = drops
        assert isinstance(await bounded(channel.send(part(key="dlv_2/0"))), Uncertain)
    assert [headers["webhook-id"] for headers, _ in receiver.requests] == ["dlv_1/0", "dlv_2/0"]
    # The second had a connection of its own: it could not be lost to one that was dead already.
    assert len(set(receiver.connections)) == 2


async def test_an_answer_that_does_not_come_is_uncertain(receiver: Receiver) -> None:
    receiver.script = receiver.hang
    outcome = await sent_to(receiver.url, timeout_ms=150)
    assert outcome == Uncertain("the endpoint did not answer in time")
    assert len(receiver.requests) == 1


async def test_an_answer_that_is_not_http_is_uncertain() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"hello\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert isinstance(await sent_to(f"http://127.0.0.1:{port}/"), Uncertain)


async def test_where_nothing_listens_nothing_was_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listening
        port = taken.getsockname()[1]
        assert isinstance(await sent_to(f"http://127.0.0.1:{port}/"), NotStarted)


async def test_a_host_without_an_address_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> list[object]:
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", fails)
    assert isinstance(await sent_to("http://nowhere.invalid/"), NotStarted)


async def test_a_tls_failure_is_not_started(receiver: Receiver) -> None:
    outcome = await sent_to(receiver.url.replace("http:", "https:"))
    assert outcome == NotStarted("no secure connection to the endpoint")
    assert receiver.requests == []


async def test_a_tls_handshake_that_hangs_is_not_started() -> None:
    over = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await sent_to(f"https://127.0.0.1:{port}/", timeout_ms=150)
        over.set()
    assert isinstance(outcome, NotStarted)


async def test_what_is_not_for_this_endpoint_is_refused_before_any_call(
    receiver: Receiver,
) -> None:
    elsewhere = [
        conversation_key("webhook", "source", "other", "7"),
        conversation_key("telegram", "dm", "7"),
        "nonsense",
        None,
    ]
    async with sender(receiver.url) as channel:
        for key in elsewhere:
            assert isinstance(await channel.send(part(conversation=key)), Refused)
    assert isinstance(await sent_to(None), Refused)
    assert receiver.requests == []


async def test_a_closed_channel_starts_nothing(receiver: Receiver) -> None:
    async with sender(receiver.url) as channel:
        await bounded(channel.send(part()))
        await channel.aclose()
        assert isinstance(await channel.send(part()), NotStarted)
    assert len(receiver.requests) == 1


async def test_a_file_goes_along_or_is_described_and_the_receipt_says_which(
    receiver: Receiver, tmp_path: Path
) -> None:
    store = LocalArtifacts(tmp_path)
    artifact = await store.put(b"abc")
    file = File(artifact=artifact, media_type="text/plain", size=3, name="a.txt")
    gone = msgspec.structs.replace(file, artifact="sha256:" + "0" * 64)
    async with sender(receiver.url, artifacts=store) as channel:
        assert await bounded(channel.send(part(kind="media", media=file))) == Sent(None)
        refused = await bounded(channel.send(part(kind="media", media=gone)))
        assert refused == Refused("the file is not in the artifact store")
    async with sender(receiver.url, artifacts=store, media_bytes_max=2) as channel:
        described = await bounded(channel.send(part(kind="media", media=file)))
        assert described == Sent(None, "the file was described, not sent")
    full, short = (json.loads(body)["media"] for _, body in receiver.requests)
    assert full == {
        "type": "file",
        "mediaType": "text/plain",
        "size": 3,
        "artifact": artifact,
        "name": "a.txt",
        "data": "YWJj",
    }
    assert "data" not in short


# ---- parts in doubt ----


def doubtful(clock: ManualClock) -> OutPart:
    return part(attempt=2, first_attempt_at=clock.now_ms())


@pytest.mark.contract("CHN-09", "CHN-10")
async def test_a_part_that_arrived_is_found_by_a_repeat_and_by_a_new_object_too(
    receiver: Receiver,
) -> None:
    clock = ManualClock()
    receiver.script = promised = Deduplicating(drops)
    async with sender(receiver.url, clock=clock, repeats_window_s=600) as channel:
        assert isinstance(await bounded(channel.send(part())), Uncertain)
    clock.advance(299_000)
    asked = msgspec.structs.replace(doubtful(clock), first_attempt_at=clock.now_ms() - 299_000)
    async with sender(receiver.url, clock=clock, repeats_window_s=600) as another:
        assert await bounded(another.reconcile(asked)) == Found("m0")
    assert promised.effects == ["dlv_1/0"]
    (first, first_body), (second, second_body) = receiver.requests
    assert first["webhook-id"] == second["webhook-id"]
    assert first_body == second_body
    assert verified([KEY], second, second_body, clock.now_ms()) == "dlv_1/0"


@pytest.mark.contract("CHN-09")
@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_a_part_whose_repeat_is_refused_for_its_content_did_not_arrive(
    receiver: Receiver, status: int
) -> None:
    receiver.script = says(status)
    clock = ManualClock()
    async with sender(receiver.url, clock=clock, repeats_window_s=600) as channel:
        assert await bounded(channel.reconcile(doubtful(clock))) == Absent()


@pytest.mark.contract("CHN-09")
@pytest.mark.parametrize(
    "answer",
    [
        *(says(status) for status in (302, 401, 403, 404, 409, 410, 429, 500, 503)),
        says(429, retry_after="7"),
        drops,
    ],
)
async def test_an_answer_that_is_about_the_moment_says_nothing_about_the_first_attempt(
    receiver: Receiver, answer: Script
) -> None:
    receiver.script = answer
    clock = ManualClock()
    async with sender(receiver.url, clock=clock, repeats_window_s=600) as channel:
        assert isinstance(await bounded(channel.reconcile(doubtful(clock))), CannotTell)
    assert len(receiver.requests) == 1


@pytest.mark.contract("CHN-09", "OUT-04")
@pytest.mark.parametrize(
    ("window_s", "age_ms"), [(0, 0), (0, 1_000), (600, 300_000), (600, 10**9), (600, -1)]
)
async def test_without_a_promise_or_after_half_its_time_nothing_is_repeated(
    receiver: Receiver, window_s: int, age_ms: int
) -> None:
    clock = ManualClock()
    asked = part(attempt=2, first_attempt_at=clock.now_ms() - age_ms)
    async with sender(receiver.url, clock=clock, repeats_window_s=window_s) as channel:
        assert isinstance(await channel.reconcile(asked), CannotTell)
        never = msgspec.structs.replace(asked, first_attempt_at=None)
        assert isinstance(await channel.reconcile(never), CannotTell)
    assert receiver.requests == []


async def test_the_profile_tells_of_the_promise() -> None:
    async with sender("http://127.0.0.1:1/", repeats_window_s=600) as made:
        channel: Channel = made
        assert (channel.name, channel.profile.reconciles) == ("ci", True)
        assert channel.profile.repeat_window_ms == 600_000
    async with sender("http://127.0.0.1:1/") as made:
        assert (made.profile.reconciles, made.profile.repeat_window_ms) == (False, 0)


# ---- secrets ----


@pytest.mark.contract("SEC-02")
async def test_neither_a_secret_nor_a_token_in_the_url_shows_up_anywhere(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = "token-4711"
    seen: list[str] = []
    for url in (f"{receiver.url}?t={token}", f"https://127.0.0.1:1/{token}"):
        for script in (drops, says(500), says(404), says(302, location="/")):
            receiver.script = script
            seen.append(repr(await sent_to(url)))
        endpoint = Endpoint(name="ci", keys=(KEY,), url=url)
        channel = WebhookChannel(endpoint)
        seen += [repr(endpoint), str(endpoint), pretty_repr(endpoint), repr(channel), repr(KEY)]
        seen.append(pretty_repr(KEY))
    with pytest.raises(ConfigError) as raised:
        Endpoint(name="ci", keys=(KEY,), url=f"ftp://host/{token}")
    seen.append(str(raised.value))
    async with opened() as door:
        for fault in (StoreLocked("locked"), KeyError(SECRET)):
            door.desk.fault = fault
            seen.append(repr(await bounded(door.post())))
        seen.append(repr(await bounded(door.post(headers={}))))
    seen += [record.getMessage() + str(record.exc_info) for record in caplog.records]
    assert [text for text in seen if token in text or SECRET[6:] in text] == []
    assert any("not taken" in text for text in seen)
