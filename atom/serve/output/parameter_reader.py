"""Read the parameters of a call, each with a key and a value.

    parameters = ParameterReader(text, form, "</function>", {"properties": {"city": {"type": "string"}}})
    while (yield from parameters.is_next()):
        key = yield from parameters.read_key()               # "city"
        is_whole = yield from parameters.read_value(print)   # "Paris", in pieces, as it arrives

A value has no escapes: what ends it may be a part of it too. So it is an end only if the call goes on after it:
with the next parameter, with the call's own end, or not at all. Models leave it out at times, right before these, and
the call's end before that of all calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from atom.serve.output.incremental_text import SPACE, ParseError, Reading, TextBuffer, check_unicode
from atom.serve.output.tool_forms import Form, read_pieces

KEY = re.compile('[^<>"\\n\ufdd1]*')
TYPE = re.compile("[a-z]*")
ENTITIES = {"&quot;": '"', "&amp;": "&"}  # the last one is read last
AS_TEXT = ("string", "true")  # types of values that are strings as they are written


class ParameterReader:
    """Reads the parameters of one call."""

    def __init__(self, text: TextBuffer, form: Form, close: str, schema: Any) -> None:
        """
        close: the text that ends the call; "": none
        schema: of all parameters
        """
        assert form.parameter is not None, "such a form has parameters"
        self.keys: list[str] = []  # that were read
        self.is_text: bool | None = None  # whether the last value is a string; None: the form does not say
        self._text, self._parameter = text, form.parameter
        self._begin = form.parameter.before[0].text
        self._closers = tuple(filter(None, (close, *form.ends)))
        self._next_calls, self._entities = form.begins, ENTITIES if form.entities else {}
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._known = set(properties) if isinstance(properties, Mapping) else set[str]()

    def is_next(self) -> Reading[bool]:
        """Whether another parameter follows."""
        yield from self._text.skip(SPACE)
        return (yield from self._text.starts_with(self._begin))

    def read_key(self) -> Reading[str]:
        """Read a parameter up to its value. ParseError if its key is missing or repeated."""
        key = yield from self._read_header()
        self.keys.append(key)
        return key

    def read_value(self, give: Callable[[str], None]) -> Reading[bool]:
        """Read a value and what ends it; whether it does end. give: called with each piece, as it arrives"""
        text, (_, value, rest) = self._text, self._parameter
        stops = (value.text, self._begin, *self._closers)
        if value.trims and (yield from text.starts_with("\n")):
            text.at += 1
        text.take(text.at)
        while True:
            end, stop = text.find_any(stops)
            if stop is None and text.is_ended:
                give(text.take(end))
                return False
            newline = int(value.trims and text.text[:end].endswith("\n"))  # it may belong to the form
            give(text.take(end - newline))
            if stop is None:
                text.at = 0
                yield
                continue
            text.at = newline
            if (yield from self._is_end(stop, is_line=bool(newline) or not value.trims)):
                text.take(text.at)
                yield from read_pieces(text, rest if stop == value.text else [])
                return True
            text.at = newline + 1

    def _read_header(self) -> Reading[str]:
        text, key = self._text, ""
        for piece in self._parameter.before:
            if piece.kind == "key":
                key = check_unicode((yield from text.read(KEY)).strip())
                for entity, char in self._entities.items():
                    key = key.replace(entity, char)
            elif piece.kind == "type":
                self.is_text = (yield from text.read(TYPE)) in AS_TEXT
            else:
                yield from read_pieces(text, [piece])
        if not key or key in self.keys:
            raise ParseError
        return key

    def _is_end(self, stop: str, *, is_line: bool) -> Reading[bool]:
        """Whether a stop ends the value. The text is read up to where the call goes on.

        is_line: the stop is where a line begins, if the format writes it so
        """
        text, start = self._text, self._text.at
        if stop == self._parameter.value.text:
            follow = [each.text for each in self._parameter.rest if each.kind == "text"][:1]
            after = text.at + len(stop)
            is_end = yield from self._is_followed(after, follow or (self._begin, *self._closers, *self._next_calls))
            text.at = after
        elif stop in self._closers:
            following = self._closers[self._closers.index(stop) + 1 :]
            is_end = yield from self._is_followed(start + len(stop), (*following, *self._next_calls))
            text.at = start
        else:
            try:
                is_end = is_line and (yield from self._read_header()) in self._known
            except ParseError:
                is_end = False
            text.at = start
        return is_end

    def _is_followed(self, at: int, words: Collection[str]) -> Reading[bool]:
        """Whether one of these words follows, or the text ends before it is clear."""
        text = self._text
        text.at = at
        yield from text.skip(SPACE)
        if (yield from text.starts_with_any(words)) is not None:
            return True
        rest = text.text[text.at :]
        return text.is_ended and any(word.startswith(rest) for word in words)
