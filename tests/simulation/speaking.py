"""A session whose turns owe deliveries: the reply, its delivery and ``turn/end`` are one transaction."""

from __future__ import annotations

from collections.abc import Hashable

from postroom.domain.event import TurnEnd
from postroom.domain.turn import Command, Finish
from tests.simulation import session as sessions
from tests.simulation.delivery import Lane, Lost
from tests.simulation.driver import Driving
from tests.simulation.session import Session, Tx


class Speaking(Session):
    """Makes a delivery for every turn that is completed."""

    lane: Lane

    def __init__(self, config: sessions.Config, lane: Lane) -> None:
        super().__init__(config)
        self.lane = lane
        self.start = self.start._replace(outbox=lane.start.outbox)

    def noted(self, tx: Tx, command: Command) -> None:
        if isinstance(command, Finish) and completed(tx):
            self.owe(tx)
        if self.lane.missing(tx.outbox):
            tx.broken.append("OUT-01 a turn has ended, and the delivery it owes is missing")

    def owe(self, tx: Tx) -> None:
        tx.outbox = self.lane.owe(tx.outbox)


def completed(tx: Tx) -> bool:
    return any(isinstance(e, TurnEnd) and e.reason.kind == "completed" for e in tx.events)


class Speaker(Driving):
    """A driver beside senders: what a commit means to them alone is nothing to it."""

    session: Speaking

    def touched(self, memory: Hashable, touch: Hashable) -> Hashable:
        return memory if isinstance(touch, Lost) else super().touched(memory, touch)
