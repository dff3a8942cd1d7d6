"""Where a session's file tools may go: its workspace and the roots its operator added.

A path is resolved first (symbolic links followed, on paper), and what it resolves to must lie
under one of the roots. Then it is opened from that root's own descriptor, component by component,
and no component may be a link any more. So a link inside the workspace works, and one that leads
out of it is refused; and whoever swaps a folder for a link between the two looks gains nothing:
the open fails, it does not follow. Whatever is done then is done relative to the descriptor that
was reached, never to the path again.

Only regular files and folders are opened. A FIFO, a socket or a device is refused by its kind,
before an open could wait on it or wake what is behind it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Generator, Sequence

import msgspec

from postroom.errors import ToolFailure

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: should a FIFO take the file's place after the look, the open still returns.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


class Opened(msgspec.Struct, frozen=True):
    """A descriptor that closes with its block. ``shown`` is the path as the model knows it."""

    fd: int
    shown: str
    size: int


class Workspace:
    """The roots of one call. ``cwd`` is what relative paths start from.

    Raises (here):
        ToolFailure: the session has no workspace, or its folder is gone.
    """

    def __init__(self, cwd: str | None, roots: Sequence[str] = ()) -> None:
        if cwd is None:
            raise ToolFailure("this session has no workspace, so there are no files to work on")
        self.cwd = os.path.realpath(cwd)
        if not os.path.isdir(self.cwd):
            raise ToolFailure(f"the workspace {cwd} is not there")
        self._roots = (self.cwd, *(os.path.realpath(root) for root in roots))

    @contextlib.contextmanager
    def file(self, path: str) -> Generator[Opened, None, None]:
        """An existing regular file, opened for reading.

        Raises:
            ToolFailure: it is not there, not a regular file, not readable, or not allowed.
        """
        with self.slot(path) as slot:
            fd, size = slot.open()
            try:
                yield Opened(fd, slot.shown, size)
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def folder(self, path: str) -> Generator[Opened, None, None]:
        """An existing folder, opened for listing.

        Raises:
            ToolFailure: it is not there, not a folder, not readable, or not allowed.
        """
        root, parts, shown = self._resolve(path)
        with _told(shown):
            fd = _descend(root, parts)
        try:
            yield Opened(fd, shown, 0)
        finally:
            os.close(fd)

    def is_folder(self, path: str) -> bool:
        root, parts, _ = self._resolve(path)
        return os.path.isdir(os.path.join(root, *parts))

    @contextlib.contextmanager
    def slot(self, path: str, *, make_folders: bool = False) -> Generator[Slot, None, None]:
        """The place of a file, there or not, held by its folder's descriptor.

        Raises:
            ToolFailure: the folder is not there (and not to be made), or is not allowed.
        """
        root, parts, shown = self._resolve(path)
        if not parts:
            raise ToolFailure(f"{shown} is a folder, not a file")
        with _told(shown):
            fd = _descend(root, parts[:-1], make=make_folders)
        try:
            yield Slot(fd, parts[-1], shown)
        finally:
            os.close(fd)

    def _resolve(self, path: str) -> tuple[str, tuple[str, ...], str]:
        """The root a path lies under, the components from there, and how to speak of it."""
        if not path or "\0" in path:
            raise ToolFailure(f"{path!r} is not a path")
        if ".." in path.split("/"):
            raise ToolFailure(f"{path}: '..' is not allowed in a path", hint=self._allowed())
        try:
            real = os.path.realpath(os.path.join(self.cwd, path))
        except (OSError, ValueError) as error:
            raise ToolFailure(f"{path!r} is not a path: {error}") from error
        for root in self._roots:
            if real == root or real.startswith(root.rstrip("/") + "/"):
                inside = real[len(root) :].strip("/")
                parts = tuple(inside.split("/")) if inside else ()
                shown = inside or "." if root == self.cwd else real
                return root, parts, shown
        linked = os.path.normpath(os.path.join(self.cwd, path)) != real
        verb = "leads" if linked else "is"
        raise ToolFailure(f"{path} {verb} outside the workspace", hint=self._allowed())

    def _allowed(self) -> str:
        others = f", or one under {', '.join(self._roots[1:])}" if self._roots[1:] else ""
        return f"allowed is a path relative to the workspace {self.cwd}, or one under it{others}"


class Slot:
    """A name in an open folder. ``shown`` is the path as the model knows it."""

    def __init__(self, folder: int, name: str, shown: str) -> None:
        self.shown = shown
        self._folder = folder
        self._name = name

    def look(self) -> os.stat_result | None:
        """What is there: a regular file's status, or None for nothing.

        Raises:
            ToolFailure: something else is there.
        """
        with _told(self.shown):
            try:
                found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
        _refuse_all_but_files(found, self.shown)
        return found

    def open(self) -> tuple[int, int]:
        """A descriptor of the regular file that is there, to be closed by the caller; its size.

        Raises:
            ToolFailure: there is none, or it cannot be read.
        """
        if self.look() is None:
            raise ToolFailure(f"there is no file {self.shown}")
        with _told(self.shown):
            fd = os.open(self._name, _FILE, dir_fd=self._folder)
        try:
            found = os.fstat(fd)
            _refuse_all_but_files(found, self.shown)
        except BaseException:
            os.close(fd)
            raise
        return fd, found.st_size

    def write(self, data: bytes, *, over: os.stat_result | None) -> None:
        """Puts a whole file in place at once: nobody sees half of it, nor does a crash leave it.

        ``over`` is what `look` saw: it must still be the same. A file that was there keeps its
        mode, and its owner where that can be.

        Raises:
            ToolFailure: it changed meanwhile, or cannot be written.
        """
        temporary = f".postroom-{secrets.token_hex(8)}.tmp"
        with _told(self.shown):
            fd = os.open(temporary, _NEW, 0o666, dir_fd=self._folder)
            try:
                try:
                    _write_all(fd, data)
                    if over is not None:
                        _take_over(fd, over)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if not _same(self.look(), over):
                    raise ToolFailure(
                        f"{self.shown} was changed by someone else meanwhile; read it again"
                    )
                os.rename(temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self._folder)
                raise


def _descend(root: str, parts: Sequence[str], *, make: bool = False) -> int:
    """Opens a folder from its root, one component at a time, through no link."""
    fd = os.open(root, _FOLDER)
    try:
        for part in parts:
            try:
                below = os.open(part, _FOLDER, dir_fd=fd)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=fd)
                below = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_all_but_files(found: os.stat_result, shown: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise ToolFailure(f"{shown} is {kind}, not a regular file")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _take_over(fd: int, before: os.stat_result) -> None:
    made = os.fstat(fd)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, before.st_uid, before.st_gid)
    os.fchmod(fd, stat.S_IMODE(before.st_mode))


def _same(now: os.stat_result | None, before: os.stat_result | None) -> bool:
    if now is None or before is None:
        return now is before
    return (now.st_ino, now.st_size, now.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


@contextlib.contextmanager
def _told(shown: str) -> Generator[None, None, None]:
    """Turns the system's errors into sentences about the path."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOENT:
                text = f"there is no {shown}"
            case errno.ENOTDIR | errno.ELOOP:
                text = f"a part of {shown} is not a folder (or became a link just now)"
            case errno.EACCES | errno.EPERM:
                text = f"{shown}: permission denied"
            case _:
                text = f"{shown}: {error.strerror}"
        raise ToolFailure(text) from error
    except ValueError as error:  # a name that the file system cannot have
        raise ToolFailure(f"{shown!r} is not a path: {error}") from error


SENT_BYTES_MAX = 50 * 1024 * 1024


def read_workspace_file(cwd: str | None, path: str) -> bytes:
    """The whole of a file of the workspace, for sending.

    Raises:
        ToolFailure: it is not there, not a regular file, not allowed, or over 50 MiB.
    """
    with Workspace(cwd).file(path) as opened:
        if opened.size > SENT_BYTES_MAX:
            raise ToolFailure(f"{opened.shown} is too large to send: {opened.size:,} bytes")
        with open(opened.fd, "rb", closefd=False) as file:
            return file.read(SENT_BYTES_MAX)
