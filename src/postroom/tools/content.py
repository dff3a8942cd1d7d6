"""What bytes are, judged by what is in them and never by a name.

Text first: several signatures of binary formats are two plain letters (BM, MZ), and a text may
begin with them.
"""

from __future__ import annotations

import codecs
from typing import TypeAlias

from postroom.domain.message import File, Image

HEAD_BYTES = 8 * 1024
TEXT = "text/plain"
UNKNOWN = "application/octet-stream"

# A text in an old one-byte encoding has some bytes that are not UTF-8; a binary has many.
_STRANGE_SHARE_MAX = 0.1

ShownMedia: TypeAlias = Image | File


def media_type(head: bytes) -> str:
    """The media type of bytes that begin with ``head`` (about `HEAD_BYTES` of them).

    ``text/plain`` for anything that reads as text, SVG and HTML too.
    """
    if head.startswith(b"%PDF-"):
        return "application/pdf"
    if b"\0" not in head:
        strange = _not_utf8(head)
        if not strange:
            return TEXT
    else:
        strange = len(head)
    known = _signature(head)
    if known is not None:
        return known
    return TEXT if strange <= len(head) * _STRANGE_SHARE_MAX else UNKNOWN


def reads_as_text(head: bytes) -> bool:
    """Whether it is UTF-8 text if NULs are let pass, as in the output of ``find -print0``."""
    return not _not_utf8(head.replace(b"\0", b""))


def is_shown(kind: str) -> bool:
    """Whether a model may be able to look at such a file itself."""
    return kind.startswith("image/") or kind == "application/pdf"


def shown_media(artifact: str, kind: str, size: int, name: str | None) -> ShownMedia:
    """The block that shows an artifact of a kind that `is_shown`."""
    block = Image if kind.startswith("image/") else File
    return block(artifact=artifact, media_type=kind, size=size, name=name)


def _not_utf8(head: bytes) -> int:
    """How many bytes are not part of a UTF-8 character; one cut off at the end is."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(head).count("\ufffd") - head.count(b"\xef\xbf\xbd")


def _signature(head: bytes) -> str | None:
    import filetype  # pyright: ignore[reportMissingTypeStubs]

    found = filetype.guess(head)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return None if found is None else str(found.mime)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
