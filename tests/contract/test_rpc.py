"""Framing and correlation: whatever comes, it is answered or ignored, and the next frame is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.errors import Disconnected
from postroom.wire.protocol import CODES, INVALID_REQUEST, PARSE_ERROR, ErrorData
from postroom.wire.rpc import (
    Handler,
    Lines,
    Malformed,
    Request,
    Response,
    RpcError,
    StreamLink,
    Unfit,
    Wire,
    error_frame,
    parse,
    request_frame,
    result_frame,
)
from tests.support import bounded

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": JSON,
        "method": st.text() | JSON,
        "params": JSON,
        "result": JSON,
        "error": JSON
        | st.fixed_dictionaries({"code": JSON, "message": JSON}, optional={"data": JSON}),
    },
)


# ---- lines ----


def lines_of(chunks: Sequence[bytes], limit: int = 1000) -> list[bytes | Unfit]:
    lines = Lines(limit)
    out = [line for chunk in chunks for line in lines.feed(chunk)]
    return out + lines.end()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({min(p, len(data)) for p in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


@given(st.lists(st.text().map(str.encode)), st.lists(st.integers(0, 300)))
def test_lines_are_the_same_however_the_stream_is_cut(
    texts: list[bytes], places: list[int]
) -> None:
    data = b"\n".join(texts)
    wanted = [line.strip() for line in data.split(b"\n") if line.strip()]
    assert lines_of(cut(data, places)) == wanted


@pytest.mark.contract("PRO-07")
def test_a_character_split_over_chunks_arrives_whole() -> None:
    text = 'é€𝄞 "\u2028" ünï'
    data = request_frame(1, "say", json.dumps(text, ensure_ascii=False).encode()) + b"\n"
    (line,) = lines_of([bytes([byte]) for byte in data])
    assert isinstance(line, bytes)
    said = parse(line)
    assert isinstance(said, Request)
    assert json.loads(said.params) == text


@given(st.lists(st.integers(0, 40)), st.integers(11, 40))
def test_a_line_over_the_limit_is_refused_once_and_the_next_is_read(
    places: list[int], size: int
) -> None:
    data = b"x" * size + b"\nok\n"
    large, after = lines_of(cut(data, places), limit=10)
    assert isinstance(large, Unfit)
    assert large.data.code == "frame_too_large"
    assert after == b"ok"


@pytest.mark.contract("PRO-07")
def test_fifty_megabytes_without_a_newline_cost_no_more_than_the_limit() -> None:
    lines = Lines(1024 * 1024)
    chunk = b"x" * 65536
    tracemalloc.start()
    try:
        refused = [line for _ in range(800) for line in lines.feed(chunk)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(refused) == 1
    assert peak < 4 * 1024 * 1024
    assert lines.feed(b"\nok\n") == [b"ok"]


# ---- frames ----


@pytest.mark.contract("PRO-04")
@given(st.binary())
@example(b"\xff\xfe")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"jsonrpc":"2.0","id":1e999,"method":"x"}')
@example(b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"x"}')
@example(b'{"jsonrpc":"2.0","method":"\\ud800"}')
def test_no_bytes_make_parsing_fail(data: bytes) -> None:
    assert isinstance(parse(data), Request | Response | Malformed)


@given(NEARLY | JSON)
def test_what_is_nearly_a_frame_is_understood_or_refused_with_its_id(value: Any) -> None:
    said = parse(json.dumps(value).encode())
    if isinstance(said, Malformed):
        assert said.error.number in (PARSE_ERROR, INVALID_REQUEST)
        error_frame(said.id, said.error.number, said.error.message, said.error.data)
    elif isinstance(said, Request):
        assert value["method"] == said.method
        assert said.id is None or value["id"] == said.id
    else:
        assert value["id"] == said.id


@pytest.mark.parametrize(
    ("frame", "code", "number", "name"),
    [
        (b"{", "parse_error", PARSE_ERROR, None),
        (b'"\xff"', "parse_error", PARSE_ERROR, None),
        (b"[]", "invalid_request", INVALID_REQUEST, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"x"}]', "invalid_request", INVALID_REQUEST, None),
        (b"3", "invalid_request", INVALID_REQUEST, None),
        (b'{"id":7,"method":"x"}', "invalid_request", INVALID_REQUEST, 7),
        (b'{"jsonrpc":"1.0","id":"a","method":"x"}', "invalid_request", INVALID_REQUEST, "a"),
        (b'{"jsonrpc":"2.0","id":7,"method":3}', "invalid_request", INVALID_REQUEST, 7),
        (b'{"jsonrpc":"2.0","id":null,"method":"x"}', "invalid_request", INVALID_REQUEST, None),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', "invalid_request", INVALID_REQUEST, None),
        (b'{"jsonrpc":"2.0","id":7}', "invalid_request", INVALID_REQUEST, 7),
    ],
)
def test_a_malformed_frame_is_told_what_is_wrong_with_it(
    frame: bytes, code: str, number: int, name: object
) -> None:
    said = parse(frame)
    assert isinstance(said, Malformed)
    assert (said.error.data.code, said.error.number, said.id) == (code, number, name)


def test_a_batch_is_refused_by_name() -> None:
    said = parse(b' [{"jsonrpc":"2.0","id":1,"method":"x"}]')
    assert isinstance(said, Malformed)
    assert "batch" in said.error.message


# ---- both ways ----


async def echo(method: str, params: bytes) -> bytes:
    return msgspec.json.encode([method, msgspec.Raw(params or b"null")])


class Pair:
    """A wire on one end of a socket pair, and the bare other end."""

    def __init__(
        self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.wire = wire
        self.reader = reader
        self.writer = writer
        self._rest = b""
        self.serving = asyncio.ensure_future(wire.serve())

    def say(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frame + b"\n" for frame in frames))

    async def _line(self) -> bytes:
        """Reads past what the stream's buffer holds."""
        while b"\n" not in self._rest and (chunk := await self.reader.read(65536)):
            self._rest += chunk
        line, newline, self._rest = self._rest.partition(b"\n")
        return line + newline

    async def hear(self) -> Any:
        line = await bounded(self._line())
        assert line.endswith(b"\n"), "the other side has ended"
        return json.loads(line)


@contextlib.asynccontextmanager
async def paired(
    handler: Handler = echo, *, small: bool = False, **more: Any
) -> AsyncGenerator[Pair]:
    here, there = socket.socketpair()
    if small:
        for one in (here, there):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link = StreamLink(
        *await asyncio.open_connection(sock=here),
        frame_bytes_max=more.get("frame_bytes_max", 1_000_000),
    )
    reader, writer = await asyncio.open_connection(
        sock=there, limit=2048 if small else 64 * 1024 * 1024
    )
    pair = Pair(Wire(link, handler, **more), reader, writer)
    try:
        yield pair
    finally:
        await bounded(pair.wire.aclose(flush_s=0.1))
        await bounded(pair.serving)
        writer.close()


@pytest.mark.contract("PRO-04")
@given(st.lists(st.binary() | NEARLY.map(lambda v: json.dumps(v).encode()), max_size=5))
def test_after_any_noise_the_connection_is_usable(noise: list[bytes]) -> None:
    async def main() -> None:
        async with paired() as pair:
            pair.say(*noise, request_frame("the end", "ping", b"{}"))
            while (said := await pair.hear()).get("id") != "the end":
                assert "error" in said or "result" in said
            assert said["result"] == ["ping", {}]

    asyncio.run(main())


@pytest.mark.contract("PRO-07")
async def test_a_frame_over_the_limit_is_refused_and_the_next_is_answered() -> None:
    async with paired(frame_bytes_max=1000) as pair:
        pair.say(b"[" + b"1," * 5_000_000 + b"1]", request_frame(1, "ping", b"{}"))
        refused = await pair.hear()
        assert refused["error"]["code"] == CODES["frame_too_large"]
        assert refused["id"] is None
        assert (await pair.hear())["result"] == ["ping", {}]


async def test_an_answer_over_the_limit_is_an_error_of_that_request() -> None:
    async def much(method: str, params: bytes) -> bytes:
        return b'"' + b"x" * 5000 + b'"'

    async with paired(much, frame_bytes_max=1000) as pair:
        pair.say(request_frame(1, "ping", b"{}"))
        said = await pair.hear()
        assert (said["id"], said["error"]["code"]) == (1, CODES["frame_too_large"])


@pytest.mark.contract("PRO-07")
async def test_answers_come_when_they_are_ready_and_name_their_request() -> None:
    second = asyncio.Event()

    async def waits(method: str, params: bytes) -> bytes:
        if method == "first":
            await second.wait()
        else:
            second.set()
        return await echo(method, params)

    async with paired(waits) as pair:
        pair.say(request_frame("a", "first", b"1"), request_frame("b", "second", b"2"))
        assert [(await pair.hear())["id"] for _ in range(2)] == ["b", "a"]


async def test_requests_go_both_ways_at_once_and_find_their_answers() -> None:
    async with paired() as pair:
        one = asyncio.ensure_future(pair.wire.request("one", b"1"))
        two = asyncio.ensure_future(pair.wire.request("two", b"2"))
        asked = [await pair.hear() for _ in range(2)]
        pair.say(
            request_frame(asked[0]["id"], "mine", b"{}"),  # the same id, the other way
            result_frame(asked[1]["id"], b'"second"'),
            result_frame(999, b'"nobody asked"'),
            result_frame("text", b'"nobody asked"'),
            error_frame(asked[0]["id"], -31010, "no", ErrorData("unknown_session")),
        )
        assert (await pair.hear())["result"] == ["mine", {}]
        assert await bounded(two) == b'"second"'
        with pytest.raises(RpcError) as caught:
            await bounded(one)
        assert (caught.value.number, caught.value.data.code) == (-31010, "unknown_session")


async def test_a_notification_is_never_answered_and_a_failure_is_told_without_its_text() -> None:
    async def fails(method: str, params: bytes) -> bytes:
        raise ValueError("a secret")

    async with paired(fails) as pair:
        pair.say(b'{"jsonrpc":"2.0","method":"note"}', request_frame(1, "ping", b"{}"))
        said = await pair.hear()
        assert said["id"] == 1
        assert said["error"]["data"]["code"] == "internal_error"
        assert "secret" not in json.dumps(said)


async def test_a_result_with_line_breaks_leaves_as_one_line() -> None:
    async def pretty(method: str, params: bytes) -> bytes:
        return b'{\n "a": [\r\n1]\n}'

    async with paired(pretty) as pair:
        pair.say(request_frame(1, "ping", b"{}"))
        assert (await pair.hear())["result"] == {"a": [1]}


@pytest.mark.contract("PRO-08")
async def test_who_ends_its_input_still_gets_its_answers() -> None:
    go = asyncio.Event()

    async def waits(method: str, params: bytes) -> bytes:
        await go.wait()
        return await echo(method, params)

    async with paired(waits) as pair:
        pair.say(request_frame(1, "slow", b"{}"))
        pair.writer.write(request_frame(2, "last", b"{}"))  # no newline ends it
        pair.writer.write_eof()
        asking = asyncio.ensure_future(pair.wire.request("you?", b"{}"))
        assert (await pair.hear())["method"] == "you?"
        with pytest.raises(Disconnected):
            await bounded(asking)
        with pytest.raises(Disconnected):
            await pair.wire.request("and now?", b"{}")
        go.set()
        assert {(await pair.hear())["id"] for _ in range(2)} == {1, 2}
        await bounded(pair.serving)


@pytest.mark.contract("PRO-08")
async def test_what_was_begun_for_a_client_that_is_gone_is_finished() -> None:
    begun, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def waits(method: str, params: bytes) -> bytes:
        begun.set()
        await go.wait()
        done.set()
        return b"{}"

    async with paired(waits) as pair:
        pair.say(request_frame(1, "slow", b"{}"))
        await bounded(begun.wait())
        asking = asyncio.ensure_future(pair.wire.request("you?", b"{}"))
        await pair.hear()
        pair.writer.close()
        with pytest.raises(Disconnected):
            await bounded(asking)
        go.set()
        await bounded(pair.serving)
        assert done.is_set()


@pytest.mark.contract("PRO-06")
async def test_who_does_not_read_is_not_read_from_and_costs_a_bounded_queue() -> None:
    answered = 0

    async def much(method: str, params: bytes) -> bytes:
        nonlocal answered
        answered += 1
        return b'"' + b"x" * 1000 + b'"'

    async with paired(much, small=True, queue_bytes_high=10_000) as pair:
        sent = 2000
        pair.say(*[request_frame(n, "ping", b"{}") for n in range(sent)])

        async def pressed() -> None:
            while not pair.wire.pressed:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0)

        await bounded(pressed())
        for _ in range(1000):
            await asyncio.sleep(0)
        assert answered < sent
        assert pair.wire.queued_bytes < 10_000 + 40 * 1100
        got = [(await pair.hear())["id"] for _ in range(sent)]
        assert sorted(got) == list(range(sent))


async def test_what_never_began_to_leave_is_withdrawn_and_said_to_be_so() -> None:
    async with paired(small=True) as pair:
        pair.wire.notify("large", b'"' + b"x" * 1_000_000 + b'"')
        await asyncio.sleep(0)
        assert await bounded(pair.wire.notify_surely("late", b"1", within_s=0)) == "not_written"
        await pair.hear()
        pair.wire.notify("after", b"1")
        assert (await pair.hear())["method"] == "after"
        assert await bounded(pair.wire.notify_surely("now", b"1", within_s=5)) == "written"
        assert (await pair.hear())["method"] == "now"


async def test_what_was_leaving_when_the_other_side_went_is_in_doubt_and_what_follows_is_not() -> (
    None
):
    async with paired(small=True) as pair:
        large = b'"' + b"x" * 5_000_000 + b'"'
        leaving = asyncio.ensure_future(pair.wire.notify_surely("large", large, within_s=10))
        await pair.reader.read(100)  # some of it has left
        waiting = asyncio.ensure_future(pair.wire.notify_surely("late", b"1", within_s=10))
        await asyncio.sleep(0)
        pair.writer.transport.abort()
        assert await bounded(leaving) == "unsure"
        assert await bounded(waiting) == "not_written"
        assert await pair.wire.notify_surely("gone", b"1", within_s=10) == "not_written"
