"""Take look-around out of regular expressions, which llguidance does not read.

split_look_aheads("^(?=.*[A-Z])(?=.*[0-9]).{8,}$")      # ["^.{8,}$", "^(?:.*[A-Z])", "^(?:.*[0-9])"], False
split_look_aheads("^(?!x)[a-z]+$")                      # ["^[a-z]+$"], True: something was left out
"""

from __future__ import annotations

from collections.abc import Iterator

AHEAD = ("(?=", "(?!")
LOOK_AROUND = (*AHEAD, "(?<=", "(?<!")


def has_look_around(pattern: str) -> bool:
    return any(pattern.startswith(LOOK_AROUND, index) for index, letter, _ in _syntax(pattern) if letter == "(")


def split_look_aheads(pattern: str) -> tuple[list[str], bool]:
    """Patterns that all hold where this one does, and whether negative look-aheads at its beginning are left out."""
    start, ahead, left_out = 1, list[str](), False
    if not pattern.startswith("^") or any(letter == "|" and depth == 0 for _, letter, depth in _syntax(pattern)):
        return [pattern], False
    while pattern.startswith(AHEAD, start):
        end = _closing(pattern, start)
        if pattern.startswith("(?=", start):
            ahead.append(f"^(?:{pattern[start + 3 : end]})")
        else:
            left_out = True
        start = end + 1
    return [f"^{pattern[start:]}", *ahead], left_out


def _closing(pattern: str, start: int) -> int:
    """The index of the parenthesis that closes the one at start; the pattern's length where none does."""
    depths = ((index, depth) for index, letter, depth in _syntax(pattern) if letter == ")" and index > start)
    level = sum(1 if letter == "(" else -1 for index, letter, _ in _syntax(pattern) if letter in "()" and index < start)
    return next((index for index, depth in depths if depth == level), len(pattern))


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
