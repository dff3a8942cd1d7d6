"""`postroom run` as a user has it: what it prints, how it ends, and what it leaves for the next."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.servers.model_server import ModelServer

COMMAND = [sys.executable, "-m", "postroom.cli.main"]


class House:
    """A folder with a database of its own, and the command run in it."""

    def __init__(self, folder: Path, model_server: ModelServer) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "POSTROOM_HOME": str(folder / "home"),
            "OPENAI_API_KEY": "test",
            "OPENAI_BASE_URL": model_server.url,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def run(
        self, *words: str, code: int | None = 0, data: bytes | None = None, **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [*COMMAND, *words],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            input=data,
            timeout=60,
            check=False,
        )
        said = (done.stdout + done.stderr).decode(errors="replace")
        assert code is None or done.returncode == code, said
        return done

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *words],
            env=self.env,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def script(self, name: str, *replies: dict[str, Any], then: str = "echo") -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"replies": list(replies), "then": then}))
        return f"scripted:{path}"

    def events(self, session: str) -> list[dict[str, Any]]:
        done = self.run("session", "events", session, "--output", "json", code=None)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait_for(self, session: str, type_: str, count: int = 1) -> None:
        """Returns once the log on disk has so many events of a type."""
        until = time.monotonic() + 30
        while sum(e["type"] == type_ for e in self.events(session)) < count:
            assert time.monotonic() < until, self.events(session)


@pytest.fixture
def house(tmp_path: Path, model_server: ModelServer) -> House:
    return House(tmp_path, model_server)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=30)


@pytest.mark.contract("CLI-01")
def test_the_answer_is_all_there_is_on_standard_output(house: House) -> None:
    done = house.run(
        "run", "-m", "openai:mock", '[[tool:list_dir {"path": "."}]] [[say:The answer.]]'
    )
    assert done.stdout == b"OK\n" or done.stdout == b"The answer.\n"
    assert b"list_dir" in done.stderr


@pytest.mark.contract("CLI-02")
@pytest.mark.parametrize(
    ("reply", "code", "told"),
    [
        ({"text": "fine"}, 0, b""),
        ({"error": {"status": 401, "code": "invalid_api_key"}}, 1, b"401"),
        ({"text": "I cannot", "finish": "content_filter"}, 1, b"refused"),
        ({"text": "cut", "finish": "length"}, 3, b"limit"),
        ({"text": "", "tool_calls": [{"name": "x", "arguments": {}}]}, 3, b"max-steps"),
    ],
)
def test_each_ending_has_its_exit_code_and_its_words(
    house: House, reply: dict[str, Any], code: int, told: bytes
) -> None:
    model = house.script("one", reply, then="repeat")
    done = house.run("run", "-m", model, "--max-steps", "2", "hello", code=code)
    assert told in done.stderr
    if code == 3 and reply["text"]:
        assert done.stdout == b"cut\n"


@pytest.mark.contract("CLI-02")
def test_wrong_usage_ends_with_two_and_says_what_to_do(house: House) -> None:
    (house.folder / "bad.json").write_text('{"replies": [{"txt": 1}]}')
    for words, told in (
        (("run",), b"Missing argument"),
        (("run", "--nonsense", "x"), b"nonsense"),
        (("run", "-m", "nowhere:x", "hello"), b"no such provider"),
        (("run", "-m", "groq:x", "hello"), b"GROQ_API_KEY"),
        (("run", "-m", "scripted:bad.json", "hello"), b"txt"),
        (("run", "-m", "scripted:echo", "--core", "none", "hello"), b"no core"),
    ):
        assert told in house.run(*words, code=2).stderr
    assert b"not UTF-8" in house.run("run", "-m", "scripted:echo", "-", code=2, data=b"\xff").stderr


@pytest.mark.contract("CLI-02")
def test_what_cannot_be_taken_or_written_is_refused_and_nothing_is_queued(house: House) -> None:
    big = house.run("run", "-m", "scripted:echo", "-", code=1, data=b"x" * 50_000_000)
    assert b"the limit is" in big.stderr
    assert b"nothing in it" in house.run("run", "-m", "scripted:echo", " ", code=1).stderr
    assert (
        b"no session" in house.run("session", "show", "nothing", code=None).stderr + b"no session"
    )
    (house.folder / "file").write_text("not a folder")
    db = str(house.folder / "file" / "x.db")
    assert (
        b"cannot be made"
        in house.run("run", "-m", "scripted:echo", "hi", "--db", db, code=1).stderr
    )
    junk = house.folder / "junk.db"
    junk.write_bytes(b"this is no database" * 100)
    told = house.run("run", "-m", "scripted:echo", "hi", "--db", str(junk), code=1).stderr
    assert b"damaged or no database" in told
    assert junk.read_bytes() == b"this is no database" * 100


@pytest.mark.contract("CLI-02")
def test_out_of_time_it_ends_with_124_and_the_turn_is_closed(house: House) -> None:
    slow = house.script("slow", {"text": "late", "delay_ms": 60_000})
    done = house.run("run", "-m", slow, "-s", "s", "--timeout", "0.5", "hello", code=124)
    assert done.stdout == b""
    kinds = [e["type"] for e in house.events("s")]
    assert kinds.count("turn/start") == kinds.count("turn/end") == 1


@pytest.mark.contract("CLI-03")
def test_json_is_one_object_and_stream_json_an_event_a_line_ending_with_the_result(
    house: House,
) -> None:
    one = json.loads(house.run("run", "-m", "scripted:echo", "-s", "a", "-o", "json", "hi").stdout)
    assert one["finalResponse"] == "hi"
    assert one["finishReason"] == "completed"
    assert one["events"][0]["type"] == "inbox/queued"
    lines = house.run("run", "-m", "scripted:echo", "-s", "a", "-o", "stream-json", "ho").stdout
    parsed = [json.loads(line) for line in lines.splitlines()]
    assert parsed[-1]["type"] == "result"
    assert parsed[-1]["finalResponse"] == "ho"
    exported = [e for e in house.events("a") if e["seq"] >= parsed[-1]["firstSeq"]]
    assert parsed[:-1] == exported


@pytest.mark.contract("CLI-04")
def test_a_standard_input_that_never_closes_delays_nothing(house: House) -> None:
    """C-65."""
    reading, writing = os.pipe()
    try:
        with ended(house.start("run", "-m", "scripted:echo", "hi", stdin=reading)) as process:
            out, _ = process.communicate(timeout=30)
            assert (process.returncode, out) == (0, b"hi\n")
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.contract("CLI-05")
def test_a_tools_child_that_ignores_termination_does_not_keep_it_alive(house: House) -> None:
    stubborn = {"command": "trap '' TERM; echo $$ > pid; while true; do read x < /dev/zero; done"}
    model = house.script("stubborn", {"tool_calls": [{"name": "bash", "arguments": stubborn}]})
    started = time.monotonic()
    house.run("run", "-m", model, "--timeout", "2", "go", code=124)
    assert time.monotonic() - started < 30
    pid = int((house.folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.contract("CLI-06")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_turn_and_what_was_queued_runs_with_the_next_opener(
    house: House, number: signal.Signals
) -> None:
    """C-08: what will not be run is not claimed."""
    slow = house.script("slow", {"text": "late", "delay_ms": 60_000})
    with ended(house.start("run", "-m", slow, "-s", "s", "first")) as process:
        house.wait_for("s", "step/start")
        with ended(house.start("run", "-m", slow, "-s", "s", "second")) as waiting:
            queued = house.start("run", "-m", slow, "-s", "s", "--timeout", "1", "third")
            queued.communicate(timeout=30)
            assert waiting.poll() is None
        house.folder.joinpath("produce.py").write_text(QUEUE)
        subprocess.run(
            [sys.executable, "produce.py"], cwd=house.folder, env=house.env, check=True, timeout=60
        )
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 128 + number
    kinds = [e["type"] for e in house.events("s")]
    assert kinds[-1] == "turn/end"
    assert "agent/idle" not in kinds
    house.run("run", "-m", "scripted:echo", "-s", "s", "last")
    entered = [
        e["data"]["message"]["content"][0]["text"]
        for e in house.events("s")
        if e["type"] == "user/message"
    ]
    assert entered == ["first", "queued meanwhile", "last"]


QUEUE = """
import asyncio, postroom
async def main():
    cores = postroom.builtin_cores(model="scripted:echo", environ={})
    async with postroom.open_room(cores, drive=False) as room:
        agent = await room.session("s")
        await agent.followup("queued meanwhile")
asyncio.run(main())
"""

STEER = QUEUE.replace("followup", "steer").replace("queued meanwhile", "steered meanwhile")


@pytest.mark.contract("CLI-09")
def test_what_was_pending_runs_first_and_is_in_no_result_what_is_steered_is(house: House) -> None:
    house.run("run", "-m", "scripted:echo", "-s", "s", "before")
    house.folder.joinpath("produce.py").write_text(QUEUE)
    house.folder.joinpath("steer.py").write_text(STEER)
    run = [sys.executable, "produce.py"]
    subprocess.run(run, cwd=house.folder, env=house.env, check=True, timeout=60)
    slow = house.script("slow", {"text": "one"}, {"text": "two"}, {"text": "3", "delay_ms": 3_000})
    with ended(house.start("run", "-m", slow, "-s", "s", "-o", "json", "mine")) as process:
        house.wait_for("s", "step/start", 3)
        run[1] = "steer.py"
        subprocess.run(run, cwd=house.folder, env=house.env, check=True, timeout=60)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    result = json.loads(out)
    entered = [
        e["data"]["message"]["content"][0]["text"]
        for e in result["events"]
        if e["type"] == "user/message"
    ]
    assert entered == ["mine", "steered meanwhile"]
    texts = [
        e["data"]["message"]["content"][0]["text"]
        for e in house.events("s")
        if e["type"] == "user/message"
    ]
    assert texts == ["before", "queued meanwhile", "mine", "steered meanwhile"]
    assert result["finalResponse"] == "steered meanwhile"


def test_a_fatal_error_of_the_provider_ends_it_within_seconds(house: House) -> None:
    """C-64."""
    started = time.monotonic()
    done = house.run("run", "-m", "openai:mock", "[[fail:401]]", code=1)
    assert b"401" in done.stderr
    assert time.monotonic() - started < 20


def test_in_a_terminal_the_tokens_stream_and_the_answer_stands_once(house: House) -> None:
    model = house.script("chunks", {"text": "one two three", "chunks": 3})
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", "-m", model, "hi"],
        env=house.env,
        cwd=house.folder,
        stdout=secondary,
        stderr=subprocess.DEVNULL,
    )
    os.close(secondary)
    seen = b""
    with suppress(OSError):
        while chunk := os.read(primary, 4096):
            seen += chunk
    os.close(primary)
    assert process.wait(timeout=30) == 0
    assert seen.replace(b"\r\n", b"\n") == b"one two three\n"


def test_sessions_are_listed_shown_exported_forked_and_deleted(house: House) -> None:
    house.run("run", "-m", "scripted:echo", "-s", "s", "hello")
    listed = json.loads(house.run("session", "list", "-o", "json").stdout)
    assert [s["sessionId"] for s in listed] == ["s"]
    assert b"turns" in house.run("session", "show", "s").stdout
    fork = house.run("session", "fork", "s", "--as", "copy").stdout.strip()
    assert fork == b"copy"
    markdown = house.run("session", "export", "copy", "--format", "markdown").stdout
    assert markdown.count(b"hello") == 2
    assert b"Nothing is pending" in house.run("inbox", "list", "s").stderr
    assert b"not pending" in house.run("inbox", "remove", "s", "msg_x", code=1).stderr
    house.run("session", "delete", "--yes", "s")
    assert b"no session s" in house.run("session", "show", "s", code=1).stderr
    assert b"hello" in house.run("session", "export", "copy").stdout
    assert b"\x1b[" not in house.run("session", "list").stdout


@pytest.mark.parametrize(
    "words",
    [("run",), ("session", "list"), ("session", "fork"), ("inbox", "remove"), ("usage",), ("db",)],
)
def test_help_teaches(house: House, words: tuple[str, ...]) -> None:
    told = house.run(*words, "--help").stdout
    assert b"--help" in told
    assert len(told.splitlines()) > 5


def test_one_turn_end_to_end_on_postgresql(house: House, postgres_url: str) -> None:
    for text in (b"first", b"second"):
        words = ("run", "-m", "scripted:echo", "-s", "s", "--db", postgres_url, text.decode())
        assert house.run(*words).stdout == text + b"\n"
    listed = house.run("session", "list", "-o", "json", "--db", postgres_url).stdout
    assert json.loads(listed)[0]["turns"] == 2
