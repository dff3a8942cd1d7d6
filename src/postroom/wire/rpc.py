"""JSON-RPC 2.0 both ways: framing and correlation. It knows nothing of what is said.

A `Link` carries frames; `Lines` cuts a byte stream into them. A `Wire` runs over a link: it answers
the other side's requests by a handler, each in a task of its own, and makes requests itself.

Rules:

- A frame that cannot be used is answered with a typed error, and the next one is read. A frame over
  the limit is never held whole: what is left of its line is thrown away as it comes.
- Every wait and queue is bounded. Who produces much (events, deliveries) asks `pressed` or awaits
  `room`; while the other side does not read, its own requests are not read either.
- Requests start in the order they came in. Answers may come in any order.
- The end of the other side's input does not end ours: what it asked is still answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from postroom.errors import Disconnected, PostroomError
from postroom.wire.protocol import (
    CODES,
    FRAME_BYTES_MAX,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
)

log = logging.getLogger("postroom.wire")

# While more than the first is queued towards the other side it is pressed, until the second is left.
QUEUE_BYTES_HIGH = 1024 * 1024
QUEUE_BYTES_LOW = 256 * 1024
REQUESTS_AT_ONCE_MAX = 32

_CHUNK = 64 * 1024
_ID_MAX = 2**53
_FLUSH_S = 5.0

RequestId: TypeAlias = int | str


class RpcError(PostroomError):
    """An error as it travels: ``number`` is JSON-RPC's code, ``data`` says which one it is by name."""

    code = "rpc"

    def __init__(self, number: int, message: str, data: ErrorData) -> None:
        super().__init__(message, hint=data.hint)
        self.number = number
        self.data = data


class Unfit(msgspec.Struct, frozen=True):
    """Something came that is no frame to be read. It is answered with this error."""

    number: int
    message: str
    data: ErrorData


def too_large(limit: int) -> Unfit:
    return Unfit(
        CODES["frame_too_large"],
        f"the frame is larger than {limit} bytes",
        ErrorData("frame_too_large", "send it as a file, or in parts"),
    )


# ---- frames of a byte stream ----


class Lines:
    """Cuts a byte stream at its newlines. It holds no more than ``limit`` bytes."""

    def __init__(self, limit: int = FRAME_BYTES_MAX) -> None:
        self._limit = limit
        self._held = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes | Unfit]:
        """The lines that are complete now, without those that are empty."""
        out: list[bytes | Unfit] = []
        start = 0
        while (at := chunk.find(b"\n", start)) >= 0:
            self._hold(chunk[start:at], out)
            self._cut(out)
            start = at + 1
        self._hold(chunk[start:], out)
        return out

    def end(self) -> list[bytes | Unfit]:
        """The last line, where no newline ends it."""
        out: list[bytes | Unfit] = []
        self._cut(out)
        return out

    def _hold(self, piece: bytes, out: list[bytes | Unfit]) -> None:
        if self._skipping:
            return
        if len(self._held) + len(piece) > self._limit:
            self._held = bytearray()
            self._skipping = True
            out.append(too_large(self._limit))
        else:
            self._held += piece

    def _cut(self, out: list[bytes | Unfit]) -> None:
        line = bytes(self._held).strip()
        self._held = bytearray()
        self._skipping = False
        if line:
            out.append(line)


class Link(Protocol):
    """Carries frames both ways. A frame is one JSON text without line breaks."""

    async def read(self) -> bytes | Unfit | None:
        """The next frame; None: the other side sends no more."""
        ...

    async def write(self, frames: Sequence[bytes]) -> None:
        """Returns when the operating system has taken them.

        Raises:
            OSError: the other side is gone.
        """
        ...

    async def aclose(self) -> None: ...


class StreamLink:
    """Newline-delimited frames over a byte stream."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._lines = Lines(frame_bytes_max)
        self._ready: deque[bytes | Unfit] = deque()
        self._ended = False
        writer.transport.set_write_buffer_limits(high=0)

    async def read(self) -> bytes | Unfit | None:
        while not self._ready:
            if self._ended:
                return None
            try:
                chunk = await self._reader.read(_CHUNK)
            except OSError:
                chunk = b""
            if chunk:
                self._ready.extend(self._lines.feed(chunk))
            else:
                self._ended = True
                self._ready.extend(self._lines.end())
        return self._ready.popleft()

    async def write(self, frames: Sequence[bytes]) -> None:
        self._writer.write(b"\n".join(frames) + b"\n")
        await self._writer.drain()

    async def aclose(self) -> None:
        if self._writer.transport.get_write_buffer_size():
            self._writer.transport.abort()  # nobody has read it, and nobody is waited for
        else:
            self._writer.close()


# ---- what a frame says ----


class Request(msgspec.Struct, frozen=True):
    """``id`` None: a notification, which nobody answers. ``params`` is JSON, empty if there is none."""

    id: RequestId | None
    method: str
    params: bytes


class Response(msgspec.Struct, frozen=True):
    """``error`` None: it went well and ``result`` is JSON."""

    id: RequestId
    result: bytes
    error: RpcError | None


class Malformed(msgspec.Struct, frozen=True):
    """``id`` None: it could not be made out."""

    id: RequestId | None
    error: Unfit


class _Error(msgspec.Struct):
    code: int
    message: str
    data: msgspec.Raw = msgspec.Raw(b"")


class _Frame(msgspec.Struct):
    jsonrpc: Literal["2.0"]
    id: RequestId | msgspec.UnsetType | None = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    params: msgspec.Raw = msgspec.Raw(b"")
    result: msgspec.Raw = msgspec.Raw(b"")
    error: _Error | msgspec.UnsetType | None = msgspec.UNSET


class _OnlyId(msgspec.Struct):
    id: RequestId | None = None


_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_id = msgspec.json.Decoder(_OnlyId).decode
_decode_error_data = msgspec.json.Decoder(ErrorData).decode
_encode = msgspec.json.Encoder().encode


def parse(data: bytes) -> Request | Response | Malformed:
    """What one frame says; never raises."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return _malformed(PARSE_ERROR, "parse_error", f"not UTF-8 (byte {error.start})")
    try:
        frame = _decode_frame(text)
    except msgspec.ValidationError as error:
        if text.lstrip().startswith("["):
            return _malformed(
                INVALID_REQUEST,
                "invalid_request",
                "batches are not taken",
                hint="send each request as a frame of its own",
            )
        return _malformed(
            INVALID_REQUEST, "invalid_request", f"not a JSON-RPC 2.0 frame: {error}", _id_of(text)
        )
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        return _malformed(PARSE_ERROR, "parse_error", f"not JSON: {error}")
    name = frame.id
    if isinstance(name, int) and abs(name) > _ID_MAX:
        return _malformed(INVALID_REQUEST, "invalid_request", "the id is too large a number")
    if frame.method is not msgspec.UNSET:
        if name is None:
            return _malformed(
                INVALID_REQUEST, "invalid_request", "an id is a number or a text, never null"
            )
        given = None if name is msgspec.UNSET else name
        return Request(given, frame.method, bytes(frame.params))
    result = bytes(frame.result)
    if isinstance(name, int | str) and (result or isinstance(frame.error, _Error)):
        return Response(name, result, _as_error(frame.error))
    known = name if isinstance(name, int | str) else None
    return _malformed(INVALID_REQUEST, "invalid_request", "neither a request nor an answer", known)


def _malformed(
    number: int, code: str, message: str, name: RequestId | None = None, hint: str | None = None
) -> Malformed:
    return Malformed(name, Unfit(number, message, ErrorData(code, hint)))


def _id_of(text: str) -> RequestId | None:
    try:
        name = _decode_id(text).id
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    return None if isinstance(name, int) and abs(name) > _ID_MAX else name


def _as_error(error: _Error | msgspec.UnsetType | None) -> RpcError | None:
    if not isinstance(error, _Error):
        return None
    try:
        data = _decode_error_data(bytes(error.data) or b'{"code":"error"}')
    except (msgspec.DecodeError, RecursionError, ValueError):
        data = ErrorData("error")
    return RpcError(error.code, error.message, data)


def request_frame(name: RequestId, method: str, params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (
        _encode(name),
        _encode(method),
        params,
    )


def note_frame(method: str, params: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (_encode(method), params)


def result_frame(name: RequestId, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (_encode(name), result)


def error_frame(name: RequestId | None, number: int, message: str, data: ErrorData) -> bytes:
    error = {"code": number, "message": message, "data": data}
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (_encode(name), _encode(error))


def _one_line(frame: bytes) -> bytes:
    """A line break in JSON only ever stands between its tokens, where a space says the same."""
    if b"\n" in frame or b"\r" in frame:
        return frame.replace(b"\n", b" ").replace(b"\r", b" ")
    return frame


# ---- both ways ----

Handler: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a request: method and parameters as JSON to a result as JSON. Raises `RpcError`."""

Written: TypeAlias = Literal["written", "not_written", "unsure"]


class _Out:
    """One frame on its way out. ``began``: some of it may have left."""

    __slots__ = ("began", "done", "frame")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.began = False
        self.done: asyncio.Future[Written] | None = None


class Wire:
    """One connection. `serve` it once; `aclose` it always."""

    def __init__(
        self,
        link: Link,
        handler: Handler,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        queue_bytes_high: int = QUEUE_BYTES_HIGH,
        queue_bytes_low: int = QUEUE_BYTES_LOW,
    ) -> None:
        self._link = link
        self._handler = handler
        self._frame_bytes_max = frame_bytes_max
        self._high = queue_bytes_high
        self._low = min(queue_bytes_low, queue_bytes_high)
        self._queue: deque[_Out] = deque()
        self._writing: list[_Out] = []
        self.queued_bytes = 0
        self._news = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._finishing = False
        self._over = False
        self._deaf = False
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._called = 0
        self._slots = asyncio.Semaphore(REQUESTS_AT_ONCE_MAX)
        self._answering: set[asyncio.Task[None]] = set()
        self._writer = asyncio.ensure_future(self._write_all())

    # ---- in ----

    async def serve(self) -> None:
        """Answers what comes, until the other side sends no more or is gone.

        It returns when everything that was asked until then is answered. Requests of ours that
        are still open fail: nobody can answer them any more.
        """
        reader = asyncio.ensure_future(self._read_all())
        try:
            await asyncio.wait({reader, self._writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._hang_up()
        while self._answering:
            await asyncio.wait(set(self._answering))

    async def _read_all(self) -> None:
        while (frame := await self._link.read()) is not None:
            await self.room()
            if isinstance(frame, Unfit):
                self._put(error_frame(None, frame.number, frame.message, frame.data))
                continue
            said = parse(frame)
            match said:
                case Malformed(name, error):
                    self._put(error_frame(name, error.number, error.message, error.data))
                case Response():
                    self._answered(said)
                case Request():
                    await self._slots.acquire()
                    task = asyncio.ensure_future(self._answer(said))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)

    async def _answer(self, request: Request) -> None:
        try:
            result = await self._handler(request.method, request.params)
            frame = b"" if request.id is None else result_frame(request.id, result)
            if len(frame) > self._frame_bytes_max:
                raise RpcError(
                    CODES["frame_too_large"],
                    f"the answer is larger than {self._frame_bytes_max} bytes",
                    ErrorData("frame_too_large", "ask for less at once"),
                )
        except RpcError as error:
            frame = error_frame(request.id, error.number, error.message, error.data)
        except Exception:
            log.exception("%s failed", request.method[:100])
            data = ErrorData("internal_error", "the server's log says more")
            frame = error_frame(request.id, INTERNAL_ERROR, "the server failed", data)
        finally:
            self._slots.release()
        if request.id is not None:
            self._put(frame)

    def _answered(self, response: Response) -> None:
        call = self._calls.get(response.id) if isinstance(response.id, int) else None
        if call is None or call.done():
            log.debug("an answer to nothing that is open: %r", response.id)
        elif response.error is not None:
            call.set_exception(response.error)
        else:
            call.set_result(response.result)

    # ---- out ----

    async def request(self, method: str, params: bytes) -> bytes:
        """Asks the other side; its result as JSON. Cancelling it forgets the question.

        Raises:
            RpcError: it answered with an error.
            Disconnected: it is gone, or sends no more.
        """
        if self._deaf or self._finishing or self._over:
            raise Disconnected("the connection is gone")
        self._called += 1
        name = self._called
        call: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[name] = call
        try:
            self._put(request_frame(name, method, params))
            return await call
        finally:
            del self._calls[name]

    def notify(self, method: str, params: bytes) -> None:
        """Says something nobody answers. It waits for nothing: ask `pressed` first."""
        self._put(note_frame(method, params))

    async def notify_surely(self, method: str, params: bytes, *, within_s: float) -> Written:
        """Says something, and tells whether it left. What has not begun to leave is withdrawn.

        ``unsure``: some of it may have left before the connection went or the time was over.
        """
        out = self._put(note_frame(method, params))
        if out is None:
            return "not_written"
        out.done = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({out.done}, timeout=within_s)
        finally:
            if not out.done.done():
                self._withdraw(out)
        return out.done.result()

    @property
    def pressed(self) -> bool:
        """More is queued than the other side reads: wait for `room`, or drop it."""
        return not self._open.is_set()

    async def room(self) -> None:
        """Returns when there is room for more, or when the connection is over."""
        await self._open.wait()

    @property
    def over(self) -> bool:
        """Nothing that is said now reaches anybody."""
        return self._over

    def _put(self, frame: bytes) -> _Out | None:
        if self._over:
            return None
        out = _Out(_one_line(frame))
        self._queue.append(out)
        self.queued_bytes += len(out.frame)
        if self.queued_bytes > self._high:
            self._open.clear()
        self._news.set()
        return out

    def _left(self, out: _Out) -> None:
        self.queued_bytes -= len(out.frame)
        if self.queued_bytes <= self._low:
            self._open.set()

    def _withdraw(self, out: _Out) -> None:
        assert out.done is not None
        if not out.began:
            self._queue.remove(out)
            self._left(out)
        out.done.set_result("unsure" if out.began else "not_written")

    async def _write_all(self) -> None:
        try:
            while not (self._finishing and not self._queue):
                while self._queue:
                    await self._link.write(self._next())
                    for out in self._writing:
                        self._left(out)
                        if out.done is not None and not out.done.done():
                            out.done.set_result("written")
                    self._writing = []
                self._news.clear()
                if not self._finishing:
                    await self._news.wait()
        except OSError as error:
            log.debug("the other side is gone: %s", error)
        finally:
            self._end()

    def _next(self) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        while self._queue and size < _CHUNK:
            out = self._queue.popleft()
            out.began = True
            self._writing.append(out)
            frames.append(out.frame)
            size += len(out.frame)
        return frames

    def _end(self) -> None:
        self._over = True
        for out in (*self._writing, *self._queue):
            if out.done is not None and not out.done.done():
                out.done.set_result("unsure" if out.began else "not_written")
        self._writing = []
        self._queue.clear()
        self.queued_bytes = 0
        self._open.set()
        self._hang_up()

    def _hang_up(self) -> None:
        self._deaf = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(Disconnected("the connection was lost"))

    async def aclose(self, *, flush_s: float = _FLUSH_S) -> None:
        """Lets what is queued leave, for so long, and closes the link."""
        self._finishing = True
        self._news.set()
        await asyncio.wait({self._writer}, timeout=flush_s)
        self._writer.cancel()
        await asyncio.wait({self._writer})
        await self._link.aclose()
