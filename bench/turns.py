"""Turns: Postroom's and the floor's, in turns with each other, on the same disk and mock.

Sessions work in closed loops: each asks again as soon as it is answered. All that began within
the time is awaited and counted, so the rate is turns over the time until the last of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import aiohttp

from bench import figures, rooms
from bench.figures import Figure, Figures, Stretch, Task, median
from bench.floor import Floor
from postroom.domain.ids import SessionId

Turn: TypeAlias = Callable[[int], Awaitable[object]]

_ROUNDS = 3
_AT_ONCE = 50  # while warming up


async def _loops(turn: Turn, sessions: int, seconds: float, counts: Stretch) -> int:
    """How many turns were made. Everything is warm before the stretch begins."""
    for first in range(0, sessions, _AT_ONCE):
        await asyncio.gather(*map(turn, range(first, min(sessions, first + _AT_ONCE))))
    done = 0

    async def loop(session: int) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await turn(session)
            done += 1

    with counts:
        until = time.perf_counter() + seconds
        await asyncio.gather(*map(loop, range(sessions)))
    return done


@asynccontextmanager
async def _floor(folder: Path, url: str) -> AsyncIterator[Floor]:
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240
    floor = Floor(url, str(folder / "floor.db"))
    try:
        yield floor
    finally:
        await floor.aclose()


class _Round:
    def __init__(self, turns: int, counts: Stretch, synchronous: str, bytes_a_turn: float) -> None:
        self.rate = turns / counts.seconds
        self.cpu_ms = counts.cpu_s * 1000 / turns
        self.bytes_a_turn = bytes_a_turn
        self._counts = counts
        self._synchronous = synchronous

    def figure(self, value: float) -> Figure:
        return self._counts.figure(value, self._synchronous)


async def _floor_round(folder: Path, task: Task, seconds: float) -> _Round:
    text = rooms.prompt(task.tools)
    async with _floor(folder, task.url):
        pass
    empty = rooms.bytes_on_disk(folder / "floor.db")
    async with _floor(folder, task.url) as floor:
        counts = Stretch(lambda: floor.group.commits)
        turns = await _loops(
            lambda session: floor.turn(session, text), task.sessions, seconds, counts
        )
        level = floor.group.synchronous
    grown = rooms.bytes_on_disk(folder / "floor.db") - empty
    return _Round(turns, counts, level, grown / (turns + task.sessions))


async def _room_round(folder: Path, task: Task, seconds: float) -> _Round:
    folder.mkdir()  # noqa: ASYNC240
    text = rooms.prompt(task.tools)
    async with rooms.open_bench_room(folder, task.url, drive=False) as room:
        agents = await asyncio.gather(*[room.session() for _ in range(task.sessions)])
        ids = [agent.session_id for agent in agents]
    empty = rooms.bytes_on_disk(folder / rooms.DATABASE)
    async with rooms.open_bench_room(folder, task.url) as room:
        agents = await asyncio.gather(*map(room.session, ids))
        counts = room.stretch()
        turns = await _loops(
            lambda session: agents[session].run(text), task.sessions, seconds, counts
        )
        level = await room.synchronous()
    grown = rooms.bytes_on_disk(folder / rooms.DATABASE) - empty
    return _Round(turns, counts, level, grown / (turns + len(ids)))


async def turns(task: Task) -> Figures:
    folder = Path(task.folder)
    seconds = task.seconds / (2 * _ROUNDS)
    floors: list[_Round] = []
    ours: list[_Round] = []
    for number in range(_ROUNDS):
        if not task.profile:
            floors.append(await _floor_round(folder / f"floor{number}", task, seconds))
        with figures.profiled():
            ours.append(await _room_round(folder / f"room{number}", task, seconds))
    found = _named("", ours)
    if floors:
        found |= _named("floor ", floors)
    return found


def _named(prefix: str, rounds: list[_Round]) -> Figures:
    """The figures of the round with the middle rate."""
    middle = sorted(rounds, key=lambda one: one.rate)[len(rounds) // 2]
    return {
        f"{prefix}rate": middle.figure(middle.rate),
        f"{prefix}cpu": middle.figure(middle.cpu_ms),
        f"{prefix}bytes": middle.figure(middle.bytes_a_turn),
    }


# How many sessions with that past take turns, and how many turns each makes in a row: few enough
# that the past stays about as long as it says.
_SPREAD = {10: (100, 4), 1_000: (8, 25), 10_000: (1, 50)}


async def history(task: Task) -> Figures:
    """The time of one turn after ``task.history`` messages, the context being in memory."""
    sessions, in_a_row = _SPREAD[task.history]
    floor_folder, folder = Path(task.folder) / "floor", Path(task.folder) / "room"
    ids = await _pasts(floor_folder, folder, task.history, sessions)
    floor_ms: list[float] = []
    room_ms: list[float] = []
    with figures.profiled():
        async with (
            _floor(floor_folder, task.url) as floor,
            rooms.open_bench_room(folder, task.url) as room,
        ):
            agents = [await room.session(each) for each in ids]
            for session in range(sessions):
                await floor.turn(session, rooms.PROMPT)
                await agents[session].run(rooms.PROMPT)
            floor_counts = Stretch(lambda: floor.group.commits)
            counts = room.stretch()
            until = time.perf_counter() + task.seconds
            session = 0
            while time.perf_counter() < until:
                if not task.profile:
                    with floor_counts:
                        await _timed(
                            lambda at: floor.turn(at, rooms.PROMPT), session, in_a_row, floor_ms
                        )
                with counts:
                    await _timed(
                        lambda at: agents[at].run(rooms.PROMPT), session, in_a_row, room_ms
                    )
                session = (session + 1) % sessions
            own, level = await room.synchronous(), floor.group.synchronous
    found = {
        "turn": counts.figure(median(room_ms), own),
        "cpu": counts.figure(counts.cpu_s * 1000 / len(room_ms), own),
    }
    if floor_ms:
        found["floor turn"] = floor_counts.figure(median(floor_ms), level)
        found["floor cpu"] = floor_counts.figure(floor_counts.cpu_s * 1000 / len(floor_ms), level)
    return found


async def _pasts(floor_folder: Path, folder: Path, messages: int, sessions: int) -> list[SessionId]:
    """Sessions with a past, the same on the floor's database as on Postroom's; both closed."""
    texts = [rooms.past_text(number) for number in range(1, messages + 1)]
    async with _floor(floor_folder, "") as floor:
        for session in range(sessions):
            await floor.past(session, texts)
    folder.mkdir()  # noqa: ASYNC240
    async with rooms.open_bench_room(folder, drive=False) as room:
        return [await room.with_past(messages) for _ in range(sessions)]


async def _timed(turn: Turn, session: int, times: int, out: list[float]) -> None:
    for _ in range(times):
        started = time.perf_counter()
        await turn(session)
        out.append((time.perf_counter() - started) * 1000)


async def opening(task: Task) -> Figures:
    """Attaching to a session with a long past in a process that has not seen it, and one turn.

    A turn of another session comes first, so that the connection to the model stands.
    """
    floor_folder, folder = Path(task.folder) / "floor", Path(task.folder) / "room"
    (long,) = await _pasts(floor_folder, folder, task.history, 1)
    floors: list[Stretch] = []
    ours: list[Stretch] = []
    level = own = ""
    until = time.perf_counter() + task.seconds
    with figures.profiled():
        while time.perf_counter() < until or len(ours) < 3:
            async with _floor(floor_folder, task.url) as floor:
                await floor.turn(2, rooms.PROMPT)
                with Stretch(lambda floor=floor: floor.group.commits) as counts:
                    await floor.turn(0, rooms.PROMPT)
                floors.append(counts)
                level = floor.group.synchronous
            async with rooms.open_bench_room(folder, task.url) as room:
                await (await room.session()).run(rooms.PROMPT)
                with room.stretch() as counts:
                    agent = await room.session(long)
                    await agent.run(rooms.PROMPT)
                ours.append(counts)
                own = await room.synchronous()
    return {"open": _middle(ours, own), "floor open": _middle(floors, level)}


def _middle(stretches: list[Stretch], synchronous: str) -> Figure:
    """The median of their times in milliseconds, with the counts of them all."""
    return Figure(
        median([one.seconds * 1000 for one in stretches]),
        sum(one.commits for one in stretches),
        sum(one.fsyncs for one in stretches),
        synchronous,
    )


async def requests(task: Task) -> Figures:
    """Bare streamed requests to the mock, read to their end, ``task.sessions`` at once."""
    body = b'{"model":"mock","stream":true,"messages":[{"role":"user","content":"hello"}]}'
    connector = aiohttp.TCPConnector(limit=1000)
    async with aiohttp.ClientSession(connector=connector) as client:
        taken: list[float] = []

        async def request(_: int) -> None:
            started = time.perf_counter()
            async with client.post(task.url + "/chat/completions", data=body) as response:
                while await response.content.readany():
                    pass
            taken.append((time.perf_counter() - started) * 1000)

        counts = Stretch(lambda: 0)
        done = await _loops(request, task.sessions, task.seconds, counts)
    return {
        "rate": Figure(done / counts.seconds),
        "median": Figure(median(taken)),
        "cpu": Figure(counts.cpu_s * 1000 / done),
    }
