"""The driver: the task of a process that claims a session's drive and works through its turns.

Its memory says where it stands (`phase`) and what it believes: its fence, the turn and the step
that it thinks open, the calls it has still to pair. Between two transactions anything may have
happened to the session; it finds out in the next one. The scripts below have the shape of the
store's: lock, look whether this has been done already, check the fence, decide, append.

Each committed script also has a twin whose answer is lost: the store has changed, and the driver
runs exactly the same script again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import combinations
from typing import NamedTuple, TypeAlias

from postroom.domain.event import (
    AssistantReply,
    EndKind,
    EndReason,
    ErrorInfo,
    ModelRetry,
    ToolResult,
)
from postroom.domain.ids import CallId, ClaimToken, MessageId
from postroom.domain.inbox import step_batch, turn_batch
from postroom.domain.message import AssistantMessage, Text, ToolCall, Usage
from postroom.domain.turn import (
    AgentState,
    BeginTurn,
    Finish,
    NextStep,
    OpenTurn,
    RecordReply,
    RecordResults,
    RecordRetry,
    StartCalls,
    TakeOver,
)
from tests.simulation.ledger import LAST
from tests.simulation.session import FRESH, HELD, OLD, Session, Touch, Tx
from tests.simulation.world import CLIENT, DEAD, ITSELF, LIVE, Move, Store

BEGIN, MODEL, TOOLS, END, AGAIN, ABANDONED = "begin", "model", "tools", "end", "again", "abandoned"


class Driver(NamedTuple):
    """What a driver remembers. ``turn`` counts from `LAST`, the session's last turn.

    ``calls``: those it has no result of, a small letter if it believes the call started.
    ``judged``: a batch and what of it the policy refused. ``script``: what it runs again. A driver
    that broke down is ABANDONED: its process alone knows that nobody drives under this claim.
    """

    phase: str
    fence: str
    turn: int
    step: int = 0
    left: int = 0
    retried: int = 0
    calls: str = ""
    judged: tuple[tuple[MessageId, ...], tuple[MessageId, ...]] | None = None
    script: tuple[Hashable, ...] = ()


class StaleClaimError(Exception):
    """The script found that the claim no longer stands."""


# What a driver does after a script: its next memory, or None: it stops.
Script: TypeAlias = Callable[..., Driver | None]


def _call(step: int, letter: str) -> CallId:
    return CallId(f"call_{step}{letter.lower()}")


def _reply(driver: Driver, calls: str) -> AssistantReply:
    blocks = tuple(ToolCall(_call(driver.step, c), "tool", "{}") for c in calls)
    message = AssistantMessage(f"reply_{driver.step}", (Text("said"), *blocks))
    finish = "tool_calls" if calls else "stop"
    return AssistantReply(driver.turn, driver.step, message, "model", finish, Usage())


def _results(driver: Driver, calls: str) -> tuple[ToolResult, ...]:
    return tuple(
        ToolResult(
            driver.turn,
            driver.step,
            _call(driver.step, c),
            (Text("done" if c.islower() else "denied"),),
            "ok" if c.islower() else "error",
        )
        for c in calls
    )


class Driving:
    """The driver as an actor of the world. A broken variant overrides a script of it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.config = session.config
        self.guarded = True

    # ---- an actor ----

    def moves(self, store: Store, memory: Hashable) -> Iterator[tuple[Move, Hashable]]:
        if memory is None:
            nobody = Driver("", OLD, LAST)
            yield from self.run(store, nobody, "claims the drive", "claim")
            if self.config.oneshot:
                for m in self.session.unqueued(store):
                    label = f"queues {self.session.messages[m].message.id} and claims, in one"
                    for move, after in self.run(store, nobody, label, "oneshot", m):
                        yield move._replace(spends=move.spends or CLIENT), after
            return
        assert isinstance(memory, Driver)
        if memory.phase == ABANDONED:
            yield from self.run(store, memory, "claims the drive from itself", "claim")
            return
        yield from self.work(store, memory)
        tx = Tx(self.session, store)
        if tx.holds(memory.fence):
            tx.set_work(self.session.give_back(tx.work))
            yield self._moved(tx, memory, None, "gives the drive back, unfinished", "drain")
        if memory.fence == HELD:
            gone = Driver(ABANDONED, HELD, LAST)
            yield Move("BREAKS DOWN, its process lives on", store, spends="abandon"), gone

    def touched(self, memory: Hashable, touch: Hashable) -> Hashable:
        assert isinstance(memory, Driver)
        assert isinstance(touch, Touch)
        fence = dict(touch.fences)[memory.fence]
        if memory.phase == ABANDONED:
            return memory if fence == HELD else None
        return memory._replace(fence=fence, turn=max(LAST - 1, memory.turn - touch.turns))

    def orphan(self, store: Store, memory: Hashable) -> Store:
        held = isinstance(memory, Driver) and memory.fence == HELD
        return store._replace(lease=DEAD) if held and store.lease == LIVE else store

    def restarted(self, move: Move) -> Move:
        """There is no recovery "at start": it follows a claim."""
        return move

    # ---- how a script runs ----

    def run(
        self, store: Store, driver: Driver, label: str, script: str, *args: Hashable
    ) -> Iterator[tuple[Move, Hashable]]:
        """The script's move, and the one in which its commit answer is lost."""
        tx = Tx(self.session, store)
        body: Script = getattr(self, script)
        try:
            after = body(tx, driver, *args)
        except StaleClaimError:
            move = Move(f"{label}: its claim is stale, it stops", store)
            yield move, None
            return
        except AssertionError as error:
            broken = (f"TRN-01 the script asserts: {error}",)
            yield Move(label, store, broken=broken), None
            return
        claims = script in ("claim", "oneshot")
        if claims and not tx.changed and after is None:
            if driver.phase == AGAIN:
                yield Move(f"{label}: it is not to be had", store), None
            return
        if tx.events and not claims and driver.fence != HELD:
            tx.broken.append("INB-17 a stale or released claim appends")
        yield self._moved(tx, driver, after, label)
        if tx.changed:
            said = label.removesuffix(", again") + ", again"
            again = driver._replace(phase=AGAIN, script=(said, script, *args))
            if claims and FRESH in tx.fences:
                again = again._replace(fence=FRESH)
            yield self._moved(tx, driver, again, f"{label} (the commit's answer is lost)", "lost")

    def _moved(
        self, tx: Tx, driver: Driver, after: Driver | None, label: str, spends: str = ITSELF
    ) -> tuple[Move, Hashable]:
        move = tx.move(label, spends=spends)
        memory = after
        if after is not None and move.touch is not None:
            memory = self.touched(after, move.touch)
        return move, memory

    # ---- what it does next ----

    def work(self, store: Store, driver: Driver) -> Iterator[tuple[Move, Hashable]]:
        match driver.phase:
            case "again":
                label, script, *args = driver.script
                was = driver._replace(script=())
                yield from self.run(store, was, str(label), str(script), *args)
            case "begin":
                yield from self.judging(store, driver, "begins a turn", "begin")
            case "model":
                yield from self.asking(store, driver)
            case "tools":
                yield from self.calling(store, driver)
            case "end":
                yield from self.run(store, driver, "ends the turn", "finish", "completed", "")
            case _:
                raise AssertionError(driver.phase)

    def judging(
        self, store: Store, driver: Driver, label: str, script: str
    ) -> Iterator[tuple[Move, Hashable]]:
        """With a policy: peek and judge outside, then claim exactly that or nothing."""
        if not self.config.policy or driver.judged is not None:
            yield from self.run(store, driver, label, script, driver.judged)
            return
        tx = Tx(self.session, store)
        if not tx.holds(driver.fence):
            yield Move("peeks: its claim is stale, it stops", store), None
            return
        ids = self.batch(tx.agent, script)
        for n in range(len(ids) + 1):
            for refused in combinations(ids, n):
                verdict = f"refuses {', '.join(refused)}" if refused else "admits all"
                judged = driver._replace(judged=(ids, refused))
                yield Move(f"peeks; the policy {verdict}", store), judged

    def batch(self, agent: AgentState, script: str) -> tuple[MessageId, ...]:
        turn = script == "begin" and not agent.owed
        batch = turn_batch(agent.inbox) if turn else step_batch(agent.inbox)
        return tuple(p.message.id for p in batch)

    def asking(self, store: Store, driver: Driver) -> Iterator[tuple[Move, Hashable]]:
        """The model call, which is no transaction, and the script that records what came."""
        yield from self.run(store, driver, "final reply", "finish", "completed", "said")
        if driver.left:
            for calls in self.config.replies:
                yield from self.run(store, driver, f"reply calls {calls}", "reply", calls)
        if driver.retried < self.config.retries:
            yield from self.run(store, driver, "the request fails and is made again", "retry")
        if self.config.aborts and self.sees_cancel(store):
            yield from self.run(store, driver, "sees the cancel", "finish", "completed", "")

    def calling(self, store: Store, driver: Driver) -> Iterator[tuple[Move, Hashable]]:
        """Starts what waits, pairs what ended, and goes over the step boundary."""
        calls = driver.calls
        if driver.judged is None:
            waiting = "".join(c for c in calls if c.isupper())
            if waiting:
                yield from self.run(store, driver, f"starts {waiting}", "start", waiting)
            if len(calls) > 1:
                label = f"records the result of {calls[0]}"
                yield from self.run(store, driver, label, "results", calls[0])
            if self.config.max_steps:
                yield from self.run(store, driver, "max_steps", "finish", "max_steps", "", calls)
            if self.config.aborts and self.sees_cancel(store):
                yield from self.run(store, driver, "sees the cancel", "finish", "completed", "")
        yield from self.judging(store, driver, "step boundary", "boundary")

    def sees_cancel(self, store: Store) -> bool:
        turn = self.session.agent(store).turn
        return turn is not None and turn.cancel is not None

    # ---- the scripts ----

    def fenced(self, tx: Tx, driver: Driver) -> None:
        if not tx.holds(driver.fence):
            raise StaleClaimError

    def open(self, tx: Tx, driver: Driver) -> bool:
        """Whether the turn that the driver believes open is."""
        return tx.agent.turn is not None and driver.turn == LAST

    def next_turn(self, tx: Tx, driver: Driver) -> Driver | None:
        """After a turn's end: stop at idle, else go on if the drive is still held."""
        if tx.agent.status == "idle":
            return None
        self.fenced(tx, driver)
        return Driver(BEGIN, driver.fence, LAST + tx.turns + 1)

    def stepping(self, tx: Tx, driver: Driver, step: int, left: int) -> Driver:
        return Driver(MODEL, driver.fence, LAST + tx.turns, step, left)

    def claim(self, tx: Tx, driver: Driver) -> Driver | None:
        again, opened = driver.phase == AGAIN, self.config.begins
        token = tx.fences[driver.fence].token if again else ClaimToken("new")
        if tx.work.status == "claimed" and tx.work.token == token and self.guarded:
            mine = driver._replace(phase="")
            opened = True
        else:
            charged = tx.work.status == "claimed"
            if not tx.take(token, abandoned=driver.phase == ABANDONED):
                return None
            mine = driver._replace(phase="", fence=FRESH)
            self.take_over(tx, charged)
            if self.config.begins:
                tx.append(BeginTurn())
        turn = tx.agent.turn
        if opened and turn is not None:
            return self.stepping(tx, mine, turn.step, self.config.steps)
        return self.next_turn(tx, mine)

    def oneshot(self, tx: Tx, driver: Driver, m: int) -> Driver | None:
        """The one-shot command: its prompt, and the drive if nobody holds it."""
        if self.session.is_new(tx, m):
            self.session.append_queued(tx, m)
        token = tx.fences[driver.fence].token
        if tx.work.status == "claimed" and tx.work.token != token:
            return None
        return self.claim(tx, driver)

    def take_over(self, tx: Tx, charged: bool) -> None:
        if tx.agent.turn is not None:
            tx.append(TakeOver(charged, self.config.attempts_max))

    def begin(
        self,
        tx: Tx,
        driver: Driver,
        judged: tuple[tuple[MessageId, ...], tuple[MessageId, ...]] | None,
    ) -> Driver | None:
        if self.guarded:
            if driver.turn <= LAST:
                if not self.open(tx, driver):
                    return self.next_turn(tx, driver)
                self.fenced(tx, driver)
                turn = tx.agent.turn
                assert turn is not None
                return self.stepping(tx, driver, turn.step, self.config.steps)
            if tx.agent.status == "idle":
                return None
        self.fenced(tx, driver)
        command = BeginTurn()
        if judged is not None and (tx.agent.owed or tx.agent.inbox.waking):
            if self.changed(tx, "begin", judged[0]):
                return driver._replace(phase=BEGIN, judged=None)
            command = BeginTurn(judged[1], "refused" if judged[1] else "")
        tx.append(command)
        if tx.agent.turn is not None:
            return self.stepping(tx, driver, 1, self.config.steps)
        return self.next_turn(tx, driver)

    def changed(self, tx: Tx, script: str, batch: tuple[MessageId, ...]) -> bool:
        return self.batch(tx.agent, script) != batch

    def boundary(
        self,
        tx: Tx,
        driver: Driver,
        judged: tuple[tuple[MessageId, ...], tuple[MessageId, ...]] | None,
    ) -> Driver | None:
        turn = self.turn_of(tx, driver)
        if turn is None:
            return self.next_turn(tx, driver)
        if self.guarded and turn.step > driver.step:
            return self.stepping(tx, driver, driver.step + 1, driver.left)
        command = NextStep(self.unpaired(tx, driver, driver.calls))
        if judged is not None and turn.cancel is None:
            if self.changed(tx, "boundary", judged[0]):
                return driver._replace(phase=TOOLS, judged=None)
            command = NextStep(command.results, judged[1], "refused" if judged[1] else "")
        tx.append(command)
        if tx.agent.turn is None:
            return self.next_turn(tx, driver)
        return self.stepping(tx, driver, driver.step + 1, driver.left)

    def expected(self, tx: Tx, driver: Driver) -> OpenTurn:
        """The driver's turn, which a fence that stands has kept open."""
        turn = tx.agent.turn
        assert turn is not None, "the turn is over"
        assert driver.turn == LAST, "another turn is open"
        return turn

    def turn_of(self, tx: Tx, driver: Driver) -> OpenTurn | None:
        """The turn the driver believes open; None if it has ended. Checks the fence otherwise."""
        if self.guarded and not self.open(tx, driver):
            return None
        self.fenced(tx, driver)
        assert tx.agent.turn is not None, "no turn is open"
        return tx.agent.turn

    def unpaired(self, tx: Tx, driver: Driver, calls: str) -> tuple[ToolResult, ...]:
        turn = tx.agent.turn
        assert turn is not None
        waiting = {c.call_id for c in turn.calls}
        results = _results(driver, calls)
        return tuple(r for r in results if r.call_id in waiting) if self.guarded else results

    def reply(self, tx: Tx, driver: Driver, calls: str) -> Driver | None:
        turn = self.turn_of(tx, driver)
        if turn is None:
            return self.next_turn(tx, driver)
        if not (self.guarded and turn.step == driver.step and turn.replied):
            start = tuple(_call(driver.step, c) for c in calls if c.islower())
            tx.append(RecordReply(_reply(driver, calls), start))
            if tx.agent.turn is None:
                return self.next_turn(tx, driver)
        return driver._replace(phase=TOOLS, left=driver.left - 1, calls=calls)

    def start(self, tx: Tx, driver: Driver, calls: str) -> Driver | None:
        self.fenced(tx, driver)
        turn = self.expected(tx, driver)
        tx.append(StartCalls(tuple(_call(driver.step, c) for c in calls)))
        if turn.cancel is not None:
            return driver._replace(phase=END)
        return driver._replace(phase=TOOLS, calls=driver.calls.lower())

    def results(self, tx: Tx, driver: Driver, calls: str) -> Driver | None:
        self.fenced(tx, driver)
        self.expected(tx, driver)
        tx.append(RecordResults(self.unpaired(tx, driver, calls)))
        return driver._replace(phase=TOOLS, calls=driver.calls.replace(calls, ""))

    def retry(self, tx: Tx, driver: Driver) -> Driver | None:
        self.fenced(tx, driver)
        turn = self.expected(tx, driver)
        attempt = driver.retried + 1
        if turn.retries < attempt or not self.guarded:
            error = ErrorInfo("server", "no answer")
            tx.append(RecordRetry(ModelRetry(driver.turn, driver.step, attempt, 500, error)))
        return driver._replace(phase=MODEL, retried=attempt)

    def finish(
        self,
        tx: Tx,
        driver: Driver,
        kind: EndKind,
        text: str,
        calls: str = "",
        twist: str = "",
    ) -> Driver | None:
        turn = self.turn_of(tx, driver)
        if turn is None:
            return self.next_turn(tx, driver)
        reply = _reply(driver, "") if text else None
        if self.guarded and turn.replied and turn.step == driver.step:
            reply = None
        tx.append(Finish(EndReason(kind), reply, self.unpaired(tx, driver, calls)), twist)
        return self.next_turn(tx, driver)
