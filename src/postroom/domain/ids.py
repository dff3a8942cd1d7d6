"""Identifiers: their types, their shapes, and how one is spelled from its parts.

An id is opaque to everyone but the code that makes it. This module makes none by itself:
time and randomness come in as arguments (`postroom.mint` supplies them).
"""

from __future__ import annotations

import re
from typing import NewType

from postroom.errors import InputError

SessionId = NewType("SessionId", str)
MessageId = NewType("MessageId", str)
CoreId = NewType("CoreId", str)
CallId = NewType("CallId", str)
DeliveryId = NewType("DeliveryId", str)
ApprovalId = NewType("ApprovalId", str)
NodeId = NewType("NodeId", str)
ClaimToken = NewType("ClaimToken", str)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _CROCKFORD for b in _CROCKFORD]
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_MESSAGE_ID = re.compile(r"msg_[A-Za-z0-9_-]{1,96}\Z")


def ulid(at_ms: int, entropy: int) -> str:
    """A ULID: 26 characters, sortable by ``at_ms`` (Unix milliseconds).

    ``entropy`` is a random number of 80 bits.
    """
    value = (at_ms & 0xFFFF_FFFF_FFFF) << 80 | entropy
    pairs = _PAIRS
    return "".join([pairs[value >> shift & 0x3FF] for shift in range(120, -1, -10)])


def session_id(text: str) -> SessionId:
    """Checks an id that came from outside.

    Raises:
        InputError: it is empty, over 128 characters, or has other characters than
            letters, digits, dot, underscore and hyphen.
    """
    if not _SESSION_ID.match(text):
        raise InputError(
            f"{text[:140]!r} is not a session id",
            hint="1 to 128 letters, digits, dots, underscores or hyphens",
        )
    return SessionId(text)


def message_id(text: str) -> MessageId:
    """Checks a producer's message id.

    Raises:
        InputError: it is not ``msg_`` and 1 to 96 letters, digits, underscores or hyphens.
    """
    if not _MESSAGE_ID.match(text):
        raise InputError(
            f"{text[:110]!r} is not a message id",
            hint="msg_ and 1 to 96 letters, digits, underscores or hyphens; best a ULID",
        )
    return MessageId(text)
