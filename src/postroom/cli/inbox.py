"""`postroom inbox`: see what is pending, and take messages out."""

from __future__ import annotations

import sys
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
    with_store,
)
from postroom.errors import InputError

if TYPE_CHECKING:
    from postroom.ports.store import Store
    from postroom.scripts.log import PendingInfo

app = typer.Typer(help="See and edit what is pending in a session.", no_args_is_help=True)


@app.command("list")
def list_(
    session: SessionArgument, db: Database = None, output: OutputOption = Output.text
) -> None:
    """List pending messages, in the order in which they will be taken."""
    from postroom.domain.ids import session_id
    from postroom.scripts.log import list_pending

    async def work(store: Store) -> list[PendingInfo]:
        return await store.read(list_pending, session_id(session))

    pending = with_store(database_of(db), work)
    if output is Output.json:
        print(msgspec.json.encode(pending).decode())
        return
    if not pending:
        print("Nothing is pending.", file=sys.stderr)
        return
    from postroom.domain.message import text_of

    print_table(
        ["message", "list", "text"],
        [
            [p.message.id, p.list.replace("_", "-"), text_of(p.message.content)[:200]]
            for p in pending
        ],
    )


@app.command()
def remove(
    session: SessionArgument,
    message: Annotated[str, typer.Argument(help="Message id, as `inbox list` shows it.")],
    db: Database = None,
) -> None:
    """Take one pending message out. Fails if the agent was quicker."""
    from postroom import mint
    from postroom.domain.ids import message_id, session_id
    from postroom.scripts.inbox import remove_message

    async def work(store: Store) -> bool:
        return await store.write(
            remove_message, session_id(session), message_id(message), mint.claim_token()
        )

    if not with_store(database_of(db), work):
        raise InputError(
            f"{message} is not pending in {session}",
            hint="it was taken already, or never was there: `postroom session events` tells",
        )
