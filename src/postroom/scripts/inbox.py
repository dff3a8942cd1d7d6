"""Producers' scripts: queue, remove, replace, cancel. They are unfenced, under the session lock."""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

import msgspec

from postroom.domain.event import (
    CancelCause,
    InboxCancelled,
    InboxReplaced,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from postroom.domain.ids import ClaimToken, MessageId, SessionId
from postroom.domain.message import Message, content_hash
from postroom.domain.turn import Cancel, Queue, Remove, Replace, decide
from postroom.errors import MessageConflict, QueueFull, RunOverlap
from postroom.ports.store import Tx
from postroom.scripts.session import LockedSession, lock_session

Operation: TypeAlias = Literal["followup", "steer", "inject"]
RunMode: TypeAlias = Literal["exclusive", "share"]

_RETRIED = ("error", "refused", "max_steps", "max_tokens")


class Receipt(msgspec.Struct, frozen=True, rename="camel"):
    """The message is committed to the inbox as event ``seq``. It says nothing of a result."""

    message_id: MessageId
    seq: int


def queue_message(
    tx: Tx,
    session_id: SessionId,
    message: Message,
    operation: Operation,
    *,
    pending_max: int,
    run: RunMode | None = None,
) -> Receipt:
    """Puts a message into the inbox; the same id again gives the same receipt.

    Ids are kept for ever with a hash of their content, so a repeat is recognised however late.

    Raises:
        MessageConflict: the id was used for other content, or in another session.
        QueueFull: the inbox is at its cap.
        RunOverlap: ``run`` is exclusive and another run owns the interval.
    """
    session = lock_session(tx, session_id)
    receipt = put_message(session, message, operation, pending_max=pending_max, run=run)
    session.save()
    return receipt


def put_message(
    session: LockedSession,
    message: Message,
    operation: Operation,
    *,
    pending_max: int,
    run: RunMode | None,
) -> Receipt:
    """`queue_message` on a session already locked; appends, and does not save."""
    receipt = known_message(session, message)
    if receipt is not None:
        return receipt
    pending = session.count_pending()
    if pending >= pending_max:
        raise QueueFull(
            f"{pending} messages are pending in {session.id}, the limit is {pending_max}",
            hint="wait until some have run, or remove some: `postroom inbox list`",
        )
    if run is not None:
        own_run(session, message.id, run)
    wakes = operation != "inject"
    target = "next_turn" if operation == "followup" else "next_step"
    session.append(decide(session.state, Queue(message, target, wakes)))
    return Receipt(message.id, session.appended[0].seq)


def known_message(session: LockedSession, message: Message) -> Receipt | None:
    """The receipt given before for this id; None if the id is new."""
    rows = session.tx.execute(
        "SELECT sid, seq, hash FROM message WHERE id = :id", {"id": message.id}
    )
    if not rows:
        return None
    sid, seq, digest = rows[0]
    if sid != session.sid or digest != content_hash(message.content):
        raise MessageConflict(
            f"{message.id} was already used for another message",
            hint="mint a new id for each message; repeat an id only to retry the same one",
        )
    return Receipt(message.id, seq)


def own_run(session: LockedSession, message_id: MessageId, run: RunMode) -> None:
    """Marks the interval from this message to the next idle as owned."""
    if run == "exclusive" and session.tx.execute(
        "SELECT 1 FROM run WHERE sid = :sid", {"sid": session.sid}
    ):
        raise RunOverlap(
            f"another run owns the present interval of {session.id}",
            hint="wait until the agent is idle, or ask to share the interval",
        )
    session.tx.execute(
        "INSERT INTO run (sid, message_id, exclusive) VALUES (:sid, :id, :exclusive)",
        {"sid": session.sid, "id": message_id, "exclusive": int(run == "exclusive")},
    )


def retry_failed(
    tx: Tx, session_id: SessionId, *, pending_max: int
) -> list[tuple[MessageId, MessageId]]:
    """Queues the messages of the turns that failed since the last completed one again.

    The answer pairs each old id with its new one, in order, as long as that is pending. A new id is
    made of the old one, so running again, or retrying twice, queues nothing twice; what failed
    again has an id of its own to be made of.
    """
    session = lock_session(tx, session_id)
    entered: list[Message] = []
    failed: list[Message] = []
    for event in session.events(0, TurnStart, UserMessage, TurnEnd):
        data = event.data
        if isinstance(data, TurnStart) and not data.recovery:
            entered = []
        elif isinstance(data, UserMessage):
            entered.append(data.message)
        elif isinstance(data, TurnEnd):
            if data.reason.kind in _RETRIED:
                failed.extend(entered)
                entered = []
            elif data.reason.kind != "interrupted":
                failed = []
    pairs: list[tuple[MessageId, MessageId]] = []
    for old in failed:
        digest = hashlib.sha256(old.id.encode()).hexdigest()[:26]
        new = Message(MessageId(f"msg_again_{digest}"), old.content, old.source)
        if known_message(session, new) is not None and not _is_pending(session, new.id):
            continue
        put_message(session, new, "followup", pending_max=pending_max, run=None)
        pairs.append((old.id, new.id))
    session.save()
    return pairs


def remove_message(tx: Tx, session_id: SessionId, message_id: MessageId, ref: ClaimToken) -> bool:
    """Takes a pending message out; False if it is unknown, foreign, or already ended.

    ``ref`` is made by the caller for this one removal: running again with it answers True.
    """
    session = lock_session(tx, session_id)
    session.load_inbox(whole=True)
    if session.state.inbox.find(message_id) is None:
        return any(
            isinstance(e.data, InboxCancelled)
            and e.data.message_id == message_id
            and e.data.ref == ref
            for e in session.events(_seq_of(session, message_id), InboxCancelled)
        )
    session.append(decide(session.state, Remove(message_id, _driven(session), ref)))
    session.save()
    return True


def replace_message(tx: Tx, session_id: SessionId, message_id: MessageId, message: Message) -> bool:
    """Puts another message in a pending one's place; False as in `remove_message`.

    Running again finds the new id already in the place of the old.
    """
    session = lock_session(tx, session_id)
    if known_message(session, message) is not None:
        return any(
            isinstance(e.data, InboxReplaced)
            and e.data.message_id == message_id
            and e.data.message.id == message.id
            for e in session.events(_seq_of(session, message_id), InboxReplaced)
        )
    session.load_inbox(whole=True)
    if session.state.inbox.find(message_id) is None:
        return False
    session.append(decide(session.state, Replace(message_id, message)))
    session.save()
    return True


def _seq_of(session: LockedSession, message_id: MessageId) -> int:
    rows = session.tx.execute(
        "SELECT seq FROM message WHERE id = :id AND sid = :sid",
        {"id": message_id, "sid": session.sid},
    )
    return rows[0][0] if rows else session.head


def _is_pending(session: LockedSession, message_id: MessageId) -> bool:
    return bool(
        session.tx.execute(
            "SELECT 1 FROM inbox WHERE sid = :sid AND id = :id",
            {"sid": session.sid, "id": message_id},
        )
    )


def _driven(session: LockedSession) -> bool:
    return session.drive().status == "claimed"


def cancel(
    tx: Tx,
    session_id: SessionId,
    cause: CancelCause,
    *,
    keep_inbox: bool,
    ref: ClaimToken,
) -> int:
    """Records a cancel; the seq of the log after it.

    Empties what is pending (unless ``keep_inbox``) and marks the open turn, if there is one. ``ref``
    is made by the caller for this one cancel: running again with it, after a lost answer, touches
    nothing that came since.
    """
    session = lock_session(tx, session_id)
    if _was_cancelled(session, ref):
        return session.head
    session.load_inbox(whole=True)
    session.append(decide(session.state, Cancel(cause, keep_inbox, _driven(session), ref)))
    session.save()
    return session.head


_LOOK_BACK = 5_000


def _was_cancelled(session: LockedSession, ref: ClaimToken) -> bool:
    """Whether this very cancel is in the log. A script runs again within moments: it is near the end."""
    rows = session.tx.execute(
        "SELECT data FROM event WHERE sid = :sid AND seq > :after"
        " AND type IN ('turn/cancel', 'inbox/cancelled')",
        {"sid": session.sid, "after": session.head - _LOOK_BACK},
    )
    return any(f'"ref":"{ref}"' in row[0] for row in rows)
