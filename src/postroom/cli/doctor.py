"""`postroom doctor`: looks at everything a run depends on, and names what is wrong.

It writes nothing. Each line is one finding: ok, a warning, or a problem with what to do about it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import msgspec
import typer

from postroom.cli.options import Database, Output, OutputOption, database_of
from postroom.errors import ModelError, PostroomError
from postroom.home import environment, home

if TYPE_CHECKING:
    from postroom.ports.model import ModelRequest
    from postroom.ports.store import Tx
    from postroom.scripts.health import Standing

_REACH_S = 5.0
_DISK_BYTES_MIN = 200 * 1024 * 1024
_EARLIEST_MS = 1_760_000_000_000


class Finding(msgspec.Struct, frozen=True):
    """``what`` was looked at; ``hint`` says what to do (None: nothing)."""

    level: Literal["ok", "warning", "problem"]
    what: str
    text: str
    hint: str | None = None


def doctor_command(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model to reach.", show_default="as run")
    ] = None,
    offline: Annotated[
        bool, typer.Option(help="Do not try to reach the model and the channels.")
    ] = False,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Check configuration, keys, the model, channels, deliveries, the database, disk and clock.

    Exit code 1 if there is a problem. Nothing is changed.
    """
    findings = asyncio.run(_examine(model, database_of(db), offline))
    if output is Output.json:
        print(json.dumps([msgspec.to_builtins(f) for f in findings]))
    else:
        for finding in findings:
            _print(finding)
    if any(f.level == "problem" for f in findings):
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    colours = {"ok": "32", "warning": "33", "problem": "31"}
    level = finding.level
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        level = f"\x1b[{colours[level]}m{level}\x1b[0m"
    print(f"{level:<8} {finding.what}: {finding.text}")
    if finding.hint:
        print(f"         {finding.hint}")


async def _examine(model: str | None, database: str, offline: bool) -> list[Finding]:
    findings: list[Finding] = []
    environ = _guarded("environment", findings, environment) or dict(os.environ)
    findings += _cores(environ)
    channels = _Channels(environ)
    findings += channels.findings
    findings += _disk(database)
    findings += _clock()
    checks: list[Awaitable[list[Finding]]] = [_database(database, channels.names)]
    if not offline:
        checks.append(_model(model, environ))
        checks += [_call(name, url) for name, url in channels.urls.items()]
    for found in await asyncio.gather(*checks):
        findings += found
    return findings


def _guarded(
    what: str, findings: list[Finding], check: Callable[[], dict[str, str]]
) -> dict[str, str] | None:
    try:
        return check()
    except PostroomError as error:
        findings.append(_problem(what, error))
        return None


def _problem(what: str, error: PostroomError) -> Finding:
    return Finding("problem", what, error.message, error.hint)


def _cores(environ: dict[str, str]) -> list[Finding]:
    from postroom.cores import core_ids, read_core

    place = home(environ) / "cores"
    findings: list[Finding] = []
    for core_id in core_ids(place):
        try:
            read_core(core_id, place)
        except PostroomError as error:
            findings.append(_problem(f"core {core_id}", error))
        else:
            findings.append(Finding("ok", f"core {core_id}", "its files are right"))
    return findings


class _Channels:
    """What the cores' files say of channels. ``names`` are all that are configured, right or wrong."""

    def __init__(self, environ: dict[str, str]) -> None:
        from postroom.cores import open_channels

        opened = open_channels(environ)
        self.urls = opened.urls
        self.names = frozenset({*opened.connected, *(f.channel for f in opened.faults)})
        self.findings = [
            _problem(f"channel {f.channel}", f.error) for f in opened.faults if f.channel
        ]
        for name in opened.channels:
            access = opened.connected[name].access
            hint = None
            if not access.everyone and not access.senders:
                hint = f'set allow = ["sender id"] or everyone = true in channels.{name}'
            self.findings.append(
                Finding("warning", f"channel {name}", "nobody may talk there", hint)
                if hint
                else Finding("ok", f"channel {name}", "its configuration is right")
            )


async def _call(name: str, url: str) -> list[Finding]:
    """Whether somebody listens where a channel sends. Nothing is sent."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(_REACH_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
    except (OSError, TimeoutError):
        text = f"nobody listens at {parts.hostname}:{port}"
        hint = "deliveries wait until somebody does; is the url right, and is the receiver up?"
        return [Finding("warning", f"channel {name}", text, hint)]
    return [Finding("ok", f"channel {name}", f"somebody listens at {parts.hostname}:{port}")]


def _disk(database: str) -> list[Finding]:
    folder = home() if "://" in database else Path(database).parent
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        hint = "give yourself write permission, or use --db"
        return [Finding("problem", "disk", f"{folder} cannot be written", hint)]
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES_MIN:
        return [
            Finding("problem", "disk", f"only {free / 1e6:,.0f} MB are free", "free some space")
        ]
    return [Finding("ok", "disk", f"{free / 1e9:,.1f} GB are free")]


def _clock() -> list[Finding]:
    now = time.time_ns() // 1_000_000
    if now < _EARLIEST_MS:
        return [Finding("problem", "clock", "it is set to the past", "set the machine's clock")]
    return [Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S %z"))]


def _file(path: Path) -> list[Finding]:
    """What a look at the file itself tells; nothing if it is sound."""
    from postroom.upkeep import check_sqlite

    if not path.exists():
        return [Finding("ok", "database", f"{path} is made by the first run")]
    hint = "restore a backup: `postroom db restore`; the file was not changed"
    return [Finding("problem", "database", str(d), hint) for d in check_sqlite(path)]


async def _database(database: str, channels: frozenset[str]) -> list[Finding]:
    if "://" not in database:
        found = await asyncio.to_thread(_file, Path(database))
        if found:
            return found
    from postroom.app import open_store

    try:
        store = await open_store(database)
    except PostroomError as error:
        return [_problem("database", error)]
    try:
        return await store.read(_look, store.node, channels)
    except PostroomError as error:
        return [_problem("database", error)]
    finally:
        await store.aclose()


def _look(tx: Tx, node: str, channels: frozenset[str]) -> list[Finding]:
    """What the tables tell: the newest event's time, claims whose owner is gone, deliveries."""
    from postroom.scripts.health import standing

    now = tx.now()
    sessions, newest = tx.execute("SELECT count(*), coalesce(max(updated_at), 0) FROM session")[0]
    findings = [Finding("ok", "database", f"{sessions} sessions, schema up to date")]
    if newest > now + 60_000:
        text = f"the newest event is {(newest - now) / 60_000:,.0f} minutes in the future"
        findings.append(Finding("problem", "clock", text, "set the machine's clock"))
    stuck = tx.execute(
        "SELECT kind, key FROM work WHERE status = 'claimed' AND owner <> :node AND NOT EXISTS"
        " (SELECT 1 FROM node WHERE node.id = work.owner AND node.expires_at > :now) LIMIT 20",
        {"node": node, "now": now},
    )
    drives = [str(key) for kind, key in stuck if not kind.startswith("delivery.")]
    sends = [str(key) for kind, key in stuck if kind.startswith("delivery.")]
    if drives:
        text = f"left by a dead process: {', '.join(drives)}"
        hint = "`postroom serve`, or the next `postroom run` with that session, recovers it"
        findings.append(Finding("warning", "claims", text, hint))
    if sends:
        text = f"left by a dead process: {', '.join(sends)}"
        hint = "the next `postroom serve` finds out what became of them, or shows them as unknown"
        findings.append(Finding("warning", "claims", text, hint))
    return findings + _deliveries(standing(tx), channels)


def _deliveries(found: Standing, channels: frozenset[str]) -> list[Finding]:
    findings: list[Finding] = []
    unknown = found.deliveries.get("unknown", 0)
    if unknown:
        hint = "`postroom outbox list --status unknown` shows them, `outbox resolve` settles one"
        findings.append(Finding("warning", "deliveries", f"{unknown} are unknown", hint))
    failed = found.deliveries.get("failed", 0)
    if failed:
        hint = "`postroom outbox list --status failed` says why, `outbox redeliver` tries again"
        findings.append(Finding("warning", "deliveries", f"{failed} have failed", hint))
    for name in found.waiting:
        if name not in channels:
            text = f"some wait for the channel {name}, which no core has"
            hint = f"configure channels.{name} again, or give them up: `postroom outbox abandon`"
            findings.append(Finding("warning", "deliveries", text, hint))
    return findings


async def _model(asked: str | None, environ: dict[str, str]) -> list[Finding]:
    from postroom.cores import models_of, read_core

    try:
        file, _, _ = read_core("default", home(environ) / "cores")
        refs = models_of(file, asked, environ)
    except PostroomError as error:
        return [_problem("model", error)]
    return [await _reach(ref, environ) for ref in refs]


async def _reach(ref: str, environ: dict[str, str]) -> Finding:
    """Asks a model's server for a word. A local or scripted model is only opened."""
    from postroom.cores import open_any

    try:
        model = open_any(ref, environ)
    except PostroomError as error:
        return _problem(f"model {ref}", error)
    try:
        if ref.startswith(("local:", "scripted:")):
            return Finding("ok", f"model {ref}", "it is here")
        async with asyncio.timeout(_REACH_S):
            await model.respond(_word(), lambda _: None)
    except TimeoutError:
        text = f"no answer in {_REACH_S:g} s"
        return Finding("warning", f"model {ref}", text, "is the server slow, or far away?")
    except ModelError as error:
        return _problem(f"model {ref}", error)
    finally:
        await model.aclose()
    return Finding("ok", f"model {ref}", "it answers")


def _word() -> ModelRequest:
    from postroom.domain.context import ContextMessage
    from postroom.domain.event import Params
    from postroom.domain.ids import SessionId
    from postroom.domain.message import Text
    from postroom.ports.model import ModelRequest

    hello = ContextMessage("user", (Text("Say ok."),), 1)
    return ModelRequest(SessionId("doctor"), 1, "", [hello], (), Params(max_tokens=16))
