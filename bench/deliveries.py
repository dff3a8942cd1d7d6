"""Deliveries: how many a second leave the outbox, how soon the first does, and at what size.

The platform is in this process and answers at once, so that what is measured is the outbox. The
floor is the same statements, recorded from the scripts themselves, through a bare writer with group
commit.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from bench import figures, rooms
from bench.commits import Recorder, copy_of, replay_at_once
from bench.figures import Figure, Figures, Task, median
from postroom import mint
from postroom.app import Room, one_core, open_room
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.ids import SessionId
from postroom.domain.outbox import CannotTell, Rules, SendOutcome, Sent, Verdict
from postroom.domain.parcel import Parcel, Piece
from postroom.flow.inbound import Access, Connected
from postroom.ports.channel import OutPart, Profile, Sink
from postroom.scripts.outbox import Claimed, Serves, claim_delivery, record_outcome, send
from postroom.scripts.routes import target_of
from postroom.scripts.session import create_session
from postroom.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from postroom.ports.store import Tx

_NAME = "loopback"
_EACH = 15  # deliveries of a session in a round
_TEXT = rooms.past_text(1)
_SIZES = (1_000, 1_000_000)
_ROWS_A_SESSION = 1_000


class _Platform:
    """Takes everything at once. ``called`` is when, of each part; ``done`` is set at the last."""

    name = _NAME
    profile = Profile()

    def __init__(self) -> None:
        self.called: list[float] = []
        self.wanted = 0
        self.done = asyncio.Event()

    async def run(self, sink: Sink) -> None:
        pass

    async def send(self, part: OutPart) -> SendOutcome:
        self.called.append(time.perf_counter())
        if len(self.called) >= self.wanted:
            self.done.set()
        return Sent(part.key)

    async def reconcile(self, part: OutPart) -> Verdict:
        return CannotTell()

    async def typing(self, conversation: ConversationKey) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def takes(self, count: int) -> None:
        self.wanted = count
        if len(self.called) < count:
            self.done.clear()
            await self.done.wait()


@asynccontextmanager
async def _room(folder: Path, platform: _Platform) -> AsyncIterator[tuple[Room, rooms.BenchRoom]]:
    """A room that serves the platform; nothing leaves before it is started."""
    commits = rooms.Commits()
    store = await SqliteStore.open(folder / rooms.DATABASE, on_commit=commits)
    commits.connection = store._writer  # pyright: ignore[reportPrivateUsage]
    async with open_room(
        one_core(rooms.core("http://127.0.0.1:1")),
        store=store,
        database=str(folder / rooms.DATABASE),
        drive=False,
        channels={_NAME: platform},
        connected={_NAME: Connected(rooms.CORE, Access(everyone=True))},
    ) as room:
        yield room, rooms.BenchRoom(room, commits)


def _parcel() -> Parcel:
    return Parcel(id=mint.delivery_id(), kind="text", pieces=(Piece(_TEXT),), policy="transient")


async def _sessions(room: Room, count: int) -> list[SessionId]:
    ids = [mint.session_id() for _ in range(count)]
    for one in ids:
        target = target_of(_NAME, conversation_key("loopback", "dm", one))
        await room.store.write(
            create_session, one, core_id=rooms.CORE, owner="operator", target=target
        )
    return ids


async def _owe(room: Room, ids: list[SessionId], each: int) -> None:
    async def lane(one: SessionId) -> None:
        for _ in range(each):
            await room.store.write(send, one, _parcel())

    await asyncio.gather(*map(lane, ids))


async def deliveries(task: Task) -> Figures:
    """Deliveries a second of ``task.sessions`` lanes; then one at a time, how soon it leaves."""
    folder = Path(task.folder)
    (folder / "template").mkdir()
    async with _room(folder / "template", _Platform()) as (room, _):
        ids = await _sessions(room, task.sessions)
        await _owe(room, ids, _EACH)
    database = folder / "template" / rooms.DATABASE
    recorded = await _statements(copy_of(database, folder, "record"), ids)
    floors: list[tuple[float, Figure]] = []
    ours: list[tuple[float, Figure]] = []
    cpus: list[Figure] = []
    wanted = len(ids) * _EACH
    soon_ms: list[float] = []
    first: Figure | None = None
    for number in range(3):
        if not task.profile:
            bare = copy_of(database, folder, f"bare{number}")
            steps, figure = await replay_at_once(bare, recorded)
            rate = steps * wanted / sum(map(len, recorded))
            floors.append((rate, Figure(rate, figure.commits, figure.fsyncs, figure.synchronous)))
        there = copy_of(database, folder, f"room{number}").parent
        platform = _Platform()
        with figures.profiled():
            async with _room(there, platform) as (room, bench):
                with bench.stretch() as counts:
                    room.outbox.start()
                    await platform.takes(wanted)
                rate = wanted / counts.seconds
                level = await bench.synchronous()
                ours.append((rate, counts.figure(rate, level)))
                cpus.append(counts.figure(counts.cpu_s * 1000 / wanted, level))
                if number == 2:
                    with bench.stretch() as soon:
                        for one in ids[:100]:
                            await room.store.write(send, one, _parcel())
                            committed = time.perf_counter()
                            await platform.takes(len(platform.called) + 1)
                            soon_ms.append((platform.called[-1] - committed) * 1000)
                    first = soon.figure(median(soon_ms), await bench.synchronous())
    assert first is not None
    found = {"deliveries": sorted(ours, key=_rate)[1][1], "soon": first}
    found["cpu"] = sorted(cpus, key=lambda figure: figure.value)[1]
    if floors:
        found["bare"] = sorted(floors, key=_rate)[1][1]
    return found


def _rate(one: tuple[float, Figure]) -> float:
    return one[0]


def _serves(node: Any, token: str) -> Serves:
    return Serves(
        node,
        frozenset({_NAME}),
        frozenset(),
        lambda channel, text: (text,),
        {_NAME: False},
        Rules(),
        frozenset({token}),
    )


def _worked_off(tx: Tx, session_id: SessionId, node: Any, most: int) -> list[list[tuple[str, Any]]]:
    """The statements of each write that the runtime makes until a lane is done, or ``most``."""
    out: list[list[tuple[str, Any]]] = []
    token = mint.claim_token()
    recorder = Recorder(tx)
    found: Any = claim_delivery(recorder, session_id, token, _serves(node, token))
    out.append(recorder.statements)
    while isinstance(found, Claimed) and len(out) <= most:
        recorder = Recorder(tx)
        token = mint.claim_token()
        sent = Sent(f"{found.delivery_id}.0")
        found = record_outcome(recorder, found, sent, 0.0, token, _serves(node, token))
        out.append(recorder.statements)
    return out


async def _statements(database: Path, ids: list[SessionId]) -> list[list[list[tuple[str, Any]]]]:
    async with _room(database.parent, _Platform()) as (room, _):
        node = room.store.node
        found = [await room.store.write(_worked_off, one, node, _EACH + 1) for one in ids]
    shutil.rmtree(database.parent)
    return found


async def outbox_size(task: Task) -> Figures:
    """The time of one claim with the record of it, alone, with so many deliveries in the table."""
    found: Figures = {}
    for size in _SIZES:
        folder = Path(task.folder) / f"{size}"
        folder.mkdir()
        async with _room(folder, _Platform()) as (room, _):
            ids = await _sessions(room, 20)
            await _owe(room, ids, 1)
        _fill(folder / rooms.DATABASE, size)
        async with _room(folder, _Platform()) as (room, bench):
            await _owe(room, ids, 10)
            spent: list[float] = []
            with bench.stretch() as counts:
                for one in ids:
                    spent += await _one_lane(room, one)
            found[f"{size}"] = counts.figure(median(spent), await bench.synchronous())
        shutil.rmtree(folder)
    return found


async def _one_lane(room: Room, session_id: SessionId) -> list[float]:
    """Milliseconds of each delivery of a lane: its claim, and its record with the next claim."""
    spent: list[float] = []
    store = room.store
    token = mint.claim_token()
    found: Any = await store.write(claim_delivery, session_id, token, _serves(store.node, token))
    while isinstance(found, Claimed):
        started = time.perf_counter()
        token = mint.claim_token()
        found = await store.write(
            record_outcome, found, Sent("there"), 0.0, token, _serves(store.node, token)
        )
        spent.append((time.perf_counter() - started) * 1000)
    return spent


def _fill(database: Path, size: int) -> None:
    """Old deliveries, all sent, of other sessions; one in a hundred has failed."""
    connection = apsw.Connection(str(database))
    connection.execute("PRAGMA synchronous = OFF").fetchall()
    connection.execute("BEGIN IMMEDIATE").fetchall()
    connection.execute(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :size)"
        " INSERT INTO delivery (id, sid, ord, kind, policy, status, blocks, due, created_at,"
        " updated_at, expires_at) SELECT printf('dlv_old_%08d', i), 1000 + i / :each, i % :each,"
        " 'text', 'transient', iif(i % 100, 'sent', 'failed'), 0, i, i, i, i FROM n",
        {"size": size, "each": _ROWS_A_SESSION},
    ).fetchall()
    connection.execute(
        "INSERT INTO part (delivery, idx, kind, text, status, attempts, reference)"
        " SELECT id, 0, 'text', :text, status, 1, id FROM delivery WHERE id LIKE 'dlv_old%'",
        {"text": _TEXT},
    ).fetchall()
    connection.execute("COMMIT").fetchall()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
