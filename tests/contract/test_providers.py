"""The provider library's adapter: what it sends, what it makes of answers, and what it costs."""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params, ToolSpec
from postroom.domain.ids import CallId, SessionId
from postroom.domain.message import Audio, Block, File, Image, Reasoning, Text, ToolCall, Usage
from postroom.errors import ConfigError, MissingKey, ModelError, ModelErrorKind, UsageError
from postroom.models import catalog, providers, providers_library
from postroom.models.catalog import ModelRef, Opening, offers, open_model, pick_default
from postroom.models.providers import Access, ProvidersModel
from postroom.models.providers_failures import BELOW, KINDS, NOT_OURS, kind_of_exception
from postroom.ports.clock import SystemClock
from postroom.ports.model import CallDelta, Delta, ModelRequest, ReasoningDelta, Reply, TextDelta
from tests.servers.model_server import ModelServer, model_server
from tests.servers.strict_chat import Answer, StrictChat, refused, validate_anthropic
from tests.servers.strict_provider import (
    BEDROCK_START,
    StrictAnthropic,
    StrictBedrock,
    StrictGoogle,
    anthropic_error,
    bedrock_call,
    bedrock_end,
    bedrock_stream,
    bedrock_text,
    block_delta,
    block_start,
    block_stop,
    frame,
    google_chunk,
    google_error,
    message_delta,
    message_end,
    message_start,
    sse,
    text_block,
    thinking_block,
    tool_block,
    validate_google,
)
from tests.support import bounded

__all__ = ["model_server"]

# Of no shape that looks like a key: it is known, not guessed.
KEY = "AIzaStrictAbcdefghijklmnop"
PNG = Image(artifact="sha256:" + "a" * 64, media_type="image/png", size=3, name="a.png")
PDF = File(artifact="sha256:" + "b" * 64, media_type="application/pdf", size=4, name="b.pdf")
GIF = Image(artifact="sha256:" + "c" * 64, media_type="image/gif", size=3)
MEDIA = {PNG.artifact: b"png", PDF.artifact: b"%PDF"}
LOOK = ToolSpec(
    "look",
    "Looks at a thing.",
    msgspec.Raw(b'{"type":"object","properties":{"at":{"type":"string"}},"required":["at"]}'),
)


@pytest.fixture(scope="module", autouse=True)
def provider_library() -> None:
    """Imported before anything is timed: it takes seconds."""
    for provider in ("anthropic", "google", "bedrock"):
        importlib.import_module(f"postroom.models.providers_{provider}")


def made(
    provider: str,
    port: int = 1,
    *,
    name: str = "claude-sonnet-5-5",
    accepts: frozenset[str] = frozenset({"image/png", "application/pdf"}),
    idle_timeout_ms: int = 60_000,
    host: str = "127.0.0.1",
) -> ProvidersModel:
    url = f"http://{host}:{port}"
    signs = provider == "bedrock"
    env = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": KEY}
    return ProvidersModel(
        Access(
            ref=f"{provider}:{name}",
            provider=provider,
            name=name,
            key=None if signs else KEY,
            base_url=url,
            shown=url,
            host=host,
            check=f"check {provider.upper()}_BASE_URL",
            key_variable=f"{provider.upper()}_API_KEY",
            secrets=(KEY,),
            accepts=accepts,
            idle_timeout_ms=idle_timeout_ms,
            env=env if signs else {},
        )
    )


def user(*content: Block | str) -> ContextMessage:
    return ContextMessage("user", _blocks(content), 1)


def assistant(*content: Block | str, seq: int = 2) -> ContextMessage:
    return ContextMessage("assistant", _blocks(content), seq)


def result(call_id: str, *content: Block | str, error: bool = False) -> ContextMessage:
    return ContextMessage("tool", _blocks(content), 3, CallId(call_id), error)


def _blocks(content: Sequence[Block | str]) -> tuple[Block, ...]:
    return tuple(Text(c) if isinstance(c, str) else c for c in content)


def request(*messages: ContextMessage, system: str = "Be brief.", **fields: Any) -> ModelRequest:
    return ModelRequest(
        SessionId("session_x"),
        1,
        system,
        messages or (user("Hi"),),
        fields.get("tools", ()),
        fields.get("params", Params()),
        fields.get("media", {}),
    )


def call(call_id: str = "c1", name: str = "look", arguments: str = '{"at":"x"}') -> ToolCall:
    return ToolCall(call_id, name, arguments)


def body(model: ProvidersModel, *messages: ContextMessage, **fields: Any) -> Any:
    return json.loads(model.render(request(*messages, **fields)))


async def say(model: ProvidersModel, req: ModelRequest | None = None) -> Reply:
    return await bounded(model.respond(req or request(), lambda _: None))


async def fail(model: ProvidersModel, req: ModelRequest | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await say(model, req)
    return caught.value


@pytest.fixture
async def anthropic() -> AsyncIterator[StrictAnthropic]:
    async with StrictAnthropic() as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def google() -> AsyncIterator[StrictGoogle]:
    async with StrictGoogle() as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def claude(anthropic: StrictAnthropic) -> AsyncIterator[ProvidersModel]:
    model = made("anthropic", anthropic.port)
    yield model
    await bounded(model.aclose())
    await bounded(anthropic.no_connection())


@pytest.fixture
async def gemini(google: StrictGoogle) -> AsyncIterator[ProvidersModel]:
    model = made("google", google.port, name="gemini-3.8-flash")
    yield model
    await bounded(model.aclose())
    await bounded(google.no_connection())


@pytest.fixture(scope="module")
def to_anthropic() -> ProvidersModel:
    """For rendering only: nothing listens there."""
    return made("anthropic")


@pytest.fixture(scope="module")
def to_google() -> ProvidersModel:
    return made("google", name="gemini-3.8-flash")


# ---- what is sent ----


def test_anthropic_gets_one_message_a_side_results_first(to_anthropic: ProvidersModel) -> None:
    sent = body(
        to_anthropic,
        user("one"),
        user("two"),
        assistant("Let me see.", call("c1"), call("c2")),
        result("c1", "seen"),
        result("c2", "not there", error=True),
        user("and?"),
        tools=(LOOK,),
    )["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "user"]
    assert [b["text"] for b in sent[0]["content"]] == ["one", "two"]
    assert [b["type"] for b in sent[1]["content"]] == ["text", "tool_use", "tool_use"]
    assert sent[1]["content"][1]["input"] == {"at": "x"}
    first, second, said = sent[2]["content"]
    assert (first["tool_use_id"], first["is_error"]) == ("c1", False)
    assert (second["tool_use_id"], second["is_error"]) == ("c2", True)
    assert second["content"][0]["text"] == "not there"
    assert said["text"] == "and?"


def test_google_gets_calls_and_responses_by_name(to_google: ProvidersModel) -> None:
    sent = body(
        to_google,
        user("one"),
        user("two"),
        assistant(call("c1"), call("c2")),
        result("c1", "seen"),
        result("c2", "not there", error=True),
        tools=(LOOK,),
    )["contents"]
    assert [c["role"] for c in sent] == ["user", "model", "user"]
    assert [p["text"] for p in sent[0]["parts"]] == ["one", "two"]
    responses = [p["functionResponse"] for p in sent[2]["parts"]]
    assert [(r["id"], r["name"]) for r in responses] == [("c1", "look"), ("c2", "look")]
    assert "error" not in responses[0]["response"]
    assert responses[1]["response"] == {"error": "not there"}
    assert validate_google(sent) == []


def test_tools_are_sent_with_their_schema(
    to_anthropic: ProvidersModel, to_google: ProvidersModel
) -> None:
    schema = json.loads(bytes(LOOK.parameters))
    (tool,) = body(to_anthropic, tools=(LOOK,))["tools"]
    assert (tool["name"], tool["description"]) == ("look", "Looks at a thing.")
    assert tool["input_schema"] == schema
    (tool,) = body(to_google, tools=(LOOK,))["tools"]
    (declaration,) = tool["functionDeclarations"]
    assert (declaration["name"], declaration["description"]) == ("look", "Looks at a thing.")
    assert declaration["parameters_json_schema"] == schema
    assert "tools" not in body(to_anthropic)
    assert "tools" not in body(to_google)


def test_without_a_system_text_none_is_sent(
    to_anthropic: ProvidersModel, to_google: ProvidersModel
) -> None:
    assert "system" not in body(to_anthropic, system="")
    assert "systemInstruction" not in body(to_google, system=" ")


def test_the_prompt_is_marked_for_caching(to_anthropic: ProvidersModel) -> None:
    sent = body(to_anthropic, user("a"), assistant("b"), user("c"), tools=(LOOK, LOOK_TOO))
    assert sent["system"][-1]["cache_control"]["type"] == "ephemeral"
    assert [("cache_control" in tool) for tool in sent["tools"]] == [False, True]
    marked = [("cache_control" in m["content"][-1]) for m in sent["messages"]]
    assert marked == [False, False, True]


LOOK_TOO = ToolSpec("look_too", "Looks too.", msgspec.Raw(b'{"type":"object"}'))


def test_files_that_the_model_takes_are_sent_as_such(
    to_anthropic: ProvidersModel, to_google: ProvidersModel
) -> None:
    history = (
        user("see", PNG, PDF, GIF),
        assistant(call()),
        result("c1", "shown", PNG),
    )
    first, _, second = body(to_anthropic, *history, media=MEDIA)["messages"]
    kinds = [b["type"] for b in first["content"]]
    assert kinds == ["text", "image", "document", "text"]
    assert base64.b64decode(first["content"][1]["source"]["data"]) == b"png"
    assert first["content"][2]["source"]["media_type"] == "application/pdf"
    assert "image/gif" in first["content"][3]["text"]
    assert [b["type"] for b in second["content"][0]["content"]] == ["text", "image"]
    first, _, second = body(to_google, *history, media=MEDIA)["contents"]
    inline = [p["inlineData"] for p in first["parts"] if "inlineData" in p]
    assert [(i.get("mimeType") or i["mime_type"], base64.b64decode(i["data"])) for i in inline] == [
        ("image/png", b"png"),
        ("application/pdf", b"%PDF"),
    ]
    assert json.dumps(second).count(base64.b64encode(b"png").decode()) == 1


def test_a_file_that_is_not_shown_is_named_in_a_line(to_anthropic: ProvidersModel) -> None:
    sound = Audio(artifact="sha256:" + "d" * 64, media_type="audio/wav", size=5, name="d.wav")
    for block, media in ((PNG, {}), (sound, {sound.artifact: b"noise"})):
        (message,) = body(to_anthropic, user("see", block), media=media)["messages"]
        (part,) = message["content"]
        assert block.name is not None
        assert block.name in part["text"]
        assert "not shown" in part["text"]


def test_an_error_is_told_in_text_only(to_anthropic: ProvidersModel) -> None:
    """The API refuses anything but text in a result that is an error."""
    history = (user("go"), assistant(call()), result("c1", "no", PNG, error=True))
    *_, last = body(to_anthropic, *history, media=MEDIA)["messages"]
    assert [b["type"] for b in last["content"][0]["content"]] == ["text"]


def test_anthropic_gets_its_own_reasoning_back_and_no_other(
    to_anthropic: ProvidersModel,
) -> None:
    history = (
        user("go"),
        assistant(
            Reasoning("mine", "anthropic:thinking:SIG+/="),
            Reasoning("", "anthropic:redacted:DATA"),
            Reasoning("unsealed"),
            Reasoning("theirs", "google:thinking:U0lH"),
            Reasoning("odd", "no seal"),
            call(),
        ),
        result("c1", "ok"),
    )
    said = body(to_anthropic, *history)["messages"][1]["content"]
    assert [b["type"] for b in said] == ["thinking", "redacted_thinking", "tool_use"]
    assert (said[0]["thinking"], said[0]["signature"]) == ("mine", "SIG+/=")
    assert said[1]["data"] == "DATA"
    params = Params(reasoning_effort="none")
    said = body(to_anthropic, *history, params=params)["messages"][1]["content"]
    assert [b["type"] for b in said] == ["tool_use"]


def test_google_gets_its_signatures_back_where_they_were(to_google: ProvidersModel) -> None:
    history = (
        user("go"),
        assistant(
            Reasoning("unsealed"),
            Reasoning("mine", "google:thinking:" + base64.b64encode(b"own").decode()),
            Reasoning("theirs", "anthropic:thinking:SIG"),
            Reasoning("", "google:next:" + base64.b64encode(b"of the call").decode()),
            call(),
        ),
        result("c1", "ok"),
    )
    thought, called = body(to_google, *history)["contents"][1]["parts"]
    assert (thought["text"], thought["thought"]) == ("mine", True)
    assert base64.b64decode(thought["thoughtSignature"]) == b"own"
    assert base64.b64decode(called["thoughtSignature"]) == b"of the call"


def test_reasoning_bound_to_what_stood_before_is_dropped_when_that_changes() -> None:
    binding = body(made("anthropic", name="claude-opus-5-5"))["thinking"]
    assert binding["block_binding"] == {"prefix_mismatch_behavior": "drop_block"}
    assert "thinking" not in body(made("anthropic", name="claude-sonnet-4-6"))


def test_parameters_are_sent_where_they_are_set(
    to_anthropic: ProvidersModel, to_google: ProvidersModel
) -> None:
    params = Params(max_tokens=77, temperature=0.5, reasoning_effort="low")
    sent = body(to_anthropic, params=params)
    assert sent["max_tokens"] == 77
    assert sent["output_config"] == {"effort": "low"}
    # Thinking and a temperature are refused together.
    assert "temperature" not in sent
    assert body(made("anthropic", name="claude-haiku-4-5"), params=Params(temperature=0.5))[
        "temperature"
    ] == (0.5)
    config = body(to_google, params=params)["generationConfig"]
    assert (config["maxOutputTokens"], config["temperature"]) == (77, 0.5)
    assert config["thinkingConfig"]["thinking_level"] == "LOW"


def test_an_effort_nobody_knows_is_refused(to_anthropic: ProvidersModel) -> None:
    with pytest.raises(ModelError, match="'lots'") as caught:
        to_anthropic.render(request(params=Params(reasoning_effort="lots")))
    assert caught.value.kind == "bad_request"
    assert "medium" in (caught.value.hint or "")


@pytest.mark.parametrize("broken", ['{"at": "x', "[1]", '"text"', "", "null"])
def test_arguments_that_are_no_object_are_wrapped_in_one(
    to_anthropic: ProvidersModel, broken: str
) -> None:
    history = (user("go"), assistant(call(arguments=broken)), result("c1", "ok"))
    use = body(to_anthropic, *history)["messages"][1]["content"][0]
    assert use["input"] == {"invalid_json": broken}


def test_ids_and_names_no_provider_takes_are_replaced(to_anthropic: ProvidersModel) -> None:
    strange = "call/1 é"
    history = (
        user("go"),
        assistant(call(strange, "no such tool!")),
        result(strange, "ok"),
        assistant(call("c1", "ä" * 80), seq=5),
        result("c1", "ok"),
        # A server that counts from one in every reply.
        assistant(call("c1"), seq=7),
        result("c1", "again"),
    )
    sent = body(to_anthropic, *history)["messages"]
    assert validate_anthropic(sent) == []
    assert sent[1]["content"][0]["name"] == "no_such_tool_"
    uses = [b["id"] for m in sent for b in m["content"] if b["type"] == "tool_use"]
    assert len(set(uses)) == 3
    assert uses[1] == "c1"


def test_the_users_side_begins_and_ends(
    to_anthropic: ProvidersModel, to_google: ProvidersModel
) -> None:
    history = (assistant("first"), assistant("second"))
    assert validate_anthropic(body(to_anthropic, *history)["messages"]) == []
    assert validate_google(body(to_google, *history)["contents"]) == []


def test_half_a_surrogate_pair_does_not_break_a_request(to_anthropic: ProvidersModel) -> None:
    history = (
        user("a \ud83d b"),
        assistant("\ude00", call(arguments='{"at":"\ud83d"')),
        result("c1", "\ud800"),
    )
    sent = body(to_anthropic, *history, system="\udc00")
    assert sent["messages"][0]["content"][0]["text"] == "a � b"


texts = st.text(st.characters(codec="utf-8") | st.sampled_from(" \n\t\ud800"), max_size=5)
blocks = st.one_of(
    texts.map(Text),
    st.just(PNG),
    st.just(GIF),
    st.builds(
        Reasoning, texts, st.sampled_from([None, "anthropic:thinking:S", "google:next:Uw=="])
    ),
)
calls = st.builds(
    ToolCall,
    st.sampled_from(["c1", "c2", "", "a b"]),
    st.sampled_from(["look", "", "a b"]),
    st.sampled_from(["{}", "{", '{"a":1}']),
)


@st.composite
def histories(draw: st.DrawFn) -> list[ContextMessage]:
    """Any history the log can give: results directly after the reply whose calls they answer."""
    messages: list[ContextMessage] = []
    for _ in range(draw(st.integers(0, 5))):
        inputs = st.lists(blocks.filter(lambda b: not isinstance(b, Reasoning)), max_size=3)
        if draw(st.booleans()):
            messages.append(user(*draw(inputs)))
            continue
        made_calls = draw(st.lists(calls, max_size=2, unique_by=lambda c: c.call_id))
        said = draw(st.lists(blocks, max_size=3))
        messages.append(assistant(*said, *made_calls, seq=len(messages)))
        messages += [
            result(c.call_id, *draw(inputs), error=draw(st.booleans())) for c in made_calls
        ]
    return messages


@given(history=histories())
@settings(max_examples=60)
def test_every_history_becomes_one_that_the_apis_take(
    to_anthropic: ProvidersModel, to_google: ProvidersModel, history: list[ContextMessage]
) -> None:
    wanted = ModelRequest(SessionId("s"), 1, "x", history, (LOOK,), Params(), MEDIA)
    sent = json.loads(to_anthropic.render(wanted))["messages"]
    assert validate_anthropic(sent) == []
    sent = json.loads(to_google.render(wanted))["contents"]
    assert validate_google(sent) == []


@pytest.mark.contract("TRN-10")
@pytest.mark.parametrize("provider", ["anthropic", "google", "bedrock"])
def test_the_same_request_is_the_same_bytes_in_every_model_of_that_name(provider: str) -> None:
    history = (user("go", PNG), assistant("Hm.", call("odd id")), result("odd id", PNG, "seen"))
    wanted = request(*history, tools=(LOOK,), media=MEDIA)
    model = made(provider)
    assert model.render(wanted) == model.render(wanted) == made(provider).render(wanted)


# ---- what comes back ----


async def test_usage_counts_what_was_cached_as_part_of_the_input(
    anthropic: StrictAnthropic, claude: ProvidersModel, google: StrictGoogle, gemini: ProvidersModel
) -> None:
    anthropic.will([message_start(), *text_block(0, "x"), *message_end()])
    assert (await say(claude)).usage == Usage(12, 5, 4, 0)
    google.will([google_chunk({"text": "x"}), google_chunk(finish="STOP")])
    assert (await say(gemini)).usage == Usage(12, 7, 5, 3)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("a_reason_of_tomorrow", "stop"),
    ],
)
async def test_anthropics_finish_reasons(
    anthropic: StrictAnthropic, claude: ProvidersModel, reason: str, finish: str
) -> None:
    anthropic.will([message_start(), *text_block(0, "x"), *message_end(reason)])
    reply = await say(claude)
    assert (reply.finish, reply.content) == (finish, (Text("x"),))


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("STOP", "stop"),
        ("MAX_TOKENS", "length"),
        ("SAFETY", "content_filter"),
        ("RECITATION", "content_filter"),
        ("PROHIBITED_CONTENT", "content_filter"),
        ("OTHER", "stop"),
    ],
)
async def test_googles_finish_reasons(
    google: StrictGoogle, gemini: ProvidersModel, reason: str, finish: str
) -> None:
    google.will([google_chunk({"text": "x"}), google_chunk(finish=reason)])
    assert (await say(gemini)).finish == finish


async def test_a_prompt_that_google_blocks_is_filtered(
    google: StrictGoogle, gemini: ProvidersModel
) -> None:
    feedback = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "responseId": "r"}
    google.will([b"data: " + json.dumps(feedback).encode() + b"\n\n"])
    reply = await say(gemini)
    assert (reply.content, reply.finish) == ((), "content_filter")


async def test_a_reply_that_the_provider_breaks_off_is_its_failure(
    google: StrictGoogle, gemini: ProvidersModel
) -> None:
    google.will([google_chunk({"text": "x"}), google_chunk(finish="MALFORMED_FUNCTION_CALL")])
    error = await fail(gemini)
    assert (error.kind, error.retryable) == ("server", True)
    assert "MALFORMED_FUNCTION_CALL" in error.message


@pytest.mark.contract("TRN-06")
async def test_a_call_cut_off_by_the_token_limit_keeps_what_came_of_it(
    anthropic: StrictAnthropic, claude: ProvidersModel
) -> None:
    cut = [
        block_start(1, type="tool_use", id="toolu_1", name="look", input={}),
        block_delta(1, type="input_json_delta", partial_json='{"at": "the mo'),
        block_stop(1),
    ]
    anthropic.will([message_start(), *text_block(0, "So: "), *cut, *message_end("max_tokens")])
    reply = await say(claude)
    assert reply.finish == "length"
    assert reply.content == (Text("So: "), ToolCall("toolu_1", "look", '{"at": "the mo'))


async def test_reasoning_keeps_its_place_and_its_seal(
    anthropic: StrictAnthropic, claude: ProvidersModel
) -> None:
    anthropic.will(
        [
            message_start(),
            *thinking_block(0, "first", "SIG1"),
            block_start(1, type="redacted_thinking", data="DATA"),
            block_stop(1),
            *text_block(2, "Hm."),
            *thinking_block(3, "then", "SIG2"),
            *tool_block(4, "toolu_1", "look", '{"at":', ' "x"}'),
            *message_end("tool_use"),
        ]
    )
    deltas: list[Delta] = []
    reply = await bounded(claude.respond(request(), deltas.append))
    assert reply.content == (
        Reasoning("first", "anthropic:thinking:SIG1"),
        Reasoning("", "anthropic:redacted:DATA"),
        Text("Hm."),
        Reasoning("then", "anthropic:thinking:SIG2"),
        ToolCall("toolu_1", "look", '{"at": "x"}'),
    )
    assert deltas == [
        ReasoningDelta("first"),
        TextDelta("Hm."),
        ReasoningDelta("then"),
        CallDelta("look"),
    ]
    # And back it goes, as it came.
    history = (user("Hi"), ContextMessage("assistant", reply.content, 2), result("toolu_1", "ok"))
    await say(claude, request(*history))
    said = anthropic.requests[-1].json["messages"][1]["content"]
    kinds = ["thinking", "redacted_thinking", "text", "thinking", "tool_use"]
    assert [b["type"] for b in said] == kinds
    assert [b["signature"] for b in said if b["type"] == "thinking"] == ["SIG1", "SIG2"]


async def test_googles_signatures_go_back_as_they_came(
    google: StrictGoogle, gemini: ProvidersModel
) -> None:
    signature = base64.b64encode(b"of the call").decode()
    called = {"functionCall": {"id": "f1", "name": "look", "args": {}}}
    google.will(
        [
            google_chunk({"text": "hm", "thought": True}),
            google_chunk({**called, "thoughtSignature": signature}),
            google_chunk(finish="STOP"),
        ]
    )
    reply = await say(gemini)
    assert reply.finish == "tool_calls"
    assert reply.content == (
        Reasoning("hm"),
        Reasoning("", f"google:next:{signature}"),
        ToolCall("f1", "look", "{}"),
    )
    history = (user("Hi"), ContextMessage("assistant", reply.content, 2), result("f1", "ok"))
    await say(gemini, request(*history))
    (part,) = google.requests[-1].json["contents"][1]["parts"]
    assert base64.b64decode(part["thoughtSignature"]) == b"of the call"


@pytest.mark.parametrize("end", ["end", "drop"])
async def test_a_stream_without_a_finish_reason_is_no_reply(
    anthropic: StrictAnthropic,
    claude: ProvidersModel,
    google: StrictGoogle,
    gemini: ProvidersModel,
    end: Any,
) -> None:
    half = [message_start(), *text_block(0, "half")]
    anthropic.will(Answer([*half, message_delta(None), sse("message_stop")], end=end))
    google.will(Answer([google_chunk({"text": "half"})], end=end))
    for model in (claude, gemini):
        deltas: list[Delta] = []
        with pytest.raises(ModelError) as caught:
            await bounded(model.respond(request(), deltas.append))
        assert (caught.value.kind, caught.value.status) == ("transport", None)
        assert deltas == [TextDelta("half")]


@pytest.mark.parametrize("end", ["drop", "hang", "hang after end"])
async def test_a_reply_that_was_finished_counts_however_the_connection_ends(
    anthropic: StrictAnthropic,
    claude: ProvidersModel,
    google: StrictGoogle,
    gemini: ProvidersModel,
    end: Any,
) -> None:
    anthropic.will(Answer([message_start(), *text_block(0, "done"), *message_end()], end=end))
    assert (await say(claude)).content == (Text("done"),)
    google.will(Answer([google_chunk({"text": "done"}, finish="STOP")], end=end))
    assert (await say(gemini)).content == (Text("done"),)


async def test_the_request_id_and_the_key_travel_in_headers(
    anthropic: StrictAnthropic, claude: ProvidersModel, google: StrictGoogle, gemini: ProvidersModel
) -> None:
    stream = [message_start(), *text_block(0, "x"), *message_end()]
    headers = {"content-type": "text/event-stream", "request-id": "req_1"}
    anthropic.will(Answer(stream, headers=headers))
    assert (await say(claude)).request_id == "req_1"
    await say(gemini)
    for received in (anthropic.requests[0], google.requests[0]):
        assert any(KEY in value for value in received.headers.values())
        assert KEY not in received.target
        assert received.headers["accept-encoding"] == "identity"
        assert "postroom/" in received.headers["user-agent"]


async def test_one_connection_serves_request_after_request(
    anthropic: StrictAnthropic, claude: ProvidersModel
) -> None:
    for _ in range(3):
        await say(claude)
    assert anthropic.connected == 1


async def test_a_closed_model_says_so(claude: ProvidersModel) -> None:
    await claude.aclose()
    assert "closed" in (await fail(claude)).message


# ---- errors ----


@pytest.mark.contract("TRN-04")
@pytest.mark.contract("TRN-05")
@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, ("invalid_request_error", "messages: odd"), "bad_request"),
        (400, ("invalid_request_error", "prompt is too long: 9 > 8"), "context_overflow"),
        (400, ("invalid_request_error", "Your credit balance is too low"), "quota"),
        (401, ("authentication_error", "invalid x-api-key"), "auth"),
        (402, ("billing_error", "pay"), "quota"),
        (403, ("permission_error", "not yours"), "auth"),
        (404, ("not_found_error", "model: x"), "bad_request"),
        (413, ("request_too_large", "too large"), "context_overflow"),
        (429, ("rate_limit_error", "slow down"), "rate_limit"),
        (500, ("api_error", "oops"), "server"),
        (504, ("timeout_error", "late"), "server"),
        (529, ("overloaded_error", "Overloaded"), "server"),
    ],
)
async def test_what_anthropic_refuses_and_why(
    anthropic: StrictAnthropic,
    claude: ProvidersModel,
    status: int,
    error: tuple[str, str],
    kind: ModelErrorKind,
) -> None:
    anthropic.will(refused(status, anthropic_error(*error), request_id="req_9", retry_after="3"))
    caught = await fail(claude)
    assert (caught.kind, caught.status, caught.request_id) == (kind, status, "req_9")
    assert caught.retry_after_ms == 3_000
    assert error[1] in caught.message
    assert len(anthropic.requests) == 1


@pytest.mark.parametrize(
    ("status", "body_", "kind", "wait_ms"),
    [
        (400, google_error(400, "INVALID_ARGUMENT", "odd"), "bad_request", None),
        (
            400,
            google_error(400, "INVALID_ARGUMENT", "input token count (9) exceeds the maximum"),
            "context_overflow",
            None,
        ),
        (
            400,
            google_error(400, "INVALID_ARGUMENT", "bad key", {"reason": "API_KEY_INVALID"}),
            "auth",
            None,
        ),
        (403, google_error(403, "PERMISSION_DENIED", "no"), "auth", None),
        (404, google_error(404, "NOT_FOUND", "no such model"), "bad_request", None),
        (
            429,
            google_error(429, "RESOURCE_EXHAUSTED", "slow", {"retryDelay": "2.5s"}),
            "rate_limit",
            2_500,
        ),
        (
            429,
            google_error(
                429,
                "RESOURCE_EXHAUSTED",
                "no more today",
                {"violations": [{"quotaId": "RequestsPerDayPerProject"}]},
            ),
            "quota",
            None,
        ),
        (500, google_error(500, "INTERNAL", "oops"), "server", None),
        (503, google_error(503, "UNAVAILABLE", "overloaded"), "server", None),
    ],
)
async def test_what_google_refuses_and_why(
    google: StrictGoogle,
    gemini: ProvidersModel,
    status: int,
    body_: dict[str, Any],
    kind: ModelErrorKind,
    wait_ms: int | None,
) -> None:
    google.will(refused(status, body_))
    caught = await fail(gemini)
    assert (caught.kind, caught.status, caught.retry_after_ms) == (kind, status, wait_ms)
    assert body_["error"]["message"] in caught.message
    assert len(google.requests) == 1


@pytest.mark.parametrize(
    ("kind_", "kind", "status"),
    [
        ("overloaded_error", "server", 529),
        ("api_error", "server", 500),
        ("rate_limit_error", "rate_limit", 429),
        ("invalid_request_error", "bad_request", 400),
        ("an_error_of_tomorrow", "server", None),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
async def test_an_error_inside_the_stream_is_an_error(
    anthropic: StrictAnthropic,
    claude: ProvidersModel,
    kind_: str,
    kind: ModelErrorKind,
    status: int | None,
    begun: bool,
) -> None:
    stream = [message_start(), *text_block(0, "half")] if begun else []
    anthropic.will([*stream, sse("error", error={"type": kind_, "message": "so it is"})])
    caught = await fail(claude)
    assert (caught.kind, caught.status) == (kind, status)
    assert "so it is" in caught.message


async def test_an_error_inside_googles_stream_is_an_error(
    google: StrictGoogle, gemini: ProvidersModel
) -> None:
    error = google_error(503, "UNAVAILABLE", "The model is overloaded.")
    google.will([google_chunk({"text": "half"}), b"data: " + json.dumps(error).encode() + b"\n\n"])
    caught = await fail(gemini)
    assert (caught.kind, caught.status) == ("server", 503)


async def test_a_refused_block_of_reasoning_is_not_tried_again_behind_our_back(
    anthropic: StrictAnthropic, claude: ProvidersModel
) -> None:
    text = "messages.1.content.0: The block is bound to a different conversation"
    anthropic.will(refused(400, anthropic_error("invalid_request_error", text)))
    history = (user("a"), assistant(Reasoning("t", "anthropic:thinking:S"), "b"), user("c"))
    assert (await fail(claude, request(*history))).kind == "bad_request"
    assert len(anthropic.requests) == 1


async def test_a_stream_that_google_could_resume_is_not_resumed(
    google: StrictGoogle, gemini: ProvidersModel
) -> None:
    token = base64.b64encode(b"here").decode()
    candidate = {"content": {"role": "model", "parts": [{"text": "a"}]}, "continuationToken": token}
    chunk = json.dumps({"candidates": [candidate], "responseId": "r"}).encode()
    google.will(Answer([b"data: " + chunk + b"\n\n"], end="drop"))
    assert (await fail(gemini)).kind == "transport"
    assert len(google.requests) == 1


@pytest.mark.parametrize("provider", ["anthropic", "google"])
async def test_a_page_of_html_is_not_repeated(
    provider: str, anthropic: StrictAnthropic, google: StrictGoogle
) -> None:
    server: StrictChat = anthropic if provider == "anthropic" else google
    page = Answer([b"<html><b>down for tea</b>"], 502, {"content-type": "text/html"})
    found = Answer([b"<html>welcome</html>"], 200, {"content-type": "text/html"})
    server.will(page, found)
    model = made(provider, server.port)
    error = await fail(model)
    assert (error.kind, error.status) == ("server", 502)
    assert "tea" not in error.message
    error = await fail(model)
    assert "welcome" not in error.message
    assert (error.kind, error.status) == ("bad_request", 200)
    await model.aclose()


@pytest.mark.parametrize("provider", ["anthropic", "google"])
async def test_a_redirect_is_not_followed(
    provider: str, anthropic: StrictAnthropic, google: StrictGoogle
) -> None:
    server: StrictChat = anthropic if provider == "anthropic" else google
    server.will(Answer([], 302, {"location": "https://elsewhere.example/x?key=1"}))
    model = made(provider, server.port)
    error = await fail(model)
    assert (error.kind, error.status) == ("bad_request", 302)
    assert "https://elsewhere.example/x" in error.message
    assert "key=1" not in error.message
    assert "BASE_URL" in (error.hint or "")
    await model.aclose()


async def test_an_error_body_without_end_is_read_within_a_bound(
    anthropic: StrictAnthropic, claude: ProvidersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from postroom.models import providers_wire

    monkeypatch.setattr(providers_wire, "ERROR_READ_S", 0.05)
    anthropic.will(Answer([b'{"error":'], 500, {"content-type": "application/json"}, end="hang"))
    assert (await fail(claude)).status == 500
    anthropic.will(Answer([b"x" * 65_536] * 8, 500, {"content-type": "text/plain"}))
    error = await fail(claude)
    assert (error.status, len(error.message) < 700) == (500, True)


async def test_silence_is_a_timeout(anthropic: StrictAnthropic) -> None:
    model = made("anthropic", anthropic.port, idle_timeout_ms=50)
    anthropic.will(Answer([], end="hang"))
    error = await fail(model)
    assert (error.kind, error.status) == ("timeout", None)
    assert "0.05 s" in error.message
    anthropic.will(Answer([message_start()], end="hang"))
    assert (await fail(model)).kind == "timeout"
    await model.aclose()


async def test_a_refused_connection_names_the_address_and_what_to_check() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for provider in ("anthropic", "google"):
        model = made(provider, port)
        error = await fail(model)
        assert error.kind == "transport"
        assert f"127.0.0.1:{port}" in error.message
        assert f"{provider.upper()}_BASE_URL" in (error.hint or "")
        await model.aclose()


async def test_an_unknown_host_is_named() -> None:
    model = made("anthropic", host="no-such-host.invalid")
    error = await fail(model)
    assert (error.kind, error.message) == (
        "transport",
        "cannot find the host no-such-host.invalid",
    )
    await model.aclose()


async def test_what_is_no_http_is_a_transport_error(
    anthropic: StrictAnthropic, claude: ProvidersModel
) -> None:
    anthropic.will(Answer(raw=b"220 mail.example ESMTP\r\n"))
    assert (await fail(claude)).kind == "transport"
    anthropic.will(Answer(raw=b""))
    error = await fail(claude)
    assert (error.kind, error.message) == (
        "transport",
        "anthropic:claude-sonnet-5-5 closed the connection without an answer",
    )


@pytest.mark.parametrize("events", [b"data: {}\n\n", b"event: x\ndata: [\n\n", b": nothing\n\n"])
async def test_a_stream_of_something_else_is_an_error(
    anthropic: StrictAnthropic,
    claude: ProvidersModel,
    google: StrictGoogle,
    gemini: ProvidersModel,
    events: bytes,
) -> None:
    anthropic.will([events])
    assert (await fail(claude)).retryable
    google.will([events])
    assert (await fail(gemini)).retryable


async def test_no_key_is_repeated_whoever_says_it(
    anthropic: StrictAnthropic, claude: ProvidersModel, google: StrictGoogle, gemini: ProvidersModel
) -> None:
    text = f"you sent x-api-key: {KEY}"
    anthropic.will(refused(401, anthropic_error("authentication_error", text)))
    google.will(refused(400, google_error(400, "INVALID_ARGUMENT", text)))
    for model, server in ((claude, anthropic), (gemini, google)):
        error = await fail(model)
        shown = "".join(traceback.format_exception(error))
        assert KEY not in f"{shown} {error!r} {vars(error)} {error.__cause__} {error.__context__}"
        assert "[key]" in error.message
        assert KEY not in repr(model)
        server.will(Answer(raw=b"no http"))
        error = await fail(model)
        assert error.__context__ is None


def test_every_exception_of_the_library_has_a_word() -> None:
    """If this fails the library has grown an exception: say in the table what it means to us."""
    from pydantic_ai import exceptions

    grown = {
        cls.__name__
        for _, cls in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(cls, BaseException)
        and not issubclass(cls, Warning)
        and cls.__module__ == exceptions.__name__
        and not cls.__name__.startswith("_")
    }
    assert grown - set(KINDS) - NOT_OURS == set()
    assert (set(KINDS) | NOT_OURS) - grown == set(), "the library has lost one"


def test_every_exception_below_the_library_has_a_kind() -> None:
    import anthropic
    import botocore.exceptions
    import google.genai.errors
    import httpx2
    import urllib3.exceptions

    # Arguments to functions of the SDK's own, which are not used; signs of wrong code.
    not_ours = {"CookieConflict", "UnknownFunctionCallArgumentError", "UnsupportedFunctionError"}
    not_ours |= {"FunctionInvocationError", "MissingServiceIdError", "UndefinedModelAttributeError"}
    wordless: list[str] = []
    for module in (anthropic, google.genai.errors, httpx2, botocore.exceptions):
        package = module.__name__.partition(".")[0]
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if not issubclass(cls, Exception) or issubclass(cls, Warning) or name in not_ours:
                continue
            if cls.__module__.partition(".")[0] != package:
                continue
            if kind_of_exception(cls.__new__(cls)) is None:
                wordless.append(f"{package}.{name}")
    assert wordless == []
    assert ("urllib3", urllib3.exceptions.HTTPError.__name__) in BELOW


# ---- long histories ----


def long_request(count: int) -> ModelRequest:
    messages: list[ContextMessage] = []
    while len(messages) < count - 1:
        number = len(messages)
        messages += [
            user(f"question {number} " * 10),
            assistant(f"answer {number} " * 20, call(f"c{number}"), seq=number),
            result(f"c{number}", "seen " * 40),
        ]
    return request(*messages[: count - 1], user("last"), tools=(LOOK,))


class Pulse:
    """Looks at the loop from within: the most work it does at one go.

    Work, not time: another process on the machine may take the processor away, but not work.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def during(self, awaitable: Awaitable[Reply]) -> Reply:
        task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        try:
            return await bounded(awaitable, 60)
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            work = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - work)


@pytest.mark.parametrize("provider", ["anthropic", "google", "bedrock"])
async def test_a_long_history_is_built_off_the_loop(
    provider: str, model_server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    real = providers_library.messages_of

    def noted(request: ModelRequest, **how: Any) -> Any:
        if len(request.messages) > 1_000:
            threads.add(threading.get_ident())
        return real(request, **how)

    monkeypatch.setattr(providers_library, "messages_of", noted)
    wanted = long_request(2_000)
    pulse = Pulse()
    async with AsyncExitStack() as stack:
        if provider == "bedrock":
            server = await stack.enter_async_context(StrictBedrock())
            model = made(provider, server.port)
            server.will(bedrock_stream([*bedrock_text(0, "OK"), *bedrock_end()]))
            assert (await say(model, wanted)).content == (Text("OK"),)
            assert server.requests[-1].body == model.render(wanted)
        else:
            model = made(provider, model_server.port)
            await say(model)
            reply = await pulse.during(model.respond(wanted, lambda _: None))
            assert reply.content == (Text("OK"),)
            assert model_server.bodies()[-1] == model.render(wanted)
        await model.aclose()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    # Building it is 50 (Anthropic) to 600 (Google) ms of work.
    assert pulse.longest_s < 0.03


async def test_large_files_are_encoded_off_the_loop(
    anthropic: StrictAnthropic, claude: ProvidersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[str] = []
    real = providers_library.Library.record

    def noted(self: Any, request: ModelRequest) -> Any:
        recorded.append(threading.current_thread().name)
        return real(self, request)

    monkeypatch.setattr(providers_library.Library, "record", noted)
    await say(claude, request(user("see", PNG), media={PNG.artifact: b"x" * 1_000}))
    await say(claude, request(user("see", PNG), media={PNG.artifact: b"x" * 1_000_000}))
    assert len(recorded) == 1
    assert recorded[0].startswith("postroom-providers")
    assert len(anthropic.requests[-1].body) > 1_300_000


async def test_cancelling_while_a_long_history_is_built_sends_nothing(
    anthropic: StrictAnthropic, claude: ProvidersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    building, go_on = threading.Event(), threading.Event()
    real = providers_library.Library.record

    def slow(self: Any, request: ModelRequest) -> Any:
        building.set()
        assert go_on.wait(10)
        return real(self, request)

    await say(claude)
    monkeypatch.setattr(providers_library.Library, "record", slow)
    task = asyncio.create_task(claude.respond(long_request(200), lambda _: None))
    assert await bounded(asyncio.to_thread(building.wait, 10))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(task)
    go_on.set()
    await say(claude)
    assert len(anthropic.requests) == 2


# ---- Bedrock ----


@pytest.fixture
async def bedrock() -> AsyncIterator[StrictBedrock]:
    async with StrictBedrock() as server:
        yield server


async def test_bedrock_is_asked_and_answers_in_its_own_dialect(bedrock: StrictBedrock) -> None:
    model = made("bedrock", bedrock.port, name="us.anthropic.claude-sonnet-5-5")
    thought = [
        frame("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"reasoningContent": piece}})
        for piece in ({"text": "hm"}, {"signature": "SIG"})
    ]
    called = bedrock_call(1, "tooluse_1", "look", '{"at":', '"x"}')
    bedrock.will(bedrock_stream([BEDROCK_START, *thought, *called, *bedrock_end("tool_use")]))
    wanted = request(user("see", PNG), tools=(LOOK,), media=MEDIA)
    reply = await say(model, wanted)
    assert reply.content == (
        Reasoning("hm", "bedrock:thinking:SIG"),
        ToolCall("tooluse_1", "look", '{"at":"x"}'),
    )
    assert (reply.finish, reply.usage) == ("tool_calls", Usage(12, 5, 5, 0))
    assert reply.request_id == "req-bedrock"
    (received,) = bedrock.requests
    assert "claude-sonnet-5-5" in received.target
    assert received.body == model.render(wanted)
    assert received.json["messages"][0]["content"][1]["image"]["format"] == "png"
    # And back it goes.
    bedrock.will(bedrock_stream([BEDROCK_START, *bedrock_text(0, "Nice."), *bedrock_end()]))
    history = (
        user("go"),
        ContextMessage("assistant", reply.content, 2),
        result("tooluse_1", "no", error=True),
    )
    await say(model, request(*history, tools=(LOOK,)))
    _, said, answered = bedrock.requests[-1].json["messages"]
    assert said["content"][0]["reasoningContent"]["reasoningText"]["signature"] == "SIG"
    assert answered["content"][0]["toolResult"]["status"] == "error"
    await bounded(model.aclose())
    await bounded(bedrock.no_connection())


@pytest.mark.parametrize(
    ("status", "code", "text", "kind"),
    [
        (429, "ThrottlingException", "slow", "rate_limit"),
        (400, "ValidationException", "odd", "bad_request"),
        (400, "ValidationException", "Input is too long for requested model.", "context_overflow"),
        (400, "ServiceQuotaExceededException", "no more", "quota"),
        (403, "AccessDeniedException", "no", "auth"),
        (404, "ResourceNotFoundException", "none", "bad_request"),
        (503, "ServiceUnavailableException", "later", "server"),
    ],
)
async def test_what_bedrock_refuses_and_why(
    bedrock: StrictBedrock, status: int, code: str, text: str, kind: ModelErrorKind
) -> None:
    model = made("bedrock", bedrock.port)
    headers = {"x_amzn_errortype": code, "x_amzn_requestid": "req_7"}
    bedrock.will(refused(status, {"message": f"{text} {KEY}"}, **headers))
    error = await fail(model)
    assert (error.kind, error.status, error.request_id) == (kind, status, "req_7")
    assert text in error.message
    assert KEY not in "".join(traceback.format_exception(error))
    assert len(bedrock.requests) == 1
    await model.aclose()


async def test_an_exception_inside_bedrocks_stream_is_an_error(bedrock: StrictBedrock) -> None:
    model = made("bedrock", bedrock.port)
    gone = frame("throttlingException", {"message": "slow"}, message_type="exception")
    bedrock.will(bedrock_stream([BEDROCK_START, *bedrock_text(0, "half"), gone]))
    error = await fail(model)
    assert (error.kind, error.status) == ("rate_limit", 429)
    await model.aclose()


async def test_bedrock_without_credentials_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    model = open_bedrock({"AWS_REGION": "us-east-1"})
    error = await fail(model)
    assert error.kind == "auth"
    assert "AWS_" in (error.hint or "")
    error = await fail(open_bedrock({}))
    assert (error.kind, "region" in error.message) == ("bad_request", True)
    assert "AWS_REGION" in (error.hint or "")


def open_bedrock(env: dict[str, str]) -> ProvidersModel:
    return providers.open_bedrock(opening("bedrock", "us.amazon.nova-pro", env))


def opening(provider: str, name: str, env: dict[str, str]) -> Opening:
    return Opening(ModelRef(provider, name), env, 1_000, None, SystemClock())


# ---- opening ----


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_registered", {})
    providers.register()


@pytest.mark.usefixtures("registered")
def test_what_is_known_of_a_model_comes_with_it() -> None:
    env = {"ANTHROPIC_API_KEY": KEY, "GOOGLE_API_KEY": KEY}
    for name in ("anthropic", "google"):
        default = catalog.facts(f"{name}:{pick(name)}")
        assert default.price is not None
        model = open_model(f"{name}:{pick(name)}", env)
        assert model.window == default.window is not None
        assert {"image/png", "application/pdf"} <= model.accepts
    assert "image/gif" not in open_model("google:gemini-3.8-flash", env).accepts
    assert open_model("google:gemma-3-27b-it", env).accepts == frozenset()
    assert open_model("anthropic:claude-x", env, window=9).window == 9


def pick(provider: str) -> str:
    default = pick_default({f"{provider.upper()}_API_KEY": KEY})
    assert default is not None
    return default.partition(":")[2]


@pytest.mark.usefixtures("registered")
def test_the_environment_says_what_is_ready() -> None:
    env = {"GEMINI_API_KEY": KEY, "AWS_PROFILE": "work"}
    found = {offer.provider: offer for offer in offers(env)}
    assert (found["anthropic"].ready, found["anthropic"].key_variable) == (
        False,
        "ANTHROPIC_API_KEY",
    )
    assert (found["google"].ready, found["google"].local) == (True, False)
    assert (found["bedrock"].ready, found["bedrock"].local) == (True, False)
    assert not {o.provider: o for o in offers({})}["bedrock"].ready
    assert pick_default(env) == "google:gemini-3.8-flash"
    assert pick_default({"AWS_PROFILE": "work"}) is None


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["anthropic", "google"])
def test_a_provider_opens_with_its_key_and_its_address(name: str) -> None:
    key, url = f"{name.upper()}_API_KEY", f"{name.upper()}_BASE_URL"
    with pytest.raises(MissingKey, match=key):
        open_model(f"{name}:x", {key: " "})
    for given_url in ("https://own.example", "https://own.example/", "https://own.example/v1"):
        model = open_model(f"{name}:x", {key: KEY, url: given_url})
        assert "'https://own.example'" in repr(model)
        assert KEY not in repr(model)
    for wrong in ("own.example", "https://ada:hush@own.example", "https://own.example?q=1"):
        with pytest.raises(ConfigError, match=url) as caught:
            open_model(f"{name}:x", {key: KEY, url: wrong})
        assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match=key):
        open_model(f"{name}:x", {key: "two words"})


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("ref", "missing"),
    [
        ("anthropic:x", "pydantic_ai"),
        ("anthropic:x", "anthropic"),
        ("google:x", "google.genai"),
        ("bedrock:x", "boto3"),
    ],
)
def test_a_part_that_is_not_installed_is_named(
    ref: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )
    env = {"ANTHROPIC_API_KEY": KEY, "GOOGLE_API_KEY": KEY, "AWS_PROFILE": "x"}
    with pytest.raises(UsageError) as caught:
        open_model(ref, env)
    assert caught.value.hint == "pip install 'postroom[providers]'"


async def test_a_library_that_cannot_be_imported_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "postroom.models.providers_anthropic", None)
    error = await fail(made("anthropic"))
    assert error.kind == "bad_request"
    assert "pip install 'postroom[providers]'" in (error.hint or "")


def test_registering_and_opening_import_no_library() -> None:
    code = (
        "import sys\n"
        "from postroom.models import catalog, providers\n"
        "providers.register()\n"
        "env = {'ANTHROPIC_API_KEY': 'k', 'GOOGLE_API_KEY': 'k', 'AWS_PROFILE': 'x'}\n"
        "for ref in ('anthropic:x', 'google:x', 'bedrock:x'):\n"
        "    catalog.open_model(ref, env)\n"
        "heavy = {'pydantic', 'pydantic_ai', 'anthropic', 'google.genai', 'boto3', 'botocore',\n"
        "         'httpx', 'httpx2', 'aiohttp'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
