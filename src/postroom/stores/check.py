"""Looks at a SQLite file and its log from outside: is it torn or damaged, and where?

It repairs nothing and writes nothing to either file. It exists because SQLite itself is silent in
two places: it fills up a file that was cut inside a page with zeros, and it takes a log (the
``-wal`` file) to end at the first frame whose checksum is wrong, whatever was committed after it.

What a crash leaves behind is no damage. A frame that was not wholly written belongs to a commit
that nobody was told of, so a log may end in one such commit. Every commit is synced before the
next begins: two commits behind a bad frame mean that something acknowledged is lost.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import apsw
import msgspec

_MAGIC = b"SQLite format 3\0"
_WAL_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}  # the byte order of the checksums' words
_WAL_HEADER = 32
_FRAME_HEADER = 24
_PROBLEMS_MAX = 100


class Finding(msgspec.Struct, frozen=True):
    """``place`` names a page, a table or a frame of the log; ``text`` what is wrong there."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def check_sqlite(path: Path | str) -> list[Finding]:
    """All that is wrong with a database file; empty if it is sound.

    It reads every page: seconds for a large file. Others may go on using it meanwhile.
    """
    path = Path(path)
    for _ in range(5):
        before = _signature(path)
        found, whole = _look(path)
        if before == _signature(path):
            return found if not whole else [*found, *_integrity(path)]
    # Others write all the time, so there is no moment to compare the two files in. What SQLite
    # shows is one moment's: its own check still tells.
    return _integrity(path)


def _look(path: Path) -> tuple[list[Finding], bool]:
    """What the files' own bytes tell, and whether the file is whole enough for SQLite's check."""
    shape = _shape(path)
    if isinstance(shape, Finding):
        return [shape], False
    log = _walk(_log_of(path))
    cut = _torn(shape, log)
    return [*log.findings(), *([cut] if cut is not None else [])], cut is None


def _signature(path: Path) -> list[object]:
    """Differs if one of the files was written to in between."""
    out: list[object] = []
    for file in (path, _log_of(path)):
        try:
            stat = file.stat()
            with file.open("rb") as opened:
                out += [stat.st_size, stat.st_mtime_ns, opened.read(100)]
        except OSError:
            out.append(None)
    return out


def torn(path: Path) -> Finding | None:
    """What is wrong with the file's header and length; a few bytes are read, however large it is.

    None also where there is no file, or one that nothing was written to. A log beside the file
    may hold what the file lacks: then its length tells nothing here.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    found: Finding | None = None
    for _ in range(3):  # another process may be writing: what is wrong stays wrong
        shape = _shape(path)
        found = shape if isinstance(shape, Finding) else _torn(shape, _Log())
        if found is None or _size_of(_log_of(path)) > _WAL_HEADER:
            return shape if isinstance(shape, Finding) else None
    return found


def lost_commits(path: Path, frames: int) -> Finding | None:
    """Whether commits lie in the log behind its first ``frames``, the ones that SQLite reads.

    Only the frames' headers are read. Another process may have appended since they were counted:
    who finds something counts again.
    """
    log = _log_of(path)
    if _size_of(log) <= _WAL_HEADER:
        return None
    with log.open("rb") as file:
        header = file.read(_WAL_HEADER)
        if len(header) < _WAL_HEADER:
            return None
        page = struct.unpack(">I", header[8:12])[0]
        commits = sum(_commits(file, page, frames, header[16:24]))
    if commits < 2:
        return None
    return Finding(
        f"log, after frame {frames}", f"a checksum is wrong, and {_many(commits)} would be lost"
    )


# ---- the file ----


class _Shape(msgspec.Struct, frozen=True):
    """``pages`` is how many the header says there are (0: it does not say)."""

    page_bytes: int
    pages: int
    size: int


def _shape(path: Path) -> _Shape | Finding:
    try:
        with path.open("rb") as file:
            header = file.read(100)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return Finding("file", f"it cannot be read: {error.strerror}")
    if not header:
        return Finding("file", "it is empty: nothing was ever written to it, or all of it is lost")
    if len(header) < 100:
        return Finding("page 1", f"the file ends after {size} bytes, inside its header")
    if not header.startswith(_MAGIC):
        return Finding("page 1", "the file does not begin as an SQLite database does")
    page_bytes = struct.unpack(">H", header[16:18])[0]
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    if page_bytes < 512 or page_bytes & (page_bytes - 1):
        return Finding("page 1", f"the header names a page size of {page_bytes} bytes")
    known = header[24:28] == header[92:96]
    return _Shape(page_bytes, struct.unpack(">I", header[28:32])[0] if known else 0, size)


def _torn(shape: _Shape, log: _Log) -> Finding | None:
    """The first page that is neither wholly in the file nor in the log."""
    whole, rest = divmod(shape.size, shape.page_bytes)
    pages = log.database_pages or shape.pages or whole + bool(rest)
    missing = [page for page in range(whole + 1, pages + 1) if page not in log.pages]
    if missing and missing[0] == whole + 1 and rest:
        return Finding(
            f"page {missing[0]}",
            f"the file ends {rest} bytes into it, of {shape.page_bytes};"
            f" there should be {pages} pages",
        )
    if missing:
        return Finding(
            f"page {missing[0]}", f"the file ends before it; there should be {pages} pages"
        )
    return None


_TREE = re.compile(r"(?:Tree (\d+) )?[Pp]age (\d+)")
_INDEX = re.compile(r"\bindex (\w+)")
_COLUMN = re.compile(r"\bvalue in (\w+)\.")


def _integrity(path: Path) -> list[Finding]:
    """SQLite's own check of every page, with the tables' names put in."""
    alone = not Path(f"{path}-shm").exists()
    found = _ask(path, alone=alone)
    if found and alone and Path(f"{path}-shm").exists():
        found = _ask(path, alone=False)  # somebody opened it meanwhile
    return found


def _ask(path: Path, *, alone: bool) -> list[Finding]:
    """``alone``: nobody has the file open. Without a log it is then read as it lies there.

    Else SQLite would make its scratch files beside it only to remove them again.
    """
    still = alone and not _size_of(_log_of(path))
    name = f"file:{_escaped(path)}?mode=ro" + ("&immutable=1" if still else "")
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    names: dict[int, str] = {}
    lines: list[str] = []
    failure: str | None = None
    try:
        connection: Any = apsw.Connection(name, flags=flags)
        try:
            connection.set_busy_timeout(10_000)
            for kind, title, root in connection.execute(
                "SELECT type, name, rootpage FROM sqlite_schema WHERE rootpage > 0"
            ):
                names[root] = f"{kind} {title}"
            for (text,) in connection.execute(f"PRAGMA integrity_check({_PROBLEMS_MAX})"):
                lines += text.splitlines()
        finally:
            connection.close()
    except apsw.Error as error:  # at bad damage, after it has said what it knows
        failure = re.sub(r"^\w+Error: ", "", str(error))
    found = [_named(line, names) for line in lines if line != "ok" and not line.startswith("***")]
    return found or ([Finding("file", failure)] if failure is not None else [])


def _named(line: str, names: dict[int, str]) -> Finding:
    tree, index, column = _TREE.search(line), _INDEX.search(line), _COLUMN.search(line)
    if tree is not None:
        table = names.get(int(tree[1])) if tree[1] else None
        return Finding(f"{table}, page {tree[2]}" if table else f"page {tree[2]}", line)
    if index is not None:
        return Finding(f"index {index[1]}", line)
    return Finding(f"table {column[1]}" if column is not None else "file", line)


def _escaped(path: Path) -> str:
    text = str(path.absolute())
    return "".join(f"%{ord(c):02x}" if c in "%?#" else c for c in text)


# ---- the log ----


class _Log(msgspec.Struct):
    """``pages`` are in a commit that SQLite reads. ``database_pages`` 0: there is no commit.

    ``bad`` is the number of the first frame it does not read; ``lost`` counts the commits from
    there on. ``header_wrong``: it reads none at all.
    """

    pages: set[int] = msgspec.field(default_factory=set[int])
    database_pages: int = 0
    bad: int = 0
    lost: int = 0
    header_wrong: bool = False

    def findings(self) -> list[Finding]:
        if not self.lost:
            return []
        if self.header_wrong:
            return [Finding("log, header", f"it is wrong, so {_many(self.lost)} would be lost")]
        place = f"log, frame {self.bad}"
        if self.lost > 1:
            text = f"its checksum is wrong, and {_many(self.lost)} from it on would be lost"
            return [Finding(place, text)]
        return [
            Finding(
                place,
                "the last commit is not whole: power failed during it, before anybody was told"
                " that it was written, or the file was damaged",
            )
        ]


def _many(commits: int) -> str:
    return "one commit" if commits == 1 else f"{commits} commits"


def _log_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _walk(path: Path) -> _Log:
    """Reads frames as SQLite does: as long as the salts and the running checksum fit."""
    log = _Log()
    if _size_of(path) <= _WAL_HEADER:
        return log
    with path.open("rb") as file:
        header = file.read(_WAL_HEADER)
        magic, _, page = struct.unpack(">III", header[:12])
        order = _WAL_MAGIC.get(magic, "")
        sums = _sums(order, header[:24], (0, 0)) if order else (0, 0)
        if not order or sums != struct.unpack(">II", header[24:32]):
            salts = file.read(16)[8:16]
            page = page if 512 <= page <= 65536 else 4096
            log.lost = sum(_commits(file, page, 0, salts))
            log.header_wrong, log.bad = True, 1
            return log
        written: set[int] = set()
        frame = 0
        while True:
            head, data = file.read(_FRAME_HEADER), file.read(page)
            if len(data) < page or head[8:16] != header[16:24]:
                break
            sums = _sums(order, data, _sums(order, head[:8], sums))
            if sums != struct.unpack(">II", head[16:24]):
                break
            frame += 1
            number, size = struct.unpack(">II", head[:8])
            written.add(number)
            if size:  # a commit: the database has so many pages now
                log.pages |= written
                log.database_pages = size
                written.clear()
        log.bad = frame + 1
        log.lost = sum(_commits(file, page, frame, header[16:24]))
    return log


def _commits(file: BinaryIO, page: int, after: int, salts: bytes) -> Iterator[bool]:
    """For each frame from number ``after`` + 1 on: whether it ends a commit of this very log."""
    at = _WAL_HEADER + after * (page + _FRAME_HEADER)
    while len(head := os.pread(file.fileno(), 16, at)) == 16:
        yield head[8:16] == salts and head[4:8] != b"\0\0\0\0"
        at += page + _FRAME_HEADER


def _sums(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """The running checksum of the log, over 32-bit words two by two."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for left, right in zip(words[::2], words[1::2], strict=True):
        first = (first + left + second) & 0xFFFF_FFFF
        second = (second + right + first) & 0xFFFF_FFFF
    return first, second
