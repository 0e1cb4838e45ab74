"""Read arguments whose keys are bare and whose strings have quotes of their own.

Gemma 4 writes calls so:

    fields = FieldReader(text, '<|"|>', send)          # of {city:<|"|>Paris<|"|>,at:{lat:48.8}}, after the brace
    while (yield from fields.is_next()):
        key = yield from fields.read_key()             # "city"
        yield from fields.write_value(as_json)         # sends '"Paris"' in pieces, as it arrives

Strings have no escapes: the next quote ends one. What was sent is taken from the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from atom.serve.output.incremental_json import MAX_DEPTH, read_json_string, skip_char, validate_json
from atom.serve.output.incremental_text import SPACE, ParseError, Reading, TextBuffer, check_unicode

KEY = re.compile('[^\\s:,{}\\[\\]<>"\ufdd1]*')
WORD = re.compile("[^,{}\\[\\]<>\\n\ufdd1]*")  # a number, true, false, null, or a string without quotes


class FieldReader:
    """Reads the fields of one object, after its brace."""

    def __init__(self, text: TextBuffer, quote: str, send: Callable[[str], None]) -> None:
        self.keys: list[str] = []  # that were read
        self._text, self._quote, self._send = text, quote, send

    def is_next(self) -> Reading[bool]:
        """Whether another field follows; else the object has ended."""
        return (yield from self._is_next("}", is_first=not self.keys))

    def read_key(self) -> Reading[str]:
        """Read a field up to its value. ParseError if its key is missing or repeated."""
        key = yield from self._read_key()
        if key in self.keys:
            raise ParseError
        self.keys.append(key)
        return key

    def write_value(self, as_json: Callable[[str], str], depth: int = 0) -> Reading[None]:
        """Send the JSON of a value, objects and lists as they arrive. as_json: of a word without quotes"""
        text = self._text
        if depth > MAX_DEPTH:
            raise ParseError
        yield from text.skip(SPACE)
        if (yield from text.starts_with(self._quote)):
            return (yield from self._write_string())
        char = yield from text.peek()
        if char == "{":
            yield from self._write_object(depth)
        elif char == "[":
            yield from self._write_list(depth)
        elif char == '"':
            self._take(json.dumps(check_unicode((yield from read_json_string(text))), ensure_ascii=False))
        elif word := (yield from text.read(WORD)).strip():
            self._take(as_json(check_unicode(word)))
        else:
            raise ParseError

    def _take(self, written: str) -> None:
        self._send(written)
        self._text.take(self._text.at)

    def _write_object(self, depth: int) -> Reading[None]:
        self._text.at += 1
        self._take("{")
        is_first = True
        while (yield from self._is_next("}", is_first=is_first)):
            key = json.dumps((yield from self._read_key()), ensure_ascii=False)
            self._take(f"{'' if is_first else ', '}{key}: ")
            is_first = False
            yield from self.write_value(word_as_json, depth + 1)
        self._take("}")

    def _write_list(self, depth: int) -> Reading[None]:
        self._text.at += 1
        self._take("[")
        is_first = True
        while (yield from self._is_next("]", is_first=is_first)):
            self._take("" if is_first else ", ")
            is_first = False
            yield from self.write_value(word_as_json, depth + 1)
        self._take("]")

    def _write_string(self) -> Reading[None]:
        text = self._text
        text.at += len(self._quote)
        self._take('"')
        while True:
            end, quote = text.find_any((self._quote,))
            self._send(json.dumps(text.take(end), ensure_ascii=False)[1:-1])
            if quote is not None:
                text.at = len(quote)
                return self._take('"')
            if text.is_ended:
                raise ParseError
            yield

    def _is_next(self, close: str, *, is_first: bool) -> Reading[bool]:
        text = self._text
        yield from text.skip(SPACE)
        char = yield from text.peek()
        if char == "," and not is_first:
            text.at += 1
            yield from text.skip(SPACE)
            char = yield from text.peek()  # a comma may be the last
        elif char != close and not is_first:
            raise ParseError
        if char == close:
            text.at += 1
        return char != close

    def _read_key(self) -> Reading[str]:
        text = self._text
        key = yield from text.read(KEY)
        yield from text.skip(SPACE)
        if not key:
            raise ParseError
        yield from skip_char(text, ":")
        return check_unicode(key)


def word_as_json(word: str) -> str:
    """The JSON of a word within an object or a list: a string if it is none."""
    try:
        return validate_json(word)
    except ParseError:
        return json.dumps(word, ensure_ascii=False)
