"""Cuts text to a platform's measure: never inside a grapheme, code blocks closed and opened again.

A piece ends, as far back as half of it, after a paragraph; else a line, a sentence, a word; else
anywhere between two graphemes. Where it ends inside a fenced code block a line with the fence is
added, and the next piece begins with the block's opening line. Nothing else is added, and nothing is
left out: `join` gives back the very source.

What was added is recognised by one rule: no piece but the last ends by itself with a line that is
only a fence, so a piece that does had it added, and the first line of the next one too. Where the
limit is too small for that the blocks are left unbalanced. A grapheme longer than the limit is cut
between its code points, for it fits nowhere.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from postroom.ports.channel import Unit

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
_ENDS_WITH_FENCE = re.compile(r"\n(`{3,}|~{3,})\Z")
_SENTENCE = re.compile(r"[.!?…。！？][\"')\]»”’]*\s+")
_INFO_MAX = 24
_LOOK_BACK = 64


def split(text: str, limit: int, unit: Unit) -> list[str]:
    """The text in pieces of at most ``limit`` units; one piece, the text itself, where it fits.

    Raises:
        ValueError: the limit is under one, or under four where bytes are counted.
    """
    if limit < (4 if unit == "utf8" else 2 if unit == "utf16" else 1):
        raise ValueError(f"nothing can be cut to {limit} {unit}")
    if measure(text, unit) <= limit:
        return [text]
    pieces: list[str] = []
    at = 0
    fence = ""
    while at < len(text):
        before = f"{fence}\n" if fence else ""
        room = limit - measure(before, unit)
        if _fits(text, at, room, unit):
            pieces.append(before + text[at:])
            break
        reserved = 0
        while True:  # room for a closing line is found out by cutting
            cut = _cut(text, at, room - reserved, unit, bool(before))
            opened = _open_after(text[at:cut], fence)
            if not _is_affordable(opened, limit, unit):
                opened = ""
            after = f"\n{_run(opened)}" if opened else ""
            if measure(after, unit) <= reserved:
                break
            reserved = measure(after, unit)
        pieces.append(before + text[at:cut] + after)
        at, fence = cut, opened
    return pieces


def _is_affordable(fence: str, limit: int, unit: Unit) -> bool:
    return bool(fence) and measure(f"{fence}\n\n{_run(fence)}", unit) <= limit // 2


def join(pieces: list[str]) -> str:
    """The source of the pieces, what `split` added taken out again."""
    out: list[str] = []
    added = False
    for number, piece in enumerate(pieces):
        start = piece.index("\n") + 1 if added else 0
        match = _ENDS_WITH_FENCE.search(piece) if number < len(pieces) - 1 else None
        out.append(piece[start : match.start() if match is not None else len(piece)])
        added = match is not None
    return "".join(out)


def measure(text: str, unit: Unit) -> int:
    """How long the platform says the text is."""
    if unit == "codepoint":
        return len(text)
    if unit == "utf8":
        return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _fits(text: str, at: int, room: int, unit: Unit) -> bool:
    return len(text) - at <= room and measure(text[at:], unit) <= room


def _cut(text: str, at: int, room: int, unit: Unit, led: bool) -> int:
    """Where a piece that begins at ``at`` ends. ``led``: a line was put before it."""
    end = at + _count(text[at : at + room], room, unit)
    half = at + (end - at) // 2
    for found in (
        text.rfind("\n\n", half, end) + 2,
        text.rfind("\n", half, end) + 1,
        _after_sentence(text, half, end),
        text.rfind(" ", half, end) + 1,
    ):
        if found > half and _boundary_before(text, at, found) == found:
            return found
    cut = _boundary_before(text, at, end)
    while cut > at and _misleads(text, at, cut, led):
        cut = _boundary_before(text, at, cut - 1)
    if cut > at:
        return cut
    return next(c for c in (end, at + 2, at + 1) if c > at and not _misleads(text, at, c, led))


def _count(head: str, room: int, unit: Unit) -> int:
    """How many code points of ``head`` fit."""
    if unit == "codepoint" or head.isascii():
        return min(len(head), room)
    encoding, width = ("utf-8", 1) if unit == "utf8" else ("utf-16-le", 2)
    data = head.encode(encoding, "surrogatepass")[: room * width]
    while True:
        try:
            fitting = len(data.decode(encoding, "surrogatepass"))
        except UnicodeDecodeError:
            data = data[:-width]
            continue
        # A high half alone at the cut decodes, and belongs to the code point that does not fit.
        return fitting if head[fitting - 1 : fitting] == _last(data, encoding) else fitting - 1


def _last(data: bytes, encoding: str) -> str:
    return data.decode(encoding, "surrogatepass")[-1:]


def _after_sentence(text: str, low: int, end: int) -> int:
    found = 0
    for match in _SENTENCE.finditer(text, low, end):
        found = match.end()
    return found


def _misleads(text: str, at: int, cut: int, led: bool) -> bool:
    """Whether the piece would end with a line that is only a fence, as if it had been added."""
    line = text.rfind("\n", at, cut)
    if line < 0 and not led:
        return False
    last = text[max(line + 1, at) : cut]
    return len(last) >= 3 and last[0] in "`~" and not last.strip(last[0])


# ---- graphemes ----


def _boundary_before(text: str, at: int, cut: int) -> int:
    """The last boundary between graphemes at or before ``cut``; ``at`` is one."""
    if cut >= len(text) or cut <= at:
        return min(max(cut, at), len(text))
    if _plain(text, cut):
        return cut
    start = at
    for back in range(cut - 1, max(at, cut - _LOOK_BACK), -1):
        if _plain(text, back):
            start = back
            break
    last = start
    for match in _graphemes()(text, start, min(len(text), cut + _LOOK_BACK)):
        if match.end() > cut:
            break
        last = match.end()
    return last


def _plain(text: str, cut: int) -> bool:
    """Whether two plain letters meet here: nothing of ASCII joins, but CR and LF."""
    return text[cut - 1] < "\x7f" and text[cut] < "\x7f" and text[cut - 1 : cut + 1] != "\r\n"


@cache
def _graphemes() -> Any:
    import regex

    return regex.compile(r"\X").finditer


# ---- fences ----


def _open_after(text: str, fence: str) -> str:
    """The opening line of the block that is open at the end of the text; empty if none is.

    ``fence`` is the one that was open at its beginning.
    """
    for match in _FENCE.finditer(text):
        run, info = match.groups()
        if not fence:
            if run[0] == "`" and "`" in info:
                continue
            fence = run + info.rstrip("\r")[:_INFO_MAX]
        elif run[0] == fence[0] and len(run) >= len(_run(fence)) and not info.strip():
            fence = ""
    return fence


def _run(fence: str) -> str:
    return fence[: len(fence) - len(fence.lstrip(fence[0]))]
