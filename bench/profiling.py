"""A profile of a measurement, thread by thread, as tables."""

from __future__ import annotations

import cProfile
import pstats
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.results import table

_ROWS = 10
_WORTH_SEEING = 0.05  # of the event loop's own time
_THREADS = {"postroom-write": "The writer thread", "postroom-read": "The readers"}
_PLACE = re.compile(r"^.*/(?:site-packages|src|lib/python[\d.]+)/|^.*/(?=bench/)")


class Profile:
    """Of the thread that enters it, and of each thread started meanwhile.

    From Python 3.12 on only one profile can be taken at a time: then there is one table.
    """

    def __init__(self) -> None:
        self._here = _profile()
        self._threads: dict[str, list[cProfile.Profile]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        threading.setprofile(self._begin)
        self._here.enable()
        try:
            yield
        finally:
            self._here.disable()
            threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    def _begin(self, *_: object) -> None:
        profile = _profile()
        try:
            profile.enable()
        except ValueError:
            return
        name = re.sub(r"[-_\d]*$", "", threading.current_thread().name)
        self._threads.setdefault(name, []).append(profile)

    def text(self) -> str:
        """A table for the entering thread, and for each other one that did a part worth seeing."""
        here = pstats.Stats(self._here)
        parts = [_table("The event loop", here)]
        for name, title in _THREADS.items():
            profiles = self._threads.get(name)
            if not profiles:
                continue
            stats = pstats.Stats(profiles[0])
            for profile in profiles[1:]:
                stats.add(profile)
            if _seconds(stats) > _WORTH_SEEING * _seconds(here):
                parts.append(_table(title, stats))
        return "\n\n".join(parts)


def _seconds(stats: pstats.Stats) -> float:
    return sum(entry[2] for entry in stats.stats.values())  # pyright: ignore


def _profile() -> cProfile.Profile:
    """By the processor time of the thread it runs in: waiting costs nothing."""
    return cProfile.Profile(time.thread_time)


def _table(title: str, stats: pstats.Stats) -> str:
    entries: dict[tuple[str, int, str], Any] = stats.stats  # pyright: ignore
    total = _seconds(stats) or 1.0
    largest = sorted(entries.items(), key=lambda item: item[1][2], reverse=True)[:_ROWS]
    rows = [
        [_name(place), f"{calls:,}", f"{own / total * 100:.1f} %", f"{own / calls * 1e6:.1f} µs"]
        for place, (_, calls, own, _, _) in largest
    ]
    return f"{title}, {total:.2f} s:\n\n" + table(("function", "calls", "own time", "a call"), rows)


def _name(place: tuple[str, int, str]) -> str:
    file, line, function = place
    if file == "~":
        return f"`{function}`"
    return f"`{_PLACE.sub('', file)}:{line} {function}`"
