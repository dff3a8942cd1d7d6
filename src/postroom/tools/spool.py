"""The output of a process while it runs: a bounded amount of memory, a bounded amount of disk.

The first and the last `KEPT_BYTES_MAX` / 2 bytes are kept and what lies between is only counted,
however much comes. Up to `MEMORY_BYTES_MAX` nothing touches the disk; over it an unnamed temporary
file holds the start, and a ring behind it the end.
"""

from __future__ import annotations

import os
import tempfile
from types import TracebackType
from typing import IO

KEPT_BYTES_MAX = 16 * 1024 * 1024
MEMORY_BYTES_MAX = 64 * 1024


class Spool:
    """Written to from the event loop; ``total`` counts every byte that came."""

    def __init__(self, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.total = 0
        self._half = kept_bytes_max // 2
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
            OSError: the temporary folder is full.
        """
        if self._file is None and self.total + len(data) <= MEMORY_BYTES_MAX:
            self._memory += data
        else:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                self._place(bytes(self._memory), 0)
                self._memory.clear()
            self._place(data, self.total)
        self.total += len(data)

    @property
    def dropped(self) -> int:
        """How many bytes between the start and the end are gone."""
        return max(0, self.total - 2 * self._half)

    def head(self, size: int) -> bytes:
        return self._read(0, min(size, self._half, self.total))

    def tail(self, size: int) -> bytes:
        size = min(size, self._half, self.total)
        return self._read(self.total - size, size)

    def contents(self) -> bytes:
        """All that was kept; a line in the middle says what was not."""
        if not self.dropped:
            return self._read(0, self.total)
        note = f"\n[… {self.dropped} bytes were not kept …]\n".encode()
        return self.head(self._half) + note + self.tail(self._half)

    def _place(self, data: bytes, at: int) -> None:
        """Writes bytes to where they belong: in the start, or in the ring of the end."""
        assert self._file is not None
        fd = self._file.fileno()
        view = memoryview(data)
        while view:
            offset, room = self._position(at)
            written = os.pwrite(fd, view[:room], offset)
            view, at = view[written:], at + written

    def _read(self, at: int, size: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[at : at + size])
        parts: list[bytes] = []
        while size > 0:
            offset, room = self._position(at)
            part = os.pread(self._file.fileno(), min(size, room), offset)
            if not part:
                break
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return b"".join(parts)

    def _position(self, at: int) -> tuple[int, int]:
        """Where the byte number ``at`` lies in the file, and how many follow it there."""
        if at < self._half:
            return at, self._half - at
        ring = (at - self._half) % self._half
        return self._half + ring, self._half - ring

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
