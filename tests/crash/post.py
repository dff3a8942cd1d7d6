"""A process that takes messages from a platform, answers them, and may kill itself on the way.

``python -m tests.crash.post --nursery`` plays plans as `tests.crash.actor` does. The platform is a
folder, and outlives every process: ``incoming`` (what people said), ``acked`` (what the channel
acknowledged), ``accepted`` (what it took, in order), one JSON line each. A process may die at a
commit, or at a call of the platform: before it, or when the platform has accepted and not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from postroom.app import one_core, open_room
from postroom.config import Limits
from postroom.domain.conversation import ConversationKey, conversation_key
from postroom.domain.ids import CoreId
from postroom.domain.message import Text
from postroom.domain.outbox import Absent, CannotTell, Found, SendOutcome, Sent, Verdict
from postroom.errors import PostroomError
from postroom.flow.core import Core
from postroom.flow.inbound import Access, Connected
from postroom.ports.channel import Inbound, OutPart, Profile, Sender, Sink
from postroom.ports.store import Tx
from tests.crash.actor import Noting, Plan, Prompted, die, nursery, open_database, say

LIFE_S = 60
NAME = "loopback"
PROFILES = {
    "finds": Profile(text_max=60, reconciles=True, settle_ms=0),
    "window": Profile(text_max=60, repeat_window_ms=600_000, settle_ms=0),
    "blind": Profile(text_max=60, settle_ms=0),
}


class Post(msgspec.Struct, forbid_unknown_fields=True):
    """``kill`` is (``commit``, its number, its phase), or (``send`` or ``ask``, its number, moment)."""

    database: str
    platform: str
    profile: str
    kill: tuple[str, int, str] | None = None


class Folder:
    """The platform."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def read(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def append(self, name: str, **fact: object) -> None:
        file = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(fact).encode() + b"\n")
        finally:
            os.close(file)

    def find(self, key: str) -> str | None:
        return next((fact["ref"] for fact in self.read("accepted") if fact["key"] == key), None)


class Channel:
    name = NAME

    def __init__(self, folder: Folder, plan: Post) -> None:
        self.profile = PROFILES[plan.profile]
        self._folder = folder
        self._plan = plan
        self._counts = {"send": 0, "ask": 0}
        self.done = asyncio.Event()

    async def run(self, sink: Sink) -> None:
        acked = {fact["dedupe"] for fact in self._folder.read("acked")}
        for fact in self._folder.read("incoming"):
            if fact["dedupe"] in acked:
                continue
            await sink(
                Inbound(
                    channel=NAME,
                    conversation=conversation_key("loopback", "dm", fact["who"]),
                    sender=Sender(id=fact["who"]),
                    content=(Text(fact["text"]),),
                    dedupe=fact["dedupe"],
                    cursor=("at", fact["dedupe"]),
                )
            )
            self._folder.append("acked", dedupe=fact["dedupe"])
        self.done.set()
        await asyncio.Event().wait()

    async def send(self, part: OutPart) -> SendOutcome:
        self._moment("send", "before")
        ref = self._take(part)
        self._moment("send", "accepted")
        return Sent(ref)

    async def reconcile(self, part: OutPart) -> Verdict:
        self._moment("ask", "before")
        if self._plan.profile == "blind":
            return CannotTell()
        found = self._folder.find(part.key)
        if found is None and self._plan.profile == "window":
            found = self._take(part)
        self._moment("ask", "accepted")
        return Found(found) if found is not None else Absent()

    def _take(self, part: OutPart) -> str:
        known = self._folder.find(part.key) if self._plan.profile == "window" else None
        if known is not None:
            return known
        ref = f"m{len(self._folder.read('accepted'))}"
        self._folder.append("accepted", key=part.key, text=part.text, ref=ref, to=part.conversation)
        return ref

    def _moment(self, what: str, moment: str) -> None:
        self._counts[what] += moment == "before"
        if self._plan.kill == (what, self._counts[what], moment):
            die()

    async def typing(self, conversation: ConversationKey) -> None:
        pass

    async def aclose(self) -> None:
        pass


def unfinished(tx: Tx) -> int:
    """How many sessions, deliveries and doubts somebody still has to see to."""
    return tx.execute(
        "SELECT (SELECT count(*) FROM session WHERE status <> 'idle')"
        " + (SELECT count(*) FROM delivery WHERE blocks = 1)"
        " + (SELECT count(*) FROM delivery WHERE status = 'unknown' AND handed_over = 0)"
    )[0][0]


async def main(plan: Post) -> None:
    commits = 0

    def on_commit(phase: str) -> None:
        nonlocal commits
        commits += phase == "before"
        if plan.kill == ("commit", commits, phase):
            die()

    store = await open_database(Plan(plan.database), on_commit)
    channel = Channel(Folder(plan.platform), plan)
    ready = asyncio.Event()
    ready.set()
    core = Core(
        id=CoreId("default"),
        revision="1",
        models=(Prompted(False, ready),),
        tools={"note": Noting("note", False, os.devnull, ready, ready)},
        permissions={"note": "allow"},
    )
    async with open_room(
        one_core(core),
        store=store,
        artifacts=_no_artifacts(),
        limits=Limits(model_retry_first_ms=1, tool_grace_ms=500),
        channels={NAME: channel},
        connected={NAME: Connected(CoreId("default"), Access(everyone=True))},
        drain_ms=1000,
    ) as room:
        news = asyncio.Event()
        room.store.subscribe(None, lambda _: news.set())
        room.store.on_work(lambda kind, key: news.set())
        await channel.done.wait()
        while await room.store.read(unfinished):
            news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 0.2)
    say(closed=True, commits=commits, **channel._counts)


def _no_artifacts() -> Any:
    return None


def run(plan: Post) -> int:
    signal.alarm(LIFE_S)
    try:
        asyncio.run(main(plan))
    except PostroomError as error:
        say(error=error.code, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    nursery(Post, run)
