"""Every example runs, in a folder of its own, and prints what it is about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDER = ROOT / "examples" / "python"

# What each prints: whole lines, in order.
PRINTED = {
    "one_prompt": ["The key is under the mat. (completed)"],
    "streaming": ["Onc|e up|on a| tim|e th|ere |was |a qu|eue.|", "9 tokens"],
    "two_programs": [
        "watcher: somebody said hello",
        "asker: hello",
        "watcher: hello again",
    ],
    "queue_while_busy": ["2 wait", "a better second question"],
    "survive_restart": [
        "a turn ended: interrupted",
        "a turn ended: completed",
        "I was interrupted.",
    ],
    "approve_tool": ['asked: send_letter {"to":"Ada"}', "The letter is on its way."],
    "fold_yesterday": ["events 2 to 11: It rained."],
}


def test_every_example_is_tried_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / f"{name}.py")],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "POSTROOM_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if line]
    if name == "two_programs":  # two programs speak when they like
        assert sorted(lines[:2]) == sorted(PRINTED[name][:2])
        lines = [*PRINTED[name][:2], *lines[2:]]
    assert lines == PRINTED[name]
