"""Starts actors: one after another in a nursery, or one to talk to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from tests.crash.actor import Plan
from tests.support import ROOT

_ACTOR = [sys.executable, "-m", "tests.crash.actor"]


def eventually(true: Callable[[], bool], *, seconds: float = 30) -> None:
    """Returns once something is true of what another process writes; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.01)


class Outcome(NamedTuple):
    """How an actor ended and what it said. A killed one has the signal's number, negative."""

    code: int
    said: list[dict[str, Any]]

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def receipts(self) -> dict[str, int]:
        return {fact["receipt"]: fact["seq"] for fact in self.said if "receipt" in fact}

    def told(self, key: str) -> Any:
        """What the actor said under a key; it must have said so."""
        return next(fact[key] for fact in self.said if key in fact)


def _facts(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


class Nursery:
    """One parent process that forks an actor a plan: no actor pays for the imports."""

    def __init__(self, module: str = "tests.crash.actor") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--nursery"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lock = threading.Lock()

    def play(self, plan: msgspec.Struct) -> Outcome:
        """Plays one plan to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(msgspec.json.encode(plan) + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        return Outcome(answer["code"], _facts(answer["said"]))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Actor:
    """A running actor with a process of its own: hear what it says, send it signals."""

    def __init__(self, plan: Plan) -> None:
        self.process = subprocess.Popen(
            [*_ACTOR, msgspec.json.encode(plan).decode()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.said: list[dict[str, Any]] = []
        self._rest = b""

    def until(self, key: str, value: Any = None, *, seconds: float = 30) -> Any:
        """Waits until the actor says something under a key (and this); what it said."""
        deadline = time.monotonic() + seconds
        at = 0
        while True:
            for fact in self.said[at:]:
                at += 1
                if key in fact and value in (None, fact[key]):
                    return fact[key]
            if not self._hear(deadline - time.monotonic()):
                raise AssertionError(f"never said {key} {value}; said {self.said}")

    def _hear(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(seconds, 0))
        if not ready:
            return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += map(json.loads, lines)
        return True

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> Outcome:
        """Sends a signal and waits for the end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = 30) -> Outcome:
        code = self.process.wait(seconds)
        while self._hear(1):
            pass
        assert self.process.stdout is not None
        self.process.stdout.close()
        return Outcome(code, self.said)


@contextlib.contextmanager
def actor(plan: Plan) -> Iterator[Actor]:
    """An actor for a ``with`` block, which it does not outlive."""
    started = Actor(plan)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.process.kill()
        started.process.wait(30)
        assert started.process.stdout is not None
        started.process.stdout.close()
