"""The shell tool: one command in the session's workspace.

It is a shell with the rights of the person who runs Postroom: it starts in the workspace and is
not confined to it. What keeps it in check is the approval policy. What this file promises is that
it ends (`postroom.tools.process`), that it sees no secrets of the environment
(`postroom.tools.environment`), and that its output, however much, is bounded in memory, on disk
and in the history (`postroom.tools.spool`).
"""

# ruff: noqa: D417  (a tool's docstring speaks to the model, which has no context to pass)

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from typing import Annotated

import msgspec

from postroom.errors import StoreError, ToolFailure
from postroom.ports.tool import Tool, ToolContext, ToolOutput
from postroom.tools.bounds import clean, preview
from postroom.tools.content import HEAD_BYTES, TEXT, media_type
from postroom.tools.environment import scrubbed
from postroom.tools.function import tool
from postroom.tools.process import GRACE_MS, KILL_WAIT_MS, Ended, run
from postroom.tools.spool import Spool
from postroom.tools.workspace import Workspace

# Under what the turn loop keeps of a result, so that the lines at the end are never cut.
SHOWN_BYTES_MAX = 30 * 1024
TIMEOUT_S = 120
TIMEOUT_S_MAX = 600
PROGRESS_MS = 500

# No pager, no colours and no questions: nobody is at the other end.
_QUIET = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "GIT_TERMINAL_PROMPT": "0"}


def shell_tools(
    *, environment_keep: frozenset[str] = frozenset(), grace_ms: int = GRACE_MS
) -> tuple[Tool, ...]:
    """`bash`.

    ``environment_keep`` names variables that a command may see although they look like secrets.
    ``grace_ms`` is how long a command may take between being asked to end and being killed.
    """

    @tool(
        effects="workspace",
        exclusive=True,
        # The command's own limit comes first, so that its output is not lost.
        timeout_ms=TIMEOUT_S_MAX * 1000 + grace_ms + KILL_WAIT_MS + 10_000,
    )
    async def bash(
        ctx: ToolContext,
        command: str,
        timeout_s: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_S_MAX)] = TIMEOUT_S,
    ) -> ToolOutput:
        """Runs a shell command in the workspace; answers with its output and its exit code.

        Standard output and error come together. Standard input is empty. Processes that it leaves
        in the background are stopped when it ends. Long output is shown in part and kept as an
        artifact.

        Args:
            command: The command, as in a bash script.
            timeout_s: Stop it after so many seconds.
        """
        workspace = Workspace(ctx.cwd)
        env = scrubbed(keep=environment_keep) | _QUIET | {"PWD": workspace.cwd}
        with Spool() as spool:
            watch = _Watch(ctx, spool)
            try:
                ended = await run(
                    [shutil.which("bash") or "/bin/sh", "-c", command],
                    cwd=workspace.cwd,
                    env=env,
                    sink=watch.take,
                    limit_ms=timeout_s * 1000,
                    grace_ms=grace_ms,
                )
            except (OSError, ValueError) as error:
                raise ToolFailure(f"the command could not be run: {error}") from error
            text = await _shown(spool, ctx)
        status = _status(ended, timeout_s)
        parts = [part for part in (text.rstrip("\n"), status) if part]
        return ToolOutput("\n".join(parts), is_error=ended.code != 0 or ended.timed_out)

    return (bash,)


class _Watch:
    """Takes the output as it comes, and shows its last line now and then to whoever watches."""

    def __init__(self, ctx: ToolContext, spool: Spool) -> None:
        self._ctx = ctx
        self._spool = spool
        self._loop = asyncio.get_running_loop()
        self._next_at = 0.0

    def take(self, data: bytes) -> None:
        self._spool.write(data)
        now = self._loop.time()
        if now >= self._next_at:
            self._next_at = now + PROGRESS_MS / 1000
            lines = data[-1_000:].decode("utf-8", "replace").split("\n")
            line = next((line for line in reversed(lines) if line.strip()), "")
            if line:
                self._ctx.progress(clean(line.strip())[:200])


async def _shown(spool: Spool, ctx: ToolContext) -> str:
    """What the model sees of the output. What is long or binary is in the artifact store first."""
    if not spool.total:
        return ""
    is_text = media_type(spool.head(HEAD_BYTES)) == TEXT
    if is_text and spool.total <= SHOWN_BYTES_MAX:
        whole = clean(spool.head(spool.total).decode("utf-8", "replace"))
        if len(whole.encode()) <= SHOWN_BYTES_MAX:
            return whole
    try:
        artifact = await ctx.artifacts.put(await asyncio.to_thread(spool.contents))
    except StoreError as error:
        place = f"the output could not be kept: {error.message}"
    else:
        what = "the whole output"
        if spool.dropped:
            what = f"all but {spool.dropped} bytes in the middle, which were not kept,"
        place = f"{what} is artifact {artifact}, read it with read_artifact"
    if not is_text:
        return f"[{spool.total} bytes of binary output; {place}]"
    head, tail = spool.head(SHOWN_BYTES_MAX), spool.tail(SHOWN_BYTES_MAX)
    return preview(head, tail, spool.total, place, SHOWN_BYTES_MAX)


def _status(ended: Ended, timeout_s: int) -> str:
    if ended.timed_out:
        status = f"[stopped: it ran longer than {timeout_s} s]"
    elif ended.code is not None and ended.code < 0:
        name = str(-ended.code)
        with contextlib.suppress(ValueError):
            name = signal.Signals(-ended.code).name
        status = f"[ended by signal {name}]"
    else:
        status = f"[exit code {ended.code}]"
    if ended.code is None:
        status += "\n[it could not be stopped and may still be running]"
    if ended.leftovers:
        status += "\n[processes that it left in the background were stopped]"
    return status
