"""The mutants tool: only a test that fails by itself kills a mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools import faketree
from tools import mutants
from tools.mutants import Mutant, MutantsError, Outcome, Verdict

LOOP = "for number in numbers:\n        result += number\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = faketree.make(tmp_path_factory.mktemp("mutants") / "project")
    faketree.patch(root, "ABC-01", "result += number", "result -= number")
    faketree.patch(root, "ABC-01-hangs", LOOP, "while True:\n        pass\n")
    faketree.patch(root, "ABC-01-syntax", "return result", "return return result")
    faketree.patch(root, "ABC-01-import", "def total", "import nothing_of_that_name\n\n\ndef total")
    faketree.patch(root, "ABC-02", "result += number", "result -= number")
    faketree.patch(root, "ABC-03", "result += number", "result -= number")
    faketree.patch(root, "ABC-04", "result += number", "result -= number")
    faketree.patch(root, "ABC-05", "result += number", "result -= number")
    faketree.patch(root, "ABC-06", "result += number", "result -= number")
    faketree.patch(root, "ABC-01-tests", "total([1, 2])", "totals", name="tests/test_sums.py")
    faketree.patch(
        root,
        "ABC-01-collect",
        "from postroom.sums import total",
        "from postroom.sums import totals as total",
        name="tests/test_sums.py",
    )
    stale = (root / "tests/mutants/ABC-01.patch").read_text()
    faketree.write(root, "tests/mutants/ABC-01-stale.patch", stale.replace("return", "give"))
    return root


@pytest.fixture(scope="module")
def verdicts(tree: Path) -> dict[str, tuple[str, str]]:
    found = mutants.mutants(tree / "tests" / "mutants")
    outcomes = mutants.run_all(tree, found, test_seconds=2)
    return {at.mutant.patch.stem: (at.verdict, at.why) for at in outcomes}


@pytest.mark.parametrize(
    ("mutant", "verdict", "why"),
    [
        ("ABC-01", "KILLED", "tests/test_sums.py::test_the_sum_of_some"),
        ("ABC-01-hangs", "KILLED", "tests/test_sums.py::test_the_sum_of_"),
        ("ABC-01-tests", "KILLED", "tests/test_sums.py::test_the_sum_of_some"),
        ("ABC-02", "SURVIVED", "1 passed"),
        ("ABC-01-stale", "BROKEN", "does not apply"),
        ("ABC-01-syntax", "BROKEN", "src/postroom/sums.py:5: invalid syntax"),
        ("ABC-01-import", "BROKEN", "postroom.sums does not import: ModuleNotFoundError"),
        ("ABC-01-collect", "BROKEN", "cannot be collected: tests/test_sums.py"),
        ("ABC-03", "BROKEN", "fails without the patch: tests/test_sums.py::test_that_already"),
        ("ABC-04", "BROKEN", "no test failed, only its set-up"),
        ("ABC-05", "BROKEN", "no passing test carries ABC-05"),
        ("ABC-06", "BROKEN", "no passing test carries ABC-06"),
    ],
)
def test_each_mutant_gets_its_verdict(
    verdicts: dict[str, tuple[str, str]], mutant: str, verdict: str, why: str
) -> None:
    assert verdicts[mutant][0] == verdict
    assert verdicts[mutant][1].startswith(why)


def test_the_tree_itself_is_not_touched(
    tree: Path, verdicts: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    fresh = faketree.make(tmp_path / "fresh")
    for name in ("src/postroom/sums.py", "tests/test_sums.py"):
        assert (tree / name).read_text() == (fresh / name).read_text()
    assert not (tree / "build").exists()


@pytest.mark.parametrize(
    ("verdicts_given", "code", "summary"),
    [
        (["KILLED", "KILLED"], 0, "2 killed, 0 survived, 0 broken"),
        (["KILLED", "SURVIVED"], 1, "1 killed, 1 survived, 0 broken"),
        (["BROKEN", "KILLED"], 1, "1 killed, 0 survived, 1 broken"),
    ],
)
def test_only_killed_mutants_give_success(
    tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdicts_given: list[Verdict],
    code: int,
    summary: str,
) -> None:
    def given(_root: Path, chosen: list[Mutant], *_rest: object) -> Iterator[Outcome]:
        for mutant, verdict in zip(chosen, verdicts_given, strict=True):
            yield Outcome(mutant, verdict, "said so", 0.1)

    monkeypatch.setattr(mutants, "run_all", given)
    assert mutants.main(["--id", "ABC-02", "--id", "ABC-03"], root=tree) == code
    assert capsys.readouterr().out.endswith(summary + "\n")


def test_a_wrong_name_or_an_unknown_id_is_told_and_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = faketree.make(tmp_path / "project")
    assert mutants.main([], root=root) == 1
    assert "has no mutant" in capsys.readouterr().err
    faketree.patch(root, "ABC-01", "result += number", "result -= number")
    assert mutants.main(["--id", "ABC-02"], root=root) == 1
    assert "no mutant of ABC-02" in capsys.readouterr().err
    faketree.patch(root, "wrong", "result += number", "result -= number")
    assert mutants.main([], root=root) == 1
    assert "wrong.patch" in capsys.readouterr().err


def test_tests_that_would_run_other_code_than_the_copy_stop_everything(tmp_path: Path) -> None:
    root = faketree.make(tmp_path / "project")
    faketree.patch(root, "ABC-01", "result += number", "result -= number")
    (root / "src" / "postroom").rename(root / "src" / "elsewhere")
    with pytest.raises(MutantsError, match="not the copy's own code"):
        list(mutants.run_all(root, mutants.mutants(root / "tests" / "mutants")))
