"""One session, as a program sees it.

`prompt`, `steer` and `inject` return when the message is durably queued, with the receipt that proves
it, and say nothing of a result. Who wants a result owns an interval: `run`. Its result is folded here,
from the events, by the same `fold_run` as everywhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from postroom import mint
from postroom.client.binding import Binding
from postroom.client.callbacks import Callback, ask, log
from postroom.client.follower import Follower
from postroom.client.live import DeltaListener, Deltas
from postroom.domain.event import Event
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.ids import message_id as checked_message_id
from postroom.domain.message import parse_content
from postroom.domain.run import RunResult, ends, fold_run, interval
from postroom.errors import CommitUncertain, Disconnected, PostroomError, RunTimeout
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.client.room import Room

Until: TypeAlias = Literal["idle", "quiescent"]
Mode: TypeAlias = Literal["exclusive", "share"]

# How often an uncertain receipt is asked for again by its id.
_SETTLE_TRIES = 3
# A run that is over for its caller may take so long to be cancelled.
_GIVE_UP_S = 10.0


class Session:
    """Cheap: it holds an id. ``created`` and ``core_id`` are as they were when it was opened."""

    def __init__(self, room: Room, session_id: SessionId, opened: said.SessionOpened) -> None:
        self.id = session_id
        self.created = opened.created
        self.core_id = opened.core_id
        self._room = room

    # ---- input ----

    async def prompt(
        self, content: object, *, message_id: str | None = None, run: Mode | None = None
    ) -> said.Receipt:
        """Queues a message for a turn of its own.

        ``content`` is a text, or a list of content blocks. ``message_id`` None: one is minted. The
        same id again gives the same receipt and queues nothing, so that an uncertain one is settled by
        sending it again; over a socket this is done here.

        Raises:
            InvalidContent, MessageConflict, QueueFull, RunOverlap: refused, nothing was queued.
            NotCommitted: not written, nothing was queued.
            CommitUncertain, Disconnected: send the same id again; that settles it.
        """
        name, blocks = _message(content, message_id)
        asked = said.SessionPrompt(self.id, blocks, name, run)
        return await self._queue("session/prompt", asked)

    async def steer(self, content: object, *, message_id: str | None = None) -> said.Receipt:
        """Queues a message for the next step; it wakes an idle agent. Raises as `prompt`."""
        name, blocks = _message(content, message_id)
        return await self._queue("session/steer", said.SessionSteer(self.id, blocks, name))

    async def inject(self, content: object, *, message_id: str | None = None) -> said.Receipt:
        """Adds to the next step that runs, and wakes nobody. Raises as `prompt`."""
        name, blocks = _message(content, message_id)
        return await self._queue("session/inject", said.SessionSteer(self.id, blocks, name))

    async def _queue(self, method: str, asked: said.Params) -> said.Receipt:
        tries = 1
        while True:
            try:
                return await self._room.call(method, asked, said.Receipt, again=True)
            except CommitUncertain:
                if tries >= _SETTLE_TRIES:
                    raise
                tries += 1

    async def inbox(self) -> list[said.Pending]:
        """What is pending, in the order it will be claimed within each list."""
        asked = said.SessionRef(self.id)
        return (await self._room.call("session/inbox", asked, said.Inbox, again=True)).pending

    async def replace(self, message_id: str, content: object) -> str | None:
        """Puts new content in a pending message's place; its new id, or None: it was not pending."""
        _, blocks = _message(content, None)
        asked = said.InboxReplace(self.id, message_id, blocks)
        return (
            await self._room.call("session/inbox/replace", asked, said.InboxReplaced)
        ).message_id

    async def remove(self, message_id: str) -> bool:
        """Takes a pending message out; False: it was not pending."""
        asked = said.InboxRemove(self.id, message_id)
        return (await self._room.call("session/inbox/remove", asked, said.InboxRemoved)).removed

    # ---- the life cycle ----

    async def cancel(self, *, keep_inbox: bool = False) -> None:
        """Records a cancel: the open turn ends, and what is pending goes unless kept."""
        asked = said.SessionCancel(self.id, keep_inbox)
        await self._room.call("session/cancel", asked, said.Done)

    async def status(self) -> said.Status:
        """Whether the whole agent is ``running`` or ``idle``, at this moment."""
        asked = said.SessionOpen(self.id)
        answer = await self._room.call("session/open", asked, said.SessionOpened, again=True)
        return answer.status

    async def fork(self, *, at_seq: int | None = None, fork_id: str | None = None) -> Session:
        """A new session with this one's history up to ``at_seq`` (None: all of it)."""
        asked = said.SessionFork(self.id, at_seq, fork_id or mint.session_id())
        answer = await self._room.call("session/fork", asked, said.Forked)
        return await self._room.session(answer.session_id)

    async def aclose(self) -> None:
        """Releases what this client's connection holds of the session. The session goes on."""
        for binding in [b for b in self._room.bindings if b.session_id == self.id]:
            await binding.aclose()

    # ---- output ----

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """Committed events from a seq on, first from the log, then live; until the room is closed.

        Over a socket it goes on across reconnects; no event is missing, none comes twice.

        Raises:
            Disconnected: the runtime is gone; begin again after the last event you have.
        """
        async with Follower(self._room, self.id, after) as follower:
            async for event in follower:
                yield event

    async def log(self, after: int = 0) -> list[Event]:
        """The committed events from a seq on, as they stand now."""
        async with Follower(self._room, self.id, after, to_head=True) as follower:
            return [event async for event in follower]

    def bind(
        self,
        *,
        on_delivery: Callback[said.DeliveryNote, None] | None = None,
        on_approval: Callback[said.ApprovalRequest, bool | None] | None = None,
        on_question: Callback[said.UserPrompt, str | None] | None = None,
    ) -> Binding:
        """Makes this client the session's route, while the binding is open: see `Binding`."""
        return Binding(self._room, self.id, on_delivery, on_approval, on_question)

    # ---- an owned interval ----

    async def run(
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
        """Queues a message and owns the interval from its receipt to the next idle.

        Overlapping runs of one client on one session wait for each other; that is part of ``timeout``
        (seconds; None: no limit). ``until`` ``quiescent``: also while children are pending.
        ``cancel_on_timeout`` takes the message out of the inbox, or else ends the open turn; what
        others have queued stays and runs. ``on_event`` is called with each event of the interval,
        ``on_delta`` with live tokens, which keep no step with the events; what they raise is logged.

        Raises, besides what `prompt` does:
            RunTimeout: the time is over; the agent goes on, unless ``cancel_on_timeout``. If the
                ``first_seq`` of its partial result is 0, no receipt had come.
            RunOverlap: another client owns the present interval; nothing was queued.
            Disconnected: the runtime is gone (not over a socket: there it goes on with the next
                connection), or the room was closed.
        """
        name, blocks = _message(content, message_id)
        quiescent = until == "quiescent"
        events: list[Event] = []
        limit = asyncio.timeout(timeout)
        try:
            async with limit, self._room.run_lock(self.id), Deltas(self._room, self.id, on_delta):
                asked = said.SessionPrompt(self.id, blocks, name, mode)
                receipt = await self._queue("session/prompt", asked)
                async with Follower(self._room, self.id, receipt.seq - 1) as follower:
                    async for event in follower:
                        events.append(event)
                        if on_event is not None:
                            await ask(on_event, event, None)
                        if event.seq > receipt.seq and ends(event, quiescent=quiescent):
                            return fold_run(self.id, name, events, quiescent=quiescent)
            raise Disconnected("the room was closed before the run was over")
        except TimeoutError:
            if not limit.expired():
                raise
        if cancel_on_timeout:
            await self._give_up(name)
        partial = fold_run(self.id, name, events, quiescent=quiescent)
        raise RunTimeout(f"the run was not over after {timeout:g} s", partial=partial)

    async def _give_up(self, message_id: str) -> None:
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                if not await self.remove(message_id):
                    await self.cancel(keep_inbox=True)
        except (PostroomError, TimeoutError) as error:
            log.warning("the run of %s could not be cancelled: %s", message_id, error)

    async def fold(self, message_id: str, *, until: Until = "idle") -> RunResult:
        """The run that starts with this message, recomputed from the log as it stands now.

        Its ``first_seq`` is 0 where the log holds no such message.
        """
        quiescent = until == "quiescent"
        name = checked_message_id(message_id)
        cut = interval(await self.log(), name, quiescent=quiescent)
        return fold_run(self.id, name, cut, quiescent=quiescent)


def _message(content: object, message_id: str | None) -> tuple[MessageId, list[dict[str, object]]]:
    name = mint.message_id() if message_id is None else checked_message_id(message_id)
    return name, msgspec.to_builtins(parse_content(content))
