"""A core in use: the definition of an agent with its parts opened."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec

from postroom.domain.event import Params, RequestHeader, ToolSpec
from postroom.domain.ids import CoreId
from postroom.ports.model import Model
from postroom.ports.policy import Policy
from postroom.ports.tool import Permission, Tool
from postroom.scripts.drive import Header
from postroom.scripts.usage import UsageRow


class Budget(msgspec.Struct, frozen=True):
    """Caps on what is spent; None: no cap. Tokens are input and output together.

    ``prices`` gives US dollars of (input, cached, output) tokens for each model whose price is
    known, by its reference. What an unknown price costs counts as nothing.
    """

    session_tokens_max: int | None = None
    day_tokens_max: int | None = None
    day_cost_max_usd: float | None = None
    prices: Mapping[str, Callable[[int, int, int], float]] = {}

    @property
    def capped(self) -> bool:
        return (self.session_tokens_max, self.day_tokens_max, self.day_cost_max_usd) != (
            None,
            None,
            None,
        )

    def spent(self, session: Sequence[UsageRow], day: Sequence[UsageRow]) -> str | None:
        """Which cap is reached, in words; None if none is."""
        cap = self.session_tokens_max
        tokens = sum(u.input_tokens + u.output_tokens for u in session)
        if cap is not None and tokens >= cap:
            return f"this session has used {tokens:,} tokens, its cap is {cap:,}"
        cap = self.day_tokens_max
        tokens = sum(u.input_tokens + u.output_tokens for u in day)
        if cap is not None and tokens >= cap:
            return f"{tokens:,} tokens were used today, the cap is {cap:,}"
        dollars = sum(self.cost_usd(u) or 0 for u in day)
        if self.day_cost_max_usd is not None and dollars >= self.day_cost_max_usd:
            return f"${dollars:.2f} were spent today, the cap is ${self.day_cost_max_usd:.2f}"
        return None

    def cost_usd(self, usage: UsageRow) -> float | None:
        """What this usage cost; None if the model's price is not known."""
        price = self.prices.get(usage.model)
        if price is None:
            return None
        return price(usage.input_tokens, usage.cached_tokens, usage.output_tokens)


class Core:
    """One revision of a core. A running turn keeps the one it started with.

    ``models`` are the model and its fallbacks, in order. ``policy`` None admits everything.
    ``permissions`` says of tools, by name, whether they are allowed, asked about or denied; of
    others their effects decide.
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
        budget: Budget | None = None,
        permissions: Mapping[str, Permission] | None = None,
    ) -> None:
        self.id = id
        self.revision = revision
        self.models = models
        self.persona = persona
        self.tools: Mapping[str, Tool] = tools or {}
        # As the log gives them back: a whole number for a temperature is a float there.
        self.params = msgspec.json.decode(msgspec.json.encode(params or Params()), type=Params)
        self.policy = policy
        self.turn_steps_max = turn_steps_max
        self.budget = budget or Budget()
        self.permissions: Mapping[str, Permission] = permissions or {}
        self._headers: dict[str, Header] = {}

    def with_policy(self, policy: Policy) -> Core:
        """The same core under another policy."""
        core = copy.copy(self)
        core.policy = policy
        return core

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
