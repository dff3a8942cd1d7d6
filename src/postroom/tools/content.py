"""Which contents a model may look at itself, and the blocks that show them to it.

What bytes are is told by `domain.media_type`.
"""

from __future__ import annotations

from typing import TypeAlias

from postroom.domain.media_type import HEAD_BYTES, TEXT, UNKNOWN, media_type, reads_as_text
from postroom.domain.message import File, Image

__all__ = [
    "HEAD_BYTES",
    "TEXT",
    "UNKNOWN",
    "ShownMedia",
    "is_shown",
    "media_type",
    "reads_as_text",
    "shown_media",
]

ShownMedia: TypeAlias = Image | File


def is_shown(kind: str) -> bool:
    """Whether a model may be able to look at such a file itself."""
    return kind.startswith("image/") or kind == "application/pdf"


def shown_media(artifact: str, kind: str, size: int, name: str | None) -> ShownMedia:
    """The block that shows an artifact of a kind that `is_shown`."""
    block = Image if kind.startswith("image/") else File
    return block(artifact=artifact, media_type=kind, size=size, name=name)
