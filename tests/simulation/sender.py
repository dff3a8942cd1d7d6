"""The tasks of a process that deliver: the sender works off the lane, the asker settles doubt.

What they remember is what they believe: which part they claimed, how their fence stands, whether
their time is over, what they were told. The scripts have the shape of `postroom.scripts.outbox`. Each
committed one also has a twin whose answer is lost: the store has changed, and it runs again.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import msgspec

from postroom.domain import outbox as machine
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    SendOutcome,
    Sent,
    Uncertain,
    Verdict,
)
from tests.simulation.delivery import (
    ASK,
    GONE,
    HELD,
    LIVE,
    NONE,
    NOW,
    OPEN,
    READY,
    SEND,
    Lane,
    LaneTx,
    Lost,
)
from tests.simulation.session import Touch
from tests.simulation.world import DEAD, ITSELF, Move, Store

CLAIMED, CHECKED, CALLS, KNOWS, AGAIN, ABANDONED = (
    "claimed",
    "checked",
    "calls",
    "knows",
    "again",
    "abandoned",
)
ASKS = "asks"
FRESH = "fresh"

OUTCOMES: dict[str, SendOutcome] = {
    "sent": Sent("ref"),
    "not started": NotStarted("nothing left"),
    "told to wait": RetryAfter(1),
    "refused": Refused("no"),
    "refused for now": Refused("busy", retryable=True),
    "uncertain": Uncertain("no answer"),
}
VERDICTS: dict[str, Verdict] = {
    "found": Found("ref"),
    "absent": Absent(),
    "cannot tell": CannotTell(),
}
_UNBEGUN = ("not started", "told to wait")
_CERTAIN = ("not started", "told to wait", "refused", "refused for now")


class Mind(NamedTuple):
    """What a sender or an asker remembers. ``fence``: how its claim on part ``p`` of ``d`` stands.

    ``late``: the time to begin a call is over. ``told``: an outcome or a verdict. ``settled``: what
    it asks about was settled when it claimed the question. ``then``: the claim that a script made
    whose answer was lost, and how it stands. ``script``: what runs again.
    """

    phase: str
    d: int = 0
    p: int = 0
    fence: str = GONE
    late: bool = False
    told: str = ""
    settled: bool = False
    then: tuple[int, str] | None = None
    script: tuple[Hashable, ...] = ()


class _Task(abc.ABC):
    """What senders and askers have in common."""

    kind = SEND

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.config = lane.config

    @abc.abstractmethod
    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]: ...

    def touched(self, memory: Hashable, touch: Hashable) -> Hashable:
        lost = touch.more if isinstance(touch, Touch) else touch
        if not isinstance(lost, Lost):
            return memory
        assert isinstance(memory, Mind)
        if (self.kind, memory.d) in lost.claims:
            if memory.phase == ABANDONED:
                return None
            memory = memory._replace(fence=GONE)
        if memory.d in lost.late and memory.phase == CLAIMED:
            memory = memory._replace(late=True)
        if memory.then is not None and (self.kind, memory.then[0]) in lost.claims:
            memory = memory._replace(then=None)
        return memory

    def orphan(self, store: Store, memory: Hashable) -> Store:
        if not isinstance(memory, Mind):
            return store
        tx = LaneTx(self.lane, store)
        self.hang_up(tx, memory)
        held = [memory.d] if memory.fence == HELD else []
        if memory.then is not None:
            held.append(memory.then[0])
        for d in held:
            if tx.state(self.kind, d) == LIVE:
                tx.set_work(self.kind, d, DEAD)
        return tx.commit()[0]

    def hang_up(self, tx: LaneTx, mind: Mind) -> None:
        """Nobody waits any longer for the answer to its call."""
        if mind.phase == CALLS:
            tx.answer(mind.d, mind.p, arrives=False, astray=True)

    def restarted(self, move: Move) -> Move:
        return move

    def run(
        self,
        store: Store,
        mind: Mind,
        label: str,
        script: str,
        *args: Hashable,
        spends: str = ITSELF,
    ) -> Iterator[tuple[Move, Hashable]]:
        """The script's move, and the one in which its commit answer is lost."""
        tx = LaneTx(self.lane, store)
        after: Mind | None = getattr(self, script)(tx, mind, *args)
        move = tx.move(label, spends=spends)
        nothing = move.store == store and move.touch is None and not move.broken
        if nothing and after is None and mind.phase in ("", ABANDONED):
            return
        yield move, self._held(move, after)
        if not nothing and spends == ITSELF and self.config.faults.get("lost"):
            again = mind._replace(
                phase=AGAIN, script=(label.removesuffix(", again") + ", again", script, *args)
            )
            if after is not None and after.fence == FRESH:
                again = again._replace(then=(after.d, FRESH))
            lost = tx.move(f"{label} (the commit's answer is lost)", spends="lost")
            yield lost, self._held(lost, again)

    def _held(self, move: Move, after: Mind | None) -> Hashable:
        """Its memory after its own commit: a claim made in it stands."""
        if after is None:
            return None
        fresh = after.fence == FRESH
        then = after.then is not None and after.then[1] == FRESH
        memory = self.touched(after, move.touch)
        if isinstance(memory, Mind) and fresh:
            memory = memory._replace(fence=HELD)
        if isinstance(memory, Mind) and then and after.then is not None:
            memory = memory._replace(then=(after.then[0], HELD))
        return memory


class Sender(_Task):
    """Works off the lane: claims, looks at its deadline, calls, records. One part after the other."""

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        mind = memory if isinstance(memory, Mind) else Mind("")
        name = f"d{mind.d}.{mind.p}"
        match mind.phase:
            case "" | "abandoned":
                yield from self.looking(store, mind)
            case "claimed":
                yield from self.beginning(store, mind, name)
            case "checked":
                yield self.call(store, mind, f"calls the platform for {name}")
            case "calls":
                yield from self.answers(store, mind, name)
            case "knows":
                yield from self.run(store, mind, f"records {name}: {mind.told}", "record")
            case "again":
                label, script, *args = mind.script
                was = mind._replace(script=())
                yield from self.run(store, was, str(label), str(script), *args)
            case _:
                raise AssertionError(mind.phase)
        breaks = self.config.faults.get("abandon") and mind.phase != ABANDONED
        if breaks and mind.fence == HELD:
            tx = LaneTx(self.lane, store)
            self.hang_up(tx, mind)
            gone = Mind(ABANDONED, mind.d, mind.p, HELD, told=ABANDONED)
            yield tx.move("BREAKS DOWN, its process lives on", spends="abandon"), gone

    # ---- what it does next ----

    def looking(self, store: Store, mind: Mind) -> Iterator[tuple[Move, Hashable]]:
        yield from self.run(store, mind, "looks at the lane", "claim")
        outbox = self.lane.outbox(store)
        if any(x.delivery.unknown_at is not None for x in outbox.letters):
            label = "looks at the lane, which has waited long enough"
            yield from self.run(store, mind, label, "claim", True)
        if self.config.faults.get("unroute"):
            label = "looks at the lane, and there is no route"
            yield from self.run(store, mind, label, "claim", False, False, spends="unroute")

    def beginning(self, store: Store, mind: Mind, name: str) -> Iterator[tuple[Move, Hashable]]:
        if self.in_time(mind):
            if self.config.gap:
                yield (
                    Move(f"sees that there is time to send {name}", store),
                    mind._replace(phase=CHECKED),
                )
            else:
                yield self.call(store, mind, f"calls the platform for {name}, in time")
            if self.config.faults.get("defer"):
                deferred = mind._replace(phase=KNOWS, told="not started")
                yield Move(f"cannot begin to send {name}", store, spends="defer"), deferred
        else:
            late = mind._replace(phase=KNOWS, told="not started", late=False)
            yield Move(f"is too late to send {name}", store), late

    def in_time(self, mind: Mind) -> bool:
        """The deadline, from a clock that was read before the claim and runs during sleep."""
        return not mind.late

    def call(self, store: Store, mind: Mind, label: str) -> tuple[Move, Hashable]:
        tx = LaneTx(self.lane, store)
        tx.begin_call(mind.d, mind.p)
        return tx.move(label), mind._replace(phase=CALLS, late=False)

    def answers(self, store: Store, mind: Mind, name: str) -> Iterator[tuple[Move, Hashable]]:
        def answer(
            label: str,
            told: str,
            spends: str = ITSELF,
            *,
            arrives: bool = False,
            astray: bool = False,
        ) -> tuple[Move, Hashable]:
            tx = LaneTx(self.lane, store)
            tx.answer(mind.d, mind.p, arrives=arrives, astray=astray)
            return tx.move(label, spends=spends), mind._replace(phase=KNOWS, told=told)

        yield answer(f"is told that {name} was accepted", "sent", arrives=True)
        answers = self.config.answers
        if "refuse" in answers:
            yield answer(f"is told that {name} is refused", "refused")
        if "again" in answers:
            yield answer(f"is told that {name} is refused for now", "refused for now")
        if "silence" in answers:
            yield answer(f"hears nothing of {name} in time", "uncertain", astray=True)
        if self.config.faults.get("defer"):
            yield answer(f"is told to wait with {name}", "told to wait", "defer")

    # ---- the scripts ----

    def claim(self, tx: LaneTx, mind: Mind, over: bool = False, routed: bool = True) -> Mind | None:
        return self.claim_next(tx, mind, over, routed)

    def record(self, tx: LaneTx, mind: Mind) -> Mind | None:
        d, p = mind.d, mind.p
        delivery = tx.delivery(d)
        if not tx.holds(SEND, d, mind.fence):
            if mind.told == "sent" and delivery.parts[p].status == "unknown":
                found = self.lane.judge(delivery, p, Found("ref"))
                tx.write(d, found, fence=GONE)
                tx.ready_again(d)
        elif delivery.parts[p].status == "sending":
            following = self.recorded(tx, mind)
            if following is not None:
                return following
        else:  # running again, and the next part was claimed
            late = tx.state(SEND, d) != LIVE
            return Mind(CLAIMED, d, machine.sending_part(delivery), mind.fence, late)
        return self.claim_next(tx, mind)

    def recorded(self, tx: LaneTx, mind: Mind) -> Mind | None:
        """One part's result and the claim of the next; else the claim is let go."""
        d, p = mind.d, mind.p
        proven = mind.told in _CERTAIN and mind.fence == HELD
        outcome = OUTCOMES[mind.told]
        recorded = machine.record(tx.delivery(d), outcome, NOW, self.lane.rules)
        if mind.told in _UNBEGUN:
            spared = recorded.parts[p].attempts < tx.delivery(d).parts[p].attempts
            tx.expect(spared, "OUT-06 an attempt is charged for what was not begun")
        if recorded.parts[p].status == "sent" and recorded.next_part is not None:
            following = self.lane.claim_part(recorded)
            if following is not None and tx.state(SEND, d) == LIVE:
                tx.write(d, recorded, fence=mind.fence, proven=proven)
                tx.write(d, following, fence=mind.fence)
                return Mind(CLAIMED, d, machine.sending_part(following), mind.fence)
        tx.write(d, recorded, fence=mind.fence, proven=proven)
        tx.release(d, mind.fence)
        return None

    def claim_next(
        self, tx: LaneTx, mind: Mind, over: bool = False, routed: bool = True
    ) -> Mind | None:
        """Looks at the head of the lane until something can be said of it."""
        while True:
            d = tx.head()
            if d is None:
                return None
            delivery = tx.delivery(d)
            if any(p.status == "sending" for p in delivery.parts):
                if mind.then == (d, HELD):  # running again
                    late = tx.state(SEND, d) != LIVE
                    return Mind(CLAIMED, d, machine.sending_part(delivery), HELD, late)
                abandoned = (mind.told, mind.d, mind.fence) == (ABANDONED, d, HELD)
                if not abandoned and not tx.lapsed(SEND, d):
                    return None
                tx.write(d, self.lane.lapse(delivery))
                tx.release(d, HELD if abandoned else GONE)
                continue
            if delivery.unknown_at is not None:
                if not over:
                    return None
                tx.write(d, machine.stop_waiting(delivery))
                goes_on = tx.delivery(d).unknown_at is None
                tx.expect(goes_on, "OUT-09 the lane waits longer than its bound")
                tx.ready_again(d)
                over = False
                continue
            if delivery.expires_at <= NOW:
                tx.write(d, machine.expire(delivery))
                tx.release(d, GONE)
                continue
            if not routed:
                tx.write(d, machine.unroute(delivery))
                tx.release(d, GONE)
                routed = True
                continue
            following = self.lane.claim_part(delivery)
            if following is None:
                return None
            tx.take(SEND, d)
            tx.write(d, following)
            return Mind(CLAIMED, d, machine.sending_part(following), FRESH)


class Asker(_Task):
    """Asks about parts in doubt, until a verdict says something or the operator has to."""

    kind = ASK

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        mind = memory if isinstance(memory, Mind) else Mind("")
        if mind.phase in ("", ABANDONED):
            for d, letter in enumerate(self.lane.outbox(store).letters):
                if letter.ask != NONE:
                    yield from self.run(store, mind, f"takes up the doubt of d{d}", "question", d)
            return
        assert isinstance(memory, Mind)
        name = f"d{memory.d}.{memory.p}"
        match memory.phase:
            case "asks":
                yield from self.asks(store, memory, name)
            case "knows":
                label = f"records the verdict on {name}: {memory.told}"
                yield from self.run(store, memory, label, "verdict")
            case "again":
                label, script, *args = memory.script
                was = memory._replace(script=())
                yield from self.run(store, was, str(label), str(script), *args)
            case _:
                raise AssertionError(memory.phase)

    def asks(self, store: Store, mind: Mind, name: str) -> Iterator[tuple[Move, Hashable]]:
        account = self.lane.outbox(store).letters[mind.d].accounts[mind.p]

        def told(verdict: str) -> Mind:
            return mind._replace(phase=KNOWS, told=verdict)

        if not self.config.repeats:
            truth = "found" if account.copies else "absent"
            yield Move(f"asks about {name}: {truth}", store), told(truth)
        elif self.may_repeat(account.window):
            tx = LaneTx(self.lane, store)
            tx.arrive(mind.d, mind.p)
            yield tx.move(f"repeats {name} with its key: it is there"), told("found")
            tx = LaneTx(self.lane, store)
            tx.set_account(mind.d, mind.p, account._replace(astray=min(2, account.astray + 1)))
            yield tx.move(f"repeats {name} with its key: no answer"), told("cannot tell")
            return
        yield Move(f"asks about {name}: nobody can tell", store), told("cannot tell")

    def may_repeat(self, window: str) -> bool:
        return window == OPEN

    def question(self, tx: LaneTx, mind: Mind, d: int) -> Mind | None:
        delivery = tx.delivery(d)
        if delivery.status != "unknown" or delivery.handed_over:
            return None
        if not self.config.asks:
            tx.write(d, machine.hand_over(delivery))
            tx.ready_again(d)
            return None
        p = next(i for i, part in enumerate(delivery.parts) if part.status == "unknown")
        settled = tx.account(d, p).settled
        if mind.then == (d, HELD):  # running again
            return Mind(ASKS, d, p, HELD, settled=settled)
        # Its process knows a claim that no task of its own uses any longer.
        abandoned = (mind.told, mind.d, mind.fence) == (ABANDONED, d, HELD)
        if not tx.take(ASK, d, abandoned=abandoned):
            return None
        return Mind(ASKS, d, p, FRESH, settled=settled)

    def stands(self, tx: LaneTx, mind: Mind) -> bool:
        return tx.holds(ASK, mind.d, mind.fence)

    def verdict(self, tx: LaneTx, mind: Mind) -> Mind | None:
        d, p, told = mind.d, mind.p, mind.told
        delivery = tx.delivery(d)
        if delivery.parts[p].status != "unknown":
            left = mind.fence == HELD
            return Mind(ABANDONED, d, p, HELD, told=ABANDONED) if left else None
        if not self.stands(tx, mind):
            if told != "found":
                return None
        elif told == "absent" and not self.lane.settling(mind.settled):
            told = "cannot tell"
        judged = self.lane.judge(delivery, p, VERDICTS[told])
        if judged.handed_over:
            judged = machine.hand_over(judged)
        if told == "cannot tell" and not judged.handed_over:
            judged = msgspec.structs.replace(judged, unknown_at=delivery.unknown_at)
        proven = told == "absent" and mind.settled and tx.account(d, p).settled
        tx.write(d, judged, fence=mind.fence, proven=proven)
        if tx.state(ASK, d) != NONE:
            tx.lost.add((ASK, d))
            tx.set_work(ASK, d, READY)
        tx.ready_again(d)
        return None
