"""A Chat Completions stream, chunk by chunk, put together to a `Reply`.

No I/O and no framing: it takes the data of each event. Servers differ in what they leave out and
what they add; what is known of that stands here, beside the field it concerns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from postroom import mint
from postroom.domain.message import Block, Finish, Reasoning, Text, ToolCall, Usage
from postroom.models.failures import Answer, read_error
from postroom.ports.model import CallDelta, DeltaSink, ReasoningDelta, Reply, TextDelta


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, object] | None = None


class _Call(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Part(msgspec.Struct, gc=False):
    """Mistral sends content as parts where the model thinks aloud."""

    type: str | None = None
    text: str | None = None
    thinking: list[_Part] | str | None = None


class _Delta(msgspec.Struct, gc=False):
    """``reasoning_content`` is DeepSeek's name, vLLM's and llama.cpp's; ``reasoning`` that of
    OpenRouter, Groq, Together and Ollama.
    """

    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct, gc=False):
    """``message`` instead of ``delta``: a whole completion, from a server that does not stream."""

    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    """``prompt_cache_hit_tokens`` is DeepSeek's name for what others give in the details."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    prompt_cache_hit_tokens: int | None = None


class _Chunk(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Chunk).decode

# Anything else counts as "stop"; "error" and DeepSeek's "insufficient_system_resource" are errors.
_FINISH: dict[str, Finish] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "content_filter": "content_filter",
}
_BROKEN_OFF = frozenset({"error", "insufficient_system_resource"})


class StreamError(Exception):
    """The server reported an error inside the stream, or sent what cannot be read."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.message)
        self.answer = answer


class _OpenCall:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []


class Completion:
    """The reply so far. ``finished``: its finish reason has come, so it is whole."""

    __slots__ = (
        "_calls",
        "_finish",
        "_half",
        "_id",
        "_kind",
        "_model",
        "_pieces",
        "_reasoning",
        "_refused",
        "_sink",
        "_text",
        "_usage",
        "events",
    )

    def __init__(self, on_delta: DeltaSink) -> None:
        self._sink = on_delta
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _OpenCall] = {}
        self._finish: str | None = None
        self._refused = False
        self._usage: _Usage | None = None
        self._id: str | None = None
        self._model: str | None = None
        self._half = ""  # the first half of a surrogate pair that a server split
        self._kind = ""  # what the pieces not yet passed on are
        self._pieces: list[str] = []
        self.events = 0

    @property
    def finished(self) -> bool:
        return self._finish is not None

    def take(self, events: Sequence[bytes]) -> bool:
        """Adds what these events say and passes it on; True at ``[DONE]``.

        Text that came in one read is passed on as one delta.

        Raises:
            StreamError: the server reports an error, or an event is no chunk.
        """
        try:
            for data in events:
                if data == b"[DONE]":
                    return True
                self.events += 1
                try:
                    chunk = _decode(data)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    chunk = self._decode_slowly(data)
                choices = chunk.choices
                if choices:
                    self._choice(choices[0])
                if chunk.error is not None:
                    raise StreamError(read_error({"error": chunk.error}))
                if chunk.usage is not None:
                    self._usage = chunk.usage
                elif choices is None:
                    self._check_unknown(data)
                if self._id is None:
                    self._id = chunk.id
                    self._model = chunk.model
            return False
        finally:
            self._flush()

    def reply(self, name: str, request_id: str | None) -> Reply:
        """The whole reply; only once it has finished."""
        assert self._finish is not None, "no finish reason has come"
        content: list[Block] = []
        if self._reasoning:
            content.append(Reasoning("".join(self._reasoning)))
        if self._text:
            content.append(Text("".join(self._text)))
        taken: set[str] = set()
        for _, call in sorted(self._calls.items()):
            if not call.name:
                continue
            call_id = call.id
            if not call_id or call_id in taken:
                call_id = mint.call_id()
            taken.add(call_id)
            content.append(ToolCall(call_id, call.name, "".join(call.arguments) or "{}"))
        finish = _FINISH.get(self._finish, "stop")
        if self._refused:
            finish = "content_filter"
        elif finish in ("stop", "tool_calls"):
            # Some servers say "stop" beside calls, some "tool_calls" without one.
            finish = "tool_calls" if taken else "stop"
        return Reply(
            tuple(content), finish, self._counted(), self._model or name, request_id or self._id
        )

    def _counted(self) -> Usage:
        usage = self._usage
        if usage is None:
            return Usage()
        cached = usage.prompt_cache_hit_tokens
        if usage.prompt_tokens_details is not None:
            cached = usage.prompt_tokens_details.cached_tokens or cached
        details = usage.completion_tokens_details
        return Usage(
            usage.prompt_tokens or 0,
            usage.completion_tokens or 0,
            cached or 0,
            (details.reasoning_tokens if details is not None else 0) or 0,
        )

    def _choice(self, choice: _Choice) -> None:
        delta = choice.delta or choice.message
        if delta is not None:
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                self._add("reasoning", thought)
            content = delta.content
            if content:
                if isinstance(content, str):
                    self._add("text", content)
                else:
                    self._parts(content)
            if delta.refusal:
                self._refused = True
                self._add("text", delta.refusal)
            if delta.tool_calls:
                for position, call in enumerate(delta.tool_calls):
                    self._call(call, position if choice.message is not None else None)
            elif delta.function_call is not None:
                self._call(_Call(0, None, delta.function_call), None)
        reason = choice.finish_reason
        if reason:
            if reason in _BROKEN_OFF and self._finish is None:
                raise StreamError(Answer("the server broke the reply off", "server_error"))
            self._finish = reason

    def _parts(self, parts: list[_Part]) -> None:
        for part in parts:
            if part.text:
                self._add("text", part.text)
            thinking = part.thinking
            if isinstance(thinking, str):
                self._add("reasoning", thinking)
            elif thinking:
                self._add("reasoning", "".join([p.text or "" for p in thinking]))

    def _call(self, piece: _Call, position: int | None) -> None:
        """Adds a piece of a call. Its index says which; servers that give none, or the same one
        to all, begin a new call with a new id.
        """
        calls = self._calls
        index = piece.index if piece.index is not None else position
        function = piece.function or _Function()
        if index is None:
            index = max(len(calls) - 1, 0)
        known = calls.get(index)
        if known is not None and piece.id and function.name and known.id not in ("", piece.id):
            same = [at for at, call in calls.items() if call.id == piece.id]
            index = same[0] if same else max(calls) + 1
            known = calls.get(index)
        if known is None:
            known = calls[index] = _OpenCall()
        if piece.id:
            known.id = piece.id
        name = function.name
        # A name may be repeated with each piece, or come in pieces.
        if name and name != known.name:
            if not known.name:
                self._flush()
                self._sink(CallDelta(name))
            known.name += name
        arguments = function.arguments
        if arguments is not None:
            if not isinstance(arguments, str):
                arguments = msgspec.json.encode(arguments).decode()
            known.arguments.append(arguments)

    def _add(self, kind: str, text: str) -> None:
        if kind != self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if not self._pieces:
            return
        text = "".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        if self._kind == "text":
            self._text.append(text)
            self._sink(TextDelta(text))
        else:
            self._reasoning.append(text)
            self._sink(ReasoningDelta(text))

    def _decode_slowly(self, data: bytes) -> _Chunk:
        """Half surrogate pairs, and numbers or nulls where others are usual."""
        try:
            value = json.loads(data)
            chunk = msgspec.convert(value, _Chunk, strict=False)
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise StreamError(
                Answer("the stream holds what is no chunk of a completion", "server_error")
            ) from error
        for choice in chunk.choices or ():
            if choice.delta is not None and isinstance(choice.delta.content, str):
                choice.delta.content = self._whole(choice.delta.content)
        return chunk

    def _whole(self, text: str) -> str:
        text = self._half + text
        self._half = ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _check_unknown(self, data: bytes) -> None:
        """An event with neither choices nor usage: an error in another shape, or nothing."""
        value: dict[str, object] = msgspec.json.decode(data, type=dict[str, object])
        answer = read_error(value)
        if answer.message is not None or value.get("object") == "error":
            raise StreamError(answer)
