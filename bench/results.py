"""The figures as tables: what was measured, its floor, its target, and whether it counts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from bench.figures import Figure
from bench.machine import Conditions, Machine
from bench.plan import Row

# What the targets were set by, for the sentence that puts them in proportion.
_TARGETS_FDATASYNC_MS = 0.35

FLOORS = ("floor", "measured", "synchronous", "commits", "fsyncs")
OURS = (
    "what",
    "measured",
    "floor",
    "times the floor",
    "target",
    "reached",
    "within twice",
    "synchronous",
    "commits",
    "fsyncs",
)


class Line(msgspec.Struct, frozen=True):
    """A row with its figures. ``figure`` None: its measurement failed."""

    row: Row
    figure: Figure | None
    floor: Figure | None = None

    @property
    def ratio(self) -> float | None:
        """How many times what the floor costs; 1 is the floor. None: there is no floor."""
        if self.figure is None or self.floor is None or not self.floor.value:
            return None
        if self.row.more_is_better:
            return self.floor.value / self.figure.value if self.figure.value else None
        return self.figure.value / self.floor.value

    @property
    def reached(self) -> bool | None:
        """None: no target."""
        if self.figure is None or self.figure.void:
            return None if self.row.target is None else False
        return self._reaches(self.figure)

    def _reaches(self, figure: Figure) -> bool | None:
        target = self.row.target
        if target is None:
            return None
        if self.row.rule == "at least":
            return figure.value >= target
        if self.row.rule == "above the floor":
            return self.floor is not None and figure.value - self.floor.value <= target
        return figure.value <= target

    @property
    def name(self) -> str:
        """With its contract where it proves one."""
        proves = self.row.contract is not None and self.reached
        return f"{self.row.name} ({self.row.contract})" if proves else self.row.name

    def cells(self) -> list[str]:
        row, figure = self.row, self.figure
        if figure is None:
            return [self.name, "failed", *[""] * (len(FLOORS if row.is_floor else OURS) - 2)]
        measured = shown(figure.value, row.unit)
        if figure.void:
            measured = f"void ({measured})"
        counts = ["", "", ""]
        if figure.commits is not None:
            counts = [figure.synchronous, f"{figure.commits:,}", f"{figure.fsyncs:,}"]
        if row.is_floor:
            return [self.name, measured, *counts]
        ratio = self.ratio
        return [
            self.name,
            measured,
            shown(self.floor.value, row.unit) if self.floor is not None else "",
            f"{ratio:.2f}" if ratio is not None else "",
            self._target(),
            self._verdict(),
            "" if ratio is None or figure.void else ("yes" if ratio <= 2 else "no"),
            *counts,
        ]

    def _target(self) -> str:
        row = self.row
        if row.target is None:
            return ""
        words = {"at least": "≥ ", "at most": "≤ ", "above the floor": "floor + "}
        return words[row.rule] + shown(row.target, row.unit)

    def _verdict(self) -> str:
        if self.reached is None:
            return ""
        if self.reached:
            return "yes"
        if self.floor is not None and self._reaches(self.floor) is False:
            return "no, nor does the floor"
        return "no"


def shown(value: float, unit: str) -> str:
    """A figure with its unit, to three digits or so."""
    space = "" if unit.startswith("/") else " "
    if unit == "B" or abs(value) >= 100:
        return f"{value:,.0f}{space}{unit}"
    return f"{value:.3g}{space}{unit}"


def table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def section(lines: list[Line]) -> str:
    """The two tables of one place: floors, then ours."""
    floors = [line.cells() for line in lines if line.row.is_floor]
    ours = [line.cells() for line in lines if not line.row.is_floor]
    parts: list[str] = []
    if ours:
        parts.append(table(OURS, ours))
    if floors:
        parts.append(table(FLOORS, floors))
    return "\n\n".join(parts)


def facts(machine: Machine, at_start: Conditions, at_end: Conditions, quick: bool) -> str:
    now = datetime.now(UTC)
    return "\n".join(
        [
            f"- Date: {now:%Y-%m-%d %H:%M} UTC{', a quick run' if quick else ''}",
            f"- Cores: {machine.cores} ({machine.architecture}, {machine.system})",
            f"- Python {machine.python}, SQLite {machine.sqlite}",
            f"- An fdatasync after a write of 4 KiB ({machine.file_system}):"
            f" {at_start.fdatasync_ms:.2f} ms at the start, {at_end.fdatasync_ms:.2f} ms at the end"
            " (medians)",
            f"- Load average: {at_start.load:.1f} at the start, {at_end.load:.1f} at the end; the"
            " measuring itself makes about 2",
        ]
    )


def proportion(at_start: Conditions, at_end: Conditions, lines: list[Line]) -> str:
    """What the disk alone allows, in a sentence."""
    commit_ms = next(
        (line.figure.value for line in lines if line.row.key == "bare median" and line.figure), None
    )
    if not commit_ms:
        return ""
    turns, with_call = 1000 / (2 * commit_ms), 1000 / (4 * commit_ms)
    slowest = max(commit_ms, at_start.fdatasync_ms, at_end.fdatasync_ms)
    tail = (
        "this disk is not always as fast, so on one session only the ratio to the floor says"
        " something about Postroom."
        if slowest > 2 * _TARGETS_FDATASYNC_MS
        else "this disk was no slower."
    )
    return (
        f"A bare durable commit took {commit_ms:.2f} ms here (median): two of them, one after the"
        f" other, allow at most {turns:,.0f} turns a second on one session, and the four of a turn"
        f" with a tool call {with_call:,.0f}. The targets were set on a disk with an fdatasync of"
        f" {_TARGETS_FDATASYNC_MS} ms; {tail}"
    )
