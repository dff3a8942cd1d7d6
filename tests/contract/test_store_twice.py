"""Every script run twice leaves what once leaves, and gives the same answer.

An engine runs a script again when a commit's answer was lost. So the same scenario is played on two
databases, once with every script run twice in a row, and both must hold the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import pytest

import postroom.scripts
from postroom.app import one_core, open_room
from postroom.domain.conversation import conversation_key
from postroom.domain.event import EndReason, ErrorInfo, ModelRetry
from postroom.domain.ids import (
    ApprovalId,
    CallId,
    ClaimToken,
    CoreId,
    DeliveryId,
    MessageId,
    NodeId,
    SessionId,
)
from postroom.domain.inbox import EMPTY
from postroom.domain.message import Message, Source, Text
from postroom.domain.outbox import CannotTell, Refused, Rules, Sent, Uncertain
from postroom.domain.parcel import Parcel, Piece
from postroom.errors import PostroomError
from postroom.flow import commands
from postroom.flow.core import Core
from postroom.ports.store import Store, Tx
from postroom.scripts import (
    approvals,
    artifacts,
    attach,
    drive,
    health,
    inbound,
    inbox,
    log,
    outbox,
    routes,
    session,
    usage,
)
from postroom.scripts.artifacts import ArtifactRecord
from postroom.scripts.drive import Drive, Judged, Offer, Progress
from postroom.scripts.session import Opened
from postroom.stores.node import (
    bury_nodes,
    forget_nodes,
    other_nodes,
    register_node,
    remove_node,
    renew_node,
)
from postroom.testing import PlainTool, StoreWrapper, calling, scripted
from tests.contract.store_world import (
    CORE,
    HEADER,
    OWNER,
    PENDING_MAX,
    SESSION,
    Engine,
    Hand,
    Heard,
    message,
    reply,
    result,
)
from tests.support import bounded

P = ParamSpec("P")
R = TypeVar("R")

OTHER = SessionId("session_other")
FORK = SessionId("session_fork")
DEAD = NodeId("node_dead")

# What scripts are made of: run by a script, never by an engine.
PIECES = frozenset(
    {
        *("lock_session", "insert_session", "read_work", "write_work", "ready_work"),
        *("release_work", "is_node", "lapsed", "copy_records"),
        *("primary_route", "is_owned", "resolve", "bind_conversation", "write_binding"),
        *("start_over", "entitle", "write_parcels", "read_delivery", "read_parts"),
    }
)


class Recording(StoreWrapper):
    """Names the scripts that ran; ``twice``: each is run again, and must say the same."""

    def __init__(self, store: Store, *, twice: bool) -> None:
        super().__init__(store)
        self._twice = twice
        self.names: set[str] = set()

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._run(super().write, script, args, kwargs)

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._run(super().read, script, args, kwargs)

    async def _run(self, run: Callable[..., Any], script: Any, args: Any, kwargs: Any) -> Any:
        self.names.add(script.__name__)
        first = await _outcome(run, script, args, kwargs)
        if self._twice:
            second = await _outcome(run, script, args, kwargs)
            assert _comparable(second) == _comparable(first), script.__name__
        if isinstance(first, PostroomError):
            raise first
        return second if self._twice else first


async def _outcome(run: Callable[..., Any], script: Any, args: Any, kwargs: Any) -> Any:
    try:
        return await run(script, *args, **kwargs)
    except PostroomError as error:
        return error


def _comparable(answer: Any) -> Any:
    """An answer without what says only that this run found itself done already.

    A drive's progress names the events its run appended, and shows the inbox only as far as its
    run looked at it; who reads it goes by where the drive stands.
    """
    match answer:
        case PostroomError():
            return answer.code, answer.message
        case Progress():
            state = msgspec.structs.replace(answer.state, inbox=EMPTY)
            return state, answer.history, answer.idle, answer.changed
        case Drive():
            return answer.fence, answer.core_id, answer.owner, _comparable(answer.progress)
        case Opened():  # whether it was created is told only to who gave a reference
            return answer.core_id, answer.owner, answer.cwd, answer.head, answer.status
        case outbox.Claimed():
            return msgspec.structs.replace(answer, lease_left_ms=0)
        case outbox.Wait():
            return answer.until
        case outbox.Question():
            return answer.claimed.fence, answer.claimed.index
        case tuple():
            return tuple(map(_comparable, answer))  # pyright: ignore[reportUnknownVariableType]
        case _:
            return answer


async def play(store: Store) -> None:
    """Every script there is, and most of the ways through it. Every id in it is fixed."""
    write, read = store.write, store.read
    hand = Hand(store)

    # made, titled, and what is pending put, changed and taken
    for _ in range(2):
        opened = await write(
            session.create_session,
            SESSION,
            core_id=CORE,
            owner=OWNER,
            exclusive=True,
            ref=ClaimToken("made"),
        )
        assert opened.created, "its caller gave a reference, so that it can be told"
    await write(session.create_session, OTHER, core_id=CORE, owner=OWNER)
    await write(log.set_title, SESSION, "a title")
    await write(_queue, "kept", "inject")
    await write(_queue, "first", "followup", run="exclusive")
    await _refused(write(_queue, "overlaps", "followup", run="exclusive"), "run_overlap")
    await _refused(write(_queue, "over the cap", "followup", pending_max=2), "queue_full")
    await write(_queue, "second", "followup")
    await write(_queue, "third", "followup")
    await write(
        inbox.replace_message, SESSION, MessageId("msg_second"), message("changed", "changed")
    )
    await write(inbox.replace_message, SESSION, MessageId("msg_none"), message("x", "x"))
    await write(inbox.remove_message, SESSION, MessageId("msg_third"), ClaimToken("taken"))
    await write(inbox.remove_message, SESSION, MessageId("msg_third"), ClaimToken("taken again"))
    await read(drive.drives_to_claim, store.node, 10)
    await read(log.list_pending, SESSION)

    # a turn with two steps, a retry, three calls, a refused steer and a late result
    claimed = await write(drive.claim_drive, SESSION, store.node, ClaimToken("one"), attempts_max=3)
    assert claimed is not None
    fence = claimed.fence
    await read(drive.drive_holder, SESSION)
    await read(drive.peek_turn, SESSION, fence)
    stale = Judged((MessageId("msg_none"),))
    assert (await write(drive.begin_turn, SESSION, fence, 1, HEADER, stale)).changed
    await write(drive.begin_turn, SESSION, fence, 1, HEADER)
    failed = ModelRetry(1, 1, 1, 500, ErrorInfo("server", "the server failed"))
    await write(drive.record_retry, SESSION, fence, failed, HEADER)
    calls = (CallId("call_a"), CallId("call_b"), CallId("call_c"))
    await write(drive.record_reply, SESSION, fence, reply(1, calls=calls), calls[:1])
    await write(drive.start_calls, SESSION, fence, 1, calls[1:])
    await write(drive.record_results, SESSION, fence, 1, (result(1, "call_a"),))
    await write(_queue, "steered", "steer")
    await read(drive.peek_step, SESSION, fence)
    judged = Judged((MessageId("msg_steered"),), (MessageId("msg_steered"),), "not now")
    rest = (result(1, "call_b"), result(1, "call_c"))
    await write(drive.next_step, SESSION, fence, 1, 1, rest, HEADER, stale)
    await write(drive.next_step, SESSION, fence, 1, 1, rest, HEADER, judged)
    await write(drive.record_late, SESSION, fence, result(1, "call_b"))
    done = EndReason("completed")
    await write(drive.finish_turn, SESSION, fence, 1, done, reply(1, 2))

    # a turn that is cancelled while it calls, with what is pending kept
    await write(drive.begin_turn, SESSION, fence, 2, HEADER)
    await write(_queue, "behind", "followup")
    await write(inbox.cancel, SESSION, "user", keep_inbox=True, ref=ClaimToken("stop"))
    await write(drive.record_reply, SESSION, fence, reply(2, calls=calls[:1]), calls[:1])
    # one that is cancelled with everything, from between two steps
    await write(drive.begin_turn, SESSION, fence, 3, HEADER)
    await write(_queue, "emptied", "followup")
    await write(inbox.cancel, SESSION, "user", keep_inbox=False, ref=ClaimToken("stop all"))
    await write(drive.finish_turn, SESSION, fence, 3, done, reply(3))
    await _refused(write(drive.start_calls, SESSION, fence, 3, calls), "stale_claim")
    await write(inbox.cancel, SESSION, "user", keep_inbox=False, ref=ClaimToken("nothing left"))

    # a receipt and its claim at once; given back; claimed again; failed; retried; cancelled idle
    offer = Offer(store.node, ClaimToken("two"), 3, HEADER)
    _, offered = await write(_queue_and_claim, "at once", offer)
    assert offered is not None
    await write(_queue_and_claim, "behind it", Offer(store.node, ClaimToken("no"), 3, HEADER))
    await write(drive.give_back_drive, SESSION, offered.fence)
    again = await write(drive.claim_drive, SESSION, store.node, ClaimToken("three"), attempts_max=3)
    assert again is not None
    await write(drive.begin_turn, SESSION, again.fence, 5, HEADER)
    await write(drive.finish_turn, SESSION, again.fence, 5, done, reply(5))
    await write(drive.begin_turn, SESSION, again.fence, 6, HEADER)
    error = EndReason("error", code="server", message="the model failed")
    await write(drive.finish_turn, SESSION, again.fence, 6, error)
    await write(inbox.retry_failed, SESSION, pending_max=PENDING_MAX)
    await write(inbox.cancel, SESSION, "user", keep_inbox=False, ref=ClaimToken("not now"))

    # a node that dies with a turn open, and who goes on with its work
    token = ClaimToken("dead")
    await write(register_node, DEAD, token, 60_000, "a node that will die")
    await write(renew_node, DEAD, token, 60_000)
    await write(_queue, "survives", "followup")
    died = await write(drive.claim_drive, SESSION, DEAD, ClaimToken("four"), attempts_max=3)
    assert died is not None
    await write(drive.begin_turn, SESSION, died.fence, 7, HEADER)
    await read(other_nodes, store.node)
    await write(bury_nodes, [DEAD])
    await write(renew_node, DEAD, token, 60_000)
    over = await write(drive.claim_drive, SESSION, store.node, ClaimToken("five"), attempts_max=3)
    assert over is not None
    await _refused(write(drive.finish_turn, SESSION, died.fence, 7, done, reply(7)), "stale_claim")
    await write(drive.begin_turn, SESSION, over.fence, 8, HEADER)
    await write(drive.finish_turn, SESSION, over.fence, 8, done, reply(8))
    await write(forget_nodes, 1)
    await write(register_node, DEAD, token, 60_000, "again")
    await write(remove_node, DEAD, token)

    # artifacts of a turn, of none, and of a session that will be deleted
    for session_id, number, turn in ((SESSION, 1, 1), (SESSION, 2, None), (OTHER, 1, None)):
        kept = ArtifactRecord(
            artifact=f"sha256:{number:064x}", media_type="image/png", size=number, turn=turn
        )
        recorded = await write(artifacts.record_artifact, session_id, kept)
        assert msgspec.structs.replace(recorded, at=0) == kept
    await read(artifacts.artifacts_of, SESSION)
    await read(artifacts.is_of_session, SESSION, f"sha256:{3:064x}")

    # read, forked, deleted
    await read(usage.usage_of_session, SESSION)
    await read(usage.usage_of_day)
    await read(usage.usage_table)
    await read(log.session_info, SESSION)
    await read(log.list_sessions)
    await read(log.read_events, SESSION)
    await read(log.read_history, SESSION)
    await read(log.find_receipt, SESSION, MessageId("msg_first"))
    await read(log.agent_status, SESSION)
    await write(log.fork_session, SESSION, FORK, owner=OWNER)
    await write(log.delete_session, OTHER)
    await write(log.delete_session, SessionId("session_none"))
    assert await hand.pending() == []
    await _play_inbound(store)
    await _play_outbox(store)
    await _play_reads(store)


async def _play_inbound(store: Store) -> None:
    """What comes in of a conversation, and the routes of its sessions."""
    write, read = store.write, store.read
    first, deleted = _arrival(1, cursor="1"), _arrival(2)
    assert (await _comes(store, first, "hello")).outcome == "queued"
    assert (await _comes(store, _arrival(1), "relabelled")).outcome == "duplicate"
    assert (await _comes(store, deleted, "taken back")).outcome == "queued"
    assert (await _comes(store, _arrival(3), "hello there", replaces="1")).outcome == "edited"
    assert (await _comes(store, _arrival(4), "of nothing", replaces="none")).outcome == "queued"
    assert (await write(inbound.delete_message, _arrival(5), "2")).outcome == "deleted"
    assert (await write(inbound.delete_message, _arrival(6), "2")).outcome == "ignored"
    refused = await write(inbound.drop, _arrival(7), inbound.Accepted("refused"))
    assert refused.outcome == "refused"
    await write(inbound.quarantine, "bot", "8", "{]", "no JSON", ("offset", "8"))
    await read(inbound.read_cursor, "bot", "offset")
    # every command that changes something
    for number, text in enumerate(
        (
            *("/steer left", "/queue edit 1 right", "/queue remove 1", "/stop", "/new", "/new"),
            *("/resume 3", "/retry", "/sessions", "/status", "/queue", "/help", "/resume"),
        ),
        10,
    ):
        one = _arrival(number)
        asked = commands.parse(text)
        assert asked is not None
        script = commands.command(asked, _inbound_message(one, text), PENDING_MAX)
        assert (await write(inbound.run_command, one, script)).outcome == "command"
    bound = await read(routes.bound_session, CORE, "bot", _HERE)
    assert bound is not None
    await read(routes.sessions_of, CORE, "bot", _HERE)
    for token in ("route_a", "route_b"):
        await write(
            routes.bind_route, bound, ClaimToken(token), channel="terminal", node=store.node
        )
    await read(routes.session_address, bound)
    await write(routes.unbind_route, ClaimToken("route_a"))
    await write(inbound.forget_old, 1)


async def _play_outbox(store: Store) -> None:
    """Deliveries sent, lost, asked about and decided; and what a person is asked before a call."""
    write, read = store.write, store.read
    here = SessionId("session_posts")
    target = routes.target_of("bot", _HERE)
    await write(session.create_session, here, core_id=CORE, owner=OWNER, target=target)
    hand = Hand(store, here)
    await hand.queue("ask me", name="msg_ask")
    drive_ = await hand.claim(token="ask")
    assert drive_ is not None
    await hand.begin(drive_.fence, 1)
    asked = ("apr_1", "apr_2", "apr_3")
    for name in asked:
        answer = await write(
            approvals.ask_approval,
            here,
            drive_.fence,
            ApprovalId(name),
            turn=1,
            step=1,
            call_id=CallId(f"call_{name}"),
            kind="approval",
            subject="look",
            text="May I look?",
            wait_ms=60_000,
        )
        assert answer == "outbox"
    decide = functools.partial(
        approvals.decide_approval, principal=OWNER, by="Ann", ref=ClaimToken("decide")
    )
    decide.__name__ = "decide_approval"  # type: ignore[attr-defined]
    assert await write(decide, ApprovalId("apr_1"), "allow") == "allow"
    with contextlib.suppress(approvals.NotAsked):
        await write(decide, ApprovalId("apr_none"), "allow")
    assert len(await read(approvals.open_approvals)) == 2
    await read(approvals.approval_decision, ApprovalId("apr_1"))
    said = _parcel("said", policy="persist", failure_history_text="never arrived")
    await write(outbox.send, here, said, turn=1, fence=drive_.fence)
    await hand.fail(drive_.fence, 1)  # what is still asked is denied; a notice is owed
    for name in ("one", "two", "three", "four"):
        await write(outbox.send, here, _parcel(name), as_owner=OWNER)
    serves = outbox.Serves(
        store.node,
        frozenset({"bot"}),
        frozenset(),
        lambda channel, text: [text[:3], text[3:]],
        {"bot": True},
        Rules(attempts_max=1),
        frozenset({"lane", *(f"lane_{n}" for n in range(20)), "ask_again"}),
    )
    assert [name for _, name in await read(outbox.lanes_to_serve, 0, 100)][-1] == here
    found = await write(outbox.claim_delivery, here, ClaimToken("lane"), serves)
    outcomes: list[Any] = [
        *(Sent("m1"), Sent("m2", "as plain text"), Refused("no"), Uncertain("lost")),
    ]
    for number in range(20):
        if not isinstance(found, outbox.Claimed):
            break
        outcome = outcomes.pop(0) if outcomes else Sent(f"m{number}")
        token = ClaimToken(f"lane_{number}")
        found = await write(outbox.record_outcome, found, outcome, 0.0, token, serves)
    assert isinstance(found, outbox.Wait)
    ((_, doubtful),) = await read(outbox.doubts, (0, ""), 10)
    question = await write(outbox.claim_question, doubtful, ClaimToken("ask_again"), serves)
    assert isinstance(question, outbox.Question)
    again = await write(outbox.record_verdict, question, CannotTell(), 0, 0.0, serves)
    assert isinstance(again, outbox.Wait)
    rules, ref = Rules(), ClaimToken("operator")
    await write(outbox.resolve_delivery, doubtful, "failed", "ann", ref)
    await write(outbox.redeliver, doubtful, "ann", ClaimToken("operator_2"), rules)
    await write(outbox.abandon, doubtful, "ann", ClaimToken("operator_3"))
    views = await read(outbox.list_deliveries, session_id=here)
    assert {v.status for v in views} >= {"sent", "failed"}
    await read(outbox.show_delivery, doubtful)


def _parcel(name: str, **more: Any) -> Parcel:
    more.setdefault("policy", "transient")
    return Parcel(
        id=DeliveryId(f"dlv_{name}"), kind="text", pieces=(Piece(f"text of {name}"),), **more
    )


async def _play_reads(store: Store) -> None:
    """What only looks."""
    here = SessionId("session_posts")
    await store.read(attach.check_owner, here, OWNER)
    await store.read(attach.standing, here)
    await store.read(attach.read_page, here, 0, 10, 10_000)
    await store.read(attach.approvals_of, OWNER)
    await store.read(attach.core_of, here)
    await store.read(health.standing)


_HERE = conversation_key("loopback", "dm", "here")


def _arrival(number: int, *, cursor: str | None = None) -> inbound.Arrival:
    return inbound.Arrival(
        ref=ClaimToken(f"in_{number}_{cursor}"),
        core_id=CORE,
        channel="bot",
        conversation=_HERE,
        dedupe=f"{number}",
        cursor=("offset", cursor) if cursor is not None else None,
        owner="conversation:here",
        new_session=SessionId(f"session_in_{number}"),
    )


def _inbound_message(one: inbound.Arrival, text: str) -> Message:
    name = inbound.message_id_of(one.channel, one.dedupe)
    return Message(name, (Text(text),), Source("conversation", sender="Ann", channel="bot"))


async def _comes(store: Store, one: inbound.Arrival, text: str, **more: Any) -> inbound.Accepted:
    return await store.write(
        inbound.accept_message, one, _inbound_message(one, text), pending_max=PENDING_MAX, **more
    )


async def _refused(writing: Any, code: str) -> None:
    with pytest.raises(PostroomError) as refused:
        await writing
    assert refused.value.code == code


def _queue(tx: Tx, text: str, operation: Any, *, pending_max: int = 99, run: Any = None) -> Any:
    """`queue_message` under an id made of its text."""
    new = message(text, text.replace(" ", "-"))
    return inbox.queue_message(tx, SESSION, new, operation, pending_max=pending_max, run=run)


def _queue_and_claim(tx: Tx, text: str, offer: Offer) -> Any:
    new = message(text, text.replace(" ", "-"))
    return drive.queue_and_claim(
        tx, SESSION, new, "followup", pending_max=99, run=None, offer=offer
    )


def everything(engine: Engine, node: str) -> dict[str, list[Any]]:
    """What the database holds, without times and without what is numbered by chance."""
    of_session = "LEFT JOIN session ON session.sid"
    held = {
        "session": "SELECT id, core_id, owner, cwd, parent, title, status, head, state, header_hash,"
        " history, context_from FROM session ORDER BY id",
        "event": f"SELECT session.id, seq, type, data FROM event {of_session} = event.sid"
        " ORDER BY session.id, seq",
        "message": f"SELECT message.id, session.id, seq, hash FROM message {of_session} ="
        " message.sid ORDER BY message.id",
        "inbox": f"SELECT session.id, lane, pos, inbox.id FROM inbox {of_session} = inbox.sid"
        " ORDER BY session.id, lane, pos",
        "run": f"SELECT session.id, message_id, exclusive FROM run {of_session} = run.sid"
        " ORDER BY session.id, message_id",
        "work": "SELECT kind, key, status, epoch, token, owner FROM work ORDER BY kind, key",
        "node": "SELECT id, expires_at > 0 FROM node ORDER BY id",
        "usage": f"SELECT session.id, model, requests, input_tokens FROM usage {of_session} ="
        " usage.sid ORDER BY session.id, model",
        "artifact": "SELECT session.id, hash, turn, media_type, size, name, summary FROM artifact"
        f" {of_session} = artifact.sid ORDER BY session.id, hash",
        "delivery": "SELECT delivery.id, session.id, ord, kind, delivery.status, route,"
        " blocks, handed_over, deferrals, reconciles, address, ref, decided_by FROM delivery"
        f" {of_session} = delivery.sid ORDER BY session.id, ord",
        "part": "SELECT delivery, idx, kind, text, status, attempts, reference, note, error FROM part"
        " ORDER BY delivery, idx",
        "approval": "SELECT id, kind, subject, status, decision, decided_by FROM approval"
        " ORDER BY id",
        "route": "SELECT session.id, token, channel, conversation, node FROM route"
        f" {of_session} = route.sid ORDER BY session.id, route.id",
        "binding": "SELECT binding.core_id, channel, conversation, session.id FROM binding"
        f" {of_session} = binding.sid ORDER BY channel, conversation",
        "conversation": "SELECT conversation, session.id FROM conversation"
        f" {of_session} = conversation.sid ORDER BY session.id",
        "cursor": "SELECT channel, name, value FROM cursor ORDER BY channel, name",
        "dedupe": "SELECT channel, key, outcome, ref, session, message FROM dedupe"
        " ORDER BY channel, key",
        "quarantine": "SELECT channel, key, raw, error FROM quarantine ORDER BY channel, key",
    }
    texts = {
        table: json.dumps([list(row) for row in engine.rows(sql)]).replace(node, "NODE")
        for table, sql in held.items()
    }
    return {table: json.loads(_WHEN.sub("", text)) for table, text in texts.items()}


_WHEN = re.compile(r',\\"expiresAt\\":\d+')


def scripts() -> set[str]:
    """The names of all transaction scripts."""
    names: set[str] = set()
    for module in pkgutil.iter_modules(postroom.scripts.__path__):
        home = importlib.import_module(f"{postroom.scripts.__name__}.{module.name}")
        for name, function in vars(home).items():
            if not inspect.isfunction(function) or function.__module__ != home.__name__:
                continue
            parameters = list(inspect.signature(function).parameters)
            if not name.startswith("_") and parameters[:1] == ["tx"]:
                names.add(name)
    return names - PIECES


@pytest.mark.contract("STO-01", "STO-08")
async def test_every_script_run_twice_equals_once(
    engine: Engine, another: Callable[[], Engine]
) -> None:
    once = Recording(await engine.open(), twice=False)
    await play(once)
    second = another()
    twice = Recording(await second.open(), twice=True)
    heard = Heard(twice.inner)
    await play(twice)
    head = (await Hand(twice).log())[-1].seq
    await heard.reach(head)
    assert heard.seqs == list(range(1, head + 1)), "nothing is told twice"
    expected, found = everything(engine, once.node), everything(second, twice.node)
    for table, rows in expected.items():
        assert found[table] == rows, table
    # A script that is not in the scenario is not proven: add it to `play`.
    ran = twice.names | {"queue_message", "queue_and_claim"}
    assert scripts() - ran == set()


@pytest.mark.contract("STO-08")
async def test_a_runtime_whose_every_write_is_made_twice_works_like_any_other(
    engine: Engine, another: Callable[[], Engine]
) -> None:
    logs = [await _conversation(engine, twice=False), await _conversation(another(), twice=True)]
    assert logs[1] == logs[0]


async def _conversation(engine: Engine, *, twice: bool) -> list[tuple[str, Any]]:
    model = scripted(
        calling("look", "look"),
        "looked",
        {"error": {"status": 500, "code": "server"}},
        "after a retry",
        "and that",
    )
    core = Core(
        id=CoreId("default"),
        revision="1",
        models=(model,),
        tools={"look": PlainTool("look")},
    )
    store = Recording(await engine.open(), twice=twice)
    async with open_room(one_core(core), store=store, artifacts=_NoArtifacts()) as room:
        agent = await room.session(SESSION)
        for text in ("look at it", "once more"):
            done = await bounded(agent.run(text))
            assert done.finish_reason == "completed"
        await agent.inject("by the way")
        await bounded(agent.run("and this"))
        return [(e.type, getattr(e.data, "outcome", None)) for e in await _log(store)]


async def _log(store: Store) -> list[Any]:
    return await store.read(log.read_events, SESSION, 0, 10_000)


class _NoArtifacts:
    async def put(self, data: bytes) -> str:
        raise AssertionError("nothing here is large")

    async def get(self, artifact: str) -> bytes:
        raise AssertionError("nothing here is large")

    async def exists(self, artifact: str) -> bool:
        return False

    async def delete(self, artifact: str) -> None:
        pass
