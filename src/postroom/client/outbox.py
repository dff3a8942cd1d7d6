"""The operator's view of what goes out, and the verbs for what got stuck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.room import Room

Decision: TypeAlias = Literal["sent", "failed", "queued"]


class Outbox:
    """``by`` names the operator who decides. A decision is never made twice by itself: where the
    connection goes before the answer, `Disconnected` is raised, and `list` tells how it stands.
    """

    def __init__(self, room: Room) -> None:
        self._room = room

    async def list(
        self,
        session_id: str | None = None,
        *,
        status: Sequence[str] = (),
        open: bool = False,
        limit: int = 50,
    ) -> list[said.Delivery]:
        """``session_id`` None: of all. ``status`` empty: in any. ``open``: only what is not settled."""
        asked = said.OutboxList(session_id, list(status), open, limit)
        answer = await self._room.call("outbox/list", asked, said.Deliveries, again=True)
        return answer.deliveries

    async def resolve(self, delivery_id: str, decision: Decision, *, by: str) -> said.Delivery:
        """Settles a delivery in doubt. ``queued`` sends it again: it may arrive twice."""
        asked = said.OutboxResolve(delivery_id, decision, by)
        return await self._room.call("outbox/resolve", asked, said.Delivery)

    async def redeliver(self, delivery_id: str, *, by: str) -> said.Delivery:
        """Puts a failed or unrouted delivery back into the queue."""
        asked = said.OutboxDecide(delivery_id, by)
        return await self._room.call("outbox/redeliver", asked, said.Delivery)

    async def abandon(self, delivery_id: str, *, by: str) -> said.Delivery:
        """Gives up a delivery that is still queued."""
        asked = said.OutboxDecide(delivery_id, by)
        return await self._room.call("outbox/abandon", asked, said.Delivery)
