"""Google's Gemini API, through the provider library.

Gemini caches the beginning of a prompt by itself; there is nothing to mark. Its signatures stand
on calls and text as well as on thoughts: see ``next`` in `providers_history`.
"""

from __future__ import annotations

import httpx2
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.settings import ModelSettings

from postroom import __version__
from postroom.domain.event import Params
from postroom.models.providers import Access
from postroom.models.providers_library import Fitting, settings_of
from postroom.models.providers_wire import Wire


def fit(access: Access) -> Fitting:
    # The SDK takes its time limit from the client, and makes of it one for the server too.
    http = httpx2.AsyncClient(
        transport=Wire(idle_timeout_ms=access.idle_timeout_ms, proxy=access.proxy),
        timeout=httpx2.Timeout(20 * 60),
    )
    # Without retry options the SDK makes one attempt.
    provider = GoogleProvider(api_key=access.key, base_url=access.base_url, http_client=http)
    model = GoogleModel(access.name, provider=provider)

    def settings(params: Params) -> ModelSettings:
        chosen = settings_of(params, access.ref)
        chosen["extra_headers"] = {"user-agent": f"postroom/{__version__}"}
        return chosen

    return Fitting(model, "google", settings, lambda _: True, http.aclose, _REHEARSAL)


_REHEARSAL = b"""data: {"candidates":[{"content":{"role":"model","parts":[{"text":"-"}]},\
"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":1,"candidatesTokenCount":1}}

"""
