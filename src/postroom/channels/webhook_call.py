"""One signed POST to an endpoint, and what its end says about whether the message was taken.

One request is one attempt. The library repeats only requests of idempotent methods, and a POST is
none; besides, every attempt has a connection of its own, so that there is no kept-alive one that
could turn out to be dead with the request half written. Redirects are not followed, proxies of the
environment are not used.

What an end means depends on where it came. Until the library says that it begins to write the
request, nothing has left: `NotStarted`. After that only an answer's status decides:

======================  ==========================================================================
2xx                     taken, whatever becomes of the answer's body
429, 503 and a time     `RetryAfter`: the receiver says that it did not take it
408, 425, 429           `Refused`, for now: it says so too, but no time
303, 5xx                `Uncertain`: 303 answers what was handled, and behind a 5xx the message may
                        have been handled before, or by whom the gateway asked
other 3xx, 4xx          `Refused` for good
no answer               `Uncertain`
======================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.payload import BytesPayload, Payload
from yarl import URL

from postroom.domain.outbox import (
    NotStarted,
    Refused,
    RetryAfter,
    SendOutcome,
    Sent,
    Uncertain,
)

CONNECT_TIMEOUT_S = 10
BODY_TIMEOUT_S = 5
BODY_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 100
RETRY_AFTER_MIN_MS = 1_000  # "0" must not become a loop that no attempt is charged for
REFERENCE_CHARS_MAX = 256

_SECONDS = re.compile(r"[0-9]{1,9}\Z")
# What the library raises while it connects, sends and reads; a TimeoutError is an OSError.
_TROUBLE = (aiohttp.ClientError, HttpProcessingError, OSError)


class Answer(msgspec.Struct, frozen=True):
    """``status`` None: there was no answer."""

    outcome: SendOutcome
    status: int | None = None


class _Body(BytesPayload):
    """Bytes of any size, without the library's warning about large ones."""

    def __init__(self, value: bytes) -> None:
        Payload.__init__(self, value, content_type="application/json")
        self._size = len(value)


class Line:
    """The way to endpoints from the running event loop. ``timeout_ms`` bounds a whole call."""

    def __init__(self, *, timeout_ms: int) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_beginning)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=CONNECTIONS_MAX),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_ms / 1000, connect=CONNECT_TIMEOUT_S),
            trace_configs=[trace],
            auto_decompress=False,
        )

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        now_ms: int,
        reference_header: str | None = None,
    ) -> Answer:
        """Makes one attempt. ``reference_header`` is where the endpoint may name its own id of the
        message, if not in the answer's ``id``.
        """
        attempt = _Attempt()
        try:
            response = await self._session.post(
                URL(url),
                data=_Body(body),
                headers={
                    **headers,
                    "Content-Type": "application/json",
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                    "User-Agent": "postroom",
                },
                allow_redirects=False,
                trace_request_ctx=attempt,
            )
        except _TROUBLE as error:
            reason = _reason(error)
            return Answer(Uncertain(reason) if attempt.began else NotStarted(reason))
        try:
            status = response.status
            if not 200 <= status < 300:
                wait = _wait_ms(response.headers.get("Retry-After"), now_ms)
                return Answer(_refusal(status, wait), status)
            reference = await _reference(response, reference_header)
            return Answer(Sent(reference), status)
        finally:
            response.close()

    async def aclose(self) -> None:
        await self._session.close()


class _Attempt:
    """``began``: from here on bytes of the request may have left this machine."""

    def __init__(self) -> None:
        self.began = False


async def _note_beginning(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    # Called just before the first byte is given to the connection.
    attempt: _Attempt = context.trace_request_ctx
    attempt.began = True


def _refusal(status: int, wait_ms: int | None) -> SendOutcome:
    reason = f"the endpoint answered {status}"
    if status in (429, 503) and wait_ms is not None:
        return RetryAfter(wait_ms, f"{reason} and asks to wait")
    if status in (408, 425, 429):
        return Refused(reason, retryable=True)
    if status == 303 or status >= 500 or status < 200:
        return Uncertain(reason)
    if status < 400:
        return Refused(f"{reason}, a redirect, which is not followed")
    return Refused(reason)


def _wait_ms(text: str | None, now_ms: int) -> int | None:
    """A ``Retry-After`` of seconds or of a date, in ms from now; None: there is none to be read."""
    if text is None:
        return None
    text = text.strip()
    if _SECONDS.match(text):
        return max(int(text) * 1000, RETRY_AFTER_MIN_MS)
    try:
        moment = parsedate_to_datetime(text)
        return max(int(moment.timestamp() * 1000) - now_ms, RETRY_AFTER_MIN_MS)
    except (ValueError, OverflowError):
        return None


async def _reference(response: aiohttp.ClientResponse, header: str | None) -> str | None:
    """The endpoint's own id of the message. The message is taken by now: nothing here may fail."""
    given = response.headers.get(header) if header is not None else None
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    return _bounded(given)
    except _TROUBLE:
        return _bounded(given)
    try:
        answer: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _bounded(given)
    found: Any = answer.get("id") if isinstance(answer, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(found, int) and not isinstance(found, bool):
        found = str(found)
    return _bounded(found if isinstance(found, str) else given)


def _bounded(text: str | None) -> str | None:
    return text if text and len(text) <= REFERENCE_CHARS_MAX else None


def _reason(error: BaseException) -> str:
    """Why there was no answer. Names no address: an endpoint's URL may hold a token."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "the endpoint's host cannot be found"
        case aiohttp.ClientSSLError():
            return "no secure connection to the endpoint"
        case aiohttp.ConnectionTimeoutError():
            return f"no connection to the endpoint within {CONNECT_TIMEOUT_S} s"
        case TimeoutError():
            return "the endpoint did not answer in time"
        case aiohttp.ClientConnectorError():
            return "no connection to the endpoint"
        case aiohttp.ServerDisconnectedError():
            return "the endpoint closed the connection without an answer"
        case aiohttp.ClientResponseError() | HttpProcessingError():
            return "the endpoint answered with something that is not HTTP"
        case _:
            return "the connection to the endpoint broke"
