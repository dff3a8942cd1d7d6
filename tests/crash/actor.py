"""A process of its own that opens a room, does what its plan says, and may kill itself on the way.

``python -m tests.crash.actor PLAN`` plays one plan, given as JSON. ``--nursery`` reads plans from
standard input, one a line, and plays each in a forked process: as real as any other, and no
second import. What it reports goes to standard output as JSON lines, each written the moment it
is true: a line that can be read back was said before the process died.

The model answers by what the last message asks for that does not begin with ``~``:

- ``[[calls:note a|alone b|note c]]``: one step with these calls, then a text
- ``[[wait]]``: says nothing until SIGUSR1 comes (a plan with ``waits`` false: answers at once)
- ``[[flaky]]``: fails with 429 the first time in this process, then answers
- ``[[fail]]``: fails for good; ``[[cut]]``: is cut by the token limit; ``[[die]]``: kills itself
- nothing: ``ok: `` and the text

Tools write ``start CALL_ID NAME WHAT`` and ``end …`` to the plan's notes. What a call is asked to
do decides what becomes of it: ``steer…`` waits for the action ``go``, ``die-before…`` and
``die-after…`` kill the process before and after its effect, ``wait…`` waits for SIGUSR1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from postroom.app import Room, one_core, open_room
from postroom.config import Limits
from postroom.domain.event import Event, ToolSpec, TurnCancel, UserMessage
from postroom.domain.ids import CoreId, MessageId, SessionId
from postroom.domain.message import Message, text_of
from postroom.errors import PostroomError
from postroom.flow.agent import Agent
from postroom.flow.core import Core
from postroom.models.scripted import (
    Script,
    ScriptedCall,
    ScriptedError,
    ScriptedModel,
    ScriptedReply,
)
from postroom.ports.model import DeltaSink, ModelRequest, Reply
from postroom.ports.policy import Admit, Verdict
from postroom.ports.store import Store
from postroom.ports.tool import Effects, ToolContext, ToolOutput
from postroom.scripts.log import read_events
from postroom.stores.sqlite import SqliteStore

# The failures that are scripted are no news.
logging.getLogger("postroom").setLevel(logging.ERROR)

P = TypeVar("P")

SESSION = SessionId("session_crash")
LIFE_S = 60
_DIRECTIVE = re.compile(r"\[\[(\w+)(?::([^]]*))?\]\]")


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    """``actions`` are ``[verb, …]``, see `Actor`. ``kill`` is the commit and the phase to die at.

    ``notes`` is the file that tools write to. ``policy``: a policy judges every batch, so claim
    and entry are two commits. ``only``: drive no other session. ``drain_ms``: how long an open
    turn may go on when the process is told to end.
    """

    database: str
    notes: str = os.devnull
    actions: list[list[Any]] = []
    session: str = SESSION
    kill: tuple[int, str] | None = None
    lease_ms: int | None = None
    waits: bool = True
    policy: bool = False
    drive: bool = True
    only: bool = True
    drain_ms: int = 1000


def say(**fact: object) -> None:
    os.write(1, msgspec.json.encode(fact) + b"\n")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---- the model ----


class Prompted:
    """See the module. Each reply is played by the scripted model, so call ids are its."""

    ref = "scripted:prompted"
    window = None
    accepts: frozenset[str] = frozenset()

    def __init__(self, waits: bool, gate: asyncio.Event) -> None:
        self._waits = waits
        self._gate = gate
        self._failed: set[str] = set()

    def render(self, request: ModelRequest) -> bytes:
        return ScriptedModel(self.ref, Script(then="echo")).render(request)

    async def respond(self, request: ModelRequest, on_delta: DeltaSink) -> Reply:
        reply = await self._choose(request)
        # "repeat" plays this one reply whatever the request's number, which makes the call ids.
        model = ScriptedModel(self.ref, Script((reply,), "repeat"))
        return await model.respond(request, on_delta)

    async def aclose(self) -> None:
        pass

    async def _choose(self, request: ModelRequest) -> ScriptedReply:
        text, rounds = _asked(request)
        found = _DIRECTIVE.search(text)
        verb, words = found.groups() if found else ("", None)
        if verb == "die":
            die()
        if verb == "wait" and self._waits:
            await self._gate.wait()
        if verb == "calls" and not rounds:
            calls = [word.split(" ", 1) for word in (words or "").split("|")]
            return ScriptedReply(
                "calling",
                tool_calls=tuple(ScriptedCall(name, {"what": what}) for name, what in calls),
            )
        if verb == "fail":
            return ScriptedReply(error=ScriptedError(status=400, code="bad_request"))
        if verb == "flaky" and text not in self._failed:
            self._failed.add(text)
            return ScriptedReply("lost", error=ScriptedError(status=429, retry_after_ms=1))
        return ScriptedReply(f"ok: {text}", finish="length" if verb == "cut" else None)


def _asked(request: ModelRequest) -> tuple[str, int]:
    """What was asked last, and the replies since. A text that begins with ~ asks nothing."""
    rounds = 0
    for message in reversed(request.messages):
        if message.role == "assistant":
            rounds += 1
        elif message.role == "user" and not (text := text_of(message.content)).startswith("~"):
            return text, rounds
    return "", rounds


# ---- the tools ----


class Noting:
    """A tool that leaves a line in a file before and after its effect."""

    effects: Effects = "workspace"
    timeout_ms: int | None = None

    def __init__(
        self, name: str, exclusive: bool, notes: str, gate: asyncio.Event, go: asyncio.Event
    ) -> None:
        schema = b'{"type":"object","properties":{"what":{"type":"string"}}}'
        self.spec = ToolSpec(name, "Notes that it ran.", msgspec.Raw(schema))
        self.exclusive = exclusive
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._gate = gate
        self._go = go

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        what = str(arguments["what"])
        if what.startswith("die-before"):
            die()
        self._note("start", ctx, what)
        if what.startswith("steer"):
            await self._go.wait()
        elif what.startswith("wait"):
            await self._gate.wait()
        elif what.startswith("yield"):
            await asyncio.sleep(0.005)
        self._note("end", ctx, what)
        if what.startswith("die-after"):
            die()
        return ToolOutput(f"noted {what}")

    def _note(self, moment: str, ctx: ToolContext, what: str) -> None:
        os.write(self._notes, f"{moment} {ctx.call_id} {self.spec.name} {what}\n".encode())


async def _admit(session_id: SessionId, batch: tuple[Message, ...]) -> Verdict:
    return Admit()


# ---- the process ----


class Actor:
    """Performs a plan's actions, one after another; doing one again does no harm.

    ===========================  ==================================================================
    ``queue ID TEXT [OP]``       queues a message and reports its receipt
    ``run ID TEXT``              queues it as an owned run and reports the result
    ``entered ID``               waits until the message stands in the history
    ``event TYPE [COUNT]``       waits until the log has so many events of a type
    ``cancel ID KEEP``           cancels the turn that the message entered, unless one was before
    ``replace ID TEXT``          replaces a pending message; ``remove ID`` takes one out
    ``go``                       lets the tools called ``steer…`` go on
    ``idle``                     waits until the agent is idle
    ``idle_all COUNT``           waits until so many ``agent/idle`` were seen, of any session
    ``hold``                     waits for SIGTERM
    ``kill SIGNAL``              sends itself a signal, and waits for it
    ``say WORD``                 reports a word
    ===========================  ==================================================================
    """

    def __init__(self, room: Room, plan: Plan, go: asyncio.Event) -> None:
        self._room = room
        self._plan = plan
        self._go = go
        self._idles = 0
        self._idle_seen = asyncio.Event()
        room.store.subscribe(None, self._count)

    def _count(self, events: Any) -> None:
        self._idles += sum(e.type == "agent/idle" for e in events)
        self._idle_seen.set()

    async def play(self) -> None:
        agent = await self._room.session(self._plan.session, core_id=CoreId("crash"))
        for verb, *args in self._plan.actions:
            await getattr(self, f"do_{verb}")(agent, *args)

    async def do_queue(
        self, agent: Agent, name: str, text: str, operation: str = "followup"
    ) -> None:
        receipt = await agent.queue(text, operation, message_id=MessageId(name))  # pyright: ignore
        say(receipt=receipt.message_id, seq=receipt.seq)

    async def do_run(self, agent: Agent, name: str, text: str) -> None:
        result = await agent.run(text, message_id=MessageId(name))
        say(run=name, result=result.to_json(events=False))

    async def do_entered(self, agent: Agent, name: str) -> None:
        await self._seen(agent, lambda e: _entered(e, name))

    async def do_event(self, agent: Agent, type_: str, count: int = 1) -> None:
        await self._seen(agent, lambda e: e.type == type_, count)

    async def do_cancel(self, agent: Agent, name: str, keep: bool) -> None:
        """The turn waits until it is cancelled, so whether that is done stands in the log."""
        await self.do_entered(agent, name)
        events = await self._log()
        since = next(e.seq for e in events if _entered(e, name))
        if not any(e.type == TurnCancel.TYPE and e.seq > since for e in events):
            await agent.cancel(keep_inbox=keep)

    async def do_replace(self, agent: Agent, name: str, text: str) -> None:
        say(replaced=await agent.replace(MessageId(name), text))

    async def do_remove(self, agent: Agent, name: str) -> None:
        say(removed=await agent.remove(MessageId(name)))

    async def do_go(self, _: Agent) -> None:
        self._go.set()

    async def do_idle(self, agent: Agent) -> None:
        await agent.when_idle()
        say(idle=True)

    async def do_idle_all(self, _: Agent, count: int) -> None:
        while self._idles < count:
            self._idle_seen.clear()
            await self._idle_seen.wait()
        say(idle=self._idles)

    async def do_hold(self, _: Agent) -> None:
        await asyncio.Event().wait()

    async def do_kill(self, _: Agent, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])
        await asyncio.Event().wait()

    async def do_say(self, _: Agent, word: str) -> None:
        say(word=word)

    async def _seen(self, agent: Agent, wanted: Callable[[Event], bool], count: int = 1) -> None:
        async for event in agent.events():
            count -= wanted(event)
            if not count:
                return

    async def _log(self) -> list[Event]:
        return await self._room.store.read(read_events, SessionId(self._plan.session), 0, 1_000_000)


def _entered(event: Event, name: str) -> bool:
    data = event.data
    return isinstance(data, UserMessage) and data.message.id == name


async def open_database(plan: Plan, on_commit: Callable[[str], None] | None) -> Store:
    lease: dict[str, Any] = {} if plan.lease_ms is None else {"lease_ms": plan.lease_ms}
    if plan.database.startswith("postgresql://"):
        from postroom.stores.postgres import PostgresStore

        return await PostgresStore.open(plan.database, on_commit=on_commit, **lease)
    return await SqliteStore.open(Path(plan.database), on_commit=on_commit, **lease)


async def main(plan: Plan) -> None:
    commits = 0

    def on_commit(phase: str) -> None:
        nonlocal commits
        commits += phase == "before"
        if plan.kill == (commits, phase):
            die()

    gate, go, end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, gate.set)
    loop.add_signal_handler(signal.SIGTERM, end.set)
    tools = {
        name: Noting(name, exclusive, plan.notes, gate, go)
        for name, exclusive in (("note", False), ("alone", True))
    }
    core = Core(
        id=CoreId("crash"),
        revision="1",
        models=(Prompted(plan.waits, gate),),
        persona="You are tested.",
        tools=tools,
        policy=_admit if plan.policy else None,
    )
    store = await open_database(plan, on_commit)
    async with open_room(
        one_core(core),
        store=store,
        artifacts=_no_artifacts(),
        limits=Limits(model_retry_first_ms=1, tool_grace_ms=500),
        only=SessionId(plan.session) if plan.only else None,
        drive=plan.drive,
        drain_ms=plan.drain_ms,
    ) as room:
        store.on_lease_lost(lambda: say(lease_lost=True))
        work = asyncio.ensure_future(Actor(room, plan, go).play())
        ended = asyncio.ensure_future(end.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        ended.cancel()
    say(
        closed=True,
        commits=commits,
        rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def _no_artifacts() -> Any:
    return None


def run(plan: Plan) -> int:
    signal.alarm(LIFE_S)  # whatever goes wrong, no process of ours outlives its test
    try:
        asyncio.run(main(plan))
    except PostroomError as error:
        say(error=error.code, message=str(error))
        return 1
    return 0


# ---- many of them ----


def nursery(kind: type[P], run: Callable[[P], int]) -> None:
    """Plays each plan in a process of its own; answers with its exit status and what it said."""
    for line in sys.stdin.buffer:
        plan = msgspec.json.decode(line, type=kind)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            os.dup2(writer, 1)
            os._exit(run(plan))
        os.close(writer)
        with os.fdopen(reader, "rb") as heard:
            said = heard.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os.write(1, msgspec.json.encode({"code": code, "said": said.decode()}) + b"\n")


if __name__ == "__main__":
    if sys.argv[1] == "--nursery":
        nursery(Plan, run)
    else:
        sys.exit(run(msgspec.json.decode(sys.argv[1], type=Plan)))
