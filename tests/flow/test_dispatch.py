"""What an item on its way is called in memory is said of the durable state, never ahead of it."""

from __future__ import annotations

import pytest

from postroom.domain.conversation import conversation_key
from postroom.domain.ids import DeliveryId, SessionId
from postroom.domain.outbox import DeliveryStatus
from postroom.ports.channel import OutPart
from postroom.ports.route import InteractionItem, InteractionOutbound, RouteError, dispatch_status

PART = OutPart(
    session_id=SessionId("session_one"),
    delivery_id=DeliveryId("dlv_one"),
    index=0,
    count=1,
    kind="text",
    conversation=conversation_key("loopback", "dm", "ann"),
    key="dlv_one.0",
    text="hello",
)


@pytest.mark.contract("OUT-17")
@pytest.mark.parametrize(
    ("durable", "called"),
    [
        ("queued", "pending"),
        ("sending", "scheduled"),
        ("sent", "delivered"),
        ("failed", "failed"),
        ("unrouted", "unrouted"),
        ("unknown", "unknown"),
    ],
)
def test_an_item_is_called_by_its_durable_status(durable: DeliveryStatus, called: str) -> None:
    assert dispatch_status(durable) == called
    assert InteractionItem(PART, durable).dispatch_status == called


@pytest.mark.contract("RTR-02", "RTR-03")
def test_an_outbound_names_its_session_and_holds_only_its_items() -> None:
    with pytest.raises(RouteError, match="names none"):
        InteractionOutbound(SessionId(""), (InteractionItem(PART),))
    with pytest.raises(RouteError, match="another session"):
        InteractionOutbound(SessionId("session_two"), (InteractionItem(PART),))
