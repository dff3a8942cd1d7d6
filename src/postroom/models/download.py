"""One file of weights while it grows, and the sources that are a file or a URL.

It grows in ``NAME.gguf.partial``; ``NAME.gguf.partial.note`` says how many of its bytes are
safely on disk, and of which weights. The note is written after the bytes are synced, so it never
claims too much; what is behind it after a crash is cut off and fetched again.

Disk work runs in threads. It looks at a stop flag between chunks, and a cancelled caller waits
for it: nothing writes to the file once the call has returned.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from postroom.models.weights import Progress, Weights

if TYPE_CHECKING:
    import aiohttp

CHUNK_BYTES = 1024 * 1024
NOTED_BYTES = 16 * 1024 * 1024
ANSWER_S = 30.0
STALLED_S = 120.0

R = TypeVar("R")


class SourceFailed(Exception):
    """This source does not have the weights; another may."""


class WrongBytes(SourceFailed):
    """They have the right number, and not the right hash."""


class Download:
    """The weights so far; ``done`` counts the bytes in the file.

    A context manager: at its end what is there is made safe. The methods that are not
    coroutines block, `show` excepted: call them in a thread.
    """

    def __init__(self, weights: Weights, path: Path, progress: Callable[[Progress], None]) -> None:
        self.weights = weights
        self.path = path
        self.done = 0
        self._partial = partial_of(path)
        self._note = note_of(path)
        self._safe = 0
        self._file: BinaryIO | None = None
        self._stage = "downloading"
        self._shown = 0
        self._progress = progress
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Download:
        self._file = self._partial.open("ab")
        self._safe = min(noted(self.path, self.weights), self._file.tell())
        self.truncate(self._safe)
        self._shown = self._safe
        return self

    def __exit__(self, *error: object) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            if not isinstance(error[1], OSError):
                self._save(file)
        if not self.done:
            self._partial.unlink(missing_ok=True)
            self._note.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Adds bytes.

        Raises:
            SourceFailed: the weights have not that many.
        """
        file = self._open()
        if self.done + len(chunk) > self.weights.size:
            raise SourceFailed(f"it has more than the weights' {self.weights.size} bytes")
        file.write(chunk)
        self.done += len(chunk)
        if self.done - self._safe >= NOTED_BYTES:
            self._save(file)
        self.show(self.done)

    def truncate(self, size: int) -> None:
        """Forgets what is behind ``size`` bytes, on disk too."""
        file = self._open()
        if size < self._safe:
            self._safe = size
            self._write_note()
        file.truncate(size)
        self.done = size

    def save(self) -> None:
        """Makes what is there so far safe."""
        self._save(self._open())

    def stage(self, words: str) -> None:
        """What is being done from now on."""
        self._stage = words

    def show(self, done: int) -> None:
        """Tells of progress; never less than was told before."""
        self._shown = max(self._shown, min(done, self.weights.size))
        report = Progress(self._stage, self._shown, self.weights.size)
        self._loop.call_soon_threadsafe(self._progress, report)

    async def finish(self) -> None:
        """Checks size and hash, and moves the file into place.

        Raises:
            SourceFailed: bytes are missing; what is there is kept.
            WrongBytes: it is not what the makers published, and is deleted.
        """
        if self.done != self.weights.size:
            raise SourceFailed(f"it ended after {self.done} of {self.weights.size} bytes")
        self._stage, self._shown = "checking", 0
        digest = await in_thread(self._digest)
        if digest != self.weights.sha256:
            await in_thread(lambda _: self.truncate(0))
            self._stage, self._shown = "downloading", 0
            raise WrongBytes(
                f"what came has the hash {digest[:12]}…, but its makers published "
                f"{self.weights.sha256[:12]}…; it was deleted"
            )
        await in_thread(lambda _: self._move())

    def _digest(self, stop: threading.Event) -> str:
        self.save()
        digest = hashlib.sha256()
        checked = 0
        with self._partial.open("rb") as file:
            while not stop.is_set() and (chunk := file.read(CHUNK_BYTES)):
                digest.update(chunk)
                checked += len(chunk)
                self.show(checked)
        return digest.hexdigest()

    def _move(self) -> None:
        self._partial.replace(self.path)
        self._note.unlink(missing_ok=True)
        handle = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _open(self) -> BinaryIO:
        assert self._file is not None, "used outside its with block"
        return self._file

    def _save(self, file: BinaryIO) -> None:
        file.flush()
        if self._safe != self.done:
            os.fsync(file.fileno())
            self._safe = self.done
            self._write_note()

    def _write_note(self) -> None:
        fresh = self._note.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(_Note(self.weights.sha256, self._safe)))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._note)


class _Note(msgspec.Struct):
    sha256: str
    bytes: int


def noted(path: Path, weights: Weights) -> int:
    """How many bytes of these weights are safely on disk, to go on from."""
    try:
        note = msgspec.json.decode(note_of(path).read_bytes(), type=_Note)
    except (OSError, msgspec.DecodeError):
        return 0
    return min(max(note.bytes, 0), weights.size) if note.sha256 == weights.sha256 else 0


def partial_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial.note")


async def in_thread(work: Callable[[threading.Event], R]) -> R:
    """Runs blocking work beside the loop. Cancelled, it asks the work to stop, and waits for it."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait((running,))
        running.exception()
        raise


async def from_file(download: Download, source: Path) -> None:
    """Copies the rest of a file.

    Raises:
        SourceFailed: it cannot be read, or has not the size of the weights.
    """

    def copy(stop: threading.Event) -> None:
        with _opened(source) as file:
            size = os.fstat(file.fileno()).st_size
            if size != download.weights.size:
                raise SourceFailed(f"it has {size} bytes, the weights {download.weights.size}")
            file.seek(download.done)
            while not stop.is_set() and (chunk := file.read(CHUNK_BYTES)):
                download.write(chunk)

    download.stage("copying")
    await in_thread(copy)


def _opened(source: Path) -> BinaryIO:
    try:
        return source.open("rb")
    except OSError as error:
        raise SourceFailed(error.strerror or "it cannot be read") from None


async def from_url(download: Download, url: str, answer_s: float = ANSWER_S) -> None:
    """Fetches the rest of a file; ``answer_s`` is how long an answer is waited for.

    Raises:
        SourceFailed: there is no answer, or it is not the weights.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, connect=answer_s, sock_read=STALLED_S)
    headers = {"Accept-Encoding": "identity"}
    if download.done:
        headers["Range"] = f"bytes={download.done}-"
    download.stage(f"downloading from {shown(url).partition('/')[0]}")
    try:
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            async with asyncio.timeout(answer_s):
                response = await session.get(url, headers=headers)
            async with response:
                await _accept(download, response)
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    await in_thread(lambda _, chunk=chunk: download.write(chunk))
    except TimeoutError:
        raise SourceFailed("it did not answer in time") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise SourceFailed(f"it could not be reached ({type(error).__name__})") from None


async def _accept(download: Download, response: aiohttp.ClientResponse) -> None:
    """Goes on only with an answer that can be the rest of the weights."""
    begin = f"bytes {download.done}-"
    if response.status == 200:
        await in_thread(lambda _: download.truncate(0))
    elif response.status != 206 or not response.headers.get("Content-Range", "").startswith(begin):
        raise SourceFailed(f"it answered {response.status}")
    length = response.content_length
    if length is not None and download.done + length != download.weights.size:
        raise SourceFailed(
            f"it offers {download.done + length} bytes, the weights have {download.weights.size}"
        )


def shown(url: str) -> str:
    """A URL without the parts that may be secret."""
    from yarl import URL

    address = URL(url)
    return f"{address.host}{address.path}"
