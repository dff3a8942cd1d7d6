"""The recorded runs: what the one fold makes of each, as every SDK must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postroom.domain.event import Event
from postroom.domain.ids import MessageId, SessionId
from postroom.domain.run import RunResult, fold_run, interval
from tests.support import ROOT, bounded
from tools import vectors

FILES = sorted((ROOT / "protocol" / "vectors").glob("*.json"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def fold(vector: dict[str, Any]) -> RunResult:
    log = [Event.from_json(json.dumps(event)) for event in vector["log"]]
    name = MessageId(vector["messageId"])
    quiescent = vector["until"] == "quiescent"
    cut = interval(log, name, quiescent=quiescent)
    return fold_run(SessionId(log[0].session_id), name, cut, quiescent=quiescent)


@pytest.mark.contract("SDK-01", "RUN-04")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_run_folds_to_its_recorded_result(path: Path) -> None:
    vector = read(path)
    result = fold(vector)
    assert {**result.to_json(events=False), "complete": result.complete} == vector["result"]
    between = [e for e in vector["log"] if result.first_seq <= e["seq"] <= result.last_seq]
    assert result.to_json()["events"] == between


async def test_recording_again_changes_nothing() -> None:
    recorded = await bounded(vectors.record(), 60)
    assert {path.name: path.read_text(encoding="utf-8") for path in FILES} == recorded


def test_the_vectors_cover_every_end_of_a_turn_and_each_way_a_message_can_go() -> None:
    found = [read(path) for path in FILES]
    kinds = {vector["result"]["finishReason"] for vector in found}
    assert kinds >= {
        "completed",
        "max_tokens",
        "max_steps",
        "refused",
        "rejected",
        "cancelled",
        "error",
        None,
    }
    types = {event["type"] for vector in found for event in vector["log"]}
    assert types >= {"inbox/rejected", "inbox/cancelled", "inbox/replaced", "model/retry"}
    ends = {
        event["data"]["reason"]["kind"]
        for vector in found
        for event in vector["log"]
        if event["type"] == "turn/end"
    }
    assert "interrupted" in ends
    assert {vector["until"] for vector in found} == {"idle", "quiescent"}
    assert {vector["result"]["complete"] for vector in found} == {True, False}


@pytest.mark.contract("RUN-11")
def test_a_turn_s_end_is_nowhere_taken_for_the_outcome_of_a_message() -> None:
    """A's own turn ends max_tokens, B's completed, then idle: A's run is completed."""
    path = ROOT / "protocol" / "vectors" / "max-tokens-then-completed.json"
    result = fold(read(path))
    assert (result.finish_reason, result.final_response) == ("completed", "2")
