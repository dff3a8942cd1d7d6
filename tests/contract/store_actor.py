"""A process with a store of its own, for tests that need a second one: to hold, to stop, to kill.

It reads a JSON list a line, ``[verb, …]``, and answers with a JSON line.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from postroom.domain.ids import ClaimToken, NodeId, SessionId
from postroom.domain.work import Fence
from postroom.errors import PostroomError
from postroom.ports.store import Store, Tx
from postroom.scripts.session import lock_session
from postroom.stores.node import renew_node
from postroom.stores.sqlite import SqliteStore
from postroom.testing.faults import FaultyVFS
from tests.contract.store_world import Hand, eventually


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(msgspec.to_builtins(answer)) + "\n")
    sys.stdout.flush()


class Actor:
    """The methods named ``do_…`` are the verbs."""

    def __init__(self, store: Store, disk: FaultyVFS | None) -> None:
        self._store = store
        self._disk = disk
        self._first_node = store.node
        self._lease_lost = 0
        self._fence = Fence(0, ClaimToken(""))
        self._release = threading.Event()
        store.on_lease_lost(self._lost)

    def _lost(self) -> None:
        self._lease_lost += 1

    async def act(self, verb: str, *args: Any) -> Any:
        do: Callable[..., Any] = getattr(self, f"do_{verb}")
        try:
            return await do(*args)
        except PostroomError as error:
            return {"error": error.code}

    async def do_create(self, session: str) -> Any:
        await Hand(self._store, SessionId(session)).create()

    async def do_queue(self, session: str, text: str, name: str | None = None) -> Any:
        return await Hand(self._store, SessionId(session)).queue(text, name=name)

    async def do_queue_many(self, session: str, count: int) -> Any:
        """One after the other, as fast as they are committed; the last receipt."""
        hand = Hand(self._store, SessionId(session))
        return [await hand.queue(f"theirs {n}") for n in range(count)][-1]

    async def do_claim(self, session: str) -> Any:
        """Claims under the identity that this process had when it started."""
        drive = await Hand(self._store, SessionId(session)).claim(self._first_node)
        if drive is None:
            return None
        self._fence = drive.fence
        return drive.fence

    async def do_claim_soon(self, session: str) -> Any:
        """Claims as soon as it can be had."""
        hand = Hand(self._store, SessionId(session))
        return (await eventually(hand.claim)).fence

    async def do_begin(self, session: str, turn: int) -> Any:
        progress = await Hand(self._store, SessionId(session)).begin(self._fence, turn)
        return [event.type for event in progress.events]

    async def do_finish(self, session: str, turn: int) -> Any:
        progress = await Hand(self._store, SessionId(session)).finish(self._fence, turn)
        return [event.type for event in progress.events]

    async def do_renew(self, token: str) -> Any:
        """Renews the lease of the first identity, as if it were still ours."""
        return await self._store.write(_renew, self._first_node, ClaimToken(token))

    async def do_node(self) -> Any:
        """The identity it has, the one it had, its lease's token, and how often the lease was lost."""
        token = await self._store.read(_token_of, self._first_node)
        return [self._store.node, self._first_node, token, self._lease_lost]

    async def do_hold(self, session: str, seconds: float) -> Any:
        """Holds what a script of this session has to wait for, in the middle of a script."""

        def script(tx: Tx) -> None:
            lock_session(tx, SessionId(session))
            say("held")
            self._release.wait(seconds)

        await self._store.write(script)
        return "released"

    async def do_fail_commit(self, session: str, text: str, name: str) -> Any:
        """Queues a message while the disk fails the COMMIT; tells what it was told."""
        assert self._disk is not None
        self._disk.wal_syncs_to_fail = 1
        return await self.do_queue(session, text, name)

    async def do_kill(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _renew(tx: Tx, node: NodeId, token: ClaimToken) -> bool:
    return renew_node(tx, node, token, 60_000)


def _token_of(tx: Tx, node: NodeId) -> str | None:
    rows = tx.execute("SELECT token FROM node WHERE id = :id", {"id": node})
    return rows[0][0] if rows else None


async def main(address: str, options: dict[str, Any]) -> None:
    disk = FaultyVFS() if options.pop("faulty", False) else None
    store: Store
    if address.startswith("postgresql://"):
        from postroom.stores.postgres import PostgresStore

        store = await PostgresStore.open(address, **options)
    else:
        vfs = disk.name if disk is not None else None
        store = await SqliteStore.open(Path(address), vfs=vfs, **options)
    actor = Actor(store, disk)
    say("open")
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        say(await actor.act(*json.loads(line)))
    await store.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
