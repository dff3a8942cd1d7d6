"""A Chat Completions server that does exactly what a test says, and refuses unsound histories.

It runs on the test's own event loop and writes raw HTTP, so a test decides every byte, every
boundary and every ending. An answer is queued with `StrictChat.will`; without one the server says
"OK". Each history is checked as OpenAI checks it: what is wrong is kept in ``violations`` and
answered with 400.

`validate_openai`, `validate_anthropic` and `as_anthropic` are pure and of use without a server.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# ---- answers ----

End = Literal["end", "drop", "hang", "hang after end"]


@dataclass
class Answer:
    """``pieces`` are written one by one, each an HTTP chunk of its own.

    ``end`` is what follows: the stream's proper end, the connection dropped, or nothing at all
    until the client goes; ``hang after end`` keeps the chunked body open after all was said.
    ``raw`` instead of all this: these bytes and nothing else. ``started`` is set when all pieces
    are written.
    """

    pieces: Sequence[bytes] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": EVENT_STREAM})
    end: End = "end"
    raw: bytes | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)


EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def chunk(
    delta: Mapping[str, object] | None = None, finish: str | None = None, **more: object
) -> bytes:
    """One event of a stream."""
    value: dict[str, object] = {
        "id": "chatcmpl-strict",
        "object": "chat.completion.chunk",
        "model": "strict-1",
        "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}],
    }
    value.update(more)
    return event(value)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def call_piece(index: int | None, **fields: object) -> dict[str, object]:
    """The delta of one piece of a call: ``id``, ``name``, ``arguments``."""
    piece: dict[str, object] = {} if index is None else {"index": index}
    if "id" in fields:
        piece["id"] = fields["id"]
    piece["function"] = {k: v for k, v in fields.items() if k != "id"}
    return {"tool_calls": [piece]}


USAGE: dict[str, object] = {
    "prompt_tokens": 12,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 5},
    "completion_tokens_details": {"reasoning_tokens": 3},
}


def spoken(*pieces: str, finish: str = "stop") -> list[bytes]:
    """A whole stream that says these pieces of text."""
    said = [chunk({"content": piece}) for piece in pieces]
    return [chunk({"role": "assistant"}), *said, *ending(finish)]


def ending(finish: str = "stop") -> list[bytes]:
    """The finish reason, the usage and the last word."""
    usage = event({"id": "chatcmpl-strict", "choices": [], "usage": USAGE})
    return [chunk(finish=finish), usage, DONE]


def refused(status: int, error: object, **headers: str) -> Answer:
    """An HTTP status with a JSON body; header names are written with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(
        [json.dumps(error).encode()], status, {"content-type": "application/json", **named}
    )


# ---- the server ----


@dataclass
class Received:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class StrictChat:
    """``async with StrictChat() as server``. ``connected`` counts all connections ever made."""

    def __init__(self) -> None:
        self.requests: list[Received] = []
        self.violations: list[str] = []
        self.connected = 0
        self._answers: deque[Answer] = deque()
        self._open: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> StrictChat:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self.no_connection()

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def will(self, *answers: Answer | Sequence[bytes]) -> Answer:
        """Queues answers; a list of pieces is a stream that ends properly. The last is returned."""
        answer = Answer()
        for given in answers:
            answer = given if isinstance(given, Answer) else Answer(given)
            self._answers.append(answer)
        return answer

    def check(self, received: Received) -> list[str]:
        """What is wrong with a request. A server of another dialect has its own."""
        return validate_openai(received.json["messages"])

    def ok(self) -> Sequence[bytes]:
        """What is said when no answer is queued."""
        return spoken("OK")

    async def no_connection(self) -> None:
        """Returns when no connection is open."""
        while self._open:
            self._changed.clear()
            await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        self._open.add(writer)
        try:
            while (received := await _read_request(reader)) is not None:
                self.requests.append(received)
                if not await self._answer(received, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, UnicodeDecodeError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(writer)
            self._changed.set()

    async def _answer(
        self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection may be used again."""
        wrong = self.check(received)
        self.violations += wrong
        if wrong:
            answer = refused(400, {"error": {"message": "; ".join(wrong)}})
        else:
            answer = self._answers.popleft() if self._answers else Answer(self.ok())
        if answer.raw is not None:
            await _write(writer, answer.raw)
            answer.started.set()
            return False
        head = f"HTTP/1.1 {answer.status} Said\r\ntransfer-encoding: chunked\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        await _write(writer, head.encode() + b"\r\n")
        for piece in answer.pieces:
            await _write(writer, b"%x\r\n%b\r\n" % (len(piece), piece))
        answer.started.set()
        if answer.end == "end":
            await _write(writer, b"0\r\n\r\n")
            return True
        if answer.end != "drop":
            await reader.read()
        return False


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Writes, and lets the reader on this same loop see these bytes before any more come."""
    writer.write(data)
    await writer.drain()
    for _ in range(4):
        await asyncio.sleep(0)


# ---- what a history must be ----

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_ID = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")


def validate_openai(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What OpenAI's API would refuse in these Chat Completions messages; empty if nothing.

    Every call is answered by exactly one tool message, directly after the assistant message and
    before anything else; there are no other tool messages; no id is used twice; no content is
    empty; arguments are a JSON object.
    """
    wrong: list[str] = [] if messages else ["there are no messages"]
    seen: set[str] = set()
    unanswered: list[str] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role == "tool":
            call_id = message.get("tool_call_id")
            if call_id in unanswered:
                unanswered.remove(call_id)
            else:
                wrong.append(f"{where}: {call_id} answers no call before it")
            wrong += _content(message.get("content"), where, ("text",))
            continue
        if unanswered:
            wrong.append(f"{where}: {', '.join(unanswered)} not answered before it")
            unanswered = []
        if role in ("system", "developer", "user"):
            kinds = ("text", "image_url", "input_audio", "file") if role == "user" else ("text",)
            wrong += _content(message.get("content"), where, kinds)
        elif role == "assistant":
            calls = message.get("tool_calls")
            if "tool_calls" in message and not calls:
                wrong.append(f"{where}: tool_calls is empty")
            if message.get("content") is not None or not calls:
                wrong += _content(message.get("content"), where, ("text",))
            for call in calls or ():
                wrong += _call(call, where, seen)
                unanswered.append(call.get("id"))
        else:
            wrong.append(f"{where}: there is no role {role!r}")
    if unanswered:
        wrong.append(f"the end: {', '.join(unanswered)} not answered")
    return wrong


def _content(content: Any, where: str, kinds: Sequence[str]) -> list[str]:
    if isinstance(content, str):
        return [] if content else [f"{where}: the content is empty"]
    if not isinstance(content, list) or not content:
        return [f"{where}: the content is no text and no list of parts"]
    wrong: list[str] = []
    for part in content:
        kind = part.get("type")
        if kind not in kinds:
            wrong.append(f"{where}: a part of type {kind} is not taken here")
        elif not part.get(kind):
            wrong.append(f"{where}: a part is empty")
    return wrong


def _call(call: Mapping[str, Any], where: str, seen: set[str]) -> list[str]:
    wrong: list[str] = []
    call_id = call.get("id")
    if not isinstance(call_id, str) or not _ID.match(call_id):
        wrong.append(f"{where}: {call_id!r} is no call id")
    elif call_id in seen:
        wrong.append(f"{where}: the id {call_id} was used before")
    else:
        seen.add(call_id)
    function = call.get("function", {})
    if call.get("type") != "function" or not _NAME.match(str(function.get("name", ""))):
        wrong.append(f"{where}: a call names no function")
    try:
        fine = isinstance(json.loads(function.get("arguments")), dict)
    except (TypeError, ValueError):
        fine = False
    if not fine:
        wrong.append(f"{where}: arguments are no JSON object")
    return wrong


def as_anthropic(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat Completions messages as the Messages API has them, one for one; no system message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role in ("system", "developer"):
            continue
        blocks: list[dict[str, Any]] = []
        if role == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            out.append({"role": "user", "content": [{**result, "content": content}]})
            continue
        if isinstance(content, str):
            blocks.append({"type": "text", "text": content})
        else:
            blocks += [p if p["type"] == "text" else {"type": "image"} for p in content or ()]
        for call in message.get("tool_calls") or ():
            function = call["function"]
            use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            blocks.append({**use, "input": json.loads(function["arguments"])})
        out.append({"role": role, "content": blocks})
    return out


def validate_anthropic(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What Anthropic's API would refuse in these messages of its own shape; empty if nothing.

    Neighbours of one role count as one message, as the API joins them. Then: the first and the
    last are the user's; the message after one that uses tools begins with exactly one result for
    each use; there are no other results; no id is used twice; no text is empty.
    """
    merged: list[tuple[str, list[Mapping[str, Any]]]] = []
    for message in messages:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        if merged and merged[-1][0] == message["role"]:
            merged[-1][1].extend(blocks)
        else:
            merged.append((message["role"], blocks))
    wrong: list[str] = []
    if not merged or merged[0][0] != "user":
        wrong.append("the first message is not the user's")
    if merged and merged[-1][0] != "user":
        wrong.append("the last message is not the user's")
    seen: set[str] = set()
    used: list[str] = []
    for index, (role, blocks) in enumerate(merged):
        where = f"message {index}"
        if role not in ("user", "assistant"):
            wrong.append(f"{where}: there is no role {role!r}")
        if not blocks:
            wrong.append(f"{where}: the content is empty")
        if any(b["type"] == "text" and not b.get("text", "").strip() for b in blocks):
            wrong.append(f"{where}: a text is empty")
        results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
        if sorted(results) != sorted(used):
            wrong.append(f"{where}: results for {results}, uses were {used}")
        if any(b["type"] == "tool_result" for b in blocks[len(results) :]):
            wrong.append(f"{where}: a result stands behind other content")
        used = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if used and role != "assistant":
            wrong.append(f"{where}: only the assistant uses tools")
        for use in used:
            if use in seen:
                wrong.append(f"{where}: the id {use} was used before")
            seen.add(use)
    return wrong
