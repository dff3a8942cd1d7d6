"""`make demo`: the main job, shown on this machine with no key and no network.

A message is queued, survives ``kill -9``, runs, and is answered; then the same over HTTP against
the bundled model server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COMMAND = [sys.executable, "-m", "postroom.cli.main"]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-demo-") as folder:
        env = {**os.environ, "POSTROOM_DB": str(Path(folder) / "demo.db")}
        _ask_and_answer(env)
        _kill_and_go_on(env, Path(folder))
        _over_http(env)
    print("\nThat was it. Next: README.md, or `.venv/bin/postroom --help`.")


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _postroom(env: dict[str, str], *words: str) -> None:
    print("$ postroom " + " ".join(w if " " not in w else f'"{w}"' for w in words), flush=True)
    subprocess.run([*_COMMAND, *words], env=env, check=True)


def _ask_and_answer(env: dict[str, str]) -> None:
    _title("A message in, a turn, a reply out (the scripted model repeats what it hears)")
    _postroom(env, "run", "--model", "scripted:echo", "Hello, Postroom!")


def _kill_and_go_on(env: dict[str, str], folder: Path) -> None:
    _title("kill -9 in the middle; the same session goes on")
    script = folder / "slow.json"
    script.write_text(
        '{"replies": [{"text": "never seen", "delay_ms": 60000},'
        ' {"text": "Here is the answer to your first question."},'
        ' {"text": "And here to your second."}], "then": "repeat"}'
    )
    words = ["run", "--session", "demo", "--model", f"scripted:{script}"]
    print('$ postroom run --session demo "First question" &   # and kill -9', flush=True)
    child = subprocess.Popen([*_COMMAND, *words, "First question"], env=env)
    _wait_for(env, "step/start")
    child.send_signal(signal.SIGKILL)
    child.wait()
    _postroom(env, *words, "Second question")
    print("$ postroom session export --format markdown demo", flush=True)
    subprocess.run(
        [*_COMMAND, "session", "export", "--format", "markdown", "demo"], env=env, check=True
    )


def _wait_for(env: dict[str, str], type_: str) -> None:
    """Waits, bounded, until the session's log on disk has an event of a type."""
    for _ in range(100):
        listed = subprocess.run(
            [*_COMMAND, "session", "events", "demo"],
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )
        if type_ in listed.stdout:
            return
        time.sleep(0.05)
    raise SystemExit("the demo session did not start")


def _over_http(env: dict[str, str]) -> None:
    server = Path(__file__).parents[2] / "tests" / "servers" / "mock_llm.py"
    if not server.exists():
        return
    _title("The same against an OpenAI-compatible server (the bundled one)")
    child = subprocess.Popen(
        [sys.executable, str(server), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().split()[-1]
        env = {**env, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
        print("$ export OPENAI_BASE_URL=… OPENAI_API_KEY=…", flush=True)
        _postroom(env, "run", "--model", "openai:mock", "[[say:Hello over HTTP.]] Greet me.")
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


if __name__ == "__main__":
    main()
