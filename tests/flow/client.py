"""A client of the protocol as plain as can be, over a byte stream or a web socket."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from postroom.app import Room
from postroom.server.connection import Connection
from postroom.server.socket import SocketServer
from postroom.wire.rpc import StreamLink
from tests.support import bounded

TOKEN = "a-token-for-the-tests"
HELLO = {"protocolVersion": 1, "client": {"name": "test", "version": "1"}}


class Failed(Exception):
    """The server answered with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['data']['code']}: {error['message']}")
        self.number: int = error["code"]
        self.data: dict[str, Any] = error["data"]
        self.name: str = error["data"]["code"]
        self.path: str | None = error["data"].get("path")


class Client(abc.ABC):
    """``heard`` is every frame that came, in order. `Client.read` runs from the start, or when told."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._news = asyncio.Event()
        self._ids = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None

    @abc.abstractmethod
    async def send(self, text: str | bytes) -> None: ...

    @abc.abstractmethod
    async def receive(self) -> str | bytes | None: ...

    @abc.abstractmethod
    async def hang_up(self) -> None: ...

    def start(self) -> None:
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            while text := await self.receive():
                self.heard.append(json.loads(text))
                self._news.set()
        self.gone.set()
        self._news.set()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(ConnectionError):
            await self.hang_up()

    async def until(self, found: Callable[[], Any], seconds: float = 20) -> Any:
        """What ``found`` gives once it gives something; looked at after each frame."""

        async def look() -> Any:
            while not (value := found()):
                if self.gone.is_set():
                    raise AssertionError("the server has ended the connection")
                self._news.clear()
                await self._news.wait()
            return value

        return await bounded(look(), seconds)

    async def ask(self, method: str, **params: Any) -> int:
        name = next(self._ids)
        frame = {"jsonrpc": "2.0", "id": name, "method": method, "params": params}
        await self.send(json.dumps(frame, ensure_ascii=False))
        return name

    async def answer_to(self, name: object) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            for frame in self.heard:
                if frame.get("id", self) == name and "method" not in frame:
                    return frame
            return None

        frame = await self.until(found)
        if "error" in frame:
            raise Failed(frame["error"])
        return frame["result"]

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self.answer_to(await self.ask(method, **params))

    async def hello(self) -> dict[str, Any]:
        return await self.call("initialize", **HELLO)

    def notes(self, method: str, **where: Any) -> list[dict[str, Any]]:
        return [
            frame["params"]
            for frame in self.heard
            if frame.get("method") == method
            and all(frame["params"].get(key) == value for key, value in where.items())
        ]

    def events(self, subscription: int | None = None) -> list[dict[str, Any]]:
        where = {} if subscription is None else {"subscription": subscription}
        return [note["event"] for note in self.notes("session.event", **where)]

    async def event(self, type_: str, *, after: int = 0) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            for event in self.events():
                if event["type"] == type_ and event["seq"] > after:
                    return event
            return None

        return await self.until(found)

    async def asked(self, method: str) -> dict[str, Any]:
        """The server's own request; its ``id`` and ``params``."""

        def found() -> dict[str, Any] | None:
            return next((f for f in self.heard if f.get("method") == method and "id" in f), None)

        return await self.until(found)

    async def answer(self, name: object, result: Any) -> None:
        await self.send(json.dumps({"jsonrpc": "2.0", "id": name, "result": result}))


class StreamClient(Client):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self.reader = reader
        self.writer = writer
        self._rest = b""

    async def send(self, text: str | bytes) -> None:
        self.writer.write((text.encode() if isinstance(text, str) else text) + b"\n")
        await self.writer.drain()

    async def receive(self) -> bytes | None:
        while b"\n" not in self._rest:
            chunk = await self.reader.read(65536)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def hang_up(self) -> None:
        self.writer.close()


class SocketClient(Client):
    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        super().__init__()
        self.ws = ws

    async def send(self, text: str | bytes) -> None:
        await self.ws.send_str(text if isinstance(text, str) else text.decode())

    async def receive(self) -> str | None:
        message = await self.ws.receive()
        return message.data if message.type is aiohttp.WSMsgType.TEXT else None

    async def hang_up(self) -> None:
        await self.ws.close()


class Server:
    """Serves a room; `connect` gives clients, all of which end with it."""

    def __init__(self, room: Room, kind: str) -> None:
        self.room = room
        self.kind = kind
        self.connections: list[Connection] = []
        self._stack = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._http: aiohttp.ClientSession | None = None

    async def connect(self, *, say_hello: bool = True, **more: Any) -> Client:
        client = await (self.socket() if self.kind == "socket" else self.stream(**more))
        client.start()
        self._stack.push_async_callback(client.close)
        if say_hello:
            await client.hello()
        return client

    async def stream(self, *, small: bool = False, **more: Any) -> StreamClient:
        here, there = socket.socketpair()
        if small:
            for one in (here, there):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link = StreamLink(*await asyncio.open_connection(sock=here))
        connection = Connection(self.room, link, kind="stdio", **more)
        self.connections.append(connection)
        serving = asyncio.ensure_future(_to_the_end(connection))
        self._stack.push_async_callback(_ended, connection, serving)
        limit = 2048 if small else 64 * 1024
        return StreamClient(*await asyncio.open_connection(sock=there, limit=limit))

    async def socket(self) -> SocketClient:
        if self._http is None:
            server = SocketServer(self.room, TOKEN)
            app = web.Application()
            app.add_routes([server.route()])
            test = await self._stack.enter_async_context(TestServer(app))
            self._stack.push_async_callback(server.aclose)
            self._url = str(test.make_url("/ws"))
            self._http = await self._stack.enter_async_context(aiohttp.ClientSession())
        assert self._url is not None
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return SocketClient(await self._http.ws_connect(self._url, headers=headers, max_msg_size=0))

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await bounded(self._stack.aclose(), 20)


async def _to_the_end(connection: Connection) -> None:
    try:
        await connection.serve()
    finally:
        await connection.aclose()


async def _ended(connection: Connection, serving: asyncio.Future[None]) -> None:
    await connection.aclose()
    await serving
