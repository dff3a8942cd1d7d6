"""The contracts tool: what counts as proven, and what makes it fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools import faketree
from tools import contracts
from tools.contracts import Contract, ContractsError, Record, Result


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return faketree.make(tmp_path / "project")


def _record(path: Path, *rows: tuple[str, list[str], str], errors: tuple[str, ...] = ()) -> Path:
    tests = {test: {"contracts": ids, "outcome": outcome} for test, ids, outcome in rows}
    path.write_text(json.dumps({"tests": tests, "collection_errors": errors}))
    return path


def _standing(tree: Path) -> dict[str, str]:
    rows = json.loads((tree / "build" / "contracts.json").read_text())
    return {name: row["status"] for name, row in rows.items()}


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_real_run_is_recorded_the_same_in_one_process_and_in_two(
    tree: Path, workers: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert contracts.main(["--", workers], root=tree) == 1
    assert _standing(tree) == {
        "ABC-01": "passed",
        "ABC-02": "passed",
        "ABC-03": "failed",
        "ABC-04": "passed",
        "ABC-05": "missing",
        "ABC-06": "missing",
        "ABC-07": "passed",
        "ABC-08": "missing",
    }
    printed = capfd.readouterr()
    assert "ABC-03! ABC-05 ABC-06 ABC-08\n" in printed.out
    assert printed.err == "contracts: ABC-03 failed\n"
    rows = json.loads((tree / "build" / "contracts.json").read_text())
    assert rows["ABC-02"]["tests"] == ["tests/test_sums.py::test_the_sum_of_none"]
    assert rows["ABC-07"]["tests"] == ["bench/RESULTS.md:5"]


def test_a_run_can_be_narrowed_to_one_contract(tree: Path) -> None:
    assert contracts.main(["--", "--contract=ABC-02"], root=tree) == 0
    record = json.loads((tree / "build" / "tests.json").read_text())
    assert list(record["tests"]) == ["tests/test_sums.py::test_the_sum_of_none"]


def test_a_file_that_cannot_be_collected_is_a_failure(
    tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faketree.write(tree, "tests/test_broken.py", "import nothing_of_that_name\n")
    assert contracts.main(["--", "--contract=ABC-02"], root=tree) == 1
    assert "tests/test_broken.py could not be read" in capfd.readouterr().err


def test_one_failing_test_breaks_a_contract_that_another_proves(tree: Path) -> None:
    record = _record(
        tree / "r.json",
        ("t::a", ["ABC-01"], "passed"),
        ("t::b", ["ABC-01"], "error"),
        ("t::c", ["ABC-01"], "passed"),
    )
    assert contracts.main(["--from", str(record)], root=tree) == 1
    assert _standing(tree)["ABC-01"] == "failed"


def test_an_id_that_is_not_in_the_manifest_is_a_failure(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _record(tree / "r.json", ("t::a", ["ABC-99"], "passed"))
    assert contracts.main(["--from", str(record)], root=tree) == 1
    assert capsys.readouterr().err == (
        "contracts: t::a carries ABC-99, which is not in the manifest\n"
    )


def test_a_claim_that_no_passing_test_carries_fails_the_check_and_only_the_check(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _record(tree / "r.json", ("t::a", ["ABC-01"], "passed"))
    faketree.write(tree, "docs/contracts-green.txt", "# claimed\nABC-01  # sums\nABC-05\nXYZ-01\n")
    assert contracts.main(["--from", str(record)], root=tree) == 0
    assert contracts.main(["--from", str(record), "--check"], root=tree) == 1
    assert capsys.readouterr().err == (
        "contracts: ABC-05 is claimed green and no passing test carries it\n"
        "contracts: XYZ-01 is claimed green and not in the manifest\n"
    )


def test_claiming_adds_what_passes_and_nothing_twice(tree: Path) -> None:
    record = _record(tree / "r.json", ("t::a", ["ABC-01", "ABC-02"], "passed"))
    faketree.write(tree, "docs/contracts-green.txt", "# claimed\nABC-02\n")
    for _ in range(2):
        assert contracts.main(["--from", str(record), "--claim", "--check"], root=tree) == 0
    assert (tree / "docs/contracts-green.txt").read_text() == "# claimed\nABC-02\nABC-01\nABC-07\n"


def test_another_runner_names_its_ids_in_titles(tree: Path) -> None:
    mine = _record(tree / "r.json", ("t::a", ["ABC-01"], "passed"))
    other = tree / "node.xml"
    other.write_text(
        "<testsuites><testsuite>"
        '<testcase name="ABC-02 holds, also for UTF-16"/>'
        '<testcase name="ABC-04 ABC-01 do not"><failure>no</failure></testcase>'
        '<testcase name="ABC-06 was skipped"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert contracts.main(["--from", str(mine), "--from", str(other)], root=tree) == 1
    standing = _standing(tree)
    assert [standing[f"ABC-0{n}"] for n in (1, 2, 4, 6)] == [
        "failed",
        "passed",
        "failed",
        "missing",
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.json", None, "run the tests first"),
        ("bad.json", "{", "not a record"),
        ("odd.json", '{"tests": {"t": {}}}', "not a record"),
        ("bad.xml", "<a>", "not a record"),
        ("what.txt", "", "a record is a .json or a .xml"),
    ],
)
def test_a_record_that_cannot_be_used_is_told_and_fails(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tree / name).write_text(text)
    assert contracts.main(["--from", str(tree / name)], root=tree) == 1
    assert said in capsys.readouterr().err


def test_an_id_stands_in_the_manifest_once(tmp_path: Path) -> None:
    faketree.write(tmp_path, "m.md", "- ABC-01 This.\n- ABC-01 That.\n")
    with pytest.raises(ContractsError, match="ABC-01 is there twice"):
        contracts.manifest(tmp_path / "m.md")
    faketree.write(tmp_path, "m.md", "# None\n")
    with pytest.raises(ContractsError, match="no contract"):
        contracts.manifest(tmp_path / "m.md")


def test_a_bench_row_proves_nothing_but_a_bench_contract() -> None:
    table = contracts.standings(
        {"ABC-01": Contract("Sums.", bench=False), "ABC-02": Contract("(bench) Fast.", bench=True)},
        [],
        [Result("bench/RESULTS.md:3", ("ABC-01", "ABC-02"), "passed")],
    )
    assert (table["ABC-01"].status, table["ABC-02"].status) == ("missing", "passed")
    assert contracts.problems(table, [Record([], [])], []) == []


def test_markers_are_found_without_running_and_odd_ones_have_no_name(tmp_path: Path) -> None:
    faketree.write(
        tmp_path,
        "tests/a/test_it.py",
        """\
        import pytest
        pytestmark = pytest.mark.contract("ABC-01")
        NAME = "ABC-02"

        @pytest.mark.contract("ABC-03", NAME)
        @pytest.mark.contract()
        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.contract("ABC-04"))])
        def test_it(x): ...
        """,
    )
    found = {use.name: use.place for use in contracts.uses(tmp_path / "tests")}
    assert set(found) == {"ABC-01", "ABC-03", "ABC-04", None}
    assert found["ABC-01"] == "tests/a/test_it.py:2"
