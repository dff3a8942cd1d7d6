"""What tools keep in a turn is the session's, with that turn as its owner, and no other session's."""

from __future__ import annotations

import pytest

from postroom.domain.ids import SessionId
from postroom.scripts.artifacts import artifacts_of
from postroom.testing import calling, scripted
from postroom.tools import artifact_tools, tool
from tests.flow.support import SESSION, idle, log_of, opened, results
from tests.support import bounded


@tool(effects="none")
async def shout() -> str:
    """Says a lot."""
    return "a loud line\n" * 10_000


@pytest.mark.contract("ART-03")
async def test_a_large_output_is_an_artifact_of_its_turn(database: str) -> None:
    model = scripted("hello", calling("shout"), "done")
    async with opened(database, model, tools=(shout,)) as room:
        agent = await room.session(SESSION)
        await bounded(agent.run("hello"))
        await bounded(agent.run("shout"))
        [kept] = await room.store.read(artifacts_of, SessionId(SESSION))
        assert (kept.turn, kept.media_type, kept.size) == (2, "text/plain", 120_000)
        assert kept.summary == "a loud line"
        [(outcome, text)] = results(await log_of(room))
        assert outcome == "ok"
        assert kept.artifact in text


async def test_a_session_that_learns_an_id_cannot_read_another_s_artifact(database: str) -> None:
    model = scripted(calling("shout"), "done")
    async with opened(database, model, tools=(shout,)) as room:
        await bounded((await room.session(SESSION)).run("shout"))
        [kept] = await room.store.read(artifacts_of, SessionId(SESSION))
    read = calling(("read_artifact", {"artifact": kept.artifact}))
    reads = scripted(read, "done", read, "done")
    async with opened(database, reads, tools=artifact_tools()) as room:
        for session_id, outcome in (("session_two", "error"), (SESSION, "ok")):
            agent = await room.session(session_id)
            await bounded(agent.run(f"read {kept.artifact}"))
            await idle(agent)
            assert results(await log_of(room, session_id))[-1][0] == outcome
