"""The validators of the strict server: what they let pass, and what each of their rules refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers.strict_chat import as_anthropic, validate_anthropic, validate_openai


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def calls(*ids: str, content: str | None = None, arguments: str = "{}") -> dict[str, Any]:
    made = [
        {"id": i, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for i in ids
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def tool(call_id: str, content: Any = "a moon") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
SOUND: list[list[dict[str, Any]]] = [
    [user()],
    [SYSTEM, user(), user([{"type": "text", "text": "and"}])],
    [user(), calls("a", "b", content="Hm."), tool("b"), tool("a"), user("So?")],
    [user(), calls("a"), tool("a"), calls("b"), tool("b")],
    [user(), calls("a"), tool("a"), {"role": "assistant", "content": "A moon."}, user("Ah.")],
]


@pytest.mark.parametrize("history", SOUND)
def test_a_sound_history_passes_both(history: list[dict[str, Any]]) -> None:
    assert validate_openai(history) == []
    assert validate_anthropic(as_anthropic(history)) == []


UNSOUND: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nothing": ([], "no messages"),
    "a call without a result": ([user(), calls("a")], "the end: a not answered"),
    "a result too late": ([user(), calls("a"), user(), tool("a")], "a not answered before it"),
    "one result of two": ([user(), calls("a", "b"), tool("a"), user()], "b not answered"),
    "a result twice": ([user(), calls("a"), tool("a"), tool("a")], "a answers no call"),
    "an orphan": ([user(), tool("a")], "a answers no call"),
    "an id twice": (
        [user(), calls("a"), tool("a"), calls("a"), tool("a")],
        "the id a was used before",
    ),
    "an id too long": ([user(), calls("a" * 41), tool("a" * 41)], "is no call id"),
    "empty text": ([user("")], "the content is empty"),
    "no content": ([user(None)], "no text and no list"),
    "an empty part": ([user([{"type": "text", "text": ""}])], "a part is empty"),
    "an image in a result": (
        [user(), calls("a"), tool("a", [{"type": "image_url", "image_url": {"url": "x"}}])],
        "image_url is not taken here",
    ),
    "an empty list of calls": (
        [user(), {"role": "assistant", "content": "x", "tool_calls": []}],
        "tool_calls is empty",
    ),
    "an assistant without anything": (
        [user(), {"role": "assistant", "content": None}],
        "no text and no list",
    ),
    "arguments that are no object": (
        [user(), calls("a", arguments='{"b'), tool("a")],
        "no JSON object",
    ),
    "a role": ([{"role": "robot", "content": "x"}], "no role 'robot'"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_openai_refuses(case: str) -> None:
    history, told = UNSOUND[case]
    assert told in "; ".join(validate_openai(history))


def use(*ids: str) -> dict[str, Any]:
    blocks = [{"type": "tool_use", "id": i, "name": "look", "input": {}} for i in ids]
    return {"role": "assistant", "content": blocks}


def results(*ids: str) -> dict[str, Any]:
    blocks = [{"type": "tool_result", "tool_use_id": i, "content": "x"} for i in ids]
    return {"role": "user", "content": blocks}


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nothing": ([], "the first message is not the user's"),
    "the assistant first": ([{"role": "assistant", "content": "x"}, user()], "the first message"),
    "the assistant last": ([user(), {"role": "assistant", "content": "x"}], "the last message"),
    "uses without results": ([user(), use("a"), user()], "results for [], uses were ['a']"),
    "one result of two": ([user(), use("a", "b"), results("a")], "results for ['a']"),
    "a result twice": ([user(), use("a"), results("a", "a")], "results for ['a', 'a']"),
    "an orphan": ([results("a")], "results for ['a'], uses were []"),
    "text before a result": ([user(), use("a"), user(), results("a")], "behind other content"),
    "an id twice": (
        [user(), use("a"), results("a"), use("a"), results("a")],
        "the id a was used before",
    ),
    "empty text": ([user(" ")], "a text is empty"),
    "no blocks": ([user([])], "the content is empty"),
    "a role": ([user(), {"role": "tool", "content": "x"}, user()], "no role 'tool'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anthropic_refuses(case: str) -> None:
    history, told = WRONG[case]
    assert told in "; ".join(validate_anthropic(history))
