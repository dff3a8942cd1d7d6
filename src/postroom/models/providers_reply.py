"""What the provider library streams back, as deltas and a `Reply`.

The library's finish reason is not enough: it reports ``stop`` for a stream that ended without
one. What the provider said itself stands in its details, and a reply without it is no reply.
Calls are taken from the reply as a whole, after its finish reason is known: one that was cut off
keeps its arguments as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from pydantic_ai.messages import (
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
)

from postroom.domain.message import Block, Finish, Reasoning, Text, ToolCall, Usage
from postroom.models.providers_history import seal
from postroom.ports.model import CallDelta, Delta, ReasoningDelta, Reply, TextDelta

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponseStreamEvent
    from pydantic_ai.models import StreamedResponse

# What a provider calls a prompt it will not answer; it gives no finish reason then.
BLOCKED = "block_reason"


class BrokenOff(Exception):
    """The provider ended the reply as a failure of its own; the text is its reason."""


def said(stream: StreamedResponse) -> str | None:
    """The provider's own finish reason; None as long as it has given none."""
    details = stream.provider_details or {}
    reason = details.get("finish_reason") or details.get(BLOCKED)
    return str(reason) if reason else None


def delta_of(event: ModelResponseStreamEvent) -> Delta | None:
    """What a watcher is told of an event; None: nothing."""
    match event:
        case PartStartEvent(part=TextPart(content=text)) if text:
            return TextDelta(text)
        case PartStartEvent(part=ThinkingPart(content=text)) if text:
            return ReasoningDelta(text)
        case PartStartEvent(part=ToolCallPart(tool_name=name)):
            return CallDelta(name)
        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)) if text:
            return TextDelta(text)
        case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=text)) if text:
            return ReasoningDelta(text)
        case _:
            return None


def reply_of(response: ModelResponse, provider: str, name: str, request_id: str | None) -> Reply:
    """The whole reply; only once the provider has said why it ended.

    Raises:
        BrokenOff: it ended because the provider failed.
    """
    content: list[Block] = []
    calls = 0
    for part in response.parts:
        details: Mapping[str, object] = getattr(part, "provider_details", None) or {}
        signature = details.get("thought_signature")
        if isinstance(part, ThinkingPart):
            content += _reasoning(part, provider, signature)
            continue
        if not isinstance(part, TextPart | ToolCallPart):
            continue
        if isinstance(signature, str):
            content.append(Reasoning("", seal(provider, "next", signature)))
        if isinstance(part, TextPart):
            if part.content:
                content.append(Text(part.content))
        else:
            calls += 1
            content.append(ToolCall(part.tool_call_id, part.tool_name, _arguments(part)))
    return Reply(
        tuple(content),
        _finish(response, calls),
        _usage(response),
        response.model_name or name,
        request_id or response.provider_response_id,
    )


def _reasoning(part: ThinkingPart, provider: str, signature: object) -> list[Block]:
    own = signature if isinstance(signature, str) else part.signature
    if not own:
        return [Reasoning(part.content)] if part.content else []
    redacted = part.id in ("redacted_thinking", "redacted_content")
    return [Reasoning(part.content, seal(provider, "redacted" if redacted else "thinking", own))]


def _arguments(part: ToolCallPart) -> str:
    arguments = part.args
    if isinstance(arguments, str):
        return arguments or "{}"
    return msgspec.json.encode(arguments or {}).decode()


def _finish(response: ModelResponse, calls: int) -> Finish:
    match response.finish_reason:
        case "length":
            return "length"
        case "content_filter":
            return "content_filter"
        case "error":
            details = response.provider_details or {}
            raise BrokenOff(str(details.get("finish_reason", "error")))
        case _:
            # Some say "stop" beside calls, some name a reason that the library does not know.
            return "tool_calls" if calls else "stop"


def _usage(response: ModelResponse) -> Usage:
    usage = response.usage
    return Usage(
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        getattr(usage, "output_reasoning_tokens", 0) or usage.details.get("thoughts_tokens", 0),
    )
