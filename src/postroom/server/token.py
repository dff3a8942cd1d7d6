"""The secret that a program shows to reach the web socket: random, kept in the home folder.

Who holds it acts as the operator.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from postroom.errors import ConfigError
from postroom.home import home

VARIABLE = "POSTROOM_TOKEN"
FILE = "socket.token"

_CHARS_MIN = 16


def socket_token(environ: Mapping[str, str], folder: Path | None = None) -> str:
    """The token of this machine's daemon; made at first use, in a file that only its owner reads.

    ``POSTROOM_TOKEN`` in ``environ`` wins. ``folder`` None: the home folder.

    Raises:
        ConfigError: the file is open to others, or holds no token, or cannot be written.
    """
    given = environ.get(VARIABLE)
    if given is not None:
        return _checked(given.strip(), VARIABLE)
    path = token_file(environ) if folder is None else folder / FILE
    try:
        with contextlib.suppress(FileExistsError):
            _make(path)
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(
                f"{path} can be read by others",
                hint="delete it: a new one is made at the next start",
            )
        return _checked(path.read_text().strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None


def token_file(environ: Mapping[str, str]) -> Path:
    """Where the token is kept."""
    return home(environ) / FILE


def _make(path: Path) -> None:
    """Writes it whole or not at all: another process may start in the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    draft = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        os.link(draft, path)
    finally:
        draft.unlink()


def _checked(token: str, where: str) -> str:
    if len(token) < _CHARS_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where} holds no token: {_CHARS_MIN} or more printable characters without spaces"
        )
    return token
