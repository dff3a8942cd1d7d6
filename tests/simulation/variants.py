"""The design with one rule taken out: each variant changes one function, and must be caught.

They are the explorer's own test. Each is a `Session` or a `Driving` with one method overridden: a
shipped decision wrapped, or a transaction of the world cut in two. ``rule`` is the contract that
its counter-example must name. A variant may *overlook* rules: those that its means break at once,
so that what is told is the harm and not the means.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import msgspec

from postroom.domain import turn as shipped
from postroom.domain import work as shipped_work
from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    EndKind,
    EventData,
    InboxCancelled,
    InboxQueued,
    StepStart,
    TurnCancel,
    TurnStart,
    UserMessage,
)
from postroom.domain.inbox import Inbox, Pending
from postroom.domain.turn import (
    AgentState,
    BeginTurn,
    Cancel,
    Command,
    Finish,
    NextStep,
    Queue,
    TakeOver,
)
from tests.simulation.driver import AGAIN, Driver, Driving
from tests.simulation.ledger import ENTERED, PENDING, Ledger
from tests.simulation.session import Config, Session, Tx
from tests.simulation.world import CLIENT, LIVE, Move, Store

_change = msgspec.structs.replace
Events = tuple[EventData, ...]


def _without(events: Events, *types: type[EventData]) -> Events:
    return tuple(e for e in events if not isinstance(e, types))


def _after(state: AgentState, events: Events) -> AgentState:
    for event in events:
        state = shipped.evolve(state, event)
    return state


# ---- parked ----


class IdleOutside(Driving):
    """It looks for what is pending in one transaction and writes idle in the next."""

    def finish(
        self,
        tx: Tx,
        driver: Driver,
        kind: EndKind,
        text: str,
        calls: str = "",
        twist: str = "",
    ) -> Driver | None:
        if twist:
            return super().finish(tx, driver, kind, text, calls, twist)
        if self.turn_of(tx, driver) is None:
            return self.next_turn(tx, driver)
        saw = "more" if tx.agent.inbox.waking else "nothing"
        label = f"ends the turn, having seen {saw}"
        return driver._replace(phase=AGAIN, script=(label, "finish", kind, text, calls, saw))


class IdleAsSeen(Session):
    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, Finish) and twist:
            events = _without(events, AgentIdle)
            if twist == "nothing":
                events += (AgentIdle(),)
        return events


class ProducerPeeks(Session):
    """The producer reads the status before its own transaction."""

    overlook = ("INB-11 agent/running written twice",)

    def queue(self, store: Store, m: int, twist: str = "") -> Iterator[Move]:
        seen = dict(x.split("=") for x in store.note.split())
        name = self.messages[m].message.id
        if name not in seen:
            status = self.agent(store).status
            note = f"{store.note} {name}={status}".strip()
            label = f"a producer reads: the agent is {status}"
            yield Move(label, store._replace(note=note), spends=CLIENT)
            return
        tx = Tx(self, store)
        status = seen.pop(name)
        tx.note = " ".join(f"{k}={v}" for k, v in seen.items())
        self.append_queued(tx, m, status)
        yield tx.move(f"it queues {name}, believing that", spends=CLIENT)

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        if isinstance(command, Queue):
            state = _change(state, status="running" if twist == "running" else "idle")
        return shipped.decide(state, command)


class ReleaseLater(Session):
    """agent/idle does not release the drive."""

    overlook = ("INB-11 the drive outlives",)
    release = staticmethod(lambda work: work)


class ReleasesLater(Driving):
    def next_turn(self, tx: Tx, driver: Driver) -> Driver | None:
        if tx.agent.status == "idle" and tx.holds(driver.fence):
            return driver._replace(phase=AGAIN, script=("releases the drive", "let_go"))
        return super().next_turn(tx, driver)

    def let_go(self, tx: Tx, driver: Driver) -> None:
        self.fenced(tx, driver)
        tx.set_work(shipped_work.release(tx.work))


class IdleIgnoresNextStep(Session):
    """The idle decision looks at next-turn only."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        if isinstance(command, Finish):
            state = _change(state, inbox=Inbox((), state.inbox.next_turn))
        return shipped.decide(state, command)


# ---- stuck or lost ----


class SettleWithoutIdle(Session):
    """A driver that finds nothing to do lets the drive go and writes nothing."""

    overlook = ("INB-11 parked: the agent runs",)

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        return _without(events, AgentIdle) if isinstance(command, BeginTurn) else events


class LetsGoInSilence(Driving):
    def next_turn(self, tx: Tx, driver: Driver) -> Driver | None:
        if tx.agent.status == "running" and tx.agent.settled and tx.holds(driver.fence):
            tx.set_work(shipped_work.release(tx.work))
            return None
        return super().next_turn(tx, driver)


class CancelWithdrawsDrive(Session):
    """A cancel withdraws an unclaimed drive and writes no agent/idle."""

    overlook = ("INB-11 parked: the agent runs", "RUN-05 idle comes too late")

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        return _without(events, AgentIdle) if isinstance(command, Cancel) else events

    def noted(self, tx: Tx, command: Command) -> None:
        if isinstance(command, Cancel) and not command.driven and tx.agent.settled:
            tx.set_work(shipped_work.release(tx.work))


class ClaimedApart(Session):
    """What was claimed in one transaction is out of the inbox until it enters in the next."""

    overlook = ("INB-11", "RUN-06 a turn", "FOLD")

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        claimed = twist.removeprefix("enter ").split()
        if twist.startswith("enter "):
            claimed = [p.message.id for p in _all(state.inbox) if p.message.id not in claimed]
        return shipped.decide(_change(state, inbox=_hide(state.inbox, claimed)), command)


class ClaimsApart(Driving):
    def begin(self, tx: Tx, driver: Driver, judged: object) -> Driver | None:
        agent = _change(tx.agent, inbox=_hide(tx.agent.inbox, tx.note.split()))
        if not tx.holds(driver.fence) or agent.turn or agent.owed or not agent.inbox.waking:
            return super().begin(tx, driver, None)
        ids = self.batch(agent, "begin")
        tx.note = " ".join(ids)
        script = (f"opens a turn with {tx.note}", "enter_claimed", *ids)
        return driver._replace(phase=AGAIN, script=script)

    def enter_claimed(self, tx: Tx, driver: Driver, *ids: str) -> Driver | None:
        self.fenced(tx, driver)
        tx.note = ""
        tx.append(BeginTurn(), "enter " + " ".join(ids))
        if tx.agent.turn is not None:
            return self.stepping(tx, driver, 1, self.config.steps)
        return self.next_turn(tx, driver)


def _all(inbox: Inbox) -> tuple[Pending, ...]:
    return inbox.next_step + inbox.next_turn


def _hide(inbox: Inbox, ids: Sequence[str]) -> Inbox:
    return Inbox(
        tuple(p for p in inbox.next_step if p.message.id not in ids),
        tuple(p for p in inbox.next_turn if p.message.id not in ids),
    )


class AbandonedStays(Driving):
    """A process does not know its own abandoned claim from a living one."""

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        if not (isinstance(memory, Driver) and memory.phase == "abandoned"):
            yield from super().moves(store, memory)


# ---- two turns open ----


class NoFence(Session):
    """Nothing checks the driver's claim."""

    overlook = ("INB-17 a stale",)
    holds = staticmethod(lambda work, fence: True)


class Unguarded(Driving):
    """A script that runs again does not look whether it has run."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.guarded = False


class NotClosing(Driving):
    """A take-over goes on without closing the turn it finds open."""

    def take_over(self, tx: Tx, charged: bool) -> None:
        pass


# ---- by a rule of its own ----


class EpochAlone(Session):
    """The fence is the epoch, and a release does not raise it."""

    holds = staticmethod(lambda work, fence: work.epoch == fence.epoch)


class Requeues(Session):
    """Recovery puts the turn's follow-up back into the queue."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, TakeOver) and ledger.turn is not None and ledger.turn.followup:
            entered = [
                p.message
                for p, fact in zip(self.messages, ledger.facts, strict=True)
                if p.kind == "F" and fact == ENTERED
            ]
            events += (InboxQueued(entered[-1], "next_turn", True),)
        return events


class RecoveryIgnoresCancel(Session):
    """Recovery closes a cancelled turn as interrupted, and goes on with it."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        if isinstance(command, TakeOver):
            state = _uncancelled(state)
        return shipped.decide(state, command)


def _uncancelled(state: AgentState) -> AgentState:
    assert state.turn is not None
    return _change(state, turn=_change(state.turn, cancel=None))


class CancelKeepsOwed(Session):
    """A cancel between a turn's interruption and its recovery leaves the recovery owed."""

    overlook = ("CAN-09 a cancel leaves the recovery owed",)

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, Cancel) and state.owed:
            events = _without(events, TurnCancel, AgentIdle)
        return events


class CancelledRecoveryRuns(Driving):
    """Makes the harm of it visible: the recovery turn of work that was cancelled."""

    def begin(self, tx: Tx, driver: Driver, judged: object) -> Driver | None:
        was = tx.note
        after = super().begin(tx, driver, judged)  # type: ignore[arg-type]
        turn = tx.agent.turn
        if was == "cancelled" and turn is not None and turn.recovery:
            tx.broken.append("CAN-09 an accepted cancel is lost: recovery goes on with its turn")
        if turn is not None:
            tx.note = ""
        return after


class CancelKeepsOwedNoted(CancelKeepsOwed):
    def noted(self, tx: Tx, command: Command) -> None:
        if isinstance(command, Cancel) and tx.agent.owed:
            tx.note = "cancelled"


class RecoveryTakesFollowup(Session):
    """The recovery turn also claims a follow-up."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, BeginTurn) and state.owed:
            number = state.turns + 1
            events += tuple(UserMessage(number, 1, p.message) for p in state.inbox.next_turn[:1])
        return events


class ClaimsAllFollowups(Session):
    """A turn boundary claims all of next-turn."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, BeginTurn) and any(isinstance(e, StepStart) for e in events):
            number = state.turns + 1
            events += tuple(UserMessage(number, 1, p.message) for p in state.inbox.next_turn[1:])
        return events


class CancelLeavesNextStep(Session):
    """A cancel drains next-turn only."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, Cancel):
            kept = {p.message.id for p in state.inbox.next_step}
            events = tuple(
                e for e in events if not (isinstance(e, InboxCancelled) and e.message_id in kept)
            )
            if not _after(state, _without(events, AgentIdle)).settled:
                events = _without(events, AgentIdle)
        return events


class CancelNotBound(Session):
    """A cancel is a flag on the session, and the next turn that opens finds it."""

    def noted(self, tx: Tx, command: Command) -> None:
        if isinstance(command, Cancel) and tx.agent.turn is None and tx.agent.status == "running":
            tx.note = "cancel"
        elif isinstance(command, BeginTurn) and tx.agent.turn is not None:
            tx.note = ""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        events = shipped.decide(state, command)
        if isinstance(command, BeginTurn) and twist == "cancel":
            out: list[EventData] = []
            for event in events:
                out.append(event)
                if isinstance(event, TurnStart):
                    out.append(TurnCancel(event.turn, "user"))
            events = tuple(out)
        return events


class SteerIntoCancelled(Session):
    """The step boundary does not look at the cancel."""

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        if isinstance(command, NextStep):
            state = _uncancelled(state)
        return shipped.decide(state, command)


class RunningAtClaim(Session):
    """The session stays idle until a driver claims it; only then agent/running is written."""

    overlook = ("INB-11",)

    def decide(self, state: AgentState, ledger: Ledger, command: Command, twist: str) -> Events:
        if isinstance(command, BeginTurn) and state.status == "idle" and state.inbox.waking:
            return AgentRunning(), *shipped.decide(_change(state, status="running"), command)
        events = shipped.decide(state, command)
        return _without(events, AgentRunning) if isinstance(command, Queue) else events

    def noted(self, tx: Tx, command: Command) -> None:
        if isinstance(command, Queue) and command.wakes:
            tx.set_work(shipped_work.ready(tx.work))
        elif isinstance(command, BeginTurn) and tx.agent.status == "idle":
            tx.set_work(shipped_work.release(tx.work))


class RecoversAtStart(Driving):
    """A process that starts closes the turn it finds open, whoever drives it."""

    def restarted(self, move: Move) -> Move:
        tx = Tx(self.session, move.store)
        if tx.agent.turn is None:
            return move
        if tx.lease == LIVE:
            tx.broken.append("INB-17 a claim in force is taken away")
        tx.append(TakeOver(True, self.config.attempts_max))
        tx.set_work(shipped_work.give_back(tx.work))
        return tx.move("restarts and recovers")._replace(process=move.process)


class DedupesPendingOnly(Session):
    """Duplicate ids are looked up among the pending messages only."""

    def queue_again(self, store: Store, m: int) -> Iterator[Move]:
        if self.ledger(store).facts[m] != PENDING:
            tx = Tx(self, store)
            self.append_queued(tx, m)
            yield tx.move("the producer sends the same id again", spends=CLIENT)


class CancelRunsTwice(Session):
    """A cancel whose answer was lost runs again, and cancels what it finds by then."""

    def cancel(self, store: Store, keep: bool) -> Iterator[Move]:
        for move in super().cancel(store, keep):
            yield move
            lost = move.store._replace(note="lost")
            yield move._replace(label=f"{move.label} (the commit's answer is lost)", store=lost)
        if store.note and not keep:
            tx = Tx(self, store)
            tx.append(Cancel("user", False, store.work.status == "claimed"))
            tx.note = ""
            if tx.events:
                tx.broken.append("CAN-09 one cancel takes effect twice, on what came after it")
            yield tx.move("the cancel runs again", spends=CLIENT)


class ClaimsUnjudged(Driving):
    """The batch that the policy judged is not compared with the one that is claimed."""

    def changed(self, tx: Tx, script: str, batch: tuple[str, ...]) -> bool:
        return False


class Variant(msgspec.Struct, frozen=True):
    """``what`` was changed, in which small world, and the ``rule`` that must be named."""

    what: str
    rule: str
    config: Config
    session: type[Session] = Session
    driver: type[Driving] = Driving


def _small(kinds: str = "FS", **faults: int) -> Config:
    return Config(kinds=kinds, faults=faults)


_WEAR = Config(kinds="FS", faults={"crash": 1, "cancel": 1, "keep": 1})
_OPENS = Config(kinds="FS", begins=True, faults={"crash": 1, "cancel": 1, "keep": 1})
_JUDGED = Config(kinds="FS", policy=True, faults={"remove": 1})

VARIANTS: dict[str, Variant] = {
    "idle_outside": Variant(
        "idle is decided outside the transaction that writes it",
        "INB-11",
        _small(),
        IdleAsSeen,
        IdleOutside,
    ),
    "producer_peeks": Variant(
        "the producer reads the status before its own transaction",
        "INB-11",
        _small(),
        ProducerPeeks,
    ),
    "release_later": Variant(
        "the drive is released in a transaction after agent/idle",
        "INB-11",
        _small("FF"),
        ReleaseLater,
        ReleasesLater,
    ),
    "idle_ignores_next_step": Variant(
        "the idle decision looks at next-turn only", "INB-11", _small(), IdleIgnoresNextStep
    ),
    "settle_without_idle": Variant(
        "a driver that finds nothing to do releases without agent/idle",
        "RUN-05",
        _WEAR,
        SettleWithoutIdle,
        LetsGoInSilence,
    ),
    "cancel_withdraws_drive": Variant(
        "a cancel withdraws an unclaimed drive and writes no agent/idle",
        "RUN-05",
        _WEAR,
        CancelWithdrawsDrive,
    ),
    "claim_in_two": Variant(
        "claim and entry are two transactions", "INB-07", _WEAR, ClaimedApart, ClaimsApart
    ),
    "abandoned_claim_stays": Variant(
        "a process does not take back the claim its own driver left behind",
        "RUN-05",
        _small("F", abandon=1),
        Session,
        AbandonedStays,
    ),
    "no_epoch": Variant(
        "nothing fences the driver's appends", "TRN-01", _small("FF", lapse=1), NoFence
    ),
    "not_idempotent": Variant(
        "a script that runs again does not look whether it has run",
        "TRN-01",
        _small("FF", lost=1),
        Session,
        Unguarded,
    ),
    "recovery_does_not_close": Variant(
        "a take-over goes on without closing the open turn", "TRN-01", _WEAR, Session, NotClosing
    ),
    "epoch_without_token": Variant(
        "the fence is the epoch alone", "INB-17", _small("FF", lost=1), EpochAlone
    ),
    "recovery_requeues": Variant(
        "recovery puts an entered message back into the queue", "INB-09", _WEAR, Requeues
    ),
    "recovery_ignores_cancel": Variant(
        "recovery goes on with a cancelled turn", "CAN-09", _WEAR, RecoveryIgnoresCancel
    ),
    "cancel_keeps_owed_recovery": Variant(
        "a cancel before the recovery turn leaves it owed",
        "CAN-09",
        _WEAR,
        CancelKeepsOwedNoted,
        CancelledRecoveryRuns,
    ),
    "recovery_takes_followup": Variant(
        "the recovery turn also claims a follow-up",
        "INB-04",
        _small("FF", crash=1),
        RecoveryTakesFollowup,
    ),
    "claims_all_followups": Variant(
        "a turn boundary claims all of next-turn", "INB-04", _small("FF"), ClaimsAllFollowups
    ),
    "cancel_leaves_next_step": Variant(
        "a cancel drains next-turn only", "CAN-01", _WEAR, CancelLeavesNextStep
    ),
    "cancel_not_bound": Variant(
        "a cancel is a flag on the session, not on the open turn", "CAN-09", _WEAR, CancelNotBound
    ),
    "steer_into_cancelled": Variant(
        "the step boundary lets a steer into a cancelled turn", "CAN-09", _WEAR, SteerIntoCancelled
    ),
    "running_at_claim": Variant(
        "agent/running is written by the claim, not by the queue", "RUN-05", _OPENS, RunningAtClaim
    ),
    "recovery_at_start": Variant(
        "a process recovers what it finds when it starts",
        "INB-17",
        _small("F", crash=1),
        Session,
        RecoversAtStart,
    ),
    "dedupe_pending_only": Variant(
        "duplicates are looked up among the pending only", "INB-09", _small(), DedupesPendingOnly
    ),
    "cancel_runs_twice": Variant(
        "a cancel that runs again cancels what came after it",
        "CAN-09",
        _small("FF", cancel=1),
        CancelRunsTwice,
    ),
    "claims_unjudged": Variant(
        "the judged batch is not compared with the claimed one",
        "INB-07",
        _JUDGED,
        Session,
        ClaimsUnjudged,
    ),
}
