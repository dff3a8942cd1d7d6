"""Sees to it that every session with something to do is driven, here or elsewhere, by one.

It hears of ready work from the store and starts a `Driver` for it; it looks again, bounded, for
claims whose owners died without a word. At most one driver a session runs in a process; what a
driver that failed had claimed is remembered as abandoned, and its successor takes it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from postroom import mint
from postroom.domain.event import Event, InboxCancelled, InboxReplaced, TurnCancel
from postroom.domain.ids import ClaimToken, SessionId
from postroom.errors import StoreClosed, StoreError
from postroom.flow.core import Core
from postroom.flow.turn import Driver, Parts
from postroom.scripts.drive import Drive, Offer, drives_to_claim
from postroom.scripts.session import DRIVE

log = logging.getLogger("postroom.supervisor")

_LOOK_LIMIT = 500
_CANCELS_KEPT = 10_000
_EDITS = (InboxCancelled.TYPE, InboxReplaced.TYPE)
_LOOK_EVERY_LONGEST_S = 15.0
_AGAIN_S = (0.1, 1.0, 5.0, 30.0)


class Supervisor:
    """``only``: drive just this one session (the one-shot command); None: all that are ready."""

    def __init__(self, parts: Parts, *, only: SessionId | None = None) -> None:
        self._parts = parts
        self._store = parts.store
        self._only = only
        self._drivers: dict[SessionId, tuple[asyncio.Task[None], Driver]] = {}
        self._again: dict[SessionId, tuple[Drive | None, ClaimToken | None]] = {}
        self._failures: dict[SessionId, int] = {}
        self._abandoned: dict[SessionId, set[ClaimToken]] = {}
        self._claiming = False
        self._looking: asyncio.Task[None] | None = None
        self._look_once_more = False
        self._timer: asyncio.TimerHandle | None = None
        self._delayed: set[asyncio.TimerHandle] = set()
        self._cancels: dict[SessionId, int] = {}
        self._stragglers: set[asyncio.Task[None]] = set()
        self._offers: set[ClaimToken] = set()
        self._offers_settled = asyncio.Event()
        self._subscriptions = [
            self._store.subscribe(None, self._on_events),
            self._store.on_work(self._on_work),
            self._store.on_lease_lost(self._on_lease_lost),
        ]
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Looks for work now, and from now on whenever the store says there may be some.

        Before that, and in a process that never calls it, nothing is claimed.
        """
        self._claiming = True
        self._look()
        self._tick()

    def drive(
        self,
        session_id: SessionId,
        claimed: Drive | None = None,
        *,
        token: ClaimToken | None = None,
    ) -> None:
        """Starts a driver for a session unless one runs; it finds out whether there is work.

        ``claimed`` is a claim made already; ``token`` that of one which may have been made.
        """
        if not self._claiming and claimed is None:
            return
        if session_id in self._drivers:
            # A claim that was made, or may have been, is not forgotten for a hint.
            kept, unsure = self._again.get(session_id, (None, None))
            if kept is None and token is not None:
                self._again[session_id] = (claimed, token)
                token = unsure
            else:
                self._again.setdefault(session_id, (None, None))
            if token is not None:
                self._abandoned.setdefault(session_id, set()).add(token)
            return
        abandoned = tuple(self._abandoned.get(session_id, ()))
        driver = Driver(self._parts, session_id, token=token, abandoned=abandoned)
        driver.cancel_turn(self._cancels.pop(session_id, 0))
        if not self._claiming:
            driver.drain()
        task = self._loop.create_task(driver.run(claimed), name=f"drive {session_id}")
        self._drivers[session_id] = (task, driver)
        task.add_done_callback(lambda done: self._ended(session_id, done))

    def offer(self, session_id: SessionId, core: Core) -> Offer | None:
        """A claim for the transaction that queues a message; None while nothing is claimed."""
        if not self._claiming or core.policy is not None or self._only not in (None, session_id):
            return None
        token = mint.claim_token()
        self._offers.add(token)
        return Offer(
            self._store.node,
            token,
            self._parts.limits.recovery_attempts_max,
            core.header(core.models[0]),
        )

    def settled(self, token: ClaimToken) -> None:
        """An offer's transaction is over: a claim made in it is handed in at once, or never."""
        self._offers.discard(token)
        if not self._offers:
            self._offers_settled.set()

    def stop_claiming(self) -> None:
        """From now on nothing new is claimed; what runs goes on."""
        self._claiming = False

    def finish_turns(self) -> None:
        """Every driver gives its drive back after the turn it is in."""
        for _, driver in self._drivers.values():
            driver.drain()

    @property
    def driving(self) -> bool:
        """Whether a driver runs in this process."""
        return bool(self._drivers)

    async def wait_drivers(self, timeout_s: float) -> None:
        """Returns when no driver runs, or when the time is over."""
        tasks = {task for task, _ in self._drivers.values()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def drain(self, budget_ms: int) -> None:
        """Ends within the budget: no new claims; open turns finish, or are left open.

        A turn left open is closed as interrupted by the session's next owner, who goes on with it.
        """
        self._claiming = False
        for subscription in self._subscriptions:
            subscription.close()
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._delayed:
            handle.cancel()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        grace_s = self._parts.limits.tool_grace_ms / 1000
        if self._offers:  # what is claimed by one of them must be given back, too
            self._offers_settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._offers_settled.wait(), grace_s)
        self.finish_turns()
        await self.wait_drivers(budget_ms / 1000)
        while self._drivers:  # one that has ended may leave a claim to the next
            tasks = {task for task, _ in self._drivers.values()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)
        if self._stragglers:
            await asyncio.wait(self._stragglers, timeout=grace_s)

    # ---- hearing of work ----

    def _on_work(self, kind: str, key: str) -> None:
        if key == "*":
            self._look()
        elif kind == DRIVE and self._only in (None, key):
            self.drive(SessionId(key))

    def _on_events(self, events: Sequence[Event]) -> None:
        """Tells drivers of cancels. One that comes before its driver has started is kept for it."""
        for event in events:
            if event.type in _EDITS:
                driven = self._drivers.get(event.session_id)
                if driven is not None:
                    driven[1].inbox_changed()
            if event.type == TurnCancel.TYPE:
                data = event.data
                assert isinstance(data, TurnCancel)
                driven = self._drivers.get(event.session_id)
                if driven is not None:
                    driven[1].cancel_turn(data.turn)
                if driven is None or event.session_id in self._again:
                    self._cancels[event.session_id] = data.turn
                    while len(self._cancels) > _CANCELS_KEPT:
                        del self._cancels[next(iter(self._cancels))]

    def _on_lease_lost(self) -> None:
        """What a lost lease leaves running is stopped, not finished."""
        for task, _ in self._drivers.values():
            task.cancel()

    def _tick(self) -> None:
        every = min(self._store.lease_ms / 6000, _LOOK_EVERY_LONGEST_S)
        self._timer = self._loop.call_later(every, self._tick)
        self._look()

    def _look(self) -> None:
        if not self._claiming:
            return
        if self._looking is not None and not self._looking.done():
            self._look_once_more = True
            return
        self._looking = self._loop.create_task(self._look_now(), name="look for work")

    async def _look_now(self) -> None:
        while True:
            self._look_once_more = False
            try:
                found = await self._store.read(drives_to_claim, self._store.node, _LOOK_LIMIT)
            except StoreClosed:
                return
            except StoreError as error:
                log.warning("looking for work failed: %s", error)
                return
            for session_id in found:
                if self._only in (None, session_id):
                    self.drive(session_id)
            if len(found) < _LOOK_LIMIT and not self._look_once_more:
                return
            await asyncio.wait(
                {t for t, _ in self._drivers.values()} or {self._loop.create_task(_nothing())},
                return_when=asyncio.FIRST_COMPLETED,
            )

    def _ended(self, session_id: SessionId, task: asyncio.Task[None]) -> None:
        _, driver = self._drivers.pop(session_id)
        for straggler in driver.stragglers:  # tools that did not stop: they are not forgotten
            self._stragglers.add(straggler)
            straggler.add_done_callback(self._stragglers.discard)
        again = self._again.pop(session_id, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._abandoned.setdefault(session_id, set()).add(driver.token)
        elif driver.done:
            self._abandoned.pop(session_id, None)
        if error is None:
            self._failures.pop(session_id, None)
        elif not isinstance(error, StoreClosed):
            failures = self._failures.get(session_id, 0)
            self._failures[session_id] = failures + 1
            wait = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
            log.error("driving %s failed; again in %g s", session_id, wait, exc_info=error)
            if self._claiming and again is None:
                self._later(wait, session_id)
        if again is not None:
            self.drive(session_id, again[0], token=again[1])

    def _later(self, wait_s: float, session_id: SessionId) -> None:
        def fire() -> None:
            self._delayed.discard(handle)
            self.drive(session_id)

        handle = self._loop.call_later(wait_s, fire)
        self._delayed.add(handle)


async def _nothing() -> None:
    pass
