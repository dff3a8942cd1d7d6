"""One client: it says who it is, then calls methods; what it holds is released when it goes.

A connection acts for one principal. Every session it names is asked whether it is theirs; one that
is not is answered as one that does not exist. What the client was told is committed stays so
whatever becomes of the connection; what it was asked is denied when it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from postroom.domain.ids import ClaimToken, CoreId, SessionId
from postroom.errors import PostroomError, StoreError
from postroom.scripts.approvals import OPERATOR
from postroom.server.failures import as_rpc_error, read_params, refused
from postroom.server.subscription import LAG_EVENTS_MAX, Subscription
from postroom.wire import protocol as wire_types
from postroom.wire.protocol import METHODS, VERSION, VERSIONS, Answer, Params
from postroom.wire.rpc import QUEUE_BYTES_HIGH, Link, RpcError, Wire

if TYPE_CHECKING:
    from postroom.app import Room

log = logging.getLogger("postroom.server")

Method: TypeAlias = Callable[[Any], Awaitable[Answer]]

# How many subscriptions, and how many bound routes, one client may hold.
HELD_MAX = 1000

_encode = msgspec.json.Encoder().encode
_DECODERS: dict[str, msgspec.json.Decoder[Params]] = {
    name: msgspec.json.Decoder(params) for name, (params, _) in METHODS.items()
}


class Connection:
    """``kind`` is ``stdio`` or ``socket``. ``on_shutdown`` is called when the client asks for it.

    `serve` it once; `aclose` it always. Between the two it still says what happens.
    """

    def __init__(
        self,
        room: Room,
        link: Link,
        *,
        kind: str,
        principal: str = OPERATOR,
        on_shutdown: Callable[[], None] | None = None,
        queue_bytes_high: int = QUEUE_BYTES_HIGH,
        lag_events_max: int = LAG_EVENTS_MAX,
    ) -> None:
        from postroom.server.operator import OperatorMethods
        from postroom.server.session import SessionMethods

        self.room = room
        self.kind = kind
        self.principal = principal
        self.wire = Wire(
            link,
            self._call,
            frame_bytes_max=room.limits.frame_bytes_max,
            queue_bytes_high=queue_bytes_high,
        )
        self._on_shutdown = on_shutdown
        self._lag_events_max = lag_events_max
        self._version: int | None = None
        self._released = False
        self._subscriptions: dict[int, Subscription] = {}
        self._subscribed = 0
        self._tokens: dict[ClaimToken, SessionId] = {}
        self._cores: dict[SessionId, CoreId] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._methods: dict[str, Method] = {
            "initialize": self._initialize,
            "shutdown": self._shutdown,
            **SessionMethods(self).table(),
            **OperatorMethods(self).table(),
        }

    # ---- its life ----

    async def serve(self) -> None:
        """Answers until the client sends no more or is gone, then gives up its routes."""
        try:
            await self.wire.serve()
        finally:
            await self._unbind_all()

    async def aclose(self) -> None:
        """Says what is still to be said, for a few seconds, and ends."""
        await self._unbind_all()
        for subscription in list(self._subscriptions.values()):
            subscription.close()
        self._subscriptions.clear()
        await self.wire.aclose()

    async def _unbind_all(self) -> None:
        self._released = True
        for token in list(self._tokens):
            await self.unbind(token)

    # ---- a call ----

    async def _call(self, method: str, raw: bytes) -> bytes:
        found = self._methods.get(method)
        if found is None:
            raise RpcError(
                wire_types.METHOD_NOT_FOUND,
                f"there is no method {method[:100]!r}",
                wire_types.ErrorData("method_not_found"),
            )
        if self._version is None and method != "initialize":
            raise refused("not_initialized", "say `initialize` first")
        try:
            return _encode(await found(read_params(_DECODERS[method], raw)))
        except RpcError:
            raise
        except PostroomError as error:
            raise as_rpc_error(error) from error

    async def _initialize(self, params: wire_types.Initialize) -> Answer:
        from postroom import __version__

        if params.protocol_version not in VERSIONS:
            raise refused(
                "unsupported_version",
                f"protocol version {params.protocol_version} is not spoken here",
                hint=f"these are: {', '.join(map(str, VERSIONS))}",
                path="protocolVersion",
                versions=VERSIONS,
            )
        self._version = params.protocol_version
        return wire_types.Initialized(
            VERSION,
            wire_types.Peer("postroom", __version__),
            {
                "deltas": True,
                "bind": True,
                "outbox": self.principal == OPERATOR,
                "shutdown": self._on_shutdown is not None,
            },
        )

    async def _shutdown(self, _: wire_types.Nothing) -> Answer:
        if self._on_shutdown is None:
            raise refused(
                "not_yours",
                "this runtime serves others too",
                hint="close the connection; the daemon is stopped where it was started",
            )
        self._on_shutdown()
        return wire_types.Done()

    # ---- what it holds ----

    def lock(self, session_id: str) -> asyncio.Lock:
        """Keeps what this client says in one session in the order it said it."""
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    def opened(self, session_id: SessionId, core_id: CoreId) -> None:
        self._cores[session_id] = core_id

    def core_of(self, session_id: SessionId) -> CoreId | None:
        """The core of a session this client opened; None: it was not opened here."""
        return self._cores.get(session_id)

    def subscribe(
        self, session_id: SessionId, *, after: int, types: list[str] | None, deltas: bool
    ) -> int:
        """Begins to tell the client of a session, after the answer to this call."""
        self._check_held(len(self._subscriptions), "subscriptions")
        self._subscribed += 1
        number = self._subscribed
        self._subscriptions[number] = Subscription(
            number,
            session_id,
            self.wire,
            self.room.store,
            self.room.live,
            after=after,
            types=None if types is None else frozenset(types),
            deltas=deltas,
            tells_status=lambda: self._first_of(session_id) == number,
            on_end=lambda: self._ended(number),
            lag_events_max=self._lag_events_max,
        )
        return number

    def unsubscribe(self, number: int) -> None:
        subscription = self._subscriptions.pop(number, None)
        if subscription is not None:
            subscription.close()

    def _ended(self, number: int) -> None:
        self._subscriptions.pop(number, None)

    def _first_of(self, session_id: SessionId) -> int | None:
        for number, subscription in self._subscriptions.items():
            if subscription.session_id == session_id:
                return number
        return None

    async def bind(self, session_id: SessionId) -> ClaimToken:
        from postroom.server.route import ConnectionRoute

        self._check_held(len(self._tokens), "routes")
        route = ConnectionRoute(session_id, self.wire, self.kind)
        token = await self.room.router.bind(session_id, route)
        self._tokens[token] = session_id
        if self._released:  # it went while the route was being bound
            await self.unbind(token)
        return token

    async def unbind(self, token: ClaimToken) -> None:
        """Takes a route of this connection away; another's is none of its business."""
        if self._tokens.pop(token, None) is not None:
            # Here it is gone at once; the router sees to the row, and the lease to the rest.
            with contextlib.suppress(StoreError):
                await self.room.router.unbind(token)

    async def release(self, session_id: SessionId) -> None:
        """Gives up what is held of one session."""
        for number, subscription in list(self._subscriptions.items()):
            if subscription.session_id == session_id:
                self.unsubscribe(number)
        for token, bound in list(self._tokens.items()):
            if bound == session_id:
                await self.unbind(token)
        self._cores.pop(session_id, None)

    def _check_held(self, count: int, what: str) -> None:
        if count >= HELD_MAX:
            raise refused(
                "input", f"this connection holds {count} {what}", hint="give some up first"
            )
