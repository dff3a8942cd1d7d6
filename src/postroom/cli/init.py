"""`postroom init`: makes the home and a first core, by asking or by flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from postroom.errors import ConfigError
from postroom.home import environment, home


def init_command(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="PROVIDER:NAME for the default core.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="File that holds the provider's key; its path is kept, not the key.",
            show_default="the key's variable in the environment",
        ),
    ] = None,
    core: Annotated[str, typer.Option(help="Id of the core to make.")] = "default",
    force: Annotated[bool, typer.Option(help="Write over a core that is there.")] = False,
) -> None:
    """Make a core that works. Without flags it asks, if it is run in a terminal."""
    from postroom.cores import PERSONA, open_any
    from postroom.domain.ids import session_id
    from postroom.upkeep import parse_model_ref

    session_id(core)  # a core's id has the same form
    environ = environment()
    if model is None:
        model = _ask(environ)
    ref = parse_model_ref(model)
    place = home(environ)
    folder = place / "cores" / core
    path = folder / "core.toml"
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already", hint="edit it, or use --force")
    if key is not None:
        _keep_key_file(place, f"{ref.provider.upper()}_API_KEY_FILE", Path(key))
        environ = environment()
    open_any(str(ref), environ)  # a missing key fails here, before anything says it is ready
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'# The core "{core}". Every setting is optional; `postroom doctor` checks them.\n'
        f'model = "{model}"\n'
        '# fallbacks = ["PROVIDER:NAME"]   # asked when the model\'s server fails\n'
        "# session_tokens_max = 1_000_000  # stop a session there, with a notice\n"
        "# day_cost_max_usd = 5.0          # where the model's price is known\n"
        '# permissions.bash = "ask"        # or "allow", "deny"; for a tool with effects\n'
    )
    words = folder / "PERSONA.md"
    if not words.exists():
        words.write_text(PERSONA + "\n")
    print(f'Made {path}\n  and {words}.\nTry: postroom run "Hello!"', file=sys.stderr)


def _ask(environ: dict[str, str]) -> str:
    from postroom.cores import CoreFile, models_of
    from postroom.errors import NoModel

    try:
        default = models_of(CoreFile(), None, environ)[0]
    except NoModel:
        if not sys.stdin.isatty():
            raise
        default = None
    if not sys.stdin.isatty():
        assert default is not None
        return default
    return typer.prompt("Model (PROVIDER:NAME; `postroom model list` shows some)", default=default)


def _keep_key_file(place: Path, variable: str, path: Path) -> None:
    """Adds a reference to the home's .env, readable by its owner alone."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint="--key names a file that holds the key")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = place / ".env"
    lines = file.read_text().splitlines() if file.exists() else []
    lines = [line for line in lines if not line.startswith(f"{variable}=")]
    lines.append(f"{variable}={path.absolute()}")
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write("\n".join(lines) + "\n")
