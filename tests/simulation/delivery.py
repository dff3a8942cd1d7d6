"""The outbox of the world: the shipped delivery machine, its claims, and a platform that is real.

`Lane` is one session's deliveries. `LaneTx` is one transaction as `postroom.scripts.outbox` makes it:
it writes what `postroom.domain.outbox` decided, keeps the two work items of each delivery, and holds
each change against an account of its own (`Account`): what the platform has, what is under way to it,
and whether a call was ever proven to have come to nothing. The machine never sees the account.

Time is kept as what it makes possible. A claim's lease is live, lapsed, or its owner is dead and not
yet found so; a part in doubt is *settled* when its claim's end and the platform's settling time are
over, which nothing that is still under way outlasts. A fence stands or it does not: one that does not
is kept as of the same epoch, for a work row that was deleted counts from the start again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from postroom.domain import outbox as machine
from postroom.domain import work as shipped_work
from postroom.domain.event import EventData
from postroom.domain.ids import ClaimToken, NodeId
from postroom.domain.outbox import Delivery, Part, Resolution, Rules, Verdict
from postroom.domain.work import Fence, Work
from tests.simulation.world import DEAD, ITSELF, LAPSED, LIVE, Move, Store

SEND, ASK = "send", "ask"
NONE, READY = "none", "ready"
HELD, GONE = "held", "gone"
OPEN, HALF, SHUT = "open", "half", "shut"

NOW, LATER, FAR = 1_000, 2_000, 3_000
EPOCH = 1
FENCES = {HELD: Fence(EPOCH, ClaimToken("held")), GONE: Fence(EPOCH, ClaimToken("gone"))}
NODE = NodeId("node")

_change = msgspec.structs.replace


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One small world of deliveries.

    ``parts``: how many each delivery has. ``answers``: what a platform may say besides accepting:
    ``refuse`` for good, ``again`` later, ``silence``. ``asks``: it can be asked about a part.
    ``repeats``: it knows the key of a part again, and asking is repeating. ``gap``: a process may
    stop between the look at its deadline and the call. ``operator``: what a named operator may say:
    a resolution, ``redeliver`` or ``abandon``. ``made`` False: turns make the deliveries.
    """

    parts: tuple[int, ...] = (1, 1)
    attempts_max: int = 2
    reconciles_max: int = 1
    answers: tuple[str, ...] = ("refuse", "again", "silence")
    asks: bool = True
    repeats: bool = False
    gap: bool = False
    operator: tuple[str, ...] = ()
    made: bool = True
    faults: dict[str, int] = {}

    @property
    def rules(self) -> Rules:
        return Rules(attempts_max=self.attempts_max, reconciles_max=self.reconciles_max)


class Account(NamedTuple):
    """What is true of one part. ``waited``, ``astray``: calls under way, with a sender that waits
    for the answer and without. ``copies``: what the platform has; ``allowed``: one, and one more
    for each time an operator had it sent again. ``begun``: a call began, and nothing has proven
    that it came to nothing. ``waived``: its place in the order was given up. ``word``: an operator
    settled it. ``window``: whether the platform still knows its key, if it ever does.
    """

    waited: int = 0
    astray: int = 0
    copies: int = 0
    allowed: int = 1
    begun: bool = False
    settled: bool = False
    waived: bool = False
    word: bool = False
    window: str = OPEN

    @property
    def under_way(self) -> bool:
        return self.waited + self.astray > 0


class Letter(NamedTuple):
    """A delivery with its two work items: none, ready, or claimed under a lease that is so."""

    delivery: Delivery
    send: str
    ask: str
    accounts: tuple[Account, ...]


class Outbox(NamedTuple):
    """``turns`` counts those that ended with something to deliver."""

    letters: tuple[Letter, ...] = ()
    turns: int = 0


class Lost(NamedTuple):
    """What a commit means to senders and askers: the claims that no longer stand, and whose time
    is over."""

    claims: tuple[tuple[str, int], ...]
    late: tuple[int, ...] = ()


# A part that is over is not counted on: taken up again, it begins at none.
_TRIED = ("queued", "sending", "unknown")


def plain(delivery: Delivery) -> Delivery:
    """The delivery without what no decision of this world depends on; times as now or later."""
    parts = tuple(Part(p.status, p.attempts if p.status in _TRIED else 0) for p in delivery.parts)
    doubt = any(p.status == "unknown" for p in parts)
    return _change(
        delivery,
        parts=parts,
        due=NOW if delivery.due <= NOW else LATER,
        expires_at=NOW if delivery.expires_at <= NOW else FAR,
        deferrals=0,
        reconciles=delivery.reconciles if doubt else 0,
        unknown_at=None if delivery.unknown_at is None else NOW,
        decided_by=None,
    )


class Lane:
    """The deliveries of one session. A broken variant overrides a method of it."""

    claim = staticmethod(shipped_work.claim)
    holds = staticmethod(shipped_work.holds)

    # Names of rules that a variant breaks on purpose, as its means and not its end.
    overlook: tuple[str, ...] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules = config.rules
        self.states: list[Outbox] = []
        self._numbers: dict[Outbox, int] = {}
        self._sound: dict[Letter, tuple[str, ...]] = {}
        made = tuple(self.letter(n) for n in config.parts) if config.made else ()
        self.start = Store(0, outbox=self.number(Outbox(made)))

    def letter(self, parts: int) -> Letter:
        delivery = Delivery((Part(),) * parts, due=NOW, expires_at=FAR)
        return Letter(delivery, READY, NONE, (Account(),) * parts)

    def number(self, outbox: Outbox) -> int:
        found = self._numbers.get(outbox)
        if found is None:
            found = self._numbers[outbox] = len(self.states)
            self.states.append(outbox)
        return found

    def outbox(self, store: Store) -> Outbox:
        return self.states[store.outbox]

    def blocks(self, delivery: Delivery) -> bool:
        return delivery.blocks

    def head(self, deliveries: Sequence[Delivery]) -> int | None:
        return next((d for d, x in enumerate(deliveries) if self.blocks(x)), None)

    def claim_part(self, delivery: Delivery) -> Delivery | None:
        return machine.claim_part(delivery, NOW)

    def judge(self, delivery: Delivery, p: int, verdict: Verdict) -> Delivery:
        return machine.judge(delivery, p, verdict, NOW, self.rules)

    def redeliver(self, delivery: Delivery) -> Delivery:
        return machine.redeliver(delivery, "ann", NOW, self.rules)

    def lapse(self, delivery: Delivery) -> Delivery:
        return machine.lapse(delivery, NOW)

    def settling(self, question_settled: bool) -> bool:
        """Whether ``absent`` counts: asked after the claim's end and the settling time."""
        return question_settled

    def kept(self, broken: list[str]) -> tuple[str, ...]:
        return tuple(b for b in broken if not self.overlook or not b.startswith(self.overlook))

    def told(self, moves: Sequence[Move]) -> list[tuple[EventData, ...]]:
        return [move.events for move in moves]

    # ---- what no process does: the platform, time, an operator ----

    def outside(self, store: Store) -> Iterator[Move]:
        for d, letter in enumerate(self.outbox(store).letters):
            yield from self._leases(store, d, letter)
            delivery = letter.delivery
            if delivery.due > NOW:
                yield self._only(store, d, f"the time of d{d} comes", due=NOW)
            expires = self.config.faults.get("expire") and delivery.expires_at > NOW
            if expires and any(p.status == "queued" for p in delivery.parts):
                label = f"d{d} becomes too old"
                yield self._only(store, d, label, spends="expire", expires_at=NOW)
            for p, account in enumerate(letter.accounts):
                yield from self._platform(store, d, p, delivery.parts[p], account)
            for word in self.config.operator:
                yield from self._decides(store, d, word)

    def _only(
        self, store: Store, d: int, label: str, *, spends: str = ITSELF, **fields: object
    ) -> Move:
        tx = LaneTx(self, store)
        letter = tx.letters[d]
        tx.letters[d] = letter._replace(delivery=_change(letter.delivery, **fields))
        return tx.move(label, spends=spends)

    def _leases(self, store: Store, d: int, letter: Letter) -> Iterator[Move]:
        for kind in (SEND, ASK):
            lease = letter.send if kind == SEND else letter.ask
            if lease == DEAD or (lease == LIVE and self.config.faults.get("lapse")):
                tx = LaneTx(self, store)
                tx.set_work(kind, d, LAPSED)
                if kind == SEND:
                    tx.late.add(d)
                if lease == LIVE:
                    label = f"the lease of the claim to {kind} d{d} lapses under its living owner"
                    yield tx.move(label, spends="lapse")
                else:
                    yield tx.move(f"the dead owner of the claim to {kind} d{d} is found dead")

    def _platform(
        self, store: Store, d: int, p: int, part: Part, account: Account
    ) -> Iterator[Move]:
        name = f"d{d}.{p}"
        if account.astray:
            less = account._replace(astray=account.astray - 1)
            tx = LaneTx(self, store)
            tx.set_account(d, p, less)
            tx.arrive(d, p)
            yield tx.move(f"a call for {name} that nobody waits for arrives")
            tx = LaneTx(self, store)
            tx.set_account(d, p, less)
            yield tx.move(f"a call for {name} that nobody waits for is lost")
        if part.status == "unknown" and not account.settled and not account.under_way:
            tx = LaneTx(self, store)
            tx.set_account(d, p, account._replace(settled=True))
            yield tx.move(f"the settling time of {name} is over")
        if self.config.repeats and account.begun and account.window != SHUT:
            window = HALF if account.window == OPEN else SHUT
            if window == HALF or not account.under_way:
                tx = LaneTx(self, store)
                tx.set_account(d, p, account._replace(window=window))
                yield tx.move(f"the window of {name}'s key is {window}", spends="window")

    # ---- a named operator ----

    def _decides(self, store: Store, d: int, word: str) -> Iterator[Move]:
        tx = LaneTx(self, store)
        delivery = tx.delivery(d)
        allowed = {"redeliver": ("failed", "unrouted"), "abandon": ("queued", "unrouted")}
        if delivery.status not in allowed.get(word, ("unknown",)):
            return
        if word == "redeliver":
            after = self.redeliver(delivery)
        elif word == "abandon":
            after = machine.abandon(delivery, "ann")
        else:
            after = self._resolved(delivery, word)  # type: ignore[arg-type]
        tx.write(d, after, word=word)
        self.decided(tx, d)
        yield tx.move(f"a named operator decides on d{d}: {word}", spends="decide")

    def _resolved(self, delivery: Delivery, as_: Resolution) -> Delivery:
        for index, part in enumerate(delivery.parts):
            if part.status == "unknown":
                delivery = machine.resolve(delivery, index, as_, "ann", NOW)
        return _change(delivery, expires_at=FAR) if as_ == "queued" else delivery

    def decided(self, tx: LaneTx, d: int) -> None:
        """A part that is being sent meanwhile is its sender's: the claim on it stays."""
        if not any(p.status == "sending" for p in tx.delivery(d).parts):
            tx.release(d, HELD)

    # ---- what turns owe ----

    def owe(self, outbox: int, *, ended: bool = True, made: bool = True) -> int:
        """A turn has ended with a reply, and the delivery of it is made."""
        letters, turns = self.states[outbox]
        if made:
            letters = (*letters, self.letter(self.config.parts[len(letters)]))
        return self.number(Outbox(letters, turns + ended))

    def missing(self, outbox: int) -> bool:
        letters, turns = self.states[outbox]
        return len(letters) < turns

    # ---- what must hold ----

    def sound(self, letter: Letter) -> tuple[str, ...]:
        """Rules that a delivery breaks as it stands between two transactions."""
        found = self._sound.get(letter)
        if found is None:
            found = self._sound[letter] = tuple(_unsound(letter))
        return found

    def at_rest(self, store: Store) -> list[str]:
        out: list[str] = []
        outbox = self.outbox(store)
        if self.missing(store.outbox):
            out.append("OUT-01 lost: a turn has ended and its reply is in no delivery")
        for letter in outbox.letters:
            delivery = letter.delivery
            final = delivery.status in ("sent", "failed", "unrouted")
            if not final and not (delivery.status == "unknown" and delivery.handed_over):
                out.append("OUT-10 stuck: a delivery is neither settled nor the operator's")
            elif delivery.status != "unknown" and any(
                p.status == "unknown" for p in delivery.parts
            ):
                out.append("OUT-12 a part in doubt is hidden from the operator")
            if letter.send != NONE or letter.ask != NONE:
                out.append("OUT-12 work is left of a delivery that is settled")
        return out


def _unsound(letter: Letter) -> Iterator[str]:
    delivery = letter.delivery
    sending = [p for p in delivery.parts if p.status == "sending"]
    doubt = delivery.status == "unknown" and not delivery.handed_over
    if len(sending) > 1:
        yield "OUT-05 two parts of one delivery are being sent"
    if (letter.send in (LIVE, LAPSED, DEAD)) != bool(sending):
        yield "OUT-12 what is being sent and who has claimed it differ"
    if delivery.unknown_at is not None and not any(p.status == "unknown" for p in delivery.parts):
        yield "OUT-09 the lane waits for a verdict on nothing"
    if delivery.handed_over and not any(p.status == "unknown" for p in delivery.parts):
        yield "OUT-12 the operator is handed a delivery with nothing to settle"
    if doubt != (letter.ask != NONE):
        yield "OUT-14 nobody asks about a doubt"


class LaneTx:
    """One transaction. Nothing is seen of it before `commit` or `move`."""

    def __init__(self, lane: Lane, store: Store) -> None:
        self.home = lane
        self.before = store
        outbox = lane.outbox(store)
        self.letters = list(outbox.letters)
        self.turns = outbox.turns
        self.lost: set[tuple[str, int]] = set()
        self.late: set[int] = set()
        self.broken: list[str] = []

    def delivery(self, d: int) -> Delivery:
        return self.letters[d].delivery

    def account(self, d: int, p: int) -> Account:
        return self.letters[d].accounts[p]

    def set_account(self, d: int, p: int, account: Account) -> None:
        accounts = self.letters[d].accounts
        accounts = (*accounts[:p], account, *accounts[p + 1 :])
        self.letters[d] = self.letters[d]._replace(accounts=accounts)

    def expect(self, holds: bool, rule: str) -> None:
        if not holds and rule not in self.broken:
            self.broken.append(rule)

    def head(self) -> int | None:
        """The delivery that the lane waits for; None: the lane is empty."""
        return self.home.head([x.delivery for x in self.letters])

    # ---- claims ----

    def state(self, kind: str, d: int) -> str:
        return self.letters[d].send if kind == SEND else self.letters[d].ask

    def set_work(self, kind: str, d: int, state: str) -> None:
        self.letters[d] = self.letters[d]._replace(**{kind: state})

    def work(self, kind: str, d: int) -> Work:
        state = self.state(kind, d)
        if state == NONE:
            return Work()
        if state == READY:
            return Work("ready", EPOCH)
        return Work("claimed", EPOCH, FENCES[HELD].token, NODE)

    def lapsed(self, kind: str, d: int) -> bool:
        """Whether the owner is no longer believed alive; so is one that is not there."""
        return self.state(kind, d) not in (LIVE, DEAD)

    def holds(self, kind: str, d: int, fence: str) -> bool:
        return self.home.holds(self.work(kind, d), FENCES[fence])

    def take(self, kind: str, d: int, *, abandoned: bool = False) -> bool:
        """Claims a work item for a fence that nobody had before, if it is to be had."""
        work = self.work(kind, d)
        if kind == SEND:  # a queued delivery's work is ready, whatever a claim left behind
            work = Work("ready", work.epoch)
        lapsed = abandoned or self.lapsed(kind, d)
        taken = self.home.claim(work, NODE, ClaimToken("new"), lapsed=lapsed)
        if taken is None:
            return False
        in_force = self.state(kind, d) == LIVE and not abandoned
        self.expect(not in_force, f"OUT-13 a claim to {kind} that is in force is taken away")
        self.lost.add((kind, d))
        self.set_work(kind, d, LIVE)
        return True

    def release(self, d: int, fence: str) -> None:
        """Lets a claim to send go. ``fence`` is the claim's own, or of somebody who lost it."""
        delivery = self.delivery(d)
        in_force = self.state(SEND, d) == LIVE and fence != HELD
        self.expect(not in_force, "OUT-13 a claim to send that is in force is taken away")
        self.lost.add((SEND, d))
        waits = self.home.blocks(delivery) and delivery.unknown_at is None
        self.set_work(SEND, d, READY if waits else NONE)

    def ready_again(self, d: int) -> None:
        delivery = self.delivery(d)
        waits = self.home.blocks(delivery) and delivery.unknown_at is None
        if self.state(SEND, d) in (NONE, READY):
            self.set_work(SEND, d, READY if waits else NONE)

    # ---- writing, held against the account ----

    def write(
        self, d: int, after: Delivery, *, fence: str = "", proven: bool = False, word: str = ""
    ) -> None:
        """``fence``: of the claim that writes; ``proven``: that the last call came to nothing, on
        what the writer was told; ``word``: an operator's.
        """
        before, after = self.delivery(d), plain(after)
        for p, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
            account = self.account(d, p)
            if old != new:
                if fence == GONE:
                    fits = (old.status, new.status) == ("unknown", "sent")
                    self.expect(fits, "OUT-13 a stale claim changes something")
                if old.status != new.status:
                    account = self._turned(d, p, old.status, new.status, account, proven, word)
            if word and new.status == "queued":
                account = account._replace(waived=True)
            if new.status == "unknown" and old.status == "sending":
                fits = after.unknown_at is not None
                self.expect(fits, "OUT-09 the lane does not wait for a verdict on what is in doubt")
            if new.status == "unknown" and after.unknown_at is None:
                account = account._replace(waived=True)
            if new.status != "unknown":
                account = account._replace(settled=False)
            if new.status == "sent":
                account = account._replace(waived=False)
            self.set_account(d, p, account)
            if new.status == "failed" != old.status:
                waits = any(q.status == "queued" for q in after.parts[p:])
                self.expect(not waits, "OUT-05 a part waits to be sent behind one that failed")
        self.letters[d] = self.letters[d]._replace(delivery=after)
        doubt = after.status == "unknown" and not after.handed_over
        if not doubt:
            if self.state(ASK, d) != NONE:
                self.lost.add((ASK, d))
            self.set_work(ASK, d, NONE)
        elif self.state(ASK, d) == NONE:
            self.set_work(ASK, d, READY)

    def _turned(
        self, d: int, p: int, old: str, new: str, account: Account, proven: bool, word: str
    ) -> Account:
        """The account of a part whose status changes, and the rules that it breaks."""
        self.expect(old != "sent", "OUT-05 a part that was sent is taken up again")
        if word:
            more = account.allowed + (new == "queued")
            return account._replace(allowed=more, begun=False, word=True)
        there = account.copies > 0 or account.under_way
        match new:
            case "sending":
                fits = account.copies < account.allowed
                self.expect(fits, "OUT-04 a part that the platform has is claimed again")
                self.expect(not account.begun, "OUT-04 claimed again with no proof of absence")
                self.expect(self._in_order(d, p), "OUT-09 claimed before its turn in the lane")
            case "sent":
                fits = account.copies > 0 or account.word
                self.expect(fits, "OUT-03 told as sent, and the platform does not have it")
                return account._replace(begun=False)
            case "failed":
                fits = not there or account.word
                self.expect(fits, "OUT-03 told as failed, and the platform has it or will")
            case _:
                pass
        return account._replace(begun=account.begun and not proven)

    def _in_order(self, d: int, p: int) -> bool:
        """Whether all that comes earlier is done, or gave up its place."""
        for e, letter in enumerate(self.letters[: d + 1]):
            if e < d and letter.delivery.unrouted:
                continue
            for q, part in enumerate(letter.delivery.parts):
                earlier = e < d or q < p
                done = part.status in ("sent", "failed", "skipped")
                if earlier and not done and not letter.accounts[q].waived:
                    return False
        return True

    # ---- the platform ----

    def begin_call(self, d: int, p: int, *, claimed: bool = True) -> None:
        account = self.account(d, p)
        self.expect(claimed, "OUT-02 the platform is called before the claim")
        self.set_account(d, p, account._replace(waited=account.waited + 1, begun=True))

    def answer(self, d: int, p: int, *, arrives: bool, astray: bool = False) -> None:
        """What becomes of a call whose sender waits."""
        account = self.account(d, p)
        still = account.astray + astray
        self.set_account(d, p, account._replace(waited=account.waited - 1, astray=still))
        if arrives:
            self.arrive(d, p)

    def arrive(self, d: int, p: int) -> None:
        account = self.account(d, p)
        if self.home.config.repeats and account.copies and account.window != SHUT:
            return  # the platform knows the key, and answers as it did
        copies = account.copies + 1
        status = self.delivery(d).parts[p].status
        self.expect(copies <= account.allowed, "OUT-04 the platform has a part twice")
        given_up = status in ("queued", "failed", "skipped") and not account.word
        self.expect(not given_up, "OUT-03 a part arrives that was proven not to")
        self.set_account(d, p, account._replace(copies=copies))

    # ---- the end ----

    def sound(self) -> None:
        """What may never be seen between two transactions."""
        for letter in self.letters:
            self.broken += (b for b in self.home.sound(letter) if b not in self.broken)

    def commit(self) -> tuple[Store, Lost | None]:
        self.sound()
        number = self.home.number(Outbox(tuple(self.letters), self.turns))
        lost = Lost(tuple(sorted(self.lost)), tuple(sorted(self.late)))
        return self.before._replace(outbox=number), lost if self.lost or self.late else None

    def move(self, label: str, *, spends: str = ITSELF) -> Move:
        store, lost = self.commit()
        return Move(label, store, None, lost, spends, (), self.home.kept(self.broken))
