"""`postroom serve` as a real process with a real receiver: answered once, killed at will, drained."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.cores import ChannelFile
from tests.e2e.daemon import SECRET, Daemon, Office, Receiver, eventually
from tests.support import ROOT

SLOW = {"text": "never in time", "delay_ms": 60_000}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.close()


def _events(office: Office, session: str) -> list[dict[str, Any]]:
    lines = office("session", "events", session, "--output", "json").stdout.splitlines()
    return [json.loads(line) for line in lines]


def _runs_a_turn(daemon: Daemon) -> None:
    eventually(lambda: daemon.metrics()["postroom_turns_running"])


def _all_said(receiver: Receiver, *texts: str) -> None:
    eventually(lambda: sorted(receiver.texts()) == sorted(texts))


# ---- the way in and out ----


@pytest.mark.contract("SEC-04")
def test_a_signed_post_is_answered_exactly_once(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    daemon = office.serve()
    status, taken = daemon.post("hello")
    assert (status, taken["outcome"]) == (200, "queued")
    _all_said(receiver, "hello")
    assert daemon.post("hello")[1] == {**taken, "outcome": "duplicate"}
    daemon.post("and more", id_="evt_2")
    _all_said(receiver, "hello", "and more")
    assert len(receiver.got) == 2
    assert receiver.unsigned == 0
    assert receiver.got[0].message["conversation"] == "7"
    eventually(lambda: [d["status"] for d in office.deliveries()] == ["sent", "sent"])


@pytest.mark.contract("SEC-04")
def test_what_is_not_signed_as_it_must_be_is_refused_and_leaves_no_trace(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver, "body_bytes_max = 1000")
    daemon = office.serve()
    assert daemon.post(key=b"x" * 32)[0] == 401
    assert daemon.post(age_s=3_600)[0] == 401
    assert daemon.post("x" * 2_000)[0] == 413
    assert daemon.post(channel="nobody")[0] == 404
    assert office.json("session", "list") == []
    assert daemon.post()[0] == 200  # the same id: none of them had taken it


@pytest.mark.contract("CHN-04")
def test_a_sender_who_is_not_named_is_refused(office: Office, receiver: Receiver) -> None:
    office.desk(receiver, allow="[]")
    daemon = office.serve()
    assert "nobody may talk there yet" in daemon.said
    assert daemon.post()[1] == {"outcome": "refused"}
    assert office.json("session", "list") == []


@pytest.mark.contract("CHN-04")
@pytest.mark.parametrize("claims", ["serve", "run"])
def test_whoever_was_shut_out_since_is_refused_at_the_claim_whichever_process_makes_it(
    office: Office, receiver: Receiver, claims: str
) -> None:
    office.desk(receiver, allow='["desk", "guest"]')
    daemon = office.serve(model=office.script(SLOW))
    session = daemon.post("from the desk")[1]["sessionId"]
    _runs_a_turn(daemon)
    assert (
        daemon.post("from a guest", id_="evt_2", sender={"id": "guest"})[1]["outcome"] == "queued"
    )
    daemon.kill()
    office.desk(receiver, allow='["desk"]')
    if claims == "serve":
        office.serve()
    else:
        office("run", "-m", "scripted:echo", "--session", session, "mine")
    found = eventually(
        lambda: [e for e in _events(office, session) if e["type"] == "inbox/rejected"]
    )
    assert [e["data"]["reason"] for e in found] == ["its sender may no longer talk here"]
    entered = [
        e["data"]["message"] for e in _events(office, session) if e["type"] == "user/message"
    ]
    assert all("guest" not in json.dumps(message) for message in entered)


def test_an_answer_waits_while_its_receiver_is_away(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    daemon = office.serve()
    port = receiver.port
    receiver.close()
    daemon.post("hello")
    eventually(lambda: "no connection" in office("outbox", "list", "--open").stdout)
    (waiting,) = office.deliveries()
    assert (waiting["status"], waiting["parts"][0]["attempts"]) == ("queued", 0)
    back = Receiver(port)
    try:
        _all_said(back, "hello")
        assert len(back.got) == 1
    finally:
        back.close()


# ---- killed ----


@pytest.mark.contract("OPS-03")
def test_killed_while_the_model_works_it_answers_after_the_restart(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    daemon = office.serve(model=office.script(SLOW))
    daemon.post("hello")
    _runs_a_turn(daemon)
    daemon.kill()
    office.serve()
    eventually(lambda: receiver.got)
    eventually(lambda: [d["status"] for d in office.deliveries()] == ["sent"])
    assert len(receiver.got) == 1


@pytest.mark.contract("OUT-12")
def test_killed_in_the_call_the_answer_is_shown_as_unknown_and_never_repeated(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    receiver.holds = True
    daemon = office.serve()
    daemon.post("hello")
    eventually(lambda: receiver.got)
    (calling,) = office.deliveries()
    assert (calling["status"], calling["claim"]) == ("sending", "claimed")
    daemon.kill()
    # Whoever opens the database finds out, from the lock on its file, that the owner is dead.
    eventually(
        lambda: [(d["status"], d["claim"]) for d in office.deliveries()] == [("sending", "lapsed")]
    )
    assert "the next look makes it unknown" in office("outbox", "list").stdout
    assert "left by a dead process" in office("doctor", "-m", "scripted:echo").stdout

    receiver.holds = False
    daemon = office.serve()
    eventually(lambda: daemon.get("/healthz")[1]["status"] == "attention")
    status, health = daemon.get("/healthz")
    assert (status, health["deliveries"]["unknown"]) == (200, 1)
    assert daemon.metrics()['postroom_deliveries{status="unknown"}'] == 1
    assert daemon.metrics()["postroom_deliveries_for_operator"] == 1
    listed = office("outbox", "list")
    assert "the sender was lost; yours to settle" in listed.stdout
    assert "outbox resolve" in listed.stderr
    assert "1 are unknown" in office("doctor", "-m", "scripted:echo").stdout
    daemon.post("next", id_="evt_2")  # the lane goes on
    _all_said(receiver, "hello", "next")
    assert len(receiver.got) == 2

    # The running daemon hears what the operator decides in another process.
    delivery = office.deliveries("--status", "unknown")[0]["deliveryId"]
    office("outbox", "resolve", delivery, "--again", "--yes", "--by", "ada")
    eventually(lambda: receiver.ids().count(f"{delivery}.0") == 2)
    eventually(lambda: daemon.get("/healthz")[1]["status"] == "ok")


def test_killed_in_the_call_to_a_receiver_that_takes_repeats_it_settles_that_by_itself(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver, "repeats_window_s = 3600")
    receiver.holds = True
    daemon = office.serve()
    daemon.post("hello")
    eventually(lambda: receiver.got)
    daemon.kill()
    receiver.holds = False
    office.serve()
    eventually(lambda: [d["status"] for d in office.deliveries()] == ["sent"])
    assert len(receiver.got) == 2
    assert len(set(receiver.ids())) == 1


def test_killed_again_while_it_settles_a_doubt_it_settles_it_with_the_next_start(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver, "repeats_window_s = 3600")
    receiver.holds = True
    daemon = office.serve()
    daemon.post("hello")
    for calls in (1, 2, 3):
        eventually(lambda calls=calls: len(receiver.got) == calls, 5)
        daemon.kill()
        daemon = office.serve()
    receiver.holds = False
    for one in receiver.got:
        one.set()
    eventually(lambda: [d["status"] for d in office.deliveries()] == ["sent"], 10)
    assert len(set(receiver.ids())) == 1


@pytest.mark.parametrize("promise", [3_600, 0])
def test_killed_again_and_again_every_answer_arrives_once_or_is_shown_as_unknown(
    office: Office, receiver: Receiver, promise: int
) -> None:
    """Killed when so many answers have come; posts are repeated until they are acknowledged."""
    office.desk(receiver, f"repeats_window_s = {promise}")
    texts = [f"message {n}" for n in range(24)]
    kills = [2, 6, 11, 15]
    daemon = office.serve()
    for number, text in enumerate(texts):
        while True:
            status, _ = daemon.post(text, id_=f"evt_{number}", conversation=str(number % 5))
            if status == 200:
                break
            assert status == 0  # it was killed: nobody answered
            daemon.wait()
            daemon = office.serve()
        if kills and len(receiver.got) >= kills[0]:
            kills.pop(0)
            daemon.process.kill()
    for _ in [*kills, "the last one, perhaps"]:
        daemon.kill()
        daemon = office.serve()

    def settled() -> bool:
        counts = daemon.metrics()
        return not counts["postroom_pending_messages"] and not (
            counts["postroom_turns_running"]
            or counts['postroom_deliveries{status="queued"}']
            or counts['postroom_deliveries{status="sending"}']
            or counts['postroom_deliveries{status="unknown"}']
            != counts["postroom_deliveries_for_operator"]
        )

    eventually(
        settled, 60, lambda: (daemon.metrics(), daemon.said, office("outbox", "list").stdout)
    )
    found = office.deliveries()
    replies = [d for d in found if d["kind"] == "reply"]
    said = " ".join(p["text"] for d in replies for p in d["parts"])
    assert all(text in said for text in texts)  # nothing that was acknowledged is lost
    statuses = {d["deliveryId"]: d["status"] for d in found}
    assert set(statuses.values()) <= ({"sent"} if promise else {"sent", "unknown"})
    got = receiver.ids()
    if not promise:
        assert len(got) == len(set(got))
    arrived = {one.removesuffix(".0") for one in got}
    assert {d for d, status in statuses.items() if status == "sent"} <= arrived <= set(statuses)


# ---- told to stop ----


@pytest.mark.contract("OPS-03")
def test_a_drain_lets_the_open_turn_end_takes_nothing_in_and_exits_with_0(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    daemon = office.serve(model=office.script({"text": "slow but done", "delay_ms": 2_500}))
    session = daemon.post("hello")[1]["sessionId"]
    daemon.post("later", id_="evt_2")
    _runs_a_turn(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: "draining" in daemon.said)
    status, health = daemon.get("/healthz")
    assert (status, health["status"]) == (503, "draining")
    assert daemon.post("too late", id_="evt_3")[0] == 503
    assert daemon.wait() == 0
    types = [e["type"] for e in _events(office, session)]
    assert types.count("turn/end") == 1  # the turn ended, and "later" was not begun
    assert types.count("turn/start") == 1

    office.serve()
    eventually(lambda: {"slow but done", "later"} <= set(receiver.texts()))
    assert "too late" not in receiver.texts()
    assert len(receiver.ids()) == len(set(receiver.ids()))


@pytest.mark.contract("OPS-03")
def test_a_turn_that_does_not_end_in_time_is_left_to_the_next_start(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    daemon = office.serve("--drain", "0.3", model=office.script(SLOW))
    session = daemon.post("hello")[1]["sessionId"]
    _runs_a_turn(daemon)
    since = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - since < 8
    assert "turn/end" not in [e["type"] for e in _events(office, session)]
    office.serve()
    eventually(lambda: receiver.got)
    reasons = [
        e["data"]["reason"]["kind"] for e in _events(office, session) if e["type"] == "turn/end"
    ]
    assert reasons[0] == "interrupted"


@pytest.mark.contract("OPS-03")
def test_a_drain_waits_for_the_answer_to_a_call_and_records_it(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    receiver.holds = True
    daemon = office.serve()
    daemon.post("hello")
    eventually(lambda: receiver.got)
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: "draining" in daemon.said)
    receiver.got[0].set()
    assert daemon.wait() == 0
    assert [d["status"] for d in office.deliveries()] == ["sent"]


@pytest.mark.contract("OPS-03")
def test_a_call_that_does_not_end_in_time_is_in_doubt(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    receiver.holds = True
    daemon = office.serve("--drain", "0.3")
    daemon.post("hello")
    eventually(lambda: receiver.got)
    assert daemon.stop() == 0
    (left,) = office.deliveries()
    assert left["status"] == "unknown"
    assert left["parts"][0]["error"] == "the process was stopped during the call"


def test_a_second_signal_ends_it_at_once(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    daemon = office.serve(model=office.script(SLOW))
    daemon.post("hello")
    _runs_a_turn(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: "draining" in daemon.said)
    since = time.monotonic()
    assert daemon.stop(signal.SIGTERM) == 143
    assert time.monotonic() - since < 5
    idle = office.serve()
    assert idle.stop(signal.SIGINT) == 0


# ---- what is wrong with a configuration ----


def test_a_channel_that_is_wrong_is_named_with_its_remedy_and_stops_no_other(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    wrong = {
        "kindless": 'secret = "DESK_SECRET"',
        "unkind": 'kind = "pigeon"\nsecret = "DESK_SECRET"',
        "unset": 'kind = "webhook"\nsecret = "SHOP_SECRET"',
        "spilled": f'kind = "webhook"\nsecret = "{SECRET}"',
        "typing": 'kind = "webhook"\nsecret = "DESK_SECRET"\nalow = ["desk"]',
        "typed": 'kind = "webhook"\nsecret = "DESK_SECRET"\nallow = "desk"',
        "nowhere": 'kind = "webhook"\nsecret = "DESK_SECRET"\nurl = "ftp://desk"',
        "homeless": 'kind = "webhook"\nsecret = "DESK_SECRET"\ncwd = "desk"',
    }
    tables = [f"[channels.{name}]\n{table}\n" for name, table in wrong.items()]
    office.core("\n".join(tables), core_id="shop")
    office.core("[channels", core_id="torn")
    daemon = office.serve()
    for name in wrong:
        assert f"channel {name} does not run:" in daemon.said
        assert f"channels.{name}" in daemon.said
    for remedy in (
        "known kinds: webhook",
        "SHOP_SECRET_FILE",
        "the name of a variable is needed",
        "known settings: kind, secret",
        "as /srv/desk",
        "core torn does not run",
    ):
        assert remedy in daemon.said
    status, health = daemon.get("/healthz")
    assert (status, health["status"]) == (503, "failing")
    assert health["channels"]["desk"]["state"] == "running"
    assert health["channels"]["typing"]["state"] == "misconfigured"
    assert "alow" in health["channels"]["typing"]["error"]
    assert daemon.metrics()['postroom_channel_up{channel="typing"}'] == 0
    daemon.post("hello")
    _all_said(receiver, "hello")
    checked = office("doctor", "-m", "scripted:echo", code=1).stdout
    assert all(f"channel {name}: " in checked for name in wrong)
    assert SECRET not in daemon.said + checked + json.dumps(health)


def test_a_name_that_two_cores_use_is_nobody_s(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    office.core((office.home / "cores" / "default" / "core.toml").read_text(), core_id="other")
    daemon = office.serve()
    assert "the cores default and other both have a channel 'desk'" in daemon.said
    assert daemon.post()[0] == 404
    alone = office.serve("--core", "default")
    assert alone.post()[0] == 404  # also where only one of them is asked for


def test_only_the_channels_of_the_named_core_run(office: Office, receiver: Receiver) -> None:
    office.desk(receiver)
    office.core('[channels.shop]\nkind = "webhook"\nsecret = "DESK_SECRET"\n', core_id="shop")
    daemon = office.serve("--core", "default")
    assert list(daemon.get("/healthz")[1]["channels"]) == ["desk"]
    assert "there is no core 'nobody'" in office("serve", "--core", "nobody", code=2).stderr


def test_a_port_that_is_taken_is_said_before_anything_is_made(office: Office) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = office("serve", "--port", port, code=2).stderr
    assert f"127.0.0.1:{port} cannot be listened on" in said
    assert "--port" in said
    assert not (office.home / "postroom.db").exists()


def test_without_a_channel_it_serves_and_says_how_to_make_one(office: Office) -> None:
    daemon = office.serve()
    assert "[channels.NAME]" in daemon.said
    assert daemon.get("/healthz")[0] == 200
    assert daemon.metrics()["postroom_pending_messages"] == 0


@pytest.mark.contract("OPS-01")
def test_doctor_names_dead_channels_and_deliveries_that_nobody_will_send(
    office: Office, receiver: Receiver
) -> None:
    office.desk(receiver)
    daemon = office.serve()
    receiver.close()
    daemon.post("hello")
    eventually(lambda: office.deliveries("--open"))
    dead = office("doctor", "-m", "scripted:echo").stdout
    assert f"nobody listens at 127.0.0.1:{receiver.port}" in dead
    daemon.stop()
    office.core("")
    orphaned = office("doctor", "-m", "scripted:echo").stdout
    assert "some wait for the channel desk, which no core has" in orphaned


# ---- the how-to ----


def _blocks(page: str, *languages: str) -> list[str]:
    text = (ROOT / "docs" / "how-to" / page).read_text()
    return re.findall(rf"```(?:{'|'.join(languages)})\n(.*?)```", text, re.DOTALL)


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])


class Reader:
    """Somebody who does what the how-to says, in a folder of their own, on ports that are free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"8321": _free_port(), "9100": _free_port()}
        programs = folder / "bin"
        programs.mkdir()
        for name, words in {
            "postroom": f"{sys.executable} -m postroom.cli.main",
            "python3": sys.executable,
        }.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (programs / name).chmod(0o755)
        self.env = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "POSTROOM_HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self.started: list[subprocess.Popen[str]] = []

    def page(self, text: str) -> str:
        for port, free in self.ports.items():
            text = text.replace(port, free)
        return text.replace("postroom serve", f"postroom serve --port {self.ports['8321']}")

    def does(self, text: str) -> str:
        done = subprocess.run(
            ["sh", "-e", "-c", self.page(text)],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def starts(self, text: str, log: str) -> subprocess.Popen[str]:
        with (self.folder / log).open("w") as file:
            process = subprocess.Popen(
                ["sh", "-c", f"exec {self.page(text)}"],
                cwd=self.folder,
                env=self.env,
                stdout=file,
                stderr=file,
                text=True,
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    for process in reader.started:
        process.kill()
        process.wait()


def test_the_webhook_how_to_works_word_for_word_but_for_its_ports(reader: Reader) -> None:
    make, receive, serve, say, look = _blocks("webhook.md", "sh")
    (program,) = _blocks("webhook.md", "python")
    (script,) = _blocks("webhook.md", "bash")
    table, promise = _blocks("webhook.md", "toml")
    core = reader.folder / "home" / "cores" / "default" / "core.toml"
    reader.does(make)
    core.write_text(reader.page(table))
    (reader.folder / "receiver.py").write_text(reader.page(program))
    (reader.folder / "say.sh").write_text(reader.page(script))
    reader.starts(receive, "receiver.log")
    daemon = reader.starts(serve, "daemon.log")
    eventually(lambda: "serving" in reader.log("daemon.log"))
    said = reader.does(say)
    assert '{"outcome":"queued"' in said
    assert '{"outcome":"duplicate"' in said
    eventually(lambda: "hello" in reader.log("receiver.log"))
    reader.does("sh say.sh evt_2 /help")
    eventually(lambda: "/status" in reader.log("receiver.log"))
    eventually(lambda: reader.does(look).count("sent") == 2)
    checked = reader.does("postroom doctor --model scripted:echo")
    assert "warning" not in checked

    daemon.kill()  # as the how-to says: whenever you like
    daemon.wait()
    core.write_text(reader.page(table + promise))
    reader.starts(serve, "again.log")
    eventually(lambda: "serving" in reader.log("again.log"))
    reader.does("sh say.sh evt_3 still")
    eventually(lambda: reader.log("receiver.log").count("still") == 1)
    assert reader.log("receiver.log").count("hello") == 1


def test_every_setting_of_a_webhook_is_in_the_how_to_and_every_one_there_exists() -> None:
    text = (ROOT / "docs" / "how-to" / "webhook.md").read_text()
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", text, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert told == set(ChannelFile.__struct_fields__)
