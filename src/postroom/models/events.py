"""Server-sent events, read from bytes as they come.

Framing only: it knows lines, comments and the ``data`` field, not what the data says. The bytes
may be split anywhere, in the middle of a character too; lines may end in LF, CRLF or CR. The
``event``, ``id`` and ``retry`` fields are passed over: no model's server says anything in them
that its data does not say.
"""

from __future__ import annotations

EVENT_BYTES_MAX = 32 * 1024 * 1024


class EventTooLarge(Exception):
    """One event is larger than ``EVENT_BYTES_MAX``."""


class EventReader:
    """Takes bytes, gives the data of each event that they complete."""

    __slots__ = ("_cr", "_data", "_held", "_held_bytes")

    def __init__(self) -> None:
        self._held: list[bytes] = []  # the line begun so far, in pieces
        self._held_bytes = 0
        self._data: bytes | None = None  # the event begun so far
        self._cr = False  # the last byte was a CR that ended a line: an LF now belongs to it

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in these bytes, in order.

        Raises:
            EventTooLarge: an event goes past the limit.
        """
        if self._cr or b"\r" in data:
            data = self._newlines(data)
        end = data.rfind(b"\n")
        if end < 0:
            self._hold(data)
            return []
        lines = data[:end]
        if self._held:
            self._held.append(lines)
            lines = b"".join(self._held)
            self._held.clear()
            self._held_bytes = 0
        if end + 1 < len(data):
            self._hold(data[end + 1 :])
        return self._take(lines.split(b"\n"))

    def close(self) -> list[bytes]:
        """What was left when the stream ended: its last line break may be missing."""
        lines = [b"".join(self._held), b""]
        self._held.clear()
        return self._take(lines)

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        pending = self._data
        for line in lines:
            if line.startswith(b"data:"):
                value = line[6:] if line[5:6] == b" " else line[5:]
                if pending is None:
                    pending = value
                else:
                    pending += b"\n" + value
                    if len(pending) > EVENT_BYTES_MAX:
                        raise EventTooLarge
            elif not line and pending is not None:
                events.append(pending)
                pending = None
        self._data = pending
        return events

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > EVENT_BYTES_MAX:
            raise EventTooLarge

    def _newlines(self, data: bytes) -> bytes:
        if self._cr and data.startswith(b"\n"):
            data = data[1:]
        self._cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
