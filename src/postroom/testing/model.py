"""A model that a test plays by hand: it waits for a request, looks at it, answers when it likes.

No reply is prepared and nothing is timed: `PuppetModel.asked` returns when a request has come,
and what the test does with it decides what happens next. For replies known in advance there is
`postroom.models.scripted.ScriptedModel`, which `scripted` makes from a few words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from postroom.domain.message import (
    Block,
    Finish,
    Reasoning,
    Text,
    ToolCall,
    Usage,
    text_of,
)
from postroom.errors import ModelError, ModelErrorKind
from postroom.models.chat import CHAT, body_of
from postroom.models.scripted import ScriptedModel, Then, parse_script
from postroom.ports.clock import Clock
from postroom.ports.model import Delta, DeltaSink, ModelRequest, Reply, TextDelta

USAGE = Usage(input_tokens=10, output_tokens=5)


class Asked:
    """One open request. Exactly one of `say`, `call`, `reply`, `fail` and `crash` answers it.

    ``request`` and ``body`` are as they were when the request was made: what the history becomes
    later does not change them. ``dropped`` is set when the request was cancelled before it was
    answered.
    """

    def __init__(self, request: ModelRequest, body: bytes, on_delta: DeltaSink) -> None:
        self.request = msgspec.structs.replace(request, messages=tuple(request.messages))
        self.body = body
        self.dropped = asyncio.Event()
        self._on_delta = on_delta
        self._streamed = ""
        self._calls = 0
        self._answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    @property
    def open(self) -> bool:
        """Whether an answer still counts."""
        return not self._answer.done()

    @property
    def texts(self) -> list[str]:
        """``role: text`` of each message of the request, in order."""
        return [f"{m.role}: {text_of(m.content)}" for m in self.request.messages]

    @property
    def news(self) -> list[str]:
        """The texts of the user messages after the last reply: what this step claimed."""
        texts: list[str] = []
        for message in self.request.messages:
            if message.role == "assistant":
                texts.clear()
            elif message.role == "user":
                texts.append(text_of(message.content))
        return texts

    def stream(self, *pieces: str) -> None:
        """Lets some text arrive; the answer is still open."""
        for piece in pieces:
            self._streamed += piece
            self._on_delta(TextDelta(piece))

    def delta(self, delta: Delta) -> None:
        """Lets any delta arrive."""
        self._on_delta(delta)

    def say(self, text: str = "", *, finish: Finish = "stop", reasoning: str = "") -> None:
        """Answers with a text, after what was streamed of it. Empty: with nothing at all."""
        rest = text.removeprefix(self._streamed)
        if rest:
            self.stream(rest)
        content: list[Block] = [Reasoning(reasoning)] if reasoning else []
        if text:
            content.append(Text(text))
        self.reply(*content, finish=finish)

    def call(
        self,
        *calls: str | tuple[str, Mapping[str, object] | str],
        text: str = "",
        finish: Finish = "tool_calls",
    ) -> None:
        """Answers with calls: a tool's name, or its name with arguments (a text goes as it is)."""
        content: list[Block] = [Text(text)] if text else []
        for each in calls:
            name, given = (each, "{}") if isinstance(each, str) else each
            arguments = given if isinstance(given, str) else msgspec.json.encode(given).decode()
            self._calls += 1
            content.append(ToolCall(f"call_{self.request.number}_{self._calls}", name, arguments))
        self.reply(*content, finish=finish)

    def reply(self, *content: Block, finish: Finish = "stop", usage: Usage = USAGE) -> None:
        """Answers with these blocks as they are."""
        self._answer.set_result(Reply(content, finish, usage, "puppet-1", "req_puppet"))

    def fail(
        self,
        kind: ModelErrorKind,
        *,
        status: int | None = None,
        retry_after_ms: int | None = None,
        request_id: str | None = None,
    ) -> None:
        """Fails the request as a provider would."""
        self.crash(
            ModelError(
                f"the puppet failed: {kind}",
                kind=kind,
                status=status,
                retry_after_ms=retry_after_ms,
                request_id=request_id,
            )
        )

    def crash(self, error: BaseException) -> None:
        """Raises anything out of the model, also what no adapter should raise."""
        self._answer.set_exception(error)

    async def answered(self) -> Reply:
        """What the model gives back; for `PuppetModel`."""
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.dropped.set()
            raise


class PuppetModel:
    """Requests arrive, the test answers. ``asks`` holds every request there was, in order."""

    def __init__(
        self,
        ref: str = "puppet:one",
        *,
        window: int | None = None,
        accepts: frozenset[str] = frozenset(),
    ) -> None:
        self.asks: list[Asked] = []
        self._ref = ref
        self._window = window
        self._accepts = accepts
        self._untaken: asyncio.Queue[Asked] = asyncio.Queue()

    @property
    def ref(self) -> str:
        return self._ref

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def accepts(self) -> frozenset[str]:
        return self._accepts

    @property
    def open(self) -> list[Asked]:
        """The requests that wait for an answer, oldest first."""
        return [asked for asked in self.asks if asked.open]

    async def asked(self) -> Asked:
        """The next request that was not handed out yet; waits for it."""
        return await self._untaken.get()

    def render(self, request: ModelRequest) -> bytes:
        return body_of(self._ref, CHAT, self._accepts, request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        asked = Asked(request, self.render(request), on_delta)
        self.asks.append(asked)
        self._untaken.put_nowait(asked)
        return await asked.answered()

    async def aclose(self) -> None:
        pass


def scripted(
    *replies: str | Mapping[str, object],
    then: Then = "error",
    ref: str = "scripted:test",
    clock: Clock | None = None,
) -> ScriptedModel:
    """A scripted model from texts and from replies as a script's file has them."""
    script = parse_script({"replies": [_reply(each) for each in replies], "then": then})
    return ScriptedModel(ref, script, clock=clock)


def calling(*calls: str | tuple[str, Mapping[str, object]], text: str = "") -> dict[str, object]:
    """A reply for `scripted` that calls tools."""
    named = [(each, dict[str, object]()) if isinstance(each, str) else each for each in calls]
    return {"text": text, "tool_calls": [{"name": n, "arguments": dict(a)} for n, a in named]}


def _reply(reply: str | Mapping[str, object]) -> Mapping[str, object]:
    return {"text": reply} if isinstance(reply, str) else reply
