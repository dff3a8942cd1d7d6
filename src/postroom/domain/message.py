"""Messages and the blocks of content they are made of.

A message is an immutable, identified, user-role input. Content is a list of blocks; what is
large lies in the artifact store and is named by its hash. `parse_content` is the edge: what
it returns is valid, and everything after it may rely on that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from postroom.domain.ids import MessageId
from postroom.errors import InvalidContent


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="type", rename="camel", gc=False):
    text: str


class Reasoning(
    msgspec.Struct,
    frozen=True,
    tag="reasoning",
    tag_field="type",
    rename="camel",
    omit_defaults=True,
):
    """What a model thought aloud. ``signature`` is the provider's seal, sent back unchanged."""

    text: str
    signature: str | None = None


class ToolCall(
    msgspec.Struct, frozen=True, tag="toolCall", tag_field="type", rename="camel", gc=False
):
    """``arguments`` is a JSON object as the model wrote it, kept as text."""

    call_id: str
    name: str
    arguments: str


class Media(
    msgspec.Struct, frozen=True, tag_field="type", rename="camel", omit_defaults=True, kw_only=True
):
    """A file by artifact reference: ``artifact`` is ``sha256:<hex>``, ``size`` in bytes."""

    artifact: str
    media_type: str
    size: int
    name: str | None = None


class Image(Media, frozen=True, tag="image"):
    pass


class Audio(Media, frozen=True, tag="audio"):
    pass


class Video(Media, frozen=True, tag="video"):
    pass


class File(Media, frozen=True, tag="file"):
    pass


MediaBlock: TypeAlias = Image | Audio | Video | File
InputBlock: TypeAlias = Text | Image | Audio | Video | File
Block: TypeAlias = Text | Reasoning | ToolCall | Image | Audio | Video | File


class Source(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Where a message came from.

    ``kind`` is ``operator``, ``conversation``, ``sdk``, ``schedule``, ``goal``, ``child``,
    ``tool`` or ``system``. ``sender`` is the person's display name and ``sender_id`` the
    platform's opaque id (None where there is no other person than the operator).
    """

    kind: str = "operator"
    principal: str | None = None
    sender: str | None = None
    sender_id: str | None = None
    channel: str | None = None
    reference: str | None = None


class Message(msgspec.Struct, frozen=True, rename="camel"):
    id: MessageId
    content: tuple[InputBlock, ...]
    source: Source


CONTENT_BYTES_MAX = 16 * 1024 * 1024

_encode = msgspec.json.Encoder().encode


def text_of(content: Sequence[Block]) -> str:
    """The text blocks, joined as they stand; empty if there is none."""
    if len(content) == 1 and isinstance(content[0], Text):
        return content[0].text
    return "".join([b.text for b in content if isinstance(b, Text)])


def sound(text: str) -> str:
    """The text in valid Unicode: halves of a surrogate pair are joined, or become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def content_hash(content: Sequence[InputBlock]) -> str:
    """Identifies content exactly: two messages with one id must agree in it."""
    return hashlib.sha256(_encode(content)).hexdigest()[:32]


def parse_content(raw: object, *, bytes_max: int = CONTENT_BYTES_MAX) -> tuple[InputBlock, ...]:
    """Content from outside: a string, or a list of blocks as JSON values or as structs.

    Raises:
        InvalidContent: it is empty, is not JSON, has an unknown block or field type, holds
            text that is no valid Unicode, or is larger than ``bytes_max`` bytes as JSON.
    """
    if isinstance(raw, str):
        raw = [Text(raw)]
    if not isinstance(raw, list | tuple):
        raise InvalidContent(
            f"a string or a list of blocks is needed, not {type(raw).__name__}", path="content"
        )
    blocks: list[InputBlock] = []
    for index, item in enumerate(raw):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        blocks.append(_parse_block(item, f"content[{index}]"))
    if not any(not isinstance(b, Text) or b.text.strip() for b in blocks):
        raise InvalidContent("there is nothing in it", path="content")
    try:
        size = len(_encode(blocks))
    except UnicodeEncodeError as error:
        raise InvalidContent("the text is not valid Unicode", path="content") from error
    if size > bytes_max:
        raise InvalidContent(
            f"{size} bytes, the limit is {bytes_max}",
            path="content",
            hint="send it as a file, or in parts",
        )
    return tuple(blocks)


def _parse_block(item: object, path: str) -> InputBlock:
    if isinstance(item, Text | Image | Audio | Video | File):
        return item
    try:
        return msgspec.convert(item, InputBlock)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise InvalidContent(reason, path=path + where.rstrip("`")) from error


Finish: TypeAlias = Literal["stop", "tool_calls", "length", "content_filter"]


class Usage(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Tokens of one model request. ``cached_tokens`` are part of ``input_tokens``."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class AssistantMessage(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    content: tuple[Block, ...]
