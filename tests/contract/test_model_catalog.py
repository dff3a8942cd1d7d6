"""The catalog: which models can be asked for, and what the environment says about them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from postroom.errors import ConfigError, MissingKey, UnknownModel
from postroom.models import catalog
from postroom.models.catalog import (
    PROVIDERS,
    ModelRef,
    Opening,
    facts,
    offers,
    open_model,
    parse_model_ref,
    pick_default,
    providers,
    register,
)
from postroom.models.scripted import Script, ScriptedModel
from postroom.ports.clock import SystemClock
from postroom.ports.model import Model

CLOUD = ("openai", "deepseek", "openrouter", "groq", "mistral", "together")
LOCAL = ("ollama", "lmstudio", "vllm", "llamacpp")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(catalog, "_registered", {})
    return


def opener(opening: Opening) -> Model:
    return ScriptedModel(str(opening.ref), Script(), window=opening.window)


# ---- references ----


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("openai:gpt-6-luna", ModelRef("openai", "gpt-6-luna")),
        ("ollama:llama3.2:1b", ModelRef("ollama", "llama3.2:1b")),
        ("openrouter:openai/gpt-4o", ModelRef("openrouter", "openai/gpt-4o")),
        ("scripted:/tmp/a:b.json", ModelRef("scripted", "/tmp/a:b.json")),
        (" openai: gpt-4o ", ModelRef("openai", "gpt-4o")),
    ],
)
def test_a_reference_is_a_provider_and_its_own_name_for_a_model(text: str, ref: ModelRef) -> None:
    assert parse_model_ref(text) == ref
    assert parse_model_ref(str(ref)) == ref


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("opnai:gpt-4o", "did you mean openai:gpt-4o?"),
        ("OpenAI:gpt-4o", "did you mean openai:gpt-4o?"),
        ("olama:llama3.2:1b", "did you mean ollama:llama3.2:1b?"),
        ("gpt-4o", "did you mean openai:gpt-4o?"),
        ("gpt-6-lunar", "did you mean openai:gpt-6-luna?"),
        ("nonsense:zzz", "providers: deepseek"),
        ("", "providers: deepseek"),
        ("openai:", "write openai:NAME"),
        ("openai", "write openai:NAME"),
    ],
)
def test_an_unknown_model_says_what_is_known_and_what_is_close(text: str, hint: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        parse_model_ref(text)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("provider", "extra"),
    [
        ("anthropic", "providers"),
        ("google", "providers"),
        ("bedrock", "providers"),
        ("local", "local"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_a_provider_that_is_not_installed_says_how_to_install_it(provider: str, extra: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        parse_model_ref(f"{provider}:x")
    assert f"postroom[{extra}]" in (caught.value.hint or "")


@pytest.mark.usefixtures("registry")
def test_all_providers_are_listed() -> None:
    assert providers() == sorted([*CLOUD, *LOCAL, "scripted"])


# ---- opening ----


@pytest.mark.parametrize("name", CLOUD)
def test_a_provider_opens_with_its_key(name: str) -> None:
    variable = f"{name.upper()}_API_KEY"
    with pytest.raises(MissingKey) as caught:
        open_model(f"{name}:x", {variable: "  "})
    assert variable in caught.value.message
    assert caught.value.hint == f"export {variable}=…"
    model = open_model(f"{name}:x", {variable: "k-123"})
    assert model.ref == f"{name}:x"
    assert PROVIDERS[name].base_url in repr(model)


@pytest.mark.parametrize("name", LOCAL)
def test_a_server_on_this_machine_needs_no_key(name: str) -> None:
    model = open_model(f"{name}:x", {})
    assert "http://localhost:" in repr(model)


@pytest.mark.parametrize("name", [*CLOUD, *LOCAL])
def test_the_base_url_of_the_environment_is_taken(name: str) -> None:
    env = {f"{name.upper()}_API_KEY": "k", f"{name.upper()}_BASE_URL": "https://own.example/api"}
    assert "https://own.example/api" in repr(open_model(f"{name}:x", env))
    env[f"{name.upper()}_BASE_URL"] = "own.example"
    with pytest.raises(ConfigError, match=f"{name.upper()}_BASE_URL"):
        open_model(f"{name}:x", env)


def test_no_key_is_asked_for_a_base_url_on_this_machine() -> None:
    assert open_model("openai:x", {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"})
    with pytest.raises(MissingKey):
        open_model("openai:x", {"OPENAI_BASE_URL": "http://far.example/v1"})


def test_what_is_known_of_a_model_comes_with_it() -> None:
    env = {"OPENAI_API_KEY": "k"}
    model = open_model("openai:gpt-4o-2024-11-20", env)
    assert model.window == 128_000
    assert {"image/png", "application/pdf"} <= model.accepts
    assert open_model("openai:gpt-4o", env, window=9).window == 9
    unknown = open_model("ollama:smollm2:135m", {})
    assert (unknown.window, unknown.accepts) == (None, frozenset())
    assert "image/png" in open_model("ollama:gemma3:4b", {}).accepts
    assert "image/png" in open_model("vllm:Qwen/Qwen2.5-VL-7B", {}).accepts


def test_facts_are_none_where_they_are_not_known() -> None:
    price = facts("openai:gpt-4o-mini").price
    assert price is not None
    assert price.cached <= price.input <= price.output
    assert (facts("ollama:x").window, facts(ModelRef("ollama", "x")).price) == (None, None)


def test_every_default_is_a_model_that_can_be_opened() -> None:
    for provider in PROVIDERS.values():
        if provider.default is not None:
            ref = parse_model_ref(f"{provider.name}:{provider.default}")
            assert open_model(ref, {provider.key_variable: "k"}).ref == str(ref)


@pytest.mark.usefixtures("registry")
def test_others_are_opened_by_whoever_registers_for_them() -> None:
    seen: list[Opening] = []

    def opened(opening: Opening) -> Model:
        seen.append(opening)
        return opener(opening)

    register("anthropic", opened, key_variable="ANTHROPIC_API_KEY", default="claude-x")
    with pytest.raises(MissingKey, match="ANTHROPIC_API_KEY"):
        open_model("anthropic:claude-y", {})
    env = {"ANTHROPIC_API_KEY": "k"}
    clock = SystemClock()
    model = open_model("anthropic:claude-y", env, window=7, idle_timeout_ms=5, clock=clock)
    assert (model.ref, model.window) == ("anthropic:claude-y", 7)
    assert seen == [Opening(ModelRef("anthropic", "claude-y"), env, 5, 7, clock)]
    register("local", opener)
    assert open_model("local:qwen", {}).ref == "local:qwen"
    assert "anthropic" in providers()


# ---- what the environment offers ----


def test_without_a_key_nothing_is_picked() -> None:
    assert pick_default({}) is None
    assert pick_default({"OPENAI_API_KEY": " ", "OLLAMA_API_KEY": "k"}) is None


@pytest.mark.usefixtures("registry")
def test_the_first_provider_in_order_whose_key_is_there_is_picked() -> None:
    env = {f"{name.upper()}_API_KEY": "k" for name in ("groq", "deepseek")}
    assert pick_default(env) == "deepseek:deepseek-flash"
    env["ANTHROPIC_API_KEY"] = "k"
    assert pick_default(env) == "deepseek:deepseek-flash"
    register("anthropic", opener, key_variable="ANTHROPIC_API_KEY", default="claude-x")
    assert pick_default(env) == "anthropic:claude-x"
    env["OPENAI_API_KEY"] = "k"
    assert pick_default(env) == "openai:gpt-6-luna"


@pytest.mark.usefixtures("registry")
def test_offers_say_what_is_ready_and_which_variable_is_missing() -> None:
    register("local", opener)
    env = {"GROQ_API_KEY": "k", "VLLM_BASE_URL": "http://ada:hush@gpu:8000/v1?token=hush"}
    found = {offer.provider: offer for offer in offers(env)}
    assert next(iter(found)) == "openai"
    assert set(found) == {*CLOUD, *LOCAL, "local"}
    assert {name for name, offer in found.items() if offer.ready} == {"groq", *LOCAL, "local"}
    assert found["openai"].key_variable == "OPENAI_API_KEY"
    assert found["groq"].default == "groq:openai/gpt-oss-120b"
    assert found["vllm"].base_url == "http://gpu:8000/v1"
    assert found["local"].key_variable is None


def test_importing_the_catalog_is_cheap() -> None:
    heavy = "{'aiohttp', 'urllib.request', 'difflib', 'postroom.models.openai_compat'}"
    code = f"import sys, postroom.models.catalog; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
