"""Amazon Bedrock's Converse API, through the provider library.

The SDK is synchronous and has an HTTP client of its own: the library calls it on threads, and
`Exchange` is kept by the SDK's events instead of a transport. Region and credentials are the
SDK's business (environment, shared files, roles), but for a bearer token and a base URL.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import boto3
from botocore.config import Config
from botocore.session import Session
from botocore.tokens import FrozenAuthToken
from pydantic_ai.models.bedrock import BedrockConverseModel
from pydantic_ai.providers.bedrock import BedrockProvider
from pydantic_ai.settings import ModelSettings

from postroom.domain.event import Params
from postroom.models.providers import Access
from postroom.models.providers_library import Fitting, settings_of
from postroom.models.providers_wire import Record, current


def fit(access: Access) -> Fitting:
    env = access.env
    config: dict[str, Any] = {
        "read_timeout": access.idle_timeout_ms / 1000,
        "connect_timeout": access.connect_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 100,
    }
    if access.key is not None:
        config["signature_version"] = "bearer"
    session = boto3.Session(
        botocore_session=_BearerSession(access.key) if access.key is not None else None,
        aws_access_key_id=env.get("AWS_ACCESS_KEY_ID") if access.key is None else None,
        aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY") if access.key is None else None,
        aws_session_token=env.get("AWS_SESSION_TOKEN") if access.key is None else None,
        region_name=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
        profile_name=env.get("AWS_PROFILE") or None,
    )
    client = cast(
        "Any",
        session.client("bedrock-runtime", config=Config(**config), endpoint_url=access.base_url),
    )
    client.meta.events.register_last("before-call.bedrock-runtime.ConverseStream", _before)
    client.meta.events.register("after-call.bedrock-runtime.ConverseStream", _after)
    model = BedrockConverseModel(access.name, provider=BedrockProvider(bedrock_client=client))
    profile = cast("Mapping[str, object]", model.profile)

    def settings(params: Params) -> ModelSettings:
        chosen = settings_of(params, access.ref)
        chosen["cache"] = True  # where the model can; the library knows
        if chosen.get("thinking"):
            chosen.pop("temperature", None)
        return chosen

    def seals_back(params: Params) -> bool:
        if params.reasoning_effort == "none":
            return False
        return bool(profile.get("bedrock_send_back_thinking_parts"))

    async def aclose() -> None:
        # Closing the client only forgets the pools: idle connections would stay until collected.
        pools = client._endpoint.http_session._manager.pools
        for pool in [pools[key] for key in pools.keys()]:  # noqa: SIM118 (no mapping: no iteration)
            pool.close()
        client.close()

    return Fitting(model, "bedrock", settings, seals_back, aclose)


def _before(params: dict[str, Any], **_: object) -> None:
    """The body is made, nothing is signed yet."""
    exchange = current.get()
    exchange.begin(Record(params["body"]))
    if exchange.record is not None:
        params["body"] = exchange.record.body


def _after(http_response: Any, **_: object) -> None:
    exchange = current.get()
    exchange.status = http_response.status_code
    exchange.headers = {str(k).lower(): str(v) for k, v in http_response.headers.items()}


class _BearerSession(Session):
    """A session whose only credential is a Bedrock API key."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def get_auth_token(self, **_: object) -> FrozenAuthToken:
        return FrozenAuthToken(self._token)

    def get_credentials(self) -> None:
        return None
