"""The OpenAI-compatible adapter against a server that does everything servers have been seen to do."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import json
import socket
import ssl
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.http_exceptions
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params, ToolSpec
from postroom.domain.ids import CallId, SessionId
from postroom.domain.message import (
    Audio,
    Block,
    File,
    Image,
    Reasoning,
    Text,
    ToolCall,
    Usage,
    text_of,
)
from postroom.errors import RETRYABLE, ConfigError, ModelError, ModelErrorKind
from postroom.models import media, openai_compat
from postroom.models.chat import CHAT, DEEPSEEK, MISTRAL, OPENAI, Dialect
from postroom.models.endpoint import endpoint_of, proxy_for
from postroom.models.events import EventReader
from postroom.models.failures import cleaned, kind_of
from postroom.models.http import Line
from postroom.models.openai_compat import OpenAICompatModel
from postroom.ports.model import CallDelta, Delta, ModelRequest, Reply, TextDelta
from tests.servers.strict_chat import (
    DONE,
    USAGE,
    Answer,
    StrictChat,
    as_anthropic,
    call_piece,
    chunk,
    ending,
    event,
    refused,
    spoken,
    validate_anthropic,
    validate_openai,
)
from tests.support import bounded

KEY = "sk-strict-abcdefghijklmnop"
NOW_MS = 1_800_000_000_000


@pytest.fixture
async def server() -> AsyncIterator[StrictChat]:
    async with StrictChat() as server:
        yield server


class FixedClock:
    def now_ms(self) -> int:
        return NOW_MS

    def monotonic_ms(self) -> int:
        return 0

    async def sleep_ms(self, ms: float) -> None:
        raise AssertionError("nothing waits")

    def jitter(self) -> float:
        return 0


@pytest.fixture
async def model(server: StrictChat) -> AsyncIterator[OpenAICompatModel]:
    model = OpenAICompatModel(
        "openai:strict",
        server.url,
        KEY,
        "strict",
        base_url_variable="OPENAI_BASE_URL",
        key_variable="OPENAI_API_KEY",
        clock=FixedClock(),
    )
    yield model
    await bounded(model.aclose())
    await bounded(server.no_connection())
    assert server.violations == []


def user(*content: Block | str) -> ContextMessage:
    return ContextMessage("user", _blocks(content), 1)


def assistant(*content: Block | str) -> ContextMessage:
    return ContextMessage("assistant", _blocks(content), 2)


def result(call_id: str, *content: Block | str) -> ContextMessage:
    return ContextMessage("tool", _blocks(content), 3, CallId(call_id))


def _blocks(content: Sequence[Block | str]) -> tuple[Block, ...]:
    return tuple(Text(c) if isinstance(c, str) else c for c in content)


def request(*messages: ContextMessage, system: str = "", **fields: Any) -> ModelRequest:
    return ModelRequest(
        SessionId("session_x"),
        1,
        system,
        messages or (user("Hi"),),
        fields.get("tools", ()),
        fields.get("params", Params()),
        fields.get("media", {}),
    )


async def say(model: OpenAICompatModel, req: ModelRequest | None = None) -> Reply:
    return await bounded(model.respond(req or request(), lambda _: None))


async def fail(model: OpenAICompatModel) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await say(model)
    return caught.value


def offline(
    dialect: Dialect = CHAT, name: str = "m", accepts: frozenset[str] = frozenset()
) -> OpenAICompatModel:
    return OpenAICompatModel(
        f"x:{name}", "http://localhost:1/v1", None, name, dialect=dialect, accepts=accepts
    )


def rendered(req: ModelRequest, model: OpenAICompatModel | None = None) -> Any:
    body = json.loads((model or offline()).render(req))
    assert validate_openai(body["messages"]) == []
    assert validate_anthropic(as_anthropic(body["messages"])) == []
    return body


# ---- the body ----


def test_the_body_asks_for_a_stream_with_usage() -> None:
    body = rendered(request(user("Hi"), system="Be brief."))
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
    }


def test_without_a_system_text_there_is_no_system_message() -> None:
    messages = rendered(request(user("a"), assistant("b"), user("c")))["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


def test_parameters_are_sent_where_they_are_set() -> None:
    params = Params(max_tokens=100, temperature=0.5, reasoning_effort="low")
    body = rendered(request(params=params))
    assert (body["max_tokens"], body["temperature"], body["reasoning_effort"]) == (100, 0.5, "low")
    assert rendered(request(params=params), offline(OPENAI))["max_completion_tokens"] == 100


def test_tools_are_sent_with_their_schema_as_it_is_written() -> None:
    schema = b'{"type":"object","properties":{"b":{},"a":{}}}'
    tool = ToolSpec("look", 'Says "hm".', msgspec.Raw(schema))
    model = offline()
    assert schema in model.render(request(tools=(tool,)))
    (sent,) = rendered(request(tools=(tool,)))["tools"]
    assert sent["type"] == "function"
    assert sent["function"]["description"] == 'Says "hm".'


def test_consecutive_user_messages_stay_as_they_are() -> None:
    messages = rendered(request(user("one"), user("two")))["messages"]
    assert [m["content"] for m in messages] == ["one", "two"]


def test_text_blocks_become_one_text() -> None:
    messages = rendered(request(user("[from Ada]\n", "Hello", "there")))["messages"]
    assert messages == [{"role": "user", "content": "[from Ada]\nHello\nthere"}]


def test_calls_and_results_go_back_in_the_shape_they_came_in() -> None:
    call = ToolCall("call_1", "look", '{"at": "it"}')
    body = rendered(request(user("Hi"), assistant("Hm.", call), result("call_1", "a moon")))
    assert body["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Hm.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "it"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a moon"},
    ]


def test_a_result_without_text_says_so() -> None:
    call = ToolCall("call_1", "look", "{}")
    messages = rendered(request(user("Hi"), assistant(call), result("call_1")))["messages"]
    assert messages[1]["content"] is None
    assert messages[2]["content"] == "(no output)"


def test_reasoning_is_not_sent_back() -> None:
    body = rendered(request(user("a"), assistant(Reasoning("hm"), "b"), user("c")))
    assert "hm" not in json.dumps(body)


def test_a_message_that_was_only_reasoning_is_left_out() -> None:
    messages = rendered(request(user("a"), assistant(Reasoning("hm")), user("c")))["messages"]
    assert [m["role"] for m in messages] == ["user", "user"]
    first = rendered(request(assistant(Reasoning("hm")), user("c")))["messages"]
    assert [m["role"] for m in first] == ["user"]


def test_deepseek_gets_its_reasoning_back_and_an_empty_one_where_there_was_none() -> None:
    call = ToolCall("call_1", "look", "{}")
    again = ToolCall("call_2", "look", "{}")
    messages = rendered(
        request(
            user("a"),
            assistant(Reasoning("hm"), call),
            result("call_1", "x"),
            assistant(again),
            result("call_2", "y"),
        ),
        offline(DEEPSEEK),
    )["messages"]
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[3]["reasoning_content"] == ""


def test_mistral_gets_ids_of_nine_characters_and_no_field_it_does_not_know() -> None:
    call = ToolCall("call_0123456789", "look", "{}")
    kept = ToolCall("abcDEF123", "look", "{}")
    history = (
        user("a"),
        assistant(call, kept),
        result(call.call_id, "x"),
        result(kept.call_id, "y"),
    )
    body = rendered(request(*history), offline(MISTRAL))
    assert "stream_options" not in body
    ids = [sent["id"] for sent in body["messages"][1]["tool_calls"]]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert ids[1] == "abcDEF123"
    assert [m["tool_call_id"] for m in body["messages"][2:]] == ids


def test_an_id_no_provider_takes_is_replaced_by_the_same_one_everywhere() -> None:
    odd = "functions.look:0/" + "x" * 50
    messages = rendered(
        request(user("a"), assistant(ToolCall(odd, "look", "{}")), result(odd, "x"))
    )["messages"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] != odd


@pytest.mark.parametrize("broken", ['{"at": "th', "", "[1]", "nonsense", '"\ud800"'])
def test_arguments_that_are_no_object_are_wrapped_in_one(broken: str) -> None:
    call = ToolCall("call_1", "look", broken)
    messages = rendered(request(user("a"), assistant(call), result("call_1", "cut")))["messages"]
    arguments = json.loads(messages[1]["tool_calls"][0]["function"]["arguments"])
    assert list(arguments) == ["invalid_json"]


def test_half_a_surrogate_pair_does_not_break_a_request() -> None:
    messages = rendered(request(user("so \ud83d what"), system="\udc00"))["messages"]
    assert messages[1]["content"] == "so \ufffd what"


@pytest.mark.parametrize(
    ("name", "effort"),
    [("gpt-6-luna", "none"), ("gpt-5.6-sol", "none"), ("gpt-5.4", None), ("gpt-6.1-sol", None)],
)
def test_openai_models_that_need_it_get_effort_none_beside_tools(
    name: str, effort: str | None
) -> None:
    tool = ToolSpec("look", "", msgspec.Raw(b"{}"))
    model = offline(OPENAI, name)
    assert rendered(request(tools=(tool,)), model).get("reasoning_effort") == effort
    assert "reasoning_effort" not in rendered(request(), model)
    asked = request(tools=(tool,), params=Params(reasoning_effort="high"))
    assert rendered(asked, model)["reasoning_effort"] == "high"


def test_a_message_is_encoded_once_and_again_only_for_another_dialect() -> None:
    message = assistant(Reasoning("hm"), "b")
    req = request(user("a"), message, user("c"))
    model = offline()
    first = model.render(req)
    encoded = message.encoded
    assert encoded is not None
    assert offline().render(req) == first
    assert message.encoded is encoded
    offline(DEEPSEEK).render(req)
    assert message.encoded is not encoded
    assert model.render(req) == first


# ---- files ----

PNG = b"\x89PNG not really"
PICTURE = Image(artifact="sha256:a1", media_type="image/png", size=len(PNG), name="moon.png")
PDF = File(artifact="sha256:b2", media_type="application/pdf", size=4, name="a.pdf")
SOUND = Audio(artifact="sha256:c3", media_type="audio/mpeg", size=3)
SEES = frozenset({"image/png", "application/pdf", "audio/mpeg"})
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
BYTES = {"sha256:a1": PNG, "sha256:b2": b"%PDF", "sha256:c3": b"ID3"}


def test_files_that_the_model_takes_are_sent_as_such() -> None:
    req = request(user("See:", PICTURE, PDF, SOUND), media=BYTES)
    (message,) = rendered(req, offline(accepts=SEES))["messages"]
    pdf = "data:application/pdf;base64," + base64.b64encode(b"%PDF").decode()
    assert message["content"] == [
        {"type": "text", "text": "See:"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": pdf}},
        {"type": "input_audio", "input_audio": {"format": "mp3", "data": "SUQz"}},
    ]


@pytest.mark.parametrize(
    ("accepts", "given"), [(frozenset[str](), BYTES), (SEES, {})], ids=["not taken", "not there"]
)
def test_a_file_that_is_not_shown_is_named_in_a_line(
    accepts: frozenset[str], given: dict[str, bytes]
) -> None:
    req = request(user("See:", PICTURE), media=given)
    (message,) = rendered(req, offline(accepts=accepts))["messages"]
    assert message["content"] == "See:\n[image: moon.png, image/png, 15 bytes; not shown]"


def test_a_file_beside_one_that_is_not_shown_is_still_shown() -> None:
    req = request(user(PICTURE, PDF), media={"sha256:a1": PNG})
    (message,) = rendered(req, offline(accepts=SEES))["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert "a.pdf" in message["content"][1]["text"]


def test_files_of_results_follow_in_a_user_message_after_the_last_result() -> None:
    one, two = ToolCall("call_1", "look", "{}"), ToolCall("call_2", "look", "{}")
    other = Image(artifact="sha256:b2", media_type="image/png", size=4)
    req = request(
        user("Hi"),
        assistant(one, two),
        result("call_1", "the moon", PICTURE),
        result("call_2", other),
        assistant("Nice."),
        user("More?"),
        assistant(ToolCall("call_3", "look", "{}")),
        result("call_3", PICTURE),
        media=BYTES,
    )
    messages = rendered(req, offline(accepts=SEES))["messages"]
    roles = [m["role"] for m in messages]
    assert roles == [
        *("user", "assistant", "tool", "tool", "user", "assistant"),
        *("user", "assistant", "tool", "user"),
    ]
    assert messages[2]["content"] == "the moon\n[moon.png is shown below]"
    assert [part["type"] for part in messages[4]["content"]] == ["text", "image_url", "image_url"]
    assert messages[4]["content"][1]["image_url"]["url"] == URL
    assert messages[9]["content"][1]["image_url"]["url"] == URL


def test_base64_is_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "KEPT_BYTES_MAX", 120)
    names = [f"sha256:bound{i}" for i in range(20)]
    for name in names:
        assert media.base64_of(name, name.encode()) == base64.b64encode(name.encode())
    kept = [name for name in names if name in media._kept]
    assert 0 < len(kept) < 8
    assert sum(map(len, media._kept.values())) <= 120


# ---- the stream ----


async def test_headers_carry_the_key_and_the_request_id_comes_back(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    headers = {"content-type": "text/event-stream", "x-request-id": "req_7"}
    server.will(Answer(spoken("OK"), headers=headers))
    reply = await say(model)
    assert reply == Reply((Text("OK"),), "stop", Usage(12, 7, 5, 3), "strict-1", "req_7")
    (received,) = server.requests
    assert received.target == "/v1/chat/completions"
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.headers["content-type"] == "application/json"


async def test_without_an_id_of_the_request_the_one_of_the_stream_stands_in(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    assert (await say(model)).request_id == "chatcmpl-strict"


async def test_a_stream_split_at_every_byte_says_the_same(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    whole = b"".join(
        [
            chunk({"content": "Grüße, 🎈"}),
            chunk(call_piece(0, id="call_1", name="look", arguments='{"at":')),
            chunk(call_piece(0, arguments='"月"}')),
            *ending("tool_calls"),
        ]
    ).replace(b"\\u00fc", "ü".encode())
    server.will([whole[i : i + 1] for i in range(len(whole))])
    reply = await say(model)
    assert reply.content == (Text("Grüße, 🎈"), ToolCall("call_1", "look", '{"at":"月"}'))


def _crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def _cr(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r")


def _no_space(data: bytes) -> bytes:
    return data.replace(b"data: ", b"data:")


def _comments(data: bytes) -> bytes:
    return b": PROCESSING\n\n" + data.replace(b"data:", b": still here\nevent: x\nid: 1\ndata:")


def _no_last_line_break(data: bytes) -> bytes:
    return data.rstrip(b"\n")


def _no_done(data: bytes) -> bytes:
    return data.replace(DONE, b"")


def _two_lines(data: bytes) -> bytes:
    return data.replace(b', "choices"', b',\ndata: "choices"')


@pytest.mark.parametrize(
    "change", [_crlf, _cr, _no_space, _comments, _no_last_line_break, _no_done, _two_lines]
)
async def test_every_way_to_frame_a_stream_is_understood(
    server: StrictChat, model: OpenAICompatModel, change: Callable[[bytes], bytes]
) -> None:
    whole = change(b"".join(spoken("one ", "two")))
    assert whole != b"".join(spoken("one ", "two"))
    server.will([whole[at : at + 3] for at in range(0, len(whole), 3)])
    reply = await say(model)
    assert (text_of(reply.content), reply.usage.output_tokens) == ("one two", 7)


LINES = st.lists(st.text("ab:é🎈 ", max_size=3), min_size=1, max_size=3)


@given(
    st.lists(LINES, max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 150), max_size=12),
)
def test_events_are_the_same_wherever_the_bytes_are_split(
    events: list[list[str]], line_end: bytes, cuts: list[int]
) -> None:
    whole = b"".join(
        b"".join(b"data: " + line.encode() + line_end for line in lines) + line_end
        for lines in events
    )
    bounds = sorted({0, len(whole), *[min(cut, len(whole)) for cut in cuts]})
    reader = EventReader()
    read: list[bytes] = []
    for start, end in pairwise(bounds):
        read += reader.feed(whole[start:end])
    assert read + reader.close() == ["\n".join(lines).encode() for lines in events]


def test_a_line_break_split_in_two_ends_no_event() -> None:
    reader = EventReader()
    assert reader.feed(b"data: a\r") == []
    assert reader.feed(b"\n") == []
    assert reader.feed(b"data: b\r\n\r\n") == [b"a\nb"]


async def test_text_of_one_read_is_one_delta_and_order_is_kept(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    stream = [
        chunk({"content": "a"}) + chunk({"content": "b"}),
        chunk({"content": "c"}) + chunk(call_piece(0, id="call_1", name="look", arguments="{}")),
        *ending("tool_calls"),
    ]
    server.will(stream)
    deltas: list[Delta] = []
    await bounded(model.respond(request(), deltas.append))
    assert deltas == [TextDelta("ab"), TextDelta("c"), CallDelta("look")]


async def test_a_line_of_megabytes_is_read(server: StrictChat, model: OpenAICompatModel) -> None:
    text = "x" * 3_000_000
    server.will(spoken(text))
    assert text_of((await say(model)).content) == text


async def test_a_line_without_end_is_an_error_within_a_bound(
    server: StrictChat, model: OpenAICompatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.models.events.EVENT_BYTES_MAX", 1_000)
    server.will(Answer([b"data: "] + [b"x" * 100] * 20, end="hang"))
    error = await fail(model)
    assert error.kind == "server"
    await bounded(server.no_connection())


async def test_a_request_of_megabytes_arrives_whole(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    req = request(user("x" * 5_000_000))
    await say(model, req)
    assert server.requests[0].body == model.render(req)


FINISHES = [
    ("stop", "stop"),
    ("tool_calls", "stop"),
    ("function_call", "stop"),
    ("length", "length"),
    ("model_length", "length"),
    ("content_filter", "content_filter"),
    ("something_new", "stop"),
]


@pytest.mark.parametrize(("said", "meant"), FINISHES)
async def test_finish_reasons_by_every_name(
    server: StrictChat, model: OpenAICompatModel, said: str, meant: str
) -> None:
    server.will(spoken("x", finish=said))
    assert (await say(model)).finish == meant


@pytest.mark.parametrize("said", ["stop", "tool_calls", "function_call"])
async def test_calls_make_the_finish_reason_tool_calls(
    server: StrictChat, model: OpenAICompatModel, said: str
) -> None:
    piece = call_piece(0, id="call_1", name="look", arguments="{}")
    server.will([chunk(piece), *ending(said)])
    assert (await say(model)).finish == "tool_calls"


async def test_a_refusal_is_text_and_ends_the_reply_as_filtered(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    server.will([chunk({"refusal": "I will "}), chunk({"refusal": "not."}), *ending()])
    reply = await say(model)
    assert (reply.content, reply.finish) == ((Text("I will not."),), "content_filter")


CALLS: dict[str, tuple[list[dict[str, Any]], list[tuple[str | None, str, str]]]] = {
    "arguments in pieces, two calls interleaved": (
        [
            call_piece(0, id="a1", name="look", arguments=""),
            call_piece(1, id="b2", name="hear", arguments=""),
            call_piece(0, arguments='{"x"'),
            call_piece(1, arguments='{"y":2}'),
            call_piece(0, arguments=":1}"),
        ],
        [("a1", "look", '{"x":1}'), ("b2", "hear", '{"y":2}')],
    ),
    "no id": (
        [call_piece(0, name="look", arguments="{}")],
        [(None, "look", "{}")],
    ),
    "no arguments": ([call_piece(0, id="a1", name="look")], [("a1", "look", "{}")]),
    "arguments as an object": (
        [call_piece(0, id="a1", name="look", arguments={"x": 1})],
        [("a1", "look", '{"x":1}')],
    ),
    "no index": (
        [call_piece(None, id="a1", name="look", arguments="{"), call_piece(None, arguments="}")],
        [("a1", "look", "{}")],
    ),
    "no index, two calls": (
        [
            call_piece(None, id="a1", name="look", arguments="{}"),
            call_piece(None, id="b2", name="hear", arguments="{}"),
        ],
        [("a1", "look", "{}"), ("b2", "hear", "{}")],
    ),
    "index 0 for all": (
        [
            call_piece(0, id="a1", name="look", arguments="{}"),
            call_piece(0, id="b2", name="hear", arguments="{}"),
        ],
        [("a1", "look", "{}"), ("b2", "hear", "{}")],
    ),
    "id and name repeated": (
        [
            call_piece(0, id="a1", name="look", arguments="{"),
            call_piece(0, id="a1", name="look", arguments="}"),
        ],
        [("a1", "look", "{}")],
    ),
    "one id for two calls": (
        [
            call_piece(0, id="a1", name="look", arguments="{}"),
            call_piece(1, id="a1", name="look", arguments="{}"),
        ],
        [("a1", "look", "{}"), (None, "look", "{}")],
    ),
    "the old function_call": (
        [
            {"function_call": {"name": "look", "arguments": ""}},
            {"function_call": {"arguments": "{}"}},
        ],
        [(None, "look", "{}")],
    ),
    "an index as text": (
        [{"tool_calls": [{"index": "0", "id": "a1", "function": {"name": "look"}}]}],
        [("a1", "look", "{}")],
    ),
}


@pytest.mark.parametrize("case", CALLS)
async def test_calls_are_put_together_however_they_come(
    server: StrictChat, model: OpenAICompatModel, case: str
) -> None:
    pieces, expected = CALLS[case]
    server.will([*map(chunk, pieces), *ending("tool_calls")])
    deltas: list[Delta] = []
    reply = await bounded(model.respond(request(), deltas.append))
    calls = [block for block in reply.content if isinstance(block, ToolCall)]
    assert [(call.name, call.arguments) for call in calls] == [(n, a) for _, n, a in expected]
    for call, (call_id, _, _) in zip(calls, expected, strict=True):
        assert call.call_id == call_id if call_id else call.call_id.startswith("call_")
    assert len({call.call_id for call in calls}) == len(calls)
    assert deltas == [CallDelta(name) for _, name, _ in expected]


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
        {"content": [{"type": "thinking", "thinking": "hm"}]},
    ],
)
async def test_reasoning_by_every_name(
    server: StrictChat, model: OpenAICompatModel, delta: dict[str, object]
) -> None:
    server.will([chunk(delta), chunk({"content": "yes"}), *ending()])
    assert (await say(model)).content == (Reasoning("hm"), Text("yes"))


@pytest.mark.parametrize(
    ("usage", "meant"),
    [
        (USAGE, Usage(12, 7, 5, 3)),
        ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4}, Usage(9, 0, 4, 0)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9)),
        ({"prompt_tokens": None, "completion_tokens": 2}, Usage(0, 2)),
    ],
)
async def test_usage_by_every_name(
    server: StrictChat, model: OpenAICompatModel, usage: dict[str, object], meant: Usage
) -> None:
    server.will([chunk({"content": "x"}), chunk(finish="stop", usage=usage), DONE])
    assert (await say(model)).usage == meant


async def test_a_surrogate_pair_split_by_the_server_is_joined(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    halves = [b'{"choices":[{"delta":{"content":"a \\ud83c"}}]}']
    halves.append(b'{"choices":[{"delta":{"content":"\\udf88 b"}}]}')
    halves.append(b'{"choices":[{"delta":{"content":" \\udf88 c"}}]}')
    server.will([*[b"data: " + half + b"\n\n" for half in halves], *ending()])
    assert text_of((await say(model)).content) == "a 🎈 b \ufffd c"


async def test_a_whole_completion_instead_of_a_stream_is_taken(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    calls = [
        {"id": "a1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        {"id": "b2", "type": "function", "function": {"name": "hear", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": "Hm.", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    whole = json.dumps({"id": "x", "model": "m1", "choices": [choice], "usage": USAGE}, indent=1)
    server.will(Answer([whole[:40].encode(), whole[40:].encode()]))
    reply = await say(model)
    assert [type(block) for block in reply.content] == [Text, ToolCall, ToolCall]
    assert (reply.model, reply.usage.input_tokens) == ("m1", 12)


# ---- the connection ----


async def test_one_connection_serves_request_after_request(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    server.will(spoken("a"), refused(500, {"error": "no"}), spoken("b"))
    await say(model)
    await fail(model)
    await say(model)
    assert server.connected == 1


async def test_models_of_one_process_share_their_connections(server: StrictChat) -> None:
    one = OpenAICompatModel("x:one", server.url, None, "one")
    two = OpenAICompatModel("x:two", server.url, "k", "two")
    await say(one)
    await say(two)
    await bounded(one.aclose())
    await say(two)
    assert server.connected == 1
    assert "authorization" not in server.requests[0].headers
    await bounded(two.aclose())
    await bounded(server.no_connection())


async def test_a_given_client_is_used_and_left_open(server: StrictChat) -> None:
    async with aiohttp.ClientSession() as session:
        model = OpenAICompatModel("x:one", server.url, None, "one", session=session)
        await say(model)
        await model.aclose()
        assert not session.closed


async def test_a_closed_model_says_so() -> None:
    model = offline()
    await model.aclose()
    assert (await fail(model)).message == "x:m was closed"


async def test_a_server_that_keeps_the_line_open_after_its_last_word_holds_nothing_up(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    server.will(Answer(spoken("done"), end="hang after end"))
    assert text_of((await say(model)).content) == "done"
    await bounded(server.no_connection())


async def test_a_reply_that_was_finished_counts_though_the_connection_breaks_after_it(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    server.will(Answer([chunk({"content": "done"}), chunk(finish="stop")], end="drop"))
    assert text_of((await say(model)).content) == "done"


CUT: dict[str, list[bytes]] = {
    "in mid text": [chunk({"content": "so"})],
    "with a last word but no finish reason": [chunk({"content": "so"}), DONE],
    "in mid event": [chunk({"content": "so"}), chunk(finish="stop")[:30]],
}


@pytest.mark.parametrize("case", [*CUT])
@pytest.mark.parametrize("end", ["end", "drop"])
async def test_a_stream_without_a_finish_reason_is_no_reply(
    server: StrictChat, model: OpenAICompatModel, case: str, end: Any
) -> None:
    server.will(Answer(CUT[case], end=end))
    error = await fail(model)
    # Half an event at a proper end is nonsense, not a cut; both are tried again.
    nonsense = (case, end) == ("in mid event", "end")
    assert error.kind == ("server" if nonsense else "transport")
    assert error.retryable


async def test_cancelling_before_the_answer_begins_closes_the_connection(
    server: StrictChat, model: OpenAICompatModel
) -> None:
    answer = server.will(Answer([], end="hang"))
    task = asyncio.create_task(model.respond(request(), lambda _: None))
    await bounded(answer.started.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(task)
    await bounded(server.no_connection())
    assert text_of((await say(model)).content) == "OK"


# ---- failures ----


async def test_silence_is_a_timeout(server: StrictChat) -> None:
    model = OpenAICompatModel("x:slow", server.url, None, "slow", idle_timeout_ms=50)
    server.will(Answer([chunk({"content": "so"})], end="hang"), Answer(raw=b"", end="hang"))
    error = await fail(model)
    assert (error.kind, error.status) == ("timeout", None)
    assert error.message == "x:slow sent nothing for 0.05 s"
    await bounded(server.no_connection())
    await model.aclose()


async def test_comments_keep_a_slow_stream_alive(server: StrictChat) -> None:
    model = OpenAICompatModel("x:slow", server.url, None, "slow", idle_timeout_ms=60_000)
    server.will([b": wait\n\n"] * 5 + spoken("at last"))
    assert text_of((await say(model)).content) == "at last"
    await model.aclose()


async def test_a_refused_connection_names_the_address_and_what_to_check() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        url = f"http://user:hush@localhost:{port}/v1?token=hush"
        model = OpenAICompatModel("ollama:x", url, KEY, "x", base_url_variable="OLLAMA_BASE_URL")
        error = await fail(model)
    assert error.kind == "transport"
    assert error.message == f"cannot connect to http://localhost:{port}/v1: nothing listens there"
    assert "OLLAMA_BASE_URL" in (error.hint or "")
    assert "hush" not in "".join(traceback.format_exception(error))
    await model.aclose()


async def test_an_unknown_host_is_named() -> None:
    model = OpenAICompatModel(
        "x:y", "https://nowhere.invalid/v1", KEY, "y", base_url_variable="X_BASE_URL"
    )
    error = await fail(model)
    assert error.kind == "transport"
    assert error.message == "cannot find the host nowhere.invalid"
    assert "X_BASE_URL" in (error.hint or "")
    await model.aclose()


async def test_a_server_without_tls_is_told_apart() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    plain = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}/v1"
    model = OpenAICompatModel("x:y", url, KEY, "y")
    error = await fail(model)
    assert error.kind == "transport"
    assert error.message == f"no secure connection to {url}: wrong version number"
    await model.aclose()
    plain.close()


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """A server's side of TLS with a certificate that nobody has signed but itself."""
    made = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem"),
    ]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


async def test_a_certificate_nobody_vouches_for_is_told(certificate: ssl.SSLContext) -> None:
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0, ssl=certificate)
    port = server.sockets[0].getsockname()[1]
    model = OpenAICompatModel("x:y", f"https://localhost:{port}/v1", KEY, "y")
    error = await fail(model)
    assert "self-signed certificate" in error.message
    assert error.kind == "transport"
    await model.aclose()
    server.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
    ],
)
async def test_what_is_no_http_is_a_transport_error(
    server: StrictChat, model: OpenAICompatModel, raw: bytes
) -> None:
    server.will(Answer(raw=raw))
    error = await fail(model)
    assert (error.kind, error.status) == ("transport", None)


BODIES: list[tuple[str, bytes, ModelErrorKind, str]] = [
    ("html", b"\n<!doctype html><title>Sign in</title>", "bad_request", "a page of HTML"),
    ("text", b"upstream says hello", "server", "no event stream"),
    ("empty", b"", "server", "no event stream"),
    ("json", b'{"error": {"message": "no such model", "code": 404}}', "bad_request", "no such"),
    ("json of nothing", b'{"status": "ok"}', "transport", "ended before"),
    ("broken json", b'{"id": ', "server", "no chunk"),
    ("broken event", b"data: {nonsense\n\n", "server", "no chunk"),
    ("list", b"data: [1, 2]\n\n", "server", "no chunk"),
    ("bad utf-8", b'data: {"id": "\xff"}\n\n', "server", "no chunk"),
]


@pytest.mark.parametrize(
    ("body", "kind", "told"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES]
)
async def test_an_answer_that_is_no_stream_is_an_error_that_says_so(
    server: StrictChat, model: OpenAICompatModel, body: bytes, kind: ModelErrorKind, told: str
) -> None:
    server.will([body] if body else [])
    error = await fail(model)
    assert error.kind == kind
    assert told in error.message


IN_STREAM: list[tuple[dict[str, object], ModelErrorKind, str]] = [
    ({"error": {"message": "busy", "type": "server_error"}}, "server", "busy"),
    ({"error": {"message": "busy", "code": 502, "metadata": {"raw": "up"}}}, "server", "busy: up"),
    ({"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, "rate_limit", "slow"),
    ({"error": {"message": "slow down", "code": 429}}, "rate_limit", "slow"),
    ({"error": {"message": "pay", "code": "insufficient_quota"}}, "quota", "pay"),
    ({"error": {"message": "x", "type": "overloaded_error"}}, "server", "x"),
    ({"error": "it broke"}, "server", "it broke"),
    ({"object": "error", "message": "too big", "code": 400}, "bad_request", "too big"),
    ({"message": "unhappy"}, "server", "unhappy"),
    ({"detail": [{"msg": "bad"}]}, "server", "bad"),
    (
        {"choices": [{"delta": {}, "finish_reason": "error"}], "error": {"message": "m"}},
        "server",
        "",
    ),
    ({"choices": [{"delta": {}, "finish_reason": "error"}]}, "server", "broke the reply off"),
]


@pytest.mark.parametrize(("said", "kind", "told"), IN_STREAM)
async def test_an_error_inside_the_stream_is_an_error(
    server: StrictChat,
    model: OpenAICompatModel,
    said: dict[str, object],
    kind: ModelErrorKind,
    told: str,
) -> None:
    server.will([chunk({"content": "so far"}), event(said), *ending()])
    deltas: list[Delta] = []
    with pytest.raises(ModelError) as caught:
        await bounded(model.respond(request(), deltas.append))
    assert caught.value.kind == kind
    assert told in caught.value.message
    assert deltas == [TextDelta("so far")]


REFUSALS: list[tuple[int, object, ModelErrorKind, str]] = [
    (429, {"error": {"code": "insufficient_quota", "message": "pay"}}, "quota", "pay"),
    (429, {"error": {"message": "TPM"}}, "rate_limit", "TPM"),
    (400, {"error": {"code": "context_length_exceeded", "message": "m"}}, "context_overflow", "m"),
    (400, {"error": {"type": "exceed_context_size_error"}}, "context_overflow", "exceed"),
    (400, {"message": "This model's maximum context length is 8192"}, "context_overflow", "8192"),
    (413, {"error": "too large"}, "context_overflow", "too large"),
    (400, {"error": {"code": "content_filter", "message": "no"}}, "refused", "no"),
    (403, {"error": {"message": "f", "metadata": {"reasons": ["x"]}}}, "refused", "f"),
    (404, {"error": "model 'x' not found"}, "bad_request", "model 'x' not found"),
    (422, {"detail": [{"loc": ["body"], "msg": "extra"}]}, "bad_request", "extra"),
    (400, {"object": "error", "message": {"detail": "d"}}, "bad_request", "detail"),
    (503, [{"error": {"message": "listed"}}], "server", "listed"),
    (500, "plain", "server", "plain"),
    (500, None, "server", "answered 500"),
]


@pytest.mark.parametrize(("status", "body", "kind", "told"), REFUSALS)
async def test_a_refusal_says_what_it_means(
    server: StrictChat,
    model: OpenAICompatModel,
    status: int,
    body: object,
    kind: ModelErrorKind,
    told: str,
) -> None:
    server.will(refused(status, body, x_request_id="req_9"))
    error = await fail(model)
    assert (error.kind, error.status, error.request_id) == (kind, status, "req_9")
    assert told in error.message
    assert error.message.startswith(f"openai:strict answered {status}")


async def test_a_page_of_html_is_not_repeated(server: StrictChat, model: OpenAICompatModel) -> None:
    server.will(Answer([b"<html>502 Bad Gateway nginx</html>"], 502, {"content-type": "text/html"}))
    error = await fail(model)
    assert error.message == "openai:strict answered 502: a page of HTML"


async def test_a_redirect_is_not_followed(server: StrictChat, model: OpenAICompatModel) -> None:
    server.will(Answer([], 307, {"location": "https://other.example/v1?token=hush"}))
    error = await fail(model)
    assert (error.kind, error.status) == ("bad_request", 307)
    assert error.message.endswith("a redirect to https://other.example/v1")
    assert error.hint == "check OPENAI_BASE_URL"
    assert len(server.requests) == 1


async def test_hints_name_what_to_check(server: StrictChat, model: OpenAICompatModel) -> None:
    server.will(refused(401, {}), refused(402, {}), refused(404, {}))
    assert (await fail(model)).hint == "check the key in OPENAI_API_KEY"
    assert "balance" in ((await fail(model)).hint or "")
    assert "OPENAI_BASE_URL" in ((await fail(model)).hint or "")


async def test_an_error_body_without_end_is_read_within_a_bound(
    server: StrictChat, model: OpenAICompatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_compat, "ERROR_READ_S", 0.05)
    headers = {"content-type": "application/json"}
    server.will(Answer([b'{"error": '], 500, headers, end="hang"))
    assert (await fail(model)).kind == "server"
    await bounded(server.no_connection())


LATER = email.utils.formatdate(NOW_MS / 1000 + 90, usegmt=True)
MUCH_LATER = email.utils.formatdate(NOW_MS / 1000 + 3_600 + 20, usegmt=True)
SERVERS_NOW = email.utils.formatdate(NOW_MS / 1000 + 3_600, usegmt=True)


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [
        ({"retry_after": "2"}, 2_000),
        ({"retry_after": "0.5"}, 500),
        ({"retry_after_ms": "1234"}, 1_234),
        ({"retry_after_ms": "7", "retry_after": "2"}, 7),
        ({"retry_after": LATER}, 90_000),
        ({"retry_after": MUCH_LATER, "date": SERVERS_NOW}, 20_000),
        ({"retry_after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 0),
        ({"retry_after": "soon"}, None),
        ({"retry_after": "-3"}, None),
        ({"retry_after": "nan"}, None),
        ({"retry_after": "99999999999"}, None),
    ],
)
async def test_retry_after_in_every_form(
    server: StrictChat, model: OpenAICompatModel, headers: dict[str, str], wait_ms: int | None
) -> None:
    server.will(refused(429, {"error": {"message": "slow down"}}, **headers))
    assert (await fail(model)).retry_after_ms == wait_ms


@pytest.mark.parametrize(
    "text",
    [
        f"Incorrect API key provided: {KEY}.",
        "Incorrect API key provided: sk-proj-****************abcd.",
        "header 'Authorization: Bearer abc.def-ghi' is wrong",
        "key gsk_abcdefgh12345678 is revoked",
    ],
)
async def test_no_key_is_repeated_whoever_says_it(
    server: StrictChat, model: OpenAICompatModel, text: str
) -> None:
    server.will(refused(401, {"error": {"message": text}}), [event({"error": text})])
    for _ in range(2):
        message = (await fail(model)).message
        assert "[key]" in message
        for secret in (KEY, "abcd.", "abc.def", "gsk_"):
            assert secret not in message


def test_an_error_is_one_short_line() -> None:
    assert cleaned("a\n  b\x1b[31m", ()) == "a b\ufffd[31m"
    assert len(cleaned("word " * 1_000, ())) == 500


def test_every_status_is_tried_again_or_not_as_it_means() -> None:
    for status in range(300, 600):
        retryable = kind_of(status, None, None, "") in RETRYABLE
        assert retryable == (status in (408, 409, 425, 429) or status >= 500), status


async def test_every_error_of_the_http_library_becomes_ours() -> None:
    """Fails when the library grows an exception that nobody has thought about."""
    known = {
        *("ClientError", "ClientResponseError", "ContentTypeError", "WSServerHandshakeError"),
        *("ClientHttpProxyError", "TooManyRedirects", "ClientConnectionError"),
        *("ClientConnectionResetError", "ClientOSError", "ClientConnectorError"),
        *("ClientConnectorDNSError", "ClientProxyConnectionError", "UnixClientConnectorError"),
        *("ServerConnectionError", "ServerDisconnectedError", "ServerTimeoutError"),
        *("ConnectionTimeoutError", "SocketTimeoutError", "ServerFingerprintMismatch"),
        *("ClientPayloadError", "InvalidURL", "InvalidUrlClientError", "RedirectClientError"),
        *("NonHttpUrlClientError", "InvalidUrlRedirectClientError"),
        *("NonHttpUrlRedirectClientError", "ClientSSLError", "ClientConnectorSSLError"),
        *("ClientConnectorCertificateError", "UploadAbortedError", "ConnectionTimeoutError"),
    }
    found: set[type[BaseException]] = set()
    todo: list[type[BaseException]] = [aiohttp.ClientError]
    while todo:
        kind = todo.pop()
        found.add(kind)
        todo += [k for k in kind.__subclasses__() if k.__module__.startswith("aiohttp.")]
    assert {kind.__name__ for kind in found} == known
    line = Line(endpoint_of("http://h/v1", "/c", None), ref="x:y", idle_timeout_ms=1)
    for kind in [*found, aiohttp.http_exceptions.BadHttpMessage, ConnectionResetError]:
        error = kind.__new__(kind)
        if isinstance(error, aiohttp.ClientConnectorError):
            error._os_error = OSError(113, "No route to host")  # type: ignore[misc]
        if isinstance(error, aiohttp.ClientResponseError):
            error.status = 407
        assert issubclass(kind, Line.TROUBLE)
        assert line.trouble(error).retryable or kind is aiohttp.ClientHttpProxyError
    await line.aclose()


# ---- endpoints and proxies ----


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
        (" https://h/v1/ ", "https://h/v1/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
        ("https://h", "https://h/chat/completions"),
        ("https://h/o?api-version=1", "https://h/o/chat/completions?api-version=1"),
        ("http://[::1]:80/v1", "http://[::1]:80/v1/chat/completions"),
    ],
)
def test_a_base_url_is_taken_as_people_write_it(base_url: str, url: str) -> None:
    assert endpoint_of(base_url, "/chat/completions", None).url == url


@pytest.mark.parametrize("base_url", ["", "h/v1", "ftp://h", "http://", "http://h:x", "http://[h"])
def test_what_is_no_url_is_a_configuration_error(base_url: str) -> None:
    with pytest.raises(ConfigError, match="X_BASE_URL"):
        OpenAICompatModel("x:y", base_url, None, "y", base_url_variable="X_BASE_URL")


@pytest.mark.parametrize("key", ["a b", "a\nb", "schlüssel", "“quoted”"])
def test_a_key_that_no_header_may_carry_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OpenAICompatModel("x:y", "http://h", key, "y", key_variable="X_API_KEY")
    assert "X_API_KEY" in str(caught.value)
    assert key not in str(caught.value)


async def test_a_login_in_the_base_url_is_used_and_never_shown(server: StrictChat) -> None:
    url = server.url.replace("://", "://ada:se%20cret@")
    model = OpenAICompatModel("x:y", url, None, "y")
    server.will(refused(401, {"error": {"message": "no: se cret, se%20cret"}}))
    error = await fail(model)
    assert server.requests[0].headers["authorization"].startswith("Basic ")
    assert "cret" not in f"{error} {model!r}"
    await model.aclose()


@pytest.mark.parametrize(
    ("env", "base_url", "proxy"),
    [
        ({}, "https://h/v1", None),
        ({"HTTPS_PROXY": "http://p:3128"}, "https://h/v1", "http://p:3128"),
        ({"https_proxy": "p:3128"}, "https://h/v1", "http://p:3128"),
        ({"HTTPS_PROXY": "http://p"}, "http://h/v1", None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "a, .example"}, "https://h.example", None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "h.example:443"}, "https://h.example", None),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "ample"}, "https://h.example", "http://p"),
        ({"HTTPS_PROXY": "http://p", "no_proxy": "*"}, "https://h.example", None),
        ({"HTTP_PROXY": "http://p"}, "http://localhost:11434/v1", None),
    ],
)
def test_the_environments_proxy_is_taken(
    env: dict[str, str], base_url: str, proxy: str | None
) -> None:
    assert proxy_for(base_url, env) == proxy


async def test_a_proxy_is_asked_with_its_own_login(server: StrictChat) -> None:
    proxy = f"http://ada:hush@127.0.0.1:{server.port}"
    model = OpenAICompatModel("x:y", "http://far.example/v1", KEY, "y", proxy=proxy)
    assert text_of((await say(model)).content) == "OK"
    (received,) = server.requests
    assert received.target == "http://far.example/v1/chat/completions"
    assert received.headers["proxy-authorization"].startswith("Basic ")
    await model.aclose()


async def test_a_dead_proxy_is_told_without_its_login() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        proxy = f"http://ada:hush@127.0.0.1:{taken.getsockname()[1]}"
        model = OpenAICompatModel("x:y", "http://far.example/v1", KEY, "y", proxy=proxy)
        error = await fail(model)
    assert error.message == "cannot connect to the proxy on the way to http://far.example/v1"
    assert "hush" not in "".join(traceback.format_exception(error))
    await model.aclose()


def test_opening_a_model_does_not_import_the_http_library() -> None:
    code = (
        "import sys, postroom.models.catalog as c\n"
        "c.open_model('ollama:x', {}); c.open_model('scripted:echo', {})\n"
        "print('aiohttp' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
