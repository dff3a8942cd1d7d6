"""The stdio transport: the runtime is a process of the client's own, one frame a line.

The process is reaped whatever happens: the end of its input asks it to drain, TERM asks again, KILL
does not ask; each is given its time. It lives in a session of its own, so that a Ctrl-C at the terminal
reaches the client alone, which closes it in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

from postroom.errors import Disconnected, UsageError
from postroom.wire.rpc import StreamLink

# How much of standard error is kept for who asks why it died.
STDERR_CHARS_MAX = 8 * 1024
# After this long an end that is not explained is told without an explanation.
_OBITUARY_S = 0.6
_TERM_S = 5.0
_KILL_S = 5.0
_CHUNK = 64 * 1024


def default_command(*, database: str | None, model: str | None, drain_s: float | None) -> list[str]:
    """This interpreter's own `postroom serve --stdio`."""
    words = [sys.executable, "-m", "postroom.cli.main", "serve", "--stdio"]
    if database is not None:
        words += ["--db", database]
    if model is not None:
        words += ["--model", model]
    if drain_s is not None:
        words += ["--drain", f"{drain_s:g}"]
    return words


class ChildTransport:
    """``drain_s`` is how long after the end of its input the process may take before TERM."""

    survives = False

    def __init__(
        self,
        command: Sequence[str],
        *,
        drain_s: float,
        term_s: float = _TERM_S,
        kill_s: float = _KILL_S,
    ) -> None:
        self._command = list(command)
        self._bounds = (drain_s, term_s, kill_s)

    async def open(self) -> Child:
        child = Child(_start(self._command), self._bounds)
        try:
            await child.connect()
        except BaseException:
            child.kill()
            raise
        return child


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"cannot start {command[0]}: {error.strerror or error}",
            hint="`command` is the program and its arguments, as ['postroom', 'serve', '--stdio']",
        ) from error


class Child:
    """One process. A thread waits for its end and another reads what it says on standard error."""

    def __init__(
        self, process: subprocess.Popen[bytes], bounds: tuple[float, float, float]
    ) -> None:
        self._process = process
        self._bounds = bounds
        self._said = bytearray()
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = loop.create_future()
        self._silent: asyncio.Future[None] = loop.create_future()
        self._reader = asyncio.StreamReader()
        self._transports: list[asyncio.BaseTransport] = []
        self._link: StreamLink | None = None

        def told(future: asyncio.Future[None] | asyncio.Future[int], value: int | None) -> None:
            if not future.done():
                future.set_result(value)  # type: ignore[arg-type]

        def tell(future: asyncio.Future[None] | asyncio.Future[int], value: int | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(told, future, value)

        stderr = process.stderr
        assert stderr is not None
        _thread(lambda: tell(self._exited, process.wait()))
        _thread(lambda: tell(self._silent, self._listen(stderr)))

    @property
    def link(self) -> StreamLink:
        assert self._link is not None
        return self._link

    @property
    def pid(self) -> int:
        return self._process.pid

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), stdout
        )
        self._transports.append(incoming)
        outgoing, flow = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stdin
        )
        self._transports.append(outgoing)
        self._link = StreamLink(self._reader, asyncio.StreamWriter(outgoing, flow, None, loop))

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while chunk := os.read(stderr.fileno(), _CHUNK):
                self._said += chunk
                del self._said[: -4 * STDERR_CHARS_MAX]

    async def obituary(self) -> Disconnected:
        """An exit code below 0 is a signal's number."""
        await asyncio.wait({self._exited, self._silent}, timeout=_OBITUARY_S)
        tail = bytes(self._said).decode(errors="replace")[-STDERR_CHARS_MAX:]
        if not self._exited.done():
            return Disconnected("the runtime has closed its output", stderr_tail=tail)
        code = self._exited.result()
        last = tail.strip().rpartition("\n")[2]
        return Disconnected(
            f"the runtime has ended with exit code {code}" + (f": {last[:300]}" if last else ""),
            exit_code=code,
            stderr_tail=tail,
        )

    def kill(self) -> None:
        """At once, for what was never used; the waiting thread reaps it."""
        self._process.kill()
        self._let_go()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    async def aclose(self) -> None:
        # What it still says is read and thrown away, or it could not end for a full pipe.
        discarding = asyncio.ensure_future(self._discard())
        try:
            drain_s, term_s, kill_s = self._bounds
            if not await self._ends(drain_s):
                self._process.terminate()
                if not await self._ends(term_s):
                    self._process.kill()
                    await self._ends(kill_s)
        except asyncio.CancelledError:
            self._process.kill()
            raise
        finally:
            discarding.cancel()
            self._let_go()
            await asyncio.wait({discarding})

    async def _ends(self, within_s: float) -> bool:
        await asyncio.wait({self._exited}, timeout=within_s)
        return self._exited.done()

    async def _discard(self) -> None:
        with contextlib.suppress(OSError):
            while await self._reader.read(_CHUNK):
                pass

    def _let_go(self) -> None:
        for transport in self._transports:
            if isinstance(transport, asyncio.WriteTransport):
                if not transport.is_closing():
                    transport.abort()
            else:
                transport.close()


def _thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="postroom-child", daemon=True).start()
