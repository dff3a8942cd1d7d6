"""The tool that fetches a page of the public web.

Only http and https, only public addresses (`postroom.tools.address`). A name is resolved once a
hop, every address it gives is checked, and the connection goes to one of those: a name that
resolves to something else a moment later gains nothing. Each redirect is a new hop with the same
checks. No proxy, no cookies, no credentials. The body is bounded after it is unpacked.
"""

# ruff: noqa: D417  (a tool's docstring speaks to the model, which has no context to pass)

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import re
import socket
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from postroom.errors import ToolFailure
from postroom.ports.tool import Tool, ToolContext, ToolOutput
from postroom.tools.address import Network, is_reachable, parse_address
from postroom.tools.content import HEAD_BYTES, TEXT, is_shown, media_type, shown_media
from postroom.tools.environment import scrubbed
from postroom.tools.function import tool
from postroom.tools.offload import in_thread
from postroom.tools.process import run

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from aiohttp.abc import AbstractResolver, ResolveResult
    from yarl import URL

REDIRECTS_MAX = 5
BODY_BYTES_MAX = 5 * 1024 * 1024
FETCH_MS_MAX = 30_000
READ_MS_MAX = 10_000
URL_CHARS_MAX = 4_000

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_META_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([\w-]{1,40})""", re.IGNORECASE)
# Codecs of the language, not of the web; some take quadratic time.
_NO_CHARSETS = frozenset({"idna", "punycode", "raw_unicode_escape", "unicode_escape", "utf-7"})
_PAGE_READER = Path(__file__).with_name("page.py")

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a host as the system resolves them."""
    found = await in_thread(
        lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), name="resolve"
    )
    return [str(entry[4][0]) for entry in found]


def web_tools(
    *,
    resolver: Resolver = resolve,
    allow_private: Sequence[str] = (),
    fetch_ms_max: int = FETCH_MS_MAX,
) -> tuple[Tool, ...]:
    """`web_fetch`.

    ``resolver(host, port)`` gives the addresses of a name. ``allow_private`` are networks
    (``10.1.0.0/16``) that may be reached though they are not public.
    """
    reach = _Reach(resolver, tuple(ipaddress.ip_network(network) for network in allow_private))

    @tool(effects="outside", timeout_ms=fetch_ms_max + READ_MS_MAX + 10_000)
    async def web_fetch(ctx: ToolContext, url: str) -> ToolOutput:
        """Fetches a page of the public web and answers with it as readable text.

        An image or a PDF is shown to you. Addresses of private networks are refused.

        Args:
            url: The address, with http:// or https://.
        """
        page = await _fetch(url, reach, fetch_ms_max)
        return await _output(page, ctx)

    return (web_fetch,)


class _Page(msgspec.Struct):
    """What came back. ``cut``: the body was longer than is kept."""

    url: str
    status: int
    declared: str
    charset: str
    body: bytes
    cut: bool


class _Reach:
    """Who may be connected to, decided where a name becomes addresses."""

    def __init__(self, resolver: Resolver, allowed: Sequence[Network]) -> None:
        self._resolver = resolver
        self._allowed = allowed

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """Every address of the host, all of them checked.

        Raises:
            ToolFailure: it has none, or one that may not be reached.
        """
        literal = parse_address(host)
        try:
            found = [host] if literal is not None else list(await self._resolver(host, port))
        except (OSError, UnicodeError) as error:
            raise ToolFailure(f"the name {host} cannot be resolved: {error}") from error
        if not found:
            raise ToolFailure(f"the name {host} has no address")
        for text in found:
            address = parse_address(text)
            if address is None or not is_reachable(address, self._allowed):
                raise ToolFailure(
                    f"{host} is at {text}, which is not an address of the public internet",
                    hint="only public addresses can be fetched",
                )
        return tuple(dict.fromkeys(found))


async def _fetch(text: str, reach: _Reach, limit_ms: int) -> _Page:
    import aiohttp

    url = _parsed(text)
    try:
        async with asyncio.timeout(limit_ms / 1000):
            for _ in range(REDIRECTS_MAX + 1):
                answer = await _hop(url, reach)
                if isinstance(answer, _Page):
                    return answer
                url = answer
    except TimeoutError as error:
        raise ToolFailure(f"{text} did not answer in {limit_ms / 1000:g} s") from error
    except (aiohttp.ClientError, OSError, zlib.error) as error:
        raise ToolFailure(f"{url} cannot be fetched: {_reason(error)}") from error
    raise ToolFailure(f"{text} redirects more than {REDIRECTS_MAX} times")


async def _hop(url: URL, reach: _Reach) -> _Page | URL:
    """One request: the page, or where it sends us."""
    import aiohttp

    assert url.host is not None
    assert url.port is not None
    addresses = await reach.addresses(url.host, url.port)
    connector = aiohttp.TCPConnector(
        resolver=_pinned(addresses),
        use_dns_cache=False,
        force_close=True,
        socket_factory=_only_to(addresses),
    )
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"User-Agent": "postroom", "Accept-Encoding": "gzip, deflate", "Accept": "*/*"},
    )
    async with session, session.get(url, allow_redirects=False) as response:
        target = response.headers.get("Location")
        if response.status in _REDIRECTS and target:
            return _parsed(target, base=url)
        body, cut = await _body(response)
        declared = response.content_type.lower()
        return _Page(str(url), response.status, declared, response.charset or "", body, cut)


def _parsed(text: str, *, base: URL | None = None) -> URL:
    from yarl import URL

    if len(text) > URL_CHARS_MAX:
        raise ToolFailure(f"the URL has more than {URL_CHARS_MAX} characters")
    try:
        url = URL(text.strip())
        url = base.join(url) if base is not None else url
        url = url.with_fragment(None)
        host, port = url.host, url.port
    except (ValueError, TypeError) as error:
        raise ToolFailure(f"{text[:200]!r} is not a URL: {error}") from error
    if url.scheme not in ("http", "https"):
        raise ToolFailure(f"{text[:200]!r}: only http:// and https:// can be fetched")
    if not host or not port:
        raise ToolFailure(f"{text[:200]!r} names no host")
    if url.user is not None or url.password is not None:
        raise ToolFailure("a URL with a user name or password in it is not fetched")
    return url


def _pinned(addresses: Sequence[str]) -> AbstractResolver:
    """A resolver that knows the checked addresses and nothing else."""
    from aiohttp.abc import AbstractResolver

    class Pinned(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return [
                {
                    "hostname": host,
                    "host": address,
                    "port": port,
                    "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                    "proto": 0,
                    "flags": socket.AI_NUMERICHOST,
                }
                for address in addresses
            ]

        async def close(self) -> None:
            pass

    return Pinned()


AddressInfo: TypeAlias = (
    "tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[object, ...]]"
)


def _only_to(addresses: Sequence[str]) -> Callable[[AddressInfo], socket.socket]:
    """Makes the sockets, and is the last to see where they will be connected to."""

    def make(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, place = info
        if str(place[0]) not in addresses:
            raise OSError(f"{place[0]} is not an address that was checked")
        return socket.socket(family, kind, protocol)

    return make


async def _body(response: ClientResponse) -> tuple[bytes, bool]:
    """The body, unpacked, as much as is kept; whether there was more."""
    body = bytearray()
    async for part in _unpacked(response):
        body += part
        if len(body) > BODY_BYTES_MAX:
            return bytes(body[:BODY_BYTES_MAX]), True
    return bytes(body), False


async def _unpacked(response: ClientResponse) -> AsyncIterator[bytes]:
    """The body in parts, none larger than is kept, however well it was packed."""
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        async for chunk in response.content.iter_chunked(64 * 1024):
            yield chunk
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise ToolFailure(f"the page is packed in a way that was not asked for: {coding[:40]}")
    unpacker = None
    async for chunk in response.content.iter_chunked(64 * 1024):
        if unpacker is None:
            # "deflate" means the zlib format, and some servers send the bare one.
            bare = coding == "deflate" and chunk[0] & 0x0F != 8
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
        while chunk and not unpacker.eof:
            yield unpacker.decompress(chunk, BODY_BYTES_MAX)
            chunk = unpacker.unconsumed_tail


async def _output(page: _Page, ctx: ToolContext) -> ToolOutput:
    kind = media_type(page.body[:HEAD_BYTES])
    is_html = page.declared in ("text/html", "application/xhtml+xml")
    if kind != TEXT and page.charset and (is_html or page.declared.startswith("text/")):
        kind = TEXT  # text in another encoding, and it says which
    failed = page.status >= 400
    head = f"[{page.url}: HTTP {page.status}, {page.declared}]"
    if page.cut:
        head += f"\n[only the first {BODY_BYTES_MAX} bytes were read]"
    if kind == TEXT:
        text = _decoded(page)
        if is_html:
            text = await _readable(text)
        return ToolOutput(f"{head}\n\n{text}", is_error=failed)
    if failed or page.cut:
        raise ToolFailure(f"{head} {kind}: not text, and not kept")
    artifact = await ctx.artifacts.put(page.body)
    if is_shown(kind):
        name = page.url.partition("?")[0].rpartition("/")[2] or None
        return ToolOutput(head, media=(shown_media(artifact, kind, len(page.body), name),))
    return ToolOutput(f"{head}\n{kind}, {len(page.body)} bytes, kept as artifact {artifact}")


def _decoded(page: _Page) -> str:
    name = page.charset
    if not name and (declared := _META_CHARSET.search(page.body, 0, HEAD_BYTES)):
        name = declared[1].decode()
    try:
        codec = codecs.lookup(name or "utf-8").name
        if codec in _NO_CHARSETS:
            codec = "utf-8"
        return page.body.decode(codec, "replace")
    except (LookupError, ValueError):
        return page.body.decode("utf-8", "replace")


async def _readable(html: str) -> str:
    """The page's text; the page as it stands if reading it takes too long."""
    out = bytearray()
    if sys.executable:
        ended = await run(
            [sys.executable, "-I", "-S", str(_PAGE_READER)],
            cwd=None,
            env=scrubbed(),
            sink=out.extend,
            limit_ms=READ_MS_MAX,
            stdin=html.encode("utf-8", "replace"),
            grace_ms=0,
        )
        if ended.code == 0 and not ended.timed_out:
            return out.decode("utf-8", "replace")
    return html


def _reason(error: Exception) -> str:
    return str(error)[:300] or type(error).__name__
