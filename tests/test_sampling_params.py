"""The table of sampling parameters, and what follows from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atom.config.help import describe_block
from atom.config.schema import SamplingConfig
from atom.errors import RequestError
from atom.sampling_params import (
    COLUMNS,
    FILTER,
    GENERATION,
    GGUF,
    PENALTY,
    USES,
    SamplingParams,
    has_use,
    sampling_kind,
)
from atom.serve.openai.params import SAME_NAMES

ROOT = Path(__file__).parents[1]
KERNELS = {f"atom/kernels/{backend}/step/sampling.py" for backend in ("torch", "triton")}
API = "atom/serve/openai/schema.py"
BENCH_FLAGS = "atom/benchmarks/arguments.py"  # flags of vLLM's benchmark, for any server


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("min_p", {*KERNELS, "atom/kernels/torch/step/speculation.py", API, BENCH_FLAGS, "atom/jobs/eval/harness.py"}),
        ("frequency_penalty", {*KERNELS, API, BENCH_FLAGS}),
    ],
)
def test_a_parameter_stands_in_the_table_where_it_is_used_and_in_the_api(name: str, files: set[str]):
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "atom").rglob("*.py")
        if re.search(rf'params\.{name}\b|columns\["{name}"\]|"{name}"|^    {name}: ', path.read_text(), re.MULTILINE)
    }
    assert found == {"atom/sampling_params.py", *files}
    assert not [path for path in (ROOT / "conf").rglob("*.yaml") if re.search(rf"\b{name}\b", path.read_text())]


def test_the_parameters_that_kernels_read():
    assert COLUMNS == {
        "temperature": "f64",
        "top_k": "i64",
        "top_p": "f64",
        "min_p": "f64",
        "presence_penalty": "f64",
        "frequency_penalty": "f64",
        "repetition_penalty": "f64",
    }
    penalties = dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), PENALTY)
    assert {**dict.fromkeys(("top_k", "top_p", "min_p"), FILTER), **penalties} == USES


def test_the_parameters_that_a_checkpoint_sets():
    same = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    assert {**same, "max_new_tokens": "max_tokens"} == GENERATION
    same = {name: name for name in ("top_p", "top_k", "min_p")}
    assert {"temp": "temperature", "penalty_repeat": "repetition_penalty", **same} == GGUF


def test_a_body_sets_each_parameter_that_it_has_a_field_for():
    assert set(SAME_NAMES) == set(
        [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "min_tokens",
            "include_stop_str_in_output",
            "stop_token_ids",
            "allowed_token_ids",
            "bad_words",
            "ignore_eos",
            "skip_special_tokens",
            "seed",
            "prompt_logprobs",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "explain",
        ]
    )


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "random"),
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0, "min_p": 0.5}, "greedy"),
        ({"top_k": -1, "top_p": 1}, "random"),
        ({"frequency_penalty": 1}, "random"),
        *[(values, "filtered") for values in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1})],
    ],
)
def test_the_filters_that_are_set_decide_the_kind_of_sampling(values: dict[str, float], kind: str):
    assert sampling_kind(SamplingParams(**values)) == kind


def test_a_penalty_counts_where_it_is_not_neutral():
    neutral = SamplingParams(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_k=3)
    assert not has_use(neutral, PENALTY)
    for values in ({"presence_penalty": -1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 0.9}):
        assert has_use(SamplingParams(**values), PENALTY), values


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("skip_special_tokens", 1, "skip_special_tokens=1 is not true or false"),
        ("visible_tokens", "x", "visible_tokens='x' is not a list"),
        ("bad_words", ["x", ""], "bad_words: '' is not a string of at least one character"),
        ("allowed_token_ids", [-1], "allowed_token_ids=-1 must be a whole number from 0 to 2147483647"),
        ("logit_bias", {1: 101}, "logit_bias[1]=101.0 must be a finite number from -100 to 100"),
        (
            "thinking_token_budget",
            -2,
            "thinking_token_budget=-2 must be a whole number from -1 to 2147483647",
        ),
        ("thinking_token_budget", 1.5, "thinking_token_budget=1.5 is not a whole number"),
        ("thinking_token_budget", True, "thinking_token_budget=True is not a whole number"),
        (
            "repetition_detection",
            3,
            "repetition_detection=3 is not a mapping of max_pattern_size, min_pattern_size, min_count",
        ),
        (
            "repetition_detection",
            {"size": 3},
            "repetition_detection: there is no 'size'; it takes max_pattern_size, min_pattern_size, min_count",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": -1},
            "repetition_detection: max_pattern_size=-1 must be a whole number from 0 to 2147483647",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
            "repetition_detection: min_pattern_size is more than max_pattern_size",
        ),
        (
            "repetition_detection",
            {"max_pattern_size": 2, "min_count": 1},
            "repetition_detection: min_count=1 must be 2 or more",
        ),
    ],
)
def test_a_parameter_is_checked_by_its_type(name: str, value: object, error: str):
    with pytest.raises(RequestError, match=f"^{re.escape(error)}$"):
        SamplingParams(**{name: value})


def test_values_that_mean_nothing_are_none_as_in_vllm():
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    for nothing in ({}, {"max_pattern_size": 0}, {"max_pattern_size": 0, "min_count": 5}):
        assert SamplingParams(repetition_detection=nothing).repetition_detection is None
    given = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 3}).repetition_detection
    assert given == {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}


def test_a_field_over_several_lines_has_its_comment_in_the_docs():
    meanings = {each.key: each.meaning for each in describe_block("sampling.", SamplingConfig)}
    assert meanings["sampling.min_p"] == "min probability of a token, as a share of the likeliest one's"
    assert meanings["sampling.n"] == "answers to one prompt"
