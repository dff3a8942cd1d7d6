"""``python -m bench``: measures every row, prints it, and writes bench/RESULTS.md.

::

    python -m bench                 everything, in under six minutes
    python -m bench --quick         everything, in about one; coarse
    python -m bench --only turns    rows whose name has this in it; writes nothing
    python -m bench --folder DIR    the disk to measure; the default is the checkout's own

Each measurement is a process of its own. The mock model is one more process, shared by all.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.figures import Figures, Task
from bench.machine import conditions, machine
from bench.plan import PLAN, PROFILES, Planned
from bench.results import Line, facts, proportion, section

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "RESULTS.md"
MOCK = ROOT / "tests" / "servers" / "mock_llm.py"
IN_MEMORY = Path("/dev/shm")
_LIMIT_S = 120
_QUICK = 0.2

_INTRODUCTION = """\
# How fast

Written by `make bench`. A floor is the least that the same promise costs on the same stack, disk and
mock model, measured in the same run and in turns with what stands on it: bare commits of the
statements of a receipt, bare streamed requests, and a bare turn loop (`bench/floor.py`: HTTP client,
one SQLite file, group commit, two durable commits a turn and four with a tool call). "Times the
floor" is the cost relative to it: 1 is the floor. Commits are group commits that changed something;
fsyncs are counted below SQLite, for floors and Postroom alike. A row with fewer fsyncs than commits
is void."""


class _Bench:
    def __init__(self, url: str, *, quick: bool) -> None:
        self._url = url
        self._quick = quick
        self.failed = False

    def measure(self, task: Task, root: Path) -> tuple[Figures, str]:
        """A task's figures and its profile. Without figures it has failed, and said so."""
        seconds = task.seconds * (_QUICK if self._quick else 1)
        sessions = task.sessions // 3 if self._quick and task.name == "idle" else task.sessions
        folder = Path(tempfile.mkdtemp(dir=root))
        task = msgspec.structs.replace(
            task, folder=str(folder), url=self._url, seconds=seconds, sessions=sessions
        )
        command = [sys.executable, "-m", "bench.measure", msgspec.json.encode(task).decode()]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"bench: {task.name} was not done after {_LIMIT_S} s", file=sys.stderr)
            self.failed = True
            return {}, ""
        finally:
            shutil.rmtree(folder)
        if done.returncode:
            print(f"bench: {task.name} failed\n{done.stderr[-4000:]}", file=sys.stderr)
            self.failed = True
            return {}, ""
        figures, _, profile = done.stdout.partition("\n")
        return msgspec.json.decode(figures, type=Figures), profile

    def lines(self, planned: Planned, root: Path) -> list[Line]:
        figures, _ = self.measure(planned.task, root)
        for task in planned.beside:
            beside, _ = self.measure(task, root)
            figures |= {f"floor {key}": figure for key, figure in beside.items()}
        return [
            Line(row, figures.get(row.key), figures.get(row.floor_key or ""))
            for row in planned.rows
        ]

    def place(self, plan: list[Planned], root: Path, only: str) -> list[Line]:
        """All rows of one disk, printed as they come."""
        out: list[Line] = []
        for planned in plan:
            lines = [
                line for line in self.lines(planned, root) if not only or only in line.row.name
            ]
            for line in lines:
                cells = line.cells()
                counts = f"  [{', '.join(cells[-3:])}]" if cells[-1] else ""
                shown = "; ".join(cell for cell in cells[1:-3] if cell)
                print(f"{cells[0]}: {shown}{counts}", flush=True)
            out += lines
        return out


@contextmanager
def _mock() -> Iterator[str]:
    """The mock model in a process of its own; the base URL of its API."""
    process = subprocess.Popen(
        [sys.executable, str(MOCK), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if "listening on" not in ready:
            raise RuntimeError("the mock model did not start")
        yield f"http://127.0.0.1:{int(ready.rsplit(':', 1)[1])}/v1"
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measures; see bench/RESULTS.md.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "build")
    chosen = parser.parse_args()
    plan = [
        planned
        for planned in PLAN
        if any(chosen.only in text for text in (planned.task.name, *[r.name for r in planned.rows]))
    ]
    only = "" if any(chosen.only in planned.task.name for planned in plan) else chosen.only
    chosen.folder.mkdir(parents=True, exist_ok=True)
    in_memory = [
        planned for planned in plan if planned.in_memory and (planned.quick or not chosen.quick)
    ]
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="bench-") as disk, _mock() as url:
        about, at_start = machine(Path(disk)), conditions(Path(disk))
        bench = _Bench(url, quick=chosen.quick)
        lines = bench.place(plan, Path(disk), only)
        memory_lines: list[Line] = []
        if IN_MEMORY.is_dir() and in_memory:
            print("-- the database in memory, without a disk", flush=True)
            with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="bench-") as memory:
                memory_lines = bench.place(in_memory, Path(memory), only)
        profiles: list[str] = []
        if not chosen.only and not chosen.quick:
            for title, task in PROFILES:
                _, profile = bench.measure(task, Path(disk))
                profiles.append(f"### {title}\n\n{profile.strip()}")
        at_end = conditions(Path(disk))
    if chosen.only:
        return int(bench.failed)
    parts = [
        _INTRODUCTION,
        facts(about, at_start, at_end, chosen.quick),
        proportion(at_start, at_end, lines),
        "## On disk",
        section(lines),
    ]
    if memory_lines:
        parts += [
            "## In memory",
            "The same with the database in a file system in memory: an fsync there does nothing, so"
            " these rows promise nothing. They show what is left when no disk is waited for.",
            section(memory_lines),
        ]
    if profiles:
        parts += [
            "## Where the time goes",
            "Each thread's own time by function, under a profiler, which makes small functions of"
            " Python look dearer than they are.",
            *profiles,
        ]
    RESULTS.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
