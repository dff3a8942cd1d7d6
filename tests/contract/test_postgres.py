"""What only a server can show: its locks, its errors, its connections, its notices."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from postroom.domain.ids import NodeId, SessionId
from postroom.domain.work import Fence
from postroom.errors import (
    CommitUncertain,
    ConfigError,
    MessageConflict,
    NotCommitted,
    PostroomError,
    StoreLocked,
    StoreReadOnly,
)
from postroom.ports.store import Store, Tx
from postroom.scripts.inbox import queue_message
from postroom.scripts.log import session_info
from postroom.scripts.session import lock_session
from postroom.stores import postgres_link, postgres_watch
from postroom.stores.postgres import PostgresStore
from postroom.stores.postgres_lease import lock_key
from postroom.stores.postgres_link import translated
from postroom.stores.postgres_watch import Notice, payloads
from tests.contract.postgres_proxy import Proxy
from tests.contract.store_world import (
    SESSION,
    Engine,
    Gate,
    Hand,
    Heard,
    PostgresEngine,
    message,
    until,
)
from tests.support import bounded

OTHER = SessionId("session_other")
SECRET = "s3cr%t-w*rd/"


@pytest_asyncio.fixture
async def engine(shared_database: str) -> AsyncGenerator[PostgresEngine]:
    """An empty database. What changes the database itself takes `postgres_engine`, one of its own."""
    made = PostgresEngine(shared_database)
    made.empty()
    yield made
    await made.close()


def _waiting_for_a_lock(engine: Engine) -> int:
    return engine.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event_type = 'Lock'"
    )[0][0]


def _terminate(engine: Engine) -> None:
    """Ends every connection but this one."""
    engine.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


async def _never_parked(hand: Hand) -> None:
    """The state the whole protocol is about: an idle agent with a waking message pending."""
    info = await hand.store.read(session_info, hand.id)
    assert not (info.status == "idle" and info.pending), "a message is parked"


# Two connections at one lock


@pytest.mark.contract("STO-09", "STO-01")
async def test_a_message_that_meets_the_end_of_a_turn_opens_the_next(
    engine: PostgresEngine,
) -> None:
    """PROTOCOL rule 1: the producer waits at the lock, and decides on what it finds behind it."""
    gate = Gate()
    driver = await Hand(await engine.open(on_commit=gate)).create()
    producer = Hand(await engine.open())
    await driver.queue("first")
    fence = (await driver.claimed()).fence
    await driver.begin(fence, 1)
    gate.hold()
    finishing = asyncio.ensure_future(driver.finish(fence, 1))
    await gate.reached()
    queueing = asyncio.ensure_future(producer.queue("meets the end"))
    await until(lambda: _waiting_for_a_lock(engine) == 1)
    gate.open()
    progress, _ = await bounded(asyncio.gather(finishing, queueing))
    assert progress.idle, "nothing was pending when the turn ended"
    assert await driver.types(progress.history) == [
        *("step/end", "turn/end", "agent/idle"),
        *("inbox/queued", "agent/running"),
    ]
    await _never_parked(driver)
    assert await driver.claim() is not None


@pytest.mark.contract("STO-09", "STO-01")
async def test_an_end_of_a_turn_that_meets_a_message_goes_on_with_it(
    engine: PostgresEngine,
) -> None:
    """PROTOCOL rule 1, the other way round."""
    gate = Gate()
    driver = await Hand(await engine.open()).create()
    producer = Hand(await engine.open(on_commit=gate))
    await driver.queue("first")
    fence = (await driver.claimed()).fence
    await driver.begin(fence, 1)
    gate.hold()
    queueing = asyncio.ensure_future(producer.queue("just in time"))
    await gate.reached()
    finishing = asyncio.ensure_future(driver.finish(fence, 1))
    await until(lambda: _waiting_for_a_lock(engine) == 1)
    gate.open()
    progress, _ = await bounded(asyncio.gather(finishing, queueing))
    assert not progress.idle
    assert "agent/idle" not in await driver.types()
    assert (await driver.begin(fence, 2)).events[0].type == "turn/start"


@pytest.mark.contract("STO-09", "STO-01")
async def test_a_removal_that_meets_a_message_leaves_no_idle_agent_with_work(
    engine: PostgresEngine,
) -> None:
    gate = Gate()
    producer = await Hand(await engine.open(on_commit=gate)).create()
    remover = await engine.open()
    await producer.queue("only", name="only")
    gate.hold()
    queueing = asyncio.ensure_future(producer.queue("another"))
    await gate.reached()
    removing = asyncio.ensure_future(_remove(remover, "only"))
    await until(lambda: _waiting_for_a_lock(engine) == 1)
    gate.open()
    await bounded(asyncio.gather(queueing, removing))
    await _never_parked(producer)
    assert await producer.pending() == ["another"]


async def _remove(store: Store, name: str) -> bool:
    from postroom.domain.ids import ClaimToken, MessageId
    from postroom.scripts.inbox import remove_message

    return await store.write(
        remove_message, SESSION, MessageId(f"msg_{name}"), ClaimToken("removal")
    )


@pytest.mark.contract("STO-09", "STO-01")
async def test_claims_and_messages_never_deadlock_and_never_park(
    postgres_engine: PostgresEngine,
) -> None:
    """PROTOCOL rule 2: two hundred rounds of claim, queue and finish against each other."""
    stores = [await postgres_engine.open() for _ in range(3)]
    drivers, producer = [Hand(store) for store in stores[:2]], await Hand(stores[2]).create()
    claims = 0
    for n in range(200):
        queueing = [producer.queue(f"{n}.{i}", "steer") for i in range(2)]
        claiming = [driver.claim() for driver in drivers]
        *drives, _, _ = await bounded(asyncio.gather(*claiming, *queueing))
        await _never_parked(producer)
        for driver, drive in zip(drivers, drives, strict=True):
            if drive is not None:
                claims += 1
                await bounded(_drive(driver, drive.fence, producer.queue(f"{n} meanwhile")))
                await _never_parked(producer)
    assert claims >= 100
    assert postgres_engine.rows(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ) == [(0,)]
    log = await producer.log()
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    queued = [e.data.message.id for e in log if e.type == "inbox/queued"]  # type: ignore[union-attr]
    entered = [e.data.message.id for e in log if e.type == "user/message"]  # type: ignore[union-attr]
    assert len(entered) == len(set(entered))
    assert len(queued) - len(entered) == (await producer.store.read(session_info, SESSION)).pending


async def _drive(driver: Hand, fence: Fence, meanwhile: Coroutine[Any, Any, Any]) -> None:
    """Turns until the agent is idle; a message comes while the first of them ends."""
    other = asyncio.ensure_future(meanwhile)
    idle = False
    while not idle:
        turn = (await driver.store.read(session_info, SESSION)).turns + 1
        idle = (await driver.begin(fence, turn)).idle or (await driver.finish(fence, turn)).idle
    await other


@pytest.mark.contract("STO-02")
async def test_a_transaction_left_open_is_ended_by_the_server(engine: PostgresEngine) -> None:
    """C-133: a process that stands still in the middle of a script holds up nobody for long."""
    store = await engine.open(lease_ms=1_500)
    stuck, other = await Hand(store).create(), Hand(await engine.open())
    held, go_on = threading.Event(), threading.Event()

    def script(tx: Tx, session_id: SessionId) -> None:
        lock_session(tx, session_id)
        held.set()
        assert go_on.wait(20)
        queue_message(tx, session_id, message("stuck", "stuck"), "followup", pending_max=9)

    waiting = asyncio.ensure_future(store.write(script, SESSION))
    assert await asyncio.to_thread(held.wait, 15)
    try:
        await bounded(other.queue("goes on"), 8)
        assert await stuck.pending() == ["goes on"]
    finally:
        go_on.set()
    await bounded(waiting)
    assert await other.pending() == ["goes on", "stuck"], "and it is made good, once"


# What is tried again, and what is not


class Failing:
    """A script that fails a number of times with one of the server's errors."""

    def __init__(self, code: str, times: int) -> None:
        self.code = code
        self.times = times
        self.runs = 0

    def __call__(self, tx: Tx) -> str:
        self.runs += 1
        tx.execute("INSERT INTO meta VALUES (:key, 'x')", {"key": f"run {self.runs}"})
        if self.runs <= self.times:
            tx.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{self.code}'; END $$")
        return "done"


@pytest.mark.parametrize("code", ["40001", "40P01", "55P03", "23505", "57P01", "08006"])
async def test_what_the_server_undoes_by_itself_runs_again(
    engine: PostgresEngine, code: str
) -> None:
    store = await engine.open()
    script = Failing(code, times=2)
    assert await bounded(store.write(script)) == "done"
    assert script.runs == 3
    assert engine.rows("SELECT key FROM meta WHERE key LIKE 'run %'") == [("run 3",)]


@pytest.mark.parametrize(
    ("code", "means"),
    [("57014", NotCommitted), ("42501", StoreReadOnly), ("22012", NotCommitted)],
)
async def test_what_would_fail_again_is_told_at_once(
    engine: PostgresEngine, code: str, means: type[PostroomError]
) -> None:
    store = await engine.open()
    script = Failing(code, times=100)
    with pytest.raises(means):
        await bounded(store.write(script))
    assert script.runs == 1
    assert engine.rows("SELECT key FROM meta WHERE key LIKE 'run %'") == []


@pytest.mark.parametrize(
    ("code", "means"),
    [
        ("40001", NotCommitted),
        ("55P03", StoreLocked),
        ("25006", StoreReadOnly),
        ("08006", NotCommitted),
    ],
)
async def test_what_never_gets_better_is_told_at_the_deadline(
    engine: PostgresEngine, code: str, means: type[PostroomError]
) -> None:
    store = await engine.open(lock_wait_ms=200)
    with pytest.raises(means):
        await bounded(store.write(Failing(code, times=10_000)))


async def test_a_script_whose_own_bug_is_a_duplicate_row_does_not_run_for_ever(
    engine: PostgresEngine,
) -> None:
    store = await engine.open()

    def twice(tx: Tx) -> None:
        for _ in range(2):
            tx.execute("INSERT INTO meta VALUES ('the same', 'x')")

    with pytest.raises(NotCommitted):
        await bounded(store.write(twice), 5)


def test_every_error_the_engine_names_is_one_the_library_knows() -> None:
    for code in postgres_link.AGAIN | postgres_link.LOST | postgres_link.MEANS.keys():
        assert psycopg.errors.lookup(code).sqlstate == code


def test_the_library_has_no_kind_of_error_that_was_not_thought_of() -> None:
    """Those without a code of the server's: a new one needs a place in `is_lost`."""
    kinds = {
        name
        for name, kind in vars(psycopg.errors).items()
        if isinstance(kind, type)
        and issubclass(kind, psycopg.Error)
        and kind.sqlstate is None
        and not name.startswith("_")
    }
    assert kinds == {
        *("Error", "InterfaceError", "DatabaseError", "DataError", "OperationalError"),
        *("IntegrityError", "InternalError", "ProgrammingError", "NotSupportedError"),
        *("PipelineAborted", "ConnectionTimeout", "CancellationTimeout"),
    }


# Connections that break


async def test_connections_that_break_are_no_error(engine: PostgresEngine) -> None:
    """Whatever they were doing: every write is made, once, and in order."""
    store = await engine.open()
    hands = [await Hand(store, SessionId(f"session_{n}")).create() for n in range(5)]
    heard = Heard(await engine.open(), None)
    for n in range(5):
        writes = [asyncio.ensure_future(hand.queue(f"{n}.{i}")) for i in range(5) for hand in hands]
        reads = [asyncio.ensure_future(hand.pending()) for hand in hands]
        await asyncio.sleep(0.005 * n)
        await asyncio.to_thread(_terminate, engine)
        await bounded(asyncio.gather(*writes, *reads))
    for hand in hands:
        assert await hand.pending() == [f"{n}.{i}" for n in range(5) for i in range(5)]
        log = await hand.log()
        assert [event.seq for event in log] == list(range(1, len(log) + 1))
        await heard.until(
            lambda events, hand=hand, head=log[-1].seq: any(  # type: ignore[misc]
                e.session_id == hand.id and e.seq == head for e in events
            )
        )
        told = [e.seq for e in heard.events if e.session_id == hand.id]
        assert told == list(range(told[0], log[-1].seq + 1))
        assert told[0] <= 2


@pytest.mark.contract("INB-01")
async def test_a_commit_whose_answer_was_lost_is_made_once_and_answered(
    engine: PostgresEngine,
) -> None:
    """The connection ends with the COMMIT done: the script runs again, and finds what it did."""
    with Proxy(engine.address) as proxy:
        hand = await Hand(await _through(proxy, engine)).create()
        witness = Heard(await engine.open())
        own = Heard(hand.store)
        proxy.marker, proxy.lose_answers = b"msg_doubt", 1
        receipt = await bounded(hand.queue("in doubt", name="doubt"))
        assert proxy.lost == 1
        assert receipt.seq == 2
        assert await hand.pending() == ["in doubt"]
        for heard in (witness, own):
            await heard.reach(3)
            assert [e.seq for e in heard.since(2)] == [2, 3]


@pytest.mark.contract("INB-01")
async def test_a_commit_whose_answer_cannot_be_had_is_uncertain_and_the_same_id_settles_it(
    engine: PostgresEngine,
) -> None:
    with Proxy(engine.address) as proxy:
        hand = await Hand(await _through(proxy, engine)).create()
        proxy.marker, proxy.lose_answers = b"msg_doubt", 2
        with pytest.raises(CommitUncertain):
            await bounded(hand.queue("in doubt", name="doubt"))
        assert proxy.lost == 2
        receipt = await bounded(hand.queue("in doubt", name="doubt"))
        assert await hand.pending() == ["in doubt"]
        assert (await hand.log())[receipt.seq - 1].type == "inbox/queued"
        with pytest.raises(MessageConflict):
            await hand.queue("something else", name="doubt")


async def test_a_server_that_is_away_for_a_while_is_waited_for(engine: PostgresEngine) -> None:
    with Proxy(engine.address) as proxy:
        store = await _through(proxy, engine)
        hand = await Hand(store).create()
        heard = Heard(store)
        proxy.refuse = True
        proxy.cut()
        writing = asyncio.ensure_future(hand.queue("waits"))
        reading = asyncio.ensure_future(hand.pending())
        other = Hand(await engine.open())
        receipt = await other.queue("meanwhile")
        assert not writing.done()
        proxy.refuse = False
        await bounded(asyncio.gather(writing, reading))
        assert sorted(await hand.pending()) == ["meanwhile", "waits"]
        await heard.reach(receipt.seq)


async def test_a_server_that_stays_away_is_an_error_at_the_deadline(
    engine: PostgresEngine,
) -> None:
    with Proxy(engine.address) as proxy:
        store = await _through(proxy, engine, lock_wait_ms=300)
        hand = await Hand(store).create()
        proxy.refuse = True
        proxy.cut()
        with pytest.raises(NotCommitted, match="cannot be reached"):
            await bounded(hand.queue("refused"))
        with pytest.raises(PostroomError, match="cannot be reached"):
            await bounded(hand.pending())
        await bounded(store.aclose(), 5)


async def test_closing_does_not_wait_for_a_server_that_is_away(engine: PostgresEngine) -> None:
    with Proxy(engine.address) as proxy:
        store = await _through(proxy, engine, lock_wait_ms=60_000)
        hand = await Hand(store).create()
        proxy.refuse = True
        proxy.cut()
        writing = asyncio.ensure_future(hand.queue("will not be"))
        await asyncio.sleep(0)
        await bounded(store.aclose(), 10)
        with pytest.raises(NotCommitted):
            await writing


async def _through(proxy: Proxy, engine: PostgresEngine, **options: Any) -> Store:
    options = {"lock_wait_ms": 10_000} | options
    store = await bounded(PostgresStore.open(proxy.url, **options))
    engine.adopt(store)
    return store


async def test_after_everybody_s_connections_broke_nobody_is_given_up_for_dead(
    engine: PostgresEngine,
) -> None:
    """Their locks are free for a moment, though they all live."""
    stores = [await engine.open() for _ in range(3)]
    nodes = [store.node for store in stores]
    for _ in range(3):
        await asyncio.to_thread(_terminate, engine)
        await until(lambda: _locked_nodes(engine) >= {lock_key(node) for node in nodes})
    assert [store.node for store in stores] == nodes
    assert _living(engine) == set(nodes)


def _living(engine: Engine) -> set[str]:
    """The nodes that were not given up."""
    return {row[0] for row in engine.rows("SELECT id FROM node WHERE expires_at > 0")}


def _locked_nodes(engine: Engine) -> set[int]:
    rows = engine.rows(
        "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks"
        " WHERE locktype = 'advisory' AND granted AND objsubid = 1"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return {row[0] for row in rows}


async def test_who_comes_back_late_from_a_common_break_is_not_given_up_for_dead(
    engine: PostgresEngine,
) -> None:
    """It may only be slower: its lease decides, not the lock that broke with everybody's."""
    with Proxy(engine.address) as proxy:
        slow, quick = await _through(proxy, engine), await engine.open()
        nodes = slow.node, quick.node
        proxy.refuse = True
        await asyncio.to_thread(_terminate, engine)
        await until(lambda: lock_key(nodes[1]) in _locked_nodes(engine))
        await asyncio.sleep(0.7)  # longer than from one look for the dead to the next
        proxy.refuse = False
        await until(lambda: lock_key(nodes[0]) in _locked_nodes(engine))
        assert (slow.node, quick.node) == nodes
        assert _living(engine) == set(nodes)


async def test_a_database_away_for_longer_than_the_lease_costs_the_lease(
    engine: PostgresEngine,
) -> None:
    """What it leaves running must stop: another may have taken over."""
    with Proxy(engine.address) as proxy:
        store = await _through(proxy, engine, lease_ms=400)
        lost = asyncio.Event()
        store.on_lease_lost(lost.set)
        node = store.node
        proxy.refuse = True
        proxy.cut()
        await bounded(lost.wait())
        proxy.refuse = False
        hand = await Hand(store).create()
        assert store.node != node
        await hand.queue("work")
        assert await hand.claim() is not None


async def test_no_more_connections_are_made_than_were_asked_for(engine: PostgresEngine) -> None:
    store = await engine.open(pool_size=3)
    hands = [await Hand(store, SessionId(f"session_{n}")).create() for n in range(20)]
    most = 0

    async def count() -> None:
        nonlocal most
        for _ in range(10):
            handles = await asyncio.to_thread(engine.open_handles)
            most = max(most, sum(each.startswith("postroom") for each in handles))

    await asyncio.gather(
        count(), *[hand.queue() for _ in range(10) for hand in hands], *[h.pending() for h in hands]
    )
    assert 0 < most <= 3 + 2 + 2


# Notices


async def test_a_lost_notice_is_made_good_by_the_sweep(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_watch, "SWEEP_S", 0.2)
    silent, listening = await engine.open(), await engine.open()
    monkeypatch.setattr(silent._watch, "announce", lambda *_: None)  # type: ignore[attr-defined]
    hand = await Hand(silent).create()
    one, everything = Heard(listening), Heard(listening, None)
    looks = asyncio.Event()
    listening.on_work(lambda _, key: looks.set() if key == "*" else None)
    other = await Hand(silent, OTHER).create()
    receipt = await hand.queue()
    await other.queue()
    await one.reach(receipt.seq)
    assert [e.seq for e in one.since(2)] == [2, 3]
    await everything.until(
        lambda events: {(SESSION, 3), (OTHER, 3)} <= {(e.session_id, e.seq) for e in events}
    )
    await bounded(looks.wait())


async def test_somebody_else_s_notice_on_the_channel_disturbs_nobody(
    engine: PostgresEngine,
) -> None:
    store = await engine.open()
    hand = await Hand(store).create()
    heard = Heard(store)
    for payload in ("", "not ours", "[]", '["x",{"session_one":"5"},[]]', '["x",{"none":9},[]]'):
        engine.rows(f"SELECT pg_notify('postroom', '{payload}')")
    receipt = await hand.queue()
    await heard.reach(receipt.seq)


def test_a_notice_fits_the_server_however_much_there_is_to_tell() -> None:
    heads = {SessionId("s" * 128 + str(n)): n + 1 for n in range(500)}
    work = [("delivery.send", "é" * 300 + str(n)) for n in range(300)]
    sent = payloads("origin", heads, work)
    assert max(len(each.encode()) for each in sent) < 8000
    decoded = [postgres_watch.msgspec.json.decode(each, type=Notice) for each in sent]
    assert {k: v for each in decoded for k, v in each.heads.items()} == heads
    # A key too long for a notice becomes "look".
    assert {entry for each in decoded for entry in each.work} == {("delivery.send", "*")}


# Addresses, statements, places


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("SELECT :a, :b", "SELECT %(a)s, %(b)s"),
        ("SELECT :a::bigint", "SELECT %(a)s::bigint"),
        ("SELECT ':a' || :a", "SELECT ':a' || %(a)s"),
        ("SELECT 'it''s :a %' LIKE :a", "SELECT 'it''s :a %%' LIKE %(a)s"),
        ('SELECT "odd :name%" FROM t', 'SELECT "odd :name%%" FROM t'),
        ("SELECT 5 % :a -- :b %\n", "SELECT 5 %% %(a)s -- :b %%\n"),
        ("SELECT /* :b\n % */ :a", "SELECT /* :b\n %% */ %(a)s"),
        ("SELECT x[1:2], now()::date", "SELECT x[1:2], now()::date"),
    ],
)
def test_a_statement_is_translated_where_it_means_a_parameter(sql: str, wanted: str) -> None:
    assert translated(sql)[0].decode() == wanted


@pytest.mark.parametrize(
    ("sql", "gives"),
    [
        ("SELECT 1", True),
        ("  with x AS (SELECT 1) SELECT * FROM x", True),
        ("INSERT INTO t VALUES (1) RETURNING id", True),
        ("UPDATE t SET a = 1", False),
        ("DELETE FROM t", False),
        ("INSERT INTO t SELECT 1", False),
    ],
)
def test_only_a_statement_that_gives_rows_is_waited_for(sql: str, gives: bool) -> None:
    assert translated(sql)[1] is gives


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:{secret}@127.0.0.1:1/nowhere",
        "postgresql://user@127.0.0.1:1/nowhere?password={secret}",
        "postgresql://user:{secret}@/nowhere?host=/nonexistent-postroom",
        "postgresql://user:{secret}@127.0.0.1:port/nowhere",
        "postgresql://user:%zz{secret}@127.0.0.1/nowhere",
        "postgresql://user:{secret}@127.0.0.1/nowhere?no_such_option=1",
        "postgresql://user:{secret}@127.0.0.1:1/nowhere?connect_timeout=soon",
        "postgres:{secret}",
    ],
)
async def test_a_password_is_in_no_error_and_no_log(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = url.format(secret="s3cr3tw0rd")
    with pytest.raises((ConfigError, NotCommitted)) as refused:
        await bounded(PostgresStore.open(shown, lock_wait_ms=500))
    told: list[str] = []
    error: BaseException | None = refused.value
    while error is not None:
        told += [str(error), repr(error)]
        error = error.__cause__ or error.__context__
    assert "s3cr3tw0rd" not in " ".join([*told, caplog.text])


async def test_a_refused_login_is_told_without_the_password(engine: PostgresEngine) -> None:
    with Proxy(engine.address) as proxy:
        url = proxy.url.replace("user=postgres", "user=nobody_known") + "&password=s3cr3tw0rd"
        with pytest.raises(NotCommitted, match="nobody_known") as refused:
            await bounded(PostgresStore.open(url))
        assert "s3cr3tw0rd" not in str(refused.value)
        assert refused.value.hint


async def test_a_role_that_forgets_commits_is_made_to_keep_them(
    postgres_engine: PostgresEngine,
) -> None:
    """A receipt means that it is on disk, whatever the database's default is."""
    name = postgres_engine.rows("SELECT current_database()")[0][0]
    postgres_engine.rows(f"ALTER DATABASE {name} SET synchronous_commit = off")
    store = await postgres_engine.open()
    ask: Callable[[Tx], str] = lambda tx: tx.execute("SHOW synchronous_commit")[0][0]  # noqa: E731
    assert await store.write(ask) == "on"


async def test_a_database_that_cannot_hold_every_text_is_refused(
    engine: PostgresEngine,
) -> None:
    latin = f"postroom_test_latin_{os.getpid()}"
    engine.rows(f"CREATE DATABASE {latin} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    try:
        url = _beside(engine.address, latin)
        with pytest.raises(ConfigError, match="LATIN1"):
            await bounded(PostgresStore.open(url))
    finally:
        engine.rows(f"DROP DATABASE {latin} WITH (FORCE)")


def _beside(url: str, database: str) -> str:
    head, _, query = url.partition("?")
    return head.rpartition("/")[0] + "/" + database + ("?" + query if query else "")


async def test_a_schema_of_its_own_is_enough(postgres_engine: PostgresEngine) -> None:
    postgres_engine.rows("CREATE TABLE public.notes (text TEXT)")
    postgres_engine.rows("CREATE SCHEMA room")
    name = postgres_engine.rows("SELECT current_database()")[0][0]
    postgres_engine.rows(f"ALTER DATABASE {name} SET search_path = room")
    hand = await Hand(await postgres_engine.open()).create()
    await hand.queue("here")
    assert postgres_engine.rows("SELECT count(*) FROM room.inbox") == [(1,)]


async def test_a_database_that_may_not_be_written_says_so(postgres_engine: PostgresEngine) -> None:
    name = postgres_engine.rows("SELECT current_database()")[0][0]
    postgres_engine.rows(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnly):
        await postgres_engine.open()


async def test_two_that_upgrade_at_once_wait_for_each_other(engine: PostgresEngine) -> None:
    with psycopg.connect(engine.address) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (0x506F_7374_726F_6F6D,))
        started = time.monotonic()
        with pytest.raises(StoreLocked):
            await engine.open(lock_wait_ms=300)
        assert time.monotonic() - started < 10
    await engine.open()


def test_a_node_s_lock_is_its_own() -> None:
    keys = {lock_key(NodeId(f"node_{n}")) for n in range(1000)}
    assert len(keys) == 1000
    assert all(-(2**63) <= key < 2**63 for key in keys)
