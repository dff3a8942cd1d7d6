"""Two ends of a link within one process, for a runtime that lives beside its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

# What lies between the two ends; who writes more waits until it is read.
_HELD_BYTES_MAX = 256 * 1024


class _Pipe:
    """Frames one way."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._held = 0
        self._closed = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def read(self) -> bytes | None:
        while not self._frames:
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        frame = self._frames.popleft()
        self._held -= len(frame)
        if self._held <= _HELD_BYTES_MAX:
            self._room.set()
        return frame

    async def write(self, frames: Sequence[bytes]) -> None:
        if self._closed:
            raise BrokenPipeError("the other end is closed")
        self._frames.extend(frames)
        self._held += sum(map(len, frames))
        self._news.set()
        if self._held > _HELD_BYTES_MAX:
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._room.set()


class MemoryLink:
    """One end. Closing it ends both directions; what the other end was sent it still reads."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    async def read(self) -> bytes | None:
        return await self._incoming.read()

    async def write(self, frames: Sequence[bytes]) -> None:
        await self._outgoing.write(frames)

    async def aclose(self) -> None:
        self._outgoing.close()
        self._incoming.close()


def memory_links() -> tuple[MemoryLink, MemoryLink]:
    one, other = _Pipe(), _Pipe()
    return MemoryLink(one, other), MemoryLink(other, one)
