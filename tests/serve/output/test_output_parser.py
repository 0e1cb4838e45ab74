from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config.tool_formats import read_format
from atom.serve.output.call_deltas import new_call_id
from atom.serve.output.output_parser import (
    Answer,
    Delta,
    OutputParser,
    ToolCall,
    ToolDelta,
    gather,
    locate,
    markers,
)
from atom.serve.output.reasoning_parser import ReasoningSplitter
from atom.serve.output.tool_parser import CallReader

TAGS = ("<think>", "</think>")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def make(
    tool_format: str | None,
    reasoning: tuple[str, str] | None = TAGS,
    is_in_reasoning: bool = False,
    tools: list[str] | None = None,
    is_parallel: bool = True,
    **options: Any,
) -> OutputParser:
    splitter = ReasoningSplitter(reasoning, is_inside=is_in_reasoning) if reasoning else None
    has_calls = tool_format or "named" in options
    reader = CallReader(read_format(tool_format) if tool_format else None, tools, **options) if has_calls else None
    return OutputParser(splitter, reader, is_parallel=is_parallel)


def parse(pieces: list[str], tool_format: str | None = "tagged_json", **options: Any) -> tuple[Answer, bool]:
    """The answer, and whether it ends with calls. Ids are call_1, call_2 …"""
    numbers = itertools.count(1)
    parser = make(tool_format, **{"tools": ["f"], "new_id": lambda: f"call_{next(numbers)}", **options})
    return gather([*map(parser.push, pieces), parser.finish()]), parser.has_whole_calls


def test_an_answer_has_reasoning_then_content_and_calls():
    text = f"<think>\nI need f.\n</think>\n\nOne moment.\n{CALL}\n"
    expected = Answer("One moment.", "I need f.", [ToolCall("f", '{"a": 1}', "call_1")])
    assert parse([text]) == (expected, True)
    assert parse(list(text)) == (expected, True)


def test_a_call_within_reasoning_is_reasoning():
    assert parse([f"<think>I could say {CALL}</think>No."]) == (Answer("No.", f"I could say {CALL}", []), False)
    assert parse([f"I could say {CALL}"], is_in_reasoning=True) == (Answer("", f"I could say {CALL}", []), False)


def test_a_bare_call_may_follow_reasoning():
    text = '<think>Hm.</think>\n\n{"name": "f", "parameters": {}}'
    for tool_format in ("json", "python_tag"):
        assert parse(list(text), tool_format) == (Answer("", "Hm.", [ToolCall("f", "{}", "call_1")]), True)


def test_nothing_is_looked_for_where_nothing_is_asked():
    text = f"<think>a</think>\n{CALL}\n"
    parser = OutputParser(None, None)
    assert [parser.push(text), parser.push("<"), parser.finish()] == [
        Delta(text, "", [], ((0, len(text)),)),
        Delta("<", "", [], ((len(text), len(text) + 1),)),
        Delta("", "", []),
    ]
    assert not parser.has_whole_calls


def test_deltas_of_a_stream_carry_what_is_new():
    parser = make("tagged_json", is_in_reasoning=True, new_id=lambda: "call_x")
    assert parser.push("Hm") == Delta("", "Hm", [])
    assert parser.push(".</think>\n\nSo") == Delta("So", ".", [], ((13, 15),))
    assert parser.push(CALL[:-15]) == Delta("", "", [ToolDelta(0, "call_x", "f", '{"a": 1')])
    assert not parser.has_whole_calls
    assert parser.push(CALL[-15:]) == Delta("", "", [ToolDelta(0, None, None, "}")])
    assert parser.finish() == Delta("", "", [])
    assert parser.has_whole_calls


def test_what_was_held_back_comes_at_the_end():
    parser = make("tagged_json")
    assert parser.push("\n<thi") == Delta("", "", [])
    assert parser.finish() == Delta("\n<thi", "", [], ((0, 5),))
    parser = make("json")
    assert parser.push('{"name": "f", ') == Delta("", "", [])
    assert parser.finish() == Delta('{"name": "f", ', "", [], ((0, 14),))


def test_an_answer_may_be_one_functions_arguments():
    expected = Answer("", "", [ToolCall("g", '{"a": 1}', "call_1")])
    assert parse(list('{"a": 1}'), None, reasoning=None, named="g") == (expected, True)


def test_an_answer_that_is_cut_off_does_not_end_with_calls():
    cut_off = CALL[: CALL.index(" 1}")]
    for before, calls in (("", []), (CALL, [ToolCall("f", '{"a": 1}', "call_1")])):
        cut = ToolCall("f", '{"a":', f"call_{len(calls) + 1}")
        assert parse([before + cut_off]) == (Answer("", "", [*calls, cut]), False)
    one = parse([CALL + cut_off], is_parallel=False)
    assert one == (Answer("", "", [ToolCall("f", '{"a": 1}', "call_1")]), True), "the second is left out"


def test_deltas_add_up_to_an_answer():
    first = [ToolDelta(0, "x", "f", '{"a'), ToolDelta(1, "y", "g", "{}")]
    deltas = [Delta("a", "", first), Delta("", "b", []), Delta("c", "d", [ToolDelta(0, None, None, '": 1}')])]
    assert gather(deltas) == Answer("ac", "bd", [ToolCall("f", '{"a": 1}', "x"), ToolCall("g", "{}", "y")])
    assert gather([]) == Answer("", "", [])


def test_a_text_that_is_in_two_parts_of_another_is_found_there():
    parts = [(10, 13), (20, 22), (30, 40)]  # characters 0 to 2, 3 and 4, 5 to 14 of the text that they are
    assert locate([(0, 2)], parts) == [(10, 12)]
    assert locate([(2, 4), (6, 7)], parts) == [(12, 13), (20, 21), (31, 32)]
    assert locate([(4, 6)], [(10, 15), (15, 20)]) == [(14, 16)]


def test_an_id_is_a_random_one():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    assert re.fullmatch("call_[0-9a-f]{24}", gather([make("tagged_json", None).push(CALL)]).calls[0].id)


@pytest.mark.parametrize(
    ("tool_format", "reasoning", "expected"),
    [
        (None, None, []),
        ("json", None, ["[TOOL_CALLS]"]),
        ("tagged_json", TAGS, ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        ("python_tag", None, ["<|python_tag|>"]),
        (None, ("<a>", "</a>"), ["<a>", "</a>"]),
    ],
)
def test_the_texts_that_must_survive_decoding(
    tool_format: str | None, reasoning: tuple[str, str] | None, expected: list[str]
):
    assert markers(read_format(tool_format) if tool_format else None, reasoning) == expected


fragments = st.sampled_from(["<think>", "</think>", CALL, "\n", "<", "tool_call>", "a", " ", CALL[:30], '{"name": "f"'])


@settings(max_examples=120)
@given(
    st.lists(fragments, max_size=10).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([None, "json", "tagged_json", "python_tag"]),
    st.sampled_from([None, TAGS]),
    st.booleans(),
)
def test_an_answer_does_not_depend_on_where_its_text_is_cut(
    text: str, cuts: list[int], tool_format: str | None, reasoning: tuple[str, str] | None, is_in_reasoning: bool
):
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    options: dict[str, Any] = {"reasoning": reasoning, "is_in_reasoning": is_in_reasoning}
    whole = parse([text], tool_format, **options)
    assert parse(pieces, tool_format, **options) == whole
    assert parse(list(text), tool_format, **options) == whole
    parser = make(tool_format, tools=["f"], **options)
    for delta in [*map(parser.push, pieces), parser.finish()]:
        assert "".join(text[start:end] for start, end in delta.places) == delta.content
