"""The command line: maps words to calls, prints answers, turns errors into exit codes."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading

import typer

from postroom.cli.run import run_command
from postroom.cores import load_http
from postroom.errors import PostroomError, UsageError

_OFFLINE = re.compile("(--model=|-m)?(scripted|local):")

app = typer.Typer(
    name="postroom",
    help="A durable runtime for AI agents: nothing acknowledged is ever lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run_command)


def _add_the_others() -> None:
    """Not for `run`, which programs start often: a tenth of a second is spent on them."""
    from postroom.cli import db, inbox, model, outbox, protocol, session
    from postroom.cli.doctor import doctor_command
    from postroom.cli.init import init_command
    from postroom.cli.serve import serve_command
    from postroom.cli.usage import usage_command

    app.command("serve")(serve_command)
    app.add_typer(session.app, name="session")
    app.add_typer(inbox.app, name="inbox")
    app.add_typer(outbox.app, name="outbox")
    app.add_typer(model.app, name="model")
    app.command("usage")(usage_command)
    app.command("init")(init_command)
    app.command("doctor")(doctor_command)
    app.add_typer(db.app, name="db")
    app.add_typer(protocol.app, name="protocol")


def _version(value: bool) -> None:
    if value:
        from postroom import __version__

        print(f"postroom {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """The entry point. Errors of ours are one line and a hint, and an exit code.

    What the runtime logs is for daemons: a command says what matters itself. POSTROOM_LOG=debug,
    info or warning shows it on standard error.
    """
    level = os.environ.get("POSTROOM_LOG")
    if level:
        logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    else:
        logging.getLogger("postroom").addHandler(logging.NullHandler())
    if sys.argv[1:2] == ["run"]:
        gc.disable()  # until it has started: what is imported is never garbage
        if not any(map(_OFFLINE.match, sys.argv)):
            # The HTTP client takes a while to import: long enough to begin before anything else.
            # No daemon: an import that the interpreter's end cuts off takes the process down.
            threading.Thread(target=load_http).start()
    else:
        _add_the_others()
    try:
        app(standalone_mode=True)
    except PostroomError as error:
        report(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        # The reader of our output has gone: that is no error of anybody's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def report(error: PostroomError) -> None:
    print(f"postroom: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
