"""Artifact stores: content-addressed bytes on a local disk, in memory or in an S3 bucket.

This file keeps bytes and nothing else: who owns an artifact, and for how long, is the
database's business. All three kinds go through one library (obstore, imported on first use).

Rules:

- The id is the hash, so a put is idempotent and two puts of the same bytes cannot disagree.
- `put` returns when the bytes would survive a power cut. The library renames a finished file
  into place but syncs neither it nor its folder [seen with strace, obstore 0.12], so
  `LocalArtifacts` does both, before it answers.
- A file that a power cut left torn has its final name and the wrong bytes. `get` refuses it,
  and the next `put` of those bytes replaces it; nothing can refer to it before that, because
  the put that wrote it never returned.
- The key is ``<first two hex digits>/<all of them>``: no folder grows without bound.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from postroom.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ConfigError,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from postroom.ports.artifact import ArtifactStore

if TYPE_CHECKING:
    from obstore.store import LocalStore, ObjectStore

T = TypeVar("T")

_ARTIFACT = re.compile(r"sha256:([0-9a-f]{64})\Z")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)

CONNECT_MS = 5_000
REQUEST_MS = 60_000
RETRIES_MAX = 3
RETRY_MS = 90_000


def artifact_id(data: bytes) -> str:
    """The id of these bytes: ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def open_artifacts(url_or_path: str | Path) -> ArtifactStore:
    """The artifact store at a folder, ``file:///folder``, ``s3://bucket/prefix`` or ``memory://``.

    S3 credentials, region and endpoint come from the environment (``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``). ``memory://`` is a new, empty
    store each time and forgets everything when it goes.

    Raises:
        ConfigError: the URL is of another kind, has credentials in it, or cannot be used.
    """
    scheme = _SCHEME.match(url_or_path) if isinstance(url_or_path, str) else None
    if scheme is None:
        return LocalArtifacts(Path(url_or_path))
    url = str(url_or_path)
    kind = scheme[1].lower()
    if kind == "file":
        path = url[len("file://") :]
        if not path.startswith("/"):
            raise ConfigError("a file URL of the artifact store needs an absolute path")
        return LocalArtifacts(Path(path))
    if "@" in url:
        raise ConfigError(
            "the artifact store's URL must hold no credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if kind not in ("s3", "memory"):
        raise ConfigError(
            f"{kind}:// is no kind of artifact store", hint="a folder, file://, s3:// or memory://"
        )
    return ObjectArtifacts(_open_object_store(kind, url))


class LocalArtifacts:
    """Artifacts as files under ``root``, which is made (mode 0700) by the first put."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._opened: LocalStore | None = None
        self._synced_shards: set[str] = set()

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
        key = _key(artifact)

        def write() -> None:
            store = self._store(make=True)
            try:
                store.put(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if artifact_id(store.get(key).bytes().to_bytes()) != artifact:
                    store.put(key, data, mode="overwrite", use_multipart=False)
            self._make_durable(key)

        _typed(write, artifact)
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
        key = _key(artifact)
        data = _typed(lambda: self._store().get(key).bytes().to_bytes(), artifact)
        return _verified(data, artifact)

    def _exists(self, artifact: str) -> bool:
        return _ARTIFACT.match(artifact) is not None and _found(
            lambda: self._store().head(_key(artifact)), artifact
        )

    def _delete(self, artifact: str) -> None:
        key = _key(artifact)
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


class ObjectArtifacts:
    """Artifacts as objects of a store whose put is durable when it answers (S3), or of memory."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def put(self, data: bytes) -> str:
        from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError

        artifact = await asyncio.to_thread(artifact_id, data)
        key = _key(artifact)
        put, head = self._store.put_async, self._store.head_async
        try:
            try:
                await put(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if (await head(key))["size"] != len(data):
                    await put(key, data, mode="overwrite", use_multipart=False)
            except NotSupportedError:
                # A server without conditional writes: the same bytes under the same name.
                await put(key, data, mode="overwrite", use_multipart=False)
        except (BaseError, OSError) as error:
            raise _translated(error, artifact) from error
        return artifact

    async def get(self, artifact: str) -> bytes:
        from obstore.exceptions import BaseError

        key = _key(artifact)
        try:
            result = await self._store.get_async(key)
            data = (await result.bytes_async()).to_bytes()
        except (BaseError, OSError) as error:
            raise _translated(error, artifact) from error
        return await asyncio.to_thread(_verified, data, artifact)

    async def exists(self, artifact: str) -> bool:
        from obstore.exceptions import BaseError

        if not _ARTIFACT.match(artifact):
            return False
        try:
            await self._store.head_async(_key(artifact))
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise _translated(error, artifact) from error
        return True

    async def delete(self, artifact: str) -> None:
        """Idempotent: an artifact that is not there is deleted already."""
        from obstore.exceptions import BaseError

        key = _key(artifact)
        try:
            await self._store.delete_async(key)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise _translated(error, artifact) from error


def _open_object_store(kind: str, url: str) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import MemoryStore, S3Store

    if kind == "memory":
        return MemoryStore()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        return S3Store.from_url(
            url,
            client_options={
                # An endpoint that the operator spelled http:// is meant.
                "allow_http": endpoint.lower().startswith("http://"),
                "connect_timeout": timedelta(milliseconds=CONNECT_MS),
                "timeout": timedelta(milliseconds=REQUEST_MS),
            },
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(milliseconds=RETRY_MS),
            },
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"the artifact store cannot be opened: {_first_line(error)}") from error


def _key(artifact: str) -> str:
    match = _ARTIFACT.match(artifact)
    if match is None:
        raise ArtifactMissing(
            f"{artifact[:100]!r} is not an artifact id", hint="sha256: and 64 hex digits"
        )
    digits = match[1]
    return f"{digits[:2]}/{digits}"


def _verified(data: bytes, artifact: str) -> bytes:
    if artifact_id(data) != artifact:
        raise ArtifactCorrupt(f"{artifact} is damaged: its bytes no longer match its hash")
    return data


def _typed(work: Callable[[], T], artifact: str) -> T:
    from obstore.exceptions import BaseError

    try:
        return work()
    except (BaseError, OSError) as error:
        raise _translated(error, artifact) from error


def _found(work: Callable[[], object], artifact: str) -> bool:
    try:
        _typed(work, artifact)
    except ArtifactMissing:
        return False
    return True


# The library's exceptions, by name, and what they are here. What is not named in a table of its
# own kind is a StoreError: the store failed, and it is not known to be for good.
TRANSLATED: dict[str, type[StoreError]] = {
    "NotFoundError": ArtifactMissing,
    "FileNotFoundError": ArtifactMissing,
    "PermissionDeniedError": StoreReadOnly,
    "UnauthenticatedError": StoreReadOnly,
    "PermissionError": StoreReadOnly,
    "GenericError": StoreError,
    "InvalidPathError": StoreError,
    "JoinError": StoreError,
    "NotSupportedError": StoreError,
    "AlreadyExistsError": StoreError,
    "PreconditionError": StoreError,
    "NotModifiedError": StoreError,
    "UnknownConfigurationKeyError": StoreError,
}

_BY_ERRNO: dict[int, type[StoreError]] = {
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EFBIG: StoreFull,
    errno.EROFS: StoreReadOnly,
    errno.EACCES: StoreReadOnly,
    errno.EPERM: StoreReadOnly,
}


def _translated(error: Exception, artifact: str) -> StoreError:
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = _OS_ERROR.search(str(error))
        number = int(found[1]) if found else 0
    kind = _BY_ERRNO.get(number) or TRANSLATED.get(type(error).__name__, StoreError)
    if kind is ArtifactMissing:
        return ArtifactMissing(f"the artifact store has no {artifact}")
    return kind(f"the artifact store failed on {artifact}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """The library appends a debug dump; its first line says what happened."""
    return str(error).partition("\n")[0][:300]


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
