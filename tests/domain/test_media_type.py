"""What bytes are: told by the bytes, and by their sender only where they say nothing."""

from __future__ import annotations

import pytest

from postroom.domain.media_type import media_type

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
STRANGE = bytes(range(128, 256)) * 4


@pytest.mark.parametrize(
    ("head", "said", "kind"),
    [
        (PNG, None, "image/png"),
        (PNG, "text/plain", "image/png"),
        (PNG, "image/jpeg", "image/png"),
        (b"%PDF-1.7\n", "text/plain", "application/pdf"),
        (b"hello", None, "text/plain"),
        (b"", None, "text/plain"),
        (b"a;b\n", "text/csv", "text/csv"),
        (b"{}", "application/JSON; charset=utf-8", "application/json"),
        (b"<svg/>", "image/svg+xml", "image/svg+xml"),
        (b"hello", "image/png", "text/plain"),
        (b"hello", "application/octet-stream", "text/plain"),
        (STRANGE, None, "application/octet-stream"),
        (STRANGE, "application/vnd.own", "application/vnd.own"),
        (STRANGE, "image/png", "application/octet-stream"),
        (STRANGE, "text/html", "application/octet-stream"),
        (STRANGE, "", "application/octet-stream"),
        (STRANGE, "application/x\r\nset-cookie: a", "application/octet-stream"),
        (STRANGE, "../../etc", "application/octet-stream"),
    ],
)
def test_the_bytes_decide_and_their_sender_fills_in(
    head: bytes, said: str | None, kind: str
) -> None:
    assert media_type(head, said) == kind
