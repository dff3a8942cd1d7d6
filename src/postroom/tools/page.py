"""An HTML page as text to read: headings, lists, links and code survive, the rest is left out.

Also a program: it reads UTF-8 HTML on standard input and writes text. The parser's time is not
bounded by its input's size on hostile pages, so a tool runs it in a process that can be stopped.
It needs nothing but the standard library.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

_UNSEEN = {"script", "style", "noscript", "template", "svg", "iframe", "object", "canvas"}
_BLOCK = {
    *("address", "article", "aside", "blockquote", "body", "dd", "details", "div", "dl", "dt"),
    *("fieldset", "figcaption", "figure", "footer", "form", "header", "hr", "main", "nav", "ol"),
    *("p", "section", "summary", "table", "tbody", "thead", "tfoot", "ul"),
}
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_SPACE = re.compile(r"[ \t\r\n\f]+")
_GAPS = re.compile(r"\n{3,}")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.out: list[str] = []
        self._unseen = 0
        self._pre = 0
        self._in_title = False
        self._links: list[tuple[str, int]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_title = False  # a title that was never closed ends at the next tag
        if tag in _UNSEEN:
            self._unseen += 1
        elif self._unseen:
            return
        elif tag == "title":
            self._in_title = True
        elif tag in _HEADINGS:
            self._break(2)
            self.out.append(_HEADINGS[tag])
        elif tag == "li":
            self._break(1)
            self.out.append("- ")
        elif tag == "br":
            self._break(1)
        elif tag == "pre":
            self._break(2)
            self.out.append("```\n")
            self._pre += 1
        elif tag in ("td", "th"):
            self.out.append(" | ")
        elif tag == "tr":
            self._break(1)
        elif tag in _BLOCK:
            self._break(2)
        elif tag == "a":
            self._links.append((dict(attrs).get("href") or "", len(self.out)))
        elif tag == "img":
            alt = (dict(attrs).get("alt") or "").strip()
            if alt:
                self.out.append(f"[image: {alt}]")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # A self-closing <script/> or <svg/> opens nothing that an end tag would close.
        if tag not in _UNSEEN:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in _UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        elif self._unseen:
            return
        elif tag == "title":
            self._in_title = False
        elif tag == "pre" and self._pre:
            self._pre -= 1
            self._break(1)
            self.out.append("```")
            self._break(2)
        elif tag in _HEADINGS or tag in _BLOCK:
            self._break(2)
        elif tag == "a" and self._links:
            self._close_link(*self._links.pop())

    def _close_link(self, href: str, start: int) -> None:
        text = _SPACE.sub(" ", "".join(self.out[start:])).strip()
        if text and href and not href.startswith(("#", "javascript:")) and text != href:
            self.out[start:] = [f"[{text}]({href})"]

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if self._in_title:
            self.title.append(data)
        elif self._pre:
            self.out.append(data)
        else:
            text = _SPACE.sub(" ", data)
            at_start = not self.out or self.out[-1].endswith(("\n", " "))
            text = text.lstrip(" ") if at_start else text
            if text:
                self.out.append(text)

    def _break(self, lines: int) -> None:
        if self.out:
            self.out.append("\n" * lines)


def readable(html: str) -> str:
    """The page's title, then its text."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    title = _SPACE.sub(" ", "".join(reader.title)).strip()
    body = "\n".join(line.rstrip() for line in "".join(reader.out).split("\n"))
    body = _GAPS.sub("\n\n", body).strip()
    return f"{title}\n\n{body}".strip() if title else body


if __name__ == "__main__":
    text = readable(sys.stdin.buffer.read().decode("utf-8", "replace"))
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
