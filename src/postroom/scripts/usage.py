"""What was spent: tokens by session, day and model, counted in the reply's own transaction."""

from __future__ import annotations

import msgspec

from postroom.domain.ids import SessionId
from postroom.ports.store import Tx

_DAY_MS = 86_400_000


class UsageRow(msgspec.Struct, frozen=True, rename="camel"):
    """Tokens of some model requests. ``day`` counts from 1970-01-01, in UTC (None: all days).

    ``session_id`` and ``core_id`` are None where the row adds up several. ``cached_tokens`` are
    part of ``input_tokens``.
    """

    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    day: int | None = None
    session_id: SessionId | None = None
    core_id: str | None = None


_SUMS = (
    "sum(requests), sum(input_tokens), sum(output_tokens), sum(cached_tokens) FROM usage"
    " JOIN session ON session.sid = usage.sid"
)


def usage_of_session(tx: Tx, session_id: SessionId) -> list[UsageRow]:
    rows = tx.execute(
        f"SELECT model, {_SUMS} WHERE session.id = :id GROUP BY model", {"id": session_id}
    )
    return [UsageRow(r[0], int(r[1]), int(r[2]), int(r[3]), int(r[4])) for r in rows]


def usage_of_day(tx: Tx, core_id: str | None = None, day: int | None = None) -> list[UsageRow]:
    """One day's usage by model; ``day`` None: today, by the store's clock."""
    where = "" if core_id is None else " AND session.core_id = :core"
    rows = tx.execute(
        f"SELECT model, {_SUMS} WHERE day = :day{where} GROUP BY model",
        {"day": tx.now() // _DAY_MS if day is None else day, "core": core_id},
    )
    return [UsageRow(r[0], int(r[1]), int(r[2]), int(r[3]), int(r[4])) for r in rows]


def usage_table(tx: Tx, *, since_day: int = 0) -> list[UsageRow]:
    """Everything by day, session, core and model, the newest day first."""
    rows = tx.execute(
        "SELECT model, requests, input_tokens, output_tokens, cached_tokens, day, session.id,"
        " session.core_id FROM usage JOIN session ON session.sid = usage.sid"
        " WHERE day >= :since ORDER BY day DESC, session.id, model",
        {"since": since_day},
    )
    return [UsageRow(*r) for r in rows]
