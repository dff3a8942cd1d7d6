"""A store with something between it and its users: faults on demand.

`StoreWrapper` passes everything on. `FaultyStore` stands before any engine and refuses a write,
or lets it commit and loses the answer: the two faults that a caller of `Store.write` must tell
apart. What an engine itself does with a full disk or a broken file is tested on the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from postroom.domain.ids import NodeId, SessionId
from postroom.errors import CommitUncertain, NotCommitted, PostroomError, StoreClosed
from postroom.ports.store import EventListener, Store, Subscription, Tx, WorkListener

P = ParamSpec("P")
R = TypeVar("R")


class StoreWrapper:
    """A `Store` over another one.

    ``closes`` False: closing it leaves the other one open. Through this one nothing more goes.
    """

    def __init__(self, store: Store, *, closes: bool = True) -> None:
        self.inner = store
        self._closes = closes
        self._closed = False

    @property
    def node(self) -> NodeId:
        return self.inner.node

    @property
    def lease_ms(self) -> int:
        return self.inner.lease_ms

    @property
    def can_notify(self) -> bool:
        return self.inner.can_notify

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._check_open()
        return await self.inner.write(script, *args, **kwargs)

    async def read(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        self._check_open()
        return await self.inner.read(script, *args, **kwargs)

    def subscribe(self, session_id: SessionId | None, listener: EventListener) -> Subscription:
        return self.inner.subscribe(session_id, listener)

    def on_work(self, listener: WorkListener) -> Subscription:
        return self.inner.on_work(listener)

    def on_lease_lost(self, listener: Callable[[], None]) -> Subscription:
        return self.inner.on_lease_lost(listener)

    async def aclose(self) -> None:
        self._closed = True
        if self._closes:
            await self.inner.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")


class _Fault:
    def __init__(self, script: str | None, times: int, error: PostroomError, written: bool) -> None:
        self.script = script
        self.times = times
        self.error = error
        self.written = written


class FaultyStore(StoreWrapper):
    """Fails writes that the test names. ``writes`` lists the scripts that were let through.

    A script is named as the function is (``"finish_turn"``); None is whichever comes next.
    """

    def __init__(self, store: Store, *, closes: bool = True) -> None:
        super().__init__(store, closes=closes)
        self.writes: list[str] = []
        self._faults: list[_Fault] = []
        self._writes_max: int | None = None
        self._under_way = 0
        self._news = asyncio.Event()

    def refuse(
        self, script: str | None = None, *, times: int = 1, error: NotCommitted | None = None
    ) -> None:
        """The next writes fail before anything is written."""
        self._faults.append(
            _Fault(script, times, error or NotCommitted("refused by the test"), False)
        )

    def lose(self, script: str | None = None, *, times: int = 1, written: bool = True) -> None:
        """The next writes end in doubt: committed, or (``written`` False) not."""
        error = CommitUncertain("the answer was lost by the test")
        self._faults.append(_Fault(script, times, error, written))

    def clear(self) -> None:
        """Forgets the faults that have not come yet."""
        self._faults.clear()

    def stop_after(self, writes: int) -> None:
        """After so many commits from now on nothing is written any more, as if killed there."""
        self._writes_max = len(self.writes) + writes
        self._news.set()

    async def stopped(self) -> None:
        """Returns when `stop_after` has come true and the last commit is made."""
        while self._writes_max is None or len(self.writes) < self._writes_max or self._under_way:
            self._news.clear()
            await self._news.wait()

    async def write(
        self, script: Callable[Concatenate[Tx, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        name = name_of(script)
        if self._writes_max is not None and len(self.writes) >= self._writes_max:
            raise StoreClosed("stopped by the test")
        fault = self._take(name)
        if fault is not None and not fault.written:
            raise fault.error
        self.writes.append(name)
        self._under_way += 1
        try:
            answer = await super().write(script, *args, **kwargs)
        finally:
            self._under_way -= 1
            self._news.set()
        if fault is not None:
            raise fault.error
        return answer

    def _take(self, name: str) -> _Fault | None:
        for fault in self._faults:
            if fault.script in (None, name):
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
                return fault
        return None


def name_of(script: Callable[..., Any]) -> str:
    """What a script is called in faults and schedules."""
    return script.__name__
