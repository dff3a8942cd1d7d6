"""What a person can say to the host in a chat: answered without the model, through the outbox.

A command begins with a slash and a known word; anything else that does is a message. Each runs in the
transaction that takes its event, so that it happens once however often the platform repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from postroom.domain.ids import ApprovalId, ClaimToken, SessionId
from postroom.domain.message import Message, Source, Text, text_of
from postroom.errors import InputError
from postroom.ports.store import Tx
from postroom.scripts.approvals import NotAsked, decide_approval, open_approvals
from postroom.scripts.inbound import Answer, Arrival, Command, entitle, start_over
from postroom.scripts.inbox import (
    cancel,
    queue_message,
    remove_message,
    replace_message,
    retry_failed,
)
from postroom.scripts.log import PendingInfo, list_pending, session_info
from postroom.scripts.routes import sessions_of
from postroom.scripts.session import lock_session

_COMMAND = re.compile(r"/([a-z]+)(?:@\S+)?(?:\s+(.*))?\Z", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_SHOWN = 60
_OWN_MAX = 10_000

HELP = """\
/new – start a new conversation; this one is kept
/sessions – list the conversations of this chat
/resume [number or id] – go on with an earlier one
/status – what I am doing
/stop – stop, and drop what waits
/queue – what waits; /queue edit N TEXT, /queue remove N
/steer TEXT – say something to the work that goes on
/retry – try again what failed
/allow, /deny [id] – answer when I ask whether I may do something
/help – this"""


class Asked(msgspec.Struct, frozen=True):
    """A command as it was said."""

    name: str
    rest: str


def parse(text: str) -> Asked | None:
    """The command in a message; None: it is for the model."""
    match = _COMMAND.match(text.strip())
    name = match[1].lower() if match is not None else ""
    if match is None or name not in _COMMANDS:
        return None
    return Asked(name, (match[2] or "").strip())


def command(asked: Asked, message: Message, pending_max: int) -> Command:
    """The command as a part of the transaction that takes its event. ``message`` is what was said."""
    run = _COMMANDS[asked.name]

    def script(tx: Tx, arrival: Arrival, session_id: SessionId) -> Answer:
        said = _Said(tx, arrival, session_id, asked.rest, message, pending_max)
        try:
            return run(said)
        except InputError as error:
            return Answer(error.message, session_id)

    return script


class _Said(msgspec.Struct, frozen=True):
    tx: Tx
    arrival: Arrival
    session_id: SessionId
    rest: str
    said: Message
    pending_max: int

    @property
    def ref(self) -> ClaimToken:
        return self.arrival.ref

    @property
    def source(self) -> Source:
        return self.said.source

    def message(self, text: str) -> Message:
        """What was said without the command: a text, and the files that came with it."""
        files = tuple(b for b in self.said.content if not isinstance(b, Text))
        return Message(self.said.id, (Text(text), *files), self.source)

    def answer(self, text: str | None) -> Answer:
        return Answer(text, self.session_id)


def _help(said: _Said) -> Answer:
    return said.answer(HELP)


def _new(said: _Said) -> Answer:
    info = session_info(said.tx, said.session_id)
    session_id = start_over(said.tx, said.arrival, said.session_id, to=None)
    if info.status == "running":
        return Answer(
            "A new conversation. The earlier one still works, but does not speak here any more;"
            " /resume goes back to it.",
            session_id,
        )
    return Answer("A new conversation. /resume goes back to an earlier one.", session_id)


def _sessions(said: _Said) -> Answer:
    arrival = said.arrival
    own = sessions_of(said.tx, arrival.core_id, arrival.channel, arrival.conversation)
    lines = [
        f"{number}. {title or session_id}{' (this one)' if session_id == said.session_id else ''}"
        for number, (session_id, title, _) in enumerate(own, 1)
    ]
    return said.answer("\n".join([*lines, "/resume N goes on with one."]))


def _resume(said: _Said) -> Answer:
    arrival = said.arrival
    own = sessions_of(said.tx, arrival.core_id, arrival.channel, arrival.conversation, _OWN_MAX)
    ids = [session_id for session_id, _, _ in own]
    if not said.rest:
        others = [i for i in ids if i != said.session_id]
        if not others:
            return said.answer("There is no earlier conversation here.")
        chosen = others[0]
    elif _NUMBER.match(said.rest) and 1 <= int(said.rest) <= len(ids):
        chosen = ids[int(said.rest) - 1]
    elif said.rest in ids:
        chosen = SessionId(said.rest)
    else:
        return said.answer(
            f"This chat has no conversation {said.rest[:_SHOWN]}. /sessions lists them."
        )
    if chosen == said.session_id:
        return said.answer("This is the one you are in.")
    start_over(said.tx, arrival, said.session_id, to=chosen)
    title = next(title for session_id, title, _ in own if session_id == chosen)
    return Answer(f"Back in {title or chosen}.", chosen)


def _status(said: _Said) -> Answer:
    info = session_info(said.tx, said.session_id)
    doing = "I am working." if info.status == "running" else "I am idle."
    waiting = f" {info.pending} waiting; /queue shows them." if info.pending else ""
    return said.answer(f"{doing}{waiting}\nSession {info.session_id}, {info.turns} turns.")


def _stop(said: _Said) -> Answer:
    info = session_info(said.tx, said.session_id)
    if info.status == "idle" and not info.pending:
        return said.answer("There is nothing to stop.")
    cancel(said.tx, said.session_id, "user", keep_inbox=False, ref=said.ref)
    dropped = f" {info.pending} that waited are dropped." if info.pending else ""
    return said.answer(f"Stopped.{dropped}")


def _queue(said: _Said) -> Answer:
    pending = list_pending(said.tx, said.session_id)
    verb, rest = _words(said.rest)
    if not verb:
        if not pending:
            return said.answer("Nothing waits.")
        lines = [f"{n}. {_shown(p)}" for n, p in enumerate(pending, 1)]
        return said.answer("\n".join(lines))
    number, text = _words(rest)
    if verb not in ("edit", "remove") or not _NUMBER.match(number):
        return said.answer("/queue, /queue edit N TEXT, or /queue remove N")
    if not 1 <= int(number) <= len(pending):
        return said.answer(f"Nothing waits as number {number}. /queue shows what does.")
    old = pending[int(number) - 1].message.id
    if verb == "remove":
        done = remove_message(said.tx, said.session_id, old, said.ref)
    elif not text.strip():
        return said.answer("/queue edit N TEXT")
    else:
        done = replace_message(said.tx, said.session_id, old, said.message(text.strip()))
    if not done:
        return said.answer("That one has begun already.")
    return said.answer("Removed." if verb == "remove" else "Changed.")


def _words(text: str) -> tuple[str, str]:
    """The first word, and what comes after it."""
    first, *rest = text.split(maxsplit=1) or [""]
    return first, rest[0] if rest else ""


def _shown(pending: PendingInfo) -> str:
    text = " ".join(text_of(pending.message.content).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _steer(said: _Said) -> Answer:
    if not said.rest:
        return said.answer("/steer TEXT")
    message = said.message(said.rest)
    queue_message(
        said.tx, said.session_id, message, "steer", pending_max=said.pending_max, run=None
    )
    entitle(said.tx, lock_session(said.tx, said.session_id).sid, message)
    return Answer(None, said.session_id, message.id)


def _retry(said: _Said) -> Answer:
    pairs = retry_failed(said.tx, said.session_id, pending_max=said.pending_max)
    if not pairs:
        return said.answer("Nothing failed since the last answer.")
    return said.answer("Trying again." if len(pairs) == 1 else f"Trying {len(pairs)} again.")


def _allow(said: _Said) -> Answer:
    return _decide(said, "allow", "Allowed.")


def _deny(said: _Said) -> Answer:
    return _decide(said, "deny", "Denied.")


def _decide(said: _Said, decision: str, done: str) -> Answer:
    asked = open_approvals(said.tx, said.session_id)
    if said.rest:
        approval_id = ApprovalId(said.rest)
    elif len(asked) == 1:
        approval_id = asked[0].approval_id
    elif asked:
        lines = [f"{a.subject}\n/{decision} {a.approval_id}" for a in asked]
        return said.answer("\n\n".join(["Which?", *lines]))
    else:
        return said.answer("Nothing is asked.")
    by = said.source.sender or said.source.sender_id or "somebody"
    try:
        decide_approval(
            said.tx,
            approval_id,
            decision,
            by=by,
            principal=said.source.principal or "",
            ref=said.ref,
            session_id=said.session_id,
        )
    except NotAsked as error:
        return said.answer(error.message[0].upper() + error.message[1:] + ".")
    return said.answer(done)


_COMMANDS: dict[str, Callable[[_Said], Answer]] = {
    "new": _new,
    "resume": _resume,
    "sessions": _sessions,
    "stop": _stop,
    "status": _status,
    "queue": _queue,
    "steer": _steer,
    "retry": _retry,
    "allow": _allow,
    "deny": _deny,
    "help": _help,
}
