"""What a tool says while its turn is open: each send is one transaction, fenced by the driver's claim."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import PurePath
from typing import Unpack

import msgspec

from postroom import mint
from postroom.domain.ids import SessionId
from postroom.domain.message import Audio, File, Image, MediaBlock, Video
from postroom.domain.parcel import Kind, Parcel, Piece, checked
from postroom.domain.work import Fence
from postroom.errors import InputError
from postroom.flow.artifacts import SessionArtifacts, record_of
from postroom.ports.artifact import hash_digits
from postroom.ports.output import Media, MediaOptions, Sent, TextOptions
from postroom.ports.store import Store
from postroom.scripts.artifacts import ArtifactRecord
from postroom.scripts.outbox import Handle, send

# Reads a file of a workspace: (workspace or None, path) -> its bytes, confined and bounded.
LoadFile = Callable[[str | None, str], bytes]

_BLOCKS: dict[Kind, type[Image | Audio | Video | File]] = {
    "image": Image,
    "audio": Audio,
    "video": Video,
    "file": File,
}
_FAMILIES = {"image": "image/", "audio": "audio/", "video": "video/"}


class TurnOutput:
    """``source`` names who speaks: the tool. Nothing it is given can name another address."""

    def __init__(
        self,
        store: Store,
        artifacts: SessionArtifacts,
        load_file: LoadFile,
        *,
        session_id: SessionId,
        turn: int,
        fence: Fence,
        owner: str,
        cwd: str | None,
        source: str,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._load_file = load_file
        self._session_id = session_id
        self._turn = turn
        self._fence = fence
        self._owner = owner
        self._cwd = cwd
        self._source = source

    async def send_text(self, text: str, **options: Unpack[TextOptions]) -> Sent:
        return await self._send(self._kept("text", text, options))

    async def send_image(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return await self._send_media("image", media, options)

    async def send_audio(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return await self._send_media("audio", media, options)

    async def send_video(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return await self._send_media("video", media, options)

    async def send_file(self, media: Media, **options: Unpack[MediaOptions]) -> Sent:
        return await self._send_media("file", media, options)

    async def progress(self, text: str) -> Sent:
        return await self._send(self._fleeting("progress", text))

    async def notice(self, text: str) -> Sent:
        return await self._send(self._fleeting("notice", text))

    async def send_to(self, session_id: SessionId, text: str) -> Sent:
        parcel = Parcel(
            id=mint.delivery_id(), kind="text", pieces=(Piece(text),), source=self._source
        )
        return _as_sent(await self._store.write(send, session_id, parcel, as_owner=self._owner))

    # ---- how ----

    def _fleeting(self, kind: Kind, text: str) -> Parcel:
        return Parcel(
            id=mint.delivery_id(),
            kind=kind,
            pieces=(Piece(text),),
            policy="transient",
            source=self._source,
        )

    def _kept(self, kind: Kind, text: str, options: TextOptions) -> Parcel:
        return Parcel(
            id=mint.delivery_id(),
            kind=kind,
            pieces=(Piece(text),),
            policy=options.get("history", "persist"),
            history_text=options.get("history_text"),
            failure_history_text=options.get("failure_history_text"),
            source=self._source,
            metadata=dict(options.get("metadata") or {}),
        )

    async def _send_media(self, kind: Kind, media: Media, options: MediaOptions) -> Sent:
        caption = options.get("caption", "")
        # Still without its file: what is wrong with the rest is said before any I/O.
        parcel = checked(self._kept(kind, caption or " ", options))
        record = await self._keep(media, options.get("summary"), options.get("name"))
        family = _FAMILIES.get(parcel.kind)
        if family is not None and not record.media_type.startswith(family):
            raise InputError(
                f"this is no {parcel.kind}: its bytes are {record.media_type}",
                hint="send_file sends any file",
            )
        block: MediaBlock = _BLOCKS[parcel.kind](
            artifact=record.artifact,
            media_type=record.media_type,
            size=record.size,
            name=record.name,
        )
        return await self._send(msgspec.structs.replace(parcel, pieces=(Piece(caption, block),)))

    async def _keep(self, media: Media, summary: str | None, name: str | None) -> ArtifactRecord:
        """The bytes, copied to the artifact store: what becomes of the file later changes nothing."""
        if isinstance(media, str) and hash_digits(media) is not None:
            data = await self._artifacts.get(media)
            return record_of(media, data, turn=self._turn, name=name, summary=summary)
        if isinstance(media, bytes):
            data = media
        else:
            path = str(media)
            if "://" in path:
                raise InputError(
                    "a URL is not sent as a file", hint="fetch it first, then send that"
                )
            data = await asyncio.to_thread(self._load_file, self._cwd, path)
            name = name or PurePath(path).name
        if not data:
            raise InputError("the file is empty, so there is nothing to send")
        return await self._artifacts.keep(data, name=name, summary=summary)

    async def _send(self, parcel: Parcel) -> Sent:
        return _as_sent(
            await self._store.write(
                send, self._session_id, parcel, turn=self._turn, fence=self._fence
            )
        )


def _as_sent(handle: Handle) -> Sent:
    return Sent(handle.delivery_id, handle.status)
