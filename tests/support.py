"""What many tests share. Small on purpose: a helper of one folder lives in that folder.

Import it as ``from tests.support import bounded``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent


async def bounded(awaitable: Awaitable[T], seconds: float = 10) -> T:
    """What `awaitable` gives; fails the test if that takes longer than ``seconds`` of real time.

    A bound of ours is told apart from a `TimeoutError` that comes out of the awaited thing
    itself: that one passes through as it is.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"still waiting after {seconds} s") from None
