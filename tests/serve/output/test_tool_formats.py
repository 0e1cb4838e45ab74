"""Every shipped format reads what its family's chat template writes, wherever the text is cut."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom.config.tool_formats import detect_format, format_files, make_format, read_format
from atom.errors import ConfigError
from atom.serve.output.channel_parser import ChannelReader
from atom.serve.output.tool_parser import CallReader

DOCS = Path(__file__).parents[3] / "docs" / "tool-calls.md"
PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "at": {"$ref": "#/$defs/Place"},
    "now": {"type": "boolean"},
    "often": {"$ref": "#/$defs/Often"},
    "places": {"type": "array", "items": {"$ref": "#/$defs/Spot"}},
    "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
}
OFTEN = {"anyOf": [{"$ref": "#/$defs/Often"}] * 99 + [{"type": "integer"}]}  # a schema of endless depth
SPOT = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
DEFINITIONS = {"Place": {"type": "object"}, "Often": OFTEN, "Spot": SPOT}
SCHEMA = {"type": "object", "properties": PARAMETERS, "$defs": DEFINITIONS}
TOOLS = {"get_weather": SCHEMA, "f": {"type": "object", "properties": {}}}
CALLS = [("get_weather", {"city": "Paris", "days": 3}), ("f", {})]

# what two calls look like, as the chat templates of the families write them
WRITTEN = {
    "json": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "f", "arguments": {}}]',
    "tagged_json": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "python_tag": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}; {"name": "f", "parameters": {}}',
    "pythonic": '[get_weather(city="Paris", days=3), f()]',
    "olmo3": '<function_calls>get_weather(city="Paris", days=3)\nf()</function_calls>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "f", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=3), f()]<|tool_call_end|>',
    "llama4": '<|python_start|>[get_weather(city="Paris", days=3), f()]<|python_end|>',
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</longcat_tool_call>\n'
    '<longcat_tool_call>\n{"name": "f", "arguments": {}}\n</longcat_tool_call>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:f{}<tool_call|>',
    "hy_v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
    ']<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "phi4_mini": 'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "f", "arguments": {}}]',
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 3}<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>',
}  # fmt: skip
IDS = {"kimi_k2": ["functions.get_weather:0", "functions.f:1"], "mistral": ["id1", "abc123def"]}


def make_reader(tool_format: Any, **options: Any) -> CallReader:
    numbers = itertools.count(1)
    options = {"tools": TOOLS, "new_id": lambda: f"id{next(numbers)}", **options}
    return (ChannelReader if tool_format.channels else CallReader)(tool_format, **options)


def read(tool_format: Any, pieces: list[str], **options: Any) -> tuple[str, str, list[tuple[str, str, str]], int]:
    """Content, reasoning, the ids, names and arguments of calls that began, and how many of them are whole."""
    reader = make_reader(tool_format, **options)
    content, reasoning, calls = "", "", list[tuple[str, str, str]]()
    for text, deltas in [*map(reader.push, pieces), reader.finish()]:
        content, reasoning = content + text, reasoning + reader.take_reasoning()
        for index, id, name, arguments in deltas:
            if id is not None:
                assert index == len(calls)
                calls.append((id, name or "", ""))
            calls[index] = (*calls[index][:2], calls[index][2] + arguments)
    return content, reasoning, calls, sum(reader.whole)


def test_every_format_is_shown_here():
    assert sorted(WRITTEN) == list(format_files())


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_template_writes_is_read_at_any_cut(name: str):
    tool_format, text = read_format(name), WRITTEN[name]
    expected = read(tool_format, [text])
    content, _, calls, num_calls = expected
    assert (content.strip(), num_calls) == ("", 2)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLS
    assert [id for id, *_ in calls] == IDS.get(name, ["id1", "id2"])
    cuts = [list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))]
    assert all(read(tool_format, pieces) == expected for pieces in cuts)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in ("pythonic", "harmony")])
def test_text_before_a_call_is_content(name: str):
    content, _, calls, num_calls = read(read_format(name), list(f"I look.\n{WRITTEN[name]}"))
    assert (content, num_calls, len(calls)) == ("I look.", 2, 2)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_that_breaks_off_is_never_lost(name: str):
    tool_format, text = read_format(name), WRITTEN[name].replace("get_weather", "nobody")
    broken = read(tool_format, [text])
    assert "nobody" in broken[0] and "Paris" in broken[0]
    for cut in range(len(text)):
        part = read(tool_format, [text[:cut]])
        assert part[2] or part[0] + part[1] == text[:cut].strip() or tool_format.channels or part[0] == text[:cut]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "kimi_k2", "qwen3_coder"])
def test_the_marker_of_all_calls_may_be_left_out(name: str):
    tool_format, text = read_format(name), WRITTEN[name]
    expected = read(tool_format, [text])
    for marker in (*tool_format.begin, *tool_format.end):
        text = text.replace(marker, "")
    for pieces in ([text], list(text)):
        content, *found = read(tool_format, pieces)
        assert (content.strip(), *found) == expected


QWEN, GLM, MINIMAX = (read_format(name) for name in ("qwen3_coder", "glm45", "minimax_m2"))
HTML = "<b>x</b></parameter>\n<parameter>y</parameter>; </function> </b> </tool_call>; <parameter=days>"


@pytest.mark.parametrize(
    ("tool_format", "text", "calls"),
    [
        # a parameter's end is left out
        (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>", [{"city": "Paris"}]),
        (QWEN, "<function=get_weather>\n<parameter=days>\n3\n</function>", [{"days": 3}]),
        (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", [{"city": "Paris", "days": 3}]),
        (QWEN, "<function=get_weather>\n<parameter=city>\nRome\n</function>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>", [{"city": "Rome"}, {"city": "Paris"}]),
        (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", [{"city": "Paris\n", "days": 3}]),
        (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</tool_call>", [{"city": "Paris"}]),
        # a call's end is left out
        (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>", [{"city": "Paris"}]),
        (QWEN, "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</tool_call>", [{"days": 3}]),
        (QWEN, "<tool_call>\n<function=get_weather>\n</tool_call>", [{}]),
        (MINIMAX, '<minimax:tool_call><invoke name="get_weather"><parameter name="days">3</parameter><invoke name="get_weather"></invoke></minimax:tool_call>', [{"days": 3}, {}]),
        # what looks like an end is a part of the value
        (QWEN, f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{HTML}\n</parameter>\n</function>\n</tool_call>", [{"city": HTML}]),
        (QWEN, "<function=get_weather>\n<parameter=city>\na <parameter=days> b\n<parameter=other>\n</parameter>\n</function>", [{"city": "a <parameter=days> b\n<parameter=other>"}]),
        (GLM, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>a</arg_value> b</tool_call> c</arg_value>\n</tool_call>", [{"city": "a</arg_value> b</tool_call> c"}]),
        (MINIMAX, '<minimax:tool_call><invoke name="get_weather"><parameter name="city"><parameter>\n <a></parameter>.</parameter></invoke></minimax:tool_call>', [{"city": "<parameter>\n <a></parameter>."}]),
        # an object's string may have a line break
        (QWEN, '<function=get_weather>\n<parameter=at>\n{"x": "a\nb"}\n</parameter>\n</function>', [{"at": {"x": "a\nb"}}]),
        (QWEN, "<function=get_weather>\n<parameter=city>\n\n\n</parameter>\n</function>", [{"city": "\n"}]),
        (QWEN, "<function=get_weather>\n<parameter=city>\n</parameter>\n</function>", [{"city": ""}]),
    ],
)  # fmt: skip
def test_parameters_are_read_by_what_goes_on_after_them(tool_format: Any, text: str, calls: list[dict[str, Any]]):
    for pieces in ([text], list(text)):
        content, _, found, num_calls = read(tool_format, pieces)
        assert (content, [json.loads(arguments) for *_, arguments in found]) == ("", calls)
        assert num_calls == len(calls)


GEMMA, DSML, M3, K3 = (read_format(name) for name in ("gemma4", "deepseek_v32", "minimax_m3", "kimi_k3"))


def dsml(key: str, is_string: str, value: str, block: str = "tool_calls") -> str:
    """A call with one parameter, in the block of DeepSeek V4 or that of V3.2."""
    parameter = f'<｜DSML｜parameter name="{key}" string="{is_string}">{value}</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="get_weather">\n{parameter}\n</｜DSML｜invoke>'
    return f"<｜DSML｜{block}>\n{call}\n</｜DSML｜{block}>"


TAG = "]<]minimax[>[<"


def element(key: str, *inside: str) -> str:
    return f"{TAG}{key}>{''.join(inside)}{TAG}/{key}>"


def m3(*elements: str) -> str:
    call = f'{TAG}invoke name="get_weather">{"".join(elements)}{TAG}/invoke>'
    return f"{TAG}tool_call>\n{call}\n{TAG}/tool_call>"


def k3(key: str, kind: str, value: str) -> str:
    """A call with one argument, after empty content."""
    argument = f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    call = f'<|open|>call tool="get_weather" index="1"<|sep|>{argument}<|close|>call<|sep|>'
    return f"<|close|>response<|sep|><|open|>tools<|sep|>{call}<|close|>tools<|sep|><|close|>message<|sep|>"


SPOTS = (element("item", element("name", name), element("size", size)) for name, size in (("x", "3"), ("5", "4")))


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments"),
    [
        (GEMMA, '<|tool_call>call:get_weather{city:<|"|>a, {b} "c"<|"|>, days: 3}<tool_call|>', {"city": 'a, {b} "c"', "days": 3}),
        (GEMMA, "<|tool_call>:get_weather{days:3,now:true,units:null}<tool_call|>", {"days": 3, "now": True, "units": None}),
        (GEMMA, "<|tool_call>call:get_weather{city:Paris}<tool_call|>", {"city": "Paris"}),
        (GEMMA, '<|tool_call>call:get_weather{city:<|"|>3<|"|>}<tool_call|>', {"city": "3"}),
        (GLM, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
         {"city": "Paris", "days": 3}),
        (DSML, dsml("city", "true", "3"), {"city": "3"}),
        (DSML, dsml("at", "false", '{"lat": 1}'), {"at": {"lat": 1}}),
        (DSML, dsml("units", "true", "3", "function_calls"), {"units": "3"}),
        (M3, m3(element("city", 'a <b> "c"\n'), "\n", element("units", "null"), element("now", "true"), "\n"),
         {"city": 'a <b> "c"\n', "units": None, "now": True}),
        (M3, m3(element("places", *SPOTS)), {"places": [{"name": "x", "size": 3}, {"name": "5", "size": 4}]}),
        (M3, m3(element("places"), element("at"), element("city")), {"places": [], "at": {}, "city": ""}),
        (M3, m3(element("at", '{"lat": 1}')), {"at": {"lat": 1}}),
        (M3, m3(element("at", "so ", element("name", "x"), "so")), {"at": {"name": "x", "$text": "so so"}}),
        (M3, m3(element("at", element("name", "x"), element("name", "y"))), {"at": {"name": ["x", "y"]}}),
        (M3, m3(element("sizes", element("width", "3"))), {"sizes": {"width": 3}}),
        (K3, k3("city", "string", ' a "b"\n'), {"city": ' a "b"\n'}),
        (K3, k3("units", "string", "3"), {"units": "3"}),
        (K3, k3("other", "number", "3"), {"other": 3}),
        (K3, k3("places", "array", '[1, "a"]'), {"places": [1, "a"]}),
        (K3, k3("a&quot;b &amp;amp; c", "string", "3"), {'a"b &amp; c': "3"}),
    ],
)  # fmt: skip
def test_a_call_has_the_arguments_that_vllm_reads(tool_format: Any, text: str, arguments: dict[str, Any]):
    """As the parsers gemma4, glm47, deepseek_v4, deepseek_v32, minimax_m3 and kimi_k3 of vLLM 0.33.0 read these texts."""
    for pieces in ([text], list(text)):
        content, _, found, num_calls = read(tool_format, pieces)
        assert (content, num_calls) == ("", 1)
        assert [json.loads(each) for *_, each in found] == [arguments]


def test_values_within_others_keep_their_types():
    """Gemma 4's template quotes strings only; vLLM 0.33.0 reads the numbers of an object as strings if its schema has no types."""
    text = '<|tool_call>call:get_weather{at:{lat:48.5,name:<|"|>x<|"|>,deep:{ok:true,list:[1,<|"|>a<|"|>,none]}}}<tool_call|>'
    (call,) = read(GEMMA, [text])[2]
    assert json.loads(call[2]) == {"at": {"lat": 48.5, "name": "x", "deep": {"ok": True, "list": [1, "a", "none"]}}}
    (call,) = read(M3, [m3(element("at", element("lat", "48.5"), element("deep", element("ok", "true"))))])[2]
    assert json.loads(call[2]) == {"at": {"lat": 48.5, "deep": {"ok": True}}}


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        (m3(element("city", "Par")).partition("Par")[0] + "Par", '{"city": "Par', ""),
        (m3(element("at", element("lat", "1"), element("name", "Par"))).partition("Par")[0] + "Par", '{"at": {"lat": 1, "name": "Par', ""),
        (m3(element("places", element("item", element("size", "3")))).partition("3")[0] + "3", '{"places": [{"size": 3', ""),
        (m3(element("days", "3"), element("days", "4")), '{"days": 3', f"{element('days', '4')}{TAG}/invoke>\n{TAG}/tool_call>"),
        (m3(element("at", f"x{TAG}/b>")), '{"at": ', f"x{TAG}/b>{TAG}/at>{TAG}/invoke>\n{TAG}/tool_call>"),
    ],
)  # fmt: skip
def test_elements_that_break_off_are_an_incomplete_call(text: str, arguments: str, content: str):
    for pieces in ([text], list(text)):
        found, _, calls, num_calls = read(M3, pieces)
        assert ([each for *_, each in calls], num_calls) == ([arguments], 0)
        assert found == content


def test_a_string_of_elements_ends_with_the_call_if_its_end_is_left_out():
    text = m3(element("city", element("b", "Paris"))).replace(f"{TAG}/city>", "")
    for pieces in ([text], list(text)):
        content, _, calls, num_calls = read(M3, pieces)
        assert (content, [json.loads(each) for *_, each in calls]) == ("", [{"city": element("b", "Paris")}])
        assert num_calls == 1


def test_strings_of_elements_are_streamed_and_others_sent_whole():
    reader = make_reader(M3)
    assert reader.push(f'{TAG}tool_call>{TAG}invoke name="get_weather">{TAG}city>Par') == (
        "",
        [(0, "id1", "get_weather", '{"city": "Par')],
    )
    assert reader.push(f"is{TAG}/city")[1] == [(0, None, None, "is")]
    assert reader.push(f">{TAG}at>{TAG}lat>1{TAG}/lat>")[1] == [(0, None, None, '", "at": ')]
    assert reader.push(f"{TAG}/at>")[1] == [(0, None, None, '{"lat": 1}')]
    assert sum(reader.whole) == 0
    assert reader.push(f"{TAG}/invoke>")[1] == [(0, None, None, "}")]
    assert sum(reader.whole) == 1


@pytest.mark.parametrize(("written", "expected"), [('{"city": "Paris"}', [{"city": "Paris"}]), ("oops", [])])
def test_arguments_may_be_one_element_of_json(written: str, expected: list[dict[str, str]]):
    """As Kimi K3's encoding_k3.py writes arguments that it has as a text only."""
    block = f'<|open|>json type="object"<|sep|>{written}<|close|>json<|sep|><|close|>call<|sep|>'
    text = f'<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>{block}<|close|>tools<|sep|>'
    for pieces in ([text], list(text)):
        content, _, calls, num_calls = read(K3, pieces)
        assert ([json.loads(each) for *_, each in calls], num_calls) == (expected, len(expected))
        assert content == ("" if expected else text)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|open|>response<|sep|>Four.<|close|>response<|sep|><|close|>message<|sep|>", "Four."),
        ("Four.\n<|close|>response<|sep|>", "Four.\n"),
        ("<|open|>response<|sep|>\nI look.<|close|>response<|sep|>" + WRITTEN["kimi_k3"] + "<|close|>message<|sep|>", "\nI look."),
        ("Four<|close|>respond", "Four<|close|>respond"),
    ],
)  # fmt: skip
def test_markers_of_content_are_left_out(text: str, content: str):
    """As KimiK3ToolParser of vLLM 0.33.0 reads these texts, but the last."""
    for pieces in ([text], list(text)):
        assert read(K3, pieces)[0] == content


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<|tool_call>call:get_weather{city:<|"|>Par', '{"city": "Par'),
        ("<|tool_call>call:get_weather{days:3,", '{"days": 3'),
        ("<|tool_call>call:get_weather{at:{lat:", '{"at": {"lat": '),
        ("<|tool_call>call:get_weather{days:3,days:4}<tool_call|>", '{"days": 3'),
    ],
)
def test_fields_that_break_off_are_an_incomplete_call(text: str, arguments: str):
    for pieces in ([text], list(text)):
        _, _, calls, num_calls = read(GEMMA, pieces)
        assert ([each for *_, each in calls], num_calls) == ([arguments], 0)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        # a header that ends without a body
        ("<|channel|>commentary?<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "<|channel|>commentary?<|end|>Yes.", []),
        ("<|channel|>commentary to=functions.f<|call|>", "<|channel|>commentary to=functions.f<|call|>", []),
        # a marker that is repeated
        ("<|channel|>commentary<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|><|call|>", "", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f<|message|>{} So.<|call|>", " So.", [("f", "{}")]),
        ('<|channel|>commentary to=functions.f<|message|>{"a": oops}<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>',
         "oops}", [("f", '{"a": '), ("f", "{}")]),
    ],
)  # fmt: skip
def test_messages_that_are_not_quite_harmony_lose_nothing(text: str, content: str, calls: list[tuple[str, str]]):
    for pieces in ([text], list(text)):
        found = read(read_format("harmony"), pieces)
        assert (found[0], [call[1:] for call in found[2]]) == (content, calls)


@pytest.mark.parametrize("size", [512, 513])
def test_a_header_of_more_than_512_characters_is_text_at_any_cut(size: int):
    text = f"<|channel|>{'analysis'.ljust(size - 11)}<|message|>Hm."
    cuts = [[text[at : at + step] for at in range(0, len(text), step)] for step in (1, 7, 999)]
    found = {read(read_format("harmony"), pieces)[:2] for pieces in cuts}
    assert found == {("", "Hm.") if size == 512 else (text, "")}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("city", ' "a"\n<b>', ' "a"\n<b>'),
        ("days", "3", 3),
        ("days", "many", "many"),
        ("days", "1e999x", "1e999x"),
        ("units", "null", None),
        ("units", "5", "5"),
        ("at", '{"x": [1]}', {"x": [1]}),
        ("at", "{'x': None}", {"x": None}),
        ("now", "True", True),
        ("now", "false", False),
        ("often", "3", 3),
        ("other", "3", 3),
        ("other", "a", "a"),
        ("other", '"a"', '"a"'),
    ],
)
def test_the_schema_says_what_a_parameter_is(key: str, text: str, value: Any):
    call = f"<seed:tool_call><function=get_weather><parameter={key}>{text}</parameter></function></seed:tool_call>"
    _, _, calls, _ = read(read_format("seed_oss"), [call])
    assert json.loads(calls[0][2]) == {key: value}


def test_parameters_are_streamed_one_by_one():
    reader = make_reader(read_format("qwen3_coder"))
    assert reader.push("<function=get_weather>\n<parameter=city>\nPar") == (
        "",
        [(0, "id1", "get_weather", '{"city": "Par')],
    )
    assert reader.push("is\n</parameter>\n")[1] == [(0, None, None, "is")], "a value may have this text"
    assert reader.push("<parameter=days>3")[1] == [(0, None, None, '", "days": ')]
    assert reader.push("</parameter>\n<")[1] == []
    assert sum(reader.whole) == 0
    assert reader.push("/function>")[1] == [(0, None, None, "3}")]
    assert sum(reader.whole) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", ("Yes.", "Hm.")),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", ("I look.\nYes.", "")),
        ("Yes.", ("Yes.", "")),
        ("<|channel|>analysis<|message|>Hm", ("", "Hm")),
        ("<|channel|>fin", ("<|channel|>fin", "")),
        (
            "<|channel|>commentary to=functions.nobody<|message|>{}<|call|>",
            ("<|channel|>commentary to=functions.nobody<|message|>{}", ""),
        ),
    ],
)  # fmt: skip
def test_channels_are_reasoning_and_content(text: str, expected: tuple[str, str]):
    for pieces in ([text], list(text)):
        assert read(read_format("harmony"), pieces) == (*expected, [], 0)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<tool_call>\\n{\"name\": ' … '\\n</tool_call>'", "tagged_json"),
        ("<tool_call>\n<function=f>\n<parameter=p>\n</parameter>\n</function>\n</tool_call>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>", "glm45"),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'",
            "deepseek_v3",
        ),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2"),
        ("<seed:tool_call>\n<function=f>\n<parameter=p>", "seed_oss"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("'<|tool_call>call:' + function['name'] + '{'", "gemma4"),
        ("<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "hy_v3"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        (
            "{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token }}<tool_call>{{ ns_token }}<invoke name={{ ns_token }}</tool_call>",
            "minimax_m3",
        ),
        ("<|open|>tools<|sep|>{{ calls }}<|close|>tools<|sep|>", "kimi_k3"),
        ("{{ message.content }}", None),
    ],
)
def test_a_chat_template_shows_its_format(template: str, name: str | None):
    assert detect_format(template) == name


def test_the_format_of_the_docs_is_read(tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "weather.yaml").write_text(block)
    (example,) = re.findall(r"It reads `(.*?)`", DOCS.read_text())
    for pieces in ([example], list(example)):
        calls = [("id1", "get_weather", '{"city": "Paris"}')]
        assert read(read_format(str(tmp_path / "weather.yaml")), pieces) == ("", "", calls, 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[]", "is not a mapping"),
        ("begin: <a>", "call is missing"),
        ("{begin: <a>, call: '{json}', ends: x}", "there is no key ends"),
        ("{begin: <a>, call: '{name}{fields}'}", "need each other"),
        ("{begin: 1, call: '{json}'}", "begin=1 is not a text"),
        ("{begin: <a>, call: '{json}', bare: 1}", "bare=1 is not true or false"),
        ("{begin: <a>, call: '{name}'}", "must have one of {arguments}"),
        ("{begin: <a>, call: '{arguments}'}", "must have {name}, or {id}, before"),
        ("{begin: <a>, call: '{id} {arguments}'}", "id must say where the name is"),
        ("{begin: <a>, call: '{name} {parameters}'}", "must be texts around {key} and {value}"),
        ("{call: '{json}'}", "nothing at its beginning distinguishes"),
        ("{begin: [<a>, <a>b], call: '{json}'}", "begins with"),
        ("{begin: <a>, call: '{name} {parameters}', parameter: '<{key}> {value} </{key}>'}", "has {key} twice"),
        ("{channels: {start: a}}", "is missing"),
    ],
)
def test_a_file_that_is_no_format_is_refused(text: str, fault: str):
    with pytest.raises(ConfigError, match=f"tool_calls=x: .*{re.escape(fault)}"):
        make_format(yaml.safe_load(text), "tool_calls=x")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_format(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_format(str(tmp_path / "bad.yaml"))
