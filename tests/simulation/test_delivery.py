"""Sending holds in every small world of deliveries, and each rule taken out of it is missed.

As with the session's worlds, they are explored once for all tests, and a test of a contract asks for
both: no world breaks the rule, and the variants that break it are seen to.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.simulation.delivery_variants import VARIANTS
from tests.simulation.delivery_worlds import SMALL
from tests.simulation.explorer import Broken, Explored, Explorer, main
from tests.simulation.world import SENDING_FAULTS


@cache
def explored(name: str) -> Explored:
    return Explorer(SMALL[name].world()).explore()


@cache
def variant(name: str) -> Explored:
    return Explorer(VARIANTS[name].world()).explore()


def broken(found: Explored, rule: str) -> list[Broken]:
    return [b for b in found.broken if b.rule.startswith(rule)]


def assert_rule(rule: str, *without: str) -> None:
    """No world breaks the rule, and each of the named variants does."""
    for name in SMALL:
        assert not broken(explored(name), rule), "\n".join(map(str, explored(name).broken))
    for name in without:
        assert broken(variant(name), rule), f"{name}: {variant(name).rules()}"


@pytest.mark.parametrize("name", SMALL)
def test_a_small_world_of_deliveries_is_explored_whole_and_breaks_no_rule(name: str) -> None:
    found = explored(name)
    assert found.whole
    assert not found.broken, "\n".join(map(str, found.broken))
    assert found.rests > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_sending_without_one_of_its_rules_is_caught(name: str) -> None:
    found = broken(variant(name), VARIANTS[name].rule)
    assert found, f"not caught; found instead: {variant(name).rules() or 'nothing'}"
    assert found[0].history


@pytest.mark.parametrize("name", VARIANTS)
def test_the_world_of_a_sending_variant_holds_with_the_rule_left_in(name: str) -> None:
    found = Explorer(VARIANTS[name].sound()).explore()
    assert found.whole
    assert not found.broken, "\n".join(map(str, found.broken))


@pytest.mark.contract("OUT-03", "OUT-04")
def test_no_platform_gets_a_part_twice_unless_absence_is_proven_or_an_operator_says_so() -> None:
    assert_rule(
        "OUT-04 the platform has a part twice",
        "claim_after_io",
        "blind_requeue",
        "unfenced_verdict",
        "stale_result",
        "no_deadline",
        "no_settling",
        "repeat_out_of_window",
    )
    assert_rule("OUT-04")
    assert_rule("OUT-03")


@pytest.mark.contract("OUT-13")
def test_a_stale_claim_changes_nothing_and_a_claim_in_force_is_not_taken_away() -> None:
    assert_rule("OUT-13", "takeover_marks_sending", "decision_lets_go")


@pytest.mark.contract("OUT-05", "OUT-09")
def test_parts_and_deliveries_go_in_order_and_a_sent_part_is_never_repeated() -> None:
    assert_rule("OUT-05", "redelivers_sent")
    assert_rule("OUT-09", "any_order")


@pytest.mark.contract("OUT-14")
def test_every_delivery_comes_to_its_end_or_to_the_operator() -> None:
    assert_rule("OUT-10 stuck", "unknown_blocks")
    assert_rule("CAN-07", "asks_for_ever", "attempt_not_charged")


def test_a_turn_never_ends_without_the_delivery_it_owes() -> None:
    assert_rule("OUT-01", "delivery_after_turn")


def test_the_small_worlds_of_deliveries_together_have_every_fault_and_every_answer() -> None:
    faults = (*SENDING_FAULTS, "crash", "lapse", "lost", "abandon")
    assert all(any(s.config.faults.get(fault) for s in SMALL.values()) for fault in faults)
    seen = frozenset().union(*(explored(name).seen for name in SMALL))
    for words in (
        "was accepted",
        "is refused for now",
        "is refused",
        "told to wait",
        "hears nothing",
        "cannot begin to send",
        "too late to send",
        "nobody waits for arrives",
        "nobody waits for is lost",
        "verdict on d0.0: found",
        "verdict on d0.0: absent",
        "verdict on d0.0: cannot tell",
        "waited long enough",
        "there is no route",
        "too old",
        "with its key",
        "redeliver",
        "abandon",
        "queued",
    ):
        assert any(words in label for label in seen), words


def test_the_command_tells_the_counter_example_of_a_sending_variant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["no_settling", "sends 2+1, no route, an operator"]) == 0
    told = capsys.readouterr().out
    assert "caught: no_settling" in told
    assert "a call for d0.0 that nobody waits for arrives" in told
    assert "holds: sends 2+1, no route, an operator" in told
