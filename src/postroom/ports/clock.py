"""Time and waiting, injected: tests drive it, the system's clock is the default."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol


class Clock(Protocol):
    """``now_ms`` is Unix time in milliseconds; ``monotonic_ms`` only ever grows."""

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...

    async def sleep_ms(self, ms: float) -> None:
        """Returns when ``ms`` have passed on this clock."""
        ...

    def jitter(self) -> float:
        """A number from 0 up to 1, to spread retries."""
        ...


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Counts while the machine sleeps too, so that a lease is not overslept."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000

    async def sleep_ms(self, ms: float) -> None:
        await asyncio.sleep(ms / 1000)

    def jitter(self) -> float:
        return random.random()
