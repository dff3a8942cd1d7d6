"""What a tool test needs: a context such as the turn loop gives, and a bounded call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from postroom.domain.ids import CallId, SessionId
from postroom.ports.artifact import ArtifactStore
from postroom.ports.tool import Tool, ToolContext, ToolOutput
from postroom.stores.artifacts import open_artifacts
from postroom.testing import HeardOutput
from postroom.tools import Registry
from tests.support import bounded


def context(
    cwd: Path | None = None,
    *,
    artifacts: ArtifactStore | None = None,
    progress: Callable[[str], None] = lambda line: None,
    session: str = "session_1",
) -> ToolContext:
    return ToolContext(
        session_id=SessionId(session),
        turn=1,
        step=1,
        call_id=CallId("call_1"),
        cwd=None if cwd is None else str(cwd),
        principal="operator",
        artifacts=artifacts or open_artifacts("memory://"),
        progress=progress,
        output=HeardOutput(),
    )


async def call(
    tools: Iterable[Tool], name: str, ctx: ToolContext, /, **arguments: object
) -> ToolOutput:
    return await bounded(Registry(tools)[name].call(ctx, arguments), 30)
