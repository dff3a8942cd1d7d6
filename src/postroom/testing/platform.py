"""A fake platform: people on one side, a channel on the other, and a script for what goes wrong.

It does to each call what it was told to (`script`, `always`), takes the message otherwise, and keeps
a log of all of it. What it can do is its `Profile`: with ``reconciles`` it can be asked for a part's
key; within ``repeat_window_ms`` it takes a repeat of a key for the same message; longer texts than
``text_max`` are refused.

`Platform` lives in this process. `postroom.testing.file_platform.FilePlatform` is the same over a
file, so that it outlives the processes that use it and can kill them (`die_at`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import assert_never

import msgspec

from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    RetryAfter,
    Sent,
    Uncertain,
    Verdict,
)
from postroom.ports.channel import Profile, Unit
from postroom.ports.clock import Clock, SystemClock
from postroom.testing import platform_facts as facts
from postroom.testing.platform_facts import (
    Accept,
    Ack,
    AskToWait,
    Behaviour,
    Call,
    Hang,
    Late,
    Lose,
    MarkupRefused,
    Message,
    Moment,
    NoConnection,
    Refuse,
    RefuseMarkup,
    Reply,
    Typed,
    Update,
    Verb,
)
from postroom.testing.platform_record import Record

OWN_ID = "postroom"
_LOST = "the connection broke before an answer"


class Person(msgspec.Struct, frozen=True):
    id: str
    name: str | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the body of an update holds, as JSON. ``own``: it is the channel's own message come back.

    ``replaces`` and ``deletes`` are ids of events.
    """

    id: str
    conversation: str
    sender: Person
    text: str = ""
    own: bool = False
    automatic: bool = False
    group: bool = False
    replaces: str | None = None
    deletes: str | None = None


class Platform(Record):
    """See the module.

    ``echoes``: what it takes comes back to the channel as an event of the channel's own. ``pulls``:
    the channel is given what comes after its cursor; else, what it did not acknowledge. The clock
    (None: the system's) times the log, the repeat window and messages under way.

    ``on_moment`` (verb, number of the call, moment) is called before a call leaves, when it has
    been accepted (of an update: when the sink has returned), and when it is answered (an update:
    acknowledged), each before anybody hears of it.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        clock: Clock | None = None,
        echoes: bool = False,
        pulls: bool = False,
    ) -> None:
        super().__init__(profile or Profile(), echoes=echoes, pulls=pulls)
        self.on_moment: Callable[[Verb, int, Moment], None] | None = None
        self._clock: Clock = clock or SystemClock()

    # ---- the script ----

    def script(
        self, *behaviours: Behaviour, verb: Verb = "send", conversation: str | None = None
    ) -> None:
        """The next calls are treated so, one each. ``conversation`` None: whichever they are for."""
        self._note(facts.Scripted(verb, behaviours, conversation, standing=False))

    def always(
        self, behaviour: Behaviour, *, verb: Verb = "send", conversation: str | None = None
    ) -> None:
        """From now on calls are treated so where nothing is queued; `Accept` ends it."""
        self._note(facts.Scripted(verb, (behaviour,), conversation, standing=True))

    def die_at(self, verb: Verb, number: int, moment: Moment) -> None:
        """The process that makes this call kills itself then, with SIGKILL. See `count`."""
        self._note(facts.Deadly(verb, number, moment))

    def release(self) -> None:
        """Lets all calls go on that hang now."""
        self._note(facts.Released())

    def arrive(self) -> None:
        """All messages that are under way arrive, in the order they left."""
        with self._held():
            self._let_in(lambda _: True)

    # ---- the people ----

    def say(
        self,
        conversation: str,
        sender: str,
        text: str,
        *,
        name: str | None = None,
        automatic: bool = False,
        group: bool = False,
        replaces: str | None = None,
    ) -> str:
        """Somebody says something, or edits the event ``replaces``; the new event's id."""
        with self._held():
            return self._come(
                conversation,
                Person(sender, name),
                text=text,
                automatic=automatic,
                group=group,
                replaces=replaces,
            )

    def delete(self, event: str) -> str:
        """Who said it deletes it; the id of the deletion."""
        with self._held():
            said = _read(self._of(event))
            return self._come(said.conversation, said.sender, deletes=event)

    def garble(self, body: str = '{"id": "e') -> str:
        """An event comes that cannot be understood; the label of its update."""
        with self._held():
            return self._push(body)

    def redeliver(
        self, event: str, *, relabelled: bool = False, concurrently: bool = False
    ) -> None:
        """The event (or the update of this label) comes again.

        ``relabelled``: in an envelope with another label. ``concurrently``: together with the
        update that comes before it, which is the one repeated if nothing else was said since.
        """
        with self._held():
            update = self._of(event)
            self._push(update.body, None if relabelled else update.label, beside=concurrently)

    def reorder(self, *events: str) -> None:
        """These, not delivered yet, come in this order, in the places that they had together."""
        with self._held():
            found = [self._of(event).position for event in events]
            places = tuple(zip(found, sorted(found), strict=True))
            self._tell(facts.Reordered(places))

    def forget_cursor(self) -> None:
        """Forgets how far the channel has come: everything there ever was comes again."""
        self._note(facts.Forgot())

    # ---- what is to be seen ----

    def messages(self, conversation: str | None = None) -> list[Message]:
        """What was taken, in order. None: in all conversations."""
        with self._held():
            return [m for m in self._messages if conversation in (None, m.conversation)]

    def seen(self, conversation: str | None = None) -> list[str]:
        """What the people there saw, in order."""
        return [message.text for message in self.messages(conversation)]

    def copies(self, key: str) -> int:
        """How many messages there are with this key."""
        return sum(message.key == key for message in self.messages())

    def calls(self, verb: Verb | None = None) -> list[Call]:
        """Every call that was begun, in order, those also that died before anything left."""
        with self._held():
            return [call for call in self._calls.values() if verb in (None, call.verb)]

    def count(self, verb: Verb) -> int:
        """How many calls of this verb were begun so far."""
        return len(self.calls(verb))

    @property
    def under_way(self) -> list[Message]:
        """What may still arrive."""
        with self._held():
            return [each.message for each in self._under_way]

    @property
    def updates(self) -> list[Update]:
        """All there were, in the order of delivery, acknowledged or not."""
        with self._held():
            return list(self._updates)

    @property
    def acks(self) -> list[Ack]:
        """All there were, in order, also those forgotten since."""
        with self._held():
            return list(self._acks)

    @property
    def unacknowledged(self) -> list[Update]:
        with self._held():
            return [update for update in self._updates if update.position not in self._acked]

    @property
    def typed(self) -> list[Typed]:
        with self._held():
            return list(self._typed)

    @property
    def resumed(self) -> list[str | None]:
        """The cursors that channels came with, in order."""
        with self._held():
            return list(self._resumed)

    # ---- the channel's side ----

    async def post(self, message: Message, *, verb: Verb = "send") -> Reply:
        """Gives it a message, whose reference and time are the platform's to set.

        Raises:
            ConnectionResetError: it was told to `Lose` the call that way.
        """
        call = self._begin(verb, message.key, message.conversation)
        try:
            answer = await self._treat(call, message)
        except BaseException:
            self._end(call, None)
            raise
        self._end(call, answer)
        return answer

    async def look_up(self, key: str, conversation: str) -> Verdict:
        """Whether a message with this key was taken: what it can tell, and what it was told to.

        Raises:
            ConnectionResetError: it was told to `Lose` the call that way.
        """
        call = self._begin("reconcile", key, conversation)
        try:
            answer = await self._looked_up(call)
        except BaseException:
            self._end(call, None)
            raise
        self._end(call, answer)
        return answer

    def resume(self, cursor: str | None) -> int:
        """A channel comes with its cursor; the position after which it is given updates."""
        with self._held():
            self._tell(facts.Resumed(cursor))
            if not self.pulls or cursor is None:
                return 0
            epoch, _, position = cursor.partition(".")
            return int(position) if int(epoch) == self._epoch else 0

    def cursor_of(self, update: Update) -> str:
        with self._held():
            return f"{self._epoch}.{update.position}"

    def waiting(self, after: int) -> list[Update]:
        """What is to be handed over at once next: one update, with what comes beside it, or none."""
        with self._held():
            left = (
                [update for update in self._updates if update.position > after]
                if self.pulls
                else [update for update in self._updates if update.position not in self._acked]
            )
        batch = left[:1]
        for update in left[1:]:
            if not update.beside:
                break
            batch.append(update)
        return batch

    def hand_over(self, update: Update) -> Call:
        """A channel begins to handle it."""
        return self._begin("receive", update.label, "")

    def acknowledge(self, update: Update, call: Call) -> None:
        """The sink has returned: it need not come again."""
        self.moment("receive", call.number, "accepted")
        now = self._clock.now_ms()
        with self._held():
            self._tell(facts.Acknowledged(Ack(update.position, now)))
            self._tell(facts.Ended("receive", call.number, None, now))
        self.moment("receive", call.number, "answered")

    def show_typing(self, conversation: str) -> None:
        self._note(Typed(conversation, self._clock.now_ms()))

    def moment(self, verb: Verb, number: int, moment: Moment) -> None:
        """A call has come so far; it may be the end of this process."""
        if (verb, number, moment) in self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.on_moment is not None:
            self.on_moment(verb, number, moment)

    # ---- calls ----

    def _begin(self, verb: Verb, key: str, conversation: str) -> Call:
        with self._held():
            call = Call(
                verb=verb,
                number=self._counts[verb] + 1,
                key=key,
                conversation=conversation,
                at=self._clock.now_ms(),
                behaviour=self._next_behaviour(verb, conversation),
            )
            self._tell(facts.Began(call))
        self.moment(verb, call.number, "before_call")
        return call

    def _end(self, call: Call, answer: Reply | Verdict | None) -> None:
        self._note(facts.Ended(call.verb, call.number, answer, self._clock.now_ms()))
        if answer is not None:
            self.moment(call.verb, call.number, "answered")

    def _next_behaviour(self, verb: Verb, conversation: str) -> Behaviour:
        queue = self._queue_for(verb, conversation)
        if queue is not None:
            return queue[0]
        here, anywhere = self._standing.get((verb, conversation)), self._standing.get((verb, None))
        return here or anywhere or Accept()

    async def _treat(self, call: Call, message: Message) -> Reply:
        behaviour = call.behaviour
        too_long = text_length(message.text, self.profile.unit) > self.profile.text_max
        match behaviour:
            case NoConnection(reason):
                return NotStarted(reason)
            case AskToWait(delay_ms):
                return RetryAfter(delay_ms)
            case Refuse(reason, True):
                return Refused(reason, retryable=True)
            case _ if too_long:
                return Refused("the text is too long")
            case Refuse(reason, _):
                return self._repeated(message) or Refused(reason)
            case RefuseMarkup():
                if message.plain:
                    return Sent(self._accept(call, message))
                return self._repeated(message) or MarkupRefused()
            case Lose(accepted, raises):
                if accepted:
                    self._accept(call, message)
                if raises:
                    raise ConnectionResetError(_LOST)
                return Uncertain(_LOST)
            case Hang(accepted):
                reference = self._accept(call, message) if accepted else None
                await self._hang()
                return Sent(reference or self._accept(call, message))
            case Late(after_ms, hangs):
                due = None if after_ms is None else call.at + after_ms
                self._note(facts.UnderWay(message, due))
                if hangs:
                    await self._hang()
                return Uncertain(_LOST)
            case Accept():
                return Sent(self._accept(call, message))
            case _:
                assert_never(behaviour)

    async def _looked_up(self, call: Call) -> Verdict:
        match call.behaviour:
            case Hang():
                await self._hang()
            case Lose(_, True):
                raise ConnectionResetError(_LOST)
            case Lose() | Late():
                return CannotTell(_LOST)
            case NoConnection(reason) | Refuse(reason):
                return CannotTell(reason)
            case AskToWait():
                return CannotTell("it asks to wait")
            case Accept() | RefuseMarkup():
                pass
        if not self.profile.reconciles:
            return CannotTell()
        with self._held():
            found = next((m.reference for m in self._messages if m.key == call.key), None)
        return Absent() if found is None else Found(found)

    async def _hang(self) -> None:
        with self._held():
            before = self._releases
        await self.until(lambda: self._released(before))

    def _released(self, before: int) -> bool:
        with self._held():
            return self._releases > before

    def _accept(self, call: Call, message: Message) -> str:
        with self._held():
            reference = self._take(message, self._clock.now_ms())
        self.moment(call.verb, call.number, "accepted")
        return reference

    def _repeated(self, message: Message) -> Sent | None:
        with self._held():
            known = self._known(message.key, self._clock.now_ms())
        return None if known is None else Sent(known)

    def _known(self, key: str, now: int) -> str | None:
        """The message that a repeat of this key is taken for."""
        window_ms = self.profile.repeat_window_ms
        for message in reversed(self._messages) if window_ms else ():
            if message.key == key and now - message.at < window_ms:
                return message.reference
        return None

    def _take(self, message: Message, now: int) -> str:
        known = self._known(message.key, now)
        if known is not None:
            return known
        reference = f"m{len(self._messages) + 1}"
        taken = msgspec.structs.replace(message, reference=reference, at=now)
        self._tell(facts.Taken(taken))
        if self.echoes:
            self._come(taken.conversation, Person(OWN_ID), text=taken.text, own=True)
        return reference

    def _let_in(self, may_arrive: Callable[[facts.UnderWay], bool]) -> None:
        for each in [each for each in self._under_way if may_arrive(each)]:
            self._tell(facts.Arrived(each.message.key))
            self._take(each.message, self._clock.now_ms() if each.due is None else each.due)

    # ---- updates ----

    def _come(
        self,
        conversation: str,
        sender: Person,
        *,
        text: str = "",
        own: bool = False,
        automatic: bool = False,
        group: bool = False,
        replaces: str | None = None,
        deletes: str | None = None,
    ) -> str:
        event = Event(
            id=f"e{len(self._updates) + 1}",
            conversation=conversation,
            sender=sender,
            text=text,
            own=own,
            automatic=automatic,
            group=group,
            replaces=replaces,
            deletes=deletes,
        )
        self._push(msgspec.json.encode(event).decode())
        return event.id

    def _push(self, body: str, label: str | None = None, *, beside: bool = False) -> str:
        update = Update(
            position=len(self._updates) + 1,
            label=label or f"u{len(self._labels) + 1}",
            body=body,
            beside=beside,
        )
        self._tell(facts.Came(update))
        return update.label

    def _of(self, event: str) -> Update:
        """The last update of an event, or of a label.

        Raises:
            LookupError: there is none.
        """
        for update in reversed(self._updates):
            if update.label == event:
                return update
            with contextlib.suppress(msgspec.DecodeError):
                if _read(update).id == event:
                    return update
        raise LookupError(f"there is no event {event}")

    def _arrivals(self) -> None:
        now = self._clock.now_ms()
        self._let_in(lambda each: each.due is not None and each.due <= now)


def text_length(text: str, unit: Unit) -> int:
    """As platforms count it."""
    match unit:
        case "codepoint":
            return len(text)
        case "utf8":
            return len(text.encode())
        case "utf16":
            return len(text.encode("utf-16-le")) // 2


_decode = msgspec.json.Decoder(Event).decode


def _read(update: Update) -> Event:
    return _decode(update.body)
