"""Conversation keys: which conversation of which platform a session is bound to.

A key is built here and nowhere else, from opaque ids that are never case-folded. Each id is
percent-encoded, so that only ``A-Z a-z 0-9 - . _ ~`` stay and a colon is always ours. A scope has a
fixed number of ids; then comes, where the platform has them, ``:thread:<id>``. A key parses back to
exactly what it was built from; anything else is no key.
"""

from __future__ import annotations

from typing import NewType
from urllib.parse import quote, unquote

import msgspec

from postroom.errors import InputError

ConversationKey = NewType("ConversationKey", str)

# platform, scope -> how many ids, and whether a thread may follow
_SCOPES: dict[tuple[str, str], tuple[int, bool]] = {
    ("telegram", "dm"): (1, False),
    ("telegram", "group"): (1, True),
    ("slack", "channel"): (2, True),
    ("slack", "dm"): (2, True),
    ("matrix", "room"): (1, True),
    ("discord", "channel"): (2, False),
    ("discord", "dm"): (1, False),
    ("email", "thread"): (1, False),
    ("webhook", "source"): (2, False),
    ("loopback", "dm"): (1, False),
}


class Conversation(msgspec.Struct, frozen=True):
    """What a key names. ``ids`` as the platform has them; ``thread`` None: the conversation itself."""

    platform: str
    scope: str
    ids: tuple[str, ...]
    thread: str | None = None


def conversation_key(
    platform: str, scope: str, *ids: str, thread: str | None = None
) -> ConversationKey:
    """The key of a conversation.

    Raises:
        InputError: there is no such scope, or it has another number of ids, or no threads; an id
            is empty, or is no valid Unicode.
    """
    shape = _SCOPES.get((platform, scope))
    if shape is None:
        raise InputError(f"there is no conversation scope {platform}:{scope}")
    count, threads = shape
    if len(ids) != count or (thread is not None and not threads):
        raise InputError(
            f"{platform}:{scope} has {count} ids{', then a thread' if threads else ''}"
        )
    parts = [platform, scope, *map(_encode, ids)]
    if thread is not None:
        parts += ["thread", _encode(thread)]
    return ConversationKey(":".join(parts))


def parse_conversation_key(text: str) -> Conversation:
    """What a key was built from.

    Raises:
        InputError: it is no key that `conversation_key` builds; old and shortened forms are not.
    """
    platform, _, rest = text.partition(":")
    scope, _, tail = rest.partition(":")
    count, _threads = _SCOPES.get((platform, scope), (0, False))
    pieces = tail.split(":")
    ids, marker = pieces[:count], pieces[count:]
    thread = marker[1] if len(marker) == 2 and marker[0] == "thread" else None
    if count and len(ids) == count and (not marker or thread is not None):
        try:
            found = Conversation(
                platform,
                scope,
                tuple(map(_decode, ids)),
                _decode(thread) if thread is not None else None,
            )
            if conversation_key(platform, scope, *found.ids, thread=found.thread) == text:
                return found
        except (InputError, UnicodeDecodeError):
            pass
    raise InputError(f"{text!r} is not a conversation key")


def _encode(id_: str) -> str:
    if not id_:
        raise InputError("an id of a conversation is empty")
    try:
        return quote(id_, safe="-._~")
    except UnicodeEncodeError as error:
        raise InputError("an id of a conversation is not valid Unicode") from error


def _decode(piece: str) -> str:
    return unquote(piece, errors="strict")
