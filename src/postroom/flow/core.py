"""A core in use: the definition of an agent with its parts opened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec

from postroom.domain.event import Params, RequestHeader, ToolSpec
from postroom.domain.ids import CoreId
from postroom.ports.model import Model
from postroom.ports.policy import Policy
from postroom.ports.tool import Tool
from postroom.scripts.drive import Header


class Core:
    """One revision of a core. A running turn keeps the one it started with.

    ``models`` are the model and its fallbacks, in order. ``policy`` None admits everything.
    """

    def __init__(
        self,
        *,
        id: CoreId,
        revision: str,
        models: tuple[Model, ...],
        persona: str = "",
        tools: Mapping[str, Tool] | None = None,
        params: Params | None = None,
        policy: Policy | None = None,
        turn_steps_max: int | None = None,
    ) -> None:
        self.id = id
        self.revision = revision
        self.models = models
        self.persona = persona
        self.tools: Mapping[str, Tool] = tools or {}
        self.params = params or Params()
        self.policy = policy
        self.turn_steps_max = turn_steps_max
        self._headers: dict[str, Header] = {}

    @cached_property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools.values())

    def header(self, model: Model) -> Header:
        """What a request to this model says besides its history."""
        header = self._headers.get(model.ref)
        if header is None:
            data = RequestHeader(
                turn=0,
                core_revision=self.revision,
                model=model.ref,
                params=self.params,
                system=self.persona,
                tools=self.tool_specs,
            )
            digest = hashlib.sha256(msgspec.json.encode(data)).hexdigest()[:32]
            header = self._headers[model.ref] = Header(digest, data)
        return header


CoreSource: TypeAlias = Callable[[CoreId], Core]
