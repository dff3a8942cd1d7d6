"""The scripted model: replies from a file instead of a provider.

``scripted:echo`` answers with the last user text. ``scripted:FILE`` plays a JSON file, one reply
for each model request of a session, retries included::

    {"replies": [{"text": "…", "reasoning": "…",
                  "tool_calls": [{"name": "…", "arguments": {}}],
                  "finish": "stop|length|content_filter",
                  "delay_ms": 0, "chunks": 3,
                  "error": {"status": 429, "code": "rate_limit", "retry_after_ms": 500}}],
     "then": "repeat|echo|error"}

``then`` says what comes after the last reply: that one again, the last user text, or an error.
Without it, an error: a script that is too short should be noticed. A reply with an ``error``
streams what else it holds and then fails. Everything follows from the script, the session and
the request's number, call ids too; usage is counted, not measured: four bytes are a token.

It is for tests, documentation and demonstrations, and passes the contract of the real adapters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from postroom.domain.ids import SessionId
from postroom.domain.message import Block, Finish, Reasoning, Text, ToolCall, Usage
from postroom.errors import ConfigError, ModelError
from postroom.models.chat import CHAT, body_of
from postroom.models.failures import kind_of
from postroom.models.media import text_with_lines
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.model import (
    CallDelta,
    DeltaSink,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
)

Then: TypeAlias = Literal["repeat", "echo", "error"]
BYTES_PER_TOKEN = 4


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ScriptedCall(_Strict, frozen=True):
    """``arguments`` as an object, or as text where the text itself is the point (broken JSON)."""

    name: str
    arguments: dict[str, object] | str = {}


class ScriptedError(_Strict, frozen=True):
    """At least one of ``status`` and ``code`` is given; together they make the error's kind."""

    status: int | None = None
    code: str | None = None
    retry_after_ms: int | None = None


class ScriptedReply(_Strict, frozen=True):
    """``finish`` None: ``tool_calls`` where there are some, else ``stop``. ``chunks``: how many
    deltas the text comes in; a text shorter than that comes letter by letter.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    finish: Literal["stop", "length", "content_filter"] | None = None
    delay_ms: int = 0
    chunks: int = 1
    error: ScriptedError | None = None


class Script(_Strict, frozen=True):
    replies: tuple[ScriptedReply, ...] = ()
    then: Then = "error"


def open_script(
    ref: str, name: str, *, window: int | None = None, clock: Clock | None = None
) -> ScriptedModel:
    """``name`` is ``echo`` or the path of a script.

    Raises:
        ConfigError: the file cannot be read, or is no script; the message names the reply and
            the field.
    """
    if name == "echo":
        script = Script(then="echo")
    else:
        try:
            script = parse_script(Path(name).expanduser().read_bytes(), name)
        except OSError as error:
            raise ConfigError(f"cannot read the script {name}: {error.strerror}") from error
    return ScriptedModel(ref, script, window=window, clock=clock)


def parse_script(source: bytes | str | Mapping[str, object], name: str = "script") -> Script:
    """Reads a script from JSON, or from its value. ``name`` is what errors call it.

    Raises:
        ConfigError: it is no script; the message names the reply (from 1) and the field.
    """
    try:
        if isinstance(source, bytes | str):
            script = msgspec.json.decode(source, type=Script)
        else:
            script = msgspec.convert(source, Script)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_located(str(error))}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    for number, reply in enumerate(script.replies, 1):
        wrong = _wrong(reply)
        if wrong is not None:
            raise ConfigError(f"{name}: reply {number}: {wrong}")
    if script.then == "repeat" and not script.replies:
        raise ConfigError(f"{name}: then: there is no reply to repeat")
    return script


class ScriptedModel:
    """Plays a `Script`. ``clock`` waits out ``delay_ms`` (None: the system's)."""

    def __init__(
        self,
        ref: str,
        script: Script,
        *,
        window: int | None = None,
        accepts: frozenset[str] = frozenset(),
        clock: Clock | None = None,
    ) -> None:
        self._ref = ref
        self._name = ref.partition(":")[2] or ref
        self._script = script
        self._window = window
        self._accepts = accepts
        self._clock: Clock = clock or SystemClock()

    @property
    def ref(self) -> str:
        return self._ref

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def accepts(self) -> frozenset[str]:
        return self._accepts

    def render(self, request: ModelRequest) -> bytes:
        """As the real adapters would send it."""
        return body_of(self._name, CHAT, self._accepts, request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        scripted = self._reply(request)
        if scripted.delay_ms:
            await self._clock.sleep_ms(scripted.delay_ms)
        content = _play(scripted, request, on_delta)
        if scripted.error is not None:
            raise self._failure(scripted.error)
        finish: Finish = scripted.finish or "stop"
        if finish == "stop" and scripted.tool_calls:
            finish = "tool_calls"
        return Reply(content, finish, self._usage(request, scripted), self._name)

    async def aclose(self) -> None:
        pass

    def _reply(self, request: ModelRequest) -> ScriptedReply:
        replies = self._script.replies
        if request.number <= len(replies):
            return replies[request.number - 1]
        match self._script.then:
            case "repeat":
                return replies[-1]
            case "echo":
                return ScriptedReply(_last_user_text(request))
            case "error":
                raise ModelError(
                    f"the script {self._name} has {len(replies)} replies,"
                    f" and this is request {request.number}",
                    kind="bad_request",
                    hint='"then" in the script says what comes after them',
                )

    def _failure(self, error: ScriptedError) -> ModelError:
        status, code = error.status, error.code
        said = " ".join(str(word) for word in (status, code) if word is not None)
        return ModelError(
            f"{self._ref} answered {said}",
            kind=kind_of(status, code, None, ""),
            status=status,
            retry_after_ms=error.retry_after_ms,
        )

    def _usage(self, request: ModelRequest, scripted: ScriptedReply) -> Usage:
        said = scripted.reasoning + scripted.text
        said += "".join([call.name + _arguments(call) for call in scripted.tool_calls])
        return Usage(
            input_tokens=_tokens(len(self.render(request))),
            output_tokens=_tokens(_size(said)),
            reasoning_tokens=_tokens(_size(scripted.reasoning)),
        )


def _play(scripted: ScriptedReply, request: ModelRequest, on_delta: DeltaSink) -> tuple[Block, ...]:
    content: list[Block] = []
    if scripted.reasoning:
        on_delta(ReasoningDelta(scripted.reasoning))
        content.append(Reasoning(scripted.reasoning))
    if scripted.text:
        for piece in _pieces(scripted.text, scripted.chunks):
            on_delta(TextDelta(piece))
        content.append(Text(scripted.text))
    for index, call in enumerate(scripted.tool_calls):
        on_delta(CallDelta(call.name))
        call_id = _call_id(request.session_id, request.number, index)
        content.append(ToolCall(call_id, call.name, _arguments(call)))
    return tuple(content)


def _pieces(text: str, count: int) -> list[str]:
    """The text in that many parts, as even as can be."""
    count = min(count, len(text))
    bounds = [len(text) * i // count for i in range(count + 1)]
    return [text[a:b] for a, b in pairwise(bounds)]


def _last_user_text(request: ModelRequest) -> str:
    for message in reversed(request.messages):
        if message.role == "user":
            return text_with_lines(message.content)
    return ""


def _call_id(session_id: SessionId, number: int, index: int) -> str:
    """The same for the same call of the same session, and no other."""
    name = f"{session_id} {number} {index}".encode()
    return "call_" + hashlib.sha256(name).hexdigest()[:24]


def _arguments(call: ScriptedCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    return msgspec.json.encode(call.arguments).decode()


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


# ---- what is wrong with a script ----

_PLACE = re.compile(r"replies\[(\d+)\]\.?")


def _located(message: str) -> str:
    """The decoder's message with its place in front, and replies counted from 1."""
    reason, _, where = message.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    place = _PLACE.match(where)
    if place is not None:
        field = where[place.end() :]
        where = f"reply {int(place.group(1)) + 1}" + (f": {field}" if field else "")
    return f"{where}: {reason}" if where else reason


def _wrong(reply: ScriptedReply) -> str | None:
    if reply.chunks < 1:
        return "chunks: at least 1"
    if reply.delay_ms < 0:
        return "delay_ms: at least 0"
    for index, call in enumerate(reply.tool_calls):
        if not call.name:
            return f"tool_calls[{index}].name: there is no name"
    error = reply.error
    if error is None:
        return None
    if error.status is None and not error.code:
        return "error: a status or a code is needed"
    if error.status is not None and not 300 <= error.status < 600:
        return "error.status: from 300 to 599"
    if error.retry_after_ms is not None and error.retry_after_ms < 0:
        return "error.retry_after_ms: at least 0"
    return None
