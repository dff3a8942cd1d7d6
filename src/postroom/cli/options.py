"""Options that several commands share, and how they open a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from postroom.errors import UsageError
from postroom.home import default_database

if TYPE_CHECKING:
    from rich.text import Text

    from postroom.ports.store import Store

R = TypeVar("R")


class Output(StrEnum):
    text = "text"
    json = "json"


def complete_session(incomplete: str) -> list[str]:
    """The newest session ids of the default database, for the shell's completion."""
    path = default_database()
    if not Path(path).exists():
        return []
    from postroom.scripts.log import list_sessions

    async def ids(store: Store) -> list[str]:
        return [s.session_id for s in await store.read(list_sessions, limit=100)]

    try:
        return [i for i in with_store(path, ids) if i.startswith(incomplete)]
    except Exception:
        return []


Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="POSTROOM_DB",
        help="Database file, or postgresql:// URL.",
        show_default="in your data folder",
    ),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text or json.")]
SessionArgument = Annotated[
    str, typer.Argument(help="Session id.", autocompletion=complete_session)
]


def database_of(option: str | None) -> str:
    return option or default_database()


def with_store(database: str, work: Callable[[Store], Coroutine[Any, Any, R]]) -> R:
    """Runs some work on an existing database; makes none by accident."""
    if "://" not in database and not Path(database).exists():
        raise UsageError(
            f"there is no database {database}",
            hint="`postroom run` makes one; --db or POSTROOM_DB names another",
        )

    async def main() -> R:
        from postroom.app import open_store

        store = await open_store(database)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return asyncio.run(main())


def when(ms: int) -> str:
    """A Unix time in milliseconds as local time, for people."""
    from datetime import datetime

    return datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def print_table(columns: list[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """A table for people: ruled and coloured in a terminal, plain when piped.

    A cell is shown as it stands: what looks like markup in it is text.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell) if isinstance(cell, str) else cell for cell in row])
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
