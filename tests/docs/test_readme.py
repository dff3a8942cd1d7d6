"""What the README shows runs, word for word."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readmes_program_runs_and_prints_its_answer(tmp_path: Path) -> None:
    (program,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "second completed\n"


def test_every_command_the_readme_names_is_there() -> None:
    told = "\n".join(blocks("console")) + (ROOT / "README.md").read_text()
    named = set(re.findall(r"postroom ([a-z]+)", told)) - {"db"}
    helped = subprocess.run(
        [sys.executable, "-m", "postroom.cli.main", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    words = {"run", "session", "inbox", "doctor", "model", "usage", "init"}
    assert words & named
    assert all(word in helped for word in named & words)


def test_importing_the_package_loads_no_part_of_it() -> None:
    code = (
        "import sys, postroom; heavy = {'aiohttp', 'apsw', 'msgspec', 'typer', 'pydantic_ai'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
