"""The webhook channel: one endpoint that posts messages to us, and to which we post ours.

Both ways are JSON over HTTP, signed as Standard Webhooks (`postroom.channels.signing`). What may be
posted is in `postroom.channels.webhook_event`, what we post in `postroom.channels.webhook_message`,
and what the end of such a post means in `postroom.channels.webhook_call`. The channel opens no port: whoever has an HTTP server mounts its
`routes`, and ``POST /webhook/<name>`` is answered while `run` runs.

Inbound, in this order: the size and the kind are refused before a byte of the body is read; the
body is read within bounds; the signature is checked on its raw bytes; only then is it parsed.

========  ====================================================================================
200       on disk; ``outcome`` is the sink's word, also ``duplicate`` for an id that came before
400       signed, but no event: kept in quarantine first, so that it is not lost; a sender that
          repeats it gets the same answer
401       not signed, not with our key, or not now; which of them is not said
408       the body did not come in time
413       too large
415       not JSON, or packed
503       not committed: come again, with the same ``webhook-id``
========  ====================================================================================

Outbound, the part's key is the ``webhook-id`` of every attempt, and the body is the same each time.
The protocol has no way to ask after a message. Only where the endpoint's owner has promised to take
a repeat for the same message (``repeats_window_s``) may a part in doubt be repeated, within half of
that time; `reconcile` does it. It says `Absent` only where the repeat was refused for its content
(`_CONTENT_REFUSED`): by the promise it would have been taken if the first had been. Any other
refusal is about the moment, and tells nothing about the first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from postroom.channels.signing import SigningKey, signed, verified
from postroom.channels.webhook_call import Answer, Line
from postroom.channels.webhook_event import read_event
from postroom.channels.webhook_message import write_message
from postroom.domain.conversation import ConversationKey, parse_conversation_key
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    SendOutcome,
    Sent,
    Verdict,
)
from postroom.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ConfigError,
    InputError,
    InvalidContent,
    PostroomError,
    StoreError,
)
from postroom.ports.artifact import ArtifactStore
from postroom.ports.channel import Accepted, OutPart, Profile, Sink
from postroom.ports.clock import Clock, SystemClock

log = logging.getLogger("postroom.channel")

SEND_TIMEOUT_MS = 30_000
SETTLE_MS = 30_000
READ_TIMEOUT_S = 10
RETRY_AFTER_S = 5

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_CONTENT_REFUSED = frozenset({400, 413, 415, 422})


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint's configuration.

    ``name`` is the channel's and stands in the path. ``keys`` all sign, and any of them is believed:
    more than one is a rotation. ``url`` is where our messages go (None: nowhere); the operator wrote
    it, so it may be a private address. ``repeats_window_s``: for how long its owner has promised to
    take a repeat with the same ``webhook-id`` for the same message (0: no promise). ``text_max`` is
    the longest text of one part, in bytes of UTF-8. ``body_bytes_max`` bounds what may be posted
    here, ``media_bytes_max`` one file either way. ``reference_header`` is a header of its answers
    that names its own id of the message (None: only ``id`` in the body does).

    Raises:
        ConfigError: the name, the URL or a number cannot be used, or there is no key.
    """

    name: str
    keys: tuple[SigningKey, ...]
    url: str | None = None
    repeats_window_s: int = 0
    text_max: int = 16_384
    body_bytes_max: int = 1024 * 1024
    media_bytes_max: int = 5 * 1024 * 1024
    reference_header: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ConfigError(
                "the name of a webhook endpoint cannot be used",
                hint="1 to 64 letters, digits, dots, underscores or hyphens",
            )
        if not self.keys:
            raise ConfigError(f"the webhook endpoint {self.name} has no secret")
        if self.url is not None and not _is_usable(self.url):
            # The URL itself is not shown: it may hold a token.
            raise ConfigError(
                f"the URL of the webhook endpoint {self.name} cannot be used",
                hint="http:// or https:// and a host, without a user, a password or a fragment",
            )
        if self.repeats_window_s < 0 or min(self.text_max, self.body_bytes_max) < 1:
            raise ConfigError(f"a number of the webhook endpoint {self.name} is too small")

    def __repr__(self) -> str:
        return f"Endpoint(name={self.name!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("name", self.name)]


class WebhookChannel:
    """The channel of one endpoint.

    ``artifacts`` keeps the files that are posted and gives those we send (None: files are taken and
    sent as a line that describes them). ``send_timeout_ms`` bounds one attempt.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        clock: Clock | None = None,
        artifacts: ArtifactStore | None = None,
        send_timeout_ms: int = SEND_TIMEOUT_MS,
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock or SystemClock()
        self._artifacts = artifacts
        self._sink: Sink | None = None
        self._line: Line | None = None
        self._closed = False
        window_ms = endpoint.repeats_window_s * 1000 if endpoint.url is not None else 0
        self._profile = Profile(
            text_max=endpoint.text_max,
            unit="utf8",
            reconciles=window_ms > 0,
            repeat_window_ms=window_ms,
            settle_ms=SETTLE_MS,
            send_timeout_ms=send_timeout_ms,
        )

    @property
    def name(self) -> str:
        return self._endpoint.name

    @property
    def profile(self) -> Profile:
        return self._profile

    def routes(self) -> list[web.RouteDef]:
        """What an HTTP server mounts: ``application.add_routes(channel.routes())``."""
        path = f"/webhook/{self.name}"
        return [web.post(path, self._receive, expect_handler=self._expect)]

    async def run(self, sink: Sink) -> None:
        """Gives what is posted to ``sink`` until it is cancelled."""
        self._sink = sink
        try:
            await asyncio.Event().wait()
        finally:
            if self._sink is sink:
                self._sink = None

    async def send(self, part: OutPart) -> SendOutcome:
        return (await self._attempt(part)).outcome

    async def reconcile(self, part: OutPart) -> Verdict:
        """Repeats the part, where the endpoint's promise covers it."""
        window_ms = self._profile.repeat_window_ms
        if not window_ms:
            return CannotTell("the endpoint has promised nothing about repeats")
        first = part.first_attempt_at
        # A clock that was set back proves nothing about how long ago the first attempt was.
        if first is None or not 0 <= self._clock.now_ms() - first < window_ms // 2:
            return CannotTell("the time for a safe repeat is over")
        answer = await self._attempt(part)
        match answer.outcome:
            case Sent(reference):
                return Found(reference)
            case Refused() if answer.status in _CONTENT_REFUSED:
                return Absent()
            case other:
                return CannotTell(other.reason)

    async def typing(self, conversation: ConversationKey) -> None:
        """There is nobody to show it to."""

    async def aclose(self) -> None:
        self._closed = True
        if self._line is not None:
            line, self._line = self._line, None
            await line.aclose()

    # ---- inbound ----

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """A sender that asks first is told before it sends anything."""
        refusal = self._unreadable(request)
        asks = request.headers.get("Expect", "").lower() == "100-continue"
        if refusal is None and asks and request.version >= HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # as the library's own handler: this was no answer
        return refusal

    async def _receive(self, request: web.Request) -> web.Response:
        refusal = self._unreadable(request)
        if refusal is not None:
            return refusal
        body = await _read(request, self._endpoint.body_bytes_max)
        if isinstance(body, web.Response):
            return body
        id_ = verified(self._endpoint.keys, request.headers, body, self._clock.now_ms())
        if id_ is None:
            return _error(401, "unauthorized", "the request is not signed as it must be")
        sink = self._sink
        if sink is None:
            return _come_again()
        try:
            return await self._hand_over(sink, id_, body)
        except Exception as error:  # whatever went wrong, the sender must not believe it is kept
            code = error.code if isinstance(error, PostroomError) else type(error).__name__
            log.warning("webhook %s: an event was not taken: %s", self.name, code)
            return _come_again()

    async def _hand_over(self, sink: Sink, id_: str, body: bytes) -> web.Response:
        try:
            inbound = await read_event(
                body,
                id_,
                self.name,
                artifacts=self._artifacts,
                media_bytes_max=self._endpoint.media_bytes_max,
            )
            accepted = await sink(inbound)
        except InvalidContent as error:
            await sink.quarantine(self.name, id_, body, str(error))
            return _error(400, error.code, str(error), path=error.path)
        return _answer(accepted)

    def _unreadable(self, request: web.Request) -> web.Response | None:
        """What is refused by its headers alone."""
        if (request.content_length or 0) > self._endpoint.body_bytes_max:
            return _too_large(self._endpoint.body_bytes_max)
        if request.content_type != "application/json":
            return _error(415, "unsupported", "the body must be application/json", close=True)
        # The signature is over the bytes as they were sent, which the server would unpack.
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return _error(415, "unsupported", "the body must not be packed", close=True)
        return None

    # ---- outbound ----

    async def _attempt(self, part: OutPart) -> Answer:
        url = self._endpoint.url
        if url is None:
            return Answer(Refused("the endpoint takes no messages: it has no URL"))
        conversation = self._own_id(part.conversation)
        if conversation is None:
            return Answer(Refused("the conversation is not this endpoint's"))
        try:
            body, note = await write_message(
                part,
                conversation,
                artifacts=self._artifacts,
                media_bytes_max=self._endpoint.media_bytes_max,
            )
        except (ArtifactMissing, ArtifactCorrupt):
            return Answer(Refused("the file is not in the artifact store"))
        except StoreError as error:
            return Answer(NotStarted(f"the file could not be read: {error.code}"))
        if self._closed:
            return Answer(NotStarted("the channel is closed"))
        if self._line is None:
            self._line = Line(timeout_ms=self._profile.send_timeout_ms)
        now_ms = self._clock.now_ms()
        answer = await self._line.post(
            url,
            body,
            signed(self._endpoint.keys, part.key, now_ms, body),
            now_ms=now_ms,
            reference_header=self._endpoint.reference_header,
        )
        match answer.outcome:
            case Sent(reference):
                return Answer(Sent(reference, note), answer.status)
            case _:
                return answer

    def _own_id(self, key: ConversationKey | None) -> str | None:
        """The id that the endpoint itself gave the conversation; None: it is not the endpoint's."""
        if key is None:
            return None
        try:
            named = parse_conversation_key(key)
        except InputError:
            return None
        if (named.platform, named.scope, named.ids[0]) != ("webhook", "source", self.name):
            return None
        return named.ids[1]


class _Taken(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    outcome: str
    session_id: str | None = None
    message_id: str | None = None


class _Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    code: str
    message: str
    path: str | None = None


async def _read(request: web.Request, bytes_max: int) -> bytes | web.Response:
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > bytes_max:
                    return _too_large(bytes_max)
    except TimeoutError:
        return _error(408, "timeout", "the body did not come in time", close=True)
    except (aiohttp.ClientError, HttpProcessingError, OSError):
        return _error(400, "incomplete", "the body broke off", close=True)
    return bytes(body)


def _answer(accepted: Accepted) -> web.Response:
    taken = _Taken(accepted.outcome, accepted.session_id, accepted.message_id)
    return _json(200, msgspec.json.encode(taken))


def _come_again() -> web.Response:
    response = _error(503, "unavailable", "the event was not taken; send it again")
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _too_large(bytes_max: int) -> web.Response:
    return _error(413, "too_large", f"the limit is {bytes_max} bytes", close=True)


def _error(
    status: int, code: str, message: str, *, path: str | None = None, close: bool = False
) -> web.Response:
    response = _json(status, msgspec.json.encode({"error": _Fault(code, message, path)}))
    if close:
        response.force_close()  # the rest of the body is not waited for
    return response


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")


def _is_usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc
        and not parts.fragment
        and url.isprintable()
        and " " not in url
    )
