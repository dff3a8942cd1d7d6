"""What every test has: contract ids, a fixed Hypothesis profile, and a PostgreSQL when it asks.

The hooks of `tools.recording` and the fixtures of `tests.servers.postgres` are this file's own by
import. Hypothesis runs the same examples every time where ``CI`` is set; elsewhere it looks for
new ones and prints how to replay what it finds. ``--hypothesis-profile=campaign`` looks longer.
"""

from __future__ import annotations

import os

from hypothesis import settings

from tests.servers.model_server import model_server
from tests.servers.postgres import postgres_server, postgres_url
from tools.recording import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = [
    "model_server",
    "postgres_server",
    "postgres_url",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("campaign", deadline=None, print_blob=True, max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "local")
