"""The searching half of `glob` and `grep`: a program of its own, with nothing but the standard library.

A regular expression can run for hours, and Python holds its interpreter lock all the while. In a
process of its own that stops nothing but the search, and it can be killed.

It is run as a file by an interpreter that sees no package. It gets a descriptor of the place to
search, opened by its caller, and goes only downwards from there, through no symbolic link: it has
no path to leave by. Standard input is one JSON object (`search.Request`); standard output is one
JSON array a line, the last of them ``["end", …]``.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator

SKIPPED_FOLDERS = {".git"}
LOOK_BYTES = 8 * 1024
LINE_BYTES_MAX = 1024 * 1024
SHOWN_CHARS_MAX = 400
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


place = ""


def emit(*values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")


def shown(path: str) -> str:
    """A path as text on one line, whatever bytes its names are made of."""
    path = (place + path).encode("utf-8", "replace").decode()
    return path if path.isprintable() else ascii(path)


def walk(fd: int, prefix: str) -> Iterator[tuple[int, str, str, bool]]:
    """Everything below an open folder, in order: its folder's descriptor, name, path, is a folder."""
    try:
        with os.scandir(fd) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError:
        return
    for name, is_folder in found:
        path = prefix + name
        yield fd, name, path, is_folder
        if is_folder and name not in SKIPPED_FOLDERS:
            try:
                below = os.open(name, _FOLDER, dir_fd=fd)
            except OSError:
                continue
            try:
                yield from walk(below, path + "/")
            finally:
                os.close(below)


def glob(request: dict[str, object], fd: int, deadline: float) -> str:
    pattern = re.compile(str(request["glob"]), re.DOTALL)
    left = int(str(request["limit"]))
    for _, _, path, is_folder in walk(fd, ""):
        if time.monotonic() > deadline:
            return "time"
        if pattern.fullmatch(path):
            if not left:
                return "limit"
            left -= 1
            emit("path", shown(path) + "/" * is_folder)
    return "all"


class Grep:
    def __init__(self, request: dict[str, object]) -> None:
        flags = re.IGNORECASE if request["ignore_case"] else 0
        self.pattern = re.compile(str(request["pattern"]), flags)
        self.only = re.compile(str(request["glob"]), re.DOTALL) if request["glob"] else None
        self.by_name = bool(request["by_name"])
        self.context = int(str(request["context"]))
        self.files_only = bool(request["files_only"])
        self.left = int(str(request["limit"]))

    def tree(self, fd: int, deadline: float) -> str:
        for folder, name, path, is_folder in walk(fd, ""):
            if time.monotonic() > deadline:
                return "time"
            if is_folder or (self.only and not self.only.fullmatch(name if self.by_name else path)):
                continue
            try:
                if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    continue
                file = os.open(name, _FILE, dir_fd=folder)
            except OSError:
                continue
            try:
                ended = self.file(file, path, deadline)
            finally:
                os.close(file)
            if ended != "all":
                return ended
        return "all"

    def file(self, fd: int, path: str, deadline: float) -> str:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return "all"
        with os.fdopen(os.dup(fd), "rb") as file:
            if b"\0" in file.peek(LOOK_BYTES)[:LOOK_BYTES]:
                return "all"
            before: deque[tuple[int, str]] = deque(maxlen=self.context)
            after = 0
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                match = self.pattern.search(text)
                if match:
                    if not self.left:
                        return "limit"
                    self.left -= 1
                    if self.files_only:
                        emit("path", shown(path))
                        return "all"
                    for earlier in before:
                        emit("line", shown(path), *earlier, False)
                    before.clear()
                    emit("line", shown(path), number, cut(text, match.start()), True)
                    # What was found so far must be there even if the next line takes for ever.
                    sys.stdout.flush()
                    after = self.context
                elif after:
                    after -= 1
                    emit("line", shown(path), number, cut(text, 0), False)
                else:
                    before.append((number, cut(text, 0)))
                if not number % 256 and time.monotonic() > deadline:
                    return "time"
        return "all"


def cut(text: str, at: int) -> str:
    """A line as it is shown: a long one around the match."""
    if len(text) <= SHOWN_CHARS_MAX:
        return text
    start = max(0, min(at - SHOWN_CHARS_MAX // 4, len(text) - SHOWN_CHARS_MAX))
    end = start + SHOWN_CHARS_MAX
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))


def main() -> None:
    global place
    request = json.load(sys.stdin)
    place = request["place"]
    fd = int(sys.argv[1])
    deadline = time.monotonic() + request["limit_ms"] / 1000
    if request["kind"] == "glob":
        ended = glob(request, fd, deadline)
    else:
        grep = Grep(request)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            ended = grep.tree(fd, deadline)
        else:
            ended = grep.file(fd, "", deadline)
    emit("end", ended)


if __name__ == "__main__":
    main()
