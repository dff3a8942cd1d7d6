"""The agent of a session, as every consumer programs against it.

There is no per-message completion handle: awaiting `followup`, `steer` or `inject` proves that
the message is durably queued, and nothing else. Who wants a result owns an interval: `run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from postroom import mint
from postroom.config import Limits
from postroom.domain.event import AgentIdle, CancelCause, Event
from postroom.domain.ids import ClaimToken, MessageId, SessionId
from postroom.domain.ids import message_id as checked_message_id
from postroom.domain.message import Message, Source, parse_content
from postroom.domain.run import RunResult, ends, fold_run, interval
from postroom.domain.turn import Status
from postroom.errors import CommitUncertain, RunTimeout, StoreClosed
from postroom.flow.feed import Feed
from postroom.ports.store import Store
from postroom.scripts import inbox as scripts
from postroom.scripts.drive import Drive, Offer, queue_and_claim
from postroom.scripts.inbox import Operation, Receipt, RunMode
from postroom.scripts.log import (
    PendingInfo,
    agent_status,
    find_receipt,
    list_pending,
    read_events,
)

Until: TypeAlias = Literal["idle", "quiescent"]

_PAGE = 1000


class Drives(Protocol):
    """A process that can drive the session itself, asked at each message."""

    def offer(self) -> Offer | None:
        """A claim to make in the receipt's transaction; None if this process claims nothing."""
        ...

    def settled(self, token: ClaimToken) -> None:
        """The transaction that might have claimed by this offer is over; `take` may follow."""
        ...

    def take(self, token: ClaimToken, drive: Drive | None) -> None:
        """Goes on with the claim that was made; None: it is unknown whether it was."""
        ...


class Agent:
    """One session's agent. Cheap: it holds nothing but the session's id."""

    def __init__(
        self,
        store: Store,
        session_id: SessionId,
        limits: Limits,
        *,
        closing: asyncio.Future[None],
        source: Source | None = None,
        run_lock: Callable[[SessionId], asyncio.Lock] | None = None,
        drives: Drives | None = None,
    ) -> None:
        self.session_id = session_id
        self._store = store
        self._limits = limits
        self._closing = closing
        self._source = source or Source()
        self._run_lock = run_lock or _no_sharing
        self._drives = drives

    # ---- input ----

    async def followup(self, content: object, *, message_id: MessageId | None = None) -> None:
        """Queues a message for a turn of its own; returns once it is committed.

        Raises:
            InvalidContent, MessageConflict, QueueFull: refused, nothing was queued.
            NotCommitted: not written, nothing was queued.
            CommitUncertain: send the same ``message_id`` again; that settles it.
        """
        await self.queue(content, "followup", message_id=message_id)

    async def steer(self, content: object, *, message_id: MessageId | None = None) -> None:
        """Queues a message for the next step; it wakes an idle agent. Raises as `followup`."""
        await self.queue(content, "steer", message_id=message_id)

    async def inject(self, content: object, *, message_id: MessageId | None = None) -> None:
        """Adds to the next step that runs, and wakes nobody. Raises as `followup`."""
        await self.queue(content, "inject", message_id=message_id)

    async def queue(
        self,
        content: object,
        operation: Operation = "followup",
        *,
        message_id: MessageId | None = None,
        run: RunMode | None = None,
        source: Source | None = None,
    ) -> Receipt:
        """The receipt behind the three: what a protocol or a channel acknowledges with.

        Raises, besides what `followup` does:
            InputError: ``message_id`` is no message id.
        """
        blocks = parse_content(content, bytes_max=self._limits.content_bytes_max)
        name = mint.message_id() if message_id is None else checked_message_id(message_id)
        message = Message(name, blocks, source or self._source)
        pending_max = self._limits.pending_messages_max
        offer = self._drives.offer() if self._drives is not None else None
        if self._drives is None or offer is None:
            return await self._store.write(
                scripts.queue_message,
                self.session_id,
                message,
                operation,
                pending_max=pending_max,
                run=run,
            )
        try:
            receipt, drive = await self._store.write(
                queue_and_claim,
                self.session_id,
                message,
                operation,
                pending_max=pending_max,
                run=run,
                offer=offer,
            )
        except (asyncio.CancelledError, CommitUncertain):
            # It may be committed all the same, and then the claim is ours to see to.
            self._drives.take(offer.token, None)
            raise
        finally:
            self._drives.settled(offer.token)
        if drive is not None:
            self._drives.take(offer.token, drive)
        return receipt

    async def inbox(self) -> list[PendingInfo]:
        """What is pending, in the order it will be claimed within each list."""
        return await self._store.read(list_pending, self.session_id)

    async def remove(self, message_id: MessageId) -> bool:
        """Takes a pending message out; False if it is unknown, foreign, or already ended."""
        return await self._store.write(
            scripts.remove_message, self.session_id, message_id, mint.claim_token()
        )

    async def replace(self, message_id: MessageId, content: object) -> MessageId | None:
        """Puts new content in a pending message's place, under a new id; None as `remove`."""
        blocks = parse_content(content, bytes_max=self._limits.content_bytes_max)
        message = Message(mint.message_id(), blocks, self._source)
        done = await self._store.write(
            scripts.replace_message, self.session_id, message_id, message
        )
        return message.id if done else None

    # ---- the life cycle ----

    async def cancel(self, cause: CancelCause = "user", *, keep_inbox: bool = False) -> None:
        """Records a cancel: the open turn ends, and what is pending goes unless kept."""
        await self._store.write(
            scripts.cancel,
            self.session_id,
            cause,
            keep_inbox=keep_inbox,
            ref=mint.claim_token(),
        )

    async def status(self) -> Status:
        status, _ = await self._store.read(agent_status, self.session_id)
        return status

    async def head(self) -> int:
        """The seq of the log's last event."""
        _, seq = await self._store.read(agent_status, self.session_id)
        return seq

    async def when_idle(self) -> None:
        """Returns when the agent is idle: at once if it is, and when the runtime closes."""
        news = asyncio.Event()
        idle_at = 0

        def take(events: Sequence[Event]) -> None:
            nonlocal idle_at
            for event in events:
                if event.type == AgentIdle.TYPE:
                    idle_at = event.seq
                    news.set()

        subscription = self._store.subscribe(self.session_id, take)
        try:
            status, seq = await self._store.read(agent_status, self.session_id)
            # What comes may be older than what was read: an idle before it is none.
            while status != "idle" and idle_at <= seq:
                news.clear()
                await self._or_closing(news.wait())
        except StoreClosed:
            return
        finally:
            subscription.close()

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Committed events from a seq on, first from the log, then live, without a gap.

        It ends when the runtime closes.
        """
        return aiter(Feed(self._store, self.session_id, after, closing=self._closing))

    # ---- an owned interval ----

    async def run(
        self,
        content: object,
        *,
        message_id: MessageId | None = None,
        timeout_ms: int | None = None,
        until: Until = "idle",
        mode: RunMode = "exclusive",
        cancel_on_timeout: bool = False,
    ) -> RunResult:
        """Queues a message and owns the interval from its receipt to the next idle.

        Overlapping calls of one runtime on one session wait for each other; that is part of
        ``timeout_ms`` (None: no limit). ``cancel_on_timeout`` takes the message out of the inbox,
        or else ends the open turn; what others have queued stays and runs.

        Raises:
            RunTimeout: the time is over; the agent goes on, unless ``cancel_on_timeout``. If the
                ``first_seq`` of its partial result is 0, the message was not queued.
            RunOverlap: another client owns the present interval; nothing was queued.
        """
        name = mint.message_id() if message_id is None else checked_message_id(message_id)
        limit = asyncio.timeout(timeout_ms / 1000 if timeout_ms is not None else None)
        try:
            async with limit, self._run_lock(self.session_id):
                with Collector(self._store, self.session_id) as collector:
                    receipt = await self.queue(content, message_id=name, run=mode)
                    return await self.result(receipt, collector, until=until)
        except TimeoutError:
            if not limit.expired():
                raise
        if cancel_on_timeout and not await self.remove(name):
            await self.cancel(keep_inbox=True)
        partial = await self.fold(name, until=until)
        raise RunTimeout(f"the run was not over after {timeout_ms} ms", partial=partial)

    async def result(
        self, receipt: Receipt, collector: Collector, *, until: Until = "idle"
    ) -> RunResult:
        """Waits for the end of the interval that starts at the receipt, and folds it."""
        quiescent = until == "quiescent"
        if not collector.saw(receipt.seq):
            # An id sent again: its interval may have ended before anybody listened.
            result = await self.fold(receipt.message_id, until=until)
            if result.complete:
                return result
        await collector.wait(receipt.seq, quiescent, self._closing)
        events = collector.since(receipt.seq, quiescent)
        if events is None:
            return await self.fold(receipt.message_id, until=until)
        return fold_run(self.session_id, receipt.message_id, events, quiescent=quiescent)

    async def fold(self, message_id: MessageId, *, until: Until = "idle") -> RunResult:
        """The run that starts with this message, recomputed from the log as it stands now."""
        quiescent = until == "quiescent"
        seq = await self._store.read(find_receipt, self.session_id, message_id)
        events: list[Event] = []
        after = (seq or 1) - 1
        while seq is not None:
            page = await self._store.read(read_events, self.session_id, after, _PAGE)
            events.extend(page)
            if len(page) < _PAGE or any(ends(e, quiescent=quiescent) for e in page):
                break
            after = page[-1].seq
        cut = interval(events, message_id, quiescent=quiescent)
        return fold_run(self.session_id, message_id, cut, quiescent=quiescent)

    async def _or_closing(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Awaits, or raises when the runtime closes: no wait outlives it."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task, self._closing}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StoreClosed("the runtime is closing")
            await task
        finally:
            task.cancel()


def _no_sharing(_: SessionId) -> asyncio.Lock:
    return asyncio.Lock()


class Collector:
    """Gathers a session's committed events from before the receipt on, to cut the interval.

    ``on_end`` is called in the moment the interval's end is seen, before anything else can be
    claimed.
    """

    def __init__(self, store: Store, session_id: SessionId) -> None:
        self.on_end: Callable[[], None] | None = None
        self._seq: int | None = None
        self._quiescent = False
        self._events: list[Event] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscription = store.subscribe(session_id, self._take)

    def _take(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if self._seq is not None:
            self._look(events)

    def _look(self, events: Sequence[Event]) -> None:
        assert self._seq is not None
        for event in events:
            if event.seq > self._seq and ends(event, quiescent=self._quiescent):
                if self.on_end is not None:
                    self.on_end()
                if not self._end.done():
                    self._end.set_result(None)
                return

    async def wait(self, seq: int, quiescent: bool, closing: asyncio.Future[None]) -> None:
        """Returns once an event after ``seq`` ends the interval.

        Raises:
            StoreClosed: ``closing`` came first.
        """
        self._seq, self._quiescent = seq, quiescent
        self._look(self._events)
        if self._end.done():
            return

        def close(_: asyncio.Future[None]) -> None:
            if not self._end.done():
                self._end.set_exception(StoreClosed("the runtime is closing"))

        closing.add_done_callback(close)
        try:
            await self._end
        finally:
            closing.remove_done_callback(close)

    def saw(self, seq: int) -> bool:
        """Whether it has listened since before this event."""
        return bool(self._events) and self._events[0].seq <= seq

    def since(self, seq: int, quiescent: bool) -> list[Event] | None:
        """The interval, if every event of it was seen; None if it must be read from the log."""
        out: list[Event] = []
        for event in self._events:
            if event.seq < seq + len(out):
                continue
            if event.seq > seq + len(out):
                return None
            out.append(event)
            if event.seq > seq and ends(event, quiescent=quiescent):
                return out
        return None

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._subscription.close()
