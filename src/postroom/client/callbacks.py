"""The user's own functions, called where what they raise breaks nothing else."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger("postroom.client")

Callback: TypeAlias = Callable[[T], R | Awaitable[R]]
"""A function, or one that is awaited."""


async def ask(callback: Callback[T, R], about: T, instead: R) -> R:
    """What the function answers; ``instead`` where it raises, which is logged."""
    try:
        answer = callback(about)
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception:
        log.exception("a callback raised")
        return instead
    return answer  # type: ignore[return-value]
