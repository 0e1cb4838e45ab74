"""Incremental readers: generators that wait for text that has not arrived.

They are written as if all of it were there.

    def read_greeting(text: Arriving) -> Reading[str]:
        if not (yield from text.starts_with("hello")):      # waits while it may still become that word
            raise Unreadable
        text.at += len("hello")
        return (yield from text.read(LETTERS))

A reader is a generator that yields where it needs more text. What it does depends on the characters alone, so it reads
the same whatever pieces they come in.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields for more text, returns what it read

SPACE = re.compile(r"[ \t\r\n]*")
NEWLINES = re.compile(r"\n*")


class Unreadable(Exception):
    """The text is not of the form that a reader reads. It stands at the first character that cannot be."""


class Arriving:
    """The text that has come and was not taken yet, and how far it is read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # of the next character to read
        self.is_ended = False

    def push(self, text: str) -> None:
        self.text += text

    def take(self, end: int) -> str:
        """Removes the text before `end`."""
        taken, self.text, self.at = self.text[:end], self.text[end:], max(0, self.at - end)
        return taken

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.is_ended:
            yield
        return self.text[self.at : self.at + 1]

    def starts_with(self, word: str) -> Reading[bool]:
        """Whether this is what comes next."""
        while len(self.text) - self.at < len(word) and not self.is_ended and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def skip(self, pattern: re.Pattern[str]) -> Reading[None]:
        """Goes past all characters of a class: a pattern of one class, any number of times."""
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None, "a pattern matches nothing too"
            self.at = match.end()
            if self.at < len(self.text) or self.is_ended:
                return
            yield

    def read(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The characters that `skip` goes past."""
        start = self.at
        yield from self.skip(pattern)
        return self.text[start : self.at]

    def give_until(self, marker: str, out: list[str]) -> Reading[bool]:
        """Moves the text before a marker to `out` as it comes, without the newlines that touch the marker.

        Then it stands behind the marker, those newlines not taken; without one all is moved, and the answer is false.
        """
        while True:
            found = self.text.find(marker)
            if found < 0 and self.is_ended:
                out.append(self.take(len(self.text)))
                return False
            end = found if found >= 0 else beginning(marker, self.text)
            out.append(self.take(len(self.text[:end].rstrip("\n"))))
            if found >= 0:
                self.at = self.text.index(marker) + len(marker)
                return True
            yield


def beginning(marker: str, text: str) -> int:
    """Where the part of a marker begins that the text ends with; its end, if it ends with none."""
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return start
        start += 1
    return len(text)
