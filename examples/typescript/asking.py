"""A runtime of one's own that asks before it runs a command: `postroom serve --stdio`, but for that."""

import argparse
import asyncio
import os

from postroom import builtin_cores, open_room
from postroom.server.stdio import serve_stdio

parser = argparse.ArgumentParser()
parser.add_argument("serve", choices=["serve"])
parser.add_argument("--stdio", action="store_true", required=True)
parser.add_argument("--model")
parser.add_argument("--db")
parser.add_argument("--drain", type=float, default=20)


async def main() -> None:
    said = parser.parse_args()
    core = builtin_cores(model=said.model, environ=os.environ)("default")
    core.permissions = {"bash": "ask", "write_file": "ask", "edit_file": "ask"}
    async with open_room(lambda _: core, database=said.db) as room:
        await serve_stdio(room, drain_ms=int(said.drain * 1000))


asyncio.run(main())
