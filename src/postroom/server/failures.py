"""Turns what went wrong into an error of the protocol: a number, a stable name, a hint, a path."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from postroom.errors import InvalidContent, PostroomError, StoreClosed
from postroom.wire.protocol import CODES, INVALID_PARAMS, ErrorData, Params
from postroom.wire.rpc import RpcError

P = TypeVar("P", bound=Params)

_AT = re.compile(r"(?P<said>.*?)(?: - at `\$(?P<at>.*)`)?\Z", re.DOTALL)
_FIELD = re.compile(
    r"Object (?:missing required|contains unknown) field `(?P<name>.*)`\Z", re.DOTALL
)


def as_rpc_error(error: PostroomError) -> RpcError:
    """An error of ours by its own code, or by that of the nearest kind of error that has a number."""
    if isinstance(error, StoreClosed):
        return refused("shutting_down", "the runtime is shutting down")
    kind = next(
        cls.code
        for cls in type(error).__mro__
        if issubclass(cls, PostroomError) and cls.code in CODES
    )
    path = error.path if isinstance(error, InvalidContent) else None
    return RpcError(CODES[kind], error.message, ErrorData(error.code, error.hint, path))


def refused(
    code: str,
    message: str,
    *,
    hint: str | None = None,
    path: str | None = None,
    versions: tuple[int, ...] = (),
) -> RpcError:
    return RpcError(CODES[code], message, ErrorData(code, hint, path, versions))


def read_params(decoder: msgspec.json.Decoder[P], raw: bytes) -> P:
    """The parameters of a method, checked.

    Raises:
        RpcError: they are none; its data names the path of the bad field, as ``client.name``.
    """
    try:
        return decoder.decode(raw or b"{}")
    except msgspec.ValidationError as error:
        matched = _AT.match(str(error))
        assert matched is not None
        path = (matched["at"] or "").lstrip(".")
        field = _FIELD.match(matched["said"])
        if field is not None:
            path = f"{path}.{field['name']}" if path else field["name"]
        said = f"{path}: {matched['said']}" if path else matched["said"]
        raise _invalid(said, path or None) from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _invalid(str(error), None) from None


def _invalid(message: str, path: str | None) -> RpcError:
    return RpcError(INVALID_PARAMS, message, ErrorData("invalid_params", None, path))
