"""`postroom run`: one shot, from idle to quiescent.

The command owns its interval: it waits until the agent is idle, queues its prompt, and folds from
there to the next idle. Output and exit code come from that run result and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from postroom.cli.ending import Signals, to_the_end
from postroom.cli.options import Database, complete_session, database_of
from postroom.errors import RunOverlap, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postroom.app import Room
    from postroom.domain.event import Event
    from postroom.domain.run import RunResult
    from postroom.flow.live import Live

EXIT_CODES: dict[str | None, int] = {
    "completed": 0,
    "max_tokens": 3,
    "max_steps": 3,
    "cancelled": 130,
}
TIMEOUT = 124
_TOOL_GRACE_S = 5.0


class RunOutput(StrEnum):
    text = "text"
    json = "json"
    stream_json = "stream-json"


def run_command(
    prompt: Annotated[str, typer.Argument(help="What to say; - reads it from standard input.")],
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            "-s",
            help="Go on with this session, or start one of this id.",
            show_default="a new one",
            autocompletion=complete_session,
        ),
    ] = None,
    core: Annotated[str, typer.Option(help="The core of a new session.")] = "default",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="PROVIDER:NAME, as openai:gpt-5.")
    ] = None,
    output: Annotated[
        RunOutput, typer.Option("--output", "-o", help="text, json, or stream-json.")
    ] = RunOutput.text,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Give up after so many seconds (exit 124).")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="At most so many model requests in a turn (exit 3).")
    ] = None,
    db: Database = None,
) -> None:
    """Ask once and print the answer.

    The prompt is on disk before the model is asked. Kill this at any moment and run it again with
    the same --session: everything is there, and interrupted work goes on.

    Exit codes: 0 completed; 1 error, refused, rejected or interrupted; 2 usage; 3 token or step
    limit; 124 time-out; 130 cancelled or Ctrl-C; 143 SIGTERM.
    """
    text = _read_stdin() if prompt == "-" else prompt
    one_shot = _OneShot(
        text=text,
        session=session,
        core=core,
        model=model,
        output=output,
        timeout_s=timeout,
        max_steps=max_steps,
        database=database_of(db),
    )
    code = asyncio.run(to_the_end(one_shot.main()))
    sys.stdout.flush()
    raise typer.Exit(code)


def _read_stdin() -> str:
    try:
        data = sys.stdin.buffer.read()
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8 (byte {error.start})", hint="convert it first"
        ) from error


class _OneShot:
    def __init__(
        self,
        *,
        text: str,
        session: str | None,
        core: str,
        model: str | None,
        output: RunOutput,
        timeout_s: float | None,
        max_steps: int | None,
        database: str,
    ) -> None:
        self._text = text
        self._session = session
        self._core = core
        self._model = model
        self._output = output
        self._timeout_s = timeout_s
        self._max_steps = max_steps
        self._database = database
        self._owns = False
        self._shown = _Shown(output)

    async def main(self) -> int:
        from postroom import mint
        from postroom.app import open_room
        from postroom.cores import builtin_cores
        from postroom.domain.ids import CoreId, session_id
        from postroom.domain.message import parse_content
        from postroom.home import environment

        content = parse_content(self._text)
        name = mint.session_id() if self._session is None else session_id(self._session)
        cores = builtin_cores(
            model=self._model, environ=environment(), turn_steps_max=self._max_steps
        )
        cores(CoreId(self._core))  # a wrong model fails here, before anything is made
        self._signals = Signals()
        async with open_room(
            cores, database=self._database, only=name, drain_ms=int(_TOOL_GRACE_S * 1000)
        ) as room:
            agent = await room.session(name, core_id=CoreId(self._core), cwd=os.getcwd())
            if self._session is None or self._shown.interactive:
                print(f"session {name}", file=sys.stderr)
            room.live.watch(name, self._shown.live)
            subscription = room.store.subscribe(name, self._shown.events)
            gc.freeze()
            gc.enable()
            try:
                return await self._interval(room, agent, content)
            finally:
                subscription.close()
                room.supervisor.stop_claiming()

    async def _interval(self, room: Room, agent: Any, content: Any) -> int:
        from postroom import mint
        from postroom.flow.agent import Collector

        message_id = mint.message_id()
        work = asyncio.ensure_future(self._own(room, agent, content, message_id, Collector))
        stop = asyncio.ensure_future(self._signals.stop.wait())
        done, _ = await asyncio.wait(
            {work, stop}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        stop.cancel()
        if work in done:
            result = work.result()
            self._shown.result(result)
            return EXIT_CODES.get(result.finish_reason, 1)
        # Out of time, or told to stop: end the turn, keep what is queued, claim nothing more.
        room.supervisor.stop_claiming()
        room.supervisor.finish_turns()
        if self._owns:  # until its own message is queued, what runs is somebody else's
            await self._cancel(room, agent, work)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work
        self._shown.result(await agent.fold(message_id, until="quiescent"), partial=True)
        if self._signals.number is not None:
            return 128 + self._signals.number
        print(f"postroom: not done after {self._timeout_s:g} s", file=sys.stderr)
        return TIMEOUT

    async def _cancel(self, room: Room, agent: Any, work: asyncio.Future[RunResult]) -> None:
        """Cancels the turn and waits for its end, here or in the process that drives it."""
        head = await agent.head()
        await agent.cancel(keep_inbox=True)
        waits: set[asyncio.Future[Any]] = {work, asyncio.ensure_future(_turn_end(agent, head))}
        if room.supervisor.driving:  # it gives the drive back, and may never be idle
            drivers = room.supervisor.wait_drivers(2 * _TOOL_GRACE_S)
            waits.add(asyncio.ensure_future(drivers))
        await asyncio.wait(waits, timeout=2 * _TOOL_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        await room.supervisor.wait_drivers(_TOOL_GRACE_S)
        for wait in waits:
            wait.cancel()

    async def _own(
        self, room: Room, agent: Any, content: Any, message_id: Any, collect: Any
    ) -> RunResult:
        """Waits for idle, queues the prompt, and waits for the end of its interval."""
        while True:
            self._shown.muted = True
            await agent.when_idle()
            with collect(room.store, agent.session_id) as collector:
                self._shown.start()
                collector.on_end = room.supervisor.stop_claiming
                self._owns = True
                try:
                    receipt = await agent.queue(content, message_id=message_id, run="exclusive")
                except RunOverlap:  # another command was quicker: its interval comes first
                    self._owns = False
                    continue
                return await agent.result(receipt, collector, until="quiescent")


async def _turn_end(agent: Any, after: int) -> None:
    """Returns once a turn has ended behind a seq of the log."""
    async for event in agent.events(after):
        if event.type == "turn/end":
            return


class _Shown:
    """What the person sees while it runs: text on stdout in a terminal, tools on stderr."""

    def __init__(self, output: RunOutput) -> None:
        self.interactive = sys.stderr.isatty()
        self.muted = False
        self._output = output
        self._streams = output is RunOutput.text and sys.stdout.isatty()
        self._streamed = False
        self._started: dict[str, tuple[str, float]] = {}
        self._colour = self.interactive and "NO_COLOR" not in os.environ
        self._seq = 0

    def start(self) -> None:
        self.muted = False

    def live(self, live: Live) -> None:
        if self.muted or not self._streams:
            return
        if live.kind == "text":
            sys.stdout.write(live.text)
            sys.stdout.flush()
            self._streamed = True
        elif live.kind == "reset" and self._streamed:
            sys.stdout.write("\n")
            self._streamed = False

    def events(self, events: Sequence[Event]) -> None:
        from postroom.domain.event import ModelRetry, ToolCallStarted, ToolResult
        from postroom.domain.message import text_of

        if self.muted:
            return
        for event in events:
            if event.seq <= self._seq:
                continue
            self._seq = event.seq
            if self._output is RunOutput.stream_json:
                print(event.to_json(), flush=True)
            data = event.data
            if isinstance(data, ToolCallStarted):
                if self._streamed:
                    sys.stdout.write("\n")
                    self._streamed = False
                self._started[data.call_id] = (data.name, event.at)
                self._say(f"> {data.name} {_short(data.arguments)}", "36")
            elif isinstance(data, ToolResult) and not data.late:
                name, at = self._started.pop(data.call_id, ("", event.at))
                mark = "ok" if data.outcome == "ok" else data.outcome
                text = "" if mark == "ok" else f": {_short(text_of(data.content))}"
                self._say(
                    f"< {name} {mark} {(event.at - at) / 1000:.1f} s{text}",
                    "32" if mark == "ok" else "31",
                )
            elif isinstance(data, ModelRetry):
                self._say(f"! {data.error.message}; again in {data.delay_ms / 1000:.1f} s", "33")

    def result(self, result: RunResult, *, partial: bool = False) -> None:
        if self._output is RunOutput.json:
            print(json.dumps(result.to_json(), ensure_ascii=False))
        elif self._output is RunOutput.stream_json:
            print(
                json.dumps({"type": "result", **result.to_json(events=False)}, ensure_ascii=False)
            )
        elif self._streams and self._streamed:
            print()
        elif result.final_response is not None and not partial:
            print(result.final_response)
        sys.stdout.flush()
        end = result.end
        if partial or end is None or end.kind == "completed":
            return
        says = {
            "error": end.message,
            "max_tokens": "the answer hit the model's token limit",
            "max_steps": "the turn hit its limit of model requests (--max-steps)",
            "refused": "the model's provider refused to answer",
            "rejected": f"the message was refused: {end.message}",
            "cancelled": "cancelled",
        }
        print(f"postroom: {says.get(end.kind) or end.kind}", file=sys.stderr)

    def _say(self, line: str, colour: str) -> None:
        if self._colour:
            line = f"\x1b[{colour}m{line}\x1b[0m"
        print(line, file=sys.stderr, flush=True)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:159] + "…"
