"""The small world: a store that several processes share, and what may go wrong between them.

A state of the world is a `Store` and two `Process`es. What happens is a `Move`: one committed
transaction, one step outside any, or one fault. The world is put together from components:

* a `Part`: some fields of the store (`session`, `work` and `lease`; `outbox`), with the moves that
  no process makes: producers, operators, time, a platform;
* an `Actor`: one kind of task that every process runs (the driver, the sender, the asker).

A process dies with all its actors, and its twin is interchangeable with it. Nothing here knows
what a session or a delivery is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from postroom.domain.event import EventData
from postroom.domain.work import Work

ITSELF, CLIENT = "", "client"
FAULTS = ("crash", "lapse", "lost", "drain", "abandon", "cancel", "keep", "remove", "replace")
# Those of delivery besides, and all that a budget may name.
SENDING_FAULTS = ("defer", "unroute", "expire", "window", "decide")
BUDGET = FAULTS + SENDING_FAULTS

LIVE, LAPSED, DEAD = "live", "lapsed", "dead"


class Store(NamedTuple):
    """What is durable. ``session`` numbers an agent's state, as its component keeps it.

    ``lease`` is that of the drive's owner: live, lapsed, or dead and not yet noticed; empty if
    nobody holds the drive. ``outbox`` numbers its deliveries' state likewise. ``note`` is for a broken variant that must remember something.
    """

    session: int
    work: Work = Work()
    lease: str = ""
    note: str = ""
    outbox: int = 0


class Process(NamedTuple):
    """``actors`` holds what each actor of the world remembers; None: it does nothing now."""

    up: bool
    actors: tuple[Hashable, ...]


class Move(NamedTuple):
    """One thing that happens, and all that follows from it.

    ``process`` is the mover afterwards (None: no process moved). ``touch`` says what the commit
    means to what any process remembers (None: nothing). ``spends`` names the fault of the budget
    that this is; `ITSELF` is what goes on by itself, `CLIENT` what a client may do at any time.
    ``broken`` names the rules that were broken by it.
    """

    label: str
    store: Store
    process: Process | None = None
    touch: Hashable = None
    spends: str = ITSELF
    events: tuple[EventData, ...] = ()
    broken: tuple[str, ...] = ()


class Actor(Protocol):
    """One kind of task of a process. What it remembers is a value; None while it rests."""

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        """What it may do next, each with its memory afterwards (`touch` already applied)."""
        ...

    def touched(self, memory: Hashable, touch: Hashable) -> Hashable:
        """Its memory in the world after somebody's commit."""
        ...

    def orphan(self, store: Store, memory: Hashable) -> Store:
        """The store after the process died that had this memory."""
        ...

    def restarted(self, move: Move) -> Move:
        """What a starting process does besides starting."""
        ...


class Part(Protocol):
    """Some fields of the store."""

    def outside(self, store: Store) -> Iterator[Move]:
        """What may happen that no process does."""
        ...

    def at_rest(self, store: Store) -> list[str]:
        """Rules broken if nothing more happens by itself in this store."""
        ...

    def told(self, moves: Sequence[Move]) -> list[tuple[EventData, ...]]:
        """The events of a history, move by move, as the log of a session would have them."""
        ...


class World:
    """Joins the components. ``budget`` allows each fault so many times in one history.

    The first part is the session's: it tells the events.
    """

    def __init__(
        self,
        start: Store,
        parts: Sequence[Part],
        actors: Sequence[Actor],
        budget: Mapping[str, int],
    ) -> None:
        unknown = set(budget) - set(BUDGET)
        assert not unknown, f"no such fault: {unknown}"
        self.start = start
        self.parts = tuple(parts)
        self.actors = tuple(actors)
        self.budget = tuple(budget.get(name, 0) for name in BUDGET)

    def outside(self, store: Store) -> Iterator[Move]:
        for part in self.parts:
            yield from part.outside(store)

    def at_rest(self, store: Store) -> list[str]:
        return [rule for part in self.parts for rule in part.at_rest(store)]

    def told(self, moves: Sequence[Move]) -> list[tuple[EventData, ...]]:
        return self.parts[0].told(moves)

    @property
    def resting(self) -> Process:
        return Process(True, (None,) * len(self.actors))

    def moves(self, store: Store, process: Process) -> Iterator[Move]:
        """What one process may do or suffer."""
        if not process.up:
            move = Move("restarts", store, self.resting)
            for actor in self.actors:
                move = actor.restarted(move)
            yield move
            return
        for i, actor in enumerate(self.actors):
            for move, memory in actor.moves(store, process.actors[i]):
                memories = tuple(
                    memory if k == i else self._touched(k, old, move.touch)
                    for k, old in enumerate(process.actors)
                )
                yield move._replace(process=Process(True, memories))
        if any(memory is not None for memory in process.actors):
            after = store
            for actor, memory in zip(self.actors, process.actors, strict=True):
                after = actor.orphan(after, memory)
            down = Process(False, (None,) * len(self.actors))
            yield Move("CRASHES", after, down, spends="crash")

    def touched(self, process: Process, touch: Hashable) -> Process:
        """The other process after a commit."""
        if touch is None or not process.up:
            return process
        return Process(
            True, tuple(self._touched(i, m, touch) for i, m in enumerate(process.actors))
        )

    def _touched(self, i: int, memory: Hashable, touch: Hashable) -> Hashable:
        if touch is None or memory is None:
            return memory
        return self.actors[i].touched(memory, touch)
