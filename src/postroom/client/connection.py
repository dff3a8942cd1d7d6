"""One live connection of the client: calls, what the server says by itself, and its end.

It is used until it is lost and then thrown away: who wants to go on asks the `Room` for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeVar

import msgspec

from postroom.client.failures import as_error
from postroom.client.transport import Opened
from postroom.errors import Disconnected
from postroom.wire import protocol as said
from postroom.wire.rpc import Link, RpcError, Unfit, Wire

A = TypeVar("A", bound=said.Answer)

_FLUSH_S = 2.0
_encode = msgspec.json.Encoder().encode


class Listener(Protocol):
    """Who hears what the server says by itself."""

    def noted(self, connection: Connection, method: str, raw: bytes) -> None:
        """A notification, in the order they came. It must not raise, and waits for nothing."""
        ...

    async def asked(self, method: str, raw: bytes) -> bytes:
        """A request of the server's."""
        ...

    def lost(self, connection: Connection) -> None:
        """The connection is over; called once."""
        ...


class Connection:
    def __init__(self, opened: Opened, listener: Listener) -> None:
        self._opened = opened
        self._listener = listener
        self.lost = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wire = Wire(_Seen(opened.link, self._ended), self._handle)
        self._serving = asyncio.ensure_future(self._wire.serve())
        self._closing: asyncio.Task[None] | None = None

    async def initialize(self, client: str) -> said.Initialized:
        from postroom import __version__

        hello = said.Initialize(said.VERSION, said.Peer(client, __version__))
        return await self.call("initialize", hello, said.Initialized)

    async def call(self, method: str, params: said.Params, answer: type[A]) -> A:
        """Asks the server. Cancelling it forgets the question; the answer may stand all the same.

        Raises:
            PostroomError: what the server answered, by its own class.
            Disconnected: the connection went before the answer came.
        """
        try:
            raw = await self._wire.request(method, _encode(params))
        except RpcError as error:
            raise as_error(error) from error
        except Disconnected:
            raise await self.obituary() from None
        return _decoder(answer).decode(raw)

    async def obituary(self) -> Disconnected:
        """Why it is gone; a new exception for each who asks."""
        return await self._opened.obituary()

    async def aclose(self) -> None:
        """Ends it and what stands behind it; bounded. Again, it waits for the first time."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
        try:
            await self._wire.aclose(flush_s=0 if self.lost else _FLUSH_S)
            await asyncio.wait({self._serving}, timeout=_FLUSH_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        finally:
            await self._opened.aclose()
            self._ended()

    # ---- what comes ----

    def _ended(self) -> None:
        if not self.lost:
            self.lost = True
            if not self._gone.done():
                self._gone.set_result(None)
            self._listener.lost(self)

    async def _handle(self, method: str, raw: bytes) -> bytes:
        if method in said.NOTIFICATIONS:
            self._listener.noted(self, method, raw)
            return b""
        if method not in said.CLIENT_METHODS:
            raise RpcError(
                said.METHOD_NOT_FOUND,
                f"this client has no method {method[:100]!r}",
                said.ErrorData("method_not_found"),
            )
        # A person thinks for as long as they like, but not longer than the connection lives.
        answering = asyncio.ensure_future(self._listener.asked(method, raw))
        try:
            await asyncio.wait({answering, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
        finally:
            answering.cancel()
        raise RpcError(said.CODES["error"], "the client is leaving", said.ErrorData("error"))


class _Seen:
    """A link whose end is told in the moment it is seen."""

    def __init__(self, link: Link, ended: Callable[[], None]) -> None:
        self._link = link
        self._ended = ended

    async def read(self) -> bytes | Unfit | None:
        frame = await self._link.read()
        if frame is None:
            self._ended()
        return frame

    async def write(self, frames: Sequence[bytes]) -> None:
        try:
            await self._link.write(frames)
        except OSError:
            self._ended()
            raise

    async def aclose(self) -> None:
        await self._link.aclose()


@cache
def _decoder(answer: type[A]) -> msgspec.json.Decoder[A]:
    return msgspec.json.Decoder(answer)
