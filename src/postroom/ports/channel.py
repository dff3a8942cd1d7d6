"""A platform as the delivery runtime and the inbound runtime see it.

A channel has three duties. It turns platform events into `Inbound` values and hands them to the
`Sink` it is run with; it acknowledges the platform only after the sink has returned, for then the
message, its dedupe key and the cursor are on disk. It sends one part and says how that ended. And,
where the platform allows it, it finds out whether a part in doubt arrived.

It keeps no durable state: an object of it may be dropped and a new one made at any moment.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec

from postroom.domain.conversation import ConversationKey
from postroom.domain.ids import DeliveryId, MessageId, SessionId
from postroom.domain.message import InputBlock, MediaBlock
from postroom.domain.outbox import SendOutcome, Verdict
from postroom.errors import PostroomError

Unit: TypeAlias = Literal["utf16", "codepoint", "utf8"]
PartKind: TypeAlias = Literal["text", "media", "progress", "notice", "approval"]


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a platform can do, as data.

    ``text_max`` is the longest text of one part, counted in ``unit``. ``reconciles``: the platform
    can be asked about a part in doubt. ``repeat_window_ms``: for how long after a part's first
    attempt a repeat with the same key is taken for the same message (0: it never is); half of it
    is used. ``settle_ms``: how long after a call has ended the platform may still accept it.
    ``send_timeout_ms`` bounds one call. ``progress``: whether progress lines are shown there.
    """

    text_max: int = 4096
    unit: Unit = "codepoint"
    reconciles: bool = False
    repeat_window_ms: int = 0
    settle_ms: int = 5_000
    send_timeout_ms: int = 30_000
    progress: bool = False


class OutPart(msgspec.Struct, frozen=True, kw_only=True):
    """One platform message, ready to be sent.

    ``key`` is the part's own idempotency key and never changes; ``first_attempt_at`` is when it was
    first tried (Unix ms; None: this is the first time), ``attempt`` counts from 1. ``media`` is the
    file of a media part, ``text`` its caption then. ``reply_to`` is the platform's id of the
    message answered; only the first part of a delivery has one. ``conversation`` names its thread
    too (None: the route is a connection, which has none).
    """

    session_id: SessionId
    delivery_id: DeliveryId
    index: int
    count: int
    kind: PartKind
    conversation: ConversationKey | None
    key: str
    text: str
    media: MediaBlock | None = None
    reply_to: str | None = None
    attempt: int = 1
    first_attempt_at: int | None = None


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """``name`` is for people, ``id`` the platform's opaque id."""

    id: str
    name: str | None = None


class Inbound(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a platform, understood.

    ``dedupe`` names the event for ever within its channel; ``cursor`` (name, value) is committed
    with it. ``replaces`` is the dedupe key of the message that this one edits; ``deletes`` the one
    it deletes (then it has no content). ``origin`` is the platform's id of the message.
    """

    channel: str
    conversation: ConversationKey
    sender: Sender
    content: tuple[InputBlock, ...]
    dedupe: str
    cursor: tuple[str, str] | None = None
    replaces: str | None = None
    deletes: str | None = None
    origin: str | None = None
    group: bool = False
    automatic: bool = False


class Accepted(msgspec.Struct, frozen=True):
    """What became of an inbound event, committed. ``message_id`` None: nothing was queued for it.

    ``outcome``: ``queued``; ``command`` (a channel command, answered through the outbox);
    ``duplicate``; ``refused`` (the sender may not talk here); ``ignored`` (own or automatic);
    ``edited`` and ``deleted`` for a pending message; ``quarantined``.
    """

    outcome: Literal[
        "queued",
        "command",
        "duplicate",
        "refused",
        "ignored",
        "edited",
        "deleted",
        "quarantined",
    ]
    session_id: SessionId | None = None
    message_id: MessageId | None = None


class Sink(Protocol):
    """Where a channel hands its events."""

    async def __call__(self, inbound: Inbound) -> Accepted:
        """Returns once it is on disk: the platform may be acknowledged now.

        Raises:
            PostroomError: it was not taken; the platform must not be acknowledged.
        """
        ...

    async def cursor(self, channel: str, name: str) -> str | None:
        """The value committed last under this name; None: none ever was."""
        ...

    async def quarantine(
        self,
        channel: str,
        dedupe: str,
        raw: bytes,
        error: str,
        cursor: tuple[str, str] | None = None,
    ) -> None:
        """Keeps an event that could not be understood, and moves the cursor past it."""
        ...


class Channel(Protocol):
    """One configured connection to a platform, by its ``name`` (unique within a process)."""

    @property
    def name(self) -> str: ...

    @property
    def profile(self) -> Profile: ...

    async def run(self, sink: Sink) -> None:
        """Receives until it is cancelled. What it raises ends it; it is started again, with backoff.

        Returning means that there is nothing to receive here.
        """
        ...

    async def send(self, part: OutPart) -> SendOutcome:
        """Makes one attempt, no retry inside. Whatever it raises counts as `Uncertain`."""
        ...

    async def reconcile(self, part: OutPart) -> Verdict:
        """Whether a part in doubt arrived. Whatever it raises counts as `CannotTell`."""
        ...

    async def typing(self, conversation: ConversationKey) -> None:
        """Shows that the agent works, where the platform can; may do nothing."""
        ...

    async def aclose(self) -> None: ...


class ChannelError(PostroomError):
    """A channel cannot work: its configuration, its credentials, or its platform is at fault."""

    code = "channel"
