"""Many deliveries over many sessions on a platform that fails one call in twenty."""

from __future__ import annotations

import asyncio
import random

import pytest

from postroom import mint
from postroom.app import one_core, open_room
from postroom.config import Limits
from postroom.domain.conversation import conversation_key
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    SendOutcome,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.domain.parcel import Parcel, Piece
from postroom.flow.inbound import Access, Connected
from postroom.ports.channel import OutPart, Profile
from postroom.ports.store import Tx
from postroom.scripts.outbox import send
from postroom.scripts.routes import target_of
from postroom.scripts.session import create_session
from postroom.testing import scripted
from tests.flow.chat import NAME, Chat
from tests.flow.support import core_of

FAULTS = 0.05


class Weather(Chat):
    """Loses answers, refuses, asks to wait, is not there, and raises; now and then it cannot say."""

    def __init__(self, seed: int) -> None:
        super().__init__(Profile(reconciles=True, settle_ms=0))
        self.chance = random.Random(seed)
        self.accepted: dict[str, list[str]] = {}
        self.copies: dict[str, int] = {}
        self.calls = 0

    async def send(self, part: OutPart) -> SendOutcome:
        self.calls += 1
        await asyncio.sleep(0)
        if self.chance.random() >= FAULTS:
            return self._accept(part)
        match self.chance.randrange(6):
            case 0:
                self._accept(part)
                return Uncertain("the answer was lost")
            case 1:
                return Uncertain("the request was lost")
            case 2:
                return Refused("busy", retryable=True)
            case 3:
                return RetryAfter(3)
            case 4:
                return NotStarted("no connection")
            case _:
                raise ConnectionResetError("by peer")

    def _accept(self, part: OutPart) -> Sent:
        self.copies[part.key] = self.copies.get(part.key, 0) + 1
        self.accepted.setdefault(part.session_id, []).append(part.text)
        return Sent(part.key)

    async def reconcile(self, part: OutPart) -> Verdict:
        if self.chance.random() < FAULTS:
            return CannotTell()
        return Found(part.key) if part.key in self.copies else Absent()


def _left(tx: Tx) -> int:
    return tx.execute(
        "SELECT count(*) FROM delivery WHERE blocks = 1 OR (status = 'unknown' AND handed_over = 0)"
    )[0][0]


async def soak(database: str, sessions: int, each: int, seed: int) -> None:
    channel = Weather(seed)
    limits = Limits(
        delivery_retry_first_ms=1,
        delivery_retry_longest_ms=20,
        reconcile_first_ms=1,
        reconcile_longest_ms=20,
        delivery_attempts_max=50,
        reconciles_max=50,
    )
    async with open_room(
        one_core(core_of(scripted())),
        database=database,
        limits=limits,
        channels={NAME: channel},
        connected={NAME: Connected(CoreId("default"), Access(everyone=True))},
        drain_ms=1000,
    ) as room:
        names = [SessionId(f"session_{n:04}") for n in range(sessions)]
        for name in names:
            target = target_of(NAME, conversation_key("loopback", "dm", name))
            await room.store.write(
                create_session, name, core_id=CoreId("default"), owner="operator", target=target
            )

        async def produce(name: SessionId) -> None:
            for number in range(each):
                parcel = Parcel(
                    id=mint.delivery_id(),
                    kind="text",
                    pieces=(Piece(f"{number}"),),
                    policy="transient",
                )
                await room.store.write(send, name, parcel)

        news = asyncio.Event()
        room.store.subscribe(None, lambda _: news.set())
        async with asyncio.timeout(500):
            await asyncio.gather(*map(produce, names))
            while True:
                news.clear()
                if not await room.store.read(_left):
                    break
                await news.wait()
        assert set(channel.copies.values()) == {1}, "sent twice"
        assert len(channel.copies) == sessions * each, "lost"
        for name in names:
            assert channel.accepted[name] == [str(n) for n in range(each)], "out of order"
        statuses = await room.store.read(
            lambda tx: tx.execute("SELECT status, count(*) FROM delivery GROUP BY status")
        )
        assert statuses == [("sent", sessions * each)]
        assert channel.calls > sessions * each


@pytest.mark.contract("OUT-04", "OUT-08", "OUT-09", "OUT-10")
async def test_a_thousand_deliveries_in_bad_weather_arrive_once_and_in_order(database: str) -> None:
    await soak(database, 40, 25, seed=1)


@pytest.mark.campaign
@pytest.mark.contract("OUT-04", "OUT-08", "OUT-09", "OUT-10")
async def test_ten_thousand_deliveries_in_bad_weather_arrive_once_and_in_order(
    database: str,
) -> None:
    await soak(database, 200, 50, seed=2)
