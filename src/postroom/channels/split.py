"""Cuts text to a platform's measure."""

from __future__ import annotations

from postroom.ports.channel import Unit


def split(text: str, limit: int, unit: Unit) -> list[str]:
    if len(text.encode("utf-16-le", "surrogatepass")) <= limit:
        return [text]
    return [text[at : at + limit // 4] for at in range(0, len(text), limit // 4)]
