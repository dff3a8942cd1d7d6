"""The cores this process can run: which model, which tools, which words, within which limits.

A core lies in ``cores/<id>/`` of the home: ``core.toml``, and ``PERSONA.md`` with its words. The core
``default`` needs no files: it is made of the command line and the environment.

A core may have channels: ``[channels.NAME]`` in its file says of what kind, with which secret, and who
may talk there. Nobody may who is not named. A secret is never in the file: the file names a variable.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from postroom.domain.event import Params
from postroom.domain.ids import CoreId
from postroom.errors import ConfigError, NoModel
from postroom.flow.core import Budget, Core, CoreSource
from postroom.home import home
from postroom.ports.artifact import ArtifactStore
from postroom.ports.channel import Channel
from postroom.ports.clock import Clock
from postroom.ports.model import Model
from postroom.ports.policy import Policy
from postroom.ports.tool import Permission, Tool

if TYPE_CHECKING:
    from aiohttp import web

    from postroom.channels.webhook import WebhookChannel
    from postroom.flow.inbound import Connected

S = TypeVar("S", bound=msgspec.Struct)

PERSONA = (
    "You are a helpful assistant. You work in the person's workspace with the tools you have. "
    "Answer briefly and to the point."
)


_EXTRAS = ("local", "anthropic", "google", "bedrock")


class CoreFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``core.toml`` may say. ``tools`` None: all the built-in ones.

    ``model`` and ``fallbacks`` are ``PROVIDER:NAME``: when a model's server fails for good the next
    one answers. Caps are in tokens (input and output together), and in US dollars where the price
    of the model is known; None: no cap. A day is a day of UTC. ``permissions`` says of tools, by
    name, whether they are allowed, asked about or denied; of others their effects decide.
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
    permissions: dict[str, Permission] = {}
    channels: dict[str, dict[str, Any]] = {}  # each is read by itself: `ChannelFile`


class ChannelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``[channels.NAME]`` may say. ``kind`` is ``webhook``.

    ``secret`` names the variable that holds the secret (several: a rotation; all of them count).
    ``url`` is where answers go (None: nowhere). ``allow`` are the senders who may talk, by the
    platform's own ids; ``everyone`` lets anybody. ``cwd`` is where its sessions work (None: without
    a folder). The rest, where None, is as `postroom.channels.webhook.Endpoint` has it.
    """

    kind: str
    secret: str | tuple[str, ...]
    url: str | None = None
    allow: tuple[str, ...] = ()
    everyone: bool = False
    cwd: str | None = None
    repeats_window_s: int | None = None
    text_max: int | None = None
    body_bytes_max: int | None = None
    media_bytes_max: int | None = None
    reference_header: str | None = None


class _AccessFile(msgspec.Struct, frozen=True):
    """What of it says who may talk, which holds even where the rest is wrong."""

    allow: tuple[str, ...] = ()
    everyone: bool = False
    cwd: str | None = None


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
    policy = _policy(core_id, file, place)
    refs = models_of(file, model, environ)
    tools = _tools(core_id, file.tools)
    return Core(
        id=core_id,
        revision=revision,
        models=tuple(open_any(ref, environ) for ref in refs),
        persona=persona,
        tools=tools,
        params=Params(file.max_tokens, file.temperature, file.reasoning_effort),
        policy=policy,
        turn_steps_max=turn_steps_max or file.turn_steps_max,
        budget=Budget(
            session_tokens_max=file.session_tokens_max,
            day_tokens_max=file.day_tokens_max,
            day_cost_max_usd=file.day_cost_max_usd,
            prices=prices(refs),
        ),
        permissions=_permissions(core_id, file, tools),
    )


def _permissions(
    core_id: str, file: CoreFile, tools: Mapping[str, Tool]
) -> Mapping[str, Permission]:
    for name in file.permissions:
        if name not in tools:
            raise ConfigError(
                f"core {core_id}: permissions name {name!r}, and there is no such tool",
                hint=f"known: {', '.join(tools)}",
            )
    return file.permissions


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
    import tomllib  # a core without a file needs none of it

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    file = _converted(values, CoreFile, str(path))
    digest = hashlib.sha256(f"{text}\0{persona}".encode()).hexdigest()[:12]
    return file, persona, digest


def _converted(values: Mapping[str, Any], type_: type[S], where: str) -> S:
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        field = place.strip("`.")
        known = ", ".join(type_.__struct_fields__)
        raise ConfigError(
            f"{where}: {field + ': ' if field else ''}{reason}", hint=f"known settings: {known}"
        ) from None


# ---- channels ----

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*_(SECRET|KEY|TOKEN|PASSWORD)\Z")
_KINDS = ("webhook",)


class ChannelFault(msgspec.Struct, frozen=True):
    """A channel that cannot be run, and why."""

    channel: str
    core_id: str
    error: ConfigError


class OpenChannels(msgspec.Struct, frozen=True):
    """The channels of some cores, opened.

    ``connected`` are the hosts' words on all configured channels, opened here or not. ``routes`` are
    for the process's HTTP server. ``urls`` says where a channel sends, if that is one place.
    """

    channels: Mapping[str, Channel]
    connected: Mapping[str, Connected]
    routes: Sequence[web.RouteDef]
    urls: Mapping[str, str]
    faults: Sequence[ChannelFault]


def open_channels(
    environ: Mapping[str, str],
    *,
    folder: Path | None = None,
    only: Collection[str] | None = None,
    artifacts: ArtifactStore | None = None,
    clock: Clock | None = None,
) -> OpenChannels:
    """Opens the channels that the cores in ``folder`` (None: the home's) configure.

    ``only``: those of these cores (None: of all). A channel, or a core, whose files are wrong is among
    the faults, and stops no other. Two cores that use one name for a channel have neither.

    Raises:
        ConfigError: ``only`` names a core that there is not, or whose file cannot be read.
    """
    place = folder or home(environ) / "cores"
    owners: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    channels: dict[str, Channel] = {}
    connected: dict[str, Connected] = {}
    routes: list[web.RouteDef] = []
    urls: dict[str, str] = {}
    faults: list[ChannelFault] = []
    for core_id in sorted({*core_ids(place), *(only or ())}):
        try:
            file, _, _ = read_core(core_id, place)
        except ConfigError as error:
            if only is not None and core_id in only:
                raise
            faults.append(ChannelFault("", core_id, error))
            continue
        for name, table in file.channels.items():
            owners.setdefault(name, []).append((core_id, table))
    for name, owned in owners.items():
        for core_id, table in owned:
            where = _where(place, core_id, name)
            mine = only is None or core_id in only
            try:
                known = connected.get(name)
                connected[name] = _either(known, _connected(CoreId(core_id), table, where))
                if len(owned) > 1:
                    ids = " and ".join(owner for owner, _ in owned)
                    raise ConfigError(
                        f"{where}: the cores {ids} both have a channel {name!r}",
                        hint="give one of them another name",
                    )
                if mine:
                    channel, url = _open_webhook(name, table, where, environ, artifacts, clock)
                    channels[name] = channel
                    routes += channel.routes()
                    if url is not None:
                        urls[name] = url
            except ConfigError as error:
                if mine:
                    faults.append(ChannelFault(name, core_id, error))
    return OpenChannels(channels, connected, routes, urls, faults)


def _open_webhook(
    name: str,
    table: Mapping[str, Any],
    where: str,
    environ: Mapping[str, str],
    artifacts: ArtifactStore | None,
    clock: Clock | None,
) -> tuple[WebhookChannel, str | None]:
    """The channel, and where it sends."""
    from postroom.channels.signing import SigningKey
    from postroom.channels.webhook import Endpoint, WebhookChannel

    kind = table.get("kind")
    if kind not in _KINDS:
        raise ConfigError(
            f"{where}: kind: there is no channel of kind {kind!r}"
            if kind is not None
            else f"{where}: kind: it is missing",
            hint=f"known kinds: {', '.join(_KINDS)}",
        )
    file = _converted(table, ChannelFile, where)
    if file.cwd is not None and not Path(file.cwd).expanduser().is_dir():
        raise ConfigError(f"{where}: cwd: there is no folder {file.cwd}", hint="make it first")
    names = (file.secret,) if isinstance(file.secret, str) else file.secret
    keys: list[SigningKey] = []
    for variable in names:
        text = _secret(variable, where, environ)
        try:
            keys.append(SigningKey(text))
        except ConfigError as error:
            raise ConfigError(
                f"{where}: secret: {variable}: {error.message}", hint=error.hint
            ) from None
    settings = {
        key: value
        for key in Endpoint.__struct_fields__
        if key not in ("name", "keys") and (value := getattr(file, key)) is not None
    }
    try:
        endpoint = Endpoint(name=name, keys=tuple(keys), **settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    return WebhookChannel(endpoint, clock=clock, artifacts=artifacts), file.url


def _secret(variable: str, where: str, environ: Mapping[str, str]) -> str:
    if not _VARIABLE.match(variable):
        # What stands there may be the secret itself: it is not repeated.
        raise ConfigError(
            f"{where}: secret: the name of a variable is needed, not a secret",
            hint="capitals, ending in _SECRET, as DESK_SECRET; its value belongs into a file that "
            "DESK_SECRET_FILE names",
        )
    value = environ.get(variable)
    if not value:
        raise ConfigError(
            f"{where}: secret: {variable} is not set",
            hint=f"set {variable}, or {variable}_FILE to a file that holds it, in the environment "
            "or in .env of Postroom's home",
        )
    return value


def _where(place: Path, core_id: str, name: str) -> str:
    return f"{place / core_id / 'core.toml'}: channels.{name}"


def _connected(core_id: CoreId, table: Mapping[str, Any], where: str) -> Connected:
    from postroom.flow.inbound import Access, Connected

    file = _converted(table, _AccessFile, where)
    cwd = None if file.cwd is None else Path(file.cwd).expanduser()
    if cwd is not None and not cwd.is_absolute():
        raise ConfigError(
            f"{where}: cwd: {file.cwd} is not absolute", hint="as /srv/desk or ~/desk"
        )
    access = Access(frozenset(file.allow), file.everyone)
    return Connected(core_id, access, None if cwd is None else str(cwd))


def _either(known: Connected | None, other: Connected) -> Connected:
    """Where two cores use one name: whom either lets in. Each core's own policy decides for it."""
    from postroom.flow.inbound import Access

    if known is None:
        return other
    senders = known.access.senders | other.access.senders
    access = Access(senders, known.access.everyone or other.access.everyone)
    return msgspec.structs.replace(known, access=access)


def _policy(core_id: CoreId, file: CoreFile, place: Path) -> Policy | None:
    """Who may talk is asked again at the claim, whichever process makes it."""
    if not file.channels:
        return None
    from postroom.flow.inbound import senders_policy

    return senders_policy(
        {
            name: _connected(core_id, table, _where(place, core_id, name))
            for name, table in file.channels.items()
        }
    )


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
