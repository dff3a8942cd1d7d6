"""Parts to test with, the same that Postroom's own tests use.

Played by hand: `PuppetModel`, `PuppetTool`, `ManualClock`. Prepared: `scripted`, `PlainTool`. In the
way on purpose: `FaultyStore`. Without a disk: `MemoryStore`. A chat platform that does as it is told:
`Loopback` over `Platform` or `FilePlatform`. In any order: `every_schedule`,
`random_schedules`, and what stands at their gates.
"""

from postroom.testing.clock import ManualClock
from postroom.testing.file_platform import FilePlatform
from postroom.testing.loopback import Loopback
from postroom.testing.memory import MemoryStore
from postroom.testing.model import Asked, PuppetModel, calling, scripted
from postroom.testing.output import HeardOutput
from postroom.testing.platform import Platform
from postroom.testing.scheduler import (
    ScheduledModel,
    ScheduledStore,
    ScheduledTool,
    Scheduler,
    every_schedule,
    random_schedules,
)
from postroom.testing.store import FaultyStore, StoreWrapper
from postroom.testing.tool import Called, PlainTool, PuppetTool

__all__ = [
    "Asked",
    "Called",
    "FaultyStore",
    "FilePlatform",
    "HeardOutput",
    "Loopback",
    "ManualClock",
    "MemoryStore",
    "PlainTool",
    "Platform",
    "PuppetModel",
    "PuppetTool",
    "ScheduledModel",
    "ScheduledStore",
    "ScheduledTool",
    "Scheduler",
    "StoreWrapper",
    "calling",
    "every_schedule",
    "random_schedules",
    "scripted",
]
