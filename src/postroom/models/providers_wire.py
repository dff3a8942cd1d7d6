"""The HTTP under the provider library: one attempt, looked at and bounded on its way.

The library and the SDKs below it build a request and read its answer; what passes between them
and the network passes through here. An `Exchange` stands for one request of ours and says what is
to happen to the one HTTP request that the library makes of it:

- *recorded*: it is taken down and never sent (`Recorded` is raised instead of an answer). That is
  how a body is rendered, and how a long history is built off the event loop.
- *rehearsed*: it is answered with given bytes and never sent, so that what the library puts off
  until its first answer is done before there is one.
- *sent as recorded*: the library was given a stand-in; what goes out is what was taken down.
- *sent as it is*.

A second request in one exchange (a retry, a resumption of the SDK's own) is refused: the turn
loop owns retries. Imports the HTTP library: loaded with the provider library, not before.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from weakref import WeakKeyDictionary

import httpx2

from postroom.models.http import CONNECT_TIMEOUT_S, CONNECTIONS_MAX, KEEP_ALIVE_S
from postroom.models.openai_compat import END_WAIT_S, ERROR_BYTES_MAX, ERROR_READ_S

KEPT_CONNECTIONS_MAX = 100

_STREAM = {"content-type": "text/event-stream"}


class Recorded(BaseException):
    """The request was taken down; nothing was sent. No error: it must pass every handler."""


class SecondRequest(httpx2.TransportError):
    """The library wanted to send more than one request for one of ours."""


@dataclass(frozen=True)
class Record:
    """A request as it would be sent. ``headers`` hold the key."""

    body: bytes
    url: str = ""
    headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)


@dataclass
class Exchange:
    """One request of ours. ``status`` and ``headers`` are the answer's (None: none has come).

    ``record`` with ``recording`` is what was taken down; without, what is sent. ``finished`` says
    whether the reply is whole, so that a line left open holds nothing up.
    """

    recording: bool = False
    record: Record | None = None
    rehearsal: bytes | None = None
    sent: bool = False
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    finished: Callable[[], bool] = lambda: False
    answer: httpx2.AsyncByteStream | None = None

    def begin(self, record: Record) -> None:
        """Called with the request the library has made, before anything is sent.

        Raises:
            Recorded: it was only to be taken down.
            SecondRequest: one was sent already.
        """
        if self.recording:
            self.record = record
            raise Recorded
        if self.sent:
            raise SecondRequest("one request is one attempt")
        self.sent = True

    async def aclose(self) -> None:
        """Gives the connection up if the answer was not read to its end.

        One SDK leaves it open when its reader is cancelled.
        """
        if self.answer is not None:
            await self.answer.aclose()


current: ContextVar[Exchange] = ContextVar("postroom_exchange")


class Wire(httpx2.AsyncBaseTransport):
    """A transport that does what the running `Exchange` says.

    Connections belong to an event loop: each loop that sends gets its own.
    """

    def __init__(self, *, idle_timeout_ms: int, proxy: str | None) -> None:
        self._proxy = proxy
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncHTTPTransport] = (
            WeakKeyDictionary()
        )
        self._tls = _tls()
        idle_s = idle_timeout_ms / 1000
        self._timeout = {
            "connect": CONNECT_TIMEOUT_S,
            "read": idle_s,
            "write": idle_s,
            "pool": CONNECT_TIMEOUT_S,
        }

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = current.get()
        # A compressed stream is held back until a block is full.
        request.headers["accept-encoding"] = "identity"
        exchange.begin(Record(await request.aread(), str(request.url), tuple(request.headers.raw)))
        if exchange.record is not None:
            request = httpx2.Request(
                request.method,
                exchange.record.url,
                headers=list(exchange.record.headers),
                content=exchange.record.body,
            )
        if exchange.rehearsal is not None:
            return httpx2.Response(200, headers=_STREAM, content=exchange.rehearsal)
        request.extensions = {**request.extensions, "timeout": self._timeout}
        response = await self._line().handle_async_request(request)
        exchange.status = response.status_code
        exchange.headers = response.headers
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        answer = _Answer if response.status_code == 200 else _Refusal
        response.stream = exchange.answer = answer(response.stream, exchange)
        return response

    async def aclose(self) -> None:
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.aclose()

    def _line(self) -> httpx2.AsyncHTTPTransport:
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            line = self._lines[loop] = httpx2.AsyncHTTPTransport(
                verify=self._tls,
                proxy=self._proxy,
                limits=httpx2.Limits(
                    max_connections=CONNECTIONS_MAX,
                    max_keepalive_connections=KEPT_CONNECTIONS_MAX,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
            )
        return line


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes tens of milliseconds: once, where the library is loaded."""
    return httpx2.create_ssl_context()


class _Answer(httpx2.AsyncByteStream):
    """A stream that ends soon after its last word, whether the server ends it or not."""

    def __init__(self, stream: httpx2.AsyncByteStream, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._stream)
        while True:
            limit = END_WAIT_S if self._exchange.finished() else None
            try:
                if limit is None:
                    piece = await anext(pieces)
                else:
                    async with asyncio.timeout(limit):
                        piece = await anext(pieces)
            except (StopAsyncIteration, TimeoutError):
                return
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Refusal(_Answer):
    """An error's body, within bounds of size and time: what came counts, however it ended."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        pieces = aiter(self._stream)
        until = asyncio.get_running_loop().time() + ERROR_READ_S
        while size < ERROR_BYTES_MAX:
            try:
                async with asyncio.timeout_at(until):
                    piece = await anext(pieces)
            except (StopAsyncIteration, TimeoutError, httpx2.TransportError):
                return
            size += len(piece)
            yield piece
