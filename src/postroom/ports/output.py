"""How tools, output modules and schedules speak: through the outbox, and nothing else.

None of them touches the log, the outbox, a route or a channel. What they send goes where the session's
deliveries go; no parameter can change that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Protocol, TypeAlias, TypedDict, Unpack

import msgspec

from postroom.domain.event import HistoryPolicy
from postroom.domain.ids import DeliveryId, SessionId

# A path in the workspace, the bytes themselves, or the id of an artifact of this session.
Media: TypeAlias = PurePath | bytes | str


class Sent(msgspec.Struct, frozen=True):
    """It is in the outbox under a stable id. Whether it arrives is the outbox's to see to.

    ``status`` is ``queued``, or ``unrouted`` where nothing is attached to the session. As text it is
    what a tool tells the model.
    """

    delivery_id: DeliveryId
    status: str

    def __str__(self) -> str:
        if self.status == "unrouted":
            return (
                f"Kept as {self.delivery_id}: nobody is attached to this session, so it was not"
                " delivered. Do not send it again."
            )
        return f"Queued as {self.delivery_id}. It is delivered from there: do not send it again."


class TextOptions(TypedDict, total=False):
    """``history`` is ``persist`` (the default: the model sees it from its next request on),
    ``model_hidden`` (people and exports do), or ``transient`` (nobody does).

    ``history_text`` is what the history keeps in place of what is sent, ``failure_history_text``
    what takes its place should the delivery fail. ``metadata`` is kept with the event and addresses
    nothing.
    """

    history: HistoryPolicy
    history_text: str | None
    failure_history_text: str | None
    metadata: Mapping[str, str] | None


class MediaOptions(TextOptions, total=False):
    """``summary`` describes the artifact, ``name`` is its file name for people. What writes history
    must bring its ``history_text``.
    """

    caption: str
    summary: str | None
    name: str | None


class Output(Protocol):
    """What may be said in one call of a tool.

    Raises (all):
        InputError: what is sent is empty, or breaks the rules of its options; nothing was written.
        ToolFailure: the file is not there, or may not be read.
        StaleClaim: the turn is over.
    """

    async def send_text(self, text: str, **options: Unpack[TextOptions]) -> Sent: ...

    async def send_image(self, media: Media, **options: Unpack[MediaOptions]) -> Sent: ...

    async def send_audio(self, media: Media, **options: Unpack[MediaOptions]) -> Sent: ...

    async def send_video(self, media: Media, **options: Unpack[MediaOptions]) -> Sent: ...

    async def send_file(self, media: Media, **options: Unpack[MediaOptions]) -> Sent: ...

    async def progress(self, text: str) -> Sent:
        """A line on how far the work is, where the channel shows such; never history."""
        ...

    async def notice(self, text: str) -> Sent:
        """Something the host says, not the assistant; never history."""
        ...

    async def send_to(self, session_id: SessionId, text: str) -> Sent:
        """Says something in another session of the same owner; this one's routes are untouched.

        Raises:
            NotYours: that session belongs to another principal.
            UnknownSession: there is no such session.
        """
        ...
