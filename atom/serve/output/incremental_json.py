"""Parse JSON and Python literals incrementally, while their text arrives.

    yield from read_json(text)                 # skips one value
    key = yield from read_json_string(text)    # the string, unescaped
    value = yield from read_python(text)       # {"city": "Paris", "days": [1, 2]}, as `ast.literal_eval` reads it

They raise ParseError at the first character that cannot be part of a value. Nothing is evaluated; the depth is limited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from atom.serve.output.incremental_text import SPACE, ParseError, Reading, TextBuffer

MAX_DEPTH = 64  # of brackets in brackets
JSON_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
JSON_WORD = re.compile(r"[a-z0-9.+E-]*")
JSON_VALUE = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
JSON_ESCAPES = frozenset('"\\/bfnrtu')
HEX = frozenset("0123456789abcdefABCDEF")

PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\\n\r]*") for quote in "'\""}
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
    if (yield from text.peek()) != char:
        raise ParseError
    text.at += 1
    yield from text.skip(SPACE)


def read_json(text: TextBuffer, depth: int = 0) -> Reading[None]:
    """Skip one JSON value (RFC 8259)."""

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
    elif not JSON_VALUE.fullmatch((yield from text.read(JSON_WORD))):
        raise ParseError


def read_json_string(text: TextBuffer) -> Reading[str]:
    """Read the next string, unescaped."""
    start = text.at
    yield from skip_json_string(text)
    return str(json.loads(text.text[start : text.at]))


def skip_json_string(text: TextBuffer) -> Reading[None]:
    if (yield from text.peek()) != '"':
        raise ParseError
    text.at += 1
    while True:
        yield from text.skip(JSON_PLAIN)
        char = yield from text.peek()
        if char == '"':
            text.at += 1
            return
        if char != "\\":
            raise ParseError
        text.at += 1
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
        elif char in ("\n", "\r") and not is_long:
            raise ParseError
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
