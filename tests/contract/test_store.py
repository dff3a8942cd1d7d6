"""The store port, over every engine: opening, and what each script leaves behind.

What is told to callers when something fails, leases, watching and size have files of their own
(`test_store_*`); what only a server can show is in `test_postgres`.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import apsw
import pytest

from postroom import mint
from postroom.domain.event import ErrorInfo, ModelRetry, RequestHeader, SessionCreated
from postroom.domain.ids import CallId, CoreId, MessageId, SessionId
from postroom.domain.message import Text
from postroom.errors import (
    Corrupt,
    InputError,
    MessageConflict,
    PostroomError,
    QueueFull,
    RunOverlap,
    SchemaMismatch,
    SessionExists,
    StaleClaim,
    StoreLocked,
    UnknownSession,
)
from postroom.scripts.drive import (
    Header,
    Judged,
    Offer,
    begin_turn,
    drive_holder,
    drives_to_claim,
    give_back_drive,
    next_step,
    peek_step,
    peek_turn,
    queue_and_claim,
    record_late,
    record_reply,
    record_results,
    record_retry,
    start_calls,
)
from postroom.scripts.inbox import (
    cancel,
    queue_message,
    remove_message,
    replace_message,
    retry_failed,
)
from postroom.scripts.log import (
    agent_status,
    delete_session,
    find_receipt,
    fork_session,
    list_pending,
    list_sessions,
    read_events,
    read_history,
    session_info,
    set_title,
)
from postroom.scripts.session import create_session
from postroom.stores.sqlite import SqliteStore
from tests.contract.store_world import (
    CORE,
    HEADER,
    OWNER,
    PENDING_MAX,
    SESSION,
    Engine,
    Hand,
    SqliteEngine,
    message,
    reply,
    result,
)

pytestmark = pytest.mark.contract("STO-01")

OTHER = SessionId("session_other")
FORK = SessionId("session_fork")


# Opening


async def test_what_was_written_is_there_when_it_is_opened_again(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("kept")
    before = await hand.log()
    await store.aclose()

    again = Hand(await engine.open())
    assert await again.log() == before
    assert await again.pending() == ["kept"]


async def test_many_may_open_a_new_database_at_once(engine: Engine) -> None:
    stores = await asyncio.gather(*[engine.open() for _ in range(4)])
    assert len({store.node for store in stores}) == 4
    await Hand(stores[0]).create()
    assert [len(await Hand(store).log()) for store in stores] == [1, 1, 1, 1]


async def test_another_may_make_the_tables_while_the_file_is_looked_at(tmp_path: Path) -> None:
    """A new file is one snapshot: its mark and its tables are read together."""
    path = tmp_path / "new.db"
    tried: list[bool] = []

    async def open_another() -> None:
        with contextlib.suppress(StoreLocked):
            await (await SqliteStore.open(path, lock_wait_ms=200)).aclose()

    def hook(connection: apsw.Connection) -> None:
        apsw.connection_hooks.remove(hook)

        def look(_: apsw.Cursor, statement: str, __: object) -> bool:
            if "user_version" in statement:
                connection.exec_trace = None
                asyncio.run(open_another())
                tried.append(True)
            return True

        connection.exec_trace = look

    apsw.connection_hooks.append(hook)
    store = await SqliteStore.open(path)
    assert tried
    await Hand(store).create()
    await store.aclose()


async def test_a_database_of_a_newer_postroom_is_refused_and_left_alone(engine: Engine) -> None:
    await (await engine.open()).aclose()
    engine.set_version(999)
    with pytest.raises(SchemaMismatch, match="999"):
        await engine.open()
    assert engine.rows("SELECT count(*) FROM node") == [(0,)]


async def test_another_program_s_database_is_refused_and_left_alone(engine: Engine) -> None:
    engine.rows("CREATE TABLE notes (text TEXT)")
    engine.rows("INSERT INTO notes (text) VALUES ('mine')")
    with pytest.raises(SchemaMismatch, match="another program"):
        await engine.open()
    assert engine.rows("SELECT text FROM notes") == [("mine",)]
    if isinstance(engine, SqliteEngine):
        assert engine.rows("PRAGMA journal_mode") == [("delete",)]


async def test_another_program_s_table_of_our_name_is_no_version(engine: Engine) -> None:
    engine.rows("CREATE TABLE meta (key TEXT, value TEXT)")
    with pytest.raises(SchemaMismatch):
        await engine.open()


async def test_a_file_that_is_no_database_is_called_damaged(sqlite_engine: SqliteEngine) -> None:
    sqlite_engine.path.write_text("this is a letter, not a database\n" * 100)
    with pytest.raises(Corrupt, match="no database"):
        await sqlite_engine.open()


# Sessions


async def test_a_session_is_made_once_whoever_asks(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    opened = await asyncio.gather(
        *[
            stores[i % 2].write(create_session, SESSION, core_id=CORE, owner=OWNER, cwd="/w")
            for i in range(10)
        ]
    )
    assert sum(each.created for each in opened) == 1
    assert {(each.core_id, each.owner, each.cwd, each.status) for each in opened} == {
        (CORE, OWNER, "/w", "idle")
    }
    assert await Hand(stores[0]).types() == ["session/created"]


async def test_a_new_session_of_a_taken_id_is_refused(engine: Engine) -> None:
    store = await engine.open()
    await Hand(store).create()
    with pytest.raises(SessionExists):
        await store.write(create_session, SESSION, core_id=CORE, owner=OWNER, exclusive=True)


async def test_of_two_that_want_a_session_for_themselves_one_gets_it(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    answers = await asyncio.gather(
        *[
            store.write(create_session, SESSION, core_id=CORE, owner=OWNER, exclusive=True)
            for store in stores
        ],
        return_exceptions=True,
    )
    assert sorted(isinstance(each, SessionExists) for each in answers) == [False, True]


async def test_sessions_are_listed_newest_first_by_owner_and_page(engine: Engine) -> None:
    store = await engine.open()
    names = [SessionId(f"session_{n}") for n in range(5)]
    for n, name in enumerate(names):
        owner = OWNER if n % 2 == 0 else "somebody"
        await store.write(create_session, name, core_id=CORE, owner=owner)
    later = await engine.open(ahead_ms=1_000)
    await Hand(later, names[0]).queue()  # the one touched last
    await store.write(set_title, names[1], "a title")
    listed = await store.read(list_sessions)
    assert listed[0].session_id == names[0]
    assert {each.session_id for each in listed} == set(names)
    assert [each.updated_at for each in listed] == sorted(
        (each.updated_at for each in listed), reverse=True
    )
    mine = await store.read(list_sessions, owner=OWNER)
    assert {each.session_id for each in mine} == set(names[::2])
    assert [each.session_id for each in await store.read(list_sessions, limit=1)] == [names[0]]
    older = await store.read(list_sessions, before=listed[0].updated_at)
    assert names[0] not in [each.session_id for each in older]
    info = await store.read(session_info, names[0])
    assert (info.status, info.pending, info.turns, info.head_seq) == ("running", 1, 0, 3)
    assert (await store.read(session_info, names[1])).title == "a title"


async def test_a_session_that_does_not_exist_is_said_to_be_unknown(engine: Engine) -> None:
    store = await engine.open()
    hand = Hand(store)
    with pytest.raises(UnknownSession):
        await hand.queue()
    with pytest.raises(UnknownSession):
        await store.read(read_events, SESSION)
    with pytest.raises(UnknownSession):
        await store.read(session_info, SESSION)
    with pytest.raises(UnknownSession):
        await store.read(agent_status, SESSION)
    with pytest.raises(UnknownSession):
        await store.read(list_pending, SESSION)


async def test_a_deleted_session_is_gone_and_its_message_ids_stay_known(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("gone", name="once")
    with pytest.raises(InputError, match="running"):
        await store.write(delete_session, SESSION)
    await hand.one_turn(1)
    assert await store.write(delete_session, SESSION)
    assert await store.write(delete_session, SESSION), "it is gone, whoever asks again"
    assert not await store.write(delete_session, OTHER)
    for table in ("session", "inbox", "work", "usage"):
        assert engine.rows(f"SELECT count(*) FROM {table}") == [(0,)]
    assert engine.rows("SELECT count(*) FROM event WHERE sid <> 0") == [(0,)]

    again = await Hand(store).create()
    assert await again.types() == ["session/created"]
    with pytest.raises(MessageConflict):
        await again.queue("gone", name="once")


async def test_event_ids_grow_also_after_the_newest_were_deleted(engine: Engine) -> None:
    """Other processes have seen this far: an id given twice would be an event never told."""
    store = await engine.open()
    await Hand(store).create()
    newest = engine.rows("SELECT max(id) FROM event")[0][0]
    await store.write(delete_session, SESSION)
    await Hand(store, OTHER).create()
    sid = f"(SELECT sid FROM session WHERE id = '{OTHER}')"
    assert engine.rows(f"SELECT min(id) FROM event WHERE sid = {sid}")[0][0] > newest


# The inbox


@pytest.mark.contract("INB-09")
async def test_the_same_id_gives_the_same_receipt_and_one_message(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    first = await hand.queue("hello", name="once")
    assert await hand.queue("hello", name="once") == first
    await hand.one_turn(1)
    assert await hand.queue("hello", name="once") == first, "however late it comes"
    assert (await hand.types()).count("inbox/queued") == 1
    assert await store.read(find_receipt, SESSION, MessageId("msg_once")) == first.seq
    assert await store.read(find_receipt, SESSION, MessageId("msg_never")) is None


@pytest.mark.contract("INB-09")
async def test_the_same_id_with_other_content_or_in_another_session_is_a_conflict(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand, other = await Hand(store).create(), await Hand(store, OTHER).create()
    await hand.queue("hello", name="once")
    with pytest.raises(MessageConflict):
        await hand.queue("goodbye", name="once")
    with pytest.raises(MessageConflict):
        await other.queue("hello", name="once")
    assert await hand.pending() == ["hello"]
    assert await other.types() == ["session/created"]


@pytest.mark.contract("INB-09")
async def test_the_same_id_from_many_at_once_is_queued_once(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    hands = [await Hand(store).create() for store in stores]
    receipts = await asyncio.gather(*[hands[i % 2].queue("hello", name="once") for i in range(20)])
    assert len(set(receipts)) == 1
    assert await hands[0].pending() == ["hello"]


@pytest.mark.contract("INB-09")
async def test_the_same_id_in_two_sessions_at_once_is_taken_by_one_of_them(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    hands = [
        await Hand(store, name).create()
        for store, name in zip(stores, (SESSION, OTHER), strict=True)
    ]
    for n in range(20):
        answers = await asyncio.gather(
            *[hand.queue("hello", name=f"both_{n}") for hand in hands], return_exceptions=True
        )
        assert sorted(isinstance(each, MessageConflict) for each in answers) == [False, True], (
            answers
        )


@pytest.mark.contract("INB-13")
async def test_over_its_cap_the_inbox_refuses_and_keeps_what_it_has(engine: Engine) -> None:
    hand = await Hand(await engine.open()).create()
    texts = [f"message {n}" for n in range(3)]
    for text in texts:
        await hand.queue(text, pending_max=3)
    with pytest.raises(QueueFull, match="3"):
        await hand.queue("one too many", pending_max=3)
    with pytest.raises(QueueFull):
        await hand.queue("one too many", "steer", pending_max=3)
    assert await hand.pending() == texts
    await hand.one_turn(1)
    await hand.queue("there is room again", pending_max=3)
    assert await hand.pending() == [*texts[1:], "there is room again"]


@pytest.mark.contract("INB-13")
async def test_a_cap_holds_against_many_producers_at_once(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    hands = [await Hand(store).create() for store in stores]
    answers = await asyncio.gather(
        *[hands[i % 2].queue(f"message {i}", pending_max=5) for i in range(20)],
        return_exceptions=True,
    )
    assert sum(isinstance(each, QueueFull) for each in answers) == 15
    assert len(await hands[0].pending()) == 5


async def test_messages_of_one_producer_keep_the_order_they_were_sent_in(engine: Engine) -> None:
    """However many connections an engine has: sent without waiting, they arrive in order."""
    hand = await Hand(await engine.open()).create()
    texts = [f"message {n}" for n in range(60)]
    receipts = await asyncio.gather(*[hand.queue(text) for text in texts])
    assert [each.seq for each in receipts] == sorted(each.seq for each in receipts)
    assert await hand.pending() == texts


async def test_a_run_owns_the_interval_until_idle(engine: Engine) -> None:
    hand = await Hand(await engine.open()).create()
    await hand.queue("mine", run="exclusive")
    with pytest.raises(RunOverlap):
        await hand.queue("theirs", run="exclusive")
    await hand.queue("shared", run="share")
    await hand.queue("no run at all")
    assert await hand.pending() == ["mine", "shared", "no run at all"]
    for turn in (1, 2):
        await hand.one_turn(turn)
    with pytest.raises(RunOverlap):
        await hand.queue("theirs", run="exclusive")
    await hand.one_turn(3)
    await hand.queue("theirs", run="exclusive")


async def test_a_pending_message_is_removed_once_and_by_its_own_id_only(engine: Engine) -> None:
    store = await engine.open()
    hand, other = await Hand(store).create(), await Hand(store, OTHER).create()
    for name in ("first", "second"):
        await hand.queue(name, name=name)
    ref = mint.claim_token()
    first = MessageId("msg_first")
    assert not await store.write(remove_message, OTHER, first, ref)
    assert await store.write(remove_message, SESSION, first, ref)
    assert not await store.write(remove_message, SESSION, first, mint.claim_token())
    assert not await store.write(remove_message, SESSION, MessageId("msg_never"), ref)
    assert await hand.pending() == ["second"]
    assert await other.types() == ["session/created"]


async def test_removing_the_last_waking_message_of_an_undriven_agent_makes_it_idle(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("only", name="only")
    await store.write(remove_message, SESSION, MessageId("msg_only"), mint.claim_token())
    assert await hand.types(1) == [
        "inbox/queued",
        "agent/running",
        "inbox/cancelled",
        "agent/idle",
    ]
    assert await hand.claim() is None


async def test_a_replacement_takes_the_place_under_a_new_id(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    for name in ("first", "second", "third"):
        await hand.queue(name, name=name)
    new = message("second, corrected", "corrected")
    assert await store.write(replace_message, SESSION, MessageId("msg_second"), new)
    assert not await store.write(
        replace_message, SESSION, MessageId("msg_second"), message("too late")
    )
    assert await hand.pending() == ["first", "second, corrected", "third"]


async def test_a_cancel_empties_both_lists_and_marks_the_open_turn(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("working")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    await hand.queue("waiting")
    await hand.queue("steering", "steer")
    await store.write(cancel, SESSION, "user", keep_inbox=False, ref=mint.claim_token())
    assert await hand.pending() == []
    progress = await hand.finish(drive.fence, 1)
    assert progress.idle
    assert [e.data.reason.kind for e in progress.events if e.type == "turn/end"] == ["cancelled"]  # type: ignore[union-attr]


async def test_a_cancel_that_keeps_the_inbox_only_marks_the_turn(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("working")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    await hand.queue("waiting")
    await store.write(cancel, SESSION, "user", keep_inbox=True, ref=mint.claim_token())
    progress = await hand.finish(drive.fence, 1)
    assert not progress.idle
    assert await hand.pending() == ["waiting"]


async def test_what_failed_is_queued_again_under_an_id_of_its_own(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("try this", name="old")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    await hand.fail(drive.fence, 1)
    pairs = await store.write(retry_failed, SESSION, pending_max=PENDING_MAX)
    assert [old for old, _ in pairs] == ["msg_old"]
    assert await hand.pending() == ["try this"]
    assert await store.write(retry_failed, SESSION, pending_max=PENDING_MAX) == pairs
    assert await hand.pending() == ["try this"]
    with pytest.raises(QueueFull):
        await hand.queue("another", pending_max=1)


# The drive


async def test_a_turn_with_calls_leaves_its_log_in_order(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("look twice")
    drive = await hand.claimed()
    fence = drive.fence
    assert (drive.core_id, drive.owner, drive.cwd) == (CORE, OWNER, None)
    assert await store.read(drive_holder, SESSION) == ("claimed", True)
    assert [text for (text,) in _texts(await store.read(peek_turn, SESSION, fence))] == [
        "look twice"
    ]
    await hand.begin(fence, 1)
    failed = ModelRetry(1, 1, 1, 500, ErrorInfo("server", "the server failed"))
    other_model = Header(
        "header-2", RequestHeader(0, "revision-1", "scripted:other", HEADER.data.params)
    )
    await store.write(record_retry, SESSION, fence, failed, other_model)
    calls = (CallId("call_a"), CallId("call_b"), CallId("call_c"))
    await store.write(record_reply, SESSION, fence, reply(1, calls=calls), calls[:1])
    assert await store.write(start_calls, SESSION, fence, 1, calls[1:]) == calls[1:]
    await store.write(record_results, SESSION, fence, 1, (result(1, "call_a"),))
    await hand.queue("and mind this", "steer")
    assert [text for (text,) in _texts(await store.read(peek_step, SESSION, fence))] == [
        "and mind this"
    ]
    rest = (result(1, "call_b"), result(1, "call_c"))
    progress = await store.write(next_step, SESSION, fence, 1, 1, rest, HEADER)
    assert progress.state.turn is not None
    assert progress.state.turn.step == 2
    await store.write(record_late, SESSION, fence, result(1, "call_b"))
    end = await hand.finish_step(fence, 1, 2)
    assert end.idle
    assert await hand.types() == [
        "session/created",
        "inbox/queued",
        "agent/running",
        "turn/start",
        "request/header",
        "step/start",
        "user/message",
        "request/header",
        "model/retry",
        "assistant/message",
        *["tool/call"] * 3,
        "tool/result",
        "inbox/queued",
        *["tool/result"] * 2,
        "step/end",
        "request/header",
        "step/start",
        "user/message",
        "tool/result",
        "assistant/message",
        "step/end",
        "turn/end",
        "agent/idle",
    ]
    log = await hand.log()
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    history = await store.read(read_history, SESSION)
    assert [e.type for e in history] == [
        "user/message",
        "assistant/message",
        *["tool/result"] * 3,
        "user/message",
        "tool/result",
        "assistant/message",
    ]
    assert await store.read(drive_holder, SESSION) == ("none", False)
    assert await store.read(agent_status, SESSION) == ("idle", len(log))


def _texts(messages: tuple[object, ...]) -> list[tuple[str, ...]]:
    return [
        tuple(block.text for block in each.content if isinstance(block, Text))  # type: ignore[attr-defined]
        for each in messages
    ]


async def test_a_drive_is_claimed_by_one_and_named_to_those_who_look(engine: Engine) -> None:
    stores = [await engine.open() for _ in range(3)]
    hand = await Hand(stores[0]).create()
    assert await stores[1].read(drives_to_claim, stores[1].node, 10) == []
    await hand.queue()
    assert await stores[1].read(drives_to_claim, stores[1].node, 10) == [SESSION]
    drives = await asyncio.gather(*[Hand(store).claim() for store in stores for _ in range(3)])
    held = [drive for drive in drives if drive is not None]
    # A second claim of the holder's own node means that its first was abandoned: the last holds.
    assert len({_owner(engine) for _ in held}) == 1
    assert held[-1].fence.epoch == max(drive.fence.epoch for drive in held)
    assert await stores[1].read(drives_to_claim, stores[1].node, 10) == []


def _owner(engine: Engine) -> str:
    return engine.rows("SELECT owner FROM work")[0][0]


async def test_a_receipt_and_the_claim_behind_it_are_one_commit(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    offer = Offer(store.node, mint.claim_token(), 3, HEADER)
    receipt, drive = await store.write(
        queue_and_claim,
        SESSION,
        message("at once"),
        "followup",
        pending_max=9,
        run=None,
        offer=offer,
    )
    assert drive is not None
    assert drive.progress.state.turn is not None
    assert (await hand.log())[receipt.seq - 1].type == "inbox/queued"
    again = Offer(store.node, mint.claim_token(), 3, HEADER)
    _, none = await store.write(
        queue_and_claim,
        SESSION,
        message("behind"),
        "followup",
        pending_max=9,
        run=None,
        offer=again,
    )
    assert none is None, "it is driven already"
    assert not (await hand.finish(drive.fence, 1)).idle
    assert await hand.pending() == ["behind"]


async def test_a_drive_given_back_is_ready_and_its_turn_recovered_without_a_charge(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("long work")
    drive = await hand.claimed()
    await hand.begin(drive.fence, 1)
    assert await store.write(give_back_drive, SESSION, drive.fence)
    with pytest.raises(StaleClaim):
        await hand.finish(drive.fence, 1)
    again = await hand.claimed()
    assert not await store.write(give_back_drive, SESSION, drive.fence)
    assert again.progress.state.owed
    assert again.progress.state.attempts == 0
    progress = await hand.begin(again.fence, 2)
    assert [e.type for e in progress.events][:1] == ["turn/start"]
    assert (await hand.finish(again.fence, 2)).idle


async def test_a_batch_that_changed_while_it_was_judged_is_not_claimed(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("judged", name="judged")
    drive = await hand.claimed()
    batch = tuple(m.id for m in await store.read(peek_turn, SESSION, drive.fence))
    await hand.queue("came in between", "steer")
    progress = await store.write(begin_turn, SESSION, drive.fence, 1, HEADER, Judged(batch))
    assert progress.changed
    assert await hand.pending() == ["came in between", "judged"]
    batch = tuple(m.id for m in await store.read(peek_turn, SESSION, drive.fence))
    progress = await store.write(
        begin_turn, SESSION, drive.fence, 1, HEADER, Judged(batch, batch[:1], "not this")
    )
    assert [e.type for e in progress.events][:2] == ["turn/start", "inbox/rejected"]


# Forks


@pytest.mark.contract("INB-14")
async def test_a_fork_has_the_history_and_not_the_inbox(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await hand.queue("first")
    await hand.one_turn(1)
    await hand.queue("still pending")
    head = await store.write(fork_session, SESSION, FORK, owner=OWNER)
    fork = Hand(store, FORK)
    log = await fork.log()
    assert [event.seq for event in log] == list(range(1, head + 1))
    assert await fork.pending() == []
    created = log[0].data
    assert isinstance(created, SessionCreated)
    assert created.forked_from is not None
    assert created.forked_from.session_id == SESSION
    assert [e.type for e in await store.read(read_history, FORK)] == [
        "user/message",
        "assistant/message",
    ]
    await fork.queue("goes its own way")
    await fork.one_turn(2)
    assert await store.write(fork_session, SESSION, FORK, owner=OWNER) == len(await fork.log())


async def test_a_fork_inside_a_turn_or_under_a_taken_id_is_refused(engine: Engine) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    await Hand(store, OTHER).create()
    await hand.queue("first")
    await hand.one_turn(1)
    with pytest.raises(InputError, match="inside a turn"):
        await store.write(fork_session, SESSION, FORK, owner=OWNER, at_seq=6)
    with pytest.raises(InputError, match="cannot be forked"):
        await store.write(fork_session, SESSION, FORK, owner=OWNER, at_seq=10_000)
    with pytest.raises(SessionExists):
        await store.write(fork_session, SESSION, OTHER, owner=OWNER)
    assert await store.write(fork_session, SESSION, FORK, owner=OWNER, at_seq=1) == 1


async def test_a_fork_and_a_new_session_of_one_id_do_not_both_win(engine: Engine) -> None:
    stores = [await engine.open(), await engine.open()]
    await Hand(stores[0]).create()
    for n in range(10):
        name = SessionId(f"session_fork_{n}")
        made, forked = await asyncio.gather(
            stores[0].write(create_session, name, core_id=CoreId("other"), owner=OWNER),
            stores[1].write(fork_session, SESSION, name, owner=OWNER),
            return_exceptions=True,
        )
        assert not isinstance(made, BaseException)
        assert isinstance(forked, SessionExists) == made.created


# A script's own error


async def test_a_script_that_raises_leaves_nothing_and_the_next_is_not_disturbed(
    engine: Engine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()

    def half(tx: object, session_id: SessionId) -> None:
        queue_message(tx, session_id, message("half"), "followup", pending_max=9)  # type: ignore[arg-type]
        raise ZeroDivisionError("a bug in a script")

    answers = await asyncio.gather(
        hand.queue("before"),
        store.write(half, SESSION),
        hand.queue("after"),
        return_exceptions=True,
    )
    assert isinstance(answers[1], ZeroDivisionError)
    assert await hand.pending() == ["before", "after"]
    log = await hand.log()
    assert [event.seq for event in log] == list(range(1, len(log) + 1))


async def test_a_statement_the_database_refuses_is_an_error_of_ours(engine: Engine) -> None:
    store = await engine.open()

    def wrong(tx: object) -> None:
        tx.execute("SELECT x FROM nowhere")  # type: ignore[attr-defined]

    for call in (store.write, store.read):
        with pytest.raises(PostroomError, match="nowhere"):
            await call(wrong)
    await Hand(store).create()


async def test_parameters_are_values_whatever_they_look_like(engine: Engine) -> None:
    """Names in texts, casts and percent signs are left alone."""
    store = await engine.open()
    texts = ["100 % :name ::text '%s' %(x)s", 'a "quoted" \\ text', "héllo 🙂 \u2028", ""]

    def ask(tx: object, text: str) -> list[tuple[object, ...]]:
        return tx.execute(  # type: ignore[attr-defined]
            "SELECT :text, ':text %' || CAST(:number AS TEXT), '100%', 7 % 4 -- :none %\n",
            {"text": text, "number": 5, "unused": 1},
        )

    for text in texts:
        assert await store.read(ask, text) == [(text, ":text %5", "100%", 3)]
