"""What the server says of an answer is what the engine and transformers say of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asking
import pytest
import torch
import transformers
from asking import CHAT, COMPLETIONS
from serving import Server

from atom import LLMEngine, SamplingParams

PROMPTS = ["Hello there", "The quick brown fox", "1 + 1 ="]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def engine(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    cache = tmp_path_factory.mktemp("engine")
    engine = LLMEngine(model=str(talker), dtype="fp32", level=1, kv_cache_memory=1 << 24, cache=str(cache))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(talker: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float32).eval()


def logprobs_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    """[T, V]: at each position, of the token that comes next."""
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def tokenize(server: Server, **body: Any) -> list[int]:
    tokens: list[int] = asking.post(server, "/tokenize", body).body["tokens"]
    return tokens


def test_greedy_text_is_the_engines_streamed_or_not(server: Server, engine: LLMEngine):
    expected = [answer["text"] for answer in engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))]
    answer = asking.post(server, COMPLETIONS, GREEDY | {"prompt": PROMPTS})
    assert [choice["text"] for choice in answer.choices] == expected
    chunks = asking.stream(server, COMPLETIONS, GREEDY | {"prompt": PROMPTS})
    assert joined(chunks, len(PROMPTS)) == expected


def joined(events: list[dict[str, Any]], num_choices: int) -> list[str]:
    """The text of each choice of a stream."""
    texts = [""] * num_choices
    for event in events:
        for choice in event["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] += said
    return texts


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"echo": True}, {"stop": ["e", "a"]}], ids=json.dumps)
def test_a_streamed_completion_adds_up_to_the_whole_one(server: Server, more: dict[str, Any]):
    body = SAMPLED | {"prompt": PROMPTS} | more
    choices = asking.post(server, COMPLETIONS, body).choices
    events = asking.stream(server, COMPLETIONS, body)
    assert joined(events, len(choices)) == [choice["text"] for choice in choices]
    reasons = {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    }
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in choices}


def test_a_streamed_chat_adds_up_to_the_whole_one(server: Server):
    body = SAMPLED | {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "logprobs": True}
    choices = asking.post(server, CHAT, body).choices
    events = asking.stream(server, CHAT, body)
    assert joined(events, 2) == [choice["message"]["content"] for choice in choices]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for choice in choices:
        mine = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        contents = [each["logprobs"]["content"] for each in mine if each["logprobs"]]
        assert list(itertools.chain(*contents)) == choice["logprobs"]["content"]


HELLO = {
    "messages": [{"role": "user", "content": "Hello"}],
    "chat_template_kwargs": {"enable_thinking": False},  # before a constrained answer a model may think
}


@pytest.mark.parametrize(("character", "num_tokens"), [("a", 1), ("é", 2), ("漢", 3), ("🙂", 4)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_token_that_completes_text_is_an_event(server: Server, path: str, character: str, num_tokens: int):
    asked = {"prompt": "Hello"} if path == COMPLETIONS else HELLO
    body = asked | {"regex": character + "{10}", "max_tokens": 50, "stream_options": {"include_usage": True}}
    *events, last = asking.stream(server, path, body)
    texts = [joined([event], 1)[0] for event in events]
    assert [text for text in texts if text] == [character] * 10
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10 * num_tokens)
    assert [event["usage"] for event in events] == [None] * len(events)


def test_the_log_probabilities_of_a_completion_are_transformers(server: Server, engine: LLMEngine, reference: Any):
    prompt = tokenize(server, prompt=PROMPTS[0])
    (made,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    expected = logprobs_of(reference, prompt + made["token_ids"])
    tokens = [*prompt, *made["token_ids"]]
    answer = asking.post(server, COMPLETIONS, GREEDY | {"prompt": prompt, "echo": True, "logprobs": 5})
    logprobs = answer.choices[0]["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(tokens)
    for place, token in list(enumerate(tokens))[1:]:
        at = expected[place - 1]
        assert logprobs["token_logprobs"][place] == pytest.approx(at[token].item(), abs=1e-4)
        top = sorted(logprobs["top_logprobs"][place].values(), reverse=True)
        assert top[:5] == pytest.approx(at.topk(5).values.tolist(), abs=1e-4)
        assert logprobs["top_logprobs"][place][logprobs["tokens"][place]] == logprobs["token_logprobs"][place]


def test_the_log_probabilities_of_a_chat_are_transformers(server: Server, engine: LLMEngine, reference: Any):
    messages = [{"role": "user", "content": "Hello"}]
    prompt = tokenize(server, messages=messages)
    (made,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    expected = logprobs_of(reference, prompt + made["token_ids"])[len(prompt) - 1 :]
    answer = asking.post(server, CHAT, GREEDY | {"messages": messages, "logprobs": True, "top_logprobs": 3})
    content = answer.choices[0]["logprobs"]["content"]
    assert len(content) == len(made["token_ids"])
    for entry, token, at in zip(content, made["token_ids"], expected, strict=False):
        assert entry["logprob"] == pytest.approx(at[token].item(), abs=1e-4)
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert top == pytest.approx(at.topk(3).values.tolist(), abs=1e-4)


def test_the_log_probabilities_of_a_prompt_are_transformers(server: Server, reference: Any):
    prompt = tokenize(server, prompt=PROMPTS[1])
    expected = logprobs_of(reference, prompt)
    answer = asking.post(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2})
    first, *others = answer.choices[0]["prompt_logprobs"]
    assert first is None
    for entry, token, at in zip(others, prompt[1:], expected, strict=False):
        assert entry[str(token)]["logprob"] == pytest.approx(at[token].item(), abs=1e-4)
        assert entry[str(token)]["rank"] == int((at > at[token]).sum()) + 1
        assert {int(each) for each in entry} == {token, *at.topk(2).indices.tolist()}


def test_a_prompt_of_one_token_is_echoed_with_its_logprobs(server: Server):
    answer = asking.post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "echo": True, "logprobs": 0})
    logprobs = answer.choices[0]["logprobs"]
    assert (logprobs["tokens"][0], logprobs["token_logprobs"][0], logprobs["text_offset"]) == ("a", None, [0, 1])


def test_the_bytes_of_tokens_are_those_of_the_text(server: Server):
    body = HELLO | {"regex": "é漢🙂!", "logprobs": True}
    answer = asking.post(server, CHAT, body)
    content = answer.choices[0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[byte] for byte in "é漢🙂!".encode()]
    assert [token["token"] for token in content[:2]] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert content[-1]["token"] == "!"


def test_offsets_point_into_the_text(server: Server):
    body = {"prompt": "Hé", "regex": "漢a🙂b", "logprobs": 0, "echo": True}
    (choice,) = asking.post(server, COMPLETIONS, body).choices
    assert choice["text"] == "Hé漢a🙂b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4, 5]


def test_usage_adds_up(server: Server):
    prompts = [tokenize(server, prompt=prompt) for prompt in PROMPTS]
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": 7, "ignore_eos": True}
    usage = asking.post(server, COMPLETIONS, body).usage
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 3 * 2 * 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["ttft_s"] < usage["latency_s"]
    assert 0 < usage["tpot_s"] * 6 < usage["latency_s"]
    streamed = asking.stream(server, COMPLETIONS, body | {"stream_options": {"include_usage": True}})[-1]["usage"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    assert [streamed[name] for name in counts] == [usage[name] for name in counts]


def test_a_prompt_without_an_answer_comes_back_with_its_log_probabilities(server: Server):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = asking.post(server, COMPLETIONS, body)
    (choice,) = answer.choices
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("abc", ["a", "b", "c"], "length")
    assert (answer.usage["completion_tokens"], answer.usage["total_tokens"]) == (0, 3)
    streamed = asking.stream(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True})
    assert joined(streamed, 1) == ["abc"]


def test_the_best_of_several_is_the_most_likely(server: Server):
    body = {"prompt": "Hello", "temperature": 1, "seed": 3, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    every = asking.post(server, COMPLETIONS, body | {"n": 4}).choices
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in every]
    order = sorted(range(4), key=lambda place: -means[place])
    kept = asking.post(server, COMPLETIONS, body | {"n": 2, "best_of": 4}).choices
    assert [choice["text"] for choice in kept] == [every[place]["text"] for place in order[:2]]
    assert [choice["index"] for choice in kept] == [0, 1]


@pytest.mark.parametrize("more", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=json.dumps)
def test_what_leaves_one_token_is_greedy(server: Server, more: dict[str, Any]):
    greedy = asking.post(server, COMPLETIONS, GREEDY | {"prompt": PROMPTS[0]}).text
    assert asking.post(server, COMPLETIONS, SAMPLED | more | {"prompt": PROMPTS[0]}).text == greedy
