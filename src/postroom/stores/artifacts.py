"""Artifact stores: content-addressed bytes in a local folder, in an S3-compatible bucket, in memory.

This keeps bytes and nothing else: who owns an artifact, and for how long, is the database's
business. The id is the hash, so a put is idempotent and two puts of the same bytes cannot
disagree. All kinds go through one library (obstore, imported on first use).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from postroom.errors import ConfigError
from postroom.ports.artifact import ArtifactStore
from postroom.stores.artifacts_local import LocalArtifacts

__all__ = ["LocalArtifacts", "open_artifacts"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def open_artifacts(
    url_or_path: str | Path, environ: Mapping[str, str] | None = None
) -> ArtifactStore:
    """The artifact store at a folder, ``file:///folder``, an S3 bucket or ``memory://``.

    A bucket is ``s3://bucket/prefix?endpoint=https://host:port&region=name``, with what it leaves
    open, and always its credentials, from ``environ`` (None: the process's): ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``.
    ``memory://`` is a new, empty store each time and forgets everything when it goes.

    Raises:
        ConfigError: the URL is of another kind, has credentials in it, or cannot be used.
    """
    scheme = _SCHEME.match(url_or_path) if isinstance(url_or_path, str) else None
    if scheme is None:
        return LocalArtifacts(Path(url_or_path).expanduser())
    url = str(url_or_path)
    match scheme[1].lower():
        case "file":
            return LocalArtifacts(_folder(url))
        case "s3":
            from postroom.stores.artifacts_object import open_bucket, parse_bucket

            environ = os.environ if environ is None else environ
            return open_bucket(parse_bucket(url, environ), environ)
        case "memory":
            from postroom.stores.artifacts_object import open_memory

            return open_memory()
        case kind:
            raise ConfigError(
                f"{kind}:// is no kind of artifact store",
                hint="a folder, file://, s3:// or memory://",
            )


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise ConfigError("a file URL of the artifact store is file:// and an absolute path")
    return Path(path)
