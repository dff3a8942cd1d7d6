"""How much of a tool's output a model gets to see, and where the rest goes.

What is over the bound goes whole to the artifact store, first; then a preview of its head and its
tail stands in the history, with a line between them that says how many bytes are not shown and
where they are. The history never holds the large thing itself.

What is shown is clean: text that every provider and every store takes. A lone surrogate becomes
U+FFFD (two that make a pair become their character), a NUL the visible sign U+2400.
"""

from __future__ import annotations

import asyncio
import codecs

from postroom.domain.message import Block, Text
from postroom.errors import StoreError
from postroom.ports.artifact import ArtifactStore
from postroom.ports.tool import ToolOutput

TEXT_BYTES_MAX = 32 * 1024
NOTHING = "(no output)"

# Over this many characters the encoding is worth a thread: about a millisecond.
_THREAD_CHARS = 512 * 1024


async def bound_output(
    output: ToolOutput, artifacts: ArtifactStore, text_bytes_max: int = TEXT_BYTES_MAX
) -> tuple[Block, ...]:
    """The content of a tool's result: one text of at most ``text_bytes_max`` bytes, and its media.

    Never fails for want of the store: then the preview says that the rest could not be kept.
    """
    if len(output.text) > _THREAD_CHARS:
        data = await asyncio.to_thread(encode, output.text)
    else:
        data = encode(output.text)
    if len(data) <= text_bytes_max:
        shown = clean(data.decode())
        if len(shown.encode()) <= text_bytes_max:
            return (Text(shown or NOTHING), *output.media)
    place = await keep(data, artifacts)
    return (Text(preview(data, data, len(data), place, text_bytes_max)), *output.media)


async def keep(data: bytes, artifacts: ArtifactStore) -> str:
    """Puts the whole of an output in the store; how the preview's line ends."""
    try:
        artifact = await artifacts.put(data)
    except StoreError as error:
        return f"the whole output could not be kept: {error.message}"
    return f"the whole output is artifact {artifact}, read it with read_artifact"


def encode(text: str) -> bytes:
    """The text as UTF-8; surrogates are paired where they can be and replaced where not."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def clean(text: str) -> str:
    """Decoded text without what a store or a provider would refuse."""
    return text.replace("\0", "\u2400")


def preview(head: bytes, tail: bytes, total: int, place: str, bytes_max: int) -> str:
    """The start and the end of ``total`` bytes, with a line between that says what is missing.

    ``head`` and ``tail`` are as much of both ends as is at hand; each may be all of it. ``place``
    ends the line. The result is at most ``bytes_max`` bytes (the line itself is never cut).
    """

    def line(left: int) -> str:
        return f"[… {left} bytes left out; {place}]"

    budget = max(0, bytes_max - len(line(total).encode()) - 2)
    first, used_first = _fit(head, budget // 2, from_end=False)
    last, used_last = _fit(tail, budget - len(first.encode()), from_end=True)
    parts = [first, line(total - used_first - used_last), last]
    return "\n".join([part for part in parts if part])


PART_BYTES_MIN = 256


def shown_part(data: bytes, offset: int, bytes_max: int) -> tuple[str, int]:
    """Text from ``offset`` on, at most ``bytes_max`` bytes of it, and where the next part begins.

    Parts that follow each other leave nothing out and show no character twice. A part is never
    smaller than `PART_BYTES_MIN`, so that it always gets on.
    """
    window = data[offset : offset + max(bytes_max, PART_BYTES_MIN) + 4]
    text, used = _fit(window, max(bytes_max, PART_BYTES_MIN), from_end=False, at_line=False)
    return text, offset + used


def _fit(data: bytes, bytes_max: int, *, from_end: bool, at_line: bool = True) -> tuple[str, int]:
    """Shown text of one end of the data, and how many bytes of it that is.

    Invalid bytes grow when they are shown, so the cut is made again until it fits.
    """
    take = min(bytes_max, len(data))
    while take > 0:
        piece = data[-take:] if from_end else data[:take]
        if take < len(data):
            piece = _after_lead(piece) if from_end else _before_lead(piece)
        if at_line and take < len(data):
            piece = _at_line(piece, from_end=from_end)
        text = clean(piece.decode("utf-8", "replace"))
        size = len(text.encode())
        if size <= bytes_max:
            return text, len(piece)
        take = min(take - 1, take * bytes_max // size)
    return "", 0


def _before_lead(piece: bytes) -> bytes:
    """Without a character that the cut at its end went through."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(piece)
    pending = len(decoder.getstate()[0])
    return piece[: len(piece) - pending]


def _after_lead(piece: bytes) -> bytes:
    """Without the rest of a character that the cut at its start went through."""
    start = 0
    while start < min(3, len(piece)) and piece[start] & 0xC0 == 0x80:
        start += 1
    return piece[start:]


def _at_line(piece: bytes, *, from_end: bool) -> bytes:
    """Cut at the end of a line, if one is near the cut."""
    if from_end:
        at = piece.find(b"\n", 0, len(piece) // 4)
        return piece[at + 1 :] if at >= 0 else piece
    at = piece.rfind(b"\n", len(piece) - len(piece) // 4)
    return piece[:at] if at >= 0 else piece
