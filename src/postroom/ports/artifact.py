"""Where large bytes live: content-addressed, written before anything refers to them."""

from __future__ import annotations

import re
from typing import Protocol

_ID = re.compile(r"sha256:([0-9a-f]{64})\Z")


def hash_digits(artifact: str) -> str | None:
    """The 64 hex digits of an artifact's id; None: it is no such id, and may name no file or key."""
    found = _ID.match(artifact)
    return found[1] if found else None


class ArtifactStore(Protocol):
    """An artifact's id is ``sha256:`` and the 64 hex digits of its bytes' hash.

    `put` is idempotent and returns only when the bytes are durable. `get` raises
    `StoreError` if they are missing or no longer match their hash.
    """

    async def put(self, data: bytes) -> str: ...

    async def get(self, artifact: str) -> bytes: ...

    async def exists(self, artifact: str) -> bool: ...

    async def delete(self, artifact: str) -> None: ...
