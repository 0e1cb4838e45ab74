from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.config.tool_formats import format_files, read_format
from atom.serve.output.call_deltas import ToolDelta
from atom.serve.output.tool_parser import CallReader

FORMATS = [name for name in format_files() if read_format(name).call]
TOOLS = ("f", "get_weather")
PARIS = '{"city": "Paris"}'


def reader(tool_format: str | None, **options: Any) -> CallReader:
    numbers = itertools.count(1)
    options = {"tools": TOOLS, "new_id": lambda: f"id{next(numbers)}", **options}
    return CallReader(read_format(tool_format) if tool_format else None, **options)


def read(tool_format: str | None, pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, str]], int]:
    """Content, the names and arguments of all calls that began, and how many of them are whole."""
    each = reader(tool_format, **options)
    content, calls, ids = "", list[tuple[str, str]](), set[str]()
    for text, deltas in [*map(each.push, pieces), each.finish()]:
        content += text
        for index, id, name, arguments in deltas:
            assert (id is None) == (name is None) == (index < len(calls))
            if id is not None:
                assert index == len(calls) and id not in ids
                ids.add(id)
                calls.append((name or "", ""))
            calls[index] = (calls[index][0], calls[index][1] + arguments)
    return content, calls, sum(each.whole)


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        # an object or a list is the whole answer
        ("json", '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("json", '\n {"name":"f","arguments":{"a":[1,{"b":"}"}]}}\n', "", [("f", '{"a":[1,{"b":"}"}]}')]),
        ("json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("json", '{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        (
            "json",
            '[{"name": "f", "arguments": {}}, {"name": "get_weather", "arguments": ' + PARIS + "}]",
            "",
            [("f", "{}"), ("get_weather", PARIS)],
        ),
        # after a marker
        ("json", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "VvvODy9mT"}]', "", [("f", "{}")]),
        ("json", '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
        ("json", 'I look.\n[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "I look.", [("f", "{}")]),
        # between tags
        ("tagged_json", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", "{}")]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', "", [("f", "{}")]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (
            "tagged_json",
            'I look.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
            '{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>\nDone.\n",
            "I look.Done.\n",
            [("f", "{}"), ("get_weather", PARIS)],
        ),
        (
            "tagged_json",
            '<tool_call>[{"name": "f", "arguments": {}},\n{"name": "f", "arguments": {"a": 1}}]</tool_call>',
            "",
            [("f", "{}"), ("f", '{"a": 1}')],
        ),
        # after the python tag, or bare
        ("python_tag", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("python_tag", 'I look.<|python_tag|>{"name": "f", "parameters": {}}', "I look.", [("f", "{}")]),
        ("python_tag", '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            "python_tag",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 1}}\n'
            '{"name": "f", "parameters": {"a": 2}}',
            "",
            [("f", "{}"), ("f", '{"a": 1}'), ("f", '{"a": 2}')],
        ),
        ("python_tag", "[f()]", "", [("f", "{}")]),
        ("python_tag", "<|python_tag|>[f()]", "", [("f", "{}")]),
        (
            "python_tag",
            '[f(a=1, b="x\\n", c=[True, None, (1.5,)], d={\'k\': -2},), get_weather( city = "Zürich" )]',
            "",
            [("f", '{"a": 1, "b": "x\\n", "c": [true, null, [1.5]], "d": {"k": -2}}'), ("get_weather", '{"city": "Zürich"}')],
        ),
    ],
)  # fmt: skip
def test_calls_are_separated_from_content(tool_format: str, text: str, content: str, calls: list[tuple[str, str]]):
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert read(tool_format, pieces) == (content, calls, len(calls))


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("json", "The answer is 4."),
        ("json", ""),
        ("json", " \n"),
        ("json", '{"answer": 42, "list": [1]}'),
        ("json", "[1, 2]"),
        ("json", "[]"),
        ("json", '["f"]'),
        ("json", 'Call {"name": "f", "parameters": {}}'),
        ("json", '```json\n{"name": "f", "parameters": {}}\n```'),
        ("json", '{"name": "nobody", "parameters": {}}'),
        ("json", '{"name": "f"'),
        ("json", '{"name": "f", "x": 1}'),
        ("json", '{"name": "f", "parameters": []}'),
        ("json", '{"name": "f", "parameters": "[]"}'),
        ("json", '{"name": "f", "parameters": "{} x"}'),
        ("json", '{"name": "f", "parameters": "none"}'),
        ("json", '{"name": "f", "parameters": nul'),
        ("json", '{"name": "f", "parameters": "{'),
        ("json", '{"name": 1, "parameters": {}}'),
        ("json", '{"name": "f", "name": "f", "parameters": {}}'),
        ("json", '{"parameters": {}, "arguments": {}, "name": "f"}'),
        ("json", '{"parameters": {}}'),
        ("json", '{"name": "'),
        ("json", "[TOOL_CALLS]"),
        ("json", "[TOOL_"),
        ("json", "[TOOL_CALLS]f[ARGS]{}"),
        ("json", "[f()]"),
        ("tagged_json", '{"name": "f", "arguments": {}}'),
        ("tagged_json", "\n\nThe tag is <tool_call>.\n\n"),
        ("tagged_json", '\n<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>\n'),
        ("tagged_json", "<tool_call>[]</tool_call>"),
        ("tagged_json", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("tagged_json", "a < b </tool_call>"),
        ("tagged_json", "<tool_call>"),
        ("tagged_json", "\n<tool_c"),
        ("python_tag", "<|python_tag|>import os\nprint(os.getcwd())"),
        ("python_tag", '<|python_tag|>brave_search.call(query="x")'),
        ("python_tag", "[link](https://example.org)"),
        ("python_tag", "[f]"),
        ("python_tag", "[1] first"),
        ("python_tag", "[f(1)]"),
        ("python_tag", "[f(a=b)]"),
        ("python_tag", "[f(a=1+1)]"),
        ("python_tag", "[f(a=__import__('os').system('ls'))]"),
        ("python_tag", "[f(a=1, a=2)]"),
        ("python_tag", "[f(**{'a': 1})]"),
        ("python_tag", "[f (a=1)]"),
        ("python_tag", "[nobody(a=1)]"),
        ("python_tag", "[f(a='\\ud800')]"),
        ("python_tag", "f(a=1)"),
        ("python_tag", "[f(a=1"),
        ("python_tag", "[[f(a=1)]]"),
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(tool_format: str, text: str):
    assert read(tool_format, [text]) == (text, [], 0)
    assert read(tool_format, list(text)) == (text, [], 0)


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments", "content"),
    [
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', '{"a": ', "oops}}</tool_call>"),
        ("tagged_json", 'So.\n<tool_call>\n{"name": "f", "arguments": {"a" 1}}', '{"a" ', "So.1}}"),
        ("json", '[{"name": "f", "parameters": {"a": 01}}]', '{"a": 0', "1}}]"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=b c</function>", '{"a": 1', "<parameter=b c</function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>\n<parameter=a>2</parameter>", '{"a": 1', "\n<parameter=a>2</parameter>"),
        (None, '{"a": 1, 2} So.', '{"a": 1, ', "2} So."),
    ],
)  # fmt: skip
def test_a_call_that_breaks_stays_incomplete_and_what_follows_is_content(
    tool_format: str | None, text: str, arguments: str, content: str
):
    options: dict[str, Any] = {"tools": {"f": {}}, "named": None if tool_format else "f"}
    for pieces in ([text], list(text)):
        assert read(tool_format, pieces, **options) == (content, [("f", arguments)], 0)


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "arguments"),
    [
        ("json", '{"name": "f", "parameters": {"a": "Par', "", '{"a": "Par'),
        ("tagged_json", 'So.\n<tool_call>\n{"name": "f", "arguments": {"a": tr', "So.", '{"a": tr'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nPar", "", '{"a": 1, "b": "Par'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", "", '{"a": 1'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "", '{"a": 1'),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parame", "", '{"a": 1'),
        (None, '{"a": ', "", '{"a": '),
    ],
)  # fmt: skip
def test_an_answer_that_is_cut_off_ends_with_an_incomplete_call(
    tool_format: str | None, text: str, content: str, arguments: str
):
    options: dict[str, Any] = {"tools": {"f": {}}, "named": None if tool_format else "f"}
    for pieces in ([text], list(text)):
        assert read(tool_format, pieces, **options) == (content, [("f", arguments)], 0)


def test_an_unfinished_call_is_no_content_where_calls_are_forced():
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]'
    for end in range(len(text) + 1):
        content, _, num_calls = read("json", list(text[:end]), is_forced=True)
        assert (content, num_calls) == ("", text[:end].count("1}"))
    assert read("json", ['[{"na']) == ('[{"na', [], 0), "of a model that was free to write it"


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        # no arguments
        ("json", '{"name": "f"}', "", [("f", "{}")]),
        ("tagged_json", '<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("json", '{"parameters": null, "name": "f"}', "", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]null", "", [("f", "{}")]),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>", "", [("f", "{}")]),
        ("glm45", "<tool_call>f</tool_call>", "", [("f", "{}")]),
        # arguments as a text
        ("tagged_json", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("json", '{"parameters": "{\\"a\\": 1}", "name": "f"}', "", [("f", '{"a": 1}')]),
        ("json", '{"name": "f", "parameters": " "}', "", [("f", "{}")]),
        ("json", '{"name": "f", "parameters": "{\\"a\\": \\"x\\ny\\"}"}', "", [("f", '{"a": "x\\ny"}')]),
        # braces that lack
        ("tagged_json", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
        ("tagged_json", '<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>', "", [("f", '{"a": 1}')]),
        ("json", '[{"name": "f", "arguments": {"a": 1}, {"name": "f", "arguments": {}}]', "", [("f", '{"a": 1}'), ("f", "{}")]),
        ("json", '[{"name": "f", "arguments": {"a": 1}]', "", [("f", '{"a": 1}')]),
        # one after another, without a separator
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", "{}"), ("f", '{"a": 1}')]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}}\n{"a": 1}', '\n{"a": 1}', [("f", "{}")]),
        # one too many
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>', ', "x": 1}</tool_call>', [("f", "{}")]),
        ("json", '{"name": "f", "parameters": {"a": 1}, "name": "f"}', ', "name": "f"}', [("f", '{"a": 1}')]),
        # control characters in strings
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>', "", [("f", '{"a": "x\\ny\\t"}')]),
        ("json", '{"arguments": {"a": "x\ny"}, "name": "f"}', "", [("f", '{"a": "x\\ny"}')]),
        ("pythonic", '[f(a="x\ny")]', "", [("f", '{"a": "x\\ny"}')]),
        # markers in strings
        ("tagged_json", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "", [("f", '{"a": "</tool_call>"}')]),
        ("python_tag", '{"name": "f", "parameters": {"a": "x; y"}}; {"name": "f", "parameters": {}}', "", [("f", '{"a": "x; y"}'), ("f", "{}")]),
    ],
)  # fmt: skip
def test_almost_a_call_is_one_where_its_arguments_are_whole(
    tool_format: str, text: str, content: str, calls: list[tuple[str, str]]
):
    for pieces in ([text], list(text)):
        assert read(tool_format, pieces) == (content, calls, len(calls))


def test_a_call_after_a_broken_one_has_the_next_index():
    broken, call = '{"name": "f", "arguments": {"a"}}</tool_call>', '{"name": "f", "arguments": {}}</tool_call>'
    expected = ("}}</tool_call>", [("f", '{"a"'), ("f", "{}")], 1)
    assert read("tagged_json", [f"<tool_call>{broken}<tool_call>{call}"]) == expected


def test_a_broken_part_of_a_list_leaves_the_calls_before_it():
    text = '[{"name": "f", "arguments": {}}, {"name": "nobody", "arguments": {}}]'
    assert read("json", [text]) == (', {"name": "nobody", "arguments": {}}]', [("f", "{}")], 1)


def test_an_opener_within_a_broken_call_opens_the_next():
    text = '<tool_call>{"name": <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("tagged_json", [text]) == ('<tool_call>{"name": ', [("f", "{}")], 1)


def test_text_after_a_bare_call_is_content():
    text = '{"name": "f", "parameters": {}}\nHere you are: {"name": "f", "parameters": {}}'
    assert read("json", [text]) == ('Here you are: {"name": "f", "parameters": {}}', [("f", "{}")], 1)


def test_any_name_can_be_called_where_none_are_given():
    text = '{"name": "anything", "parameters": {}}'
    assert read("json", [text], tools=None) == ("", [("anything", "{}")], 1)
    assert read("json", ['{"name": "", "parameters": {}}'], tools=None)[1] == []
    assert read("json", ['{"name": "\\ud800", "parameters": {}}'], tools=None)[1] == []
    assert read("json", [text], tools=())[0] == text


def test_arguments_are_streamed_while_they_arrive():
    each = reader("tagged_json")
    assert each.push('Sure.\n<tool_call>{"name": "f') == ("Sure.", [])
    assert each.push('", "arguments": ') == ("", [])
    assert each.push('{"a') == ("", [ToolDelta(0, "id1", "f", '{"a')])
    assert each.push('": "x') == ("", [ToolDelta(0, None, None, '": "x')])
    assert each.push('y", "b": 12') == ("", [ToolDelta(0, None, None, 'y", "b": 12')])
    assert each.push("3") == ("", [ToolDelta(0, None, None, "3")])
    assert sum(each.whole) == 0
    assert each.push("}") == ("", [ToolDelta(0, None, None, "}")])
    assert sum(each.whole) == 1
    assert each.push("}\n</tool") == ("", [])
    assert each.push('_call><tool_call>{"name": "f", "arguments": {}}') == ("", [ToolDelta(1, "id2", "f", "{}")])
    assert each.finish() == ("", [])
    assert sum(each.whole) == 2


def test_arguments_before_the_name_come_with_it():
    each = reader("json")
    assert each.push('{"arguments": {"a": 1}, ') == ("", [])
    assert each.push('"name": "f') == ("", [])
    assert each.push('"') == ("", [ToolDelta(0, "id1", "f", '{"a": 1}')])


def test_calls_of_a_python_list_come_one_by_one():
    each = reader("python_tag")
    assert each.push("[f(a=1") == ("", [])
    assert each.push("), f(") == ("", [ToolDelta(0, "id1", "f", '{"a": 1}')])
    assert each.push(")") == ("", [ToolDelta(1, "id2", "f", "{}")])
    assert each.push("]") == ("", [])


@pytest.mark.parametrize("tool_format", FORMATS)
def test_plain_text_is_not_held_back(tool_format: str):
    each = reader(tool_format)
    for piece in ["I", " am", " a < b", " [1],", " {x}", " text.", "\tYes"]:
        assert each.push(piece) == (piece, [])


def test_only_what_may_be_an_opener_is_held_back():
    each = reader("tagged_json")
    assert each.push("a\n\n") == ("a", [])
    assert each.push("b <tool_") == ("\n\nb ", [])
    assert each.push("box>") == ("<tool_box>", [])
    assert each.push("\n<") == ("", [])
    assert each.finish() == ("\n<", [])


def test_an_answer_in_json_is_given_out_once_it_cannot_be_a_call():
    each = reader("json")
    assert each.push(' {"na') == ("", [])
    assert each.push('nswer"') == (' {"nanswer"', [])
    assert each.push(": [1") == (": [1", [])


def test_a_name_that_nobody_has_is_given_out_at_its_end():
    each = reader("tagged_json")
    assert each.push('<tool_call>{"name": "nobody') == ("", [])
    assert each.push('"') == ('<tool_call>{"name": "nobody"', [])


def test_an_answer_may_be_the_arguments_of_one_function():
    assert read(None, [PARIS], named="get_weather") == ("", [("get_weather", PARIS)], 1)
    assert read(None, list(f"\n{PARIS}\n"), named="get_weather") == ("", [("get_weather", PARIS)], 1)
    each = reader(None, named="f")
    assert each.push('{"a": ') == ("", [ToolDelta(0, "id1", "f", '{"a": ')])
    assert each.push("1}") == ("", [ToolDelta(0, None, None, "1}")])
    assert sum(each.whole) == 1


@pytest.mark.parametrize("text", ["[1]", "No.", ""])
def test_what_are_no_arguments_is_content(text: str):
    assert read(None, list(text), named="f") == (text, [], 0)
    assert read(None, [text], named="f") == (text, [], 0)


names = st.sampled_from(TOOLS)
arguments = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans()), max_size=3)
said = st.text(alphabet="abc <>/{}[]\"'\n").map(str.strip).filter(lambda text: text and "<tool_call>" not in text)


@given(st.lists(st.tuples(said, names, arguments, st.sampled_from([None, 2])), max_size=4), said)
def test_what_a_template_writes_is_read_back(turns: list[tuple[str, str, dict[str, Any], int | None]], last: str):
    text, expected = "", []
    for content, name, values, indent in turns:
        call = json.dumps({"name": name, "arguments": values}, indent=indent, ensure_ascii=False)
        text += f"{content}\n<tool_call>\n{call}\n</tool_call>\n"
        expected.append((name, values))
    content, calls, num_calls = read("tagged_json", [text + last])
    assert content == "".join(content for content, *_ in turns) + last
    assert [(name, json.loads(each)) for name, each in calls] == expected
    assert num_calls == len(turns)


def test_long_arguments_come_piece_by_piece():
    each, value = reader("json"), "x" * 50_000
    assert each.push('{"name": "f", "arguments": {"a": "')[1] == [ToolDelta(0, "id1", "f", '{"a": "')]
    for start in range(0, len(value), 5):
        assert each.push(value[start : start + 5]) == ("", [ToolDelta(0, None, None, "xxxxx")])
