"""The protocol as JSON Schema, made from its types: what both SDKs are generated from."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from postroom.domain.event import TYPES, Event
from postroom.wire.protocol import (
    CLIENT_METHODS,
    CODES,
    FRAME_BYTES_MAX,
    METHODS,
    NOTIFICATIONS,
    STANDARD,
    VERSION,
    VERSIONS,
    ErrorData,
    EventNote,
)

_WIRE, _EVENT = EventNote.__module__, Event.__module__
_REF = "#/$defs/{name}"


def schema() -> dict[str, Any]:
    """One document: ``methods``, ``clientMethods``, ``notifications``, ``events``, ``errors``, ``$defs``.

    A method names its ``params`` and ``result``, an event type its ``data``, all by reference.
    """
    types: list[Any] = [t for pair in METHODS.values() for t in pair]
    types += [t for pair in CLIENT_METHODS.values() for t in pair]
    types += [*NOTIFICATIONS.values(), ErrorData, *TYPES.values()]
    references, components = msgspec.json.schema_components(
        types, ref_template=_REF, schema_hook=_hook
    )
    by_type = dict(zip(map(id, types), references, strict=True))

    def pairs(methods: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {"params": by_type[id(params)], "result": by_type[id(answer)]}
            for name, (params, answer) in methods.items()
        }

    return _plain(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "The Postroom protocol",
            "version": VERSION,
            "versions": list(VERSIONS),
            "frameBytesMax": FRAME_BYTES_MAX,
            "methods": pairs(METHODS),
            "clientMethods": pairs(CLIENT_METHODS),
            "notifications": {name: by_type[id(t)] for name, t in NOTIFICATIONS.items()},
            "events": {name: by_type[id(t)] for name, t in TYPES.items()},
            "errorData": by_type[id(ErrorData)],
            "errors": {**STANDARD, **CODES},
            "$defs": components,
        }
    )


def schema_text() -> str:
    """As it is printed and checked in: stable, indented, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """Where a message and an event share a name, the event's gets ``Data`` at its end."""
    text = msgspec.json.encode(document).decode()
    text = re.sub(rf'(["/]){re.escape(_WIRE)}\.(\w+)"', r'\1\2"', text)
    text = re.sub(rf'(["/]){re.escape(_EVENT)}\.(\w+)"', r'\1\2Data"', text)
    return msgspec.json.decode(text)


def _hook(kind: type) -> dict[str, Any]:
    if kind is msgspec.Raw:
        return {}  # any JSON
    raise NotImplementedError
