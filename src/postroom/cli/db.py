"""`postroom db`: migrate, check, back up and restore."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from postroom.cli.options import Database, database_of
from postroom.errors import ConfigError

app = typer.Typer(help="Migrate, check, back up and restore the database.", no_args_is_help=True)


@app.command()
def migrate(db: Database = None) -> None:
    """Bring the database's schema up to date. Opening it does the same."""
    from postroom.upkeep import VERSION

    database = database_of(db)

    async def main() -> None:
        from postroom.app import open_store

        await (await open_store(database)).aclose()

    asyncio.run(main())
    print(f"{_shown(database)} has schema version {VERSION}.")


@app.command()
def check(db: Database = None) -> None:
    """Look for damage. Writes nothing; exit code 1 if there is any."""
    from postroom.upkeep import check_sqlite

    findings = check_sqlite(_file(database_of(db)))
    for finding in findings:
        print(finding)
    if findings:
        raise typer.Exit(1)
    print("No damage found.")


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(help="A new folder for the copy.")],
    db: Database = None,
) -> None:
    """Copy the database and its artifacts, also while Postroom runs."""
    from postroom.upkeep import back_up

    done = back_up(_file(database_of(db)), folder)
    print(f"{folder}: {done.sessions} sessions, {done.artifacts} artifacts, {done.bytes:,} bytes.")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(help="A folder that `db backup` made.")],
    db: Database = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Put a backup in the database's place. What is there now is kept beside it.

    Nothing that the backup knows of is sent again: deliveries that were not finished become
    `unknown`, for you to decide.
    """
    from postroom.upkeep import restore as put_back

    target = _file(database_of(db), must_exist=False)
    if not yes:
        typer.confirm(f"Put {folder} in the place of {target}?", abort=True, err=True)
    for line in put_back(folder, target):
        print(line)


def _file(database: str, *, must_exist: bool = True) -> Path:
    if "://" in database:
        raise ConfigError(
            "this command is for SQLite files",
            hint="use PostgreSQL's own tools: pg_dump, pg_restore, pg_amcheck",
        )
    path = Path(database)
    if must_exist and not path.exists():
        raise ConfigError(f"there is no database {path}", hint="--db or POSTROOM_DB names another")
    return path


def _shown(database: str) -> str:
    return database if "://" not in database else database.rsplit("@", maxsplit=1)[-1]
