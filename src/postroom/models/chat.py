"""The Chat Completions dialect: from a request to the bytes of its body.

Pure. A message is encoded once and remembers its bytes (`ContextMessage.encoded`), each with a
comma before it, so that a body is a join of what is already there. Messages that hold files are
put together anew (what they say depends on ``request.media``); their base64 is kept elsewhere.

What providers do differently is data: a `Dialect`. Rules that hold for all of them:

- Several user messages in a row are sent as they are.
- The API takes no files in a tool message: those of a reply's results follow in one user message
  after the last of them.
- Reasoning is not sent back, except where a provider refuses its absence.
- Arguments that are no JSON object (a call cut off by the token limit) are wrapped in one:
  servers parse them, and a history that one of them cannot parse would fail for ever.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from postroom.domain.context import ContextMessage
from postroom.domain.event import ToolSpec
from postroom.domain.message import (
    Audio,
    Block,
    Image,
    Media,
    MediaBlock,
    Reasoning,
    Text,
    ToolCall,
)
from postroom.models.media import base64_of, joined, line_for, text_with_lines
from postroom.ports.model import ModelRequest


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """``encoding`` names how messages look; dialects that share it share encoded messages.

    ``reasoning_back``: assistant messages carry their ``reasoning_content``. ``short_ids``: call
    ids are nine letters or digits. ``max_tokens``: the name of that parameter. ``usage_option``:
    the server must be asked for usage in a stream. ``no_effort_with_tools``: model names that
    take tools only with ``reasoning_effort`` none; it is sent where the core sets no effort.
    """

    encoding: str = "chat"
    reasoning_back: bool = False
    short_ids: bool = False
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    usage_option: bool = True
    no_effort_with_tools: str | None = None


CHAT = Dialect()
OPENAI = Dialect(
    max_tokens="max_completion_tokens",
    # developers.openai.com/api/docs/models/gpt-6-luna: function calling only with effort "none",
    # which gpt-6-astra and gpt-6.1 do not know; models before gpt-5.6 need nothing.
    no_effort_with_tools=r"gpt-5\.[6-9]|gpt-6-(?!astra)",
)
# api-docs.deepseek.com/guides/thinking_mode: thinking is on by default, and a turn that called
# tools is refused later if its reasoning is missing.
DEEPSEEK = Dialect(encoding="chat, reasoning sent back", reasoning_back=True)
# Mistral's API refuses fields it does not know and other shapes of call ids.
MISTRAL = Dialect(encoding="chat, short ids", short_ids=True, usage_option=False)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def body_of(name: str, dialect: Dialect, accepts: frozenset[str], request: ModelRequest) -> bytes:
    """The body of ``POST /chat/completions``: exactly what is sent."""
    parts = [_opening(name, dialect, request)]
    if request.system:
        parts.append(b'{"role":"system","content":' + _text(request.system) + b"}")
    append = parts.append
    encoding = dialect.encoding
    trailing: list[tuple[int, list[bytes]]] = []
    for message in request.messages:
        known = message.encoded
        if known and known[0] == encoding:
            append(known[1])
            continue
        content = message.content
        if len(content) == 1 and type(content[0]) is Text:
            # Nearly all are, and the first request of a long session encodes thousands.
            encoded = _only_text(message, content[0].text, dialect)
            message.encoded = (encoding, encoded)
        elif any(isinstance(block, Media) for block in content):
            encoded, following = _with_media(message, dialect, accepts, request.media)
            if following:
                trailing.append((len(parts), following))
        else:
            encoded = _plain(message, dialect)
            message.encoded = (encoding, encoded)
        append(encoded)
    if trailing:
        _insert_after_results(parts, trailing, request.messages)
    if not request.system:
        _strip_first_comma(parts)
    append(b"]}")
    return b"".join(parts)


def _opening(name: str, dialect: Dialect, request: ModelRequest) -> bytes:
    params = request.params
    out = b'{"model":' + _text(name) + b',"stream":true'
    if dialect.usage_option:
        out += b',"stream_options":{"include_usage":true}'
    if params.max_tokens is not None:
        out += b',"%b":%d' % (dialect.max_tokens.encode(), params.max_tokens)
    if params.temperature is not None:
        out += b',"temperature":' + _encode(params.temperature)
    effort = params.reasoning_effort
    if effort is None and request.tools and dialect.no_effort_with_tools is not None:
        effort = "none" if re.match(dialect.no_effort_with_tools, name) else None
    if effort is not None:
        out += b',"reasoning_effort":' + _text(effort)
    if request.tools:
        out += b',"tools":[' + b",".join(map(_tool, request.tools)) + b"]"
    return out + b',"messages":['


def _tool(spec: ToolSpec) -> bytes:
    return (
        b'{"type":"function","function":{"name":'
        + _text(spec.name)
        + b',"description":'
        + _text(spec.description)
        + b',"parameters":'
        + bytes(spec.parameters)
        + b"}}"
    )


def _plain(message: ContextMessage, dialect: Dialect) -> bytes:
    """A message without files. Empty bytes: it says nothing a server would take."""
    if message.role == "user":
        return _user(_text(text_with_lines(message.content)))
    if message.role == "tool":
        return _result(message, text_with_lines(message.content), dialect)
    return _assistant(message.content, dialect)


def _only_text(message: ContextMessage, text: str, dialect: Dialect) -> bytes:
    if message.role == "user":
        return _user(_text(text))
    if message.role == "assistant" and text and not dialect.reasoning_back:
        return b',{"role":"assistant","content":' + _text(text) + b"}"
    return _plain(message, dialect)


def _user(content: bytes) -> bytes:
    return b',{"role":"user","content":' + content + b"}"


def _result(message: ContextMessage, text: str, dialect: Dialect) -> bytes:
    call_id = _call_id(message.call_id or "", dialect)
    return (
        b',{"role":"tool","tool_call_id":'
        + call_id
        + b',"content":'
        + _text(text or "(no output)")
        + b"}"
    )


def _assistant(content: Sequence[Block], dialect: Dialect) -> bytes:
    text = text_with_lines(content)
    calls = [block for block in content if isinstance(block, ToolCall)]
    if not text and not calls:
        return b""
    out = b',{"role":"assistant","content":' + (_text(text) if text else b"null")
    if dialect.reasoning_back:
        reasoning = "".join([block.text for block in content if isinstance(block, Reasoning)])
        out += b',"reasoning_content":' + _text(reasoning)
    if calls:
        out += b',"tool_calls":[' + b",".join([_call(call, dialect) for call in calls]) + b"]"
    return out + b"}"


def _call(call: ToolCall, dialect: Dialect) -> bytes:
    return (
        b'{"id":'
        + _call_id(call.call_id, dialect)
        + b',"type":"function","function":{"name":'
        + _text(call.name)
        + b',"arguments":'
        + _text(_arguments(call.arguments))
        + b"}}"
    )


def _arguments(arguments: str) -> str:
    try:
        if isinstance(_decode(arguments), dict):
            return arguments
    except (msgspec.DecodeError, UnicodeEncodeError):
        pass
    return _encode({"invalid_json": _sound(arguments)}).decode()


_ID = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}\Z")


def _call_id(call_id: str, dialect: Dialect) -> bytes:
    """The id as the provider takes it; another provider's id may have another shape.

    OpenAI takes 40 characters, Mistral nine letters or digits.
    """
    if not (_SHORT_ID if dialect.short_ids else _ID).match(call_id):
        digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()
        call_id = digest[:9] if dialect.short_ids else "call_" + digest[:24]
    return b'"' + call_id.encode() + b'"'


# ---- files ----


def _with_media(
    message: ContextMessage,
    dialect: Dialect,
    accepts: frozenset[str],
    media: Mapping[str, bytes],
) -> tuple[bytes, list[bytes]]:
    """The message, and the parts of the user message that must follow a tool's result."""
    shown = {
        block.artifact
        for block in message.content
        if isinstance(block, Media) and block.media_type in accepts and block.artifact in media
    }
    if not shown or message.role == "assistant":
        return _plain(message, dialect), []
    if message.role == "user":
        parts: list[bytes] = []
        for block in message.content:
            if isinstance(block, Text):
                if block.text:
                    parts.append(_text_part(block.text))
            elif isinstance(block, Media):
                if block.artifact in shown:
                    parts.append(_file_part(block, media[block.artifact]))
                else:
                    parts.append(_text_part(line_for(block)))
        return _user(b"[" + b",".join(parts) + b"]"), []
    pieces: list[str] = []
    following: list[bytes] = []
    for block in message.content:
        if isinstance(block, Text):
            pieces.append(block.text)
        elif isinstance(block, Media):
            if block.artifact in shown:
                pieces.append(f"[{block.name or block.artifact} is shown below]")
                following.append(_file_part(block, media[block.artifact]))
            else:
                pieces.append(line_for(block))
    return _result(message, joined(pieces), dialect), following


def _text_part(text: str) -> bytes:
    return b'{"type":"text","text":' + _text(text) + b"}"


def _file_part(block: MediaBlock, data: bytes) -> bytes:
    encoded = base64_of(block.artifact, data)
    if isinstance(block, Audio):
        kind = b"mp3" if block.media_type in ("audio/mpeg", "audio/mp3") else b"wav"
        return (
            b'{"type":"input_audio","input_audio":{"format":"%b","data":"' % kind + encoded + b'"}}'
        )
    url = b'"data:' + _text(block.media_type)[1:-1] + b";base64," + encoded + b'"'
    if isinstance(block, Image):
        return b'{"type":"image_url","image_url":{"url":' + url + b"}}"
    name = _text(block.name or "file")
    return b'{"type":"file","file":{"filename":' + name + b',"file_data":' + url + b"}}"


def _insert_after_results(
    parts: list[bytes],
    trailing: list[tuple[int, list[bytes]]],
    messages: Sequence[ContextMessage],
) -> None:
    """Puts the files of tool results behind the last result of their reply."""
    base = len(parts) - len(messages)
    at_end: dict[int, list[bytes]] = {}
    for place, following in trailing:
        end = place - base
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        at_end.setdefault(end, []).extend(following)
    for end in sorted(at_end, reverse=True):
        intro = _text_part("Shown by the tool results above:")
        content = b"[" + b",".join([intro, *at_end[end]]) + b"]"
        parts.insert(base + end, _user(content))


def _strip_first_comma(parts: list[bytes]) -> None:
    for index in range(1, len(parts)):
        if parts[index]:
            parts[index] = parts[index][1:]
            return


# ---- text ----


def _text(text: str) -> bytes:
    """JSON text; half a surrogate pair, which no encoding has, becomes U+FFFD."""
    try:
        return _encode(text)
    except UnicodeEncodeError:
        return _encode(_sound(text))


def _sound(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
