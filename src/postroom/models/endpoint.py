"""Where a model's server is and how one proves oneself to it, checked before the first request.

Pure: no connection is made here. What is shown of an endpoint holds no secret.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import msgspec

from postroom.errors import ConfigError

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Endpoint(msgspec.Struct, frozen=True):
    """``url`` is the full one to post to, ``shown`` the base URL as it may be shown.

    ``authorization`` is the header's value (None: no header is sent); ``secrets`` are the texts
    that must not appear anywhere. The variables name what a hint may mention.
    """

    url: str
    shown: str
    host: str
    authorization: str | None
    secrets: tuple[str, ...]
    base_url_variable: str | None
    key_variable: str | None

    @property
    def check(self) -> str:
        """What to look at if the address may be wrong."""
        return f"check {self.base_url_variable}" if self.base_url_variable else "check the base URL"

    def __repr__(self) -> str:
        return f"Endpoint({self.shown!r})"


def endpoint_of(
    base_url: str,
    path: str,
    api_key: str | None,
    *,
    base_url_variable: str | None = None,
    key_variable: str | None = None,
) -> Endpoint:
    """The endpoint ``path`` under ``base_url``; a query in the base URL stays behind the path.

    A base URL that already ends in ``path`` is taken as it is. A user and password in it become
    a Basic authorization if there is no key.

    Raises:
        ConfigError: the URL is no http or https URL, or the key cannot stand in a header.
    """
    source = base_url_variable or "the base URL"
    try:
        parts = urlsplit(base_url.strip())
        port = parts.port
    except ValueError:
        raise ConfigError(f"{source} is not a URL") from None
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            f"{source} must be a URL that begins with http:// or https://",
            hint="such as http://localhost:8000/v1",
        )
    base_path = parts.path.rstrip("/").removesuffix(path)
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    bare = SplitResult(parts.scheme, netloc, base_path, "", "")
    key = _checked_key(api_key, key_variable)
    authorization = f"Bearer {key}" if key else None
    secrets = [key] if key else []
    if parts.password is not None:
        password = unquote(parts.password)
        secrets += [parts.password, password]
        if authorization is None:
            login = f"{unquote(parts.username or '')}:{password}".encode()
            authorization = "Basic " + base64.b64encode(login).decode()
            secrets.append(authorization)
    return Endpoint(
        urlunsplit(bare._replace(path=base_path + path, query=parts.query)),
        urlunsplit(bare),
        host,
        authorization,
        tuple(s for s in secrets if s),
        base_url_variable,
        key_variable,
    )


def is_loopback(base_url: str) -> bool:
    """Whether the URL's host is this machine by name or number."""
    try:
        return urlsplit(base_url.strip()).hostname in _LOOPBACK
    except ValueError:
        return False


def proxy_for(base_url: str, env: Mapping[str, str]) -> str | None:
    """The proxy that the environment names for this URL; None: go straight.

    ``HTTPS_PROXY`` and ``HTTP_PROXY`` by the URL's scheme, in either case of letters. Hosts that
    ``NO_PROXY`` lists (``*``, a name, or a domain with all below it) and this machine itself
    are reached without.
    """
    parts = urlsplit(base_url.strip())
    named = {name.lower(): value for name, value in env.items() if value}
    proxy = named.get(f"{parts.scheme}_proxy")
    host = parts.hostname
    if proxy is None or host is None or host in _LOOPBACK:
        return None
    for entry in named.get("no_proxy", "").lower().split(","):
        name = entry.strip().partition(":")[0].removeprefix("*.").lstrip(".")
        if name in ("*", host) or (name and host.endswith("." + name)):
            return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _checked_key(api_key: str | None, variable: str | None) -> str | None:
    key = (api_key or "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the key in {variable or 'the configuration'} has a character that no key has",
            hint="copy it again: spaces, line breaks and quotes do not belong to it",
        )
    return key
