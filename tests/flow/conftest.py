"""What the tests of the turn loop have: a database that lies in memory where there is a place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_MEMORY = "/dev/shm"


@pytest.fixture
def database() -> Iterator[str]:
    """The path of a database that does not exist yet."""
    where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="postroom-flow-", dir=where))
    yield str(folder / "postroom.db")
    shutil.rmtree(folder)
