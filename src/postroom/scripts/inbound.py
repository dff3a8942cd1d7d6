"""What comes in from a platform: one transaction for its dedupe key, cursor, session and message.

The first thing written is the dedupe key: whoever writes it takes the event, and everybody else, then
or later, finds out what became of it. Then the conversation's binding is locked: what comes in of one
conversation is taken one after the other, so that a message never lands in a session that a command
beside it has just left. The platform is acknowledged after the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from postroom.domain.conversation import ConversationKey
from postroom.domain.event import InboxReplaced, SessionCreated
from postroom.domain.ids import ClaimToken, CoreId, DeliveryId, MessageId, SessionId
from postroom.domain.message import Message, text_of
from postroom.domain.parcel import Parcel, Piece
from postroom.ports.channel import Accepted
from postroom.ports.store import Tx
from postroom.scripts.inbox import Operation, put_message, remove_message, replace_message
from postroom.scripts.routes import bind_conversation, write_binding
from postroom.scripts.sending import SEND
from postroom.scripts.session import LockedSession, insert_session, lock_session

TITLE_MAX = 60


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a platform with what the host adds.

    ``ref`` is made for this one handling of it, ``new_session`` is the id of the session that is
    made should the conversation have none. ``owner`` is the principal that session belongs to.
    """

    ref: ClaimToken
    core_id: CoreId
    channel: str
    conversation: ConversationKey
    dedupe: str
    cursor: tuple[str, str] | None
    owner: str
    new_session: SessionId
    cwd: str | None = None


# What a command does: it gets the session the conversation talks to, and may answer with a text.
Command: TypeAlias = Callable[[Tx, Arrival, SessionId], "Answer"]


class Answer(msgspec.Struct, frozen=True):
    """What a command says, and to which session it is said (it may have changed)."""

    text: str | None
    session_id: SessionId
    message_id: MessageId | None = None


def message_id_of(channel: str, dedupe: str) -> MessageId:
    """The id of the message an event becomes: the same event always becomes the same message."""
    digest = hashlib.sha256(f"{channel}\0{dedupe}".encode("utf-8", "surrogatepass")).hexdigest()
    return MessageId(f"msg_in_{digest[:40]}")


def accept_message(
    tx: Tx,
    arrival: Arrival,
    message: Message,
    *,
    pending_max: int,
    operation: Operation = "followup",
    replaces: str | None = None,
) -> Accepted:
    """Queues a message of a conversation; binds the conversation to its session first.

    ``replaces`` is the dedupe key of the message it edits: a pending one is replaced, where it
    waits; one that has entered a turn is followed by this new one.
    """
    known = _take(tx, arrival)
    if known is not None:
        return known
    if tx.execute("SELECT 1 FROM message WHERE id = :id", {"id": message.id}):
        # Its dedupe key was forgotten; a message's id never is.
        return _done(tx, arrival, Accepted("duplicate", None, message.id))
    session_id = _session_of(tx, arrival)
    if replaces is not None:
        found = _own_message(tx, arrival, replaces)
        if found is not None and replace_message(tx, *found, message):
            if found[0] == session_id:
                _bind(lock_session(tx, session_id), arrival)
            return _done(tx, arrival, Accepted("edited", found[0], message.id))
    session = lock_session(tx, session_id)
    _bind(session, arrival)
    busy = session.state.status == "running"
    put_message(session, message, operation, pending_max=pending_max, run=None)
    entitle(tx, session.sid, message)
    if busy and operation == "followup":
        _owe(session, arrival, queued_text(session.pending))
    session.save()
    return _done(tx, arrival, Accepted("queued", session_id, message.id))


def queued_text(pending: int) -> str:
    """What a busy chat is told of a message it just sent. ``pending`` counts it too."""
    if pending <= 1:
        return "Queued: it comes next. /queue shows what waits, /steer TEXT goes in between."
    return f"Queued: {pending - 1} before it. /queue shows what waits."


def delete_message(tx: Tx, arrival: Arrival, deletes: str) -> Accepted:
    """Takes back a message that its sender deleted, if it still waits."""
    known = _take(tx, arrival)
    if known is not None:
        return known
    found = _own_message(tx, arrival, deletes)
    if found is None:
        return _done(tx, arrival, Accepted("ignored"))
    removed = remove_message(tx, *found, arrival.ref)
    return _done(tx, arrival, Accepted("deleted" if removed else "ignored", found[0]))


def run_command(tx: Tx, arrival: Arrival, command: Command) -> Accepted:
    """Runs a channel command and answers it through the outbox, in one transaction."""
    known = _take(tx, arrival)
    if known is not None:
        return known
    answer = command(tx, arrival, _session_of(tx, arrival))
    session = lock_session(tx, answer.session_id)
    _bind(session, arrival)
    if answer.text is not None:
        _owe(session, arrival, answer.text)
        session.save()
    return _done(tx, arrival, Accepted("command", answer.session_id, answer.message_id))


def drop(tx: Tx, arrival: Arrival, accepted: Accepted) -> Accepted:
    """Remembers an event that nothing is queued for: refused, ignored."""
    return _take(tx, arrival) or _done(tx, arrival, accepted)


def quarantine(
    tx: Tx, channel: str, dedupe: str, raw: str, error: str, cursor: tuple[str, str] | None
) -> None:
    """Keeps an event that could not be understood, and moves the cursor past it, once."""
    row = {"channel": channel, "key": dedupe, "raw": raw, "error": error, "now": tx.now()}
    known = tx.execute("SELECT 1 FROM dedupe WHERE channel = :channel AND key = :key", row)
    kept = tx.execute(
        "INSERT INTO quarantine (channel, key, raw, error, at)"
        " VALUES (:channel, :key, :raw, :error, :now) ON CONFLICT (channel, key) DO NOTHING"
        " RETURNING 1",
        row,
    )
    if cursor is not None and kept and not known:
        _move(tx, channel, cursor)


def read_cursor(tx: Tx, channel: str, name: str) -> str | None:
    rows = tx.execute(
        "SELECT value FROM cursor WHERE channel = :channel AND name = :name",
        {"channel": channel, "name": name},
    )
    return rows[0][0] if rows else None


def forget_old(tx: Tx, before: int) -> None:
    """Drops the dedupe keys of events taken before a time (Unix ms): no platform repeats them now."""
    tx.execute("DELETE FROM dedupe WHERE at < :before", {"before": before})


def start_over(
    tx: Tx, arrival: Arrival, session_id: SessionId, *, to: SessionId | None
) -> SessionId:
    """Has the conversation talk to another session than ``session_id``: ``to``, or a new one (None).

    Whoever calls it binds the route (`run_command` does), and so takes it from the old session.
    """
    if to is None:
        to = arrival.new_session
        if to == session_id:
            return to  # it had none before: the one made for this very command is new
        made = insert_session(tx, to, _created(arrival))
        assert made is not None
        made.save()
        sid = made.sid
    else:
        sid = lock_session(tx, to).sid
    write_binding(tx, arrival.core_id, arrival.channel, arrival.conversation, sid)
    return to


def entitle(tx: Tx, sid: int, message: Message) -> None:
    """Calls a session by the first words said in it, if it has no title yet."""
    words = "".join(c if c.isprintable() else " " for c in text_of(message.content)).split()
    if not words:
        return
    title = " ".join(words)
    if len(title) > TITLE_MAX:
        cut = title[: TITLE_MAX - 1]
        title = (cut[: cut.rfind(" ")] if " " in cut else cut) + "…"
    tx.execute(
        "UPDATE session SET title = :title WHERE sid = :sid AND title IS NULL",
        {"title": title, "sid": sid},
    )


# ---- the steps ----


def _take(tx: Tx, arrival: Arrival) -> Accepted | None:
    """Takes the event, if nobody did; else what became of it."""
    row = {
        "channel": arrival.channel,
        "key": arrival.dedupe,
        "now": tx.now(),
        "ref": arrival.ref,
    }
    taken = tx.execute(
        "INSERT INTO dedupe (channel, key, at, outcome, ref) VALUES (:channel, :key, :now, '', :ref)"
        " ON CONFLICT (channel, key) DO NOTHING RETURNING 1",
        row,
    )
    if taken:
        if arrival.cursor is not None:
            _move(tx, arrival.channel, arrival.cursor)
        return None
    outcome, ref, session, message = tx.execute(
        "SELECT outcome, ref, session, message FROM dedupe WHERE channel = :channel AND key = :key",
        row,
    )[0]
    # The cursor moved with the first copy: a late one must not set it back.
    return Accepted(outcome if ref == arrival.ref else "duplicate", session, message)


def _done(tx: Tx, arrival: Arrival, accepted: Accepted) -> Accepted:
    tx.execute(
        "UPDATE dedupe SET outcome = :outcome, session = :session, message = :message"
        " WHERE channel = :channel AND key = :key",
        {
            "outcome": accepted.outcome,
            "session": accepted.session_id,
            "message": accepted.message_id,
            "channel": arrival.channel,
            "key": arrival.dedupe,
        },
    )
    return accepted


def _move(tx: Tx, channel: str, cursor: tuple[str, str]) -> None:
    tx.execute(
        "INSERT INTO cursor (channel, name, value, updated_at)"
        " VALUES (:channel, :name, :value, :now) ON CONFLICT (channel, name)"
        " DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at",
        {"channel": channel, "name": cursor[0], "value": cursor[1], "now": tx.now()},
    )


def _bound(tx: Tx, arrival: Arrival) -> SessionId | None:
    """The session the conversation is bound to; nobody binds it anew until this transaction is over."""
    rows = tx.execute(
        "SELECT sid FROM binding WHERE core_id = :core AND channel = :channel"
        f" AND conversation = :conversation{tx.for_update}",
        {
            "core": arrival.core_id,
            "channel": arrival.channel,
            "conversation": arrival.conversation,
        },
    )
    sid = rows[0][0] if rows else None
    named = tx.execute("SELECT id FROM session WHERE sid = :sid", {"sid": sid})
    return SessionId(named[0][0]) if named else None


def _own_message(tx: Tx, arrival: Arrival, dedupe: str) -> tuple[SessionId, MessageId] | None:
    """The message an event became, with its session, if it is this conversation's own.

    It may have been edited since, by its sender or with /queue: then it is what took its place.
    """
    message_id = message_id_of(arrival.channel, dedupe)
    rows = tx.execute(
        "SELECT session.id, message.seq FROM message"
        " JOIN session ON session.sid = message.sid"
        " JOIN conversation ON conversation.sid = message.sid"
        " WHERE message.id = :id AND conversation.core_id = :core"
        " AND conversation.channel = :channel AND conversation.conversation = :conversation",
        {
            "id": message_id,
            "core": arrival.core_id,
            "channel": arrival.channel,
            "conversation": arrival.conversation,
        },
    )
    if not rows:
        return None
    session = lock_session(tx, SessionId(rows[0][0]))
    for event in session.events(rows[0][1], InboxReplaced):
        data = event.data
        if isinstance(data, InboxReplaced) and data.message_id == message_id:
            message_id = data.message.id
    return session.id, message_id


def _bind(session: LockedSession, arrival: Arrival) -> None:
    """Makes the conversation the session's primary route; what waits for one may go there."""
    moved = bind_conversation(
        session.tx, session.sid, arrival.channel, arrival.conversation, arrival.ref
    )
    if moved and session.deliveries:
        session.tx.wake(SEND, session.id)


def _session_of(tx: Tx, arrival: Arrival) -> SessionId:
    """The session the conversation talks to; made if it has none. Two at once make one.

    The binding is written before its session is made: whoever comes second waits for the first.
    """
    first = tx.execute(
        "INSERT INTO binding (core_id, channel, conversation, sid, bound_at)"
        " VALUES (:core, :channel, :conversation, 0, :now)"
        " ON CONFLICT (core_id, channel, conversation) DO NOTHING RETURNING 1",
        {
            "core": arrival.core_id,
            "channel": arrival.channel,
            "conversation": arrival.conversation,
            "now": tx.now(),
        },
    )
    if not first:
        bound = _bound(tx, arrival)
        if bound is not None:
            return bound
    made = insert_session(tx, arrival.new_session, _created(arrival))
    assert made is not None
    made.save()
    write_binding(tx, arrival.core_id, arrival.channel, arrival.conversation, made.sid)
    return arrival.new_session


def _created(arrival: Arrival) -> SessionCreated:
    return SessionCreated(
        core_id=arrival.core_id, owner=arrival.owner, cwd=arrival.cwd, ref=arrival.ref
    )


def _owe(session: LockedSession, arrival: Arrival, text: str) -> None:
    """Something the host says to this conversation, outside of any turn."""
    parcel = Parcel(
        id=DeliveryId(f"dlv_in_{arrival.ref}"),
        kind="notice",
        pieces=(Piece(text),),
        policy="transient",
    )
    session.owe(parcel, None, decided=f"conv {arrival.channel} {arrival.conversation}")
