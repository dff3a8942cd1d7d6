"""The small worlds of deliveries: in the default run, and in the campaign.

In most of them two deliveries are in the outbox from the start, and two processes send and ask. In
the others the turns of a session make them, and the processes drive it as well.
"""

from __future__ import annotations

import msgspec

from tests.simulation import session as sessions
from tests.simulation.delivery import Config, Lane
from tests.simulation.sender import Asker, Sender
from tests.simulation.speaking import Speaker, Speaking
from tests.simulation.world import World

WORDS = ("sent", "failed", "queued", "redeliver", "abandon")


class Setting(msgspec.Struct, frozen=True):
    """A world of deliveries. ``session`` None: nothing makes them, they are there."""

    config: Config
    session: sessions.Config | None = None
    lane: type[Lane] = Lane
    sender: type[Sender] = Sender
    asker: type[Asker] = Asker
    speaking: type[Speaking] = Speaking
    speaker: type[Speaker] = Speaker

    def world(self) -> World:
        lane = self.lane(self.config)
        tasks = self.sender(lane), self.asker(lane)
        if self.session is None:
            return World(lane.start, (lane,), tasks, self.config.faults)
        session = self.speaking(self.session, lane)
        faults = {**self.session.faults, **self.config.faults}
        return World(session.start, (session, lane), (self.speaker(session), *tasks), faults)


def _lane(*parts: int, **options: object) -> Setting:
    fields = {k: options.pop(k) for k in tuple(options) if k in Config.__struct_fields__}
    return Setting(Config(parts=parts, faults=options, **fields))  # type: ignore[arg-type]


def _turns(kinds: str, *parts: int, **options: object) -> Setting:
    fields = {k: options.pop(k) for k in tuple(options) if k in Config.__struct_fields__}
    lane = Config(parts=parts, made=False, faults=options, **fields)  # type: ignore[arg-type]
    return Setting(lane, sessions.Config(kinds=kinds, steps=0))


_SILENT = ("silence",)

# In the default run: seconds together.
SMALL: dict[str, Setting] = {
    "sends 2, a zombie": _lane(2, answers=_SILENT, attempts_max=1, lapse=1),
    "sends 2+1, nobody to ask": _lane(2, 1, answers=_SILENT, asks=False, attempts_max=1, crash=1),
    "sends 1+1, deferred, too old": _lane(1, 1, attempts_max=1, defer=1, expire=1),
    "sends 1+1, a lost answer": _lane(
        1, 1, answers=_SILENT, asks=False, attempts_max=1, lapse=1, lost=1
    ),
    "sends 1, every answer": _lane(1, attempts_max=2, reconciles_max=2, crash=1, lapse=1),
    "sends 1, a task breaks down": _lane(1, answers=_SILENT, crash=1, abandon=1, lapse=1),
    "sends 2, an operator": _lane(
        2, answers=_SILENT, asks=False, attempts_max=1, operator=WORDS, crash=1, decide=1
    ),
    "sends 2, too old": _lane(2, attempts_max=1, expire=1),
    "sends 2, the route goes": _lane(2, attempts_max=1, unroute=1),
    "sends 2+1, no route, an operator": _lane(
        2, 1, answers=("refuse",), operator=WORDS, attempts_max=1, unroute=1, decide=2
    ),
    "sends 1, keys repeated": _lane(1, repeats=True, gap=True, crash=1, lapse=1),
    "sends 1, keys forgotten": _lane(1, repeats=True, crash=1, window=2),
    "turns F, sent": _turns("F", 1, answers=_SILENT, attempts_max=1, crash=1, lapse=1),
}

# The campaign: minutes.
BASE: dict[str, Setting] = SMALL | {
    "sends 1, every fault": _lane(1, crash=2, lapse=2, lost=1, defer=1, expire=1),
    "sends 1, three attempts": _lane(
        1, attempts_max=3, reconciles_max=2, crash=2, lapse=2, abandon=1
    ),
    "sends 1+1, crash": _lane(1, 1, attempts_max=1, crash=1, defer=1, expire=1),
    "sends 1+1, a zombie": _lane(1, 1, answers=_SILENT, attempts_max=1, lapse=1, lost=1),
    "sends 2, two zombies": _lane(2, answers=_SILENT, attempts_max=1, lapse=2, lost=1),
    "sends 2, every answer": _lane(2, crash=1),
    "sends 2+1, crash": _lane(2, 1, answers=_SILENT, attempts_max=1, crash=1),
    "sends 1+2, refusals": _lane(1, 2, answers=("refuse",), attempts_max=1, lapse=1),
    "sends 2, asked, an operator": _lane(
        2, answers=_SILENT, attempts_max=1, operator=WORDS, decide=1
    ),
    "sends 1+1, an operator twice": _lane(
        1, 1, answers=_SILENT, asks=False, attempts_max=1, operator=WORDS, crash=1, decide=2
    ),
    "sends 1+1, keys repeated": _lane(
        1, 1, answers=_SILENT, attempts_max=1, repeats=True, gap=True, lapse=1
    ),
    "turns FF, sent": _turns("FF", 1, 1, answers=(), crash=1, lapse=1),
}
