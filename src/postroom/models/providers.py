"""Models of providers with an API of their own, through a provider library.

An extra: ``pip install 'postroom[providers]'``. The library and the SDKs under it take seconds to
import and milliseconds a request, so that nothing of them is imported before the first request,
then on a thread, and long histories are turned into a body on that thread too. One thread for
all models: a second one would only take the interpreter from the event loop more often.

``anthropic``, ``google`` and ``bedrock`` pass the contract of a model over HTTP, against servers
of our own. Untested is how Bedrock's credentials are found, and its bearer tokens: they need TLS.
Providers that speak Chat Completions are in `catalog.PROVIDERS`; they need no library.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import re
import sys
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from postroom.errors import ConfigError, MissingKey, ModelError, UsageError
from postroom.models import catalog
from postroom.models.catalog import IMAGES, PDF, Opening, facts
from postroom.models.endpoint import endpoint_of, proxy_for
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.model import DeltaSink, ModelRequest, Reply

if TYPE_CHECKING:
    from postroom.models.providers_library import Library

INSTALL = "pip install 'postroom[providers]'"
CONNECT_TIMEOUT_S = 30
IDLE_TIMEOUT_MS = 120_000

# From here on a request is built on the thread: about 10 ms of work, by messages or by files.
MESSAGES_ON_LOOP_MAX = 100
MEDIA_BYTES_ON_LOOP_MAX = 512 * 1024

_worker = ThreadPoolExecutor(1, thread_name_prefix="postroom-providers")


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where and as whom to ask, and what must not be shown.

    ``name`` is the model's, ``base_url`` None: the SDK's own. ``shown`` and ``host`` are what
    messages call the place. ``env`` is for an SDK that looks for credentials by itself.
    """

    ref: str
    provider: str
    name: str
    key: str | None
    base_url: str | None
    shown: str
    host: str
    check: str
    key_variable: str | None
    secrets: tuple[str, ...]
    accepts: frozenset[str] = frozenset()
    idle_timeout_ms: int = IDLE_TIMEOUT_MS
    connect_timeout_s: int = CONNECT_TIMEOUT_S
    proxy: str | None = None
    env: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"Access({self.ref!r}, {self.shown!r})"


class ProvidersModel:
    """A model behind the provider library. ``window`` is in tokens (None: unknown)."""

    def __init__(
        self, access: Access, *, window: int | None = None, clock: Clock | None = None
    ) -> None:
        self._access = access
        self._window = window
        self._clock: Clock = clock or SystemClock()
        self._library: Library | None = None
        self._closed = False

    @property
    def ref(self) -> str:
        return self._access.ref

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def accepts(self) -> frozenset[str]:
        return self._access.accepts

    def __repr__(self) -> str:
        return f"ProvidersModel({self._access.ref!r}, {self._access.shown!r})"

    def render(self, request: ModelRequest) -> bytes:
        """The body, as the library makes it: its request is taken down instead of sent.

        Waits for a thread: not for an event loop in a hurry.
        """
        return _worker.submit(self._render, request).result()

    def _render(self, request: ModelRequest) -> bytes:
        library = self._load()
        from postroom.models.providers_failures import told
        from postroom.models.providers_wire import Exchange

        try:
            return library.record(request).body
        except ModelError:
            raise
        except Exception as error:
            failure = error
        raise told(failure, Exchange(), self._access, self._clock.now_ms())

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        loop = asyncio.get_running_loop()
        library = self._library
        if library is None and not self._closed:
            library = await loop.run_in_executor(_worker, self._load)
        if library is None or self._closed:
            raise ModelError(f"{self.ref} was closed", kind="transport")
        from postroom.models.providers_failures import broken_off, told, unfinished
        from postroom.models.providers_reply import BrokenOff
        from postroom.models.providers_wire import Exchange

        exchange = Exchange()
        reply: Reply | None = None
        failure: Exception | None = None
        try:
            if _is_long(request):
                exchange.record = await loop.run_in_executor(_worker, library.record, request)
            reply, failure = await library.answer(request, exchange, on_delta)
        except ModelError:
            raise
        except Exception as error:
            failure = error
        # Raised here, where no exception of the library hangs on to ours with a body or a key.
        if reply is not None:
            return reply
        if isinstance(failure, BrokenOff):
            raise broken_off(self._access, str(failure), exchange)
        if failure is not None:
            raise told(failure, exchange, self._access, self._clock.now_ms())
        raise unfinished(self._access, exchange)

    async def aclose(self) -> None:
        self._closed = True
        library, self._library = self._library, None
        if library is not None:
            await library.aclose()

    def _load(self) -> Library:
        """On the thread: one at a time, and once."""
        if self._library is None:
            try:
                with _unswept(self._access.provider):
                    from postroom.models.providers_library import Library

                    self._library = Library(self._access)
            except ModelError:
                raise
            except ImportError as error:
                raise ModelError(
                    f"{self.ref} needs another version of its library: {error}",
                    kind="bad_request",
                    hint=f"{INSTALL} --upgrade",
                ) from None
            except Exception as error:
                # An SDK that finds no region, no profile, or a file it cannot read.
                raise ModelError(
                    f"{self.ref} cannot be opened: {error}",
                    kind="bad_request",
                    hint=self._access.check,
                ) from None
        return self._library


@contextmanager
def _unswept(provider: str) -> Generator[None]:
    """The first time for a provider: no garbage collection within, and none of what is there now.

    The library is some hundred thousand objects for good. Looking through them holds every thread
    up for a tenth of a second, again and again while a long history is built.
    """
    if f"postroom.models.providers_{provider}" in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


def _is_long(request: ModelRequest) -> bool:
    if len(request.messages) > MESSAGES_ON_LOOP_MAX:
        return True
    return sum(map(len, request.media.values())) > MEDIA_BYTES_ON_LOOP_MAX


# ---- for the catalogue ----

AUDIO = frozenset(
    {"audio/wav", "audio/mpeg", "audio/mp3", "audio/aac", "audio/ogg", "audio/flac", "audio/aiff"}
)
# What Gemini takes as such (ai.google.dev/gemini-api/docs/image-understanding); no GIF.
GEMINI = frozenset({"image/png", "image/jpeg", "image/webp", "image/heic", "image/heif"})

# Who sees pictures and reads PDF files on Bedrock (docs.aws.amazon.com/bedrock, supported models).
_BEDROCK_SEEING = r"claude|nova-(lite|pro|premier|2)"


def register() -> None:
    """Makes ``anthropic:…``, ``google:…`` and ``bedrock:…`` openable. Imports no library."""
    catalog.register(
        "anthropic",
        open_anthropic,
        key_variable="ANTHROPIC_API_KEY",
        default="claude-sonnet-5-5",
    )
    catalog.register(
        "google",
        open_google,
        key_variable=GOOGLE_KEYS[0],
        default="gemini-3.8-flash",
        ready=lambda env: _first(env, GOOGLE_KEYS) is not None,
    )
    catalog.register("bedrock", open_bedrock, key_variable=BEDROCK_KEY, ready=_has_aws)


def open_anthropic(opening: Opening) -> ProvidersModel:
    """``ANTHROPIC_API_KEY``; ``ANTHROPIC_BASE_URL`` with or without ``/v1``."""
    _require_library("anthropic")
    key = _key(opening, ("ANTHROPIC_API_KEY",))
    return _over_http(
        opening,
        key,
        "ANTHROPIC_BASE_URL",
        "https://api.anthropic.com",
        versions=("/v1",),
        accepts=IMAGES | PDF,
    )


GOOGLE_KEYS = ("GOOGLE_API_KEY", "GEMINI_API_KEY")


def open_google(opening: Opening) -> ProvidersModel:
    """``GOOGLE_API_KEY`` or ``GEMINI_API_KEY``; ``GOOGLE_BASE_URL`` with or without a version."""
    _require_library("google.genai")
    key = _key(opening, GOOGLE_KEYS)
    return _over_http(
        opening,
        key,
        "GOOGLE_BASE_URL",
        "https://generativelanguage.googleapis.com",
        versions=("/v1beta", "/v1"),
        accepts=GEMINI | PDF | AUDIO if "gemini" in opening.ref.name.lower() else frozenset(),
    )


BEDROCK_KEY = "AWS_BEARER_TOKEN_BEDROCK"


def open_bedrock(opening: Opening) -> ProvidersModel:
    """``AWS_BEARER_TOKEN_BEDROCK``, or what the AWS SDK finds; ``AWS_REGION``; ``BEDROCK_BASE_URL``."""
    _require_library("boto3")
    env = opening.env
    base_url = _first(env, ("BEDROCK_BASE_URL",))
    key = _first(env, (BEDROCK_KEY,))
    shown = host = "Amazon Bedrock"
    check = "check AWS_REGION, AWS_PROFILE and the credentials"
    if base_url is not None:
        endpoint = endpoint_of(base_url, "", None, base_url_variable="BEDROCK_BASE_URL")
        base_url, shown, host, check = endpoint.shown, endpoint.shown, endpoint.host, endpoint.check
    seeing = re.search(_BEDROCK_SEEING, opening.ref.name, re.IGNORECASE) is not None
    access = Access(
        ref=str(opening.ref),
        provider="bedrock",
        name=opening.ref.name,
        key=key,
        base_url=base_url,
        shown=shown,
        host=host,
        check=check,
        key_variable=BEDROCK_KEY if key else "AWS_PROFILE or AWS_ACCESS_KEY_ID",
        secrets=tuple(filter(None, [key, *(env.get(name) for name in _AWS_SECRETS)])),
        accepts=IMAGES | PDF if seeing else frozenset(),
        idle_timeout_ms=opening.idle_timeout_ms,
        env=env,
    )
    return _opened(access, opening)


_AWS_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AWS = (
    BEDROCK_KEY,
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def _has_aws(env: Mapping[str, str]) -> bool:
    """Whether there are credentials that can be seen without asking anybody: not a machine's role."""
    if _first(env, _AWS) is not None:
        return True
    home = env.get("HOME", "")
    return bool(home) and (Path(home) / ".aws" / "credentials").is_file()


def _over_http(
    opening: Opening,
    key: str,
    variable: str,
    default: str,
    *,
    versions: tuple[str, ...],
    accepts: frozenset[str],
) -> ProvidersModel:
    provider = opening.ref.provider
    given = _first(opening.env, (variable,)) or default
    base_url = given.rstrip("/")
    for version in versions:
        base_url = base_url.removesuffix(version)
    key_variable = f"{provider.upper()}_API_KEY"
    endpoint = endpoint_of(base_url, "", key, base_url_variable=variable, key_variable=key_variable)
    if "@" in given.partition("//")[2].partition("/")[0] or "?" in given:
        raise ConfigError(f"{variable} may hold no login and no query", hint="only an address")
    access = Access(
        ref=str(opening.ref),
        provider=provider,
        name=opening.ref.name,
        key=key,
        base_url=endpoint.shown,
        shown=endpoint.shown,
        host=endpoint.host,
        check=endpoint.check,
        key_variable=key_variable,
        secrets=endpoint.secrets,
        accepts=accepts,
        idle_timeout_ms=opening.idle_timeout_ms,
        proxy=proxy_for(base_url, opening.env),
    )
    return _opened(access, opening)


def _opened(access: Access, opening: Opening) -> ProvidersModel:
    window = opening.window or facts(opening.ref).window
    return ProvidersModel(access, window=window, clock=opening.clock)


def _key(opening: Opening, variables: tuple[str, ...]) -> str:
    key = _first(opening.env, variables)
    if key is None:
        raise MissingKey(
            f"{opening.ref} needs a key in {variables[0]}", hint=f"export {variables[0]}=…"
        )
    return key


def _first(env: Mapping[str, str], variables: tuple[str, ...]) -> str | None:
    """The value of the first variable that is set to something."""
    return next((value for name in variables if (value := env.get(name, "").strip())), None)


def _require_library(sdk: str) -> None:
    """Looks whether the extra is installed, without importing it."""
    for name in ("pydantic_ai", sdk):
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise UsageError(
                "models of this provider need a part that is not installed", hint=INSTALL
            )
