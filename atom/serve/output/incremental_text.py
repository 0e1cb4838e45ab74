"""Incremental readers: generators that wait for text that has not arrived.

They are written as if the whole text were there.

    def read_greeting(text: TextBuffer) -> Reading[str]:
        if not (yield from text.starts_with("hello")):      # waits while it may still become that word
            raise ParseError
        text.at += len("hello")
        return (yield from text.read(LETTERS))

A reader is a generator that yields where it needs more text. Its result depends only on the characters, not on the
pieces in which they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields for more text, returns what it read
Span: TypeAlias = tuple[int, int]  # of characters: the first index, and the one after the last

SPACE = re.compile(r"[ \t\r\n]*")
NEWLINES = re.compile(r"\n*")


class ParseError(Exception):
    """The text does not have the reader's form; `at` is the first wrong character."""


class Excerpt:
    """Text that a reader took out of the text that arrived, and where it was there."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._places: list[Span] = []

    def add(self, text: str, start: int) -> None:
        """Add a text. start: its index in all the text that arrived; negative for what was no part of it"""
        self._texts.append(text)
        add_span(self._places, (start, start + len(text)))

    def take(self) -> str:
        """The text that was added since the last call."""
        text = "".join(self._texts)
        self._texts.clear()
        return text

    def take_places(self) -> list[Span]:
        """Where the text that was added since the last call was, in order."""
        places, self._places = self._places, []
        return places


class TextBuffer:
    """The text that has arrived and is not taken yet, with a read position."""

    def __init__(self) -> None:
        self.text = ""
        self.num_taken = 0  # characters that were before it
        self.at = 0  # index of the next character to read
        self.is_ended = False
        self.controls: list[int] = []  # control characters in JSON strings: indices in all the text that arrived

    def push(self, text: str) -> None:
        self.text += text

    def take(self, end: int) -> str:
        """Remove and return the text before `end`."""
        taken, self.text, self.at = self.text[:end], self.text[end:], max(0, self.at - end)
        self.num_taken += len(taken)
        return taken

    def move(self, end: int, out: Excerpt) -> None:
        """Take the text before `end` into an excerpt."""
        start = self.num_taken
        out.add(self.take(end), start)

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.is_ended:
            yield
        return self.text[self.at : self.at + 1]

    def starts_with(self, word: str) -> Reading[bool]:
        """Whether the text continues with this word."""
        while len(self.text) - self.at < len(word) and not self.is_ended and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def skip(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Skip all characters of a class: a pattern of one class, any number of times."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None, "the pattern matches the empty text"
            self.at = match.end()
            if self.at < len(self.text) or self.is_ended:
                return
            yield

    def read(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the characters that `skip` skips."""
        start = self.at
        yield from self.skip(pattern)
        return self.text[start : self.at]

    def starts_with_any(self, words: Iterable[str]) -> Reading[str | None]:
        """The first of these words with which the text continues."""
        for word in words:
            if (yield from self.starts_with(word)):
                return word
        return None

    def find_any(self, markers: Iterable[str]) -> tuple[int, str | None]:
        """Where the first of these markers is, and which. None: where one may begin, at the end of the text.

        No marker is the beginning of another.
        """
        places = [(found, marker) for marker in markers if (found := self.text.find(marker, self.at)) >= 0]
        first, marker = min(places, default=(len(self.text), None))
        partial = len(self.text)
        if not self.is_ended:
            partial = min((partial_marker(each, self.text, self.at) for each in markers), default=partial)
        return (first, marker) if first <= partial else (partial, None)

    def move_until(self, markers: tuple[str, ...], out: Excerpt) -> Reading[str | None]:
        """Move the text before a marker to `out` as it arrives, without the newlines that touch the marker.

        The marker found: the next character is the one after it. None: there is no marker, and all the text is moved.
        """
        while True:
            self.at = 0
            end, marker = self.find_any(markers)
            if marker is None and self.is_ended:
                self.move(len(self.text), out)
                return None
            kept = len(self.text[:end].rstrip("\n"))
            self.move(kept, out)
            if marker is not None:
                self.at = end - kept + len(marker)
                return marker
            yield


def check_unicode(text: str) -> str:
    """The text. ParseError if it has half of a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParseError from error
    return text


def add_span(spans: list[Span], span: Span) -> None:
    """Add a span after others: to the last one if they touch."""
    start, end = span
    if spans and spans[-1][1] == start:
        spans[-1] = spans[-1][0], end
    elif start < end:
        spans.append(span)


def partial_marker(marker: str, text: str, start: int = 0) -> int:
    """The index where the text from `start` on ends in an incomplete marker; the text's length if it does not."""
    start = max(start, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return start
        start += 1
    return len(text)
