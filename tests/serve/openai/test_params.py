from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.config import Config
from atom.config.load import load
from atom.serve.http.errors import FieldError
from atom.serve.openai.params import sampling_params
from atom.serve.openai.schema import ChatRequest, CompletionRequest, Generation

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def config(talker: Path) -> Config:
    limits = ["serve.http.max_stop_sequences=2", "serve.http.max_top_n_tokens=3", "serve.http.best_of=4"]
    return load([f"checkpoint={talker}", "sampling.max_tokens=256", "sampling.top_k=7", *limits])


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hello"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": MESSAGES} | fields)


def test_what_a_body_leaves_out_is_the_configurations(config: Config):
    params = sampling_params(completion(temperature=0.5, top_p=None), config)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 1.0, 7, 256)
    assert (params.n, params.logprobs, params.stop_strings, params.structured_outputs) == (1, None, None, None)


def test_max_completion_tokens_counts_before_max_tokens(config: Config):
    assert sampling_params(chat(max_tokens=5, max_completion_tokens=9), config).max_tokens == 9
    assert sampling_params(chat(max_tokens=5), config).max_tokens == 5


def test_without_max_tokens_a_chat_has_what_the_context_holds_and_a_completion_16(talker: Path):
    config = load([f"checkpoint={talker}", "serve.max_model_len=100"])
    assert sampling_params(chat(), config).max_tokens == 100, "Context.fit takes the prompt's off"
    assert sampling_params(completion(), config).max_tokens == 16
    assert sampling_params(completion(max_tokens=50), config).max_tokens == 50
    config = load([f"checkpoint={talker}", "sampling.max_tokens=7"])
    assert {sampling_params(body, config).max_tokens for body in (chat(), completion())} == {7}


def test_a_default_of_min_tokens_gives_way_to_a_short_answer(talker: Path):
    config = load([f"checkpoint={talker}", "sampling.min_tokens=20"])
    assert sampling_params(chat(), config).min_tokens == 20
    assert sampling_params(chat(max_tokens=5), config).min_tokens == 5
    assert sampling_params(completion(), config).min_tokens == 16
    assert sampling_params(Generation(), config, max_tokens=3).min_tokens == 3, "Anthropic's"
    with pytest.raises(FieldError, match="min_tokens=6 is more than max_tokens=5"):
        sampling_params(chat(min_tokens=6, max_tokens=5), config)


def test_a_stop_string_is_a_list_of_one(config: Config):
    assert sampling_params(chat(stop="x"), config).stop_strings == ["x"]
    assert sampling_params(chat(stop=["x", "y"]), config).stop_strings == ["x", "y"]


def test_the_names_of_tokens_become_their_numbers(config: Config):
    assert sampling_params(chat(logit_bias={"5": 1.5, "263": -100}), config).logit_bias == {5: 1.5, 263: -100.0}


def test_log_probabilities_are_asked_for_in_each_apis_way(config: Config):
    assert sampling_params(completion(logprobs=0), config).logprobs == 0
    assert sampling_params(completion(logprobs=3), config).logprobs == 3
    assert sampling_params(chat(logprobs=True), config).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=2), config).logprobs == 2
    assert sampling_params(chat(logprobs=False), config).logprobs is None


def test_the_best_of_more_than_are_wanted_need_log_probabilities(config: Config):
    params = sampling_params(completion(n=2, best_of=4), config)
    assert (params.n, params.logprobs) == (4, 0)
    assert sampling_params(completion(n=4), config).logprobs is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}},
            {"json": {"const": 1}},
        ),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"json": {"const": 1}}}, {"json": {"const": 1}}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_what_the_answer_must_match(config: Config, fields: dict[str, Any], expected: dict[str, Any] | None):
    assert sampling_params(chat(**fields), config).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 4}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"min_tokens": 257}, "min_tokens"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"regex": ""}, "regex"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(config: Config, fields: dict[str, Any], param: str):
    with pytest.raises(FieldError) as refused:
        sampling_params(chat(**fields), config)
    assert refused.value.param == param


def test_zero_tokens_need_an_echo(config: Config):
    assert sampling_params(completion(max_tokens=0, echo=True), config).max_tokens == 1
    with pytest.raises(FieldError, match="echo"):
        sampling_params(completion(max_tokens=0), config)
