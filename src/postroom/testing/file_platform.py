"""A fake platform in a file: many processes may use it, and it outlives each of them.

One fact is one line of JSON, written at once under an exclusive lock, so a message is taken wholly or
not at all, and one that was taken stays so whatever becomes of the process. (It is not synced: that
would only matter to a machine that loses its power.) A line that a killed process did not finish is
no fact, and the next writer cuts it off.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from postroom.ports.channel import Profile
from postroom.ports.clock import Clock
from postroom.testing.platform import Platform
from postroom.testing.platform_facts import Fact, Founded

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Fact).decode


class FilePlatform(Platform):
    """The platform in the file ``path``, which is made if it is not there.

    What it can do (``profile``, ``echoes``, ``pulls``) is settled by who makes the file; all others
    get it as it is. Another process's facts are noticed within 20 ms of real time.
    """

    _poll_s = 0.02

    def __init__(
        self,
        path: str | os.PathLike[str],
        profile: Profile | None = None,
        *,
        clock: Clock | None = None,
        echoes: bool = False,
        pulls: bool = False,
    ) -> None:
        super().__init__(profile, clock=clock, echoes=echoes, pulls=pulls)
        self.path = Path(path)
        self._offset = 0
        self._file = -1
        with self._held():
            if self._offset == 0:
                self._tell(Founded(self.profile, echoes, pulls))

    @contextlib.contextmanager
    def _held(self) -> Generator[None]:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._catch_up()
            self._arrivals()
            yield
        finally:
            os.close(self._file)  # the lock goes with it
            self._file = -1

    def _catch_up(self) -> None:
        size = os.fstat(self._file).st_size
        if size == self._offset:
            return
        data = os.pread(self._file, size - self._offset, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._fold(_decode(line))
        self._offset += len(whole)
        if len(whole) < len(data):
            os.ftruncate(self._file, self._offset)
        self._wake()

    def _tell(self, fact: Fact) -> None:
        line = _encode(fact) + b"\n"
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")
        self._offset += written
        super()._tell(fact)
