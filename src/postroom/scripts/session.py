"""The locked session: what every script that decides something about a session starts with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from postroom.domain.context import HISTORY_TYPES
from postroom.domain.event import (
    AgentIdle,
    AgentRunning,
    ApprovalDecided,
    AssistantReply,
    Event,
    EventData,
    HistoryCompacted,
    InboxCancelled,
    InboxQueued,
    InboxRejected,
    InboxReplaced,
    SessionCreated,
    ToolResult,
    TurnEnd,
    TurnStart,
    UserMessage,
    decode_data,
    encode_data,
)
from postroom.domain.ids import ClaimToken, CoreId, MessageId, NodeId, SessionId
from postroom.domain.inbox import EMPTY, Inbox, Pending
from postroom.domain.message import Message, content_hash, text_of
from postroom.domain.parcel import Parcel, of_ending, of_reply
from postroom.domain.turn import AgentState, Status, evolve
from postroom.domain.work import Fence, Work, WorkStatus, holds
from postroom.errors import SessionExists, StaleClaim, UnknownSession
from postroom.ports.store import Row, SqlValue, Tx
from postroom.scripts.routes import primary_route
from postroom.scripts.sending import Owed, write_parcels

DRIVE = "session.drive"
_DAY_MS = 86_400_000
LANES = {"next_step": 0, "next_turn": 1}

_replace = msgspec.structs.replace
_encode = msgspec.json.Encoder().encode
_decode_state = msgspec.json.Decoder(AgentState).decode
_decode_message = msgspec.json.Decoder(Message).decode


class LockedSession:
    """One session under its lock. Facts are appended, then everything is written by `save`.

    ``head`` is the seq of the last event, ``history`` that of the last one the model may see
    (``before``: as it was when the lock was taken).
    """

    __slots__ = (
        "_lanes",
        "_now",
        "_parcels",
        "_puts",
        "_rows",
        "appended",
        "before",
        "core_id",
        "cwd",
        "deliveries",
        "head",
        "header_hash",
        "history",
        "id",
        "owner",
        "parent",
        "pending",
        "sid",
        "state",
        "target",
        "turn_reply_to",
        "turn_route",
        "tx",
        "wakes_drive",
    )

    def __init__(self, tx: Tx, session_id: SessionId, row: Row) -> None:
        self.tx = tx
        self.id = session_id
        self.sid: int = row[0]
        self.core_id = CoreId(row[1])
        self.owner: str = row[2]
        self.cwd: str | None = row[3]
        self.parent: SessionId | None = row[4]
        self.head: int = row[5]
        self.state: AgentState = _decode_state(row[6])
        self.header_hash: str | None = row[7]
        self.history: int = row[8]
        self.before = self.history
        self.pending: int = row[9]
        self.deliveries: int = row[10]
        self.turn_route: str | None = row[11]
        self.target: str | None = row[12]
        self.turn_reply_to: str | None = row[13]
        self.appended: list[Event] = []
        self.wakes_drive = False
        self._rows: list[dict[str, SqlValue]] = []
        self._now = tx.now()
        self._lanes: dict[MessageId, tuple[int, int]] = {}
        self._puts: dict[MessageId, dict[str, SqlValue]] = {}
        self._parcels: list[Owed] = []

    # ---- reading what a decision needs ----

    def load_inbox(self, *, whole: bool = False) -> None:
        """Joins the pending messages to the state: all of next-step, and of next-turn all or two.

        Two are enough for every decision of a boundary: the one it claims, and whether another
        is left.
        """
        if self.pending == len(self._puts):
            return  # all that is pending was put by this script, and is in the state already
        limit = "" if whole else " LIMIT 2"
        rows = self.tx.execute(
            "SELECT lane, pos, wakes, message FROM inbox WHERE sid = :sid AND lane = 0"
            " UNION ALL SELECT lane, pos, wakes, message FROM ("
            " SELECT lane, pos, wakes, message FROM inbox WHERE sid = :sid AND lane = 1"
            f" ORDER BY pos{limit}) AS heads ORDER BY lane, pos",
            {"sid": self.sid},
        )
        first: list[Pending] = []
        second: list[Pending] = []
        for lane, pos, wakes, raw in rows:
            message = _decode_message(raw)
            self._lanes[message.id] = (lane, pos)
            (second if lane else first).append(Pending(message, bool(wakes)))
        for name, put in self._puts.items():  # not in the table yet
            pending = self.state.inbox.find(name)
            assert pending is not None
            (second if put["lane"] else first).append(pending)
        self.state = _replace(self.state, inbox=Inbox(tuple(first), tuple(second)))

    def count_pending(self) -> int:
        """How many messages are pending, those put by this script among them."""
        return self.pending

    def drive(self) -> Work:
        """The session's drive as it stands."""
        return read_work(self.tx, DRIVE, self.id)

    def events(self, after: int, *types: type[EventData]) -> list[Event]:
        """The log after a seq, for an answer to a script that runs again."""
        names = "".join(f", '{t.TYPE}'" for t in types)[2:]
        where = f" AND type IN ({names})" if names else ""
        rows = self.tx.execute(
            f"SELECT seq, type, at, data FROM event WHERE sid = :sid AND seq > :after{where}"
            " ORDER BY seq",
            {"sid": self.sid, "after": after},
        )
        return [Event(self.id, r[0], r[1], r[2], r[3]) for r in rows]

    # ---- writing ----

    def append(self, events: Iterable[EventData]) -> None:
        for data in events:
            self.head += 1
            type_ = data.TYPE
            raw = encode_data(data)
            self._rows.append(
                {"sid": self.sid, "seq": self.head, "type": type_, "at": self._now, "data": raw}
            )
            if type_ in HISTORY_TYPES and not (isinstance(data, ToolResult) and data.late):
                self.history = self.head
            self.state = evolve(self.state, data)
            self._project(data)
            event = Event(self.id, self.head, type_, self._now, raw, data)
            self.appended.append(event)
            self.tx.publish(event)

    def _project(self, data: EventData) -> None:
        tx = self.tx
        if isinstance(data, UserMessage):
            self._take(data.message.id)
            self.turn_reply_to = self.turn_reply_to or data.message.source.reference
        elif isinstance(data, InboxQueued):
            lane = LANES[data.target]
            self._lanes[data.message.id] = (lane, self.head)
            self._put(data.message, lane, self.head, data.wakes)
        elif isinstance(data, AgentRunning):
            self.wakes_drive = True
        elif isinstance(data, AgentIdle):
            release_work(tx, DRIVE, self.id)
            tx.execute("DELETE FROM run WHERE sid = :sid", {"sid": self.sid})
        elif isinstance(data, InboxCancelled | InboxRejected):
            self._take(data.message_id)
        elif isinstance(data, InboxReplaced):
            lane, pos = self._lanes[data.message_id]
            pending = self.state.inbox.find(data.message.id)
            assert pending is not None
            self._take(data.message_id)
            self._lanes[data.message.id] = (lane, pos)
            self._put(data.message, lane, pos, pending.wakes)
        elif isinstance(data, AssistantReply):
            self._count(data)
            reply = of_reply(data.message)
            if reply is not None:
                self.owe(reply, data.turn)
        elif isinstance(data, TurnStart):
            if not data.recovery:  # which answers where the interrupted turn would have
                self.turn_route = primary_route(tx, self.sid)
                self.turn_reply_to = None
        elif isinstance(data, TurnEnd):
            told = of_ending(self.id, data.turn, data.reason, self._is_silent())
            if told is not None:
                self.owe(told, data.turn)
        elif isinstance(data, ApprovalDecided):
            tx.execute(
                "UPDATE approval SET status = 'decided', decision = :decision, decided_by = :by"
                " WHERE id = :id",
                {"decision": data.decision, "by": data.by, "id": data.approval_id},
            )
        elif isinstance(data, HistoryCompacted):
            tx.execute(
                "UPDATE session SET context_from = :seq WHERE sid = :sid AND :first <= context_from",
                {"seq": data.to_seq + 1, "first": data.from_seq, "sid": self.sid},
            )

    def _is_silent(self) -> bool:
        """Whether the turn that ends here did something, and its last message says nothing."""
        last = next(
            (e.data for e in reversed(self.appended) if e.type == AssistantReply.TYPE), None
        )
        if not isinstance(last, AssistantReply) or last.step == 1:
            return False
        return not text_of(last.message.content).strip()

    def owe(self, parcel: Parcel, turn: int | None, *, decided: str | None = None) -> None:
        """Puts a delivery into the outbox, with what the log has been told already.

        ``turn`` is the one it was said in. ``decided`` is where it goes where that is not the
        turn's route.
        """
        route = decided or (self.turn_route if turn is not None else None)
        if turn is not None and parcel.reply_to is None and self.turn_reply_to is not None:
            parcel = _replace(parcel, reply_to=self.turn_reply_to)
        self._parcels.append(Owed(parcel, turn, self.head, route))

    def _count(self, reply: AssistantReply) -> None:
        usage = reply.usage
        if not usage.input_tokens and not usage.output_tokens:
            return
        self.tx.execute(
            "INSERT INTO usage (sid, day, model, requests, input_tokens, output_tokens,"
            " cached_tokens) VALUES (:sid, :day, :model, 1, :input, :output, :cached)"
            " ON CONFLICT (sid, day, model) DO UPDATE SET requests = usage.requests + 1,"
            " input_tokens = usage.input_tokens + excluded.input_tokens,"
            " output_tokens = usage.output_tokens + excluded.output_tokens,"
            " cached_tokens = usage.cached_tokens + excluded.cached_tokens",
            {
                "sid": self.sid,
                "day": self._now // _DAY_MS,
                "model": reply.model,
                "input": usage.input_tokens,
                "output": usage.output_tokens,
                "cached": usage.cached_tokens,
            },
        )

    def _put(self, message: Message, lane: int, pos: int, wakes: bool) -> None:
        self.pending += 1
        self.tx.execute(
            "INSERT INTO message (id, sid, seq, hash) VALUES (:id, :sid, :seq, :hash)",
            {
                "id": message.id,
                "sid": self.sid,
                "seq": self.head,
                "hash": content_hash(message.content),
            },
        )
        self._puts[message.id] = {
            "sid": self.sid,
            "lane": lane,
            "pos": pos,
            "id": message.id,
            "wakes": int(wakes),
            "message": _encode(message).decode(),
        }

    def _take(self, message_id: MessageId) -> None:
        self.pending -= 1
        if self._puts.pop(message_id, None) is not None:
            return  # put and taken by one script: the row is never written
        lane, pos = self._lanes[message_id]
        self.tx.execute(
            "DELETE FROM inbox WHERE sid = :sid AND lane = :lane AND pos = :pos",
            {"sid": self.sid, "lane": lane, "pos": pos},
        )

    def save(self) -> None:
        """Writes the appended events and the session row, once, at the end of the script."""
        if not self._rows and not self._parcels:
            return
        if self._parcels:
            self.deliveries = write_parcels(
                self.tx, self.sid, self.id, self.target, self.deliveries, self._parcels
            )
            self._parcels = []
        for row in self._puts.values():
            self.tx.execute(
                "INSERT INTO inbox (sid, lane, pos, id, wakes, message)"
                " VALUES (:sid, :lane, :pos, :id, :wakes, :message)",
                row,
            )
        self._puts.clear()
        if self._rows:
            self.tx.execute_many(
                "INSERT INTO event (sid, seq, type, at, data)"
                " VALUES (:sid, :seq, :type, :at, :data)",
                self._rows,
            )
        state = self.state
        if state.inbox is not EMPTY:
            state = _replace(state, inbox=EMPTY)
        self.tx.execute(
            "UPDATE session SET head = :head, status = :status, state = :state,"
            " header_hash = :header, history = :history, pending = :pending,"
            " deliveries = :deliveries, turn_route = :route,"
            " turn_reply_to = :reply_to, updated_at = :now WHERE sid = :sid",
            {
                "head": self.head,
                "status": state.status,
                "state": _encode(state).decode(),
                "header": self.header_hash,
                "history": self.history,
                "pending": self.pending,
                "deliveries": self.deliveries,
                "route": self.turn_route,
                "reply_to": self.turn_reply_to,
                "now": self._now,
                "sid": self.sid,
            },
        )
        self._rows = []
        if self.wakes_drive:
            ready_work(self.tx, DRIVE, self.id)
            self.tx.wake(DRIVE, self.id)


_COLUMNS = (
    "sid, core_id, owner, cwd, parent, head, state, header_hash, history, pending,"
    " deliveries, turn_route, target, turn_reply_to"
)


def lock_session(tx: Tx, session_id: SessionId, fence: Fence | None = None) -> LockedSession:
    """The session, locked until the end of the transaction. Every script's first statement.

    ``fence`` is the driver's: with it the script goes no further unless the claim still stands.

    Raises:
        UnknownSession: there is no such session.
        StaleClaim: the drive was taken over, released, or given back since.
    """
    rows = tx.execute(
        f"SELECT {_COLUMNS} FROM session WHERE id = :id{tx.for_update}", {"id": session_id}
    )
    if not rows:
        raise UnknownSession(
            f"there is no session {session_id}", hint="`postroom session list` shows them"
        )
    session = LockedSession(tx, session_id, rows[0])
    if fence is not None:
        check_fence(session, fence)
    return session


def check_fence(session: LockedSession, fence: Fence) -> None:
    if not holds(session.drive(), fence):
        raise StaleClaim(f"the drive of {session.id} is no longer held here")


class Opened(msgspec.Struct, frozen=True):
    """A session that exists now; ``created``: it did not before."""

    created: bool
    core_id: CoreId
    owner: str
    cwd: str | None
    head: int
    status: Status


def create_session(
    tx: Tx,
    session_id: SessionId,
    *,
    core_id: CoreId,
    owner: str,
    cwd: str | None = None,
    parent: SessionId | None = None,
    target: str | None = None,
    exclusive: bool = False,
    ref: ClaimToken | None = None,
) -> Opened:
    """Makes a session unless it exists.

    ``ref`` is made by the caller for this one call: running again with it answers that the session
    was created, as the first time. Without it running again finds a session that exists.

    Raises:
        SessionExists: it exists, and ``exclusive`` asks for a new one.
    """
    known = _opened(tx, session_id, ref)
    if known is None:
        session = insert_session(
            tx,
            session_id,
            SessionCreated(
                core_id=core_id, owner=owner, cwd=cwd, parent=parent, target=target, ref=ref
            ),
        )
        if session is not None:
            session.save()
            return Opened(True, core_id, owner, cwd, session.head, "idle")
        known = _opened(tx, session_id, ref)  # another transaction made it in the meantime
        assert known is not None
    if exclusive and not known.created:
        raise SessionExists(f"session {session_id} exists already")
    return known


def _opened(tx: Tx, session_id: SessionId, ref: ClaimToken | None) -> Opened | None:
    rows = tx.execute(
        "SELECT core_id, owner, cwd, head, status, sid FROM session WHERE id = :id",
        {"id": session_id},
    )
    if not rows:
        return None
    *known, sid = rows[0]
    return Opened(ref is not None and _made_by(tx, sid) == ref, *known)


def _made_by(tx: Tx, sid: int) -> str | None:
    """The ``ref`` of the call that made a session."""
    raw = tx.execute("SELECT data FROM event WHERE sid = :sid AND seq = 1", {"sid": sid})[0][0]
    created = decode_data(SessionCreated.TYPE, raw)
    assert isinstance(created, SessionCreated)
    return created.ref


def insert_session(tx: Tx, session_id: SessionId, created: SessionCreated) -> LockedSession | None:
    """A new session with its first event appended, not yet saved; None if the id is taken."""
    rows = tx.execute(
        "INSERT INTO session (id, core_id, owner, cwd, parent, status, head, state,"
        " created_at, updated_at, target) VALUES (:id, :core, :owner, :cwd, :parent, 'idle', 0,"
        f" '{{}}', :now, :now, :target) ON CONFLICT (id) DO NOTHING RETURNING {_COLUMNS}",
        {
            "id": session_id,
            "core": created.core_id,
            "owner": created.owner,
            "cwd": created.cwd,
            "parent": created.parent,
            "target": created.target,
            "now": tx.now(),
        },
    )
    if not rows:
        return None
    session = LockedSession(tx, session_id, rows[0])
    session.append((created,))
    return session


# ---- work items, as rows ----


def read_work(tx: Tx, kind: str, key: str) -> Work:
    rows = tx.execute(
        "SELECT status, epoch, token, owner FROM work WHERE kind = :kind AND key = :key",
        {"kind": kind, "key": key},
    )
    if not rows:
        return Work()
    status, epoch, token, owner = rows[0]
    return Work(
        cast("WorkStatus", status),
        epoch,
        ClaimToken(token) if token is not None else None,
        NodeId(owner) if owner is not None else None,
    )


def write_work(tx: Tx, kind: str, key: str, work: Work) -> None:
    tx.execute(
        "INSERT INTO work (kind, key, status, epoch, token, owner)"
        " VALUES (:kind, :key, :status, :epoch, :token, :owner)"
        " ON CONFLICT (kind, key) DO UPDATE SET status = excluded.status,"
        " epoch = excluded.epoch, token = excluded.token, owner = excluded.owner",
        {
            "status": work.status,
            "epoch": work.epoch,
            "token": work.token,
            "owner": work.owner,
            "kind": kind,
            "key": key,
        },
    )


def ready_work(tx: Tx, kind: str, key: str) -> None:
    """`domain.work.ready`, as one statement. Who calls it says so to others (`Tx.wake`)."""
    tx.execute(
        "INSERT INTO work (kind, key, status, epoch) VALUES (:kind, :key, 'ready', 0)"
        " ON CONFLICT (kind, key) DO UPDATE SET status = 'ready', token = NULL, owner = NULL"
        " WHERE work.status <> 'claimed'",
        {"kind": kind, "key": key},
    )


def release_work(tx: Tx, kind: str, key: str) -> None:
    """`domain.work.release`, as one statement: the epoch stays."""
    tx.execute(
        "UPDATE work SET status = 'none', token = NULL, owner = NULL"
        " WHERE kind = :kind AND key = :key",
        {"kind": kind, "key": key},
    )


def is_node(tx: Tx, node: NodeId) -> bool:
    """Whether a process is known under this identity and was not given up for dead."""
    return bool(tx.execute("SELECT 1 FROM node WHERE id = :id AND expires_at > 0", {"id": node}))


def lapsed(tx: Tx, owner: NodeId | None) -> bool:
    """Whether a claim's owner is no longer believed alive."""
    rows = tx.execute(
        "SELECT 1 FROM node WHERE id = :id AND expires_at > :now", {"id": owner, "now": tx.now()}
    )
    return not rows
