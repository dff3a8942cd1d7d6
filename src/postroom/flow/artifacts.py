"""The artifact store as one session sees it in one turn.

What it puts is recorded as the session's own, with the turn that owns it; what is not the session's
own it does not get, and is told no more than that it is not there. Bytes first, record second: a
record never speaks of bytes that were not kept.

It is made for each turn, and given to tools in place of the store itself. Nothing is deleted
through it: an artifact lives as long as its session.
"""

from __future__ import annotations

from postroom.domain.ids import SessionId
from postroom.domain.media_type import HEAD_BYTES, is_text, media_type
from postroom.domain.message import sound
from postroom.errors import ArtifactMissing, UsageError
from postroom.ports.artifact import ArtifactStore
from postroom.ports.store import Store
from postroom.scripts.artifacts import ArtifactRecord, is_of_session, record_artifact

SUMMARY_CHARS_MAX = 200
NAME_CHARS_MAX = 255


class SessionArtifacts:
    """An `ArtifactStore` of one session and turn. ``turn`` None: outside of any."""

    __slots__ = ("_artifacts", "_session_id", "_store", "_turn")

    def __init__(
        self, store: Store, artifacts: ArtifactStore, session_id: SessionId, turn: int | None
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._session_id = session_id
        self._turn = turn

    async def put(self, data: bytes) -> str:
        return (await self.keep(data)).artifact

    async def keep(
        self,
        data: bytes,
        *,
        said: str | None = None,
        name: str | None = None,
        summary: str | None = None,
    ) -> ArtifactRecord:
        """Puts the bytes and records them; the record, an earlier one of the session's if it has one.

        ``said``, ``name`` and ``summary`` are as in `record_of`.

        Raises:
            StoreError: they were not kept, or not recorded: then no one owns them.
            UnknownSession: the session is gone.
        """
        artifact = await self._artifacts.put(data)
        record = record_of(artifact, data, turn=self._turn, said=said, name=name, summary=summary)
        return await self._store.write(record_artifact, self._session_id, record)

    async def get(self, artifact: str) -> bytes:
        """The bytes of one of the session's own.

        Raises:
            ArtifactMissing: it is not the session's, or its bytes are not there.
            ArtifactCorrupt: its bytes are others.
        """
        if not await self._is_own(artifact):
            raise ArtifactMissing(f"this session has no artifact {artifact[:100]}")
        return await self._artifacts.get(artifact)

    async def exists(self, artifact: str) -> bool:
        return await self._is_own(artifact) and await self._artifacts.exists(artifact)

    async def delete(self, artifact: str) -> None:
        """
        Raises:
            UsageError: always.
        """
        raise UsageError(f"{artifact[:100]} is kept as long as its session")

    async def _is_own(self, artifact: str) -> bool:
        return await self._store.read(is_of_session, self._session_id, artifact)


def record_of(
    artifact: str,
    data: bytes,
    *,
    turn: int | None = None,
    said: str | None = None,
    name: str | None = None,
    summary: str | None = None,
) -> ArtifactRecord:
    """The record of bytes already put, to be written by `record_artifact` in whose transaction it is.

    ``said`` is the media type their sender gives them, believed where the bytes do not tell. ``name``
    becomes a plain file name. ``summary`` None: a text's first line.
    """
    kind = media_type(data[:HEAD_BYTES], said)
    return ArtifactRecord(
        artifact=artifact,
        media_type=kind,
        size=len(data),
        turn=turn,
        name=None if name is None else file_name(name),
        summary=_first_line(data, kind) if summary is None else _one_line(summary),
    )


def file_name(text: str) -> str | None:
    """A name for people from one that came from outside: no path, nothing invisible. None: no name."""
    last = text.replace("\\", "/").rpartition("/")[2]
    name = "".join(c for c in sound(last) if c.isprintable()).strip()
    if len(name) > NAME_CHARS_MAX:
        stem, dot, suffix = name.rpartition(".")
        ending = dot + suffix if stem and len(suffix) <= 16 else ""
        name = name[: NAME_CHARS_MAX - len(ending)] + ending
    return None if name in ("", ".", "..") else name


def _first_line(data: bytes, kind: str) -> str | None:
    if not is_text(kind):
        return None
    lines = data[:HEAD_BYTES].decode("utf-8", "replace").splitlines()
    return next((line for each in lines if (line := _one_line(each))), None)


def _one_line(text: str) -> str | None:
    """The text on one line, without what no line shows, cut to `SUMMARY_CHARS_MAX`; None: nothing."""
    words = " ".join("".join(c if c.isprintable() else " " for c in sound(text)).split())
    if len(words) > SUMMARY_CHARS_MAX:
        words = words[: SUMMARY_CHARS_MAX - 1] + "…"
    return words or None
