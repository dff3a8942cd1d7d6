"""Whether a call may run: the tool's policy, and where it says ``ask``, a person's decision.

Tools with effects are asked about for everybody but the operator, and denied where nobody could
answer. Time-out, cancel and a lost connection deny. What is asked is on disk before anybody sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec

from postroom import mint
from postroom.config import Limits
from postroom.domain.event import ApprovalDecided, Event
from postroom.domain.ids import ApprovalId, CallId, SessionId
from postroom.domain.work import Fence
from postroom.errors import StoreError
from postroom.flow.router import SessionInteractionRouter
from postroom.ports.clock import Clock
from postroom.ports.route import Question
from postroom.ports.store import Store
from postroom.ports.tool import Permission, Tool
from postroom.scripts.approvals import (
    OPERATOR,
    NotAsked,
    approval_decision,
    ask_approval,
    decide_approval,
)

_SUBJECT_MAX = 500


class Decision(msgspec.Struct, frozen=True):
    """``why`` is told to the model where the call may not run."""

    allowed: bool
    why: str = ""


def permission(tool: Tool, configured: Permission | None, principal: str) -> Permission:
    """What the policy says of a tool for whoever the turn works for."""
    if configured is not None:
        return configured
    if tool.effects == "none" or principal == OPERATOR:
        return "allow"
    return "ask"


def subject_of(name: str, arguments: str) -> str:
    """What is asked about, in words."""
    text = f"{name} {arguments}" if arguments.strip() not in ("", "{}") else name
    return text if len(text) <= _SUBJECT_MAX else text[: _SUBJECT_MAX - 1] + "…"


class Approvals:
    """Asks on behalf of a turn's driver."""

    def __init__(
        self, store: Store, router: SessionInteractionRouter, clock: Clock, limits: Limits
    ) -> None:
        self._store = store
        self._router = router
        self._clock = clock
        self._wait_ms = limits.approval_wait_ms

    async def ask(
        self,
        session_id: SessionId,
        fence: Fence,
        *,
        turn: int,
        step: int,
        call_id: CallId,
        subject: str,
    ) -> Decision:
        """A person's decision, or a denial with its reason. Cancelling it leaves it to the turn's end."""
        approval_id = mint.approval_id()
        decided: asyncio.Future[ApprovalDecided] = asyncio.get_running_loop().create_future()

        def heard(events: Sequence[Event]) -> None:
            for event in events:
                if event.type == ApprovalDecided.TYPE and not decided.done():
                    data = event.data
                    if isinstance(data, ApprovalDecided) and data.approval_id == approval_id:
                        decided.set_result(data)

        subscription = self._store.subscribe(session_id, heard)
        try:
            asked = await self._store.write(
                ask_approval,
                session_id,
                fence,
                approval_id,
                turn=turn,
                step=step,
                call_id=call_id,
                kind="approval",
                subject=subject,
                text=f"May I run this?\n{subject}\n\n/allow {approval_id}\n/deny {approval_id}",
                wait_ms=self._wait_ms,
            )
            if asked == "nobody":
                return Decision(False, "nobody is attached to this session who could be asked")
            if asked == "cancelled":
                return Decision(False, "the turn was cancelled")
            if asked == "connection":
                return await self._by_connection(session_id, approval_id, subject, decided)
            return await self._decided(approval_id, decided)
        finally:
            subscription.close()

    async def _by_connection(
        self,
        session_id: SessionId,
        approval_id: ApprovalId,
        subject: str,
        decided: asyncio.Future[ApprovalDecided],
    ) -> Decision:
        """Asks whoever is connected; somebody else may decide it meanwhile."""
        question = Question(approval_id, session_id, subject, ("allow", "deny"))
        request = asyncio.ensure_future(self._router.request_approval(question))
        timer = asyncio.ensure_future(self._clock.sleep_ms(self._wait_ms))
        try:
            await asyncio.wait({request, decided, timer}, return_when=asyncio.FIRST_COMPLETED)
            if decided.done():
                return _as_decision(decided.result())
            if not request.done():
                return await self._deny(approval_id, "nobody answered in time")
            if request.exception() is not None:
                return await self._deny(approval_id, "the connection was lost")
            answer, why = request.result()
            if answer is None:
                return await self._decided(approval_id, decided)
            if not answer:
                return await self._deny(approval_id, "denied" if why == "asked" else why)
            with contextlib.suppress(NotAsked):
                await self._decide(approval_id, "allow", OPERATOR)
            return await self._settled(approval_id)
        finally:
            request.cancel()
            timer.cancel()

    async def _decided(
        self, approval_id: ApprovalId, decided: asyncio.Future[ApprovalDecided]
    ) -> Decision:
        timer = asyncio.ensure_future(self._clock.sleep_ms(self._wait_ms))
        try:
            await asyncio.wait({decided, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        if decided.done():
            return _as_decision(decided.result())
        return await self._deny(approval_id, "nobody answered in time")

    async def _deny(self, approval_id: ApprovalId, why: str) -> Decision:
        """Denies it, unless somebody has decided in the meantime."""
        with contextlib.suppress(NotAsked):
            await self._decide(approval_id, "deny", why)
            return Decision(False, why)
        return await self._settled(approval_id)

    async def _decide(self, approval_id: ApprovalId, decision: str, by: str) -> None:
        await self._store.write(
            decide_approval,
            approval_id,
            decision,
            by=by,
            principal=OPERATOR,
            ref=mint.claim_token(),
        )

    async def _settled(self, approval_id: ApprovalId) -> Decision:
        found = await self._store.read(approval_decision, approval_id)
        if found is None:
            raise StoreError(f"approval {approval_id} is not there")
        decision, by = found
        return Decision(decision == "allow", f"denied by {by}")


def _as_decision(decided: ApprovalDecided) -> Decision:
    return Decision(decided.decision == "allow", f"denied by {decided.by}")
