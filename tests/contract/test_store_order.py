"""Putting commits into order, with nothing real around it: every order of learning of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.stores.hub import Hub
from postroom.stores.order import Found, Order, Want

SESSION = SessionId("session_one")


class Bench:
    """A log, and an order that follows it. ``time`` is that of the log's clock and the process's."""

    def __init__(self) -> None:
        self.time = 1000
        self.log: list[Event] = []
        self.wants: list[Want] = []
        self.told: list[int] = []
        self.hub = Hub(self._forgotten)
        self.order = Order(self.hub, self.wants.append, lambda: self.time)

    def _forgotten(self, session_id: SessionId | None) -> None:
        self.order.forget(session_id)

    def follow(self, session_id: SessionId | None = SESSION) -> Callable[[], None]:
        subscription = self.hub.subscribe(
            session_id, lambda events: self.told.extend(e.seq for e in events)
        )
        self.order.follow(session_id)
        return subscription.close

    def commit(self, count: int = 1) -> list[Event]:
        """Writes to the log; what of it the order learns is for the test to say."""
        self.time += 10
        new = [Event(SESSION, len(self.log) + n + 1, "x", self.time, "{}") for n in range(count)]
        self.log += new
        return new

    def start_again(self) -> None:
        """The session is deleted and made anew."""
        self.time += 10
        self.log = []

    def answer(self, page: int = 500) -> None:
        """Reads the log for what is wanted."""
        wants, self.wants[:] = list(self.wants), []
        for want in wants:
            after = want.after
            if after is None:
                after = max([e.seq for e in self.log if e.at < want.since_ms], default=0)
            events = [e for e in self.log if e.seq > after][:page]
            head = len(self.log) if self.log else None
            self.order.found(Found(want, head, after, events, len(events) == page))

    def settle(self) -> None:
        for _ in range(200):
            if not self.wants:
                return
            self.answer()
        raise AssertionError("it asks for ever")


def test_our_own_commits_need_no_reading() -> None:
    bench = Bench()
    bench.order.committed(bench.commit(3))
    bench.follow()
    for _ in range(5):
        bench.order.committed(bench.commit(2))
    assert bench.told == list(range(4, 14))
    assert bench.wants == []


def test_a_commit_that_is_learned_of_early_waits_for_the_one_before_it() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    first, second = bench.commit(), bench.commit()
    bench.order.committed(second)
    assert bench.told == []
    bench.order.committed(first)
    assert bench.told == [2, 3]


def test_a_gap_that_is_another_s_is_read_from_the_log() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.commit(2)
    bench.order.committed(bench.commit())
    bench.settle()
    assert bench.told == [2, 3, 4]


def test_a_session_that_was_never_seen_is_told_from_the_subscription_on() -> None:
    bench = Bench()
    bench.commit(5)
    bench.time += 1
    bench.follow()
    bench.commit(2)
    bench.order.committed(bench.commit())
    bench.settle()
    assert bench.told == [6, 7, 8]


def test_a_notice_of_what_is_known_asks_for_nothing() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.order.committed(bench.commit(3))
    bench.order.heard(SESSION, 4)
    bench.order.heard(SESSION, 2)
    assert bench.wants == []


def test_a_notice_that_comes_while_the_log_is_read_is_looked_into_too() -> None:
    bench = Bench()
    bench.follow()
    bench.commit(2)
    bench.order.heard(SESSION, 2)
    wanted = list(bench.wants)
    bench.wants.clear()
    early = Found(wanted[0], 2, 0, list(bench.log), False)
    bench.commit(2)
    bench.order.heard(SESSION, 4)
    assert bench.wants == [], "one question at a time"
    bench.order.found(early)
    bench.settle()
    assert bench.told == [1, 2, 3, 4]


def test_a_long_absence_is_read_page_by_page() -> None:
    bench = Bench()
    bench.follow()
    bench.commit(1200)
    bench.order.look()
    bench.settle()
    assert bench.told == list(range(1, 1201))


def test_a_lost_notice_is_made_good_by_a_look() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.commit(3)
    bench.order.look()
    bench.settle()
    assert bench.told == [2, 3, 4]


def test_who_listens_to_all_hears_of_sessions_it_never_heard_of() -> None:
    bench = Bench()
    bench.commit(2)
    bench.time += 1
    close = bench.follow(None)
    bench.commit(2)
    bench.order.heard(SESSION, 4)
    bench.settle()
    assert bench.told == [3, 4]
    close()
    bench.order.committed(bench.commit())
    bench.order.heard(SESSION, 9)
    assert bench.wants == []
    assert bench.told == [3, 4]


def test_a_log_that_began_again_is_told_from_its_beginning() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.order.committed(bench.commit(4))
    bench.start_again()
    bench.commit(2)
    bench.order.look()
    bench.settle()
    assert bench.told == [2, 3, 4, 5, 1, 2]
    bench.start_again()
    bench.order.committed(bench.commit(2))
    assert bench.told[-2:] == [1, 2]


def test_a_deleted_session_is_asked_after_no_more() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.commit()
    bench.order.committed(bench.commit())
    bench.start_again()
    bench.settle()
    assert bench.told == [3], "what was committed here is told all the same"


def test_a_flood_that_cannot_be_placed_costs_bounded_memory() -> None:
    bench = Bench()
    bench.order.committed(bench.commit())
    bench.follow()
    bench.commit()
    for _ in range(1500):
        bench.order.committed(bench.commit())
    line = bench.order._lines[SESSION]  # pyright: ignore[reportPrivateUsage]
    assert len(line.held) <= 1000
    bench.settle()
    assert bench.told == list(range(2, 1503))


STEPS = st.lists(
    st.sampled_from(["ours", "theirs", "late", "notice", "look", "read", "again"]),
    min_size=1,
    max_size=60,
)


@given(STEPS, st.integers(0, 4), st.booleans())
def test_whatever_is_learned_in_whatever_order_is_told_once_and_in_order(
    steps: list[str], before: int, seen: bool
) -> None:
    """``late``: a commit of ours is learned of after later ones. ``again``: the listener changes."""
    bench = Bench()
    if before:
        events = bench.commit(before)
        if seen:
            bench.order.committed(events)
    bench.time += 1
    close = bench.follow()
    held: list[list[Event]] = []
    floor = before
    for step in steps:
        match step:
            case "ours":
                bench.order.committed(bench.commit(2))
            case "theirs":
                bench.commit()
            case "late":
                held.append(bench.commit())
            case "notice":
                bench.order.heard(SESSION, len(bench.log))
            case "look":
                bench.order.look()
            case "read":
                bench.answer(page=3)
            case _:
                for events in held:
                    bench.order.committed(events)
                held.clear()
                bench.order.look()
                bench.settle()
                assert bench.told == list(range(floor + 1, len(bench.log) + 1))
                close()
                bench.told.clear()
                bench.time += 1
                floor = len(bench.log)
                close = bench.follow()
    for events in reversed(held):
        bench.order.committed(events)
    bench.order.look()
    bench.settle()
    assert bench.told == list(range(floor + 1, len(bench.log) + 1))
