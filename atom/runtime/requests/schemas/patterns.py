"""Remove look-around from regular expressions, which llguidance does not support.

split_look_aheads("^(?=.*[A-Z])(?=.*[0-9]).{8,}$")      # ["^.{8,}$", "^(?:.*[A-Z])", "^(?:.*[0-9])"], False
split_look_aheads("^(?!x)[a-z]+$")                      # ["^[a-z]+$"], True: something was left out
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

AHEAD = ("(?=", "(?!")
LOOK_AROUND = (*AHEAD, "(?<=", "(?<!")


def is_match(pattern: str, text: str) -> bool | None:
    """Whether a regular expression is found in a text, in time linear in it; None if it cannot be read."""
    validator = _validator(pattern)
    if validator is None:
        return None
    try:
        validator.validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=16)
def _validator(pattern: str) -> SchemaValidator | None:
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:
        return None


def has_look_around(pattern: str) -> bool:
    return any(pattern.startswith(LOOK_AROUND, index) for index, letter, _ in _syntax(pattern) if letter == "(")


def split_look_aheads(pattern: str) -> tuple[list[str], bool]:
    """Patterns that all hold where this one does, and whether negative look-aheads at its beginning are left out."""
    start, ahead, left_out = 1, list[str](), False
    opened, closing = list[int](), dict[int, int]()  # a parenthesis -> the one that closes it
    for index, letter, depth in _syntax(pattern):
        if letter == "|" and depth == 0:
            return [pattern], False
        if letter == "(":
            opened.append(index)
        elif letter == ")" and opened:
            closing[opened.pop()] = index
    while pattern.startswith("^") and pattern.startswith(AHEAD, start) and start in closing:
        if pattern.startswith("(?=", start):
            ahead.append(f"^(?:{pattern[start + 3 : closing[start]]})")
        else:
            left_out = True
        start = closing[start] + 1
    return [f"^{pattern[start:]}", *ahead] if start > 1 else [pattern], left_out


def _syntax(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Index, letter and depth of the parentheses and bars that are no literals."""
    depth, is_in_class, index = 0, False, 0
    while index < len(pattern):
        letter = pattern[index]
        if letter == "\\":
            index += 1
        elif is_in_class:
            is_in_class = letter != "]"
        elif letter == "[":
            is_in_class = True
        elif letter == "(":
            yield index, letter, depth
            depth += 1
        elif letter == ")":
            depth -= 1
            yield index, letter, depth
        elif letter == "|":
            yield index, letter, depth
        index += 1
