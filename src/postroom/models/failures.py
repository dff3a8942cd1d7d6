"""What a model's server says when it refuses or fails, as a `ModelError`.

By tables: the codes that providers give, then the HTTP status, then what the message says. The
error's text is the server's own, shortened and with every secret taken out; no request body is
ever part of it.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import msgspec

from postroom.errors import ModelError, ModelErrorKind

MESSAGE_CHARS_MAX = 500
WEEK_S = 7 * 24 * 3600  # a longer wait than this is no sensible answer

# Codes and types that say more than the status they come with.
_EXACT: dict[str, ModelErrorKind] = {
    "insufficient_quota": "quota",
    "insufficient_balance": "quota",
    "insufficient_credits": "quota",
    "quota_exceeded": "quota",
    "billing_hard_limit_reached": "quota",
    "billing_not_active": "quota",
    "exceeded_current_quota_error": "quota",
    "context_length_exceeded": "context_overflow",
    "exceed_context_size_error": "context_overflow",
    "request_too_large": "context_overflow",
    "content_filter": "refused",
    "content_policy_violation": "refused",
    "content_policy": "refused",
    "moderation": "refused",
    "rate_limit_exceeded": "rate_limit",
    "invalid_api_key": "auth",
}

_STATUS: dict[int, ModelErrorKind] = {
    401: "auth",
    402: "quota",
    403: "auth",
    407: "auth",
    408: "timeout",
    409: "server",
    413: "context_overflow",
    425: "server",
    429: "rate_limit",
}

# Codes for where no status says it (inside a stream, in a script); our own kinds too.
_GENERAL: dict[str, ModelErrorKind] = {
    "rate_limit": "rate_limit",
    "rate_limit_error": "rate_limit",
    "too_many_requests": "rate_limit",
    "server": "server",
    "server_error": "server",
    "api_error": "server",
    "internal_server_error": "server",
    "overloaded_error": "server",
    "service_unavailable": "server",
    "timeout": "timeout",
    "timeout_error": "timeout",
    "transport": "transport",
    "empty": "empty",
    "auth": "auth",
    "authentication_error": "auth",
    "permission_error": "auth",
    "bad_request": "bad_request",
    "invalid_request_error": "bad_request",
    "badrequesterror": "bad_request",
    "not_found_error": "bad_request",
    "model_not_found": "bad_request",
    "quota": "quota",
    "context_overflow": "context_overflow",
    "refused": "refused",
}

_TOO_LONG = re.compile(
    r"maximum context length|context length (of|exceed)|exceed\w*.{0,40}context|context window"
    r"|context size|greater than the context|prompt is too long|too many (input )?tokens"
    r"|reduce the length of the",
    re.IGNORECASE,
)

_HINTS: dict[ModelErrorKind, str] = {
    "auth": "check the key in {key}",
    "quota": "check the account's balance and limits with the provider",
}


class Answer(msgspec.Struct, frozen=True):
    """What an error says of itself; None where it says nothing."""

    message: str | None = None
    code: str | None = None
    type: str | None = None
    status: int | None = None


def kind_of(status: int | None, code: str | None, type_: str | None, text: str) -> ModelErrorKind:
    """The kind of an error. ``status`` None: it came inside a stream, or from no server."""
    for name in (code, type_):
        if name is not None and (kind := _EXACT.get(name.lower())) is not None:
            return kind
    if status in (None, 400, 422, 500) and _TOO_LONG.search(text):
        return "context_overflow"
    if status is not None:
        if (kind := _STATUS.get(status)) is not None:
            return kind
        if 300 <= status < 500:
            return "bad_request"
        return "server"
    for name in (code, type_):
        if name is not None and (kind := _GENERAL.get(name.lower())) is not None:
            return kind
    return "server"


def read_error(value: object) -> Answer:
    """Reads an error object as providers shape it.

    ``{"error": {…}}``, ``{"error": "…"}``, ``{"message": …}``, ``{"detail": …}``, or a list of
    one of these.
    """
    if _is_list(value) and value:
        value = value[0]
    if not _is_object(value):
        return Answer(value if isinstance(value, str) else None)
    inner = value.get("error", value)
    if not _is_object(inner):
        return Answer(inner if isinstance(inner, str) else None)
    message = inner.get("message", inner.get("detail"))
    if message is not None and not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    code = inner.get("code")
    status = code if isinstance(code, int) and 100 <= code < 600 else None
    if isinstance(code, str) and code.isdigit() and len(code) == 3:
        status = int(code)
    metadata = inner.get("metadata")
    if _is_object(metadata):
        raw = metadata.get("raw")
        if isinstance(raw, str):
            message = f"{message}: {raw}"
        if metadata.get("reasons"):
            return Answer(message, "moderation", None, status)
    type_ = inner.get("type")
    return Answer(
        message,
        code if isinstance(code, str) else None,
        type_ if isinstance(type_, str) else None,
        status,
    )


def failure(
    ref: str,
    answer: Answer,
    *,
    status: int | None = None,
    retry_after_ms: int | None = None,
    request_id: str | None = None,
    key_variable: str | None = None,
    hint: str | None = None,
    secrets: Sequence[str] = (),
    kind: ModelErrorKind | None = None,
) -> ModelError:
    """The error for an answer with this HTTP status (None: inside a stream that had begun).

    ``kind`` None: as the answer's codes, status and text say.
    """
    status = status or answer.status
    text = cleaned(answer.message or "", secrets)
    kind = kind or kind_of(status, answer.code, answer.type, text)
    said = f"{ref} answered {status}" if status is not None else f"{ref} failed"
    told = text or answer.code or answer.type
    if kind == "auth" and key_variable is None:
        hint = hint or "check the key"
    elif kind in _HINTS:
        hint = hint or _HINTS[kind].format(key=key_variable)
    return ModelError(
        f"{said}: {told}" if told else said,
        kind=kind,
        status=status,
        retry_after_ms=retry_after_ms,
        request_id=request_id,
        hint=hint,
    )


_KEY = re.compile(r"\b(?:sk|pk|gsk|xai|key|tgp)[-_][A-Za-z0-9_*.-]{6,}|(?i:bearer)\s+[^\s\"',}]+")


def cleaned(text: str, secrets: Sequence[str]) -> str:
    """One short line without secrets: the given ones, and whatever looks like a key."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "[key]")
    text = _KEY.sub("[key]", " ".join(text.split()))
    text = "".join([c if c.isprintable() else "\ufffd" for c in text])
    if len(text) > MESSAGE_CHARS_MAX:
        text = text[: MESSAGE_CHARS_MAX - 1] + "…"
    return text


def retry_after_ms(headers: Mapping[str, str], now_ms: int) -> int | None:
    """How long the server asks to wait; None if it does not say.

    ``retry-after-ms``, then ``Retry-After`` in seconds or as an HTTP date (RFC 9110 §10.2.3),
    measured against the server's own ``Date`` where it gives one. ``headers`` ignores case.
    """
    wait = _number(headers.get("retry-after-ms"), WEEK_S * 1000)
    if wait is not None:
        return round(wait)
    value = headers.get("retry-after")
    wait = _number(value, WEEK_S)
    if wait is not None:
        return round(wait * 1000)
    until = _date_ms(value)
    if until is None:
        return None
    return max(0, until - (_date_ms(headers.get("date")) or now_ms))


def request_id(headers: Mapping[str, str]) -> str | None:
    for name in ("x-request-id", "request-id", "x-generation-id"):
        if value := headers.get(name):
            return value[:200]
    return None


def _number(value: str | None, maximum: float) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number <= maximum else None


def _date_ms(value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(email.utils.parsedate_to_datetime(value).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


def _is_object(value: object) -> TypeGuard[dict[str, object]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)
