"""A pytest plugin that knows contract ids: it selects tests by id and records what came of them.

``--contract ID`` (may be repeated) runs only the tests that carry one of these ids.
``--contracts-report FILE`` writes, at the end, one JSON object::

    {"tests": {"tests/a/test_b.py::test_c": {"contracts": ["INB-01"], "outcome": "passed",
                                             "seconds": 0.12}},
     "collection_errors": ["tests/a/test_d.py"],
     "exit_status": 0}

``outcome`` is ``passed``, ``failed`` (the test's own body), ``error`` (its set-up or tear-down)
or ``skipped`` (an expected failure counts as skipped). The ids travel with each test's report, so
that the record is whole when the tests run in several processes; only the controlling process
writes it. tests/conftest.py takes the hooks below as its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

Outcome = Literal["passed", "failed", "error", "skipped"]

_PROPERTY = "contracts"
_RANK: dict[Outcome, int] = {"passed": 0, "skipped": 1, "error": 2, "failed": 3}


def contracts_of(item: pytest.Item) -> list[str]:
    """The ids that a test carries, in the order its markers name them, each once."""
    named = [str(name) for marker in item.iter_markers("contract") for name in marker.args]
    return list(dict.fromkeys(named))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contracts")
    group.addoption(
        "--contract",
        action="append",
        default=[],
        metavar="ID",
        help="run only the tests that carry this contract id; may be repeated",
    )
    group.addoption(
        "--contracts-report",
        default=None,
        metavar="FILE",
        help="write every test's outcome and contract ids to FILE, as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "contract(*ids): the contract ids this test proves")
    target = config.getoption("--contracts-report")
    # A worker reports to the controlling process, which alone sees the whole run.
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(str(target))), "contracts-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {str(name) for name in config.getoption("--contract") or ()}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        carried = contracts_of(item)
        if carried:
            item.user_properties.append((_PROPERTY, carried))
        (kept if not wanted or wanted & set(carried) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


class _Recorder:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._tests: dict[str, dict[str, Any]] = {}
        self._collection_errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # Several workers may each report the same file.
        if report.failed and report.nodeid not in self._collection_errors:
            self._collection_errors.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._tests.setdefault(
            report.nodeid, {"contracts": [], "outcome": "passed", "seconds": 0.0}
        )
        for name, value in report.user_properties:
            if name == _PROPERTY:
                row["contracts"] = value
        outcome = _outcome(report)
        if _RANK[outcome] > _RANK[row["outcome"]]:
            row["outcome"] = outcome
        row["seconds"] = round(row["seconds"] + report.duration, 3)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        record = {
            "tests": dict(sorted(self._tests.items())),
            "collection_errors": sorted(self._collection_errors),
            "exit_status": int(exitstatus),
        }
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _outcome(report: pytest.TestReport) -> Outcome:
    if report.failed:
        # A worker that died reports its test under no phase: the test brought it down.
        return "error" if report.when in ("setup", "teardown") else "failed"
    return "skipped" if report.skipped else "passed"
