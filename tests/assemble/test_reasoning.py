"""The markers around a model's reasoning, by its file, its chat template and its tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serve.output.test_parsers import HARMONY, harmony_tokenizer, make_tokenizer

from atom.assemble.reasoning import find_markers
from atom.checkpoint import Tokenizer
from atom.config import Config
from atom.config.load import load


def config(**fields: object) -> Config:
    loaded = load(["load_dummy=true"])
    return replace(loaded, model=replace(loaded.model, **{"tool_calls": None, "reasoning": None, **fields}))  # type: ignore[arg-type]


def texts(config: Config, tokenizer: Tokenizer) -> tuple[str, list[str]] | None:
    found = find_markers(config, tokenizer)
    return None if found is None else (found.begin.text, [each.text for each in found.ends])


def test_markers_are_those_of_the_model_file():
    tokenizer = make_tokenizer(["<think>", "</think>"], "")
    found = find_markers(config(reasoning=["<think>", "</think>"]), tokenizer)
    assert found is not None and [found.begin.tokens, *(end.tokens for end in found.ends)] == [[256], [257]]


def test_channels_are_those_of_gpt_oss():
    assert texts(config(), harmony_tokenizer()) == (
        "<|channel|>analysis<|message|>",
        ["<|end|>", "<|call|>", "<|return|>"],
    )
    found = find_markers(config(), harmony_tokenizer())
    assert found is not None and [len(end.tokens) for end in found.ends] == [1, 1, 1] and len(HARMONY) > 3


@pytest.mark.parametrize(
    ("tool_calls", "tokens", "more"),
    [
        ("kimi_k2", ["<|tool_calls_section_begin|>"], ["<|tool_calls_section_begin|>"]),
        ("kimi_k2", [], []),  # which text may spell, too
        ("tagged_json", ["<tool_call>"], []),  # a call within the reasoning is reasoning
        (None, ["<tool_call>"], []),
    ],
)
def test_the_marker_of_calls_ends_reasoning_where_it_is_a_token_that_only_calls_have(
    tool_calls: str | None, tokens: list[str], more: list[str]
):
    of_model = config(reasoning=["<think>", "</think>"], tool_calls=tool_calls)
    assert texts(of_model, make_tokenizer(tokens, "")) == ("<think>", ["</think>", *more])


def test_there_are_none_without_reasoning_a_tokenizer_or_logits_for_them():
    assert texts(config(), make_tokenizer([], "")) is None
    assert find_markers(config(reasoning=["<think>", "</think>"]), None) is None
    few = config(reasoning=["<think>", "</think>"], vocab=257)
    assert find_markers(few, make_tokenizer(["<think>", "</think>"], "")) is None
