"""Anthropic's Messages API, through the provider library.

Prompt caching is on: the tools, the system text and the last message are marked, each request
reads what the one before it has written. Newer models bind their reasoning to what stood before
it, and refuse it after a change there (another persona, other tools, a compacted history); they
are asked to drop such blocks instead, since the library's own way is a second request.
"""

from __future__ import annotations

from typing import cast

import httpx2
from anthropic import AsyncAnthropic
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.settings import ModelSettings

from postroom import __version__
from postroom.domain.event import Params
from postroom.models.providers import Access
from postroom.models.providers_library import Fitting, settings_of
from postroom.models.providers_wire import Wire


def fit(access: Access) -> Fitting:
    http = httpx2.AsyncClient(
        transport=Wire(idle_timeout_ms=access.idle_timeout_ms, proxy=access.proxy)
    )
    client = AsyncAnthropic(
        api_key=access.key,
        base_url=access.base_url,
        max_retries=0,
        http_client=http,
        open_telemetry=False,
    )
    model = AnthropicModel(access.name, provider=AnthropicProvider(anthropic_client=client))
    profile = model.profile
    binds = bool(profile.get("anthropic_binds_thinking_blocks"))
    samples = not profile.get("anthropic_disallows_sampling_settings")

    def settings(params: Params) -> ModelSettings:
        chosen = AnthropicModelSettings(
            anthropic_cache_instructions=True,
            anthropic_cache_tool_definitions=True,
            anthropic_cache_messages=True,
        )
        chosen.update(cast("AnthropicModelSettings", settings_of(params, access.ref)))
        chosen["extra_headers"] = {"User-Agent": f"postroom/{__version__}"}
        thinking = chosen.get("thinking")
        if binds and thinking is not False:
            chosen["anthropic_thinking"] = {
                "type": "adaptive",
                "block_binding": {"prefix_mismatch_behavior": "drop_block"},
            }
        if not samples or thinking:
            # These are refused beside each other, and by models that always think.
            chosen.pop("temperature", None)
        return chosen

    def seals_back(params: Params) -> bool:
        return params.reasoning_effort != "none"

    return Fitting(model, "anthropic", settings, seals_back, http.aclose, _REHEARSAL)


_REHEARSAL = b"""event: message_start
data: {"type":"message_start","message":{"id":"","type":"message","role":"assistant","model":"",\
"content":[],"stop_reason":null,"usage":{"input_tokens":1,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"-"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}

event: message_stop
data: {"type":"message_stop"}

"""
