"""What is read is held against `json` and `ast.literal_eval`."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.serve.output.incremental_json import MAX_DEPTH, read_json, read_json_string, read_python, validate_json
from atom.serve.output.incremental_text import ParseError, Reading, TextBuffer

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


def read(reader: Callable[[TextBuffer], Reading[Any]], pieces: list[str]) -> tuple[Any, str]:
    """What a reader makes of text that comes in pieces, and the text that it leaves. ParseError, or the answer."""
    text = TextBuffer()
    reading = reader(text)
    for num_read, piece in enumerate(pieces, 1):
        text.push(piece)
        try:
            next(reading)
        except StopIteration as end:
            return end.value, text.text[text.at :] + "".join(pieces[num_read:])
    text.is_ended = True
    with pytest.raises(StopIteration) as end:
        next(reading)
    return end.value.value, text.text[text.at :]


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def is_read(reader: Callable[[TextBuffer], Reading[Any]], text: str) -> bool:
    """Whether all of the text is one value."""
    try:
        return read(reader, [text])[1] == ""
    except ParseError:
        return False


@given(value=values, indent=st.sampled_from([None, 0, 2]), is_ascii=st.booleans())
def test_json_is_read_up_to_its_end(value: Any, indent: int | None, is_ascii: bool):
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert read(read_json, list(f"{text} rest")) == (None, " rest")
    assert read(read_json, [f"{text}]"]) == (None, "]")


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "b": [true, null, -0.5e+3]}', '"\\u00e9\\n"', "[]", "{}", "-0", "1E9", '[[[["x"]]]]', '{ "a" :\n[ ] }'],
)
def test_what_json_takes_is_json(text: str):
    assert is_read(read_json, text) and strict_json(text) is not Ellipsis


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,]", '{"a": 1,}', "{a: 1}", "{'a': 1}", '"\\x41"', '"\\u12g4"', "01", "1.", ".5", "+1", "nul", "NaN",
        "Infinity", "--1", "1e", '"a', '"\\', '{"a" 1}', '{"a": }', "[1 2]", "True", "{1: 2}", '{"a": 1 "b": 2}',
    ],
)  # fmt: skip
def test_what_json_refuses_is_none(text: str):
    with pytest.raises(ValueError):
        strict_json(text)
    assert not is_read(read_json, text)


@given(st.text(alphabet='{}[]",:\\ntruefals0123456789.eE+- u', max_size=12))
def test_any_text_is_json_where_it_is_for_the_json_package(text: str):
    try:
        strict_json(text)
        is_json = text == text.strip(" \n")
    except ValueError:
        is_json = False
    assert is_read(read_json, text) == is_json


@given(st.text())
def test_a_json_string_is_read_as_by_json(text: str):
    assert read(read_json_string, list(json.dumps(text)))[0] == text
    assert read(read_json_string, [json.dumps(text, ensure_ascii=False)])[0] == text


@given(values)
def test_a_python_literal_is_the_value_that_its_repr_shows(value: Any):
    assert read(read_python, list(repr(value) + ","))[0] == value
    assert is_read(read_python, repr(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("()", []),
        ("[1, 2,]", [1, 2]),
        ("{'a': 1,}", {"a": 1}),
        ("'it\\'s'", "it's"),
        ('"""two "quoted"\nlines"""', 'two "quoted"\nlines'),
        ("''", ""),
        ("'\\x41\\u00e9\\U0001f600\\101\\d\\\n'", "Aé😀A\\d"),
        ("+1", 1),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e3", 1000.0),
        ("00", 0),
    ],
)
def test_a_python_literal_means_what_python_means(text: str, value: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # \d
        theirs = ast.literal_eval(text)
    assert (list(theirs) if isinstance(theirs, tuple) else theirs) == value
    assert read(read_python, list(text + " "))[0] == value


def test_control_characters_in_strings_are_read_and_written_as_escapes():
    text = '{"a\tb": "x\ny\r\\n",\n\t"c": "\x01"}'
    escaped = '{"a\\tb": "x\\ny\\r\\n",\n\t"c": "\\u0001"}'
    assert validate_json(text) == escaped and strict_json(escaped) == {"a\tb": "x\ny\r\n", "c": "\x01"}
    assert read(read_json_string, list('"x\ny"'))[0] == "x\ny"
    assert read(read_python, list("'x\ny' "))[0] == "x\ny"


@pytest.mark.parametrize(
    ("text", "kept"),
    [('{"a": oops}', '{"a": '), ("[01]", "[0"), ("[trux]", "[tru"), ("[1.]", "[1."), ('"\\x"', '"\\'), ("[-a]", "[-"), ("[1 2]", "[1 ")],
)  # fmt: skip
def test_what_is_read_before_a_wrong_character_begins_a_value(text: str, kept: str):
    buffer = TextBuffer()
    buffer.push(text)
    with pytest.raises(ParseError):
        next(read_json(buffer))
    assert text[: buffer.at] == kept


def test_the_constants_of_json_are_constants_in_python_literals_too():
    assert read(read_python, ["[true, false, null]"])[0] == [True, False, None]


@pytest.mark.parametrize(
    "text",
    [
        "1 + 1", "x", "f()", "{1: 2}", "{1, 2}", "b'x'", "r'x'", "f'{x}'", "1j", "...", "'a' 'b'", "lambda: 1", "[x for x in y]",
        "__import__('os')", "'\\N{DASH}'", "'\\x4'", "'\\U00110000'", "1_000", "0x10", "007", "1e999", "-1e999",
        "-'a'", "not 1", "a.b", "[1", "'a", "'\\", "(", "[,]", "nan", "1" * 5000,
    ],
)  # fmt: skip
def test_what_no_tool_argument_can_be_is_not_read(text: str):
    assert not is_read(read_python, text)


@given(st.text(alphabet="[](){}'\",:\\n TrueNonx0123456789.e+-", max_size=10))
def test_any_text_that_is_read_is_what_python_reads(text: str):
    try:
        value, rest = read(read_python, [text])
    except ParseError:
        return
    said = text[: len(text) - len(rest)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plain(ast.literal_eval(said)) == value


def plain(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(("reader", "opening", "closing"), [(read_json, "[", "]"), (read_python, "(", ",)")])
def test_brackets_nest_only_so_deep(reader: Callable[[TextBuffer], Reading[Any]], opening: str, closing: str):
    assert is_read(reader, opening * MAX_DEPTH + "1" + closing * MAX_DEPTH)
    assert not is_read(reader, opening * (MAX_DEPTH + 1) + "1" + closing * (MAX_DEPTH + 1))
    assert not is_read(reader, opening * 1_000_000)


@pytest.mark.parametrize("piece", ["-", "'", '"', "\\", "1", "a.", "1e", "'a'", "'''", "not ", "x if y else ", "1,"])
def test_endless_text_is_refused_and_breaks_nothing(piece: str):
    assert not is_read(read_python, piece * 100_000)
