"""The floor of a turn: what the same promise costs on the same stack with nothing else.

A message is on disk before it counts as received, and a reply before it counts as given: two
durable commits a turn, four with a tool call. One SQLite file, one writer thread with group
commit, one HTTP client, each message encoded once. It knows no queue, no claim, no cancel, no
recovery and no error: it is what is left of an agent runtime without a reason to have one.

It imports nothing of Postroom, and can be run as a whole process: ``python -m bench.floor URL
DATABASE PROMPT``.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Sequence

import aiohttp
import apsw
import msgspec

_SCHEMA = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA wal_autocheckpoint = 8000",
    "CREATE TABLE IF NOT EXISTS entry (id INTEGER PRIMARY KEY, session INTEGER, body BLOB)",
    "CREATE INDEX IF NOT EXISTS entry_session ON entry (session)",
)
_INSERT = "INSERT INTO entry (session, body) VALUES (?, ?)"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def synchronous(connection: apsw.Connection) -> str:
    """The setting of a connection, by its name."""
    level = connection.execute("PRAGMA synchronous").fetchall()[0][0]
    return ("OFF", "NORMAL", "FULL", "EXTRA")[int(str(level))]


class Group:
    """A writer thread: whatever statements are queued while it commits go into the next commit."""

    def __init__(self, path: str, setup: Sequence[str]) -> None:
        self.commits = 0
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[list, asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._connection = apsw.Connection(path)
        for statement in setup:
            self._connection.execute(statement).fetchall()
        self.synchronous = synchronous(self._connection)
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    async def write(self, statements: list) -> None:
        """Returns when these statements, each with its parameters, are on disk."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._queue.put((statements, future))
        await future

    def _main(self) -> None:
        execute = self._connection.execute
        while (first := self._queue.get()) is not None:
            group = [first]
            while len(group) < 512 and not self._queue.empty():
                if (further := self._queue.get()) is None:
                    self._queue.put(None)
                    break
                group.append(further)
            execute("BEGIN IMMEDIATE")
            for statements, _ in group:
                for sql, params in statements:
                    execute(sql, params).fetchall()
            execute("COMMIT")
            self.commits += 1
            self._loop.call_soon_threadsafe(_resolve, [future for _, future in group])

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._connection.close()


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Floor:
    """``url`` is the base of a Chat Completions API. Sessions are numbers."""

    def __init__(self, url: str, path: str) -> None:
        self.group = Group(path, _SCHEMA)
        self._path = path
        self._url = url + "/chat/completions"
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1000))
        self._histories: dict[int, list[bytes]] = {}

    def open(self, session: int) -> list[bytes]:
        """The history of a session, from memory or from the file."""
        history = self._histories.get(session)
        if history is None:
            reader = apsw.Connection(self._path)
            rows = reader.execute(
                "SELECT body FROM entry WHERE session = ? ORDER BY id", (session,)
            )
            history = self._histories[session] = [row[0] for row in rows]
            reader.close()
        return history

    async def past(self, session: int, texts: Sequence[str]) -> None:
        """Gives a session messages it had before, in one commit."""
        roles = ("user", "assistant")
        bodies = [_encode({"role": roles[n % 2], "content": t}) for n, t in enumerate(texts)]
        await self.group.write([(_INSERT, (session, body)) for body in bodies])

    async def turn(self, session: int, text: str) -> str:
        history = self.open(session)
        await self._add(session, history, {"role": "user", "content": text})
        while True:
            message = await self._request(history)
            await self._add(session, history, message)
            calls = message.get("tool_calls")
            if not calls:
                return str(message["content"])
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "done"}
            await self._add(session, history, result)

    async def _add(self, session: int, history: list[bytes], message: dict) -> None:
        body = _encode(message)
        await self.group.write([(_INSERT, (session, body))])
        history.append(body)

    async def _request(self, history: list[bytes]) -> dict:
        body = b'{"model":"mock","stream":true,"messages":[' + b",".join(history) + b"]}"
        text: list[str] = []
        call: dict = {}
        async with self._client.post(self._url, data=body) as response:
            pieces: list[bytes] = []
            while data := await response.content.readany():
                pieces.append(data)
        for line in b"".join(pieces).split(b"\n"):
            if not line.startswith(b"data: {"):
                continue
            for choice in _decode(line[6:])["choices"]:
                delta = choice["delta"]
                if delta.get("content"):
                    text.append(delta["content"])
                for part in delta.get("tool_calls", ()):
                    function = part["function"]
                    if "id" in part:
                        call = {"id": part["id"], "type": "function", "function": function}
                    else:
                        call["function"]["arguments"] += function["arguments"]
        if call:
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": "assistant", "content": "".join(text)}

    async def aclose(self) -> None:
        await self._client.close()
        self.group.close()


async def _main(url: str, path: str, prompt: str) -> None:
    floor = Floor(url, path)
    print(await floor.turn(1, prompt))
    await floor.aclose()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:4]))
