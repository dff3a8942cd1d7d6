"""Which models there are to ask for, and how one is opened.

A model is ``PROVIDER:NAME``. The OpenAI-compatible providers are data (`PROVIDERS`); others are
opened by whoever `register`s for their name. Importing this module imports no HTTP library, and
nothing here asks a network.

The environment of a provider: ``PROVIDER_API_KEY`` and ``PROVIDER_BASE_URL``; for ``llamacpp``,
``LLAMACPP_BASE_URL``. Servers on this machine need no key, and take one if it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec

from postroom.errors import MissingKey, UnknownModel
from postroom.models.chat import CHAT, DEEPSEEK, MISTRAL, OPENAI, Dialect
from postroom.models.endpoint import is_loopback, proxy_for
from postroom.ports.clock import Clock, SystemClock
from postroom.ports.model import Model

IMAGES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
PDF = frozenset({"application/pdf"})


class ModelRef(msgspec.Struct, frozen=True):
    """A model by provider and the provider's own name for it, which may hold colons."""

    provider: str
    name: str

    def __str__(self) -> str:
        return f"{self.provider}:{self.name}"


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible provider. ``default`` is the model taken if only its key is known.

    ``local``: it runs on this machine and needs no key. ``images`` and ``files``: which names
    take pictures, and PDF files, as such (a pattern; None: none).
    """

    name: str
    base_url: str
    local: bool = False
    dialect: Dialect = CHAT
    default: str | None = None
    images: str | None = None
    files: str | None = None

    @property
    def key_variable(self) -> str:
        return f"{self.name.upper()}_API_KEY"

    @property
    def base_url_variable(self) -> str:
        return f"{self.name.upper()}_BASE_URL"


# Names of open models that take pictures, wherever they are served.
_SEEING = (
    r"vision|-vl\b|\dvl\b|pixtral|llava|gemma-?[34]|llama-?4|minicpm-v|moondream|mistral-small"
    r"|mistral-medium|ministral|qwen-?3\.[5-9]"
)

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            name="openai",
            base_url="https://api.openai.com/v1",
            dialect=OPENAI,
            default="gpt-6-luna",
            images=r"gpt-4o|gpt-4\.1|gpt-[5-9]|chatgpt|o[13]\b|o4",
            files=r"gpt-4o|gpt-4\.1|gpt-[5-9]|o[13]\b|o4",
        ),
        Provider(
            name="deepseek",
            base_url="https://api.deepseek.com",
            dialect=DEEPSEEK,
            default="deepseek-flash",
        ),
        Provider(
            name="openrouter",
            base_url="https://openrouter.ai/api/v1",
            default="openrouter/auto",
            images=rf"openai/(gpt-4o|gpt-4\.1|gpt-[5-9]|o[34])|anthropic/|google/gemini|{_SEEING}",
            files=r"openai/(gpt-4o|gpt-4\.1|gpt-[5-9])|anthropic/|google/gemini",
        ),
        Provider(
            name="groq",
            base_url="https://api.groq.com/openai/v1",
            default="openai/gpt-oss-120b",
            images=_SEEING,
        ),
        Provider(
            name="mistral",
            base_url="https://api.mistral.ai/v1",
            dialect=MISTRAL,
            default="mistral-medium-latest",
            images=rf"mistral-large|{_SEEING}",
        ),
        Provider(
            name="together",
            base_url="https://api.together.xyz/v1",
            default="openai/gpt-oss-120b",
            images=_SEEING,
        ),
        Provider(name="ollama", base_url="http://localhost:11434/v1", local=True, images=_SEEING),
        Provider(name="lmstudio", base_url="http://localhost:1234/v1", local=True, images=_SEEING),
        Provider(name="vllm", base_url="http://localhost:8000/v1", local=True, images=_SEEING),
        Provider(name="llamacpp", base_url="http://localhost:8080/v1", local=True, images=_SEEING),
    )
}


class Price(msgspec.Struct, frozen=True):
    """List prices in US dollars per million tokens; cached ones are part of the input."""

    input: float
    cached: float
    output: float

    def cost_of(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """US dollars of so many tokens; ``cached_tokens`` are part of ``input_tokens``."""
        fresh = input_tokens - cached_tokens
        return (
            fresh * self.input + cached_tokens * self.cached + output_tokens * self.output
        ) / 1_000_000


class Facts(msgspec.Struct, frozen=True):
    """``window``: tokens of a request and its reply together. None: unknown."""

    window: int | None = None
    price: Price | None = None


# As the providers published them in November 2026, for requests of ordinary length.
_FACTS: dict[str, Facts] = {
    "anthropic:claude-fable-5-2": Facts(1_000_000, Price(8.00, 0.20, 40.00)),
    "anthropic:claude-opus-5-5": Facts(1_000_000, Price(4.00, 0.20, 20.00)),
    "anthropic:claude-sonnet-5-5": Facts(1_000_000, Price(2.00, 0.10, 10.00)),
    "anthropic:claude-haiku-5-5": Facts(1_000_000),
    "anthropic:claude-opus-4-8": Facts(1_000_000, Price(5.00, 0.50, 25.00)),
    "anthropic:claude-sonnet-4-6": Facts(1_000_000, Price(3.00, 0.30, 15.00)),
    "anthropic:claude-haiku-4-5": Facts(200_000, Price(1.00, 0.10, 5.00)),
    "google:gemini-3.8-flash": Facts(1_000_000, Price(0.75, 0.075, 3.75)),
    "google:gemini-3.5-flash-lite": Facts(1_000_000, Price(0.30, 0.03, 2.50)),
    "google:gemini-4-argon": Facts(1_048_576),
    "openai:gpt-6-luna": Facts(1_050_000, Price(0.10, 0.01, 0.50)),
    "openai:gpt-6-sol": Facts(1_050_000, Price(2.00, 0.20, 10.00)),
    "openai:gpt-6.1-sol": Facts(1_050_000, Price(2.00, 0.10, 10.00)),
    "openai:gpt-5.6-luna": Facts(1_050_000, Price(0.20, 0.02, 1.20)),
    "openai:gpt-5.6-terra": Facts(1_050_000, Price(2.00, 0.20, 12.00)),
    "openai:gpt-5.6-sol": Facts(1_050_000),
    "openai:gpt-4.1": Facts(1_047_576, Price(2.00, 0.50, 8.00)),
    "openai:gpt-4.1-mini": Facts(1_047_576, Price(0.40, 0.10, 1.60)),
    "openai:gpt-4o": Facts(128_000, Price(2.50, 1.25, 10.00)),
    "openai:gpt-4o-mini": Facts(128_000, Price(0.15, 0.075, 0.60)),
    "deepseek:deepseek-flash": Facts(1_000_000),
    "deepseek:deepseek-v4-pro": Facts(1_000_000),
    "groq:openai/gpt-oss-120b": Facts(131_072),
    "together:openai/gpt-oss-120b": Facts(131_072),
}

_DATED = re.compile(r"-\d{4}-\d{2}-\d{2}\Z")


def facts(ref: ModelRef | str) -> Facts:
    """What is known of a model; a dated name counts as the name without its date."""
    text = str(ref)
    return _FACTS.get(text) or _FACTS.get(_DATED.sub("", text)) or Facts()


# ---- opening ----


class Opening(msgspec.Struct, frozen=True):
    """What an opener gets. ``window`` overrides what is known of the model (None: keep it)."""

    ref: ModelRef
    env: Mapping[str, str]
    idle_timeout_ms: int
    window: int | None
    clock: Clock


Opener: TypeAlias = Callable[[Opening], Model]


class Registered(msgspec.Struct, frozen=True):
    """``key_variable`` None: it needs no key. ``default`` as in `Provider`. ``ready`` is given
    where more than that variable can make it so; then the opener itself asks for its key.
    """

    opener: Opener
    key_variable: str | None = None
    default: str | None = None
    ready: Callable[[Mapping[str, str]], bool] | None = None


_registered: dict[str, Registered] = {}

# Providers that need a part of Postroom that may not be installed.
_EXTRAS = {
    "anthropic": "providers",
    "google": "providers",
    "bedrock": "providers",
    "local": "local",
}

# Whose key is looked for first when nothing names a model.
ORDER = ("openai", "anthropic", "google", "deepseek", "openrouter", "mistral", "groq", "together")


def register(
    provider: str,
    opener: Opener,
    *,
    key_variable: str | None = None,
    default: str | None = None,
    ready: Callable[[Mapping[str, str]], bool] | None = None,
) -> None:
    """Makes ``PROVIDER:…`` openable. The opener imports what it needs when it is called.

    With a ``key_variable`` and a ``default`` name the provider takes part in `pick_default`. A
    second registration replaces the first.
    """
    _registered[provider] = Registered(opener, key_variable, default, ready)


def providers() -> list[str]:
    """Every provider that can be opened, sorted."""
    return sorted({"scripted", *PROVIDERS, *_registered})


def parse_model_ref(text: str) -> ModelRef:
    """Reads ``PROVIDER:NAME``.

    Raises:
        UnknownModel: it has another form, or there is no such provider.
    """
    provider, colon, name = text.strip().partition(":")
    known = providers()
    if provider in known and name.strip():
        return ModelRef(provider, name.strip())
    if provider in known:
        raise UnknownModel(f"{text!r} names no model of {provider}", hint=f"write {provider}:NAME")
    if colon and (extra := _EXTRAS.get(provider)) is not None:
        raise UnknownModel(
            f"models of {provider} need a part that is not installed",
            hint=f"pip install 'postroom[{extra}]'",
        )
    raise UnknownModel(
        f"{text!r} is not a model: " + ("no such provider" if colon else "write PROVIDER:NAME"),
        hint=_suggestion(text.strip(), provider) + f"providers: {', '.join(known)}",
    )


def open_model(
    ref: ModelRef | str,
    env: Mapping[str, str],
    *,
    idle_timeout_ms: int = 120_000,
    window: int | None = None,
    clock: Clock | None = None,
) -> Model:
    """Opens a model with what the environment ``env`` says; no connection is made yet.

    Raises:
        UnknownModel: there is no such provider.
        MissingKey: the provider's key is not in ``env``; the hint names the variable.
        ConfigError: a base URL, a key or a script cannot be used.
    """
    if isinstance(ref, str):
        ref = parse_model_ref(ref)
    opening = Opening(ref, env, idle_timeout_ms, window, clock or SystemClock())
    if (registered := _registered.get(ref.provider)) is not None:
        if registered.ready is None:
            _require(registered.key_variable, ref, env)
        return registered.opener(opening)
    if ref.provider == "scripted":
        from postroom.models.scripted import open_script

        return open_script(str(ref), ref.name, window=window, clock=opening.clock)
    provider = PROVIDERS.get(ref.provider)
    if provider is None:
        raise UnknownModel(
            f"{ref} is of no known provider", hint=f"providers: {', '.join(providers())}"
        )
    return _open_compatible(provider, opening)


def _open_compatible(provider: Provider, opening: Opening) -> Model:
    from postroom.models.openai_compat import OpenAICompatModel

    ref, env = opening.ref, opening.env
    base_url = _value(env, provider.base_url_variable) or provider.base_url
    key = _value(env, provider.key_variable)
    if key is None and not provider.local and not is_loopback(base_url):
        _require(provider.key_variable, ref, env)
    accepts = frozenset[str]()
    if provider.images is not None and re.search(provider.images, ref.name, re.IGNORECASE):
        accepts |= IMAGES
    if provider.files is not None and re.search(provider.files, ref.name, re.IGNORECASE):
        accepts |= PDF
    return OpenAICompatModel(
        str(ref),
        base_url,
        key,
        ref.name,
        dialect=provider.dialect,
        idle_timeout_ms=opening.idle_timeout_ms,
        window=opening.window or facts(ref).window,
        accepts=accepts,
        proxy=proxy_for(base_url, env),
        base_url_variable=provider.base_url_variable,
        key_variable=provider.key_variable,
        clock=opening.clock,
    )


# ---- what the environment offers ----


class Offer(msgspec.Struct, frozen=True):
    """A provider as the environment has it. ``ready``: its key is there, or it needs none.

    ``default`` is a model's whole reference (None: a name must be given). ``base_url`` is shown
    without secrets (None: the provider's library knows it).
    """

    provider: str
    ready: bool
    local: bool
    key_variable: str | None
    base_url: str | None
    default: str | None


def offers(env: Mapping[str, str]) -> list[Offer]:
    """What could be opened, in the order of `ORDER`, then the servers on this machine.

    Asks no network: a local server is ready whether it runs or not.
    """
    names = [name for name in ORDER if name in PROVIDERS or name in _registered]
    names += [name for name in providers() if name not in names and name != "scripted"]
    return [_offer(name, env) for name in names]


def pick_default(env: Mapping[str, str]) -> str | None:
    """The default model of the first provider in `ORDER` whose key is there; None: no key is."""
    for offer in offers(env):
        if offer.ready and not offer.local and offer.default and offer.key_variable:
            return offer.default
    return None


def _offer(name: str, env: Mapping[str, str]) -> Offer:
    registered = _registered.get(name)
    if registered is not None:
        variable = registered.key_variable
        if registered.ready is not None:
            ready = registered.ready(env)
        else:
            ready = variable is None or _value(env, variable) is not None
        default = f"{name}:{registered.default}" if registered.default else None
        return Offer(name, ready, variable is None, variable, None, default)
    provider = PROVIDERS[name]
    base_url = _value(env, provider.base_url_variable) or provider.base_url
    return Offer(
        name,
        provider.local or _value(env, provider.key_variable) is not None,
        provider.local,
        provider.key_variable,
        re.sub(r"//[^/@]*@", "//", base_url.partition("?")[0]),
        f"{name}:{provider.default}" if provider.default else None,
    )


def _value(env: Mapping[str, str], variable: str) -> str | None:
    """A variable that is set to nothing is not set."""
    return env.get(variable, "").strip() or None


def _require(variable: str | None, ref: ModelRef, env: Mapping[str, str]) -> None:
    if variable is not None and _value(env, variable) is None:
        raise MissingKey(f"{ref} needs a key in {variable}", hint=f"export {variable}=…")


def _suggestion(text: str, provider: str) -> str:
    """``did you mean …? ``, or nothing."""
    from difflib import get_close_matches

    names = {ref.partition(":")[2]: ref for ref in _FACTS}
    if text in names:
        return f"did you mean {names[text]}? "
    close = get_close_matches(provider.lower(), providers(), 1)
    if close and ":" in text:
        return f"did you mean {close[0]}:{text.partition(':')[2]}? "
    close = get_close_matches(text, [*names, *_FACTS], 1)
    return f"did you mean {names.get(close[0], close[0])}? " if close else ""
