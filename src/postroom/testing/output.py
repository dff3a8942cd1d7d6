"""What a tool said, without an outbox: for tests of the tool itself."""

from __future__ import annotations

from typing import Unpack

from postroom import mint
from postroom.domain.ids import SessionId
from postroom.ports.output import Media, MediaOptions, Sent, TextOptions


class HeardOutput:
    """An `Output` that keeps what it is given: (what kind, the text or caption, the media)."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str, Media | None]] = []

    def _hear(self, kind: str, text: str, media: Media | None = None) -> Sent:
        self.said.append((kind, text, media))
        return Sent(mint.delivery_id(), "queued")

    async def send_text(self, text: str, **options: Unpack[TextOptions]) -> Sent:
        return self._hear("text", text)

    async def send_image(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return self._hear("image", options.get("caption", ""), media)

    async def send_audio(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return self._hear("audio", options.get("caption", ""), media)

    async def send_video(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return self._hear("video", options.get("caption", ""), media)

    async def send_file(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return self._hear("file", options.get("caption", ""), media)

    async def progress(self, text: str) -> Sent:
        return self._hear("progress", text)

    async def notice(self, text: str) -> Sent:
        return self._hear("notice", text)

    async def send_to(self, session_id: SessionId, text: str) -> Sent:
        return self._hear(f"to {session_id}", text)
