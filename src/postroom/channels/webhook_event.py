"""What may be posted to a webhook: a JSON object, read strictly.

::

    {"conversation": "any id of yours",
     "text": "…",                                        and/or
     "content": [{"type": "text", "text": "…"},
                 {"type": "image|audio|video|file", "mediaType": "…", "name"?: "…", "data": base64}],
     "sender"?: {"id": "…", "name"?: "…"},
     "automatic"?: true,                                 an auto-reply or an error notice
     "replaces"?: "webhook-id of the message this edits",
     "deletes"?: "webhook-id of the message to delete"}  then no text and no content

Its bytes decide what a file is; ``mediaType`` counts where they do not tell, and an ``image`` with
the bytes of something else arrives as a file. Unknown fields are refused: a typing error must not
look like a success, and a message of our own that is echoed back is no event. Whether it was signed
is settled before this is asked.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec

from postroom.channels.signing import is_webhook_id
from postroom.domain.conversation import conversation_key
from postroom.domain.media_type import HEAD_BYTES, media_type
from postroom.domain.message import Audio, File, Image, InputBlock, Text, Video
from postroom.errors import InvalidContent
from postroom.ports.artifact import ArtifactStore
from postroom.ports.channel import Inbound, Sender

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_MediaType = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+$", max_length=127)
]

_REASON_CHARS_MAX = 300
_FIELD = re.compile(r"Object (missing required|contains unknown) field `([^`]*)`")


class _Text(msgspec.Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: str


class _Media(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    rename="camel",
    forbid_unknown_fields=True,
    kw_only=True,
):
    media_type: _MediaType
    data: bytes
    name: _Name | None = None


class _Image(_Media, frozen=True, tag="image"):
    pass


class _Audio(_Media, frozen=True, tag="audio"):
    pass


class _Video(_Media, frozen=True, tag="video"):
    pass


class _File(_Media, frozen=True, tag="file"):
    pass


_Block: TypeAlias = _Text | _Image | _Audio | _Video | _File


class _Sender(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Id
    name: _Name | None = None


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    conversation: _Id
    text: str | None = None
    content: list[_Block] = []
    sender: _Sender | None = None
    automatic: bool = False
    replaces: str | None = None
    deletes: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


async def read_event(
    body: bytes,
    webhook_id: str,
    endpoint: str,
    *,
    artifacts: ArtifactStore | None,
    media_bytes_max: int,
) -> Inbound:
    """The event in a request's body. Its files are in the artifact store when this returns; one that
    is larger than ``media_bytes_max`` bytes, or any without a store, has become a line of text.

    A message without a sender is the endpoint's own.

    Raises:
        InvalidContent: it is no such event; ``path`` names the field.
        StoreError: a file could not be stored.
    """
    event = _parsed(body)
    blocks: list[InputBlock] = [Text(event.text)] if event.text is not None else []
    for block in event.content:
        blocks.append(await _kept(block, artifacts, media_bytes_max))
    sender = event.sender or _Sender(endpoint)
    return Inbound(
        channel=endpoint,
        conversation=conversation_key("webhook", "source", endpoint, event.conversation),
        sender=Sender(id=sender.id, name=sender.name),
        content=tuple(blocks),
        dedupe=webhook_id,
        replaces=event.replaces,
        deletes=event.deletes,
        origin=webhook_id,
        automatic=event.automatic,
    )


def _parsed(body: bytes) -> _Event:
    try:
        event = _decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidContent("it is not JSON in UTF-8", path="$") from None
    for name, value in (("replaces", event.replaces), ("deletes", event.deletes)):
        if value is not None and not is_webhook_id(value):
            raise InvalidContent("a webhook-id is needed", path=name)
    if event.deletes is None:
        if not (event.text or "").strip() and not any(
            not isinstance(block, _Text) or block.text.strip() for block in event.content
        ):
            raise InvalidContent("there is nothing in it", path="text")
        return event
    if event.replaces is not None:
        raise InvalidContent("an event replaces or deletes, not both", path="replaces")
    if event.text is not None or event.content:
        where = "text" if event.text is not None else "content"
        raise InvalidContent("what deletes a message has none of its own", path=where)
    return event


def _invalid(error: msgspec.ValidationError) -> InvalidContent:
    """The library's sentence, with the path of the field itself where it names the one around it."""
    reason, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    field = _FIELD.match(reason)
    if field is not None:
        path = f"{path}.{field[2]}" if path else field[2]
        reason = "it is missing" if field[1].startswith("missing") else "there is no such field"
    return InvalidContent(reason[:_REASON_CHARS_MAX], path=path[:_REASON_CHARS_MAX] or "$")


async def _kept(block: _Block, artifacts: ArtifactStore | None, media_bytes_max: int) -> InputBlock:
    if isinstance(block, _Text):
        return Text(block.text)
    size, name = len(block.data), block.name or "without a name"
    if artifacts is None:
        return Text(f"[a file was not kept: {name}, {size} bytes; files are not taken here]")
    if size > media_bytes_max:
        return Text(
            f"[a file was not kept: {name}, {size} bytes; the limit is {media_bytes_max} bytes]"
        )
    kind = media_type(block.data[:HEAD_BYTES], block.media_type)
    made = _KINDS.get((type(block), kind.partition("/")[0]), File)
    artifact = await artifacts.put(block.data)
    return made(artifact=artifact, media_type=kind, size=size, name=block.name)


_KINDS: dict[tuple[type[_Media], str], type[Image | Audio | Video]] = {
    (_Image, "image"): Image,
    (_Audio, "audio"): Audio,
    (_Video, "video"): Video,
}
