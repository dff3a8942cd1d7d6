"""The file tools: what they do, and that they stay in the workspace whatever they are given."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from postroom.domain.message import File, Image
from postroom.errors import ToolFailure
from postroom.ports.tool import ToolOutput
from postroom.tools import artifact_tools, bound_output, file_tools
from tests.contract.tool_context import call, context

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 100


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the workspace, with a secret in it."""
    folder = tmp_path / "workspace-other"
    folder.mkdir()
    (folder / "secret").write_text("the secret")
    return folder


async def read(workspace: Path, path: str, **arguments: object) -> str:
    output = await call(file_tools(), "read_file", context(workspace), path=path, **arguments)
    return output.text


async def write(workspace: Path, path: str, content: str) -> str:
    ctx = context(workspace)
    return (await call(file_tools(), "write_file", ctx, path=path, content=content)).text


async def edit(workspace: Path, path: str, old: str, new: str, **arguments: object) -> str:
    ctx = context(workspace)
    output = await call(file_tools(), "edit_file", ctx, path=path, old=old, new=new, **arguments)
    return output.text


# Reading


async def test_a_text_is_read_as_it_stands(workspace: Path) -> None:
    (workspace / "a.txt").write_bytes("one\r\ntwo ✓\nno end".encode())
    assert await read(workspace, "a.txt") == "one\r\ntwo ✓\nno end"
    assert await read(workspace, str(workspace / "a.txt")) == "one\r\ntwo ✓\nno end"


async def test_an_empty_file_says_so(workspace: Path) -> None:
    (workspace / "a.txt").touch()
    assert await read(workspace, "a.txt") == "[a.txt is empty]"


async def test_lines_are_read_from_an_offset_to_a_limit(workspace: Path) -> None:
    (workspace / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    text = await read(workspace, "a.txt", offset=4, limit=2)
    assert text == "line 4\nline 5\n\n[lines 4 to 5 of a.txt; go on with offset=6]"
    assert await read(workspace, "a.txt", offset=10) == "line 10\n"
    with pytest.raises(ToolFailure, match="has 10 lines; there is no line 11"):
        await read(workspace, "a.txt", offset=11)


async def test_a_long_text_is_read_page_by_page_and_no_page_is_cut_again(workspace: Path) -> None:
    whole = "".join(f"this is line number {n}, é✓\n" for n in range(5_000))
    (workspace / "a.txt").write_text(whole)
    ctx = context(workspace)
    pages: list[str] = []
    offset: str | None = "1"
    while offset:
        output = await call(file_tools(), "read_file", ctx, path="a.txt", offset=int(offset))
        (block,) = await bound_output(output, ctx.artifacts)
        assert block.text == output.text  # type: ignore[union-attr]
        body, _, note = output.text.partition("\n[")
        pages.append(body)
        offset = note.rpartition("offset=")[2].rstrip("]")
    assert "".join(pages) == whole


async def test_a_line_of_two_megabytes_is_cut_and_kept_whole_as_an_artifact(
    workspace: Path,
) -> None:
    whole = "first\n" + "é" * 1_000_000 + "\nlast\n"
    (workspace / "a.json").write_text(whole)
    ctx = context(workspace)
    first = await call(file_tools(), "read_file", ctx, path="a.json")
    assert first.text == "first\n\n[lines 1 to 1 of a.json; go on with offset=2]"
    output = await call(file_tools(), "read_file", ctx, path="a.json", offset=2)
    assert len(output.text.encode()) < 32 * 1024
    assert "[line 2 of a.json is too long and was cut here; the next is offset=3]" in output.text
    artifact = "sha256:" + output.text.partition("artifact sha256:")[2][:64]
    page = await call(artifact_tools(), "read_artifact", ctx, artifact=artifact, offset=1_900_000)
    assert "é" * 1000 in page.text
    assert await read(workspace, "a.json", offset=3) == "last\n"


async def test_text_in_an_old_encoding_is_shown_with_marks(workspace: Path) -> None:
    (workspace / "a.txt").write_bytes(b"a text in which one caf\xe9 is not UTF-8\n")
    assert await read(workspace, "a.txt") == "a text in which one caf\ufffd is not UTF-8\n"


@pytest.mark.parametrize("start", ["BM is no bitmap", "MZ", "ID3", "<svg/>", "%!", "{\\rtf"])
async def test_a_text_is_a_text_whatever_it_begins_with(workspace: Path, start: str) -> None:
    (workspace / "a.png").write_text(start)
    assert await read(workspace, "a.png") == start


async def test_pictures_and_pdfs_are_shown_by_artifact_and_known_by_their_content(
    workspace: Path,
) -> None:
    (workspace / "picture.txt").write_bytes(PNG)
    (workspace / "paper").write_bytes(b"%PDF-1.7\n...")
    ctx = context(workspace)
    picture = await call(file_tools(), "read_file", ctx, path="picture.txt")
    (block,) = picture.media
    assert isinstance(block, Image)
    assert (block.media_type, block.size, block.name) == ("image/png", len(PNG), "picture.txt")
    assert await ctx.artifacts.get(block.artifact) == PNG
    paper = await call(file_tools(), "read_file", ctx, path="paper")
    assert isinstance(paper.media[0], File)
    assert paper.media[0].media_type == "application/pdf"


async def test_ten_megabytes_of_binary_are_refused_and_not_read(workspace: Path) -> None:
    # C-146
    (workspace / "a.bin").write_bytes(os.urandom(1024) * 10 * 1024)
    with pytest.raises(ToolFailure, match=r"a\.bin is a binary file \(.*, 10485760 bytes\)"):
        await read(workspace, "a.bin")
    (workspace / "big.png").write_bytes(PNG + b"\0" * 10 * 1024 * 1024)
    with pytest.raises(ToolFailure, match="at most 10485760 can be shown"):
        await read(workspace, "big.png")


# Writing and editing


async def test_a_file_is_written_with_its_folders(workspace: Path) -> None:
    assert await write(workspace, "new/deep/a.txt", "é\n") == (
        "wrote 3 bytes to new/deep/a.txt (new)"
    )
    assert (workspace / "new/deep/a.txt").read_text() == "é\n"
    assert await write(workspace, "new/deep/a.txt", "") == (
        "wrote 0 bytes to new/deep/a.txt (it had 3)"
    )


async def test_a_file_that_is_replaced_keeps_its_mode_and_leaves_no_other_behind(
    workspace: Path,
) -> None:
    script = workspace / "run.sh"
    script.write_text("old")
    script.chmod(0o750)
    await write(workspace, "run.sh", "new")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    await edit(workspace, "run.sh", "new", "newer")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert os.listdir(workspace) == ["run.sh"]


async def test_whoever_has_the_old_file_open_never_sees_half_of_the_new_one(
    workspace: Path,
) -> None:
    (workspace / "a.txt").write_text("old")
    os.link(workspace / "a.txt", workspace / "same")
    with (workspace / "a.txt").open() as reader:
        await write(workspace, "a.txt", "a new text")
        assert reader.read() == "old"
    assert (workspace / "same").read_text() == "old"


async def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a.txt").write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolFailure, match="No space left"):
        await write(workspace, "a.txt", "new")
    assert os.listdir(workspace) == ["a.txt"]
    assert (workspace / "a.txt").read_text() == "old"


async def test_an_edit_does_not_undo_a_change_that_came_between(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a.txt").write_text("one two")
    fsync = os.fsync

    def meanwhile(fd: int) -> None:
        (workspace / "a.txt").write_text("somebody else's text")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", meanwhile)
    with pytest.raises(ToolFailure, match="was changed by someone else meanwhile"):
        await edit(workspace, "a.txt", "one", "1")
    assert (workspace / "a.txt").read_text() == "somebody else's text"


async def test_surrogates_are_joined_where_they_pair_and_refused_where_not(
    workspace: Path,
) -> None:
    await write(workspace, "a.txt", "\ud83d\ude00")
    assert (workspace / "a.txt").read_text() == "😀"
    with pytest.raises(ToolFailure, match="content is not valid Unicode"):
        await write(workspace, "a.txt", "\ud800")


async def test_an_edit_answers_with_a_unified_diff(workspace: Path) -> None:
    (workspace / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 21)))
    text = await edit(workspace, "a.py", "line 10\n", "ten\nand more\n")
    assert text == (
        "edited a.py\n--- a.py\n+++ a.py\n@@ -7,7 +7,8 @@\n line 7\n line 8\n line 9\n"
        "-line 10\n+ten\n+and more\n line 11\n line 12\n line 13\n"
    )


async def test_replace_all_replaces_all_in_one_diff(workspace: Path) -> None:
    (workspace / "a.py").write_text("x = 1\n" + "\n" * 20 + "y = x\n")
    text = await edit(workspace, "a.py", "x", "name", replace_all=True)
    assert text.startswith("edited a.py (2 places)\n")
    assert text.count("@@ -") == 2
    assert (workspace / "a.py").read_text() == "name = 1\n" + "\n" * 20 + "y = name\n"


async def test_the_last_line_without_an_end_is_marked_in_the_diff(workspace: Path) -> None:
    (workspace / "a.txt").write_text("one")
    assert await edit(workspace, "a.txt", "one", "two") == (
        "edited a.txt\n--- a.txt\n+++ a.txt\n@@ -1,1 +1,1 @@\n-one\n"
        "\\ No newline at end of file\n+two\n\\ No newline at end of file\n"
    )


async def test_changing_very_many_lines_is_told_in_a_sentence(workspace: Path) -> None:
    (workspace / "a.txt").write_text("word\n" * 100_000)
    text = await edit(workspace, "a.txt", "word", "other", replace_all=True)
    assert text.endswith("100000 lines from line 1 on became 100000: too many for a diff")


async def test_an_edit_leaves_every_other_byte_alone(workspace: Path) -> None:
    before = b"\xef\xbb\xbfone\r\ncaf\xe9 and some more of that text\r\ntwo\r\n"
    (workspace / "a.txt").write_bytes(before)
    await edit(workspace, "a.txt", "two", "2")
    assert (workspace / "a.txt").read_bytes() == before.replace(b"two", b"2")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("", "x", "old is empty"),
        ("same", "same", "nothing to change"),
        ("def two", "x", "occurs 2 times in a.py (lines 3, 5)"),
        ("nowhere", "x", "old does not occur in a.py; read the file again"),
        ("DEF ONE", "x", "other upper and lower case"),
        ("def one():\n  return 1", "x", "at line 1 it does with other spaces"),
        ("def one():\n    return 7", "x", "its first line is line 1"),
    ],
)
async def test_an_edit_that_does_not_fit_says_what_is_wrong(
    workspace: Path, old: str, new: str, reason: str
) -> None:
    text = "def one():\n    return 1\ndef two\n    pass\ndef two\n"
    (workspace / "a.py").write_text(text)
    with pytest.raises(ToolFailure) as caught:
        await edit(workspace, "a.py", old, new)
    assert reason in str(caught.value)
    assert (workspace / "a.py").read_text() == text


async def test_line_ends_that_differ_are_told(workspace: Path) -> None:
    (workspace / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    with pytest.raises(ToolFailure, match=r"end with \\r\\n"):
        await edit(workspace, "a.txt", "one\ntwo", "x")


async def test_a_binary_file_is_not_edited(workspace: Path) -> None:
    (workspace / "a.bin").write_bytes(PNG)
    with pytest.raises(ToolFailure, match="not a text file"):
        await edit(workspace, "a.bin", "PNG", "GIF")


# Listing


async def test_a_folder_is_listed_with_the_kind_of_each_entry(workspace: Path) -> None:
    (workspace / "b").mkdir()
    (workspace / "a.txt").write_text("1234")
    (workspace / "link").symlink_to("a.txt")
    os.mkfifo(workspace / "pipe")
    (workspace / "two\nlines").touch()
    output = await call(file_tools(), "list_dir", context(workspace))
    assert output.text.split("\n") == [
        ".: 5 entries",
        "'two\\nlines' (0 bytes)",
        "a.txt (4 bytes)",
        "b/",
        "link -> a.txt",
        "pipe (not a regular file)",
    ]


async def test_a_folder_of_very_many_entries_is_listed_in_part(workspace: Path) -> None:
    for n in range(1_200):
        (workspace / f"{n:04}").touch()
    output = await call(file_tools(), "list_dir", context(workspace))
    lines = output.text.split("\n")
    assert lines[0] == ".: 1200 entries, the first 1000 are shown"
    assert (len(lines), lines[1], lines[-1]) == (1_001, "0000 (0 bytes)", "0999 (0 bytes)")


# Confinement


OUTSIDE = [
    "../workspace-other/secret",
    "a/../../workspace-other/secret",
    "{outside}/secret",
    "{outside}",
    "/etc/passwd",
    "link/secret",
    "secret-link",
    "loop",
    "",
    "nul\0byte",
    "\ud800",
    "x" * 300,
]


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file", "list_dir"])
async def test_no_file_tool_leaves_the_workspace(
    workspace: Path, outside: Path, path: str, name: str
) -> None:
    (workspace / "a").mkdir()
    (workspace / "link").symlink_to(outside)
    (workspace / "secret-link").symlink_to(outside / "secret")
    (workspace / "loop").symlink_to("loop")
    arguments = {
        "read_file": {},
        "write_file": {"content": "overwritten"},
        "edit_file": {"old": "the", "new": "a"},
        "list_dir": {},
    }[name]
    before = sorted(os.listdir(workspace))
    with pytest.raises(ToolFailure):
        await call(
            file_tools(), name, context(workspace), path=path.format(outside=outside), **arguments
        )
    assert (outside / "secret").read_text() == "the secret"
    assert os.listdir(outside) == ["secret"]
    assert sorted(os.listdir(workspace)) == before


@pytest.mark.contract("ART-02")
async def test_a_refusal_says_what_is_allowed(workspace: Path, outside: Path) -> None:
    with pytest.raises(ToolFailure) as caught:
        await read(workspace, "/etc/passwd")
    assert caught.value.message == "/etc/passwd is outside the workspace"
    assert str(workspace) in (caught.value.hint or "")
    (workspace / "link").symlink_to(outside)
    with pytest.raises(ToolFailure, match="link/secret leads outside the workspace"):
        await read(workspace, "link/secret")
    tools = file_tools([str(outside)])
    with pytest.raises(ToolFailure, match=f"or one under {outside}"):
        await call(tools, "read_file", context(workspace), path="../x")


async def test_a_root_that_the_operator_added_may_be_reached(
    workspace: Path, outside: Path
) -> None:
    tools = file_tools([str(outside)])
    ctx = context(workspace)
    (workspace / "link").symlink_to(outside)
    for path in (str(outside / "secret"), "link/secret"):
        assert (await call(tools, "read_file", ctx, path=path)).text == "the secret"
    await call(tools, "write_file", ctx, path=str(outside / "new"), content="x")
    assert (outside / "new").read_text() == "x"


async def test_links_that_stay_inside_work_and_are_not_replaced_by_a_write(
    workspace: Path,
) -> None:
    (workspace / "real").mkdir()
    (workspace / "real/a.txt").write_text("text")
    (workspace / "folder").symlink_to("real")
    (workspace / "file").symlink_to("folder/a.txt")
    assert await read(workspace, "file") == "text"
    await write(workspace, "file", "new")
    assert (workspace / "file").is_symlink()
    assert (workspace / "real/a.txt").read_text() == "new"


async def test_a_workspace_that_is_itself_behind_a_link_is_the_folder_it_leads_to(
    workspace: Path, tmp_path: Path
) -> None:
    (workspace / "a.txt").write_text("text")
    (tmp_path / "alias").symlink_to(workspace)
    assert await read(tmp_path / "alias", "a.txt") == "text"
    assert await read(tmp_path / "alias", str(tmp_path / "alias/a.txt")) == "text"


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize("swapped", ["inner", "inner/secret"])
@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file"])
async def test_a_link_put_in_place_after_the_check_is_not_followed(
    workspace: Path,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    swapped: str,
    name: str,
) -> None:
    # The path is resolved and judged, then opened from the root without following any link. The
    # swap happens exactly between the two, which no amount of racing could do more reliably.
    (workspace / "inner").mkdir()
    (workspace / "inner/secret").write_text("the harmless one")
    realpath = os.path.realpath

    def then_swapped(path: str) -> str:
        resolved = realpath(path)
        if str(path).endswith("inner/secret"):
            (workspace / swapped).rename(workspace / "aside")
            target = outside if swapped == "inner" else outside / "secret"
            (workspace / swapped).symlink_to(target)
        return resolved

    monkeypatch.setattr(os.path, "realpath", then_swapped)
    arguments = {
        "read_file": {},
        "write_file": {"content": "overwritten"},
        "edit_file": {"old": "the", "new": "a"},
    }[name]
    with pytest.raises(ToolFailure, match="link"):
        await call(file_tools(), name, context(workspace), path="inner/secret", **arguments)
    assert (outside / "secret").read_text() == "the secret"
    assert os.listdir(outside) == ["secret"]


@pytest.mark.contract("ART-02")
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a folder"])
@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file"])
async def test_only_regular_files_are_opened_and_nothing_waits_on_a_fifo(
    workspace: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)  # a socket's path is short
    path, roots = "strange", ["/dev"]
    if kind == "a FIFO":
        os.mkfifo("strange")
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("strange")
    elif kind == "a device":
        path = "/dev/zero"
    else:
        os.mkdir("strange")
    arguments = {
        "read_file": {},
        "write_file": {"content": "overwritten"},
        "edit_file": {"old": "the", "new": "a"},
    }[name]
    with pytest.raises(ToolFailure, match=f"is {kind}, not a regular file"):
        await call(file_tools(roots), name, context(workspace), path=path, **arguments)


@pytest.mark.contract("ART-02")
async def test_a_fifo_that_takes_a_file_s_place_after_the_look_is_not_waited_on(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "a.txt").write_text("text")
    look = os.stat

    def then_swapped(path: str, **how: object) -> os.stat_result:
        found = look(path, **how)  # type: ignore[arg-type]
        if path == "a.txt":
            (workspace / "a.txt").unlink()
            os.mkfifo(workspace / "a.txt")
        return found

    monkeypatch.setattr(os, "stat", then_swapped)
    with pytest.raises(ToolFailure, match="is a FIFO"):
        await read(workspace, "a.txt")


@pytest.mark.parametrize("name", ["read_file", "write_file", "edit_file", "list_dir"])
async def test_without_a_workspace_the_tools_say_so(name: str, tmp_path: Path) -> None:
    arguments = {
        "read_file": {"path": "a"},
        "write_file": {"path": "a", "content": ""},
        "edit_file": {"path": "a", "old": "a", "new": "b"},
        "list_dir": {},
    }[name]
    with pytest.raises(ToolFailure, match="this session has no workspace"):
        await call(file_tools(), name, context(None), **arguments)
    with pytest.raises(ToolFailure, match="is not there"):
        await call(file_tools(), name, context(tmp_path / "gone"), **arguments)


async def test_no_call_leaves_a_descriptor_open(workspace: Path) -> None:
    (workspace / "a.txt").write_text("text")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await read(workspace, "a.txt")
        await write(workspace, "b/c.txt", "text")
        for path in ("none", "../x", "a.txt/x"):
            with pytest.raises(ToolFailure):
                await read(workspace, path)
    output = await call(file_tools(), "list_dir", context(workspace), path="b")
    assert isinstance(output, ToolOutput)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
