"""The world around a channel: its platform, played the same way whichever platform it is.

To put a channel through the suite of `test_channels`, write a `World` for it and name it there. A
world says by its attributes what the platform can do; what it cannot, the suite does not ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal, Self

import msgspec

from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.ids import DeliveryId, MessageId, SessionId
from postroom.ports.channel import Accepted, Channel, Inbound, OutPart, Profile
from postroom.testing.clock import ManualClock
from postroom.testing.loopback import Loopback, dm
from postroom.testing.platform import Event, Platform
from postroom.testing.platform_facts import (
    Accept,
    AskToWait,
    Behaviour,
    Hang,
    Lose,
    NoConnection,
    Refuse,
    Update,
)
from tests.support import bounded

WAIT_MS = 7_000

Treatment = Literal[
    "accept",
    "refuse",  # for good, for what the message is
    "refuse_for_now",  # without a time
    "wait",  # refused, and WAIT_MS to wait
    "no_connection",
    "lose_answer",  # taken, and the connection breaks
    "lose_message",  # not taken, and the connection breaks
    "hang",  # not taken, and no answer
]


class Desk:
    """A sink whose commits the test holds in its hand. It knows an event again, as the real one.

    ``faults`` are raised by the next commits, one each. ``order`` is every call that began, by key.
    """

    def __init__(self) -> None:
        self.taken: list[Inbound] = []
        self.kept: list[tuple[str, str, bytes]] = []
        self.cursors: dict[tuple[str, str], str] = {}
        self.order: list[str] = []
        self.duplicates: list[str] = []
        self.faults: list[Exception] = []
        self.at_once = 0
        self.at_once_max = 0
        self.arrived = asyncio.Event()
        self.may_commit = asyncio.Event()
        self.may_commit.set()

    async def __call__(self, inbound: Inbound) -> Accepted:
        await self._commit(inbound.dedupe)
        known = inbound.dedupe in [one.dedupe for one in self.taken]
        (self.duplicates.append(inbound.dedupe) if known else self.taken.append(inbound))
        if inbound.cursor is not None:
            self.cursors[inbound.channel, inbound.cursor[0]] = inbound.cursor[1]
        outcome = "duplicate" if known else "ignored" if inbound.automatic else "queued"
        return Accepted(outcome, SessionId("session_1"), MessageId("msg_1"))

    async def cursor(self, channel: str, name: str) -> str | None:
        return self.cursors.get((channel, name))

    async def quarantine(
        self,
        channel: str,
        dedupe: str,
        raw: bytes,
        error: str,
        cursor: tuple[str, str] | None = None,
    ) -> None:
        await self._commit(dedupe)
        assert error
        self.kept.append((channel, dedupe, raw))
        if cursor is not None:
            self.cursors[channel, cursor[0]] = cursor[1]

    async def _commit(self, dedupe: str) -> None:
        self.order.append(dedupe)
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        self.arrived.set()
        try:
            await asyncio.sleep(0)  # a commit takes its time: others may come meanwhile
            await self.may_commit.wait()
        finally:
            self.at_once -= 1
        if self.faults:
            raise self.faults.pop(0)

    @property
    def texts(self) -> list[str]:
        return [block.text for one in self.taken for block in one.content]  # type: ignore[union-attr]


class World(ABC):
    """One platform. ``clock`` is the channel's, and the platform's where it has one.

    ``in_order``: the platform gives one event after the other. ``echoes``: its events include the
    channel's own messages.
    """

    in_order = True
    echoes = False

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.desk = Desk()
        self._made: list[Channel] = []
        self._keys = 0

    @property
    def profile(self) -> Profile:
        return self.channel().profile

    @property
    def reads(self) -> bool:
        """Whether it can be asked about a part without sending it."""
        return self.profile.reconciles and not self.profile.repeat_window_ms

    @property
    def repeats(self) -> bool:
        """Whether a part in doubt may be repeated, within half of its window."""
        return self.profile.repeat_window_ms > 0

    # ---- the channel ----

    def channel(self) -> Channel:
        """A new object of the channel, over the same platform."""
        made = self.make()
        self._made.append(made)
        return made

    @abstractmethod
    def make(self) -> Channel: ...

    @property
    @abstractmethod
    def conversation(self) -> ConversationKey: ...

    @property
    @abstractmethod
    def foreign(self) -> ConversationKey:
        """A conversation of another platform."""

    def part(self, **changes: Any) -> OutPart:
        """A part like any other, with a key of its own."""
        self._keys += 1
        made = OutPart(
            session_id=SessionId("session_1"),
            delivery_id=DeliveryId(f"dlv_{self._keys}"),
            index=0,
            count=1,
            kind="text",
            conversation=self.conversation,
            key=f"dlv_{self._keys}.0",
            text=f"text {self._keys}",
        )
        return msgspec.structs.replace(made, **changes)

    def tried(self, part: OutPart) -> OutPart:
        """The part as it is asked about: tried for the first time now."""
        return msgspec.structs.replace(part, first_attempt_at=self.clock.now_ms())

    @contextlib.asynccontextmanager
    async def receiving(self, channel: Channel | None = None) -> AsyncGenerator[Desk]:
        """The channel runs, and is started again when it fails, at most a hundred times."""
        running = channel or self.channel()

        async def keep_running() -> None:
            for _ in range(100):
                try:
                    await running.run(self.desk)
                except Exception:
                    continue
                raise AssertionError("it returned, though there is something to receive")
            raise AssertionError("it failed a hundred times")

        task = asyncio.create_task(keep_running())
        try:
            yield self.desk
            if task.done():
                task.result()
        finally:
            task.cancel()
            await bounded(asyncio.wait([task]))

    # ---- the platform ----

    @abstractmethod
    async def treat(self, treatment: Treatment) -> None:
        """What happens to every call from now on."""

    @abstractmethod
    def seen(self) -> list[str]:
        """What the people saw, in order."""

    @abstractmethod
    def copies(self, key: str) -> int: ...

    @abstractmethod
    def calls(self) -> int:
        """How many calls reached the platform's side, or tried to."""

    @abstractmethod
    async def hanging(self) -> None:
        """Returns once a call hangs."""

    @abstractmethod
    async def nothing_left(self) -> None:
        """Returns once no call is under way; fails if one stays."""

    # ---- the people ----

    @abstractmethod
    def say(self, text: str, *, automatic: bool = False) -> str:
        """Somebody says something; the name of the event here."""

    @abstractmethod
    def garble(self) -> str:
        """An event that cannot be understood; its name here."""

    @abstractmethod
    def redeliver(
        self, event: str, *, relabelled: bool = False, concurrently: bool = False
    ) -> None: ...

    @abstractmethod
    def acked(self) -> list[str]:
        """The events acknowledged so far, in order, each as often as it was."""

    @abstractmethod
    async def until(self, true: Callable[[], bool]) -> None:
        """Returns once something is true of what the platform shows; bounded."""

    async def turns(self) -> None:
        """Lets whoever can go on do so."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._made:
            await channel.aclose()


_BEHAVIOURS: dict[Treatment, Behaviour] = {
    "accept": Accept(),
    "refuse": Refuse(),
    "refuse_for_now": Refuse(retryable=True),
    "wait": AskToWait(WAIT_MS),
    "no_connection": NoConnection(),
    "lose_answer": Lose(accepted=True),
    "lose_message": Lose(accepted=False),
    "hang": Hang(),
}


class LoopbackWorld(World):
    """Events are named by their ids, garbled ones by their labels."""

    def __init__(self, platform: Platform, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.platform = platform
        self.echoes = platform.echoes

    def make(self) -> Channel:
        return Loopback(self.platform, clock=self.clock)

    @property
    def conversation(self) -> ConversationKey:
        return dm("ann")

    @property
    def foreign(self) -> ConversationKey:
        return conversation_key("telegram", "dm", "1")

    async def treat(self, treatment: Treatment) -> None:
        self.platform.always(_BEHAVIOURS[treatment], verb="send")
        self.platform.always(_BEHAVIOURS[treatment], verb="reconcile")

    def seen(self) -> list[str]:
        return self.platform.seen()

    def copies(self, key: str) -> int:
        return self.platform.copies(key)

    def calls(self) -> int:
        return self.platform.count("send") + self.platform.count("reconcile")

    def _open(self) -> bool:
        return any(c.ended_at is None for c in self.platform.calls() if c.verb != "receive")

    async def hanging(self) -> None:
        await self.until(self._open)

    async def nothing_left(self) -> None:
        await self.until(lambda: not self._open())
        assert self.platform.under_way == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def say(self, text: str, *, automatic: bool = False) -> str:
        return self.platform.say("ann", "u1", text, name="Ann", automatic=automatic)

    def garble(self) -> str:
        return self.platform.garble()

    def redeliver(
        self, event: str, *, relabelled: bool = False, concurrently: bool = False
    ) -> None:
        self.platform.redeliver(event, relabelled=relabelled, concurrently=concurrently)

    def acked(self) -> list[str]:
        updates = {update.position: update for update in self.platform.updates}
        return [_name(updates[ack.position]) for ack in self.platform.acks]

    async def until(self, true: Callable[[], bool]) -> None:
        await bounded(self.platform.until(true))


def _name(update: Update) -> str:
    try:
        return msgspec.json.decode(update.body, type=Event).id
    except msgspec.DecodeError:
        return update.label
