"""Standard Webhooks signatures: how a request is signed, and how one is believed.

Pure: time and bytes come in as arguments. The symmetric scheme only (``v1``, HMAC-SHA256). What is
signed is ``<id>.<timestamp>.<body>`` with the body as raw bytes, so a request is believed before
anybody parses it. Several keys at once are a rotation: all of them sign, any of them is believed.

Source: the Standard Webhooks specification 1.0.0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from postroom.errors import ConfigError

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
TOLERANCE_S = 300

_PREFIX = "whsec_"
_KEY_BYTES_MIN = 24
_KEY_BYTES_MAX = 64
_ID = re.compile(r"[\x21-\x7e]{1,256}\Z")
_TIMESTAMP = re.compile(r"[0-9]{1,12}\Z")


class SigningKey:
    """A secret of an endpoint, ``whsec_`` and the base64 of 24 to 64 bytes. It shows itself nowhere.

    Raises:
        ConfigError: the text is no such secret. The error does not repeat it.
    """

    __slots__ = ("_secret",)

    def __init__(self, text: str) -> None:
        try:
            secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            secret = b""
        if not text.startswith(_PREFIX) or not _KEY_BYTES_MIN <= len(secret) <= _KEY_BYTES_MAX:
            # Raised here and not in the handler: an error's context would hold the text.
            raise ConfigError(
                "this is no webhook secret",
                hint="whsec_ and the base64 of 24 to 64 random bytes",
            )
        self._secret = secret

    def __repr__(self) -> str:
        return "SigningKey(…)"

    def __reduce__(self) -> str:
        raise TypeError("a signing key is not written down")

    def signature(self, content: bytes) -> bytes:
        """Of the signed content, in base64."""
        return base64.b64encode(hmac.digest(self._secret, content, hashlib.sha256))


def is_webhook_id(text: str) -> bool:
    """Whether it can be a ``webhook-id``: 1 to 256 visible ASCII characters."""
    return _ID.match(text) is not None


def signed(keys: Sequence[SigningKey], id_: str, at_ms: int, body: bytes) -> dict[str, str]:
    """The three headers of a request that leaves at ``at_ms`` (Unix ms).

    Raises:
        ValueError: ``id_`` is no `is_webhook_id`.
    """
    if not is_webhook_id(id_):
        raise ValueError("a webhook id is 1 to 256 visible ASCII characters")
    timestamp = str(at_ms // 1000)
    content = _content(id_, timestamp, body)
    return {
        ID_HEADER: id_,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: " ".join("v1," + key.signature(content).decode() for key in keys),
    }


def verified(
    keys: Sequence[SigningKey], headers: Mapping[str, str], body: bytes, now_ms: int
) -> str | None:
    """The ``webhook-id`` of a request that was signed with one of the keys within `TOLERANCE_S` of
    now, before or after; None for any other, whatever is wrong with it.

    ``headers`` is looked up in lower case.
    """
    id_ = headers.get(ID_HEADER, "")
    timestamp = headers.get(TIMESTAMP_HEADER, "")
    if not is_webhook_id(id_) or not _TIMESTAMP.match(timestamp):
        return None
    fresh = abs(now_ms - int(timestamp) * 1000) <= TOLERANCE_S * 1000
    content = _content(id_, timestamp, body)
    given = [
        value.encode("utf-8", "surrogateescape")
        for version, _, value in (
            entry.partition(",") for entry in headers.get(SIGNATURE_HEADER, "").split(" ")
        )
        if version == "v1"
    ]
    # Every key is compared with every signature, so that time tells nothing about either.
    matches = [
        hmac.compare_digest(expected, one)
        for expected in [key.signature(content) for key in keys]
        for one in given
    ]
    return id_ if any(matches) and fresh else None


def _content(id_: str, timestamp: str, body: bytes) -> bytes:
    return b".".join((id_.encode(), timestamp.encode(), body))
