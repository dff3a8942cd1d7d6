"""The cores this process can run: which model, which tools, which words.

Until cores are read from files there is one, `default`, made of the command line and the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from postroom.domain.ids import CoreId
from postroom.errors import ConfigError, NoModel
from postroom.flow.core import Core, CoreSource

PERSONA = (
    "You are a helpful assistant. You work in the person's workspace with the tools you have. "
    "Answer briefly and to the point."
)


def builtin_cores(
    *,
    model: str | None,
    environ: Mapping[str, str],
    turn_steps_max: int | None = None,
) -> CoreSource:
    """A source that knows the core ``default``; its model is opened when it is first asked for.

    Raises (when asked):
        ConfigError: another core is asked for.
        NoModel, UnknownModel, MissingKey: no usable model is named.
    """
    made: list[Core] = []

    def source(core_id: CoreId) -> Core:
        if core_id != "default":
            raise ConfigError(f"there is no core {core_id!r}", hint="known: default")
        if not made:
            made.append(_default_core(model, environ, turn_steps_max))
        return made[0]

    return source


def _default_core(
    model: str | None, environ: Mapping[str, str], turn_steps_max: int | None
) -> Core:
    from postroom.models.catalog import open_model, pick_default

    ref = model or environ.get("POSTROOM_MODEL") or pick_default(environ)
    if ref is None:
        raise NoModel(
            "no model is configured",
            hint="set OPENAI_API_KEY (or another provider's key), or run "
            "`postroom model install`, or try `postroom run --model scripted:echo hello`",
        )
    return Core(
        id=CoreId("default"),
        revision="builtin-1",
        models=(open_model(ref, environ),),
        persona=PERSONA,
        turn_steps_max=turn_steps_max,
    )
