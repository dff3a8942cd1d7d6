"""Breaks the code on purpose and sees whether the tests that guard a contract notice.

::

    python -m tools.mutants                 every mutant
    python -m tools.mutants --id INB-04     those of one contract; may be repeated

A mutant is a patch, ``tests/mutants/ID.patch`` (more of one contract: ``ID-2.patch``,
``ID-name.patch``). Each is applied to a copy of the working tree, never to the tree itself, and only
the tests that carry its id are run there. The verdicts:

- KILLED    at least one of these tests failed in its own body, or ran out of time.
- SURVIVED  all of them passed: the contract is not guarded against this.
- BROKEN    it proves nothing: the patch does not apply, the patched code does not import or compile,
  no test carries the id, those tests already fail without the patch, or none got as far as failing.

The exit code is 1 if any is not KILLED, or if there is none to run. Two run at a time. A test has
``--test-seconds`` to finish and a mutant a few times that, so a mutant that hangs is a killed one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Verdict = Literal["KILLED", "SURVIVED", "BROKEN"]

_NAME = re.compile(r"^(?P<id>[A-Z]{3,4}-\d{2})(?:-\w+)?$")
_PATCHED = re.compile(r"^\+\+\+ b/(?P<path>\S+)", re.MULTILINE)
_SKIPPED_FOLDERS = shutil.ignore_patterns(
    ".git", ".venv", "build", "__pycache__", "node_modules", ".*_cache", ".hypothesis"
)


class Mutant(NamedTuple):
    contract: str
    patch: Path


class Outcome(NamedTuple):
    mutant: Mutant
    verdict: Verdict
    why: str
    seconds: float


class Baseline(NamedTuple):
    """How the tests of each contract did without a patch: ``{id: {test: outcome}}``."""

    tests: Mapping[str, Mapping[str, str]]
    seconds: float


class MutantsError(Exception):
    """There is nothing to run, or the run as a whole cannot be trusted."""


def mutants(folder: Path, wanted: Sequence[str] = ()) -> list[Mutant]:
    """The patches of ``folder``, those of ``wanted`` only if it names any.

    Raises: `MutantsError` for a file name without an id, and if there is none.
    """
    found: list[Mutant] = []
    for patch in sorted(folder.glob("*.patch")):
        match = _NAME.match(patch.stem)
        if match is None:
            raise MutantsError(f"{patch.name}: the name of a mutant begins with a contract's id")
        if not wanted or match["id"] in wanted:
            found.append(Mutant(match["id"], patch))
    for name in wanted:
        if all(mutant.contract != name for mutant in found):
            raise MutantsError(f"{folder.name}/ has no mutant of {name}")
    if not found:
        raise MutantsError(f"{folder.name}/ has no mutant")
    return found


# The copies


def copy_tree(root: Path, target: Path) -> None:
    """What git would commit of ``root``, tracked or new; without git, all but the usual caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0 or not listed.stdout:
        shutil.copytree(root, target, ignore=_SKIPPED_FOLDERS, symlinks=True)
        return
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        source, place = root / name, target / name
        # A file that is deleted and not yet committed as such is listed, and not there.
        if source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def apply(patch: Path, tree: Path) -> str | None:
    """Patches ``tree``; None if it went well, else what git said."""
    done = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(patch.resolve())],
        cwd=tree,
        # The copy is no repository; one that happens to lie above it must not be found.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["git apply failed"])[0]
    return None


def _does_not_load(patch: Path, tree: Path) -> str | None:
    """Why a patched Python file cannot be read or imported; None if each can."""
    for name in _PATCHED.findall(patch.read_text(encoding="utf-8")):
        path = tree / name
        if path.suffix != ".py" or not path.exists():
            continue
        try:
            ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            return f"{name}:{error.lineno}: {error.msg}"
        parts = Path(name).with_suffix("").parts
        if parts[0] != "src" or parts[-1] == "__main__":
            continue
        module = ".".join(part for part in parts[1:] if part != "__init__")
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            cwd=tree,
            env=_environment(tree),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            return f"{module} does not import: {done.stderr.strip().splitlines()[-1]}"
    return None


def _environment(tree: Path) -> dict[str, str]:
    """The copy's own source goes before the installed package, which is the tree's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {
        **kept,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The fixed Hypothesis profile: a verdict must not depend on the day's examples.
        "CI": "true",
    }


# The runs


class _Run(NamedTuple):
    record: dict[str, Any] | None
    timed_out: bool
    tail: str


def _pytest(tree: Path, arguments: Sequence[str], seconds: float) -> _Run:
    record = tree / "build" / "mutant.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line"]
    process = subprocess.Popen(
        [*command, f"--contracts-report={record}", *arguments],
        cwd=tree,
        env=_environment(tree),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timed_out = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        # Out of time, or interrupted: the tests' own children go with them.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        timed_out = isinstance(error, subprocess.TimeoutExpired)
        if not timed_out:
            raise
    found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else None
    return _Run(found, timed_out, "\n".join(output.splitlines()[-15:]))


def baseline(tree: Path, contracts: Sequence[str], test_seconds: float, jobs: int) -> Baseline:
    """Runs the tests of all ``contracts`` in the unpatched copy.

    Raises: `MutantsError` if the run gave no record or some file could not be collected.
    """
    where = subprocess.run(
        [sys.executable, "-c", "import postroom; print(postroom.__file__)"],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(where).resolve().is_relative_to(tree.resolve()):
        raise MutantsError(f"the copy's tests would run {where}, not the copy's own code")
    started = time.monotonic()
    selected = [f"--contract={name}" for name in contracts]
    run = _pytest(tree, [*selected, f"--timeout={test_seconds}", f"-n{jobs}"], seconds=3600)
    seconds = time.monotonic() - started
    if run.record is None:
        raise MutantsError(f"the tests do not run without a patch:\n{run.tail}")
    if run.record["collection_errors"]:
        raise MutantsError(
            f"cannot be collected without a patch: {run.record['collection_errors']}"
        )
    tests: dict[str, dict[str, str]] = {name: {} for name in contracts}
    for test, row in run.record["tests"].items():
        for name in row["contracts"]:
            if name in tests:
                tests[name][test] = row["outcome"]
    return Baseline(tests, seconds)


def judge(
    mutant: Mutant, clean: Path, before: Baseline, test_seconds: float
) -> tuple[Verdict, str]:
    """The verdict on one mutant and one line that says why. ``clean`` is the unpatched copy."""
    tests = before.tests[mutant.contract]
    failing = [test for test, outcome in tests.items() if outcome in ("failed", "error")]
    if failing:
        return "BROKEN", f"fails without the patch: {failing[0]}"
    if "passed" not in tests.values():
        return "BROKEN", f"no passing test carries {mutant.contract}"
    with tempfile.TemporaryDirectory(prefix="postroom-mutant-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(clean, tree, ignore=_SKIPPED_FOLDERS, symlinks=True)
        refused = apply(mutant.patch, tree)
        if refused is not None:
            return "BROKEN", f"does not apply: {refused}"
        fault = _does_not_load(mutant.patch, tree)
        if fault is not None:
            return "BROKEN", fault
        files = sorted({test.partition("::")[0] for test in tests})
        run = _pytest(
            tree,
            [f"--contract={mutant.contract}", f"--timeout={test_seconds}", "--maxfail=3", *files],
            # Long enough for two tests to hang and the rest to run on a busy machine.
            seconds=2 * test_seconds + 3 * before.seconds + 30,
        )
    return _verdict(run)


def _verdict(run: _Run) -> tuple[Verdict, str]:
    if run.timed_out:
        return "KILLED", "out of time"
    if run.record is None:
        return "BROKEN", f"the test run died: {run.tail.splitlines()[-1] if run.tail else ''}"
    if run.record["collection_errors"]:
        return "BROKEN", f"cannot be collected: {run.record['collection_errors'][0]}"
    by_outcome: dict[str, list[str]] = {}
    for test, row in run.record["tests"].items():
        by_outcome.setdefault(row["outcome"], []).append(test)
    if "failed" in by_outcome:
        return "KILLED", by_outcome["failed"][0]
    if "error" in by_outcome:
        return "BROKEN", f"no test failed, only its set-up or tear-down: {by_outcome['error'][0]}"
    if "passed" not in by_outcome:
        return "BROKEN", "no test ran"
    return "SURVIVED", f"{len(by_outcome['passed'])} passed"


def run_all(
    root: Path, chosen: Sequence[Mutant], test_seconds: float = 60, jobs: int = 2
) -> Iterator[Outcome]:
    """One outcome for each mutant, as they are reached, in the order given."""
    with tempfile.TemporaryDirectory(prefix="postroom-mutants-") as folder:
        clean = Path(folder) / "tree"
        copy_tree(root, clean)
        names = list(dict.fromkeys(mutant.contract for mutant in chosen))
        before = baseline(clean, names, test_seconds, jobs)

        def one(mutant: Mutant) -> Outcome:
            started = time.monotonic()
            verdict, why = judge(mutant, clean, before, test_seconds)
            return Outcome(mutant, verdict, why, time.monotonic() - started)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, chosen)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="mutants", description="Do the tests notice when the code is broken?"
    )
    parser.add_argument("--id", dest="ids", action="append", default=[], metavar="ID")
    parser.add_argument("--test-seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args(arguments)
    counts: dict[Verdict, int] = {"KILLED": 0, "SURVIVED": 0, "BROKEN": 0}
    try:
        found = mutants(root / "tests" / "mutants", chosen.ids)
        print(f"{len(found)} mutants; first their tests without a patch", flush=True)
        width = max(len(mutant.patch.stem) for mutant in found)
        for at in run_all(root, found, chosen.test_seconds, chosen.jobs):
            counts[at.verdict] += 1
            name = at.mutant.patch.stem
            print(f"{at.verdict:8}  {name:{width}}  {at.seconds:5.1f} s  {at.why}", flush=True)
    except MutantsError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items()))
    return 0 if counts["KILLED"] == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
