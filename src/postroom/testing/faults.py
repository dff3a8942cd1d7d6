"""A file system for SQLite that fails when it is told to, and counts what reaches the disk.

Open a store on it by name: ``SqliteStore.open(path, vfs=disk.name)``. The faults are the disk's, so
what is tested is everything above it: SQLite, the engine, and what the caller is told.

It is for tests of errors and for counting, not for measuring time: each sync goes through the
interpreter. Reads, and writes unless they are to fail, are SQLite's own; only `syncs` and the
faults of syncing are always there.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import TracebackType
from typing import Any, cast

import apsw

_numbers = itertools.count(1)
_FSYNC_FAILED = 1034  # SQLITE_IOERR_FSYNC


class FaultyVFS(apsw.VFS):
    """Registered as ``name`` until it is closed. Set the faults from any thread, at any time.

    ``wal_syncs_to_fail``: so many of the next syncs of a write-ahead log fail. ``syncs_fail``: all
    syncs of all files do, until it is set back. ``full``: no write finds room, as on a full disk
    (needs ``writes``). ``sync_delay_s``: each sync takes so much longer. ``syncs`` counts them,
    the failed ones too.
    """

    def __init__(self, *, writes: bool = False) -> None:
        self.name = f"postroom-faulty-{next(_numbers)}"
        super().__init__(self.name, "")
        self.wal_syncs_to_fail = 0
        self.syncs_fail = False
        self.full = False
        self.sync_delay_s = 0.0
        self.syncs = 0
        self._file = _WritingFile if writes else _File
        self._lock = threading.Lock()

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return self._file(self, name, flags)

    def sync(self, wal: bool) -> None:
        """Called before each sync.

        Raises:
            apsw.IOError: it is to fail.
        """
        with self._lock:
            self.syncs += 1
            fails = self.syncs_fail
            if wal and self.wal_syncs_to_fail > 0:
                self.wal_syncs_to_fail -= 1
                fails = True
        if self.sync_delay_s:
            time.sleep(self.sync_delay_s)
        if fails:
            error = apsw.IOError("the disk failed, as it was told to")
            error.extendedresult = _FSYNC_FAILED  # pyright: ignore[reportAttributeAccessIssue]
            raise error

    def close(self) -> None:
        """Files that are open stay usable. Idempotent."""
        self.unregister()

    def __enter__(self) -> FaultyVFS:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _File(apsw.VFSFile):
    def __init__(
        self, disk: FaultyVFS, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        super().__init__("", name, flags)
        self.disk = disk
        self._wal = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xSync(self, flags: int) -> None:
        self.disk.sync(self._wal)
        super().xSync(flags)


class _WritingFile(_File):
    def xWrite(self, data: bytes, offset: int) -> None:
        if self.disk.full:
            raise apsw.FullError("the disk is full, as it was told to be")
        cast("Any", super()).xWrite(data, offset)
