"""The environment a child process gets: the operator's own, without anything secret.

A variable goes if its name has a word that names a secret, or if its value looks like one
whatever it is called. This hides secrets from a command and from what it starts, not from one that
goes looking: it runs as the same user and may read what that user may read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_WORDS = re.compile(
    r"(?<![A-Z])(?:KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASS|PW|PWD|PAT|CREDENTIALS?"
    r"|CREDS?|AUTH|AUTHORIZATION|BEARER|COOKIES?|DSN|JWT|OTP|PRIVATE|SALT|PEPPER|WEBHOOK)(?![A-Z])"
)
_PARTS = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH_?KEY|ENCRYPTION_?KEY"
    r"|CREDENTIAL"
)
_PREFIXES = ("POSTROOM_",)
# Two are the shell's own. The others make a new shell read a file that may set what was removed.
_PLAIN = frozenset({"PWD", "OLDPWD"})
_NEVER = frozenset({"BASH_ENV", "ENV"})
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VALUE = re.compile(
    r"""
    ://[^/\s:@]*:[^\s@]+@                   # a URL with a password in it
    | ://[^/\s@]{16,}@                      # or with a token for a user
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY
    | \beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.        # a JSON web token
    | \b(?: sk-[\w-]{16,} | sk_(?:live|test)_\w{16,} | gh[pousr]_\w{30,} | github_pat_\w{30,}
        | glpat-[\w-]{16,} | xox[abeoprs]-[\w-]{10,} | xapp-[\w-]{10,} | hf_\w{30,}
        | A[KS]IA[0-9A-Z]{16} | AIza[\w-]{30,} | npm_\w{30,} | pypi-[\w-]{30,}
        | \d{8,10}:[\w-]{35}                # a Telegram bot token
      )
    """,
    re.VERBOSE,
)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret, by its name or by its value."""
    if name in _PLAIN:
        return False
    if name in _NEVER or name.upper().startswith(_PREFIXES):
        return True
    upper = _CAMEL.sub("_", name).upper()
    return (
        _WORDS.search(upper) is not None
        or _PARTS.search(upper) is not None
        or _VALUE.search(value) is not None
    )


def scrubbed(
    environment: Mapping[str, str] | None = None, *, keep: frozenset[str] = frozenset()
) -> dict[str, str]:
    """The environment (None: this process's) without its secrets.

    ``keep`` names variables that the operator wants let through whatever they look like.
    """
    source = os.environ if environment is None else environment
    return {
        name: value for name, value in source.items() if name in keep or not is_secret(name, value)
    }
