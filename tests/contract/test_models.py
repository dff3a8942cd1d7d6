"""The contract of `ports.model`, over every adapter there is.

A test asks its *stage* for a model that will do one thing (a `Scene`), and looks at what comes
back. An adapter joins by one more stage in `STAGES`: a way to make it do what a scene says. Where
a server stands behind the adapter, the stage makes the server do it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
import pytest

from postroom.domain.context import ContextMessage
from postroom.domain.event import Params, ToolSpec
from postroom.domain.ids import SessionId
from postroom.domain.message import Finish, Reasoning, Text, ToolCall, text_of
from postroom.errors import ModelError, ModelErrorKind
from postroom.models.openai_compat import OpenAICompatModel
from postroom.models.providers import Access, ProvidersModel
from postroom.models.scripted import ScriptedModel, parse_script
from postroom.ports.model import (
    CallDelta,
    Delta,
    Model,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
)
from tests.servers.model_server import ModelServer, model_server
from tests.servers.strict_chat import (
    Answer,
    StrictChat,
    call_piece,
    chunk,
    ending,
    refused,
)
from tests.servers.strict_provider import (
    BEDROCK_START,
    StrictAnthropic,
    StrictBedrock,
    StrictGoogle,
    bedrock_call,
    bedrock_delta,
    bedrock_end,
    bedrock_stream,
    block_delta,
    block_start,
    google_chunk,
    message_end,
    message_start,
    text_block,
    thinking_block,
    tool_block,
)
from tests.support import bounded

__all__ = ["model_server"]

SECRET = "sk-contract-0123456789abcdef"


@dataclass(frozen=True)
class Scene:
    """What the model is to do. ``calls`` are names with their arguments. ``status``: refuse.
    ``broken``: say the text, then lose the connection. ``hangs``: say the text, then nothing.
    """

    text: str = ""
    pieces: int = 1
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    finish: Finish | None = None
    status: int | None = None
    retry_after_ms: int | None = None
    broken: bool = False
    hangs: bool = False


@dataclass(frozen=True)
class Shape:
    """Where a dialect's body holds what was asked: roles in order, and names of tools."""

    roles: Callable[[Any], list[str]]
    tools: Callable[[Any], list[str]]


CHAT = Shape(
    lambda body: [m["role"] for m in body["messages"]],
    lambda body: [t["function"]["name"] for t in body["tools"]],
)
ANTHROPIC = Shape(
    lambda body: ["system" for _ in body["system"]] + [m["role"] for m in body["messages"]],
    lambda body: [t["name"] for t in body["tools"]],
)
GOOGLE = Shape(
    lambda body: (
        ["system" for _ in body["systemInstruction"]["parts"]]
        + [c["role"] for c in body["contents"]]
    ),
    lambda body: [d["name"] for t in body["tools"] for d in t["functionDeclarations"]],
)

BEDROCK = Shape(
    lambda body: ["system" for _ in body["system"]] + [m["role"] for m in body["messages"]],
    lambda body: [t["toolSpec"]["name"] for t in body["toolConfig"]["tools"]],
)


@dataclass
class Cast:
    """The model and the request to make. ``begun`` is set once it is in the middle of it."""

    model: Model
    request: ModelRequest
    deltas: list[Delta] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.begun.set()

    async def respond(self) -> Reply:
        return await bounded(self.model.respond(self.request, self.on_delta))

    async def refusal(self) -> ModelError:
        with pytest.raises(ModelError) as caught:
            await self.respond()
        return caught.value

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas if isinstance(d, TextDelta))


class Stage(Protocol):
    shape: Shape

    async def play(self, scene: Scene) -> Cast: ...

    async def sent(self) -> bytes | None:
        """The last body that arrived; None if nothing is sent anywhere."""
        ...

    async def no_connection(self) -> None:
        """Returns when the far end has no connection left."""
        ...

    async def aclose(self) -> None: ...


LOOK = ToolSpec(
    "look",
    "Looks at a thing.",
    msgspec.Raw(b'{"type":"object","properties":{"at":{"type":"string"}}}'),
)


def request(prompt: str) -> ModelRequest:
    return ModelRequest(
        SessionId("session_contract"),
        1,
        "You are terse.",
        [ContextMessage("user", (Text(prompt),), 1)],
        (LOOK,),
        Params(),
    )


class Scripted:
    """The scripted model, told by a script; a wait that never ends is a clock that stands."""

    shape = CHAT

    async def play(self, scene: Scene) -> Cast:
        reply: dict[str, Any] = {"text": scene.text, "chunks": scene.pieces}
        reply["reasoning"] = scene.reasoning
        reply["tool_calls"] = [{"name": n, "arguments": a} for n, a in scene.calls]
        if scene.finish not in (None, "tool_calls"):
            reply["finish"] = scene.finish
        if scene.status is not None:
            reply["error"] = {"status": scene.status, "retry_after_ms": scene.retry_after_ms}
        if scene.broken:
            reply["error"] = {"code": "transport"}
        if scene.hangs:
            reply["delay_ms"] = 1
        script = parse_script({"replies": [reply]})
        clock = StandingClock()
        model = ScriptedModel("scripted:test", script, clock=clock)
        return Cast(model, request("Hi"), begun=clock.slept)

    async def sent(self) -> bytes | None:
        return None

    async def no_connection(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class StandingClock:
    """``slept`` is set when somebody waits, for ever."""

    def __init__(self) -> None:
        self.slept = asyncio.Event()

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> int:
        return 0

    async def sleep_ms(self, ms: float) -> None:
        self.slept.set()
        await asyncio.Event().wait()

    def jitter(self) -> float:
        return 0


class Compatible:
    """The OpenAI-compatible adapter, with a server on this loop that says any bytes."""

    shape = CHAT

    def __init__(self, server: StrictChat) -> None:
        self._server = server
        self._models: list[Model] = []

    async def play(self, scene: Scene) -> Cast:
        self._server.will(_answer(scene))
        model = OpenAICompatModel("openai:strict", self._server.url, SECRET, "strict")
        self._models.append(model)
        return Cast(model, request("Hi"))

    async def sent(self) -> bytes | None:
        return self._server.requests[-1].body

    async def no_connection(self) -> None:
        await bounded(self._server.no_connection())

    async def aclose(self) -> None:
        for model in self._models:
            await model.aclose()
        assert self._server.violations == []


def _answer(scene: Scene) -> Answer:
    if scene.status is not None:
        headers = {}
        if scene.retry_after_ms is not None:
            headers["retry_after"] = f"{scene.retry_after_ms / 1000:g}"
        # A careless server repeats the key it was given.
        error = {"message": f"no: Authorization was 'Bearer {SECRET}'", "type": "server_error"}
        return refused(scene.status, {"error": error}, **headers)
    stream = [chunk({"role": "assistant", "content": ""})]
    if scene.reasoning:
        stream.append(chunk({"reasoning_content": scene.reasoning}))
    size = max(1, -(-len(scene.text) // scene.pieces))
    for at in range(0, len(scene.text), size):
        stream.append(chunk({"content": scene.text[at : at + size]}))
    for index, (name, arguments) in enumerate(scene.calls):
        written = json.dumps(arguments)
        stream.append(chunk(call_piece(index, id=f"call_{index}", name=name, arguments="")))
        stream.append(chunk(call_piece(index, arguments=written[:4])))
        stream.append(chunk(call_piece(index, arguments=written[4:])))
    if scene.broken or scene.hangs:
        return Answer(stream, end="drop" if scene.broken else "hang")
    finish = scene.finish or ("tool_calls" if scene.calls else "stop")
    return Answer([*stream, *ending(finish)])


class Provided:
    """The provider library's adapter, with a server on this loop that speaks its dialect."""

    def __init__(self, provider: str, server: StrictChat) -> None:
        self._provider = provider
        self._server = server
        self._models: list[Model] = []
        self.shape = {"anthropic": ANTHROPIC, "google": GOOGLE, "bedrock": BEDROCK}[provider]

    async def play(self, scene: Scene) -> Cast:
        self._server.will(_ANSWERS[self._provider](scene))
        model = provided(self._provider, self._server.port)
        self._models.append(model)
        return Cast(model, request("Hi"))

    async def sent(self) -> bytes | None:
        return self._server.requests[-1].body

    async def no_connection(self) -> None:
        await bounded(self._server.no_connection())

    async def aclose(self) -> None:
        for model in self._models:
            await model.aclose()
        assert self._server.violations == []


def provided(provider: str, port: int) -> ProvidersModel:
    """A model of the provider library, asked at a port of this machine."""
    url = f"http://127.0.0.1:{port}"
    # The AWS SDK sends no bearer token without TLS: there the secret signs.
    signs = provider == "bedrock"
    env = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": SECRET}
    return ProvidersModel(
        Access(
            ref=f"{provider}:strict",
            provider=provider,
            name="strict",
            key=None if signs else SECRET,
            base_url=url,
            shown=url,
            host="127.0.0.1",
            check="check the address",
            key_variable="KEY",
            secrets=(SECRET,),
            env=env if signs else {},
        )
    )


def _pieces(scene: Scene) -> list[str]:
    size = max(1, -(-len(scene.text) // scene.pieces))
    return [scene.text[at : at + size] for at in range(0, len(scene.text), size)]


def _refused(scene: Scene) -> Answer:
    headers = {}
    if scene.retry_after_ms is not None:
        headers["retry_after"] = f"{scene.retry_after_ms / 1000:g}"
    error = {"message": f"no: x-api-key was '{SECRET}'", "type": "api_error"}
    return refused(scene.status or 0, {"type": "error", "error": error}, **headers)


def _anthropic_answer(scene: Scene) -> Answer:
    if scene.status is not None:
        return _refused(scene)
    stream = [message_start()]
    index = 0
    if scene.reasoning:
        stream += thinking_block(index, scene.reasoning)
        index += 1
    if scene.broken or scene.hangs:
        stream.append(block_start(index, type="text", text=""))
        stream += [block_delta(index, type="text_delta", text=piece) for piece in _pieces(scene)]
        return Answer(stream, end="drop" if scene.broken else "hang")
    if scene.text:
        stream += text_block(index, *_pieces(scene))
        index += 1
    for at, (name, arguments) in enumerate(scene.calls, index):
        written = json.dumps(arguments)
        stream += tool_block(at, f"toolu_{at}", name, written[:4], written[4:])
    finish = scene.finish or ("tool_calls" if scene.calls else "stop")
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
    return Answer([*stream, *message_end(reasons.get(finish, "end_turn"))])


def _google_answer(scene: Scene) -> Answer:
    if scene.status is not None:
        return _refused(scene)
    stream: list[bytes] = []
    if scene.reasoning:
        stream.append(google_chunk({"text": scene.reasoning, "thought": True}))
    stream += [google_chunk({"text": piece}) for piece in _pieces(scene)]
    if scene.broken or scene.hangs:
        return Answer(stream, end="drop" if scene.broken else "hang")
    for name, arguments in scene.calls:
        stream.append(google_chunk({"functionCall": {"name": name, "args": arguments}}))
    reasons = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
    return Answer([*stream, google_chunk(finish=reasons.get(scene.finish or "stop", "STOP"))])


def _bedrock_answer(scene: Scene) -> Answer:
    if scene.status is not None:
        answer = _refused(scene)
        error = {"message": f"no: the token was '{SECRET}'"}
        return refused(scene.status, error, **{**answer.headers, "x-amzn-errortype": "Refused"})
    stream = [BEDROCK_START]
    if scene.reasoning:
        stream.append(bedrock_delta(0, reasoningContent={"text": scene.reasoning}))
    deltas = [bedrock_delta(1, text=piece) for piece in _pieces(scene)]
    if scene.broken or scene.hangs:
        return bedrock_stream([*stream, *deltas], "drop" if scene.broken else "hang")
    stream += deltas
    for at, (name, arguments) in enumerate(scene.calls, 2):
        written = json.dumps(arguments)
        stream += bedrock_call(at, f"tooluse_{at}", name, written[:4], written[4:])
    finish = scene.finish or ("tool_calls" if scene.calls else "stop")
    reasons = {
        "tool_calls": "tool_use",
        "length": "max_tokens",
        "content_filter": "content_filtered",
    }
    return bedrock_stream([*stream, *bedrock_end(reasons.get(finish, "end_turn"))])


_ANSWERS = {
    "anthropic": _anthropic_answer,
    "google": _google_answer,
    "bedrock": _bedrock_answer,
}


class OverProcess:
    """An adapter with a server in another process, told by directives in the prompt."""

    def __init__(self, server: ModelServer, shape: Shape, opened: Callable[[], Model]) -> None:
        self._server = server
        self._opened = opened
        self._models: list[Model] = []
        self.shape = shape

    async def play(self, scene: Scene) -> Cast:
        prompt = ""
        if scene.status is not None:
            prompt += f"[[fail:{scene.status}]]"
        if scene.reasoning:
            prompt += f"[[think:{scene.reasoning}]]"
        if scene.calls:
            name, arguments = scene.calls[0]
            assert all(call == scene.calls[0] for call in scene.calls)
            prompt += f"[[par*{len(scene.calls)}:{name} {json.dumps(arguments)}]]"
        elif scene.hangs:
            # Words that go on for minutes: this server cannot fall silent.
            prompt += "[[len:5000]][[gap:20]]"
        elif scene.text:
            prompt += f"[[say:{scene.text}]]"
        if scene.broken:
            prompt += "[[drop]]"
        model = self._opened()
        self._models.append(model)
        return Cast(model, request(prompt or "Hi"))

    async def sent(self) -> bytes | None:
        return self._server.bodies()[-1]

    async def no_connection(self) -> None:
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        for _ in range(1_000):
            if self._server.connections() == 0:
                return
        raise AssertionError("a connection is still open")

    async def aclose(self) -> None:
        for model in self._models:
            await model.aclose()


@pytest.fixture(scope="session")
def provider_library() -> None:
    """Imported before anything is timed: it takes seconds."""
    importlib.import_module("postroom.models.providers_anthropic")
    importlib.import_module("postroom.models.providers_google")
    importlib.import_module("postroom.models.providers_bedrock")


STAGES = (
    "scripted",
    "openai_compat",
    "anthropic",
    "google",
    "bedrock",
    "openai_compat over a process",
    "anthropic over a process",
    "google over a process",
)
# Those whose far end can be told every detail: where a reply ends, and how long to wait.
EXACT = STAGES[:5]


@pytest.fixture
async def stage(
    request: pytest.FixtureRequest, model_server: ModelServer, provider_library: None
) -> AsyncIterator[Stage]:
    def compatible() -> Model:
        return OpenAICompatModel("openai:mock", model_server.url, SECRET, "mock")

    async with AsyncExitStack() as stack:
        made: Stage
        match request.param:
            case "scripted":
                made = Scripted()
            case "openai_compat":
                made = Compatible(await stack.enter_async_context(StrictChat()))
            case "anthropic":
                made = Provided("anthropic", await stack.enter_async_context(StrictAnthropic()))
            case "google":
                made = Provided("google", await stack.enter_async_context(StrictGoogle()))
            case "bedrock":
                made = Provided("bedrock", await stack.enter_async_context(StrictBedrock()))
            case "anthropic over a process":
                opened = partial(provided, "anthropic", model_server.port)
                made = OverProcess(model_server, ANTHROPIC, opened)
            case "google over a process":
                opened = partial(provided, "google", model_server.port)
                made = OverProcess(model_server, GOOGLE, opened)
            case _:
                made = OverProcess(model_server, CHAT, compatible)
        yield made
        await bounded(made.aclose())


every_stage = pytest.mark.parametrize("stage", STAGES, indirect=True)
exact_stage = pytest.mark.parametrize("stage", EXACT, indirect=True)


# ---- replies ----


@every_stage
async def test_a_reply_has_the_text_that_was_said(stage: Stage) -> None:
    cast = await stage.play(Scene(text='Grüße, 世界 🎈 \\n "quoted"'))
    reply = await cast.respond()
    assert reply.content == (Text('Grüße, 世界 🎈 \\n "quoted"'),)
    assert reply.finish == "stop"
    assert reply.model


@every_stage
async def test_deltas_in_order_add_up_to_the_text(stage: Stage) -> None:
    text = "one two three four five six seven eight"
    cast = await stage.play(Scene(text=text, pieces=7))
    reply = await cast.respond()
    assert cast.text == text == text_of(reply.content)


@exact_stage
async def test_text_is_passed_on_as_it_comes_not_at_the_end(stage: Stage) -> None:
    cast = await stage.play(Scene(text="one two three four", pieces=4))
    await cast.respond()
    assert len(cast.deltas) == 4


@every_stage
async def test_reasoning_comes_first_and_apart_from_the_text(stage: Stage) -> None:
    cast = await stage.play(Scene(text="42", reasoning="six by nine"))
    reply = await cast.respond()
    thought, text = reply.content
    assert isinstance(thought, Reasoning)
    assert (thought.text, text) == ("six by nine", Text("42"))
    assert cast.deltas[0] == ReasoningDelta("six by nine")
    assert cast.text == "42"


@every_stage
async def test_a_call_has_an_id_a_name_and_its_arguments(stage: Stage) -> None:
    cast = await stage.play(Scene(calls=(("look", {"at": "the ä {moon}"}),)))
    reply = await cast.respond()
    (call,) = reply.content
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "the ä {moon}"})
    assert call.call_id
    assert reply.finish == "tool_calls"
    assert cast.deltas == [CallDelta("look")]


@every_stage
async def test_parallel_calls_keep_their_order_and_have_ids_of_their_own(stage: Stage) -> None:
    cast = await stage.play(Scene(calls=(("look", {"at": "it"}),) * 3))
    reply = await cast.respond()
    calls = [block for block in reply.content if isinstance(block, ToolCall)]
    assert [call.name for call in calls] == ["look"] * 3
    assert [json.loads(call.arguments) for call in calls] == [{"at": "it"}] * 3
    assert len({call.call_id for call in calls}) == 3
    assert cast.deltas == [CallDelta("look")] * 3


@exact_stage
async def test_text_may_stand_before_a_call(stage: Stage) -> None:
    cast = await stage.play(Scene(text="Let me see.", calls=(("look", {}),)))
    reply = await cast.respond()
    assert [type(block) for block in reply.content] == [Text, ToolCall]
    assert cast.deltas == [TextDelta("Let me see."), CallDelta("look")]


@every_stage
async def test_usage_is_counted(stage: Stage) -> None:
    reply = await (await stage.play(Scene(text="some words"))).respond()
    assert reply.usage.input_tokens > 0
    assert reply.usage.output_tokens > 0
    assert reply.usage.cached_tokens <= reply.usage.input_tokens


@exact_stage
@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
async def test_the_finish_reason_is_kept(stage: Stage, finish: Finish) -> None:
    reply = await (await stage.play(Scene(text="so far", finish=finish))).respond()
    assert reply.finish == finish


@exact_stage
async def test_a_reply_cut_at_the_token_limit_shows_its_calls_as_well(stage: Stage) -> None:
    scene = Scene(text="so far", calls=(("look", {"at": "x"}),), finish="length")
    reply = await (await stage.play(scene)).respond()
    assert reply.finish == "length"
    assert [type(block) for block in reply.content] == [Text, ToolCall]


@exact_stage
async def test_an_empty_reply_is_returned_as_it_is(stage: Stage) -> None:
    cast = await stage.play(Scene())
    reply = await cast.respond()
    assert (reply.content, reply.finish, cast.deltas) == ((), "stop", [])


@every_stage
async def test_one_model_answers_many_requests_at_once(stage: Stage) -> None:
    first = await stage.play(Scene(text="the same"))
    for _ in range(9):
        await stage.play(Scene(text="the same"))
    model = first.model
    replies = await bounded(
        asyncio.gather(*[model.respond(first.request, lambda _: None) for _ in range(10)])
    )
    assert [text_of(reply.content) for reply in replies] == ["the same"] * 10


# ---- refusals and failures ----

KINDS: list[tuple[int, ModelErrorKind]] = [
    (400, "bad_request"),
    (401, "auth"),
    (402, "quota"),
    (403, "auth"),
    (404, "bad_request"),
    (408, "timeout"),
    (422, "bad_request"),
    (429, "rate_limit"),
    (500, "server"),
    (502, "server"),
    (503, "server"),
    (529, "server"),
]


@every_stage
@pytest.mark.parametrize(("status", "kind"), KINDS)
async def test_a_status_becomes_the_kind_of_error_it_means(
    stage: Stage, status: int, kind: ModelErrorKind
) -> None:
    cast = await stage.play(Scene(status=status))
    error = await cast.refusal()
    assert (error.kind, error.status) == (kind, status)
    assert cast.deltas == []
    shown = "".join(traceback.format_exception(error))
    assert SECRET not in f"{shown} {error!r} {vars(error)}"
    assert str(status) in error.message


@exact_stage
@pytest.mark.parametrize("status", [429, 503])
async def test_the_wait_that_the_provider_asks_for_is_told(stage: Stage, status: int) -> None:
    error = await (await stage.play(Scene(status=status, retry_after_ms=2_500))).refusal()
    assert (error.retry_after_ms, error.retryable) == (2_500, True)


@every_stage
async def test_without_such_a_word_there_is_no_wait(stage: Stage) -> None:
    error = await (await stage.play(Scene(status=429))).refusal()
    assert error.retry_after_ms is None


@every_stage
async def test_a_connection_lost_in_mid_stream_is_an_error_and_no_reply(stage: Stage) -> None:
    cast = await stage.play(Scene(text="half of it", broken=True))
    error = await cast.refusal()
    assert (error.kind, error.status) == ("transport", None)
    assert cast.text in ("", "half of it")


@every_stage
async def test_the_next_request_after_a_failure_works(stage: Stage) -> None:
    assert (await (await stage.play(Scene(status=500))).refusal()).retryable
    assert text_of((await (await stage.play(Scene(text="fine"))).respond()).content) == "fine"


# ---- cancelling, rendering, closing ----


@every_stage
async def test_cancelling_in_mid_stream_returns_at_once_and_leaves_no_connection(
    stage: Stage,
) -> None:
    cast = await stage.play(Scene(text="begun", hangs=True))
    task = asyncio.create_task(cast.respond())
    await bounded(cast.begun.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(task)
    await stage.no_connection()


@every_stage
async def test_render_gives_the_very_bytes_that_are_sent(stage: Stage) -> None:
    cast = await stage.play(Scene(text="ok"))
    rendered = cast.model.render(cast.request)
    await cast.respond()
    sent = await stage.sent()
    assert sent is None or sent == rendered
    assert cast.model.render(cast.request) == rendered
    body = json.loads(rendered)
    assert stage.shape.roles(body) == ["system", "user"]
    assert stage.shape.tools(body) == ["look"]


@every_stage
async def test_a_model_says_what_it_is(stage: Stage) -> None:
    model = (await stage.play(Scene())).model
    provider, _, name = model.ref.partition(":")
    assert provider
    assert name
    assert model.window is None
    assert model.accepts == frozenset()
    assert SECRET not in repr(model)


@every_stage
async def test_a_model_may_be_closed_twice(stage: Stage) -> None:
    cast = await stage.play(Scene(text="bye"))
    await cast.respond()
    await cast.model.aclose()
    await cast.model.aclose()
    await stage.no_connection()
