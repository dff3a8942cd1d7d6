"""Artifacts as files of a local folder.

Rules:

- `put` returns when the bytes would survive a power cut. The library renames a finished file
  into place but syncs neither it nor its folder [seen with strace, obstore 0.12], so this
  does both, before it answers.
- A file that a power cut left torn has its final name and the wrong bytes. `get` refuses it,
  and the next `put` of those bytes replaces it; nothing can refer to it before that, because
  the put that wrote it never returned.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from postroom.errors import ArtifactMissing
from postroom.ports.artifact import hash_digits
from postroom.stores.artifacts_bytes import artifact_id, key_of, translated, verified

if TYPE_CHECKING:
    from obstore.store import LocalStore

T = TypeVar("T")


class LocalArtifacts:
    """Artifacts as files under ``root``, which is made (mode 0700) by the first put."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._opened: LocalStore | None = None
        self._synced_shards: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalArtifacts({str(self.root)!r})"

    async def put(self, data: bytes) -> str:
        return await asyncio.to_thread(self._put, data)

    async def get(self, artifact: str) -> bytes:
        return await asyncio.to_thread(self._get, artifact)

    async def exists(self, artifact: str) -> bool:
        return await asyncio.to_thread(self._exists, artifact)

    async def delete(self, artifact: str) -> None:
        """Idempotent: an artifact that is not there is deleted already."""
        await asyncio.to_thread(self._delete, artifact)

    def _put(self, data: bytes) -> str:
        from obstore.exceptions import AlreadyExistsError

        artifact = artifact_id(data)
        key = key_of(artifact)

        def write() -> None:
            store = self._store(make=True)
            try:
                store.put(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if artifact_id(store.get(key).bytes().to_bytes()) != artifact:
                    store.put(key, data, mode="overwrite", use_multipart=False)
            self._make_durable(key)

        _typed(write, artifact, putting=True)
        return artifact

    def _make_durable(self, key: str) -> None:
        """Syncs the file and its folder; once a process also the folder's own name.

        Whoever finds the bytes already there syncs too: the one who wrote them may be a moment
        away from it.
        """
        path = self.root / key
        shard = path.parent
        _fsync(path)
        _fsync(shard)
        if shard.name not in self._synced_shards:
            _fsync(self.root)
            self._synced_shards.add(shard.name)

    def _get(self, artifact: str) -> bytes:
        key = key_of(artifact)
        data = _typed(lambda: self._store().get(key).bytes().to_bytes(), artifact)
        return verified(data, artifact)

    def _exists(self, artifact: str) -> bool:
        return hash_digits(artifact) is not None and _found(
            lambda: self._store().head(key_of(artifact)), artifact
        )

    def _delete(self, artifact: str) -> None:
        key = key_of(artifact)
        _found(lambda: self._store().delete(key), artifact)

    def _store(self, *, make: bool = False) -> LocalStore:
        if self._opened is None:
            from obstore.store import LocalStore

            if make:
                _make_folder(self.root)
            elif not self.root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "there is no artifact store", str(self.root))
            self._opened = LocalStore(self.root)
        return self._opened


def _typed(work: Callable[[], T], artifact: str, *, putting: bool = False) -> T:
    from obstore.exceptions import BaseError

    try:
        return work()
    except (BaseError, OSError) as error:
        raise translated(error, artifact, putting=putting) from error


def _found(work: Callable[[], object], artifact: str) -> bool:
    try:
        _typed(work, artifact)
    except ArtifactMissing:
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, each durable in the one above."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
