"""The rows of the outbox: writing what is owed, reading it back as the machine's own values."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from postroom.config import Limits
from postroom.domain.ids import SessionId
from postroom.domain.message import MediaBlock
from postroom.domain.outbox import Delivery, Part
from postroom.domain.parcel import Parcel
from postroom.ports.channel import PartKind
from postroom.ports.store import Row, SqlValue, Tx
from postroom.scripts.routes import is_owned

SEND = "delivery.send"
ASK = "delivery.reconcile"

_encode = msgspec.json.Encoder().encode
_decode_media = msgspec.json.Decoder(MediaBlock).decode


class Owed(msgspec.Struct, frozen=True):
    """A parcel about to be written. ``seq`` is that of the event that says it."""

    parcel: Parcel
    turn: int | None
    seq: int
    route: str | None


def write_parcels(
    tx: Tx,
    sid: int,
    session_id: SessionId,
    target: str | None,
    count: int,
    owed: Sequence[Owed],
) -> int:
    """Writes deliveries with their parts and work items, in order; how many there are now.

    Where nothing owns the session they are ``unrouted`` from the start. The text of a reply's only
    part is not written again: its event has it.
    """
    now = tx.now()
    unowned = not any(o.route for o in owed) and not is_owned(tx, sid, target)
    expiry_ms = Limits().delivery_expiry_ms
    parts: list[dict[str, SqlValue]] = []
    work: list[dict[str, SqlValue]] = []
    for one in owed:
        count += 1
        parcel = one.parcel
        status = "unrouted" if unowned else "queued"
        tx.execute(
            "INSERT INTO delivery (id, sid, ord, kind, policy, owner_turn, seq, status, blocks,"
            " due, route, failure_text, reply_to, created_at, updated_at, expires_at)"
            " VALUES (:id, :sid, :ord, :kind, :policy, :turn, :seq, :status, :blocks,"
            " :now, :route, :failure, :reply_to, :now, :now, :expires)",
            {
                "id": parcel.id,
                "sid": sid,
                "ord": count,
                "kind": parcel.kind,
                "policy": parcel.policy,
                "turn": one.turn,
                "seq": one.seq,
                "status": status,
                "blocks": int(status == "queued"),
                "now": now,
                "route": one.route,
                "failure": parcel.failure_history_text,
                "reply_to": parcel.reply_to,
                "expires": now + expiry_ms,
            },
        )
        for index, piece in enumerate(parcel.pieces):
            media = _encode(piece.media).decode() if piece.media is not None else None
            text = None if parcel.kind == "reply" else piece.text
            parts.append(
                {"id": parcel.id, "idx": index, "kind": _part_kind(parcel), "text": text}
                | {"media": media}
            )
        if status == "queued":
            work.append({"kind": SEND, "key": parcel.id})
    tx.execute_many(
        "INSERT INTO part (delivery, idx, kind, text, media, status)"
        " VALUES (:id, :idx, :kind, :text, :media, 'queued')",
        parts,
    )
    if work:
        tx.execute_many(
            "INSERT INTO work (kind, key, status, epoch) VALUES (:kind, :key, 'ready', 0)", work
        )
        tx.wake(SEND, session_id)
    return count


def _part_kind(parcel: Parcel) -> PartKind:
    if parcel.kind in ("progress", "notice", "approval"):
        return parcel.kind
    return "media" if any(p.media for p in parcel.pieces) else "text"


# ---- reading ----

DELIVERY = (
    "id, kind, policy, owner_turn, seq, status, handed_over, due, ask_at, unknown_at, deferrals,"
    " reconciles, route, address, ref, failure_text, reply_to, decided_by, created_at, updated_at,"
    " expires_at, ord, sid"
)


class DeliveryRow(msgspec.Struct, frozen=True):
    """One delivery as the table has it."""

    id: str
    kind: str
    policy: str
    owner_turn: int | None
    seq: int | None
    status: str
    handed_over: int
    due: int
    ask_at: int | None
    unknown_at: int | None
    deferrals: int
    reconciles: int
    route: str | None
    address: str | None
    ref: str | None
    failure_text: str | None
    reply_to: str | None
    decided_by: str | None
    created_at: int
    updated_at: int
    expires_at: int
    ord: int
    sid: int


class PartRow(msgspec.Struct, frozen=True):
    """One part as the table has it. ``until``: when the call that left it in doubt had to end."""

    kind: PartKind
    text: str | None
    media: MediaBlock | None
    until: int | None
    part: Part


def read_delivery(tx: Tx, where: str, params: dict[str, SqlValue]) -> DeliveryRow | None:
    rows = tx.execute(f"SELECT {DELIVERY} FROM delivery WHERE {where}", params)
    return DeliveryRow(*rows[0]) if rows else None


def read_parts(tx: Tx, delivery_id: str) -> list[PartRow]:
    rows = tx.execute(
        "SELECT kind, text, media, until, status, attempts, first_attempt_at, reference, note,"
        " error FROM part WHERE delivery = :id ORDER BY idx",
        {"id": delivery_id},
    )
    return [_part(row) for row in rows]


def _part(row: Row) -> PartRow:
    media = _decode_media(row[2]) if row[2] is not None else None
    return PartRow(row[0], row[1], media, row[3], Part(*row[4:]))


def machine(row: DeliveryRow, parts: Sequence[PartRow]) -> Delivery:
    return Delivery(
        parts=tuple(p.part for p in parts),
        due=row.due,
        expires_at=row.expires_at,
        unrouted=row.status == "unrouted",
        deferrals=row.deferrals,
        reconciles=row.reconciles,
        unknown_at=row.unknown_at,
        handed_over=bool(row.handed_over),
        decided_by=row.decided_by,
    )
