"""A clock that moves when it is told to."""

from __future__ import annotations

import asyncio


class ManualClock:
    """Starts at ``now_ms`` and stands still; `advance` moves it and wakes who slept so long."""

    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now = now_ms
        self._start = now_ms
        self._sleepers: list[tuple[int, asyncio.Future[None]]] = []
        self._arrivals = asyncio.Event()

    def now_ms(self) -> int:
        return self._now

    def monotonic_ms(self) -> int:
        return self._now - self._start

    def jitter(self) -> float:
        return 1.0

    async def sleep_ms(self, ms: float) -> None:
        if ms <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (self._now + int(ms), future)
        self._sleepers.append(entry)
        self._arrivals.set()
        try:
            await future
        finally:
            if entry in self._sleepers:
                self._sleepers.remove(entry)

    def advance(self, ms: int) -> None:
        self._now += ms
        for entry in sorted(self._sleepers, key=lambda s: s[0]):
            due, future = entry
            if due <= self._now:
                self._sleepers.remove(entry)  # it sleeps no more, though it has not run yet
                if not future.done():
                    future.set_result(None)

    async def sleeping(self) -> int:
        """Waits until somebody sleeps; how long until the first of them is due, in milliseconds."""
        while not self._sleepers:
            self._arrivals.clear()
            await self._arrivals.wait()
        return min(due for due, _ in self._sleepers) - self._now
