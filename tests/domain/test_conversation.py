"""Conversation keys: exact, reversible, and collision-free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.conversation import (
    Conversation,
    conversation_key,
    parse_conversation_key,
)
from postroom.errors import InputError

SCOPES = [
    ("telegram", "dm", 1, False),
    ("telegram", "group", 1, True),
    ("slack", "channel", 2, True),
    ("slack", "dm", 2, True),
    ("matrix", "room", 1, True),
    ("discord", "channel", 2, False),
    ("discord", "dm", 1, False),
    ("email", "thread", 1, False),
    ("webhook", "source", 2, False),
    ("loopback", "dm", 1, False),
]

awkward = st.sampled_from(
    [":", "%", "thread", ":thread:", "%3A", " ", "a:b", "ä", "日本", "A", "a"]
)
ids = st.one_of(st.text(st.characters(codec="utf-8"), min_size=1), awkward)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    platform, scope, count, threads = draw(st.sampled_from(SCOPES))
    names = tuple(draw(ids) for _ in range(count))
    thread = draw(st.none() | ids) if threads else None
    return Conversation(platform, scope, names, thread)


def key(conversation: Conversation) -> str:
    return conversation_key(
        conversation.platform,
        conversation.scope,
        *conversation.ids,
        thread=conversation.thread,
    )


@pytest.mark.contract("KEY-01")
@given(conversations())
def test_a_key_parses_back_to_exactly_what_it_was_built_from(conversation: Conversation) -> None:
    assert parse_conversation_key(key(conversation)) == conversation


@pytest.mark.contract("KEY-01")
@given(conversations(), conversations())
def test_two_conversations_never_share_a_key(one: Conversation, other: Conversation) -> None:
    assert (key(one) == key(other)) == (one == other)


@pytest.mark.contract("KEY-02")
def test_the_documented_keys_are_spelled_exactly_so() -> None:
    assert conversation_key("telegram", "dm", "123") == "telegram:dm:123"
    slack = conversation_key("slack", "channel", "T1", "C1", thread="123.4")
    assert slack == "slack:channel:T1:C1:thread:123.4"
    assert conversation_key("matrix", "room", "!room:example") == "matrix:room:%21room%3Aexample"


@pytest.mark.parametrize(
    "text",
    [
        "telegram:123",
        "telegram:dm:",
        "telegram:dm:1:2",
        "telegram:dm:1:thread:2",
        "telegram:group:1:topic:2",
        "slack:channel:T1",
        "matrix:room:!room:example",
        "matrix:room:%21room%3aexample",
        "nowhere:dm:1",
        "",
        "telegram:dm:%FF",
    ],
)
def test_anything_else_is_no_key(text: str) -> None:
    with pytest.raises(InputError):
        parse_conversation_key(text)


def test_an_empty_or_broken_id_is_refused() -> None:
    for id_ in ("", "\ud800"):
        with pytest.raises(InputError):
            conversation_key("telegram", "dm", id_)
