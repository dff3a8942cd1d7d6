"""Where one session's deliveries can go in this process, and what travels there."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec

from postroom.domain.ids import SessionId
from postroom.domain.outbox import DeliveryStatus, SendOutcome
from postroom.errors import PostroomError
from postroom.ports.channel import OutPart, Profile

DispatchStatus: TypeAlias = Literal[
    "pending", "scheduled", "delivered", "failed", "unrouted", "unknown"
]

_DISPATCH: dict[str, DispatchStatus] = {
    "queued": "pending",
    "sending": "scheduled",
    "sent": "delivered",
    "failed": "failed",
    "unrouted": "unrouted",
    "unknown": "unknown",
}


def dispatch_status(status: DeliveryStatus) -> DispatchStatus:
    """How an item is called in memory: always said of the durable state, never ahead of it."""
    return _DISPATCH[status]


class InteractionItem(msgspec.Struct, frozen=True):
    """One claimed part on its way. ``status`` is the durable one it was claimed with."""

    part: OutPart
    status: DeliveryStatus = "sending"

    @property
    def dispatch_status(self) -> DispatchStatus:
        return dispatch_status(self.status)


class InteractionOutbound(msgspec.Struct, frozen=True):
    """What is delivered together: always to the one session it names.

    Raises:
        RouteError: it names none, or an item is another session's.
    """

    session_id: SessionId
    items: tuple[InteractionItem, ...]

    def __post_init__(self) -> None:
        if not self.session_id:
            raise RouteError("an outbound names the session it belongs to; this one names none")
        if any(item.part.session_id != self.session_id for item in self.items):
            raise RouteError(f"an item of another session lies in an outbound of {self.session_id}")


class Question(msgspec.Struct, frozen=True):
    """Something asked of a person. ``choices`` empty: any text answers."""

    id: str
    session_id: SessionId
    text: str
    choices: tuple[str, ...] = ()


class Route(Protocol):
    """A connection that is bound to one session, in this process."""

    @property
    def session_id(self) -> SessionId: ...

    @property
    def channel(self) -> str:
        """What kind of connection it is, for people: ``terminal``, ``socket``, a channel's name."""
        ...

    @property
    def profile(self) -> Profile: ...

    async def deliver(self, outbound: InteractionOutbound) -> SendOutcome:
        """Sends the one item of it. Refuses another session's.

        Raises:
            RouteError: the outbound is another session's.
        """
        ...

    async def prompt_user(self, prompt: Question) -> str | None:
        """The person's answer; None: there was none."""
        ...

    async def request_approval(self, request: Question) -> bool | None:
        """Allowed or denied; None: shown, and decided later by the approval's id, or not at all."""
        ...


class RouteError(PostroomError):
    """An outbound and a route do not belong together."""

    code = "route"
