"""Artifacts as objects of an S3-compatible bucket, or of memory: a put is durable when it answers.

A bucket is named by ``s3://bucket/prefix?endpoint=…&region=…``. Credentials are never part of the
URL: they come from the environment, so that the URL may be shown, logged and kept in a file.

Rules:

- A put creates: an object that is there is left alone if it is the same, and replaced if not. A
  server that cannot create conditionally is given the bytes all the same: they are the same bytes
  under the same name, whoever wins.
- Every request has a time limit and a bounded number of tries.
- An endpoint is checked here: the library ends the whole thread on one it cannot parse.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from postroom.errors import ConfigError
from postroom.ports.artifact import hash_digits
from postroom.stores.artifacts_bytes import artifact_id, first_line, key_of, translated, verified

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config

CONNECT_MS = 5_000
REQUEST_MS = 60_000
RETRIES_MAX = 3
RETRY_MS = 90_000

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}\Z")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
_ENDPOINT = re.compile(
    r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?(?:/[\w.~/-]*)?\Z", re.ASCII
)
_KEY_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


class Bucket(msgspec.Struct, frozen=True):
    """A place in S3. ``endpoint`` and ``region`` None: AWS, and its default region.

    ``conditional``: whether the server takes a conditional put.
    """

    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    conditional: bool = True

    def __str__(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.name}{'/' if self.prefix else ''}{self.prefix}{at}"


def parse_bucket(url: str, environ: Mapping[str, str]) -> Bucket:
    """The bucket of an ``s3://`` URL; what it leaves open comes from the environment.

    ``endpoint`` and ``region`` may stand in the query, or be ``AWS_ENDPOINT_URL_S3``,
    ``AWS_ENDPOINT_URL`` and ``AWS_REGION``; ``conditional_put=disabled`` is for a server that knows
    none.

    Raises:
        ConfigError: it has credentials in it, or a part that cannot be used. No value is repeated.
    """
    if "@" in unquote(url):
        raise ConfigError("the artifact store's URL must hold no credentials", hint=_KEY_HINT)
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError("the artifact store's URL cannot be read", hint=_FORM) from None
    settings = dict(given)
    for name in settings.keys() - {"endpoint", "region", "conditional_put"}:
        secret = re.search(r"key|secret|token|password|credential|signature", name, re.IGNORECASE)
        raise ConfigError(
            f"the artifact store's URL has an unknown setting {name[:40]!r}",
            hint=_KEY_HINT if secret else _FORM,
        )
    if len(settings) < len(given) or parts.fragment:
        raise ConfigError("the artifact store's URL says something twice", hint=_FORM)
    if not _BUCKET.match(parts.netloc):
        raise ConfigError("the artifact store's URL names no usable bucket", hint=_FORM)
    prefix = unquote(parts.path).strip("/")
    if any(p in ("", ".", "..") or not p.isprintable() for p in prefix.split("/") if prefix):
        raise ConfigError("the artifact store's URL has an unusable prefix", hint=_FORM)
    endpoint = (
        settings.get("endpoint")
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or None
    )
    if endpoint is not None and not _is_endpoint(endpoint):
        raise ConfigError(
            "the endpoint of the artifact store cannot be used", hint="http(s)://host[:port]"
        )
    region = settings.get("region") or environ.get("AWS_REGION") or None
    if region is not None and not _REGION.match(region):
        raise ConfigError("the region of the artifact store cannot be used")
    put = settings.get("conditional_put") or environ.get("AWS_CONDITIONAL_PUT") or "etag"
    if put not in ("etag", "disabled"):
        raise ConfigError("conditional_put of the artifact store is etag or disabled")
    return Bucket(parts.netloc, prefix, endpoint, region, put == "etag")


_FORM = "s3://bucket/prefix?endpoint=https://host:port&region=name"


def _is_endpoint(text: str) -> bool:
    if not _ENDPOINT.match(text):
        return False
    try:
        return urlsplit(text).port != 0
    except ValueError:
        return False


class ObjectArtifacts:
    """Artifacts as objects of a store whose put is durable when it answers.

    ``place`` says where that is, to people.
    """

    def __init__(self, store: ObjectStore, place: str, *, conditional: bool = True) -> None:
        self._store = store
        self._conditional = conditional
        self.place = place

    def __repr__(self) -> str:
        return f"ObjectArtifacts({self.place!r})"

    async def put(self, data: bytes) -> str:
        from obstore.exceptions import BaseError

        artifact = await asyncio.to_thread(artifact_id, data)
        try:
            await self._put(key_of(artifact), data)
        except (BaseError, OSError) as error:
            raise translated(error, artifact, putting=True) from error
        return artifact

    async def _put(self, key: str, data: bytes) -> None:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        if self._conditional:
            try:
                await self._store.put_async(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                if await self._is_there(key, data):
                    return
            except (NotSupportedError, NotImplementedError):
                self._conditional = False
            else:
                return
        await self._store.put_async(key, data, mode="overwrite", use_multipart=False)

    async def _is_there(self, key: str, data: bytes) -> bool:
        """Whether the object is the same, by what the server says of it.

        Its tag is the MD5 of the bytes, except under some kinds of encryption: then they are sent
        once more than need be.
        """
        head = await self._store.head_async(key)
        if head["size"] != len(data):
            return False
        md5 = await asyncio.to_thread(lambda: hashlib.md5(data, usedforsecurity=False).hexdigest())
        return (head["e_tag"] or "").strip('"') == md5

    async def get(self, artifact: str) -> bytes:
        from obstore.exceptions import BaseError

        key = key_of(artifact)
        try:
            result = await self._store.get_async(key)
            data = (await result.bytes_async()).to_bytes()
        except (BaseError, OSError) as error:
            raise translated(error, artifact) from error
        return await asyncio.to_thread(verified, data, artifact)

    async def exists(self, artifact: str) -> bool:
        from obstore.exceptions import BaseError

        if hash_digits(artifact) is None:
            return False
        try:
            await self._store.head_async(key_of(artifact))
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise translated(error, artifact) from error
        return True

    async def delete(self, artifact: str) -> None:
        """Idempotent: an artifact that is not there is deleted already."""
        from obstore.exceptions import BaseError

        key = key_of(artifact)
        try:
            await self._store.delete_async(key)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise translated(error, artifact) from error


def open_memory() -> ObjectArtifacts:
    """A new, empty store that forgets everything when it goes."""
    from obstore.store import MemoryStore

    return ObjectArtifacts(MemoryStore(), "memory://")


def open_bucket(bucket: Bucket, environ: Mapping[str, str]) -> ObjectArtifacts:
    """A bucket, with the environment's credentials; nothing is asked of the server yet.

    Without a key there, the library looks for the credentials that a cloud gives its machines.

    Raises:
        ConfigError: the credentials or the place cannot be used.
    """
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    config: S3Config = {}
    if bucket.endpoint is not None:
        # This name of the setting wins over the same variable of the process.
        config["aws_endpoint_url_s3"] = bucket.endpoint
    if bucket.region is not None:
        config["region"] = bucket.region
    if key := _credential("AWS_ACCESS_KEY_ID", environ):
        config["access_key_id"] = key
    if secret := _credential("AWS_SECRET_ACCESS_KEY", environ):
        config["secret_access_key"] = secret
    if token := _credential("AWS_SESSION_TOKEN", environ):
        config["session_token"] = token
    try:
        store = S3Store(
            bucket.name,
            prefix=bucket.prefix or None,
            config=config,
            client_options={
                # An endpoint that the operator spelled http:// is meant.
                "allow_http": (bucket.endpoint or "").startswith("http://"),
                "connect_timeout": timedelta(milliseconds=CONNECT_MS),
                "timeout": timedelta(milliseconds=REQUEST_MS),
            },
            retry_config={
                "max_retries": RETRIES_MAX,
                "retry_timeout": timedelta(milliseconds=RETRY_MS),
            },
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"the artifact store cannot be opened: {first_line(error)}") from None
    return ObjectArtifacts(store, str(bucket), conditional=bucket.conditional)


def _credential(name: str, environ: Mapping[str, str]) -> str | None:
    value = environ.get(name)
    if value and not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{name} holds characters that no such value has")
    return value or None
