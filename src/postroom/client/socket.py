"""The web socket transport: the runtime is a daemon's, and outlives every connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from postroom.errors import ConfigError, Disconnected, UsageError
from postroom.wire.protocol import FRAME_BYTES_MAX, INVALID_REQUEST, ErrorData
from postroom.wire.rpc import Unfit

_CONNECT_S = 10.0
# A link that says nothing for so long is asked; one that does not answer is gone.
_HEARTBEAT_S = 20.0
_CLOSE_S = 3.0


class SocketTransport:
    survives = True

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    async def open(self) -> Socket:
        http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(_CONNECT_S):
                ws = await http.ws_connect(
                    self._url,
                    headers={"Authorization": f"Bearer {self._token}"},
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=2 * FRAME_BYTES_MAX,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]
                )
        except BaseException as error:
            await http.close()
            match error:
                case aiohttp.WSServerHandshakeError(status=401):
                    raise ConfigError(
                        f"{self._url} does not know this token",
                        hint="POSTROOM_TOKEN of the daemon, or what its file socket.token holds",
                    ) from None
                case aiohttp.WSServerHandshakeError(status=status) if status < 500:
                    raise UsageError(
                        f"{self._url} answers {status}: no runtime to talk to"
                    ) from None
                case aiohttp.InvalidURL():
                    raise UsageError(f"{self._url!r} is no address of a web socket") from None
                case aiohttp.ClientError() | OSError() | TimeoutError():
                    raise Disconnected(f"cannot reach {self._url}: {error}") from error
                case _:
                    raise
        return Socket(self._url, http, ws)


class Socket:
    """An open web socket, as link and as what stands behind it."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, ws: aiohttp.ClientWebSocketResponse
    ) -> None:
        self._url = url
        self._http = http
        self._ws = ws

    @property
    def link(self) -> Socket:
        return self

    async def read(self) -> bytes | Unfit | None:
        message = await self._ws.receive()
        if message.type is aiohttp.WSMsgType.TEXT:
            return message.data.encode()
        if message.type is aiohttp.WSMsgType.BINARY:
            return Unfit(INVALID_REQUEST, "text frames only", ErrorData("invalid_request"))
        return None

    async def write(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await self._ws.send_frame(frame, aiohttp.WSMsgType.TEXT)

    async def obituary(self) -> Disconnected:
        return Disconnected(f"the connection to {self._url} is lost")

    async def aclose(self) -> None:
        """As link, and once more as what was opened."""
        try:
            async with asyncio.timeout(2 * _CLOSE_S):
                await self._ws.close()
        except TimeoutError:
            pass
        finally:
            await self._http.close()
