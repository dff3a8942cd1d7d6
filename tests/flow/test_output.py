"""What a tool says while it runs: through the outbox, into the history as asked, to nobody else."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.domain.event import DeliveryQueued, ToolSpec
from postroom.domain.ids import SessionId
from postroom.errors import InputError, ToolFailure, UnknownSession
from postroom.ports.channel import Profile
from postroom.ports.output import MediaOptions, Output, TextOptions
from postroom.ports.tool import ToolContext, ToolOutput
from postroom.scripts.artifacts import artifacts_of
from postroom.scripts.outbox import NotYours, list_deliveries
from postroom.testing import PuppetModel, calling, scripted
from tests.flow.audit import audit
from tests.flow.chat import Chat, chatting
from tests.flow.support import SESSION, idle, log_of, of, opened, results
from tests.support import bounded

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40


class Says:
    """A tool that does something with its output and answers what that returned."""

    exclusive = False
    effects = "none"
    timeout_ms = None

    def __init__(self, do: Callable[[Output], Awaitable[object]], name: str = "says") -> None:
        self.spec = ToolSpec(name, "says", msgspec.Raw(b'{"type":"object","properties":{}}'))
        self._do = do

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        return ToolOutput(str(await self._do(ctx.output)))


async def once(database: str, do: Callable[[Output], Awaitable[object]], **more: Any) -> Any:
    """One turn in a chat whose tool does this: (parts, log, tool's answer)."""
    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("says"), "done"), tools=[Says(do)], **more
    ) as room:
        accepted = await chat.say("go")
        assert accepted.session_id is not None
        await idle(room.agent(accepted.session_id))
        log = await log_of(room, accepted.session_id)
        assert audit(log) == []
        views = await room.store.read(list_deliveries, session_id=accepted.session_id)
        await chat.sees(len([v for v in views if v.kind != "progress"]))
        return chat.parts, log, results(log)[0]


@pytest.mark.contract("OUT-01", "OUT-15")
async def test_what_a_tool_says_is_delivered_before_the_reply_and_belongs_to_its_turn(
    database: str,
) -> None:
    parts, log, answer = await once(database, lambda out: out.send_text("by the way"))
    assert [p.text for p in parts] == ["by the way", "done"]
    (queued,) = of(log, DeliveryQueued)
    assert (queued.owner_turn_id, queued.source, queued.text) == (1, "says", "by the way")
    assert answer[0] == "ok"
    assert answer[1].startswith(f"Queued as {queued.delivery_id}")
    assert "do not send it again" in answer[1]


@pytest.mark.contract("HIS-01")
@pytest.mark.parametrize(
    ("history", "shown"), [("persist", True), ("model_hidden", False), ("transient", False)]
)
async def test_the_model_sees_what_it_said_from_its_next_request_on_if_that_is_kept(
    database: str, history: Any, shown: bool
) -> None:
    chat, model = Chat(), PuppetModel()
    tool = Says(lambda out: out.send_text("aside", history=history))
    async with chatting(database, chat, model, tools=[tool]) as room:
        await chat.say("go")
        (await bounded(model.asked())).call("says")
        asked = await bounded(model.asked())
        assert any("aside" in text for text in asked.texts) == shown
        assert asked.texts[-1].startswith("tool: ")
        asked.say("done")
        await chat.sees(2)
        (session,) = {p.session_id for p in chat.parts}
        log = await log_of(room, session)
        assert len(of(log, DeliveryQueued)) == (0 if history == "transient" else 1)


@pytest.mark.contract("HIS-01")
async def test_media_that_write_history_must_say_what_they_are_and_nothing_is_written(
    database: str,
) -> None:
    async def do(out: Output) -> str:
        with pytest.raises(InputError, match="history_text"):
            await out.send_image(PNG)
        with pytest.raises(InputError, match="nothing to send"):
            await out.send_text("")
        return "refused"

    parts, log, answer = await once(database, do)
    assert answer == ("ok", "refused")
    assert [p.text for p in parts] == ["done"]
    assert of(log, DeliveryQueued) == []


@pytest.mark.contract("ART-01", "ART-03")
async def test_a_file_is_copied_when_it_is_sent_and_recorded_as_the_turns(
    database: str, tmp_path: Path
) -> None:
    """C-120: what becomes of the file afterwards changes nothing."""
    file = tmp_path / "plan.png"
    file.write_bytes(PNG)

    async def do(out: Output) -> object:
        sent = await out.send_image(Path("plan.png"), caption="the plan", history_text="a plan")
        file.unlink()
        return sent

    chat = Chat()
    async with chatting(
        database, chat, scripted(calling("says"), "done"), tools=[Says(do)], cwd=str(tmp_path)
    ) as room:
        accepted = await chat.say("go")
        assert accepted.session_id is not None
        await chat.sees(2)
        first = chat.parts[0]
        assert first.text == "the plan"
        assert first.media is not None
        assert (first.media.media_type, first.media.size) == ("image/png", len(PNG))
        assert await room.artifacts.get(first.media.artifact) == PNG
        (record,) = await room.store.read(artifacts_of, accepted.session_id)
        assert (record.artifact, record.turn, record.name) == (first.media.artifact, 1, "plan.png")


@pytest.mark.contract("ART-02")
async def test_files_outside_the_workspace_urls_and_foreign_artifacts_are_not_sent(
    database: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")

    async def do(out: Output) -> str:
        for media in (Path("../secret"), Path("/etc/hostname"), Path("missing")):
            with pytest.raises(ToolFailure):
                await out.send_file(media, history="transient")
        with pytest.raises(InputError, match="URL"):
            await out.send_file("https://example.org/x", history="transient")
        with pytest.raises(Exception, match="no artifact"):
            await out.send_file("sha256:" + "0" * 64, history="transient")
        with pytest.raises(InputError, match="no image"):
            await out.send_image(b"plain text", history="transient")
        return "refused"

    parts, _, answer = await once(database, do, cwd=str(tmp_path / "in"))
    assert answer == ("ok", "refused")
    assert [p.text for p in parts] == ["done"]


@pytest.mark.contract("SEC-05")
async def test_metadata_addresses_nothing_and_names_no_id(database: str) -> None:
    """C-210."""
    forged = {
        "delivery_id": "dlv_forged",
        "session_id": "session_other",
        "conversation": "loopback:dm:mallory",
        "channel": "other",
    }
    parts, log, _ = await once(database, lambda out: out.send_text("x", metadata=forged))
    (queued,) = of(log, DeliveryQueued)
    assert queued.metadata == forged
    assert queued.delivery_id != "dlv_forged"
    assert {p.conversation for p in parts} == {"loopback:dm:ann"}
    assert {p.session_id for p in parts} == {log[0].session_id}
    names = {name for name in dir(Output) if not name.startswith("_")}
    addressing = {"session", "session_id", "route", "conversation", "channel", "delivery_id", "to"}
    for name in names - {"send_to"}:
        assert not addressing & set(inspect.signature(getattr(Output, name)).parameters)
    assert not addressing & set(MediaOptions.__annotations__)
    assert set(TextOptions.__annotations__) < set(MediaOptions.__annotations__)


@pytest.mark.contract("OUT-16")
async def test_sending_elsewhere_reaches_that_session_and_only_ones_own(database: str) -> None:
    chat = Chat()
    targets: list[SessionId] = []

    async def do(out: Output) -> str:
        sent = await out.send_to(targets[0], "hello there")
        with pytest.raises(NotYours):
            await out.send_to(targets[1], "not mine")
        with pytest.raises(UnknownSession):
            await out.send_to(SessionId("session_none"), "nobody")
        return sent.status

    async with chatting(
        database, chat, scripted(calling("says"), "done"), tools=[Says(do)]
    ) as room:
        mine = "conversation:loopback:loopback:dm:ann"
        own = await room.session("session_own", owner=mine)
        other = await room.session("session_other", owner="operator")
        targets += [own.session_id, other.session_id]
        accepted = await chat.say("go")
        assert accepted.session_id is not None
        await idle(room.agent(accepted.session_id))
        await chat.sees(1)
        # Its own route and binding are untouched; nothing is attached to the other session.
        assert chat.seen == ["done"]
        (there,) = await room.store.read(list_deliveries, session_id=own.session_id)
        assert (there.status, there.parts[0].text) == ("unrouted", "hello there")
        assert await room.store.read(list_deliveries, session_id=other.session_id) == []
        assert results(await log_of(room, accepted.session_id)) == [("ok", "unrouted")]


@pytest.mark.contract("OUT-11")
async def test_a_session_that_nothing_is_attached_to_keeps_what_is_said(database: str) -> None:
    async with opened(
        database, scripted(calling("says"), "done"), tools=[Says(lambda out: out.send_text("x"))]
    ) as room:
        agent = await room.session(SESSION)
        await agent.followup("go")
        await idle(agent)
        views = await room.store.read(list_deliveries)
        assert [(v.kind, v.status, v.claim) for v in views] == [
            ("reply", "unrouted", "none"),
            ("text", "unrouted", "none"),
        ]
        assert "nobody is attached" in results(await log_of(room))[0][1]


@pytest.mark.contract("OUT-11")
async def test_a_channel_that_shows_progress_gets_what_the_tools_do_as_transient_deliveries(
    database: str,
) -> None:
    async def do(out: Output) -> str:
        await out.progress("half way")
        return "ok"

    chat = Chat(Profile(progress=True))
    async with chatting(
        database, chat, scripted(calling("says"), "done"), tools=[Says(do)]
    ) as room:
        accepted = await chat.say("go")
        assert await chat.sees(4) == ["says started", "half way", "says finished", "done"]
        views = await room.store.read(list_deliveries)
        assert {v.policy for v in views if v.kind == "progress"} == {"transient"}
        assert accepted.session_id is not None
        assert of(await log_of(room, accepted.session_id), DeliveryQueued) == []


async def test_progress_is_shown_only_where_a_channel_shows_it(database: str) -> None:
    async def do(out: Output) -> str:
        await out.progress("half way")
        await out.notice("mind the gap")
        return "ok"

    parts, _, _ = await once(database, do)
    assert [(p.kind, p.text) for p in parts] == [("notice", "mind the gap"), ("text", "done")]
