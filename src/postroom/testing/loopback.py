"""The `loopback` channel: the shipped fake, with a platform behind it that a test plays.

It does what a real adapter does and nothing more: it turns updates into `Inbound` values and
acknowledges each after the sink has returned, sends one part and says how that ended, and asks about
a part in doubt where the platform's profile allows it. What goes wrong is the platform's doing
(`postroom.testing.platform`). Conversations are ``loopback:dm:<id>``.

A part in doubt is looked up where the profile ``reconciles``; else it is repeated, within half of
``repeat_window_ms`` counted from the first attempt; else nobody can tell.
"""

from __future__ import annotations

import asyncio

import msgspec

from postroom.domain.conversation import (
    ConversationKey,
    conversation_key,
    parse_conversation_key,
)
from postroom.domain.message import Text
from postroom.domain.outbox import (
    Absent,
    CannotTell,
    Found,
    NotStarted,
    Refused,
    SendOutcome,
    Sent,
    Verdict,
)
from postroom.errors import InputError
from postroom.ports.channel import Inbound, OutPart, Profile, Sender, Sink
from postroom.ports.clock import Clock, SystemClock
from postroom.testing.platform import Event, Platform
from postroom.testing.platform_facts import MarkupRefused, Message, Update, Verb

PLAIN = "sent as plain text: the platform refused the markup"
CURSOR = "updates"

READS_BACK = Profile(reconciles=True)
WINDOW = Profile(repeat_window_ms=600_000)
BLIND = Profile()

# The limits and units are those of the platforms named. Their windows: of Matrix, what Synapse
# keeps; Discord publishes none and speaks of a few minutes, so that this is a guess on the low side.
PROFILES: dict[str, Profile] = {
    "reads_back": READS_BACK,
    "window": WINDOW,
    "blind": BLIND,
    "telegram": Profile(text_max=4_096, unit="utf16"),
    "slack": Profile(text_max=4_000, unit="codepoint", reconciles=True),
    "matrix": Profile(text_max=60_000, unit="utf8", repeat_window_ms=86_400_000),
    "discord": Profile(text_max=2_000, unit="codepoint", repeat_window_ms=120_000),
}

_decode = msgspec.json.Decoder(Event).decode


def dm(id_: str) -> ConversationKey:
    """The key of the platform's conversation ``id_``."""
    return conversation_key("loopback", "dm", id_)


class Loopback:
    """A channel over a platform. It keeps nothing that another object over the same one would miss.

    ``clock`` (None: the system's) tells whether a repeat is still within the window.
    """

    def __init__(
        self, platform: Platform, *, name: str = "loopback", clock: Clock | None = None
    ) -> None:
        self.platform = platform
        self._name = name
        self._clock: Clock = clock or SystemClock()
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def profile(self) -> Profile:
        return self.platform.profile

    # ---- inbound ----

    async def run(self, sink: Sink) -> None:
        """Hands over what comes, in order, until it is cancelled or the sink raises."""
        after = self.platform.resume(await sink.cursor(self._name, CURSOR))
        while True:
            batch = await self._next(after)
            if len(batch) == 1:
                await self._hand_over(sink, batch[0])
            else:
                handed = (self._hand_over(sink, update) for update in batch)
                for end in await asyncio.gather(*handed, return_exceptions=True):
                    if isinstance(end, BaseException):
                        raise end
            after = batch[-1].position

    async def _next(self, after: int) -> list[Update]:
        await self.platform.until(lambda: bool(self.platform.waiting(after)))
        return self.platform.waiting(after)

    async def _hand_over(self, sink: Sink, update: Update) -> None:
        call = self.platform.hand_over(update)
        cursor = (CURSOR, self.platform.cursor_of(update))
        try:
            inbound = self._inbound(update, cursor)
        except (msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
            # Its id cannot be read, so it goes by its envelope's.
            raw = update.body.encode(errors="surrogatepass")
            dedupe = f"update:{update.label}"
            await sink.quarantine(self._name, dedupe, raw, str(error), cursor)
        else:
            await sink(inbound)
        self.platform.acknowledge(update, call)

    def _inbound(self, update: Update, cursor: tuple[str, str]) -> Inbound:
        event = _decode(update.body)
        return Inbound(
            channel=self._name,
            conversation=dm(event.conversation),
            sender=Sender(id=event.sender.id, name=event.sender.name),
            content=() if event.deletes is not None else (Text(event.text),),
            dedupe=event.id,
            cursor=cursor,
            replaces=event.replaces,
            deletes=event.deletes,
            origin=event.id,
            group=event.group,
            automatic=event.own or event.automatic,
        )

    # ---- outbound ----

    async def send(self, part: OutPart) -> SendOutcome:
        return await self._post(part, "send")

    async def reconcile(self, part: OutPart) -> Verdict:
        if self._closed:
            return CannotTell("the channel is closed")
        conversation = _own_id(part.conversation)
        if conversation is None:
            return Absent()  # it is refused before anything leaves, each time
        profile = self.platform.profile
        if profile.reconciles or not profile.repeat_window_ms:
            return await self.platform.look_up(part.key, conversation)
        first = part.first_attempt_at
        # A clock that was set back proves nothing about how long ago the first attempt was.
        if first is None or not 0 <= self._clock.now_ms() - first < profile.repeat_window_ms // 2:
            return CannotTell("the time for a safe repeat is over")
        match await self._post(part, "reconcile"):
            case Sent(reference):
                return Found(reference)
            case Refused(_, False):
                # A repeat of what was taken is answered as that, so the first was not.
                return Absent()
            case outcome:
                return CannotTell(outcome.reason)

    async def _post(self, part: OutPart, verb: Verb) -> SendOutcome:
        if self._closed:
            return NotStarted("the channel is closed")
        conversation = _own_id(part.conversation)
        if conversation is None:
            return Refused("the conversation is not this platform's")
        message = Message(
            key=part.key,
            conversation=conversation,
            text=part.text,
            kind=part.kind,
            reference="",
            at=0,
            media=part.media.artifact if part.media is not None else None,
            reply_to=part.reply_to,
        )
        answer = await self.platform.post(message, verb=verb)
        if not isinstance(answer, MarkupRefused):
            return answer
        plain = await self.platform.post(msgspec.structs.replace(message, plain=True), verb=verb)
        match plain:
            case Sent(reference):
                return Sent(reference, PLAIN)
            case MarkupRefused():
                return Refused("the platform refused the plain text as it had the markup")
            case _:
                return plain

    async def typing(self, conversation: ConversationKey) -> None:
        id_ = _own_id(conversation)
        if id_ is not None and not self._closed:
            self.platform.show_typing(id_)

    async def aclose(self) -> None:
        """Nothing is sent any more. Idempotent."""
        self._closed = True


def _own_id(key: ConversationKey | None) -> str | None:
    """The platform's own id of a conversation; None: it is not of this platform."""
    if key is None:
        return None
    try:
        named = parse_conversation_key(key)
    except InputError:
        return None
    return named.ids[0] if (named.platform, named.scope) == ("loopback", "dm") else None
