"""`make demo`: the main job, shown on this machine, with no key.

A message is queued, survives ``kill -9``, runs, and is answered; the same over HTTP against the
bundled model server. Then a small real model is installed once and answers a question of yours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_DEFAULT = "qwen2.5-coder-0.5b"
_COMMAND = [sys.executable, "-m", "postroom.cli.main"]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-demo-") as folder:
        env = {**os.environ, "POSTROOM_DB": str(Path(folder) / "demo.db")}
        _ask_and_answer(env)
        _kill_and_go_on(env, Path(folder))
        _over_http(env)
    _a_real_model()
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


QUESTION = "What is the capital of France?"


def _a_real_model() -> None:
    """Installs the small local model where weights are kept for good, and asks it."""
    _title("A real model on this machine, without a key")
    asked = " ".join(sys.argv[1:])
    if not asked and sys.stdin.isatty():
        asked = input(f"Your question [{QUESTION}]: ").strip()
    print("$ postroom model install", flush=True)
    if subprocess.run([*_COMMAND, "model", "install"], check=False).returncode != 0:
        print("It could not be installed here; everything else works without it.")
    else:
        with tempfile.TemporaryDirectory(prefix="postroom-demo-") as folder:
            env = {**os.environ, "POSTROOM_DB": str(Path(folder) / "demo.db")}
            _postroom(env, "run", "--model", f"local:{_DEFAULT}", asked or QUESTION)
    print(
        "\nFor a better one, set your provider's key and ask again:\n"
        '  export OPENAI_API_KEY=…   and   .venv/bin/postroom run "…"   (`postroom model list`)'
    )


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
