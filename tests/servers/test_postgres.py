"""The test server itself: a database a test, templates, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.servers import postgres
from tests.servers.postgres import PostgresServer
from tests.support import ROOT


def _one(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(statement).fetchone()
    assert row is not None
    return row[0]


def test_each_test_has_a_database_of_its_own(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    other = postgres_server.create()
    try:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("CREATE TABLE here (x int)")
        assert _one(postgres_url, "SELECT count(*) FROM pg_tables WHERE tablename = 'here'") == 1
        assert _one(other, "SELECT count(*) FROM pg_tables WHERE tablename = 'here'") == 0
    finally:
        postgres_server.drop(other)


def test_a_template_is_built_once_and_copied(postgres_server: PostgresServer) -> None:
    built: list[str] = []

    def build(url: str) -> None:
        built.append(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE marked AS SELECT 7 AS x")

    urls = [postgres_server.create(postgres_server.template("marked", build)) for _ in range(2)]
    try:
        assert [_one(url, "SELECT x FROM marked") for url in urls] == [7, 7]
        assert len(built) == 1
    finally:
        for url in urls:
            postgres_server.drop(url)


def test_a_database_in_use_can_be_dropped(postgres_server: PostgresServer) -> None:
    url = postgres_server.create()
    with psycopg.connect(url) as connection:
        postgres_server.drop(url)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


_HOLDER = """
import sys
from tests.servers.postgres import running_server
with running_server() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def test_a_killed_test_process_takes_its_server_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POSTROOM_TEST_DATABASE", raising=False)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        url = holder.stdout.readline().strip()
        with psycopg.connect(url) as connection:
            holder.kill()
            holder.wait()
            # The connection is the witness: the server cuts it when it stops.
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT pg_sleep(30)")


def test_the_newest_release_on_the_machine_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for release in ("9.6", "17", "15"):
        folder = tmp_path / release / "bin"
        folder.mkdir(parents=True)
    folders = sorted(tmp_path.glob("*/bin"), key=postgres._release)
    assert [folder.parent.name for folder in folders] == ["9.6", "15", "17"]


def test_a_given_server_that_does_not_answer_is_a_failure_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POSTROOM_TEST_DATABASE", f"postgresql://u@/d?host={tmp_path}")
    with (
        pytest.raises(pytest.fail.Exception, match="POSTROOM_TEST_DATABASE does not answer"),
        postgres.running_server(),
    ):
        pass


def test_a_machine_without_postgresql_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("POSTROOM_TEST_DATABASE", raising=False)
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with (
        pytest.raises(pytest.fail.Exception, match="install"),
        postgres.running_server(),
    ):
        pass
