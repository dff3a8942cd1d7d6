"""What is sent: the content of a delivery, checked before anything is written.

A delivery's id is made of what it comes from wherever that has an id of its own (a reply, the end of
a turn), so that a script that runs twice makes one delivery.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from postroom.domain.event import EndReason, HistoryPolicy
from postroom.domain.ids import DeliveryId, SessionId
from postroom.domain.message import AssistantMessage, MediaBlock, text_of
from postroom.errors import InputError

Kind: TypeAlias = Literal[
    "reply", "text", "image", "audio", "video", "file", "progress", "notice", "approval"
]
_FLEETING = ("progress", "notice", "approval")
_TEXTUAL = ("reply", "text", *_FLEETING)


class Piece(msgspec.Struct, frozen=True):
    """One part before it is cut to a platform's measure. ``media`` has its caption in ``text``."""

    text: str
    media: MediaBlock | None = None


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Something to be delivered to a session's conversation.

    ``history_text`` is what the history keeps (None: the text itself; media must bring one).
    ``failure_history_text`` takes its place should the delivery fail. ``reply_to`` is the
    platform's id of the message it answers. ``source`` names the tool or module it came from;
    ``metadata`` is theirs, kept with the event, and addresses nothing.
    """

    id: DeliveryId
    kind: Kind
    pieces: tuple[Piece, ...]
    policy: HistoryPolicy = "persist"
    history_text: str | None = None
    failure_history_text: str | None = None
    reply_to: str | None = None
    source: str | None = None
    metadata: dict[str, str] = {}


def checked(parcel: Parcel) -> Parcel:
    """The parcel as it may be written.

    Raises:
        InputError: it is empty; it writes history and brings no text for it; progress and notices
            were to be kept.
    """
    if not any(p.text or p.media for p in parcel.pieces):
        raise InputError("there is nothing to send", hint="give a text or a file")
    if parcel.kind in _FLEETING:
        if parcel.policy != "transient" or parcel.history_text is not None:
            raise InputError(f"a {parcel.kind} is never history", hint="send a text to keep it")
    elif parcel.policy != "transient" and parcel.kind not in _TEXTUAL and not parcel.history_text:
        raise InputError(
            f"this {parcel.kind} writes history and has no history_text",
            hint="say in words what was sent, or send it with history='transient'",
        )
    if parcel.policy == "transient" and parcel.failure_history_text is not None:
        raise InputError("what is not in the history cannot be replaced in it")
    return parcel


def history_text(parcel: Parcel) -> str:
    if parcel.history_text is not None:
        return parcel.history_text
    return "\n\n".join(p.text for p in parcel.pieces if p.text)


def of_reply(message: AssistantMessage) -> Parcel | None:
    """The delivery that a committed reply owes; None if it says nothing."""
    text = text_of(message.content)
    if not text.strip():
        return None
    return Parcel(id=_made_of(message.id), kind="reply", pieces=(Piece(text),))


def of_ending(session_id: SessionId, turn: int, reason: EndReason, silent: bool) -> Parcel | None:
    """What the conversation is told at a turn's end; None where the reply says it all.

    ``silent``: the last message of the turn was empty.
    """
    text = _told(reason, silent)
    if text is None:
        return None
    return Parcel(
        id=DeliveryId(f"dlv_end_{session_id}_{turn}"),
        kind="notice",
        pieces=(Piece(text),),
        policy="transient",
    )


_ENDINGS = {
    "max_tokens": "The answer was cut off: it became longer than this model may write."
    " Ask for the rest, or for less at a time.",
    "max_steps": "I stopped after the most steps one turn may take. Say “go on” to continue.",
    "refused": "The model declined to answer this. Say it in another way, or ask something else.",
}
_ERRORS = {
    "recovery_exhausted": "This work was interrupted too often and was given up."
    " What was done is kept; send it again to start anew.",
    "budget": "The limit set for spending is reached, so nothing was asked of the model."
    " The operator can raise it.",
    "auth": "The model's provider refused the credentials. The operator has to mend that;"
    " /retry asks again.",
    "quota": "The model's provider says the account is exhausted. The operator has to mend that;"
    " /retry asks again.",
    "context_overflow": "This conversation has become too long for the model."
    " /new starts another one.",
}
_ERROR = "Something went wrong while answering, and I gave up on it. /retry asks again."


def _told(reason: EndReason, silent: bool) -> str | None:
    if reason.kind in _ENDINGS:
        return _ENDINGS[reason.kind]
    if reason.kind == "rejected":
        return "This message was not let in." + (f" {reason.message}" if reason.message else "")
    if reason.kind == "error":
        return _ERRORS.get(reason.code or "", _ERROR)
    if reason.kind == "completed" and silent:
        return "Done; there is nothing to add."
    return None


def _made_of(reply_id: str) -> DeliveryId:
    return DeliveryId("dlv_" + reply_id.removeprefix("reply_"))
