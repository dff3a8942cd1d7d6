"""Functions as tools, the registry, the bound on output, reading artifacts, and the import cost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import Annotated, Literal

import msgspec
import pytest

from postroom.domain.message import Block, File, Image, Text
from postroom.errors import DuplicateTool, StoreFull, ToolFailure, UnknownTool, UsageError
from postroom.ports.tool import ToolContext, ToolOutput
from postroom.tools import (
    Registry,
    artifact_tools,
    bound_output,
    builtin_tools,
    tool,
)
from postroom.tools.bounds import TEXT_BYTES_MAX
from tests.contract.tool_context import call, context
from tests.support import bounded


class Point(msgspec.Struct):
    x: int
    y: int = 0


@tool(effects="none", timeout_ms=5_000)
def forecast(
    ctx: ToolContext,
    city: str,
    days: Annotated[int, msgspec.Meta(ge=1, le=7)] = 1,
    unit: Literal["c", "f"] = "c",
    points: list[Point] = [],  # noqa: B006
    note: str | None = None,
) -> str:
    """The weather of the next days.

    It may be wrong.

    Args:
        city: Its name,
            in any language.
        days (int): How many.
    Returns:
        Not for the model.
    """
    points.append(Point(1))
    return json.dumps([ctx.session_id, city, days, unit, len(points), note])


def schema_of(made: object) -> dict[str, object]:
    return msgspec.json.decode(bytes(made.spec.parameters))  # type: ignore[attr-defined]


def test_the_signature_is_the_schema_and_the_docstring_the_description() -> None:
    assert forecast.spec.name == "forecast"
    assert forecast.spec.description == "The weather of the next days.\n\nIt may be wrong."
    schema = schema_of(forecast)
    assert schema["type"] == "object"
    assert schema["required"] == ["city"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert "ctx" not in properties
    assert properties["city"] == {
        "type": "string",
        "description": "Its name, in any language.",
    }
    assert properties["days"] == {
        "type": "integer",
        "description": "How many.",
        "minimum": 1,
        "maximum": 7,
        "default": 1,
    }
    assert properties["unit"] == {"enum": ["c", "f"], "default": "c"}
    assert properties["points"]["items"] == {"$ref": "#/$defs/Point"}
    assert (forecast.effects, forecast.exclusive, forecast.timeout_ms) == ("none", False, 5_000)


def test_a_tool_is_cautious_unless_told_otherwise() -> None:
    @tool
    def anything() -> None: ...

    assert anything.effects == "outside"
    assert anything.timeout_ms is None
    assert schema_of(anything)["properties"] == {}


async def test_a_function_gets_its_checked_arguments_and_the_context() -> None:
    output = await call([forecast], "forecast", context(), city="Rome", days=3)
    assert json.loads(output.text) == ["session_1", "Rome", 3, "c", 1, None]
    # A mutable default is fresh in each call.
    again = await call([forecast], "forecast", context(), city="Rome")
    assert json.loads(again.text)[4] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "city is required"),
        ({"city": 7}, "city does not fit: expected str, got int"),
        ({"city": "Rome", "days": 9}, "days does not fit: expected int <= 7"),
        ({"city": "Rome", "days": "soon"}, "days does not fit: expected int, got str"),
        ({"city": "Rome", "unit": "k"}, "unit does not fit: invalid enum value 'k'"),
        ({"city": "Rome", "town": 1}, "no argument town; there is city, days, unit, points, note"),
        ({"city": "Rome", "points": [{}]}, "points[0].x is required"),
        ({"city": "Rome", "points": [{"x": "a"}]}, "points[0].x does not fit"),
    ],
)
async def test_an_argument_that_does_not_fit_is_named(
    arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ToolFailure) as caught:
        await call([forecast], "forecast", context(), **arguments)
    assert named in str(caught.value)


async def test_a_number_written_as_text_is_taken_but_text_stays_text() -> None:
    output = await call([forecast], "forecast", context(), city="3", days="3", note="null")
    assert json.loads(output.text)[1:] == ["3", 3, "c", 1, "null"]


async def test_a_plain_function_runs_in_a_thread_and_a_coroutine_on_the_loop() -> None:
    @tool
    def plain() -> int:
        return threading.get_ident()

    @tool
    async def coroutine() -> int:
        asyncio.get_running_loop()
        return threading.get_ident()

    here = str(threading.get_ident())
    assert (await call([plain], "plain", context())).text != here
    assert (await call([coroutine], "coroutine", context())).text == here


async def test_a_plain_function_that_hangs_can_be_left_and_does_not_block_the_others() -> None:
    release = threading.Event()
    entered = threading.Semaphore(0)

    @tool
    def hangs() -> str:
        entered.release()
        release.wait(30)
        return "late"

    try:
        calls = [asyncio.ensure_future(hangs.call(context(), {})) for _ in range(50)]
        await bounded(asyncio.to_thread(lambda: [entered.acquire() for _ in calls]))
        for each in calls:
            each.cancel()
        done = await bounded(asyncio.gather(*calls, return_exceptions=True))
        assert all(isinstance(result, asyncio.CancelledError) for result in done)
    finally:
        release.set()


@pytest.mark.contract("TRN-08")
async def test_what_a_tool_raises_reaches_the_caller_as_it_is() -> None:
    @tool
    def plain() -> None:
        raise KeyError("gone")

    @tool
    async def coroutine() -> None:
        raise ToolFailure("try another city")

    with pytest.raises(KeyError, match="gone"):
        await call([plain], "plain", context())
    with pytest.raises(ToolFailure, match="another city"):
        await call([coroutine], "coroutine", context())


@pytest.mark.contract("TRN-08")
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_tool_cannot_end_the_program(kind: str) -> None:
    def plain() -> None:
        sys.exit("bye")

    async def coroutine() -> None:
        sys.exit("bye")

    made = tool(name="leaves")(plain if kind == "plain" else coroutine)
    with pytest.raises(ToolFailure, match="SystemExit"):
        await call([made], "leaves", context())


async def test_a_stop_iteration_from_a_thread_is_a_failure_and_not_a_hang() -> None:
    @tool
    def runs_out() -> object:
        return next(iter(()))

    with pytest.raises(ToolFailure, match="StopIteration"):
        await call([runs_out], "runs_out", context())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"ä": [1, None, True]}, '{"ä": [1, null, true]}'),
        ([1, 2], "[1, 2]"),
        (7, "7"),
        (None, ""),
        (ToolOutput("made", is_error=True), "made"),
    ],
)
async def test_text_json_and_outputs_are_answers(value: object, text: str) -> None:
    @tool
    def answers() -> object:
        return value

    output = await call([answers], "answers", context())
    assert output.text == text
    assert output.is_error == (text == "made")


@pytest.mark.contract("TRN-08")
@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", float("nan"), [{"a": object()}]])
async def test_a_value_that_is_not_json_is_an_error_result(value: object) -> None:
    @tool
    def answers() -> object:
        return value

    output = await call([answers], "answers", context())
    assert output.is_error
    assert "not JSON" in output.text
    assert " at 0x" not in output.text


@pytest.mark.contract("TRN-08")
async def test_a_value_that_holds_itself_is_an_error_result() -> None:
    @tool
    def answers() -> object:
        value: list[object] = []
        value.append(value)
        return value

    assert (await call([answers], "answers", context())).is_error


def test_a_function_that_a_model_cannot_be_told_of_is_refused_by_parameter() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]

    def many(*args: int) -> None: ...

    def positional(a: int, /) -> None: ...

    def late(a: int, ctx: ToolContext) -> None: ...

    def strange(a: threading.Thread) -> None: ...

    for function, reason in [
        (untyped, "a has no type"),
        (many, "args"),
        (positional, "by its name"),
        (late, "first parameter"),
        (strange, "Thread"),
    ]:
        with pytest.raises(UsageError, match=reason):
            tool(function)
    with pytest.raises(UsageError, match="no name for a tool"):
        tool(name="two words")(many)


def test_a_registry_keeps_the_order_and_knows_each_name_once() -> None:
    @tool
    def second() -> None: ...

    registry = Registry([forecast, second])
    assert list(registry) == ["forecast", "second"]
    assert [spec.name for spec in registry.specs] == ["forecast", "second"]
    assert registry["second"] is second
    assert registry.get("third") is None
    assert list(registry.only(["second"])) == ["second"]
    with pytest.raises(DuplicateTool, match="second"):
        registry.add(second)
    with pytest.raises(UnknownTool, match="there is forecast, second"):
        registry["third"]
    with pytest.raises(UnknownTool):
        registry.only(["third"])


def test_the_built_in_tools_say_what_they_do_to_the_world() -> None:
    found = {name: (made.effects, made.exclusive) for name, made in builtin_tools().items()}
    assert found == {
        "read_file": ("none", False),
        "write_file": ("workspace", True),
        "edit_file": ("workspace", True),
        "list_dir": ("none", False),
        "glob": ("none", False),
        "grep": ("none", False),
        "bash": ("workspace", True),
        "web_fetch": ("outside", False),
        "read_artifact": ("none", False),
    }
    for made in builtin_tools().values():
        assert made.spec.description
        for field in schema_of(made)["properties"].values():  # type: ignore[attr-defined]
            assert field["description"]


def test_importing_the_tools_loads_no_heavy_library() -> None:
    program = (
        "import sys, postroom.tools; postroom.tools.builtin_tools(); "
        "print([m for m in ('aiohttp', 'yarl', 'obstore', 'filetype') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


# The bound


def only_text(blocks: tuple[Block, ...]) -> str:
    (block,) = blocks
    assert isinstance(block, Text)
    return block.text


def artifact_in(text: str) -> str:
    return "sha256:" + text.partition("artifact sha256:")[2][:64]


def left_out_in(text: str) -> int:
    return int(text.partition("[… ")[2].partition(" bytes left out; ")[0])


async def test_a_short_output_stays_as_it_is() -> None:
    ctx = context()
    picture = Image(artifact="sha256:" + "0" * 64, media_type="image/png", size=1)
    blocks = await bound_output(ToolOutput("short ✓", media=(picture,)), ctx.artifacts)
    assert blocks == (Text("short ✓"), picture)
    exact = "x" * TEXT_BYTES_MAX
    assert only_text(await bound_output(ToolOutput(exact), ctx.artifacts)) == exact


async def test_an_empty_output_says_so() -> None:
    assert only_text(await bound_output(ToolOutput(""), context().artifacts)) == "(no output)"


@pytest.mark.contract("TRN-08")
async def test_a_long_output_becomes_head_and_tail_and_is_kept_whole() -> None:
    ctx = context()
    whole = "".join(f"line {n}\n" for n in range(50_000))
    text = only_text(await bound_output(ToolOutput(whole), ctx.artifacts))
    assert len(text.encode()) <= TEXT_BYTES_MAX
    head, _, tail = text.partition("\n[… ")
    note, _, tail = tail.partition("]\n")
    assert whole.startswith(head + "\n")
    assert whole.endswith("\n" + tail)
    assert left_out_in(text) == len(whole) - len(head) - len(tail)
    assert note.endswith("read it with read_artifact")
    assert await ctx.artifacts.get(artifact_in(text)) == whole.encode()


@pytest.mark.contract("TRN-08")
async def test_one_line_of_two_megabytes_is_bounded_and_can_be_paged_through() -> None:
    # C-146: a huge JSON line, stored as it came, put every later request over the window.
    ctx = context()
    whole = json.dumps({"rows": ["ä✓" * 20] * 20_000}, ensure_ascii=False)
    assert len(whole.encode()) > 2_000_000
    text = only_text(await bound_output(ToolOutput(whole), ctx.artifacts))
    assert len(text.encode()) <= TEXT_BYTES_MAX
    assert "\ufffd" not in text

    pages: list[str] = []
    offset = 0
    size = len(whole.encode())
    while offset < size:
        page = await call(
            artifact_tools(), "read_artifact", ctx,
            artifact=artifact_in(text), offset=offset, limit=30_000,
        )  # fmt: skip
        head, _, body = page.text.partition("]\n")
        assert len(page.text.encode()) <= TEXT_BYTES_MAX
        pages.append(body)
        offset = int(head.split()[3])
    assert "".join(pages) == whole


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lone \ud800 surrogate", "lone \ufffd surrogate"),
        ("a pair \ud83d\ude00 of them", "a pair 😀 of them"),
        ("a \0 in it", "a ␀ in it"),
    ],
)
async def test_text_that_no_store_takes_is_made_clean(text: str, shown: str) -> None:
    assert only_text(await bound_output(ToolOutput(text), context().artifacts)) == shown


@pytest.mark.parametrize("character", ["\0", "\ud800", "€", "😀", "é"])
async def test_a_long_output_of_strange_characters_is_bounded_all_the_same(
    character: str,
) -> None:
    ctx = context()
    text = only_text(await bound_output(ToolOutput(character * 100_000), ctx.artifacts))
    assert TEXT_BYTES_MAX * 0.9 < len(text.encode()) <= TEXT_BYTES_MAX
    assert await ctx.artifacts.exists(artifact_in(text))
    if character in "€😀é":
        assert "\ufffd" not in text


@pytest.mark.contract("TRN-08")
async def test_a_store_that_is_full_costs_the_rest_but_not_the_preview() -> None:
    class Full:
        async def put(self, data: bytes) -> str:
            raise StoreFull("the disk is full")

        async def get(self, artifact: str) -> bytes:
            raise AssertionError

        async def exists(self, artifact: str) -> bool:
            raise AssertionError

        async def delete(self, artifact: str) -> None:
            raise AssertionError

    text = only_text(await bound_output(ToolOutput("x" * 100_000), Full()))
    assert "the whole output could not be kept: the disk is full]" in text
    assert text.startswith("xxx")


@pytest.mark.parametrize("limit", [0, 10, 200, 1_000])
async def test_a_small_bound_still_says_where_the_rest_is(limit: int) -> None:
    ctx = context()
    text = only_text(await bound_output(ToolOutput("y" * 5_000), ctx.artifacts, limit))
    assert await ctx.artifacts.get(artifact_in(text)) == b"y" * 5_000
    assert len(text.encode()) <= max(limit, 200)


# Reading artifacts


async def test_an_artifact_is_read_in_parts_that_say_how_to_go_on() -> None:
    ctx = context()
    artifact = await ctx.artifacts.put(b"a" * 300 + b"b" * 300)
    first = await call(artifact_tools(), "read_artifact", ctx, artifact=artifact, limit=300)
    assert first.text == "[bytes 0 to 300 of 600; go on with offset=300]\n" + "a" * 300
    rest = await call(artifact_tools(), "read_artifact", ctx, artifact=artifact, offset=300)
    assert rest.text == "[bytes 300 to 600 of 600]\n" + "b" * 300
    with pytest.raises(ToolFailure, match="has 600 bytes; there is nothing at 600"):
        await call(artifact_tools(), "read_artifact", ctx, artifact=artifact, offset=600)


async def test_output_with_nuls_that_was_kept_can_be_read_back() -> None:
    ctx = context()
    text = only_text(await bound_output(ToolOutput("name\0" * 20_000), ctx.artifacts))
    page = await call(artifact_tools(), "read_artifact", ctx, artifact=artifact_in(text))
    assert page.text.partition("\n")[2].startswith("name␀name␀")


async def test_pictures_are_shown_and_other_binaries_refused() -> None:
    ctx = context()
    picture = await ctx.artifacts.put(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    shown = await call(artifact_tools(), "read_artifact", ctx, artifact=picture)
    assert shown.media == (Image(artifact=picture, media_type="image/png", size=48),)
    document = await ctx.artifacts.put(b"%PDF-1.7\n")
    shown = await call(artifact_tools(), "read_artifact", ctx, artifact=document)
    assert shown.media == (File(artifact=document, media_type="application/pdf", size=9),)
    binary = await ctx.artifacts.put(bytes(range(256)) * 10)
    with pytest.raises(ToolFailure, match="is binary"):
        await call(artifact_tools(), "read_artifact", ctx, artifact=binary)


@pytest.mark.parametrize("artifact", ["sha256:" + "1" * 64, "../../etc/passwd"])
async def test_an_artifact_that_is_not_there_is_told(artifact: str) -> None:
    with pytest.raises(ToolFailure, match=artifact):
        await call(artifact_tools(), "read_artifact", context(), artifact=artifact)
