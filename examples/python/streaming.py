"""Show an answer while it is written.

Live tokens are for showing: pieces may be missing, and they keep no step with the events. What counts are
the events, which are committed before anybody hears of them, and the result that is folded from them.
"""

import asyncio
import json
from pathlib import Path

import postroom

# A script in the place of a model: one answer, in nine pieces.
SCRIPT = {"replies": [{"text": "Once upon a time there was a queue.", "chunks": 9}]}


async def main() -> None:
    async with postroom.connect(database="example.db", model="scripted:story.json") as room:
        session = await room.session("story")
        result = await session.run(
            "Tell me a story.",
            timeout=60,
            on_delta=lambda delta: print(delta.text, end="|", flush=True),
        )
        print(f"\n{result.usage.output_tokens} tokens")


Path("story.json").write_text(json.dumps(SCRIPT))
asyncio.run(main())
