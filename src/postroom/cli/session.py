"""`postroom session`: list, show, events, export, fork, delete."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from postroom.cli.options import (
    Database,
    Output,
    OutputOption,
    SessionArgument,
    database_of,
    print_table,
    when,
    with_store,
)
from postroom.errors import UnknownSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from postroom.domain.event import Event
    from postroom.ports.store import Store
    from postroom.scripts.log import SessionInfo

app = typer.Typer(help="Look at sessions, export, fork and delete them.", no_args_is_help=True)


class Format(StrEnum):
    jsonl = "jsonl"
    markdown = "markdown"


@app.command("list")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest first.")] = 50,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """List sessions, the newest first."""
    from postroom.scripts.log import list_sessions

    async def work(store: Store) -> list[SessionInfo]:
        return await store.read(list_sessions, limit=limit)

    sessions = with_store(database_of(db), work)
    if output is Output.json:
        print(msgspec.json.encode(sessions).decode())
        return
    if not sessions:
        print("No sessions yet.", file=sys.stderr)
        return
    print_table(
        ["session", "core", "status", "turns", "pending", "last active"],
        [
            [
                s.session_id,
                s.core_id,
                s.status,
                str(s.turns),
                str(s.pending),
                when(s.updated_at),
            ]
            for s in sessions
        ],
    )


@app.command()
def show(session: SessionArgument, db: Database = None, output: OutputOption = Output.text) -> None:
    """Show one session."""
    from postroom.scripts.log import session_info

    async def work(store: Store) -> SessionInfo:
        return await store.read(session_info, _id(session))

    info = with_store(database_of(db), work)
    if output is Output.json:
        print(msgspec.json.encode(info).decode())
        return
    rows = [
        ["session", info.session_id],
        ["title", info.title or ""],
        ["core", info.core_id],
        ["owner", info.owner],
        ["status", info.status],
        ["workspace", info.cwd or "none"],
        ["turns", str(info.turns)],
        ["pending", str(info.pending)],
        ["events", str(info.head_seq)],
        ["created", when(info.created_at)],
        ["last active", when(info.updated_at)],
    ]
    if info.parent:
        rows.insert(3, ["parent", info.parent])
    for name, value in rows:
        if value:
            print(f"{name:<12} {value}")


@app.command()
def events(
    session: SessionArgument,
    after: Annotated[int, typer.Option(min=0, help="Only events after this seq.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Print a session's events, one a line, in order."""

    async def work(store: Store) -> None:
        count = 0
        async for event in _events(store, session, after):
            print(event.to_json() if output is Output.json else _line(event))
            count += 1
            if limit is not None and count >= limit:
                return

    with_store(database_of(db), work)


@app.command()
def export(
    session: SessionArgument,
    format: Annotated[
        Format, typer.Option(help="jsonl: the whole log. markdown: the conversation.")
    ] = Format.jsonl,
    db: Database = None,
) -> None:
    """Write a session to standard output."""

    async def work(store: Store) -> None:
        async for event in _events(store, session, 0):
            if format is Format.jsonl:
                print(event.to_json())
            else:
                text = _markdown(event)
                if text:
                    print(text + "\n")

    with_store(database_of(db), work)


@app.command()
def fork(
    session: SessionArgument,
    at: Annotated[
        int | None,
        typer.Option("--at", min=1, help="Fork after this event.", show_default="the last turn"),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="Id of the fork.", show_default="a new one")
    ] = None,
    db: Database = None,
    output: OutputOption = Output.text,
) -> None:
    """Make a session that starts with another's history. What is pending stays behind."""
    from postroom import mint
    from postroom.domain.ids import session_id
    from postroom.scripts.log import fork_session

    fork_id = mint.session_id() if name is None else session_id(name)

    async def work(store: Store) -> int:
        return await store.write(fork_session, _id(session), fork_id, owner="operator", at_seq=at)

    head = with_store(database_of(db), work)
    if output is Output.json:
        print(json.dumps({"sessionId": fork_id, "headSeq": head}))
    else:
        print(fork_id)


@app.command()
def retry(
    session: SessionArgument, db: Database = None, output: OutputOption = Output.text
) -> None:
    """Queue the messages of failed turns again. They run with the next `postroom run`.

    Failed turns are those since the last completed one that ended in an error, refused, or at a
    limit. Each message is queued once, however often this is said.
    """
    from postroom.config import Limits
    from postroom.scripts.inbox import retry_failed

    async def work(store: Store) -> list[tuple[str, str]]:
        pairs = await store.write(
            retry_failed, _id(session), pending_max=Limits().pending_messages_max
        )
        return [(str(old), str(new)) for old, new in pairs]

    pairs = with_store(database_of(db), work)
    if output is Output.json:
        print(json.dumps([{"messageId": old, "again": new} for old, new in pairs]))
    elif not pairs:
        print("No turn has failed since the last completed one.", file=sys.stderr)
    else:
        for old, new in pairs:
            print(f"{old} again as {new}")


@app.command()
def delete(
    session: SessionArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    db: Database = None,
) -> None:
    """Delete an idle session and its log, for good."""
    from postroom.scripts.log import delete_session

    if not yes:
        typer.confirm(f"Delete {session} and all of its history?", abort=True, err=True)

    async def work(store: Store) -> bool:
        return await store.write(delete_session, _id(session))

    if not with_store(database_of(db), work):
        raise UnknownSession(
            f"there is no session {session}", hint="`postroom session list` shows them"
        )


def _id(text: str):
    from postroom.domain.ids import session_id

    return session_id(text)


async def _events(store: Store, session: str, after: int) -> AsyncIterator[Event]:
    from postroom.scripts.log import read_events

    while True:
        page = await store.read(read_events, _id(session), after, 1000)
        for event in page:
            yield event
        if len(page) < 1000:
            return
        after = page[-1].seq


def _line(event: Event) -> str:
    raw = event.raw if len(event.raw) <= 300 else event.raw[:299] + "…"
    return f"{event.seq:>6}  {when(event.at)}  {event.type:<18} {'' if raw == '{}' else raw}"


def _markdown(event: Event) -> str | None:
    from postroom.domain.event import AssistantReply, ToolCallStarted, TurnEnd, UserMessage
    from postroom.domain.message import text_of

    data = event.data
    if isinstance(data, UserMessage):
        who = data.message.source.sender or "You"
        return f"## {who}\n\n{text_of(data.message.content)}"
    if isinstance(data, AssistantReply):
        text = text_of(data.message.content)
        return f"## Assistant\n\n{text}" if text else None
    if isinstance(data, ToolCallStarted):
        return f"> tool `{data.name}` `{data.arguments}`"
    if isinstance(data, TurnEnd) and data.reason.kind != "completed":
        return f"> *turn ended: {data.reason.kind} {data.reason.message or ''}*"
    return None
