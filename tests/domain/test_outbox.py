"""A delivery is claimed before it is sent and never repeated in doubt."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postroom.domain.outbox import (
    LOST,
    Absent,
    CannotTell,
    Delivery,
    DeliveryStatus,
    Found,
    NotStarted,
    Part,
    PartStatus,
    Refused,
    Resolution,
    RetryAfter,
    Rules,
    SendOutcome,
    Sent,
    Uncertain,
    Verdict,
    abandon,
    claim_part,
    expire,
    hand_over,
    judge,
    lapse,
    reconcile_delay_ms,
    record,
    redeliver,
    resolve,
    sending_part,
    stop_waiting,
    unroute,
)

End = Callable[[Delivery], Delivery]

NOW = 1_000_000
RULES = Rules(attempts_max=3, reconciles_max=3)


def delivery(*statuses: PartStatus, attempts: int = 0, **fields: object) -> Delivery:
    parts = tuple(Part(s, attempts=attempts) for s in statuses)
    made = Delivery(parts, due=0, expires_at=NOW + RULES.expiry_ms)
    return msgspec.structs.replace(made, **fields)


def claimed(d: Delivery, now: int = NOW) -> Delivery:
    found = claim_part(d, now)
    assert found is not None
    return found


def statuses(d: Delivery) -> list[PartStatus]:
    return [p.status for p in d.parts]


def in_doubt(parts: int = 1) -> Delivery:
    return record(claimed(delivery(*["queued"] * parts)), Uncertain("cut off"), NOW, RULES)


# ---- the delivery's status and its lane ----

RANK: dict[PartStatus, int] = {
    "unknown": 0, "failed": 1, "sending": 2, "queued": 3, "sent": 4, "skipped": 5,
}  # fmt: skip


@pytest.mark.parametrize("parts", list(itertools.product(RANK, repeat=3)))
def test_the_status_is_the_worst_parts(parts: tuple[PartStatus, ...]) -> None:
    worst = min(parts, key=RANK.__getitem__)
    expected: DeliveryStatus = "failed" if worst == "skipped" else worst
    assert delivery(*parts).status == expected
    assert delivery(*parts, unrouted=True).status == "unrouted"


@pytest.mark.parametrize(
    ("made", "blocks"),
    [
        (delivery("queued"), True),
        (delivery("queued", due=NOW * 2), True),
        (delivery("sending"), True),
        (delivery("sent"), False),
        (delivery("failed", "skipped"), False),
        (delivery("queued", unrouted=True), False),
        (delivery("unknown", unknown_at=NOW), True),
        (delivery("unknown", unknown_at=NOW, handed_over=True), False),
        (delivery("unknown"), False),
        (delivery("unknown", "queued"), True),
        (delivery("unknown", "sent", "queued"), True),
        (delivery("unknown", "sent"), False),
    ],
)
def test_what_holds_its_lane(made: Delivery, blocks: bool) -> None:
    assert made.blocks is blocks


# ---- claiming ----


@pytest.mark.parametrize(
    ("made", "index"),
    [
        (delivery("queued", "queued"), 0),
        (delivery("sent", "queued"), 1),
        (delivery("unknown", "queued"), 1),
        (delivery("queued", due=NOW), 0),
        (delivery("queued", due=NOW + 1), None),
        (delivery("sending", "queued"), None),
        (delivery("queued", "sending"), None),
        (delivery("unknown", "queued", unknown_at=NOW), None),
        (delivery("queued", unrouted=True), None),
        (delivery("sent", "sent"), None),
        (delivery("failed", "skipped"), None),
        (delivery("unknown"), None),
    ],
)
def test_the_next_queued_part_is_claimed_when_nothing_holds_it(
    made: Delivery, index: int | None
) -> None:
    after = claim_part(made, NOW)
    if index is None:
        assert after is None
        return
    assert after is not None
    assert sending_part(after) == index
    assert after.parts[index] == Part("sending", 1, NOW)
    assert after.parts[:index] + after.parts[index + 1 :] == (
        made.parts[:index] + made.parts[index + 1 :]
    )


def test_the_first_attempt_keeps_its_time() -> None:
    again = record(claimed(delivery("queued")), Refused("busy", True), NOW, RULES)
    assert claimed(again, NOW * 2).parts[0].first_attempt_at == NOW


# ---- outcomes ----


@pytest.mark.contract("OUT-05")
@pytest.mark.parametrize(
    ("outcome", "expected", "attempts"),
    [
        (Sent("m1", "as plain text"), ["sent", "sent", "queued"], 1),
        (NotStarted("no connection"), ["sent", "queued", "queued"], 0),
        (RetryAfter(5_000), ["sent", "queued", "queued"], 0),
        (Refused("busy", retryable=True), ["sent", "queued", "queued"], 1),
        (Refused("too long"), ["sent", "failed", "skipped"], 1),
        (Uncertain("cut off"), ["sent", "unknown", "queued"], 1),
    ],
)
def test_an_answer_changes_its_own_part_and_leaves_the_sent_one(
    outcome: SendOutcome, expected: list[PartStatus], attempts: int
) -> None:
    before = claimed(delivery("sent", "queued", "queued"))
    after = record(before, outcome, NOW, RULES)
    assert statuses(after) == expected
    assert after.parts[1].attempts == attempts
    assert after.parts[0] == before.parts[0]
    assert after.unknown_at == (NOW if "unknown" in expected else None)


def test_a_receipt_has_the_reference_and_the_note() -> None:
    after = record(claimed(delivery("queued")), Sent("m1", "as plain text"), NOW, RULES)
    assert after.parts[0] == Part("sent", 1, NOW, "m1", "as plain text")


def test_a_platforms_wish_to_wait_is_kept_to_the_millisecond() -> None:
    after = record(claimed(delivery("queued")), RetryAfter(30_000), NOW, RULES, 0.9)
    assert after.due == NOW + 30_000
    assert claim_part(after, NOW + 29_999) is None
    assert claim_part(after, NOW + 30_000) is not None


def test_waits_double_up_to_the_longest_and_jitter_only_shortens() -> None:
    waits: list[int] = []
    d = delivery("queued")
    for _ in range(40):
        at = d.due
        d = record(claimed(d, at), NotStarted("no connection"), at, RULES)
        waits.append(d.due - at)
        assert d.parts[0].attempts == 0
    assert waits[:3] == [2_000, 4_000, 8_000]
    assert waits[-1] == RULES.retry_longest_ms
    assert d.deferrals == 40
    assert record(claimed(d, d.due), Sent(None), d.due, RULES).deferrals == 0
    early = record(claimed(delivery("queued")), NotStarted("no"), NOW, RULES, jitter=0.999)
    assert NOW + 1_500 <= early.due < NOW + 2_000


@pytest.mark.contract("OUT-08")
def test_attempts_are_bounded_and_then_it_has_failed() -> None:
    d, now, waits = delivery("queued", "queued"), NOW, []
    for attempt in range(1, RULES.attempts_max + 1):
        assert d.status == "queued"
        d = record(claimed(d, now), Refused("busy", retryable=True), now, RULES)
        assert d.parts[0].attempts == attempt
        waits.append(d.due - now)
        now = max(now, d.due)
    assert statuses(d) == ["failed", "skipped"]
    assert d.status == "failed"
    assert d.parts[0].error == "busy"
    assert claim_part(d, now) is None
    assert waits[:2] == [2_000, 4_000]


# ---- doubt ----


@pytest.mark.contract("OUT-04")
def test_a_lost_sender_leaves_its_part_in_doubt() -> None:
    before = claimed(delivery("sent", "queued", "queued", reconciles=2, handed_over=True))
    after = lapse(before, NOW + 5)
    assert statuses(after) == ["sent", "unknown", "queued"]
    assert after.parts[1].error == LOST
    assert (after.unknown_at, after.reconciles, after.handed_over) == (NOW + 5, 0, False)
    assert claim_part(after, NOW * 2) is None
    assert after.blocks


@pytest.mark.contract("OUT-04")
@pytest.mark.parametrize("ends", [stop_waiting, hand_over])
def test_when_no_verdict_comes_the_rest_goes_on_without_the_part_in_doubt(
    ends: End,
) -> None:
    after = claimed(ends(in_doubt(2)))
    assert statuses(after) == ["unknown", "sending"]
    done = record(after, Sent("m2"), NOW, RULES)
    assert not done.blocks
    assert done.status == "unknown"
    assert claim_part(done, NOW * 9) is None


@pytest.mark.contract("OUT-04")
@pytest.mark.parametrize(
    ("verdict", "status", "claimable"),
    [(Found("m1"), "sent", False), (Absent(), "queued", True), (CannotTell(), "unknown", False)],
)
def test_only_a_proof_of_absence_queues_a_part_again(
    verdict: Verdict, status: PartStatus, claimable: bool
) -> None:
    after = judge(in_doubt(), 0, verdict, NOW + 1, RULES)
    assert after.parts[0].status == status
    assert after.parts[0].attempts == 1
    assert after.unknown_at is None
    assert after.reconciles == 1
    assert (claim_part(after, NOW + 1) is not None) is claimable


def test_a_find_without_a_reference_keeps_the_known_one() -> None:
    d = in_doubt()
    d = msgspec.structs.replace(d, parts=(msgspec.structs.replace(d.parts[0], reference="known"),))
    assert judge(d, 0, Found(None), NOW, RULES).parts[0].reference == "known"
    assert judge(d, 0, Found("new"), NOW, RULES).parts[0].reference == "new"


@pytest.mark.contract("OUT-08")
def test_absent_with_no_attempt_left_fails_and_skips_the_rest() -> None:
    d = delivery("queued", "queued", attempts=RULES.attempts_max - 1)
    doubtful = lapse(claimed(d), NOW)
    assert statuses(judge(doubtful, 0, Absent(), NOW, RULES)) == ["failed", "skipped"]


@pytest.mark.contract("OUT-14")
def test_a_platform_that_cannot_tell_is_asked_a_bounded_number_of_times() -> None:
    d, delays = in_doubt(), []
    for asked in range(1, RULES.reconciles_max + 1):
        assert not d.handed_over
        d = judge(d, 0, CannotTell("who knows"), NOW, RULES)
        assert d.reconciles == asked
        delays.append(reconcile_delay_ms(d, RULES))
    assert d.handed_over
    assert d.status == "unknown"
    assert d.parts[0].error == "who knows"
    assert claim_part(d, NOW * 9) is None
    assert delays == [2_000, 4_000, 8_000]
    assert reconcile_delay_ms(delivery("unknown"), RULES) == 2_000
    assert reconcile_delay_ms(delivery("unknown", reconciles=60), RULES) == 900_000


@pytest.mark.parametrize("status", [s for s in RANK if s != "unknown"])
def test_a_part_that_is_not_in_doubt_is_neither_judged_nor_settled(status: PartStatus) -> None:
    d = delivery(status)
    assert judge(d, 0, Absent(), NOW, RULES) == d
    assert resolve(d, 0, "queued", "ann", NOW) == d


# ---- operators, routes and age ----


@pytest.mark.contract("OUT-04")
@pytest.mark.parametrize(
    ("as_", "expected", "attempts"),
    [
        ("sent", ["sent", "queued"], 1),
        ("failed", ["failed", "skipped"], 1),
        ("queued", ["queued", "queued"], 0),
    ],
)
def test_a_named_operator_settles_a_part_in_doubt(
    as_: Resolution, expected: list[PartStatus], attempts: int
) -> None:
    after = resolve(hand_over(in_doubt(2)), 0, as_, "ann", NOW + 7)
    assert statuses(after) == expected
    assert after.parts[0].attempts == attempts
    assert "ann" in (after.parts[0].error or "")
    assert (after.decided_by, after.handed_over, after.unknown_at) == ("ann", False, None)
    assert after.due == NOW + 7


def test_the_operator_keeps_a_delivery_until_its_last_doubt_is_gone() -> None:
    d = delivery("unknown", "unknown", handed_over=True)
    once = resolve(d, 0, "sent", "ann", NOW)
    assert once.handed_over
    assert not resolve(once, 1, "sent", "ann", NOW).handed_over


def test_without_a_route_a_claimed_part_was_not_started() -> None:
    after = unroute(claimed(delivery("sent", "queued", "queued")))
    assert statuses(after) == ["sent", "queued", "queued"]
    assert after.parts[1].attempts == 0
    assert after.status == "unrouted"
    assert not after.blocks
    assert claim_part(after, NOW) is None


@pytest.mark.parametrize("gives_up", [expire, lambda d: abandon(d, "ann")])
def test_giving_up_fails_what_is_queued_and_nothing_else(gives_up: End) -> None:
    before = delivery("sent", "unknown", "sending", "queued", "failed", "skipped")
    after = gives_up(before)
    assert statuses(after) == ["sent", "unknown", "sending", "failed", "failed", "skipped"]
    assert after.parts[3].error in ("expired", "abandoned")
    assert after.parts[:3] == before.parts[:3]
    assert gives_up(delivery("queued", unrouted=True)).status == "failed"


def test_an_operator_who_gives_up_is_named() -> None:
    assert abandon(delivery("queued"), "ann").decided_by == "ann"
    assert expire(delivery("queued")).decided_by is None


@pytest.mark.contract("OUT-05")
def test_redelivery_sends_what_failed_and_leaves_what_was_sent_or_is_in_doubt() -> None:
    before = delivery("sent", "unknown", "failed", "skipped", attempts=3, deferrals=4)
    after = redeliver(before, "ann", NOW, RULES)
    assert statuses(after) == ["sent", "unknown", "queued", "queued"]
    assert [p.attempts for p in after.parts] == [3, 3, 0, 0]
    assert (after.due, after.expires_at) == (NOW, NOW + RULES.expiry_ms)
    assert (after.decided_by, after.deferrals) == ("ann", 0)
    assert redeliver(delivery("queued", unrouted=True), "ann", NOW, RULES).status == "queued"


# ---- every order of allowed events ----

OUTCOMES = st.sampled_from(
    [
        Sent("m"), Sent(None), NotStarted("no"), RetryAfter(3_000), Refused("no"),
        Refused("busy", retryable=True), Refused("busy", retryable=True), Uncertain("?"),
    ]
)  # fmt: skip
JITTERS = st.floats(0, 0.99)
INDEXES = st.integers(0, 3)


class ADelivery(RuleBasedStateMachine):
    """Walks allowed events; ``allowed`` counts, for each part, the sends it may still begin."""

    @initialize(count=st.integers(1, 4))
    def make(self, count: int) -> None:
        self.now = NOW
        self.d = delivery(*["queued"] * count)
        self.sent: dict[int, Part] = {}
        self.doubtful: set[int] = set()
        self.tries = [0] * count

    def is_sending(self) -> bool:
        return "sending" in statuses(self.d)

    def step(self, after: Delivery, *, released: int | None = None, by_hand: bool = False) -> None:
        """``released``: the part that a verdict or an operator took out of doubt."""
        for index, part in self.sent.items():
            assert after.parts[index] == part, "a sent part changed"
        for index in self.doubtful - {released}:
            assert after.parts[index].status == "unknown", "a doubt went without a verdict"
        for index, (old, new) in enumerate(zip(self.d.parts, after.parts, strict=True)):
            if old.status != new.status and new.status == "queued" and by_hand:
                self.tries[index] = 0
        self.d = after
        self.sent = {i: p for i, p in enumerate(after.parts) if p.status == "sent"}
        self.doubtful = {i for i, p in enumerate(after.parts) if p.status == "unknown"}

    @rule()
    def claim(self) -> None:
        self.now = max(self.now, self.d.due)
        after = claim_part(self.d, self.now)
        if after is None:
            held = self.d.unrouted or self.d.unknown_at is not None or self.is_sending()
            assert held or "queued" not in statuses(self.d)
            return
        index = sending_part(after)
        assert self.d.parts[index].status == "queued"
        assert "queued" not in statuses(self.d)[:index], "parts are sent in order"
        self.tries[index] += 1
        self.step(after)

    @precondition(is_sending)
    @rule(outcome=OUTCOMES, jitter=JITTERS)
    def answer(self, outcome: SendOutcome, jitter: float) -> None:
        index = sending_part(self.d)
        after = record(self.d, outcome, self.now, RULES, jitter)
        if isinstance(outcome, NotStarted | RetryAfter):
            self.tries[index] -= 1
            assert after.due > self.now
        if after.parts[index].status == "failed":
            assert "queued" not in statuses(after)[index:]
        self.step(after)

    @precondition(is_sending)
    @rule()
    def sender_is_lost(self) -> None:
        self.step(lapse(self.d, self.now))

    @precondition(lambda self: self.doubtful)
    @rule(index=INDEXES, verdict=st.sampled_from([Found("m"), Absent(), Absent(), CannotTell()]))
    def verdict(self, index: int, verdict: Verdict) -> None:
        index = sorted(self.doubtful)[index % len(self.doubtful)]
        after = judge(self.d, index, verdict, self.now, RULES)
        self.step(after, released=None if isinstance(verdict, CannotTell) else index)

    @precondition(lambda self: self.doubtful)
    @rule(index=INDEXES, as_=st.sampled_from(["sent", "failed", "queued"]))
    def operator_settles(self, index: int, as_: Resolution) -> None:
        index = sorted(self.doubtful)[index % len(self.doubtful)]
        self.step(resolve(self.d, index, as_, "ann", self.now), released=index, by_hand=True)

    @precondition(lambda self: self.d.unknown_at is not None)
    @rule(end=st.sampled_from([stop_waiting, stop_waiting, hand_over]))
    def goes_on(self, end: End) -> None:
        self.step(end(self.d))

    @precondition(lambda self: not self.is_sending() and "queued" in statuses(self.d))
    @rule(end=st.sampled_from([unroute, expire, lambda d: abandon(d, "ann")]))
    def ends(self, end: End) -> None:
        self.step(end(self.d))

    @precondition(is_sending)
    @rule()
    def route_goes_before_the_call(self) -> None:
        self.tries[sending_part(self.d)] -= 1
        self.step(unroute(self.d))

    @precondition(lambda self: self.d.status in ("failed", "unrouted"))
    @rule()
    def operator_redelivers(self) -> None:
        after = redeliver(self.d, "ann", self.now, RULES)
        self.tries = [
            0 if p.status == "queued" else t for t, p in zip(self.tries, after.parts, strict=True)
        ]
        self.step(after)

    @invariant()
    def holds(self) -> None:
        present = statuses(self.d)
        assert present.count("sending") <= 1
        for part, tries in zip(self.d.parts, self.tries, strict=True):
            assert 0 <= part.attempts == tries <= RULES.attempts_max
        if not self.d.unrouted:
            worst = min(present, key=RANK.__getitem__)
            assert self.d.status == worst
        if self.d.unknown_at is not None:
            assert self.doubtful
        if self.d.handed_over:
            assert self.doubtful
        waits = self.d.unknown_at is not None and not self.d.handed_over
        open_ = waits or "queued" in present or "sending" in present
        assert self.d.blocks == (open_ and not self.d.unrouted)
        for index, status in enumerate(present):
            if status == "skipped":
                assert "failed" in present[:index]


@pytest.mark.contract("OUT-04", "OUT-05", "OUT-08", "OUT-14")
def test_in_any_order_of_events_nothing_is_repeated_in_doubt_and_each_try_counts() -> None:
    run_state_machine_as_test(
        ADelivery, settings=settings(max_examples=300, stateful_step_count=40, deadline=None)
    )
