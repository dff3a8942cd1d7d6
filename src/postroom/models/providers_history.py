"""A request in the provider library's own messages.

Pure. The library turns them into each provider's JSON; what it is given here is what every one
of them takes:

- Messages of one side in a row are one message: user messages and the results before them.
- Results stand before anything else of their message, which the order of the history gives.
- A conversation begins and ends with the user's side.
- Text without a letter in it is left out, as are messages that were only that.
- Call ids are of 1 to 64 letters, digits, ``_`` and ``-``, and no id is used twice; names are of
  such characters too. What another model once made up must not break every later request.
- Arguments that are no JSON object (a call cut off by the token limit) are wrapped in one.
- Reasoning goes back only with its seal, and only to the provider that set it.

A *seal* is what a provider signs its reasoning with: ``PROVIDER:KIND:SIGNATURE``, kept in
`Reasoning.signature`. The kinds: ``thinking`` (of this text), ``redacted`` (of text that is not
shown) and ``next`` (of the block that follows).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from pydantic_ai.messages import (
    BinaryContent,
    InstructionPart,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition

from postroom.domain.context import ContextMessage
from postroom.domain.message import Block, Media, Reasoning, Text, ToolCall
from postroom.models.media import line_for, text_with_lines
from postroom.ports.model import ModelRequest as Request

SealKind = Literal["thinking", "redacted", "next"]

# Said for the user where a provider needs the user's side to speak and the history has nothing.
BEGIN = "(the conversation goes on)"
GO_ON = "Go on."
NOTHING = "(no text)"
NO_OUTPUT = "(no output)"

_decode = msgspec.json.Decoder().decode
_decode_object = msgspec.json.Decoder(dict[str, object]).decode


def seal(provider: str, kind: SealKind, signature: str) -> str:
    return f"{provider}:{kind}:{signature}"


def parameters_of(request: Request) -> ModelRequestParameters:
    """The system text and the tools."""
    system = sound(request.system)
    return ModelRequestParameters(
        function_tools=[
            ToolDefinition(
                name=spec.name,
                description=sound(spec.description),
                parameters_json_schema=_decode_object(spec.parameters),
            )
            for spec in request.tools
        ],
        instruction_parts=[InstructionPart(content=system)] if system.strip() else [],
    )


def messages_of(
    request: Request, *, provider: str, accepts: frozenset[str], seals_back: bool
) -> list[ModelMessage]:
    """The history. ``seals_back`` False: no reasoning is sent back, sealed or not."""
    history = _History(provider, accepts, seals_back, request.media)
    for message in request.messages:
        history.add(message)
    return history.done()


class _History:
    def __init__(
        self,
        provider: str,
        accepts: frozenset[str],
        seals_back: bool,
        media: Mapping[str, bytes],
    ) -> None:
        self._provider = provider
        self._accepts = accepts
        self._seals_back = seals_back
        self._media = media
        self._messages: list[ModelMessage] = []
        self._ids: set[str] = set()
        # The calls of the last reply, by the id the history knows them by: id as sent, and name.
        self._calls: dict[str, tuple[str, str]] = {}

    def add(self, message: ContextMessage) -> None:
        if message.role == "user":
            self._ask(UserPromptPart(self._shown(message.content) or NOTHING))
        elif message.role == "tool":
            self._ask(self._result(message))
        else:
            self._calls = {}
            parts = self._said(message)
            if parts:
                self._answer(parts)

    def done(self) -> list[ModelMessage]:
        messages = self._messages
        if not messages or isinstance(messages[0], ModelResponse):
            messages.insert(0, ModelRequest([UserPromptPart(BEGIN)]))
        if isinstance(messages[-1], ModelResponse):
            messages.append(ModelRequest([UserPromptPart(GO_ON)]))
        return messages

    def _ask(self, part: ModelRequestPart) -> None:
        last = self._messages[-1] if self._messages else None
        if isinstance(last, ModelRequest):
            last.parts = [*last.parts, part]
        else:
            self._messages.append(ModelRequest([part]))

    def _answer(self, parts: list[ModelResponsePart]) -> None:
        last = self._messages[-1] if self._messages else None
        if isinstance(last, ModelResponse):
            last.parts = [*last.parts, *parts]
        else:
            self._messages.append(ModelResponse(parts))

    def _shown(self, content: Sequence[Block]) -> str | list[str | BinaryContent]:
        """Text as it stands if there is nothing else; empty if there is nothing at all."""
        items: list[str | BinaryContent] = []
        for block in content:
            if isinstance(block, Text):
                if block.text.strip():
                    items.append(sound(block.text))
            elif isinstance(block, Media):
                items.append(self._file(block))
        if all(isinstance(item, str) for item in items):
            return sound(text_with_lines(content)) if items else ""
        return items

    def _file(self, block: Media) -> str | BinaryContent:
        data = self._media.get(block.artifact)
        if data is None or block.media_type not in self._accepts:
            return line_for(block)
        # Its name is its hash: the library would work out one of its own from all the bytes.
        name = block.artifact.removeprefix("sha256:")[:12]
        return BinaryContent(data=data, media_type=block.media_type, identifier=name)

    def _result(self, message: ContextMessage) -> ToolReturnPart:
        known = message.call_id or ""
        call_id, name = self._calls.get(known) or (_id(known), "unknown")
        content: object
        if message.error:
            # An error is told in text only: files beside it are refused.
            content = sound(text_with_lines(message.content))
        else:
            content = self._shown(message.content)
        return ToolReturnPart(
            name,
            content or NO_OUTPUT,
            call_id,
            outcome="failed" if message.error else "success",
        )

    def _said(self, message: ContextMessage) -> list[ModelResponsePart]:
        parts: list[ModelResponsePart] = []
        for index, block in enumerate(message.content):
            if isinstance(block, Text):
                if block.text.strip():
                    parts.append(TextPart(sound(block.text)))
            elif isinstance(block, Reasoning):
                thought = self._thought(block)
                if thought is not None:
                    parts.append(thought)
            elif isinstance(block, ToolCall):
                parts.append(self._call(block, f"{message.seq} {index}"))
            else:
                parts.append(TextPart(line_for(block)))
        # A seal alone is no message.
        return parts if any(not isinstance(part, ThinkingPart) for part in parts) else []

    def _call(self, call: ToolCall, place: str) -> ToolCallPart:
        call_id = _id(call.call_id)
        if call_id in self._ids:
            call_id = _id(f"{call.call_id} {place}")
        self._ids.add(call_id)
        name = _name(call.name)
        self._calls[call.call_id] = (call_id, name)
        return ToolCallPart(name, _arguments(call.arguments), call_id)

    def _thought(self, block: Reasoning) -> ThinkingPart | None:
        if not self._seals_back or block.signature is None:
            return None
        provider, _, rest = block.signature.partition(":")
        kind, _, signature = rest.partition(":")
        if provider != self._provider or not signature:
            return None
        if kind == "redacted":
            return ThinkingPart(
                "", id="redacted_thinking", signature=signature, provider_name=provider
            )
        if kind == "thinking" and provider == "google":
            # There a thought's own signature is a detail; `signature` is that of the next part.
            details: dict[str, object] = {"thought_signature": signature}
            return ThinkingPart(sound(block.text), provider_name=provider, provider_details=details)
        return ThinkingPart(sound(block.text), signature=signature, provider_name=provider)


_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def _id(call_id: str) -> str:
    if _ID.match(call_id):
        return call_id
    return "call_" + hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unknown"


def _arguments(arguments: str) -> dict[str, object]:
    try:
        value = _decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        value = None
    if isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    return {"invalid_json": sound(arguments)}


def sound(text: str) -> str:
    """Half a surrogate pair, which no encoding has, becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
