"""The exhaustive explorer: every interleaving of a small world, breadth first.

A state is a store, two processes and what is left of the budget of faults. Everything is kept by
number: a state is one integer for what there is (store and processes, the twins in order) and one
for the budget. What can happen follows from the first alone, so it is worked out once, and a state
that has been seen with at least as much budget left is not entered again: it could do nothing new.

For each state that is reached the explorer knows that no move broke a rule (the moves say so), that
where nothing more happens by itself everything is settled, and that what happens by itself always
comes to rest: its moves make no circle. A rule that is broken is told with a shortest history.

``python -m tests.simulation.explorer base|broken|NAME`` runs the campaign and prints its figures.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from multiprocessing import Pool
from typing import NamedTuple, TypeAlias

from postroom.domain.event import EventData
from tests.simulation import delivery_variants, delivery_worlds, variants, worlds
from tests.simulation.world import BUDGET, CLIENT, ITSELF, Move, Process, Store, World
from tests.simulation.worlds import build

_BITS = 14
_MASK = (1 << _BITS) - 1
_GUARD = sum(8 << 4 * i for i in range(len(BUDGET)))


class Happening(NamedTuple):
    """One line of a history: who, what, and the events it committed."""

    who: str
    label: str
    events: tuple[EventData, ...]


class Broken(NamedTuple):
    """A broken rule, and a shortest history that breaks it."""

    rule: str
    history: tuple[Happening, ...]

    def __str__(self) -> str:
        lines = [f"{self.rule}   ({len(self.history)} steps)"]
        for happening in self.history:
            facts = ", ".join(f"{e.TYPE}{_detail(e)}" for e in happening.events)
            who = f"{happening.who} " if happening.who else ""
            lines.append(f"    {who}{happening.label}" + (f"   [{facts}]" if facts else ""))
        return "\n".join(lines)


def _detail(event: EventData) -> str:
    """What distinguishes an event, in a few characters: turn and step, message, call or reason."""

    def part(name: str) -> str | None:
        value = getattr(event, name, None)
        return getattr(value, "id", None) or getattr(value, "kind", None) or value

    place = ".".join(str(n) for n in (part("turn"), part("step")) if n is not None)
    what = part("message_id") or part("message") or part("call_id") or part("reason")
    said = " ".join(str(x) for x in (place, what, part("outcome")) if x)
    return f"({said})" if said else ""


class Explored(NamedTuple):
    """``states`` counts what was entered, ``places`` without regard to the budget.

    ``rests`` are the places where nothing more happens by itself, ``seen`` the labels and event
    types that occurred. ``whole`` is False if the limit cut it short.
    """

    states: int
    places: int
    rests: int
    seconds: float
    broken: tuple[Broken, ...]
    seen: frozenset[str]
    whole: bool

    def rules(self) -> str:
        return "; ".join(b.rule for b in self.broken)


class Explorer:
    """Explores one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stores: list[Store] = []
        self._store_numbers: dict[Store, int] = {}
        self._processes: list[Process] = []
        self._process_numbers: dict[Process, int] = {}
        self._touches: list[object] = []
        self._touch_numbers: dict[object, int] = {None: 0}
        self._touches.append(None)
        self._touched: dict[tuple[int, int], int] = {}
        self._outside: dict[int, _Steps] = {}
        self._inside: dict[int, _Steps] = {}
        self._seen: set[str] = set()
        self._rests = 0
        # By place: where it leads by itself; what else may happen, with its cost; what breaks.
        self._itself: dict[int, tuple[int, ...]] = {}
        self._else: dict[int, tuple[tuple[int, int], ...]] = {}
        self._breaks: dict[int, list[tuple[int, str]]] = {}
        # The states in the order they were reached: place, budget left, where from.
        self._path: list[int] = []
        self._left: list[int] = []
        self._from: list[int] = []

    # ---- numbers ----

    def _store(self, store: Store) -> int:
        number = self._store_numbers.get(store)
        if number is None:
            number = self._store_numbers[store] = len(self._stores)
            self._stores.append(store)
        return number

    def _process(self, process: Process) -> int:
        number = self._process_numbers.get(process)
        if number is None:
            number = self._process_numbers[process] = len(self._processes)
            self._processes.append(process)
            assert number <= _MASK, "more processes than a place has room for"
        return number

    def _touch(self, touch: object) -> int:
        number = self._touch_numbers.get(touch)
        if number is None:
            number = self._touch_numbers[touch] = len(self._touches)
            self._touches.append(touch)
        return number

    def _after_touch(self, process: int, touch: int) -> int:
        if not touch:
            return process
        key = process, touch
        after = self._touched.get(key)
        if after is None:
            touched = self.world.touched(self._processes[process], self._touches[touch])
            after = self._touched[key] = self._process(touched)
        return after

    @staticmethod
    def _pair(one: int, two: int) -> int:
        """The twins in order: which of them is which makes no difference."""
        return one << _BITS | two if one < two else two << _BITS | one

    def _place(self, store: int, one: int, two: int) -> int:
        return store << 2 * _BITS | self._pair(one, two)

    @staticmethod
    def _split(place: int) -> tuple[int, int, int]:
        return place >> 2 * _BITS, place >> _BITS & _MASK, place & _MASK

    # ---- what can happen ----

    def _compile(self, moves: Iterable[Move], process: int) -> _Steps:
        """Moves in numbers, those alone that the budget could ever allow."""
        itself: list[tuple[int, int, int]] = []
        other: list[tuple[int, int, int, int]] = []
        breaks: list[tuple[int, str]] = []
        for move in moves:
            cost = _cost(move)
            if cost and not self.world.budget[BUDGET.index(move.spends)]:
                continue
            self._seen.add(move.label)
            self._seen.update(e.TYPE for e in move.events)
            if move.broken:
                breaks += ((cost, rule) for rule in move.broken)
                continue
            base = self._store(move.store) << 2 * _BITS
            after = process if move.process is None else self._process(move.process)
            touch = self._touch(move.touch)
            if move.spends == ITSELF:
                itself.append((base, after, touch))
            else:
                other.append((base, after, touch, cost))
        return itself, other, breaks

    def _of_process(self, store: int, process: int) -> _Steps:
        key = store << _BITS | process
        steps = self._inside.get(key)
        if steps is None:
            moves = self.world.moves(self._stores[store], self._processes[process])
            steps = self._inside[key] = self._compile(moves, process)
        return steps

    def _of_outside(self, store: int) -> _Steps:
        steps = self._outside.get(store)
        if steps is None:
            moves = self.world.outside(self._stores[store])
            steps = self._outside[store] = self._compile(moves, 0)
        return steps

    def _visit(self, place: int) -> None:
        """Works out, once, what can happen at a place."""
        store, one, two = self._split(place)
        itself: list[int] = []
        other: list[tuple[int, int]] = []
        breaks: list[tuple[int, str]] = []
        after_touch = self._after_touch
        for me, twin in ((one, two), (two, one))[: 1 + (one != two)]:
            by_itself, at_a_cost, broken = self._of_process(store, me)
            for base, mine, touch in by_itself:
                its = after_touch(twin, touch) if touch else twin
                itself.append(base | (mine << _BITS | its if mine < its else its << _BITS | mine))
            for base, mine, touch, cost in at_a_cost:
                its = after_touch(twin, touch) if touch else twin
                after = base | (mine << _BITS | its if mine < its else its << _BITS | mine)
                other.append((after, cost))
            breaks += broken
        by_itself, at_a_cost, broken = self._of_outside(store)
        for base, _, touch in by_itself:
            itself.append(base | self._pair(after_touch(one, touch), after_touch(two, touch)))
        for base, _, touch, cost in at_a_cost:
            pair = self._pair(after_touch(one, touch), after_touch(two, touch))
            other.append((base | pair, cost))
        breaks += broken
        if not itself and not any(cost == 0 for cost, _ in breaks):
            breaks += ((0, rule) for rule in self.world.at_rest(self._stores[store]))
            self._rests += 1
        self._itself[place] = tuple(itself)
        self._else[place] = tuple(other)
        if breaks:
            self._breaks[place] = breaks

    # ---- the search ----

    def explore(self, *, states_max: int = 20_000_000) -> Explored:
        """Everything that can be reached. Each rule that breaks is reported once."""
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # nothing here is garbage before the end, and looking for it is half the time
        try:
            found, whole = self._search(states_max)
            broken = [Broken(rule, self._history(at, rule)) for rule, at in found.items()]
            circle = self._circle() if whole and not broken else ()
            if circle:
                rule = "CAN-07 what happens by itself goes round for ever"
                at = self._path.index(circle[0])
                broken.append(Broken(rule, self._history(at, None, circle[1:])))
        finally:
            if collecting:
                gc.enable()
        return Explored(
            len(self._path),
            len(self._itself),
            self._rests,
            time.process_time() - began,
            tuple(sorted(broken, key=lambda b: len(b.history))),
            frozenset(self._seen),
            whole,
        )

    def _search(self, states_max: int) -> tuple[dict[str, int], bool]:
        """Breadth first; the states in which a rule first breaks, and whether this is all."""
        rest = self._process(self.world.resting)
        first = self._place(self._store(self.world.start), rest, rest)
        budget = sum(n << 4 * i for i, n in enumerate(self.world.budget)) | _GUARD
        places, budgets, parents = self._path, self._left, self._from
        places.append(first)
        budgets.append(budget)
        parents.append(-1)
        seen: dict[int, tuple[int, ...]] = {first: (budget,)}
        found: dict[str, int] = {}
        visited, fork, breaks = self._itself, self._else, self._breaks
        at = 0
        while at < len(places) < states_max:
            place, left = places[at], budgets[at]
            if place not in visited:
                self._visit(place)
            if place in breaks:
                for cost, rule in breaks[place]:
                    if not cost or left & cost * 7:
                        found.setdefault(rule, at)
            reach = [(after, 0) for after in visited[place]]
            reach += fork[place]
            for after, cost in reach:
                now = left
                if cost:
                    if not left & cost * 7:
                        continue
                    now -= cost
                known = seen.get(after)
                if known is None:
                    seen[after] = (now,)
                else:
                    # Seen with at least as much of everything left: no digit borrows its guard.
                    bare = now ^ _GUARD
                    for k in known:
                        if (k - bare) & _GUARD == _GUARD:
                            break
                    else:
                        seen[after] = (*known, now)
                        known = None
                if known is None:
                    places.append(after)
                    budgets.append(now)
                    parents.append(at)
            at += 1
        return found, at == len(places)

    def _circle(self) -> tuple[int, ...]:
        """Places of which each leads to the next by itself, the last one as the first; () if none.

        Whatever leads nowhere by itself is taken away, over and over; what stays goes round.
        """
        out_of = {place: set(targets) for place, targets in self._itself.items()}
        into: dict[int, list[int]] = {}
        for place, targets in out_of.items():
            for after in targets:
                into.setdefault(after, []).append(place)
        ended = [place for place, targets in out_of.items() if not targets]
        while ended:
            place = ended.pop()
            del out_of[place]
            for before in into.get(place, ()):
                out_of[before].discard(place)
                if not out_of[before]:
                    ended.append(before)
        if not out_of:
            return ()
        walked: list[int] = []
        at = next(place for place in self._path if place in out_of)
        while at not in walked:
            walked.append(at)
            at = min(out_of[at])
        return (*walked[walked.index(at) :], at)

    # ---- telling ----

    def _history(
        self, at: int, rule: str | None, beyond: Sequence[int] = ()
    ) -> tuple[Happening, ...]:
        """The moves that led to a state, and ``beyond`` it at no cost; last the one that broke the
        rule, if a move did.
        """
        path = [at]
        while self._from[path[-1]] >= 0:
            path.append(self._from[path[-1]])
        path.reverse()
        moves: list[tuple[str, Move]] = []
        names = ["P1", "P2"]
        states = [(self._path[n], self._left[n]) for n in path]
        states += [(place, self._left[at]) for place in beyond]
        for (here, before), (there, left) in pairwise(states):
            for slot, move, after in self._happenings(here):
                fits = not move.broken and _cost(move) == before - left
                if fits and self._place(*after) == there:
                    moves.append((names[slot] if slot >= 0 else "", move))
                    if after[1] > after[2]:
                        names.reverse()
                    break
            else:
                raise AssertionError("a history cannot be told again")
        for slot, move, _ in self._happenings(self._path[at]):
            if rule in move.broken:
                moves.append((names[slot] if slot >= 0 else "", move))
                break
        told = self.world.told([move for _, move in moves])
        return tuple(
            Happening(who, move.label, events)
            for (who, move), events in zip(moves, told, strict=True)
        )

    def rests(self, every: int = 1) -> Iterable[tuple[Happening, ...]]:
        """A history for every so manieth state at which nothing more happens by itself."""
        at = [n for n, place in enumerate(self._path) if not self._itself.get(place, (1,))]
        for n in at[::every]:
            yield self._history(n, None)

    def _happenings(self, place: int) -> Iterable[tuple[int, Move, tuple[int, int, int]]]:
        store, one, two = self._split(place)
        there = self._stores[store]
        for slot, me, other in ((0, one, two), (1, two, one)):
            for move in self.world.moves(there, self._processes[me]):
                if move.process is None:
                    continue
                mine = self._process(move.process)
                twin = self._after_touch(other, self._touch(move.touch))
                pair = (mine, twin) if slot == 0 else (twin, mine)
                yield slot, move, (self._store(move.store), *pair)
        for move in self.world.outside(there):
            touch = self._touch(move.touch)
            pair = self._after_touch(one, touch), self._after_touch(two, touch)
            yield -1, move, (self._store(move.store), *pair)


# What happens by itself as (store, process, touch), the rest with its cost, and what breaks a rule.
_Steps: TypeAlias = tuple[
    list[tuple[int, int, int]], list[tuple[int, int, int, int]], list[tuple[int, str]]
]


def _cost(move: Move) -> int:
    return 0 if move.spends in (ITSELF, CLIENT) else 1 << 4 * BUDGET.index(move.spends)


# ---- the campaign ----


BASE = worlds.BASE | delivery_worlds.BASE
VARIANTS = variants.VARIANTS | delivery_variants.VARIANTS


def _world(name: str) -> World:
    if name in worlds.BASE:
        return build(worlds.BASE[name])
    if name in delivery_worlds.BASE:
        return delivery_worlds.BASE[name].world()
    variant = VARIANTS[name]
    if isinstance(variant, delivery_variants.Variant):
        return variant.world()
    return build(variant.config, variant.session, variant.driver)


def _run(name: str) -> tuple[str, Explored]:
    return name, Explorer(_world(name)).explore()


def _told(name: str, explored: Explored) -> tuple[bool, str]:
    """Whether it came out as it should, and what to print."""
    figures = (
        f"{explored.states:,} states at {explored.places:,} places in {explored.seconds:.1f} s"
    )
    if name in BASE:
        good = explored.whole and not explored.broken
        verdict = "holds" if good else "BROKEN" if explored.broken else "CUT SHORT"
        told = explored.broken
    else:
        variant = VARIANTS[name]
        told = tuple(b for b in explored.broken if b.rule.startswith(variant.rule))[:1]
        good = bool(told)
        figures = f"{variant.what}; {figures}"
        verdict = "caught" if good else "NOT CAUGHT"
    lines = [f"{verdict}: {name} ({figures})", *(f"  {b}".replace("\n", "\n  ") for b in told)]
    return good, "\n".join(lines)


def _each(names: list[str]) -> Iterable[tuple[str, Explored]]:
    if len(names) == 1:
        yield _run(names[0])
        return
    # A process for each: what a world takes up is given back when it is done.
    with Pool(2, maxtasksperchild=1) as pool:
        yield from pool.imap(_run, names, chunksize=1)


def main(arguments: list[str]) -> int:
    """``base`` (the design holds), ``broken`` (each variant is caught), or names of either."""
    names: list[str] = []
    for argument in arguments or ["base"]:
        group = {"base": list(BASE), "broken": list(VARIANTS)}
        names += group.get(argument, [argument])
    unknown = [n for n in names if n not in BASE and n not in VARIANTS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are", *BASE, *VARIANTS, sep="\n  ")
        return 2
    failed = states = 0
    seconds = 0.0
    for name, explored in _each(names):
        good, text = _told(name, explored)
        print(text, flush=True)
        failed += not good
        states += explored.states
        seconds += explored.seconds
    print(f"{len(names)} explored, {failed} failed: {states:,} states in {seconds:.0f} s of CPU")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
