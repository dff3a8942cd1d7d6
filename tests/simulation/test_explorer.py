"""The design holds in every small world, and each rule taken out of it is missed.

The worlds are explored once for all tests. A test of a contract asks for both: nothing breaks the
rule in any world, and the explorer would have seen it, for it sees it in the variants that break it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache

import pytest

from postroom.domain.event import AgentIdle, Event, InboxQueued, InboxReplaced, encode_data
from postroom.domain.run import fold_run, interval
from postroom.domain.turn import AgentState, evolve
from tests.simulation.explorer import Broken, Explored, Explorer, Happening, main
from tests.simulation.ledger import SESSION
from tests.simulation.variants import VARIANTS
from tests.simulation.world import FAULTS, Move, Store, World
from tests.simulation.worlds import BASE, SMALL, build


@cache
def explorer(name: str) -> tuple[Explorer, Explored]:
    world = Explorer(build(SMALL[name]))
    return world, world.explore()


@cache
def variant(name: str) -> Explored:
    it = VARIANTS[name]
    return Explorer(build(it.config, it.session, it.driver)).explore()


def broken(explored: Explored, rule: str) -> list[Broken]:
    return [b for b in explored.broken if b.rule.startswith(rule)]


def assert_rule(rule: str, *without: str) -> None:
    """No world breaks the rule, and each of the named variants does."""
    for name in SMALL:
        assert not broken(explorer(name)[1], rule), "\n".join(map(str, explorer(name)[1].broken))
    for name in without:
        assert broken(variant(name), rule), f"{name}: {variant(name).rules()}"


@pytest.mark.parametrize("name", SMALL)
def test_a_small_world_is_explored_whole_and_breaks_no_rule(name: str) -> None:
    explored = explorer(name)[1]
    assert explored.whole
    assert not explored.broken, "\n".join(map(str, explored.broken))
    assert explored.rests > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_a_design_without_one_of_its_rules_is_caught(name: str) -> None:
    found = broken(variant(name), VARIANTS[name].rule)
    assert found, f"not caught; found instead: {variant(name).rules() or 'nothing'}"
    assert found[0].history


@pytest.mark.parametrize("name", VARIANTS)
def test_the_world_of_a_variant_holds_with_the_rule_left_in(name: str) -> None:
    explored = Explorer(build(VARIANTS[name].config)).explore()
    assert not explored.broken, "\n".join(map(str, explored.broken))


@pytest.mark.contract("INB-11")
def test_a_waking_message_is_never_pending_while_the_agent_is_idle() -> None:
    assert_rule(
        "INB-11", "idle_outside", "producer_peeks", "release_later", "idle_ignores_next_step"
    )


@pytest.mark.contract("INB-05")
def test_a_steer_joins_a_step_or_opens_a_turn_and_is_never_parked() -> None:
    assert_rule("INB-05", "settle_without_idle", "cancel_withdraws_drive")
    # A parked steer is first seen as what parks it: idle, with something waking pending.
    assert_rule("INB-11", "idle_outside", "producer_peeks", "idle_ignores_next_step")


@pytest.mark.contract("INB-04")
def test_a_boundary_claims_next_step_whole_and_follow_ups_never_share_a_turn() -> None:
    assert_rule("INB-04", "recovery_takes_followup", "claims_all_followups", "claim_in_two")


@pytest.mark.contract("INB-07")
def test_every_queued_message_gets_exactly_one_terminal_fact() -> None:
    assert_rule("INB-07", "claim_in_two", "recovery_requeues", "claims_unjudged")
    assert_rule("INB-09", "recovery_requeues", "dedupe_pending_only")


@pytest.mark.contract("TRN-01")
def test_turns_and_steps_are_numbered_and_nested_without_gaps() -> None:
    assert_rule("TRN-01", "no_epoch", "not_idempotent", "recovery_does_not_close")


@pytest.mark.contract("CAN-09")
def test_a_cancel_is_never_lost_and_never_reaches_a_later_turn() -> None:
    assert_rule(
        "CAN-09",
        "recovery_ignores_cancel",
        "cancel_keeps_owed_recovery",
        "cancel_not_bound",
        "steer_into_cancelled",
        "cancel_runs_twice",
    )


def test_the_small_worlds_together_have_every_fault_and_every_event_of_an_agent() -> None:
    assert all(any(config.faults.get(fault) for config in SMALL.values()) for fault in FAULTS)
    seen = frozenset().union(*(explorer(name)[1].seen for name in SMALL))
    assert {
        "inbox/queued",
        "inbox/rejected",
        "inbox/cancelled",
        "inbox/replaced",
        "agent/running",
        "agent/idle",
        "turn/start",
        "turn/end",
        "turn/cancel",
        "step/start",
        "step/end",
        "user/message",
        "assistant/message",
        "tool/call",
        "tool/result",
        "model/retry",
    } <= seen
    assert any("queues msg_F0 and claims, in one" in label for label in seen)


@pytest.mark.parametrize("name", SMALL)
def test_every_log_that_comes_to_rest_folds_to_an_idle_agent_and_to_whole_runs(name: str) -> None:
    explored = explorer(name)[0]
    histories = list(explored.rests())
    assert histories
    for history in histories:
        log = written(history)
        state = AgentState()
        for event in log:
            state = evolve(state, event.data)
        assert (state.status, state.turn, state.owed) == ("idle", None, False)
        starts = [e.data.turn for e in log if e.type == "turn/start"]  # type: ignore[union-attr]
        assert starts == list(range(1, state.turns + 1))
        reread = [Event.from_json(e.to_json()) for e in log]
        for event in log:
            data = event.data
            if not isinstance(data, InboxQueued | InboxReplaced) or "_I" in data.message.id:
                continue  # an inject wakes nobody: its interval may last beyond the log
            message_id = data.message.id
            run = fold_run(SESSION, message_id, interval(log, message_id))
            assert run.complete
            assert run.first_seq == event.seq
            assert log[run.last_seq - 1].type == AgentIdle.TYPE
            assert fold_run(SESSION, message_id, interval(reread, message_id)) == run


def written(history: tuple[Happening, ...]) -> list[Event]:
    """A history's events as a session's log."""
    events = [event for happening in history for event in happening.events]
    return [Event(SESSION, seq, e.TYPE, 0, encode_data(e), e) for seq, e in enumerate(events, 1)]


class Spinner:
    """An actor that never comes to rest."""

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        yield Move("turns round", store), None if memory else "round"

    def touched(self, memory: Hashable, touch: Hashable) -> Hashable:
        return memory

    def orphan(self, store: Store, memory: Hashable) -> Store:
        return store

    def restarted(self, move: Move) -> Move:
        return move


def test_what_goes_round_for_ever_by_itself_is_found() -> None:
    world = build(SMALL["FS"])
    explored = Explorer(World(world.start, world.parts, (Spinner(),), {})).explore()
    assert broken(explored, "CAN-07 what happens by itself goes round for ever")


def test_a_second_actor_joins_every_process_and_leaves_the_first_alone() -> None:
    """As a delivery machine would: here an actor that does one thing and rests."""

    class Noter(Spinner):
        def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
            if not store.note:
                yield Move("leaves a note", store._replace(note="left")), None

    world = build(SMALL["FS, judged by a policy"])
    budget = {"crash": 1, "cancel": 1}
    alone = Explorer(World(world.start, world.parts, world.actors, budget)).explore()
    actors = (*world.actors, Noter())
    both = Explorer(World(world.start, world.parts, actors, budget)).explore()
    assert both.whole
    assert not both.broken, both.rules()
    assert both.seen == alone.seen | {"leaves a note"}
    assert both.places == 2 * alone.places


def test_the_command_names_what_it_does_not_know_and_tells_a_counter_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["no such world"]) == 2
    told = capsys.readouterr().out
    assert all(name in told for name in (*BASE, *VARIANTS))
    assert main(["release_later"]) == 0
    told = capsys.readouterr().out
    assert "caught: release_later" in told
    assert "a producer queues msg_F1   [inbox/queued(msg_F1), agent/running]" in told
