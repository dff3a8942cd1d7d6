"""Path patterns: ``*`` and ``?`` within a name, ``**`` across folders, ``[a-z]``, ``{a,b}``.

A pattern becomes a regular expression over paths written with ``/``, relative to where the search
starts. Hidden files match like others.
"""

from __future__ import annotations

import re

from postroom.errors import ToolFailure

PATTERN_CHARS_MAX = 1_000
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_CHOICES_MAX = 64


def path_regex(pattern: str) -> str:
    """The regular expression that a whole path has to match.

    Raises:
        ToolFailure: the pattern is empty, too long, or leads out of where it starts.
    """
    if not pattern or len(pattern) > PATTERN_CHARS_MAX:
        raise ToolFailure(f"the pattern must have 1 to {PATTERN_CHARS_MAX} characters")
    if pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
        raise ToolFailure(
            f"{pattern}: a pattern is relative to path and has no '..'",
            hint="name the folder to start from with path",
        )
    return "|".join(_one(choice) for choice in _choices(pattern))


def _choices(pattern: str) -> list[str]:
    """The pattern with each of its ``{a,b}`` spelled out."""
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        if len(waiting) + len(done) > _CHOICES_MAX:
            raise ToolFailure(f"the pattern has more than {_CHOICES_MAX} alternatives")
        current = waiting.pop(0)
        found = _CHOICE.search(current)
        if found is None:
            done.append(current)
            continue
        start, end = found.span()
        waiting += [current[:start] + part + current[end:] for part in found[1].split(",")]
    return done


def _one(pattern: str) -> str:
    out: list[str] = []
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    for index, name in enumerate(names):
        last = index == len(names) - 1
        if name == "**":
            out.append(".*" if last else "(?:[^/]+/)*")
        else:
            out.append(_name(name) + ("" if last else "/"))
    return "".join(out)


def _name(name: str) -> str:
    """One component. Stars side by side are one: two would only make the matching slow."""
    out: list[str] = []
    at = 0
    while at < len(name):
        char = name[at]
        at += 1
        if char == "*":
            if not out or out[-1] != "[^/]*":
                out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (end := name.find("]", at + 1)) > 0:
            body = name[at:end].replace("\\", "\\\\").replace("[", "\\[")
            if body[0] in "!^":
                body = "^" + (body[1:] or "\\!")
            out.append(f"(?!/)[{body}]")
            at = end + 1
        else:
            out.append(re.escape(char))
    return "".join(out)
