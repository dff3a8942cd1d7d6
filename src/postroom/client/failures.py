"""Turns an error of the protocol back into the exception it was: the server's table, read backwards.

The name in its data is the most exact; a name that this version does not know falls back to the
nearest kind its number stands for.
"""

from __future__ import annotations

from collections.abc import Iterator

from postroom import errors
from postroom.wire.protocol import CODES, INVALID_PARAMS, METHOD_NOT_FOUND
from postroom.wire.rpc import RpcError

# Those that take more than a message do not come as errors of a call, but `InvalidContent`.
_OF_THE_CLIENT = (errors.ModelError, errors.RunTimeout, errors.Disconnected)


def _leaves(root: type[errors.PostroomError]) -> Iterator[type[errors.PostroomError]]:
    yield root
    for cls in root.__subclasses__():
        if cls.__module__ == errors.__name__:
            yield from _leaves(cls)


_BY_NAME: dict[str, type[errors.PostroomError]] = {
    cls.code: cls
    for cls in _leaves(errors.PostroomError)
    if not issubclass(cls, (*_OF_THE_CLIENT, errors.InvalidContent))
} | {
    # What only the protocol can say, by what its caller has to do about it.
    "shutting_down": errors.StoreClosed,
    "unsupported_version": errors.UsageError,
    "unauthorized": errors.ConfigError,
    "frame_too_large": errors.InputError,
    "not_yours": errors.InputError,
    "not_asked": errors.InputError,
    "invalid_params": errors.InputError,
    "method_not_found": errors.UsageError,
}
_NAMES = {number: name for name, number in CODES.items()} | {
    INVALID_PARAMS: "invalid_params",
    METHOD_NOT_FOUND: "method_not_found",
}


def as_error(error: RpcError) -> errors.PostroomError:
    """The exception of `postroom.errors`; the root of them where nothing else fits."""
    name, hint = error.data.code, error.data.hint
    if errors.InvalidContent.code in (name, _NAMES.get(error.number)):
        path = error.data.path or "content"
        return errors.InvalidContent(error.message.removeprefix(f"{path}: "), path=path, hint=hint)
    kind = _BY_NAME.get(name) or _BY_NAME.get(_NAMES.get(error.number, ""), errors.PostroomError)
    return kind(error.message, hint=hint)
