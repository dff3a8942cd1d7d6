"""A process that sends, asks or receives over a platform in a file, and may be killed by it.

``python -m tests.contract.loopback_child FILE VERB KEY``. It says what it was told, if it lives.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from postroom.domain.ids import DeliveryId, SessionId
from postroom.ports.channel import OutPart
from postroom.ports.clock import SystemClock
from postroom.testing.file_platform import FilePlatform
from postroom.testing.loopback import Loopback, dm
from tests.contract.channel_world import Desk

LIFE_S = 30


async def main(path: str, verb: str, key: str) -> None:
    channel = Loopback(FilePlatform(path))
    part = OutPart(
        session_id=SessionId("session_1"),
        delivery_id=DeliveryId("dlv_1"),
        index=0,
        count=1,
        kind="text",
        conversation=dm("ann"),
        key=key,
        text="hello",
        first_attempt_at=SystemClock().now_ms(),
    )
    if verb == "send":
        print(type(await channel.send(part)).__name__)
    elif verb == "reconcile":
        print(type(await channel.reconcile(part)).__name__)
    else:
        desk = Desk()
        receiving = asyncio.create_task(channel.run(desk))
        await channel.platform.until(lambda: not channel.platform.unacknowledged)
        receiving.cancel()
        print(*(inbound.dedupe for inbound in desk.taken))


if __name__ == "__main__":
    signal.alarm(LIFE_S)
    asyncio.run(main(*sys.argv[1:]))
