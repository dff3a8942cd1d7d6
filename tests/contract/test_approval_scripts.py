"""Approvals and questions as rows: asked once, decided once, by those who may, over every engine."""

from __future__ import annotations

import pytest

from postroom.domain.conversation import conversation_key
from postroom.domain.event import ApprovalAsked, ApprovalDecided
from postroom.domain.ids import ApprovalId, CallId, ClaimToken, SessionId
from postroom.domain.work import Fence
from postroom.errors import StaleClaim
from postroom.ports.store import Store
from postroom.scripts.approvals import (
    Asked,
    NotAsked,
    approval_decision,
    ask_approval,
    decide_approval,
    open_approvals,
)
from postroom.scripts.outbox import list_deliveries
from postroom.scripts.routes import target_of
from postroom.scripts.session import create_session
from tests.contract.store_world import CORE, OWNER, SESSION, Engine, Hand

HERE = target_of("bot", conversation_key("loopback", "dm", "ann"))


async def asking(store: Store, *, target: str | None = HERE) -> tuple[Hand, Fence]:
    await store.write(create_session, SESSION, core_id=CORE, owner=OWNER, target=target)
    hand = Hand(store)
    await hand.queue("do it")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    return hand, drive.fence


async def ask(
    store: Store, fence: Fence, name: str = "apr_1", kind: str = "question", wait_ms: int = 60_000
) -> Asked:
    return await store.write(
        ask_approval,
        SESSION,
        fence,
        ApprovalId(name),
        turn=1,
        step=1,
        call_id=CallId("call_1"),
        kind=kind,
        subject="Which colour?",
        text="Which colour?",
        wait_ms=wait_ms,
        choices=("red", "blue"),
    )


async def decide(
    store: Store,
    decision: str,
    name: str = "apr_1",
    *,
    principal: str = OWNER,
    ref: str = "one",
    session_id: SessionId | None = None,
) -> str:
    return await store.write(
        decide_approval,
        ApprovalId(name),
        decision,
        by="Ann",
        principal=principal,
        ref=ClaimToken(ref),
        session_id=session_id,
    )


@pytest.mark.contract("APR-01", "OUT-01")
async def test_a_question_its_event_and_its_delivery_are_one_transaction(engine: Engine) -> None:
    store = await engine.open()
    hand, fence = await asking(store)
    assert await ask(store, fence) == "outbox"
    assert await ask(store, fence) == "outbox", "asked again under its id it is the same question"
    (asked,) = [e.data for e in await hand.log() if isinstance(e.data, ApprovalAsked)]
    assert (asked.kind, asked.choices) == ("question", ("red", "blue"))
    (delivery,) = await store.read(list_deliveries)
    assert (delivery.kind, delivery.status, delivery.owner_turn_id) == ("approval", "queued", 1)
    (waits,) = await store.read(open_approvals)
    assert (waits.approval_id, waits.kind) == ("apr_1", "question")


@pytest.mark.contract("APR-01", "APR-02")
async def test_an_answer_counts_once_and_outlives_the_process(engine: Engine) -> None:
    store = await engine.open()
    _, fence = await asking(store)
    await ask(store, fence)
    assert await decide(store, "blue") == "blue"
    assert await decide(store, "blue") == "blue", "the same decision again"
    with pytest.raises(NotAsked, match="already"):
        await decide(store, "red", ref="two")
    await store.aclose()
    store = await engine.open()
    assert await store.read(approval_decision, ApprovalId("apr_1")) == ("blue", "Ann")
    assert await store.read(open_approvals) == []


@pytest.mark.contract("APR-02", "SEC-03")
@pytest.mark.parametrize("how", ["guessed", "foreign", "elsewhere"])
async def test_who_is_not_asked_decides_nothing(engine: Engine, how: str) -> None:
    store = await engine.open()
    _, fence = await asking(store)
    await ask(store, fence)
    other = SessionId("session_other")
    await store.write(create_session, other, core_id=CORE, owner="mallory")
    deciding = {
        "guessed": decide(store, "blue", "apr_2"),
        "foreign": decide(store, "blue", principal="mallory"),
        "elsewhere": decide(store, "blue", session_id=other),
    }
    with pytest.raises(NotAsked, match="nobody asked that"):
        await deciding.pop(how)
    for unused in deciding.values():
        unused.close()
    assert len(await store.read(open_approvals, SESSION)) == 1


@pytest.mark.contract("APR-03")
async def test_when_its_time_is_over_it_can_only_be_denied(engine: Engine) -> None:
    store = await engine.open()
    _, fence = await asking(store)
    await ask(store, fence, wait_ms=0)
    with pytest.raises(NotAsked, match="time"):
        await decide(store, "allow")
    assert await decide(store, "deny", ref="two") == "deny"


@pytest.mark.contract("APR-03", "RTR-04")
async def test_where_nobody_could_answer_nothing_is_asked(engine: Engine) -> None:
    store = await engine.open()
    hand, fence = await asking(store, target=None)
    assert await ask(store, fence) == "nobody"
    assert "approval/asked" not in await hand.types()
    assert await store.read(open_approvals) == []


@pytest.mark.contract("APR-03")
async def test_the_end_of_the_turn_denies_what_is_open_and_after_it_nothing_is_asked(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand, fence = await asking(store)
    await ask(store, fence, "apr_1")
    await ask(store, fence, "apr_2", "approval")
    await hand.finish(fence, 1)
    decided = [e.data for e in await hand.log() if isinstance(e.data, ApprovalDecided)]
    assert [(d.approval_id, d.decision) for d in decided] == [("apr_1", "deny"), ("apr_2", "deny")]
    assert await store.read(open_approvals) == []
    with pytest.raises(StaleClaim):
        await ask(store, fence, "apr_3")
