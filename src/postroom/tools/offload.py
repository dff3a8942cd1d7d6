"""Blocking work on a thread of its own, awaited from the event loop.

Not a pool: a thread a call. A tool that never returns would hold a pool's place for ever, and the
interpreter would wait for it at exit; a daemon thread does neither. Cancelling the await abandons
the thread: it runs on to its end and its answer is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from postroom.errors import ToolFailure

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, name: str) -> T:
    """Runs ``work`` in a thread with this task's context variables; its result or its exception.

    Raises:
        ToolFailure: the work tried to end the program (``SystemExit`` and its like).
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T) -> None:
        if not answer.done():
            answer.set_result(result)

    def fail(error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)

    def run() -> None:
        # The loop may have closed meanwhile: then nobody waits for the answer.
        with contextlib.suppress(RuntimeError):
            try:
                result = context.run(work)
            except BaseException as error:
                loop.call_soon_threadsafe(fail, as_failure(error))
            else:
                loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name=f"tool-{name}", daemon=True).start()
    return await answer


def as_failure(error: BaseException) -> Exception:
    """What an exception becomes on its way through a future, which takes only ordinary ones."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = ToolFailure(f"the tool raised {type(error).__name__}, which would end the program")
    failure.__cause__ = error
    return failure
