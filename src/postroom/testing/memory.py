"""A store in memory, without a thread: for tests that care about orders and not about disks.

It runs the same scripts on the same SQLite as the real engine does, one after the other, on the
event loop. So nothing happens while nobody lets it, and a test can try thousands of orders. It
keeps nothing, and it proves nothing about commits: those tests need the real engine.

Several nodes may share one database: ``MemoryStore(beside=store)`` is another one. A node's lease
lasts until `lapse` is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import apsw

from postroom import mint
from postroom.domain.ids import NodeId, SessionId
from postroom.errors import StoreClosed
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.store import EventListener, Subscription, Tx, WorkListener
from postroom.stores.hub import Hub
from postroom.stores.node import bury_nodes, register_node, remove_node
from postroom.stores.sqlite import SqliteTx, migrate

P = ParamSpec("P")
R = TypeVar("R")

_FOR_EVER_MS = 10**12


class _Shared:
    """One database and the nodes on it."""

    def __init__(self) -> None:
        connection = apsw.Connection(":memory:")
        migrate(connection, Path(":memory:"))
        self.connection = cast("Any", connection)  # the library's own types are left here
        self.nodes: list[MemoryStore] = []


class MemoryStore:
    """See the module. ``clock`` None: the system's."""

    can_notify = True

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        lease_ms: int = 90_000,
        beside: MemoryStore | None = None,
    ) -> None:
        self.lease_ms = lease_ms
        self.commits = 0
        self._clock: Clock = clock or SystemClock()
        self._shared = beside._shared if beside is not None else _Shared()
        self._shared.nodes.append(self)
        self._hub = Hub()
        self._node = mint.node_id()
        self._token = mint.claim_token()
        self._open = True
        self._run(register_node, self._node, self._token, _FOR_EVER_MS, "in memory")

    @property
    def node(self) -> NodeId:
        return self._node

    def lapse(self) -> None:
        """From now on the other nodes take this one for dead. It is not told."""
        self._run(bury_nodes, [self._node])

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if not self._open:
            raise StoreClosed("the store is closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def commit() -> None:
            if done.done():
                return  # withdrawn by who awaited it
            tx = SqliteTx(self._shared.connection, self._clock.now_ms)
            try:
                answer = self._run(script, *args, tx=tx, **kwargs)
            except Exception as error:
                done.set_exception(error)
                return
            # The caller first, then who listens; other nodes hear of it in a moment of their own.
            done.set_result(answer)
            self._tell(tx, dict.fromkeys(tx.hints))
            for other in self._shared.nodes:
                if other is not self:
                    loop.call_soon(other._tell, tx, {("*", "*"): None})

        loop.call_soon(commit)
        return await done

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if not self._open:
            raise StoreClosed("the store is closed")
        await asyncio.sleep(0)
        return script(SqliteTx(self._shared.connection, self._clock.now_ms), *args, **kwargs)

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        return self._hub.subscribe(session_id, listener)

    def on_work(self, listener: WorkListener) -> Subscription:
        return self._hub.on_work(listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> Subscription:
        return self._hub.on_lease_lost(listener)

    async def aclose(self) -> None:
        """The last node to go takes the database with it."""
        if not self._open:
            return
        self._open = False
        self._run(remove_node, self._node, self._token)
        self._shared.nodes.remove(self)
        if not self._shared.nodes:
            self._shared.connection.close()

    def _run(
        self, script: Callable[..., R], *args: Any, tx: SqliteTx | None = None, **kwargs: Any
    ) -> R:
        """A script in a transaction of its own."""
        connection = self._shared.connection
        connection.execute("BEGIN")
        try:
            answer = script(tx or SqliteTx(connection, self._clock.now_ms), *args, **kwargs)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        self.commits += 1
        return answer

    def _tell(self, tx: SqliteTx, hints: dict[tuple[str, str], None]) -> None:
        if tx.events:
            self._hub.publish(tx.events)
        if hints:
            self._hub.wake(hints)
