"""What the model sees: a fold over the log.

`fold` keeps the history in order, in provider-neutral messages; an adapter turns each of them
into its provider's JSON and remembers the bytes on the message (`ContextMessage.encoded`), so
that a message is encoded once, not once a turn. Nothing here is stored: the same log always
gives the same context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from postroom.domain.event import (
    AssistantReply,
    Event,
    HistoryCompacted,
    ToolResult,
    UserMessage,
)
from postroom.domain.ids import CallId
from postroom.domain.message import Block, Message, Text, ToolCall
from postroom.domain.turn import UNKNOWN

Role: TypeAlias = Literal["user", "assistant", "tool"]

HISTORY_TYPES = frozenset(
    {UserMessage.TYPE, AssistantReply.TYPE, ToolResult.TYPE, HistoryCompacted.TYPE}
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


class Context:
    """The active history of one session, grown event by event.

    ``call_ids`` are those of every call taken, ``bytes`` the size of the events: about what it costs in memory, several times over.
    """

    __slots__ = ("_open", "bytes", "call_ids", "messages", "seq")

    def __init__(self) -> None:
        self.call_ids: set[str] = set()
        self.bytes = 0
        self.messages: list[ContextMessage] = []
        self.seq = 0
        self._open: dict[str, None] = {}

    def add(self, event: Event) -> None:
        """Takes the next event of the log. Events that are no history change nothing.

        ``seq`` is that of the last history event taken.
        """
        if event.type not in HISTORY_TYPES or event.seq <= self.seq:
            return
        data = event.data
        if isinstance(data, ToolResult) and data.late:
            return
        self.seq = event.seq
        self.bytes += len(event.raw)
        if isinstance(data, UserMessage):
            self._close(event.seq)
            self.messages.append(ContextMessage("user", _as_seen(data.message), event.seq))
        elif isinstance(data, AssistantReply):
            self._close(event.seq)
            if data.message.content:
                self.messages.append(ContextMessage("assistant", data.message.content, event.seq))
            for block in data.message.content:
                if isinstance(block, ToolCall):
                    self._open[block.call_id] = None
                    self.call_ids.add(block.call_id)
        elif isinstance(data, ToolResult):
            # An orphan (its call is not in the history) is left out: no provider takes it.
            if data.call_id in self._open:
                del self._open[data.call_id]
                self.messages.append(
                    ContextMessage(
                        "tool", data.content, event.seq, data.call_id, data.outcome != "ok"
                    )
                )
        elif isinstance(data, HistoryCompacted):
            kept = [m for m in self.messages if not data.from_seq <= m.seq <= data.to_seq]
            summary = Text(f"Summary of the conversation before this point:\n\n{data.summary}")
            at = next((i for i, m in enumerate(kept) if m.seq > data.to_seq), len(kept))
            kept.insert(at, ContextMessage("user", (summary,), data.to_seq))
            self.messages = kept

    def _close(self, seq: int) -> None:
        """Pairs calls whose results the log lacks; a sound log never needs it."""
        for call_id in self._open:
            self.messages.append(
                ContextMessage("tool", (Text(UNKNOWN),), seq, CallId(call_id), True)
            )
        self._open = {}

    def view(self) -> list[ContextMessage]:
        """The messages of a request made now, every call paired."""
        self._close(self.seq)
        return self.messages


def fold(events: Iterable[Event]) -> Context:
    context = Context()
    for event in events:
        context.add(event)
    return context


def _as_seen(message: Message) -> tuple[Block, ...]:
    """A message's content as the model gets it: other people's text is marked as theirs."""
    source = message.source
    if source.sender is None and source.sender_id is None:
        return message.content
    who = source.sender or "someone"
    if source.sender_id is not None:
        who += f" (id {source.sender_id})"
    return (Text(f"[message from {who}, not the operator]\n"), *message.content)
