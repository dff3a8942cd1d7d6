"""What is posted to an endpoint: one part, as a JSON object.

::

    {"type": "message",
     "conversation": "the endpoint's own id",
     "text": "…",
     "deliveryId": "dlv_…", "part": 1, "parts": 2,
     "kind": "text|media|progress|notice|approval",
     "replyTo"?: "webhook-id of the message that is answered",
     "media"?: {"type": "image|audio|video|file", "mediaType": "…", "size": 123,
                "artifact": "sha256:…", "name"?: "…", "data"?: base64}}

It is made of the part and the artifact store alone, and of nothing that changes from one attempt to
the next: a repeat with the same key must have the same bytes.
"""

from __future__ import annotations

import base64

import msgspec

from postroom.domain.message import MediaBlock
from postroom.ports.artifact import ArtifactStore
from postroom.ports.channel import OutPart

NOT_SENT = "the file was described, not sent"


class _Media(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    type: str
    media_type: str
    size: int
    artifact: str
    name: str | None = None
    data: str | None = None


class _Message(
    msgspec.Struct,
    frozen=True,
    tag="message",
    tag_field="type",
    rename="camel",
    omit_defaults=True,
    kw_only=True,
):
    conversation: str
    text: str
    delivery_id: str
    part: int
    parts: int
    kind: str
    reply_to: str | None = None
    media: _Media | None = None


async def write_message(
    part: OutPart,
    conversation: str,
    *,
    artifacts: ArtifactStore | None,
    media_bytes_max: int,
) -> tuple[bytes, str | None]:
    """The body, and what its receipt must add (None: nothing).

    A file larger than ``media_bytes_max`` bytes, or any without a store, goes without its bytes.

    Raises:
        StoreError: the file could not be read.
    """
    block = part.media
    media = None if block is None else await _media(block, artifacts, media_bytes_max)
    body = msgspec.json.encode(
        _Message(
            conversation=conversation,
            text=part.text,
            delivery_id=part.delivery_id,
            part=part.index + 1,
            parts=part.count,
            kind=part.kind,
            reply_to=part.reply_to,
            media=media,
        )
    )
    return body, NOT_SENT if media is not None and media.data is None else None


async def _media(
    block: MediaBlock, artifacts: ArtifactStore | None, media_bytes_max: int
) -> _Media:
    data: str | None = None
    if artifacts is not None and block.size <= media_bytes_max:
        data = base64.b64encode(await artifacts.get(block.artifact)).decode()
    return _Media(
        type=type(block).__name__.lower(),
        media_type=block.media_type,
        size=block.size,
        artifact=block.artifact,
        name=block.name,
        data=data,
    )
