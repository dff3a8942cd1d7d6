"""Killed at every commit and every call of the platform: nothing lost, nothing sent twice.

Doubt is left only where the platform cannot tell. Three kinds of platforms: one that can be asked,
one that takes a repeat for the same message, and one that can do neither.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

from tests.crash.children import Nursery
from tests.crash.post import Folder, Post

Kill = tuple[str, int, str]

SAID = (
    ("ann", "one, and a long text that becomes more than one message over there, in order"),
    ("ben", "two [[calls:note a]]"),
    ("ann", "three [[fail]]"),
    ("ann", "/status"),
    ("ben", "four"),
)


@pytest.fixture(scope="module")
def posts() -> Iterator[Sequence[Nursery]]:
    started = [Nursery("tests.crash.post") for _ in range(2)]
    yield started
    for nursery in started:
        nursery.close()


class Row(NamedTuple):
    id: str
    session: str
    ord: int
    kind: str
    status: str
    idx: int
    part: str


class Case:
    """One platform and one database, through crashes and restarts."""

    def __init__(self, folder: Path, profile: str, nursery: Nursery) -> None:
        folder.mkdir(parents=True)
        self.platform = Folder(str(folder))
        for number, (who, text) in enumerate(SAID):
            self.platform.append("incoming", dedupe=f"{number}", who=who, text=text)
        self.plan = Post(str(folder / "room.db"), str(folder), profile)
        self._nursery = nursery
        self.doubtful = 0

    def play(self, kill: Kill | None) -> Any:
        self.plan.kill = kill
        outcome = self._nursery.play(self.plan)
        assert outcome.killed or outcome.code == 0, outcome
        return outcome

    def rows(self) -> list[Row]:
        database = apsw.Connection(self.plan.database, flags=apsw.SQLITE_OPEN_READONLY)
        found = database.execute(
            "SELECT delivery.id, session.id, ord, delivery.kind, delivery.status, idx, part.status"
            " FROM delivery JOIN session ON session.sid = delivery.sid"
            " JOIN part ON part.delivery = delivery.id ORDER BY session.sid, ord, idx"
        ).fetchall()
        replies = database.execute(
            "SELECT count(*) FROM event WHERE type = 'assistant/message'"
        ).fetchall()[0][0]
        database.close()
        rows = [Row(*row) for row in found]
        assert len({r.id for r in rows if r.kind == "reply"}) == replies, "a reply is not owed"
        return rows

    def check(self) -> None:
        """Everything is accounted for, and each person saw it once and in order."""
        rows = self.rows()
        accepted = self.platform.read("accepted")
        keys = [fact["key"] for fact in accepted]
        assert len(keys) == len(set(keys)), "sent twice"
        order = {f"{r.id}.{r.idx}": (r.ord, r.idx) for r in rows}
        session = {f"{r.id}.{r.idx}": r.session for r in rows}
        assert set(keys) <= set(order), "the platform has what the outbox has not"
        for row in rows:
            there = f"{row.id}.{row.idx}" in keys
            assert row.part in ("sent", "unknown"), row
            assert there or row.part == "unknown", "said to be sent, and is not there"
            if self.plan.profile != "blind":
                assert row.part == "sent", row
        self.doubtful += sum(row.part == "unknown" for row in rows)
        for name in set(session.values()):
            seen = [order[key] for key in keys if session[key] == name]
            assert seen == sorted(seen), "out of order"
        texts = "".join(fact["text"] for fact in sorted(accepted, key=lambda f: session[f["key"]]))
        if self.plan.profile != "blind":
            for word in ("one", "two", "four", "gave up", "I am "):
                assert word in texts, f"{word} was lost"
        assert {fact["dedupe"] for fact in self.platform.read("acked")} == set("01234")


def whole(folder: Path, profile: str, nursery: Nursery) -> Any:
    case = Case(folder / "whole", profile, nursery)
    outcome = case.play(None)
    case.check()
    assert case.doubtful == 0
    return outcome


def kills_of(outcome: Any) -> list[Kill]:
    commits, sends = outcome.told("commits"), outcome.told("send")
    at_commits = [("commit", n, p) for n in range(1, commits + 1) for p in ("before", "after")]
    at_calls = [("send", n, m) for n in range(1, sends + 1) for m in ("before", "accepted")]
    return [*at_commits, *at_calls]


def sweep(
    posts: Sequence[Nursery], folder: Path, profile: str, lists: Sequence[Sequence[Kill]]
) -> tuple[int, int]:
    """Plays each list of kills, one restart each: (processes that died, parts left in doubt)."""

    def lane(number: int) -> tuple[int, int]:
        died = doubtful = 0
        for index in range(number, len(lists), len(posts)):
            case = Case(folder / f"{index}", profile, posts[number])
            try:
                for kill in lists[index]:
                    died += case.play(kill).killed
                case.play(None)
                case.check()
            except AssertionError as error:
                error.add_note(f"{profile}, killed at {list(lists[index])}, {case.plan.database}")
                error.add_note(json.dumps(case.platform.read("accepted"), indent=1))
                raise
            doubtful += case.doubtful
        return died, doubtful

    with ThreadPoolExecutor(len(posts)) as threads:
        done = list(threads.map(lane, range(len(posts))))
    return sum(d for d, _ in done), sum(u for _, u in done)


@pytest.mark.contract("REC-01", "OUT-02", "OUT-03", "OUT-04", "OUT-09", "CHN-01", "CHN-10")
@pytest.mark.parametrize("profile", ["finds", "window", "blind"])
def test_a_crash_at_any_call_of_the_platform_and_some_commits_sends_nothing_twice(
    posts: Sequence[Nursery], tmp_path: Path, profile: str
) -> None:
    """C-17, C-18, C-23, C-29, C-35, C-41: one list of kills a case."""
    kills = kills_of(whole(tmp_path, profile, posts[0]))
    at_calls = [k for k in kills if k[0] == "send"]
    at_commits = [k for k in kills if k[0] == "commit" and k[1] % 9 == 4]
    lists = [[kill] for kill in (*at_calls, *at_commits)]
    died, doubtful = sweep(posts, tmp_path, profile, lists)
    assert died >= len(at_calls)
    assert (doubtful > 0) == (profile == "blind")


@pytest.mark.contract("REC-01", "OUT-02", "OUT-03")
@pytest.mark.parametrize("profile", ["finds", "window", "blind"])
def test_a_crash_during_the_recovery_of_a_send_repeats_nothing(
    posts: Sequence[Nursery], tmp_path: Path, profile: str
) -> None:
    """C-33: twice in a row around the same send, and around the question about it."""
    lists: list[list[Kill]] = [
        [("send", n, first), second]
        for n in (1, 3)
        for first in ("before", "accepted")
        for second in (("ask", 1, "before"), ("ask", 1, "accepted"), ("send", 1, "accepted"))
    ]
    sweep(posts, tmp_path, profile, lists)


@pytest.mark.campaign
@pytest.mark.contract("REC-01", "OUT-02", "OUT-03", "OUT-04", "OUT-09")
@pytest.mark.parametrize("profile", ["finds", "window", "blind"])
def test_a_crash_at_every_commit_and_call_loses_nothing_and_sends_nothing_twice(
    posts: Sequence[Nursery], tmp_path: Path, profile: str
) -> None:
    kills = kills_of(whole(tmp_path, profile, posts[0]))
    sweep(posts, tmp_path, profile, [[kill] for kill in kills])
    chance = random.Random(7)
    again = [*kills[:16], ("ask", 1, "before"), ("ask", 1, "accepted")]
    pairs = [[chance.choice(kills), chance.choice(again)] for _ in range(100)]
    sweep(posts, tmp_path / "twice", profile, pairs)
