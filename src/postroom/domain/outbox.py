"""A delivery as a state machine: claimed before the platform is called, never repeated in doubt.

::

    queued  -> sending
    sending -> sent
            -> queued     not started, or told to wait: certainly not sent, no attempt charged
            -> queued     another refusal worth a retry: attempt charged
            -> failed     refused for good, or the attempts are used up
            -> unknown    the call may have begun and no answer was recorded
            -> unrouted   the route went before the call, and nothing owns the session
    queued  -> unrouted   no live route, and nobody to ask for one
    queued  -> failed     too old, or given up by a named operator
    unknown -> sent, queued, failed     by a verdict, or by a named operator
    unrouted, failed -> queued          by a named operator

A delivery is made of parts, one platform message each, sent in order; each part has its own state,
attempts and reference, so doubt about one never repeats another. The delivery's status is its worst
part's. Later deliveries of its session wait while it `blocks`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

PartStatus: TypeAlias = Literal["queued", "sending", "sent", "unknown", "failed", "skipped"]
DeliveryStatus: TypeAlias = Literal["queued", "sending", "sent", "unknown", "failed", "unrouted"]

LOST = "the sender was lost"
_NO_ROUTE = "there was no route"
_WORST: tuple[DeliveryStatus, ...] = ("unknown", "failed", "sending", "queued", "sent")
_replace = msgspec.structs.replace


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of sending. ``attempts_max`` is for one part, counted over restarts."""

    attempts_max: int = 8
    retry_first_ms: int = 2_000
    retry_longest_ms: int = 900_000
    expiry_ms: int = 86_400_000
    reconciles_max: int = 6
    reconcile_first_ms: int = 2_000
    reconcile_longest_ms: int = 900_000
    reconcile_wait_ms: int = 60_000


class Part(msgspec.Struct, frozen=True):
    """``reference`` is the platform's id of the message (None: not known). ``note`` says what the
    receipt adds, such as a fall-back to plain text. ``first_attempt_at`` None: never tried.
    """

    status: PartStatus = "queued"
    attempts: int = 0
    first_attempt_at: int | None = None
    reference: str | None = None
    note: str | None = None
    error: str | None = None


class Delivery(msgspec.Struct, frozen=True):
    """``due``: not to be tried before (Unix ms). ``deferrals`` counts tries that never started, in a
    row. ``unknown_at``: since when a part is in doubt and no verdict has come (None: none is).
    ``handed_over``: the operator's to settle. ``decided_by`` names who last decided by hand.
    """

    parts: tuple[Part, ...]
    due: int
    expires_at: int
    unrouted: bool = False
    deferrals: int = 0
    reconciles: int = 0
    unknown_at: int | None = None
    handed_over: bool = False
    decided_by: str | None = None

    @property
    def status(self) -> DeliveryStatus:
        if self.unrouted:
            return "unrouted"
        present = {p.status for p in self.parts}
        for status in _WORST:
            if status in present:
                return status
        return "failed"

    @property
    def blocks(self) -> bool:
        """Whether later deliveries of the session wait for this one."""
        if self.unrouted:
            return False
        if self.unknown_at is not None and not self.handed_over:
            return True
        return any(p.status in ("queued", "sending") for p in self.parts)

    @property
    def next_part(self) -> int | None:
        """The part that may be sent next; None if none may: all are done, one is being sent, or doubt holds them."""
        if self.unrouted or self.unknown_at is not None:
            return None
        # a verdict may queue a part again while one behind it is being sent
        if any(p.status == "sending" for p in self.parts):
            return None
        return next((i for i, p in enumerate(self.parts) if p.status == "queued"), None)


# ---- what a channel answers ----


class Sent(msgspec.Struct, frozen=True, tag=True):
    reference: str | None
    note: str | None = None


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """Nothing left this machine: no adapter, no connection."""

    reason: str


class RetryAfter(msgspec.Struct, frozen=True, tag=True):
    """The platform refused and said when to come back. 0: at once, which is taken for no time said."""

    delay_ms: int
    reason: str = "the platform asks to wait"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The platform refused: certainly not sent. ``retryable``: it may take it later."""

    reason: str
    retryable: bool = False


class Uncertain(msgspec.Struct, frozen=True, tag=True):
    """The call may have begun, and nobody knows how it ended."""

    reason: str


SendOutcome: TypeAlias = Sent | NotStarted | RetryAfter | Refused | Uncertain


class Found(msgspec.Struct, frozen=True, tag=True):
    reference: str | None


class Absent(msgspec.Struct, frozen=True, tag=True):
    """Proven not to have arrived, and not to be under way any more."""


class CannotTell(msgspec.Struct, frozen=True, tag=True):
    reason: str = "the platform cannot tell"


Verdict: TypeAlias = Found | Absent | CannotTell
Resolution: TypeAlias = Literal["sent", "failed", "queued"]


# ---- the decisions ----


def claim_part(delivery: Delivery, now: int) -> Delivery | None:
    """The delivery with its next part `sending`, the attempt charged; None if none may be sent now."""
    index = delivery.next_part
    if index is None or delivery.due > now:
        return None
    part = delivery.parts[index]
    claimed = _replace(
        part,
        status="sending",
        attempts=part.attempts + 1,
        first_attempt_at=part.first_attempt_at or now,
        error=None,
    )
    return _with(delivery, index, claimed)


def record(
    delivery: Delivery, outcome: SendOutcome, now: int, rules: Rules, jitter: float = 0.0
) -> Delivery:
    """The delivery after its `sending` part was answered. ``jitter`` is from 0 up to 1."""
    index = sending_part(delivery)
    part = delivery.parts[index]
    match outcome:
        case Sent(reference, note):
            sent = _replace(part, status="sent", reference=reference, note=note)
            return _replace(_with(delivery, index, sent), deferrals=0)
        case NotStarted(reason) | RetryAfter(delay_ms=0, reason=reason):
            wait = _backoff(
                delivery.deferrals, rules.retry_first_ms, rules.retry_longest_ms, jitter
            )
            deferred = _replace(delivery, deferrals=delivery.deferrals + 1, due=now + wait)
            return _again(deferred, index, _uncharged(part, reason))
        case RetryAfter(delay_ms, reason):
            waiting = _replace(delivery, due=now + delay_ms)
            return _again(waiting, index, _uncharged(part, reason))
        case Refused(reason, retryable):
            if not retryable or part.attempts >= rules.attempts_max:
                return _fail(delivery, index, reason)
            wait = _backoff(part.attempts - 1, rules.retry_first_ms, rules.retry_longest_ms, jitter)
            again = _replace(part, status="queued", error=reason)
            return _replace(_again(delivery, index, again), due=now + wait)
        case Uncertain(reason):
            return _doubt(delivery, index, reason, now)


def lapse(delivery: Delivery, now: int) -> Delivery:
    """The claim on its `sending` part ran out: whether it was sent is unknown."""
    return _doubt(delivery, sending_part(delivery), LOST, now)


def judge(
    delivery: Delivery, index: int, verdict: Verdict, now: int, rules: Rules, jitter: float = 0.0
) -> Delivery:
    """The delivery after the platform was asked about a part in doubt."""
    part = delivery.parts[index]
    if part.status != "unknown":
        return delivery
    judged = _replace(delivery, unknown_at=None, reconciles=delivery.reconciles + 1)
    match verdict:
        case Found(reference):
            sent = _replace(part, status="sent", reference=reference or part.reference)
            return _settled(_with(judged, index, sent))
        case Absent():
            if part.attempts >= rules.attempts_max:
                return _settled(_fail(judged, index, "it did not arrive, and no attempt is left"))
            again = _replace(part, status="queued", error="it did not arrive")
            return _settled(_replace(_with(judged, index, again), due=now))
        case CannotTell(reason):
            tried = _with(judged, index, _replace(part, error=reason))
            return _replace(tried, handed_over=judged.reconciles >= rules.reconciles_max)


def reconcile_delay_ms(delivery: Delivery, rules: Rules, jitter: float = 0.0) -> int:
    """How long after a verdict that said nothing the platform is asked again."""
    first, longest = rules.reconcile_first_ms, rules.reconcile_longest_ms
    return _backoff(max(0, delivery.reconciles - 1), first, longest, jitter)


def stop_waiting(delivery: Delivery) -> Delivery:
    """No verdict came in time: the rest of the delivery and the lane go on."""
    return _replace(delivery, unknown_at=None)


def hand_over(delivery: Delivery) -> Delivery:
    """Nobody can tell: the operator's to settle."""
    return _replace(delivery, unknown_at=None, handed_over=True)


def unroute(delivery: Delivery) -> Delivery:
    """No route, and nothing that owns the session. A claimed part was not started.

    Where a part is in doubt the delivery stays so, and what of it waited has failed.
    """
    parts = tuple(_uncharged(p, _NO_ROUTE) if p.status == "sending" else p for p in delivery.parts)
    if any(p.status == "unknown" for p in parts):
        return _give_up(_replace(delivery, parts=parts), _NO_ROUTE)
    return _replace(delivery, parts=parts, unrouted=True)


def expire(delivery: Delivery) -> Delivery:
    """Too old: what is still queued fails. What is being sent, or in doubt, is left to its end."""
    return _give_up(delivery, "expired")


def abandon(delivery: Delivery, by: str) -> Delivery:
    """A named operator gives up what is queued."""
    return _replace(_give_up(delivery, "abandoned"), decided_by=by)


def resolve(delivery: Delivery, index: int, as_: Resolution, by: str, now: int) -> Delivery:
    """A named operator settles a part in doubt; `queued` sends it again, on their word."""
    part = delivery.parts[index]
    if part.status != "unknown":
        return delivery
    settled = _replace(delivery, unknown_at=None, decided_by=by, due=now)
    if as_ == "failed":
        return _settled(_fail(settled, index, f"settled by {by}"))
    attempts = 0 if as_ == "queued" else part.attempts
    changed = _replace(part, status=as_, attempts=attempts, error=f"settled by {by}")
    return _settled(_with(settled, index, changed))


def redeliver(delivery: Delivery, by: str, now: int, rules: Rules) -> Delivery:
    """A named operator has what failed or found no route sent again. Sent parts stay sent."""
    parts = tuple(
        _replace(p, status="queued", attempts=0, error=None) if p.status in _REDELIVERED else p
        for p in delivery.parts
    )
    return _replace(
        delivery,
        parts=parts,
        unrouted=False,
        deferrals=0,
        due=now,
        expires_at=now + rules.expiry_ms,
        decided_by=by,
    )


_REDELIVERED = ("failed", "skipped", "queued")


def sending_part(delivery: Delivery) -> int:
    """The part that is being sent; there is one."""
    return next(i for i, p in enumerate(delivery.parts) if p.status == "sending")


def _with(delivery: Delivery, index: int, part: Part) -> Delivery:
    parts = (*delivery.parts[:index], part, *delivery.parts[index + 1 :])
    return _replace(delivery, parts=parts)


def _again(delivery: Delivery, index: int, queued: Part) -> Delivery:
    """One part is to be tried again, unless one before it has failed meanwhile."""
    if any(p.status == "failed" for p in delivery.parts[:index]):
        queued = _replace(queued, status="skipped")
    return _with(delivery, index, queued)


def _uncharged(part: Part, reason: str) -> Part:
    return _replace(part, status="queued", attempts=part.attempts - 1, error=reason)


def _fail(delivery: Delivery, index: int, reason: str) -> Delivery:
    """One part fails for good; the ones behind it, not tried yet, are skipped."""
    failed = _with(delivery, index, _replace(delivery.parts[index], status="failed", error=reason))
    parts = tuple(
        _replace(p, status="skipped") if i > index and p.status == "queued" else p
        for i, p in enumerate(failed.parts)
    )
    return _replace(failed, parts=parts)


def _doubt(delivery: Delivery, index: int, reason: str, now: int) -> Delivery:
    doubtful = _replace(delivery.parts[index], status="unknown", error=reason)
    return _replace(
        _with(delivery, index, doubtful), unknown_at=now, reconciles=0, handed_over=False
    )


def _give_up(delivery: Delivery, reason: str) -> Delivery:
    parts = tuple(
        _replace(p, status="failed", error=reason) if p.status == "queued" else p
        for p in delivery.parts
    )
    return _replace(delivery, parts=parts, unrouted=False)


def _settled(delivery: Delivery) -> Delivery:
    """With the last doubt gone the operator has nothing to settle."""
    if any(p.status == "unknown" for p in delivery.parts):
        return delivery
    return _replace(delivery, handed_over=False)


def _backoff(tries: int, first_ms: int, longest_ms: int, jitter: float) -> int:
    """Doubling, at most ``longest_ms``, less up to a quarter of it."""
    return int(min(first_ms * 2 ** min(tries, 30), longest_ms) * (1 - 0.25 * jitter))
