"""Performs what `domain.turn` decides: drives one session, turn by turn, step by step.

A `Driver` lives from a claim to the release that comes with ``agent/idle``. It writes only under
its claim: when the claim is lost, its next write fails and it stops. Between two writes it does
the slow things (the model, the tools), and each of those ends at once when a cancel is recorded.

::

    claim ─> begin turn ─> request ─┬─ calls ─> run them ─> next step ─> request …
                ^                   └─ answer, error, cancel ─> finish ─┬─> begin turn
                └────────────────── something waking is pending ────────┤
                                                                        └─> idle, released
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from postroom import mint
from postroom.config import Limits
from postroom.domain.context import Context
from postroom.domain.event import (
    AssistantReply,
    EndReason,
    ErrorInfo,
    Event,
    ModelRetry,
    ToolResult,
    TurnStart,
    UserMessage,
)
from postroom.domain.ids import CallId, ClaimToken, SessionId
from postroom.domain.message import (
    AssistantMessage,
    Block,
    Message,
    Reasoning,
    Text,
    ToolCall,
    Usage,
    sound,
)
from postroom.domain.turn import OpenTurn
from postroom.domain.work import Fence
from postroom.errors import (
    CommitUncertain,
    ModelError,
    NotCommitted,
    PostroomError,
    StaleClaim,
    StoreError,
    ToolFailure,
)
from postroom.flow.approvals import Approvals, Decision, permission, subject_of
from postroom.flow.artifacts import SessionArtifacts
from postroom.flow.context import Contexts, load_media
from postroom.flow.core import Core, CoreSource
from postroom.flow.live import Live, LiveHub
from postroom.flow.output import LoadFile, TurnOutput
from postroom.flow.writing import AGAIN_MS, write_again
from postroom.ports.artifact import ArtifactStore
from postroom.ports.clock import Clock
from postroom.ports.model import (
    CallDelta,
    Delta,
    Model,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
)
from postroom.ports.policy import Admit
from postroom.ports.store import Store, Tx
from postroom.ports.tool import Permission, ToolContext, ToolOutput
from postroom.scripts import drive as scripts
from postroom.scripts.approvals import OPERATOR
from postroom.scripts.drive import Drive, Header, Judged, Progress
from postroom.scripts.usage import usage_of_day, usage_of_session

log = logging.getLogger("postroom.turn")

P = ParamSpec("P")
R = TypeVar("R")


class Bound(Protocol):
    """Bounds a tool's output before it reaches the log; the rest goes to the artifact store."""

    async def __call__(
        self, output: ToolOutput, artifacts: ArtifactStore, text_bytes_max: int
    ) -> Sequence[Block]: ...


class Parts(msgspec.Struct, frozen=True):
    """What a driver works with."""

    store: Store
    clock: Clock
    artifacts: ArtifactStore
    cores: CoreSource
    contexts: Contexts
    live: LiveHub
    limits: Limits
    bound: Bound
    approvals: Approvals
    load_file: LoadFile
    shows_progress: Callable[[SessionId], Awaitable[bool]]


class BudgetSpent(PostroomError):
    code = "budget"


class Interrupted(Exception):
    """A cancel was recorded while something slow was under way."""


class Driver:
    """Drives one session for as long as it holds the claim. Made, run once, thrown away.

    ``done``: it held the claim, and let go of it as it should.
    """

    def __init__(
        self,
        parts: Parts,
        session_id: SessionId,
        *,
        token: ClaimToken | None = None,
        abandoned: tuple[ClaimToken, ...] = (),
    ) -> None:
        self._parts = parts
        self._limits = parts.limits
        self._store = parts.store
        self._id = session_id
        self._fence = Fence(0, token or mint.claim_token())
        self._abandoned = abandoned
        self.done = False
        self._core: Core | None = None
        self._cwd: str | None = None
        self._owner = OPERATOR
        self._principal = OPERATOR
        self._context = Context()
        self._draining = False
        self._armed: asyncio.Task[Any] | None = None
        self._struck = False
        self._judging = False
        self._cancelled_turn = 0
        self._turn = 0
        self.stragglers: set[asyncio.Task[None]] = set()

    @property
    def token(self) -> ClaimToken:
        """Of the claim it holds, or is about to make."""
        return self._fence.token

    def drain(self) -> None:
        """Begins no further turn: after the present one the drive is given back."""
        self._draining = True

    def cancel_turn(self, number: int) -> None:
        """A cancel of this turn is recorded: what is slow ends at once."""
        self._cancelled_turn = max(self._cancelled_turn, number)
        if number >= self._turn:
            self._strike()

    def inbox_changed(self) -> None:
        """Something pending was taken out or replaced: a judgement under way may be void."""
        if self._judging:
            self._strike()

    def _strike(self) -> None:
        if self._armed is not None:
            task, self._armed, self._struck = self._armed, None, True
            task.cancel()

    # ---- the loop ----

    async def run(self, claimed: Drive | None = None) -> None:
        """Claims the drive (unless it comes claimed) and works until the agent is idle.

        Returns without having done anything if the drive is not to be had.
        """
        try:
            drive = claimed or await self._claim()
            if drive is None:
                return
            self._fence = drive.fence
            self._cwd, self._owner = drive.cwd, drive.owner
            self._core = self._parts.cores(drive.core_id)
            await self._drive(drive.progress)
            self.done = True
        except StaleClaim as stale:
            log.info("%s: %s", self._id, stale)
            self._parts.contexts.drop(self._id)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_back())
            raise
        finally:
            for task in self.stragglers:
                task.cancel()

    async def _claim(self) -> Drive | None:
        return await self._write(
            scripts.claim_drive,
            self._id,
            self._store.node,
            self._fence.token,
            attempts_max=self._limits.recovery_attempts_max,
            abandoned=self._abandoned,
        )

    async def _drive(self, progress: Progress) -> None:
        self._context = await self._parts.contexts.open(self._id)
        while not progress.idle:
            await self._catch_up(progress)
            turn = progress.state.turn
            if turn is not None:
                self._turn = turn.number
                progress = await self._step(turn, progress)
            elif self._draining:
                await self._give_back()
                return
            else:
                progress = await self._begin(progress)
        await self._catch_up(progress)
        self._parts.contexts.keep(self._id, self._context)

    async def _catch_up(self, progress: Progress) -> None:
        for event in progress.events:
            if event.type == TurnStart.TYPE:
                self._principal = self._owner
            elif event.type == UserMessage.TYPE:
                self._hear(event)
        await self._parts.contexts.catch_up(self._context, self._id, progress)

    def _hear(self, event: Event) -> None:
        """A turn in which anybody but the operator has spoken works for them."""
        data = event.data
        if isinstance(data, UserMessage) and data.message.source.sender_id is not None:
            self._principal = data.message.source.principal or data.message.source.kind

    def _artifacts_of(self, turn: OpenTurn) -> SessionArtifacts:
        return SessionArtifacts(self._store, self._parts.artifacts, self._id, turn.number)

    async def _begin(self, progress: Progress) -> Progress:
        number = progress.state.turns + 1
        judged = None
        if self._in_use.policy is not None:
            batch = await self._store.read(scripts.peek_turn, self._id, self._fence)
            try:
                judged = await self._judge(batch)
            except Interrupted:
                return msgspec.structs.replace(progress, events=())
        return await self._write(
            scripts.begin_turn, self._id, self._fence, number, self._header, judged
        )

    async def _judge(self, batch: tuple[Message, ...]) -> Judged:
        """Asks the policy about a peeked batch. A policy that fails or hangs refuses.

        Raises:
            Interrupted: the batch was cancelled or edited meanwhile; its verdict is not needed.
        """
        ids = tuple(m.id for m in batch)
        policy = self._in_use.policy
        if policy is None or not batch:
            return Judged(ids)
        self._judging = True
        try:
            async with asyncio.timeout(self._limits.policy_timeout_ms / 1000):
                verdict = await self._breakable(policy(self._id, batch))
            if isinstance(verdict, Admit):
                return Judged(ids)
            rejected = ids if verdict.message_ids is None else verdict.message_ids
            return Judged(ids, tuple(i for i in ids if i in rejected), sound(verdict.reason))
        except Interrupted:
            raise
        except Exception:
            log.exception("%s: the policy failed", self._id)
            return Judged(ids, ids, "the policy failed")
        finally:
            self._judging = False

    async def _step(self, turn: OpenTurn, progress: Progress) -> Progress:
        """One step: request, then its calls or its ending. Every path ends in one write."""
        if turn.cancel is not None:
            return await self._finish(turn, EndReason("completed"))
        if turn.replied:  # running again after a lost answer: the calls were not run here
            return await self._calls(turn, list(turn.calls), progress)
        partial = _Partial()
        try:
            reply, model = await self._request(turn, progress, partial)
        except Interrupted:
            return await self._finish(turn, EndReason("completed"), partial.reply(turn))
        except ModelError as error:
            return await self._finish(turn, _error_reason(error))
        except BudgetSpent as error:
            return await self._finish(turn, EndReason("error", code="budget", message=str(error)))
        return await self._take(turn, reply, model, progress)

    async def _take(
        self, turn: OpenTurn, reply: Reply, model: Model, progress: Progress
    ) -> Progress:
        """What follows from a whole reply."""
        calls = [b for b in reply.content if isinstance(b, ToolCall)]
        content = reply.content
        if reply.finish in ("length", "content_filter"):
            # A call of a cut reply may itself be cut: none is run, the text is kept.
            content, calls = tuple(b for b in content if not isinstance(b, ToolCall)), []
        content = _distinct_calls(_sound(content), self._context.call_ids)
        data = AssistantReply(
            turn.number,
            turn.step,
            AssistantMessage(mint.reply_id(), content),
            model.ref,
            reply.finish,
            reply.usage,
        )
        if not calls:
            kind = "refused" if reply.finish == "content_filter" else "completed"
            return await self._finish(turn, EndReason(kind), data)
        calls = [b for b in content if isinstance(b, ToolCall)]
        held = any(self._permission(c) != "allow" for c in calls)
        first = [] if held else self._startable(deque(calls), 0, False)
        progress = await self._write(
            scripts.record_reply,
            self._id,
            self._fence,
            data,
            tuple(CallId(c.call_id) for c in first),
        )
        after = progress.state.turn
        if after is None or after.number != turn.number:
            return progress
        return await self._calls(after, list(after.calls), progress)

    async def _finish(
        self,
        turn: OpenTurn,
        reason: EndReason,
        reply: AssistantReply | None = None,
        results: tuple[ToolResult, ...] = (),
    ) -> Progress:
        return await self._write(
            scripts.finish_turn, self._id, self._fence, turn.number, reason, reply, results
        )

    # ---- the model ----

    async def _request(
        self, turn: OpenTurn, progress: Progress, partial: _Partial
    ) -> tuple[Reply, Model]:
        """One reply from the first model that gives one; failed attempts leave only a retry fact."""
        await self._check_budget()
        models = self._in_use.models
        number = progress.state.requests
        attempt = turn.retries
        for index, model in enumerate(models):
            tries = 0
            while True:
                partial.clear()
                try:
                    reply = await self._attempt(turn, number, model, partial)
                    if not _is_empty(reply):
                        return reply, model
                    error = ModelError(f"{model.ref} answered nothing", kind="empty")
                except ModelError as failure:
                    reply, error = None, failure
                partial.clear()  # a cancel from here on keeps nothing of the failed attempt
                last = tries >= self._limits.model_retries_max or not error.retryable
                wait_ms = self._backoff_ms(tries, error)
                if wait_ms > self._limits.model_retry_after_longest_ms:
                    last = True
                following = models[index + 1] if last and index + 1 < len(models) else None
                if last and (following is None or not _is_outage(error)):
                    if reply is not None:  # empty to the end: a turn without an answer
                        return reply, model
                    raise error
                attempt += 1
                tries += 1
                number += 1
                await self._retry(turn, attempt, wait_ms, error, following)
                if following is not None:
                    break
        raise AssertionError("a core has at least one model")

    async def _check_budget(self) -> None:
        budget = self._in_use.budget
        if not budget.capped:
            return
        session = await self._store.read(usage_of_session, self._id)
        day = await self._store.read(usage_of_day, self._in_use.id)
        reached = budget.spent(session, day)
        if reached is not None:
            raise BudgetSpent(
                reached, hint="raise the cap in core.toml, or wait; nothing was asked"
            )

    async def _attempt(self, turn: OpenTurn, number: int, model: Model, partial: _Partial) -> Reply:
        messages = self._context.view()
        core = self._in_use
        request = ModelRequest(
            session_id=self._id,
            number=number,
            system=core.persona,
            messages=messages,
            tools=core.tool_specs,
            params=core.params,
            media=await load_media(messages, model, self._parts.artifacts),
        )
        live = self._parts.live

        def on_delta(delta: Delta) -> None:
            partial.add(delta)
            if live.watched(self._id):
                live.send(_as_live(self._id, turn, delta))

        try:
            return await self._interruptible(model.respond(request, on_delta))
        except (ModelError, Interrupted):
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            # A mistake of the adapter's: it costs this turn, and not the driver over and over.
            log.exception("%s: %s raised", self._id, model.ref)
            name = type(error).__name__
            raise ModelError(f"{model.ref} raised {name}", kind="bad_request") from error

    async def _retry(
        self,
        turn: OpenTurn,
        attempt: int,
        wait_ms: int,
        error: ModelError,
        following: Model | None,
    ) -> None:
        delay = 0 if following is not None else wait_ms
        log.warning("%s: %s; trying again in %d ms", self._id, error.message, delay)
        retry = ModelRetry(
            turn.number,
            turn.step,
            attempt,
            delay,
            _error_info(error),
            following.ref if following is not None else None,
        )
        header = self._in_use.header(following) if following is not None else None
        await self._write(scripts.record_retry, self._id, self._fence, retry, header)
        self._parts.live.send(Live(self._id, turn.number, turn.step, "reset", error.message))
        if delay:
            await self._interruptible(self._parts.clock.sleep_ms(delay))

    def _backoff_ms(self, tries: int, error: ModelError) -> int:
        """The provider's word if it gave one; else doubling, with up to half of it as jitter."""
        if error.retry_after_ms is not None:
            return error.retry_after_ms
        limits = self._limits
        wait = min(limits.model_retry_first_ms * 2**tries, limits.model_retry_longest_ms)
        return int(wait * (0.5 + 0.5 * self._parts.clock.jitter()))

    # ---- tools ----

    async def _calls(self, turn: OpenTurn, calls: Sequence[Any], progress: Progress) -> Progress:
        """Runs the step's open calls, then closes the step. Results go to the log in call order."""
        order = [CallId(c.call_id) for c in calls]
        waiting = deque(ToolCall(c.call_id, c.name, c.arguments) for c in calls)
        started = {c.call_id for c in turn.calls if c.started}
        running: dict[asyncio.Task[ToolResult], ToolCall] = {}
        results: dict[CallId, ToolResult] = {}
        logged = 0
        try:
            for call, why in await self._denied(
                turn, [c for c in waiting if c.call_id not in started]
            ):
                waiting.remove(call)
                text = f"This call was not allowed to run: {why}."
                results[CallId(call.call_id)] = ToolResult(
                    turn.number, turn.step, CallId(call.call_id), (Text(text),), "not_started"
                )
            while waiting or running:
                alone = any(self._is_exclusive(c) for c in running.values())
                batch = self._startable(waiting, len(running), alone)
                unstarted = tuple(CallId(c.call_id) for c in batch if c.call_id not in started)
                if unstarted:
                    allowed = await self._write(
                        scripts.start_calls, self._id, self._fence, turn.number, unstarted
                    )
                    if len(allowed) < len(unstarted):
                        raise Interrupted
                for call in batch:
                    waiting.popleft()
                    task = asyncio.ensure_future(self._call(turn, call))
                    running[task] = call
                done, _ = await self._interruptible(
                    asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                )
                for task in done:
                    call = running.pop(task)
                    results[CallId(call.call_id)] = task.result()
                ready = logged
                while ready < len(order) and order[ready] in results:
                    ready += 1
                if ready > logged and (waiting or running):
                    batch_results = tuple(results[i] for i in order[logged:ready])
                    logged = ready
                    progress = await self._write(
                        scripts.record_results, self._id, self._fence, turn.number, batch_results
                    )
                    await self._catch_up(progress)
        except Interrupted:
            await self._stop(running)
            for task, call in running.items():
                if task.done() and not task.cancelled() and task.exception() is None:
                    results[CallId(call.call_id)] = task.result()
            rest = tuple(results[i] for i in order[logged:] if i in results)
            return await self._finish(turn, EndReason("completed"), results=rest)
        except BaseException:
            await self._stop(running)
            raise
        rest = tuple(results[i] for i in order[logged:])
        steps_max = self._in_use.turn_steps_max or self._limits.turn_steps_max
        if turn.step >= steps_max:
            return await self._finish(turn, EndReason("max_steps"), results=rest)
        return await self._next_step(turn, rest)

    def _permission(self, call: ToolCall) -> Permission:
        core = self._in_use
        tool = core.tools.get(call.name)
        if tool is None:
            return "allow"  # there is nothing to run: its result says so
        return permission(tool, core.permissions.get(call.name), self._principal)

    async def _denied(
        self, turn: OpenTurn, calls: Sequence[ToolCall]
    ) -> list[tuple[ToolCall, str]]:
        """The calls that may not run, and why. Where one is asked about the whole step waits."""
        denied: list[tuple[ToolCall, str]] = []
        asked: list[tuple[ToolCall, asyncio.Task[Decision]]] = []
        for call in calls:
            match self._permission(call):
                case "allow":
                    continue
                case "deny":
                    denied.append((call, "the core's policy denies this tool"))
                case "ask":
                    asked.append((call, asyncio.ensure_future(self._ask(turn, call))))
        try:
            if asked:
                await self._interruptible(asyncio.wait([task for _, task in asked]))
            for call, task in asked:
                decision = task.result()
                if not decision.allowed:
                    denied.append((call, decision.why))
        finally:
            for _, task in asked:
                task.cancel()
        return denied

    async def _ask(self, turn: OpenTurn, call: ToolCall) -> Decision:
        return await self._parts.approvals.ask(
            self._id,
            self._fence,
            turn=turn.number,
            step=turn.step,
            call_id=CallId(call.call_id),
            subject=subject_of(call.name, call.arguments),
        )

    async def _next_step(self, turn: OpenTurn, results: tuple[ToolResult, ...]) -> Progress:
        while True:
            judged = None
            if self._in_use.policy is not None and self._cancelled_turn < turn.number:
                batch = await self._store.read(scripts.peek_step, self._id, self._fence)
                try:
                    judged = await self._judge(batch)
                except Interrupted:
                    continue
            progress = await self._write(
                scripts.next_step,
                self._id,
                self._fence,
                turn.number,
                turn.step,
                results,
                self._header,
                judged,
            )
            if not progress.changed:
                return progress

    def _startable(self, waiting: deque[ToolCall], running: int, alone: bool) -> list[ToolCall]:
        """The next calls that may run beside those that run: up to the cap, exclusive ones alone."""
        batch: list[ToolCall] = []
        for call in waiting:
            taken = running + len(batch)
            if alone or taken >= self._limits.tools_at_once_max:
                break
            if self._is_exclusive(call):
                if taken == 0:
                    batch.append(call)
                break
            batch.append(call)
        return batch

    def _is_exclusive(self, call: ToolCall) -> bool:
        tool = self._in_use.tools.get(call.name)
        return tool is not None and tool.exclusive

    async def _call(self, turn: OpenTurn, call: ToolCall) -> ToolResult:
        """One call's result, whatever the tool does: raises, hangs, answers too much."""
        shown = await self._parts.shows_progress(self._id)
        if shown:
            await self._show(turn, call, "started")
        output = await self._outcome(turn, call)
        if shown:
            await self._show(turn, call, "failed" if output.is_error else "finished")
        try:
            content = await self._bounded(turn, output)
        except Exception as error:
            log.exception("%s: the output of %s could not be kept", self._id, call.name)
            content = (Text(f"The tool ran, but its output could not be kept: {error}"),)
            output = ToolOutput("", is_error=True)
        outcome = "error" if output.is_error else "ok"
        return ToolResult(turn.number, turn.step, CallId(call.call_id), content, outcome)

    async def _show(self, turn: OpenTurn, call: ToolCall, what: str) -> None:
        """Tells a conversation that shows such things how a call fares; nothing hangs on it."""
        try:
            await self._output_of(turn, call).progress(f"{call.name} {what}")
        except StoreError as error:
            log.info("%s: %s", self._id, error)

    def _output_of(self, turn: OpenTurn, call: ToolCall) -> TurnOutput:
        return TurnOutput(
            self._store,
            self._artifacts_of(turn),
            self._parts.load_file,
            session_id=self._id,
            turn=turn.number,
            fence=self._fence,
            owner=self._owner,
            cwd=self._cwd,
            source=call.name,
        )

    async def _bounded(self, turn: OpenTurn, output: ToolOutput) -> tuple[Block, ...]:
        limit = self._limits.tool_text_bytes_max
        return tuple(await self._parts.bound(output, self._artifacts_of(turn), limit))

    async def _outcome(self, turn: OpenTurn, call: ToolCall) -> ToolOutput:
        tool = self._in_use.tools.get(call.name)
        if tool is None:
            known = ", ".join(self._in_use.tools) or "none"
            return ToolOutput(f"There is no tool {call.name!r}. Known: {known}.", is_error=True)
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeError) as error:
            return ToolOutput(f"The arguments are no JSON object: {error}", is_error=True)

        def progress(line: str) -> None:
            self._parts.live.send(
                Live(
                    self._id, turn.number, turn.step, "progress", line, tool.spec.name, call.call_id
                )
            )

        ctx = ToolContext(
            session_id=self._id,
            turn=turn.number,
            step=turn.step,
            call_id=CallId(call.call_id),
            cwd=self._cwd,
            principal=self._principal,
            artifacts=self._artifacts_of(turn),
            progress=progress,
            output=self._output_of(turn, call),
        )
        limit_ms = tool.timeout_ms or self._limits.tool_timeout_ms

        async def run() -> ToolOutput:
            try:
                return await tool.call(ctx, arguments)
            except ToolFailure as failure:
                return ToolOutput(str(failure), is_error=True)
            except Exception as error:
                log.warning("%s: tool %s raised", self._id, call.name, exc_info=True)
                return ToolOutput(f"{type(error).__name__}: {error}", is_error=True)

        task = asyncio.ensure_future(run())
        try:
            await asyncio.wait({task}, timeout=limit_ms / 1000)
        except asyncio.CancelledError:
            if not await _end(task, self._limits.tool_grace_ms):
                self._await_straggler(turn, call, task)
                raise
            if task.cancelled():
                raise
            return task.result()  # it had its answer, or would not be stopped from giving it
        if task.done():
            if task.cancelled():
                return ToolOutput("The tool stopped itself without an answer.", is_error=True)
            return task.result()
        text = f"The tool was stopped after {limit_ms / 1000:g} s without an answer."
        if not await _end(task, self._limits.tool_grace_ms):
            text = f"The tool has not answered in {limit_ms / 1000:g} s and could not be stopped."
            self._await_straggler(turn, call, task)
        elif not task.cancelled():
            return task.result()
        return ToolOutput(text, is_error=True)

    def _await_straggler(
        self, turn: OpenTurn, call: ToolCall, task: asyncio.Task[ToolOutput]
    ) -> None:
        """Records the result of a call that was closed, should it come while the claim stands."""

        async def late() -> None:
            output = await task
            content = await self._bounded(turn, output)
            result = ToolResult(turn.number, turn.step, CallId(call.call_id), content, "late")
            try:
                await self._write(scripts.record_late, self._id, self._fence, result)
            except StoreError:
                log.warning("%s: %s answered after its claim was over", self._id, call.name)

        straggler = asyncio.ensure_future(late())
        self.stragglers.add(straggler)
        straggler.add_done_callback(self.stragglers.discard)

    async def _stop(self, running: dict[asyncio.Task[ToolResult], ToolCall]) -> None:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=2 * self._limits.tool_grace_ms / 1000)

    # ---- claims, cancels, writes ----

    @property
    def _in_use(self) -> Core:
        assert self._core is not None
        return self._core

    @property
    def _header(self) -> Header:
        return self._in_use.header(self._in_use.models[0])

    async def _interruptible(self, slow: Awaitable[R]) -> R:
        """Awaits something slow, and drops it the moment a cancel of this turn is recorded.

        Raises:
            Interrupted: the turn is cancelled.
        """
        if self._cancelled_turn >= self._turn:
            if asyncio.iscoroutine(slow):
                slow.close()
            raise Interrupted
        return await self._breakable(slow)

    async def _breakable(self, slow: Awaitable[R]) -> R:
        """Awaits something slow, and drops it at a `_strike`."""
        task = asyncio.current_task()
        assert task is not None
        self._armed, self._struck = task, False
        try:
            return await slow
        except asyncio.CancelledError:
            struck, self._struck = self._struck, False
            if struck and task.uncancel() == 0:
                raise Interrupted from None
            raise
        finally:
            self._armed = None
            if self._struck:  # it ended in its own way all the same
                task.uncancel()

    async def _give_back(self) -> None:
        try:
            await self._write(scripts.give_back_drive, self._id, self._fence)
        except (StaleClaim, NotCommitted, CommitUncertain) as error:
            log.info("%s: the drive was not given back: %s", self._id, error)

    async def _write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """A script's answer. What the store could not write is tried again: all are idempotent."""
        return await write_again(self._store, AGAIN_MS, self._pause, script, *args, **kwargs)

    async def _pause(self, wait_ms: int) -> bool:
        await self._parts.clock.sleep_ms(wait_ms)
        return True


class _Partial:
    """What has streamed in of a reply, in case it is cut by a cancel."""

    __slots__ = ("_reasoning", "_text")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self._text.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._reasoning.append(delta.text)

    def clear(self) -> None:
        self._text.clear()
        self._reasoning.clear()

    def reply(self, turn: OpenTurn) -> AssistantReply | None:
        """The streamed text as an interrupted reply; None if none had come."""
        text = sound("".join(self._text))
        if not text:
            return None
        content: tuple[Block, ...] = (Text(text),)
        if self._reasoning:
            content = (Reasoning(sound("".join(self._reasoning))), *content)
        message = AssistantMessage(mint.reply_id(), content)
        return AssistantReply(turn.number, turn.step, message, "", "stop", Usage(), True)


def _is_empty(reply: Reply) -> bool:
    """No text and no call; cut and refused replies are what they say they are."""
    if reply.finish in ("length", "content_filter"):
        return False
    return not any(
        isinstance(b, ToolCall) or (isinstance(b, Text) and b.text) for b in reply.content
    )


def _distinct_calls(content: tuple[Block, ...], known: Set[str]) -> tuple[Block, ...]:
    """Call ids are unique within a history: a repeated one gets a new id."""
    seen: set[str] = set()
    out: list[Block] = []
    for block in content:
        if isinstance(block, ToolCall):
            if not block.call_id or block.call_id in seen or block.call_id in known:
                block = msgspec.structs.replace(block, call_id=mint.call_id())
            seen.add(block.call_id)
        out.append(block)
    return tuple(out)


def _sound(content: tuple[Block, ...]) -> tuple[Block, ...]:
    """The content with every text in valid Unicode: no log can hold half a surrogate pair."""

    def mend(block: Block) -> Block:
        change = msgspec.structs.replace
        if isinstance(block, Text | Reasoning):
            return block if block.text.isascii() else change(block, text=sound(block.text))
        if isinstance(block, ToolCall):
            return ToolCall(sound(block.call_id), sound(block.name), sound(block.arguments))
        return block

    return tuple(map(mend, content))


def _is_outage(error: ModelError) -> bool:
    """Whether another model may do better: the server failed, not the request."""
    return error.retryable or error.kind == "quota"


def _error_info(error: ModelError) -> ErrorInfo:
    return ErrorInfo(
        error.kind, sound(error.message), error.status, error.retry_after_ms, error.request_id
    )


def _error_reason(error: ModelError) -> EndReason:
    if error.kind == "refused":
        return EndReason("refused", message=sound(error.message))
    return EndReason(
        "error",
        code=error.kind,
        message=sound(str(error)),
        status=error.status,
        retry_after_ms=error.retry_after_ms,
        provider_request_id=error.request_id,
    )


def _as_live(session_id: SessionId, turn: OpenTurn, delta: Delta) -> Live:
    if isinstance(delta, CallDelta):
        return Live(session_id, turn.number, turn.step, "call", name=delta.name)
    kind = "text" if isinstance(delta, TextDelta) else "reasoning"
    return Live(session_id, turn.number, turn.step, kind, delta.text)


async def _end(task: asyncio.Task[Any], grace_ms: int) -> bool:
    """Cancels a task and waits for it, bounded; whether it ended."""
    task.cancel()
    await asyncio.wait({task}, timeout=grace_ms / 1000)
    return task.done()
