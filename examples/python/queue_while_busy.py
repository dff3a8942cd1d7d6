"""Say more while the agent is busy.

A prompt waits for a turn of its own, a steer joins the next step, an injection joins it too but wakes
nobody. Each returns when it is on disk, and says nothing of a result. The run that was under way
collects all that happens until the agent is idle.
"""

import asyncio
import json
from pathlib import Path

import postroom
from postroom.client import Event

# The first answer takes half a second; what comes after it is echoed.
SCRIPT = {"replies": [{"text": "I am thinking.", "delay_ms": 500}], "then": "echo"}


async def main() -> None:
    async with postroom.connect(database="example.db", model="scripted:slow.json") as room:
        session = await room.session("busy")
        busy = asyncio.Event()

        def look(event: Event) -> None:
            if event.type == "step/start":
                busy.set()

        running = asyncio.create_task(session.run("Begin.", timeout=60, on_event=look))
        await busy.wait()
        receipt = await session.prompt("a second question")
        await session.prompt("a third, which is withdrawn")
        pending = await session.inbox()
        print(len(pending), "wait")
        await session.remove(pending[-1].message["id"])
        await session.replace(receipt.message_id, "a better second question")
        result = await running
        print(result.final_response)


Path("slow.json").write_text(json.dumps(SCRIPT))
asyncio.run(main())
