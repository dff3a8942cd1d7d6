"""The tool that pages through an artifact: the whole of an output of which a preview was shown."""

# ruff: noqa: D417  (a tool's docstring speaks to the model, which has no context to pass)

from __future__ import annotations

from typing import Annotated

import msgspec

from postroom.errors import ArtifactCorrupt, ArtifactMissing, ToolFailure
from postroom.ports.tool import Tool, ToolContext, ToolOutput
from postroom.tools.bounds import shown_part
from postroom.tools.content import (
    HEAD_BYTES,
    TEXT,
    is_shown,
    media_type,
    reads_as_text,
    shown_media,
)
from postroom.tools.function import tool

PAGE_BYTES = 16 * 1024
# Under what the turn loop keeps of a result: a page of an artifact must not become an artifact.
PAGE_BYTES_MAX = 30 * 1024


def artifact_tools() -> tuple[Tool, ...]:
    """`read_artifact`. Which artifacts it finds is for the context's store to say: the session's own."""

    @tool(effects="none")
    async def read_artifact(
        ctx: ToolContext,
        artifact: str,
        offset: Annotated[int, msgspec.Meta(ge=0)] = 0,
        limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_BYTES_MAX)] = PAGE_BYTES,
    ) -> ToolOutput:
        """Reads a part of an artifact: an output or a file that was too large to show whole.

        Args:
            artifact: Its id, sha256: and 64 hex digits.
            offset: The first byte to read, from 0.
            limit: How many bytes to read.
        """
        try:
            data = await ctx.artifacts.get(artifact)
        except (ArtifactMissing, ArtifactCorrupt) as error:
            raise ToolFailure(error.message) from error
        kind = media_type(data[:HEAD_BYTES])
        if is_shown(kind):
            block = shown_media(artifact, kind, len(data), None)
            return ToolOutput(f"[{kind}, {len(data)} bytes]", media=(block,))
        if kind != TEXT and not reads_as_text(data[:HEAD_BYTES]):
            raise ToolFailure(f"{artifact} is binary ({kind}, {len(data)} bytes)")
        if offset >= len(data):
            raise ToolFailure(f"{artifact} has {len(data)} bytes; there is nothing at {offset}")
        text, end = shown_part(data, offset, limit)
        more = f"; go on with offset={end}" if end < len(data) else ""
        return ToolOutput(f"[bytes {offset} to {end} of {len(data)}{more}]\n{text}")

    return (read_artifact,)
