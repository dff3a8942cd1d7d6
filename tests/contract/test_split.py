"""Long texts are cut to a platform's measure, and read back together as they were."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from wcwidth import iter_graphemes

from postroom.channels.split import join, split
from postroom.ports.channel import Unit

PLATFORMS: dict[str, tuple[int, Unit]] = {
    "telegram": (4096, "utf16"),
    "slack": (4000, "codepoint"),
    "slack markdown": (12_000, "codepoint"),
    "discord": (2000, "codepoint"),
    "matrix": (60_000, "utf8"),
    "webhook": (1 << 20, "utf8"),
}
SMALL: list[tuple[int, Unit]] = [
    (limit, unit) for limit in (4, 10, 36, 60, 100) for unit in ("utf16", "codepoint", "utf8")
]
FAMILY = "👨‍👩‍👧‍👦"


def size(text: str, unit: Unit) -> int:
    if unit == "codepoint":
        return len(text)
    units = len(text.encode("utf-8", "surrogatepass"))
    return units if unit == "utf8" else sum(2 if c > "\uffff" else 1 for c in text)


PIECES = st.sampled_from(
    [
        *"a \n\r.`~",
        "word ", "One sentence. ", "\n\n", "\r\n", "   ", "\t", "```", "```\n", "\n```py\n",
        "\n```\n", "~~~ x\n", "\n~~~\n", "````\n", " ```\n", "é", "e\u0301", "\u0301", "漢字。",
        FAMILY, "🇩🇪", "🇫", "\u200d", "क्ष", "\ud800", "\udc00", "x" * 50, "`" * 30, "line\n" * 5,
        "\n```" + "i" * 40 + "\n",
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=60).map("".join)


def fits_and_reads_back(text: str, limit: int, unit: Unit) -> list[str]:
    parts = split(text, limit, unit)
    assert parts
    assert join(parts) == text
    for part in parts:
        assert size(part, unit) <= limit
        assert part or not text
    if size(text, unit) <= limit:
        assert parts == [text]
    return parts


@pytest.mark.contract("CHN-02")
@pytest.mark.parametrize(("limit", "unit"), SMALL)
@settings(max_examples=250, deadline=None)
@given(text=TEXTS)
def test_parts_fit_and_read_back_at_any_limit(limit: int, unit: Unit, text: str) -> None:
    fits_and_reads_back(text, limit, unit)


@pytest.mark.contract("CHN-02")
@pytest.mark.parametrize("platform", PLATFORMS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_parts_fit_and_read_back_on_every_platform(platform: str, data: st.DataObject) -> None:
    limit, unit = PLATFORMS[platform]
    seed = data.draw(st.lists(PIECES, min_size=1, max_size=30).map("".join))
    text = seed * (limit * data.draw(st.integers(1, 2)) // len(seed) + 1)
    fits_and_reads_back(text, limit, unit)


@pytest.mark.contract("CHN-02")
@pytest.mark.parametrize(("limit", "unit"), [(40, "codepoint"), (80, "utf16"), (100, "utf8")])
@settings(max_examples=250, deadline=None)
@given(
    text=st.lists(
        st.sampled_from([FAMILY, "🇩🇪", "e\u0301", "क्ष", "각", "a", " ", "\r\n", "漢", "☝🏽", "\n"]),
        max_size=150,
    ).map("".join)
)
def test_no_grapheme_is_cut(limit: int, unit: Unit, text: str) -> None:
    parts = fits_and_reads_back(text, limit, unit)
    assert [g for part in parts for g in iter_graphemes(part)] == list(iter_graphemes(text))


CODE = st.lists(st.sampled_from(["x = 1\n", "\n", "call(" + "y" * 90 + ")\n", "# a b c\n"]))
PROSE = st.lists(st.sampled_from(["Some words here. ", "\n\n", "word ", "z" * 70]), max_size=10)
FENCES = st.sampled_from(["```", "```py", "~~~", "````md"])


@st.composite
def documents(draw: st.DrawFn) -> str:
    out: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        out.append("".join(draw(PROSE)).strip(" ") + "\n\n")
        fence = draw(FENCES)
        out.append(f"{fence}\n{''.join(draw(CODE))}{fence.rstrip('pymd')}\n\n")
    return "".join(out)


def is_balanced(part: str) -> bool:
    """As a Markdown parser reads it: each block of code ends in a closing line."""
    lines = part.split("\n")
    for token in MarkdownIt().parse(part):
        if token.type == "fence" and token.map is not None:
            closing = lines[token.map[1] - 1].strip()
            if token.map[1] - token.map[0] < 2 or not re.fullmatch(
                re.escape(token.markup[0]) + f"{{{len(token.markup)},}}", closing
            ):
                return False
    return True


@pytest.mark.contract("CHN-02")
@pytest.mark.parametrize(("limit", "unit"), [(60, "codepoint"), (100, "utf16"), (150, "utf8")])
@settings(max_examples=200, deadline=None)
@given(text=documents())
def test_every_part_has_its_fences_balanced(limit: int, unit: Unit, text: str) -> None:
    for part in fits_and_reads_back(text, limit, unit):
        assert is_balanced(part), part


def test_a_cut_fence_is_closed_and_opened_again_with_its_info() -> None:
    lines = [f"line {n}\n" for n in range(20)]
    text = "```py\n" + "".join(lines) + "```\nthe end"
    parts = split(text, 100, "codepoint")
    assert len(parts) > 1
    for part in parts[:-1]:
        assert part.startswith("```py\n")
        assert part.endswith("\n```")
    assert parts[-1].startswith("```py\n")
    assert parts[-1].endswith("```\nthe end")
    assert join(parts) == text


def test_a_long_line_of_code_is_cut_with_a_longer_closing_line() -> None:
    text = "```\n" + "x" * 100 + "\n```"
    parts = split(text, 60, "codepoint")
    assert parts[0] == "```\n" + "x" * (60 - 9) + "\n````"
    assert parts[1].startswith("```\nxx")
    assert join(parts) == text


def test_two_blocks_of_code_that_meet_at_a_cut_stay_two() -> None:
    block = "```py\n" + "x = 1\n" * 12 + "```\n"
    parts = split(block * 4, 100, "codepoint")
    assert parts == [block] * 4
    assert join(parts) == block * 4


@pytest.mark.parametrize(
    "run", ["`" * 500, "``````\n" * 60, "```\n" * 60, "~~~ " * 100, "~~~~\n~~~\n" * 40]
)
@pytest.mark.parametrize("before", ["", "```\n", "```py\nx", "~~~\n", "``` \n"])
@pytest.mark.parametrize("limit", [4, 7, 36, 37, 41, 60])
def test_runs_of_fence_characters_read_back(run: str, before: str, limit: int) -> None:
    fits_and_reads_back(before + run, limit, "codepoint")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 60 + "\n\n" + "b" * 20 + "\n" + "c" * 60, "a" * 60 + "\n\n"),
        ("a" * 60 + "\r\n\r\n" + "b" * 20 + "\r\n" + "c" * 60, "a" * 60 + "\r\n\r\n"),
        ("a" * 60 + "\n" + "b. " + "c" * 60, "a" * 60 + "\n"),
        ("a" * 60 + ". bb " + "c" * 60, "a" * 60 + ". "),
        ("漢" * 60 + "。" + "字" * 60, "漢" * 60 + "。"),
        ("a" * 60 + " bb" + "c" * 60, "a" * 60 + " "),
        ("a" * 150, "a" * 100),
        ("a \n" + "b" * 150, "a \n"),
    ],
)
def test_the_best_place_for_a_cut_is_taken(text: str, first: str) -> None:
    assert split(text, 100, "codepoint")[0] == first


def test_a_block_that_begins_late_begins_the_next_part() -> None:
    text = "word " * 14 + "\n```\n" + "x = 1\n" * 10 + "```\n"
    assert split(text, 100, "codepoint") == ["word " * 14 + "\n", text[71:]]


@pytest.mark.parametrize("count", [1_999, 2_000, 2_001, 6_000, 50_000])
def test_a_text_takes_as_many_parts_as_it_needs(count: int) -> None:
    parts = fits_and_reads_back("x" * count, 2_000, "codepoint")
    assert len(parts) == -(-count // 2_000)


def test_emoji_count_twice_in_utf16() -> None:
    assert [len(p) for p in split("🙂" * 2_049, 4096, "utf16")] == [2_048, 1]
    parts = split(FAMILY * 400, 4096, "utf16")
    assert all(part == FAMILY * (len(part) // len(FAMILY)) for part in parts)


def test_a_grapheme_that_is_too_long_is_cut_between_its_code_points() -> None:
    zalgo = "e" + "\u0301" * 100
    parts = split("ab " + zalgo + "🇩🇪🇫🇷", 10, "codepoint")
    assert all(len(p) <= 10 for p in parts)
    assert "".join(parts) == "ab " + zalgo + "🇩🇪🇫🇷"
    assert [g for p in parts for g in iter_graphemes(p)][-2:] == ["🇩🇪", "🇫🇷"]


def test_the_empty_text_is_one_empty_part() -> None:
    assert split("", 10, "utf8") == [""]
    assert join([""]) == join([]) == ""


def test_what_is_blank_at_the_end_makes_no_part_of_its_own() -> None:
    parts = fits_and_reads_back("x" * 100 + "\n\n", 100, "codepoint")
    assert len(parts) == 2
    assert all(p.strip() for p in parts)


def test_a_limit_too_small_for_a_character_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        split("x", 3, "utf8")


@pytest.mark.parametrize(
    "seed",
    [
        "A sentence of words. ",
        "漢",
        "🇩🇪",
        "\u0301",
        "x",
        "```\n",
        "`",
        "```" + "y" * 900 + "\n",
        " ",
    ],
)
def test_time_grows_with_the_length_and_not_faster(seed: str) -> None:
    def spent(length: int) -> float:
        text = "```\n" + seed * (length // len(seed))
        began = time.process_time()
        parts = split(text, 2_000, "codepoint")
        assert join(parts) == text
        return time.process_time() - began

    short, long = max(0.02, spent(100_000)), spent(800_000)
    assert long < 8 * short * 4
