"""The HTTP under an adapter: one client for all models of an event loop, and its errors as ours.

Imports aiohttp, which takes a fifth of a second: adapters import this module with their first
request, not before. The client keeps connections but no cookies, follows no redirect, and its
only time limits are those for connecting and for silence.
"""

from __future__ import annotations

import asyncio
import ssl
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.payload import BytesPayload, Payload
from multidict import CIMultiDict
from yarl import URL

from postroom import __version__
from postroom.errors import ModelError, ModelErrorKind
from postroom.models.endpoint import Endpoint

CONNECTIONS_MAX = 1_000
CONNECT_TIMEOUT_S = 30
KEEP_ALIVE_S = 30
HEADER_BYTES_MAX = 64 * 1024


class _Body(BytesPayload):
    """Bytes of any size, without the library's warning about large ones.

    They exist as a whole anyway, and the transport sends what the socket takes.
    """

    def __init__(self, value: bytes) -> None:
        Payload.__init__(self, value, content_type="application/json")
        self._size = len(value)


class _Shared:
    def __init__(self) -> None:
        self.users = 0
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS_MAX, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=60
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
        )


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


class Line:
    """One adapter's way to its endpoint, on the running loop's client.

    ``session`` is a client to use and leave open (None: the loop's own, closed by whoever
    closes its line last).
    """

    # What aiohttp raises while it connects, sends and reads; a TimeoutError is an OSError.
    TROUBLE = (aiohttp.ClientError, HttpProcessingError, OSError)

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        ref: str,
        idle_timeout_ms: int,
        proxy: str | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.ref = ref
        self.endpoint = endpoint
        self._idle_timeout_ms = idle_timeout_ms
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_ms / 1000
        )
        self._url = URL(endpoint.url)
        self._headers = CIMultiDict(
            {
                "Accept": "text/event-stream, application/json",
                # A compressed stream is held back until a block is full.
                "Accept-Encoding": "identity",
                "Content-Type": "application/json",
                "User-Agent": f"postroom/{__version__}",
            }
        )
        if endpoint.authorization is not None:
            self._headers["Authorization"] = endpoint.authorization
        self._proxy, self._proxy_headers = _proxy(proxy)
        if self._proxy_headers is not None and self._url.scheme == "http":
            # No tunnel: the proxy reads the request itself.
            self._headers.update(self._proxy_headers)
        self._owned = session is None
        self._session = session or self._acquire()

    async def post(self, body: bytes) -> aiohttp.ClientResponse:
        """Sends one request; the answer's headers have come, its body has not.

        Raises `TROUBLE`.
        """
        return await self._session.post(
            self._url,
            data=_Body(body),
            headers=self._headers,
            allow_redirects=False,
            timeout=self._timeout,
            proxy=self._proxy,
            proxy_headers=self._proxy_headers,
        )

    async def aclose(self) -> None:
        shared = _shared.get(self.loop)
        if not self._owned or shared is None or shared.session is not self._session:
            return
        self._owned = False
        shared.users -= 1
        if shared.users == 0:
            del _shared[self.loop]
            await shared.session.close()

    def _acquire(self) -> aiohttp.ClientSession:
        shared = _shared.get(self.loop)
        if shared is None or shared.session.closed:
            shared = _shared[self.loop] = _Shared()
        shared.users += 1
        return shared.session

    def trouble(self, error: BaseException) -> ModelError:
        """A failure below HTTP's answers, as ours: no connection, or one that broke."""
        endpoint = self.endpoint
        kind: ModelErrorKind = "transport"
        hint: str | None = None
        match error:
            case aiohttp.ClientHttpProxyError():
                text = f"the proxy on the way to {endpoint.shown} answered {error.status}"
                hint = "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
                kind = "auth" if error.status == 407 else "transport"
            case aiohttp.ClientProxyConnectionError():
                text = f"cannot connect to the proxy on the way to {endpoint.shown}"
                hint = "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
            case aiohttp.ClientConnectorDNSError():
                text = f"cannot find the host {endpoint.host}"
                hint = f"{endpoint.check} and the network"
            case aiohttp.ClientSSLError() | ssl.SSLError():
                text = f"no secure connection to {endpoint.shown}: {_tls_reason(error)}"
                hint = f"{endpoint.check}, this machine's clock and its certificates"
            case aiohttp.ConnectionTimeoutError():
                text = f"no connection to {endpoint.shown} within {CONNECT_TIMEOUT_S} s"
                kind, hint = "timeout", f"{endpoint.check} and the network"
            case TimeoutError():
                seconds = self._idle_timeout_ms / 1000
                kind, text = "timeout", f"{self.ref} sent nothing for {seconds:g} s"
            case aiohttp.ClientConnectorError():
                text = f"cannot connect to {endpoint.shown}: {_connect_reason(error)}"
                hint = f"is the server running? if it is, {endpoint.check}"
            case aiohttp.ServerDisconnectedError():
                text = f"{self.ref} closed the connection without an answer"
            case aiohttp.ClientResponseError() | HttpProcessingError():
                text = f"{endpoint.shown} answered with something that is not HTTP"
                hint = endpoint.check
            case _:
                text = f"the connection to {self.ref} broke"
        return ModelError(text, kind=kind, hint=hint)


def _proxy(proxy: str | None) -> tuple[URL | None, CIMultiDict[str] | None]:
    """A proxy's URL without its user and password, and the header that stands for them."""
    if proxy is None:
        return None, None
    url = URL(proxy)
    if url.user is None:
        return url, None
    login = aiohttp.encode_basic_auth(url.user, url.password or "")
    return url.with_user(None), CIMultiDict({"Proxy-Authorization": login})


def _connect_reason(error: aiohttp.ClientConnectorError) -> str:
    # Several addresses tried come as one error without a number, but with all their texts.
    if isinstance(error.os_error, ConnectionRefusedError) or "refused" in str(error.os_error):
        return "nothing listens there"
    return (error.os_error.strerror or "the connection was closed").lower()


def _tls_reason(error: BaseException) -> str:
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    reason = getattr(inner, "verify_message", None) or getattr(inner, "reason", None)
    return str(reason or "the handshake failed").replace("_", " ").lower()
