"""The TypeScript SDK, from its lock file to its examples: installed, built, and tested on this runtime.

Its own tests are in sdk/typescript/test. They start `postroom` as a child and as a daemon, fold the
recorded logs, pack the package, install it in an empty project, and run what README and examples show.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SDK = ROOT / "sdk" / "typescript"


def npm(*words: str, within_s: float, **environ: str) -> str:
    done = subprocess.run(
        ["npm", *words],
        cwd=SDK,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-20_000:]
    return said


@pytest.mark.timeout(400)
@pytest.mark.contract("SDK-01", "SDK-02", "SDK-03", "SDK-04")
def test_the_typescript_sdk_installs_builds_and_passes_its_tests() -> None:
    command = Path(sys.executable).parent / "postroom"
    assert command.exists()
    npm("ci", "--prefer-offline", within_s=120)
    said = npm("test", within_s=240, POSTROOM_COMMAND=str(command))
    counts = dict(re.findall(r"(?:#|ℹ) (tests|pass|fail|cancelled|skipped|todo) (\d+)", said))
    assert int(counts["tests"]) > 50
    assert {counts[name] for name in ("fail", "cancelled", "skipped", "todo")} == {"0"}
