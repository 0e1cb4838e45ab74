"""What a model may do in a chat beside talking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atom.config import Config
from atom.config.load import load
from atom.sampling_params import SamplingParams
from atom.serve.errors import FieldError
from atom.serve.openai.schema import NamedTool, Tool
from atom.serve.output.parsers import Talk

THINK = ("<think>", "</think>")


@pytest.fixture(scope="module")
def config() -> Config:
    """Of a model that thinks and tags its calls."""
    loaded = load(["load_dummy=true"])
    return replace(loaded, model=replace(loaded.model, tool_calls="tagged_json", reasoning=list(THINK)))


def tool(name: str) -> Tool:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_reasoning_and_calls_are_separated_from_content(config: Config):
    talk = Talk(config, [tool("f")], None)
    params = talk.constrain(SamplingParams())
    assert (params.visible_tokens, params.structured_outputs) == (["<tool_call>", "</tool_call>", *THINK], None)
    told = '<think>hm</think>Well.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    answer = talk.read(told, "prompt")
    assert (answer.reasoning, answer.content) == ("hm", "Well.")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"x": 1}')]


def test_without_tools_a_tag_is_text(config: Config):
    for tools, choice in ((None, None), ([tool("f")], "none")):
        talk = Talk(config, tools, choice)
        talk.constrain(SamplingParams())
        assert talk.read("<tool_call>{}</tool_call>", "prompt").content == "<tool_call>{}</tool_call>"


def test_a_constrained_answer_is_no_reasoning_though_the_template_opens_it(config: Config):
    talk = Talk(config, None, None)
    talk.constrain(SamplingParams(structured_outputs={"json_object": True}))
    assert talk.read("{}", "prompt<think>")[:2] == ("{}", "")
    free = Talk(config, None, None)
    free.constrain(SamplingParams())
    assert free.read("{}", "prompt<think>")[:2] == ("", "{}")


def test_a_forced_call_constrains_the_answer_to_its_arguments(config: Config):
    named = NamedTool.model_validate({"type": "function", "function": {"name": "f"}})
    talk = Talk(config, [tool("f"), tool("g")], named)
    constraint = talk.constrain(SamplingParams()).structured_outputs
    assert constraint is not None and constraint["json"]["properties"] == {"x": {"type": "integer"}}
    answer = talk.read('{"x": 2}', "prompt")
    assert (answer.content, [(call.name, call.arguments) for call in answer.calls]) == ("", [("f", '{"x": 2}')])


def test_one_call_is_kept_where_no_more_are_wanted(config: Config):
    talk = Talk(config, [tool("f")], None, is_parallel=False)
    talk.constrain(SamplingParams())
    told = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' * 2
    assert len(talk.read(told, "prompt").calls) == 1


def test_what_cannot_be_is_refused_by_field(config: Config):
    plain = replace(config, model=replace(config.model, tool_calls=None))
    with pytest.raises(FieldError, match="names no format of tool calls") as refused:
        Talk(plain, [tool("f")], None)
    assert refused.value.param == "tools"
    with pytest.raises(FieldError, match="tool_choice needs tools"):
        Talk(config, None, "required")
    with pytest.raises(FieldError, match="both say what the answer is"):
        Talk(config, [tool("f")], "required").constrain(SamplingParams(structured_outputs={"regex": "a"}))
