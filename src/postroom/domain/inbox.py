"""The inbox of a session: what is pending, and what a boundary may claim.

Two first-in-first-out lists. A *follow-up* waits in next-turn for a turn of its own; a *steer*
and an *inject* wait in next-step for the next step that runs. All but an inject wake the agent.

::

    queue ──> pending ──> entered      it became a user/message of a step
                     ├──> rejected     the policy refused it
                     ├──> cancelled    with its cause
                     └──> replaced     by another, in its place

A turn boundary claims all of next-step and at most one of next-turn; a boundary between steps
claims next-step only. Two follow-ups never share a turn.
"""

from __future__ import annotations

import msgspec

from postroom.domain.event import Target
from postroom.domain.ids import MessageId
from postroom.domain.message import Message


class Pending(msgspec.Struct, frozen=True):
    message: Message
    wakes: bool


class Inbox(msgspec.Struct, frozen=True):
    """What is pending, oldest first. A store may show only the head of ``next_turn``."""

    next_step: tuple[Pending, ...] = ()
    next_turn: tuple[Pending, ...] = ()

    @property
    def waking(self) -> bool:
        """Whether anything here opens a turn by itself."""
        if self.next_turn:
            return True
        return any(p.wakes for p in self.next_step)

    def find(self, message_id: MessageId) -> Pending | None:
        for pending in self.next_step + self.next_turn:
            if pending.message.id == message_id:
                return pending
        return None

    def add(self, pending: Pending, target: Target) -> Inbox:
        if target == "next_turn":
            return Inbox(self.next_step, (*self.next_turn, pending))
        return Inbox((*self.next_step, pending), self.next_turn)

    def without(self, message_id: MessageId) -> Inbox:
        return Inbox(
            tuple(p for p in self.next_step if p.message.id != message_id),
            tuple(p for p in self.next_turn if p.message.id != message_id),
        )

    def replace(self, message_id: MessageId, message: Message) -> Inbox:
        def swap(pending: Pending) -> Pending:
            return Pending(message, pending.wakes) if pending.message.id == message_id else pending

        return Inbox(tuple(map(swap, self.next_step)), tuple(map(swap, self.next_turn)))


EMPTY = Inbox()


def turn_batch(inbox: Inbox) -> tuple[Pending, ...]:
    """What a turn boundary claims: all of next-step, then at most one follow-up."""
    return inbox.next_step + inbox.next_turn[:1]


def step_batch(inbox: Inbox) -> tuple[Pending, ...]:
    """What a boundary between steps, or a recovery turn, claims."""
    return inbox.next_step
