"""`web_fetch`: what may be reached, how much of it, and how a page reads.

The pages come from a real server on the loopback, which the tests allow by hand; everything else
stays as refused as it is for an operator who allows nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from aiohttp import web

import postroom.tools.web
from postroom.domain.message import File, Image
from postroom.errors import ToolFailure
from postroom.ports.tool import ToolContext, ToolOutput
from postroom.tools import bound_output, web_tools
from postroom.tools.address import is_reachable, parse_address
from postroom.tools.page import readable
from tests.contract.tool_context import call, context
from tests.support import bounded

LOOPBACK = ("127.0.0.1/32",)
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 100


class Site:
    """A server on the loopback whose pages a test sets; it counts the requests for each."""

    def __init__(self) -> None:
        self.pages: dict[str, Callable[[web.Request], web.StreamResponse]] = {}
        self.slow: set[str] = set()
        self.requests: list[web.Request] = []
        self.port = 0
        self.closing = asyncio.Event()

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def page(self, path: str, body: str | bytes, kind: str = "text/html", **more: object) -> None:
        data = body.encode() if isinstance(body, str) else body
        headers = {"Content-Type": kind, **{k.replace("_", "-"): str(v) for k, v in more.items()}}
        self.pages[path] = lambda _: web.Response(body=data, headers=headers)

    def redirect(self, path: str, target: str, status: int = 302) -> None:
        self.pages[path] = lambda _: web.Response(status=status, headers={"Location": target})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        if request.path in self.slow:
            await self.closing.wait()
        make = self.pages.get(request.path)
        return make(request) if make else web.Response(status=404, text="not here")


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    made.port = runner.addresses[0][1]
    yield made
    made.closing.set()
    await runner.cleanup()


class Names:
    """A resolver that a test fills. It gives a name's answers one after the other."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): given for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        given = self.answers[host]
        return given.pop(0) if len(given) > 1 else given[0]


async def fetch(
    url: str, *, ctx: ToolContext | None = None, names: Names | None = None, **settings: object
) -> ToolOutput:
    tools = web_tools(
        **({"resolver": names} if names else {}),  # type: ignore[arg-type]
        **{"allow_private": LOOPBACK, **settings},  # type: ignore[arg-type]
    )
    return await call(tools, "web_fetch", ctx or context(), url=url)


# Which addresses


PRIVATE = [
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1"),
    *("127.255.255.254", "168.63.129.16", "169.254.169.254", "172.16.0.1"),
    *("172.31.255.255", "192.0.0.192", "192.168.1.1", "198.18.0.1"),
    *("203.0.113.5", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("::ffff:169.254.169.254", "::127.0.0.1", "fe80::1", "fe80::1%eth0"),
    *("fc00::1", "fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1"),
    *("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:7f00:1::"),
    *("2001:db8::1", "3fff::1"),
]
PUBLIC = ["8.8.8.8", "93.184.215.14", "172.32.0.1", "2606:4700::1", "::ffff:8.8.8.8"]


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize("text", PRIVATE)
def test_an_address_that_is_not_public_is_not_reachable(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert not is_reachable(address)


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_reachable(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert is_reachable(address)


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "localhost"),
        *("127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0"),
    ],
)
async def test_no_spelling_of_a_private_address_is_fetched(site: Site, host: str) -> None:
    with pytest.raises(ToolFailure, match=r"not an address of the public|cannot be resolved"):
        await fetch(site.url(host=host), allow_private=())
    assert site.requests == []


@pytest.mark.contract("ART-02")
async def test_one_private_address_among_public_ones_is_enough_to_refuse(site: Site) -> None:
    names = Names(site_test=[["93.184.215.14", "10.0.0.1"]])
    with pytest.raises(ToolFailure, match=r"site\.test is at 10\.0\.0\.1"):
        await fetch(site.url(host="site.test"), names=names)


@pytest.mark.contract("ART-02")
async def test_a_name_is_resolved_once_and_connected_to_where_it_was_checked(site: Site) -> None:
    # A second look would give another, private address: nobody takes it.
    site.page("/", "hello")
    names = Names(site_test=[["127.0.0.1"], ["127.0.0.2"], ["10.0.0.1"]])
    output = await fetch(site.url(host="site.test"), names=names)
    assert output.text.endswith("\n\nhello")
    assert names.asked == ["site.test"]
    assert site.requests[0].headers["Host"] == f"site.test:{site.port}"


@pytest.mark.contract("ART-02")
async def test_a_connection_to_an_address_that_was_not_checked_is_not_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last look is at the socket: here the resolution behind it is made to lie.
    pinned = postroom.tools.web._pinned
    monkeypatch.setattr(postroom.tools.web, "_pinned", lambda _: pinned(["127.0.0.1"]))
    with pytest.raises(ToolFailure, match=r"site\.test:\d+/ cannot be fetched"):
        await fetch(site.url(host="site.test"), names=Names(site_test=[["93.184.215.14"]]))
    assert site.requests == []


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://127.0.0.2:{port}/", "127.0.0.2, which is not an address of the public"),
        ("http://169.254.169.254/latest/meta-data", "not an address of the public"),
        ("http://inner.test:{port}/", "inner.test is at 10.0.0.7"),
        ("//127.0.0.2:{port}/", "not an address of the public"),
        ("file:///etc/passwd", "only http:// and https://"),
        ("http://user:pass@127.0.0.1:{port}/", "user name or password"),
    ],
)
async def test_a_redirect_is_checked_like_the_first_address(
    site: Site, target: str, reason: str
) -> None:
    site.redirect("/", target.format(port=site.port))
    names = Names(inner_test=[["10.0.0.7"]])
    with pytest.raises(ToolFailure) as caught:
        await fetch(site.url(), names=names)
    assert reason in str(caught.value)
    assert len(site.requests) == 1


async def test_redirects_are_followed_up_to_five(site: Site) -> None:
    for n in range(6):
        site.redirect(f"/{n}", f"/{n + 1}#part", status=(301, 302, 303, 307, 308, 302)[n])
    site.page("/6", "arrived")
    assert (await fetch(site.url("/1"))).text == (
        f"[{site.url('/6')}: HTTP 200, text/html]\n\narrived"
    )
    with pytest.raises(ToolFailure, match="redirects more than 5 times"):
        await fetch(site.url("/0"))


@pytest.mark.parametrize(
    "url",
    [
        *("", "no url", "ftp://host/x", "file:///etc/passwd", "javascript:alert(1)", "http://"),
        *("http:///path", "http://user:pass@host/", "http://host:99999/", "//host/x"),
        "http://host/" + "x" * 5_000,
    ],
)
async def test_what_is_no_address_of_the_web_is_refused(url: str) -> None:
    with pytest.raises(ToolFailure):
        await fetch(url, names=Names(host=[["127.0.0.1"]]))


async def test_a_name_that_nobody_knows_is_told() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    with pytest.raises(ToolFailure, match=r"nowhere\.test cannot be resolved: Name or service"):
        await call(web_tools(resolver=unknown), "web_fetch", context(), url="http://nowhere.test/")
    with pytest.raises(ToolFailure, match="has no address"):
        await fetch("http://empty.test/", names=Names(empty_test=[[]]))


async def test_a_server_that_refuses_the_connection_is_told(unused_tcp_port: int) -> None:
    with pytest.raises(ToolFailure, match="cannot be fetched"):
        await fetch(f"http://127.0.0.1:{unused_tcp_port}/")


async def test_proxies_and_credentials_of_the_environment_are_not_used(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    site.page("/", "direct", Set_Cookie="a=b")
    site.redirect("/first", "/")
    await fetch(site.url("/first"))
    assert [dict(r.headers).keys() & {"Cookie", "Authorization"} for r in site.requests] == [
        set(), set(),
    ]  # fmt: skip


# How much and how long


async def test_a_body_over_the_limit_is_cut_and_the_rest_not_read(site: Site) -> None:
    site.page("/", "y" * 8 * 1024 * 1024, "text/plain")
    output = await fetch(site.url())
    assert "[only the first 5242880 bytes were read]" in output.text
    assert len(output.text) < 5242880 + 1_000
    ctx = context()
    (block,) = await bound_output(output, ctx.artifacts)
    assert len(block.text.encode()) <= 32 * 1024  # type: ignore[union-attr]


async def test_a_body_is_bounded_after_it_is_unpacked(site: Site) -> None:
    # 50 MB of nothing in 50 KB.
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(1024 * 1024)) for _ in range(50)) + packer.flush()
    site.page("/", bomb, "text/plain", Content_Encoding="gzip")
    tracemalloc.start()
    try:
        with pytest.raises(ToolFailure, match="only the first 5242880 bytes were read"):
            await fetch(site.url())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 1024 * 1024


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("coding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", bare_deflate)],
)
async def test_packed_pages_are_unpacked(
    site: Site, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    site.page("/", pack(b"packed text " * 10_000), "text/plain", Content_Encoding=coding)
    assert (await fetch(site.url())).text.endswith("\n\n" + "packed text " * 10_000)


async def test_damaged_packing_and_packing_that_nobody_asked_for_are_told(site: Site) -> None:
    site.page("/bad", b"\x1f\x8bnot gzip at all", "text/plain", Content_Encoding="gzip")
    with pytest.raises(ToolFailure, match="cannot be fetched"):
        await fetch(site.url("/bad"))
    site.page("/other", b"...", "text/plain", Content_Encoding="br")
    with pytest.raises(ToolFailure, match="not asked for: br"):
        await fetch(site.url("/other"))


async def test_a_server_that_never_answers_is_given_up(site: Site) -> None:
    site.slow.add("/")
    with pytest.raises(ToolFailure, match=r"did not answer in 0\.2 s"):
        await fetch(site.url(), fetch_ms_max=200)


async def test_cancelling_a_fetch_closes_its_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        fetching = asyncio.ensure_future(fetch(f"http://127.0.0.1:{port}/"))
        await bounded(asked.wait())
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(fetching)
        await bounded(closed.wait())


# What comes back


async def test_an_error_page_is_an_error_with_its_text(site: Site) -> None:
    output = await fetch(site.url("/missing"))
    assert output.is_error
    assert output.text == f"[{site.url('/missing')}: HTTP 404, text/plain]\n\nnot here"


async def test_a_page_made_to_take_for_ever_comes_as_it_stands(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parser needs quadratic time for comments that never end: minutes for this one.
    monkeypatch.setattr("postroom.tools.web.READ_MS_MAX", 200)
    hostile = "<!--" * 200_000
    site.page("/", hostile)
    assert (await fetch(site.url())).text.endswith("\n\n" + hostile)


async def test_json_and_text_come_as_they_are(site: Site) -> None:
    site.page("/a.json", '{"a": [1, 2]}', "application/json")
    assert (await fetch(site.url("/a.json"))).text.endswith('\n\n{"a": [1, 2]}')


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html; charset=iso-8859-1", "<p>café</p>".encode("iso-8859-1")),
        ("text/html", '<meta charset="windows-1252"><p>café</p>'.encode("cp1252")),
        ("text/html; charset=utf-16", "<p>café</p>".encode("utf-16")),
        ("text/html; charset=no-such-thing", "<p>café</p>".encode()),
        ("text/html; charset=punycode", "<p>café</p>".encode()),
    ],
)
async def test_a_page_is_read_in_its_own_encoding(site: Site, kind: str, body: bytes) -> None:
    site.page("/", body, kind)
    assert (await fetch(site.url())).text.endswith("\n\ncafé")


async def test_pictures_and_pdfs_are_shown_and_known_by_their_content(site: Site) -> None:
    site.page("/dir/a.png?x", PNG, "text/plain")
    site.page("/dir/a.png", PNG, "text/plain")
    ctx = context()
    output = await fetch(site.url("/dir/a.png?size=1"), ctx=ctx)
    (block,) = output.media
    assert isinstance(block, Image)
    assert (block.media_type, block.size, block.name) == ("image/png", len(PNG), "a.png")
    assert await ctx.artifacts.get(block.artifact) == PNG
    site.page("/paper", b"%PDF-1.7\n", "application/pdf")
    assert isinstance((await fetch(site.url("/paper"))).media[0], File)


async def test_another_binary_is_kept_as_an_artifact(site: Site) -> None:
    site.page("/a.bin", bytes(range(256)), "application/octet-stream")
    ctx = context()
    output = await fetch(site.url("/a.bin"), ctx=ctx)
    artifact = "sha256:" + output.text.partition("artifact sha256:")[2]
    assert await ctx.artifacts.get(artifact) == bytes(range(256))


def test_a_page_becomes_text_to_read() -> None:
    html = """<!doctype html><html><head><title>The  title</title><style>p {}</style></head><body>
    <script>var x = "<p>not this</p>";</script><noscript>nor this</noscript>
    <h1>Heading</h1><p>Some <b>bold</b>
       text &amp; more.<br>A line.</p>
    <ul><li>one</li><li><a href="/two">two</a></li></ul>
    <pre>kept   as
      it is</pre>
    <img alt="a picture"><table><tr><th>a</th><td>b</td></tr></table>
    <a href="#top">up</a></body></html>"""
    assert readable(html) == (
        "The title\n\n# Heading\n\nSome bold text & more.\nA line.\n\n- one\n- [two](/two)\n\n"
        "```\nkept   as\n      it is\n```\n\n[image: a picture]\n\n | a | b\n\nup"
    )


@pytest.mark.parametrize("html", ["", "<", "</p>", "<p", "<title>no end<p>text", "&#x110000;"])
def test_a_broken_page_is_read_as_far_as_it_goes(html: str) -> None:
    assert isinstance(readable(html), str)
