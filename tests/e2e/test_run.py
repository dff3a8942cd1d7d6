"""`postroom run` where it gets hard: beside other commands, killed, without an answer, in pipes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import click
import pytest
import typer
from typer.testing import CliRunner

from postroom.cli.main import app
from postroom.domain.event import Event
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.run import fold_run, interval
from tests.e2e.test_one_shot import COMMAND, House, ended
from tests.servers.model_server import ModelServer

STUCK = str(Path(__file__).with_name("stuck.py"))
ECHO = ("run", "-m", "scripted:echo")


@pytest.fixture
def house(tmp_path: Path, model_server: ModelServer) -> House:
    return House(tmp_path, model_server)


def _heard(process: subprocess.Popen[bytes], code: int = 0) -> bytes:
    """What a started command printed; it must end with ``code``."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (process.returncode, out, err)
    return out


def _eventually(true: Callable[[], Any], seconds: float = 30) -> Any:
    """What becomes true in another process; polled, since it has no way to tell us."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.02)
    return found


def _rows(house: House, sql: str) -> list[tuple[Any, ...]]:
    path = house.folder / "home" / "postroom.db"
    with contextlib.suppress(apsw.Error):
        connection: Any = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()
    return []


def _types(house: House) -> list[str]:
    """The types of all events, without the cost of another command."""
    return [row[0] for row in _rows(house, "SELECT type FROM event ORDER BY id")]


def _entered(house: House, session: str) -> list[str]:
    return [
        event["data"]["message"]["content"][0]["text"]
        for event in house.events(session)
        if event["type"] == "user/message"
    ]


def _produce(house: House, body: str) -> subprocess.Popen[bytes]:
    """A producer in a process of its own, which drives nothing."""
    program = house.folder / f"produce-{len(list(house.folder.iterdir()))}.py"
    program.write_text(PRODUCER.format(body=body))
    return subprocess.Popen(
        [sys.executable, str(program)],
        env=house.env,
        cwd=house.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


PRODUCER = """
import asyncio, postroom
async def one(room, name, text):
    agent = await room.session(name)
    print("here", flush=True)
    {body}
async def main():
    cores = postroom.builtin_cores(model="scripted:echo", environ={{}})
    async with postroom.open_room(cores, drive=False) as room:
        await asyncio.gather(*[one(room, f"s{{n}}", f"late {{n}}") for n in range(3)])
asyncio.run(main())
"""


# ---- beside other commands ----


@pytest.mark.contract("CLI-06", "CLI-09")
def test_a_signal_before_its_own_prompt_is_queued_touches_nothing(house: House) -> None:
    slow = house.script("slow", {"text": "late", "delay_ms": 60_000})
    with ended(house.start("run", "-m", slow, "-s", "s", "theirs")) as first:
        _eventually(lambda: "step/start" in _types(house))
        before = _types(house)
        with ended(house.start(*ECHO, "-s", "s", "mine")) as second:
            _eventually(lambda: len(_rows(house, "SELECT 1 FROM node")) == 2)
            second.send_signal(signal.SIGINT)
            started = time.monotonic()
            assert _heard(second, 130) == b""
            assert time.monotonic() - started < 5
        assert _types(house) == before
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        _heard(first, 143)
    assert _entered(house, "s") == ["theirs"]


@pytest.mark.contract("CLI-09", "RUN-09")
def test_commands_that_come_at_once_wait_for_one_another(house: House) -> None:
    words = [f"number {n}" for n in range(3)]
    house.run(*ECHO, "-s", "s", "before")
    running = [house.start(*ECHO, "-s", "s", "-o", "json", word) for word in words]
    results = [json.loads(_heard(process)) for process in running]
    assert [result["finalResponse"] for result in results] == words
    spans = sorted((result["firstSeq"], result["lastSeq"]) for result in results)
    assert spans[0][1] < spans[1][0]
    assert spans[1][1] < spans[2][0]


@pytest.mark.contract("CLI-09", "RUN-01")
def test_what_is_queued_right_after_its_own_idle_is_left_to_the_next_opener(house: House) -> None:
    """C-08: three producers see the idle and queue at once, while the command is ending."""
    body = """
    async for event in agent.events():
        if event.type == "agent/idle":
            await agent.followup(text)
            return"""
    with ended(_produce(house, body.strip())) as producer:
        assert producer.stdout is not None
        for _ in range(3):
            producer.stdout.readline()
        running = [house.start(*ECHO, "-s", f"s{n}", f"mine {n}") for n in range(3)]
        assert [_heard(process) for process in running] == [b"mine 0\n", b"mine 1\n", b"mine 2\n"]
        _heard(producer)
    for number in range(3):
        kinds = [event["type"] for event in house.events(f"s{number}")]
        assert kinds[-3:] == ["agent/idle", "inbox/queued", "agent/running"]
    assert house.run(*ECHO, "-s", "s0", "after").stdout == b"after\n"
    assert _entered(house, "s0") == ["mine 0", "late 0", "after"]


@pytest.mark.contract("CLI-09", "REC-02")
def test_the_command_after_a_kill_recovers_first_and_answers_its_own_prompt_alone(
    house: House,
) -> None:
    slow = house.script("slow", {"text": "", "delay_ms": 60_000})
    with ended(house.start("run", "-m", slow, "-s", "s", "killed")) as process:
        _eventually(lambda: "step/start" in _types(house))
        process.kill()
        _heard(process, -signal.SIGKILL)
    result = json.loads(house.run(*ECHO, "-s", "s", "-o", "json", "mine").stdout)
    assert result["finalResponse"] == "mine"
    entered = [e for e in result["events"] if e["type"] == "user/message"]
    assert len(entered) == 1
    ends = [e["data"]["reason"]["kind"] for e in house.events("s") if e["type"] == "turn/end"]
    assert ends == ["interrupted", "completed", "completed"]


@pytest.mark.contract("CLI-06")
def test_pending_messages_are_listed_and_can_be_taken_out(house: House) -> None:
    _heard(_produce(house, "await agent.followup(text); await agent.inject('context')"))
    listed = json.loads(house.run("inbox", "list", "s1", "-o", "json").stdout)
    assert [(p["list"], p["wakes"]) for p in listed] == [("next_step", False), ("next_turn", True)]
    assert b"late 1" in house.run("inbox", "list", "s1").stdout
    house.run("inbox", "remove", "s1", listed[1]["message"]["id"])
    left = json.loads(house.run("inbox", "list", "s1", "-o", "json").stdout)
    assert [p["list"] for p in left] == ["next_step"]
    # The last waking message was taken out: the agent is idle, and says so.
    assert house.events("s1")[-1]["type"] == "agent/idle"


# ---- no answer ----


@pytest.mark.contract("CLI-02", "CLI-05")
def test_whoever_does_not_answer_the_command_ends(house: House) -> None:
    """C-64: each with its code and its reason, started together since most of it is waiting."""
    blocks = house.script("blocks", {"tool_calls": [{"name": "blocks"}]})
    refuses = house.script("refuses", {"tool_calls": [{"name": "refuses"}]})
    mock = ("run", "-m", "openai:mock")
    started = time.monotonic()
    with contextlib.ExitStack() as stack:

        def start(*words: str, stuck: bool = False, **env: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, STUCK] if stuck else COMMAND
            process = subprocess.Popen(
                [*command, *words],
                env={**house.env, **env},
                cwd=house.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            return stack.enter_context(ended(process))

        cases = [
            (start(*mock, "[[drop]]"), 1, b"again in"),
            (start(*mock, "hello", OPENAI_BASE_URL="http://127.0.0.1:1/v1"), 1, b"127.0.0.1"),
            (start(*mock, "--timeout", "1", "[[delay:60000]]"), 124, b"not done after 1 s"),
            (start(*mock, "[[fail:403]]"), 1, b"403"),
            (start("run", "-m", blocks, "--timeout", "1", "x", stuck=True), 124, b"blocks"),
            (start("run", "-m", refuses, "--timeout", "1", "x", stuck=True), 124, b"refuses"),
        ]
        for process, code, told in cases:
            out, err = process.communicate(timeout=90)
            assert (process.returncode, out) == (code, b""), err
            assert told in err, err
            assert b"Traceback" not in err
    assert time.monotonic() - started < 60


@pytest.mark.contract("CLI-03")
def test_a_time_out_is_told_in_json_too(house: House) -> None:
    slow = house.script("slow", {"text": "one two", "delay_ms": 60_000})
    limit = ("-m", slow, "--timeout", "1", "x")
    one = house.start("run", "-o", "json", *limit)
    many = house.start("run", "-o", "stream-json", *limit)
    result = json.loads(_heard(one, 124))
    lines = [json.loads(line) for line in _heard(many, 124).splitlines()]
    assert lines[-1]["type"] == "result"
    assert result["finishReason"] == lines[-1]["finishReason"] == "cancelled"
    assert result["finalResponse"] is None


@pytest.mark.contract("CLI-02")
def test_an_interrupt_while_the_prompt_is_read_ends_with_130(house: House) -> None:
    def heed() -> None:
        # A shell that runs the tests in the background has them ignore the interrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with ended(house.start(*ECHO, "-", stdin=subprocess.PIPE, preexec_fn=heed)) as process:
        assert process.stdin is not None
        # The command reads when it has taken more than fits in the pipe.
        process.stdin.write(b"x" * 200_000)
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.contract("CLI-02", "STO-04")
def test_a_database_of_a_newer_version_is_refused_and_left_alone(house: House) -> None:
    path = house.folder / "room.db"
    house.run(*ECHO, "hello", "--db", str(path))
    connection: Any = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 9999")
    connection.close()
    before = path.read_bytes()
    done = house.run(*ECHO, "hello", "--db", str(path), code=None)
    assert done.returncode in (1, 2)
    assert b"upgrade Postroom" in done.stderr
    assert path.read_bytes() == before


# ---- what is printed ----


@pytest.mark.contract("CLI-03", "RUN-04")
def test_the_result_is_the_fold_of_the_exported_log(house: House) -> None:
    model = house.script(
        "tools",
        {"text": "Looking.", "tool_calls": [{"name": "list_dir", "arguments": {"path": "."}}]},
        {"text": "", "error": {"status": 503}},
        {"text": "Found it."},
    )
    house.run(*ECHO, "-s", "s", "before")
    house.run(*ECHO, "-s", "s", "before, again")
    printed = json.loads(house.run("run", "-m", model, "-s", "s", "-o", "json", "mine").stdout)
    lines = house.run("session", "export", "s").stdout.splitlines()
    log = [Event.from_json(line) for line in lines]
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    name = MessageId(printed["messageId"])
    cut = interval(log, name, quiescent=True)
    assert fold_run(SessionId("s"), name, cut, quiescent=True).to_json() == printed
    assert printed["finalResponse"] == "Found it."


@pytest.mark.contract("CLI-01")
def test_a_reader_that_goes_early_is_no_error(house: House) -> None:
    house.run(*ECHO, "-s", "s", "-", data=b"word " * 60_000)
    with ended(house.start("session", "export", "s")) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b'{"sessionId":"s","seq":1,')
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.wait(30)


@pytest.mark.contract("CLI-01")
@pytest.mark.parametrize("plain", [True, False])
def test_colours_are_for_terminals_that_want_them(house: House, plain: bool) -> None:
    model = house.script("tools", {"tool_calls": [{"name": "list_dir", "arguments": {}}]})
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", "-m", model, "hi"],
        env={**house.env, **({"NO_COLOR": "1"} if plain else {})},
        cwd=house.folder,
        stdout=subprocess.PIPE,
        stderr=secondary,
    )
    os.close(secondary)
    seen = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(primary, 4096):
            seen += chunk
    os.close(primary)
    out = _heard(process)
    assert b"list_dir" in seen
    assert (b"\x1b[" in seen) is not plain
    assert out == b"hi\n"


def _leaves(command: Any, words: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(command, click.Group) and not hasattr(command, "commands"):
        return [(words, command)]
    return [
        leaf
        for name in command.commands
        for leaf in _leaves(command.commands[name], (*words, name))
    ]


LEAVES = _leaves(typer.main.get_command(app))


@pytest.mark.parametrize(("words", "command"), LEAVES, ids=[" ".join(w) for w, _ in LEAVES])
def test_help_lists_every_option(words: tuple[str, ...], command: Any) -> None:
    told = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert told.exit_code == 0
    for parameter in command.params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option in told.output
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.help, f"{parameter.name} is not explained"
