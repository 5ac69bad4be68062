"""Text that arrives in pieces, for parsers that read it as if it were complete."""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""A coroutine that yields whenever it needs more text."""


class TextFeed:
    """Feeds a coroutine, which is resumed with each piece of text.

    A parser so written decides by what it has read and never by where a piece ended, so the way the text is
    cut cannot change what comes out. It waits for more text only while what is there could go on in several ways.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._mark: int | None = None
        self._has_ended = False

    def append(self, text: str) -> None:
        kept = self._position if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._position -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self) -> None:
        """No more text comes."""
        self._has_ended = True

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def mark(self, *, before: str = "") -> None:
        """Keeps the text from here on until `take_marked` asks for it; from before a marker just read, if given."""
        self._mark = self._position - len(before)

    def take_marked(self) -> str:
        """What was read since the mark, which is removed."""
        assert self._mark is not None
        start, self._mark = self._mark, None
        return self._text[start : self._position]

    def unread(self, text: str) -> None:
        """Puts back what was read last."""
        self._position -= len(text)

    def peek(self) -> Reading[str]:
        """The next character, which stays; "" at the end of the text."""
        while self._position == len(self._text) and not self._has_ended:
            yield
        return self._text[self._position : self._position + 1]

    def next(self) -> Reading[str]:
        """The next character; "" at the end of the text."""
        char = yield from self.peek()
        self._position += len(char)
        return char

    def is_at(self, marker: str) -> Reading[bool]:
        """Whether the marker comes next; it stays."""
        while True:
            seen = self._text[self._position : self._position + len(marker)]
            if seen == marker or not marker.startswith(seen) or self._has_ended:
                return seen == marker
            yield

    def take(self, marker: str) -> Reading[bool]:
        """Reads the marker if it comes next."""
        found = yield from self.is_at(marker)
        if found:
            self._position += len(marker)
        return found

    def skip_space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self._position += 1

    def take_all(self) -> str:
        """What has come and is not read yet."""
        text = self._text[self._position :]
        self._position = len(self._text)
        return text

    def pass_on(self, markers: tuple[str, ...], show: Callable[[str], None]) -> Reading[tuple[str, str | None]]:
        """Shows the text up to the first marker, as soon as it cannot be part of one, and reads the marker.

        Returns the space before the marker, which is not shown, and the marker; None at the end of the text.
        """
        while True:
            rest = self._text[self._position :]
            found = [(start, marker) for marker in markers if (start := rest.find(marker)) >= 0]
            marker_start, marker = min(found, default=(len(rest), None))
            text_end = marker_start
            if marker is None and not self._has_ended:
                text_end -= _beginning_len(rest, markers)
            text = rest[:text_end].rstrip()
            if text:
                show(text)
            if marker is not None or self._has_ended:
                self._position += marker_start + len(marker or "")
                return rest[len(text) : marker_start], marker
            self._position += len(text)
            yield


def _beginning_len(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of the text that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(len(text) - len(marker) + 1, 0))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
