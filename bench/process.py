"""`postroom run` as a whole process, and the moment its first model request arrives."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from bench.figures import Figure, Figures, Task, median
from bench.results import table

_ROOT = Path(__file__).resolve().parent.parent
_TIMES_MIN = 5


class _Relay:
    """Stands before the mock, passes every byte on, and notes when a request's first came."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._path = parts.path
        self.arrived = 0.0
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{self._path}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(65536)
        if not self.arrived:
            self.arrived = time.perf_counter()
        onward_reader, onward = await asyncio.open_connection(self._host, self._port)
        onward.write(first)
        await asyncio.gather(_pump(reader, onward), _pump(onward_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _run(command: list[str], environment: dict[str, str], answer: str) -> float:
    """How long it took from the start of the process until it had ended, in seconds."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        cwd=_ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    took = time.perf_counter() - started
    if process.returncode or out.decode().strip() != answer:
        raise RuntimeError(
            f"{command[1:4]} ended with {process.returncode}: {err.decode()[-2000:]}"
        )
    return took


async def whole(task: Task) -> Figures:
    """The same prompt by the command and by the floor, each a process of its own, in turns."""
    folder = Path(task.folder)
    relay = _Relay(task.url)
    server = await relay.start()
    environment = dict(os.environ, OPENAI_BASE_URL=relay.url, OPENAI_API_KEY="bench")
    arguments = ["run", "--model", "openai:mock", "--db", str(folder / "run.db"), "hello"]
    ours = [str(Path(sys.executable).with_name("postroom")), *arguments]
    floor = [sys.executable, "-m", "bench.floor", relay.url, str(folder / "floor.db"), "hello"]
    counted = folder / "counted.json"
    # The first of each makes its database and compiles what is not compiled yet.
    await _run(ours, environment, "OK")
    await _run(floor, environment, "OK")
    await _run([sys.executable, "-m", "bench.process", str(counted), *arguments], environment, "OK")
    ends: list[float] = []
    firsts: list[float] = []
    floors: list[float] = []
    floor_firsts: list[float] = []
    until = time.perf_counter() + task.seconds
    while len(ends) < _TIMES_MIN or time.perf_counter() < until:
        relay.arrived = 0.0
        started = time.perf_counter()
        ends.append(await _run(ours, environment, "OK"))
        firsts.append(relay.arrived - started)
        relay.arrived = 0.0
        started = time.perf_counter()
        floors.append(await _run(floor, environment, "OK"))
        floor_firsts.append(relay.arrived - started)
    server.close()
    await server.wait_closed()
    commits, fsyncs, synchronous = json.loads(counted.read_text(encoding="utf-8"))
    return {
        "whole": Figure(median(ends), commits, fsyncs, synchronous),
        "first request": Figure(median(firsts)),
        "floor whole": Figure(median(floors)),
        "floor first request": Figure(median(floor_firsts)),
    }


def imports(task: Task) -> str:
    """What the command imports, by package, as a table: nearly all of its start is that."""
    path = Path(task.folder) / "imports.db"
    arguments = ["run", "--model", "openai:mock", "--db", str(path), "hello"]
    command = [sys.executable, "-X", "importtime", "-c", _IMPORTS, *arguments]
    environment = dict(os.environ, OPENAI_BASE_URL=task.url, OPENAI_API_KEY="bench")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[int]] = {}
    for line in done.stderr.splitlines():
        if match := _IMPORTED.match(line):
            found.setdefault(match[2], []).append(int(match[1]))
    largest = sorted(found.items(), key=lambda item: sum(item[1]), reverse=True)
    rows = [[f"`{n}`", str(len(us)), f"{sum(us) / 1000:.1f} ms"] for n, us in largest[:12]]
    total = sum(sum(us) for us in found.values()) / 1000
    columns = ["package", "modules", "own time"]
    return (
        f"Its imports, one after the other and slowed by being timed, {total:.0f} ms:\n\n"
        + table(columns, rows)
    )


# The client first, as the command has it imported by a thread beside.
_IMPORTS = "import aiohttp, sys; from postroom.cli.main import main; sys.exit(main())"
_IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([^.\s]+)")


def _counted(target: Path, arguments: list[str]) -> None:
    """The command in this process, its commits and fsyncs counted; not for measuring time."""
    import apsw

    from bench import counting
    from bench.floor import synchronous
    from postroom.cli.main import main

    counting.install()
    commits = 0
    levels: list[str] = []

    def watch(connection: apsw.Connection) -> None:
        changes = 0

        def committed() -> bool:
            nonlocal changes, commits
            if not levels:
                levels.append(synchronous(connection))
            commits += connection.total_changes() != changes
            changes = connection.total_changes()
            return False

        connection.set_commit_hook(committed)

    apsw.connection_hooks.append(watch)
    before = counting.fsyncs()
    sys.argv = ["postroom", *arguments]
    try:
        main()
    finally:
        found = [commits, counting.fsyncs() - before, levels[0]]
        target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _counted(Path(sys.argv[1]), sys.argv[2:])
