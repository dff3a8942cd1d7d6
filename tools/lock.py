"""Writes requirements/test.txt: every version and hash that the environment of the project needs.

``make lock`` runs it where uv is installed. It takes what pyproject.toml names (dependencies, all
extras, all groups), resolves it for every platform and every supported Python at once, and keeps
the versions that are already locked unless it is told to ``--upgrade``. The file holds versions
and hashes only: where they are downloaded from is each machine's own business.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEADER = "# Made by `make lock` from pyproject.toml. Versions and hashes; no addresses.\n"

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)")
_ADDRESS = re.compile(r"://|^-", re.MULTILINE)


def faults(text: str) -> list[str]:
    """What is wrong with a lock: an address or an option in it, a requirement without a hash."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [f"not a version and hashes: {line}" for line in lines if _ADDRESS.search(line)]
    joined = "\n".join(lines).replace("\\\n", " ")
    for line in joined.splitlines():
        if line.strip() and (not _REQUIREMENT.match(line) or "--hash=sha256:" not in line):
            found.append(f"no version or no hash: {line.split(' ')[0]}")
    return found


def locked(text: str) -> dict[str, set[str]]:
    """The versions a lock holds, by normalized name; several where platforms differ."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := _REQUIREMENT.match(line):
            found.setdefault(normalized(match["name"]), set()).add(match["version"])
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def compiled(root: Path, previous: str, upgrade: bool) -> str:
    """What uv resolves, as text.

    Raises: `subprocess.CalledProcessError` if nothing satisfies pyproject.toml.
    """
    with (root / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["dependency-groups"]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "lock.txt"
        target.write_text(previous, encoding="utf-8")
        subprocess.run(
            [
                *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"),
                *("--universal", "--python-version", "3.11", "--generate-hashes"),
                *("--no-header", "--no-annotate", "--no-emit-index-url", "--all-extras"),
                *(f"--group={group}" for group in groups),
                *(("--upgrade",) if upgrade else ()),
                f"--output-file={target}",
            ],
            cwd=root,
            check=True,
        )
        return target.read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="lock", description="Write requirements/test.txt.")
    parser.add_argument("--upgrade", action="store_true")
    chosen = parser.parse_args(arguments)
    target = root / "requirements" / "test.txt"
    previous = target.read_text(encoding="utf-8") if target.exists() else ""
    text = HEADER + compiled(root, previous, chosen.upgrade)
    found = faults(text)
    for fault in found:
        print(f"lock: {fault}", file=sys.stderr)
    if found:
        return 1
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")
    print(f"{target.relative_to(root)}: {len(locked(text))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
