"""`postroom outbox`: what an operator sees, and what they decide, with its consequences said."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.e2e.daemon import COMMAND, Office

STATUSES = ("queued", "sending", "sent", "unknown", "failed", "unrouted")
HOUR_MS = 3_600_000
COMPLETING = """
import sys
from postroom.cli.main import main
sys.argv[:] = ["postroom"]
main()
"""


class Desk(Office):
    """An office whose outbox is written by hand, so that it holds every state at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for session in ("s", "other"):
            self("run", "-m", "scripted:echo", "--session", session, "hello")
        self.database = apsw.Connection(str(self.home / "postroom.db"))
        self.database.execute("DELETE FROM delivery; DELETE FROM part")
        self.database.execute(
            "INSERT INTO binding (core_id, channel, conversation, sid, bound_at)"
            " VALUES ('default', 'desk', 'webhook:source:desk:7', 1, 0)"
        )
        for ord_, status in enumerate(STATUSES):
            self.put(f"dlv_{status}", ord_, status)
        self.database.execute(
            "INSERT INTO work VALUES ('delivery.send', 'dlv_sending', 'claimed', 1, 't', 'gone')"
        )

    def put(self, name: str, ord_: int, status: str, sid: int = 1, text: str = "the text") -> None:
        now = self.database.execute("SELECT max(updated_at) FROM session").fetchall()[0][0]
        part = "queued" if status == "unrouted" else status
        error = {"unknown": "the sender was lost", "failed": "the endpoint answered 410"}.get(
            status
        )
        self.database.execute(
            "INSERT INTO delivery (id, sid, ord, kind, status, policy, blocks, handed_over, due,"
            " created_at, updated_at, expires_at) VALUES (?, ?, ?, 'text', ?, 'transient', ?, ?, 0,"
            " ?, ?, ?)",
            (
                *(name, sid, ord_ + 100, status, status in ("queued", "sending")),
                *(status == "unknown", now + ord_, now, now + HOUR_MS),
            ),
        )
        self.database.execute(
            "INSERT INTO part (delivery, idx, kind, text, status, attempts, first_attempt_at,"
            " error) VALUES (?, 0, 'text', ?, ?, 1, 1, ?)",
            (name, text, part, error),
        )

    def of(self, delivery: str) -> dict[str, Any]:
        return self.json("outbox", "show", delivery)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.database.close()


def _ids(found: list[dict[str, Any]]) -> set[str]:
    return {d["deliveryId"].removeprefix("dlv_") for d in found}


@pytest.mark.contract("OUT-12")
def test_the_list_shows_status_claim_and_why_in_one_read(desk: Desk) -> None:
    lines = {
        line.split()[0]: line for line in desk("outbox", "list").stdout.splitlines()[1:] if line
    }
    assert set(lines) == {f"dlv_{s}" for s in STATUSES}
    told = {
        "unknown": "the sender was lost; yours to settle",
        "failed": "the endpoint answered 410",
        "unrouted": "nothing is attached to its session",
        "queued": "waits for its turn",
    }
    for status, text in told.items():
        assert status in lines[f"dlv_{status}"].split()[2]
        assert text in lines[f"dlv_{status}"]
    assert lines["dlv_sending"].split()[2:4] == ["sending", "lapsed"]
    assert "the next look makes it unknown" in lines["dlv_sending"]
    by_id = {d["deliveryId"]: d for d in desk.deliveries()}
    assert (by_id["dlv_sending"]["status"], by_id["dlv_sending"]["claim"]) == ("sending", "lapsed")
    assert by_id["dlv_sending"]["claimedBy"] == "gone"


def test_the_list_can_be_narrowed(desk: Desk) -> None:
    desk.put("dlv_elsewhere", 50, "queued", sid=2)
    assert _ids(desk.deliveries("--open")) == {*STATUSES, "elsewhere"} - {"sent"}
    assert _ids(desk.deliveries("--status", "sent", "--status", "failed")) == {"sent", "failed"}
    assert _ids(desk.deliveries("--session", "other")) == {"elsewhere"}
    newest = desk.json("outbox", "list", "--limit", "1")
    assert _ids(newest) == {"elsewhere"}
    assert desk.json("outbox", "list", "--session", "other", "--status", "sent") == []
    none = desk("outbox", "list", "--session", "other", "--status", "sent")
    assert (none.stdout, none.stderr) == ("", "Nothing there.\n")
    assert "'lost' is not one of" in desk("outbox", "list", "--status", "lost", code=2).stderr


def test_colours_are_for_terminals_and_foreign_text_does_nothing_to_one(desk: Desk) -> None:
    evil = "[red]not markup[/] \x1b[2J\x07\nnext"
    desk.put("dlv_evil", 60, "queued", text=evil)
    desk.database.execute("UPDATE part SET error = ? WHERE delivery = 'dlv_evil'", (evil,))
    plain = desk("outbox", "list").stdout + desk("outbox", "show", "dlv_evil").stdout
    assert "\x1b" not in plain
    assert "[red]not markup[/]" in plain
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "outbox", "list"],
        env={**desk.env, "TERM": "xterm-256color", "COLUMNS": "200"},
        stdout=secondary,
        stderr=subprocess.DEVNULL,
    )
    os.close(secondary)
    seen = b""
    try:
        while chunk := os.read(primary, 4096):
            seen += chunk
    except OSError:  # the other side has ended
        pass
    os.close(primary)
    assert process.wait(30) == 0
    assert b"\x1b[32msent" in seen
    assert b"\x1b[2J" not in seen


def test_show_tells_all_of_one(desk: Desk) -> None:
    shown = desk("outbox", "show", "dlv_unknown").stdout
    for text in ("unknown", "the sender was lost", "1 try", "| the text", "yours to settle"):
        assert text in shown
    missing = desk("outbox", "show", "dlv_none", code=1).stderr
    assert "there is no delivery dlv_none" in missing
    assert "outbox list" in missing


@pytest.mark.parametrize(
    ("flag", "status"), [("--sent", "sent"), ("--failed", "failed"), ("--again", "queued")]
)
def test_a_doubt_is_settled_by_name(desk: Desk, flag: str, status: str) -> None:
    said = desk("outbox", "resolve", "dlv_unknown", flag, "--yes", "--by", "ada").stdout
    assert "decided by   ada" in said
    settled = desk.of("dlv_unknown")
    assert (settled["status"], settled["decidedBy"]) == (status, "ada")
    last = json.loads(desk("session", "events", "s", "--output", "json").stdout.splitlines()[-1])
    assert (last["type"], last["data"]["status"]) == ("delivery/status", status)
    again = desk("outbox", "resolve", "dlv_unknown", "--sent", code=1).stderr
    assert f"is {status}: it is not in doubt" in again


def test_sending_again_asks_first_and_says_that_it_may_arrive_twice(desk: Desk) -> None:
    asked = desk("outbox", "resolve", "dlv_unknown", "--again", stdin="n\n", code=1)
    assert "perhaps twice?" in asked.stderr
    assert "the text" in asked.stderr
    assert desk.of("dlv_unknown")["status"] == "unknown"
    desk("outbox", "resolve", "dlv_unknown", "--again", code=1)  # nobody answers: no
    assert desk.of("dlv_unknown")["status"] == "unknown"
    desk("outbox", "resolve", "dlv_unknown", "--again", stdin="y\n")
    assert desk.of("dlv_unknown")["status"] == "queued"


def test_exactly_one_verdict_is_needed_and_what_each_means_is_said(desk: Desk) -> None:
    for flags in ((), ("--sent", "--again")):
        said = desk("outbox", "resolve", "dlv_unknown", *flags, code=2).stderr
        assert "one of --sent, --failed, --again" in said
        assert "may arrive twice" in said
    assert "may deliver it twice" in " ".join(desk("outbox", "resolve", "--help").stdout.split())


def test_the_operator_s_name_is_the_login_name_unless_it_is_said(desk: Desk) -> None:
    desk.env["LOGNAME"] = "grace"
    desk("outbox", "resolve", "dlv_unknown", "--sent")
    assert desk.of("dlv_unknown")["decidedBy"] == "grace"
    assert (
        "--by needs a name" in desk("outbox", "abandon", "dlv_queued", "--by", " ", code=1).stderr
    )


def test_what_failed_is_sent_again_without_a_question_unless_somebody_settled_it(
    desk: Desk,
) -> None:
    desk("outbox", "redeliver", "dlv_failed", "--by", "ada")
    assert desk.of("dlv_failed")["status"] == "queued"
    desk("outbox", "resolve", "dlv_unknown", "--failed", "--by", "ada")
    asked = desk("outbox", "redeliver", "dlv_unknown", "--by", "ada", stdin="n\n", code=1)
    assert "perhaps twice?" in asked.stderr
    assert desk.of("dlv_unknown")["status"] == "failed"
    desk("outbox", "redeliver", "dlv_unknown", "--by", "ada", "--yes")
    assert desk.of("dlv_unknown")["status"] == "queued"
    refused = desk("outbox", "redeliver", "dlv_sent", code=1).stderr
    assert "is sent: it neither failed nor is without a route" in refused


def test_what_waits_can_be_given_up_and_that_taken_back(desk: Desk) -> None:
    desk("outbox", "abandon", "dlv_queued", "--by", "ada")
    given_up = desk.of("dlv_queued")
    assert (given_up["status"], given_up["decidedBy"]) == ("failed", "ada")
    assert "abandoned" in desk("outbox", "list").stdout
    desk("outbox", "redeliver", "dlv_queued", "--by", "ada")
    assert desk.of("dlv_queued")["status"] == "queued"
    refused = desk("outbox", "abandon", "dlv_unknown", code=1).stderr
    assert "is unknown: it does not wait to be sent" in refused


def test_what_has_no_route_goes_nowhere_until_something_is_attached(desk: Desk) -> None:
    desk.put("dlv_lost", 70, "unrouted", sid=2)
    refused = desk("outbox", "redeliver", "dlv_lost", code=1).stderr
    assert "nothing is attached to other" in refused
    desk("outbox", "redeliver", "dlv_unrouted")  # its session has a binding by now
    assert desk.of("dlv_unrouted")["status"] == "queued"


def test_the_shell_completes_the_ids_that_a_verb_can_take(desk: Desk) -> None:
    for verb, ids in {
        "show": {f"dlv_{s}" for s in STATUSES},
        "resolve": {"dlv_unknown"},
        "redeliver": {"dlv_failed", "dlv_unrouted"},
        "abandon": {"dlv_queued", "dlv_unrouted"},
    }.items():
        completed = subprocess.run(
            [sys.executable, "-c", COMPLETING],
            env={
                **desk.env,
                "_POSTROOM_COMPLETE": "complete_bash",
                "COMP_WORDS": f"postroom outbox {verb} dlv_",
                "COMP_CWORD": "3",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout.split()
        assert set(completed) == ids
