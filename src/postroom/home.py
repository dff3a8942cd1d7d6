"""Where things are: the home folder, and the environment with its secrets.

The home holds ``postroom.db``, ``cores/``, ``models/`` and ``.env``. It is ``POSTROOM_HOME``, or the
platform's user data folder. Secrets come from the environment, then from the home's ``.env``; a
variable ``NAME_FILE`` names a file that holds the value of ``NAME``. A ``.env`` of the folder one
happens to stand in is never read: it could send a key to a stranger's server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from postroom.errors import ConfigError

_FILE_SUFFIX = "_FILE"
_SECRET_BYTES_MAX = 64 * 1024


def home(environ: Mapping[str, str] | None = None) -> Path:
    named = (os.environ if environ is None else environ).get("POSTROOM_HOME")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_data_path

    return user_data_path("postroom", appauthor=False)


def default_database(environ: Mapping[str, str] | None = None) -> str:
    return str(home(environ) / "postroom.db")


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The process's environment, completed by the home's ``.env`` and by ``NAME_FILE`` references.

    What is set already wins. Only references of keys, tokens, secrets and passwords are followed.

    Raises:
        ConfigError: a named file cannot be read, or is no text; the message names the variable
            and the file, never the value.
    """
    values = dict(os.environ if environ is None else environ)
    file = home(values) / ".env"
    if file.is_file():
        from dotenv import dotenv_values

        try:
            for name, value in dotenv_values(file, interpolate=False).items():
                if value is not None:
                    values.setdefault(name, value)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {_why(error)}") from None
    for name in [n for n in values if n.endswith(_FILE_SUFFIX) and _is_secret(n)]:
        target = name.removesuffix(_FILE_SUFFIX)
        if target not in values and values[name]:
            values[target] = _read_secret(name, Path(values[name]).expanduser())
    return values


def _is_secret(name: str) -> bool:
    stem = name.removesuffix(_FILE_SUFFIX)
    return stem.endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD"))


def _read_secret(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_SECRET_BYTES_MAX + 1)
        if len(data) > _SECRET_BYTES_MAX:
            raise ConfigError(f"{name} names {path}, which is too large for a secret")
        return data.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{name} names {path}, which cannot be read: {_why(error)}",
            hint="check the path and its permissions",
        ) from None


def _why(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "error") if isinstance(error, OSError) else "it is not UTF-8 text"
