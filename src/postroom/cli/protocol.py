"""`postroom protocol`: what programs speak with a runtime."""

from __future__ import annotations

import sys

import typer

app = typer.Typer(help="What programs speak with a runtime.", no_args_is_help=True)


@app.callback()
def _root() -> None:  # pyright: ignore[reportUnusedFunction]
    pass


@app.command("schema")
def schema_command() -> None:
    """Print the protocol as JSON Schema: methods, notifications, events and errors."""
    from postroom.server.schema import schema_text

    sys.stdout.write(schema_text())
