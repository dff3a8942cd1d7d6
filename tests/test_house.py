"""The rules of the house: what must be true of the tree as a whole, whatever it does."""

from __future__ import annotations

import inspect
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports
from packaging.requirements import Requirement

import postroom
from tests.support import ROOT
from tools import contracts, lock, mutants

ADAPTERS = ("stores", "models", "tools", "channels")
MAY_NAME_ADAPTERS = ("app", "cores", "upkeep", "testing", "demo")

# In pieces, so that this file keeps its own rules.
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "npm" + "js.com",
    "yarn" + "pkg.com",
    "crates" + ".io",
    "debian" + ".org",
    "proxy.golang" + ".org",
)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/(?=\w)")
LEFT_OVER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b")


def _tree() -> list[Path]:
    """What git would commit; without git, what is not plainly made or installed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.decode().rstrip("\0").split("\0")
        return [path for name in names if (path := ROOT / name).is_file()]
    made = {".git", ".venv", "build", "dist", "node_modules", "__pycache__", ".hypothesis"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(
            part in made or part.endswith(("_cache", ".egg-info"))
            for part in path.relative_to(ROOT).parts
        )
    ]


def _lines() -> Iterator[tuple[str, str]]:
    """Every line of every text in the tree, each with its place."""
    for path in _tree():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            yield f"{path.relative_to(ROOT)}:{number}", line


# Imports


def test_data_flows_one_way_and_no_adapter_knows_the_flow() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_only_the_composition_root_names_an_adapter() -> None:
    graph = grimp.build_graph("postroom", cache_dir=None, exclude_type_checking_imports=True)
    offences: list[str] = []
    for adapter in ADAPTERS:
        package = f"postroom.{adapter}"
        if package not in graph.modules:
            continue
        for importer in sorted(graph.find_modules_that_directly_import(package, as_package=True)):
            part = importer.removeprefix("postroom.").partition(".")[0]
            if part not in (adapter, *MAY_NAME_ADAPTERS):
                offences.append(f"{importer} imports from {package}")
    assert offences == []


def test_the_public_names_are_what_can_be_imported() -> None:
    promised = list(getattr(postroom, "__all__", []))
    assert len(promised) == len(set(promised))
    for name in promised:
        assert hasattr(postroom, name), f"postroom.__all__ names {name}, which is not there"
    # Submodules appear by being imported; the other two are the file's own tools.
    seen = {
        name
        for name in dir(postroom)
        if not name.startswith("_")
        and name not in ("annotations", "TYPE_CHECKING")
        and not inspect.ismodule(getattr(postroom, name))
    }
    public = {name for name in promised if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(postroom, name))}
    assert seen == public - modules


# Contracts


def test_every_id_that_a_test_carries_is_in_the_manifest() -> None:
    known = contracts.manifest(ROOT / "docs" / "contracts.md")
    used = list(contracts.uses(ROOT / "tests"))
    assert [use for use in used if use.name is None] == [], "an id is a plain text in its marker"
    assert [use for use in used if use.name not in known] == []


def test_every_contract_claimed_green_is_carried_by_a_test_or_a_bench_row() -> None:
    known = contracts.manifest(ROOT / "docs" / "contracts.md")
    claimed = contracts.claimed(ROOT / "docs" / "contracts-green.txt")
    assert sorted(set(claimed)) == sorted(claimed), "claimed twice"
    used = {use.name for use in contracts.uses(ROOT / "tests")}
    benched = {
        name
        for row in contracts.bench_rows(ROOT / "bench" / "RESULTS.md")
        for name in row.contracts
        if name in known and known[name].bench
    }
    assert [name for name in claimed if name not in used | benched] == []


def test_every_mutant_is_of_a_contract_that_a_test_carries() -> None:
    folder = ROOT / "tests" / "mutants"
    if not any(folder.glob("*.patch")):
        return
    used = {use.name for use in contracts.uses(ROOT / "tests")}
    found = mutants.mutants(folder)
    assert [mutant.patch.name for mutant in found if mutant.contract not in used] == []


# Texts


@pytest.mark.parametrize("host", REGISTRY_HOSTS)
def test_no_text_names_the_host_of_a_package_registry(host: str) -> None:
    assert [place for place, line in _lines() if host in line] == []


def test_no_text_names_a_path_of_somebody_s_machine() -> None:
    assert [
        f"{place}: {line.strip()}" for place, line in _lines() if MACHINE_PATH.search(line)
    ] == []


def test_nothing_is_left_to_be_done_later_in_the_tree() -> None:
    assert [f"{place}: {line.strip()}" for place, line in _lines() if LEFT_OVER.search(line)] == []


def test_every_decision_tells_problem_decision_what_was_rejected_and_how_it_is_verified() -> None:
    lacking: list[str] = []
    for page in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        headings = " ".join(re.findall(r"^##+ (.+)$", text, re.MULTILINE)).lower()
        lacking += [
            f"{page.name}: no section “{word}”"
            for word in ("problem", "decision", "rejected", "verified")
            if word not in headings and page.name != "README.md"
        ]
    assert lacking == []


def test_the_changelog_has_a_place_for_what_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[?Unreleased\]?\s*$", text, re.MULTILINE)


# The environment


def _named_in_pyproject() -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    texts = list(project["project"]["dependencies"])
    for extra in project["project"].get("optional-dependencies", {}).values():
        texts += extra
    for group in project["dependency-groups"].values():
        texts += [entry for entry in group if isinstance(entry, str)]
    found = [Requirement(text) for text in texts]
    return [one for one in found if lock.normalized(one.name) != "postroom"]


def test_the_lock_holds_every_dependency_in_an_allowed_version() -> None:
    held = lock.locked((ROOT / "requirements" / "test.txt").read_text(encoding="utf-8"))
    wrong = [
        str(one)
        for one in _named_in_pyproject()
        if not any(
            one.specifier.contains(version, prereleases=True)
            for version in held.get(lock.normalized(one.name), ())
        )
    ]
    assert wrong == [], "run `make lock`"


def test_the_lock_holds_versions_and_hashes_and_no_address() -> None:
    text = (ROOT / "requirements" / "test.txt").read_text(encoding="utf-8")
    assert lock.faults(text) == []


@pytest.mark.parametrize(
    "line",
    [
        "apsw==3.54.1.0",
        "apsw>=3 --hash=sha256:00",
        "apsw @ https://somewhere/apsw.whl --hash=sha256:00",
        "--index-url https://somewhere/simple",
    ],
)
def test_a_lock_with_an_address_or_without_a_hash_is_refused(line: str) -> None:
    good = "apsw==3.54.1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:00\n"
    assert lock.faults("# made\n" + good) == []
    assert lock.faults(good + line + "\n") != []
