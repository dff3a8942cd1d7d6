"""How things stand in the store, for health, metrics and `doctor`: a few counts, read together."""

from __future__ import annotations

import msgspec

from postroom.ports.store import Tx
from postroom.scripts.session import DRIVE


class Standing(msgspec.Struct, frozen=True):
    """``deliveries``: how many are not sent, by status; a status without any is left out.

    ``operators`` are those in doubt that only an operator can settle. ``turns`` are the sessions
    being driven, by any process. ``oldest_pending_ms`` is the age of the oldest pending message
    (None: nothing is pending). ``waiting`` names the channels that queued deliveries wait for.
    """

    pending: int
    oldest_pending_ms: int | None
    deliveries: dict[str, int]
    operators: int
    turns: int
    waiting: tuple[str, ...]


def standing(tx: Tx) -> Standing:
    """How things stand now."""
    pending, oldest = tx.execute(
        "SELECT count(*), min(event.at) FROM inbox"
        " JOIN message ON message.id = inbox.id"
        " JOIN event ON event.sid = message.sid AND event.seq = message.seq"
    )[0]
    deliveries = tx.execute(
        "SELECT status, count(*), coalesce(sum(handed_over), 0) FROM delivery"
        " WHERE status <> 'sent' GROUP BY status"
    )
    turns = tx.execute(
        "SELECT count(*) FROM work WHERE kind = :kind AND status = 'claimed'", {"kind": DRIVE}
    )[0][0]
    waiting = tx.execute(
        "SELECT DISTINCT binding.channel FROM delivery JOIN binding ON binding.sid = delivery.sid"
        " WHERE delivery.status <> 'sent' AND delivery.status = 'queued' ORDER BY binding.channel"
    )
    return Standing(
        pending=pending,
        oldest_pending_ms=max(0, tx.now() - oldest) if oldest is not None else None,
        deliveries={row[0]: row[1] for row in deliveries},
        operators=sum(int(row[2]) for row in deliveries if row[0] == "unknown"),
        turns=turns,
        waiting=tuple(row[0] for row in waiting),
    )
