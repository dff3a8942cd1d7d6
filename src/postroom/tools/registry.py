"""The tools of an agent: an ordered set of them, by name.

It runs nothing and decides nothing: the turn loop calls a tool, the policy says whether it may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from postroom.domain.event import ToolSpec
from postroom.errors import DuplicateTool, UnknownTool
from postroom.ports.tool import Tool
from postroom.tools.function import FunctionTool, tool

__all__ = ["FunctionTool", "Registry", "tool"]


class Registry(Mapping[str, Tool]):
    """Name to tool, in the order they were added, which is the order a model is told of them.

    As a mapping, ``get`` answers None for a name that is not there; ``registry[name]`` raises
    `UnknownTool`, whose message says which names there are.
    """

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for each in tools:
            self.add(each)

    def add(self, added: Tool) -> Tool:
        """Adds one tool and returns it, so that it can stand above ``@tool`` as a decorator.

        Raises:
            DuplicateTool: another tool has that name.
        """
        name = added.spec.name
        if name in self._tools:
            raise DuplicateTool(f"there are two tools named {name}")
        self._tools[name] = added
        return added

    def only(self, names: Iterable[str]) -> Registry:
        """Some of these tools, in the order of ``names``.

        Raises:
            UnknownTool: one of them is not here.
            DuplicateTool: one is named twice.
        """
        return Registry(self[name] for name in names)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What a model is told, in order."""
        return tuple(each.spec for each in self._tools.values())

    def __getitem__(self, name: str) -> Tool:
        found = self._tools.get(name)
        if found is None:
            known = f"there is {', '.join(self._tools)}" if self._tools else "there is none"
            raise UnknownTool(f"there is no tool named {name[:100]!r}", hint=known)
        return found

    def get(self, name: str, default: Tool | None = None) -> Tool | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tool of that name, or ``default``."""
        return self._tools.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)
