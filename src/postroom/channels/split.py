"""Cuts a text into messages that a platform takes, and reads it back together.

It is not a renderer: it changes no character of the source, and only adds. A code fence that is cut
in two is closed at the end of one part and opened again at the start of the next; nothing else is
added. A fence is a line of at most three spaces and three or more backticks or tildes, as CommonMark
has it outside lists and quotes. One whose repeated lines would take more than a quarter of the
limit is cut like any other text, so that every part has half of the limit for the text itself.

What is added, and how `join` knows it:

- cut after a line's end: the closing line, as long as the opening one and without a line end; then,
  in the next part, the opening line and a newline;
- cut within a line: the same, but with a newline before the closing line, which is one character
  longer.

Of a fence that is open, a part can end in such a line, and the next begin with the opening one, for
no other reason: a cut that would look so by chance is made one character earlier.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import msgspec

from postroom.ports.channel import Unit

_LIMIT_MIN = 4  # units: any one code point fits
_TRIES = 16  # places of one kind that are looked at before a worse kind will do
_LARGEST: dict[Unit, int] = {"codepoint": 1, "utf16": 2, "utf8": 4}

_RUN = re.compile(r"(`{3,}|~{3,})([^\r\n]*)")
_BEGINS = re.compile(r" {0,3}(?:`{3,}|~{3,})")
_MAY_BEGIN = re.compile(r" {0,3}(?:`{0,2}|~{0,2})\Z")
_OPENS = re.compile(r" {0,3}(?:`{3,}[^`\r\n]*(?=[\r\n]|\Z)|~{3,})")
_CLOSES = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(?=[\r\n]|\Z)")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*[ \t]+|[。！？]+")
_WORD = re.compile(r"[ \t]+")


def split(text: str, limit: int, unit: Unit) -> list[str]:
    """The text as parts of at most ``limit`` units each, in order.

    What fits is one part, as it is, and so is the empty text: a message without text is still one.
    A part ends, where it can, at a paragraph, else at a line, a sentence, a word, and never inside
    a grapheme, unless that alone is longer than a part's room: then between its code points. No
    part is blank while the source has no longer run of blanks than a part.

    Raises:
        ValueError: the limit is under 4 units, less than one character may need.
    """
    if limit < _LIMIT_MIN:
        raise ValueError(f"a limit of {limit} units does not hold every character")
    if len(text) <= limit and (
        len(text) * _LARGEST[unit] <= limit or text.isascii() or _size(text, unit) <= limit
    ):
        return [text]
    return _Splitter(text, limit, unit).parts()


def join(parts: list[str]) -> str:
    """The source of what `split` gave: without the lines that it added, as the module says."""
    source: list[str] = []
    reader = _Reader()
    added = ""
    for index, part in enumerate(parts):
        following = parts[index + 1] if index + 1 < len(parts) else None
        body = part.removeprefix(added)
        added = ""
        end = max(body.rfind("\n"), body.rfind("\r")) + 1
        last = body[end:]
        if following is not None and end and _BEGINS.match(last):
            fence = reader.after(body[:end])
            if fence is not None and last in fence.endings and following.startswith(fence.again):
                added = fence.again
                body = body[: end - (last != fence.closing)]
        reader.read(body)
        source.append(body)
    return "".join(source)


class _Fence(msgspec.Struct, frozen=True):
    """An open fence. ``indent`` and ``run`` are its opening line's, ``info`` what follows there."""

    indent: str
    run: str
    info: str

    @property
    def closing(self) -> str:
        return self.indent + self.run

    @property
    def endings(self) -> tuple[str, str]:
        return self.closing, self.closing + self.run[0]

    @property
    def again(self) -> str:
        return f"{self.indent}{self.run}{self.info}\n"

    @property
    def added(self) -> str:
        """The most that one cut adds to the parts on its sides."""
        return f"{self.again}\n{self.endings[1]}"

    def closes(self, run: str) -> bool:
        return run.startswith(self.run)


class _Mark(msgspec.Struct, frozen=True):
    """A line that opens or closes a fence, from ``start`` to ``end`` (before its line end)."""

    start: int
    end: int
    before: _Fence | None
    after: _Fence | None


def _marks(text: str, fence: _Fence | None = None) -> Iterator[_Mark]:
    """The lines that open or close a fence, where ``fence`` is open at the start."""
    for found in _RUN.finditer(text):
        run, info = found.groups()
        start = found.start()
        while start and found.start() - start < 4 and text[start - 1] == " ":
            start -= 1
        indent = text[start : found.start()]
        if len(indent) > 3 or (start and text[start - 1] not in "\r\n"):
            continue
        if fence is not None:
            if not fence.closes(run) or info.strip(" \t"):
                continue
            after = None
        elif run[0] == "`" and "`" in info:
            continue
        else:
            after = _Fence(indent, run, info.rstrip())
        yield _Mark(start, found.end(), fence, after)
        fence = after


class _Reader:
    """Which fence is open after what was read of a source, piece by piece."""

    def __init__(self) -> None:
        self._fence: _Fence | None = None
        self._line: list[str] = []  # the unfinished line

    def read(self, piece: str) -> None:
        end = max(piece.rfind("\n"), piece.rfind("\r")) + 1
        if end:
            self._fence = self.after(piece[:end])
            self._line = []
        rest = piece[end:]
        if not self._line or len(self._line[0]) < 8:
            rest = "".join(self._line) + rest
            plain = not _BEGINS.match(rest) and not _MAY_BEGIN.match(rest)
            self._line = ["x" * 8 if plain else rest]  # of a plain line nothing has to be known
        elif self._line[0] != "x" * 8:
            self._line.append(rest)

    def after(self, lines: str) -> _Fence | None:
        """Which fence would be open after these, the last of which is finished."""
        fence = self._fence
        for mark in _marks("".join((*self._line, lines)), fence):
            fence = mark.after
        return fence


class _Splitter:
    def __init__(self, text: str, limit: int, unit: Unit) -> None:
        self._text = text
        self._limit = limit
        self._unit: Unit = unit
        self._at = 0
        self._prefix = ""
        self._content_end = len(text.rstrip())
        self._whole_until = 0  # the end of a grapheme that is too long for a part
        self._coming = _marks(text)
        self._near: list[_Mark] = []  # those from just before ``_at`` to the window's end
        self._line_start = 0  # of the line that ``_at`` is in

    def parts(self) -> list[str]:
        parts: list[str] = []
        while True:
            room = self._limit - _size(self._prefix, self._unit)
            end = self._reach(room)
            if end == len(self._text):
                parts.append(self._prefix + self._text[self._at :])
                return parts
            self._look_to(end)
            cut = self._cut(end, room)
            added, prefix = self._seam(cut)
            parts.append(self._prefix + self._text[self._at : cut] + added)
            self._line_start = self._start_of_line(cut)
            self._at, self._prefix = cut, prefix

    # ---- where ----

    def _cut(self, end: int, room: int) -> int:
        reserve = max(
            (
                _size("\n" + fence.endings[1], self._unit)
                for fence in {self._fence_at(self._at), *(m.after for m in self._near)}
                if fence is not None and self._repeats(fence)
            ),
            default=0,
        )
        last = self._reach(room - reserve) if reserve else end
        if self._at + 1 < self._content_end <= last:
            last = self._content_end - 1  # something that is not blank is left for the next part
        half = self._at + (last - self._at) // 2
        # a fence that begins late is better begun in the next part
        late = [m.start for m in self._near if m.after is not None and half < m.start <= last]
        if late and self._fence_at(last) is not None and self._good(late[-1]):
            return late[-1]
        for clean in (True, False):
            for cuts in (
                self._paragraphs(half, last),
                self._lines(half, last),
                self._matches(_SENTENCE, half, last),
                self._matches(_WORD, half, last),
                self._lines(self._at, last),
                self._matches(_WORD, self._at, last),
            ):
                for _, cut in zip(range(_TRIES), cuts, strict=False):
                    if self._good(cut) and (not clean or self._is_clean(cut)):
                        return cut
            if clean:
                cut = self._grapheme(last)
                for _ in range(_TRIES):
                    if cut is None or self._is_clean(cut):
                        break
                    cut = self._grapheme(cut - 1) if cut - 1 > self._at else None
                if cut is not None and self._good(cut):
                    return cut
        cut = self._grapheme(last) or self._within_grapheme(last)
        return cut - 1 if self._looks_added(cut) else cut

    def _paragraphs(self, first: int, last: int) -> Iterator[int]:
        text, end = self._text, last
        while True:
            cut = max(text.rfind("\n\n", first, end) + 2, text.rfind("\n\r\n", first, end) + 3)
            if cut <= max(first, 3):
                return
            yield cut
            end = cut - 1

    def _lines(self, first: int, last: int) -> Iterator[int]:
        end = last
        while (cut := self._text.rfind("\n", first, end) + 1) > first:
            yield cut
            end = cut - 1

    def _matches(self, pattern: re.Pattern[str], first: int, last: int) -> Iterator[int]:
        found = (m.end() for m in pattern.finditer(self._text, first, last))
        yield from reversed([cut for cut in found if cut > first])

    def _good(self, cut: int) -> bool:
        """Between graphemes, with something to show before it, and not taken for a cut fence."""
        text = self._text
        return (
            self._at < cut
            and (cut >= self._whole_until)
            and (_apart(text, cut) or _graphemes(text[cut - 1 : cut + 1])[0] == text[cut - 1])
            and not self._is_bare(cut)
            and not self._looks_added(cut)
        )

    def _is_bare(self, cut: int) -> bool:
        """Nothing but blanks would stand before the cut, or blanks and an opening line."""
        text, mark = self._text, self._mark_at(cut)
        if mark is not None and mark.after is not None and self._at <= mark.start < mark.end < cut:
            return not text[mark.end : cut].strip() and not text[self._at : mark.start].strip()
        return text[self._at : cut].isspace()

    def _grapheme(self, last: int) -> int | None:
        """The last place between graphemes; None: the first one goes on beyond."""
        start = max(self._at, self._whole_until)
        if last <= start:
            return last if last == start > self._at else None
        if _apart(self._text, last):
            return last
        *_, final = _graphemes(self._text[start : last + 1])
        cut = last + 1 - len(final)
        return cut if cut > self._at else None

    def _within_grapheme(self, last: int) -> int:
        if self._at >= self._whole_until:
            self._whole_until = _grapheme_end(self._text, self._at, last - self._at + 1)
        return last

    def _reach(self, room: int) -> int:
        """How far the text from here on fits into so many units."""
        text, at = self._text, self._at
        window = text[at : at + room]
        if self._unit == "codepoint" or window.isascii():
            return at + len(window)
        least = min(len(window), room // _LARGEST[self._unit])
        lengths = range(least, len(window) + 1)
        fit = bisect_right(lengths, room, key=lambda n: _size(window[:n], self._unit))
        return at + lengths[fit - 1]

    # ---- fences ----

    def _look_to(self, end: int) -> None:
        passed = bisect_left(self._near, self._at, key=lambda m: m.end)
        del self._near[: max(0, passed - 1)]
        while not self._near or self._near[-1].start < end:
            mark = next(self._coming, None)
            if mark is None:
                return
            self._near.append(mark)

    def _mark_at(self, cut: int) -> _Mark | None:
        """The last line that opens or closes a fence and begins before this place."""
        index = bisect_left(self._near, cut, key=lambda m: m.start)
        return self._near[index - 1] if index else None

    def _fence_at(self, cut: int) -> _Fence | None:
        mark = self._mark_at(cut)
        if mark is None:
            return self._near[0].before if self._near else None
        return mark.before if cut <= mark.end else mark.after

    def _repeats(self, fence: _Fence) -> bool:
        return _size(fence.added, self._unit) <= self._limit // 4

    def _seam(self, cut: int) -> tuple[str, str]:
        """What is added before and after a cut."""
        fence = self._fence_at(cut)
        if fence is None or not self._repeats(fence):
            return "", ""
        if self._text[cut - 1] in "\r\n":
            return fence.closing, fence.again
        mark = self._mark_at(cut)
        in_mark = mark is not None and cut <= mark.end
        if in_mark or self._begins_as_closing(self._start_of_line(cut), fence):
            return "", ""
        return "\n" + fence.endings[1], fence.again

    def _is_clean(self, cut: int) -> bool:
        """Whether the two pieces of a line are as far from being a fence's as the line itself."""
        text = self._text
        if text[cut - 1] in "\r\n":
            return True
        mark = self._mark_at(cut)
        if mark is not None and cut <= mark.end:
            return False
        line, fence = self._start_of_line(cut), self._fence_at(cut)
        reads = _OPENS if fence is None else _CLOSES
        if fence is not None and self._begins_as_closing(line, fence):
            return False
        head = reads.match(text, max(line, self._at), cut)
        tail = reads.match(text, cut, min(len(text), cut + self._limit))
        return head is None and tail is None

    def _begins_as_closing(self, line: int, fence: _Fence) -> bool:
        found = _BEGINS.match(self._text, line)
        return found is not None and fence.closes(found.group().lstrip(" "))

    def _looks_added(self, cut: int) -> bool:
        """Whether `join` would take the source's own characters here for added ones."""
        text = self._text
        line = self._start_of_line(cut)
        if line <= self._at or not _BEGINS.match(text, line, cut):
            return False
        fence = self._fence_at(line)
        if fence is None or self._seam(cut) != ("", ""):
            return False
        return text[line:cut] in fence.endings and text.startswith(fence.again, cut)

    def _start_of_line(self, cut: int) -> int:
        text, at = self._text, self._at
        found = max(text.rfind("\n", at, cut), text.rfind("\r", at, cut)) + 1
        return found if found else self._line_start


def _size(text: str, unit: Unit) -> int:
    if unit == "codepoint" or text.isascii():
        return len(text)
    if unit == "utf16":
        return len(text.encode("utf-16-le", "surrogatepass")) // 2
    return len(text.encode("utf-8", "surrogatepass"))


def _apart(text: str, cut: int) -> bool:
    """Whether it is plain that no grapheme holds the characters on both sides."""
    before, after = text[cut - 1], text[cut]
    return (before < "\x7f" and after < "\x7f") and not (before == "\r" and after == "\n")


def _graphemes(text: str) -> list[str]:
    from wcwidth import iter_graphemes  # only a text with more than ASCII at a cut needs it

    return list(iter_graphemes(text))


def _grapheme_end(text: str, start: int, least: int) -> int:
    """Where the grapheme that begins here ends; it is known to be longer than ``least``."""
    from wcwidth import iter_graphemes

    window = least * 2
    while True:
        first = next(iter(iter_graphemes(text[start : start + window])))
        if len(first) < window or start + window >= len(text):
            return start + len(first)
        window *= 2
