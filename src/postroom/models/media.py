"""Media for a model: base64 of an artifact's bytes, or the line of text that stands for it.

An artifact's id is the hash of its bytes, so its base64 is kept under that id, for as long as it
is in use and within a bound: a picture in the history is encoded once, not once a turn, and a
thousand sessions do not each hold their own copy.
"""

from __future__ import annotations

import binascii
from collections import OrderedDict
from collections.abc import Iterable

from postroom.domain.message import Audio, Block, Image, Media, Text, Video

KEPT_BYTES_MAX = 64 * 1024 * 1024

_KINDS: dict[type[Media], str] = {Image: "image", Audio: "audio", Video: "video"}

_kept: OrderedDict[str, bytes] = OrderedDict()
_kept_bytes = 0


def base64_of(artifact: str, data: bytes) -> bytes:
    """The artifact's bytes in base64, without line breaks."""
    global _kept_bytes
    found = _kept.get(artifact)
    if found is not None:
        _kept.move_to_end(artifact)
        return found
    encoded = binascii.b2a_base64(data, newline=False)
    if len(encoded) <= KEPT_BYTES_MAX // 4:
        _kept[artifact] = encoded
        _kept_bytes += len(encoded)
        while _kept_bytes > KEPT_BYTES_MAX:
            _, gone = _kept.popitem(last=False)
            _kept_bytes -= len(gone)
    return encoded


def line_for(block: Media) -> str:
    """One line that tells a model of a file it is not shown."""
    kind = _KINDS.get(type(block), "file")
    name = block.name or block.artifact
    return f"[{kind}: {name}, {block.media_type}, {block.size} bytes; not shown]"


def text_with_lines(content: Iterable[Block]) -> str:
    """The text of a message, with a line for each file; reasoning and calls are left out."""
    return joined(
        [
            block.text if isinstance(block, Text) else line_for(block)
            for block in content
            if isinstance(block, Text | Media)
        ]
    )


def joined(pieces: list[str]) -> str:
    """Pieces of one message as one text: a line break between them, unless one is there."""
    out = ""
    for piece in pieces:
        if out and piece and not out.endswith("\n"):
            out += "\n"
        out += piece
    return out
