"""What is measured, as values: a task for one process, and the figures it comes back with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import msgspec

from bench import counting


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, made in a process of its own.

    ``folder`` is empty and on the disk to measure. ``url`` is the base of the mock model's API.
    ``seconds`` is about how long it may measure; setting up comes on top. ``sessions``,
    ``tools`` and ``history`` (past messages) are what it is about, where it asks.
    """

    name: str
    folder: str = ""
    url: str = ""
    seconds: float = 3.0
    sessions: int = 1
    tools: int = 0
    history: int = 0
    profile: bool = False


class Figure(msgspec.Struct, frozen=True):
    """``value`` is in the unit of its row. ``commits`` None: nothing was written.

    ``commits`` are group commits. ``synchronous`` is what the writing connection answered.
    """

    value: float
    commits: int | None = None
    fsyncs: int = 0
    synchronous: str = ""

    @property
    def void(self) -> bool:
        """Fewer fsyncs than commits: something was acknowledged that was not on the disk."""
        return self.commits is not None and self.fsyncs < self.commits


Figures: TypeAlias = dict[str, Figure]

# What is within `profiled()` is profiled where a profile was asked for.
profiled: Callable[[], AbstractContextManager[None]] = nullcontext

SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")


class Stretch:
    """A stretch of time, and what was spent in it. Add up several with ``+``."""

    def __init__(self, commits: Callable[[], int]) -> None:
        self._commits = commits
        self.seconds = self.cpu_s = 0.0
        self.commits = self.fsyncs = 0

    def __enter__(self) -> Stretch:
        self._from = (
            self._commits(),
            counting.fsyncs(),
            time.process_time(),
            time.perf_counter(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter()
        commits, fsyncs, cpu, started = self._from
        self.seconds += ended - started
        self.cpu_s += time.process_time() - cpu
        self.fsyncs += counting.fsyncs() - fsyncs
        self.commits += self._commits() - commits

    def figure(self, value: float, synchronous: str) -> Figure:
        return Figure(value, self.commits, self.fsyncs, synchronous)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of all lie, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
