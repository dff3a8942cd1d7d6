"""The parts that measurements of Postroom share: a core on the mock, a room, a past."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import apsw

from bench.figures import SYNCHRONOUS, Stretch
from postroom import mint
from postroom.app import Room, one_core, open_room
from postroom.domain.event import AssistantReply, EndReason
from postroom.domain.ids import CoreId, NodeId, SessionId
from postroom.domain.message import AssistantMessage, Message, Source, Text, Usage
from postroom.flow.core import Core
from postroom.models.openai_compat import OpenAICompatModel
from postroom.scripts.drive import Offer, finish_turn, queue_and_claim
from postroom.stores.sqlite import SqliteStore
from postroom.tools.function import tool

if TYPE_CHECKING:
    from postroom.ports.store import Tx

CORE = CoreId("default")
DATABASE = "postroom.db"
PROMPT = "What is the time in the other office?"
PROMPT_WITH_CALL = PROMPT + " [[tool:look {}]]"


def prompt(tools: int) -> str:
    return PROMPT_WITH_CALL if tools else PROMPT


def past_text(number: int) -> str:
    """A message of the past: about as long as what people write to each other."""
    return f"This is message {number}, about as long as what people write to each other."


@tool(effects="none")
async def look() -> str:
    """Looks at the clock."""
    return "done"


def core(url: str) -> Core:
    model = OpenAICompatModel("openai:mock", url, None, "mock")
    return Core(id=CORE, revision="bench", models=(model,), tools={"look": look})


class BenchRoom:
    """A room, with what its store's commits are counted by."""

    def __init__(self, room: Room, commits: Commits) -> None:
        self.room = room
        self.session = room.session
        self._commits = commits

    @property
    def commits(self) -> int:
        """Group commits that changed something; one that did not needs no fsync."""
        return self._commits.count

    def stretch(self) -> Stretch:
        return Stretch(lambda: self._commits.count)

    async def synchronous(self) -> str:
        """What the writing connection says of itself."""
        return await self.room.store.write(_synchronous)

    async def with_past(self, messages: int) -> SessionId:
        """A new session with so many messages behind it."""
        agent = await self.session()
        store, own = self.room.store, self.room.cores(CORE)
        await store.write(_write_past, agent.session_id, messages, store.node, own)
        return agent.session_id


class Commits:
    def __init__(self) -> None:
        self.count = 0
        self.connection: apsw.Connection | None = None
        self._changes = 0

    def __call__(self, when: str) -> None:
        """Called by the store's own thread before and after each commit."""
        if when == "before" and self.connection is not None:
            changes = self.connection.total_changes()
            self.count += changes != self._changes
            self._changes = changes


@asynccontextmanager
async def open_bench_room(
    folder: Path, url: str = "http://127.0.0.1:1", *, drive: bool = True
) -> AsyncIterator[BenchRoom]:
    """A room on the database of this folder. ``drive`` False: what is queued there stays."""
    commits = Commits()
    store = await SqliteStore.open(folder / DATABASE, on_commit=commits)
    commits.connection = store._writer  # pyright: ignore[reportPrivateUsage]
    database = str(folder / DATABASE)
    async with open_room(one_core(core(url)), store=store, database=database, drive=drive) as room:
        yield BenchRoom(room, commits)


def _synchronous(tx: Tx) -> str:
    return SYNCHRONOUS[tx.execute("PRAGMA synchronous")[0][0]]


def bytes_on_disk(database: Path) -> int:
    """The size of a closed database, what is still in its write-ahead log moved in."""
    connection = apsw.Connection(str(database))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return database.stat().st_size


def _write_past(tx: Tx, session_id: SessionId, messages: int, node: NodeId, core: Core) -> None:
    """Half as many turns as ``messages``, by the scripts that real turns run, in one commit."""
    header = core.header(core.models[0])
    for turn, number in zip(itertools.count(1), range(1, messages, 2), strict=False):
        message = Message(mint.message_id(), (Text(past_text(number)),), Source())
        offer = Offer(node, mint.claim_token(), 3, header)
        _, drive = queue_and_claim(
            tx, session_id, message, "followup", pending_max=1, run=None, offer=offer
        )
        assert drive is not None
        answer = AssistantMessage(mint.reply_id(), (Text(past_text(number + 1)),))
        reply = AssistantReply(turn, 1, answer, "mock", "stop", Usage(10, 2))
        finish_turn(tx, session_id, drive.fence, turn, EndReason("completed"), reply)
