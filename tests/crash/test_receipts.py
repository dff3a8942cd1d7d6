"""What a receipt promises, kept through kills, signals, stopped processes and long queues.

The processes are real and die by real signals; what they left is read from the database.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

from postroom.app import one_core, open_room
from postroom.domain.event import Event
from postroom.domain.ids import ClaimToken, CoreId, MessageId, NodeId
from postroom.domain.message import Message, Source, Text
from postroom.domain.turn import NOT_STARTED, UNKNOWN
from postroom.flow.core import Core
from postroom.models.scripted import Script, ScriptedModel
from postroom.scripts.drive import Drive, Offer, claim_drive, drives_to_claim, queue_and_claim
from postroom.scripts.session import create_session
from postroom.stores.artifacts import LocalArtifacts
from postroom.stores.sqlite import SqliteStore, SqliteTx
from tests.crash import log_rules
from tests.crash.actor import SESSION, Plan
from tests.crash.children import Nursery, actor, eventually
from tests.crash.reading import read, rows
from tests.support import bounded

TEN = [f"msg_{number}" for number in range(10)]


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """Plans of one database: each call is the plan of one more process."""

    def make(*actions: list[Any], **more: Any) -> Plan:
        return Plan(str(tmp_path / "room.db"), str(tmp_path / "notes"), list(actions), **more)

    return make


# ---- queued behind a running turn ----


@pytest.mark.contract("INB-02", "INB-03")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_ten_messages_behind_a_running_turn_survive_the_end_of_the_process(
    nursery: Nursery, plan: Callable[..., Plan], number: str
) -> None:
    """C-15, C-201: the signal comes 0 ms after the tenth receipt. C-205: no prompt wakes them."""
    ended = nursery.play(
        plan(
            ["queue", "msg_busy", "[[wait]]"],
            ["entered", "msg_busy"],
            *(["queue", name, f"this is {name}"] for name in TEN),
            ["kill", number],
            drain_ms=0,
        )
    )
    assert ended.killed if number == "SIGKILL" else ended.code == 0
    assert list(ended.receipts) == ["msg_busy", *TEN]
    left = read(plan().database)
    assert [name for name, _ in left.pending] == TEN
    assert left.of("agent/idle") == []

    restarted = nursery.play(plan(["idle"], ["run", "msg_later", "later"], waits=False))

    record = read(plan().database)
    log_rules.check(record)
    log_rules.check_rest(record)
    assert record.entered == ["msg_busy", *TEN, "msg_later"]
    assert record.ends == ["interrupted", *["completed"] * 12]
    turns = [user.turn for user in record.of("user/message")]
    assert turns == [1, *range(3, 14)], (
        "the recovery is a turn of its own, and so is each of the ten"
    )
    # C-205: the first idle came before the later prompt, whose interval holds its own turn alone.
    result = restarted.told("result")
    idle = next(e.seq for e in record.events if e.type == "agent/idle")
    assert result["firstSeq"] == idle + 1
    assert result["finalResponse"] == "ok: later"


@pytest.mark.contract("INB-10")
def test_a_message_is_pending_or_in_the_history_at_every_moment(
    nursery: Nursery, tmp_path: Path
) -> None:
    """C-19: killed between the claim and the first commit under it, the message is still pending.

    A policy judges the batch, so that claim and entry are two commits.
    """
    claimed_and_pending = entered_and_open = 0
    for commit in range(1, 6):
        for phase in ("before", "after"):
            folder = tmp_path / f"{commit}-{phase}"
            folder.mkdir()
            plan = Plan(str(folder / "room.db"), policy=True)
            plan.actions = [["queue", "msg_1", "hello"], ["idle"]]
            plan.kill = (commit, phase)
            ended = nursery.play(plan)
            record = read(plan.database)
            log_rules.check(record)
            names = [name for name, _ in record.pending]
            if "msg_1" in ended.receipts:
                assert [*names, *record.entered] == ["msg_1"]
            charged = bool(record.entered) and ended.killed and "turn/end" not in _types(record)
            claimed_and_pending += (
                record.work is not None and record.work[0] == "claimed" and bool(names)
            )
            entered_and_open += charged

            plan.kill = None
            assert nursery.play(plan).code == 0
            record = read(plan.database)
            log_rules.check(record)
            log_rules.check_rest(record)
            assert record.entered == ["msg_1"]
            assert record.ends == (["interrupted"] if charged else []) + ["completed"]
    assert claimed_and_pending
    assert entered_and_open


def _types(record: Any) -> list[str]:
    return [event.type for event in record.events]


@pytest.mark.contract("INB-10")
async def test_a_claim_made_with_a_receipt_is_not_taken_by_a_look_of_the_same_process(
    tmp_path: Path,
) -> None:
    """The receipt's answer is on its way to its driver, and a look for work comes in between."""
    store = await SqliteStore.open(tmp_path / "room.db")
    await store.write(create_session, SESSION, core_id=CoreId("crash"), owner="operator")
    message = Message(MessageId("msg_1"), (Text("hello"),), Source())
    header = _echo_core().header(_echo_core().models[0])
    offer = Offer(store.node, ClaimToken("made with the receipt"), 3, header)
    _, drive = await store.write(
        queue_and_claim, SESSION, message, "followup", pending_max=10, run=None, offer=offer
    )
    assert drive is not None

    async def look(*abandoned: ClaimToken) -> Drive | None:
        token = ClaimToken("a look")
        return await store.write(
            claim_drive, SESSION, store.node, token, attempts_max=3, abandoned=abandoned
        )

    assert await look(ClaimToken("another")) is None
    assert read(str(tmp_path / "room.db")).ends == []
    # Known to be driven by nobody it is to be had, and what it began is interrupted.
    assert await look(offer.token) is not None
    assert read(str(tmp_path / "room.db")).ends == ["interrupted"]
    await store.aclose()


@pytest.mark.contract("INB-16")
async def test_an_idle_from_before_is_not_taken_for_the_one_that_is_waited_for(
    tmp_path: Path,
) -> None:
    """Where commits are told of by the database, an old one may come after a newer was read."""
    store = await SqliteStore.open(tmp_path / "room.db")
    late = _Late(store)
    async with open_room(
        one_core(_echo_core()), store=late, artifacts=LocalArtifacts(tmp_path), drive=False
    ) as room:
        agent = await room.session(SESSION, core_id=CoreId("crash"))
        await agent.followup("hello")
        old = Event(SESSION, 1, "agent/idle", 0, '{"pendingChildren":[]}')
        new = Event(SESSION, 9, "agent/idle", 0, '{"pendingChildren":[]}')
        waiting = asyncio.ensure_future(agent.when_idle())
        await bounded(late.was_read.wait())
        late.tell(old)
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        late.tell(new)
        await bounded(waiting)


class _Late:
    """A store that tells of nothing by itself; what it is told to tell comes after a read."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._listeners: list[Callable[[list[Event]], None]] = []
        self.was_read = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read(self, script: Any, *args: Any, **kwargs: Any) -> Any:
        answer = await self._store.read(script, *args, **kwargs)
        self.was_read.set()
        return answer

    def subscribe(self, session_id: Any, listener: Any) -> Any:
        if session_id is not None:
            self._listeners.append(listener)
        return self._store.subscribe(session_id, lambda _: None)

    def tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener([event])


def _echo_core() -> Core:
    model = ScriptedModel("scripted:echo", Script(then="echo"))
    return Core(id=CoreId("crash"), revision="1", models=(model,))


# ---- leases ----


@pytest.mark.contract("INB-17")
@pytest.mark.parametrize("prompt", ["[[wait]]", "[[calls:note wait]]"])
def test_a_driver_stopped_past_its_lease_writes_nothing_when_it_goes_on(
    plan: Callable[..., Plan], prompt: str
) -> None:
    """C-134, C-138: another process took over meanwhile, in the middle of a reply or of a tool."""
    database = plan().database
    first_moment = "user/message" if prompt == "[[wait]]" else "tool/call"
    stopped = plan(["queue", "msg_1", prompt], ["event", first_moment], ["say", "inside"], ["hold"])
    taking = plan(["event", "turn/start", 2], ["say", "took over"], ["idle"], ["hold"])
    stopped.lease_ms = taking.lease_ms = 1_500
    with actor(stopped) as first:
        first.until("word", "inside")
        ((node, _, _),) = nodes = rows(database, "SELECT id, token, expires_at FROM node")
        epoch = read(database).work[1]
        first.send(signal.SIGSTOP)
        with actor(taking) as second:
            second.until("word", "took over")
            ((*held, owner),) = rows(
                database, "SELECT status, epoch, token, owner FROM work WHERE status <> 'none'"
            ) or [(None,)]
            before = read(database)
            # The first wakes with its answer in hand: it tries to write it under its old claim.
            first.send(signal.SIGUSR1)
            first.send(signal.SIGCONT)
            first.until("lease_lost")
            assert first.end().code == 0
            after = read(database)
            assert after.events[: len(before.events)] == before.events
            if prompt == "[[wait]]":
                # The second is in the middle of the recovery turn: nothing moved.
                assert after == before
                assert held[:2] == ["claimed", epoch + 1]
                assert owner != node
            sql = f"SELECT id, token, expires_at FROM node WHERE id = '{node}'"
            assert rows(database, sql) in (nodes, []), "the old lease was renewed"
            second.send(signal.SIGUSR1)
            second.until("idle")
            assert second.end().code == 0
    record = read(database)
    log_rules.check(record)
    log_rules.check_rest(record)
    assert record.ends == ["interrupted", "completed"]
    if prompt != "[[wait]]":
        assert [result.outcome for result in record.of("tool/result")] == ["unknown"]


@pytest.mark.contract("INB-17")
def test_a_turn_longer_than_the_lease_goes_on(plan: Callable[..., Plan]) -> None:
    """A lease means that its owner lives, not how long it may take; another process looks on."""
    database = plan().database
    driving = plan(["queue", "msg_1", "[[wait]]"], ["entered", "msg_1"], ["say", "in"], ["idle"])
    looking = plan(["say", "here"], ["idle"])
    driving.lease_ms = looking.lease_ms = 600
    with actor(driving) as first, actor(looking) as second:
        first.until("word", "in")
        second.until("word", "here")
        owner = read(database).work[3]
        expires = f"SELECT expires_at FROM node WHERE id = '{owner}'"
        ((began,),) = rows(database, expires)
        eventually(lambda: rows(database, expires)[0][0] > began + 2 * 600)
        first.send(signal.SIGUSR1)
        second.until("idle")
        assert first.wait().code == second.wait().code == 0
    record = read(database)
    assert record.ends == ["completed"]
    assert record.work[:2] == ("none", 1), "it was claimed once"


# ---- recovery ----


@pytest.mark.contract("REC-02")
def test_work_that_kills_its_process_again_and_again_is_given_up_and_the_queue_goes_on(
    nursery: Nursery, plan: Callable[..., Plan]
) -> None:
    assert nursery.play(
        plan(["queue", "msg_1", "[[die]]"], ["queue", "msg_2", "after"], ["idle"])
    ).killed
    # The message behind may not have been told of in time: it is sent again, which does no harm.
    for _ in range(3):
        assert nursery.play(plan(["queue", "msg_2", "after"], ["idle"])).killed
    assert nursery.play(plan(["queue", "msg_2", "after"], ["idle"])).code == 0

    record = read(plan().database)
    log_rules.check(record)
    log_rules.check_rest(record)
    assert record.ends == [*["interrupted"] * 3, "error", "completed"]
    reasons = [end.reason for end in record.of("turn/end")]
    assert [reason.attempt for reason in reasons[:3]] == [1, 2, 3]
    assert reasons[3].code == "recovery_exhausted"
    assert record.entered == ["msg_1", "msg_2"]
    assert [start.recovery for start in record.of("turn/start")] == [False, True, True, True, False]


@pytest.mark.contract("REC-02")
def test_a_session_killed_in_the_middle_of_a_turn_can_be_used_at_once(
    nursery: Nursery, plan: Callable[..., Plan]
) -> None:
    """C-90."""
    killed = plan(["queue", "msg_1", "[[wait]]"], ["entered", "msg_1"], ["kill", "SIGKILL"])
    assert nursery.play(killed).killed
    again = nursery.play(plan(["run", "msg_2", "hello"], waits=False))
    assert again.told("result")["finalResponse"] == "ok: hello"
    assert again.told("result")["finishReason"] == "completed"
    record = read(plan().database)
    log_rules.check_rest(record)
    assert record.ends == ["interrupted", "completed", "completed"]


@pytest.mark.contract("REC-03")
def test_a_turn_that_ends_by_itself_is_completed_also_where_the_process_then_ends(
    nursery: Nursery, plan: Callable[..., Plan]
) -> None:
    """C-75: with a tool as its last deed, and a process that is told to end."""
    ended = nursery.play(
        plan(["queue", "msg_1", "[[calls:note a]]"], ["idle"], ["kill", "SIGTERM"])
    )
    assert ended.code == 0
    assert nursery.play(plan(["idle"])).code == 0
    record = read(plan().database)
    log_rules.check_rest(record)
    assert record.ends == ["completed"]
    assert not any("interrupt" in e.raw or "cancel" in e.raw for e in record.events)


# ---- calls ----


@pytest.mark.contract("REC-03", "REC-05")
def test_a_batch_of_three_calls_may_be_killed_anywhere(nursery: Nursery, tmp_path: Path) -> None:
    """C-142: at each commit, and before and after each tool's effect; the session stays usable."""
    calls = "[[calls:note yield a|note yield b|note yield c]]"
    points: list[tuple[str, tuple[int, str] | None]] = [
        (calls, (commit, phase)) for commit in range(1, 7) for phase in ("before", "after")
    ]
    for place in range(3):
        for moment in ("die-before", "die-after"):
            whats = ["a", "b", "c"]
            whats[place] = moment
            points.append((f"[[calls:{'|'.join(f'note {what}' for what in whats)}]]", None))
    outcomes: set[str] = set()
    died = 0
    for number, (prompt, kill) in enumerate(points):
        folder = tmp_path / str(number)
        folder.mkdir()
        plan = Plan(str(folder / "room.db"), str(folder / "notes"))
        plan.actions, plan.kill = [["queue", "msg_1", prompt], ["idle"]], kill
        died += nursery.play(plan).killed
        plan.actions.append(["run", "msg_2", "and now?"])
        plan.kill = None
        result = nursery.play(plan).told("result")
        assert result["finalResponse"] == "ok: and now?", (prompt, kill)

        record = read(plan.database)
        log_rules.check(record)
        log_rules.check_rest(record)
        log_rules.check_notes(record, Path(plan.notes).read_text())
        outcomes |= {result.outcome for result in record.of("tool/result")}
    assert outcomes == {"ok", "unknown"}, "calls that may start together start in one commit"
    assert died >= len(points) - 2


@pytest.mark.contract("REC-03")
def test_the_model_is_told_which_call_ran_which_may_have_and_which_never_did(
    nursery: Nursery, plan: Callable[..., Plan]
) -> None:
    """C-143: killed in the middle of a call with effects, another done, another still waiting."""
    prompt = "[[calls:note a|alone die-after b|note c]]"
    assert nursery.play(plan(["queue", "msg_1", prompt], ["idle"])).killed
    assert nursery.play(plan(["idle"])).code == 0

    record = read(plan().database)
    log_rules.check_rest(record)
    results = record.of("tool/result")
    assert [result.outcome for result in results] == ["ok", "unknown", "not_started"]
    started = {call.call_id for call in record.of("tool/call")}
    assert [result.call_id in started for result in results] == [True, True, False]
    recovery = next(e.seq for e in record.events if e.type == "turn/start" and e.data.recovery)  # pyright: ignore
    shown = log_rules.rendered(record.events[: recovery + 1])
    told = [message["content"] for message in shown if message["role"] == "tool"]
    assert told == ["noted a", UNKNOWN, NOT_STARTED]
    assert "verify" in UNKNOWN


# ---- size ----


@pytest.mark.contract("REC-06")
async def test_a_restart_with_ten_thousand_sessions_resumes_the_hundred_pending_ones(
    nursery: Nursery, plan: Callable[..., Plan], tmp_path: Path
) -> None:
    database = plan().database
    pending = {f"session_pending_{number:03}" for number in range(100)}
    store = await SqliteStore.open(database)
    async with open_room(
        one_core(_echo_core()), store=store, artifacts=LocalArtifacts(tmp_path), drive=False
    ) as room:
        for name in sorted(pending):
            agent = await room.session(name, core_id=CoreId("crash"))
            await bounded(agent.followup("hello"))
    _add_idle_sessions(database, 9_900)

    steps = _steps_of_a_look(database)
    assert steps < 100 * 50, f"{steps} steps: a look for work goes through all sessions"
    started = time.monotonic()
    assert nursery.play(plan(["idle_all", 100], only=False)).code == 0
    assert time.monotonic() - started < 30

    ran = rows(
        database, "SELECT session.id FROM session JOIN event USING (sid) WHERE type = 'turn/end'"
    )
    assert {name for (name,) in ran} == pending
    assert len(ran) == 100
    ((idle,),) = rows(
        database,
        "SELECT count(*) FROM session WHERE status = 'idle' AND head = 1 AND id LIKE 'session_idle%'",
    )
    assert idle == 9_900


def _add_idle_sessions(database: str, count: int) -> None:
    """Sessions that were once driven and have nothing to do, straight into the tables."""
    connection = apsw.Connection(database)
    names = (
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}),"
        " named AS (SELECT 'session_idle_' || i AS name FROM n) "
    )
    with connection:
        connection.execute(
            "INSERT INTO session (id, core_id, owner, status, head, state, created_at, updated_at) "
            + names
            + "SELECT name, 'crash', 'operator', 'idle', 1, '{}', 0, 0 FROM named"
        )
        connection.execute(
            "INSERT INTO event (sid, seq, type, at, data) SELECT sid, 1, 'session/created', 0,"
            """ '{"coreId":"crash","owner":"operator"}' FROM session WHERE id LIKE 'session_idle%'"""
        )
        connection.execute(
            "INSERT INTO work (kind, key, status, epoch) "
            + names
            + "SELECT 'session.drive', name, 'none', 1 FROM named"
        )
    connection.close()


def _steps_of_a_look(database: str) -> int:
    """How many steps the database engine takes to look for work: its cost, without a clock."""
    connection = apsw.Connection(database, flags=apsw.SQLITE_OPEN_READONLY)
    steps = 0

    def count(trace: dict[str, Any]) -> None:
        nonlocal steps
        steps += trace["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
    found = drives_to_claim(SqliteTx(connection, lambda: 0), NodeId("node_x"), 500)
    connection.close()
    assert len(found) == 100
    return steps


@pytest.mark.contract("STO-03")
async def test_a_session_of_two_hundred_thousand_events_opens_like_a_short_one(
    nursery: Nursery, plan: Callable[..., Plan]
) -> None:
    """C-149 in small: the cost follows what a compaction left, in time and in memory."""
    short = nursery.play(plan(["run", "msg_1", "hello"], session="session_short"))
    events = await _add_long_session(plan().database, turns=22_500)
    assert events > 200_000

    started = time.monotonic()
    long = nursery.play(plan(["run", "msg_2", "hello"]))
    assert time.monotonic() - started < 10

    assert long.told("result")["finalResponse"] == "ok: hello"
    assert long.told("result")["usage"]["inputTokens"] < 2_000
    assert long.told("rss_kib") < short.told("rss_kib") + 20_000
    record_head = rows(plan().database, f"SELECT head FROM session WHERE id = '{SESSION}'")
    assert record_head[0][0] > events


_TURN = (
    ("turn/start", '{{"turn":{0}}}'),
    ("step/start", '{{"turn":{0},"step":1}}'),
    (
        "user/message",
        '{{"turn":{0},"step":1,"message":{{"id":"msg_old_{0}","content":[{{"type":"text",'
        '"text":"question {0}"}}],"source":{{"kind":"operator"}}}}}}',
    ),
    (
        "assistant/message",
        '{{"turn":{0},"step":1,"message":{{"id":"reply_{0}","content":[{{"type":"text",'
        '"text":"answer {0}"}}]}},"model":"m","finish":"stop","usage":{{}}}}',
    ),
    ("step/end", '{{"turn":{0},"step":1}}'),
    ("turn/end", '{{"turn":{0},"reason":{{"kind":"completed"}}}}'),
    ("agent/idle", '{{"pendingChildren":[]}}'),
    ("inbox/rejected", '{{"messageId":"msg_no_{0}","reason":"only to fill the log"}}'),
    ("agent/running", "{{}}"),
)


async def _add_long_session(database: str, turns: int) -> int:
    """A log of many turns with a compaction just before its end, straight into the tables."""
    store = await SqliteStore.open(database)
    await store.write(create_session, SESSION, core_id=CoreId("crash"), owner="operator")
    await store.aclose()
    connection = apsw.Connection(database)
    ((sid,),) = connection.execute("SELECT sid FROM session WHERE id = ?", (SESSION,)).fetchall()
    numbered = (
        (sid, 2 + (turn - 1) * len(_TURN) + place, type_, text.format(turn))
        for turn in range(1, turns + 1)
        for place, (type_, text) in enumerate(_TURN)
    )
    last = 1 + turns * len(_TURN)
    covered = last - 20 * len(_TURN)
    compacted = f'{{"fromSeq":2,"toSeq":{covered},"summary":"much was said"}}'
    with connection:
        insert = "INSERT INTO event (sid, seq, type, at, data) VALUES (?, ?, ?, 0, ?)"
        connection.executemany(insert, numbered)
        connection.execute(insert, (sid, last + 1, "history/compacted", compacted))
        connection.execute(
            "UPDATE session SET head = :head, history = :head, context_from = :from,"
            " state = :state WHERE sid = :sid",
            {
                "head": last + 1,
                "from": covered + 1,
                "state": f'{{"turns":{turns},"requests":{turns}}}',
                "sid": sid,
            },
        )
    connection.close()
    return last + 1
