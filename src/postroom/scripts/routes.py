"""Where a session's deliveries go: live routes, durable bindings, and the target it was made with.

A route is spelled as text wherever it is kept: ``conv <channel> <conversation>`` for a conversation
of a channel, ``live <token>`` for a connection. A live one is valid as long as its node's lease; a
conversation's until it is unbound. The latest bind is the primary one.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from postroom.domain.conversation import ConversationKey, parse_conversation_key
from postroom.domain.ids import ClaimToken, CoreId, NodeId, SessionId
from postroom.errors import InputError, UnknownSession
from postroom.ports.store import Row, Tx


class ToConversation(msgspec.Struct, frozen=True):
    channel: str
    conversation: ConversationKey

    def spelled(self) -> str:
        return f"conv {self.channel} {self.conversation}"


class ToConnection(msgspec.Struct, frozen=True):
    """``node``: the process that holds the connection."""

    token: ClaimToken
    channel: str
    node: NodeId

    def spelled(self) -> str:
        return f"live {self.token}"


Address: TypeAlias = ToConversation | ToConnection

_VALID = (
    "(route.node IS NULL OR EXISTS"
    " (SELECT 1 FROM node WHERE node.id = route.node AND node.expires_at > :now))"
)


def target_of(channel: str, conversation: ConversationKey) -> str:
    """A session's durable target, as `SessionCreated.target` has it."""
    parse_conversation_key(conversation)
    if not channel or " " in channel:
        raise InputError(f"{channel!r} is no channel's name")
    return ToConversation(channel, conversation).spelled()


def primary_route(tx: Tx, sid: int) -> str | None:
    """The valid route that was bound last; None if there is none."""
    found = _routes(tx, sid)
    return found[0].spelled() if found else None


def is_owned(tx: Tx, sid: int, target: str | None) -> bool:
    """Whether something can be asked to deliver: a route, a binding, or a target."""
    if target is not None:
        return True
    return bool(
        tx.execute(
            f"SELECT 1 FROM route WHERE sid = :sid AND {_VALID}"
            " UNION ALL SELECT 1 FROM binding WHERE sid = :sid LIMIT 1",
            {"sid": sid, "now": tx.now()},
        )
    )


def resolve(tx: Tx, sid: int, wanted: str | None, target: str | None) -> Address | None:
    """Where a delivery goes now; None: nothing owns the session.

    ``wanted`` if that still is a place of this session's: the route that was primary when the turn
    opened, say. If it is gone the primary one of today; then the conversation of its binding, the
    latest first; then its target.
    """
    routes = _routes(tx, sid)
    for route in routes:
        if route.spelled() == wanted:
            return route
    if routes and wanted is None:
        return routes[0]
    rows = tx.execute(
        "SELECT channel, conversation FROM binding WHERE sid = :sid"
        " ORDER BY bound_at DESC, conversation",
        {"sid": sid},
    )
    owners: list[Address] = [ToConversation(r[0], ConversationKey(r[1])) for r in rows]
    if target is not None:
        owners.append(_spelled_conversation(target))
    for owner in owners:
        if owner.spelled() == wanted:
            return owner
    return next(iter((*routes, *owners)), None)


def session_address(tx: Tx, session_id: SessionId) -> Address | None:
    """Where something said to this session now would go; None: nothing owns it."""
    rows = tx.execute("SELECT sid, target FROM session WHERE id = :id", {"id": session_id})
    return resolve(tx, rows[0][0], None, rows[0][1]) if rows else None


def _spelled_conversation(text: str) -> ToConversation:
    _, channel, conversation = text.split(" ", 2)
    return ToConversation(channel, ConversationKey(conversation))


def _routes(tx: Tx, sid: int) -> list[Address]:
    rows = tx.execute(
        "SELECT route.token, route.channel, route.conversation, route.node FROM route"
        f" WHERE route.sid = :sid AND {_VALID} ORDER BY route.id DESC",
        {"sid": sid, "now": tx.now()},
    )
    return [_address(row) for row in rows]


def _address(row: Row) -> Address:
    token, channel, conversation, node = row
    if conversation is not None:
        return ToConversation(channel, ConversationKey(conversation))
    return ToConnection(ClaimToken(token), channel, NodeId(node))


# ---- binding ----


def bind_route(
    tx: Tx,
    session_id: SessionId,
    token: ClaimToken,
    *,
    channel: str,
    node: NodeId,
) -> None:
    """Makes a connection of this process the session's primary route. ``token`` is the caller's.

    A token that is bound already keeps its place: only its process gets a new name.

    Raises:
        UnknownSession: there is no such session.
    """
    if not tx.execute("SELECT 1 FROM session WHERE id = :id", {"id": session_id}):
        raise UnknownSession(
            f"there is no session {session_id}", hint="`postroom session list` shows them"
        )
    tx.execute(
        "INSERT INTO route (sid, token, channel, conversation, node, bound_at)"
        " SELECT sid, :token, :channel, NULL, :node, :now FROM session WHERE id = :id"
        " ON CONFLICT (token) DO UPDATE SET node = excluded.node",
        {
            "token": token,
            "channel": channel,
            "node": node,
            "now": tx.now(),
            "id": session_id,
        },
    )
    tx.wake("delivery.send", session_id)


def unbind_route(tx: Tx, token: ClaimToken) -> None:
    """Takes a route away; the one bound before it is primary again. Again, it does nothing.

    What waited for it goes there, too.
    """
    for (sid,) in tx.execute(
        "DELETE FROM route WHERE token = :token RETURNING sid", {"token": token}
    ):
        for (session_id,) in tx.execute("SELECT id FROM session WHERE sid = :sid", {"sid": sid}):
            tx.wake("delivery.send", session_id)


def bind_conversation(
    tx: Tx, sid: int, channel: str, conversation: ConversationKey, token: ClaimToken
) -> bool:
    """Makes a conversation its session's primary route, and no other session's any more.

    False: it was that already.
    """
    known = tx.execute(
        "SELECT id, sid FROM route WHERE channel = :channel AND conversation = :conversation",
        {"channel": channel, "conversation": conversation},
    )
    newest = tx.execute("SELECT max(id) FROM route WHERE sid = :sid", {"sid": sid})[0][0]
    if [(r[0], r[1]) for r in known] == [(newest, sid)]:
        return False
    for row in known:
        tx.execute("DELETE FROM route WHERE id = :id", {"id": row[0]})
    tx.execute(
        "INSERT INTO route (sid, token, channel, conversation, node, bound_at)"
        " VALUES (:sid, :token, :channel, :conversation, NULL, :now)"
        " ON CONFLICT (token) DO NOTHING",
        {
            "sid": sid,
            "token": token,
            "channel": channel,
            "conversation": conversation,
            "now": tx.now(),
        },
    )
    return True


def bound_session(
    tx: Tx, core_id: CoreId, channel: str, conversation: ConversationKey
) -> SessionId | None:
    """The session a conversation talks to; None: it has none yet."""
    rows = tx.execute(
        "SELECT session.id FROM binding JOIN session ON session.sid = binding.sid"
        " WHERE binding.core_id = :core AND channel = :channel AND conversation = :conversation",
        {"core": core_id, "channel": channel, "conversation": conversation},
    )
    return SessionId(rows[0][0]) if rows else None


def write_binding(
    tx: Tx, core_id: CoreId, channel: str, conversation: ConversationKey, sid: int
) -> None:
    """Binds a conversation to a session, durably, and remembers that it was its own."""
    row = {
        "core": core_id,
        "channel": channel,
        "conversation": conversation,
        "sid": sid,
        "now": tx.now(),
    }
    tx.execute(
        "INSERT INTO binding (core_id, channel, conversation, sid, bound_at)"
        " VALUES (:core, :channel, :conversation, :sid, :now)"
        " ON CONFLICT (core_id, channel, conversation)"
        " DO UPDATE SET sid = excluded.sid, bound_at = excluded.bound_at",
        row,
    )
    tx.execute(
        "INSERT INTO conversation (core_id, channel, conversation, sid, since)"
        " VALUES (:core, :channel, :conversation, :sid, :now) ON CONFLICT DO NOTHING",
        row,
    )


def sessions_of(
    tx: Tx, core_id: CoreId, channel: str, conversation: ConversationKey, limit: int = 20
) -> list[tuple[SessionId, str | None, int]]:
    """A conversation's own sessions: id, title, last change (Unix ms); the newest first.

    Their order is that of their making, so that a number keeps its meaning while work goes on.
    """
    rows = tx.execute(
        "SELECT session.id, session.title, session.updated_at FROM conversation"
        " JOIN session ON session.sid = conversation.sid WHERE conversation.core_id = :core"
        " AND channel = :channel AND conversation = :conversation"
        " ORDER BY conversation.since DESC, session.sid DESC LIMIT :limit",
        {"core": core_id, "channel": channel, "conversation": conversation, "limit": limit},
    )
    return [(SessionId(r[0]), r[1], r[2]) for r in rows]
