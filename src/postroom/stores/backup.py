"""Backs a SQLite database up while it runs, and puts a backup back.

A backup is a folder: the database, and the artifacts it refers to. It is one consistent state: the
copy is made by SQLite's own online backup, and artifacts, which are never changed, are copied after
it.

Putting a backup back turns time back for us, not for the world. What was being sent, or waited to be,
may have been sent after the backup was made; so nothing that was not finished is sent again by
itself: it becomes `unknown`, for the operator. A channel's cursor never goes back: the newer of the
backup's and the present one stays.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import apsw
import msgspec

from postroom.domain.ids import NodeId
from postroom.errors import ConfigError, StoreError, StoreFull
from postroom.stores.node import proven_dead
from postroom.stores.schema import VERSION

_NAME = "postroom.db"
_ARTIFACTS = "artifacts"
_PAGES_A_STEP = 2000


class BackUp(msgspec.Struct, frozen=True):
    """What was copied."""

    sessions: int
    artifacts: int
    bytes: int


def back_up(database: Path, folder: Path) -> BackUp:
    """Copies a database and its artifacts into a new folder, also while others write.

    Raises:
        ConfigError: the folder exists.
        StoreFull: there is no room for it; what was copied is removed.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already", hint="name a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700, parents=True)
        _copy_database(database, partial / _NAME)
        count = _copy_artifacts(_artifacts_of(database), partial / _ARTIFACTS)
        sessions = _number(partial / _NAME, "SELECT count(*) FROM session")
        size = sum(p.stat().st_size for p in partial.rglob("*") if p.is_file())
        os.rename(partial, folder)
    except (OSError, apsw.FullError) as error:
        raise StoreFull(f"the backup could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return BackUp(sessions, count, size)


def _copy_database(source: Path, target: Path) -> None:
    reading = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READONLY)
    writing = apsw.Connection(str(target))
    try:
        reading.set_busy_timeout(30_000)
        with writing.backup("main", reading, "main") as copy:
            while not copy.done:
                copy.step(_PAGES_A_STEP)
    finally:
        writing.close()
        reading.close()
    _sync(target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _artifacts_of(database: Path) -> Path:
    return database.with_name(database.name + "-artifacts")


def _copy_artifacts(source: Path, target: Path) -> int:
    count = 0
    target.mkdir(exist_ok=True, parents=True)
    for path in source.rglob("*") if source.is_dir() else ():
        if path.is_file() and not path.name.startswith("."):
            place = target / path.relative_to(source)
            if place.exists():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
            count += 1
    return count


def restore(folder: Path, database: Path) -> list[str]:
    """Puts a backup in a database's place; what it did, in sentences for the operator.

    What was there is kept beside it, under a new name.

    Raises:
        ConfigError: the folder is no backup, or a Postroom still runs on the database.
        StoreError: the backup is of a newer schema, or damaged.
    """
    source = folder / _NAME
    if not source.is_file():
        raise ConfigError(f"{folder} is no backup", hint=f"it has no {_NAME}")
    version = _number(source, "PRAGMA user_version")
    if version > VERSION:
        raise StoreError(
            f"the backup has schema version {version}, this Postroom knows {VERSION}",
            hint="upgrade Postroom",
        )
    _check_nobody_runs(database)
    said: list[str] = []
    incoming = database.with_name(database.name + ".incoming")
    incoming.unlink(missing_ok=True)
    database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(source, incoming)
    _bring_up_to_date(incoming)
    doubtful = _doubt_what_was_under_way(incoming)
    kept = _keep_newer_cursors(incoming, database) if database.exists() else 0
    for suffix in ("-wal", "-shm"):
        incoming.with_name(incoming.name + suffix).unlink(missing_ok=True)
    _sync(incoming)
    if database.exists():
        aside = _aside(database)
        _checkpoint(database)
        os.rename(database, aside)
        for suffix in ("-wal", "-shm"):
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        said.append(f"What was there is kept as {aside}.")
    os.rename(incoming, database)
    count = _copy_artifacts(folder / _ARTIFACTS, _artifacts_of(database))
    said.insert(0, f"Restored {database} ({count} artifacts were missing and are back).")
    said.append(
        f"{doubtful} deliveries were not finished when the backup was made; they are now unknown "
        "and nothing is sent again by itself."
    )
    if kept:
        said.append(f"{kept} channel cursors were newer than the backup's and are kept.")
    return said


def _check_nobody_runs(database: Path) -> None:
    nodes = database.with_name(database.name + "-nodes")
    for path in nodes.iterdir() if nodes.is_dir() else ():
        if not proven_dead(nodes, NodeId(path.name)):
            raise ConfigError(
                f"a Postroom still runs on {database}",
                hint="stop it first (postroom serve, chat, run)",
            )


def _aside(database: Path) -> Path:
    for number in range(1, 10_000):
        aside = database.with_name(f"{database.name}.before-restore-{number}")
        if not aside.exists():
            return aside
    raise ConfigError(f"there are too many old copies beside {database}")


def _open(path: Path) -> Any:
    return cast("Any", apsw.Connection(str(path)))


def _number(path: Path, sql: str) -> int:
    connection = _open(path)
    try:
        return connection.execute(sql).fetchall()[0][0]
    except apsw.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    finally:
        connection.close()


def _checkpoint(path: Path) -> None:
    connection = _open(path)
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        connection.close()


def _bring_up_to_date(path: Path) -> None:
    from postroom.stores.sqlite import migrate

    connection = apsw.Connection(str(path))
    try:
        migrate(connection, path)
    finally:
        connection.close()


def _doubt_what_was_under_way(path: Path) -> int:
    """Every delivery that had not come to an end becomes `unknown`, and the operator's."""
    connection = _open(path)
    try:
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute(
            "SELECT id FROM delivery WHERE status IN ('queued', 'sending', 'unknown')"
        ).fetchall()
        connection.execute(
            "UPDATE part SET status = 'unknown', error = 'a backup was restored'"
            " WHERE status IN ('queued', 'sending') AND delivery IN"
            " (SELECT id FROM delivery WHERE status IN ('queued', 'sending', 'unknown'))"
        )
        connection.execute(
            "UPDATE delivery SET status = 'unknown', handed_over = 1, blocks = 0, unknown_at = NULL"
            " WHERE status IN ('queued', 'sending', 'unknown')"
        )
        connection.execute(
            "UPDATE work SET status = 'none', token = NULL, owner = NULL"
            " WHERE kind IN ('delivery.send', 'delivery.reconcile')"
        )
        connection.execute("UPDATE node SET expires_at = 0")
        connection.execute("COMMIT")
        return len(rows)
    finally:
        connection.close()


def _keep_newer_cursors(incoming: Path, present: Path) -> int:
    """A cursor that went on since the backup stays where it is, with the dedupe keys before it."""
    connection = _open(incoming)
    try:
        connection.execute("ATTACH ? AS present", (str(present),))
        known = connection.execute(
            "SELECT 1 FROM present.sqlite_schema WHERE name = 'cursor'"
        ).fetchall()
        if not known:
            return 0
        connection.execute("BEGIN IMMEDIATE")
        kept = connection.execute(
            "INSERT INTO cursor (channel, name, value, updated_at)"
            " SELECT channel, name, value, updated_at FROM present.cursor WHERE true"
            " ON CONFLICT (channel, name) DO UPDATE SET value = excluded.value,"
            " updated_at = excluded.updated_at WHERE excluded.updated_at > cursor.updated_at"
            " RETURNING channel"
        ).fetchall()
        connection.execute("INSERT OR IGNORE INTO dedupe SELECT * FROM present.dedupe")
        connection.execute("COMMIT")
        return len(kept)
    finally:
        connection.close()
