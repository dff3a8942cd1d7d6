"""Chat Completions over HTTP: OpenAI's API, and the many servers that speak it.

The fastest path of the product, so: messages are encoded once, a body is a join, the stream is
read as bytes by a typed decoder, and one client with kept connections serves every model of the
process. One attempt a request; the turn loop retries.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from postroom.errors import ModelError
from postroom.models.chat import CHAT, Dialect, body_of
from postroom.models.completion import Completion, StreamError
from postroom.models.endpoint import endpoint_of
from postroom.models.events import EVENT_BYTES_MAX, EventReader, EventTooLarge
from postroom.models.failures import Answer, failure, read_error, request_id, retry_after_ms
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.model import DeltaSink, ModelRequest, Reply

if TYPE_CHECKING:
    import aiohttp

    from postroom.models.http import Line

IDLE_TIMEOUT_MS = 120_000
ERROR_BYTES_MAX = 64 * 1024
ERROR_READ_S = 5
# After the stream's last word: how long its end is waited for, so that the connection is kept.
END_WAIT_S = 0.1


class OpenAICompatModel:
    """A model behind a Chat Completions endpoint.

    ``ref`` is ``PROVIDER:NAME`` as asked for, ``name`` the name that is sent. ``base_url`` is
    what stands before ``/chat/completions``. ``api_key`` None: no Authorization header.
    ``session`` is an aiohttp client to use and leave open (None: the process's own). ``window``
    is in tokens (None: unknown). ``proxy`` is a proxy's URL. ``base_url_variable`` and
    ``key_variable`` are the environment's names for these, for hints.

    Raises:
        ConfigError: the base URL is no http or https URL, or the key cannot stand in a header.
    """

    def __init__(
        self,
        ref: str,
        base_url: str,
        api_key: str | None,
        name: str,
        *,
        dialect: Dialect = CHAT,
        session: aiohttp.ClientSession | None = None,
        idle_timeout_ms: int = IDLE_TIMEOUT_MS,
        window: int | None = None,
        accepts: frozenset[str] = frozenset(),
        proxy: str | None = None,
        base_url_variable: str | None = None,
        key_variable: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._ref = ref
        self._name = name
        self._endpoint = endpoint_of(
            base_url,
            "/chat/completions",
            api_key,
            base_url_variable=base_url_variable,
            key_variable=key_variable,
        )
        self._dialect = dialect
        self._session = session
        self._idle_timeout_ms = idle_timeout_ms
        self._window = window
        self._accepts = accepts
        self._proxy = proxy
        self._clock: Clock = clock or SystemClock()
        self._line: Line | None = None
        self._closed = False

    @property
    def ref(self) -> str:
        return self._ref

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def accepts(self) -> frozenset[str]:
        return self._accepts

    def __repr__(self) -> str:
        return f"OpenAICompatModel({self._ref!r}, {self._endpoint.shown!r})"

    def render(self, request: ModelRequest) -> bytes:
        return body_of(self._name, self._dialect, self._accepts, request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        body = self.render(request)
        line = self._line
        if line is None or line.loop is not asyncio.get_running_loop():
            line = self._open()
        try:
            response = await line.post(body)
        except line.TROUBLE as error:
            raise line.trouble(error) from None
        try:
            if response.status != 200:
                raise await self._refusal(response, line)
            return await self._read(response, line, on_delta)
        except BaseException:
            # Cancelled or failed: nothing more is wanted from this connection.
            response.close()
            raise

    async def aclose(self) -> None:
        self._closed = True
        line, self._line = self._line, None
        if line is not None:
            await line.aclose()

    def _open(self) -> Line:
        if self._closed:
            raise ModelError(f"{self._ref} was closed", kind="transport")
        from postroom.models.http import Line

        self._line = Line(
            self._endpoint,
            ref=self._ref,
            idle_timeout_ms=self._idle_timeout_ms,
            proxy=self._proxy,
            session=self._session,
        )
        return self._line

    async def _read(
        self, response: aiohttp.ClientResponse, line: Line, on_delta: DeltaSink
    ) -> Reply:
        content = response.content
        completion = Completion(on_delta)
        events = EventReader()
        ended = False
        try:
            data = await content.readany()
            first = data.lstrip()[:1]
            if first in (b"{", b"[", b"<"):
                data = await self._whole(content, data)
                ended = True
                if first == b"<":
                    raise self._not_a_stream(response, "a page of HTML")
                completion.take([data])
            while not ended and data:
                ended = completion.take(events.feed(data))
                if not ended:
                    data = await content.readany()
            if not ended:
                completion.take(events.close())
        except StreamError as error:
            raise self._failure(error.answer, response, status=None) from None
        except EventTooLarge:
            raise self._not_a_stream(response, "an endless line") from None
        except line.TROUBLE as error:
            if not completion.finished:
                raise line.trouble(error) from None
        if not completion.finished:
            if not completion.events:
                raise self._not_a_stream(response, "no event stream")
            raise ModelError(
                f"the stream of {self._ref} ended before the reply did",
                kind="transport",
                request_id=request_id(response.headers),
            )
        if not content.is_eof():
            await self._end(content, line)
            if not content.is_eof():
                response.close()
        return completion.reply(self._name, request_id(response.headers))

    async def _end(self, content: aiohttp.StreamReader, line: Line) -> None:
        """Waits a moment for the end of a stream that has said its last word."""
        try:
            async with asyncio.timeout(END_WAIT_S):
                while await content.readany():
                    pass
        except line.TROUBLE:
            pass

    async def _whole(self, content: aiohttp.StreamReader, data: bytes) -> bytes:
        """The rest of an answer that is no stream."""
        pieces = [data]
        size = len(data)
        while data := await content.readany():
            pieces.append(data)
            size += len(data)
            if size > EVENT_BYTES_MAX:
                raise EventTooLarge
        return b"".join(pieces)

    async def _refusal(self, response: aiohttp.ClientResponse, line: Line) -> ModelError:
        """What an answer with another status than 200 says, read within bounds."""
        status = response.status
        if 300 <= status < 400:
            target = response.headers.get("location", "").partition("?")[0]
            return self._failure(
                Answer(f"a redirect to {target}" if target else "a redirect"),
                response,
                status=status,
                hint=self._endpoint.check,
            )
        body = b""
        try:
            async with asyncio.timeout(ERROR_READ_S):
                while len(body) < ERROR_BYTES_MAX and (data := await response.content.readany()):
                    body += data
        except line.TROUBLE:
            pass
        if not response.content.is_eof():
            response.close()
        if body.lstrip().startswith(b"<"):
            answer = Answer("a page of HTML")
        else:
            try:
                answer = read_error(msgspec.json.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError):
                answer = Answer(body.decode(errors="replace") or None)
        hint = f"check the model's name, and {self._endpoint.check}" if status == 404 else None
        return self._failure(answer, response, status=status, hint=hint)

    def _failure(
        self,
        answer: Answer,
        response: aiohttp.ClientResponse,
        *,
        status: int | None,
        hint: str | None = None,
    ) -> ModelError:
        return failure(
            self._ref,
            answer,
            status=status,
            retry_after_ms=retry_after_ms(response.headers, self._clock.now_ms()),
            request_id=request_id(response.headers),
            key_variable=self._endpoint.key_variable,
            hint=hint,
            secrets=self._endpoint.secrets,
        )

    def _not_a_stream(self, response: aiohttp.ClientResponse, what: str) -> ModelError:
        return ModelError(
            f"{self._endpoint.shown} answered with {what} instead of a completion",
            kind="bad_request" if what == "a page of HTML" else "server",
            status=response.status,
            request_id=request_id(response.headers),
            hint=self._endpoint.check,
        )
