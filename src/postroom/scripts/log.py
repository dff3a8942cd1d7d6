"""Reading: the log, sessions, what is pending. These change nothing and need no lock."""

from __future__ import annotations

import msgspec

from postroom.domain.event import (
    Event,
    ForkPoint,
    HistoryCompacted,
    SessionCreated,
    Target,
    decode_data,
    encode_data,
)
from postroom.domain.ids import CoreId, MessageId, SessionId
from postroom.domain.message import Message
from postroom.domain.turn import AgentState, Status
from postroom.errors import InputError, SessionExists, UnknownSession
from postroom.ports.store import Row, Tx
from postroom.scripts.artifacts import copy_records
from postroom.scripts.session import insert_session, lock_session

# As the partial index spells it: SQLite uses that index for no other order of the same words.
_HISTORY = (
    "('user/message', 'assistant/message', 'tool/result', 'history/compacted',"
    " 'delivery/queued', 'history/replaced')"
)

_decode_state = msgspec.json.Decoder(AgentState).decode
_decode_message = msgspec.json.Decoder(Message).decode


class SessionInfo(msgspec.Struct, frozen=True, rename="camel"):
    """A session as lists show it. Times in Unix milliseconds; ``turns`` counts those begun."""

    session_id: SessionId
    core_id: CoreId
    owner: str
    cwd: str | None
    parent: SessionId | None
    title: str | None
    status: Status
    head_seq: int
    turns: int
    pending: int
    created_at: int
    updated_at: int


class PendingInfo(msgspec.Struct, frozen=True, rename="camel"):
    """One pending message. ``list`` is ``next_turn`` or ``next_step``."""

    message: Message
    list: Target
    wakes: bool
    seq: int


_INFO = (
    "SELECT id, core_id, owner, cwd, parent, title, status, head, state, created_at, updated_at,"
    " (SELECT count(*) FROM inbox WHERE inbox.sid = session.sid) FROM session"
)


def _info(row: Row) -> SessionInfo:
    turns = _decode_state(row[8]).turns
    core_id, owner, cwd, parent, title, status, head = row[1:8]
    return SessionInfo(
        row[0], core_id, owner, cwd, parent, title, status, head, turns, row[11], row[9], row[10]
    )


def session_info(tx: Tx, session_id: SessionId) -> SessionInfo:
    rows = tx.execute(f"{_INFO} WHERE id = :id", {"id": session_id})
    if not rows:
        raise UnknownSession(
            f"there is no session {session_id}", hint="`postroom session list` shows them"
        )
    return _info(rows[0])


def list_sessions(
    tx: Tx, *, owner: str | None = None, limit: int = 50, before: int | None = None
) -> list[SessionInfo]:
    """The newest first. ``owner`` None: everybody's. ``before``: older than this updated_at."""
    where = ["parent IS NULL"]
    if owner is not None:
        where.append("owner = :owner")
    if before is not None:
        where.append("updated_at < :before")
    rows = tx.execute(
        f"{_INFO} WHERE {' AND '.join(where)} ORDER BY updated_at DESC, id DESC LIMIT :limit",
        {"owner": owner, "before": before, "limit": limit},
    )
    return [_info(r) for r in rows]


def read_events(tx: Tx, session_id: SessionId, after: int = 0, limit: int = 1000) -> list[Event]:
    """Events with a seq above ``after``, in order."""
    sid = _sid(tx, session_id)
    rows = tx.execute(
        "SELECT seq, type, at, data FROM event WHERE sid = :sid AND seq > :after"
        " ORDER BY seq LIMIT :limit",
        {"sid": sid, "after": after, "limit": limit},
    )
    return [Event(session_id, r[0], r[1], r[2], r[3]) for r in rows]


def read_history(tx: Tx, session_id: SessionId, after: int = 0) -> list[Event]:
    """The events the model's context is folded from, from the last compaction on.

    What a compaction covers is not read: opening follows the active context, not the log.
    """
    rows = tx.execute(
        "SELECT event.seq, event.type, event.at, event.data FROM session JOIN event"
        " ON event.sid = session.sid AND event.seq > :after AND event.seq >= session.context_from"
        f" AND event.type IN {_HISTORY} WHERE session.id = :id ORDER BY event.seq",
        {"id": session_id, "after": after},
    )
    return [Event(session_id, r[0], r[1], r[2], r[3]) for r in rows]


def find_receipt(tx: Tx, session_id: SessionId, message_id: MessageId) -> int | None:
    """The seq at which a message entered the inbox; None if it never did."""
    rows = tx.execute(
        "SELECT message.seq FROM message JOIN session ON session.sid = message.sid"
        " WHERE message.id = :id AND session.id = :session",
        {"id": message_id, "session": session_id},
    )
    return rows[0][0] if rows else None


def list_pending(tx: Tx, session_id: SessionId) -> list[PendingInfo]:
    sid = _sid(tx, session_id)
    rows = tx.execute(
        "SELECT lane, pos, wakes, message FROM inbox WHERE sid = :sid ORDER BY lane, pos",
        {"sid": sid},
    )
    return [
        PendingInfo(_decode_message(raw), "next_turn" if lane else "next_step", bool(wakes), pos)
        for lane, pos, wakes, raw in rows
    ]


def agent_status(tx: Tx, session_id: SessionId) -> tuple[Status, int]:
    """``running`` or ``idle``, and the seq this was true at."""
    rows = tx.execute("SELECT status, head FROM session WHERE id = :id", {"id": session_id})
    if not rows:
        raise UnknownSession(f"there is no session {session_id}")
    return rows[0][0], rows[0][1]


def _sid(tx: Tx, session_id: SessionId) -> int:
    rows = tx.execute("SELECT sid FROM session WHERE id = :id", {"id": session_id})
    if not rows:
        raise UnknownSession(
            f"there is no session {session_id}", hint="`postroom session list` shows them"
        )
    return rows[0][0]


_COPIED = (
    "turn/start",
    "turn/end",
    "step/start",
    "step/end",
    "request/header",
    "user/message",
    "assistant/message",
    "tool/call",
    "tool/result",
    "model/retry",
    "history/compacted",
    "delivery/queued",
    "history/replaced",
)


def fork_session(
    tx: Tx,
    parent_id: SessionId,
    fork_id: SessionId,
    *,
    owner: str,
    at_seq: int | None = None,
) -> int:
    """Makes a session with another's history up to a seq; the fork's head.

    ``at_seq`` None: up to the end of the last closed turn. The fork has its own log, numbered
    from 1; pending messages stay with the parent. Running again finds the fork made.

    Raises:
        InputError: ``at_seq`` lies inside a turn, or past the end.
        SessionExists: ``fork_id`` is another session.
    """
    parent = lock_session(tx, parent_id)
    made = tx.execute("SELECT sid, head FROM session WHERE id = :id", {"id": fork_id})
    if made:
        first = tx.execute(
            "SELECT data FROM event WHERE sid = :sid AND seq = 1", {"sid": made[0][0]}
        )
        created = decode_data(SessionCreated.TYPE, first[0][0])
        assert isinstance(created, SessionCreated)
        if created.forked_from is None or created.forked_from.session_id != parent_id:
            raise SessionExists(f"session {fork_id} exists already")
        return made[0][1]
    last = tx.execute(
        "SELECT coalesce(max(seq), 1) FROM event WHERE sid = :sid AND type = 'turn/end'"
        " AND seq <= :at",
        {"sid": parent.sid, "at": parent.head if at_seq is None else at_seq},
    )[0][0]
    cut = last if at_seq is None else at_seq
    if not 1 <= cut <= parent.head:
        raise InputError(f"{parent_id} has events 1 to {parent.head}; it cannot be forked at {cut}")
    started = tx.execute(
        "SELECT count(*) FROM event WHERE sid = :sid AND type = 'turn/start'"
        " AND seq > :last AND seq <= :cut",
        {"sid": parent.sid, "last": last, "cut": cut},
    )[0][0]
    if started:
        raise InputError(
            f"event {cut} of {parent_id} lies inside a turn",
            hint=f"fork at the end of a turn, for example at {last}",
        )
    created = SessionCreated(
        core_id=parent.core_id,
        owner=owner,
        cwd=parent.cwd,
        forked_from=ForkPoint(parent_id, cut),
    )
    fork = insert_session(tx, fork_id, created)
    if fork is None:  # another transaction made it in the meantime
        raise SessionExists(f"session {fork_id} exists already")
    fork.save()
    types = ", ".join(f"'{t}'" for t in _COPIED)
    tx.execute(
        "INSERT INTO event (sid, seq, type, at, data)"
        " SELECT :fork, 1 + row_number() OVER (ORDER BY seq), type, at, data FROM event"
        f" WHERE sid = :parent AND seq > 1 AND seq <= :cut AND type IN ({types})",
        {"fork": fork.sid, "parent": parent.sid, "cut": cut},
    )
    _renumber_compactions(tx, parent.sid, fork.sid, types)
    counts = tx.execute(
        "SELECT max(seq), count(CASE WHEN type = 'turn/start' THEN 1 END),"
        " count(CASE WHEN type IN ('step/start', 'model/retry') THEN 1 END),"
        f" max(CASE WHEN type IN {_HISTORY} THEN seq END) FROM event WHERE sid = :sid",
        {"sid": fork.sid},
    )[0]
    head, turns, requests, history = counts
    cut_at = tx.execute(
        "SELECT at FROM event WHERE sid = :sid AND seq = :cut", {"sid": parent.sid, "cut": cut}
    )[0][0]
    copy_records(tx, parent.sid, fork.sid, turns=turns, cut_at=cut_at)
    state = AgentState(turns=turns, requests=requests)
    tx.execute(
        "UPDATE session SET head = :head, state = :state, history = :history WHERE sid = :sid",
        {
            "head": head,
            "state": msgspec.json.encode(state).decode(),
            "history": history or 0,
            "sid": fork.sid,
        },
    )
    return head


def _renumber_compactions(tx: Tx, parent: int, fork: int, types: str) -> None:
    """A copied compaction names seqs of the parent's log: they become the fork's own."""
    rows = tx.execute(
        "SELECT seq, data FROM event WHERE sid = :sid AND type = 'history/compacted' ORDER BY seq",
        {"sid": fork},
    )
    for seq, raw in rows:
        data = decode_data(HistoryCompacted.TYPE, raw)
        assert isinstance(data, HistoryCompacted)

        def mapped(old: int) -> int:
            return tx.execute(
                "SELECT 1 + count(*) FROM event WHERE sid = :sid AND seq > 1 AND seq <= :old"
                f" AND type IN ({types})",
                {"sid": parent, "old": old},
            )[0][0]

        moved = msgspec.structs.replace(
            data, from_seq=mapped(data.from_seq - 1) + 1, to_seq=mapped(data.to_seq)
        )
        tx.execute(
            "UPDATE event SET data = :data WHERE sid = :sid AND seq = :seq",
            {"data": encode_data(moved), "sid": fork, "seq": seq},
        )
        tx.execute(
            "UPDATE session SET context_from = :seq WHERE sid = :sid",
            {"seq": moved.to_seq + 1, "sid": fork},
        )


def delete_session(tx: Tx, session_id: SessionId) -> bool:
    """Removes an idle session with its log; False if there never was one. Running again: True.

    Message ids stay known, so that a late repeat of one is not taken for new.

    Raises:
        InputError: the agent is running.
    """
    rows = tx.execute(
        f"SELECT sid, status FROM session WHERE id = :id{tx.for_update}", {"id": session_id}
    )
    gone = msgspec.json.encode({"sessionId": session_id}).decode()
    if not rows:
        return bool(
            tx.execute("SELECT 1 FROM event WHERE sid = 0 AND data = :gone", {"gone": gone})
        )
    sid, status = rows[0]
    if status != "idle":
        raise InputError(f"{session_id} is running", hint="cancel it and wait until it is idle")
    tx.execute(
        "DELETE FROM work WHERE kind IN ('delivery.send', 'delivery.reconcile')"
        " AND key IN (SELECT id FROM delivery WHERE sid = :sid)",
        {"sid": sid},
    )
    tx.execute(
        "DELETE FROM part WHERE delivery IN (SELECT id FROM delivery WHERE sid = :sid)",
        {"sid": sid},
    )
    for table in (
        "inbox",
        "run",
        "usage",
        "delivery",
        "route",
        "binding",
        "conversation",
        "approval",
        "artifact",
    ):
        tx.execute(f"DELETE FROM {table} WHERE sid = :sid", {"sid": sid})
    newest = tx.execute("SELECT coalesce(max(id), 0) FROM event")[0][0]
    tx.execute("DELETE FROM event WHERE sid = :sid", {"sid": sid})
    tx.execute("DELETE FROM work WHERE key = :id", {"id": session_id})
    tx.execute("DELETE FROM session WHERE sid = :sid", {"sid": sid})
    # A mark in place of the log. Event ids must not be given twice, as other processes have seen
    # this far: where the newest went, the mark takes its id.
    id_column, id_value = "", ""
    if not tx.execute("SELECT 1 FROM event WHERE id = :id", {"id": newest}):
        id_column, id_value = "id, ", ":id, "
    tx.execute(
        f"INSERT INTO event ({id_column}sid, seq, type, at, data) SELECT {id_value}0,"
        " 1 + coalesce(max(seq), 0), 'log/pruned', :now, :gone FROM event WHERE sid = 0",
        {"id": newest, "now": tx.now(), "gone": gone},
    )
    return True


def set_title(tx: Tx, session_id: SessionId, title: str) -> None:
    session = lock_session(tx, session_id)
    tx.execute(
        "UPDATE session SET title = :title WHERE sid = :sid",
        {"title": title, "sid": session.sid},
    )
