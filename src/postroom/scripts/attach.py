"""What a connection reads: whose a session is, where it stands, its events by the page.

These change nothing and need no lock.
"""

from __future__ import annotations

from postroom.domain.event import Event
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.turn import Status
from postroom.errors import UnknownSession
from postroom.ports.store import Tx
from postroom.scripts.approvals import OPERATOR, OpenApproval


def may_touch(principal: str, owner: str) -> bool:
    """The owner predicate: the operator may all, everybody else what is their own."""
    return principal in (OPERATOR, owner)


def check_owner(tx: Tx, session_id: SessionId, principal: str) -> None:
    """Raises:

    UnknownSession: there is no such session, or it is not this principal's; which of the two is
        not told.
    """
    rows = tx.execute("SELECT owner FROM session WHERE id = :id", {"id": session_id})
    if not rows or not may_touch(principal, rows[0][0]):
        raise unknown(session_id)


def unknown(session_id: str) -> UnknownSession:
    return UnknownSession(
        f"there is no session {session_id}", hint="`postroom session list` shows them"
    )


def standing(tx: Tx, session_id: SessionId) -> tuple[Status, int, int]:
    """The status, the seq it was true at, and how many messages are pending there."""
    rows = tx.execute(
        "SELECT status, head, (SELECT count(*) FROM inbox WHERE inbox.sid = session.sid)"
        " FROM session WHERE id = :id",
        {"id": session_id},
    )
    if not rows:
        raise unknown(session_id)
    return rows[0][0], rows[0][1], rows[0][2]


def read_page(
    tx: Tx, session_id: SessionId, after: int, limit: int, chars_max: int
) -> tuple[list[Event], bool]:
    """Events above ``after``, in order, and whether there are more.

    At most ``limit``, and no more than ``chars_max`` characters of data, but one at least.
    """
    found = tx.execute("SELECT sid FROM session WHERE id = :id", {"id": session_id})
    if not found:
        raise unknown(session_id)
    sizes = tx.execute(
        "SELECT seq, length(data) FROM event WHERE sid = :sid AND seq > :after"
        " ORDER BY seq LIMIT :limit",
        {"sid": found[0][0], "after": after, "limit": limit + 1},
    )
    last, size = after, 0
    for seq, length in sizes[:limit]:
        size += length
        if size > chars_max and last > after:
            break
        last = seq
    rows = tx.execute(
        "SELECT seq, type, at, data FROM event WHERE sid = :sid AND seq > :after AND seq <= :last"
        " ORDER BY seq",
        {"sid": found[0][0], "after": after, "last": last},
    )
    more = bool(sizes) and sizes[-1][0] > last
    return [Event(session_id, r[0], r[1], r[2], r[3]) for r in rows], more


def approvals_of(tx: Tx, principal: str, session_id: SessionId | None = None) -> list[OpenApproval]:
    """What waits to be decided and this principal may decide, the oldest first."""
    where = ["approval.status = 'open'"]
    if session_id is not None:
        where.append("session.id = :id")
    if principal != OPERATOR:
        where.append("session.owner = :owner")
    rows = tx.execute(
        "SELECT approval.id, session.id, kind, subject, expires_at FROM approval"
        f" JOIN session ON session.sid = approval.sid WHERE {' AND '.join(where)}"
        " ORDER BY approval.created_at, approval.id",
        {"id": session_id, "owner": principal},
    )
    return [OpenApproval(*row) for row in rows]


def core_of(tx: Tx, session_id: SessionId) -> CoreId:
    rows = tx.execute("SELECT core_id FROM session WHERE id = :id", {"id": session_id})
    if not rows:
        raise unknown(session_id)
    return CoreId(rows[0][0])
