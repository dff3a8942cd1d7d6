"""Models of providers with an API of their own, through a provider library.

An extra: ``pip install 'postroom[providers]'``. The library and the SDKs under it take seconds to
import and milliseconds a request, so that nothing of them is imported before the first request,
then on a thread, and long histories are turned into a body on that thread too. One thread for
all models: a second one would only take the interpreter from the event loop more often.

``anthropic`` and ``google`` are tested over HTTP. ``bedrock`` is offered untested: it is built of
the same parts, and what it makes of a request is tested, but no answer of a real server is.
Providers that speak Chat Completions are in `catalog.PROVIDERS`; they need no library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from postroom.errors import ModelError
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
        return _worker.submit(lambda: self._load().record(request)).result().body

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        if self._closed:
            raise ModelError(f"{self.ref} was closed", kind="transport")
        loop = asyncio.get_running_loop()
        library = self._library
        if library is None:
            library = await self._tried(loop.run_in_executor(_worker, self._load))
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
        """On the thread: one at a time."""
        if self._library is None:
            from postroom.models.providers_library import Library

            self._library = Library(self._access)
        return self._library
