"""A tiny project, laid out as this one is, for the tools to work on."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from pathlib import Path

from tests.support import ROOT

SUM = """\
    def total(numbers):
        result = 0
        for number in numbers:
            result += number
        return result
    """

TESTS = """\
    import pytest
    from postroom.sums import total

    @pytest.mark.contract("ABC-01")
    def test_the_sum_of_some():
        assert total([1, 2]) == 3

    @pytest.mark.contract("ABC-01", "ABC-02")
    def test_the_sum_of_none():
        assert total([]) == 0

    @pytest.mark.contract("ABC-03")
    def test_that_already_fails():
        assert total([1]) == 2

    @pytest.fixture
    def three():
        return [total([1]), 2][1] + total([1])

    @pytest.fixture
    def careful():
        assert total([4]) == 4

    @pytest.mark.contract("ABC-04")
    def test_behind_a_fixture(careful):
        pass

    @pytest.mark.contract("ABC-05")
    @pytest.mark.skip(reason="to see what becomes of it")
    def test_not_run():
        pass

    def test_without_an_id(three):
        assert three == 3
    """

MANIFEST = """\
    # Contracts

    - ABC-01 Sums are right.
    - ABC-02 The sum of none is 0.
    - ABC-03 A promise that is broken.
    - ABC-04 A promise behind a fixture.
    - ABC-05 A promise whose test is skipped.
    - ABC-06 A promise without a test.
    - ABC-07 (bench) A promise of speed.
    - ABC-08 (bench) Another one.
    """

RESULTS = """\
    ABC-08 is named outside the table only.

    | what | id | measured |
    |---|---|---|
    | sums | ABC-07 | 1,000,000 a second |
    """


def make(root: Path) -> Path:
    files = {
        "pyproject.toml": """\
            [tool.pytest.ini_options]
            testpaths = ["tests"]
            pythonpath = ["src"]
            addopts = "-p no:asyncio -p no:hypothesispytest"
            """,
        "src/postroom/__init__.py": "",
        "src/postroom/sums.py": SUM,
        "tests/test_sums.py": TESTS,
        "docs/contracts.md": MANIFEST,
        "bench/RESULTS.md": RESULTS,
    }
    for name, text in files.items():
        write(root, name, text)
    shutil.copy(ROOT / "tools" / "recording.py", root / "conftest.py")
    return root


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")


def patch(root: Path, mutant: str, old: str, new: str, name: str = "src/postroom/sums.py") -> None:
    """Writes the mutant that puts ``new`` in the place of ``old`` in the file ``name``."""
    before = (root / name).read_text(encoding="utf-8")
    assert old in before
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        before.replace(old, new).splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    write(root, f"tests/mutants/{mutant}.patch", "".join(lines))
