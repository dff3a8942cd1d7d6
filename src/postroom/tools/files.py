"""Tools that read, write, edit and list files of the session's workspace.

All of them stay inside it (see `postroom.tools.workspace`). Reading is bounded, so that what a
model sees in one call fits the history; a large file is read part by part. Writing replaces a file
whole and at once, or not at all.
"""

# ruff: noqa: D417  (a tool's docstring speaks to the model, which has no context to pass)

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import IO, Annotated

import msgspec

from postroom.errors import ToolFailure
from postroom.ports.tool import Tool, ToolContext, ToolOutput
from postroom.tools.content import HEAD_BYTES, TEXT, is_shown, media_type, shown_media
from postroom.tools.diff import unified
from postroom.tools.function import tool
from postroom.tools.offload import in_thread
from postroom.tools.workspace import Slot, Workspace

# A little under what the turn loop keeps of a result, so that a page is not cut a second time.
READ_BYTES_MAX = 30 * 1024
READ_LINES_MAX = 2_000
READ_MS_MAX = 20_000
MEDIA_BYTES_MAX = 10 * 1024 * 1024
KEPT_BYTES_MAX = EDIT_BYTES_MAX = 16 * 1024 * 1024
LIST_ENTRIES_MAX = 1_000
LIST_LOOKS_MAX = 100_000

_PIECE_BYTES = 64 * 1024

Positive = Annotated[int, msgspec.Meta(ge=1)]


def file_tools(roots: Sequence[str] = ()) -> tuple[Tool, ...]:
    """`read_file`, `write_file`, `edit_file` and `list_dir`.

    ``roots`` are folders that they may reach besides the session's workspace.
    """

    @tool(effects="none")
    async def read_file(
        ctx: ToolContext, path: str, offset: Positive = 1, limit: Positive = READ_LINES_MAX
    ) -> ToolOutput:
        """Reads a file of the workspace.

        A text comes as it stands, at most about 30 KB at a time: go on with offset. An image or a
        PDF is shown to you. Other binary files are refused.

        Args:
            path: The file, relative to the workspace.
            offset: The first line to read, from 1.
            limit: How many lines to read.
        """
        page = await in_thread(
            lambda: _read(Workspace(ctx.cwd, roots), path, offset, limit), name="read_file"
        )
        if page.kept is None:
            return ToolOutput(page.text)
        artifact = await ctx.artifacts.put(page.kept)
        if page.kind == TEXT:
            whole = f"\n[the whole file is artifact {artifact}, read it with read_artifact]"
            return ToolOutput(page.text + whole)
        return ToolOutput(
            page.text, media=(shown_media(artifact, page.kind, len(page.kept), page.name),)
        )

    @tool(effects="workspace", exclusive=True)
    def write_file(ctx: ToolContext, path: str, content: str) -> str:
        """Writes a whole file of the workspace; makes it and its folders if they are not there.

        Args:
            path: The file, relative to the workspace.
            content: All that shall be in it.
        """
        data = _encoded(content, "content")
        with Workspace(ctx.cwd, roots).slot(path, make_folders=True) as slot:
            before = slot.look()
            slot.write(data, over=before)
            was = "new" if before is None else f"it had {before.st_size}"
            return f"wrote {len(data)} bytes to {slot.shown} ({was})"

    @tool(effects="workspace", exclusive=True)
    def edit_file(
        ctx: ToolContext, path: str, old: str, new: str, replace_all: bool = False
    ) -> str:
        """Replaces an exact piece of text in a file of the workspace; answers with the diff.

        Args:
            path: The file, relative to the workspace.
            old: The text to replace, exactly as it stands in the file, with its line ends and
                indentation. It must occur once, unless replace_all is set.
            new: The text to put in its place.
            replace_all: Replace every occurrence.
        """
        with Workspace(ctx.cwd, roots).slot(path) as slot:
            return _edit(slot, _encoded(old, "old"), _encoded(new, "new"), replace_all)

    @tool(effects="none")
    def list_dir(ctx: ToolContext, path: str = ".") -> str:
        """Lists a folder of the workspace: its files with their sizes, and its folders.

        Args:
            path: The folder, relative to the workspace.
        """
        with Workspace(ctx.cwd, roots).folder(path) as folder:
            return _listing(folder.fd, folder.shown)

    return read_file, write_file, edit_file, list_dir


class _Page(msgspec.Struct):
    """What to show of a file. ``kept`` goes to the artifact store: an image, a PDF, or a text
    with a line that is too long to page through by lines.
    """

    text: str
    kind: str
    name: str
    kept: bytes | None = None


def _read(workspace: Workspace, path: str, offset: int, limit: int) -> _Page:
    with workspace.file(path) as opened, os.fdopen(os.dup(opened.fd), "rb") as file:
        shown, size = opened.shown, opened.size
        page = _Page("", media_type(file.read(HEAD_BYTES)), os.path.basename(shown))
        file.seek(0)
        if page.kind == TEXT:
            page.text, cut = _lines(file, shown, offset, limit)
            if cut and size <= KEPT_BYTES_MAX:
                file.seek(0)
                page.kept = file.read(KEPT_BYTES_MAX)
            return page
        if not is_shown(page.kind):
            raise ToolFailure(
                f"{shown} is a binary file ({page.kind}, {size} bytes)",
                hint="only text, images and PDFs can be read",
            )
        if size > MEDIA_BYTES_MAX:
            raise ToolFailure(
                f"{shown} ({page.kind}) has {size} bytes; at most {MEDIA_BYTES_MAX} can be shown"
            )
        page.kept = file.read(MEDIA_BYTES_MAX)
        page.text = f"[{shown}: {page.kind}, {len(page.kept)} bytes]"
        return page


def _lines(file: IO[bytes], shown: str, offset: int, limit: int) -> tuple[str, bool]:
    """Lines ``offset`` and on, as many as fit, and a note of what is not shown.

    The second value: the last line was too long and is cut.
    """
    parts: list[str] = []
    left = READ_BYTES_MAX
    number = 0
    for number, piece, starts in _pieces(file, time.monotonic() + READ_MS_MAX / 1000):
        if number < offset:
            continue
        text = piece.decode("utf-8", "replace")
        cost = len(text.encode())
        if number >= offset + limit or (cost > left and parts and starts):
            note = f"\n[lines {offset} to {number - 1} of {shown}; go on with offset={number}]"
            return "".join(parts) + note, False
        if cost > left:
            parts.append(text.encode()[:left].decode("utf-8", "ignore"))
            note = (
                f"\n[line {number} of {shown} is too long and was cut here; "
                f"the next is offset={number + 1}]"
            )
            return "".join(parts) + note, True
        parts.append(text)
        left -= cost
    if number < offset and (number or offset > 1):
        raise ToolFailure(f"{shown} has {number} lines; there is no line {offset}")
    return "".join(parts) or f"[{shown} is empty]", False


def _pieces(file: IO[bytes], deadline: float) -> Iterator[tuple[int, bytes, bool]]:
    """Lines with their number from 1; a very long one in several pieces.

    The last value says whether the piece starts its line.
    """
    number, starts, count = 1, True, 0
    while piece := file.readline(_PIECE_BYTES):
        count += 1
        if not count % 1024 and time.monotonic() > deadline:
            raise ToolFailure(
                f"the file is too large to reach that line in {READ_MS_MAX // 1000} s"
            )
        yield number, piece, starts
        starts = piece.endswith(b"\n")
        number += starts


def _edit(slot: Slot, old: bytes, new: bytes, replace_all: bool) -> str:
    # On the bytes, so that whatever else is in the file (line ends, a byte order mark, another
    # encoding) stays as it is.
    if not old:
        raise ToolFailure("old is empty; to make or replace a whole file use write_file")
    if old == new:
        raise ToolFailure("old and new are the same: there is nothing to change")
    before = slot.look()
    fd, size = slot.open()
    with os.fdopen(fd, "rb") as file:
        if size > EDIT_BYTES_MAX:
            raise ToolFailure(f"{slot.shown} has {size} bytes; at most {EDIT_BYTES_MAX} are edited")
        data = file.read(EDIT_BYTES_MAX + 1)
    if media_type(data[:HEAD_BYTES]) != TEXT:
        raise ToolFailure(f"{slot.shown} is not a text file")
    count = data.count(old)
    if not count:
        raise ToolFailure(f"old does not occur in {slot.shown}{_nearly(data, old)}")
    if count > 1 and not replace_all:
        lines = ", ".join(str(n) for n in _line_numbers(data, old))
        raise ToolFailure(
            f"old occurs {count} times in {slot.shown} (lines {lines})",
            hint="take more of the text around it, so that it is unique, or set replace_all",
        )
    after = data.replace(old, new)
    slot.write(after, over=before)
    times = f" ({count} places)" if count > 1 else ""
    diff = unified(data.decode("utf-8", "replace"), after.decode("utf-8", "replace"), slot.shown)
    return f"edited {slot.shown}{times}\n{diff}"


def _nearly(data: bytes, old: bytes) -> str:
    """Why it may be that the text was not found, if something much like it is there."""
    if b"\r\n" in data and b"\r" not in old and old.replace(b"\n", b"\r\n") in data:
        return ": the file's lines end with \\r\\n, and those of old with \\n"
    text, wanted = data.decode("utf-8", "replace"), old.decode("utf-8", "replace")
    if wanted.casefold() in text.casefold():
        return ": it does with other upper and lower case letters"
    wanted_lines = [line.strip() for line in wanted.strip().split("\n")]
    lines = [line.strip() for line in text.split("\n")]
    for at in range(len(lines) - len(wanted_lines) + 1):
        if lines[at : at + len(wanted_lines)] == wanted_lines:
            return f": at line {at + 1} it does with other spaces or indentation"
    if wanted_lines[0] in lines:
        return (
            f": its first line is line {lines.index(wanted_lines[0]) + 1}, "
            "but what follows is different"
        )
    return "; read the file again"


def _line_numbers(data: bytes, old: bytes, at_most: int = 10) -> Iterator[int]:
    at = -1
    for _ in range(at_most):
        at = data.find(old, at + 1)
        if at < 0:
            return
        yield data.count(b"\n", 0, at) + 1


def _encoded(text: str, argument: str) -> bytes:
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le").encode()
    except UnicodeDecodeError as error:
        raise ToolFailure(f"the argument {argument} is not valid Unicode text") from error


def _listing(fd: int, shown: str) -> str:
    lines: list[str] = []
    looks = 0
    with os.scandir(fd) as entries:
        for entry in entries:
            looks += 1
            if looks > LIST_LOOKS_MAX:
                break
            lines.append(_entry_line(fd, entry))
    lines.sort()
    more = f"more than {LIST_LOOKS_MAX}" if looks > LIST_LOOKS_MAX else f"{looks}"
    head = f"{shown}: {more} {'entry' if looks == 1 else 'entries'}"
    if len(lines) > LIST_ENTRIES_MAX:
        head += f", the first {LIST_ENTRIES_MAX} are shown"
    return "\n".join([head, *lines[:LIST_ENTRIES_MAX]])


def _entry_line(fd: int, entry: os.DirEntry[str]) -> str:
    name = entry.name if entry.name.isprintable() else ascii(entry.name)
    try:
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            return f"{name}/"
        if stat.S_ISLNK(found.st_mode):
            return f"{name} -> {os.readlink(entry.name, dir_fd=fd)}"
        if stat.S_ISREG(found.st_mode):
            return f"{name} ({found.st_size} bytes)"
    except OSError:
        return f"{name} (gone)"
    return f"{name} (not a regular file)"
