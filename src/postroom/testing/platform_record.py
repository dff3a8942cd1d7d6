"""What a fake platform knows: its facts, folded as they are written, and who waits for news of them.

Here nothing decides what happens; that is `postroom.testing.platform`. The record is in memory; one
in a file overrides how it is held and how a fact is told (`postroom.testing.file_platform`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import assert_never

import msgspec

from postroom.ports.channel import Profile
from postroom.testing import platform_facts as facts
from postroom.testing.platform_facts import (
    Ack,
    Behaviour,
    Call,
    Fact,
    Message,
    Moment,
    Typed,
    Update,
    Verb,
)


class Record:
    """Facts are read and told while it is held, so that what is decided is decided on all of them."""

    _poll_s: float | None = None  # None: nobody else writes

    def __init__(self, profile: Profile, *, echoes: bool, pulls: bool) -> None:
        self.profile = profile
        self.echoes = echoes
        self.pulls = pulls
        self._messages: list[Message] = []
        self._calls: dict[tuple[Verb, int], Call] = {}
        self._counts: Counter[Verb] = Counter()
        self._queued: dict[tuple[Verb, str | None], deque[Behaviour]] = {}
        self._standing: dict[tuple[Verb, str | None], Behaviour] = {}
        self._deadly: set[tuple[Verb, int, Moment]] = set()
        self._under_way: list[facts.UnderWay] = []
        self._releases = 0
        self._updates: list[Update] = []
        self._labels: set[str] = set()
        self._acks: list[Ack] = []
        self._acked: set[int] = set()
        self._epoch = 0
        self._resumed: list[str | None] = []
        self._typed: list[Typed] = []
        self._waiters: list[asyncio.Future[None]] = []

    async def until(self, true: Callable[[], bool]) -> None:
        """Returns once something is true of the platform. It looks again when a fact was written."""
        while not true():
            # Nothing awaits between looking and waiting, so no news of this process is missed.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await asyncio.wait([waiter], timeout=self._poll_s)
            finally:
                self._waiters.remove(waiter)
                waiter.cancel()

    @contextlib.contextmanager
    def _held(self) -> Generator[None]:
        """While it is held nobody else writes, and all that was written is known. Not to be nested."""
        self._arrivals()
        yield

    def _arrivals(self) -> None:
        """What has come about by the time alone; it is held."""

    def _note(self, fact: Fact) -> None:
        with self._held():
            self._tell(fact)

    def _tell(self, fact: Fact) -> None:
        """Writes a fact down; it is held."""
        self._fold(fact)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _fold(self, fact: Fact) -> None:
        match fact:
            case facts.Founded(profile, echoes, pulls):
                self.profile, self.echoes, self.pulls = profile, echoes, pulls
            case facts.Scripted(verb, behaviours, conversation, standing):
                if standing:
                    self._standing[verb, conversation] = behaviours[-1]
                else:
                    queue = self._queued.setdefault((verb, conversation), deque())
                    queue.extend(behaviours)
            case facts.Deadly(verb, number, moment):
                self._deadly.add((verb, number, moment))
            case facts.Began(call):
                self._counts[call.verb] = call.number
                self._calls[call.verb, call.number] = call
                queue = self._queue_for(call.verb, call.conversation)
                if queue is not None:
                    queue.popleft()
            case facts.Ended(verb, number, answer, at):
                self._calls[verb, number] = msgspec.structs.replace(
                    self._calls[verb, number], answer=answer, ended_at=at
                )
            case facts.Taken(message):
                self._messages.append(message)
            case facts.UnderWay():
                self._under_way.append(fact)
            case facts.Arrived(key):
                self._under_way.remove(next(u for u in self._under_way if u.message.key == key))
            case facts.Released():
                self._releases += 1
            case facts.Came(update):
                self._updates.append(update)
                self._labels.add(update.label)
            case facts.Reordered(places):
                moved = dict(places)
                self._updates = sorted(
                    (
                        msgspec.structs.replace(u, position=moved.get(u.position, u.position))
                        for u in self._updates
                    ),
                    key=lambda update: update.position,
                )
            case facts.Acknowledged(ack):
                self._acks.append(ack)
                self._acked.add(ack.position)
            case facts.Forgot():
                self._acked.clear()
                self._epoch += 1
            case facts.Resumed(cursor):
                self._resumed.append(cursor)
            case Typed():
                self._typed.append(fact)
            case _:
                assert_never(fact)

    def _queue_for(self, verb: Verb, conversation: str) -> deque[Behaviour] | None:
        """The queue that the next such call takes from; None: nothing is queued for it."""
        return self._queued.get((verb, conversation)) or self._queued.get((verb, None)) or None
