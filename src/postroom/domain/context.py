"""What the model sees: a fold over the log.

`fold` keeps the history in order, in provider-neutral messages; an adapter turns each of them
into its provider's JSON and remembers the bytes on the message (`ContextMessage.encoded`), so
that a message is encoded once, not once a turn. Nothing here is stored: the same log always
gives the same context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from postroom.domain.event import (
    AssistantReply,
    DeliveryQueued,
    Event,
    HistoryCompacted,
    HistoryReplaced,
    ToolResult,
    UserMessage,
)
from postroom.domain.ids import CallId, DeliveryId
from postroom.domain.message import Block, Source, Text, ToolCall
from postroom.domain.turn import UNKNOWN

LOST = "The beginning of this conversation is lost."

Role: TypeAlias = Literal["user", "assistant", "tool"]

HISTORY_TYPES = frozenset(
    {
        UserMessage.TYPE,
        AssistantReply.TYPE,
        ToolResult.TYPE,
        HistoryCompacted.TYPE,
        DeliveryQueued.TYPE,
        HistoryReplaced.TYPE,
    }
)


class ContextMessage:
    """One entry of the history. ``call_id`` and ``error`` are set for role ``tool`` only.

    ``encoded`` is an adapter's memory: its own dialect name to the bytes it sends.
    """

    __slots__ = ("call_id", "content", "encoded", "error", "role", "seq")

    def __init__(
        self,
        role: Role,
        content: tuple[Block, ...],
        seq: int,
        call_id: CallId | None = None,
        error: bool = False,
    ) -> None:
        self.role: Role = role
        self.content = content
        self.seq = seq
        self.call_id = call_id
        self.error = error
        self.encoded: tuple[str, bytes] | None = None

    def __repr__(self) -> str:
        return f"ContextMessage({self.role}, seq={self.seq}, {self.content!r})"


class _Said(msgspec.Struct, frozen=True, rename="camel", gc=False):
    content: tuple[Block, ...]
    source: Source | None = None


class _SaidData(msgspec.Struct, frozen=True, gc=False):
    message: _Said


_SAID = (UserMessage.TYPE, AssistantReply.TYPE)
_decode_said = msgspec.json.Decoder(_SaidData).decode


class Context:
    """The active history of one session, grown event by event.

    ``call_ids`` are those of every call taken, ``bytes`` the size of the events: about what it costs
    in memory, several times over.
    """

    __slots__ = ("_open", "_said", "bytes", "call_ids", "messages", "seq")

    def __init__(self) -> None:
        self.call_ids: set[str] = set()
        self.bytes = 0
        self.messages: list[ContextMessage] = []
        self.seq = 0
        self._open: dict[str, None] = {}
        self._said: dict[DeliveryId, tuple[ContextMessage, int]] = {}

    def add(self, event: Event) -> None:
        """Takes the next event of the log. Events that are no history change nothing.

        ``seq`` is that of the last history event taken.
        """
        if event.type not in HISTORY_TYPES or event.seq <= self.seq:
            return
        if event.type in _SAID:
            # Thousands of these are read when a long session is opened: only what is shown is decoded.
            self._take(event)
            said = _decode_said(event.raw).message
            self._close(event.seq)
            if event.type == UserMessage.TYPE:
                content = _as_seen(said.content, said.source)
                self.messages.append(ContextMessage("user", content, event.seq))
                return
            if said.content:
                self.messages.append(ContextMessage("assistant", said.content, event.seq))
            for block in said.content:
                if isinstance(block, ToolCall):
                    self._open[block.call_id] = None
                    self.call_ids.add(block.call_id)
            return
        data = event.data
        if isinstance(data, ToolResult) and data.late:
            return
        self._take(event)
        if isinstance(data, ToolResult):
            # An orphan (its call is not in the history) is left out: no provider takes it.
            if data.call_id in self._open:
                del self._open[data.call_id]
                self.messages.append(
                    ContextMessage(
                        "tool", data.content, event.seq, data.call_id, data.outcome != "ok"
                    )
                )
        elif isinstance(data, DeliveryQueued):
            if data.policy == "persist":
                self._say(data, event.seq)
        elif isinstance(data, HistoryReplaced):
            self._replace(data)
        elif isinstance(data, HistoryCompacted):
            self._close(event.seq)
            kept = [m for m in self.messages if not data.from_seq <= m.seq <= data.to_seq]
            summary = Text(f"Summary of the conversation before this point:\n\n{data.summary}")
            at = next((i for i, m in enumerate(kept) if m.seq > data.to_seq), len(kept))
            kept.insert(at, ContextMessage("user", (summary,), min(data.to_seq, event.seq)))
            self.messages = _paired(kept)

    def _say(self, said: DeliveryQueued, seq: int) -> None:
        """Said by the assistant: with its calls, where some have no result yet, as they stay paired."""
        text = Text(said.text)
        message = self.messages[-1] if self.messages else None
        if self._open:
            message = next(m for m in reversed(self.messages) if m.role == "assistant")
            calls = [i for i, b in enumerate(message.content) if isinstance(b, ToolCall)]
            at = calls[0]
            message.content = (*message.content[:at], text, *message.content[at:])
            message.encoded = None
        else:
            at = 0
            message = ContextMessage("assistant", (text,), seq)
            self.messages.append(message)
        self._said[said.delivery_id] = (message, at)

    def _replace(self, replaced: HistoryReplaced) -> None:
        found = self._said.pop(replaced.delivery_id, None)
        if found is not None:
            message, at = found
            text = Text(replaced.text)
            message.content = (*message.content[:at], text, *message.content[at + 1 :])
            message.encoded = None

    def _take(self, event: Event) -> None:
        self.seq = event.seq
        self.bytes += len(event.raw)

    def _close(self, seq: int) -> None:
        """Pairs calls whose results the log lacks; a sound log never needs it."""
        for call_id in self._open:
            self.messages.append(
                ContextMessage("tool", (Text(UNKNOWN),), seq, CallId(call_id), True)
            )
        self._open = {}

    def view(self) -> list[ContextMessage]:
        """The messages of a request made now: a person's first, every call paired."""
        self._close(self.seq)
        if self.messages and self.messages[0].role != "user":
            self.messages.insert(0, ContextMessage("user", (Text(LOST),), 0))
        return self.messages


def _paired(messages: list[ContextMessage]) -> list[ContextMessage]:
    """Every call with its result right behind it, should a compaction have come between them."""
    results = {m.call_id: m for m in messages if m.role == "tool"}
    out: list[ContextMessage] = []
    for message in messages:
        if message.role == "tool":
            continue
        out.append(message)
        for block in message.content:
            if isinstance(block, ToolCall):
                call_id = CallId(block.call_id)
                unknown = ContextMessage("tool", (Text(UNKNOWN),), message.seq, call_id, True)
                out.append(results.get(call_id, unknown))
    return out


def fold(events: Iterable[Event]) -> Context:
    context = Context()
    for event in events:
        context.add(event)
    return context


def _as_seen(content: tuple[Block, ...], source: Source | None) -> tuple[Block, ...]:
    """A message's content as the model gets it: other people's text is marked as theirs."""
    if source is None or (source.sender is None and source.sender_id is None):
        return content
    who = source.sender or "someone"
    if source.sender_id is not None:
        who += f" (id {source.sender_id})"
    return (Text(f"[message from {who}, not the operator]\n"), *content)
