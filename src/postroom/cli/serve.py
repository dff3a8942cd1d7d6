"""`postroom serve`: the daemon. Agents, delivery, channels and HTTP in one process.

It holds nothing that a restart may not lose. Told to stop it drains: it takes and claims nothing new,
lets open turns and calls end, and leaves what does not end in time for the next start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from postroom.cli.ending import Signals, to_the_end
from postroom.cli.options import Database, database_of
from postroom.errors import PostroomError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from postroom.cores import OpenChannels
    from postroom.flow.core import CoreSource


def serve_command(
    core: Annotated[
        list[str] | None,
        typer.Option(
            help="Run the channels of this core; may be repeated.", show_default="of all cores"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="PROVIDER:NAME for every core, whatever it names."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 is any free one.")
    ] = 8321,
    drain: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for open turns and calls to end in.", show_default="20"),
    ] = None,
    stdio: Annotated[
        bool,
        typer.Option("--stdio", help="Serve one client on standard input and output instead."),
    ] = False,
    db: Database = None,
) -> None:
    """Run the daemon: agents, delivery, and the channels that cores configure.

    A core's core.toml has a table [channels.NAME] for each channel; docs/how-to/webhook.md shows one
    from its secret to the first answer. /healthz tells how things are (503: something does not
    work), /metrics is for Prometheus. Nothing else than this machine reaches it unless --host says so.

    SIGTERM or Ctrl-C drains: nothing new is taken in or claimed, open turns and calls may end within
    --drain; a turn that does not is gone on with by the next start. Kill it at any moment and start
    it again: nothing that was acknowledged is lost.

    Exit codes: 0 drained; 2 usage or configuration; 1 the database failed; 130 or 143 when a second
    Ctrl-C or SIGTERM ended it at once.
    """
    if not os.environ.get("POSTROOM_LOG"):
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
    if stdio:
        from postroom.cli.stdio import serve_one

        serve_one(model=model, drain_s=drain, database=database_of(db))
        return
    from postroom.server.http import listen

    listening = listen(host, port)
    daemon = _Daemon(
        cores=core,
        model=model,
        drain_s=drain,
        database=database_of(db),
        listening=listening,
        host=host,
    )
    try:
        asyncio.run(to_the_end(daemon.main()))
    finally:
        listening.close()


class _Daemon:
    def __init__(
        self,
        *,
        cores: list[str] | None,
        model: str | None,
        drain_s: float | None,
        database: str,
        listening: socket.socket,
        host: str,
    ) -> None:
        self._cores = cores
        self._model = model
        self._drain_ms = None if drain_s is None else int(drain_s * 1000)
        self._database = database
        self._listening = listening
        self._host = host

    async def main(self) -> int:
        from postroom.app import artifacts_for, open_room
        from postroom.cores import builtin_cores, open_channels
        from postroom.home import environment
        from postroom.server.http import HttpServer, Watched
        from postroom.server.socket import SocketServer
        from postroom.server.token import VARIABLE, socket_token, token_file

        signals = Signals()
        environ = environment()
        token = socket_token(environ)
        cores = builtin_cores(model=self._model, environ=environ)
        artifacts = artifacts_for(self._database)
        opened = open_channels(environ, only=self._cores, artifacts=artifacts)
        async with open_room(
            cores,
            database=self._database,
            artifacts=artifacts,
            channels=opened.channels,
            connected=opened.connected,
        ) as room:
            _try_cores(room.cores, opened, self._cores)
            faults = {f.channel or f"core {f.core_id}": f.error.message for f in opened.faults}
            names = environ.get("POSTROOM_HOSTS", "").split(",")
            sockets = SocketServer(
                room, token, host=self._host, hosts=[n.strip() for n in names if n.strip()]
            )
            assert room.channels is not None
            server = HttpServer(
                Watched(room.store, room.channels, room.outbox, faults),
                [*opened.routes, sockets.route()],
            )
            try:
                await server.start(self._listening)
                # A log is read by more than those who may act as the operator.
                kept = VARIABLE if VARIABLE in environ else str(token_file(environ))
                self._tell(opened, token if sys.stderr.isatty() else f"see {kept}")
                await signals.stop.wait()
                _say(f"draining for at most {(self._drain_ms or room.limits.drain_ms) / 1000:g} s")
                server.drain()
                await room.aclose(drain_ms=self._drain_ms)
            finally:
                await sockets.aclose()
                await server.aclose()
        _say("drained")
        return 0

    def _tell(self, opened: OpenChannels, token: str) -> None:
        host, port = self._listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        database = self._database.rsplit("@", maxsplit=1)[-1]
        for name, url in {**dict.fromkeys(opened.channels), **opened.urls}.items():
            path = f"/webhook/{name}"
            to = f"answers go to {urlsplit(url).hostname}" if url else "there is no URL for answers"
            _say(f"channel {name} takes POST {path}, {to}")
            if not _has_senders(opened.connected, name):
                _say(f"  nobody may talk there yet: set allow or everyone of channels.{name}")
        for fault in opened.faults:
            what = f"channel {fault.channel}" if fault.channel else f"core {fault.core_id}"
            _say(f"{what} does not run: {fault.error.message}")
            if fault.error.hint:
                _say(f"  {fault.error.hint}")
        if not opened.channels and not opened.faults:
            _say("no core has a channel: [channels.NAME] in a core.toml makes one")
        _say(f"programs connect to ws://{host}:{port}/ws, token: {token}")
        _say(f"serving http://{host}:{port} from {database}")


def _try_cores(cores: CoreSource, opened: OpenChannels, only: list[str] | None) -> None:
    """A core that cannot be opened says so now, and not with the first message. It stops no other."""
    from postroom.domain.ids import CoreId

    used = {c.core_id for name, c in opened.connected.items() if name in opened.channels}
    for core_id in sorted(used | {CoreId(name) for name in only or ()}) or [CoreId("default")]:
        try:
            cores(core_id)
        except PostroomError as error:
            _say(f"core {core_id} cannot work: {error.message}")
            if error.hint:
                _say(f"  {error.hint}")


def _has_senders(connected: Mapping[str, object], name: str) -> bool:
    from postroom.flow.inbound import Connected

    known = connected.get(name)
    return isinstance(known, Connected) and (known.access.everyone or bool(known.access.senders))


def _say(line: str) -> None:
    print(f"postroom: {line}", file=sys.stderr, flush=True)
