"""The driver's scripts: claim, begin a turn, take a step, end a turn. All are fenced.

Each names the turn and step that its caller believes open. Run again after a lost commit answer
it finds that turn and step already past, and answers from the log.
"""

from __future__ import annotations

import msgspec

from postroom.domain.event import (
    AgentIdle,
    AssistantReply,
    EndReason,
    Event,
    ModelRetry,
    RequestHeader,
    StepStart,
    ToolResult,
    TurnEnd,
)
from postroom.domain.ids import CallId, ClaimToken, CoreId, MessageId, NodeId, SessionId
from postroom.domain.inbox import step_batch, turn_batch
from postroom.domain.message import Message
from postroom.domain.turn import (
    AgentState,
    BeginTurn,
    Finish,
    NextStep,
    RecordReply,
    RecordResults,
    RecordRetry,
    StartCalls,
    TakeOver,
    decide,
)
from postroom.domain.work import Fence, claim, give_back, holds, ready
from postroom.errors import StaleClaim
from postroom.ports.store import Tx
from postroom.scripts.inbox import Operation, Receipt, RunMode, put_message
from postroom.scripts.session import (
    DRIVE,
    LockedSession,
    check_fence,
    is_node,
    lapsed,
    lock_session,
    read_work,
    write_work,
)


class Header(msgspec.Struct, frozen=True):
    """A request header and its hash: the log gets it when the hash differs from the last."""

    hash: str
    data: RequestHeader


class Judged(msgspec.Struct, frozen=True):
    """A peeked batch and what the policy said of it. ``rejected`` is a part of ``batch``."""

    batch: tuple[MessageId, ...]
    rejected: tuple[MessageId, ...] = ()
    reason: str = ""


class Progress(msgspec.Struct, frozen=True):
    """Where the drive stands after a script.

    ``events`` are those appended (none when the script found itself already done), ``before`` and
    ``history`` the seqs of the last event the model may see, before and after them.
    ``idle``: the agent is idle and the drive released. ``changed``: the judged batch was no
    longer the pending one; nothing was claimed and the boundary is to be tried again.
    """

    state: AgentState
    before: int
    history: int
    events: tuple[Event, ...] = ()
    idle: bool = False
    changed: bool = False


class Drive(msgspec.Struct, frozen=True):
    """A claimed drive, and where it stands."""

    fence: Fence
    core_id: CoreId
    owner: str
    cwd: str | None
    progress: Progress


def _progress(session: LockedSession) -> Progress:
    events = tuple(session.appended)
    idle = bool(events) and events[-1].type == AgentIdle.TYPE
    return Progress(session.state, session.before, session.history, events, idle)


def _already(session: LockedSession, *, idle: bool = False, changed: bool = False) -> Progress:
    """The answer of a script that has nothing to write."""
    history = session.history
    return Progress(session.state, history, history, (), idle, changed)


def _with_header(session: LockedSession, header: Header | None, turn: int) -> None:
    """Appends the header if it says something new. It stands before the step that uses it."""
    if header is not None and header.hash != session.header_hash:
        session.append((msgspec.structs.replace(header.data, turn=turn),))
        session.header_hash = header.hash
        session.state = msgspec.structs.replace(session.state, header=session.head)


def claim_drive(
    tx: Tx,
    session_id: SessionId,
    node: NodeId,
    token: ClaimToken,
    *,
    attempts_max: int,
    begin: Header | None = None,
    abandoned: tuple[ClaimToken, ...] = (),
) -> Drive | None:
    """Claims a session's drive if it is to be had; None if it is not.

    ``abandoned`` are claims of this very process that nobody in it drives any more: they are to
    be had like those of the dead. A claim that it made otherwise is left alone: it may have been
    made with a receipt a moment ago, and its driver is about to start.

    A turn found open is closed here: recovery follows a claim and nothing else. With ``begin``
    the next turn is opened at once, in the same transaction (no policy judges it).
    ``progress.idle`` then says that there was nothing to do.

    Running again finds its own token; the answer is the state as it stands. A node that was given
    up for dead claims nothing: it has another identity by now, or is about to get one.
    """
    session = lock_session(tx, session_id)
    work = session.drive()
    if work.status == "claimed" and work.token == token:
        session.load_inbox()
        return _drive(session, Fence(work.epoch, token), _already(session))
    if not is_node(tx, node):
        return None
    dead = work.status == "claimed" and (work.token in abandoned or lapsed(tx, work.owner))
    claimed = claim(work, node, token, lapsed=dead)
    if claimed is None:
        return None
    write_work(tx, DRIVE, session_id, claimed)
    if session.state.turn is not None:
        session.append(decide(session.state, TakeOver(charged=dead, attempts_max=attempts_max)))
    if begin is not None:
        _begin(session, begin, None)
    session.save()
    fence = Fence(claimed.epoch, token)
    return _drive(session, fence, _progress(session))


def _drive(session: LockedSession, fence: Fence, progress: Progress) -> Drive:
    return Drive(fence, session.core_id, session.owner, session.cwd, progress)


def peek_turn(tx: Tx, session_id: SessionId, fence: Fence) -> tuple[Message, ...]:
    """What a turn boundary would claim now, for the policy to judge."""
    session = lock_session(tx, session_id, fence)
    session.load_inbox()
    state = session.state
    batch = step_batch(state.inbox) if state.owed else turn_batch(state.inbox)
    return tuple(p.message for p in batch)


def peek_step(tx: Tx, session_id: SessionId, fence: Fence) -> tuple[Message, ...]:
    """What a boundary between steps would claim now."""
    session = lock_session(tx, session_id, fence)
    session.load_inbox()
    return tuple(p.message for p in step_batch(session.state.inbox))


def begin_turn(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    number: int,
    header: Header,
    judged: Judged | None = None,
) -> Progress:
    """Opens turn ``number`` and its first step with the claimed batch, or settles.

    Running again finds the turn open, or already ended, or the agent idle.
    """
    session = lock_session(tx, session_id)
    state = session.state
    if state.turns >= number:
        if state.turn is not None and state.turn.number == number:
            check_fence(session, fence)
            return _already(session)
        return _already(session, idle=state.status == "idle")
    if state.status == "idle":
        return _already(session, idle=True)
    check_fence(session, fence)
    if not _begin(session, header, judged):
        return _already(session, changed=True)
    session.save()
    return _progress(session)


def _begin(session: LockedSession, header: Header, judged: Judged | None) -> bool:
    """False if the judged batch is no longer what a boundary would claim."""
    session.load_inbox()
    state = session.state
    command = BeginTurn()
    if judged is not None and (state.owed or state.inbox.waking):
        batch = step_batch(state.inbox) if state.owed else turn_batch(state.inbox)
        if tuple(p.message.id for p in batch) != judged.batch:
            return False
        command = BeginTurn(judged.rejected, judged.reason)
    events = decide(state, command)
    for event in events:
        if isinstance(event, StepStart):
            _with_header(session, header, event.turn)
        session.append((event,))
    return True


def next_step(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    turn: int,
    step: int,
    results: tuple[ToolResult, ...],
    header: Header,
    judged: Judged | None = None,
) -> Progress:
    """Closes ``step`` with its last results and opens the next, or ends a cancelled turn.

    Running again finds the next step open, or the turn ended.
    """
    session = lock_session(tx, session_id)
    state = session.state
    if state.turn is None or state.turn.number != turn:
        return _ended(session, turn)
    check_fence(session, fence)
    if state.turn.step > step:
        return _already(session)
    session.load_inbox()
    command = NextStep(_unpaired(session, results))
    if judged is not None and state.turn.cancel is None:
        if tuple(p.message.id for p in step_batch(session.state.inbox)) != judged.batch:
            return _already(session, changed=True)
        command = NextStep(command.results, judged.rejected, judged.reason)
    for event in decide(session.state, command):
        if isinstance(event, StepStart):
            _with_header(session, header, turn)
        session.append((event,))
    session.save()
    return _progress(session)


def record_reply(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    reply: AssistantReply,
    start: tuple[CallId, ...],
) -> Progress:
    """Commits a reply that calls tools, with the calls that start at once.

    Running again finds the step replied.
    """
    session = lock_session(tx, session_id)
    state = session.state
    if state.turn is None or state.turn.number != reply.turn:
        return _ended(session, reply.turn)
    check_fence(session, fence)
    if state.turn.step == reply.step and state.turn.replied:
        return _already(session)
    if state.turn.cancel is not None:
        session.load_inbox()
    session.append(decide(session.state, RecordReply(reply, start)))
    session.save()
    return _progress(session)


def start_calls(
    tx: Tx, session_id: SessionId, fence: Fence, turn: int, call_ids: tuple[CallId, ...]
) -> tuple[CallId, ...]:
    """Commits that calls start; those that may. None may once the turn is cancelled."""
    session = lock_session(tx, session_id, fence)
    assert session.state.turn is not None
    assert session.state.turn.number == turn
    session.append(decide(session.state, StartCalls(call_ids)))
    session.save()
    if session.state.turn.cancel is not None:
        return ()
    return tuple(c.call_id for c in session.state.turn.calls if c.started and c.call_id in call_ids)


def record_results(
    tx: Tx, session_id: SessionId, fence: Fence, turn: int, results: tuple[ToolResult, ...]
) -> Progress:
    """Commits results of calls of the open step; one already paired is not paired again."""
    session = lock_session(tx, session_id, fence)
    assert session.state.turn is not None
    assert session.state.turn.number == turn
    session.append(decide(session.state, RecordResults(_unpaired(session, results))))
    session.save()
    return _progress(session)


def _unpaired(session: LockedSession, results: tuple[ToolResult, ...]) -> tuple[ToolResult, ...]:
    assert session.state.turn is not None
    open_calls = {c.call_id for c in session.state.turn.calls}
    return tuple(r for r in results if r.call_id in open_calls)


def record_late(tx: Tx, session_id: SessionId, fence: Fence, result: ToolResult) -> None:
    """Records a result whose call was closed before it came. The model never sees it."""
    session = lock_session(tx, session_id, fence)
    late = msgspec.structs.replace(result, outcome="late")
    if any(e.data == late for e in session.events(session.history, ToolResult)):
        return
    session.append((late,))
    session.save()


def record_retry(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    retry: ModelRetry,
    header: Header | None = None,
) -> Progress:
    """Commits that the step's request failed and is made again. ``header``: by another model."""
    session = lock_session(tx, session_id, fence)
    turn = session.state.turn
    assert turn is not None
    assert turn.number == retry.turn
    if turn.retries < retry.attempt:
        _with_header(session, header, retry.turn)
        session.append(decide(session.state, RecordRetry(retry)))
        session.save()
    return _progress(session)


def finish_turn(
    tx: Tx,
    session_id: SessionId,
    fence: Fence,
    turn: int,
    reason: EndReason,
    reply: AssistantReply | None = None,
    results: tuple[ToolResult, ...] = (),
) -> Progress:
    """Ends the turn: the one ending. Idle or not is decided here, in the same transaction.

    Running again finds the turn ended.

    Raises:
        StaleClaim: the turn was ended by somebody else's recovery.
    """
    session = lock_session(tx, session_id)
    state = session.state
    if state.turn is None or state.turn.number != turn:
        return _ended(session, turn)
    check_fence(session, fence)
    session.load_inbox()
    if reply is not None and state.turn.replied and state.turn.step == reply.step:
        reply = None
    if reply is None:
        results = _unpaired(session, results)
    session.append(decide(session.state, Finish(reason, reply, results)))
    session.save()
    return _progress(session)


def _ended(session: LockedSession, turn: int) -> Progress:
    """The answer for a turn that is no longer open, if its own driver ended it."""
    if session.state.turns < turn:
        raise StaleClaim(f"turn {turn} of {session.id} was never opened")
    events = session.events(0, TurnEnd, AgentIdle)
    at = next(
        i for i, e in enumerate(events) if isinstance(e.data, TurnEnd) and e.data.turn == turn
    )
    end = events[at].data
    assert isinstance(end, TurnEnd)
    if end.reason.kind == "interrupted" or end.reason.code == "recovery_exhausted":
        raise StaleClaim(f"turn {turn} of {session.id} was closed by its recovery")
    idle = at + 1 < len(events) and events[at + 1].type == AgentIdle.TYPE
    return _already(session, idle=idle)


class Offer(msgspec.Struct, frozen=True):
    """A process ready to drive a session at once: its claim, and the header of its first step."""

    node: NodeId
    token: ClaimToken
    attempts_max: int
    begin: Header


def queue_and_claim(
    tx: Tx,
    session_id: SessionId,
    message: Message,
    operation: Operation,
    *,
    pending_max: int,
    run: RunMode | None,
    offer: Offer,
) -> tuple[Receipt, Drive | None]:
    """Queues a message and, if that woke an idle agent, claims its drive and opens the turn.

    One commit where two would do the same. No drive in the answer means that somebody else
    drives, or that nothing woke. Running again finds the message known and the claim its own.
    """
    session = lock_session(tx, session_id)
    idle = session.state.status == "idle"
    receipt = put_message(session, message, operation, pending_max=pending_max, run=run)
    work = session.drive()
    if work.token == offer.token:
        return receipt, _drive(session, Fence(work.epoch, offer.token), _already(session))
    woke = idle and session.state.status == "running"
    if not woke or work.status == "claimed" or not is_node(tx, offer.node):
        session.save()
        return receipt, None
    claimed = claim(ready(work), offer.node, offer.token, lapsed=False)
    assert claimed is not None
    write_work(tx, DRIVE, session_id, claimed)
    session.wakes_drive = False
    _begin(session, offer.begin, None)
    session.save()
    fence = Fence(claimed.epoch, offer.token)
    return receipt, _drive(session, fence, _progress(session))


def give_back_drive(tx: Tx, session_id: SessionId, fence: Fence) -> bool:
    """Lets go of the drive unfinished, an open turn left open; whether it was still held.

    Nothing is charged: the next owner closes the turn as interrupted and goes on. Running again
    finds the drive ready, and nobody's claim after this one.
    """
    session = lock_session(tx, session_id)
    work = session.drive()
    if not holds(work, fence):
        return work.status == "ready" and work.epoch == fence.epoch
    write_work(tx, DRIVE, session_id, give_back(work))
    tx.wake(DRIVE, session_id)
    return True


def drives_to_claim(tx: Tx, node: NodeId, limit: int) -> list[SessionId]:
    """Sessions whose drive is ready, or whose owner is no longer believed alive.

    The second condition on ``status`` says nothing new: SQLite needs it to use the partial index,
    and without that index every look reads a row for each session there ever was.
    """
    rows = tx.execute(
        "SELECT key FROM work WHERE kind = :kind AND status = 'ready' AND status <> 'none'"
        " ORDER BY key LIMIT :limit",
        {"kind": DRIVE, "limit": limit},
    )
    orphans = tx.execute(
        "SELECT key FROM work WHERE kind = :kind AND status = 'claimed' AND status <> 'none'"
        " AND owner <> :node"
        " AND NOT EXISTS (SELECT 1 FROM node WHERE node.id = work.owner"
        " AND node.expires_at > :now) LIMIT :limit",
        {"kind": DRIVE, "node": node, "now": tx.now(), "limit": limit},
    )
    return [SessionId(r[0]) for r in rows + orphans]


def drive_holder(tx: Tx, session_id: SessionId) -> tuple[str, bool]:
    """The drive's status, and whether a claim on it is in force."""
    work = read_work(tx, DRIVE, session_id)
    return work.status, work.status == "claimed" and not lapsed(tx, work.owner)
