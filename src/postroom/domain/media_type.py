"""What bytes are, judged by what is in them and never by a name.

Text first: several signatures of binary formats are two plain letters (BM, MZ), and a text may
begin with them. What a sender says they are counts only where the bytes say nothing against it.
"""

from __future__ import annotations

import codecs
import re

HEAD_BYTES = 8 * 1024
TEXT = "text/plain"
UNKNOWN = "application/octet-stream"

# A text in an old one-byte encoding has some bytes that are not UTF-8; a binary has many.
_STRANGE_SHARE_MAX = 0.1

_SAID = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}\Z")
_TEXTS = frozenset(
    {
        "application/json",
        "application/x-ndjson",
        "application/xml",
        "application/yaml",
        "application/toml",
        "application/javascript",
    }
)


def media_type(head: bytes, said: str | None = None) -> str:
    """The media type of bytes that begin with ``head`` (about `HEAD_BYTES` of them).

    ``text/plain`` for anything that reads as text, SVG and HTML too. ``said`` is what their sender
    calls them (None: nothing), with or without parameters: it is taken for bytes without a
    signature, unless it names a kind that has one, or calls a text a binary or the other way round.
    """
    found = _by_content(head)
    if said is None or found not in (TEXT, UNKNOWN):
        return found
    said = said.partition(";")[0].strip().lower()
    if not _SAID.match(said) or is_text(said) != (found == TEXT) or _has_signature(said):
        return found
    return said


def is_text(kind: str) -> bool:
    """Whether a media type is of text: ``text/*``, JSON, XML and their like."""
    return kind.startswith(("text/", "message/")) or kind in _TEXTS or _is_suffixed(kind)


def reads_as_text(head: bytes) -> bool:
    """Whether it is UTF-8 text if NULs are let pass, as in the output of ``find -print0``."""
    return not _not_utf8(head.replace(b"\0", b""))


def _is_suffixed(kind: str) -> bool:
    return kind.endswith(("+json", "+xml", "+yaml"))


def _by_content(head: bytes) -> str:
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


def _not_utf8(head: bytes) -> int:
    """How many bytes are not part of a UTF-8 character; one cut off at the end is."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(head).count("\ufffd") - head.count(b"\xef\xbf\xbd")


def _signature(head: bytes) -> str | None:
    import filetype  # pyright: ignore[reportMissingTypeStubs]

    found = filetype.guess(head)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return None if found is None else str(found.mime)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _has_signature(kind: str) -> bool:
    import filetype  # pyright: ignore[reportMissingTypeStubs]

    return filetype.get_type(mime=kind) is not None  # pyright: ignore[reportUnknownMemberType]
