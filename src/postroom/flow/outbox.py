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
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
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
from postroom.errors import (
    InputError,
    StoreClosed,
    StoreError,
    UnknownSession,
)
from postroom.flow.router import SessionInteractionRouter
from postroom.flow.writing import AGAIN_MS, write_again
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
_LOOK_AGAIN_S = 0.25
_RECORD_AGAIN_MS = 30_000
_LAST_WRITES_S = 5.0
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
        self._failures: dict[SessionId, int] = {}
        self._working = False
        self._over = asyncio.Event()
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
        """Hints every lane that has something, page by page, and asks about every doubt.

        Not at every commit of another process's: what comes within a moment is looked at together.
        """
        try:
            while True:
                self._look_again = False
                await self._look_at_all()
                if not self._look_again:
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)
        except StoreClosed:
            return
        except StoreError as error:
            log.warning("the outbox could not be looked at: %s", error)

    async def _look_at_all(self) -> None:
        after = 0
        while self._working:
            lanes = await self._store.read(scripts.lanes_to_serve, after, _LOOK_LIMIT)
            for after, session_id in lanes:  # noqa: B007 - where the next page begins
                self._hint(session_id)
            if len(lanes) < _LOOK_LIMIT:
                break
        doubt = (0, "")
        while self._working:
            doubts = await self._store.read(scripts.doubts, doubt, _LOOK_LIMIT)
            for doubt in doubts:
                self._ask(doubt[1])
            if len(doubts) < _LOOK_LIMIT:
                break

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
        except (StoreClosed, UnknownSession, asyncio.CancelledError):
            self._failures.pop(session_id, None)  # a session that was deleted has no lane
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
        if wait.left_ms is None:
            return False
        sleep = asyncio.ensure_future(self._clock.sleep_ms(wait.left_ms))
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
        token, asked_at = mint.claim_token(), self._clock.monotonic_ms()
        found: Next = await self._write(
            AGAIN_MS, scripts.claim_delivery, session_id, token, self._serves(token)
        )
        while isinstance(found, Claimed):
            self.counts.claimed += 1
            outcome = await self._send(found, asked_at)
            self._count(outcome)
            token, asked_at = mint.claim_token(), self._clock.monotonic_ms()
            # What a platform said is known to nobody else: it is not given up while it can be kept.
            found = await self._write(
                itertools.chain(AGAIN_MS, itertools.repeat(_RECORD_AGAIN_MS)),
                scripts.record_outcome,
                found,
                outcome,
                self._clock.jitter(),
                token,
                self._serves(token, found.fence.token),
            )
        return found

    def _count(self, outcome: SendOutcome) -> None:
        if isinstance(outcome, Sent):
            self.counts.sent += 1
        elif isinstance(outcome, Uncertain):
            self.counts.unknown += 1
        else:
            self.counts.refused += 1

    def _serves(self, *active: ClaimToken) -> Serves:
        """Nothing while it ends: then the last outcomes are recorded and nothing more is claimed."""
        profiles: dict[str, Profile] = {}
        if self._working:
            profiles = {name: c.profile for name, c in self._router.channels.items()}

        def cut(channel: str, text: str) -> Sequence[str]:
            profile = profiles[channel]
            return self._cut(text, profile.text_max, profile.unit)

        return Serves(
            self._store.node,
            frozenset(profiles),
            self._router.connections if self._working else frozenset(),
            cut,
            {name: p.reconciles or p.repeat_window_ms > 0 for name, p in profiles.items()},
            self._rules,
            frozenset(active),
        )

    async def _send(self, claimed: Claimed, asked_at: int) -> SendOutcome:
        """What came of one call. It ends well before the claim, asked for at ``asked_at``, could."""
        left_ms = asked_at + claimed.lease_left_ms * 2 // 3 - self._clock.monotonic_ms()
        if left_ms <= 0:
            return NotStarted("the claim became too old before the call")
        if self._over.is_set():
            return NotStarted("the process is stopping")
        route = self._router.route_to(claimed.session_id, claimed.address)
        if route is None:
            return NotStarted("what would deliver it is not here")
        profile = route.profile
        if claimed.kind == "progress" and not profile.progress:
            return Sent(None, "not shown there")
        outbound = InteractionOutbound(claimed.session_id, (InteractionItem(_part(claimed)),))
        call = self._loop.create_task(self._router.deliver(outbound, claimed.address))
        try:
            await asyncio.sleep(0)  # what is answered in this process mostly is by now
            if not call.done():
                await self._end_of(call, min(profile.send_timeout_ms, left_ms))
            if call.done():
                return _outcome(call)
            if self._over.is_set():
                return Uncertain("the process was stopped during the call")
            return Uncertain("it did not answer in time")
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call}, timeout=1)
                if call.done() and not call.cancelled():
                    call.exception()  # too late to be believed, and not to be warned of

    async def _end_of(self, call: asyncio.Task[SendOutcome], limit_ms: int) -> None:
        """Returns when the call has ended, after the limit, or when this process has no more time."""
        timer = self._loop.create_task(_sleep_ms(self._clock, limit_ms))
        over = self._loop.create_task(self._over.wait())
        try:
            await asyncio.wait({call, timer, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            over.cancel()

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
                token = mint.claim_token()
                found = await self._write(
                    AGAIN_MS,
                    scripts.claim_question,
                    delivery_id,
                    token,
                    self._serves(token),
                )
                if isinstance(found, Question):
                    self.counts.asked += 1
                    found = await self._write(
                        AGAIN_MS,
                        scripts.record_verdict,
                        found,
                        await self._verdict(found),
                        self._settle_ms(found),
                        self._clock.jitter(),
                        self._serves(token),
                    )
                if found is None or found.left_ms is None:
                    return
                await self._clock.sleep_ms(found.left_ms)
        except (StoreClosed, InputError, UnknownSession):
            return  # deleted meanwhile, or the process ends
        except StoreError as error:
            log.warning("delivery %s could not be settled now: %s", delivery_id, error)
        except Exception:
            log.exception("delivery %s could not be settled now", delivery_id)

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
        for task in (*self._asking.values(), self._looking):
            if task is not None:
                task.cancel()
        lanes = {lane.task for lane in self._lanes.values() if lane.task is not None}
        for lane in self._lanes.values():
            lane.hint.set()
        if lanes:
            _, left = await asyncio.wait(lanes, timeout=budget_ms / 1000)
            self._over.set()
            if left:  # their calls are cut off, and what is known of them is still written
                _, left = await asyncio.wait(left, timeout=_LAST_WRITES_S)
            for task in left:
                task.cancel()
        self._over.set()
        if self._asking:
            await asyncio.wait(set(self._asking.values()), timeout=1)

    # ---- writing ----

    async def _write(
        self,
        again_ms: Iterable[int],
        script: Callable[Concatenate[Tx, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """A write that is made again, after these pauses, while the store says it may be."""
        return await write_again(self._store, again_ms, self._pause, script, *args, **kwargs)

    async def _pause(self, wait_ms: int) -> bool:
        """Sleeps, but not beyond the end of this process; False: that has come."""
        if self._over.is_set():
            return False
        sleep = self._loop.create_task(_sleep_ms(self._clock, wait_ms))
        over = self._loop.create_task(self._over.wait())
        try:
            await asyncio.wait({sleep, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            over.cancel()
        return True


async def _sleep_ms(clock: Clock, ms: int) -> None:
    await clock.sleep_ms(ms)


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


def _outcome(call: asyncio.Task[SendOutcome]) -> SendOutcome:
    """What a route answered. Whatever it raised instead, the call may have begun."""
    if call.cancelled():
        return Uncertain("the call was cancelled")
    error = call.exception()
    if error is None:
        return call.result()
    log.warning("a route failed: %s: %s", type(error).__name__, error)
    return Uncertain(f"{type(error).__name__}: {error}")
