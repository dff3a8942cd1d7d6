"""A language model as the turn loop sees it: one request in, one reply out, deltas on the way.

Contract of an adapter:

- `respond` makes exactly one attempt. The turn loop owns retries; a library's own are off.
- It raises `ModelError` and nothing else (besides cancellation). A stream that ends without a
  finish reason is a ``transport`` error, not a reply. A reply with neither text nor call is
  returned as it is: the loop decides.
- Cancelling the task closes the connection and returns at once.
- `render` gives the exact bytes that `respond` sends, from the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params, ToolSpec
from postroom.domain.ids import SessionId
from postroom.domain.message import Block, Finish, Usage


class ModelRequest(msgspec.Struct, frozen=True):
    """``number`` counts the session's requests from 1, retries included.

    ``media`` holds the bytes of every artifact that a message names and the model accepts, by
    artifact id; a media block without an entry there is sent as a line of text that names it.
    """

    session_id: SessionId
    number: int
    system: str
    messages: Sequence[ContextMessage]
    tools: tuple[ToolSpec, ...]
    params: Params
    media: Mapping[str, bytes] = {}


class Reply(msgspec.Struct, frozen=True):
    """``model`` is the name the provider gave back; ``request_id`` its id (None: it gave none)."""

    content: tuple[Block, ...]
    finish: Finish
    usage: Usage
    model: str
    request_id: str | None = None


class TextDelta(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    text: str


class CallDelta(msgspec.Struct, frozen=True, tag="call", tag_field="type"):
    """The model has begun to call a tool; its arguments are still coming."""

    name: str


Delta: TypeAlias = TextDelta | ReasoningDelta | CallDelta
DeltaSink: TypeAlias = Callable[[Delta], None]


class Model(Protocol):
    @property
    def ref(self) -> str:
        """``PROVIDER:NAME``, as it was asked for."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens that fit in a request and its reply together; None if unknown."""
        ...

    @property
    def accepts(self) -> frozenset[str]:
        """Media types (``image/png``, ``application/pdf``) taken as such."""
        ...

    def render(self, request: ModelRequest) -> bytes: ...

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply: ...

    async def aclose(self) -> None: ...
