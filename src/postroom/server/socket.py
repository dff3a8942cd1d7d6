"""The protocol over a web socket: one text frame is one JSON-RPC frame.

A client shows the token as ``Authorization: Bearer …``, or, where it cannot set a header, offers the
two subprotocols ``postroom.1`` and ``bearer.…``. What names another ``Host`` than this machine, or
comes from a page of another origin, is refused before anything else is looked at.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import WSCloseCode, WSMsgType, web

from postroom.scripts.approvals import OPERATOR
from postroom.server.connection import Connection
from postroom.wire.protocol import FRAME_BYTES_MAX, INVALID_REQUEST, ErrorData
from postroom.wire.rpc import Unfit, too_large

if TYPE_CHECKING:
    from postroom.app import Room

log = logging.getLogger("postroom.server")

PATH = "/ws"
SUBPROTOCOL = "postroom.1"
CONNECTIONS_MAX = 1000

_BEARER = "bearer."
# The library holds a message whole before we see it. Up to twice our own limit it is refused with a
# typed error and the socket stays; beyond that the socket is closed (1009).
_HELD_FACTOR = 2
_HEARTBEAT_S = 60.0
_CLOSE_S = 2.0


class SocketLink:
    """Frames over an open web socket."""

    def __init__(self, socket: web.WebSocketResponse, frame_bytes_max: int) -> None:
        self._socket = socket
        self._frame_bytes_max = frame_bytes_max

    async def read(self) -> bytes | Unfit | None:
        message = await self._socket.receive()
        if message.type is WSMsgType.TEXT:
            frame = message.data.encode()
            return (
                frame if len(frame) <= self._frame_bytes_max else too_large(self._frame_bytes_max)
            )
        if message.type is WSMsgType.BINARY:
            return Unfit(INVALID_REQUEST, "text frames only, please", ErrorData("invalid_request"))
        return None

    async def write(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await self._socket.send_frame(frame, WSMsgType.TEXT)

    async def aclose(self) -> None:
        await self._socket.close(code=WSCloseCode.GOING_AWAY, drain=False)


class SocketServer:
    """Takes connections at `route`; `aclose` ends those that are open.

    ``host`` is the address the process listens on. ``hosts`` are further names it is reached by.
    """

    def __init__(
        self,
        room: Room,
        token: str,
        *,
        host: str = "127.0.0.1",
        hosts: Iterable[str] = (),
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self._room = room
        self._token = token.encode()
        self._host = host.strip("[]").lower()
        self._hosts = frozenset(name.lower() for name in hosts)
        self._frame_bytes_max = frame_bytes_max
        self._open: set[Connection] = set()
        self._closing = False

    def route(self) -> web.RouteDef:
        return web.get(PATH, self._connect)

    async def aclose(self) -> None:
        """Says what is still to be said, and closes every connection."""
        self._closing = True
        await asyncio.gather(*(connection.aclose() for connection in list(self._open)))

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        refused = self._refusal(request)
        if refused is not None:
            return refused
        socket = web.WebSocketResponse(
            protocols=(SUBPROTOCOL,),
            heartbeat=_HEARTBEAT_S,
            timeout=_CLOSE_S,
            max_msg_size=_HELD_FACTOR * self._frame_bytes_max,
            compress=False,
        )
        await socket.prepare(request)
        connection = Connection(
            self._room, SocketLink(socket, self._frame_bytes_max), kind="socket", principal=OPERATOR
        )
        self._open.add(connection)
        try:
            await connection.serve()
        finally:
            self._open.discard(connection)
            await connection.aclose()
        return socket

    # ---- who may connect ----

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not self._is_ours(request.headers.get("Host", "")):
            return _refuse(403, "this host name is not served here")
        origin = request.headers.get("Origin")
        if origin is not None and not _same_origin(origin, request.headers["Host"]):
            return _refuse(403, "pages of other origins may not connect")
        if not self._believes(request):
            response = _refuse(401, "the token is missing or wrong")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if self._closing or len(self._open) >= CONNECTIONS_MAX:
            return _refuse(503, "no more connections are taken")
        return None

    def _is_ours(self, host: str) -> bool:
        """A name that anybody can point at this machine is not ours; an address cannot be pointed."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if _is_loopback(name) or name in self._hosts:
            return True
        return not _is_loopback(self._host) and (name == self._host or _is_address(name))

    def _believes(self, request: web.Request) -> bool:
        shown: list[str] = []
        scheme, _, value = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            shown.append(value.strip())
        for line in request.headers.getall("Sec-WebSocket-Protocol", []):
            for offered in line.split(","):
                if offered.strip().startswith(_BEARER):
                    shown.append(offered.strip().removeprefix(_BEARER))
        return any(hmac.compare_digest(one.encode(), self._token) for one in shown)


def add_socket(
    app: web.Application, room: Room, token: str, *, host: str = "127.0.0.1"
) -> SocketServer:
    """Serves the protocol in an application; its shutdown ends the connections."""
    server = SocketServer(room, token, host=host)
    app.add_routes([server.route()])

    async def close(_: web.Application) -> None:
        await server.aclose()

    app.on_shutdown.append(close)
    return server


def _same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse(status: int, message: str) -> web.Response:
    log.warning("a connection was refused: %s", message)
    return web.json_response({"error": {"code": "unauthorized", "message": message}}, status=status)
