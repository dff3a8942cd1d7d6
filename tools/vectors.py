"""Records protocol/vectors/: logs of real runs, and what a run in each of them comes to.

::

    python -m tools.vectors            # write them anew
    python -m tools.vectors --check    # do the files say what the code says?

Every SDK folds each ``log`` from ``messageId`` to ``until`` and must come to ``result``: all of the
run's result but its events, which are those of the log from ``firstSeq`` to ``lastSeq``. The runs are
real ones, on models and tools that are played by hand. Times and ids are made the same every time, so
that recording again changes nothing where nothing has changed. What cannot be recorded (an event of a
later version, a child of a version to come) is put into a real log, and its description says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from postroom.app import Room, one_core, open_room
from postroom.config import Limits
from postroom.domain.event import Event
from postroom.domain.ids import CoreId, MessageId, SessionId
from postroom.domain.message import Message, Reasoning, Text
from postroom.domain.run import fold_run, interval
from postroom.flow.agent import Agent
from postroom.flow.core import Core
from postroom.ports.clock import Clock
from postroom.ports.policy import Admit, Policy, Reject, Verdict
from postroom.scripts.log import read_events
from postroom.testing import Asked, ManualClock, PuppetModel, PuppetTool

T = TypeVar("T")

FOLDER = Path(__file__).resolve().parent.parent / "protocol" / "vectors"
SESSION = SessionId("session_vector")

_EPOCH_MS = 1_700_000_000_000
_WAIT_S = 20.0
# Ids that chance makes, each kind counted by itself in the order of the log.
_MADE = re.compile(r"\b(?P<kind>msg|reply|call|dlv|apr)_(?P<id>[0-9A-Za-z_]+)\b")
_REF = re.compile(r'"ref":"[0-9a-f]{24}"')
_LATER = re.compile(r'"(?P<what>expiresAt|delayMs)":\d+')

Views = dict[str, tuple[str, str]]
Scenario = Callable[["Stage"], Awaitable[Views]]


class Stage:
    """Where a scenario plays: one session, a model, a tool, and the log at the end."""

    def __init__(self, folder: Path) -> None:
        self._database = str(folder / "postroom.db")
        self.model = PuppetModel()
        self.tool = PuppetTool("look")
        self.log: list[Event] = []

    @asynccontextmanager
    async def opened(
        self,
        *,
        drive: bool = True,
        policy: Policy | None = None,
        clock: Clock | None = None,
        **more: Any,
    ) -> AsyncGenerator[Agent]:
        core = Core(
            id=CoreId("default"),
            revision="vectors-1",
            models=(self.model,),
            persona="You are being recorded.",
            tools={"look": self.tool},
            policy=policy,
            **more,
        )
        limits = Limits(model_retry_first_ms=1, model_retries_max=2, recovery_attempts_max=2)
        async with open_room(
            one_core(core),
            database=self._database,
            clock=clock,
            limits=limits,
            drive=drive,
            drain_ms=0,
        ) as room:
            yield await room.session(SESSION)
            self.log = await _log(room)

    async def asked(self) -> Asked:
        return await _bounded(self.model.asked())

    async def idle(self, agent: Agent) -> None:
        await _bounded(agent.when_idle())

    async def says(self, agent: Agent, *texts: str) -> None:
        """The model answers so many requests, then the agent is idle."""
        for text in texts:
            (await self.asked()).say(text)
        await self.idle(agent)


def _id(name: str) -> MessageId:
    return MessageId(f"msg_{name}")


async def _bounded(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, _WAIT_S)


async def _log(room: Room) -> list[Event]:
    return await room.store.read(read_events, SESSION, 0, 100_000)


# ---- the scenarios: what happens, and which message is looked at ----


async def one_prompt(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("What is it?", message_id=_id("A"))
        (await stage.asked()).say("A vector.", reasoning="they ask")
        await stage.idle(agent)
    return {"one-prompt": ("A", "A question, an answer, idle.")}


async def tools(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look", text="let me look")
        (await _bounded(stage.tool.called())).answer("a bird")
        (await stage.asked()).call("look")
        (await _bounded(stage.tool.called())).fail("too dark")
        await stage.says(agent, "A bird; then it was too dark.")
    return {"tools": ("A", "Three steps with two calls, one of which fails; usage is their sum.")}


async def steered(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look")
        called = await _bounded(stage.tool.called())
        await agent.steer("Only the colour.", message_id=_id("B"))
        called.answer("a red bird")
        await stage.says(agent, "Red.")
    return {
        "steered": ("A", "A message is steered into the open turn; it is in the run."),
        "steered-by": (
            "B",
            "The same, seen from the message that steered: its run ends there too.",
        ),
    }


async def steered_late(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("First.", message_id=_id("A"))
        asked = await stage.asked()
        await agent.steer("One more thing.", message_id=_id("B"))
        asked.say("Done.")
        await stage.says(agent, "And that, too.")
    return {"steered-late": ("A", "A steer that no step of the turn took opens the next turn.")}


async def injected(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.inject("It rains.", message_id=_id("C"))
        await agent.followup("Umbrella?", message_id=_id("A"))
        asked = await stage.asked()
        await agent.inject("It stopped.", message_id=_id("D"))
        asked.say("Yes.")
        await stage.idle(agent)
        await agent.followup("And now?", message_id=_id("B"))
        await stage.says(agent, "No.")
    return {
        "injected": (
            "A",
            "Context that waited joins the turn; what is injected too late waits on.",
        ),
        "injected-later": ("B", "The context that waited enters with the next turn."),
        "injected-first": (
            "C",
            "A run that starts with injected context lasts to the idle of who came after it.",
        ),
    }


async def queued(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        asked = await stage.asked()
        await agent.followup("Two.", message_id=_id("B"))
        await agent.followup("Three.", message_id=_id("C"))
        asked.say("1")
        await stage.says(agent, "2", "3")
        await agent.followup("Four.", message_id=_id("D"))
        await stage.says(agent, "4")
    return {
        "queued-first": ("A", "Two more wait: the run goes on until all three have run."),
        "queued-second": ("B", "The same idle ends the run of the one in the middle."),
        "queued-third": ("C", "And that of the last; an earlier answer falls into its interval."),
        "queued-later": ("D", "A message after the idle has an interval of its own."),
    }


async def failed(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        (await stage.asked()).fail("auth", status=401, request_id="req_7")
        await stage.idle(agent)
        await agent.followup("Two.", message_id=_id("B"))
        asked = await stage.asked()
        await agent.followup("Three.", message_id=_id("C"))
        asked.fail("bad_request", status=400)
        await stage.says(agent, "3")
    return {
        "failed": ("A", "The provider refuses the key: an error, and no answer."),
        "failed-then-completed": ("B", "A turn fails, the next message completes, then idle."),
        "queued-behind-a-failure": (
            "C",
            "A failed turn of another message does not end the run of the one behind it.",
        ),
    }


async def retried(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        (await stage.asked()).fail("server", status=503)
        (await stage.asked()).fail("rate_limit", status=429, retry_after_ms=1)
        await stage.says(agent, "At last.")
    return {"retried": ("A", "Two attempts fail, the third answers: the turn completes.")}


async def answer_then_error(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look", text="let me see")
        (await _bounded(stage.tool.called())).answer("a bird")
        (await stage.asked()).fail("context_overflow", status=400)
        await stage.idle(agent)
    return {
        "error-after-text": (
            "A",
            "A step said something before the turn failed: that text is last.",
        )
    }


async def removed(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        asked = await stage.asked()
        await agent.followup("Two.", message_id=_id("B"))
        await agent.remove(_id("B"))
        asked.say("1")
        await stage.idle(agent)
    return {"removed": ("B", "Removed before it entered: its run ends with the interval it is in.")}


async def removed_alone(stage: Stage) -> Views:
    async with stage.opened(drive=False) as agent:
        await agent.followup("One.", message_id=_id("A"))
        await agent.remove(_id("A"))
        await agent.followup("Two.", message_id=_id("B"))
        await agent.cancel()
    return {
        "removed-alone": ("A", "Removed, and nothing else ran: both fields are null, at once."),
        "cancelled-alone": ("B", "Cancelled while it waited, and nothing else ran."),
    }


async def replaced(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        asked = await stage.asked()
        await agent.followup("Two?", message_id=_id("B"))
        new = await agent.replace(_id("B"), "Two!")
        assert new is not None
        asked.say("1")
        await stage.says(agent, "2")
    return {
        "replaced": ("B", "Replaced before it entered: the run of the old id ends all the same."),
        "replacement": (new.removeprefix("msg_"), "A run starts where a replacement was made."),
    }


async def empty(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look", text="let me see")
        (await _bounded(stage.tool.called())).answer("nothing")
        for _ in range(3):
            (await stage.asked()).say("", reasoning="there is nothing to say")
        await stage.idle(agent)
        await agent.followup("In pieces.", message_id=_id("B"))
        (await stage.asked()).reply(Text("one, "), Reasoning("and now"), Text("two ☂"))
        await stage.idle(agent)
    return {
        "empty-answer": ("A", "The last message has no text: no earlier one stands in for it."),
        "text-in-pieces": ("B", "Text blocks are joined as they stand; reasoning is no text."),
    }


async def cancelled(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        (await stage.asked()).stream("Once upon ", "a time")
        await agent.followup("Two.", message_id=_id("B"))
        await agent.cancel()
        await stage.idle(agent)
        await agent.followup("Three.", message_id=_id("C"))
        asked = await stage.asked()
        await agent.followup("Four.", message_id=_id("D"))
        await agent.cancel(keep_inbox=True)
        await _bounded(asked.dropped.wait())
        await stage.says(agent, "4")
    return {
        "cancelled": ("A", "Cancelled while it spoke: what had arrived is the final response."),
        "cancelled-while-queued": ("B", "The cancel took it out of the inbox."),
        "cancelled-keeping-the-inbox": ("C", "Its turn is cancelled; what waited runs, then idle."),
    }


async def restarted(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look")
        await _bounded(stage.tool.called())
        await agent.followup("Two.", message_id=_id("B"))
    async with stage.opened() as agent:
        (await stage.asked()).say("It may have looked.")
        await stage.says(agent, "2")
    return {
        "restarted": ("A", "The process ends in the middle of a call; the next one recovers."),
        "queued-over-a-restart": ("B", "What waited runs after the recovery."),
    }


async def exhausted(stage: Stage) -> Views:
    async with AsyncExitStack() as lives:  # each for which the one before is long dead
        for life in range(4):
            clock = ManualClock()
            clock.advance(10 * life * Limits().lease_sqlite_ms)
            stage.model = PuppetModel()
            agent = await lives.enter_async_context(stage.opened(clock=clock))
            if life == 0:
                await agent.followup("One.", message_id=_id("A"))
            if life < 3:
                await stage.asked()
            else:
                await stage.idle(agent)
    return {"recovery-exhausted": ("A", "Interrupted too often, the work is given up.")}


async def max_tokens(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        asked = await stage.asked()
        await agent.followup("Two.", message_id=_id("B"))
        asked.say("cut o", finish="length")
        await stage.says(agent, "2")
        await agent.followup("Three.", message_id=_id("C"))
        (await stage.asked()).say("cut aga", finish="length")
        await stage.idle(agent)
    return {
        "max-tokens-then-completed": (
            "A",
            "Its own turn ended max_tokens, another's completed: the result is the interval's.",
        ),
        "completed-behind-max-tokens": ("B", "The other's run, which ends at the same idle."),
        "max-tokens": ("C", "A turn that ends max_tokens, and nothing behind it."),
    }


async def refused(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        (await stage.asked()).say("I would rather", finish="content_filter")
        await stage.idle(agent)
    return {"refused": ("A", "The provider's safety stop ends the turn.")}


async def rejected(stage: Stage) -> Views:
    async def policy(session_id: SessionId, batch: tuple[Message, ...]) -> Verdict:
        assert session_id == SESSION
        return Reject("not you") if any(m.id == _id("A") for m in batch) else Admit()

    async with stage.opened(policy=policy) as agent:
        await agent.followup("One.", message_id=_id("A"))
        await stage.idle(agent)
    return {"rejected": ("A", "A policy refuses the message: a turn without a step.")}


async def max_steps(stage: Stage) -> Views:
    async with stage.opened(turn_steps_max=2) as agent:
        await agent.followup("Look.", message_id=_id("A"))
        for _ in range(2):
            (await stage.asked()).call("look", text="again")
            (await _bounded(stage.tool.called())).answer("a bird")
        await stage.idle(agent)
    return {"max-steps": ("A", "The turn used up its steps.")}


async def still_open(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("Zero.", message_id=_id("Z"))
        await stage.says(agent, "0")
        await agent.followup("Look.", message_id=_id("A"))
        (await stage.asked()).call("look", text="let me see")
        await _bounded(stage.tool.called())
    return {
        "still-open": ("A", "The interval is not over: the result says how far it came."),
        "not-in-the-log": ("nobody", "No such message: nothing, from seq 0 to seq 0."),
    }


async def children(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        await stage.says(agent, "I have asked a child.")
        await agent.followup("It is done.", message_id=_id("B"))
        await stage.says(agent, "All done.")
    first = next(i for i, event in enumerate(stage.log) if event.type == "agent/idle")
    stage.log[first] = _changed(stage.log[first], '{"pendingChildren":["session_child_1"]}')
    return {
        "children-pending": ("A", "Idle with a child pending (put into a real log): it is named."),
        "quiescent": ("A", "The same log, until quiescent: on to the idle without a child."),
    }


async def unknown_events(stage: Stage) -> Views:
    async with stage.opened() as agent:
        await agent.followup("One.", message_id=_id("A"))
        await stage.says(agent, "1")
    at = next(i for i, event in enumerate(stage.log) if event.type == "assistant/message")
    later = Event(SESSION, 0, "weather/changed", 0, '{"turn":1,"message":{"content":"rain"}}')
    log = [*stage.log[:at], later, *stage.log[at:]]
    stage.log = [Event(SESSION, n, e.type, e.at, e.raw) for n, e in enumerate(log, start=1)]
    return {
        "unknown-event": ("A", "An event of a later version (put into a real log) is passed by.")
    }


def _changed(event: Event, raw: str) -> Event:
    return Event(event.session_id, event.seq, event.type, event.at, raw)


SCENARIOS: tuple[Scenario, ...] = (
    one_prompt,
    tools,
    steered,
    steered_late,
    injected,
    queued,
    failed,
    retried,
    answer_then_error,
    removed,
    removed_alone,
    replaced,
    empty,
    cancelled,
    restarted,
    exhausted,
    max_tokens,
    refused,
    rejected,
    max_steps,
    still_open,
    children,
    unknown_events,
)


# ---- recording ----


async def record() -> dict[str, str]:
    """Every vector's text, by the name of its file."""
    out: dict[str, str] = {}
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="postroom-vectors-") as folder:
            stage = Stage(Path(folder))
            views = await scenario(stage)
        log, names = _normal(stage.log)
        for name, (message, description) in views.items():
            until = "quiescent" if name == "quiescent" else "idle"
            message_id = MessageId(names.get(f"msg_{message}", f"msg_{message}"))
            out[f"{name}.json"] = _text(name, description, log, message_id, until)
    return out


def _text(
    name: str, description: str, log: Sequence[Event], message_id: MessageId, until: str
) -> str:
    quiescent = until == "quiescent"
    cut = interval(log, message_id, quiescent=quiescent)
    result = fold_run(SESSION, message_id, cut, quiescent=quiescent)
    expected = {**result.to_json(events=False), "complete": result.complete}
    head = [
        f'  "name": {json.dumps(name)},',
        f'  "description": {json.dumps(description)},',
        f'  "messageId": {json.dumps(message_id)},',
        f'  "until": {json.dumps(until)},',
        f'  "result": {json.dumps(expected, ensure_ascii=False)},',
    ]
    events = ",\n".join(f"    {event.to_json()}" for event in log)
    return "\n".join(["{", *head, f'  "log": [\n{events}\n  ]', "}", ""])


def _normal(log: Iterable[Event]) -> tuple[list[Event], dict[str, str]]:
    """The log with times and ids that are the same every time, and what each id has become."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def named(found: re.Match[str]) -> str:
        kind, old = found["kind"], found[0]
        if len(found["id"]) < 20:  # given by the scenario
            return old
        if old not in names:
            counts[kind] = counts.get(kind, 0) + 1
            names[old] = f"{kind}_{counts[kind]:04}"
        return names[old]

    out: list[Event] = []
    for event in log:
        raw = _MADE.sub(named, event.raw)
        raw = _REF.sub('"ref":"0"', raw)
        raw = _LATER.sub(r'"\g<what>":1', raw)
        out.append(Event(SESSION, event.seq, event.type, _EPOCH_MS + 1000 * event.seq, raw))
    return out, names


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare with the files")
    check: bool = parser.parse_args(words).check
    logging.disable(logging.WARNING)  # that the model fails is what some are about
    recorded = asyncio.run(record())
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    changed = sorted(n for n in {*recorded, *there} if recorded.get(n) != there.get(n))
    if check:
        print("\n".join(f"differs: {name}" for name in changed) or "all as recorded")
        return 1 if changed else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in changed:
        path = FOLDER / name
        path.write_text(recorded[name], encoding="utf-8") if name in recorded else path.unlink()
    print(f"{len(recorded)} vectors, {len(changed)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
