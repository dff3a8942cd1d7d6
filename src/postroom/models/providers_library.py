"""The provider library at work: one model of it, asked and listened to.

Loaded on first use, on a thread: importing the library and an SDK takes seconds. The files beside
this one say how each provider's model is made (`Fitting`), how a request becomes the library's
messages, and what its reply and its errors become.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec
from pydantic_ai.direct import model_request_stream
from pydantic_ai.messages import ModelMessage, ModelRequest, UserPromptPart
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
from pydantic_ai.settings import ModelSettings, ThinkingLevel

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params, ToolSpec
from postroom.domain.ids import SessionId
from postroom.domain.message import Text
from postroom.errors import ModelError
from postroom.models.providers_failures import request_id_of
from postroom.models.providers_history import messages_of, parameters_of
from postroom.models.providers_reply import delta_of, reply_of, said
from postroom.models.providers_wire import Exchange, Record, Recorded, current
from postroom.ports.model import DeltaSink, Reply
from postroom.ports.model import ModelRequest as Request

if TYPE_CHECKING:
    from postroom.models.providers import Access


@dataclass(frozen=True)
class Fitting:
    """One provider's model of the library, made to go through our `Exchange`.

    ``provider`` is the name its seals carry. ``settings`` are the library's for a request with
    these parameters; ``seals_back`` whether reasoning may be sent back with them. ``rehearsal``
    is a short reply in the provider's bytes (None: there is no rehearsal).
    """

    model: Model
    provider: str
    settings: Callable[[Params], ModelSettings]
    seals_back: Callable[[Params], bool]
    aclose: Callable[[], Awaitable[None]]
    rehearsal: bytes | None = None


EFFORTS: dict[str, ThinkingLevel] = {
    "none": False,
    "minimal": "minimal",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}


def settings_of(params: Params, ref: str) -> ModelSettings:
    """What is said alike to every provider.

    Raises:
        ModelError: ``bad_request``, if the effort is none of `EFFORTS`.
    """
    settings = ModelSettings()
    if params.max_tokens is not None:
        settings["max_tokens"] = params.max_tokens
    if params.temperature is not None:
        settings["temperature"] = params.temperature
    if params.reasoning_effort is not None:
        if params.reasoning_effort not in EFFORTS:
            raise ModelError(
                f"{ref} knows no reasoning effort {params.reasoning_effort!r}",
                kind="bad_request",
                hint=f"one of {', '.join(EFFORTS)}",
            )
        settings["thinking"] = EFFORTS[params.reasoning_effort]
    return settings


_FIRST = Request(
    SessionId(""),
    0,
    "-",
    [ContextMessage("user", (Text("-"),), 0)],
    (ToolSpec("-", "-", msgspec.Raw(b'{"type":"object"}')),),
    Params(),
)

# In place of a request that was taken down already: its answer is read, its body is not sent.
_STAND_IN: Sequence[ModelMessage] = (ModelRequest([UserPromptPart(".")]),)


class Library:
    """``access`` is where and as whom to ask."""

    def __init__(self, access: Access) -> None:
        module = importlib.import_module(f"postroom.models.providers_{access.provider}")
        self._access = access
        self._fitting = cast("Callable[[Access], Fitting]", module.fit)(access)
        # The first request and the first answer build what was put off: here, not on a loop. If
        # that fails, the first real request will say what is wrong.
        with suppress(Exception):
            if self._fitting.rehearsal is None:
                self.record(_FIRST)
            else:
                exchange = Exchange(rehearsal=self._fitting.rehearsal)
                asyncio.run(self.answer(_FIRST, exchange, lambda _: None))

    def record(self, request: Request) -> Record:
        """The HTTP request that would be made: the library makes it, and it is not sent.

        Runs the library on an event loop of its own: for a thread without one.
        """
        exchange = Exchange(recording=True)
        asyncio.run(self._run(request, exchange))
        assert exchange.record is not None, "the library made no request"
        return exchange.record

    async def _run(self, request: Request, exchange: Exchange) -> None:
        try:
            async with self._open(request, exchange):
                pass
        except Recorded:
            pass

    async def answer(
        self, request: Request, exchange: Exchange, on_delta: DeltaSink
    ) -> tuple[Reply | None, Exception | None]:
        """The reply (None: the stream ended before it did), and what ended the stream.

        An error after the provider's last word is no error.

        Raises:
            BrokenOff: the provider ended the reply as a failure of its own.
            Exception: whatever the library raises before it has read anything.
        """
        async with self._open(request, exchange) as stream:
            exchange.finished = lambda: said(stream) is not None
            failure: Exception | None = None
            try:
                async for event in stream:
                    delta = delta_of(event)
                    if delta is not None:
                        on_delta(delta)
            except Exception as error:
                failure = error
            if said(stream) is None:
                return None, failure
            return (
                reply_of(
                    stream.get(),
                    self._fitting.provider,
                    self._access.name,
                    request_id_of(exchange.headers),
                ),
                None,
            )

    async def aclose(self) -> None:
        await self._fitting.aclose()

    @asynccontextmanager
    async def _open(self, request: Request, exchange: Exchange) -> AsyncGenerator[StreamedResponse]:
        fitting = self._fitting
        if exchange.record is not None:
            messages, parameters = _STAND_IN, ModelRequestParameters()
            settings = ModelSettings()
        else:
            messages = messages_of(
                request,
                provider=fitting.provider,
                accepts=self._access.accepts,
                seals_back=fitting.seals_back(request.params),
            )
            parameters = parameters_of(request)
            settings = fitting.settings(request.params)
        opened: AbstractAsyncContextManager[StreamedResponse] = model_request_stream(
            fitting.model,
            messages,
            model_settings=settings,
            model_request_parameters=parameters,
            instrument=False,
        )
        token = current.set(exchange)
        try:
            async with opened as stream:
                yield stream
        finally:
            current.reset(token)
            await exchange.aclose()
