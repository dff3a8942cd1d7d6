"""A runtime as its client sees it: sessions, approvals, the outbox; and the connection behind them.

A call that may be asked twice without harm is asked again on the next connection, where the runtime
outlives its connections; every other one fails with `Disconnected`. A runtime that ends with its
connection fails what waits at once, and the next call starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Literal, TypeVar

import msgspec

from postroom import mint
from postroom.client.binding import Binding
from postroom.client.callbacks import log
from postroom.client.connection import Connection
from postroom.client.follower import Follower, Noted
from postroom.client.live import Stream
from postroom.client.outbox import Outbox
from postroom.client.session import Session
from postroom.client.transport import Transport
from postroom.domain.event import Event
from postroom.domain.ids import session_id as checked_session_id
from postroom.errors import Disconnected, PostroomError, StoreClosed
from postroom.wire import protocol as said

T = TypeVar("T")
A = TypeVar("A", bound=said.Answer)

_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 1.0
# So many questions wait in the connection itself; fewer than what it answers at once.
_ANSWERS_AT_ONCE_MAX = 24

_encode = msgspec.json.Encoder().encode
_decode_note = msgspec.json.Decoder(Noted).decode
_decode_lagged = msgspec.json.Decoder(said.Lagged).decode
_decode_delta = msgspec.json.Decoder(said.SessionDelta).decode
_decode_delivery = msgspec.json.Decoder(said.DeliveryNote).decode
_decode_prompt = msgspec.json.Decoder(said.UserPrompt).decode
_decode_request = msgspec.json.Decoder(said.ApprovalRequest).decode


class Room:
    """What `postroom.connect` gives. ``async with`` it, or `open` and `aclose` it."""

    def __init__(self, transport: Transport, *, client: str, reconnect_s: float) -> None:
        self.outbox = Outbox(self)
        self.closed = False
        self.followers: set[Follower] = set()
        self.bindings: list[Binding] = []
        self.streams: dict[str, Stream] = {}
        self._transport = transport
        self._client = client
        self._reconnect_s = reconnect_s
        self._connection: Connection | None = None
        self._was_connected = False
        self._opening: asyncio.Task[Connection] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._heard: dict[tuple[Connection, int], Follower] = {}
        self._leaving: set[tuple[Connection, int]] = set()
        self._closing: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering = 0
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def open(self) -> Room:
        """Connects now, rather than at the first call."""
        await self.connection()
        return self

    async def __aenter__(self) -> Room:
        try:
            return await self.open()
        except BaseException:
            await self.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends what waits, gives up the connection, and reaps a runtime of its own. Bounded, idempotent."""
        if self._ending is None:
            self.closed = True
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    # ---- sessions ----

    async def session(
        self, session_id: str | None = None, *, core_id: str | None = None, cwd: str | None = None
    ) -> Session:
        """Attaches to a session, making it first if there is none of that id (None: a new one).

        ``core_id`` and ``cwd`` (an absolute path where the runtime runs) are those of a new session.

        Raises:
            InputError: the id, the core or the path cannot be used.
            UnknownSession: it is another's.
        """
        name = mint.session_id() if session_id is None else checked_session_id(session_id)
        asked = said.SessionOpen(name, core_id, cwd)
        opened = await self.call("session/open", asked, said.SessionOpened, again=True)
        return Session(self, name, opened)

    async def sessions(
        self, *, limit: int = 50, before: int | None = None
    ) -> list[said.SessionInfo]:
        """A page of them, the last changed first; ``before`` is the ``updated_at`` of the last page's end."""
        asked = said.SessionList(limit, before)
        return (await self.call("session/list", asked, said.Sessions, again=True)).sessions

    # ---- approvals ----

    async def approvals(self, session_id: str | None = None) -> list[said.Approval]:
        """What waits for somebody's decision."""
        asked = said.ApprovalList(session_id)
        return (await self.call("approval/list", asked, said.Approvals, again=True)).approvals

    async def decide(self, approval_id: str, decision: Literal["allow", "deny"]) -> None:
        asked = said.ApprovalDecide(approval_id, decision)
        await self.call("approval/decide", asked, said.Done)

    # ---- calls ----

    @property
    def survives(self) -> bool:
        """Whether the runtime outlives a lost connection."""
        return self._transport.survives

    async def call(
        self, method: str, params: said.Params, answer: type[A], *, again: bool = False
    ) -> A:
        """One call of the protocol. ``again``: asking it twice does no harm."""
        return await self.over(lambda c: c.call(method, params, answer), again=again)

    async def over(self, work: Callable[[Connection], Awaitable[T]], *, again: bool) -> T:
        """Does some work on the connection there is; with ``again``, on the next if it is lost."""
        loop = asyncio.get_running_loop()
        until: float | None = None
        pause_s = _PAUSE_FIRST_S
        while True:
            connection = await self.connection()
            try:
                return await work(connection)
            except (StoreClosed, Disconnected) as error:
                # `StoreClosed`: a runtime that drains has certainly not done it, and will be back.
                harmless = again or isinstance(error, StoreClosed)
                until = until or loop.time() + self._reconnect_s
                if not (harmless and self.survives) or self.closed or loop.time() >= until:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def connection(self) -> Connection:
        """The connection there is, or a new one.

        Raises:
            Disconnected: there is none to be had, for as long as it may take; or the room is closed.
        """
        if self.closed:
            raise Disconnected("the room is closed")
        if self._connection is not None:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if self.closed and opening.cancelled():
                raise Disconnected("the room is closed") from None
            raise

    def _opened(self, opening: asyncio.Task[Connection]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # whoever waits hears of it; perhaps nobody does any more

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        patient = self._was_connected and self.survives
        until = loop.time() + (self._reconnect_s if patient else 0)
        pause_s = _PAUSE_FIRST_S
        while True:
            try:
                return await self._open_once()
            except (Disconnected, StoreClosed):
                if loop.time() >= until:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _open_once(self) -> Connection:
        connection = Connection(await self._transport.open(), self)
        try:
            await connection.initialize(self._client)
            for held in (*self.bindings, *self.streams.values()):
                await held.restore(connection)
            if connection.lost:
                raise await connection.obituary()
        except BaseException:
            await connection.aclose()
            raise
        self._connection = connection
        self._was_connected = True
        return connection

    # ---- what the server says: see `Listener` ----

    def noted(self, connection: Connection, method: str, raw: bytes) -> None:
        try:
            match method:
                case "session.event":
                    note = _decode_note(raw)
                    key = (connection, note.subscription)
                    follower = self._heard.get(key)
                    if follower is not None:
                        follower.hear(Event.from_json(bytes(note.event)))
                    elif key not in self._leaving:
                        self.unfollow(*key)  # who asked for it was cancelled meanwhile
                case "session.lagged":
                    lagged = _decode_lagged(raw)
                    follower = self._heard.pop((connection, lagged.subscription), None)
                    if follower is not None:
                        follower.lagged()
                case "session.delta":
                    delta = _decode_delta(raw)
                    if (stream := self.streams.get(delta.session_id)) is not None:
                        stream.hear(delta)
                case "session.delivery":
                    delivery = _decode_delivery(raw)
                    if (binding := self._binding(delivery.session_id)) is not None:
                        binding.deliver(delivery)
                case _:
                    pass
        except msgspec.DecodeError:
            log.exception("%s cannot be read", method)

    async def asked(self, method: str, raw: bytes) -> bytes:
        if method == "user/prompt":
            prompt = _decode_prompt(raw)
            binding = self._binding(prompt.session_id)
            if binding is None or self._answering >= _ANSWERS_AT_ONCE_MAX:
                return _encode(said.UserAnswer(None))
            with self._one_more():
                return _encode(said.UserAnswer(await binding.answer(prompt)))
        request = _decode_request(raw)
        binding = self._binding(request.session_id)
        if binding is None:
            return _encode(said.ApprovalAnswer(None))
        if self._answering >= _ANSWERS_AT_ONCE_MAX:
            self.spawn(self._decide_later(binding, request))
            return _encode(said.ApprovalAnswer(None))
        with self._one_more():
            return _encode(said.ApprovalAnswer(await binding.approve(request)))

    def lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
        for key, follower in list(self._heard.items()):
            if key[0] is connection:
                del self._heard[key]
                follower.lost(connection)
        if not self.closed:
            self._closing.add(connection)
            self.spawn(self._see_off(connection))
            if self.survives and (self.bindings or self.streams):
                self.spawn(self._restore())

    async def _see_off(self, connection: Connection) -> None:
        await connection.aclose()
        self._closing.discard(connection)

    async def _restore(self) -> None:
        with contextlib.suppress(PostroomError):
            await self.connection()

    async def _decide_later(self, binding: Binding, request: said.ApprovalRequest) -> None:
        allowed = await binding.approve(request)
        if allowed is not None:
            with contextlib.suppress(PostroomError):
                await self.decide(request.approval_id, "allow" if allowed else "deny")

    @contextlib.contextmanager
    def _one_more(self) -> Generator[None]:
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1

    def _binding(self, session_id: str) -> Binding | None:
        return next((b for b in reversed(self.bindings) if b.session_id == session_id), None)

    # ---- for the parts of the client ----

    def follow(self, connection: Connection, number: int, follower: Follower) -> None:
        if connection.lost:
            follower.lost(connection)
        else:
            self._heard[connection, number] = follower

    def unfollow(self, connection: Connection, number: int) -> None:
        """Tells the server that nobody listens any more, and waits for nothing."""
        self._heard.pop((connection, number), None)
        if not connection.lost and not self.closed:
            self._leaving.add((connection, number))
            self.spawn(self._unsubscribe(connection, number))

    async def _unsubscribe(self, connection: Connection, number: int) -> None:
        try:
            asked = said.SessionUnsubscribe(number)
            await connection.call("session/unsubscribe", asked, said.Done)
        except PostroomError:
            pass  # then it ends with the connection
        finally:
            self._leaving.discard((connection, number))

    def run_lock(self, session_id: str) -> asyncio.Lock:
        """Keeps this client's runs of one session one after the other."""
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Work that nobody waits for; it ends with the room."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self) -> None:
        for follower in list(self.followers):
            follower.wake()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        connection, self._connection = self._connection, None
        if connection is not None:
            self._closing.add(connection)
        try:
            await asyncio.gather(*(one.aclose() for one in self._closing))
        finally:
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
