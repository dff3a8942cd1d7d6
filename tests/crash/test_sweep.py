"""A crash at every commit of a scenario, before it and after it, and what a restart makes of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash import log_rules, scenario
from tests.crash.actor import Plan
from tests.crash.children import Nursery, Outcome
from tests.crash.reading import Record, read
from tests.servers.postgres import PostgresServer


class Kill(NamedTuple):
    commit: int
    phase: str


@pytest.fixture(scope="module")
def pair(nursery: Nursery) -> Iterator[Sequence[Nursery]]:
    """Two nurseries: two actors run at a time."""
    other = Nursery()
    yield [nursery, other]
    other.close()


def _file(folder: Path) -> str:
    return str(folder / "room.db")


class Sweep:
    """Plays the scenario with kills, each in a database of its own that ``make`` makes."""

    def __init__(
        self, nurseries: Sequence[Nursery], folder: Path, make: Callable[[Path], str] = _file
    ) -> None:
        self._nurseries = nurseries
        self._folder = folder
        self._make = make

    def commits(self) -> int:
        """How many commits the scenario takes when nobody dies."""
        run = _Run(self._plan("whole"), self._nurseries[0])
        outcome = run.play(None)
        run.check_end()
        return outcome.told("commits")

    def all(self, kills: Sequence[Sequence[Kill]]) -> int:
        """Plays each list of kills, one restart a kill; how many processes died on the way."""
        lanes = len(self._nurseries)

        def lane(number: int) -> int:
            return sum(
                self._one(kills[index], self._nurseries[number], f"{index}")
                for index in range(number, len(kills), lanes)
            )

        with ThreadPoolExecutor(lanes) as threads:
            return sum(threads.map(lane, range(lanes)))

    def _one(self, kills: Sequence[Kill], nursery: Nursery, name: str) -> int:
        run = _Run(self._plan(name), nursery)
        died = 0
        try:
            for kill in kills:
                if run.play(kill).killed:
                    died += 1
                    run.check_crash()
            run.play(None)
            run.check_end()
        except AssertionError as error:
            log = [f"{e.seq} {e.type} {e.raw[:160]}" for e in read(run.plan.database).events]
            error.add_note("\n".join([f"killed at {list(kills)}, {run.plan.database}", *log]))
            raise
        return died

    def _plan(self, name: str) -> Plan:
        folder = self._folder / name
        folder.mkdir()
        return Plan(self._make(folder), str(folder / "notes"), scenario.ACTIONS)


class _Run:
    """One database through crashes and restarts."""

    def __init__(self, plan: Plan, nursery: Nursery) -> None:
        self.plan = plan
        self._nursery = nursery
        self._receipts: dict[str, int] = {}
        self._interrupted: set[int] = set()

    def play(self, kill: Kill | None) -> Outcome:
        self.plan.kill = kill
        outcome = self._nursery.play(self.plan)
        assert outcome.killed or outcome.code == 0, outcome
        for name, seq in outcome.receipts.items():
            assert self._receipts.setdefault(name, seq) == seq, f"{name} has two receipts"
        return outcome

    def check_crash(self) -> None:
        """What must be true of the file while nobody runs."""
        record = read(self.plan.database)
        log_rules.check(record)
        self._check_receipts(record)
        turn = record.events and log_rules.open_turn(record.events)
        if turn and not turn.cancel:
            self._interrupted.add(turn.number)

    def check_end(self) -> None:
        record = read(self.plan.database)
        log_rules.check(record)
        log_rules.check_rest(record)
        log_rules.check_notes(record, Path(self.plan.notes).read_text())
        scenario.check_outcome(record)
        self._check_receipts(record)
        ends = {end.turn: end.reason.kind for end in record.of("turn/end")}
        assert {t for t, kind in ends.items() if kind == "interrupted"} == self._interrupted

    def _check_receipts(self, record: Record) -> None:
        """Every receipt stands for the very event it names."""
        queued = {e.data.message.id: e.seq for e in record.events if e.type == "inbox/queued"}
        for name, seq in self._receipts.items():
            assert queued.get(name) == seq


def _boundaries(commits: int) -> list[Kill]:
    return [Kill(n, phase) for n in range(1, commits + 1) for phase in ("before", "after")]


def _twice(commits: int, count: int, seed: int) -> list[list[Kill]]:
    """Pairs of kills: somewhere, and then soon after the restart, in the recovery itself."""
    chance = random.Random(seed)
    first = _boundaries(commits)
    soon = _boundaries(8)
    return [[chance.choice(first), chance.choice(soon)] for _ in range(count)]


@pytest.mark.contract("INB-04", "INB-07", "INB-10", "INB-11", "REC-01", "REC-03", "REC-05")
def test_a_crash_at_any_third_commit_loses_nothing_and_repeats_nothing(
    pair: Sequence[Nursery], tmp_path: Path
) -> None:
    """REC-01 in small; C-19, C-90, C-142, C-201 at each of these points."""
    sweep = Sweep(pair, tmp_path)
    commits = sweep.commits()
    assert commits > 30  # scripts that meet in the queue share one
    kills = [[kill] for kill in _boundaries(commits) if kill.commit % 3 == 1]
    # Scripts that meet in the queue share a commit: a run may have a few less of them.
    assert sweep.all(kills) >= len(kills) - 4


@pytest.mark.contract("REC-01", "REC-02")
def test_a_crash_during_the_recovery_from_a_crash_is_recovered_from(
    pair: Sequence[Nursery], tmp_path: Path
) -> None:
    sweep = Sweep(pair, tmp_path)
    assert sweep.all(_twice(sweep.commits(), 12, seed=1)) > 12


@pytest.mark.contract("REC-01", "STO-01")
def test_a_crash_at_any_commit_loses_nothing_on_postgresql(
    pair: Sequence[Nursery], tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """Three boundaries; the campaign takes them all."""
    with _postgres(postgres_server) as make:
        sweep = Sweep(pair, tmp_path, make)
        assert sweep.all([[Kill(5, "before")], [Kill(12, "after")], [Kill(30, "before")]]) == 3


@pytest.mark.campaign
@pytest.mark.contract("INB-04", "INB-07", "INB-10", "INB-11", "REC-01", "REC-03", "REC-05")
def test_a_crash_at_every_commit_loses_nothing_and_repeats_nothing(
    pair: Sequence[Nursery], tmp_path: Path
) -> None:
    sweep = Sweep(pair, tmp_path)
    kills = [[kill] for kill in _boundaries(sweep.commits())]
    assert sweep.all(kills) >= len(kills) - 8


@pytest.mark.campaign
@pytest.mark.contract("REC-01", "REC-02")
def test_two_crashes_at_any_commits_are_recovered_from(
    pair: Sequence[Nursery], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    sweep = Sweep(pair, tmp_path)
    sweep.all(_twice(sweep.commits(), 150, seed))


@pytest.mark.campaign
@pytest.mark.contract("REC-01", "STO-01")
def test_a_crash_at_every_commit_loses_nothing_on_postgresql(
    pair: Sequence[Nursery], tmp_path: Path, postgres_server: PostgresServer
) -> None:
    with _postgres(postgres_server) as make:
        sweep = Sweep(pair, tmp_path, make)
        kills = [[kill] for kill in _boundaries(sweep.commits())]
        assert sweep.all(kills) >= len(kills) - 8


@contextlib.contextmanager
def _postgres(server: PostgresServer) -> Iterator[Callable[[Path], str]]:
    """Databases of a PostgreSQL server, dropped at the end."""
    made: list[str] = []

    def make(_: Path) -> str:
        made.append(server.create())
        return made[-1]

    try:
        yield make
    finally:
        for url in made:
            server.drop(url)
