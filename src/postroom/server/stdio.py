"""The protocol over standard input and output: one client, one frame a line.

Nothing else may write to standard output while it is served: the process's own output goes to
standard error. The end of input is the end of the client: what it asked is answered, what runs may
end (see `Room.aclose`), and it still hears of that while it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from postroom.server.connection import Connection
from postroom.wire.rpc import Link, StreamLink

if TYPE_CHECKING:
    from postroom.app import Room

_CHUNK = 64 * 1024
_COPY_S = 5.0


async def serve_link(
    room: Room,
    link: Link,
    *,
    stop: asyncio.Event | None = None,
    drain_ms: int | None = None,
    kind: str = "stdio",
) -> None:
    """Serves one client, then drains and closes the room.

    It ends with the client's input, when the client asks for it, or when ``stop`` is set.
    """
    stop = asyncio.Event() if stop is None else stop
    connection = Connection(room, link, kind=kind, on_shutdown=stop.set)
    serving = asyncio.ensure_future(connection.serve())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        stopping.cancel()
        try:
            await room.aclose(drain_ms=drain_ms)
        finally:
            await connection.aclose()
            await asyncio.gather(serving, return_exceptions=True)


async def serve_stdio(
    room: Room, *, stop: asyncio.Event | None = None, drain_ms: int | None = None
) -> None:
    """`serve_link` over this process's own standard input and output, which it takes for itself."""
    async with _standard_streams() as link:
        await serve_link(room, link, stop=stop, drain_ms=drain_ms)


@contextlib.asynccontextmanager
async def _standard_streams() -> AsyncGenerator[StreamLink]:
    loop = asyncio.get_running_loop()
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what prints without being asked is read by a person, not by the client
    if not _is_pipe(source):
        source, _ = _copied(source, reading=True)
    copier = None
    if not _is_pipe(target):
        target, copier = _copied(target, reading=False)
    reader = asyncio.StreamReader()
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", 0)
    )
    outgoing, flow = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(target, "wb", 0)
    )
    try:
        yield StreamLink(reader, asyncio.StreamWriter(outgoing, flow, None, loop))
    finally:
        incoming.close()
        outgoing.close()
        await asyncio.sleep(0)  # both are closed in the loop's next round
        if copier is not None:
            await asyncio.to_thread(copier.join, _COPY_S)


def _is_pipe(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _copied(descriptor: int, *, reading: bool) -> tuple[int, threading.Thread]:
    """Our end of a pipe that is filled from, or emptied into, a file or a terminal, and by whom.

    The event loop cannot wait for a file; and a terminal is shared with others, for whom its mode
    must not change.
    """
    out, into = os.pipe()

    def copy(source: int, target: int) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(source, _CHUNK):
                view = memoryview(chunk)
                while view:
                    view = view[os.write(target, view) :]
        os.close(target)

    ends = (descriptor, into) if reading else (out, descriptor)
    thread = threading.Thread(target=copy, args=ends, daemon=True)
    thread.start()
    return (out if reading else into), thread
