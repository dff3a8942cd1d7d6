"""Approvals and questions, durable: asked once, decided once, by those who may.

An id is unguessable and single-use. A decision is a compare-and-set on the open one; whoever is not
asked, or comes late, decides nothing and is told so. What a turn's end leaves undecided is denied.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from postroom.domain.event import ApprovalAsked, ApprovalDecided
from postroom.domain.ids import ApprovalId, CallId, ClaimToken, DeliveryId, SessionId
from postroom.domain.parcel import Parcel, Piece
from postroom.domain.work import Fence
from postroom.errors import PostroomError, StaleClaim
from postroom.ports.store import Tx
from postroom.scripts.routes import ToConversation, resolve
from postroom.scripts.session import check_fence, lock_session

OPERATOR = "operator"

Asked: TypeAlias = Literal["outbox", "connection", "nobody", "cancelled"]


class NotAsked(PostroomError):
    """There is no such open question here, for this person."""

    code = "not_asked"


class OpenApproval(msgspec.Struct, frozen=True, rename="camel"):
    approval_id: ApprovalId
    session_id: SessionId
    kind: str
    subject: str
    expires_at: int


def ask_approval(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    approval_id: ApprovalId,
    *,
    turn: int,
    step: int,
    call_id: CallId,
    kind: str,
    subject: str,
    text: str,
    wait_ms: int,
    choices: tuple[str, ...] = (),
) -> Asked:
    """Asks, by the session's route: through the outbox, or for the caller to ask a connection.

    ``text`` is what a conversation is shown. Where nobody could answer nothing is asked.

    Raises:
        StaleClaim: the turn is over, or driven by somebody else.
    """
    session = lock_session(tx, session_id)
    check_fence(session, fence)
    open_turn = session.state.turn
    if open_turn is None or open_turn.number != turn:
        raise StaleClaim(f"turn {turn} of {session_id} is over")
    address = resolve(tx, session.sid, session.turn_route, session.target)
    if address is None:
        return "nobody"
    by_outbox = isinstance(address, ToConversation)
    if tx.execute("SELECT 1 FROM approval WHERE id = :id", {"id": approval_id}):
        return "outbox" if by_outbox else "connection"
    if open_turn.cancel is not None:
        return "cancelled"
    expires_at = tx.now() + wait_ms
    session.append(
        (ApprovalAsked(approval_id, kind, subject, turn, step, call_id, expires_at, choices),)
    )
    tx.execute(
        "INSERT INTO approval (id, sid, kind, subject, status, created_at, expires_at)"
        " VALUES (:id, :sid, :kind, :subject, 'open', :now, :expires)",
        {
            "id": approval_id,
            "sid": session.sid,
            "kind": kind,
            "subject": subject,
            "now": tx.now(),
            "expires": expires_at,
        },
    )
    if by_outbox:
        parcel = Parcel(
            id=DeliveryId(f"dlv_{approval_id}"),
            kind="approval",
            pieces=(Piece(text),),
            policy="transient",
        )
        session.owe(parcel, turn)
    session.save()
    return "outbox" if by_outbox else "connection"


def decide_approval(
    tx: Tx,
    approval_id: ApprovalId,
    decision: str,
    *,
    by: str,
    principal: str,
    ref: ClaimToken,
    session_id: SessionId | None = None,
) -> str:
    """Decides an open approval; the decision that stands.

    ``principal`` is who decides: the operator, or whom the session belongs to. ``by`` is how they
    are called in the log. ``ref`` is made for this one decision: running again with it answers the
    same.

    Raises:
        NotAsked: there is no such question, or not for this principal or session; or it was
            decided, or its time is over. A guessed and a foreign id get the same answer.
    """
    rows = tx.execute(
        "SELECT session.id, approval.status, approval.decision, approval.decided_by, approval.ref"
        " FROM approval JOIN session ON session.sid = approval.sid WHERE approval.id = :id",
        {"id": approval_id},
    )
    if not rows or (session_id is not None and rows[0][0] != session_id):
        raise NotAsked("nobody asked that")
    session = lock_session(tx, rows[0][0])
    if principal not in (OPERATOR, session.owner):
        raise NotAsked("nobody asked that")
    status, decided, decided_by, known_ref, expires_at = tx.execute(
        "SELECT status, decision, decided_by, ref, expires_at FROM approval WHERE id = :id",
        {"id": approval_id},
    )[0]
    if status != "open":
        if known_ref == ref:
            return decided
        said = {"allow": "allowed", "deny": "denied"}.get(decided, "answered")
        raise NotAsked(f"this was {said} already ({decided_by})")
    if tx.now() >= expires_at and decision != "deny":
        raise NotAsked("the time to answer this is over")
    session.append((ApprovalDecided(approval_id, decision, by),))
    tx.execute("UPDATE approval SET ref = :ref WHERE id = :id", {"ref": ref, "id": approval_id})
    session.save()
    return decision


def open_approvals(tx: Tx, session_id: SessionId | None = None) -> list[OpenApproval]:
    """What waits to be decided, the oldest first. ``session_id`` None: everywhere."""
    where = " AND session.id = :id" if session_id is not None else ""
    rows = tx.execute(
        "SELECT approval.id, session.id, kind, subject, expires_at FROM approval"
        " JOIN session ON session.sid = approval.sid"
        f" WHERE approval.status = 'open'{where} ORDER BY approval.created_at, approval.id",
        {"id": session_id},
    )
    return [OpenApproval(*row) for row in rows]


def approval_decision(tx: Tx, approval_id: ApprovalId) -> tuple[str, str] | None:
    """The decision and who made it; None: it is open, or unknown."""
    rows = tx.execute(
        "SELECT decision, decided_by FROM approval WHERE id = :id AND status <> 'open'",
        {"id": approval_id},
    )
    return (rows[0][0], rows[0][1]) if rows else None
