"""Stands between a store and its server, and cuts a connection at the worst moment."""

from __future__ import annotations

import contextlib
import select
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_COMMITTED = b"C\x00\x00\x00\x0bCOMMIT\x00"  # the server's word that a transaction is committed


class Proxy:
    """``url`` is the server's database through it. Use it in a ``with`` block.

    ``lose_answers``: so many commits of connections that had sent ``marker`` are done, and their
    answers are lost with the connection. ``refuse``: no new connection is let through.
    """

    def __init__(self, url: str) -> None:
        parts = {name: str(value) for name, value in conninfo_to_dict(url).items()}
        self._host = parts.get("host", "localhost")
        self._port = parts.get("port", "5432")
        self._folder = Path(tempfile.mkdtemp(prefix="postroom-proxy-", dir="/tmp"))
        here = parts | {"host": str(self._folder), "port": "5432", "sslmode": "disable"}
        self.url = "postgresql:///?" + "&".join(f"{k}={quote(v, safe='')}" for k, v in here.items())
        assert make_conninfo(self.url)
        self.marker = b""
        self.lose_answers = 0
        self.lost = 0
        self.refuse = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / ".s.PGSQL.5432"))
        self._listener.listen()

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        shutil.rmtree(self._folder)

    def cut(self) -> None:
        """Cuts every connection there is."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            self._start(self._carry, client)

    def _connect(self) -> socket.socket:
        if self._host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
            return server
        return socket.create_connection((self._host, int(self._port)))

    def _carry(self, client: socket.socket) -> None:
        server = self._connect()
        marked = False
        with self._lock:
            self._open |= {client, server}
        try:
            while True:
                for source in select.select([client, server], (), ())[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        marked = marked or bool(self.marker and self.marker in data)
                        server.sendall(data)
                    elif marked and _COMMITTED in data and self._loses():
                        return
                    else:
                        client.sendall(data)
        except OSError:
            return
        finally:
            with self._lock:
                self._open -= {client, server}
            client.close()
            server.close()

    def _loses(self) -> bool:
        with self._lock:
            if self.lost >= self.lose_answers:
                return False
            self.lost += 1
            return True
