"""What a fake platform does when it is called, and what it writes down.

Everything a platform knows is a fact in a list that only grows, so a platform in memory and one in a
file, which many processes share, are the same thing. Times are Unix milliseconds. A conversation
is the platform's own id of it, such as ``ann``; the key of it is the channel's to build.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from postroom.domain.outbox import SendOutcome, Verdict
from postroom.ports.channel import PartKind, Profile

Verb: TypeAlias = Literal["send", "reconcile", "receive"]
Moment: TypeAlias = Literal["before_call", "accepted", "answered"]

# ---- what it does with a call ----


class Accept(msgspec.Struct, frozen=True, tag=True):
    """Takes it and says so. What happens where nothing else was asked for."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Does not take it. Not ``retryable``: for what it is, so a message taken before stays taken."""

    reason: str = "refused"
    retryable: bool = False


class RefuseMarkup(msgspec.Struct, frozen=True, tag=True):
    """Does not take it as it is marked up; it may take the plain text."""


class AskToWait(msgspec.Struct, frozen=True, tag=True):
    delay_ms: int


class NoConnection(msgspec.Struct, frozen=True, tag=True):
    """Nothing leaves the machine."""

    reason: str = "no connection"


class Lose(msgspec.Struct, frozen=True, tag=True):
    """The connection breaks before an answer. ``accepted``: the message had been taken by then.

    ``raises``: the adapter lets the exception out, as one with a fault does.
    """

    accepted: bool = True
    raises: bool = False


class Hang(msgspec.Struct, frozen=True, tag=True):
    """Gives no answer until `Platform.release`. ``accepted``: it is taken at once, else only then."""

    accepted: bool = False


class Late(msgspec.Struct, frozen=True, tag=True):
    """The call ends without an answer while the message is still under way.

    It arrives ``after_ms`` after the call began (None: when `Platform.arrive` is called), whatever
    has become of the caller. ``hangs``: the call does not end by itself.
    """

    after_ms: int | None = None
    hangs: bool = False


Behaviour: TypeAlias = (
    Accept | Refuse | RefuseMarkup | AskToWait | NoConnection | Lose | Hang | Late
)


class MarkupRefused(msgspec.Struct, frozen=True, tag=True):
    """The answer to a message whose markup was not taken."""


Reply: TypeAlias = SendOutcome | MarkupRefused

# ---- what is to be seen of it ----


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the people see it. ``media`` names the artifact of its file (None: it has none).

    ``plain``: it was sent without markup. ``at`` is when it was taken.
    """

    key: str
    conversation: str
    text: str
    kind: PartKind
    reference: str
    at: int
    media: str | None = None
    reply_to: str | None = None
    plain: bool = False


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a channel began, or one update that it was handed (then ``key`` is its label).

    ``number`` counts the calls of one ``verb`` from 1, over all processes. ``answer`` None: none was
    given; ``ended_at`` None: it is under way, or its process died, or the update was not acknowledged.
    """

    verb: Verb
    number: int
    key: str
    conversation: str
    at: int
    behaviour: Behaviour
    answer: Reply | Verdict | None = None
    ended_at: int | None = None


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One event on its way to the channel. ``position`` is its place in the order of delivery.

    ``label`` is the envelope's id; the event's own id is inside ``body``. The same event may come
    again under the same label or under another. ``beside``: it comes together with the one before.
    """

    position: int
    label: str
    body: str
    beside: bool = False


class Ack(msgspec.Struct, frozen=True):
    position: int
    at: int


class Typed(msgspec.Struct, frozen=True, tag=True):
    conversation: str
    at: int


# ---- the facts ----


class Founded(msgspec.Struct, frozen=True, tag=True):
    profile: Profile
    echoes: bool
    pulls: bool


class Scripted(msgspec.Struct, frozen=True, tag=True):
    """``conversation`` None: for any. ``standing``: from now on, where nothing else is queued."""

    verb: Verb
    behaviours: tuple[Behaviour, ...]
    conversation: str | None
    standing: bool


class Deadly(msgspec.Struct, frozen=True, tag=True):
    verb: Verb
    number: int
    moment: Moment


class Began(msgspec.Struct, frozen=True, tag=True):
    call: Call


class Ended(msgspec.Struct, frozen=True, tag=True):
    verb: Verb
    number: int
    answer: Reply | Verdict | None
    at: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    message: Message


class UnderWay(msgspec.Struct, frozen=True, tag=True):
    """``due`` None: until it is let in."""

    message: Message
    due: int | None


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """The oldest that is under way and has this key is so no more."""

    key: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """All calls that hang now."""


class Came(msgspec.Struct, frozen=True, tag=True):
    update: Update


class Reordered(msgspec.Struct, frozen=True, tag=True):
    """(old position, new position) of each that moved."""

    places: tuple[tuple[int, int], ...]


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    ack: Ack


class Forgot(msgspec.Struct, frozen=True, tag=True):
    """How far the channel has come."""


class Resumed(msgspec.Struct, frozen=True, tag=True):
    """A channel came, with this cursor."""

    cursor: str | None


Fact: TypeAlias = (
    Founded
    | Scripted
    | Deadly
    | Began
    | Ended
    | Taken
    | UnderWay
    | Arrived
    | Released
    | Came
    | Reordered
    | Acknowledged
    | Forgot
    | Resumed
    | Typed
)
