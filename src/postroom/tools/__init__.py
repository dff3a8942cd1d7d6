"""What an agent can do besides talking: its tools, and how a function becomes one.

Importing this loads no network, storage or media library; a tool loads what it needs when it is
first called.
"""

from __future__ import annotations

from collections.abc import Sequence

from postroom.tools.artifacts import artifact_tools
from postroom.tools.bounds import bound_output
from postroom.tools.files import file_tools
from postroom.tools.function import FunctionTool, tool
from postroom.tools.registry import Registry
from postroom.tools.search import search_tools
from postroom.tools.shell import shell_tools
from postroom.tools.web import Resolver, web_tools

__all__ = [
    "FunctionTool",
    "Registry",
    "Resolver",
    "artifact_tools",
    "bound_output",
    "builtin_tools",
    "file_tools",
    "search_tools",
    "shell_tools",
    "tool",
    "web_tools",
]


def builtin_tools(
    *,
    roots: Sequence[str] = (),
    environment_keep: frozenset[str] = frozenset(),
    allow_private: Sequence[str] = (),
) -> Registry:
    """All built-in tools with the settings an operator may want to change.

    ``roots`` are folders that the file tools may reach besides a session's workspace;
    ``environment_keep`` names variables that a command may see although they look like secrets;
    ``allow_private`` are networks that `web_fetch` may reach although they are not public.
    """
    return Registry(
        (
            *file_tools(roots),
            *search_tools(roots),
            *shell_tools(environment_keep=environment_keep),
            *web_tools(allow_private=allow_private),
            *artifact_tools(),
        )
    )
