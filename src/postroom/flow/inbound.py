"""Takes what comes in from channels: who may talk, what is a command, what becomes a message.

It returns only when that is on disk, and then the channel may acknowledge its platform. A handled
event is never handled again, however often and however relabelled it comes. One that cannot be
handled is put aside, so that those behind it are not held up: only what the store could not write
is the platform's to send again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from postroom import mint
from postroom.config import Limits
from postroom.domain.conversation import parse_conversation_key
from postroom.domain.ids import CoreId, SessionId
from postroom.domain.message import Message, Source, parse_content, sound, text_of
from postroom.errors import InputError, QueueFull, StoreError
from postroom.flow import commands
from postroom.ports.channel import Accepted, Inbound
from postroom.ports.policy import Admit, Policy, Reject, Verdict
from postroom.ports.store import Store
from postroom.scripts import inbound as scripts
from postroom.scripts.inbound import Arrival, message_id_of

log = logging.getLogger("postroom.inbound")

KIND = "conversation"
_NAME_MAX = 80


class Access(msgspec.Struct, frozen=True):
    """Who may talk on a channel, by the platform's own ids. ``everyone`` lets anybody in."""

    senders: frozenset[str] = frozenset()
    everyone: bool = False

    def allows(self, sender_id: str | None) -> bool:
        return self.everyone or (sender_id is not None and sender_id in self.senders)


class Connected(msgspec.Struct, frozen=True):
    """What the host decided for a channel: its core, who may talk, where its sessions work."""

    core_id: CoreId
    access: Access
    cwd: str | None = None


class InteractionRuntime:
    """``connected`` says for each channel, by name, where its messages go."""

    def __init__(self, store: Store, limits: Limits, connected: Mapping[str, Connected]) -> None:
        self._store = store
        self._limits = limits
        self._connected = connected

    async def __call__(self, inbound: Inbound) -> Accepted:
        return await self.handle(inbound)

    async def handle(self, inbound: Inbound) -> Accepted:
        """Resolves the session, binds the route, queues the message; returns after the commit.

        What is no message and no command (empty content, a conversation that is no key) is kept in
        quarantine, and may be acknowledged like the rest.

        Raises:
            InputError: the channel is not connected here.
            StoreError: the store could not write; the platform must not be acknowledged.
        """
        connected = self._connected.get(inbound.channel)
        if connected is None:
            raise InputError(f"no channel {inbound.channel!r} is connected here")
        try:
            return await self._taken(inbound, connected)
        except StoreError:
            raise
        except Exception as error:
            if not isinstance(error, InputError):
                log.exception("%s: an event could not be handled", inbound.channel)
            reason = str(error) or type(error).__name__
            await self.quarantine(
                inbound.channel, inbound.dedupe, _raw(inbound), reason, inbound.cursor
            )
            return Accepted("quarantined")

    async def _taken(self, inbound: Inbound, connected: Connected) -> Accepted:
        parse_conversation_key(inbound.conversation)
        arrival = Arrival(
            ref=mint.claim_token(),
            core_id=connected.core_id,
            channel=inbound.channel,
            conversation=inbound.conversation,
            dedupe=inbound.dedupe,
            cursor=inbound.cursor,
            owner=f"{KIND}:{inbound.channel}:{inbound.conversation}",
            new_session=mint.session_id(),
            cwd=connected.cwd,
        )
        if inbound.automatic:
            return await self._store.write(scripts.drop, arrival, Accepted("ignored"))
        if not connected.access.allows(inbound.sender.id):
            return await self._store.write(scripts.drop, arrival, Accepted("refused"))
        if inbound.deletes is not None:
            return await self._store.write(scripts.delete_message, arrival, inbound.deletes)
        return await self._said(inbound, arrival)

    async def _said(self, inbound: Inbound, arrival: Arrival) -> Accepted:
        source = Source(
            kind=KIND,
            principal=arrival.owner,
            sender=inbound.sender.name and name_shown(inbound.sender.name),
            sender_id=inbound.sender.id,
            channel=inbound.channel,
            reference=inbound.origin,
        )
        content = parse_content(inbound.content, bytes_max=self._limits.content_bytes_max)
        pending_max = self._limits.pending_messages_max
        message = Message(message_id_of(inbound.channel, inbound.dedupe), content, source)
        asked = commands.parse(text_of(content))
        try:
            if asked is not None and inbound.replaces is None:
                script = commands.command(asked, message, pending_max)
                return await self._store.write(scripts.run_command, arrival, script)
            return await self._store.write(
                scripts.accept_message,
                arrival,
                message,
                pending_max=pending_max,
                replaces=inbound.replaces,
            )
        except QueueFull as error:
            log.warning("%s: %s", inbound.channel, error)
            answer = _saying("Too much waits here already; this was not queued. /queue, /stop.")
            return await self._store.write(scripts.run_command, arrival, answer)

    async def cursor(self, channel: str, name: str) -> str | None:
        return await self._store.read(scripts.read_cursor, channel, name)

    async def quarantine(
        self,
        channel: str,
        dedupe: str,
        raw: bytes,
        error: str,
        cursor: tuple[str, str] | None = None,
    ) -> None:
        log.warning("%s: an event was put aside: %s", channel, error)
        text = raw.decode("utf-8", "replace")
        await self._store.write(
            scripts.quarantine, channel, sound(dedupe), text, sound(error), cursor
        )

    def guarded(self, policy: Policy | None) -> Policy:
        """A core's own policy, and before it that a sender may still talk here."""
        if policy is None:
            return self.policy
        own = policy

        async def both(session_id: SessionId, batch: tuple[Message, ...]) -> Verdict:
            verdict = await self.policy(session_id, batch)
            refused = verdict.message_ids or () if isinstance(verdict, Reject) else ()
            left = tuple(m for m in batch if m.id not in refused)
            if not left:
                return verdict
            also = await own(session_id, left)
            if isinstance(also, Admit):
                return verdict
            ids = also.message_ids if also.message_ids is not None else [m.id for m in left]
            return Reject(also.reason, (*refused, *ids))

        return both

    async def policy(self, session_id: SessionId, batch: tuple[Message, ...]) -> Verdict:
        """Judges a batch at its claim, as `senders_policy` does."""
        return judge_senders(self._connected, batch)


def senders_policy(connected: Mapping[str, Connected]) -> Policy:
    """Refuses at the claim whoever was let in when the message came and has been shut out since.

    A message of a channel that is not among ``connected`` is refused; one of no channel never is.
    """

    async def policy(session_id: SessionId, batch: tuple[Message, ...]) -> Verdict:
        return judge_senders(connected, batch)

    return policy


def judge_senders(connected: Mapping[str, Connected], batch: tuple[Message, ...]) -> Verdict:
    refused = tuple(m.id for m in batch if not _may_talk(connected, m.source))
    if not refused:
        return Admit()
    return Reject("its sender may no longer talk here", refused)


def _may_talk(connected: Mapping[str, Connected], source: Source) -> bool:
    if source.kind != KIND or source.channel is None:
        return True
    known = connected.get(source.channel)
    return known is not None and known.access.allows(source.sender_id)


def name_shown(name: str) -> str:
    """A sender's name in one short line that cannot pass for a mark of ours."""
    plain = "".join(c if c.isprintable() else " " for c in sound(name))
    line = " ".join(plain.replace("[", "(").replace("]", ")").split())
    return line[:_NAME_MAX]


def _raw(inbound: Inbound) -> bytes:
    try:
        return msgspec.json.encode(inbound)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON cannot have
        return repr(inbound).encode("utf-8", "backslashreplace")


def _saying(text: str) -> scripts.Command:
    def script(tx: object, arrival: Arrival, session_id: SessionId) -> scripts.Answer:
        return scripts.Answer(text, session_id)

    return script
