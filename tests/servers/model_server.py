"""The fixture that runs `mock_llm.py` as a process of its own, for real HTTP on a free port.

One server a test process; it reads its instructions from the prompt (see its docstring). What it
was sent stands in its log, in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mock_llm.py")


class ModelServer:
    """``url`` is the base URL of its Chat Completions; ``port`` serves the other dialects too."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = log

    def bodies(self) -> list[bytes]:
        """The body of every request so far, in order."""
        bodies: list[bytes] = []
        for line in self._log.read_bytes().splitlines():
            _, _, body = line.split(b" ", 2)
            bodies.append(body)
        return bodies

    def connections(self) -> int:
        """How many connections are open, the one of this question not counted."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/__stats", timeout=10) as answer:
            return int(json.load(answer)["conns"]) - 1


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    log = tmp_path_factory.mktemp("model_server") / "requests.log"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--port", "0", "--log", str(log)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        assert "listening on" in ready, "the model server did not start"
        yield ModelServer(int(ready.rsplit(":", 1)[1]), log)
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stdout.close()
