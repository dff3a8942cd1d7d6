"""The delivery runtime: claims what is in the outbox, sends it, records what came of it.

One ordered lane a session; lanes never hold each other up. A claim is on disk before the platform is
called, and a call ends before the claim could be taken for dead. What a call's end leaves in doubt
is asked about, bounded, and then the operator's. Nothing is sent again in doubt.

::

    claim ──> call ──> record, and claim what is next ──> call …
      └─ nothing may be sent now: wait for a hint, or for the time when something may
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from postroom import mint
from postroom.config import Limits
from postroom.domain.ids import ClaimToken, DeliveryId, SessionId
from postroom.domain.outbox import (
    CannotTell,
    NotStarted,
    Rules,
    SendOutcome,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.errors import CommitUncertain, NotCommitted, StoreClosed, StoreError
from postroom.flow.router import SessionInteractionRouter
from postroom.ports.channel import OutPart, Profile, Unit
from postroom.ports.clock import Clock
from postroom.ports.route import InteractionItem, InteractionOutbound
from postroom.ports.store import Store, Tx
from postroom.scripts import outbox as scripts
from postroom.scripts.outbox import Claimed, Next, Question, Serves, Wait
from postroom.scripts.routes import ToConversation
from postroom.scripts.sending import ASK, SEND

log = logging.getLogger("postroom.outbox")

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_LIMIT = 500
_LOOK_EVERY_S = 15.0
_WRITE_AGAIN_MS = (100, 400, 1600, 6400)
_LANE_AGAIN_S = (0.1, 1.0, 5.0, 30.0)

Cut = Callable[[str, int, Unit], Sequence[str]]


def rules_of(limits: Limits) -> Rules:
    return Rules(
        attempts_max=limits.delivery_attempts_max,
        retry_first_ms=limits.delivery_retry_first_ms,
        retry_longest_ms=limits.delivery_retry_longest_ms,
        expiry_ms=limits.delivery_expiry_ms,
        reconciles_max=limits.reconciles_max,
        reconcile_first_ms=limits.reconcile_first_ms,
        reconcile_longest_ms=limits.reconcile_longest_ms,
        reconcile_wait_ms=limits.reconcile_wait_ms,
    )


class Counts(msgspec.Struct):
    """What this process did since it started."""

    claimed: int = 0
    sent: int = 0
    unknown: int = 0
    refused: int = 0
    asked: int = 0


class _Lane:
    __slots__ = ("hint", "task")

    def __init__(self) -> None:
        self.hint = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class DeliveryRuntime:
    """``cut`` cuts a text to a limit and unit. Made, started, drained, thrown away."""

    def __init__(
        self,
        store: Store,
        router: SessionInteractionRouter,
        *,
        cut: Cut,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._store = store
        self._router = router
        self._cut = cut
        self._clock = clock
        self._rules = rules_of(limits)
        self._lanes: dict[SessionId, _Lane] = {}
        self._asking: dict[DeliveryId, asyncio.Task[None]] = {}
        self._active: set[ClaimToken] = set()
        self._failures: dict[SessionId, int] = {}
        self._working = False
        self._looking: asyncio.Task[None] | None = None
        self._look_again = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._tick: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.counts = Counts()
        self._subscriptions = [
            store.on_work(self._on_work),
            store.on_lease_lost(self._on_lease_lost),
        ]

    def start(self) -> None:
        """Sends what waits, and from now on whatever the store says may be sent."""
        self._working = True
        self._look()
        self._ticking()

    # ---- hearing of work ----

    def _on_work(self, kind: str, key: str) -> None:
        if not self._working:
            return
        if kind == SEND and key != "*":
            self._hint(SessionId(key))
        elif kind == ASK and key != "*":
            self._ask(DeliveryId(key))
        elif kind in (SEND, ASK, "*"):
            self._look()

    def _on_lease_lost(self) -> None:
        self._active.clear()
        self._look()

    def _ticking(self) -> None:
        if self._working:
            self._look()
            self._tick = self._loop.call_later(_LOOK_EVERY_S, self._ticking)

    def _look(self) -> None:
        if self._looking is not None and not self._looking.done():
            self._look_again = True
            return
        self._looking = self._loop.create_task(self._look_once(), name="look at the outbox")

    async def _look_once(self) -> None:
        """Hints every lane that has something, page by page, and asks about every doubt."""
        try:
            while True:
                self._look_again = False
                after = 0
                while self._working:
                    page = await self._store.read(scripts.lanes_to_serve, after, _LOOK_LIMIT)
                    for _, session_id in page:
                        self._hint(session_id)
                    if len(page) < _LOOK_LIMIT:
                        break
                    after = page[-1][0]
                for delivery_id, _ in await self._store.read(scripts.doubts, _LOOK_LIMIT):
                    self._ask(delivery_id)
                if not self._look_again:
                    return
        except StoreClosed:
            return
        except StoreError as error:
            log.warning("the outbox could not be looked at: %s", error)

    def _hint(self, session_id: SessionId) -> None:
        if not self._working:
            return
        lane = self._lanes.get(session_id)
        if lane is None:
            lane = self._lanes[session_id] = _Lane()
            lane.task = self._loop.create_task(
                self._lane(session_id, lane), name=f"lane {session_id}"
            )
        lane.hint.set()

    # ---- a lane ----

    async def _lane(self, session_id: SessionId, lane: _Lane) -> None:
        try:
            while self._working:
                lane.hint.clear()
                found = await self._work_off(session_id)
                self._failures.pop(session_id, None)
                if found is None:
                    if not lane.hint.is_set():
                        return
                elif not lane.hint.is_set() and not await self._rest(lane, found):
                    return
        except (StoreClosed, asyncio.CancelledError):
            pass
        except Exception:
            # A lane that fails is a mistake of ours or the store's: it costs a pause, and no other lane.
            log.exception("the lane of %s failed", session_id)
            failures = self._failures.get(session_id, 0)
            self._failures[session_id] = failures + 1
            self._later(_LANE_AGAIN_S[min(failures, 3)], session_id)
        finally:
            if self._lanes.get(session_id) is lane:
                del self._lanes[session_id]
            if lane.hint.is_set() and self._working and session_id not in self._failures:
                self._hint(session_id)

    async def _rest(self, lane: _Lane, wait: Wait) -> bool:
        """Waits for the hint or the time; False: only a hint can say more, and it starts a lane."""
        if wait.until is None:
            return False
        sleep = asyncio.ensure_future(
            self._clock.sleep_ms(max(1, wait.until - self._clock.now_ms()))
        )
        hint = asyncio.ensure_future(lane.hint.wait())
        try:
            await asyncio.wait({sleep, hint}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            hint.cancel()
        return True

    def _later(self, seconds: float, session_id: SessionId) -> None:
        def again() -> None:
            self._timers.discard(timer)
            self._hint(session_id)

        timer = self._loop.call_later(seconds, again)
        self._timers.add(timer)

    async def _work_off(self, session_id: SessionId) -> Wait | None:
        """Sends what may be sent now, one after the other; what there is to wait for then."""
        token = self._token()
        deadline = self._deadline()
        used: list[ClaimToken] = [token]
        try:
            found: Next = await self._write(
                scripts.claim_delivery, session_id, token, self._serves()
            )
            while isinstance(found, Claimed):
                self.counts.claimed += 1
                outcome, stopped = await self._send(found, deadline)
                token = self._token()
                used.append(token)
                deadline = self._deadline()
                found = await asyncio.shield(self._record(found, outcome, token, stopped))
                if stopped:
                    raise asyncio.CancelledError
            return found
        finally:
            self._active.difference_update(used)

    async def _record(
        self, claimed: Claimed, outcome: SendOutcome, token: ClaimToken, stopped: bool
    ) -> Next:
        self._count(outcome)
        serves = self._serves()
        if stopped or not self._working:  # the last act here: nothing more is claimed
            serves = msgspec.structs.replace(
                serves, channels=frozenset[str](), connections=frozenset[str]()
            )
        return await self._write(
            scripts.record_outcome, claimed, outcome, self._clock.jitter(), token, serves
        )

    def _count(self, outcome: SendOutcome) -> None:
        if isinstance(outcome, Sent):
            self.counts.sent += 1
        elif isinstance(outcome, Uncertain):
            self.counts.unknown += 1
        else:
            self.counts.refused += 1

    def _token(self) -> ClaimToken:
        token = mint.claim_token()
        self._active.add(token)
        return token

    def _deadline(self) -> int:
        """Read before a claim: its calls end well before its lease could."""
        return self._clock.monotonic_ms() + self._store.lease_ms * 2 // 3

    def _serves(self) -> Serves:
        profiles = {name: c.profile for name, c in self._router.channels.items()}

        def cut(channel: str, text: str) -> Sequence[str]:
            profile = profiles[channel]
            return self._cut(text, profile.text_max, profile.unit)

        return Serves(
            self._store.node,
            frozenset(profiles),
            self._router.connections,
            cut,
            {name: p.reconciles or p.repeat_window_ms > 0 for name, p in profiles.items()},
            self._rules,
            frozenset(self._active),
        )

    async def _send(self, claimed: Claimed, deadline: int) -> tuple[SendOutcome, bool]:
        """What came of one call, and whether this process was told to stop meanwhile."""
        left_ms = deadline - self._clock.monotonic_ms()
        if left_ms <= 0:
            return NotStarted("the claim became too old before the call"), False
        route = self._router.route_to(claimed.session_id, claimed.address)
        if route is None:
            return NotStarted("what would deliver it is not here"), False
        profile = route.profile
        if claimed.kind == "progress" and not profile.progress:
            return Sent(None, "not shown there"), False
        limit_ms = min(profile.send_timeout_ms, left_ms)
        outbound = InteractionOutbound(claimed.session_id, (InteractionItem(_part(claimed)),))
        call = asyncio.ensure_future(self._router.deliver(outbound, claimed.address))
        timer = asyncio.ensure_future(self._clock.sleep_ms(limit_ms))
        try:
            await asyncio.wait({call, timer}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return _outcome(call), False
            return Uncertain(f"no answer within {limit_ms / 1000:g} s"), False
        except asyncio.CancelledError:
            if call.done():
                return _outcome(call), True
            return Uncertain("the process was stopped during the call"), True
        finally:
            timer.cancel()
            call.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait({call}, timeout=1)

    # ---- doubt ----

    def _ask(self, delivery_id: DeliveryId) -> None:
        if not self._working or delivery_id in self._asking:
            return
        task = self._loop.create_task(self._reconcile(delivery_id), name=f"ask {delivery_id}")
        self._asking[delivery_id] = task
        task.add_done_callback(lambda _: self._asking.pop(delivery_id, None))

    async def _reconcile(self, delivery_id: DeliveryId) -> None:
        """Asks until a verdict says something, or until that is the operator's to decide."""
        try:
            while self._working:
                token = self._token()
                try:
                    found = await self._write(
                        scripts.claim_question, delivery_id, token, self._serves()
                    )
                    if isinstance(found, Question):
                        self.counts.asked += 1
                        verdict = await self._verdict(found)
                        found = await self._write(
                            scripts.record_verdict,
                            found,
                            verdict,
                            self._settle_ms(found),
                            self._clock.jitter(),
                            self._serves(),
                        )
                finally:
                    self._active.discard(token)
                if found is None or found.until is None:
                    return
                await self._clock.sleep_ms(max(1, found.until - self._clock.now_ms()))
        except StoreError as error:
            log.warning("delivery %s could not be settled now: %s", delivery_id, error)

    def _settle_ms(self, question: Question) -> int:
        profile = self._profile(question)
        return profile.settle_ms if profile is not None else 0

    def _profile(self, question: Question) -> Profile | None:
        address = question.claimed.address
        channel = self._router.channels.get(address.channel)
        return channel.profile if channel is not None else None

    async def _verdict(self, question: Question) -> Verdict:
        address = question.claimed.address
        channel = self._router.channels.get(address.channel)
        if channel is None or not isinstance(address, ToConversation):
            return CannotTell("the channel is not here")
        profile = channel.profile
        if not profile.reconciles:
            age_ms = self._clock.now_ms() - question.claimed.first_attempt_at
            if age_ms >= profile.repeat_window_ms // 2:
                return CannotTell("it is too late to repeat it safely")
        ask = asyncio.ensure_future(channel.reconcile(_part(question.claimed)))
        timer = asyncio.ensure_future(self._clock.sleep_ms(profile.send_timeout_ms))
        try:
            await asyncio.wait({ask, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not ask.done():
                return CannotTell("no answer in time")
            return ask.result()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("%s could not say: %s", channel.name, error)
            return CannotTell(f"{type(error).__name__}: {error}")
        finally:
            timer.cancel()
            ask.cancel()

    # ---- ending ----

    async def drain(self, budget_ms: int) -> None:
        """Claims nothing more; lets calls end within the budget, then leaves them in doubt."""
        self._working = False
        for subscription in self._subscriptions:
            subscription.close()
        for timer in (*self._timers, self._tick):
            if timer is not None:
                timer.cancel()
        tasks = {lane.task for lane in self._lanes.values() if lane.task is not None}
        for task in (*self._asking.values(), self._looking):
            if task is not None:
                task.cancel()
        for lane in self._lanes.values():
            lane.hint.set()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=budget_ms / 1000)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=5)
        if self._asking:
            await asyncio.wait(set(self._asking.values()), timeout=1)

    # ---- writing ----

    async def _write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """A write that is made again while the store says it may be."""
        for wait_ms in _WRITE_AGAIN_MS:
            try:
                return await self._store.write(script, *args, **kwargs)
            except StoreClosed:
                raise
            except (NotCommitted, CommitUncertain) as error:
                log.warning("not written, again in %d ms: %s", wait_ms, error)
                await self._clock.sleep_ms(wait_ms)
        return await self._store.write(script, *args, **kwargs)


def _part(claimed: Claimed) -> OutPart:
    address = claimed.address
    conversation = address.conversation if isinstance(address, ToConversation) else None
    return OutPart(
        session_id=claimed.session_id,
        delivery_id=claimed.delivery_id,
        index=claimed.index,
        count=claimed.count,
        kind=claimed.kind,
        conversation=conversation,
        key=f"{claimed.delivery_id}.{claimed.index}",
        text=claimed.text,
        media=claimed.media,
        reply_to=claimed.reply_to,
        attempt=claimed.attempt,
        first_attempt_at=claimed.first_attempt_at,
    )


def _outcome(call: asyncio.Future[SendOutcome]) -> SendOutcome:
    """What a route answered. Whatever it raised instead, the call may have begun."""
    if call.cancelled():
        return Uncertain("the call was cancelled")
    error = call.exception()
    if error is None:
        return call.result()
    log.warning("a route failed: %s: %s", type(error).__name__, error)
    return Uncertain(f"{type(error).__name__}: {error}")
