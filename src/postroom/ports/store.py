"""The durable store: transaction scripts run against an engine.

A *script* is a plain synchronous function ``def queue_message(tx, ...)``. It runs SQL through
`Tx.execute` with named parameters (``:name``) and nothing else: no clock, no randomness, no I/O.
An engine may run a script twice (a lost commit answer, a retried group), so a script run twice
must leave what it left the first time and give the same answer.

`Store.write` returns only after the commit is on disk. That is what a receipt means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from postroom.domain.event import Event
from postroom.domain.ids import NodeId, SessionId

SqlValue: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = tuple[Any, ...]

P = ParamSpec("P")
R = TypeVar("R")


class Tx(Protocol):
    """One open transaction, seen by a script.

    ``for_update`` and ``skip_locked`` are SQL fragments (empty where the engine locks the whole
    file): ``SELECT … FROM session WHERE id = :id {tx.for_update}``.
    """

    for_update: str
    skip_locked: str

    def execute(self, sql: str, params: Mapping[str, SqlValue] | None = None) -> list[Row]:
        """Runs one statement with ``:name`` parameters; the rows it gives, or an empty list."""
        ...

    def execute_many(self, sql: str, rows: Sequence[Mapping[str, SqlValue]]) -> None:
        """Runs one statement for each set of parameters."""
        ...

    def now(self) -> int:
        """Unix milliseconds, read after the lock: the store's clock, not the process's."""
        ...

    def publish(self, event: Event) -> None:
        """Hands an event to the subscribers, once this transaction has committed."""
        ...

    def wake(self, kind: str, key: str) -> None:
        """Says that a work item became ready, once this transaction has committed."""
        ...


Script: TypeAlias = Callable[Concatenate[Tx, P], R]
EventListener: TypeAlias = Callable[[Sequence[Event]], None]
WorkListener: TypeAlias = Callable[[str, str], None]


class Subscription(Protocol):
    def close(self) -> None:
        """Idempotent; no call comes after it."""
        ...


class Store(Protocol):
    """An engine with its identity in the database.

    ``node`` is this process's own id, under which it claims. It changes when the lease was lost:
    then every claim made under the old id is stale.
    """

    @property
    def node(self) -> NodeId: ...

    @property
    def lease_ms(self) -> int:
        """How long a claim of this node is believed without a sign of life."""
        ...

    @property
    def can_notify(self) -> bool:
        """Whether other processes' commits are pushed; if not they are noticed by a look."""
        ...

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Runs a script in a transaction; returns its answer after the commit is durable.

        Raises:
            NotCommitted: certainly nothing was written.
            CommitUncertain: the commit's answer was lost; the same call again settles it.
            PostroomError: whatever the script itself raised; its writes are undone.
        """
        ...

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Runs a reading script on one short snapshot, beside the writer."""
        ...

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        """Committed events of a session (None: of all), in ``seq`` order, from now on.

        The listener is called on the event loop and must not raise or block. Other processes'
        commits arrive too.
        """
        ...

    def on_work(self, listener: WorkListener) -> Subscription:
        """Calls ``listener(kind, key)`` when work may have become ready, here or elsewhere.

        A hint, not a promise: a key of ``*`` means "look".
        """
        ...

    def on_lease_lost(self, listener: Callable[[], None]) -> Subscription:
        """Calls the listener when this node's lease was lost; its claims are stale."""
        ...

    async def aclose(self) -> None:
        """Finishes what was accepted, gives up the lease, and leaves no thread or file open."""
        ...
