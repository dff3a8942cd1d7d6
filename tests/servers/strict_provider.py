"""Servers of Anthropic's, Google's and Bedrock's dialects that do exactly what a test says.

`StrictChat` underneath: a queue of answers, byte for byte, and a check of every history as the
provider's own API makes it. Here are the events of their streams and the checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from tests.servers.strict_chat import Answer, End, Received, StrictChat, validate_anthropic

# ---- Anthropic: the events of a message ----

ANTHROPIC_USAGE = {
    "input_tokens": 7,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 1,
    "output_tokens": 1,
}


def sse(kind: str, **fields: object) -> bytes:
    value = json.dumps({"type": kind, **fields})
    return f"event: {kind}\ndata: {value}\n\n".encode()


def message_start() -> bytes:
    message = {
        "id": "msg_strict",
        "type": "message",
        "role": "assistant",
        "model": "strict-1",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": ANTHROPIC_USAGE,
    }
    return sse("message_start", message=message)


def block_start(index: int, **block: object) -> bytes:
    return sse("content_block_start", index=index, content_block=block)


def block_delta(index: int, **delta: object) -> bytes:
    return sse("content_block_delta", index=index, delta=delta)


def block_stop(index: int) -> bytes:
    return sse("content_block_stop", index=index)


def text_block(index: int, *pieces: str) -> list[bytes]:
    deltas = [block_delta(index, type="text_delta", text=piece) for piece in pieces]
    return [block_start(index, type="text", text=""), *deltas, block_stop(index)]


def thinking_block(index: int, thinking: str, signature: str = "") -> list[bytes]:
    events = [
        block_start(index, type="thinking", thinking="", signature=""),
        block_delta(index, type="thinking_delta", thinking=thinking),
    ]
    if signature:
        events.append(block_delta(index, type="signature_delta", signature=signature))
    return [*events, block_stop(index)]


def tool_block(index: int, call_id: str, name: str, *pieces: str) -> list[bytes]:
    """A call whose arguments come in these pieces of JSON."""
    deltas = [block_delta(index, type="input_json_delta", partial_json=p) for p in pieces]
    start = block_start(index, type="tool_use", id=call_id, name=name, input={})
    return [start, *deltas, block_stop(index)]


def message_delta(reason: str | None, output_tokens: int = 5, **delta: object) -> bytes:
    usage = {"output_tokens": output_tokens}
    stop = {"stop_reason": reason, "stop_sequence": None, **delta}
    return sse("message_delta", delta=stop, usage=usage)


def message_end(reason: str = "end_turn") -> list[bytes]:
    return [message_delta(reason), sse("message_stop")]


def anthropic_error(kind: str, message: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": message}}


class StrictAnthropic(StrictChat):
    def check(self, received: Received) -> list[str]:
        return validate_anthropic(received.json["messages"])

    def ok(self) -> Sequence[bytes]:
        return [message_start(), *text_block(0, "OK"), *message_end()]


# ---- Google: the chunks of a stream ----

GOOGLE_USAGE = {
    "promptTokenCount": 12,
    "cachedContentTokenCount": 5,
    "candidatesTokenCount": 4,
    "thoughtsTokenCount": 3,
    "totalTokenCount": 19,
}


def google_chunk(*parts: Mapping[str, object], finish: str | None = None, **more: object) -> bytes:
    candidate: dict[str, object] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    value = {
        "candidates": [candidate],
        "usageMetadata": GOOGLE_USAGE,
        "modelVersion": "strict-1",
        "responseId": "resp_strict",
        **more,
    }
    return b"data: " + json.dumps(value).encode() + b"\r\n\r\n"


def google_error(code: int, status: str, message: str, *details: object) -> dict[str, object]:
    error = {"code": code, "message": message, "status": status, "details": list(details)}
    return {"error": error}


class StrictGoogle(StrictChat):
    def check(self, received: Received) -> list[str]:
        return validate_google(received.json["contents"])

    def ok(self) -> Sequence[bytes]:
        return [google_chunk({"text": "OK"}), google_chunk(finish="STOP")]


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")


def validate_google(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What Gemini's API would refuse in these contents; empty if nothing.

    The user's side begins and ends; no part is empty; the content after one that calls functions
    holds a response for each call, by id and name, and there are no others.
    """
    wrong: list[str] = []
    if not contents or contents[0].get("role") != "user":
        wrong.append("the first content is not the user's")
    if contents and contents[-1].get("role") != "user":
        wrong.append("the last content is not the user's")
    called: list[tuple[str, str]] = []
    for index, content in enumerate(contents):
        where = f"contents[{index}]"
        if content.get("role") not in ("user", "model"):
            wrong.append(f"{where}: there is no role {content.get('role')!r}")
        parts = content.get("parts") or []
        if not parts:
            wrong.append(f"{where}: there are no parts")
        answered: list[tuple[str, str]] = []
        calls: list[tuple[str, str]] = []
        for part in parts:
            if not part.get("text", True):
                wrong.append(f"{where}: a text is empty")
            if response := part.get("functionResponse"):
                answered.append((response["id"], response["name"]))
            if call := part.get("functionCall"):
                calls.append((call["id"], call["name"]))
                if not _NAME.match(call["name"]):
                    wrong.append(f"{where}: {call['name']!r} is no name of a function")
        if sorted(answered) != sorted(called):
            wrong.append(f"{where}: responses for {answered}, calls were {called}")
        called = calls
    return wrong


# ---- Bedrock: the frames of an event stream ----


def frame(kind: str, value: object, *, message_type: str = "event") -> bytes:
    """One message of the binary event stream: prelude, headers, payload, and their checksums."""
    named = {
        f":{message_type}-type": kind,
        ":content-type": "application/json",
        ":message-type": message_type,
    }
    headers = b""
    for name, text in named.items():
        headers += bytes([len(name)]) + name.encode() + b"\x07"
        headers += len(text).to_bytes(2, "big") + text.encode()
    payload = json.dumps(value).encode()
    head = (len(headers) + len(payload) + 16).to_bytes(4, "big") + len(headers).to_bytes(4, "big")
    body = head + crc32(head).to_bytes(4, "big") + headers + payload
    return body + crc32(body).to_bytes(4, "big")


def bedrock_text(index: int, *pieces: str) -> list[bytes]:
    deltas = [bedrock_delta(index, text=piece) for piece in pieces]
    return [*deltas, frame("contentBlockStop", {"contentBlockIndex": index})]


def bedrock_delta(index: int, **delta: object) -> bytes:
    return frame("contentBlockDelta", {"contentBlockIndex": index, "delta": delta})


def bedrock_call(index: int, call_id: str, name: str, *pieces: str) -> list[bytes]:
    use = {"toolUse": {"toolUseId": call_id, "name": name}}
    start = frame("contentBlockStart", {"contentBlockIndex": index, "start": use})
    deltas = [bedrock_delta(index, toolUse={"input": piece}) for piece in pieces]
    return [start, *deltas, frame("contentBlockStop", {"contentBlockIndex": index})]


BEDROCK_START = frame("messageStart", {"role": "assistant"})
BEDROCK_USAGE = {
    "inputTokens": 7,
    "outputTokens": 5,
    "totalTokens": 17,
    "cacheReadInputTokens": 5,
    "cacheWriteInputTokens": 0,
}


def bedrock_end(reason: str = "end_turn") -> list[bytes]:
    usage = {"usage": BEDROCK_USAGE, "metrics": {"latencyMs": 1}}
    return [frame("messageStop", {"stopReason": reason}), frame("metadata", usage)]


def bedrock_stream(pieces: Sequence[bytes], end: End = "end") -> Answer:
    headers = {
        "content-type": "application/vnd.amazon.eventstream",
        "x-amzn-requestid": "req-bedrock",
    }
    return Answer(pieces, headers=headers, end=end)


class StrictBedrock(StrictChat):
    def check(self, received: Received) -> list[str]:
        return []
