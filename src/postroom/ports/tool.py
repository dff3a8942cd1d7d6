"""A tool as the turn loop sees it.

A tool gets JSON arguments and a context, and answers with content for the model. It may raise
`ToolFailure` with a message the model can act on; anything else it raises becomes an error
result too, and the turn goes on. Cancelling its task must stop it: what it started (a process,
a request) ends with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeAlias

import msgspec

from postroom.domain.event import ToolSpec
from postroom.domain.ids import CallId, SessionId
from postroom.domain.message import MediaBlock
from postroom.ports.artifact import ArtifactStore
from postroom.ports.output import Output

Permission: TypeAlias = Literal["allow", "ask", "deny"]
Effects: TypeAlias = Literal["none", "workspace", "outside"]


class ToolContext(msgspec.Struct, frozen=True):
    """``cwd`` is the session's workspace (None: it has none). ``principal`` is who the turn's
    messages came from. ``progress`` shows a line to whoever watches, and keeps nothing. ``output``
    speaks to the session's conversation, through the outbox.
    """

    session_id: SessionId
    turn: int
    step: int
    call_id: CallId
    cwd: str | None
    principal: str
    artifacts: ArtifactStore
    progress: Callable[[str], None]
    output: Output


class ToolOutput(msgspec.Struct, frozen=True):
    """``text`` of any length: the loop bounds it and keeps the rest as an artifact.

    ``media`` are artifacts already put in the store.
    """

    text: str
    media: tuple[MediaBlock, ...] = ()
    is_error: bool = False


class Tool(Protocol):
    """``exclusive``: runs alone, never beside another call. ``effects`` none: it only looks.
    ``timeout_ms`` None: the core's limit.
    """

    @property
    def spec(self) -> ToolSpec: ...

    @property
    def exclusive(self) -> bool: ...

    @property
    def effects(self) -> Effects: ...

    @property
    def timeout_ms(self) -> int | None: ...

    def call(self, ctx: ToolContext, arguments: dict[str, object]) -> Awaitable[ToolOutput]: ...
