"""The artifact store as tools see it: one session's, one turn's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from postroom.domain.ids import SessionId
from postroom.domain.message import Image
from postroom.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    StoreFull,
    ToolFailure,
    UnknownSession,
    UsageError,
)
from postroom.flow.artifacts import SessionArtifacts, file_name
from postroom.mint import message_id
from postroom.ports.artifact import ArtifactStore
from postroom.ports.store import Store
from postroom.ports.tool import ToolOutput
from postroom.scripts.artifacts import artifacts_of
from postroom.scripts.inbox import queue_message
from postroom.scripts.log import delete_session
from postroom.stores.artifacts import open_artifacts
from postroom.tools import artifact_tools, bound_output, file_tools
from tests.contract.store_world import SESSION, Engine, Hand, message
from tests.contract.tool_context import call, context

OTHER = SessionId("session_other")
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40


async def world(engine: Engine) -> tuple[Store, ArtifactStore]:
    """A store with two sessions, and the bytes they share."""
    store = await engine.open()
    for session_id in (SESSION, OTHER):
        await Hand(store, session_id).create()
    return store, open_artifacts("memory://")


@pytest.mark.contract("ART-03")
async def test_what_a_turn_puts_is_recorded_as_its_own(engine: Engine) -> None:
    store, artifacts = await world(engine)
    mine = SessionArtifacts(store, artifacts, SESSION, 3)
    artifact = await mine.put(PNG)
    assert await mine.get(artifact) == PNG
    assert await mine.exists(artifact)
    [found] = await store.read(artifacts_of, SESSION)
    assert (found.artifact, found.turn) == (artifact, 3)
    assert (found.media_type, found.size, found.name, found.summary) == (
        "image/png",
        len(PNG),
        None,
        None,
    )
    await SessionArtifacts(store, artifacts, SESSION, 4).put(PNG)
    assert await store.read(artifacts_of, SESSION) == [found]


async def test_a_record_is_made_of_what_the_sender_says_and_the_bytes_do_not_deny(
    engine: Engine,
) -> None:
    store, artifacts = await world(engine)
    mine = SessionArtifacts(store, artifacts, SESSION, None)
    table = await mine.keep(b"\n  a;\tb\n1;2\n", said="text/CSV; charset=utf-8", name="../t.csv")
    assert (table.media_type, table.name, table.summary) == ("text/csv", "t.csv", "a; b")
    assert table.turn is None
    lie = await mine.keep(PNG, said="text/plain", name="\0", summary="a\nplot\0 " + "x" * 500)
    assert (lie.media_type, lie.name) == ("image/png", None)
    assert lie.summary is not None
    assert lie.summary.startswith("a plot x")
    assert len(lie.summary) == 200
    assert await store.read(artifacts_of, SESSION) == sorted(
        [table, lie], key=lambda each: (each.at, each.artifact)
    )


async def test_another_session_s_artifact_is_not_there(engine: Engine) -> None:
    store, artifacts = await world(engine)
    mine = SessionArtifacts(store, artifacts, SESSION, 1)
    theirs = await SessionArtifacts(store, artifacts, OTHER, 1).put(b"theirs")
    never = "sha256:" + "0" * 64
    for artifact in (theirs, never, "../secret"):
        assert not await mine.exists(artifact)
        with pytest.raises(ArtifactMissing) as caught:
            await mine.get(artifact)
        assert caught.value.message == f"this session has no artifact {artifact}"


async def test_a_file_that_came_in_with_a_message_can_be_got(engine: Engine) -> None:
    store, artifacts = await world(engine)
    artifact = await artifacts.put(PNG)
    mine = SessionArtifacts(store, artifacts, SESSION, 1)
    assert not await mine.exists(artifact)
    picture = Image(artifact=artifact, media_type="image/png", size=len(PNG))
    sent = msgspec.structs.replace(message(), id=message_id(), content=(picture,))
    await store.write(queue_message, SESSION, sent, "followup", pending_max=10)
    assert await mine.get(artifact) == PNG
    assert not await SessionArtifacts(store, artifacts, OTHER, 1).exists(artifact)


async def test_own_bytes_that_went_or_were_damaged_are_told_as_such(
    engine: Engine, tmp_path: Path
) -> None:
    store, _ = await world(engine)
    mine = SessionArtifacts(store, open_artifacts(tmp_path / "kept"), SESSION, 1)
    artifact = await mine.put(b"the right bytes")
    [path] = [each for each in (tmp_path / "kept").rglob("*") if each.is_file()]
    path.write_bytes(b"others")
    with pytest.raises(ArtifactCorrupt):
        await mine.get(artifact)
    path.unlink()
    assert not await mine.exists(artifact)
    with pytest.raises(ArtifactMissing):
        await mine.get(artifact)


async def test_what_could_not_be_kept_is_not_recorded(engine: Engine) -> None:
    class Full:
        async def put(self, data: bytes) -> str:
            raise StoreFull("the disk is full")

        async def get(self, artifact: str) -> bytes:
            raise AssertionError

        async def exists(self, artifact: str) -> bool:
            raise AssertionError

        async def delete(self, artifact: str) -> None:
            raise AssertionError

    store, _ = await world(engine)
    with pytest.raises(StoreFull):
        await SessionArtifacts(store, Full(), SESSION, 1).put(b"data")
    assert await store.read(artifacts_of, SESSION) == []


async def test_nothing_is_deleted_through_a_session_and_nothing_put_for_one_that_went(
    engine: Engine,
) -> None:
    store, artifacts = await world(engine)
    theirs = SessionArtifacts(store, artifacts, OTHER, 1)
    artifact = await theirs.put(b"shared")
    with pytest.raises(UsageError):
        await theirs.delete(artifact)
    mine = SessionArtifacts(store, artifacts, SESSION, 1)
    assert await mine.put(b"shared") == artifact
    await store.write(delete_session, OTHER)
    assert not await theirs.exists(artifact)
    with pytest.raises(UnknownSession):
        await theirs.put(b"late")
    assert await mine.get(artifact) == b"shared"


async def test_tools_read_what_their_session_kept_and_no_other_s(
    engine: Engine, tmp_path: Path
) -> None:
    store, artifacts = await world(engine)
    mine = context(tmp_path, artifacts=SessionArtifacts(store, artifacts, SESSION, 1))
    other = context(artifacts=SessionArtifacts(store, artifacts, OTHER, 1), session=OTHER)
    (tmp_path / "plot.png").write_bytes(PNG)
    shown = await call(file_tools(()), "read_file", mine, path="plot.png")
    [block] = shown.media
    await bound_output(ToolOutput("a line\n" * 20_000), mine.artifacts)
    picture, whole = await store.read(artifacts_of, SESSION)
    assert {block.artifact, "text/plain"} <= {
        each for one in (picture, whole) for each in (one.artifact, one.media_type)
    }
    for each in (picture, whole):
        await call(artifact_tools(), "read_artifact", mine, artifact=each.artifact)
        with pytest.raises(ToolFailure, match="this session has no artifact"):
            await call(artifact_tools(), "read_artifact", other, artifact=each.artifact)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("report.pdf", "report.pdf"),
        ("/etc/passwd", "passwd"),
        ("C:\\Users\\x\\notes.txt", "notes.txt"),
        ("..", None),
        ("a/..", None),
        ("dir/", None),
        ("", None),
        ("in\0vis\u202eible\n.txt", "invisible.txt"),
        ("é☃.txt", "é☃.txt"),
        ("half \ud800.txt", "half \ufffd.txt"),
        ("n" * 300 + ".tar", "n" * 251 + ".tar"),
        ("n" * 300, "n" * 255),
    ],
)
def test_a_name_from_outside_becomes_a_plain_file_name(text: str, name: str | None) -> None:
    assert file_name(text) == name
