"""The cores this process can run: which model, which tools, which words, within which limits.

A core lies in ``cores/<id>/`` of the home: ``core.toml``, and ``PERSONA.md`` with its words. The core
``default`` needs no files: it is made of the command line and the environment.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from postroom.domain.event import Params
from postroom.domain.ids import CoreId
from postroom.errors import ConfigError, NoModel
from postroom.flow.core import Budget, Core, CoreSource
from postroom.home import home
from postroom.ports.model import Model
from postroom.ports.tool import Tool

PERSONA = (
    "You are a helpful assistant. You work in the person's workspace with the tools you have. "
    "Answer briefly and to the point."
)


_EXTRAS = ("local", "anthropic", "google", "bedrock")


class CoreFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``core.toml`` may say. ``tools`` None: all the built-in ones.

    ``model`` and ``fallbacks`` are ``PROVIDER:NAME``: when a model's server fails for good the next
    one answers. Caps are in tokens (input and output together), and in US dollars where the price
    of the model is known; None: no cap. A day is a day of UTC.
    """

    model: str | None = None
    fallbacks: tuple[str, ...] = ()
    tools: tuple[str, ...] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    reasoning_effort: str | None = None
    turn_steps_max: int | None = None
    session_tokens_max: int | None = None
    day_tokens_max: int | None = None
    day_cost_max_usd: float | None = None


def builtin_cores(
    *,
    model: str | None,
    environ: Mapping[str, str],
    turn_steps_max: int | None = None,
    folder: Path | None = None,
) -> CoreSource:
    """A source of the cores in ``folder`` (None: the home's); ``model`` overrules what they name.

    A core is opened when it is first asked for, and kept.

    Raises (when asked):
        ConfigError: there is no such core, or its file is wrong.
        NoModel, UnknownModel, MissingKey: no usable model is named.
    """
    place = folder or home(environ) / "cores"
    opened: dict[str, Core] = {}

    def source(core_id: CoreId) -> Core:
        core = opened.get(core_id)
        if core is None:
            core = opened[core_id] = _open(core_id, place, model, environ, turn_steps_max)
        return core

    return source


def _open(
    core_id: CoreId,
    place: Path,
    model: str | None,
    environ: Mapping[str, str],
    turn_steps_max: int | None,
) -> Core:
    file, persona, revision = read_core(core_id, place)
    refs = models_of(file, model, environ)
    return Core(
        id=core_id,
        revision=revision,
        models=tuple(open_any(ref, environ) for ref in refs),
        persona=persona,
        tools=_tools(core_id, file.tools),
        params=Params(file.max_tokens, file.temperature, file.reasoning_effort),
        turn_steps_max=turn_steps_max or file.turn_steps_max,
        budget=Budget(
            session_tokens_max=file.session_tokens_max,
            day_tokens_max=file.day_tokens_max,
            day_cost_max_usd=file.day_cost_max_usd,
            prices=prices(refs),
        ),
    )


def core_ids(place: Path) -> list[str]:
    """The cores there are files for, and ``default``."""
    found = {p.parent.name for p in place.glob("*/core.toml")} if place.is_dir() else set[str]()
    return sorted(found | {"default"})


def read_core(core_id: str, place: Path) -> tuple[CoreFile, str, str]:
    """A core's file, its persona, and its revision: a hash of both.

    Raises:
        ConfigError: naming the file, and the line or the field that is wrong.
    """
    folder = place / core_id
    path = folder / "core.toml"
    if not path.is_file():
        if core_id == "default":
            return CoreFile(), PERSONA, "builtin"
        raise ConfigError(
            f"there is no core {core_id!r}",
            hint=f"known: {', '.join(core_ids(place))}; a new one is {path}",
        )
    try:
        text = path.read_text()
        words = folder / "PERSONA.md"
        persona = words.read_text().strip() if words.is_file() else PERSONA
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        file = msgspec.convert(tomllib.loads(text), CoreFile)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        field = where.strip("`.")
        known = ", ".join(CoreFile.__struct_fields__)
        raise ConfigError(
            f"{path}: {field + ': ' if field else ''}{reason}", hint=f"known settings: {known}"
        ) from None
    digest = hashlib.sha256(f"{text}\0{persona}".encode()).hexdigest()[:12]
    return file, persona, digest


def models_of(file: CoreFile, asked: str | None, environ: Mapping[str, str]) -> list[str]:
    """The references of the model and its fallbacks, the first one that is named anywhere.

    The order: the command line, the core, ``POSTROOM_MODEL``, a provider whose key is there, the
    local model if its weights are installed.
    """
    if asked is not None:
        return [asked]
    if file.model is not None:
        return [file.model, *file.fallbacks]
    from postroom.models.catalog import pick_default

    register_extras(environ)
    ref = environ.get("POSTROOM_MODEL") or pick_default(environ) or _installed(environ)
    if ref is None:
        raise NoModel(
            "no model is configured",
            hint="one of these fixes it: `export OPENAI_API_KEY=…` (or another provider's key); "
            "`postroom model install` (a small model on this machine, no key); "
            "`postroom run --model PROVIDER:NAME …` (`postroom model list` shows what there is)",
        )
    return [ref, *file.fallbacks]


def _installed(environ: Mapping[str, str]) -> str | None:
    from postroom.models.local import installed_default

    return installed_default(home(environ) / "models")


def open_any(ref: str, environ: Mapping[str, str]) -> Model:
    """Opens a model of any provider, those of the extras too. Raises as `catalog.open_model`."""
    from postroom.models.catalog import open_model

    if ref.partition(":")[0] in _EXTRAS:
        register_extras(environ)
    return open_model(ref, environ)


def load_http() -> None:
    """Imports the HTTP client, which takes a while; best in a thread, while a database opens."""
    import postroom.models.http  # noqa: F401  # pyright: ignore[reportUnusedImport]


def register_extras(environ: Mapping[str, str]) -> None:
    """Makes the providers known that need a part of Postroom of their own. Imports none of it."""
    from postroom.models import local, providers

    local.register(home(environ) / "models")
    providers.register()


def prices(refs: list[str]) -> Mapping[str, Callable[[int, int, int], float]]:
    """For each model whose price is known: US dollars of (input, cached, output) tokens."""
    from postroom.models.catalog import facts

    out: dict[str, Callable[[int, int, int], float]] = {}
    for ref in refs:
        price = facts(ref).price if ":" in ref else None
        if price is not None:
            out[ref] = price.cost_of
    return out


def _tools(core_id: str, names: tuple[str, ...] | None) -> Mapping[str, Tool]:
    from postroom.tools import builtin_tools

    tools = builtin_tools()
    if names is None:
        return tools
    for name in names:
        if name not in tools:
            raise ConfigError(
                f"core {core_id}: there is no tool {name!r}", hint=f"known: {', '.join(tools)}"
            )
    return {name: tools[name] for name in names}
