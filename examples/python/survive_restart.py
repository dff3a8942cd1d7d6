"""A run that survives the restart of its daemon.

The daemon is killed while the model is asked, and started again at the same address. The client
connects again by itself; the interrupted turn is recovered, and the result says so.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import postroom
from postroom.client import Event

# The first request is never answered in time; the next one, after the restart, is.
SCRIPT = {"replies": [{"text": "too late", "delay_ms": 600_000}, {"text": "I was interrupted."}]}
TOKEN = secrets.token_urlsafe(32)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "postroom.cli.main", "serve", "--port", str(port)]
    options = ["--db", "example.db", "--model", "scripted:restart.json"]
    return subprocess.Popen(
        [*command, *options],
        env={**os.environ, "POSTROOM_TOKEN": TOKEN},
        stderr=subprocess.DEVNULL,
    )


async def connected(url: str) -> postroom.client.Room:
    while True:
        room = postroom.connect(url, token=TOKEN)
        try:
            return await room.open()
        except postroom.errors.Disconnected:  # it is not up yet
            await asyncio.sleep(0.1)


async def main() -> None:
    port = free_port()
    daemon = serve(port)
    try:
        async with await connected(f"ws://127.0.0.1:{port}/ws") as room:
            session = await room.session("long")
            asked = asyncio.Event()

            def look(event: Event) -> None:
                if event.type == "step/start":
                    asked.set()
                if event.type == "turn/end":
                    print("a turn ended:", event.data.reason.kind)

            running = asyncio.create_task(session.run("Work.", timeout=120, on_event=look))
            await asked.wait()
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            daemon = serve(port)
            result = await running
            print(result.final_response)
    finally:
        daemon.terminate()
        daemon.wait()


Path("restart.json").write_text(json.dumps(SCRIPT))
asyncio.run(main())
