"""One question, one answer.

The runtime lives in this program and keeps everything in example.db. `scripted:echo` answers with what
it is told, without any key; put in a model of yours, as "openai:gpt-5-mini" or "ollama:qwen3".
"""

import asyncio

import postroom


async def main() -> None:
    async with postroom.connect(database="example.db", model="scripted:echo") as room:
        session = await room.session("notes")
        result = await session.run("The key is under the mat.", timeout=60)
        print(result.final_response, f"({result.finish_reason})")


asyncio.run(main())
