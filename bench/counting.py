"""Counts SQLite's fsyncs in this process, and changes nothing else.

It replaces two function pointers of SQLite's own file system layer: ``xOpen``, so that every file
opened from now on gets a copy of its method table, and in that copy ``xSync``, which counts and
calls the original. A layer written with `apsw.VFS` would do the same in fewer lines, but sends
every read and write through the interpreter and holds its lock during each fsync; a measured
program with an event loop then stands still for as long as the disk takes.

The structures are those of SQLite's documented C interface (`sqlite3_vfs`, `sqlite3_io_methods`).
`install` makes sure that they are by counting a commit of its own.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import apsw

_SYNC = 5  # xSync's place among the methods, after xClose, xRead, xWrite and xTruncate
_METHODS = {1: 12, 2: 16, 3: 18}  # how many there are, by version

_Sync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_Open = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.c_void_p,
)


class _Vfs(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int),
        ("file_bytes", ctypes.c_int),
        ("path_max", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("open", ctypes.c_void_p),
    ]


class _Counter:
    """What is kept alive for SQLite, and the count. There is one, made by `install`."""

    def __init__(self, vfs: _Vfs) -> None:
        self.fsyncs = 0
        self._tables: dict[int, ctypes.Array[ctypes.c_void_p]] = {}
        self._callbacks: list[object] = []
        self._open = _Open(vfs.open or 0)
        self._hook = _Open(self._opened)
        vfs.open = ctypes.cast(self._hook, ctypes.c_void_p).value

    def _opened(
        self,
        vfs: int,
        name: int,
        file: ctypes._Pointer[ctypes.c_void_p],  # pyright: ignore[reportPrivateUsage]
        flags: int,
        out_flags: int,
    ) -> int:
        result = self._open(vfs, name, file, flags, out_flags)
        methods = file[0]
        if methods:
            table = self._tables.get(methods) or self._counting(methods)
            file[0] = ctypes.addressof(table)
        return result

    def _counting(self, methods: int) -> ctypes.Array[ctypes.c_void_p]:
        version = min(ctypes.c_int.from_address(methods).value, 3)
        table = (ctypes.c_void_p * (1 + _METHODS[version]))()
        ctypes.memmove(table, methods, ctypes.sizeof(table))
        original = _Sync(table[_SYNC] or 0)

        def sync(file: int, flags: int) -> int:
            self.fsyncs += 1
            return original(file, flags)

        callback = _Sync(sync)
        self._callbacks.append(callback)
        table[_SYNC] = ctypes.cast(callback, ctypes.c_void_p).value
        self._tables[methods] = table
        return table


_counter: _Counter | None = None


def install() -> None:
    """From now on every fsync of SQLite in this process is counted. Idempotent.

    Raises:
        RuntimeError: this SQLite's layout is another; nothing could be counted.
    """
    global _counter
    if _counter is not None:
        return
    probe = apsw.Connection(":memory:")
    pointer = ctypes.c_void_p()
    probe.file_control("main", apsw.SQLITE_FCNTL_VFS_POINTER, ctypes.addressof(pointer))
    _counter = _Counter(_Vfs.from_address(pointer.value or 0))
    probe.close()
    with tempfile.TemporaryDirectory() as folder:
        connection = apsw.Connection(str(Path(folder) / "probe.db"))
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL"):
            connection.execute(statement).fetchall()
        connection.execute("CREATE TABLE probe (a)")
        before = _counter.fsyncs
        connection.execute("INSERT INTO probe VALUES (1)")
        counted = _counter.fsyncs - before
        connection.close()
    if counted != 1:
        raise RuntimeError(f"one commit was counted as {counted} fsyncs")


def fsyncs() -> int:
    """How many there were since `install`; 0 without it."""
    return _counter.fsyncs if _counter is not None else 0
