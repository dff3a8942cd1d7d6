"""The way in: which transport the arguments mean."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from postroom.client.room import Room
from postroom.client.sync import SyncRoom
from postroom.client.transport import Transport
from postroom.errors import UsageError

if TYPE_CHECKING:
    from postroom.flow.core import Core

# What a runtime may take to drain where nobody says, with a margin: in seconds.
_DRAIN_S = 25.0
_MARGIN_S = 5.0


class Embedded(Enum):
    """Says of ``command`` that it was not given."""

    HERE = "here"


HERE: Final = Embedded.HERE


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    command: Sequence[str] | Embedded | None = HERE,
    database: str | None = None,
    model: str | None = None,
    core: Core | None = None,
    drain: float | None = None,
    reconnect: float = 60,
    client: str = "postroom-python",
) -> Room:
    """A runtime to work with; ``async with`` it.

    - ``connect(database=…, model=…)`` or ``connect(core=…)`` runs one in this process;
    - ``connect(command=None, database=…, model=…)`` starts `postroom serve --stdio` as a child;
      ``command`` may be another program with its arguments, which then says everything itself;
    - ``connect("ws://127.0.0.1:8321/ws", token=…)`` talks to a daemon. ``token`` None: that of
      ``POSTROOM_TOKEN``, or for this machine's daemon the one it keeps in its home.

    ``drain`` is how many seconds open turns may take to end when a runtime of one's own is closed
    (None: its default). ``reconnect`` is for how many seconds a lost socket is tried again.

    Raises:
        UsageError: the arguments do not go together.
    """
    local = {"database": database, "model": model, "core": core, "drain": drain}
    given = [name for name, value in local.items() if value is not None]
    transport: Transport
    if address is not None:
        if command is not HERE or given:
            wrong = [*([] if command is HERE else ["command"]), *given]
            raise UsageError(f"{', '.join(wrong)}: a daemon at an address decides that itself")
        transport = _socket(address, token)
    elif token is not None:
        raise UsageError("a token is for an address", hint="as connect('ws://…/ws', token=…)")
    elif isinstance(command, Embedded):
        from postroom.client.embedded import EmbeddedTransport

        if core is not None and model is not None:
            raise UsageError("core and model: a core names its own models")
        transport = EmbeddedTransport(
            database=database,
            model=model,
            core=core,
            drain_ms=None if drain is None else int(drain * 1000),
        )
    else:
        transport = _child(command, given, database=database, model=model, drain=drain)
    return Room(transport, client=client, reconnect_s=reconnect)


def connect_sync(
    address: str | None = None,
    *,
    token: str | None = None,
    command: Sequence[str] | Embedded | None = HERE,
    database: str | None = None,
    model: str | None = None,
    core: Core | None = None,
    drain: float | None = None,
    reconnect: float = 60,
    client: str = "postroom-python",
) -> SyncRoom:
    """`connect` for code that does not await; ``with`` it. It works inside a running event loop, too."""
    room = connect(
        address,
        token=token,
        command=command,
        database=database,
        model=model,
        core=core,
        drain=drain,
        reconnect=reconnect,
        client=client,
    )
    return SyncRoom(room, close_s=(_DRAIN_S if drain is None else drain) + 4 * _MARGIN_S)


def _child(
    command: Sequence[str] | None,
    given: list[str],
    *,
    database: str | None,
    model: str | None,
    drain: float | None,
) -> Transport:
    from postroom.client.child import ChildTransport, default_command

    if "core" in given:
        raise UsageError("core: a process of its own reads its cores from Postroom's home")
    if isinstance(command, str):
        raise UsageError("command is a list of words, not one text")
    if command is not None and [name for name in given if name != "drain"]:
        raise UsageError(f"{', '.join(given)}: say it in the command")
    words = list(
        default_command(database=database, model=model, drain_s=drain)
        if command is None
        else command
    )
    return ChildTransport(words, drain_s=_DRAIN_S if drain is None else drain + _MARGIN_S)


def _socket(address: str, token: str | None) -> Transport:
    parts = urlsplit(address)
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise UsageError(
            f"{address!r} is no address of a web socket", hint="as ws://127.0.0.1:8321/ws"
        )
    from postroom.client.socket import SocketTransport

    return SocketTransport(address, _known_token(parts.hostname) if token is None else token)


def _known_token(host: str) -> str:
    from postroom.home import environment, home

    environ = environment()
    if token := environ.get("POSTROOM_TOKEN"):
        return token
    path = home(environ) / "socket.token"
    # It is shown to nobody but a daemon of this machine.
    if _is_loopback(host) and path.exists():
        return path.read_text().strip()
    raise UsageError("there is no token", hint="token=…, or POSTROOM_TOKEN in the environment")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
