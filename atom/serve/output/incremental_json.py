"""Parse JSON and Python literals incrementally, while their text arrives.

    yield from read_json(text)                 # skips one value
    key = yield from read_json_string(text)    # the string, unescaped
    json_text(text, start)                     # what was read from there on, as JSON that every parser takes
    value = yield from read_python(text)       # {"city": "Paris", "days": [1, 2]}, as `ast.literal_eval` reads it

They raise ParseError at the first character that cannot be part of a value, so that the text before it is the beginning
of one. Models write newlines and tabs in strings as they are: these are read too. Nothing is evaluated; the depth is
limited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from atom.serve.output.incremental_text import SPACE, ParseError, Reading, T, TextBuffer

MAX_DEPTH = 64  # of brackets in brackets
JSON_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
JSON_NAMES = {"t": "true", "f": "false", "n": "null"}  # by first character
DIGITS = frozenset("0123456789")
JSON_DIGITS = re.compile("[0-9]*")
JSON_ESCAPES = frozenset('"\\/bfnrtu')
HEX = frozenset("0123456789abcdefABCDEF")

PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
PYTHON_WORD = re.compile(r"[\w.+-]*")
PYTHON_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
PYTHON_INTEGER = re.compile(r"[+-]?(0+|[1-9][0-9]*)")
PYTHON_FLOAT = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?")
# those of Python's language reference, except \N{name}
PYTHON_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
PYTHON_ESCAPES = {**dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)), "\n": ""}


def read_items(
    text: TextBuffer, close: str, read_item: Callable[[], Reading[None]], *, may_trail: bool = False
) -> Reading[int]:
    """Read comma-separated items from the next bracket to `close`; the number of commas.

    may_trail: a comma may precede `close`
    """
    text.at += 1
    num_commas = 0
    yield from text.skip(SPACE)
    is_closed = (yield from text.peek()) == close
    while not is_closed:
        yield from read_item()
        yield from text.skip(SPACE)
        char = yield from text.peek()
        is_closed = char == close
        if char == ",":
            num_commas += 1
            text.at += 1
            yield from text.skip(SPACE)
            is_closed = may_trail and (yield from text.peek()) == close
        elif not is_closed:
            raise ParseError
    text.at += 1
    return num_commas


def expect(text: TextBuffer, char: str) -> Reading[None]:
    """Skip this character and the space around it."""
    yield from text.skip(SPACE)
    yield from skip_char(text, char)
    yield from text.skip(SPACE)


def read_json(text: TextBuffer, depth: int = 0) -> Reading[None]:
    """Skip one JSON value (RFC 8259, with control characters in strings)."""

    def read_member() -> Reading[None]:
        yield from skip_json_string(text)
        yield from expect(text, ":")
        yield from read_json(text, depth + 1)

    if depth > MAX_DEPTH:
        raise ParseError
    char = yield from text.peek()
    if char == "{":
        yield from read_items(text, "}", read_member)
    elif char == "[":
        yield from read_items(text, "]", lambda: read_json(text, depth + 1))
    elif char == '"':
        yield from skip_json_string(text)
    elif char in JSON_NAMES:
        for letter in JSON_NAMES[char]:
            yield from skip_char(text, letter)
    else:
        yield from skip_number(text)


def skip_number(text: TextBuffer) -> Reading[None]:
    if (yield from text.peek()) == "-":
        text.at += 1
    if (yield from text.peek()) == "0":
        text.at += 1
    else:
        yield from skip_digits(text)
    if (yield from text.peek()) == ".":
        text.at += 1
        yield from skip_digits(text)
    if (yield from text.peek()) in ("e", "E"):
        text.at += 1
        if (yield from text.peek()) in ("+", "-"):
            text.at += 1
        yield from skip_digits(text)


def skip_digits(text: TextBuffer) -> Reading[None]:
    if (yield from text.peek()) not in DIGITS:
        raise ParseError
    yield from text.skip(JSON_DIGITS)


def skip_char(text: TextBuffer, char: str) -> Reading[None]:
    if (yield from text.peek()) != char:
        raise ParseError
    text.at += 1


def json_text(text: TextBuffer, start: int) -> str:
    """The JSON that was read from `start` on, with the control characters in its strings escaped."""
    parts, last = [], start
    for at in (each - text.num_taken for each in text.controls):
        if start <= at < text.at:
            parts += [text.text[last:at], json.dumps(text.text[at])[1:-1]]
            last = at + 1
    text.controls = [each for each in text.controls if each >= text.num_taken + text.at]
    return "".join(parts) + text.text[last : text.at]


def read_json_string(text: TextBuffer) -> Reading[str]:
    """Read the next string, unescaped."""
    start = text.at
    yield from skip_json_string(text)
    return str(json.loads(text.text[start : text.at], strict=False))


def skip_json_string(text: TextBuffer) -> Reading[None]:
    yield from skip_char(text, '"')
    while True:
        yield from text.skip(JSON_PLAIN)
        char = yield from text.peek()
        if not char:
            raise ParseError
        if char < " ":
            text.controls.append(text.num_taken + text.at)
        text.at += 1
        if char == '"':
            return
        if char != "\\":
            continue
        char = yield from text.peek()
        if char not in JSON_ESCAPES:
            raise ParseError
        text.at += 1
        for _ in range(4 if char == "u" else 0):
            if (yield from text.peek()) not in HEX:
                raise ParseError
            text.at += 1


def read_python(text: TextBuffer, depth: int = 0) -> Reading[Any]:
    """Read a literal that JSON can express: string, number, list or tuple, dict with string keys, True, False, None."""
    items: list[Any] = []
    members: dict[str, Any] = {}

    def read_item() -> Reading[None]:
        items.append((yield from read_python(text, depth + 1)))

    def read_member() -> Reading[None]:
        key = yield from read_python_string(text)
        yield from expect(text, ":")
        members[key] = yield from read_python(text, depth + 1)

    if depth > MAX_DEPTH:
        raise ParseError
    char = yield from text.peek()
    if char == "{":
        yield from read_items(text, "}", read_member, may_trail=True)
        return members
    if char == "[":
        yield from read_items(text, "]", read_item, may_trail=True)
        return items
    if char == "(":
        num_commas = yield from read_items(text, ")", read_item, may_trail=True)
        return items if num_commas or not items else items[0]
    if char in PYTHON_PLAIN:
        return (yield from read_python_string(text))
    return python_value((yield from text.read(PYTHON_WORD)))


def python_value(word: str) -> Any:
    """The value of a word: a number, True, False or None."""
    if word in PYTHON_NAMES:
        return PYTHON_NAMES[word]
    try:
        if PYTHON_INTEGER.fullmatch(word):
            return int(word)
    except ValueError as error:  # more digits than Python converts
        raise ParseError from error
    if not PYTHON_FLOAT.fullmatch(word) or math.isinf(float(word)):
        raise ParseError
    return float(word)


def read_python_string(text: TextBuffer) -> Reading[str]:
    """Read the next string, unescaped; in one or three quotes, without a prefix."""
    quote = yield from text.peek()
    if quote not in PYTHON_PLAIN:
        raise ParseError
    is_long = yield from text.starts_with(quote * 3)
    end = quote * 3 if is_long else quote
    text.at += len(end)
    start = text.at
    while not (yield from text.starts_with(end)):
        char = yield from text.peek()
        if char == "\\":
            text.at += 1
            char = yield from text.peek()
        if not char:
            raise ParseError
        text.at += 1
        yield from text.skip(PYTHON_PLAIN[quote])
    literal = text.text[start : text.at]
    text.at += len(end)
    return PYTHON_ESCAPE.sub(unescape, literal)


def unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if escape in PYTHON_ESCAPES:
        return PYTHON_ESCAPES[escape]
    if escape[0] in "xuU" and len(escape) > 1 and int(escape[1:], 16) <= 0x10FFFF:
        return chr(int(escape[1:], 16))
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    if escape[0] in "xuUN":
        raise ParseError
    return match[0]  # Python leaves an unknown escape as it is


def validate_json(text: str) -> str:
    """A text that is one JSON value, with the control characters in its strings escaped. ParseError if it is not."""
    buffer, _ = read_whole(text, read_json)
    return json_text(buffer, 0)


def read_whole(text: str, read: Callable[[TextBuffer], Reading[T]]) -> tuple[TextBuffer, T]:
    """Read a text that is one value. ParseError if it is not."""
    buffer = TextBuffer()
    buffer.push(text)
    buffer.is_ended = True
    reading = read(buffer)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            if buffer.at < len(text) or not text:
                raise ParseError from None
            return buffer, end.value
