"""What is owed is on disk with what it belongs to, is claimed before it is sent, and ends told.

The scripts of `postroom.scripts.outbox`, each one transaction, over both engines.
"""

from __future__ import annotations

from typing import Any

import pytest

from postroom.domain.context import fold
from postroom.domain.conversation import conversation_key
from postroom.domain.event import (
    DeliveryQueued,
    DeliveryStatusChanged,
    EndReason,
    HistoryReplaced,
)
from postroom.domain.ids import ClaimToken, DeliveryId, SessionId
from postroom.domain.message import File, text_of
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    Rules,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.domain.parcel import Parcel, Piece
from postroom.errors import InputError, NotCommitted, StaleClaim
from postroom.ports.store import Store, Tx
from postroom.scripts import outbox, routes
from postroom.scripts.drive import finish_turn
from postroom.scripts.log import read_events
from postroom.scripts.outbox import Claimed, DeliveryView, Question, Serves, Wait
from postroom.scripts.session import create_session
from postroom.stores.node import bury_nodes
from tests.contract.store_world import CORE, OWNER, SESSION, Engine, Hand
from tests.support import bounded

CHAT = "bot"
HERE = conversation_key("loopback", "dm", "here")
REPORT = File(artifact="sha256:0", media_type="application/pdf", size=9)
RULES = Rules(
    attempts_max=3, retry_first_ms=1_000, reconciles_max=2, reconcile_first_ms=0, expiry_ms=3600_000
)


def whole(_: str, text: str) -> list[str]:
    return [text]


def by_words(_: str, text: str) -> list[str]:
    return text.split()


def serving(store: Store, *active: str, channels: tuple[str, ...] = (CHAT,), **more: Any) -> Serves:
    fields: dict[str, Any] = {
        "node": store.node,
        "channels": frozenset(channels),
        "connections": frozenset(),
        "cut": by_words,
        "asks": dict.fromkeys(channels, True),
        "rules": RULES,
        "active": frozenset(active),
    }
    return Serves(**(fields | more))


def parcel(name: str, text: str = "hello", **more: Any) -> Parcel:
    fields: dict[str, Any] = {"kind": "text", "pieces": (Piece(text),)}
    return Parcel(id=DeliveryId(f"dlv_{name}"), **(fields | more))


class Desk:
    """One session's outbox through one store. Its session has a conversation for its target."""

    def __init__(self, store: Store, session_id: SessionId = SESSION) -> None:
        self.store = store
        self.id = session_id
        self._tokens = 0

    async def create(self, *, target: bool = True) -> Desk:
        address = routes.target_of(CHAT, HERE) if target else None
        await self.store.write(create_session, self.id, core_id=CORE, owner=OWNER, target=address)
        return self

    async def send(self, name: str, text: str = "hello", **more: Any) -> outbox.Handle:
        return await self.store.write(outbox.send, self.id, parcel(name, text, **more))

    def token(self) -> ClaimToken:
        self._tokens += 1
        return ClaimToken(f"{self.store.node}-{self._tokens}")

    async def claim(self, token: ClaimToken | None = None, **more: Any) -> outbox.Next:
        token = token or self.token()
        serves = serving(self.store, token, **more)
        return await bounded(self.store.write(outbox.claim_delivery, self.id, token, serves))

    async def claimed(self, **more: Any) -> Claimed:
        found = await self.claim(**more)
        assert isinstance(found, Claimed), found
        return found

    async def record(self, claimed: Claimed, outcome: Any, **more: Any) -> outbox.Next:
        token = self.token()
        serves = serving(self.store, token, claimed.fence.token, **more)
        return await bounded(
            self.store.write(outbox.record_outcome, claimed, outcome, 0.0, token, serves)
        )

    async def ask(self, name: str, **more: Any) -> Any:
        token = self.token()
        serves = serving(self.store, token, **more)
        return await self.store.write(
            outbox.claim_question, DeliveryId(f"dlv_{name}"), token, serves
        )

    async def question(self, name: str) -> Question:
        found = await self.ask(name)
        assert isinstance(found, Question), found
        return found

    async def answer(self, question: Question, verdict: Verdict, settle_ms: int = 0) -> Any:
        return await self.store.write(
            outbox.record_verdict, question, verdict, settle_ms, 0.0, serving(self.store)
        )

    async def show(self, name: str) -> DeliveryView:
        return await self.store.read(outbox.show_delivery, DeliveryId(f"dlv_{name}"))

    async def status(self, name: str) -> str:
        return (await self.show(name)).status

    async def in_doubt(self, name: str, text: str = "hello") -> None:
        await self.send(name, text)
        await self.record(await self.claimed(), Uncertain("the answer was lost"))

    async def log(self, kind: type[Any]) -> list[Any]:
        events = await self.store.read(read_events, self.id, 0, 10_000)
        return [e.data for e in events if isinstance(e.data, kind)]

    async def seen(self) -> list[str]:
        """What the model sees of it."""
        events = await self.store.read(read_events, self.id, 0, 10_000)
        return [text_of(m.content) for m in fold(events).messages]


async def desk_on(engine: Engine, *, target: bool = True, **options: Any) -> Desk:
    return await Desk(await engine.open(**options)).create(target=target)


def part_states(view: DeliveryView) -> list[str]:
    return [p.status for p in view.parts]


# ---- what is owed is written with what owes it ----


@pytest.mark.contract("OUT-01")
async def test_a_send_writes_delivery_parts_work_and_history_in_one_transaction(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    hand = Hand(desk.store)
    await hand.queue()
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    said = parcel("one", pieces=(Piece("a"), Piece("b")), source="tool")
    handle = await desk.store.write(outbox.send, SESSION, said, turn=1, fence=drive.fence)
    assert handle == outbox.Handle(said.id, "queued")
    view = await desk.show("one")
    assert (view.status, view.claim, view.owner_turn_id) == ("queued", "ready", 1)
    assert [p.text for p in view.parts] == ["a", "b"]
    (queued,) = await desk.log(DeliveryQueued)
    assert (queued.text, queued.owner_turn_id, queued.source) == ("a\n\nb", 1, "tool")
    outside = await desk.send("two")
    assert outside.status == "queued"
    assert (await desk.show("two")).owner_turn_id is None


@pytest.mark.contract("OUT-01")
async def test_a_send_that_is_undone_leaves_none_of_its_rows(engine: Engine) -> None:
    def sends_and_fails(tx: Tx) -> None:
        outbox.send(tx, SESSION, parcel("one"))
        raise NotCommitted("after it")

    desk = await desk_on(engine)
    with pytest.raises(NotCommitted):
        await desk.store.write(sends_and_fails)
    for table in ("delivery", "part", "work"):
        assert engine.rows(f"SELECT count(*) FROM {table}")[0][0] == 0, table
    assert await desk.log(DeliveryQueued) == []


@pytest.mark.contract("OUT-01")
async def test_a_send_of_a_turn_that_is_over_writes_nothing(engine: Engine) -> None:
    desk = await desk_on(engine)
    hand = Hand(desk.store)
    await hand.queue()
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    await hand.finish(drive.fence, 1)
    with pytest.raises(StaleClaim):
        await desk.store.write(outbox.send, SESSION, parcel("late"), turn=1, fence=drive.fence)
    with pytest.raises(InputError):
        await desk.show("late")


@pytest.mark.contract("TRN-11", "OUT-01")
async def test_a_turns_end_and_its_reply_are_one_commit_with_their_delivery(
    engine: Engine,
) -> None:
    phases: list[int] = []

    def counted(phase: str) -> None:
        if phase == "after" and watching:
            phases.append(1)

    watching = False
    desk = await desk_on(engine, on_commit=counted)
    hand = Hand(desk.store)
    await hand.queue()
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    watching = True
    await hand.finish(drive.fence, 1, "the answer")
    watching = False
    assert len(phases) == 1
    (view,) = await desk.store.read(outbox.list_deliveries)
    assert (view.kind, view.status, view.owner_turn_id) == ("reply", "queued", 1)
    assert [p.text for p in view.parts] == ["the answer"]
    assert (await hand.types())[-1] == "agent/idle"


@pytest.mark.contract("TRN-14")
async def test_a_turn_that_fails_tells_its_conversation_once_without_the_error(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    hand = Hand(desk.store)
    await hand.queue()
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    reason = EndReason("error", code="auth", message="key sk-secret was refused")
    for _ in range(2):
        await desk.store.write(finish_turn, SESSION, drive.fence, 1, reason)
    (view,) = await desk.store.read(outbox.list_deliveries)
    assert (view.kind, view.policy) == ("notice", "transient")
    assert "secret" not in view.parts[0].text


@pytest.mark.contract("HIS-01")
async def test_the_model_sees_what_is_kept_for_it_and_nothing_else(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("kept", "kept")
    await desk.send("hidden", "hidden", policy="model_hidden")
    await desk.send("fleeting", "fleeting", policy="transient")
    assert await desk.seen() == ["kept"]
    assert [q.text for q in await desk.log(DeliveryQueued)] == ["kept", "hidden"]


@pytest.mark.contract("HIS-01")
async def test_a_file_for_the_history_without_words_for_it_is_refused_before_anything_is_written(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    file = (Piece("", REPORT),)
    before = engine.rows("SELECT head FROM session")
    with pytest.raises(InputError):
        await desk.send("file", kind="file", pieces=file)
    assert engine.rows("SELECT head FROM session") == before
    assert engine.rows("SELECT count(*) FROM delivery")[0][0] == 0
    await desk.send("said", kind="file", pieces=file, history_text="the report")
    await desk.send("gone", kind="file", pieces=file, policy="transient")
    assert await desk.seen() == ["the report"]


@pytest.mark.contract("OUT-11")
async def test_what_nothing_could_deliver_is_unrouted_and_goes_only_on_request(
    engine: Engine,
) -> None:
    desk = await desk_on(engine, target=False)
    assert (await desk.send("one")).status == "unrouted"
    assert await desk.seen() == ["hello"], "the history keeps it"
    assert await desk.claim() is None
    again = (DeliveryId("dlv_one"), "ann", ClaimToken("op"), RULES)
    with pytest.raises(InputError):
        await desk.store.write(outbox.redeliver, *again)
    await desk.store.write(
        routes.bind_route, SESSION, ClaimToken("tty"), channel="terminal", node=desk.store.node
    )
    assert await desk.claim() is None, "an attachment alone sends nothing"
    view = await desk.store.write(outbox.redeliver, *again)
    assert (view.status, view.decided_by) == ("queued", "ann")
    found = await desk.claimed(connections=frozenset({"tty"}))
    assert found.address == routes.ToConnection(ClaimToken("tty"), "terminal", desk.store.node)


@pytest.mark.contract("OUT-11")
async def test_a_route_that_goes_before_the_claim_leaves_it_unrouted(engine: Engine) -> None:
    desk = await desk_on(engine, target=False)
    token = ClaimToken("tty")
    await desk.store.write(
        routes.bind_route, SESSION, token, channel="terminal", node=desk.store.node
    )
    assert (await desk.send("one")).status == "queued"
    await desk.store.write(routes.unbind_route, token)
    assert await desk.claim() is None
    assert await desk.status("one") == "unrouted"
    assert (await desk.show("one")).parts[0].attempts == 0


# ---- the lane ----


@pytest.mark.contract("OUT-02", "OUT-09")
async def test_a_lane_is_claimed_in_order_each_with_the_result_before_it(engine: Engine) -> None:
    desk = await desk_on(engine)
    for name in ("one", "two"):
        await desk.send(name, f"{name} more")
    found: Any = await desk.claimed()
    order: list[tuple[str, int]] = []
    while isinstance(found, Claimed):
        order.append((found.delivery_id, found.index))
        view = await desk.store.read(outbox.show_delivery, found.delivery_id)
        assert part_states(view)[found.index] == "sending"
        assert (view.claim, view.parts[found.index].attempts) == ("claimed", 1)
        before = engine.rows("SELECT count(*) FROM part WHERE status = 'sending'")[0][0]
        assert before == 1
        found = await desk.record(found, Sent(f"ref-{found.index}"))
    assert found is None
    assert order == [("dlv_one", 0), ("dlv_one", 1), ("dlv_two", 0), ("dlv_two", 1)]
    assert engine.rows("SELECT count(*) FROM work WHERE kind LIKE 'delivery%'")[0][0] == 0
    told = [(s.delivery_id, s.status) for s in await desk.log(DeliveryStatusChanged)]
    assert told == [("dlv_one", "sent"), ("dlv_two", "sent")]


@pytest.mark.contract("OUT-09")
async def test_while_one_is_being_sent_nothing_else_of_its_lane_is(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.send("two")
    await desk.claimed()
    other = Desk(await engine.open())
    assert await other.claim() == Wait(None)


@pytest.mark.contract("OUT-06")
async def test_a_channel_that_is_not_served_costs_no_attempt(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    for _ in range(5):
        waits = await desk.claim(channels=())
        assert isinstance(waits, Wait)
    view = await desk.show("one")
    assert (view.status, view.parts[0].attempts, view.parts[0].text) == ("queued", 0, "hello")
    assert (await desk.claimed()).attempt == 1


@pytest.mark.contract("OUT-06", "OUT-07")
async def test_what_certainly_was_not_sent_waits_uncharged(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    waits = await desk.record(await desk.claimed(), NotStarted("no connection"))
    assert isinstance(waits, Wait)
    assert (await desk.show("one")).parts[0].attempts == 0
    later = Desk(await engine.open(ahead_ms=2_000))
    waits = await later.record(await later.claimed(), RetryAfter(37_000))
    assert isinstance(waits, Wait)
    view = await desk.show("one")
    assert view.parts[0].attempts == 0
    assert waits.until == view.due
    early = Desk(await engine.open(ahead_ms=35_000))
    assert isinstance(await early.claim(), Wait)
    due = Desk(await engine.open(ahead_ms=45_000))
    assert (await due.claimed()).attempt == 1


@pytest.mark.contract("OUT-07")
async def test_told_to_wait_for_no_time_a_record_run_again_is_not_taken_for_a_second_answer(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    claimed = await desk.claimed()
    token = desk.token()
    serves = serving(desk.store, token, claimed.fence.token)
    write = (outbox.record_outcome, claimed, RetryAfter(0), 0.0, token, serves)
    first, second = [await desk.store.write(*write) for _ in range(2)]
    # C-116: it is not called again at once, and the second run changes nothing.
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    assert first.until == second.until
    assert first.until is not None
    assert first.until >= first.now + RULES.retry_first_ms * 3 // 4


@pytest.mark.contract("OUT-08")
async def test_attempts_run_out_over_restarts_and_then_it_is_failed(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.send("two")
    for attempt in range(1, RULES.attempts_max + 1):
        now = Desk(await engine.open(ahead_ms=attempt * 60_000))
        claimed = await now.claimed()
        assert (claimed.delivery_id, claimed.attempt) == ("dlv_one", attempt)
        found = await now.record(claimed, Refused("busy", retryable=True))
    assert isinstance(found, Claimed), "a failed one holds nothing"
    assert found.delivery_id == "dlv_two"
    assert await desk.status("one") == "failed"


@pytest.mark.contract("OUT-05")
async def test_a_refused_part_ends_the_rest_and_repeats_none_before_it(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "a b c", reply_to="m7")
    first = await desk.claimed()
    second = await desk.record(first, Sent("r1"))
    assert isinstance(second, Claimed)
    assert (first.reply_to, second.reply_to) == ("m7", None)
    assert first.address == second.address
    assert await desk.record(second, Refused("too rude")) is None
    view = await desk.show("one")
    assert (view.status, part_states(view)) == ("failed", ["sent", "failed", "skipped"])
    await desk.store.write(outbox.redeliver, view.delivery_id, "ann", ClaimToken("op"), RULES)
    assert (await desk.claimed()).index == 1


@pytest.mark.contract("OUT-18")
async def test_what_became_too_old_fails_as_expired_even_where_nobody_serves_it(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    later = Desk(await engine.open(ahead_ms=RULES.expiry_ms))
    assert await later.claim(channels=()) is None
    view = await desk.show("one")
    assert (view.status, view.parts[0].error) == ("failed", "expired")


@pytest.mark.contract("OUT-18")
async def test_what_an_operator_has_sent_again_is_not_too_old_for_it(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    later = Desk(await engine.open(ahead_ms=90_000_000))
    await later.store.write(
        outbox.resolve_delivery, DeliveryId("dlv_one"), "queued", "ann", ClaimToken("op")
    )
    assert (await later.claimed()).delivery_id == "dlv_one"


async def test_a_text_is_cut_again_for_another_channel_as_long_as_nothing_was_begun(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "a b c")
    claimed = await desk.claimed(cut=whole)
    assert (claimed.count, claimed.text) == (1, "a b c")
    await desk.record(claimed, NotStarted("no connection"))
    later = Desk(await engine.open(ahead_ms=5_000))
    claimed = await later.claimed(cut=by_words)
    assert (claimed.count, claimed.text) == (3, "a")


@pytest.mark.contract("RTR-08")
async def test_what_began_in_one_place_ends_there_whoever_attached_meanwhile(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "a b")
    claimed = await desk.claimed()
    await desk.store.write(
        routes.bind_route, SESSION, ClaimToken("tty"), channel="terminal", node=desk.store.node
    )
    second = await desk.record(claimed, Sent("r1"), connections=frozenset({"tty"}))
    assert isinstance(second, Claimed)
    assert second.address == claimed.address


# ---- claims that are lost ----


@pytest.mark.contract("OUT-03", "OUT-13")
async def test_a_dead_owners_claim_leaves_doubt_and_the_lane_waits_for_a_verdict(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.send("two")
    await desk.claimed()
    other = Desk(await engine.open())
    assert await other.claim() == Wait(None)
    assert (await desk.show("one")).claim == "claimed"
    await other.store.write(bury_nodes, [desk.store.node])
    assert (await desk.show("one")).claim == "lapsed"
    waits = await other.claim()
    assert isinstance(waits, Wait)
    assert waits.until is not None
    assert await desk.status("one") == "unknown"
    later = Desk(await engine.open(ahead_ms=RULES.reconcile_wait_ms + 1_000))
    assert (await later.claimed()).delivery_id == "dlv_two", "it waits no longer than that"
    assert await desk.status("one") == "unknown"


@pytest.mark.contract("OUT-03")
async def test_an_own_claim_that_nobody_is_at_is_in_doubt_too(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.claimed()
    assert isinstance(await desk.claim(), Wait)
    assert await desk.status("one") == "unknown"


@pytest.mark.contract("OUT-02")
async def test_a_claim_run_again_is_the_same_claim(engine: Engine) -> None:
    desk = await desk_on(engine, target=False)
    token = ClaimToken("tty")
    await desk.store.write(
        routes.bind_route, SESSION, token, channel="terminal", node=desk.store.node
    )
    await desk.send("one")
    mine = desk.token()
    first = await desk.claim(mine, connections=frozenset({token}))
    await desk.store.write(routes.unbind_route, token)
    second = await desk.claim(mine, connections=frozenset())
    assert isinstance(first, Claimed)
    assert isinstance(second, Claimed)
    assert (second.fence, second.attempt) == (first.fence, 1)


@pytest.mark.contract("OUT-13")
async def test_who_lost_the_claim_can_record_nothing_but_that_it_arrived(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    stale = await desk.claimed()
    other = Desk(await engine.open())
    await other.store.write(bury_nodes, [desk.store.node])
    await other.claim()
    for outcome in (NotStarted("no"), Refused("no"), RetryAfter(1), Uncertain("no")):
        await other.record(stale, outcome)
        assert await desk.status("one") == "unknown"
    await other.record(stale, Sent("r1"))
    view = await desk.show("one")
    assert (view.status, view.parts[0].reference) == ("sent", "r1")
    await other.record(stale, Sent("r2"))
    assert (await desk.show("one")).parts[0].reference == "r1", "once"


@pytest.mark.contract("OUT-13")
async def test_a_process_whose_lease_has_ended_claims_nothing(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.store.write(bury_nodes, [desk.store.node])
    assert await desk.claim() == Wait(None)
    assert (await desk.show("one")).parts[0].attempts == 0


async def test_a_claim_says_how_long_its_owner_is_believed_alive(engine: Engine) -> None:
    desk = await desk_on(engine, lease_ms=30_000)
    await desk.send("one")
    assert 0 < (await desk.claimed()).lease_left_ms <= 30_000


@pytest.mark.contract("OUT-02")
async def test_who_serves_nothing_more_records_and_claims_no_next_part(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "a b")
    assert isinstance(await desk.record(await desk.claimed(), Sent("r1"), channels=()), Wait)
    view = await desk.show("one")
    assert (part_states(view), view.claim) == (["sent", "queued"], "ready")


# ---- doubt ----


@pytest.mark.contract("OUT-04")
@pytest.mark.parametrize(
    ("verdict", "status"), [(Found("r9"), "sent"), (Absent(), "queued"), (CannotTell(), "unknown")]
)
async def test_only_a_verdict_that_proves_it_absent_has_it_sent_again(
    engine: Engine, verdict: Verdict, status: str
) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    await desk.answer(await desk.question("one"), verdict)
    view = await desk.show("one")
    assert view.status == status
    assert (view.claim == "ready") == (status == "queued")
    assert isinstance(await desk.claim(), Claimed) == (status == "queued")


@pytest.mark.contract("OUT-04")
async def test_absent_means_nothing_before_the_call_is_over_and_settled(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    waits = await desk.answer(await desk.question("one"), Absent(), settle_ms=5_000)
    assert isinstance(waits, Wait)
    assert await desk.status("one") == "unknown"
    assert isinstance(await desk.ask("one"), Wait)
    later = Desk(await engine.open(ahead_ms=6_000))
    await later.answer(await later.question("one"), Absent(), settle_ms=5_000)
    assert await desk.status("one") == "queued"


@pytest.mark.contract("OUT-04", "OUT-13")
async def test_a_verdict_whose_claim_was_lost_says_nothing_but_found(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    stale = await desk.question("one")
    await desk.question("one")  # asked by another
    await desk.answer(stale, Absent())
    assert await desk.status("one") == "unknown"
    await desk.answer(stale, Found("r9"))
    assert await desk.status("one") == "sent"


@pytest.mark.contract("OUT-14")
async def test_a_platform_that_never_can_tell_leaves_it_to_the_operator(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one", "a b")
    await desk.send("two")
    for _ in range(RULES.reconciles_max):
        question = await desk.question("one")
        last = await desk.answer(question, CannotTell())
    assert last is None
    view = await desk.show("one")
    assert (view.status, view.handed_over) == ("unknown", True)
    assert await desk.ask("one") is None
    assert await desk.store.read(outbox.doubts, (0, ""), 10) == []
    assert (await desk.claimed()).index == 1, "the rest goes on"


@pytest.mark.contract("OUT-14")
async def test_a_platform_that_cannot_be_asked_hands_over_at_once(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    assert await desk.ask("one", asks={CHAT: False}) is None
    view = await desk.show("one")
    assert (view.status, view.handed_over) == ("unknown", True)


async def test_doubts_are_listed_page_by_page(engine: Engine) -> None:
    names: set[str] = set()
    store = await engine.open()
    for number in range(5):
        desk = await Desk(store, SessionId(f"session_{number}")).create()
        await desk.in_doubt(f"{number}")
    page: list[tuple[int, DeliveryId]] = [(0, DeliveryId(""))]
    while page:
        page = await store.read(outbox.doubts, page[-1], 2)
        names.update(name for _, name in page)
    assert names == {f"dlv_{n}" for n in range(5)}


# ---- the operator ----


@pytest.mark.contract("OUT-12")
async def test_a_view_shows_status_and_claim_as_they_stood_together(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    await desk.send("two")
    await desk.claimed()
    two, one = await desk.store.read(outbox.list_deliveries)
    assert (one.status, one.claim, one.claimed_by) == ("sending", "claimed", desk.store.node)
    assert (two.status, two.claim, two.claimed_by) == ("queued", "ready", None)
    assert one.address == f"conv {CHAT} {HERE}"
    named = await desk.store.read(outbox.list_deliveries, status=("sending",))
    assert [v.delivery_id for v in named] == ["dlv_one"]


@pytest.mark.contract("OUT-18")
async def test_an_operators_decisions_bear_their_name_and_are_made_once(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one")
    one = DeliveryId("dlv_one")
    for _ in range(2):
        view = await desk.store.write(outbox.abandon, one, "ann", ClaimToken("a"))
        assert (view.status, view.decided_by, view.parts[0].error) == ("failed", "ann", "abandoned")
    for _ in range(2):
        view = await desk.store.write(outbox.redeliver, one, "ben", ClaimToken("b"), RULES)
        assert (view.status, view.decided_by) == ("queued", "ben")
    await desk.record(await desk.claimed(), Uncertain("lost"))
    for _ in range(2):
        view = await desk.store.write(outbox.resolve_delivery, one, "sent", "cleo", ClaimToken("c"))
        assert (view.status, view.decided_by) == ("sent", "cleo")
    told = [(s.status, s.by) for s in await desk.log(DeliveryStatusChanged)]
    assert told == [("failed", "ann"), ("queued", "ben"), ("unknown", None), ("sent", "cleo")]
    for wrong in (outbox.abandon, outbox.resolve_delivery, outbox.redeliver):
        arguments: tuple[Any, ...] = ("ann", ClaimToken("d"))
        if wrong is outbox.resolve_delivery:
            arguments = ("sent", *arguments)
        if wrong is outbox.redeliver:
            arguments = (*arguments, RULES)
        with pytest.raises(InputError):
            await desk.store.write(wrong, one, *arguments)


@pytest.mark.contract("OUT-04", "OUT-18")
async def test_a_decision_to_send_again_is_no_licence_for_a_second_time(engine: Engine) -> None:
    """Its answer was lost, the delivery came into doubt anew, and the decision is written again."""
    desk = await desk_on(engine)
    await desk.in_doubt("one")
    decision = (outbox.resolve_delivery, DeliveryId("dlv_one"), "queued", "ann", ClaimToken("op"))
    await desk.store.write(*decision)
    await desk.record(await desk.claimed(), Uncertain("lost again"))
    view = await desk.store.write(*decision)
    assert view.status == "unknown"


# ---- what fails, in the history ----


@pytest.mark.contract("HIS-02", "HIS-03")
async def test_what_the_history_says_of_a_failure_comes_once_when_it_first_fails(
    engine: Engine,
) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "here it is", failure_history_text="it could not be sent")
    await desk.record(await desk.claimed(cut=whole), Refused("busy", retryable=True))
    assert await desk.seen() == ["here it is"], "a retryable refusal is no failure"
    later = Desk(await engine.open(ahead_ms=10_000))
    await later.record(await later.claimed(cut=whole), Refused("no"))
    assert await desk.seen() == ["it could not be sent"]
    again = (outbox.redeliver, DeliveryId("dlv_one"), "ann", ClaimToken("op"), RULES)
    await later.store.write(*again)
    await later.record(await later.claimed(cut=whole), Refused("no"))
    assert len(await desk.log(HistoryReplaced)) == 1
    assert await desk.seen() == ["it could not be sent"]


@pytest.mark.contract("HIS-03")
async def test_a_failed_delivery_keeps_its_place_in_the_history(engine: Engine) -> None:
    desk = await desk_on(engine)
    await desk.send("one", "hello")
    await desk.record(await desk.claimed(), Refused("no"))
    assert await desk.status("one") == "failed"
    assert await desk.seen() == ["hello"]
