"""What every artifact store agrees on: id, key, proof of the bytes, and errors.

The key is ``<first two hex digits>/<all of them>``: no folder grows without bound. It is made of
the checked digits alone, so that no id reaches another file or object. The library's exceptions
become ours by one table; its messages are cut to what happened and where.
"""

from __future__ import annotations

import errno
import hashlib
import re

from postroom.errors import ArtifactCorrupt, ArtifactMissing, StoreError, StoreFull, StoreReadOnly
from postroom.ports.artifact import hash_digits

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_CODE = re.compile(r"<Code>(\w+)</Code>")


def artifact_id(data: bytes) -> str:
    """The id of these bytes: ``sha256:`` and 64 hex digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def key_of(artifact: str) -> str:
    """Where its bytes lie within a store.

    Raises:
        ArtifactMissing: it is no artifact's id.
    """
    digits = hash_digits(artifact)
    if digits is None:
        raise ArtifactMissing(
            f"{artifact[:100]!r} is not an artifact id", hint="sha256: and 64 hex digits"
        )
    return f"{digits[:2]}/{digits}"


def verified(data: bytes, artifact: str) -> bytes:
    """The bytes, if they are this artifact's.

    Raises:
        ArtifactCorrupt: they are others.
    """
    if artifact_id(data) != artifact:
        raise ArtifactCorrupt(f"{artifact} is damaged: its bytes no longer match its hash")
    return data


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


def translated(error: Exception, artifact: str, *, putting: bool = False) -> StoreError:
    """One of the library's errors as ours. ``putting``: what is missing then is the place itself."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        found = _OS_ERROR.search(str(error))
        number = int(found[1]) if found else 0
    kind = _BY_ERRNO.get(number) or TRANSLATED.get(type(error).__name__, StoreError)
    if kind is ArtifactMissing:
        if not putting and "NoSuchBucket" not in str(error):
            return ArtifactMissing(f"the artifact store has no {artifact}")
        kind = StoreError
    return kind(f"the artifact store failed on {artifact}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """What happened, without the library's debug dump and without the server's page.

    Of a page of S3's only the code is kept: the rest may repeat the request.
    """
    text = str(error).partition("\n")[0]
    code = _CODE.search(str(error))
    said, page, _ = text.partition("<")
    return said[:300].rstrip(" :") + (f" ({code[1]})" if page and code else "")
