"""Where what is said goes: by the session's id, to the route of its turn, and nowhere else."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from postroom.app import Room, open_store
from postroom.config import Limits
from postroom.domain.ids import CoreId, DeliveryId, SessionId
from postroom.domain.outbox import NotStarted, SendOutcome, Sent
from postroom.domain.parcel import Parcel, Piece
from postroom.errors import NotCommitted, UnknownSession
from postroom.flow import router as router_module
from postroom.mint import claim_token, delivery_id
from postroom.ports.channel import OutPart, Profile
from postroom.ports.route import (
    InteractionItem,
    InteractionOutbound,
    Question,
    RouteError,
    dispatch_status,
)
from postroom.ports.store import Tx
from postroom.scripts.outbox import send
from postroom.scripts.routes import (
    ToConnection,
    ToConversation,
    bind_route,
    target_of,
    unbind_route,
)
from postroom.scripts.session import create_session
from postroom.stores.node import bury_nodes
from postroom.testing import FaultyStore, PuppetModel, StoreWrapper, scripted
from tests.flow.support import SESSION, idle, until
from tests.flow.support_channel import (
    Line,
    Terminal,
    agent_of,
    deliveries,
    dm,
    never,
    room_with,
    settled,
)
from tests.support import bounded

ASK = Question("q1", SessionId(SESSION), "really?")


def part_of(session_id: str, text: str = "hello", conversation: str | None = None) -> OutPart:
    return OutPart(
        session_id=SessionId(session_id),
        delivery_id=DeliveryId("dlv_1"),
        index=0,
        count=1,
        kind="text",
        conversation=conversation,  # type: ignore[arg-type]
        key="dlv_1.0",
        text=text,
    )


def outbound_of(session_id: str, **more: str) -> InteractionOutbound:
    item = InteractionItem(part_of(session_id, **more))
    return InteractionOutbound(SessionId(session_id), (item,))


async def tell(room: Room, session_id: str | None, text: str) -> DeliveryId:
    """Something is said in a session, outside of any turn."""
    parcel = Parcel(id=delivery_id(), kind="notice", pieces=(Piece(text),), policy="transient")
    assert session_id is not None
    await room.store.write(send, SessionId(session_id), parcel)
    return parcel.id


# ---- binding ----


@pytest.mark.contract("RTR-01")
async def test_the_last_bound_route_hears_and_unbinding_restores_the_one_before(
    database: str,
) -> None:
    async with room_with(database, [], scripted(then="echo")) as room:
        agent = await room.session(SESSION)
        first, second = Terminal(SESSION), Terminal(SESSION)
        one = await room.router.bind(agent.session_id, first)
        two = await room.router.bind(agent.session_id, second)
        assert one != two
        await agent.run("to the second")
        await second.hears("to the second")
        await room.router.unbind(two)
        await agent.run("to the first")
        await first.hears("to the first")
        for stale in (two, claim_token()):
            await room.router.unbind(stale)
        await agent.run("still the first")
        await first.hears("still the first")
        await room.router.unbind(one)
        await agent.run("to nobody")
        await settled(room, SESSION, "unrouted")
        assert (first.texts, second.texts) == (
            ["to the first", "still the first"],
            ["to the second"],
        )


async def test_a_route_of_another_session_and_a_session_that_is_not_there_cannot_be_bound(
    database: str,
) -> None:
    async with room_with(database, [], scripted()) as room:
        agent = await room.session(SESSION)
        with pytest.raises(RouteError):
            await room.router.bind(agent.session_id, Terminal("session_other"))
        with pytest.raises(UnknownSession):
            await room.router.bind(SessionId("session_none"), Terminal("session_none"))
        assert room.router.connections == frozenset()


async def test_a_bind_that_is_cancelled_leaves_no_row_that_would_pass_for_a_route(
    database: str,
) -> None:
    class Slow(StoreWrapper):
        hold = False

        async def write(self, script, *args, **kwargs):  # type: ignore[no-untyped-def]
            answer = await super().write(script, *args, **kwargs)
            if self.hold and script.__name__ == "bind_route":
                reached.set()
                await go.wait()
            return answer

    reached, go = asyncio.Event(), asyncio.Event()
    store = Slow(await open_store(database))
    async with room_with(database, [], scripted(then="echo"), store=store) as room:
        agent = await room.session(SESSION)
        store.hold = True
        binding = asyncio.ensure_future(room.router.bind(agent.session_id, Terminal(SESSION)))
        await bounded(reached.wait())
        binding.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await bounded(binding)
        assert room.router.connections == frozenset()
        await agent.run("to nobody")
        assert [d.status for d in await deliveries(room, SESSION)] == ["unrouted"]


async def test_an_unbind_that_the_store_refused_is_made_good_by_the_next(database: str) -> None:
    store = FaultyStore(await open_store(database))
    async with room_with(database, [], scripted(then="echo"), store=store) as room:
        agent = await room.session(SESSION)
        token = await room.router.bind(agent.session_id, Terminal(SESSION))
        store.refuse("unbind_route")
        with pytest.raises(NotCommitted):
            await room.router.unbind(token)
        await room.router.unbind(token)
        await agent.run("to nobody")
        assert [d.status for d in await deliveries(room, SESSION)] == ["unrouted"]


# ---- one session, nobody else's ----


@pytest.mark.contract("RTR-02")
async def test_every_kind_of_route_refuses_what_belongs_to_another_session(
    database: str,
) -> None:
    line = Line()
    async with room_with(database, [line], scripted(then="echo")) as room:
        accepted = await line.say("hello")
        await line.hears("hello")
        address = ToConversation("line", dm())
        assert accepted.session_id is not None
        chat = room.router.route_to(accepted.session_id, address)
        assert chat is not None
        heard = len(line.parts)
        for foreign in (
            outbound_of("session_other", conversation=dm()),
            outbound_of(accepted.session_id, conversation=dm("bob")),
        ):
            with pytest.raises(RouteError):
                await chat.deliver(foreign)
        agent = await room.session(SESSION)
        terminal = Terminal(SESSION)
        token = await room.router.bind(agent.session_id, terminal)
        live = ToConnection(token, "terminal", room.store.node)
        with pytest.raises(RouteError):
            await terminal.deliver(outbound_of("session_other"))
        # The router does not even find it for another session.
        answer = await room.router.deliver(outbound_of("session_other"), live)
        assert isinstance(answer, NotStarted)
        assert terminal.parts == []
        assert len(line.parts) == heard


@pytest.mark.contract("RTR-02")
async def test_what_two_sessions_say_cannot_travel_together() -> None:
    with pytest.raises(RouteError):
        InteractionOutbound(SessionId("session_a"), (InteractionItem(part_of("session_b")),))


@pytest.mark.contract("RTR-03")
async def test_an_outbound_without_a_session_is_a_typed_error() -> None:
    with pytest.raises(RouteError) as refused:
        InteractionOutbound(SessionId(""), ())
    assert refused.value.code == "route"


@pytest.mark.contract("RTR-03")
async def test_a_send_by_session_id_goes_there_and_to_no_sibling(database: str) -> None:
    """From anywhere: the id decides, not who was last heard, nor the channel that asked."""
    one, two = Line("one"), Line("two")
    async with room_with(database, [one, two], scripted(then="echo")) as room:
        first = await one.say("first")
        await one.hears("first")
        second = await two.say("second", to=dm("bob"))
        await two.hears("second")
        await tell(room, first.session_id, "for one")
        await one.hears("for one")
        await tell(room, second.session_id, "for two")
        await two.hears("for two")
        with pytest.raises(UnknownSession):
            await tell(room, "session_none", "for nobody")
        assert one.texts[1:] == ["for one"]
        assert two.texts[1:] == ["for two"]


@pytest.mark.contract("RTR-03")
async def test_what_metadata_say_addresses_nothing(database: str) -> None:
    line = Line()
    async with room_with(database, [line], scripted(then="echo")) as room:
        ann = await line.say("ann")
        bob = await line.say("bob", to=dm("bob"))
        await line.count(2)
        assert ann.session_id is not None
        parcel = Parcel(
            id=delivery_id(),
            kind="text",
            pieces=(Piece("for ann"),),
            metadata={
                "session_id": bob.session_id or "",
                "sessionId": bob.session_id or "",
                "conversation": dm("bob"),
                "channel": "line",
            },
        )
        await room.store.write(send, ann.session_id, parcel)
        part = await line.hears("for ann")
        assert (part.conversation, part.session_id) == (dm("ann"), ann.session_id)


@pytest.mark.contract("RTR-03")
def test_the_router_reads_no_lineage_no_context_and_no_key() -> None:
    names = set(inspect.getsource(router_module).split('"""', 2)[2].split())
    text = " ".join(names)
    for word in ("contextvars", "ContextVar", "parent", "parse_conversation_key", "current_"):
        assert word not in text


def test_a_dispatch_status_is_said_of_the_durable_one() -> None:
    told = {s: dispatch_status(s) for s in ("queued", "sending", "sent", "failed", "unrouted")}
    assert told == {
        "queued": "pending",
        "sending": "scheduled",
        "sent": "delivered",
        "failed": "failed",
        "unrouted": "unrouted",
    }
    assert InteractionItem(part_of(SESSION)).dispatch_status == "scheduled"


# ---- asking a person ----


@pytest.mark.contract("RTR-04")
async def test_questions_go_to_the_sessions_own_route_whoever_was_bound_since(
    database: str,
) -> None:
    async def yes(_: Question) -> str:
        return "yes"

    async def allowed(_: Question) -> bool:
        return True

    async with room_with(database, [], scripted()) as room:
        await room.session(SESSION)
        other = await room.session("session_other")
        mine, theirs = Terminal(SESSION), Terminal("session_other")
        mine.answer, mine.allow = yes, allowed
        await room.router.bind(SessionId(SESSION), mine)
        await room.router.bind(other.session_id, theirs)
        assert await bounded(room.router.prompt_user(ASK)) == "yes"
        assert await bounded(room.router.request_approval(ASK)) == (True, "asked")
        assert mine.asked == [ASK, ASK]
        assert theirs.asked == []


@pytest.mark.contract("RTR-04")
async def test_without_a_route_a_prompt_is_unanswered_and_an_approval_denied_with_the_reason(
    database: str,
) -> None:
    async with room_with(database, [], scripted()) as room:
        await room.session(SESSION)
        other = await room.session("session_other")
        await room.router.bind(other.session_id, Terminal("session_other"))
        assert await bounded(room.router.prompt_user(ASK)) is None
        allowed, why = await bounded(room.router.request_approval(ASK))
        assert allowed is False
        assert "nobody is attached" in why


@pytest.mark.contract("RTR-04", "RTR-06")
async def test_a_route_that_fails_or_goes_while_it_asks_answers_nothing_and_allows_nothing(
    database: str,
) -> None:
    async def breaks(_: Question) -> bool:
        raise OSError("the line broke")

    async def hangs(_: Question) -> bool:
        return await never()

    async with room_with(database, [], scripted()) as room:
        await room.session(SESSION)
        broken = Terminal(SESSION)
        broken.answer = broken.allow = breaks  # type: ignore[assignment]
        await room.router.bind(SessionId(SESSION), broken)
        assert await bounded(room.router.prompt_user(ASK)) is None
        allowed, why = await bounded(room.router.request_approval(ASK))
        assert (allowed, why) == (False, "the connection failed to ask")
        for ask, expected in (
            (room.router.prompt_user, None),
            (room.router.request_approval, (False, "the connection was lost")),
        ):
            leaving = Terminal(SESSION)
            leaving.answer = leaving.allow = hangs  # type: ignore[assignment]
            token = await room.router.bind(SessionId(SESSION), leaving)
            asking = asyncio.ensure_future(ask(ASK))
            await bounded(leaving.asked_news.wait())
            await room.router.unbind(token)
            assert await bounded(asking) == expected


# ---- routes that fail ----


@pytest.mark.contract("RTR-06")
async def test_a_route_that_raises_leaves_its_delivery_in_doubt_and_the_next_one_goes_on(
    database: str,
) -> None:
    async def breaks(part: OutPart) -> SendOutcome:
        if "breaks" in part.text:
            raise RuntimeError("the line broke")
        return Sent(None)

    async with room_with(database, [], scripted(then="echo")) as room:
        agent = await room.session(SESSION)
        terminal = Terminal(SESSION)
        terminal.deliver_with = breaks
        await room.router.bind(agent.session_id, terminal)
        await agent.run("this breaks")
        await settled(room, SESSION, "unknown")
        await agent.run("this arrives")
        await terminal.hears("this arrives")
        assert terminal.texts == ["this arrives"], "what is in doubt is not sent again"


@pytest.mark.contract("RTR-06")
async def test_a_route_that_hangs_is_given_up_and_holds_no_other_session_up(
    database: str,
) -> None:
    async def hangs(_: OutPart) -> SendOutcome:
        hanging.set()
        return await never()

    hanging = asyncio.Event()
    async with room_with(database, [], scripted(then="echo")) as room:
        stuck, other = await room.session(SESSION), await room.session("session_other")
        terminal, fine = Terminal(SESSION), Terminal("session_other")
        terminal.profile = Profile(send_timeout_ms=300)  # type: ignore[misc]
        terminal.deliver_with = hangs
        await room.router.bind(stuck.session_id, terminal)
        await room.router.bind(other.session_id, fine)
        await stuck.run("lost")
        await bounded(hanging.wait())
        await other.run("meanwhile")
        await fine.hears("meanwhile")
        await settled(room, SESSION, "unknown")
        terminal.deliver_with = None
        await stuck.run("after it")
        await terminal.hears("after it")


@pytest.mark.contract("RTR-06")
async def test_a_route_that_goes_before_the_call_hands_over_to_the_one_before_it(
    database: str,
) -> None:
    async with room_with(database, [], scripted(then="echo")) as room:
        agent = await room.session(SESSION)
        stays, goes = Terminal(SESSION), Terminal(SESSION)
        await room.router.bind(agent.session_id, stays)
        token = await room.router.bind(agent.session_id, goes)

        async def leaves(_: OutPart) -> SendOutcome:
            await room.router.unbind(token)
            return NotStarted("the connection is closed")

        goes.deliver_with = leaves
        await agent.run("hello")
        await stays.hears("hello")
        await settled(room, SESSION, "sent")


# ---- the route of a turn ----


@pytest.mark.contract("RTR-08")
async def test_an_answer_goes_to_the_route_that_was_primary_when_its_turn_opened(
    database: str,
) -> None:
    model = PuppetModel()
    async with room_with(database, [], model) as room:
        agent = await room.session(SESSION)
        opener, later = Terminal(SESSION), Terminal(SESSION)
        await room.router.bind(agent.session_id, opener)
        await agent.followup("a question")
        asked = await bounded(model.asked())
        await room.router.bind(agent.session_id, later)
        asked.say("the answer")
        await opener.hears("the answer")
        await agent.followup("another")
        (await bounded(model.asked())).say("another answer")
        await later.hears("another answer")
        assert (opener.texts, later.texts) == (["the answer"], ["another answer"])


@pytest.mark.contract("RTR-08")
async def test_if_that_route_is_gone_the_answer_goes_to_the_primary_one_of_then(
    database: str,
) -> None:
    model = PuppetModel()
    async with room_with(database, [], model) as room:
        agent = await room.session(SESSION)
        opener, later = Terminal(SESSION), Terminal(SESSION)
        token = await room.router.bind(agent.session_id, opener)
        await agent.followup("a question")
        asked = await bounded(model.asked())
        await room.router.bind(agent.session_id, later)
        await room.router.unbind(token)
        asked.say("the answer")
        await later.hears("the answer")
        assert opener.texts == []


@pytest.mark.contract("RTR-08")
async def test_if_no_route_is_left_the_answer_goes_to_the_conversation_it_is_bound_to(
    database: str,
) -> None:
    """A terminal opened the turn and left: the chat that owns the session is asked for a route."""
    model, line = PuppetModel(), Line()
    async with room_with(database, [line], model) as room:
        accepted = await line.say("hello")
        (await bounded(model.asked())).say("hello yourself")
        await line.hears("hello yourself")
        agent = agent_of(room, accepted)
        await idle(agent)
        await room.store.write(_forget_routes)
        terminal = Terminal(agent.session_id)
        token = await room.router.bind(agent.session_id, terminal)
        await agent.followup("a question")
        asked = await bounded(model.asked())
        await room.router.unbind(token)
        asked.say("the answer")
        part = await line.hears("the answer")
        assert part.conversation == dm()
        assert terminal.texts == []


def _forget_routes(tx: Tx) -> None:
    tx.execute("DELETE FROM route")


@pytest.mark.contract("RTR-08")
async def test_if_nothing_binds_it_the_answer_goes_to_the_sessions_target(
    database: str,
) -> None:
    line = Line()
    async with room_with(database, [line], scripted(then="echo")) as room:
        session_id = SessionId("session_of_a_schedule")
        await room.store.write(
            create_session,
            session_id,
            core_id=CoreId("default"),
            owner="schedule:morning",
            target=target_of("line", dm("bob")),
        )
        await room.agent(session_id).followup("good morning")
        part = await line.hears("good morning")
        assert part.conversation == dm("bob")


@pytest.mark.contract("RTR-08")
async def test_if_nothing_owns_the_session_the_answer_is_unrouted(database: str) -> None:
    model = PuppetModel()
    async with room_with(database, [], model) as room:
        agent = await room.session(SESSION)
        terminal = Terminal(SESSION)
        token = await room.router.bind(agent.session_id, terminal)
        await agent.followup("a question")
        asked = await bounded(model.asked())
        await room.router.unbind(token)
        asked.say("the answer")
        await settled(room, SESSION, "unrouted")
        assert terminal.texts == []


@pytest.mark.contract("RTR-08")
async def test_an_answer_never_goes_to_where_another_session_was_heard_last(
    database: str,
) -> None:
    """Two sessions, a slow model, and the second speaks on another channel while the first waits."""
    model, one, two = PuppetModel(), Line("one"), Line("two")
    async with room_with(database, [one, two], model) as room:
        first = await one.say("from ann")
        slow = await bounded(model.asked())
        await two.say("from bob", to=dm("bob"))
        quick = await bounded(model.asked())
        quick.say("for bob")
        part = await two.hears("for bob")
        assert part.conversation == dm("bob")
        await two.say("from bob again", to=dm("bob"))
        slow.say("for ann")
        part = await one.hears("for ann")
        assert (part.conversation, part.session_id) == (dm(), first.session_id)
        assert two.texts == ["for bob"]
        assert one.texts == ["for ann"]
        await settled(room, first.session_id, "sent")


@pytest.mark.contract("RTR-08")
async def test_an_answer_begun_in_a_chat_goes_there_though_a_terminal_has_joined_since(
    database: str,
) -> None:
    model, line = PuppetModel(), Line()
    async with room_with(database, [line], model) as room:
        accepted = await line.say("a question")
        asked = await bounded(model.asked())
        agent = agent_of(room, accepted)
        await room.router.bind(agent.session_id, Terminal(agent.session_id))
        asked.say("the answer")
        await line.hears("the answer")


# ---- a lease that was lost ----


@pytest.mark.contract("RTR-06")
async def test_after_a_lost_lease_live_routes_are_bound_again_in_their_places(
    database: str,
) -> None:
    limits = Limits(lease_sqlite_ms=1_000)
    async with room_with(database, [], scripted(then="echo"), limits=limits) as room:
        agent = await room.session(SESSION)
        first, second = Terminal(SESSION), Terminal(SESSION)
        await room.router.bind(agent.session_id, first)
        token = await room.router.bind(agent.session_id, second)
        await agent.run("before")
        await second.hears("before")
        old = room.store.node
        await room.store.write(bury_nodes, [old])

        async def bound_again() -> bool:
            nodes = await room.store.read(_route_nodes)
            return room.store.node != old and nodes == [room.store.node] * 2

        await until(bound_again)
        await agent.run("after")
        await second.hears("after")
        await room.router.unbind(token)
        await agent.run("and the one before it")
        await first.hears("and the one before it")


def _route_nodes(tx: Tx) -> list[str]:
    return [row[0] for row in tx.execute("SELECT node FROM route ORDER BY id")]


@pytest.mark.contract("RTR-08")
async def test_what_waits_for_another_nodes_terminal_comes_here_once_that_is_unbound(
    database: str,
) -> None:
    """The other process holds the connection and does not send: this one may not, until it is gone."""
    line = Line()
    other = await open_store(database)
    async with room_with(database, [line], scripted(then="echo")) as room:
        accepted = await line.say("hello")
        await line.hears("hello")
        agent = agent_of(room, accepted)
        await idle(agent)
        away = claim_token()
        await other.write(bind_route, agent.session_id, away, channel="terminal", node=other.node)
        await agent.followup("to the other")
        await idle(agent)
        waiting = [d.status for d in await deliveries(room, agent.session_id)]
        assert waiting == ["sent", "queued"]
        await other.write(unbind_route, away)
        await line.hears("to the other")
    await other.aclose()


@pytest.mark.contract("RTR-07")
async def test_a_message_brings_what_waits_for_another_nodes_terminal_to_its_chat(
    database: str,
) -> None:
    """What no turn said goes to the primary route of now: the chat's, from its next message on."""
    line, model = Line(), PuppetModel()
    other = await open_store(database)
    async with room_with(database, [line], model) as room:
        accepted = await line.say("hello")
        (await bounded(model.asked())).say("hello yourself")
        await line.hears("hello yourself")
        agent = agent_of(room, accepted)
        await idle(agent)
        await other.write(
            bind_route, agent.session_id, claim_token(), channel="terminal", node=other.node
        )
        await tell(room, agent.session_id, "a notice")
        await settled(room, agent.session_id, "sent")
        await settled(room, agent.session_id, "queued")
        await line.say("I am here")
        await line.hears("a notice")
        assert len(line.parts) == 2
    await other.aclose()


@pytest.mark.contract("RTR-06")
async def test_binding_again_after_a_lost_lease_outlives_a_store_that_refuses(
    database: str,
) -> None:
    store = FaultyStore(await open_store(database, limits=Limits(lease_sqlite_ms=1_000)))
    async with room_with(database, [], scripted(then="echo"), store=store) as room:
        agent = await room.session(SESSION)
        terminal = Terminal(SESSION)
        await room.router.bind(agent.session_id, terminal)
        old = room.store.node
        store.refuse("bind_route", times=2)
        await room.store.write(bury_nodes, [old])

        async def bound_again() -> bool:
            nodes = await room.store.read(_route_nodes)
            return room.store.node != old and nodes == [room.store.node]

        await until(bound_again)
        await agent.run("after")
        await terminal.hears("after")
