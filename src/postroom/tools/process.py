"""A child process that ends: on its own, at its time limit, or when its caller is cancelled.

The child leads a session and process group of its own, and everything that is still in the group
ends with it: SIGTERM first, SIGKILL after a grace. A descendant that made a session of its own
has left the group and is beyond reach; it cannot hold the caller up, even if it keeps the output
pipe open.

Its output is read as it comes and handed on; nothing is gathered here. Its standard input is what
it is given, or empty: no child waits for a person.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

GRACE_MS = 2_000
# After SIGKILL: the kernel needs a moment, and may not have one (a dead network disk).
KILL_WAIT_MS = 1_000
# After the leader has ended: a helper it did not wait for (``>(tee log)``) may be about to end.
SETTLE_MS = 300
# After all have ended: what they wrote is in the pipe already.
DRAIN_MS = 100
_POLL_MS = 10
_CHUNK_BYTES = 64 * 1024

Sink = Callable[[bytes], None]


class Ended(msgspec.Struct, frozen=True):
    """``code`` is the exit code, negative for a signal; None: it could not be ended.

    ``leftovers``: it left processes running in its group, which were stopped.
    """

    code: int | None
    timed_out: bool
    leftovers: bool


async def run(
    argv: Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str],
    sink: Sink,
    limit_ms: int,
    stdin: bytes = b"",
    pass_fds: Sequence[int] = (),
    grace_ms: int = GRACE_MS,
) -> Ended:
    """Runs a command to its end. ``sink`` gets standard output and error, in one stream.

    Takes at most ``limit_ms`` + ``grace_ms`` and a moment. Cancelling it stops the group with the
    same grace; cancelling it again kills the group at once. An exception of the sink ends the
    command too, and is raised here.

    Raises:
        OSError: it could not be started.
    """
    child = _Child(argv, cwd=cwd, env=env, sink=sink, stdin=stdin, pass_fds=pass_fds)
    try:
        done = await _within(limit_ms, child.exited, child.broken)
        if child.broken.done():
            await child.stop(grace_ms)
            raise child.broken.result()
        leftovers = done and not await child.gone(SETTLE_MS)
        if not done or leftovers:
            await child.stop(grace_ms)
        await _within(DRAIN_MS, child.closed)
        return Ended(child.code, timed_out=not done, leftovers=leftovers)
    except asyncio.CancelledError:
        await child.stop(grace_ms)
        raise
    finally:
        child.abandon()


class _Child:
    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str],
        sink: Sink,
        stdin: bytes,
        pass_fds: Sequence[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self.exited: asyncio.Future[None] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.broken: asyncio.Future[Exception] = self._loop.create_future()
        self._stopped = False
        with contextlib.ExitStack() as stack:
            given: int = subprocess.DEVNULL
            if stdin:
                # A file needs no writer beside the reader, and cannot deadlock.
                file = stack.enter_context(tempfile.TemporaryFile())
                file.write(stdin)
                file.seek(0)
                given = file.fileno()
            self._process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._loop.add_reader(self._pipe.fileno(), self._read)
        # A thread a child: no child watcher, no signal handler, nothing shared with the host.
        waiter = threading.Thread(target=self._wait, name="child-wait", daemon=True)
        try:
            waiter.start()
        except RuntimeError:  # the process may have no more threads
            self.abandon()
            self._process.wait()
            raise

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def _wait(self) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(_resolve, self.exited)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close_pipe()
            return
        try:
            self._sink(data)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_result(error)
            self._close_pipe()

    def _close_pipe(self) -> None:
        if not self._pipe.closed:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            _resolve(self.closed)

    async def stop(self, grace_ms: int) -> None:
        """Ends the whole group: asks, then kills. Bounded, whatever the processes do."""
        self._signal(signal.SIGTERM)
        # A stopped process takes its SIGTERM only when it goes on.
        self._signal(signal.SIGCONT)
        if not await self.gone(grace_ms):
            self._signal(signal.SIGKILL)
            await self.gone(KILL_WAIT_MS)
        self._stopped = True

    async def gone(self, limit_ms: int) -> bool:
        """Waits until the leader and its group have ended; False if the time was over first."""
        deadline = self._loop.time() + limit_ms / 1000
        while not self.exited.done() or self.group_lives():
            left_ms = (deadline - self._loop.time()) * 1000
            if left_ms <= 0:
                return False
            await asyncio.sleep(min(_POLL_MS, left_ms) / 1000)
        return True

    def group_lives(self) -> bool:
        """Whether anything in the group still runs. A zombie that nobody reaps does not count."""
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return _has_running_member(self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def abandon(self) -> None:
        """The last word: nothing of it is left running, nothing of it is left open."""
        if not self._stopped and (not self.exited.done() or self.group_lives()):
            self._signal(signal.SIGKILL)
        self._close_pipe()


def _has_running_member(group: int) -> bool:
    """Looks through /proc, where there is one; else what the signal said stands."""
    processes = Path("/proc")
    if not (processes / "self/stat").exists():
        return True
    for entry in os.listdir(processes):
        if entry.isdigit():
            try:
                stat = (processes / entry / "stat").read_bytes()
            except OSError:
                continue
            # "pid (name) state ppid pgrp …", and the name may hold anything.
            state, _, pgrp = stat.rpartition(b")")[2].split()[:3]
            if int(pgrp) == group and state not in (b"Z", b"X"):
                return True
    return False


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _within(
    limit_ms: int, *futures: asyncio.Future[None] | asyncio.Future[Exception]
) -> bool:
    """Waits until one of the futures is done; False if the time was over first."""
    done, _ = await asyncio.wait(
        futures, timeout=limit_ms / 1000, return_when=asyncio.FIRST_COMPLETED
    )
    return bool(done)
