"""The daemon as a process, and a receiver of its webhooks, for the tests that need both.

Signing and checking are written here once more, from the specification, so that the two sides of a
test do not share a mistake.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()
COMMAND = [sys.executable, "-m", "postroom.cli.main"]


def eventually(
    true: Callable[[], T], seconds: float = 30, says: Callable[[], object] | None = None
) -> T:
    """What becomes true in another process; polled, since it has no way to tell us.

    ``says`` tells how things are if it does not.
    """
    deadline = time.monotonic() + seconds
    while not (found := true()):
        told = says() if says is not None and time.monotonic() >= deadline else ""
        assert time.monotonic() < deadline, f"not true after {seconds} s {told}"
        time.sleep(0.02)
    return found


def signature(id_: str, at: str, body: bytes, key: bytes = KEY) -> str:
    mac = hmac.digest(key, f"{id_}.{at}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(mac).decode()


class Got(threading.Event):
    """One request that reached the receiver; set when its answer may go."""

    def __init__(self, id_: str, message: dict[str, Any]) -> None:
        super().__init__()
        self.id = id_
        self.message = message

    @property
    def text(self) -> str:
        return self.message["text"]


class Receiver:
    """An endpoint. ``holds``: an answer waits until the test lets it go."""

    def __init__(self, port: int = 0) -> None:
        self.got: list[Got] = []
        self.unsigned = 0
        self.holds = False
        self.status = 204
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A caller that was killed is what these tests are about."""

        self._server = Server(("127.0.0.1", port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def take(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        id_, at = request.headers["webhook-id"], request.headers["webhook-timestamp"]
        if signature(id_, at, body) not in request.headers["webhook-signature"].split():
            self.unsigned += 1
            request.send_response(401)
            request.end_headers()
            return
        got = Got(id_, json.loads(body))
        self.got.append(got)
        if self.holds:
            got.wait(60)
        request.send_response(self.status)
        request.end_headers()

    def texts(self) -> list[str]:
        """What was said, each message once however often it came."""
        return list({one.id: one.text.splitlines()[-1] for one in list(self.got)}.values())

    def ids(self) -> list[str]:
        return [one.id for one in list(self.got)]

    def close(self) -> None:
        for one in self.got:
            one.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Office:
    """A home with a core and its channels, and daemons over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        (self.home / "cores" / "default").mkdir(parents=True)
        secret = folder / "desk.secret"
        secret.write_text(SECRET + "\n")
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "POSTROOM_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "DESK_SECRET_FILE": str(secret),
        }
        self.daemons: list[Daemon] = []

    def core(self, text: str, core_id: str = "default") -> None:
        folder = self.home / "cores" / core_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "core.toml").write_text(text)

    def desk(self, receiver: Receiver, *more: str, allow: str = '["desk"]') -> None:
        lines = [
            "[channels.desk]",
            'kind = "webhook"',
            'secret = "DESK_SECRET"',
            f'url = "http://127.0.0.1:{receiver.port}/answers"',
            f"allow = {allow}",
            *more,
        ]
        self.core("\n".join(lines) + "\n")

    def script(self, *replies: dict[str, Any], then: str = "echo") -> str:
        path = self.folder / f"replies-{len(list(self.folder.iterdir()))}.json"
        path.write_text(json.dumps({"replies": list(replies), "then": then}))
        return f"scripted:{path}"

    def __call__(
        self, *words: str, code: int | None = 0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *words],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=60,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--output", "json").stdout)

    def deliveries(self, *words: str) -> list[dict[str, Any]]:
        return self.json("outbox", "list", "--limit", "1000", *words)

    def serve(self, *words: str, model: str = "scripted:echo") -> Daemon:
        daemon = Daemon(self, ["serve", "--port", "0", "--model", model, *words])
        self.daemons.append(daemon)
        daemon.ready()
        return daemon

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.kill()


class Daemon:
    """`postroom serve`. What it says is read as it comes."""

    def __init__(self, office: Office, words: list[str]) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            env=office.env,
            cwd=office.folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.said = ""
        self.url = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def ready(self) -> None:
        def url() -> str:
            assert self.process.poll() is None, self.said
            found = re.search(r"serving (http://\S+)", self.said)
            return found[1] if found else ""

        self.url = eventually(url)

    def post(
        self,
        text: str = "hello",
        *,
        id_: str = "evt_1",
        conversation: str = "7",
        channel: str = "desk",
        key: bytes = KEY,
        age_s: int = 0,
        **more: Any,
    ) -> tuple[int, dict[str, Any]]:
        """The status and the body of the answer; 0 if there was none."""
        body = json.dumps({"conversation": conversation, "text": text, **more}).encode()
        at = str(int(time.time()) - age_s)
        headers = {
            "Content-Type": "application/json",
            "webhook-id": id_,
            "webhook-timestamp": at,
            "webhook-signature": signature(id_, at, body, key),
        }
        request = urllib.request.Request(f"{self.url}/webhook/{channel}", body, headers)
        return _answer(request)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return _answer(urllib.request.Request(self.url + path))

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 40) -> int:
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 40) -> int:
        code = self.process.wait(seconds)
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def _answer(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}")
    except OSError:  # refused, or cut off when the daemon was killed
        return 0, {}
