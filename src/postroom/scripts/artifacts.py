"""Whose the artifacts are: one record a session and artifact, kept as long as the session.

The bytes lie in the artifact store and are there before their record is. A record names the turn
that was open when the session first had the artifact (None: none was); having it again changes
nothing. The bytes of one artifact may be several sessions'.

A session's own are those with a record, and those that its log refers to as media: a message that
came in with a file owns it. A text that merely contains an id refers to nothing.
"""

from __future__ import annotations

import msgspec

from postroom.domain.event import (
    AssistantReply,
    DeliveryQueued,
    EventData,
    InboxQueued,
    InboxReplaced,
    RequestHeader,
    ToolResult,
    UserMessage,
    decode_data,
)
from postroom.domain.ids import SessionId
from postroom.domain.message import Media
from postroom.errors import InputError, UnknownSession
from postroom.ports.artifact import hash_digits
from postroom.ports.store import Row, Tx


class ArtifactRecord(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """``artifact`` is its id, ``size`` in bytes; ``media_type`` by content.

    ``turn`` is the session's turn that owns it (None: it came outside of any). ``name`` is a file
    name for people, ``summary`` a line on what is in it (None: there is none). ``at``: when the
    session first had it, in Unix milliseconds (0: not recorded yet).
    """

    artifact: str
    media_type: str
    size: int
    turn: int | None = None
    name: str | None = None
    summary: str | None = None
    at: int = 0


_COLUMNS = "hash, media_type, size, turn, name, summary, at"


def record_artifact(tx: Tx, session_id: SessionId, record: ArtifactRecord) -> ArtifactRecord:
    """Records that a session has an artifact; the record as it stands, an earlier one unchanged.

    Raises:
        InputError: its id or its size is none.
        UnknownSession: there is no such session, or no more.
    """
    if hash_digits(record.artifact) is None or record.size < 0:
        raise InputError(f"{record.artifact[:100]!r} is not an artifact id and its size")
    rows = tx.execute(f"SELECT sid FROM session WHERE id = :id{tx.for_update}", {"id": session_id})
    if not rows:
        raise _unknown(session_id)
    key = {"sid": rows[0][0], "hash": record.artifact}
    tx.execute(
        f"INSERT INTO artifact (sid, {_COLUMNS}) VALUES (:sid, :hash, :media_type, :size, :turn,"
        " :name, :summary, :at) ON CONFLICT (sid, hash) DO NOTHING",
        {
            **key,
            "media_type": record.media_type,
            "size": record.size,
            "turn": record.turn,
            "name": record.name,
            "summary": record.summary,
            "at": tx.now(),
        },
    )
    held = tx.execute(f"SELECT {_COLUMNS} FROM artifact WHERE sid = :sid AND hash = :hash", key)
    return _record(held[0])


def artifacts_of(tx: Tx, session_id: SessionId, *, turn: int | None = None) -> list[ArtifactRecord]:
    """The session's records in the order they came. ``turn`` None: of all turns and of none."""
    sid = _sid(tx, session_id)
    of_turn = "" if turn is None else " AND turn = :turn"
    rows = tx.execute(
        f"SELECT {_COLUMNS} FROM artifact WHERE sid = :sid{of_turn} ORDER BY at, hash",
        {"sid": sid} if turn is None else {"sid": sid, "turn": turn},
    )
    return [_record(row) for row in rows]


def is_of_session(tx: Tx, session_id: SessionId, artifact: str) -> bool:
    """Whether an artifact is the session's own; False too if there is no such session."""
    if hash_digits(artifact) is None:
        return False
    rows = tx.execute("SELECT sid FROM session WHERE id = :id", {"id": session_id})
    if not rows:
        return False
    key = {"sid": rows[0][0], "hash": artifact}
    if tx.execute("SELECT 1 FROM artifact WHERE sid = :sid AND hash = :hash", key):
        return True
    names = ", ".join(f"'{each.TYPE}'" for each in _REFERRING)
    events = tx.execute(
        f"SELECT type, data FROM event WHERE sid = :sid AND type IN ({names})"
        " AND data LIKE :part ORDER BY seq",
        {"sid": rows[0][0], "part": f'%"{artifact}"%'},
    )
    return any(artifact in _referred(decode_data(kind, raw)) for kind, raw in events)


_REFERRING: tuple[type[EventData], ...] = (
    InboxQueued,
    InboxReplaced,
    UserMessage,
    AssistantReply,
    ToolResult,
    DeliveryQueued,
    RequestHeader,
)


def _referred(data: EventData) -> set[str]:
    """The artifacts that an event refers to."""
    match data:
        case InboxQueued() | InboxReplaced() | UserMessage() | AssistantReply():
            content = data.message.content
        case ToolResult():
            content = data.content
        case DeliveryQueued():
            return set(data.artifacts)
        case RequestHeader():
            return {data.artifact} if data.artifact is not None else set()
        case _:
            return set()
    return {block.artifact for block in content if isinstance(block, Media)}


def copy_records(tx: Tx, parent: int, fork: int, *, turns: int, cut_at: int) -> None:
    """Gives a fork the records of its own past: of its turns, and of none up to then.

    Sessions are named by their number. ``cut_at`` is the time of the last event it took over.
    """
    tx.execute(
        f"INSERT INTO artifact (sid, {_COLUMNS}) SELECT :fork, {_COLUMNS} FROM artifact"
        " WHERE sid = :parent AND (turn <= :turns OR (turn IS NULL AND at <= :cut_at))",
        {"fork": fork, "parent": parent, "turns": turns, "cut_at": cut_at},
    )


def _record(row: Row) -> ArtifactRecord:
    artifact, media_type, size, turn, name, summary, at = row
    return ArtifactRecord(
        artifact=artifact,
        media_type=media_type,
        size=size,
        turn=turn,
        name=name,
        summary=summary,
        at=at,
    )


def _sid(tx: Tx, session_id: SessionId) -> int:
    rows = tx.execute("SELECT sid FROM session WHERE id = :id", {"id": session_id})
    if not rows:
        raise _unknown(session_id)
    return rows[0][0]


def _unknown(session_id: SessionId) -> UnknownSession:
    return UnknownSession(
        f"there is no session {session_id}", hint="`postroom session list` shows them"
    )
