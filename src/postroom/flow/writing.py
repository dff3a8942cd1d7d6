"""Writes that are made again: every script may run twice, so what was not written is tried again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

from postroom.errors import CommitUncertain, NotCommitted, StoreClosed
from postroom.ports.store import Store, Tx

log = logging.getLogger("postroom.writing")

P = ParamSpec("P")
R = TypeVar("R")

AGAIN_MS = (100, 400, 1600, 6400)


async def write_again(
    store: Store,
    again_ms: Iterable[int],
    pause: Callable[[int], Awaitable[bool]],
    script: Callable[Concatenate[Tx, P], R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """A script's answer, after as many of these pauses as the store needs.

    ``pause`` waits for so many milliseconds; False: there is no time for another try.

    Raises:
        StoreClosed: at once.
        NotCommitted, CommitUncertain: after the last pause, or where there is no time for another.
    """
    for wait_ms in again_ms:
        try:
            return await store.write(script, *args, **kwargs)
        except StoreClosed:
            raise
        except (NotCommitted, CommitUncertain) as error:
            log.warning("%s: %s; again in %d ms", getattr(script, "__name__", "?"), error, wait_ms)
            if not await pause(wait_ms):
                raise
    return await store.write(script, *args, **kwargs)
