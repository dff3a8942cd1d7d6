"""The engines that the suite of the store port runs over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.contract.store_world import Engine, PostgresEngine, SqliteEngine
from tests.servers.postgres import PostgresServer


@pytest.fixture(scope="session")
def shared_database(postgres_server: PostgresServer) -> str:
    """One database for all tests of the suite, emptied for each: many times quicker than a new one."""
    return postgres_server.create()


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Engine]:
    """An empty database, and stores opened on it; the stores are closed at the end."""
    made = make_engine(request, tmp_path)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def sqlite_engine(tmp_path: Path) -> AsyncGenerator[SqliteEngine]:
    """For what only a file can show."""
    made = SqliteEngine(tmp_path / "postroom.db")
    yield made
    await made.close()


@pytest_asyncio.fixture
async def postgres_engine(postgres_url: str) -> AsyncGenerator[PostgresEngine]:
    """For what only a server can show."""
    made = PostgresEngine(postgres_url)
    yield made
    await made.close()


@pytest.fixture
def another(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Callable[[], Engine]:
    """Makes a second empty database of the same kind. Its stores are closed with the first's."""

    def make() -> Engine:
        if isinstance(engine, SqliteEngine):
            return engine.joined(SqliteEngine(tmp_path / "another.db"))
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = server.create()
        request.addfinalizer(lambda: server.drop(url))
        return engine.joined(PostgresEngine(url))

    return make


def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    if request.param == "sqlite":
        return SqliteEngine(tmp_path / "postroom.db")
    made = PostgresEngine(request.getfixturevalue("shared_database"))
    made.empty()
    return made
