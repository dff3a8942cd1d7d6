"""What the machine is, as far as it explains the figures. It names nothing and nobody."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import apsw
import msgspec

from bench.figures import median

_SYNCS = 60


class Machine(msgspec.Struct, frozen=True):
    cores: int
    architecture: str
    system: str
    python: str
    sqlite: str
    file_system: str


class Conditions(msgspec.Struct, frozen=True):
    """What changes from one minute to the next, on a shared machine by much.

    ``load`` is the machine's load average over one minute, ``fdatasync_ms`` the median of an
    fdatasync after a write of 4 KiB.
    """

    load: float
    fdatasync_ms: float


def machine(folder: Path) -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        architecture=platform.machine(),
        system=platform.system(),
        python=platform.python_version(),
        sqlite=apsw.sqlite_lib_version(),
        file_system=_file_system(folder),
    )


def conditions(folder: Path) -> Conditions:
    return Conditions(os.getloadavg()[0], _fdatasync_ms(folder))


def _file_system(folder: Path) -> str:
    """The type of the file system that holds this folder, as the system calls it."""
    device = folder.stat().st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"


def _fdatasync_ms(folder: Path) -> float:
    path = folder / "fdatasync"
    taken: list[float] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for number in range(_SYNCS):
            os.pwrite(descriptor, b"\1" * 4096, number * 4096)
            started = time.perf_counter()
            os.fdatasync(descriptor)
            taken.append((time.perf_counter() - started) * 1000)
    finally:
        os.close(descriptor)
        path.unlink()
    return median(taken)
