from __future__ import annotations

import re

import pytest

from atom.config.typed_json import parse_value, parse_values, read_object
from atom.errors import ConfigError


def test_values_have_commas_between_them():
    assert parse_values("x", ' {"a": [1, null]} , "b,c" ,2') == [{"a": [1, None]}, "b,c", 2]
    assert parse_value("x", "[1.5]") == [1.5]


def test_a_key_that_is_a_whole_number_is_one():
    assert parse_value("x", '{"5": 1, "-7": 1, "05": 1, "1.5": 1, "a": {"0": 1}}') == {
        **{5: 1, -7: 1, "05": 1, "1.5": 1},
        "a": {0: 1},
    }


@pytest.mark.parametrize("text", ["", "{", "1 2", "1,", "nope", '{"a": 1}}', "'a'"])
def test_what_is_no_json_is_a_value_error(text: str):
    with pytest.raises(ValueError, match=r"\w"):
        parse_values("x", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "--flag=[1] is no JSON object"),
        ("{", "--flag={ is no JSON ("),
        ("{},{}", "--flag={},{} is no JSON (there is more than one value)"),
        ("[" * 100_000, "--flag: it is nested deeper than 64"),
    ],
)
def test_an_object_that_cannot_be_read_is_refused_with_its_flag(text: str, message: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        read_object(f"--flag={text}", text)
