"""Fold a run from yesterday's log.

A result is nothing that has to be kept: it is what the log says of an interval. Whoever knows the id of
the message can compute it again, later and elsewhere. Here the session is written to a file, one event
a line, and the result is folded from the file alone.

This one is written with the synchronous twin: no `await` in it.
"""

from pathlib import Path

import postroom
from postroom.client import Event
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.run import fold_run, interval

MINE = MessageId("msg_yesterday")
LOG = Path("yesterday.jsonl")


def yesterday() -> None:
    with postroom.connect_sync(database="example.db", model="scripted:echo") as room:
        session = room.session("diary")
        session.run("It rained.", message_id=MINE, timeout=60)
        session.run("The sun came out.", timeout=60)
        LOG.write_text("".join(f"{event.to_json()}\n" for event in session.log()))


def today() -> None:
    log = [Event.from_json(line) for line in LOG.read_text().splitlines()]
    result = fold_run(SessionId("diary"), MINE, interval(log, MINE))
    print(f"events {result.first_seq} to {result.last_seq}: {result.final_response}")


yesterday()
today()
