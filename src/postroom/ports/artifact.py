"""Where large bytes live: content-addressed, written before anything refers to them."""

from __future__ import annotations

from typing import Protocol


class ArtifactStore(Protocol):
    """An artifact's id is ``sha256:`` and the 64 hex digits of its bytes' hash.

    `put` is idempotent and returns only when the bytes are durable. `get` raises
    `StoreError` if they are missing or no longer match their hash.
    """

    async def put(self, data: bytes) -> str: ...

    async def get(self, artifact: str) -> bytes: ...

    async def exists(self, artifact: str) -> bool: ...

    async def delete(self, artifact: str) -> None: ...
