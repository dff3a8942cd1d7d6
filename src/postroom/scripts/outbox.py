"""The outbox's scripts: send, claim, record, reconcile, and what an operator decides.

Each locks the session first, for a lane is one session's and a changed delivery is told to its log.
A claim is committed before the platform is called; what was answered is recorded under the claim's
fence. The result of one part and the claim of the next are one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from postroom.config import Limits
from postroom.domain import outbox as machine
from postroom.domain.conversation import ConversationKey
from postroom.domain.event import (
    AssistantReply,
    DeliveryQueued,
    DeliveryStatusChanged,
    HistoryReplaced,
    PartReceipt,
    decode_data,
)
from postroom.domain.ids import ClaimToken, DeliveryId, NodeId, SessionId
from postroom.domain.message import MediaBlock, text_of
from postroom.domain.outbox import (
    Delivery,
    Found,
    Part,
    Resolution,
    Rules,
    SendOutcome,
    Sent,
    Verdict,
)
from postroom.domain.parcel import Parcel, checked, history_text
from postroom.domain.work import Fence, Work, claim, holds
from postroom.errors import InputError, PostroomError, StaleClaim
from postroom.ports.channel import PartKind
from postroom.ports.store import Tx
from postroom.scripts.routes import Address, ToConnection, ToConversation, is_owned, resolve
from postroom.scripts.sending import (
    ASK,
    SEND,
    DeliveryRow,
    PartRow,
    read_delivery,
    read_parts,
)
from postroom.scripts.sending import machine as as_machine
from postroom.scripts.session import (
    LockedSession,
    check_fence,
    lapsed,
    lock_session,
    read_work,
    ready_work,
    write_work,
)

_encode = msgspec.json.Encoder().encode


class Serves(msgspec.Struct, frozen=True):
    """What a process can deliver to, as data and two pure functions.

    ``channels`` are those it runs; ``cut`` cuts a text to a channel's measure; ``connections`` are
    the live routes it holds. ``asks`` says of each channel whether a part in doubt can be settled
    there. ``active`` are its claims in use on what it asks for: another of its own was abandoned.
    """

    node: NodeId
    channels: frozenset[str]
    connections: frozenset[str]
    cut: Callable[[str, str], Sequence[str]]
    asks: Mapping[str, bool]
    rules: Rules
    active: frozenset[str] = frozenset()


class Claimed(msgspec.Struct, frozen=True):
    """One part to be sent now: `sending` is on disk, the attempt charged.

    ``lease_left_ms``: how long from the claim on its owner is believed alive without another sign.
    """

    session_id: SessionId
    delivery_id: DeliveryId
    fence: Fence
    address: Address
    kind: PartKind
    index: int
    count: int
    text: str
    media: MediaBlock | None
    reply_to: str | None
    attempt: int
    first_attempt_at: int
    lease_left_ms: int


class Wait(msgspec.Struct, frozen=True):
    """Nothing of this lane may be sent now; look again at ``until`` (Unix ms; None: at a hint).

    It is the store's time, as ``now`` is: a process whose own clock differs goes by what is left.
    """

    until: int | None
    now: int = 0

    @property
    def left_ms(self) -> int | None:
        return max(1, self.until - self.now) if self.until is not None else None


Next: TypeAlias = Claimed | Wait | None


class NotYours(PostroomError):
    """The session belongs to another principal."""

    code = "not_yours"


class Handle(msgspec.Struct, frozen=True, rename="camel"):
    """A delivery in the outbox: whether it arrives is the outbox's to see to, and nobody else's."""

    delivery_id: DeliveryId
    status: str


# ---- making deliveries ----


def send(
    tx: Tx,
    session_id: SessionId,
    parcel: Parcel,
    *,
    turn: int | None = None,
    fence: Fence | None = None,
    as_owner: str | None = None,
) -> Handle:
    """Puts a parcel into a session's outbox, and into its history where its policy says so.

    ``turn`` with ``fence``: it is said in this open turn. ``as_owner``: only into a session of this
    principal. Running again finds the delivery made.

    Raises:
        NotYours: the session is another principal's.
        StaleClaim: the turn is over, or driven by somebody else.
    """
    parcel = checked(parcel)
    session = lock_session(tx, session_id)
    known = read_delivery(tx, "id = :id", {"id": parcel.id})
    if known is not None:
        return Handle(DeliveryId(known.id), known.status)
    if as_owner is not None and session.owner != as_owner:
        raise NotYours(f"session {session_id} belongs to somebody else")
    if fence is not None:
        check_fence(session, fence)
        if session.state.turn is None or session.state.turn.number != turn:
            raise StaleClaim(f"turn {turn} of {session_id} is over")
    if parcel.policy != "transient":
        session.append(
            (
                DeliveryQueued(
                    parcel.id,
                    parcel.kind,
                    history_text(parcel),
                    parcel.policy,
                    turn,
                    tuple(p.media.artifact for p in parcel.pieces if p.media is not None),
                    parcel.source,
                    parcel.metadata,
                ),
            )
        )
    session.owe(parcel, turn)
    session.save()
    made = read_delivery(tx, "id = :id", {"id": parcel.id})
    assert made is not None
    return Handle(parcel.id, made.status)


# ---- claiming and recording ----


def lanes_to_serve(tx: Tx, after: int, limit: int) -> list[tuple[int, SessionId]]:
    """Sessions with a delivery that is not done: their row ids and ids, above ``after``, in order."""
    rows = tx.execute(
        "SELECT session.sid, session.id FROM session WHERE session.sid IN"
        " (SELECT DISTINCT sid FROM delivery WHERE blocks = 1 AND sid > :after"
        " ORDER BY sid LIMIT :limit) ORDER BY session.sid",
        {"after": after, "limit": limit},
    )
    return [(r[0], SessionId(r[1])) for r in rows]


def claim_delivery(tx: Tx, session_id: SessionId, token: ClaimToken, serves: Serves) -> Next:
    """Claims the next part of a session's lane, if there is one that may be sent from here now.

    Running again finds its own claim. None: the lane is empty.
    """
    session = lock_session(tx, session_id)
    found = _claim_next(session, token, serves)
    session.save()
    return found


def record_outcome(
    tx: Tx,
    claimed: Claimed,
    outcome: SendOutcome,
    jitter: float,
    token: ClaimToken,
    serves: Serves,
) -> Next:
    """Commits what the platform said of a claimed part, and claims what comes next in the lane.

    ``token`` is for that next claim, should it be another delivery's. A claim that was lost records
    nothing, but that a part in doubt is known to have arrived.
    """
    session = lock_session(tx, claimed.session_id)
    row, parts = _load(tx, claimed.delivery_id)
    work = read_work(tx, SEND, claimed.delivery_id)
    delivery = as_machine(row, parts)
    if not holds(work, claimed.fence):
        if isinstance(outcome, Sent) and delivery.parts[claimed.index].status == "unknown":
            found_there = Found(outcome.reference)
            judged = machine.judge(
                delivery, claimed.index, found_there, tx.now(), serves.rules, jitter
            )
            _write(session, row, parts, judged)
            _ready_again(tx, row, judged)
    elif delivery.parts[claimed.index].status == "sending":
        recorded = machine.record(delivery, outcome, tx.now(), serves.rules, jitter)
        following = _go_on(session, row, parts, recorded, claimed, serves)
        if following is not None:
            session.save()
            return following
    else:  # running again, and the next part was claimed
        return _claimed(session, row, parts, delivery, claimed.fence, claimed.address)
    found = _claim_next(session, token, serves)
    session.save()
    return found


def _go_on(
    session: LockedSession,
    row: DeliveryRow,
    parts: list[PartRow],
    recorded: Delivery,
    claimed: Claimed,
    serves: Serves,
) -> Claimed | None:
    """The next part of the same delivery under the same claim; else the claim is let go."""
    tx = session.tx
    if recorded.parts[claimed.index].status == "sent" and recorded.next_part is not None:
        until = _lease_end(tx, serves)
        address = resolve(tx, session.sid, claimed.address.spelled(), session.target)
        following = machine.claim_part(recorded, tx.now())
        goes_on = address == claimed.address and _can(serves, claimed.address)
        if following is not None and until is not None and goes_on:
            _write(session, row, parts, following, until=until)
            return _claimed(session, row, parts, following, claimed.fence, claimed.address, until)
    _write(session, row, parts, recorded)
    _release(tx, row, recorded)
    return None


def _claim_next(session: LockedSession, token: ClaimToken, serves: Serves) -> Next:
    """Looks at the head of the lane until something can be said of it."""
    tx = session.tx
    lease_end = _lease_end(tx, serves)
    if lease_end is None:
        return Wait(None)
    while True:
        row = read_delivery(
            tx, "sid = :sid AND blocks = 1 ORDER BY ord LIMIT 1", {"sid": session.sid}
        )
        if row is None:
            return None
        parts = read_parts(tx, row.id)
        delivery = as_machine(row, parts)
        if row.decided_by is None:  # how old it may become is a setting of who sends it
            expires_at = row.created_at + serves.rules.expiry_ms
            delivery = msgspec.structs.replace(delivery, expires_at=expires_at)
        now = tx.now()
        work = read_work(tx, SEND, row.id)
        if any(p.status == "sending" for p in delivery.parts):
            if work.token == token:  # running again
                fence, address = Fence(work.epoch, token), _address_of(row, serves)
                return _claimed(session, row, parts, delivery, fence, address)
            abandoned = work.owner == serves.node and work.token not in serves.active
            if not abandoned and not lapsed(tx, work.owner):
                return Wait(None)
            lost = machine.lapse(delivery, now)
            sending = parts[machine.sending_part(delivery)]
            _write(session, row, parts, lost, until=sending.until if abandoned else None)
            _release(tx, row, lost)
            continue
        if delivery.unknown_at is not None:
            until = delivery.unknown_at + serves.rules.reconcile_wait_ms
            if now < until:
                return Wait(until, now)
            goes_on = machine.stop_waiting(delivery)
            _write(session, row, parts, goes_on)
            _ready_again(tx, row, goes_on)
            continue
        if now >= delivery.expires_at:
            expired = machine.expire(delivery)
            _write(session, row, parts, expired)
            _release(tx, row, expired)
            continue
        begun = any(p.status in ("sent", "unknown") for p in delivery.parts)
        wanted = row.address if begun else row.route  # what has begun in one place ends there
        address = resolve(tx, session.sid, wanted, session.target)
        if address is None:
            unrouted = machine.unroute(delivery)
            _write(session, row, parts, unrouted)
            _release(tx, row, unrouted)
            continue
        if not _can(serves, address):
            return Wait(delivery.expires_at, now)
        if delivery.due > now:
            return Wait(min(delivery.due, delivery.expires_at), now)
        if isinstance(address, ToConversation) and _is_untouched(delivery):
            parts = _cut(session, row, parts, address.channel, serves)
            cut = tuple(p.part for p in parts)
            delivery = msgspec.structs.replace(delivery, parts=cut)
        following = machine.claim_part(delivery, now)
        assert following is not None
        taken = claim(_as_ready(work), serves.node, token, lapsed=False)
        assert taken is not None
        write_work(tx, SEND, row.id, taken)
        _write(session, row, parts, following, until=lease_end, to=address)
        fence = Fence(taken.epoch, token)
        return _claimed(session, row, parts, following, fence, address, lease_end)


def _as_ready(work: Work) -> Work:
    """A queued delivery's work is ready; what a claim left behind gives way to the next one."""
    return Work("ready", work.epoch)


def _can(serves: Serves, address: Address) -> bool:
    if isinstance(address, ToConnection):
        return address.node == serves.node and address.token in serves.connections
    return address.channel in serves.channels


def _address_of(row: DeliveryRow, serves: Serves) -> Address:
    """Where a claim of this process's own goes, whatever became of the route since."""
    assert row.address is not None
    conversation = _spelled(row.address)
    if conversation is not None:
        return conversation
    return ToConnection(ClaimToken(row.address.split(" ", 1)[1]), "", serves.node)


def _is_untouched(delivery: Delivery) -> bool:
    """Nothing of it was ever begun to be sent, so its parts may still be cut otherwise."""
    return all(p.status == "queued" and p.attempts == 0 for p in delivery.parts)


def _lease_end(tx: Tx, serves: Serves) -> int | None:
    """Until when this process is believed alive, as it stands; None: it is no more."""
    rows = tx.execute(
        "SELECT expires_at FROM node WHERE id = :id AND expires_at > :now",
        {"id": serves.node, "now": tx.now()},
    )
    return rows[0][0] if rows else None


def _cut(
    session: LockedSession,
    row: DeliveryRow,
    parts: list[PartRow],
    channel: str,
    serves: Serves,
) -> list[PartRow]:
    """The parts as this channel takes them; written only where they come out different."""
    fresh: list[tuple[PartKind, str | None, MediaBlock | None]] = []
    for part in parts:
        text = _text(session.tx, row, part, session.sid)
        pieces = list(serves.cut(channel, text)) if text else [""]
        if part.media is not None:
            fresh.append((part.kind, pieces[0], part.media))
            fresh.extend(("text", piece, None) for piece in pieces[1:])
        else:
            fresh.extend((part.kind, piece, None) for piece in pieces)
    if len(fresh) == len(parts):
        return parts
    tx = session.tx
    tx.execute("DELETE FROM part WHERE delivery = :id", {"id": row.id})
    tx.execute_many(
        "INSERT INTO part (delivery, idx, kind, text, media, status)"
        " VALUES (:id, :idx, :kind, :text, :media, 'queued')",
        [
            {
                "id": row.id,
                "idx": index,
                "kind": kind,
                "text": text,
                "media": _encode(media).decode() if media is not None else None,
            }
            for index, (kind, text, media) in enumerate(fresh)
        ],
    )
    return [PartRow(kind, text, media, None, Part()) for kind, text, media in fresh]


def _text(tx: Tx, row: DeliveryRow, part: PartRow, sid: int) -> str:
    """A part's text; that of an uncut reply stands in the log."""
    if part.text is not None:
        return part.text
    found = tx.execute(
        "SELECT data FROM event WHERE sid = :sid AND seq = :seq", {"sid": sid, "seq": row.seq}
    )
    data = decode_data(AssistantReply.TYPE, found[0][0])
    assert isinstance(data, AssistantReply)
    return text_of(data.message.content)


def _claimed(
    session: LockedSession,
    row: DeliveryRow,
    parts: list[PartRow],
    delivery: Delivery,
    fence: Fence,
    address: Address,
    until: int | None = None,
) -> Claimed:
    """``until`` None: the claim was made before, and its row says so."""
    index = machine.sending_part(delivery)
    part = delivery.parts[index]
    until = parts[index].until if until is None else until
    assert part.first_attempt_at is not None
    assert until is not None
    return Claimed(
        session.id,
        DeliveryId(row.id),
        fence,
        address,
        parts[index].kind,
        index,
        len(parts),
        _text(session.tx, row, parts[index], session.sid),
        parts[index].media,
        row.reply_to if index == 0 else None,
        part.attempts,
        part.first_attempt_at,
        until - session.tx.now(),
    )


def _load(tx: Tx, delivery_id: str) -> tuple[DeliveryRow, list[PartRow]]:
    row = read_delivery(tx, "id = :id", {"id": delivery_id})
    if row is None:
        raise InputError(
            f"there is no delivery {delivery_id}", hint="`postroom outbox list` shows them"
        )
    return row, read_parts(tx, delivery_id)


def _release(tx: Tx, row: DeliveryRow, delivery: Delivery) -> None:
    """Lets a claim go: nothing is left to do, or what is left waits for a new claim."""
    if delivery.blocks and delivery.unknown_at is None:
        tx.execute(
            "UPDATE work SET status = 'ready', token = NULL, owner = NULL"
            " WHERE kind = :kind AND key = :key",
            {"kind": SEND, "key": row.id},
        )
    else:
        tx.execute(
            "DELETE FROM work WHERE kind = :kind AND key = :key", {"kind": SEND, "key": row.id}
        )


def _ready_again(tx: Tx, row: DeliveryRow, delivery: Delivery) -> None:
    """What waited for a verdict, or for an operator, may be claimed once more."""
    if delivery.blocks and delivery.unknown_at is None:
        ready_work(tx, SEND, row.id)
    elif not delivery.blocks:
        tx.execute(
            "DELETE FROM work WHERE kind = :kind AND key = :key AND status <> 'claimed'",
            {"kind": SEND, "key": row.id},
        )


_TOLD = ("sent", "failed", "unknown", "unrouted")


def _write(
    session: LockedSession,
    row: DeliveryRow,
    parts: list[PartRow],
    after: Delivery,
    *,
    until: int | None = None,
    ref: str | None = None,
    to: Address | None = None,
    by: str | None = None,
) -> None:
    """Writes what changed, and tells the log where the delivery's status did."""
    tx = session.tx
    now = tx.now()
    before = as_machine(row, parts)
    for index, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
        if old == new:
            continue
        tx.execute(
            "UPDATE part SET status = :status, attempts = :attempts,"
            " first_attempt_at = :first, until = :until, reference = :reference, note = :note,"
            " error = :error WHERE delivery = :id AND idx = :idx",
            {
                "status": new.status,
                "attempts": new.attempts,
                "first": new.first_attempt_at,
                "until": _part_until(parts[index], new, until, now, row),
                "reference": new.reference,
                "note": new.note,
                "error": new.error,
                "id": row.id,
                "idx": index,
            },
        )
    status = after.status
    doubt = status == "unknown" and not after.handed_over
    tx.execute(
        "UPDATE delivery SET status = :status, blocks = :blocks, handed_over = :handed,"
        " due = :due, ask_at = :ask, unknown_at = :unknown, deferrals = :deferrals,"
        " reconciles = :reconciles, ref = coalesce(:ref, ref),"
        " address = coalesce(:address, address), decided_by = :by, updated_at = :now,"
        " expires_at = :expires, failure_text = :failure WHERE id = :id",
        {
            "status": status,
            "blocks": int(after.blocks),
            "handed": int(after.handed_over),
            "due": after.due,
            "ask": (row.ask_at or now) if doubt else None,
            "unknown": after.unknown_at,
            "deferrals": after.deferrals,
            "reconciles": after.reconciles,
            "ref": ref,
            "address": to.spelled() if to is not None else None,
            "by": after.decided_by,
            "now": now,
            "expires": after.expires_at,
            "failure": None if status == "failed" else row.failure_text,
            "id": row.id,
        },
    )
    if doubt and row.ask_at is None:
        ready_work(tx, ASK, row.id)
        tx.wake(ASK, row.id)
    if not doubt and row.ask_at is not None:
        tx.execute(
            "DELETE FROM work WHERE kind = :kind AND key = :key", {"kind": ASK, "key": row.id}
        )
    if status != row.status and (status in _TOLD or row.status in _TOLD or by is not None):
        receipts = tuple(PartReceipt(p.status, p.reference, p.note, p.error) for p in after.parts)
        session.append(
            (DeliveryStatusChanged(DeliveryId(row.id), status, receipts, row.owner_turn, by),)
        )
        if status == "failed" and row.failure_text is not None:
            session.append((HistoryReplaced(DeliveryId(row.id), row.failure_text),))


def _part_until(
    before: PartRow, after: Part, until: int | None, now: int, row: DeliveryRow
) -> int | None:
    if after.status == "sending":
        return until
    if after.status == "unknown" and before.part.status == "sending":
        # Its own sender records it when the call is over. A lost one's is over when it is proven
        # dead or its lease has ended, and no later than its call had to be.
        return min(before.until or now, now) if until is None else until
    return before.until


# ---- reconcile ----


class Question(msgspec.Struct, frozen=True):
    """A part in doubt, to be asked about. ``settled_at``: from then on absent means absent."""

    claimed: Claimed
    asked_at: int
    until: int


def doubts(tx: Tx, after: tuple[int, str], limit: int) -> list[tuple[int, DeliveryId]]:
    """Deliveries in doubt that are not the operator's yet, above ``after``, the oldest first.

    Each as when it was made (Unix ms) and its id: both are what the next page comes after.
    """
    rows = tx.execute(
        "SELECT created_at, id FROM delivery WHERE status = 'unknown' AND status <> 'sent'"
        " AND handed_over = 0 AND created_at >= :at AND (created_at > :at OR id > :id)"
        " ORDER BY created_at, id LIMIT :limit",
        {"at": after[0], "id": after[1], "limit": limit},
    )
    return [(r[0], DeliveryId(r[1])) for r in rows]


def claim_question(
    tx: Tx, delivery_id: DeliveryId, token: ClaimToken, serves: Serves
) -> Question | Wait | None:
    """Claims the next question to a channel about a delivery in doubt.

    A channel that cannot be asked hands the delivery to the operator at once. None: there is
    nothing to ask, or another asks. Running again finds its own claim.
    """
    row = read_delivery(tx, "id = :id", {"id": delivery_id})
    if row is None:
        return None
    session = _session_of(tx, row)
    row, parts = _load(tx, delivery_id)
    delivery = as_machine(row, parts)
    if delivery.status != "unknown" or delivery.handed_over or row.address is None:
        return None
    now = tx.now()
    address = _spelled(row.address)
    if address is None or (address.channel in serves.asks and not serves.asks[address.channel]):
        _hand_over(session, row, parts, delivery)
        return None
    if address.channel not in serves.channels:
        return None
    if row.ask_at is not None and row.ask_at > now:
        return Wait(row.ask_at, now)
    work = read_work(tx, ASK, row.id)
    if work.token != token:
        abandoned = work.owner == serves.node and work.token not in serves.active
        taken = claim(work, serves.node, token, lapsed=abandoned or lapsed(tx, work.owner))
        if taken is None or _lease_end(tx, serves) is None:
            return None
        write_work(tx, ASK, row.id, taken)
        work = taken
    index = next(i for i, p in enumerate(delivery.parts) if p.status == "unknown")
    part = delivery.parts[index]
    asked = Claimed(
        session.id,
        delivery_id,
        Fence(work.epoch, token),
        address,
        parts[index].kind,
        index,
        len(parts),
        _text(tx, row, parts[index], session.sid),
        parts[index].media,
        row.reply_to if index == 0 else None,
        part.attempts,
        part.first_attempt_at or row.created_at,
        0,
    )
    return Question(asked, now, parts[index].until or now)


def record_verdict(
    tx: Tx, question: Question, verdict: Verdict, settle_ms: int, jitter: float, serves: Serves
) -> Wait | None:
    """Commits a verdict under its fence; when to ask again, or None if that is settled.

    ``absent`` asked before the claim's end and the platform's settling time says nothing.
    """
    asked = question.claimed
    session = lock_session(tx, asked.session_id)
    row, parts = _load(tx, asked.delivery_id)
    delivery = as_machine(row, parts)
    now = tx.now()
    work = read_work(tx, ASK, row.id)
    if delivery.parts[asked.index].status != "unknown":
        return Wait(row.ask_at, now) if row.ask_at is not None else None
    if not holds(work, asked.fence):
        if not isinstance(verdict, Found):
            return Wait(row.ask_at, now)
    elif isinstance(verdict, machine.Absent) and question.asked_at < question.until + settle_ms:
        verdict = machine.CannotTell("asked too early to be sure")
    judged = machine.judge(delivery, asked.index, verdict, now, serves.rules, jitter)
    if judged.handed_over:
        judged = machine.hand_over(judged)
    unsettled = isinstance(verdict, machine.CannotTell) and not judged.handed_over
    if unsettled:  # the lane waits for the first verdict that says something, bounded
        judged = msgspec.structs.replace(judged, unknown_at=delivery.unknown_at)
    again = max(
        now + machine.reconcile_delay_ms(judged, serves.rules, jitter),
        question.until + settle_ms if unsettled else 0,
    )
    still = judged.status == "unknown" and not judged.handed_over
    _write(session, row, parts, judged)
    if still:
        tx.execute("UPDATE delivery SET ask_at = :at WHERE id = :id", {"at": again, "id": row.id})
        tx.execute(
            "UPDATE work SET status = 'ready', token = NULL, owner = NULL"
            " WHERE kind = :kind AND key = :key",
            {"kind": ASK, "key": row.id},
        )
    _ready_again(tx, row, judged)
    tx.wake(SEND, session.id)
    session.save()
    return Wait(again, now) if still else None


def _hand_over(
    session: LockedSession, row: DeliveryRow, parts: list[PartRow], delivery: Delivery
) -> None:
    handed = machine.hand_over(delivery)
    _write(session, row, parts, handed)
    _ready_again(session.tx, row, handed)
    session.tx.wake(SEND, session.id)
    session.save()


def _session_of(tx: Tx, row: DeliveryRow) -> LockedSession:
    name = tx.execute("SELECT id FROM session WHERE sid = :sid", {"sid": row.sid})[0][0]
    return lock_session(tx, SessionId(name))


def _spelled(text: str) -> ToConversation | None:
    """A conversation's address; None for a connection's, which nobody can ask any more."""
    kind, channel, rest = text.split(" ", 2) if text.startswith("conv ") else ("", "", "")
    return ToConversation(channel, ConversationKey(rest)) if kind else None


# ---- what an operator sees and decides ----


class PartView(msgspec.Struct, frozen=True, rename="camel"):
    index: int
    kind: str
    status: str
    attempts: int
    reference: str | None
    note: str | None
    error: str | None
    text: str
    artifact: str | None


class DeliveryView(msgspec.Struct, frozen=True, rename="camel"):
    """A delivery with the state of the claim on it, read together.

    ``claim`` is ``none``, ``ready``, ``claimed`` or ``lapsed`` (claimed by a process that is no
    longer believed alive: the next look makes the part unknown). Times in Unix milliseconds.
    """

    delivery_id: DeliveryId
    session_id: SessionId
    kind: str
    status: str
    claim: str
    claimed_by: str | None
    handed_over: bool
    address: str | None
    owner_turn_id: int | None
    policy: str
    decided_by: str | None
    due: int
    created_at: int
    updated_at: int
    expires_at: int
    parts: tuple[PartView, ...]


def list_deliveries(
    tx: Tx,
    *,
    session_id: SessionId | None = None,
    status: tuple[str, ...] = (),
    open_only: bool = False,
    limit: int = 50,
) -> list[DeliveryView]:
    """The newest first. ``status``: only these; ``open_only``: all that were not sent."""
    where: list[str] = []
    params: dict[str, str | int | float | bytes | None] = {"limit": limit}
    if session_id is not None:
        where.append("sid = (SELECT sid FROM session WHERE id = :session)")
        params["session"] = session_id
    if open_only:
        where.append("status <> 'sent'")
    if status:
        names = [f"s{i}" for i in range(len(status))]
        params.update(zip(names, status, strict=True))
        where.append(f"status IN ({', '.join(':' + n for n in names)})")
        if "sent" not in status:
            where.append("status <> 'sent'")
    clause = f" WHERE {' AND '.join(where)}" if where else ""
    # Within a session both orders are one, and this one is an index's.
    newest = "ord DESC" if session_id is not None else "created_at DESC, ord DESC"
    rows = tx.execute(f"SELECT id FROM delivery{clause} ORDER BY {newest} LIMIT :limit", params)
    return [show_delivery(tx, DeliveryId(r[0])) for r in rows]


def show_delivery(tx: Tx, delivery_id: DeliveryId) -> DeliveryView:
    """One delivery.

    Raises:
        InputError: there is none of this id.
    """
    row, parts = _load(tx, delivery_id)
    return _view(tx, row, parts)


def _view(tx: Tx, row: DeliveryRow, parts: list[PartRow]) -> DeliveryView:
    name = tx.execute("SELECT id FROM session WHERE sid = :sid", {"sid": row.sid})[0][0]
    work = read_work(tx, SEND, row.id)
    held = work.status == "claimed"
    return DeliveryView(
        delivery_id=DeliveryId(row.id),
        session_id=SessionId(name),
        kind=row.kind,
        status=row.status,
        claim="lapsed" if held and lapsed(tx, work.owner) else work.status,
        claimed_by=work.owner if held else None,
        handed_over=bool(row.handed_over),
        address=row.address,
        owner_turn_id=row.owner_turn,
        policy=row.policy,
        decided_by=row.decided_by,
        due=row.due,
        created_at=row.created_at,
        updated_at=row.updated_at,
        expires_at=row.expires_at,
        parts=tuple(
            PartView(
                index,
                p.kind,
                p.part.status,
                p.part.attempts,
                p.part.reference,
                p.part.note,
                p.part.error,
                _text(tx, row, p, row.sid),
                p.media.artifact if p.media is not None else None,
            )
            for index, p in enumerate(parts)
        ),
    )


def resolve_delivery(
    tx: Tx, delivery_id: DeliveryId, as_: Resolution, by: str, ref: ClaimToken
) -> DeliveryView:
    """A named operator settles every part in doubt; ``queued`` has them sent again, on their word.

    ``ref`` is made by the caller for this one decision: running again with it changes nothing.

    Raises:
        InputError: no part of it is in doubt.
    """

    def settle(session: LockedSession, delivery: Delivery, now: int) -> Delivery:
        for index, part in enumerate(delivery.parts):
            if part.status == "unknown":
                delivery = machine.resolve(delivery, index, as_, by, now)
        if as_ == "queued":  # their word counts, however old it has become
            expires_at = max(delivery.expires_at, now + Limits().delivery_expiry_ms)
            delivery = msgspec.structs.replace(delivery, expires_at=expires_at)
        return delivery

    return _decide(tx, delivery_id, ref, by, ("unknown",), "is not in doubt", settle)


def redeliver(
    tx: Tx, delivery_id: DeliveryId, by: str, ref: ClaimToken, rules: Rules
) -> DeliveryView:
    """A named operator has what failed, or found no route, sent again. Sent parts stay sent.

    Raises:
        InputError: it neither failed nor is it unrouted; or nothing could deliver it still.
    """

    def again(session: LockedSession, delivery: Delivery, now: int) -> Delivery:
        if not is_owned(tx, session.sid, session.target):
            raise InputError(
                f"nothing is attached to {session.id} that could deliver {delivery_id}",
                hint="open the session in a chat or a terminal first",
            )
        return machine.redeliver(delivery, by, now, rules)

    from_ = ("failed", "unrouted")
    return _decide(tx, delivery_id, ref, by, from_, "neither failed nor is without a route", again)


def abandon(tx: Tx, delivery_id: DeliveryId, by: str, ref: ClaimToken) -> DeliveryView:
    """A named operator gives up what is queued, or without a route.

    Raises:
        InputError: nothing of it waits.
    """
    return _decide(
        tx,
        delivery_id,
        ref,
        by,
        ("queued", "unrouted"),
        "does not wait to be sent",
        lambda session, delivery, now: machine.abandon(delivery, by),
    )


def _decide(
    tx: Tx,
    delivery_id: DeliveryId,
    ref: ClaimToken,
    by: str,
    from_: tuple[str, ...],
    otherwise: str,
    change: Callable[[LockedSession, Delivery, int], Delivery],
) -> DeliveryView:
    """``ref`` stays with the delivery, so that running again later finds the decision made."""
    row, _ = _load(tx, delivery_id)
    session = _session_of(tx, row)
    row, parts = _load(tx, delivery_id)
    if row.ref == ref:
        return _view(tx, row, parts)
    if row.status not in from_:
        raise InputError(f"delivery {delivery_id} is {row.status}: it {otherwise}")
    after = change(session, as_machine(row, parts), tx.now())
    _write(session, row, parts, after, ref=ref, by=by)
    if not any(p.status == "sending" for p in after.parts):  # its sender keeps its claim
        _release(tx, row, after)
        _ready_again(tx, row, after)
    tx.wake(SEND, session.id)
    session.save()
    row, parts = _load(tx, delivery_id)
    return _view(tx, row, parts)
