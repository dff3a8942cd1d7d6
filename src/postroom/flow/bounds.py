"""Bounds a tool's output before it reaches the log: a preview stays, the rest is an artifact."""

from __future__ import annotations

from postroom.domain.message import Block, Text
from postroom.ports.artifact import ArtifactStore
from postroom.ports.tool import ToolOutput


async def bound_output(
    output: ToolOutput, artifacts: ArtifactStore, *, text_bytes_max: int
) -> tuple[Block, ...]:
    """The content of a tool result, its text at most about ``text_bytes_max`` bytes of UTF-8."""
    data = output.text.encode("utf-8", "replace")
    if len(data) <= text_bytes_max:
        text = data.decode()
        return (*((Text(text),) if text or not output.media else ()), *output.media)
    artifact = await artifacts.put(data)
    head = data[: text_bytes_max * 2 // 3].decode("utf-8", "ignore")
    tail = data[-text_bytes_max // 3 :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    note = (
        f"\n[… {left_out} bytes left out; the whole output is artifact {artifact}, "
        "read it with read_artifact …]\n"
    )
    return (Text(head + note + tail), *output.media)
