"""What goes wrong in the provider library, as a `ModelError`.

By tables of exception names, so that nothing of the library is imported here. A name's word is
first what the library has understood of the error (it reads each provider's own codes); where it
has no word, the HTTP status and the body decide, as for every other adapter. Nothing that the
library writes of an exception is repeated: its texts may hold whole bodies. What is told is the
provider's own message, shortened and without secrets.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeGuard

from postroom.errors import ModelError, ModelErrorKind
from postroom.models.failures import Answer, failure, read_error, request_id, retry_after_ms

if TYPE_CHECKING:
    from postroom.models.providers import Access

# The library's own, by class. None: the status and the body say what it is.
KINDS: dict[str, ModelErrorKind | None] = {
    "ModelRateLimitError": "rate_limit",
    "ModelQuotaExceededError": "quota",
    "ModelUnavailableError": "server",
    "ModelOverloadedError": "server",
    "ModelServerError": "server",
    "ModelTimeoutError": "timeout",
    "ModelRequestTimeout": "timeout",
    "ModelConnectionError": "transport",
    "ModelContextWindowExceededError": "context_overflow",
    "ModelAuthenticationError": "auth",
    "ModelNotFoundError": "bad_request",
    "ModelRequestRejectedError": None,
    "ModelHTTPError": None,
    "ModelAPIError": None,
    "ContentFilterError": "refused",
    "UnexpectedModelBehavior": "server",
    "UserError": "bad_request",
}

# Those of agents, tools, fallbacks and conversations of the library, none of which is used here.
NOT_OURS = frozenset(
    {
        "AgentRunError",
        "ApprovalRequired",
        "CallDeferred",
        "ConcurrencyLimitExceeded",
        "FallbackExceptionGroup",
        "IncompleteToolCall",
        "ModelRetry",
        "OutputTokenLimitExceeded",
        "RetryModelRequest",
        "RunCancelled",
        "RunTimedOut",
        "SkipModelRequest",
        "SkipToolExecution",
        "SkipToolValidation",
        "SuspendedResponseExpired",
        "ToolFailed",
        "ToolFailedError",
        "ToolRetryError",
        "UndrainedPendingMessagesError",
        "UsageLimitExceeded",
    }
)

# Those of the SDKs and HTTP libraries below it, where one of them comes through as it is.
BELOW: dict[tuple[str, str], ModelErrorKind] = {
    ("httpx2", "TimeoutException"): "timeout",
    ("httpx2", "TransportError"): "transport",
    ("httpx2", "StreamError"): "transport",
    ("httpx2", "HTTPError"): "server",
    ("httpx2", "InvalidURL"): "bad_request",
    ("anthropic", "APITimeoutError"): "timeout",
    ("anthropic", "APIConnectionError"): "transport",
    ("anthropic", "CredentialsError"): "auth",
    ("anthropic", "AnthropicError"): "server",
    ("google", "APIError"): "server",
    ("google", "UnknownApiResponseError"): "server",
    ("google", "ContinuationInterruptedError"): "transport",
    ("botocore", "ReadTimeoutError"): "timeout",
    ("botocore", "ConnectTimeoutError"): "timeout",
    ("botocore", "HTTPClientError"): "transport",
    ("botocore", "ConnectionError"): "transport",
    ("botocore", "NoCredentialsError"): "auth",
    ("botocore", "PartialCredentialsError"): "auth",
    ("botocore", "CredentialRetrievalError"): "auth",
    ("botocore", "TokenRetrievalError"): "auth",
    ("botocore", "NoAuthTokenError"): "auth",
    ("botocore", "SSOError"): "auth",
    ("botocore", "ProfileNotFound"): "auth",
    ("botocore", "BotoCoreError"): "bad_request",
    ("botocore", "ClientError"): "server",
    ("urllib3", "TimeoutError"): "timeout",
    ("urllib3", "HTTPError"): "transport",
}


class Seen(Protocol):
    """What is known of the answer: `providers_wire.Exchange`."""

    sent: bool
    status: int | None
    headers: Mapping[str, str]


def kind_of_exception(error: BaseException) -> ModelErrorKind | None:
    """By the most special class that a table names; None: the status decides, or nothing does."""
    for cls in type(error).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "pydantic_ai" and cls.__name__ in KINDS:
            # Those that came with a status are of two classes: the one with a word is asked.
            kind = KINDS[cls.__name__]
            if kind is not None:
                return kind
        elif (package, cls.__name__) in BELOW:
            return BELOW[package, cls.__name__]
    return None


def told(error: Exception, seen: Seen, access: Access, now_ms: int) -> ModelError:
    """The error as ours."""
    if seen.status == 200 and not _is_stream(seen):
        return unfinished(access, seen)
    kind = kind_of_exception(error)
    if kind in ("timeout", "transport") and seen.status in (None, 200):
        return _trouble(error, kind, access, seen)
    status = seen.status if seen.status != 200 else None
    if status is None:
        named = getattr(error, "status_code", None)
        status = named if isinstance(named, int) else None
    headers = seen.headers or getattr(error, "headers", None) or {}
    wait = retry_after_ms(headers, now_ms)
    asked = getattr(error, "retry_after", None)
    if wait is None and isinstance(asked, int | float):
        wait = round(asked * 1000)
    answer, hint = _answer(error, status, headers, access)
    if kind is None and status is None and not _is_of_library(error):
        # Before anything was sent the request is at fault, after that whatever came back.
        kind = "server" if seen.sent else "bad_request"
    return failure(
        access.ref,
        answer,
        status=status,
        retry_after_ms=wait,
        request_id=request_id_of(headers),
        key_variable=access.key_variable,
        hint=hint,
        secrets=access.secrets,
        kind=kind,
    )


def unfinished(access: Access, seen: Seen) -> ModelError:
    """A stream that ended before the provider said why the reply ends."""
    if not _is_stream(seen):
        html = "html" in seen.headers.get("content-type", "")
        what = "a page of HTML" if html else "no event stream"
        return ModelError(
            f"{access.shown} answered with {what} instead of a completion",
            kind="bad_request" if html else "server",
            status=seen.status,
            request_id=request_id_of(seen.headers),
            hint=access.check,
        )
    return ModelError(
        f"the stream of {access.ref} ended before the reply did",
        kind="transport",
        request_id=request_id_of(seen.headers),
    )


def _is_stream(seen: Seen) -> bool:
    return not seen.headers or "event" in seen.headers.get("content-type", "")


def broken_off(access: Access, reason: str, seen: Seen) -> ModelError:
    """A reply that the provider itself gave up."""
    return ModelError(
        f"{access.ref} broke its reply off: {reason}",
        kind="server",
        request_id=request_id_of(seen.headers),
    )


def _is_of_library(error: Exception) -> bool:
    return any(
        cls.__module__.startswith("pydantic_ai") and cls.__name__ in KINDS
        for cls in type(error).__mro__
    )


def _answer(
    error: Exception, status: int | None, headers: Mapping[str, str], access: Access
) -> tuple[Answer, str | None]:
    """What the provider said, and a hint where the address may be what is wrong."""
    if status is not None and 300 <= status < 400:
        target = headers.get("location", "").partition("?")[0]
        return Answer(f"a redirect to {target}" if target else "a redirect"), access.check
    hint = f"check the model's name, and {access.check}" if status == 404 else None
    body = getattr(error, "body", None)
    if _is_object(body):
        inner = body.get("Error")
        answer = read_error({"error": _lowered(inner)} if _is_object(inner) else body)
        message = answer.message or ""
        if message.lstrip().startswith("<"):
            answer = Answer("a page of HTML")
        elif not message and answer.code is None and answer.type is None:
            answer = Answer(_code(error))
        return answer, hint
    if isinstance(body, str) and body:
        return Answer("a page of HTML" if body.lstrip().startswith("<") else body), hint
    if status is not None:
        return Answer(_code(error)), hint
    if _is_of_library(error):
        return Answer("the provider library could not use the answer"), hint
    return Answer(f"the provider library failed with {type(error).__name__}"), hint


def _code(error: Exception) -> str | None:
    code = getattr(error, "provider_error_code", None) or getattr(
        error, "provider_error_type", None
    )
    return code if isinstance(code, str) else None


def _lowered(error: dict[str, object]) -> dict[str, object]:
    """AWS writes ``Code`` and ``Message``."""
    return {name.lower(): value for name, value in error.items()}


def request_id_of(headers: Mapping[str, str]) -> str | None:
    return request_id(headers) or headers.get("x-amzn-requestid")


def _trouble(
    error: Exception, kind: ModelErrorKind | None, access: Access, seen: Seen
) -> ModelError:
    """No connection, one that broke, or one on which nothing came."""
    text, hint = f"the connection to {access.ref} broke", None
    phase = getattr(error, "phase", None)
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if kind == "timeout":
        if phase in ("connect", "pool"):
            text = f"no connection to {access.shown} within {access.connect_timeout_s} s"
            hint = f"{access.check} and the network"
        else:
            text = f"{access.ref} sent nothing for {access.idle_timeout_ms / 1000:g} s"
    elif "ProxyError" in names:
        text = f"the proxy on the way to {access.shown} failed"
        hint = "check HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
    elif any(isinstance(cause, socket.gaierror) for cause in causes):
        text = f"cannot find the host {access.host}"
        hint = f"{access.check} and the network"
    elif tls := next((c for c in causes if isinstance(c, ssl.SSLError)), None):
        reason = getattr(tls, "verify_message", None) or tls.reason or "the handshake failed"
        text = f"no secure connection to {access.shown}: {str(reason).replace('_', ' ').lower()}"
        hint = f"{access.check}, this machine's clock and its certificates"
    elif phase == "connect":
        text = f"cannot connect to {access.shown}"
        hint = f"is the server running? if it is, {access.check}"
    elif not seen.headers and "RemoteProtocolError" in names:
        text = f"{access.ref} closed the connection without an answer"
    return ModelError(
        text, kind=kind or "transport", hint=hint, request_id=request_id_of(seen.headers)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of, the newest first; at most so many."""
    for _ in range(20):
        if error is None:
            return
        yield error
        if isinstance(error, BaseExceptionGroup):
            inner: tuple[BaseException, ...] = error.exceptions  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            yield from inner
        error = error.__cause__ or error.__context__


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)
