"""A torn or damaged database is named with its place, refused, and left as it is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from postroom.domain.ids import CoreId, session_id
from postroom.errors import Corrupt
from postroom.scripts.log import list_sessions
from postroom.scripts.session import create_session
from postroom.stores.check import check_sqlite
from postroom.stores.sqlite import SqliteStore
from tests.crash.actor import Plan
from tests.crash.children import Nursery, actor
from tests.support import ROOT, bounded

PAGE = 4096
FRAME = PAGE + 24


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed database of some hundred sessions, and nothing beside it but its nodes' folder."""
    path = tmp_path_factory.mktemp("sound") / "room.db"

    async def fill() -> None:
        store = await SqliteStore.open(path)
        for number in range(300):
            name = session_id(f"session_{number}")
            await store.write(create_session, name, core_id=CoreId("c"), owner="o" * 100)
        await store.aclose()

    asyncio.run(fill())
    return path


@pytest.fixture
def killed(nursery: Nursery, tmp_path: Path) -> Path:
    """What `kill -9` leaves: a database whose commits are in its log."""
    path = tmp_path / "room.db"
    actions = [["queue", "msg_1", "hello"], ["idle"], ["run", "msg_2", "again"]]
    assert nursery.play(Plan(str(path), actions=[*actions, ["kill", "SIGKILL"]])).killed
    assert _log(path).stat().st_size > 10 * FRAME
    return path


def _log(path: Path) -> Path:
    return Path(f"{path}-wal")


@contextlib.contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Fails unless the folder holds the same files with the same bytes at the end.

    SQLite's scratch file (``-shm``) holds nothing and is left out.
    """

    def contents() -> dict[str, bytes]:
        files = [p for p in path.parent.iterdir() if p.is_file() and not p.name.endswith("-shm")]
        return {p.name: p.read_bytes() for p in files}

    before = contents()
    yield
    assert contents() == before


def _put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size if size > 0 else path.stat().st_size + size)


def _pages(path: Path) -> int:
    return path.stat().st_size // PAGE


def _root(path: Path, table: str) -> int:
    connection: Any = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        sql = "SELECT rootpage FROM sqlite_schema WHERE name = ?"
        return connection.execute(sql, (table,)).fetchall()[0][0]
    finally:
        connection.close()


async def _use(path: Path) -> None:
    """Opens the store and reads what is in it."""
    store = await SqliteStore.open(path)
    try:
        await store.read(list_sessions)
    finally:
        await store.aclose()


# ---- the file ----

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "its last page is cut in two": (lambda p: _cut(p, -1000), "page {pages}: the file ends 3096"),
    "its last page is missing": (lambda p: _cut(p, -PAGE), "page {pages}: the file ends before"),
    "half of it is missing": (lambda p: _cut(p, 20 * PAGE), "page 21: the file ends before it"),
    "only its first bytes are left": (lambda p: _cut(p, 50), "page 1: the file ends after 50"),
    "all of it is zeros": (lambda p: p.write_bytes(bytes(20 * PAGE)), "page 1: the file does not"),
    "it is something else": (lambda p: p.write_text("notes\n" * 99), "page 1: the file does not"),
    "its page size is nonsense": (lambda p: _put(p, 16, b"\x03\x03"), "page 1: the header names"),
}


@pytest.mark.contract("REC-07")
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_torn_file_is_refused_with_the_place_and_not_touched(
    sound: Path, tmp_path: Path, damage: str
) -> None:
    path = Path(shutil.copy(sound, tmp_path / "room.db"))
    pages = _pages(path)
    act, place = DAMAGES[damage]
    act(path)
    place = place.format(pages=pages)
    with unchanged(path):
        (finding,) = check_sqlite(path)
        assert str(finding).startswith(place)
        with pytest.raises(Corrupt, match=place):
            await bounded(_use(path))


@pytest.mark.contract("REC-07")
async def test_a_damaged_page_is_named_with_its_table(sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path / "room.db"))
    root = _root(path, "session")
    _put(path, (root - 1) * PAGE, b"\xff" * PAGE)
    with unchanged(path):
        places = [finding.place for finding in check_sqlite(path)]
    assert f"table session, page {root}" in places
    for _ in range(2):  # the first error leaves the reader usable, and the second is typed too
        with pytest.raises(Corrupt):
            await bounded(_use(path))


@pytest.mark.contract("REC-07")
def test_an_index_that_lacks_a_row_is_named(sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path / "room.db"))
    index_leaf = b"\x0a"
    pages = (path.read_bytes()[at : at + PAGE] for at in range(0, path.stat().st_size, PAGE))
    damaged = [p.replace(b"session_70", b"session_7X") if p[:1] == index_leaf else p for p in pages]
    path.write_bytes(b"".join(damaged))
    with unchanged(path):
        places = {finding.place for finding in check_sqlite(path)}
    assert "index sqlite_autoindex_session_1" in places


# ---- the log ----


@pytest.mark.contract("REC-07")
async def test_commits_behind_a_damaged_frame_are_not_silently_dropped(killed: Path) -> None:
    """SQLite alone would open this file, show what stood before the frame, and write over the rest."""
    _put(_log(killed), 32 + 4 * FRAME + 24 + 100, b"\x55" * 8)
    with unchanged(killed):
        findings = list(map(str, check_sqlite(killed)))
        assert findings[0].startswith("log, frame 5: its checksum is wrong, and ")
        with pytest.raises(Corrupt, match="log, after frame 0: a checksum is wrong, and "):
            await bounded(_use(killed))


@pytest.mark.contract("REC-07")
async def test_a_log_whose_header_is_damaged_is_not_silently_dropped(killed: Path) -> None:
    _put(_log(killed), 0, b"\x00" * 8)
    with unchanged(killed):
        assert str(check_sqlite(killed)[0]).startswith("log, header: it is wrong, so ")
        with pytest.raises(Corrupt, match="log"):
            await bounded(_use(killed))


@pytest.mark.contract("REC-07")
async def test_a_last_commit_that_was_not_wholly_written_is_told_of_and_does_no_harm(
    killed: Path,
) -> None:
    """Power that fails inside a commit leaves this: nobody was told that it was written."""
    _cut(_log(killed), -10)
    with unchanged(killed):
        (finding,) = check_sqlite(killed)
    assert "the last commit is not whole" in finding.text
    await bounded(_use(killed))
    assert check_sqlite(killed) == []


@pytest.mark.contract("REC-07")
async def test_what_a_kill_leaves_is_sound(killed: Path) -> None:
    with unchanged(killed):
        assert check_sqlite(killed) == []
    # The rest of a commit that was never finished is no damage either.
    with _log(killed).open("ab") as log:
        log.write(_log(killed).read_bytes()[32 : 32 + 8] + bytes(500))
    assert check_sqlite(killed) == []
    await bounded(_use(killed))
    # Closed in order, all of it is in the one file: a copy of that is a copy of the whole.
    assert {p.name for p in killed.parent.iterdir()} == {"room.db", "room.db-nodes"}


@pytest.mark.contract("REC-07")
def test_a_database_can_be_checked_while_a_process_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "room.db"
    plan = Plan(str(path), actions=[["queue", "msg_1", "[[wait]]"], ["say", "in"], ["hold"]])
    with actor(plan) as running:
        running.until("word", "in")
        assert check_sqlite(path) == []
        assert running.end().code == 0


# ---- the command ----


@pytest.mark.contract("REC-07")
def test_doctor_names_the_place_and_fails(killed: Path) -> None:
    def doctor() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "postroom.cli.main", "doctor", "--offline"]
        return subprocess.run(
            [*command, "--db", str(killed), "--model", "scripted:echo"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    _put(_log(killed), 32 + 4 * FRAME + 24 + 100, b"\x55" * 8)
    with unchanged(killed):
        said = doctor()
    assert said.returncode == 1
    assert "log, frame 5: its checksum is wrong" in said.stdout
    assert "postroom db restore" in said.stdout
    _log(killed).unlink()
    said = doctor()
    assert said.returncode == 0, said.stdout
