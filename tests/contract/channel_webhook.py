"""The world of the webhook channel: an endpoint over real HTTP, which keeps its promise if it made one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Self

import aiohttp
from aiohttp import web

from postroom.channels.signing import SigningKey, signed
from postroom.channels.webhook import Endpoint, WebhookChannel
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.ports.channel import Channel
from tests.contract.channel_world import WAIT_MS, Desk, Treatment, World
from tests.support import bounded

KEY = SigningKey("whsec_" + base64.b64encode(b"k" * 32).decode())
NAME = "ci"
DONE = (200, 400)
AGAIN_S = 0.01


class WebhookWorld(World):
    """Events are named by their ``webhook-id``. Its sender posts one after the other, each until it is
    answered for good, as the protocol asks it to.
    """

    def __init__(self, *, promised: bool) -> None:
        super().__init__()
        self._promised = promised
        self._treatment: Treatment = "accept"
        self._effects: list[tuple[str, str]] = []
        self._calls = 0
        self._hung = 0
        self._news = asyncio.Event()
        self._ids = itertools.count(1)
        self._bodies: dict[str, bytes] = {}
        self._acked: list[str] = []
        self._letters: asyncio.Queue[str] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._door: int | None = None  # the port at which the channel receives now
        self._over = asyncio.Event()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/hook", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await self.treat("accept")
        self._start(self._post_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._over.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    # ---- the channel ----

    def make(self) -> Channel:
        endpoint = Endpoint(
            name=NAME,
            keys=(KEY,),
            url=f"http://127.0.0.1:{self._port}/hook",
            repeats_window_s=600 if self._promised else 0,
        )
        return WebhookChannel(endpoint, clock=self.clock)

    @property
    def conversation(self) -> ConversationKey:
        return conversation_key("webhook", "source", NAME, "ann")

    @property
    def foreign(self) -> ConversationKey:
        return conversation_key("webhook", "source", "another", "ann")

    @contextlib.asynccontextmanager
    async def receiving(self, channel: Channel | None = None) -> AsyncGenerator[Desk]:
        running = channel or self.channel()
        assert isinstance(running, WebhookChannel)
        app = web.Application()
        app.add_routes(running.routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._door = runner.addresses[0][1]
        try:
            async with super().receiving(running) as desk:
                yield desk
        finally:
            self._door = None
            await runner.cleanup()

    # ---- the endpoint ----

    async def treat(self, treatment: Treatment) -> None:
        self._treatment = treatment
        for site in list(self._runner.sites):
            await site.stop()
        if treatment != "no_connection":
            await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        id_, text = request.headers["webhook-id"], body["text"]
        self._calls += 1
        known = self._promised and any(id_ == each for each, _ in self._effects)
        match self._treatment:
            case "refuse_for_now":
                return web.Response(status=429)
            case "wait":
                return web.Response(status=429, headers={"Retry-After": str(WAIT_MS // 1000)})
            case "hang":
                await self._hang()
                return web.Response()
            case "refuse" if not known:
                return web.Response(status=400)
            case "lose_message":
                return _dropped(request)
            case _:
                pass
        if not known:
            self._effects.append((id_, text))
        if self._treatment == "lose_answer":
            return _dropped(request)
        return web.json_response({"id": f"m-{id_}"})

    async def _hang(self) -> None:
        self._hung += 1
        self._ring()
        try:
            await self._over.wait()
        finally:  # cancelled, when the other side hangs up
            self._hung -= 1
            self._ring()

    def seen(self) -> list[str]:
        return [text for _, text in self._effects]

    def copies(self, key: str) -> int:
        return sum(id_ == key for id_, _ in self._effects)

    def calls(self) -> int:
        return self._calls

    async def hanging(self) -> None:
        await self.until(lambda: self._hung > 0)

    async def nothing_left(self) -> None:
        await self.until(lambda: not self._hung)

    # ---- its sender ----

    def say(self, text: str, *, automatic: bool = False) -> str:
        event = {"conversation": "ann", "text": text, "sender": {"id": "u1", "name": "Ann"}}
        return self._write(json.dumps({**event, "automatic": automatic}).encode())

    def garble(self) -> str:
        return self._write(b'{"conversation": "a')

    def _write(self, body: bytes) -> str:
        id_ = f"evt_{next(self._ids)}"
        self._bodies[id_] = body
        self._letters.put_nowait(id_)
        return id_

    def redeliver(
        self, event: str, *, relabelled: bool = False, concurrently: bool = False
    ) -> None:
        if relabelled:
            self.clock.advance(1_000)  # another timestamp, and so another signature
        if concurrently:
            self._start(self._post(event))
        else:
            self._letters.put_nowait(event)

    async def _post_all(self) -> None:
        while True:
            await self._post(await self._letters.get())

    async def _post(self, id_: str) -> None:
        while (status := await self._posted(id_)) not in DONE:
            assert status in (None, 503)
            await asyncio.sleep(AGAIN_S)
        self._acked.append(id_)
        self._ring()

    async def _posted(self, id_: str) -> int | None:
        """The status; None: nobody was there, or the connection broke."""
        body = self._bodies[id_]
        headers = signed([KEY], id_, self.clock.now_ms(), body)
        if self._door is None:
            return None
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"http://127.0.0.1:{self._door}/webhook/{NAME}",
                    data=body,
                    headers={**headers, "Content-Type": "application/json"},
                ) as response,
            ):
                return response.status
        except aiohttp.ClientError:
            return None

    def acked(self) -> list[str]:
        return list(self._acked)

    def _ring(self) -> None:
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not true():
                self._news.clear()
                await self._news.wait()

        await bounded(wait())

    async def turns(self) -> None:
        await asyncio.sleep(0.05)  # so long that a wrong answer would have come


def _dropped(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
