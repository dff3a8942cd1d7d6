"""Records of artifacts, over every engine: whose they are, and for how long."""

from __future__ import annotations

import pytest

from postroom.domain.event import EndReason, Params, RequestHeader, ToolResult
from postroom.domain.ids import CallId, SessionId
from postroom.domain.message import File, Image, InputBlock, Message, Source, Text
from postroom.errors import InputError, UnknownSession
from postroom.mint import message_id
from postroom.ports.store import Store
from postroom.scripts.artifacts import (
    ArtifactRecord,
    artifacts_of,
    is_of_session,
    record_artifact,
)
from postroom.scripts.drive import Header, begin_turn, finish_turn, record_reply
from postroom.scripts.inbox import queue_message, replace_message
from postroom.scripts.log import delete_session, fork_session
from postroom.scripts.session import create_session
from tests.contract.store_world import (
    CORE,
    OWNER,
    PENDING_MAX,
    SESSION,
    Engine,
    Hand,
    reply,
)

OTHER = SessionId("session_other")
FORK = SessionId("session_fork")


def name_of(digit: str) -> str:
    return "sha256:" + digit * 64


def record(digit: str, turn: int | None = 1, **more: str) -> ArtifactRecord:
    return ArtifactRecord(
        artifact=name_of(digit), media_type="image/png", size=7, turn=turn, **more
    )


async def owned(store: Store, session_id: SessionId, *digits: str) -> list[str]:
    """Those of the digits whose artifact is the session's."""
    return [d for d in digits if await store.read(is_of_session, session_id, name_of(d))]


@pytest.mark.contract("ART-01", "ART-03")
async def test_a_record_says_whose_it_is_what_it_is_and_which_turn_had_it_first(
    engine: Engine,
) -> None:
    store = await engine.open()
    await Hand(store).create()
    first = await store.write(
        record_artifact, SESSION, record("a", 1, name="plot.png", summary="a plot")
    )
    assert first.at > 0
    again = await store.write(record_artifact, SESSION, record("a", 2, name="other.png"))
    assert again == first
    outside = await store.write(record_artifact, SESSION, record("b", None))
    await store.aclose()

    store = await engine.open()
    assert await store.read(artifacts_of, SESSION) == [first, outside]
    assert await store.read(artifacts_of, SESSION, turn=1) == [first]
    assert await store.read(artifacts_of, SESSION, turn=2) == []
    assert (first.turn, first.name, first.summary) == (1, "plot.png", "a plot")
    assert (first.media_type, first.size, outside.turn) == ("image/png", 7, None)


async def test_an_artifact_is_of_the_sessions_that_have_it_and_of_no_other(
    engine: Engine,
) -> None:
    store = await engine.open()
    await Hand(store).create()
    await Hand(store, OTHER).create()
    await store.write(record_artifact, SESSION, record("a"))
    await store.write(record_artifact, SESSION, record("b"))
    await store.write(record_artifact, OTHER, record("b"))
    assert await owned(store, SESSION, *"abc") == ["a", "b"]
    assert await owned(store, OTHER, *"abc") == ["b"]
    assert await owned(store, SessionId("session_none"), *"abc") == []


@pytest.mark.parametrize("wrong", ["", "%", "sha256:../../etc/passwd", "sha256:" + "A" * 64])
async def test_what_is_no_artifact_id_is_not_recorded_and_is_nobody_s(
    engine: Engine, wrong: str
) -> None:
    store = await engine.open()
    await Hand(store).create()
    with pytest.raises(InputError):
        await store.write(
            record_artifact,
            SESSION,
            ArtifactRecord(artifact=wrong, media_type="text/plain", size=1),
        )
    await store.write(record_artifact, SESSION, record("a"))
    assert not await store.read(is_of_session, SESSION, wrong)
    assert len(await store.read(artifacts_of, SESSION)) == 1


async def test_an_unknown_session_has_no_artifacts(engine: Engine) -> None:
    store = await engine.open()
    with pytest.raises(UnknownSession):
        await store.write(record_artifact, SESSION, record("a"))
    with pytest.raises(UnknownSession):
        await store.read(artifacts_of, SESSION)


def with_blocks(*blocks: InputBlock) -> Message:
    return Message(message_id(), blocks, Source())


def picture(digit: str) -> Image:
    return Image(artifact=name_of(digit), media_type="image/png", size=7)


async def test_media_of_messages_and_results_in_the_log_are_the_session_s_own(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    sent = with_blocks(Text("look"), picture("a"))
    await store.write(queue_message, SESSION, sent, "followup", pending_max=PENDING_MAX)
    assert await owned(store, SESSION, *"abcde") == ["a"]

    file = File(artifact=name_of("b"), media_type="text/plain", size=1, name="notes")
    await store.write(replace_message, SESSION, sent.id, with_blocks(file))
    fence = (await hand.claimed()).fence
    header = RequestHeader(0, "revision-2", "scripted:echo", Params(), artifact=name_of("c"))
    await store.write(begin_turn, SESSION, fence, 1, Header("large", header))
    call = CallId("call_a")
    await store.write(record_reply, SESSION, fence, reply(1, calls=(call,)), (call,))
    shown = ToolResult(1, 1, call, (Text("shown"), picture("d")), "ok")
    await store.write(finish_turn, SESSION, fence, 1, EndReason("completed"), None, (shown,))
    assert await owned(store, SESSION, *"abcde") == ["a", "b", "c", "d"]


async def test_a_text_that_names_an_artifact_does_not_make_it_the_session_s(
    engine: Engine,
) -> None:
    """Whoever may write to a session could read any artifact whose id they know otherwise."""
    store = await engine.open()
    await Hand(store).create()
    await store.write(create_session, OTHER, core_id=CORE, owner=OWNER)
    await store.write(record_artifact, OTHER, record("a"))
    for text in (name_of("a"), f'{{"artifact":"{name_of("a")}"}}', f'"{name_of("a")}"'):
        message = with_blocks(Text(text))
        await store.write(queue_message, SESSION, message, "followup", pending_max=PENDING_MAX)
    assert await owned(store, SESSION, "a") == []


@pytest.mark.contract("ART-01")
async def test_records_go_with_their_session_and_with_no_other(engine: Engine) -> None:
    store = await engine.open()
    for session_id in (SESSION, OTHER):
        await Hand(store, session_id).create()
        await store.write(record_artifact, session_id, record("a"))
    await store.write(delete_session, OTHER)
    assert await owned(store, SESSION, "a") == ["a"]
    assert engine.rows("SELECT count(*) FROM artifact") == [(1,)]
    await store.write(delete_session, SESSION)
    assert engine.rows("SELECT count(*) FROM artifact") == [(0,)]
    with pytest.raises(UnknownSession):
        await store.write(record_artifact, SESSION, record("a"))


async def test_a_fork_has_the_artifacts_of_its_own_past_and_keeps_them(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await store.write(record_artifact, SESSION, record("0", None))
    cuts: list[int] = []
    for turn in (1, 2):
        await hand.queue(f"turn {turn}")
        drive = await hand.claimed()
        await hand.begin(drive.fence, turn)
        await store.write(record_artifact, SESSION, record(str(turn), turn))
        await hand.finish(drive.fence, turn)
        cuts.append([e.seq for e in await hand.log() if e.type == "turn/end"][-1])
    later = await engine.open(ahead_ms=5_000)
    await later.write(record_artifact, SESSION, record("3", None))

    await store.write(fork_session, SESSION, FORK, owner=OWNER, at_seq=cuts[0])
    assert await owned(store, FORK, *"0123") == ["0", "1"]
    await store.write(fork_session, SESSION, OTHER, owner=OWNER)
    assert await owned(store, OTHER, *"0123") == ["0", "1", "2"]
    await store.write(delete_session, SESSION)
    kept = await store.read(artifacts_of, FORK)
    assert [(each.artifact, each.turn) for each in kept] == [
        (name_of("0"), None),
        (name_of("1"), 1),
    ]
