"""Keeps sessions' contexts in memory between turns, bounded by bytes; the log is the truth."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from postroom.domain.context import Context, ContextMessage
from postroom.domain.event import Event
from postroom.domain.ids import SessionId
from postroom.domain.message import Media
from postroom.ports.artifact import ArtifactStore
from postroom.ports.model import Model
from postroom.ports.store import Store
from postroom.scripts.drive import Progress
from postroom.scripts.log import read_history


class Contexts:
    """One context a session, the least used dropped first. ``bytes_max`` bounds an estimate."""

    def __init__(self, store: Store, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[SessionId, tuple[Context, int]] = OrderedDict()

    async def open(self, session_id: SessionId) -> Context:
        """The context as it was left here last, or folded from the log."""
        kept = self._kept.pop(session_id, None)
        if kept is not None:
            self._bytes -= kept[1]
            return kept[0]
        context = Context()
        await self._read(context, session_id)
        return context

    async def catch_up(self, context: Context, session_id: SessionId, progress: Progress) -> None:
        """Brings a context to where the drive stands: by the answer's events, or by the log."""
        if progress.before > context.seq:
            await self._read(context, session_id)
        for event in progress.events:
            context.add(event)
        if progress.history > context.seq:
            await self._read(context, session_id)

    async def _read(self, context: Context, session_id: SessionId) -> None:
        grow(context, await self._store.read(read_history, session_id, context.seq))

    def keep(self, session_id: SessionId, context: Context) -> None:
        size = _FACTOR * context.bytes + _ENTRY_BYTES * len(context.messages)
        self._kept[session_id] = (context, size)
        self._bytes += size
        while self._bytes > self._bytes_max and self._kept:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped

    def drop(self, session_id: SessionId) -> None:
        kept = self._kept.pop(session_id, None)
        if kept is not None:
            self._bytes -= kept[1]


def grow(context: Context, events: Sequence[Event]) -> None:
    """Adds events. A great many at once make only what is kept: collecting would find nothing."""
    collecting = len(events) > _MANY and gc.isenabled()
    if collecting:
        gc.disable()
    try:
        for event in events:
            context.add(event)
    finally:
        if collecting:
            gc.enable()


_MANY = 500


# An entry is held decoded and, once sent, encoded; around both stand Python's own objects.
_FACTOR = 2
_ENTRY_BYTES = 400


async def load_media(
    messages: Iterable[ContextMessage], model: Model, artifacts: ArtifactStore
) -> dict[str, bytes]:
    """The bytes of every artifact in the history that the model takes as such."""
    accepts = model.accepts
    if not accepts:
        return {}
    media: dict[str, bytes] = {}
    for message in messages:
        for block in message.content:
            if not isinstance(block, Media) or block.artifact in media:
                continue
            if block.media_type in accepts:
                media[block.artifact] = await artifacts.get(block.artifact)
    return media
