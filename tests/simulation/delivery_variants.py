"""Sending with one rule taken out: each variant changes one function, and must be caught.

As in `tests.simulation.variants`: ``rule`` is the contract its counter-example must name, and what a
variant overlooks is broken by its means, so that what is told is the harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from postroom.domain import outbox as machine
from postroom.domain.event import EndKind
from postroom.domain.outbox import Delivery, Verdict
from postroom.domain.turn import Command, TakeOver
from tests.simulation.delivery import GONE, HELD, NOW, SEND, Config, Lane, LaneTx
from tests.simulation.delivery_worlds import Setting
from tests.simulation.driver import AGAIN, Driver
from tests.simulation.sender import CALLS, Asker, Mind, Sender
from tests.simulation.session import Config as SessionConfig
from tests.simulation.session import Tx
from tests.simulation.speaking import Speaker, Speaking, completed
from tests.simulation.world import World

_change = msgspec.structs.replace


# ---- stuck or lost ----


class OwesLater(Speaking):
    """A turn's end does not make the delivery."""

    overlook = ("OUT-01 a turn has ended",)

    def owe(self, tx: Tx) -> None:
        tx.outbox = self.lane.owe(tx.outbox, made=False)


class MakesItLater(Speaker):
    """The delivery is made in the transaction after the turn's end."""

    def finish(
        self,
        tx: Tx,
        driver: Driver,
        kind: EndKind,
        text: str,
        calls: str = "",
        twist: str = "",
    ) -> Driver | None:
        after = super().finish(tx, driver, kind, text, calls, twist)
        if completed(tx):
            return driver._replace(phase=AGAIN, script=("makes the delivery", "make"))
        return after

    def make(self, tx: Tx, driver: Driver) -> Driver | None:
        tx.outbox = self.session.lane.owe(tx.outbox, ended=False)
        return self.next_turn(tx, driver)


class UnknownBlocks(Lane):
    """What is in doubt holds the lane, the operator's too."""

    def blocks(self, delivery: Delivery) -> bool:
        return delivery.blocks or any(p.status == "unknown" for p in delivery.parts)


# ---- double send ----


class Twice(Lane):
    """Nothing is told but the harm: a second copy."""

    overlook = ("OUT-02", "OUT-03", "OUT-04 a part", "OUT-04 claimed", "OUT-13")


class ClaimsLater(Sender):
    """The platform is called first, and the claim recorded after."""

    def claim_next(
        self, tx: LaneTx, mind: Mind, over: bool = False, routed: bool = True
    ) -> Mind | None:
        d = tx.head()
        following = d is not None and self.lane.claim_part(tx.delivery(d))
        if d is None or not following:
            return super().claim_next(tx, mind, over, routed)
        p = machine.sending_part(following)
        tx.begin_call(d, p, claimed=False)
        return Mind(CALLS, d, p)

    def record(self, tx: LaneTx, mind: Mind) -> Mind | None:
        following = self.lane.claim_part(tx.delivery(mind.d))
        if following is not None:
            tx.take(SEND, mind.d)
            tx.write(mind.d, following)
            self.recorded(tx, mind._replace(fence=HELD))
        return None


class RequeuesBlindly(Twice):
    """A claim that ran out puts its part back into the queue."""

    def lapse(self, delivery: Delivery) -> Delivery:
        lost = machine.lapse(delivery, NOW)
        parts = tuple(
            _change(p, status="queued" if q.status == "sending" else p.status)
            for p, q in zip(lost.parts, delivery.parts, strict=True)
        )
        return _change(lost, parts=parts, unknown_at=None)


class UnfencedVerdict(Asker):
    """A verdict is written whoever holds the question by now."""

    def stands(self, tx: LaneTx, mind: Mind) -> bool:
        return True


class StaleResult(Sender):
    """A result is written to whatever is being sent by then."""

    def record(self, tx: LaneTx, mind: Mind) -> Mind | None:
        d, p = mind.d, mind.p
        if mind.fence == GONE and tx.delivery(d).parts[p].status == "sending":
            self.recorded(tx, mind)
            return None
        return super().record(tx, mind)


class NoDeadline(Sender):
    """The time is not looked at before the call."""

    def in_time(self, mind: Mind) -> bool:
        return True


class NoSettling(Twice):
    """``absent`` counts whenever it was asked."""

    def settling(self, question_settled: bool) -> bool:
        return True


class RepeatsForEver(Asker):
    """A key is repeated however long ago the first attempt was."""

    def may_repeat(self, window: str) -> bool:
        return True


# ---- by a rule of its own ----


class TakeOverMarks(Speaking):
    """Whoever takes a session over makes unknown what is being sent of it."""

    def noted(self, tx: Tx, command: Command) -> None:
        super().noted(tx, command)
        if not isinstance(command, TakeOver):
            return
        lane = LaneTx(self.lane, tx.before._replace(outbox=tx.outbox))
        for d in range(len(lane.letters)):
            if any(p.status == "sending" for p in lane.delivery(d).parts):
                lane.write(d, machine.lapse(lane.delivery(d), NOW))
                lane.release(d, GONE)
        store, lost = lane.commit()
        tx.outbox, tx.more = store.outbox, lost
        tx.broken += lane.broken


class DecisionLetsGo(Lane):
    """A decision on a part in doubt lets go of the claim on the part that is being sent."""

    overlook = ("OUT-12",)

    def decided(self, tx: LaneTx, d: int) -> None:
        tx.release(d, GONE)


class AnyOrder(Lane):
    """Whatever is queued may be claimed, whoever is before it."""

    overlook = ("OUT-12",)

    def head(self, deliveries: Sequence[Delivery]) -> int | None:
        queued = (d for d, x in enumerate(deliveries) if x.status == "queued")
        return next(queued, super().head(deliveries))


class RepeatsSent(Lane):
    """What is redelivered is redelivered whole."""

    def redeliver(self, delivery: Delivery) -> Delivery:
        again = super().redeliver(delivery)
        return _change(again, parts=tuple(_change(p, status="queued") for p in again.parts))


class NotCharged(Lane):
    """A claim charges no attempt."""

    def claim_part(self, delivery: Delivery) -> Delivery | None:
        claimed = super().claim_part(delivery)
        if claimed is None:
            return None
        pairs = zip(claimed.parts, delivery.parts, strict=True)
        return _change(claimed, parts=tuple(_change(p, attempts=q.attempts) for p, q in pairs))


class AsksForEver(Lane):
    """Verdicts that say nothing are not counted."""

    def judge(self, delivery: Delivery, p: int, verdict: Verdict) -> Delivery:
        judged = super().judge(delivery, p, verdict)
        return _change(judged, reconciles=0, handed_over=False)


class Variant(msgspec.Struct, frozen=True):
    """``what`` was changed, in which small world, and the ``rule`` that must be named."""

    what: str
    rule: str
    setting: Setting

    def world(self) -> World:
        return self.setting.world()

    def sound(self) -> World:
        """The same world with the rule left in."""
        config = self.setting.config
        config = _change(config, gap=config.gap and config.repeats)
        return Setting(config, self.setting.session).world()


def _lane(*parts: int, lane: type[Lane] = Lane, **options: object) -> Setting:
    tasks = {k: options.pop(k) for k in ("sender", "asker") if k in options}
    fields = {k: options.pop(k) for k in tuple(options) if k in Config.__struct_fields__}
    config = Config(parts=parts, faults=options, **fields)  # type: ignore[arg-type]
    return Setting(config, lane=lane, **tasks)  # type: ignore[arg-type]


def _turns(
    kinds: str, speaking: type[Speaking], speaker: type[Speaker] = Speaker, **faults: int
) -> Setting:
    config = Config(parts=(1,) * len(kinds), made=False, answers=(), faults=faults)
    session = SessionConfig(kinds=kinds, steps=0)
    return Setting(config, session, speaking=speaking, speaker=speaker)


_SILENT = ("silence",)
_FOR_EVER = "CAN-07 what happens by itself goes round for ever"
_TWICE = "OUT-04 the platform has a part twice"

VARIANTS: dict[str, Variant] = {
    "delivery_after_turn": Variant(
        "a reply's delivery is made in the transaction after turn/end",
        "OUT-01 lost",
        _turns("F", OwesLater, MakesItLater, crash=1),
    ),
    "unknown_blocks": Variant(
        "what the operator has to settle holds the lane",
        "OUT-10",
        _lane(1, 1, lane=UnknownBlocks, answers=_SILENT, attempts_max=1),
    ),
    "claim_after_io": Variant(
        "the platform is called before the claim is written",
        _TWICE,
        _lane(1, lane=Twice, sender=ClaimsLater, crash=1),
    ),
    "blind_requeue": Variant(
        "a claim that ran out goes back to queued, with no verdict",
        _TWICE,
        _lane(1, lane=RequeuesBlindly, crash=1),
    ),
    "unfenced_verdict": Variant(
        "a verdict is written without its claim",
        _TWICE,
        _lane(1, lane=Twice, asker=UnfencedVerdict, answers=_SILENT, attempts_max=3, lapse=1),
    ),
    "stale_result": Variant(
        "a result is written without its claim",
        _TWICE,
        _lane(1, lane=Twice, sender=StaleResult, attempts_max=3, lapse=1),
    ),
    "no_deadline": Variant(
        "the call is begun however late it is",
        _TWICE,
        _lane(1, lane=Twice, sender=NoDeadline, lapse=1),
    ),
    "no_settling": Variant(
        "absent counts while a call may be under way",
        _TWICE,
        _lane(1, lane=NoSettling, answers=_SILENT),
    ),
    "repeat_out_of_window": Variant(
        "a key is repeated after the platform forgot it",
        _TWICE,
        _lane(1, lane=Twice, asker=RepeatsForEver, repeats=True, answers=_SILENT, window=2),
    ),
    "gap_without_key": Variant(
        "a process stops between the deadline's check and the call, and no key protects",
        _TWICE,
        _lane(1, lane=Twice, gap=True, lapse=1),
    ),
    "takeover_marks_sending": Variant(
        "a session's take-over makes unknown what is being sent",
        "OUT-13",
        _turns("FF", TakeOverMarks, lapse=1),
    ),
    "decision_lets_go": Variant(
        "an operator's decision on one part lets go of the claim on another",
        "OUT-13",
        _lane(
            2,
            lane=DecisionLetsGo,
            operator=("sent",),
            answers=_SILENT,
            asks=False,
            attempts_max=1,
            decide=1,
        ),
    ),
    "any_order": Variant(
        "a delivery may be claimed before those made earlier",
        "OUT-09",
        _lane(1, 1, lane=AnyOrder, answers=("again",)),
    ),
    "redelivers_sent": Variant(
        "what is redelivered is sent whole, what had arrived too",
        "OUT-05",
        _lane(2, lane=RepeatsSent, answers=("refuse",), operator=("redeliver",), decide=1),
    ),
    "attempt_not_charged": Variant(
        "a claim charges no attempt", _FOR_EVER, _lane(1, lane=NotCharged, answers=("again",))
    ),
    "asks_for_ever": Variant(
        "verdicts that say nothing are not counted",
        _FOR_EVER,
        _lane(1, lane=AsksForEver, answers=_SILENT, attempts_max=1),
    ),
}
