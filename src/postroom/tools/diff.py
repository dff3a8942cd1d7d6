"""A unified diff of two versions of one text, in time that their size bounds."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

CONTEXT_LINES = 3
# Comparing is quadratic in the lines that differ; beyond this a diff helps nobody anyway.
CHANGED_LINES_MAX = 1_000


def unified(before: str, after: str, name: str) -> str:
    """The diff, or one sentence where too many lines changed; empty if nothing did."""
    old, new = _lines(before), _lines(after)
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    if len(old) == start + end == len(new):
        return ""
    changed = max(len(old), len(new)) - start - end
    if changed > CHANGED_LINES_MAX:
        return (
            f"{len(old) - start - end} lines from line {start + 1} on "
            f"became {len(new) - start - end}: too many for a diff"
        )
    first = max(0, start - CONTEXT_LINES)
    last = max(0, end - CONTEXT_LINES)
    out = [f"--- {name}\n", f"+++ {name}\n"]
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        out.append(f"@@ -{_span(first + i1, i2 - i1)} +{_span(first + j1, j2 - j1)} @@\n")
        for kind, a1, a2, b1, b2 in group:
            if kind == "equal":
                out += _marked(" ", old[a1:a2])
                continue
            out += _marked("-", old[a1:a2])
            out += _marked("+", new[b1:b2])
    return "".join(out)


def _lines(text: str) -> list[str]:
    """Lines with their ends. Only a line feed ends one: other separators are text here."""
    *whole, last = text.split("\n")
    return [line + "\n" for line in whole] + ([last] if last else [])


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _span(start: int, length: int) -> str:
    return f"{start + (1 if length else 0)},{length}"


def _marked(mark: str, lines: Sequence[str]) -> list[str]:
    return [
        mark + line if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"
        for line in lines
    ]
