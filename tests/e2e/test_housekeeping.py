"""The commands around a run: init, model list, usage, budgets, retry, backup and restore, secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.servers.model_server import ModelServer

SECRET = "sk-planted-0123456789abcdef"


class Command:
    """`postroom` in a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "POSTROOM_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def __call__(
        self, *words: str, env: dict[str, str] | None = None, code: int | None = 0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "postroom.cli.main", *words],
            env={**self.env, **(env or {})},
            cwd=self.folder,
            capture_output=True,
            text=True,
            input=stdin,
            timeout=60,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def script(self, name: str, *replies: dict[str, Any], then: str = "repeat") -> str:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"replies": list(replies), "then": then}))
        return f"scripted:{path}"

    @property
    def database(self) -> Path:
        return self.home / "postroom.db"


@pytest.fixture
def postroom(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.mark.contract("CLI-08")
def test_with_nothing_configured_the_error_names_the_commands_that_fix_it(
    postroom: Command,
) -> None:
    said = postroom("run", "hello", code=2).stderr
    for fix in ("OPENAI_API_KEY", "postroom model install", "--model PROVIDER:NAME"):
        assert fix in said


def test_init_by_flags_makes_a_core_that_works(postroom: Command) -> None:
    postroom("init", "--model", "scripted:echo")
    core = postroom.home / "cores" / "default" / "core.toml"
    assert 'model = "scripted:echo"' in core.read_text()
    assert postroom("run", "hello").stdout == "hello\n"
    assert "exists already" in postroom("init", "--model", "scripted:echo", code=2).stderr


@pytest.mark.contract("SEC-06")
def test_a_core_says_which_tools_may_run_and_a_name_that_is_no_tool_is_an_error(
    postroom: Command,
) -> None:
    script = postroom.folder / "calls.json"
    script.write_text(
        '{"replies": [{"tool_calls": [{"name": "bash", "arguments": {"command": "touch made"}}]}],'
        ' "then": "echo"}'
    )
    folder = postroom.home / "cores" / "default"
    folder.mkdir(parents=True)
    core = folder / "core.toml"
    core.write_text(f'model = "scripted:{script}"\npermissions.bash = "deny"\n')
    said = postroom("run", "-o", "stream-json", "go").stdout
    assert "policy denies this tool" in said
    core.write_text(f'model = "scripted:{script}"\npermissions.bash = "ask"\n')
    assert "nobody is attached" in postroom("run", "-o", "stream-json", "go").stdout
    core.write_text(f'model = "scripted:{script}"\npermissions.bsh = "ask"\n')
    assert "bsh" in postroom("run", "go", code=2).stderr
    core.write_text(f'model = "scripted:{script}"\npermissions.bash = "maybe"\n')
    assert "permissions" in postroom("run", "go", code=2).stderr


def test_init_without_a_key_says_which_variable_is_missing_and_makes_nothing(
    postroom: Command,
) -> None:
    assert "OPENAI_API_KEY" in postroom("init", "--model", "openai:x", code=2).stderr
    assert not (postroom.home / "cores").exists()


@pytest.mark.contract("SEC-02")
def test_a_key_in_a_file_is_used_and_appears_nowhere(
    postroom: Command, model_server: ModelServer
) -> None:
    key = postroom.folder / "key"
    key.write_text(SECRET + "\n")
    env = {"OPENAI_BASE_URL": model_server.url}
    made = postroom("init", "--model", "openai:mock", "--key", str(key), env=env)
    prompt = '[[tool:bash {"command": "env; echo done"}]]'
    ran = postroom("run", "--session", "s", "--output", "stream-json", prompt, env=env)
    failed = postroom("run", "--session", "s", "[[fail:401]]", env=env, code=1)
    exported = postroom("session", "export", "s")
    checked = postroom("doctor", env=env)
    told = [ran, made, failed, exported, checked]
    assert "done" in exported.stdout
    assert not any(SECRET in d.stdout + d.stderr for d in told)
    files = [p for p in postroom.folder.rglob("*") if p.is_file() and p != key]
    assert not any(SECRET.encode() in p.read_bytes() for p in files)


@pytest.mark.contract("SEC-02")
def test_a_key_in_the_homes_env_file_is_used_but_not_one_of_the_folder_one_stands_in(
    postroom: Command, model_server: ModelServer
) -> None:
    (postroom.folder / ".env").write_text("OPENAI_API_KEY=from-here\n")
    env = {"OPENAI_BASE_URL": "http://192.0.2.1/v1"}
    assert "OPENAI_API_KEY" in postroom("run", "-m", "openai:m", "hi", env=env, code=2).stderr
    postroom.home.mkdir()
    (postroom.home / ".env").write_text(
        f"OPENAI_API_KEY={SECRET}\nOPENAI_BASE_URL={model_server.url}\n"
    )
    assert postroom("run", "-m", "openai:mock", "[[say:yes]]").stdout == "yes\n"


def test_a_secret_file_that_cannot_be_read_is_named_without_its_content(postroom: Command) -> None:
    env = {"OPENAI_API_KEY_FILE": str(postroom.folder / "nowhere")}
    said = postroom("run", "-m", "openai:m", "hi", env=env, code=2).stderr
    assert "OPENAI_API_KEY_FILE" in said
    assert "nowhere" in said


def test_a_wrong_setting_is_named_with_its_file_and_the_known_ones(postroom: Command) -> None:
    folder = postroom.home / "cores" / "default"
    folder.mkdir(parents=True)
    (folder / "core.toml").write_text('model = "scripted:echo"\nmodle = 3\n')
    said = postroom("run", "hi", code=2).stderr
    assert "core.toml" in said
    assert "modle" in said
    (folder / "core.toml").write_text("model = \n")
    assert "line 1" in postroom("run", "hi", code=2).stderr


def test_model_list_shows_what_the_environment_offers(postroom: Command) -> None:
    listed = json.loads(postroom("model", "list", "--output", "json").stdout)
    assert listed["default"] is None
    by_name = {p["provider"]: p for p in listed["providers"]}
    assert not by_name["openai"]["ready"]
    assert by_name["openai"]["needs"] == "OPENAI_API_KEY"
    env = {"OPENAI_API_KEY": SECRET}
    listed = json.loads(postroom("model", "list", "--output", "json", env=env).stdout)
    assert listed["default"].startswith("openai:")
    assert SECRET not in postroom("model", "list", env=env).stdout


def test_usage_adds_up_tokens_by_day_session_and_model(postroom: Command) -> None:
    for session in ("one", "one", "two"):
        postroom("run", "-m", "scripted:echo", "--session", session, "hello")
    by_session = json.loads(postroom("usage", "--by", "session", "--output", "json").stdout)
    assert {row["session"]: row["requests"] for row in by_session} == {"one": 2, "two": 1}
    by_model = json.loads(postroom("usage", "--by", "model", "--output", "json").stdout)
    assert [(row["model"], row["costUsd"]) for row in by_model] == [("scripted:echo", None)]
    assert "unknown" in postroom("usage").stdout


def test_a_cap_stops_the_session_with_a_notice_and_loses_nothing(postroom: Command) -> None:
    folder = postroom.home / "cores" / "default"
    folder.mkdir(parents=True)
    (folder / "core.toml").write_text('model = "scripted:echo"\nsession_tokens_max = 1\n')
    postroom("run", "--session", "s", "first")
    stopped = postroom("run", "--session", "s", "second", code=1)
    assert "its cap is 1" in stopped.stderr
    assert stopped.stdout == ""
    (folder / "core.toml").write_text('model = "scripted:echo"\n')
    retried = postroom("session", "retry", "s").stdout
    assert "again as" in retried
    postroom("run", "--session", "s", "third")
    exported = postroom("session", "export", "--format", "markdown", "s").stdout
    assert exported.count("second") == 3  # asked, asked again, and echoed


def test_retry_queues_the_messages_of_failed_turns_once(postroom: Command) -> None:
    failing = postroom.script("failing", {"error": {"status": 401}})
    for text in ("one", "two"):
        postroom("run", "--session", "s", "-m", failing, text, code=1)
    pairs = json.loads(postroom("session", "retry", "s", "--output", "json").stdout)
    assert len(pairs) == 2
    again = json.loads(postroom("session", "retry", "s", "--output", "json").stdout)
    assert again == pairs
    pending = json.loads(postroom("inbox", "list", "s", "--output", "json").stdout)
    assert [p["message"]["content"][0]["text"] for p in pending] == ["one", "two"]
    postroom("run", "--session", "s", "-m", "scripted:echo", "three")
    assert json.loads(postroom("session", "retry", "s", "--output", "json").stdout) == []


@pytest.mark.contract("STO-04")
def test_a_backup_made_while_it_runs_restores_to_a_consistent_state(postroom: Command) -> None:
    postroom("run", "-m", "scripted:echo", "--session", "before", "kept")
    slow = postroom.script("slow", {"text": "late", "delay_ms": 60_000})
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "postroom.cli.main", "run", "--session", "open"),
            *("-m", slow, "hello"),
        ],
        env=postroom.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            if (
                '"step/start"'
                in postroom("session", "events", "open", "-o", "json", code=None).stdout
            ):
                break
        copy = postroom.folder / "copy"
        postroom("db", "backup", str(copy))
        refused = postroom("db", "restore", "--yes", str(copy), code=2).stderr
        assert "still runs" in refused
    finally:
        running.kill()
        running.wait()
    postroom("run", "-m", "scripted:echo", "--session", "after", "lost by the restore")
    said = postroom("db", "restore", "--yes", str(copy)).stdout
    assert "before-restore" in said
    listed = json.loads(postroom("session", "list", "--output", "json").stdout)
    assert {s["sessionId"] for s in listed} == {"before", "open"}
    postroom("run", "-m", "scripted:echo", "--session", "open", "go on")
    assert "kept" in postroom("session", "export", "before").stdout
    postroom("db", "check")


@pytest.mark.contract("STO-05")
def test_a_restored_backup_sends_nothing_again_and_keeps_newer_cursors(postroom: Command) -> None:
    postroom("run", "-m", "scripted:echo", "--session", "s", "hello")
    statuses = ["queued", "sending", "sent", "unknown", "failed", "unrouted"]
    database = apsw.Connection(str(postroom.database))
    for index, status in enumerate(statuses):
        database.execute(
            "INSERT INTO delivery (id, sid, ord, kind, status, policy, blocks, due, created_at,"
            " updated_at, expires_at) VALUES (?, 1, ?, 'text', ?, 'persist', ?, 0, 0, 0, 0)",
            (f"dlv_{status}", index + 100, status, status in ("queued", "sending", "unknown")),
        )
        part = "queued" if status == "unrouted" else status
        database.execute(
            "INSERT INTO part (delivery, idx, kind, text, status) VALUES (?, 0, 'text', '', ?)",
            (f"dlv_{status}", part),
        )
    database.execute(
        "INSERT INTO work VALUES ('delivery.send', 'dlv_queued', 'ready', 0, NULL, NULL)"
    )
    database.execute(
        "INSERT INTO cursor VALUES ('bot', 'offset', '5', 100), ('bot', 'old', '9', 900)"
    )
    database.execute(
        "INSERT INTO dedupe VALUES ('bot', 'update-4', 100, 'queued', 'r', NULL, NULL)"
    )
    copy = postroom.folder / "copy"
    postroom("db", "backup", str(copy))
    database.execute("UPDATE cursor SET value = '8', updated_at = 200 WHERE name = 'offset'")
    database.execute(
        "INSERT INTO dedupe VALUES ('bot', 'update-7', 200, 'queued', 'r', NULL, NULL)"
    )
    database.close()
    said = postroom("db", "restore", "--yes", str(copy)).stdout
    assert "3 deliveries were not finished" in said
    assert "cursors were newer" in said
    database = apsw.Connection(str(postroom.database))
    deliveries = dict(database.execute("SELECT id, status FROM delivery").fetchall())
    assert [deliveries[f"dlv_{s}"] for s in statuses] == [
        *("unknown", "unknown", "sent", "unknown", "failed", "unrouted")
    ]
    assert database.execute("SELECT sum(blocks) FROM delivery").fetchall() == [(0,)]
    assert database.execute("SELECT status FROM work WHERE key = 'dlv_queued'").fetchall() == [
        ("none",)
    ]
    assert dict(database.execute("SELECT name, value FROM cursor").fetchall()) == {
        "offset": "8",
        "old": "9",
    }
    assert database.execute("SELECT count(*) FROM dedupe").fetchall() == [(2,)]
    database.close()


@pytest.mark.contract("OPS-01")
def test_doctor_finds_and_names_what_is_wrong(postroom: Command, model_server: ModelServer) -> None:
    assert "no model is configured" in postroom("doctor", code=1).stdout
    env = {"OPENAI_API_KEY": SECRET, "OPENAI_BASE_URL": model_server.url}
    healthy = postroom("doctor", "--model", "openai:mock", env=env)
    assert "ok" in healthy.stdout
    nobody = {**env, "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    assert "127.0.0.1:9" in postroom("doctor", "-m", "openai:mock", env=nobody, code=1).stdout
    folder = postroom.home / "cores" / "broken"
    folder.mkdir(parents=True)
    (folder / "core.toml").write_text("nonsense = 1\n")
    assert "broken" in postroom("doctor", "-m", "openai:mock", env=env, code=1).stdout
