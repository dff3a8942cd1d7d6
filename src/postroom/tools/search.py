"""Tools that find files by name (`glob`) and by content (`grep`), in the session's workspace.

The search itself runs in a process of its own (`postroom.tools.search_worker` says why). This side
opens the place to search, bounds the time, and puts what comes back into words.
"""

# ruff: noqa: D417  (a tool's docstring speaks to the model, which has no context to pass)

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from postroom.errors import ToolFailure
from postroom.ports.tool import Tool, ToolContext
from postroom.tools.environment import scrubbed
from postroom.tools.function import tool
from postroom.tools.offload import in_thread
from postroom.tools.pattern import path_regex
from postroom.tools.process import run
from postroom.tools.workspace import Workspace

SEARCH_MS_MAX = 20_000
# The worker watches the clock itself, and is stopped only where it cannot.
_STOP_AFTER_MS = 500
FOUND_MAX = 1_000
ANSWER_BYTES_MAX = 4 * 1024 * 1024
PATTERN_CHARS_MAX = 4_000

_WORKER = Path(__file__).with_name("search_worker.py")

Limit = Annotated[int, msgspec.Meta(ge=1, le=FOUND_MAX)]


class Request(msgspec.Struct):
    """What the worker is asked. ``glob`` is a regular expression over paths, or empty; ``place``
    stands before each path in the answer.
    """

    kind: str
    limit: int
    limit_ms: int
    glob: str = ""
    by_name: bool = False
    pattern: str = ""
    ignore_case: bool = False
    context: int = 0
    files_only: bool = False
    place: str = ""


def search_tools(roots: Sequence[str] = (), *, limit_ms: int = SEARCH_MS_MAX) -> tuple[Tool, ...]:
    """`glob` and `grep`.

    ``roots`` are folders that they may reach besides the session's workspace.
    """

    @tool(effects="none")
    async def glob(ctx: ToolContext, pattern: str, path: str = ".", limit: Limit = 200) -> str:
        """Finds files and folders of the workspace by a pattern, in order of their paths.

        Args:
            pattern: As in src/**/*.py or *.{js,ts}: ** stands for any folders, * and ? stay
                within one name.
            path: The folder to start from, relative to the workspace.
            limit: How many to list.
        """
        request = Request("glob", limit, limit_ms, glob=path_regex(pattern))
        workspace = Workspace(ctx.cwd, roots)
        records, ended = await _ask(workspace, path, request)
        lines = [record[1] for record in records]
        return "\n".join(lines or ["nothing found"]) + _note(ended, limit, limit_ms)

    @tool(effects="none")
    async def grep(
        ctx: ToolContext,
        pattern: str,
        *,
        path: str = ".",
        glob: str = "",
        ignore_case: bool = False,
        context: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0,
        files_only: bool = False,
        limit: Limit = 200,
    ) -> str:
        """Finds lines by a regular expression in files of the workspace.

        Answers with PATH:LINE:TEXT for a match and PATH-LINE-TEXT for the lines around it. Binary
        files and .git are passed over.

        Args:
            pattern: A regular expression, matched within one line.
            path: The file or folder to search, relative to the workspace.
            glob: Only files whose path matches this pattern; without a / only the name counts.
            ignore_case: Match upper and lower case alike.
            context: How many lines to show before and after each match.
            files_only: List only the files that have a match.
            limit: How many matches (or files) to list.
        """
        request = Request(
            "grep",
            limit,
            limit_ms,
            glob=path_regex(glob) if glob else "",
            by_name="/" not in glob,
            pattern=_checked(pattern),
            ignore_case=ignore_case,
            context=context,
            files_only=files_only,
        )
        workspace = Workspace(ctx.cwd, roots)
        records, ended = await _ask(workspace, path, request)
        lines = _grep_lines(records, spaced=context > 0)
        return "\n".join(lines or ["nothing found"]) + _note(ended, limit, limit_ms)

    return glob, grep


_Record: TypeAlias = tuple[str, str] | tuple[str, str, int, str, bool]


def _checked(pattern: str) -> str:
    if len(pattern) > PATTERN_CHARS_MAX:
        raise ToolFailure(f"the pattern has more than {PATTERN_CHARS_MAX} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ToolFailure(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


async def _ask(workspace: Workspace, path: str, request: Request) -> tuple[list[_Record], str]:
    """Runs the worker on one place. The second value is why it ended."""
    if not sys.executable:
        raise ToolFailure("there is no Python interpreter to search with")
    held, request.place = await in_thread(
        lambda: _open(workspace, path, file_too=request.kind == "grep"), name=request.kind
    )
    answer = bytearray()

    def take(data: bytes) -> None:
        if len(answer) < ANSWER_BYTES_MAX:
            answer.extend(data)

    end = await run(
        [sys.executable, "-I", "-S", str(_WORKER), str(held.fd)],
        cwd=None,
        env=scrubbed(),
        sink=take,
        limit_ms=request.limit_ms + _STOP_AFTER_MS,
        stdin=msgspec.json.encode(request),
        pass_fds=(held.fd,),
        grace_ms=0,
    )
    lines = bytes(answer).split(b"\n")
    records: list[_Record] = []
    for line in lines:
        if line.startswith(b'["end", '):
            return records, msgspec.json.decode(line, type=tuple[str, str])[1]
        if line.startswith(b"["):
            try:
                records.append(_decode(line))
            except msgspec.MsgspecError:
                break  # the last line, cut off
    if end.timed_out or len(answer) >= ANSWER_BYTES_MAX:
        return records, "time" if end.timed_out else "limit"
    raise ToolFailure(f"the search failed: {lines[-2 if len(lines) > 1 else -1].decode()[:300]}")


def _decode(line: bytes) -> _Record:
    if line.startswith(b'["line"'):
        return msgspec.json.decode(line, type=tuple[str, str, int, str, bool])
    return msgspec.json.decode(line, type=tuple[str, str])


class _Held:
    """A descriptor that closes when nobody holds it: its opener may have been cancelled."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        os.close(self.fd)


def _open(workspace: Workspace, path: str, *, file_too: bool) -> tuple[_Held, str]:
    """The open file or folder, and what stands before the paths found in it."""
    if file_too and not workspace.is_folder(path):
        with workspace.file(path) as file:
            return _Held(file.fd), file.shown
    with workspace.folder(path) as folder:
        return _Held(folder.fd), "" if folder.shown == "." else folder.shown + "/"


def _grep_lines(records: Sequence[_Record], *, spaced: bool) -> list[str]:
    lines: list[str] = []
    last: tuple[str, int] | None = None
    for record in records:
        if len(record) == 2:
            lines.append(record[1])
            continue
        _, path, number, text, is_match = record
        if spaced and last is not None and last != (path, number - 1):
            lines.append("--")
        last = (path, number)
        lines.append(f"{path}:{number}:{text}" if is_match else f"{path}-{number}-{text}")
    return lines


def _note(ended: str, limit: int, limit_ms: int) -> str:
    if ended == "limit":
        return f"\n[there is more than these {limit}: narrow the search]"
    if ended == "time":
        return f"\n[stopped after {limit_ms / 1000:g} s, so there may be more: narrow the search]"
    return ""
