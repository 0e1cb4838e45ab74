from __future__ import annotations

import re

import pytest

from atom.runtime.requests.schemas.patterns import has_look_around, split_look_aheads


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^(?=.*[A-Z])(?=.*[0-9]).{4,}$", ["aB3d", "abcd", "A1", "AAAA", "0A00"]),
        (r"^(?=(a|b)\))[ab)]+$", ["a)", "b))", "ab", "))", ")"]),
        (r"^(?=[)(]a)..$", [")a", "(a", "aa", "(b"]),
        ("^a(?=b)b$", ["ab", "a", "b"]),
        ("^(?=a)a|b$", ["a", "xb", "b", "c"]),
    ],
)
def test_what_all_of_the_patterns_match_the_pattern_matches(pattern: str, texts: list[str]):
    patterns, left_out = split_look_aheads(pattern)
    assert not left_out
    for text in texts:
        assert all(re.search(each, text) for each in patterns) == bool(re.search(pattern, text)), text


def test_negative_look_aheads_at_the_beginning_are_left_out():
    assert split_look_aheads(r"^(?!\.)(?=b)a$") == (["^a$", "^(?:b)"], True)
    assert split_look_aheads(r"a(?!b)") == (["a(?!b)"], False)


def test_look_around_is_distinguished_from_literals():
    assert all(map(has_look_around, ["(?=a)", "a(?!b)", "(?<=a)b", "((?<!a)b)"]))
    assert not any(map(has_look_around, [r"\(?=a", "[(?=a]", "(?:a)", "(?<name>a)", ""]))
