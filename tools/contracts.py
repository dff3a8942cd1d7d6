"""Which contracts of docs/contracts.md are proven, by which tests.

::

    python -m tools.contracts                       run the suite, then tell
    python -m tools.contracts --from build/tests.json   tell from a record of an earlier run
    python -m tools.contracts --check               also: is every id claimed green still green?
    python -m tools.contracts --claim               add what passes to docs/contracts-green.txt

It writes build/contracts.json, ``{id: {"status": "passed|failed|missing", "tests": [...]}}``, and
prints the ids without a passing test. ``failed``: some test that carries the id did not pass.
``missing``: no test that ran carries it, or only skipped ones do. An id marked "(bench)" is proven
by a row of bench/RESULTS.md that names it.

The exit code is 1 if an id failed, if a test carries an id that is not in the manifest, if a test
file could not be read, or, with ``--check``, if an id of docs/contracts-green.txt is not passed.

A record is either what `tools.recording` writes (``.json``) or a JUnit file (``.xml``) of a runner
that has no markers: there the ids stand in a test's title. ``--from`` may be repeated.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent

Status = Literal["passed", "failed", "missing"]

ID = re.compile(r"\b[A-Z]{3,4}-\d{2}\b")
_MANIFEST_LINE = re.compile(r"^- (?P<id>[A-Z]{3,4}-\d{2}) (?P<text>\S.*)$")
_RESULTS_ROW = re.compile(r"^\s*\|")


class ContractsError(Exception):
    """A manifest, list or record that cannot be used; the message says where and why."""


class Contract(NamedTuple):
    text: str
    bench: bool


def family(name: str) -> str:
    """``INB`` of ``INB-01``."""
    return name.partition("-")[0]


class Result(NamedTuple):
    """One test of one run. ``outcome`` is passed, failed, error or skipped."""

    test: str
    contracts: tuple[str, ...]
    outcome: str


@dataclass
class Standing:
    """Where one contract stands. ``tests`` are those that carry it, in the order they came."""

    status: Status = "missing"
    tests: list[str] = field(default_factory=list[str])


class Record(NamedTuple):
    results: list[Result]
    unreadable: list[str]


# What is promised, and what is claimed


def manifest(path: Path) -> dict[str, Contract]:
    """The contracts of ``path``, in its order.

    Raises: `ContractsError` for an id that stands there twice, and for a file without any.
    """
    found: dict[str, Contract] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _MANIFEST_LINE.match(line)
        if match is None:
            continue
        if match["id"] in found:
            raise ContractsError(f"{path}: {match['id']} is there twice")
        found[match["id"]] = Contract(match["text"], bench=match["text"].startswith("(bench)"))
    if not found:
        raise ContractsError(f"{path}: no contract in it")
    return found


def claimed(path: Path) -> list[str]:
    """The ids claimed green: one a line, `#` starts a comment; a missing file claims nothing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if (word := line.partition("#")[0].strip())]


# What the tests say of themselves, without running them


class Use(NamedTuple):
    """One id at one place. ``name`` is None where the marker's argument is not a plain text."""

    name: str | None
    place: str


def uses(tests: Path) -> Iterator[Use]:
    """Every id that a marker of a Python test below ``tests`` names."""
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if not isinstance(node, ast.Call) or not _is_marker(node.func):
                continue
            place = f"{path.relative_to(tests.parent)}:{node.lineno}"
            if not node.args or node.keywords:
                yield Use(None, place)
            for argument in node.args:
                value = argument.value if isinstance(argument, ast.Constant) else None
                yield Use(value if isinstance(value, str) else None, place)


def _is_marker(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "contract"
        and isinstance(function.value, ast.Attribute)
        and function.value.attr == "mark"
    )


# What a run says


def read_record(path: Path, contracts: Collection[str]) -> Record:
    """A record of one run, by the kind its name says.

    Titles are prose: there only words of a known family (the letters of an id) count as ids.

    Raises: `ContractsError` for a file that is not there or is neither kind.
    """
    try:
        if path.suffix == ".json":
            return _recorded(path)
        if path.suffix == ".xml":
            return _junit(path, {family(name) for name in contracts})
    except FileNotFoundError:
        raise ContractsError(f"{path}: no such record; run the tests first") from None
    except (ValueError, KeyError, ElementTree.ParseError) as error:
        raise ContractsError(f"{path}: not a record of a test run: {error}") from error
    raise ContractsError(f"{path}: a record is a .json or a .xml file")


def _recorded(path: Path) -> Record:
    record = json.loads(path.read_text(encoding="utf-8"))
    results = [
        Result(test, tuple(row["contracts"]), row["outcome"])
        for test, row in record["tests"].items()
    ]
    return Record(results, list(record["collection_errors"]))


def _junit(path: Path, families: set[str]) -> Record:
    results: list[Result] = []
    for case in ElementTree.parse(path).iter("testcase"):
        title = case.get("name", "")
        inside = {child.tag for child in case}
        if inside & {"failure", "error"}:
            outcome = "failed"
        else:
            outcome = "skipped" if "skipped" in inside else "passed"
        named = dict.fromkeys(name for name in ID.findall(title) if family(name) in families)
        results.append(Result(title, tuple(named), outcome))
    return Record(results, [])


def bench_rows(path: Path) -> Iterator[Result]:
    """One passed result for each row of the results table that names a contract."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if _RESULTS_ROW.match(line) and (names := ID.findall(line)):
            yield Result(f"{path.parent.name}/{path.name}:{number}", tuple(names), "passed")


def standings(
    contracts: dict[str, Contract], results: Iterable[Result], benched: Iterable[Result]
) -> dict[str, Standing]:
    """Where every contract of the manifest stands; ids that are not in it are left out."""
    table = {name: Standing() for name in contracts}
    for result in results:
        for name in result.contracts:
            if name in table:
                _count(table[name], result)
    for result in benched:
        for name in result.contracts:
            if name in table and contracts[name].bench:
                _count(table[name], result)
    return table


def _count(standing: Standing, result: Result) -> None:
    standing.tests.append(result.test)
    if result.outcome in ("failed", "error"):
        standing.status = "failed"
    elif result.outcome == "passed" and standing.status == "missing":
        standing.status = "passed"


# Telling


def problems(
    table: dict[str, Standing], records: Sequence[Record], green: Sequence[str]
) -> list[str]:
    """What makes the exit code 1, one line each. ``green`` is empty where it is not checked."""
    found = [f"{name} failed" for name, standing in table.items() if standing.status == "failed"]
    for record in records:
        found += [f"{place} could not be read by the test runner" for place in record.unreadable]
        found += [
            f"{result.test} carries {name}, which is not in the manifest"
            for result in record.results
            for name in result.contracts
            if name not in table
        ]
    for name in green:
        if name not in table:
            found.append(f"{name} is claimed green and not in the manifest")
        elif table[name].status == "missing":
            found.append(f"{name} is claimed green and no passing test carries it")
    return found


def _tell(table: dict[str, Standing]) -> None:
    unproven: dict[str, list[str]] = {}
    for name, standing in table.items():
        if standing.status != "passed":
            mark = "!" if standing.status == "failed" else ""
            unproven.setdefault(family(name), []).append(name + mark)
    print("Contracts without a passing test (!: a test that carries it failed):")
    for names in unproven.values():
        print("  " + " ".join(names))
    passed = sum(standing.status == "passed" for standing in table.values())
    failed = sum(standing.status == "failed" for standing in table.values())
    missing = len(table) - passed - failed
    print(f"Of {len(table)} contracts: {passed} proven, {failed} broken, {missing} without a test")


def _claim(path: Path, table: dict[str, Standing]) -> None:
    already = set(claimed(path))
    added = [name for name, at in table.items() if at.status == "passed" and name not in already]
    if not added:
        return
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text + "".join(f"{name}\n" for name in added), encoding="utf-8")
    print(f"Claimed: {' '.join(added)}")


def _run_suite(root: Path, extra: Sequence[str]) -> Path:
    target = root / "build" / "tests.json"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--contracts-report={target}", *extra]
    subprocess.run(command, cwd=root, check=False)
    return target


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="contracts", description="Which contracts are proven, and by which tests."
    )
    parser.add_argument(
        "--from", dest="records", type=Path, action="append", metavar="FILE", default=[]
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--claim", action="store_true")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    chosen = parser.parse_args(arguments)
    try:
        contracts = manifest(root / "docs" / "contracts.md")
        green_list = root / "docs" / "contracts-green.txt"
        paths: list[Path] = chosen.records or [_run_suite(root, chosen.pytest)]
        records = [read_record(path, contracts) for path in paths]
    except ContractsError as error:
        print(f"contracts: {error}", file=sys.stderr)
        return 1
    results = (result for record in records for result in record.results)
    table = standings(contracts, results, bench_rows(root / "bench" / "RESULTS.md"))
    _write(root / "build" / "contracts.json", table)
    _tell(table)
    if chosen.claim:
        _claim(green_list, table)
    found = problems(table, records, claimed(green_list) if chosen.check else [])
    for problem in found:
        print(f"contracts: {problem}", file=sys.stderr)
    return 1 if found else 0


def _write(path: Path, table: dict[str, Standing]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {name: {"status": at.status, "tests": at.tests} for name, at in table.items()}
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
