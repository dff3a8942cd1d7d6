"""Who may enter a turn: judged at the claim, outside any transaction."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import msgspec

from postroom.domain.ids import MessageId, SessionId
from postroom.domain.message import Message


class Admit(msgspec.Struct, frozen=True):
    pass


class Reject(msgspec.Struct, frozen=True):
    """``message_ids`` None: the whole batch. ``reason`` is recorded and told to the sender."""

    reason: str
    message_ids: tuple[MessageId, ...] | None = None


Verdict: TypeAlias = Admit | Reject


class Policy(Protocol):
    async def __call__(self, session_id: SessionId, batch: tuple[Message, ...]) -> Verdict: ...
