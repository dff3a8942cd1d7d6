"""The scripted model: what a script may say, and how it is played."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params
from postroom.domain.ids import SessionId
from postroom.domain.message import Image, Text, ToolCall, text_of
from postroom.errors import ConfigError, ModelError
from postroom.models.catalog import open_model
from postroom.models.scripted import ScriptedModel, open_script, parse_script
from postroom.ports.model import CallDelta, Delta, ModelRequest, ReasoningDelta, TextDelta
from tests.support import bounded


class HandClock:
    """Goes only when it is told to; ``waits`` are those that were asked for."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.asked = asyncio.Event()
        self.over = asyncio.Event()

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> int:
        return 0

    async def sleep_ms(self, ms: float) -> None:
        self.waits.append(ms)
        self.asked.set()
        await self.over.wait()

    def jitter(self) -> float:
        return 0


def request(number: int = 1, *texts: str, session: str = "session_a") -> ModelRequest:
    messages = [ContextMessage("user", (Text(text),), 1) for text in texts or ("Hi",)]
    return ModelRequest(SessionId(session), number, "", messages, (), Params())


def played(*replies: dict[str, Any], **more: Any) -> ScriptedModel:
    return ScriptedModel("scripted:test", parse_script({"replies": list(replies), **more}))


async def text(model: ScriptedModel, number: int = 1) -> str:
    return text_of((await bounded(model.respond(request(number), lambda _: None))).content)


async def test_replies_follow_the_number_of_the_request_retries_included() -> None:
    model = played({"text": "one"}, {"error": {"status": 500}}, {"text": "three"})
    assert await text(model, 1) == "one"
    with pytest.raises(ModelError):
        await text(model, 2)
    assert await text(model, 3) == "three"
    assert await text(model, 1) == "one"


async def test_echo_answers_with_the_last_user_text() -> None:
    model = open_script("scripted:echo", "echo")
    reply = await model.respond(request(7, "first", "the\nlast"), lambda _: None)
    assert text_of(reply.content) == "the\nlast"


async def test_echo_names_the_files_of_a_message_and_is_empty_without_one() -> None:
    model = open_script("scripted:echo", "echo")
    picture = Image(artifact="sha256:a", media_type="image/png", size=1, name="a.png")
    message = ContextMessage("user", (Text("See"), picture), 1)
    asked = ModelRequest(SessionId("s"), 1, "", [message], (), Params())
    assert "a.png" in text_of((await model.respond(asked, lambda _: None)).content)
    nothing = ModelRequest(SessionId("s"), 1, "", [], (), Params())
    assert (await model.respond(nothing, lambda _: None)).content == ()


@pytest.mark.parametrize(("then", "said"), [("repeat", "one"), ("echo", "Hi")])
async def test_then_says_what_comes_after_the_last_reply(then: str, said: str) -> None:
    model = played({"text": "one"}, then=then)
    assert await text(model, 2) == said
    assert await text(model, 9) == said


@pytest.mark.parametrize("more", [{}, {"then": "error"}])
async def test_a_script_that_is_too_short_fails_unless_it_says_otherwise(
    more: dict[str, str],
) -> None:
    with pytest.raises(ModelError, match=r"has 1 replies, and this is request 2") as caught:
        await text(played({"text": "one"}, **more), 2)
    assert not caught.value.retryable


async def test_chunks_are_that_many_deltas() -> None:
    for chunks, text_, expected in [(3, "abcdefgh", 3), (5, "abc", 3), (1, "abc", 1), (4, "", 0)]:
        deltas: list[Delta] = []
        await played({"text": text_, "chunks": chunks}).respond(request(), deltas.append)
        assert len(deltas) == expected
        assert "".join(d.text for d in deltas if isinstance(d, TextDelta)) == text_


async def test_everything_of_a_reply_is_told_in_order_before_its_error() -> None:
    reply = {"reasoning": "hm", "text": "so", "tool_calls": [{"name": "look"}]}
    model = played({**reply, "error": {"code": "transport"}})
    deltas: list[Delta] = []
    with pytest.raises(ModelError) as caught:
        await model.respond(request(), deltas.append)
    assert deltas == [ReasoningDelta("hm"), TextDelta("so"), CallDelta("look")]
    assert (caught.value.kind, caught.value.status) == ("transport", None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"status": 429, "code": "rate_limit", "retry_after_ms": 500}, "rate_limit"),
        ({"status": 429, "code": "insufficient_quota"}, "quota"),
        ({"status": 400, "code": "context_length_exceeded"}, "context_overflow"),
        ({"status": 401}, "auth"),
        ({"status": 529}, "server"),
        ({"code": "timeout"}, "timeout"),
        ({"code": "refused"}, "refused"),
        ({"code": "empty"}, "empty"),
        ({"code": "quota"}, "quota"),
    ],
)
async def test_an_error_has_the_kind_the_real_adapters_give_it(
    error: dict[str, Any], kind: str
) -> None:
    with pytest.raises(ModelError) as caught:
        await text(played({"error": error}))
    assert (caught.value.kind, caught.value.status) == (kind, error.get("status"))
    assert caught.value.retry_after_ms == error.get("retry_after_ms")


async def test_call_ids_follow_from_session_request_and_place() -> None:
    model = played({"tool_calls": [{"name": "a"}, {"name": "a"}]}, then="repeat")

    async def ids(number: int, session: str) -> list[str]:
        asked = request(number, session=session)
        reply = await model.respond(asked, lambda _: None)
        return [b.call_id for b in reply.content if isinstance(b, ToolCall)]

    assert await ids(1, "session_a") == await ids(1, "session_a")
    every = [*await ids(1, "session_a"), *await ids(2, "session_a"), *await ids(1, "session_b")]
    assert len(set(every)) == 6
    assert all(len(i) <= 40 for i in every)


async def test_arguments_may_be_an_object_or_text_that_is_none() -> None:
    calls = [{"name": "a", "arguments": {"b": [1, "ä"]}}, {"name": "a", "arguments": '{"b'}]
    reply = await played({"tool_calls": calls}).respond(request(), lambda _: None)
    assert [b.arguments for b in reply.content if isinstance(b, ToolCall)] == [
        '{"b":[1,"ä"]}',
        '{"b',
    ]


async def test_a_delay_is_waited_out_on_the_given_clock() -> None:
    clock = HandClock()
    model = ScriptedModel(
        "scripted:test", parse_script({"replies": [{"text": "x", "delay_ms": 750}]}), clock=clock
    )
    deltas: list[Delta] = []
    task = asyncio.create_task(model.respond(request(), deltas.append))
    await bounded(clock.asked.wait())
    assert (clock.waits, deltas) == ([750], [])
    clock.over.set()
    await bounded(task)
    assert deltas == [TextDelta("x")]


async def test_usage_is_counted_in_fours_of_bytes() -> None:
    model = played({"text": "12345", "reasoning": "1234"})
    usage = (await model.respond(request(), lambda _: None)).usage
    assert (usage.output_tokens, usage.reasoning_tokens) == (3, 1)
    assert usage.input_tokens == -(-len(model.render(request())) // 4)


def test_a_window_and_media_types_may_be_given() -> None:
    model = open_model("scripted:echo", {}, window=1_000)
    assert model.window == 1_000
    seeing = ScriptedModel("scripted:x", parse_script({}), accepts=frozenset({"image/png"}))
    assert seeing.accepts == {"image/png"}


async def test_a_file_is_played_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a script.json"
    path.write_text('{"replies": [{"text": "from the file"}]}')
    model = open_model(f"scripted:{path}", {})
    assert model.ref == f"scripted:{path}"
    reply = await bounded(model.respond(request(), lambda _: None))
    assert text_of(reply.content) == "from the file"


WRONG: list[tuple[Any, str]] = [
    ({"replies": [{}, {"txt": "x"}]}, "reply 2: Object contains unknown field `txt`"),
    ({"replies": [{"text": 5}]}, "reply 1: text: Expected `str`, got `int`"),
    ({"replies": [{"tool_calls": [{}]}]}, "reply 1: tool_calls[0]: Object missing required"),
    ({"replies": [{"tool_calls": [{"name": ""}]}]}, "reply 1: tool_calls[0].name: there is"),
    ({"replies": [{"tool_calls": [{"name": "a", "arguments": [1]}]}]}, "arguments: Expected"),
    ({"replies": [{"finish": "tool_calls"}]}, "reply 1: finish: Invalid enum value"),
    ({"replies": [{"chunks": 0}]}, "reply 1: chunks: at least 1"),
    ({"replies": [{"delay_ms": -1}]}, "reply 1: delay_ms: at least 0"),
    ({"replies": [{"error": {}}]}, "reply 1: error: a status or a code is needed"),
    ({"replies": [{"error": {"status": 200}}]}, "reply 1: error.status: from 300 to 599"),
    ({"replies": [{"error": {"status": "429"}}]}, "reply 1: error.status: Expected"),
    (
        {"replies": [{"error": {"status": 429, "retry_after_ms": -1}}]},
        "reply 1: error.retry_after_ms: at least 0",
    ),
    ({"then": "stop"}, "then: Invalid enum value 'stop'"),
    ({"then": "repeat"}, "then: there is no reply to repeat"),
    ({"reply": []}, "Object contains unknown field `reply`"),
    ([], "Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("script", "told"), WRONG)
def test_a_wrong_script_is_refused_with_the_place(tmp_path: Path, script: Any, told: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(script))
    with pytest.raises(ConfigError) as caught:
        open_model(f"scripted:{path}", {})
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b'{"replies": [{"text": "\xff"}]}'])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not JSON"):
        open_model(f"scripted:{path}", {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json: No such file"):
        open_model(f"scripted:{tmp_path}/nothing.json", {})
