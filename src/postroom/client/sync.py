"""The client for code that does not await: a thread with an event loop of its own, and calls into it.

It works where no loop runs and where one does, which it then blocks for the time of a call. Callbacks
are called in that thread; calling back from there would wait for itself, and is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from postroom.client.callbacks import Callback
from postroom.client.live import DeltaListener
from postroom.client.outbox import Decision
from postroom.client.session import Mode, Session, Until
from postroom.domain.event import Event
from postroom.domain.run import RunResult
from postroom.errors import Disconnected, UsageError
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.binding import Binding
    from postroom.client.room import Room

T = TypeVar("T")

_JOIN_S = 5.0


class _Loop:
    """The thread. It is a daemon: a program that forgets to close is not held."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="postroom-client", daemon=True)
        self._over = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=_JOIN_S))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __call__(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        if self._over or threading.current_thread() is self._thread:
            work.close()
            if self._over:
                raise Disconnected("the room is closed")
            raise UsageError(
                "a callback may not wait for the room it is called by",
                hint="hand the work to another thread",
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        if not self._over:
            self._over = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * _JOIN_S)


class SyncRoom:
    """What `postroom.connect_sync` gives; see `postroom.client.Room`. ``close_s`` bounds `close`."""

    def __init__(self, room: Room, *, close_s: float) -> None:
        self._room = room
        self._close_s = close_s
        self._call = _Loop()
        self._closed = False
        self._lock = threading.Lock()
        self.outbox = SyncOutbox(room, self._call)

    def open(self) -> SyncRoom:
        self._call(self._room.open())
        return self

    def __enter__(self) -> SyncRoom:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what waits, and the thread. Idempotent, bounded."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._call(self._room.aclose(), self._close_s)
        except concurrent.futures.TimeoutError:
            pass  # the thread is stopped all the same
        finally:
            self._call.stop()

    def session(
        self, session_id: str | None = None, *, core_id: str | None = None, cwd: str | None = None
    ) -> SyncSession:
        session = self._call(self._room.session(session_id, core_id=core_id, cwd=cwd))
        return SyncSession(session, self._call)

    def sessions(self, *, limit: int = 50, before: int | None = None) -> list[said.SessionInfo]:
        return self._call(self._room.sessions(limit=limit, before=before))

    def approvals(self, session_id: str | None = None) -> list[said.Approval]:
        return self._call(self._room.approvals(session_id))

    def decide(self, approval_id: str, decision: Literal["allow", "deny"]) -> None:
        self._call(self._room.decide(approval_id, decision))


class SyncOutbox:
    """See `postroom.client.outbox.Outbox`."""

    def __init__(self, room: Room, call: _Loop) -> None:
        self._outbox = room.outbox
        self._call = call

    def list(
        self,
        session_id: str | None = None,
        *,
        status: Sequence[str] = (),
        open: bool = False,
        limit: int = 50,
    ) -> list[said.Delivery]:
        return self._call(self._outbox.list(session_id, status=status, open=open, limit=limit))

    def resolve(self, delivery_id: str, decision: Decision, *, by: str) -> said.Delivery:
        return self._call(self._outbox.resolve(delivery_id, decision, by=by))

    def redeliver(self, delivery_id: str, *, by: str) -> said.Delivery:
        return self._call(self._outbox.redeliver(delivery_id, by=by))

    def abandon(self, delivery_id: str, *, by: str) -> said.Delivery:
        return self._call(self._outbox.abandon(delivery_id, by=by))


class SyncBinding:
    """See `postroom.client.Binding`."""

    def __init__(self, binding: Binding, call: _Loop) -> None:
        self._binding = binding
        self._call = call

    def open(self) -> SyncBinding:
        self._call(self._binding.open())
        return self

    def close(self) -> None:
        self._call(self._binding.aclose())

    def __enter__(self) -> SyncBinding:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncSession:
    """See `postroom.client.Session`, whose methods these are."""

    def __init__(self, session: Session, call: _Loop) -> None:
        self.id = session.id
        self.created = session.created
        self.core_id = session.core_id
        self._session = session
        self._call = call

    def prompt(
        self, content: object, *, message_id: str | None = None, run: Mode | None = None
    ) -> said.Receipt:
        return self._call(self._session.prompt(content, message_id=message_id, run=run))

    def steer(self, content: object, *, message_id: str | None = None) -> said.Receipt:
        return self._call(self._session.steer(content, message_id=message_id))

    def inject(self, content: object, *, message_id: str | None = None) -> said.Receipt:
        return self._call(self._session.inject(content, message_id=message_id))

    def inbox(self) -> list[said.Pending]:
        return self._call(self._session.inbox())

    def replace(self, message_id: str, content: object) -> str | None:
        return self._call(self._session.replace(message_id, content))

    def remove(self, message_id: str) -> bool:
        return self._call(self._session.remove(message_id))

    def cancel(self, *, keep_inbox: bool = False) -> None:
        self._call(self._session.cancel(keep_inbox=keep_inbox))

    def status(self) -> said.Status:
        return self._call(self._session.status())

    def fork(self, *, at_seq: int | None = None, fork_id: str | None = None) -> SyncSession:
        forked = self._call(self._session.fork(at_seq=at_seq, fork_id=fork_id))
        return SyncSession(forked, self._call)

    def close(self) -> None:
        self._call(self._session.aclose())

    def events(self, after: int = 0) -> Iterator[Event]:
        """Blocks until the next event; ends when the room is closed by another thread."""
        events = self._session.events(after)

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._call(following())) is not None:
                yield event
        finally:
            with contextlib.suppress(Disconnected):  # closed meanwhile: it has ended with the room
                self._call(_ended(events))

    def log(self, after: int = 0) -> list[Event]:
        return self._call(self._session.log(after))

    def bind(
        self,
        *,
        on_delivery: Callback[said.DeliveryNote, None] | None = None,
        on_approval: Callback[said.ApprovalRequest, bool | None] | None = None,
        on_question: Callback[said.UserPrompt, str | None] | None = None,
    ) -> SyncBinding:
        binding = self._session.bind(
            on_delivery=on_delivery, on_approval=on_approval, on_question=on_question
        )
        return SyncBinding(binding, self._call)

    def run(
        self,
        content: object,
        *,
        message_id: str | None = None,
        timeout: float | None = None,
        until: Until = "idle",
        mode: Mode = "exclusive",
        cancel_on_timeout: bool = False,
        on_event: Callback[Event, object] | None = None,
        on_delta: DeltaListener | None = None,
    ) -> RunResult:
        return self._call(
            self._session.run(
                content,
                message_id=message_id,
                timeout=timeout,
                until=until,
                mode=mode,
                cancel_on_timeout=cancel_on_timeout,
                on_event=on_event,
                on_delta=on_delta,
            )
        )

    def fold(self, message_id: str, *, until: Until = "idle") -> RunResult:
        return self._call(self._session.fold(message_id, until=until))


async def _ended(events: AsyncGenerator[Event]) -> None:
    await events.aclose()
