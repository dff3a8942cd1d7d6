"""`glob` and `grep`: what they find, how they are bounded, and that they stay in the workspace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from postroom.errors import ToolFailure
from postroom.tools import search_tools
from tests.contract.tool_context import call, context
from tests.support import bounded


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    for path, text in {
        "README.md": "a readme\n",
        "src/one.py": "import os\n\ndef one():\n    return 1\n\n# the end\n",
        "src/deep/two.ts": "export const two = 1;\n",
        "src/deep/.hidden": "return hidden\n",
        ".git/config": "return of the config\n",
        "data.bin": "return\0binary\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("return secret\n")
    (folder / "src/link").symlink_to(outside)
    (folder / "src/secret-link.py").symlink_to(outside / "secret.py")
    os.mkfifo(folder / "src/pipe.py")
    return folder


async def glob(workspace: Path, pattern: str, **arguments: object) -> list[str]:
    output = await call(search_tools(), "glob", context(workspace), pattern=pattern, **arguments)
    return output.text.split("\n")


async def grep(workspace: Path, pattern: str, **arguments: object) -> list[str]:
    output = await call(search_tools(), "grep", context(workspace), pattern=pattern, **arguments)
    return output.text.split("\n")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", [".git/", "README.md", "data.bin", "src/"]),
        ("*.md", ["README.md"]),
        ("**/*.py", ["src/one.py", "src/pipe.py", "src/secret-link.py"]),
        ("src/**/t??.ts", ["src/deep/two.ts"]),
        ("src/deep/**", ["src/deep/.hidden", "src/deep/two.ts"]),
        ("src/{link,deep}", ["src/deep/", "src/link"]),
        ("**/*.{ts,md}", ["README.md", "src/deep/two.ts"]),
        ("**/[!o]*.ts", ["src/deep/two.ts"]),
        ("**/[a-o]ne.py", ["src/one.py"]),
        ("src/[", ["nothing found"]),
        ("**/secret.py", ["nothing found"]),
    ],
)
async def test_a_pattern_finds_paths(workspace: Path, pattern: str, found: list[str]) -> None:
    assert await glob(workspace, pattern) == found


async def test_paths_are_told_from_the_workspace_wherever_the_search_starts(
    workspace: Path,
) -> None:
    assert await glob(workspace, "*.ts", path="src/deep") == ["src/deep/two.ts"]
    assert await grep(workspace, "two", path="src") == ["src/deep/two.ts:1:export const two = 1;"]
    assert await grep(workspace, "one", path="src/one.py") == ["src/one.py:3:def one():"]


async def test_more_than_the_limit_is_told(workspace: Path) -> None:
    found = await glob(workspace, "*", limit=2)
    assert found == [
        ".git/", "README.md", "[there is more than these 2: narrow the search]",
    ]  # fmt: skip
    assert (await grep(workspace, "e", limit=1))[1:] == [
        "[there is more than these 1: narrow the search]"
    ]


async def test_lines_are_found_and_binaries_git_and_links_passed_over(workspace: Path) -> None:
    assert await grep(workspace, "return|secret") == [
        "src/deep/.hidden:1:return hidden",
        "src/one.py:4:    return 1",
    ]
    assert await grep(workspace, "nowhere at all") == ["nothing found"]
    assert await grep(workspace, "RETURN", ignore_case=True, glob="*.py") == [
        "src/one.py:4:    return 1"
    ]
    assert await grep(workspace, "return", glob="src/*", files_only=True) == ["src/one.py"]


async def test_lines_around_a_match_are_shown_once_each(workspace: Path) -> None:
    (workspace / "many.txt").write_text("".join(f"{n}\n" for n in range(1, 13)))
    assert await grep(workspace, "^(3|4|9)$", path="many.txt", context=1) == [
        "many.txt-2-2",
        "many.txt:3:3",
        "many.txt:4:4",
        "many.txt-5-5",
        "--",
        "many.txt-8-8",
        "many.txt:9:9",
        "many.txt-10-10",
    ]


async def test_a_match_in_a_line_of_two_megabytes_is_shown_with_what_is_near_it(
    workspace: Path,
) -> None:
    (workspace / "long.json").write_text("x" * 500_000 + "needle" + "y" * 1_500_000)
    (line,) = await grep(workspace, "needle", path="long.json")
    assert "xneedley" in line
    assert len(line) < 500


async def test_names_that_are_no_text_are_shown_on_one_line(workspace: Path) -> None:
    (workspace / os.fsdecode(b"strange\xff\nname")).write_text("needle\n")
    assert await grep(workspace, "needle") == ["'strange?\\nname':1:needle"]
    assert "'strange?\\nname'" in await glob(workspace, "strange*")


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("grep", {"pattern": "("}, "not a regular expression"),
        ("grep", {"pattern": "x" * 5_000}, "more than 4000 characters"),
        ("grep", {"pattern": "x", "path": "src/pipe.py"}, "is a FIFO"),
        ("grep", {"pattern": "x", "path": "none"}, "there is no file none"),
        ("glob", {"pattern": "x", "path": "README.md"}, "not a folder"),
        ("glob", {"pattern": ""}, "1 to 1000 characters"),
        ("glob", {"pattern": "{a,b}" * 20}, "more than 64 alternatives"),
    ],
)
async def test_what_cannot_be_searched_is_told(
    workspace: Path, name: str, arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(ToolFailure, match=reason):
        await call(search_tools(), name, context(workspace), **arguments)


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize("path", ["..", "/etc", "src/link", "src/secret-link.py", "../outside"])
async def test_no_search_leaves_the_workspace(workspace: Path, path: str) -> None:
    with pytest.raises(ToolFailure):
        await grep(workspace, "", path=path)
    with pytest.raises(ToolFailure):
        await glob(workspace, "*", path=path)
    for pattern in ("../*", "/etc/*", "src/../../*", "{..,x}/*"):
        assert not [p for p in await _glob_or_nothing(workspace, pattern) if "outside" in p]


async def _glob_or_nothing(workspace: Path, pattern: str) -> list[str]:
    try:
        return await glob(workspace, pattern)
    except ToolFailure:
        return []


@pytest.mark.parametrize("name", ["glob", "grep"])
async def test_without_a_workspace_a_search_says_so(name: str) -> None:
    with pytest.raises(ToolFailure, match="no workspace"):
        await call(search_tools(), name, context(None), pattern="x")


async def test_an_expression_that_never_ends_is_stopped_and_the_loop_goes_on_meanwhile(
    workspace: Path,
) -> None:
    (workspace / "a.txt").write_text("found: aab\n" + "a" * 60 + "b\n")
    tools = search_tools(limit_ms=200)
    ctx = context(workspace)
    started = time.monotonic()
    searching = asyncio.ensure_future(
        call(tools, "grep", ctx, pattern="^found|^(a+)+$", path="a.txt")
    )
    ticks = 0
    while not searching.done():
        await asyncio.sleep(0.01)
        ticks += 1
    output = await bounded(searching)
    assert output.text.split("\n") == [
        "a.txt:1:found: aab",
        "[stopped after 0.2 s, so there may be more: narrow the search]",
    ]
    assert time.monotonic() - started < 10
    assert ticks > 10


async def test_a_cancelled_search_leaves_no_process(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    one_started = asyncio.Event()

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            one_started.set()

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    (workspace / "a.txt").write_text("a" * 60 + "b\n")
    searching = asyncio.ensure_future(
        call(search_tools(), "grep", context(workspace), pattern="^(a+)+$", path="a.txt")
    )
    await bounded(one_started.wait())
    searching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(searching)
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)
