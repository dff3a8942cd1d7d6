"""What comes in from a platform is on disk whole or not at all, and once.

The scripts of `postroom.scripts.inbound` and the routes they bind, over both engines.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from postroom import mint
from postroom.config import Limits
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.event import InboxQueued, SessionCreated
from postroom.domain.ids import ClaimToken, CoreId, MessageId, SessionId
from postroom.domain.message import Image, InputBlock, Message, Source, Text, text_of
from postroom.errors import NotCommitted, QueueFull, UnknownSession
from postroom.flow import commands
from postroom.ports.channel import Accepted
from postroom.ports.store import Store, Tx
from postroom.scripts import inbound as scripts
from postroom.scripts import routes
from postroom.scripts.drive import begin_turn
from postroom.scripts.inbound import Answer, Arrival, Command, message_id_of
from postroom.scripts.inbox import cancel, replace_message
from postroom.scripts.log import delete_session, list_pending, session_info
from postroom.scripts.outbox import list_deliveries
from postroom.scripts.routes import ToConnection, ToConversation
from postroom.scripts.session import create_session, lock_session
from postroom.stores.node import remove_node
from tests.contract.store_world import (
    CORE,
    HEADER,
    Engine,
    Gate,
    Hand,
    PostgresEngine,
    message,
    until,
)
from tests.support import bounded

CHANNEL = "bot"
HERE = conversation_key("loopback", "dm", "here")
THERE = conversation_key("loopback", "dm", "there")
ANN = Source(kind="conversation", sender="Ann", sender_id="ann", channel=CHANNEL)


def arrival(
    dedupe: str = "1",
    conversation: ConversationKey = HERE,
    *,
    cursor: str | None = None,
    ref: str | None = None,
    channel: str = CHANNEL,
) -> Arrival:
    """One handling of an event. The cursor is named ``offset``."""
    return Arrival(
        ref=ClaimToken(ref) if ref is not None else mint.claim_token(),
        core_id=CORE,
        channel=channel,
        conversation=conversation,
        dedupe=dedupe,
        cursor=("offset", cursor) if cursor is not None else None,
        owner=f"conversation:{channel}:{conversation}",
        new_session=mint.session_id(),
    )


def said(one: Arrival, text: str, *more: InputBlock) -> Message:
    return Message(message_id_of(one.channel, one.dedupe), (Text(text), *more), ANN)


async def comes(
    store: Store, text: str, one: Arrival | None = None, dedupe: str = "1", **more: Any
) -> Accepted:
    """A message of the conversation arrives."""
    one = one or arrival(dedupe)
    more.setdefault("pending_max", 100)
    return await bounded(store.write(scripts.accept_message, one, said(one, text), **more))


async def commanded(store: Store, text: str, dedupe: str) -> Accepted:
    """A person says a command in the conversation."""
    one = arrival(dedupe)
    asked = commands.parse(text)
    assert asked is not None
    script = commands.command(asked, said(one, text), 100)
    return await bounded(store.write(scripts.run_command, one, script))


async def pending(store: Store, session_id: SessionId | None) -> list[str]:
    assert session_id is not None
    waiting = await store.read(list_pending, session_id)
    return [text_of(p.message.content) for p in waiting]


async def cursor(store: Store) -> str | None:
    return await store.read(scripts.read_cursor, CHANNEL, "offset")


async def notices(store: Store, session_id: SessionId | None) -> list[str]:
    found = await store.read(list_deliveries, session_id=session_id)
    return [part.text for delivery in reversed(found) for part in delivery.parts]


async def turn_opens(store: Store, session_id: SessionId | None) -> Hand:
    assert session_id is not None
    hand = Hand(store, session_id)
    drive = await hand.claimed()
    number = drive.progress.state.turns + 1
    await store.write(begin_turn, session_id, drive.fence, number, HEADER)
    return hand


def _sid(tx: Tx, session_id: SessionId) -> int:
    return lock_session(tx, session_id).sid


def _primary(tx: Tx, session_id: SessionId) -> str | None:
    return routes.primary_route(tx, _sid(tx, session_id))


async def primary(store: Store, session_id: SessionId) -> str | None:
    return await store.write(_primary, session_id)


def _resolved(
    tx: Tx, session_id: SessionId, wanted: str | None, target: str | None
) -> routes.Address | None:
    return routes.resolve(tx, _sid(tx, session_id), wanted, target)


async def resolved(
    store: Store,
    session_id: SessionId,
    wanted: str | None = None,
    target: str | None = None,
) -> routes.Address | None:
    return await store.write(_resolved, session_id, wanted, target)


# ---- one transaction ----


@pytest.mark.contract("CHN-01")
async def test_key_cursor_binding_session_and_message_commit_together(engine: Engine) -> None:
    store = await engine.open()
    one = arrival("update-7", cursor="7")
    accepted = await comes(store, "hello", one)
    assert accepted == Accepted("queued", one.new_session, message_id_of(CHANNEL, "update-7"))
    assert await cursor(store) == "7"
    assert await pending(store, accepted.session_id) == ["hello"]
    info = await store.read(session_info, one.new_session)
    assert (info.owner, info.status, info.core_id) == (one.owner, "running", CORE)
    bound = await store.read(routes.bound_session, CORE, CHANNEL, HERE)
    assert bound == one.new_session
    assert await primary(store, one.new_session) == f"conv {CHANNEL} {HERE}"


@pytest.mark.contract("CHN-01")
async def test_what_is_not_committed_leaves_no_key_no_cursor_and_no_session(
    engine: Engine,
) -> None:
    with engine.disk() as disk:
        store = await engine.open(**disk.options)
        await comes(store, "first", arrival("0", THERE))
        disk.fail_commit()
        with pytest.raises(NotCommitted):
            await comes(store, "hello", arrival("update-7", cursor="7"))
        assert await cursor(store) is None
        assert await store.read(routes.bound_session, CORE, CHANNEL, HERE) is None
        assert engine.rows("SELECT count(*) FROM dedupe")[0][0] == 1
        assert engine.rows("SELECT count(*) FROM session")[0][0] == 1
        again = await comes(store, "hello", arrival("update-7", cursor="7"))
        assert again.outcome == "queued", "the platform sends it again, and it is taken"
        assert await cursor(store) == "7"


async def test_a_refused_message_takes_its_key_and_cursor_back(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "first", arrival("1", cursor="1"))
    with pytest.raises(QueueFull):
        await comes(store, "second", arrival("2", cursor="2"), pending_max=1)
    assert await cursor(store) == "1"
    assert await pending(store, first.session_id) == ["first"]


async def test_an_arrival_run_again_answers_the_same(engine: Engine) -> None:
    store = await engine.open()
    one = arrival("1", cursor="1")
    answers = [await comes(store, "hello", one) for _ in range(3)]
    assert answers == [answers[0]] * 3
    assert answers[0].outcome == "queued"


# ---- once ----


@pytest.mark.contract("CHN-01")
async def test_an_event_that_comes_again_is_a_duplicate_however_it_is_relabelled(
    engine: Engine,
) -> None:
    store = await engine.open()
    first = await comes(store, "hello", arrival("1", cursor="10"))
    await comes(store, "more", arrival("2", cursor="11"))
    for text, place, where in (
        ("hello", HERE, "10"),
        ("hello, edited", HERE, "12"),
        ("hello", THERE, None),
    ):
        copy = await comes(store, text, arrival("1", place, cursor=where))
        assert copy == Accepted("duplicate", first.session_id, first.message_id)
    assert await pending(store, first.session_id) == ["hello", "more"]
    assert await cursor(store) == "11", "a late copy does not move it"
    assert await store.read(routes.bound_session, CORE, CHANNEL, THERE) is None


@pytest.mark.contract("CHN-01")
async def test_the_same_event_on_two_tasks_runs_once(engine: Engine) -> None:
    one, two = await engine.open(), await engine.open()
    for number in range(5):
        copies = [
            comes(store, f"hello {number}", arrival(f"{number}")) for store in (one, two, one, two)
        ]
        outcomes = sorted(a.outcome for a in await asyncio.gather(*copies))
        assert outcomes == ["duplicate", "duplicate", "duplicate", "queued"]
    bound = await one.read(routes.bound_session, CORE, CHANNEL, HERE)
    assert await pending(one, bound) == [f"hello {n}" for n in range(5)]


async def test_an_event_of_another_channel_with_the_same_key_is_another(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "hello", arrival("1"))
    second = await comes(store, "hello", arrival("1", channel="another"))
    assert [first.outcome, second.outcome] == ["queued", "queued"]
    assert first.session_id != second.session_id
    assert first.message_id != second.message_id


@pytest.mark.contract("CHN-01")
async def test_a_forgotten_event_that_comes_again_still_runs_once(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "hello", arrival("1"))
    await commanded(store, "/new", "2")
    await store.write(scripts.forget_old, 2**52)
    assert engine.rows("SELECT count(*) FROM dedupe")[0][0] == 0
    late = await comes(store, "hello, relabelled", arrival("1"))
    assert (late.outcome, late.message_id) == ("duplicate", first.message_id)


async def test_only_old_events_are_forgotten(engine: Engine) -> None:
    old, now = await engine.open(), await engine.open(ahead_ms=Limits().dedupe_kept_ms)
    await comes(old, "long ago", arrival("1"))
    await comes(now, "just now", arrival("2"))
    before = engine.rows("SELECT max(at) FROM dedupe")[0][0] - 1000
    await now.write(scripts.forget_old, before)
    assert engine.rows("SELECT key FROM dedupe") == [("2",)]


@pytest.mark.contract("CHN-01")
async def test_what_is_dropped_is_remembered_and_moves_the_cursor(engine: Engine) -> None:
    store = await engine.open()
    for number, outcome in enumerate(("refused", "ignored")):
        one = arrival(outcome, cursor=f"{number}")
        assert await store.write(scripts.drop, one, Accepted(outcome)) == Accepted(outcome)
        assert await store.write(scripts.drop, one, Accepted(outcome)) == Accepted(outcome)
        again = await store.write(scripts.drop, arrival(outcome), Accepted(outcome))
        assert again.outcome == "duplicate"
    assert await cursor(store) == "1"
    assert engine.rows("SELECT count(*) FROM session")[0][0] == 0, "a stranger makes no session"


@pytest.mark.contract("CHN-06")
async def test_quarantine_keeps_the_event_and_moves_the_cursor_once(engine: Engine) -> None:
    store = await engine.open()
    for _ in range(2):
        await store.write(scripts.quarantine, CHANNEL, "1", "{]", "no JSON", ("offset", "1"))
    assert engine.rows("SELECT key, raw, error FROM quarantine") == [("1", "{]", "no JSON")]
    await comes(store, "hello", arrival("2", cursor="2"))
    await store.write(scripts.quarantine, CHANNEL, "1", "{]", "again", ("offset", "1"))
    await store.write(scripts.quarantine, CHANNEL, "2", "{]", "taken", ("offset", "0"))
    assert await cursor(store) == "2", "a late copy does not set it back"


# ---- one session ----


@pytest.mark.contract("BND-01")
@pytest.mark.parametrize("nodes", [1, 2])
async def test_two_first_messages_at_once_make_one_session(engine: Engine, nodes: int) -> None:
    stores = [await engine.open() for _ in range(nodes)]
    taken = await asyncio.gather(
        *[comes(stores[n % nodes], f"m{n}", arrival(f"{n}")) for n in range(8)]
    )
    assert len({a.session_id for a in taken}) == 1
    assert {a.outcome for a in taken} == {"queued"}
    assert engine.rows("SELECT count(*) FROM session")[0][0] == 1
    assert engine.rows("SELECT count(*) FROM binding")[0][0] == 1
    assert engine.rows("SELECT count(*) FROM route")[0][0] == 1
    assert sorted(await pending(stores[0], taken[0].session_id)) == [f"m{n}" for n in range(8)]


@pytest.mark.contract("BND-01")
async def test_a_conversation_whose_session_was_deleted_gets_one_new_one(engine: Engine) -> None:
    store, other = await engine.open(), await engine.open()
    first = await comes(store, "hello", arrival("1"))
    assert first.session_id is not None
    stop = mint.claim_token()
    await store.write(cancel, first.session_id, "user", keep_inbox=False, ref=stop)
    await store.write(delete_session, first.session_id)
    taken = await asyncio.gather(
        *[comes((store, other)[n % 2], f"m{n}", arrival(f"again-{n}")) for n in range(4)]
    )
    assert len({a.session_id for a in taken}) == 1
    assert taken[0].session_id != first.session_id


@pytest.mark.contract("BND-01")
async def test_conversations_channels_and_cores_have_sessions_of_their_own(
    engine: Engine,
) -> None:
    store = await engine.open()
    here = await comes(store, "a", arrival("1"))
    there = await comes(store, "b", arrival("2", THERE))
    other = await comes(store, "c", arrival("3", channel="another"))
    assert len({here.session_id, there.session_id, other.session_id}) == 3
    again = await comes(store, "d", arrival("4"))
    assert again.session_id == here.session_id


async def test_a_message_beside_a_new_lands_where_the_route_is(engine: Engine) -> None:
    """Whichever is first: the conversation's route and binding name one session."""
    one, two = await engine.open(), await engine.open()
    await comes(one, "first", arrival("0"))
    for number in range(6):
        await asyncio.gather(
            commanded(one, "/new", f"new {number}"),
            comes(two, f"beside {number}", arrival(f"beside {number}")),
        )
        bound = await one.read(routes.bound_session, CORE, CHANNEL, HERE)
        assert bound is not None
        assert await primary(one, bound) == f"conv {CHANNEL} {HERE}"
    assert engine.rows("SELECT count(*) FROM route")[0][0] == 1


@pytest.mark.contract("BND-01", "RTR-05")
async def test_a_new_that_overtakes_a_message_leaves_no_route_behind(
    postgres_engine: PostgresEngine,
) -> None:
    """The message takes the route back from a terminal while the command moves it: one after the other."""
    gate = Gate()
    one, two = await postgres_engine.open(on_commit=gate), await postgres_engine.open()
    old = await comes(one, "first", arrival("1"))
    assert old.session_id is not None
    await bind(two, old.session_id, "terminal")
    gate.hold()
    coming = asyncio.ensure_future(comes(one, "second", arrival("2")))
    await gate.reached()
    leaving = asyncio.ensure_future(commanded(two, "/new", "3"))
    await until(lambda: postgres_engine.rows(_WAITING))
    gate.open()
    await coming
    new = await leaving
    chats = postgres_engine.rows(
        "SELECT session.id FROM route JOIN session ON session.sid = route.sid"
        " WHERE conversation IS NOT NULL"
    )
    assert chats == [(new.session_id,)]
    assert await primary(two, old.session_id) == "live terminal"


_WAITING = (
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


# ---- a busy chat, edits, deletions ----


@pytest.mark.contract("CHN-11")
async def test_a_busy_chat_is_told_its_place_in_line(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "first", arrival("1"))
    assert await notices(store, first.session_id) == [], "an idle agent just answers"
    await turn_opens(store, first.session_id)
    await comes(store, "second", arrival("2"))
    third = arrival("3")
    for _ in range(2):
        await comes(store, "third", third)
    told = await notices(store, first.session_id)
    assert len(told) == 2, "a script that runs again says nothing twice"
    assert told[0].startswith("Queued: it comes next")
    assert told[1].startswith("Queued: 1 before it")


@pytest.mark.contract("CHN-11")
async def test_a_chat_is_busy_from_the_receipt_on(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "first", arrival("1"))
    await comes(store, "second", arrival("2"))
    assert [n[:18] for n in await notices(store, first.session_id)] == ["Queued: 1 before i"]


@pytest.mark.contract("CHN-12")
async def test_an_edit_before_entry_replaces_the_message_in_its_place(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "wrod", arrival("1"))
    await comes(store, "behind", arrival("2"))
    edit = arrival("edit 1")
    for _ in range(2):
        edited = await comes(store, "word", edit, replaces="1")
        assert edited.outcome == "edited"
    assert await pending(store, first.session_id) == ["word", "behind"]
    twice = await comes(store, "words", arrival("edit 2"), replaces="1")
    assert twice.outcome == "edited", "an edit of what was edited before"
    assert await pending(store, first.session_id) == ["words", "behind"]


@pytest.mark.contract("CHN-12")
async def test_an_edit_after_entry_is_a_new_message(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "wrod", arrival("1"))
    await turn_opens(store, first.session_id)
    edited = await comes(store, "word", arrival("edit"), replaces="1")
    assert edited.outcome == "queued"
    assert await pending(store, first.session_id) == ["word"]
    unknown = await comes(store, "of nothing", arrival("edit 2"), replaces="never came")
    assert unknown.outcome == "queued"


@pytest.mark.contract("CHN-12")
async def test_an_edit_finds_its_message_in_the_session_it_waits_in(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "wrod", arrival("1"))
    await commanded(store, "/new", "2")
    edited = await comes(store, "word", arrival("edit"), replaces="1")
    assert edited.outcome == "edited"
    assert edited.session_id == first.session_id
    assert await pending(store, first.session_id) == ["word"]
    foreign = await comes(store, "not yours", arrival("x", THERE), replaces="edit")
    assert foreign.outcome == "queued"
    assert await pending(store, first.session_id) == ["word"]


@pytest.mark.contract("CHN-12")
async def test_a_deletion_removes_a_pending_message_and_nothing_else(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "taken back", arrival("1"))
    await comes(store, "stays", arrival("2"))
    await comes(store, "edited", arrival("edit"), replaces="1")
    gone = arrival("delete 1")
    for _ in range(2):
        deleted = await store.write(scripts.delete_message, gone, "1")
        assert deleted == Accepted("deleted", first.session_id), "what it was edited to goes"
    assert await pending(store, first.session_id) == ["stays"]
    foreign = await store.write(scripts.delete_message, arrival("x", THERE), "2")
    assert foreign == Accepted("ignored")
    await turn_opens(store, first.session_id)
    late = await store.write(scripts.delete_message, arrival("delete 2"), "2")
    assert late.outcome == "ignored"
    never = await store.write(scripts.delete_message, arrival("delete 3"), "never came")
    assert never == Accepted("ignored")


@pytest.mark.contract("CHN-12")
async def test_a_deletion_follows_an_edit_made_in_the_queue(engine: Engine) -> None:
    store = await engine.open()
    first = await comes(store, "one", arrival("1"))
    assert first.session_id is not None
    assert first.message_id is not None
    await store.write(
        replace_message, first.session_id, first.message_id, message("other", "other")
    )
    deleted = await store.write(scripts.delete_message, arrival("delete"), "1")
    assert deleted.outcome == "deleted"
    assert await pending(store, first.session_id) == []


# ---- commands, and the sessions of a conversation ----


async def test_a_command_and_its_answer_are_one_transaction_and_happen_once(
    engine: Engine,
) -> None:
    store = await engine.open()
    ran: list[SessionId] = []

    def count(tx: Tx, one: Arrival, session_id: SessionId) -> Answer:
        ran.append(session_id)
        return Answer("done", session_id)

    asked: Command = count
    one = arrival("1", cursor="1")
    first = await store.write(scripts.run_command, one, asked)
    again = await store.write(scripts.run_command, one, asked)
    copy = await store.write(scripts.run_command, arrival("1"), asked)
    assert first == again == Accepted("command", one.new_session)
    assert copy.outcome == "duplicate"
    assert ran == [one.new_session]
    assert await notices(store, one.new_session) == ["done"]
    assert await cursor(store) == "1"


@pytest.mark.contract("RTR-05")
async def test_new_moves_the_binding_and_the_route_and_leaves_the_old_session_unrouted(
    engine: Engine,
) -> None:
    store = await engine.open()
    old = await comes(store, "first", arrival("1"))
    assert old.session_id is not None
    for _ in range(2):
        new = await commanded(store, "/new", "2")
    bound = await store.read(routes.bound_session, CORE, CHANNEL, HERE)
    assert bound == new.session_id != old.session_id
    assert bound is not None
    assert await primary(store, bound) == f"conv {CHANNEL} {HERE}"
    assert await primary(store, old.session_id) is None
    assert await resolved(store, old.session_id, f"conv {CHANNEL} {HERE}") is None
    assert (await store.read(session_info, bound)).owner == arrival().owner


@pytest.mark.contract("RTR-05")
async def test_new_as_the_first_thing_ever_said_makes_one_session(engine: Engine) -> None:
    store = await engine.open()
    new = await commanded(store, "/new", "1")
    assert new.outcome == "command"
    assert engine.rows("SELECT id FROM session") == [(new.session_id,)]
    assert engine.rows("SELECT count(*) FROM route")[0][0] == 1


@pytest.mark.contract("RTR-05", "BND-02")
async def test_resume_goes_back_durably_and_only_to_a_session_of_its_own(
    engine: Engine,
) -> None:
    store = await engine.open()
    old = await comes(store, "first", arrival("1"))
    foreign = await comes(store, "private", arrival("x", THERE))
    new = await commanded(store, "/new", "2")
    for number, wanted in enumerate((f"{foreign.session_id}", "3", "0", "9" * 6000, "session_x")):
        refused = await commanded(store, f"/resume {wanted}", f"try {number}")
        assert refused.session_id == new.session_id
    back = await commanded(store, f"/resume {old.session_id}", "3")
    assert back.session_id == old.session_id
    bound = await store.read(routes.bound_session, CORE, CHANNEL, HERE)
    assert bound == old.session_id
    later = await comes(store, "and on", arrival("4"))
    assert later.session_id == old.session_id
    forth = await commanded(store, "/resume 1", "5")
    assert forth.session_id == new.session_id


@pytest.mark.contract("BND-02")
async def test_a_conversation_lists_its_own_sessions_newest_first_and_no_others(
    engine: Engine,
) -> None:
    store = await engine.open()
    first = await comes(store, "first words", arrival("1"))
    await comes(store, "private", arrival("x", THERE))
    await comes(store, "another bot's", arrival("y", channel="another"))
    second = await commanded(store, "/new", "2")
    await commanded(store, f"/resume {first.session_id}", "3")
    await comes(store, "more", arrival("4"))
    own = await store.read(routes.sessions_of, CORE, CHANNEL, HERE)
    assert [(s, t) for s, t, _ in own] == [
        (second.session_id, None),
        (first.session_id, "first words"),
    ]
    assert await store.read(routes.sessions_of, CoreId("other"), CHANNEL, HERE) == []


async def test_a_session_is_called_by_its_first_words(engine: Engine) -> None:
    store = await engine.open()
    long = "Please  look\nat the\0 third chapter again, and tell me what the author means by it"
    first = await comes(store, long, arrival("1"))
    await comes(store, "something else", arrival("2"))
    assert first.session_id is not None
    title = (await store.read(session_info, first.session_id)).title
    assert title == "Please look at the third chapter again, and tell me what…"
    assert len(title) <= scripts.TITLE_MAX


async def test_a_picture_gives_no_title_and_the_first_words_after_it_do(engine: Engine) -> None:
    store = await engine.open()
    one = arrival("1")
    picture = Image(artifact="sha256:" + "0" * 64, media_type="image/png", size=1)
    await store.write(
        scripts.accept_message,
        one,
        Message(message_id_of(CHANNEL, "1"), (picture,), ANN),
        pending_max=9,
    )
    assert (await store.read(session_info, one.new_session)).title is None
    await comes(store, "w" * 100, arrival("2"))
    assert (await store.read(session_info, one.new_session)).title == "w" * 59 + "…"


async def test_a_character_that_an_engine_cannot_keep_does_not_hold_a_chat_up(
    engine: Engine,
) -> None:
    store = await engine.open()
    await comes(store, "nothing\0 here", arrival("1"))
    accepted = await commanded(store, "/resume a\0b", "2")
    assert "has no conversation a" in (await notices(store, accepted.session_id))[0]
    await store.write(scripts.quarantine, CHANNEL, "\0", "\0", "\0", None)


# ---- routes ----


async def session(store: Store, name: str = "session_one") -> SessionId:
    session_id = SessionId(name)
    await store.write(create_session, session_id, core_id=CORE, owner="operator")
    return session_id


async def bind(store: Store, session_id: SessionId, token: str) -> None:
    await store.write(
        routes.bind_route, session_id, ClaimToken(token), channel="terminal", node=store.node
    )


async def unbind(store: Store, token: str) -> None:
    await store.write(routes.unbind_route, ClaimToken(token))


@pytest.mark.contract("RTR-01")
async def test_the_latest_bind_is_primary_and_unbinding_it_restores_the_one_before(
    engine: Engine,
) -> None:
    store = await engine.open()
    one, other = await session(store), await session(store, "session_other")
    assert await primary(store, one) is None
    for token in ("a", "b", "c"):
        await bind(store, one, token)
    await bind(store, one, "b")  # again: it stays where it is
    await bind(store, other, "d")
    assert await primary(store, one) == "live c"
    await unbind(store, "b")
    assert await primary(store, one) == "live c"
    for _ in range(2):
        await unbind(store, "c")
        assert await primary(store, one) == "live a"
    await unbind(store, "never bound")
    await unbind(store, "a")
    assert await primary(store, one) is None
    assert await primary(store, other) == "live d"


@pytest.mark.contract("RTR-01")
async def test_a_conversation_and_a_connection_take_turns_by_who_came_last(
    engine: Engine,
) -> None:
    store = await engine.open()
    first = await comes(store, "from the chat", arrival("1"))
    assert first.session_id is not None
    await bind(store, first.session_id, "a")
    assert await primary(store, first.session_id) == "live a"
    await comes(store, "from the chat again", arrival("2"))
    assert await primary(store, first.session_id) == f"conv {CHANNEL} {HERE}"
    await unbind(store, "a")
    assert await primary(store, first.session_id) == f"conv {CHANNEL} {HERE}"
    assert engine.rows("SELECT count(*) FROM route")[0][0] == 1


async def test_a_session_that_does_not_exist_cannot_be_bound(engine: Engine) -> None:
    store = await engine.open()
    with pytest.raises(UnknownSession):
        await bind(store, SessionId("session_none"), "a")


@pytest.mark.contract("RTR-08")
async def test_a_dead_nodes_connection_is_no_route_any_more(engine: Engine) -> None:
    store, dying = await engine.open(), await engine.open()
    one = await session(store)
    await bind(store, one, "here")
    await bind(dying, one, "there")
    assert await primary(store, one) == "live there"
    token = engine.rows(f"SELECT token FROM node WHERE id = '{dying.node}'")[0][0]
    await store.write(remove_node, dying.node, ClaimToken(token))
    assert await primary(store, one) == "live here"
    assert await resolved(store, one, "live there") == ToConnection(
        ClaimToken("here"), "terminal", store.node
    )
    await unbind(store, "here")
    assert await resolved(store, one, "live there") is None


@pytest.mark.contract("RTR-08")
async def test_a_delivery_resolves_to_its_turns_route_then_to_todays_then_to_who_owns_it(
    engine: Engine,
) -> None:
    store = await engine.open()
    first = await comes(store, "hello", arrival("1"))
    one = first.session_id
    assert one is not None
    chat = ToConversation(CHANNEL, HERE)
    target = routes.target_of("mail", THERE)
    await bind(store, one, "a")
    await bind(store, one, "b")
    a = ToConnection(ClaimToken("a"), "terminal", store.node)
    b = ToConnection(ClaimToken("b"), "terminal", store.node)
    assert await resolved(store, one, "live a", target) == a, "the turn's own, though not primary"
    assert await resolved(store, one, chat.spelled(), target) == chat
    assert await resolved(store, one, "live gone", target) == b, "today's primary"
    await unbind(store, "a")
    await unbind(store, "b")
    assert await resolved(store, one, "live a", target) == chat
    engine.rows("DELETE FROM route")
    assert await resolved(store, one, "live a", target) == chat, "by its binding"
    engine.rows("DELETE FROM binding")
    assert await resolved(store, one, None, target) == ToConversation("mail", THERE)
    assert await resolved(store, one, "live a") is None


@pytest.mark.contract("RTR-07")
async def test_a_message_is_never_queued_before_its_route_is_bound(engine: Engine) -> None:
    """Whoever sees the message committed sees the route too: another node may open its turn at once."""
    gate = Gate()
    store, other = await engine.open(on_commit=gate), await engine.open()
    await comes(store, "first", arrival("0"))
    bound = await other.read(routes.bound_session, CORE, CHANNEL, HERE)
    assert bound is not None
    await bind(other, bound, "terminal")
    gate.hold()
    coming = asyncio.ensure_future(comes(store, "from the chat", arrival("1")))
    await gate.reached()
    assert await pending(other, bound) == ["first"]
    gate.open()
    await coming
    log = await Hand(other, bound).log()
    assert isinstance(log[0].data, SessionCreated)
    assert [e.data.message.source for e in log if isinstance(e.data, InboxQueued)] == [ANN, ANN]
    await turn_opens(other, bound)
    opened = engine.rows("SELECT turn_route FROM session")
    assert opened == [(f"conv {CHANNEL} {HERE}",)]


def test_a_message_id_is_made_of_its_event_alone() -> None:
    names = {message_id_of(c, k) for c in ("a", "b", "\0") for k in ("1", "2", "\ud800", "")}
    assert len(names) == 12
    assert message_id_of("a", "1") == message_id_of("a", "1")
    assert all(isinstance(MessageId(name), str) for name in names)
