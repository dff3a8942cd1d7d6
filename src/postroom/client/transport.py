"""What a transport is to the client: something that opens a link to a runtime, and sees to its end."""

from __future__ import annotations

from typing import Protocol

from postroom.errors import Disconnected
from postroom.wire.rpc import Link


class Opened(Protocol):
    """An open link and what stands behind it."""

    @property
    def link(self) -> Link: ...

    async def obituary(self) -> Disconnected:
        """Why the link is gone, in words; at most a second after it went."""
        ...

    async def aclose(self) -> None:
        """Gives up what was opened, once the link is closed. Bounded; called once."""
        ...


class Transport(Protocol):
    """``survives``: the runtime outlives the link, so that what waits may wait for another link."""

    @property
    def survives(self) -> bool: ...

    async def open(self) -> Opened:
        """A new link. Cancelling it leaves nothing behind.

        Raises:
            Disconnected: it could not be opened now; it may be later.
            PostroomError: it cannot be opened like this.
        """
        ...
