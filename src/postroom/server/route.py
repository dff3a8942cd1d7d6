"""A connection as the route of one session: what is delivered there, and what its person is asked."""

from __future__ import annotations

import asyncio

import msgspec

from postroom.domain.ids import SessionId
from postroom.domain.outbox import NotStarted, SendOutcome, Sent, Uncertain
from postroom.errors import Disconnected
from postroom.ports.channel import Profile
from postroom.ports.route import InteractionOutbound, Question, RouteError
from postroom.wire.protocol import (
    ApprovalAnswer,
    ApprovalRequest,
    DeliveryNote,
    UserAnswer,
    UserPrompt,
)
from postroom.wire.rpc import Wire

# A text is not split for a program; a frame holds it in any encoding.
_PROFILE = Profile(text_max=4_000_000, unit="codepoint")
# Shorter than the profile's own limit of a call: what did not begin to leave by then is withdrawn.
_WITHIN_S = 20.0
_UNBOUND_WITHIN_S = 5.0

_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(UserAnswer).decode
_decode_approval = msgspec.json.Decoder(ApprovalAnswer).decode


class ConnectionRoute:
    """``channel`` is the kind of connection, for people."""

    def __init__(self, session_id: SessionId, wire: Wire, channel: str) -> None:
        self._session_id = session_id
        self._wire = wire
        self._channel = channel

    @property
    def session_id(self) -> SessionId:
        return self._session_id

    @property
    def channel(self) -> str:
        return self._channel

    @property
    def profile(self) -> Profile:
        return _PROFILE

    async def deliver(self, outbound: InteractionOutbound) -> SendOutcome:
        """Sent, once the operating system has taken the part. What never began to leave never did."""
        (item,) = outbound.items
        if outbound.session_id != self._session_id:
            raise RouteError(f"this route belongs to {self._session_id}, not {outbound.session_id}")
        part = item.part
        media = part.media
        note = DeliveryNote(
            part.session_id,
            part.delivery_id,
            part.index,
            part.count,
            part.kind,
            part.key,
            part.text,
            media.artifact if media is not None else None,
            media.media_type if media is not None else None,
            media.name if media is not None else None,
        )
        written = await self._wire.notify_surely(
            "session.delivery", _encode(note), within_s=_WITHIN_S
        )
        match written:
            case "written":
                return Sent(None)
            case "not_written":
                return NotStarted("the client does not read, or is gone")
            case "unsure":
                return Uncertain("the connection was lost while it was written")

    async def prompt_user(self, prompt: Question) -> str | None:
        asked = UserPrompt(prompt.id, prompt.session_id, prompt.text, list(prompt.choices))
        raw = await self._ask("user/prompt", _encode(asked))
        return _decode_answer(raw).answer if raw is not None else None

    async def request_approval(self, request: Question) -> bool | None:
        """Whatever it raises denies: see the router."""
        asked = ApprovalRequest(request.id, request.session_id, request.text)
        raw = await self._ask("approval/request", _encode(asked))
        return _decode_approval(raw).allow if raw is not None else False

    async def _ask(self, method: str, params: bytes) -> bytes | None:
        """The answer; None: the connection is lost.

        It is unbound in that moment, and the router, which knows what that means, stops waiting.
        """
        try:
            return await self._wire.request(method, params)
        except Disconnected:
            await asyncio.sleep(_UNBOUND_WITHIN_S)
            return None
