"""The methods of sessions: open, say, cancel, look, follow, bind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from postroom import mint
from postroom.domain.ids import ClaimToken, CoreId, MessageId, SessionId
from postroom.domain.ids import message_id as checked_message_id
from postroom.domain.ids import session_id as checked_session_id
from postroom.domain.message import Source
from postroom.flow.agent import Agent
from postroom.scripts.approvals import OPERATOR
from postroom.scripts.attach import check_owner, may_touch, read_page, standing, unknown
from postroom.scripts.inbox import Operation, RunMode
from postroom.scripts.log import PendingInfo, SessionInfo, fork_session, list_sessions
from postroom.scripts.session import create_session
from postroom.server.failures import refused
from postroom.server.subscription import PAGE_CHARS
from postroom.wire import protocol as said

if TYPE_CHECKING:
    from postroom.server.connection import Connection, Method

DEFAULT_CORE = CoreId("default")


class SessionMethods:
    """What they need of the client is its `Connection`; they hold nothing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._room = connection.room
        self._store = connection.room.store

    def table(self) -> dict[str, Method]:
        return {
            "session/open": self._open,
            "session/prompt": self._prompt,
            "session/steer": self._steer,
            "session/inject": self._inject,
            "session/cancel": self._cancel,
            "session/inbox": self._inbox,
            "session/inbox/replace": self._replace,
            "session/inbox/remove": self._remove,
            "session/events": self._events,
            "session/subscribe": self._subscribe,
            "session/unsubscribe": self._unsubscribe,
            "session/bind": self._bind,
            "session/unbind": self._unbind,
            "session/list": self._list,
            "session/fork": self._fork,
            "session/close": self._close,
        }

    async def _own(self, text: str) -> SessionId:
        """The session, if it may be this client's. The operator's own scripts say if there is none."""
        name = checked_session_id(text)
        if self._connection.principal != OPERATOR:
            await self._store.read(check_owner, name, self._connection.principal)
        return name

    async def _agent(self, text: str) -> Agent:
        name = await self._own(text)
        return self._room.agent(
            name,
            source=Source(kind="sdk", principal=self._connection.principal),
            core_id=self._connection.core_of(name),
        )

    # ---- open ----

    async def _open(self, params: said.SessionOpen) -> said.SessionOpened:
        principal = self._connection.principal
        name = mint.session_id()
        if params.session_id is not None:
            name = checked_session_id(params.session_id)
        if params.cwd is not None and (not os.path.isabs(params.cwd) or "\0" in params.cwd):
            raise refused("input", f"{params.cwd[:200]!r} is no absolute path", path="cwd")
        core_id = DEFAULT_CORE if params.core_id is None else CoreId(params.core_id)
        if params.core_id is not None:
            self._room.cores(core_id)  # one that is not there fails before anything is made
        opened = await self._store.write(
            create_session,
            name,
            core_id=core_id,
            owner=principal,
            cwd=params.cwd,
            ref=mint.claim_token(),
        )
        if not may_touch(principal, opened.owner):
            raise unknown(name)
        self._connection.opened(name, opened.core_id)
        subscription = None
        if params.after is not None:
            self._check_after(params.after, opened.head)
            subscription = self._connection.subscribe(
                name, after=params.after, types=None, deltas=False
            )
        return said.SessionOpened(
            name, opened.created, opened.head, opened.status, opened.core_id, subscription
        )

    async def _list(self, params: said.SessionList) -> said.Sessions:
        principal = self._connection.principal
        found = await self._store.read(
            list_sessions,
            owner=None if principal == OPERATOR else principal,
            limit=params.limit,
            before=params.before,
        )
        return said.Sessions([_as_info(info) for info in found])

    async def _fork(self, params: said.SessionFork) -> said.Forked:
        name = await self._own(params.session_id)
        fork = mint.session_id()
        if params.fork_id is not None:
            fork = checked_session_id(params.fork_id)
        head = await self._store.write(
            fork_session, name, fork, owner=self._connection.principal, at_seq=params.at_seq
        )
        return said.Forked(fork, head)

    async def _close(self, params: said.SessionRef) -> said.Done:
        await self._connection.release(SessionId(params.session_id))
        return said.Done()

    # ---- the inbox ----

    async def _prompt(self, params: said.SessionPrompt) -> said.Receipt:
        return await self._queue(params, "followup", params.run)

    async def _steer(self, params: said.SessionSteer) -> said.Receipt:
        return await self._queue(params, "steer")

    async def _inject(self, params: said.SessionSteer) -> said.Receipt:
        return await self._queue(params, "inject")

    async def _queue(
        self,
        params: said.SessionPrompt | said.SessionSteer,
        operation: Operation,
        run: RunMode | None = None,
    ) -> said.Receipt:
        """Nothing is awaited between the commit and the answer: it leaves before any model is asked."""
        async with self._connection.lock(params.session_id):
            agent = await self._agent(params.session_id)
            name = None if params.message_id is None else checked_message_id(params.message_id)
            receipt = await agent.queue(params.content, operation, message_id=name, run=run)
        return said.Receipt(receipt.message_id, receipt.seq)

    async def _cancel(self, params: said.SessionCancel) -> said.Done:
        async with self._connection.lock(params.session_id):
            agent = await self._agent(params.session_id)
            await agent.cancel("user", keep_inbox=params.keep_inbox)
        return said.Done()

    async def _inbox(self, params: said.SessionRef) -> said.Inbox:
        agent = await self._agent(params.session_id)
        return said.Inbox([_as_pending(info) for info in await agent.inbox()])

    async def _replace(self, params: said.InboxReplace) -> said.InboxReplaced:
        async with self._connection.lock(params.session_id):
            agent = await self._agent(params.session_id)
            name = await agent.replace(MessageId(params.message_id), params.content)
        return said.InboxReplaced(name)

    async def _remove(self, params: said.InboxRemove) -> said.InboxRemoved:
        async with self._connection.lock(params.session_id):
            agent = await self._agent(params.session_id)
            return said.InboxRemoved(await agent.remove(MessageId(params.message_id)))

    # ---- the log ----

    async def _events(self, params: said.SessionEvents) -> said.Events:
        name = await self._own(params.session_id)
        page, more = await self._store.read(read_page, name, params.after, params.limit, PAGE_CHARS)
        return said.Events(
            [
                said.Event(e.session_id, e.seq, e.type, e.at, msgspec.json.decode(e.raw))
                for e in page
            ],
            more,
        )

    async def _subscribe(self, params: said.SessionSubscribe) -> said.Subscribed:
        name = await self._own(params.session_id)
        _, head, _ = await self._store.read(standing, name)
        self._check_after(params.after, head)
        number = self._connection.subscribe(
            name, after=params.after, types=params.types, deltas=params.deltas
        )
        return said.Subscribed(number, head)

    def _check_after(self, after: int, head: int) -> None:
        if after > head:
            raise refused(
                "input",
                f"the log ends at {head}, before {after}",
                hint="read it from 0: it is not the log you know",
                path="after",
            )

    async def _unsubscribe(self, params: said.SessionUnsubscribe) -> said.Done:
        self._connection.unsubscribe(params.subscription)
        return said.Done()

    # ---- the route ----

    async def _bind(self, params: said.SessionBind) -> said.Bound:
        name = await self._own(params.session_id)
        return said.Bound(await self._connection.bind(name))

    async def _unbind(self, params: said.SessionUnbind) -> said.Done:
        await self._connection.unbind(ClaimToken(params.token))
        return said.Done()


def _as_info(info: SessionInfo) -> said.SessionInfo:
    return msgspec.convert(info, said.SessionInfo, from_attributes=True)


def _as_pending(info: PendingInfo) -> said.Pending:
    message = msgspec.to_builtins(info.message)
    return said.Pending(message, info.list, info.wakes, info.seq)
