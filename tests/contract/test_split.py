"""Text is cut to a platform's measure, never inside a grapheme, and reads back as it was."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from postroom.channels.split import join, measure, split
from postroom.ports.channel import Unit

PLATFORMS: dict[str, tuple[int, Unit]] = {
    "telegram": (4096, "utf16"),
    "slack": (4000, "codepoint"),
    "discord": (2000, "codepoint"),
    "matrix": (60_000, "utf8"),
    "webhook": (16_384, "utf8"),
    "tiny": (64, "utf16"),
}
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
FLAG = "\U0001f1eb\U0001f1f7"
WORDS = st.sampled_from(
    [
        *("```", "```py\n", "```\n", "~~~\n", "````\n", "`", "\n", "\n\n", " ", "\r\n", "a "),
        *("word ", "e\u0301", FAMILY, FLAG, "\ud55c\uad6d", "x" * 30, "- item\n", "| a | b |\n"),
        *("A sentence. ", "**bold**", "\U0001f600", "\ud800", "\udc00"),
    ]
)
TEXTS = st.lists(WORDS, max_size=120).map("".join)


def fences(text: str) -> int:
    """How many fence lines are open at the end, by the rule for tildes and backticks."""
    fence = ""
    for line in text.split("\n"):
        match = regex.match(r" {0,3}(`{3,}|~{3,})(.*)$", line)
        if match is None:
            continue
        run, info = match.groups()
        if not fence:
            fence = "" if run[0] == "`" and "`" in info else run
        elif run[0] == fence[0] and len(run) >= len(fence) and not info.strip():
            fence = ""
    return len(fence)


@pytest.mark.contract("CHN-02")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("length", [1_999, 2_000, 2_001, 6_000, 50_000])
def test_a_long_answer_becomes_parts_within_the_limit_that_read_back(
    platform: str, length: int
) -> None:
    """C-106."""
    limit, unit = PLATFORMS[platform]
    for source in ("word " * length, FAMILY * length, "a" * length, "one\n\ntwo. " * length):
        text = source[:length]
        pieces = split(text, limit, unit)
        assert join(pieces) == text
        assert all(0 < measure(piece, unit) <= limit for piece in pieces)
        assert len(pieces) <= 1 + 2.5 * measure(text, unit) / limit


@pytest.mark.contract("CHN-02")
@given(TEXTS, st.integers(4, 64), st.sampled_from(["utf16", "codepoint", "utf8"]))
def test_whatever_the_text_and_the_limit_the_parts_fit_and_read_back(
    text: str, limit: int, unit: Unit
) -> None:
    """C-109: progress is guaranteed."""
    pieces = split(text, limit, unit)
    assert join(pieces) == text
    assert all(measure(piece, unit) <= limit for piece in pieces)


@pytest.mark.contract("CHN-02")
@given(TEXTS, st.integers(64, 200), st.sampled_from(["utf16", "codepoint", "utf8"]))
def test_no_part_ends_inside_a_grapheme(text: str, limit: int, unit: Unit) -> None:
    """C-112: no surrogate pair, family or flag is cut."""
    ends = {match.end() for match in regex.finditer(r"\X", text)} | {0}
    pieces = split(text, limit, unit)
    for number in range(1, len(pieces)):
        # A last piece of our own: its first line goes if one was added for it.
        begun = join([*pieces[:number], "Q\nZ"])
        at = len(begun) - (3 if begun.endswith("Q\nZ") else 1)
        assert at in ends, pieces


@pytest.mark.contract("CHN-02")
def test_a_code_block_that_is_cut_is_closed_and_opened_again() -> None:
    code = "".join(f"line {n}\n" for n in range(60))
    text = f"Here it is:\n```python\n{code}```\nThat was it."
    pieces = split(text, 200, "codepoint")
    assert len(pieces) > 2
    assert join(pieces) == text
    for piece in pieces:
        assert fences(piece) == 0, piece
    assert all(piece.startswith("```python\n") for piece in pieces[1:-1])


def test_what_fits_is_left_alone_and_an_empty_text_is_one_part() -> None:
    assert split("", 10, "utf8") == [""]
    assert split("```\nopen", 10, "utf8") == ["```\nopen"]
    assert split("\U0001f600" * 5, 10, "utf16") == ["\U0001f600" * 5]


def test_paragraphs_lines_and_words_are_kept_whole_where_they_can_be() -> None:
    assert split("one two three", 8, "codepoint") == ["one two ", "three"]
    assert split("first line\nsecond line", 16, "codepoint") == ["first line\n", "second line"]
    assert split("para one.\n\npara two.", 15, "codepoint") == ["para one.\n\n", "para two."]


def test_a_limit_under_one_character_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing can be cut"):
        split("xxxxx", 3, "utf8")
