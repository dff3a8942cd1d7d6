"""Durable claimable work: who may do it, and for how long they are believed alive.

::

    none ──ready──> ready ──claim──> claimed ──release──> none
                      ^                 │  ├──give back──> ready
                      └───(lapsed: the owner died or its lease ran out, a new claim wins)

A claim has a token of its own and raises the *epoch*. A holder proves itself with both: the epoch
shuts out whoever held it before, the token whoever released it since. A lapsed claim is not taken
away: it is replaced by the next claim, which is told so and recovers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from postroom.domain.ids import ClaimToken, NodeId

WorkStatus: TypeAlias = Literal["none", "ready", "claimed"]


class Fence(msgspec.Struct, frozen=True):
    """What a holder shows with everything it writes."""

    epoch: int
    token: ClaimToken


class Work(msgspec.Struct, frozen=True):
    status: WorkStatus = "none"
    epoch: int = 0
    token: ClaimToken | None = None
    owner: NodeId | None = None


def ready(work: Work) -> Work:
    """There is something to do. A claim in force sees to it itself."""
    return work if work.status == "claimed" else Work("ready", work.epoch)


def claim(work: Work, owner: NodeId, token: ClaimToken, *, lapsed: bool) -> Work | None:
    """The work with a new holder; None if it is not to be had.

    ``lapsed``: the present owner's lease is over, or the owner is proven dead.
    """
    if work.status == "ready" or (work.status == "claimed" and lapsed):
        return Work("claimed", work.epoch + 1, token, owner)
    return None


def release(work: Work) -> Work:
    return Work("none", work.epoch)


def give_back(work: Work) -> Work:
    """Unfinished, by its holder's own will: the next claim pays no attempt for it."""
    return Work("ready", work.epoch)


def holds(work: Work, fence: Fence) -> bool:
    return work.status == "claimed" and work.epoch == fence.epoch and work.token == fence.token
