"""Which measurements there are, which rows they give, and what each row is held against."""

from __future__ import annotations

from typing import Literal

import msgspec

from bench.figures import Task

Rule = Literal["at least", "at most", "above the floor"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the results. ``key`` and ``floor_key`` name figures of its task.

    ``target`` None: none was set. ``rule`` says how it is meant; ``above the floor`` bounds the
    difference. ``contract`` is the id that the row proves where its target is reached.
    """

    name: str
    key: str
    unit: str
    floor_key: str | None = None
    target: float | None = None
    rule: Rule = "at most"
    contract: str | None = None
    is_floor: bool = False

    @property
    def more_is_better(self) -> bool:
        return self.unit.startswith("/")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """``beside``: further tasks whose figures are floors of these rows, under ``floor `` names.

    ``in_memory``: it is also run where nothing waits for a disk; a quick run leaves most of that
    out, all that is not ``quick``.
    """

    task: Task
    rows: tuple[Row, ...]
    beside: tuple[Task, ...] = ()
    in_memory: bool = False
    quick: bool = True


def _floor(name: str, key: str, unit: str) -> Row:
    return Row(name=name, key=key, unit=unit, is_floor=True)


def _turns(sessions: int, tools: int, target: float | None, seconds: float) -> Planned:
    what = f"{sessions} session{'s' if sessions > 1 else ''}"
    what += ", one tool call" if tools else ""
    rows = [
        _floor(f"bare turns, {what}", "floor rate", "/s"),
        _floor(f"CPU of a bare turn, {what}", "floor cpu", "ms"),
        Row(
            name=f"turns, {what}",
            key="rate",
            unit="/s",
            floor_key="floor rate",
            target=target,
            rule="at least",
        ),
        Row(name=f"CPU of a turn, {what}", key="cpu", unit="ms", floor_key="floor cpu"),
    ]
    if sessions == 50 and not tools:
        rows += [
            _floor("bytes on disk a bare turn", "floor bytes", "B"),
            Row(
                name="bytes on disk a turn",
                key="bytes",
                unit="B",
                floor_key="floor bytes",
                target=2500,
            ),
        ]
    return Planned(
        task=Task(name="turns", sessions=sessions, tools=tools, seconds=seconds),
        rows=tuple(rows),
        in_memory=True,
        quick=sessions <= 50 and not tools,
    )


def _history(messages: int, target: float | None) -> Planned:
    what = f"after {messages:,} messages"
    return Planned(
        task=Task(name="history", history=messages),
        rows=(
            _floor(f"a bare turn {what}", "floor turn", "ms"),
            Row(
                name=f"a turn {what}", key="turn", unit="ms", floor_key="floor turn", target=target
            ),
            Row(name=f"CPU of a turn {what}", key="cpu", unit="ms", floor_key="floor cpu"),
        ),
        in_memory=True,
        quick=messages == 10_000,
    )


def _requests(at_once: int) -> Planned:
    return Planned(
        task=Task(name="requests", sessions=at_once, seconds=1.5),
        rows=(
            _floor(f"bare streamed requests, {at_once} at once", "rate", "/s"),
            _floor(f"CPU of a bare request, {at_once} at once", "cpu", "ms"),
        ),
    )


PLAN = (
    Planned(
        task=Task(name="latency"),
        rows=(
            _floor("bare commit of a receipt's statements, median", "bare median", "ms"),
            _floor("bare commit of a receipt's statements, p99", "bare p99", "ms"),
            Row(
                name="receipt, one producer, median",
                key="receipt median",
                unit="ms",
                floor_key="bare median",
                target=0.3,
                rule="above the floor",
            ),
            Row(
                name="receipt, one producer, p99",
                key="receipt p99",
                unit="ms",
                floor_key="bare p99",
            ),
        ),
        in_memory=True,
    ),
    Planned(
        task=Task(name="many", sessions=500),
        rows=(
            _floor("the same statements, 500 producers, group commit", "bare", "/s"),
            Row(
                name="receipts, 500 producers on 500 sessions",
                key="receipts",
                unit="/s",
                floor_key="bare",
                target=12_000,
                rule="at least",
            ),
        ),
        in_memory=True,
    ),
    Planned(
        task=Task(name="deliveries", sessions=200),
        rows=(
            _floor("the same statements, 200 lanes, group commit", "bare", "/s"),
            Row(
                name="deliveries, 200 sessions",
                key="deliveries",
                unit="/s",
                floor_key="bare",
                target=1500,
                rule="at least",
            ),
            Row(name="CPU of a delivery, 200 sessions", key="cpu", unit="ms"),
            Row(
                name="from a delivery's commit to the call of its platform, median",
                key="soon",
                unit="ms",
                target=5,
            ),
        ),
        in_memory=True,
    ),
    Planned(
        task=Task(name="outbox_size"),
        rows=(
            Row(name="record and claim, 1,000 deliveries in the table", key="1000", unit="ms"),
            Row(
                name="record and claim, 1,000,000 deliveries in the table",
                key="1000000",
                unit="ms",
                floor_key="1000",
            ),
        ),
    ),
    _requests(1),
    _requests(50),
    _turns(1, 0, 375, 4.0),
    _turns(1, 1, 200, 4.0),
    _turns(50, 0, 1000, 5.0),
    _turns(50, 1, None, 5.0),
    _turns(500, 0, 1000, 8.0),
    _turns(500, 1, None, 8.0),
    _history(10, None),
    _history(1_000, None),
    _history(10_000, 7),
    Planned(
        task=Task(name="opening", history=10_000),
        rows=(
            _floor("bare opening after 10,000 messages and one turn", "floor open", "ms"),
            Row(
                name="opening after 10,000 messages and one turn",
                key="open",
                unit="ms",
                floor_key="floor open",
                target=50,
            ),
        ),
        in_memory=True,
    ),
    Planned(
        task=Task(name="active", sessions=500, seconds=3.0),
        beside=(Task(name="active_floor", sessions=500, seconds=3.0),),
        rows=(
            _floor("memory of the bare loop, 500 sessions at work", "floor peak", "MiB"),
            Row(
                name="memory, 500 sessions at work",
                key="peak",
                unit="MiB",
                floor_key="floor peak",
                target=90,
            ),
        ),
    ),
    Planned(
        task=Task(name="idle", sessions=3000),
        rows=(
            Row(
                name="memory of an idle session, without SQLite's page cache",
                key="idle",
                unit="B",
                target=4096,
            ),
        ),
    ),
    Planned(
        task=Task(name="whole", seconds=5.0),
        rows=(
            _floor("the bare turn as a whole process", "floor whole", "s"),
            _floor("its first model request", "floor first request", "s"),
            Row(
                name="`postroom run` as a whole process",
                key="whole",
                unit="s",
                floor_key="floor whole",
                target=0.6,
            ),
            Row(
                name="`postroom run` until its first model request arrives",
                key="first request",
                unit="s",
                floor_key="floor first request",
                target=0.4,
                contract="CLI-07",
            ),
        ),
    ),
)

# What the profiles are taken of, and how they are called.
PROFILES = (
    ("a turn on 50 sessions", Task(name="turns", sessions=50, seconds=4.0, profile=True)),
    ("receipts of 500 producers", Task(name="many", sessions=500, seconds=2.0, profile=True)),
    ("deliveries on 200 sessions", Task(name="deliveries", sessions=200, profile=True)),
    ("a turn after 10,000 messages", Task(name="history", history=10_000, profile=True)),
    ("opening after 10,000 messages", Task(name="opening", history=10_000, profile=True)),
    ("`postroom run`", Task(name="whole", profile=True)),
)
