"""The small worlds that are explored whole: in the default run, and in the campaign.

Each looks closely at something else; together they have every command, every fault, and every
kind of message. Two faults of one kind in one history are where a rule about the first meets a
rule about the second.
"""

from __future__ import annotations

from tests.simulation.driver import Driving
from tests.simulation.session import Config, Session
from tests.simulation.world import World


def build(
    config: Config, session: type[Session] = Session, driver: type[Driving] = Driving
) -> World:
    """A world of the session and its drivers. A broken variant brings its own of either."""
    part = session(config)
    return World(part.start, (part,), (driver(part),), config.faults)


def _world(kinds: str, **options: object) -> Config:
    fields = {k: options.pop(k) for k in tuple(options) if k in Config.__struct_fields__}
    return Config(kinds=kinds, faults=options, **fields)  # type: ignore[arg-type]


# In the default run: seconds together.
SMALL: dict[str, Config] = {
    "FS": _world("FS", crash=1, lapse=1, lost=1, cancel=1, keep=1),
    "FSI": _world("FSI", crash=1, keep=1),
    "FS, edited": _world("FS", crash=1, drain=1, remove=1, replace=1),
    "SS": _world("SS", crash=2, lapse=2, lost=1, keep=1),
    "FF, edited": _world("FF", crash=2, lapse=1, drain=1, cancel=1, keep=1, remove=1, replace=1),
    "FF, begun by the claim, one-shot": _world(
        "FF", begins=True, oneshot=True, crash=1, lapse=1, lost=1, cancel=1, abandon=1
    ),
    "FS, judged by a policy": _world("FS", policy=True, crash=1, remove=1, cancel=1),
    "FI, judged by a policy": _world("FI", policy=True, crash=1, replace=1),
    "F, two calls": _world(
        "F", replies=("aB",), retries=1, max_steps=True, aborts=True, lost=1, crash=1, cancel=1
    ),
}

# The campaign: minutes, and some gigabytes for the last ones.
BASE: dict[str, Config] = SMALL | {
    "FS, more faults": _world("FS", crash=2, lapse=2, lost=1, cancel=1, keep=1),
    "FS, two lost answers": _world("FS", lost=2, crash=1, lapse=1, cancel=2),
    "FFF": _world("FFF", crash=2, lapse=1, cancel=1),
    "FSS, two steps": _world("FSS", steps=2, crash=1, lapse=1, cancel=1),
    "FFS, two steps": _world(
        "FFS", steps=2, attempts_max=2, crash=2, lapse=1, lost=1, cancel=1, drain=1
    ),
    "F, two calls, three recoveries": _world(
        "F", replies=("aB",), attempts_max=3, crash=4, lapse=1, drain=1
    ),
    "FS, begun by the claim, one-shot": _world(
        "FS", begins=True, oneshot=True, crash=2, lapse=1, lost=1, cancel=1, abandon=1
    ),
    "FS, calls of every kind": _world(
        "FS",
        replies=("a", "A", "aB"),
        retries=1,
        max_steps=True,
        aborts=True,
        crash=1,
        lapse=1,
        lost=1,
        cancel=1,
    ),
    "FS, judged, edited": _world(
        "FS", policy=True, crash=1, lapse=1, lost=1, cancel=1, remove=1, replace=1
    ),
    "FSI, judged": _world("FSI", policy=True, crash=1, cancel=1, replace=1),
    "FSI, judged, two calls": _world(
        "FSI",
        policy=True,
        replies=("aB",),
        aborts=True,
        crash=1,
        lapse=1,
        lost=1,
        cancel=1,
        keep=1,
        remove=1,
    ),
    "FFSI": _world("FFSI", crash=2, lapse=1, lost=1, cancel=1, keep=1),
    "FSI, every fault": _world(
        "FSI",
        crash=2,
        lapse=2,
        lost=2,
        drain=1,
        abandon=1,
        cancel=1,
        keep=1,
        remove=1,
        replace=1,
    ),
    "FFS, every fault": _world(
        "FFS",
        attempts_max=2,
        crash=2,
        lapse=2,
        lost=2,
        drain=1,
        abandon=1,
        cancel=2,
        keep=1,
        remove=1,
        replace=1,
    ),
    "FS, everything a driver does": _world(
        "FS",
        policy=True,
        oneshot=True,
        replies=("a", "A", "aB"),
        retries=1,
        max_steps=True,
        aborts=True,
        crash=2,
        lapse=1,
        lost=1,
        drain=1,
        abandon=1,
        cancel=1,
        keep=1,
    ),
}
