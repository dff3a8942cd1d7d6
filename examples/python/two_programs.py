"""Two programs on one session.

Each has a runtime of its own over one database; here the second is a process, started by
`command=None`. Either may say something, both see the same log, and the session is driven by whoever
holds it: no answer is given twice.
"""

import asyncio
from contextlib import aclosing

import postroom
from postroom.client import Session
from postroom.domain.event import InboxQueued
from postroom.domain.message import text_of


async def watch(session: Session) -> None:
    async with aclosing(session.events()) as events:
        async for event in events:
            if isinstance(event.data, InboxQueued):
                print("watcher: somebody said", text_of(event.data.message.content))
            if event.type == "agent/idle":
                return


async def main() -> None:
    here = postroom.connect(database="example.db", model="scripted:echo")
    there = postroom.connect(command=None, database="example.db", model="scripted:echo")
    async with here as one, there as other:
        asking, watching = await one.session("shared"), await other.session("shared")
        watcher = asyncio.create_task(watch(watching))
        result = await asking.run("hello", timeout=60)
        print("asker:", result.final_response)
        await watcher
        answer = await watching.run("hello again", timeout=60)
        print("watcher:", answer.final_response)


asyncio.run(main())
