"""A session of the world: the shipped decision functions inside the store's transactions.

`Session` keeps agent states and ledgers by number, so that a state of the world stays small, and
remembers every decision: the same command to the same state is decided once. `Tx` is one
transaction as the store's scripts make it: decide, evolve, project. ``agent/running`` makes the
drive ready, ``agent/idle`` releases it.

States are kept relative. Turns are renumbered so that the last one is `LAST`; a claim's epoch so
that the present one is `EPOCH`. What a process believes moves along (`Touch`). Requests are
counted here and then forgotten, for no decision asks for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from postroom.domain import turn as shipped
from postroom.domain import work as shipped_work
from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    EventData,
    ModelRetry,
    StepStart,
    TurnStart,
)
from postroom.domain.ids import ClaimToken, NodeId
from postroom.domain.turn import AgentState, Cancel, Command, Queue, Remove, Replace
from postroom.domain.work import Fence, Work
from tests.simulation.ledger import LAST, PENDING, UNKNOWN, Auditor, Ledger, parcels
from tests.simulation.world import CLIENT, DEAD, ITSELF, LAPSED, LIVE, Move, Store

EPOCH = 1
HELD, GONE, OLD, FRESH = "held", "gone", "old", "fresh"
TOKEN = ClaimToken("held")
NODE = NodeId("node")

# How a fence may stand to the drive: it holds it; it did, under this epoch; it did before.
FENCES = {
    HELD: Fence(EPOCH, TOKEN),
    GONE: Fence(EPOCH, ClaimToken("gone")),
    OLD: Fence(EPOCH - 1, ClaimToken("old")),
}

_change = msgspec.structs.replace


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One small world.

    ``kinds``: one letter a message (F, S, I). ``replies``: what a model's reply with tool calls
    may be, one letter a call, a small one if it starts with the reply. ``steps``: how many such
    replies a turn may have. ``policy``: a policy judges each batch, and may refuse. ``begins``:
    a claim opens the turn in its own transaction. ``aborts``: a driver may see the cancel's flag
    at any time, and ends its turn. ``oneshot``: a process may queue and claim in one. The rest is
    a budget of faults.
    """

    kinds: str = "FS"
    replies: tuple[str, ...] = ("a",)
    steps: int = 1
    attempts_max: int = 1
    policy: bool = False
    begins: bool = False
    aborts: bool = False
    retries: int = 0
    max_steps: bool = False
    oneshot: bool = False
    faults: dict[str, int] = {}


class Touch(NamedTuple):
    """What a commit means to a driver's memory: how its fence stands now, how its turn counts.

    ``more`` is what it means to what other actors remember.
    """

    fences: tuple[tuple[str, str], ...]
    turns: int
    more: Hashable = None


class Fold(NamedTuple):
    """What follows from a command: ``projected`` are the events that move the drive."""

    session: int
    events: tuple[EventData, ...]
    turns: int
    projected: tuple[EventData, ...]
    broken: tuple[str, ...]


class Session:
    """The session's component. A broken variant overrides a method of it."""

    holds = staticmethod(shipped_work.holds)
    claim = staticmethod(shipped_work.claim)
    ready = staticmethod(shipped_work.ready)
    release = staticmethod(shipped_work.release)
    give_back = staticmethod(shipped_work.give_back)

    # Names of ledger rules that a variant breaks on purpose, as its means and not its end.
    overlook: tuple[str, ...] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.messages = parcels(config.kinds)
        self.auditor = Auditor(self.messages, config.attempts_max)
        self.states: list[tuple[AgentState, Ledger]] = []
        self._numbers: dict[tuple[AgentState, Ledger], int] = {}
        self._folds: dict[tuple[int, Command, str], Fold] = {}
        self._sound: dict[tuple[int, str], tuple[str, ...]] = {}
        self.start = Store(self._number(AgentState(turns=LAST), self.auditor.blank()))

    # ---- deciding ----

    def decide(
        self, state: AgentState, ledger: Ledger, command: Command, twist: str
    ) -> tuple[EventData, ...]:
        """The shipped decision. ``twist`` is a variant's: what its transaction found elsewhere."""
        return shipped.decide(state, command)

    def noted(self, tx: Tx, command: Command) -> None:
        """After each decision of a transaction: a variant may do more, or take a note."""

    def fold(self, session: int, command: Command, twist: str = "") -> Fold:
        key = session, command, twist
        found = self._folds.get(key)
        if found is None:
            found = self._folds[key] = self._fold(session, command, twist)
        return found

    def _fold(self, session: int, command: Command, twist: str) -> Fold:
        state, ledger = self.states[session]
        try:
            events = self.decide(state, ledger, command, twist)
            after = state
            for event in events:
                after = shipped.evolve(after, event)
        except AssertionError as error:
            return Fold(session, (), 0, (), (f"TRN-01 the decision asserts: {error}",))
        ledger, broken = self.auditor.read(ledger, command, events)
        requests = sum(isinstance(e, StepStart | ModelRetry) for e in events)
        if after.requests != state.requests + requests:
            broken.append("FOLD requests are not counted")
        turns = after.turns - state.turns
        turn = after.turn and _change(after.turn, number=after.turn.number - turns)
        after = _change(after, turns=after.turns - turns, turn=turn, requests=0)
        broken += self.auditor.differs(ledger, after)
        projected = tuple(e for e in events if isinstance(e, AgentRunning | AgentIdle))
        return Fold(self._number(after, ledger), events, turns, projected, tuple(broken))

    def kept(self, broken: list[str]) -> tuple[str, ...]:
        return tuple(b for b in broken if not self.overlook or not b.startswith(self.overlook))

    def _number(self, state: AgentState, ledger: Ledger) -> int:
        key = state, ledger
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.states)
            self.states.append(key)
        return number

    def agent(self, store: Store) -> AgentState:
        return self.states[store.session][0]

    def ledger(self, store: Store) -> Ledger:
        return self.states[store.session][1]

    def sound(self, store: Store) -> tuple[str, ...]:
        key = store.session, store.work.status
        found = self._sound.get(key)
        if found is None:
            found = tuple(self.auditor.sound(self.ledger(store), store.work.status))
            self._sound[key] = found
        return found

    def at_rest(self, store: Store) -> list[str]:
        return self.auditor.settled(self.ledger(store))

    def told(self, moves: Sequence[Move]) -> list[tuple[EventData, ...]]:
        """Turns numbered from 1, as a log has them: the world keeps them relative."""
        turns, out = 0, list[tuple[EventData, ...]]()
        for move in moves:
            events = move.events
            out.append(
                tuple(
                    _change(e, turn=e.turn + turns - LAST) if hasattr(e, "turn") else e  # type: ignore[union-attr]
                    for e in events
                )
            )
            turns += sum(isinstance(e, TurnStart) for e in events)
        return out

    # ---- what no process does: producers, operators, time ----

    def outside(self, store: Store) -> Iterator[Move]:
        ledger = self.ledger(store)
        for m in self.unqueued(store):
            yield from self.queue(store, m)
        for m, parcel in enumerate(self.messages):
            fact = ledger.facts[m]
            first = m < len(self.config.kinds)
            if first and fact != UNKNOWN:
                yield from self.queue_again(store, m)
            if fact == PENDING:
                tx = Tx(self, store)
                tx.append(Remove(parcel.message.id, store.work.status == "claimed"))
                yield tx.move(f"somebody removes {parcel.message.id}", spends="remove")
                if first:
                    tx = Tx(self, store)
                    new = self.messages[m + len(self.config.kinds)].message
                    tx.append(Replace(parcel.message.id, new))
                    yield tx.move(f"somebody replaces {parcel.message.id}", spends="replace")
        for keep in (False, True):
            yield from self.cancel(store, keep)
        if store.lease == LIVE:
            lapsed = store._replace(lease=LAPSED)
            yield Move("the lease lapses under its living owner", lapsed, spends="lapse")
        elif store.lease == DEAD:
            yield Move("the dead owner is found dead", store._replace(lease=LAPSED))

    def unqueued(self, store: Store) -> list[int]:
        """What may be queued next. Messages of one kind are interchangeable: in order of number."""
        kinds, facts = self.config.kinds, self.ledger(store).facts
        new = [m for m in range(len(kinds)) if facts[m] == UNKNOWN]
        return [m for m in new if not any(kinds[k] == kinds[m] for k in new if k < m)]

    def is_new(self, tx: Tx, m: int) -> bool:
        """Whether this id was never seen: its table keeps them for ever."""
        return self.states[tx.session][1].facts[m] == UNKNOWN

    def queue(self, store: Store, m: int, twist: str = "") -> Iterator[Move]:
        tx = Tx(self, store)
        self.append_queued(tx, m, twist)
        yield tx.move(f"a producer queues {self.messages[m].message.id}", spends=CLIENT)

    def append_queued(self, tx: Tx, m: int, twist: str = "") -> None:
        parcel = self.messages[m]
        target = "next_turn" if parcel.kind == "F" else "next_step"
        tx.append(Queue(parcel.message, target, parcel.wakes), twist)

    def queue_again(self, store: Store, m: int) -> Iterator[Move]:
        """The answer was lost and the producer sends the same id: the same receipt, no change."""
        yield from ()

    def cancel(self, store: Store, keep: bool) -> Iterator[Move]:
        """Run again after a lost answer it finds its own mark and changes nothing."""
        tx = Tx(self, store)
        tx.append(Cancel("user", keep, store.work.status == "claimed"))
        if tx.changed or tx.broken:
            what = " and keeps the inbox" if keep else ""
            yield tx.move(f"somebody cancels{what}", spends="keep" if keep else "cancel")


class Tx:
    """One transaction. Nothing is seen of it before `move` or `commit`."""

    def __init__(self, session: Session, store: Store) -> None:
        self.home = session
        self.before = store
        self.session = store.session
        self.work = store.work
        self.lease = store.lease
        self.note = store.note
        self.outbox = store.outbox
        self.more: Hashable = None
        self.fences = dict(FENCES)
        self.turns = 0
        self.events: list[EventData] = []
        self.broken: list[str] = []

    @property
    def agent(self) -> AgentState:
        return self.home.states[self.session][0]

    @property
    def changed(self) -> bool:
        before = self.before.work, self.before.note, self.before.outbox
        return bool(self.events) or (self.work, self.note, self.outbox) != before

    def append(self, command: Command, twist: str = "") -> Fold:
        fold = self.home.fold(self.session, command, twist or self.note)
        self.session = fold.session
        self.events += fold.events
        self.broken += fold.broken
        self.turns += fold.turns
        for event in fold.projected:
            self.project(event)
        self.home.noted(self, command)
        return fold

    def project(self, event: EventData) -> None:
        self.set_work(
            self.home.ready(self.work)
            if isinstance(event, AgentRunning)
            else self.home.release(self.work)
        )

    def set_work(self, work: Work) -> None:
        self.work = work
        if work.status != "claimed":
            self.lease = ""

    def take(self, token: ClaimToken, *, abandoned: bool = False) -> bool:
        """Claims the drive for a new fence, if it is to be had."""
        lapsed = abandoned or self.before.lease == LAPSED
        work = self.home.claim(self.work, NODE, token, lapsed=lapsed)
        if work is None:
            return False
        if self.work.status == "claimed" and not lapsed:
            self.broken.append("INB-17 a claim in force is taken away")
        self.set_work(work)
        self.lease = LIVE
        self.fences[FRESH] = Fence(work.epoch, token)
        return True

    def holds(self, fence: str) -> bool:
        return self.home.holds(self.work, self.fences[fence])

    def stands(self, fence: str) -> str:
        """How a fence really stands to the drive, whatever `holds` says."""
        mine, work = self.fences[fence], self.work
        if work.status == "claimed" and (work.epoch, work.token) == (mine.epoch, mine.token):
            return HELD
        return GONE if work.epoch == mine.epoch else OLD

    def commit(self) -> tuple[Store, Touch | None]:
        fences = tuple((f, self.stands(f)) for f in self.fences)
        claimed = self.work.status == "claimed"
        work = (
            Work(self.work.status, EPOCH, TOKEN, NODE) if claimed else Work(self.work.status, EPOCH)
        )
        store = self.before._replace(
            session=self.session,
            work=work,
            lease=self.lease,
            note=self.note,
            outbox=self.outbox,
        )
        self.broken += self.home.sound(store)
        still = all(f == now for f, now in fences)
        nothing = still and not self.turns and self.more is None
        return store, None if nothing else Touch(fences, self.turns, self.more)

    def move(self, label: str, *, spends: str = ITSELF) -> Move:
        store, touch = self.commit()
        broken = self.home.kept(self.broken)
        return Move(label, store, None, touch, spends, tuple(self.events), broken)
