"""Budgets of reasoning in an engine: the tokens of transformers under the same rule, whatever is drafted or preempted.

The models have eleven tokens, each a letter: an `a` begins reasoning, `bc` ends it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from runtime.step.test_run_ahead import forced_token
from test_draft_engine import EVERY, LETTERS, LIMITS, VOCAB, Case, case_of, opened
from test_kv_scales import add_tokenizer
from torch import Tensor

from atom import LLMEngine, RequestError, SamplingParams
from atom.runtime.step.runner import Runner

__all__ = ["case_of"]

THINKS = {"model.reasoning": ["a", "bc"]}
BEGIN = LETTERS.index("a")
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
HOT = SamplingParams(temperature=9.0, seed=5, max_tokens=40, ignore_eos=True)  # all letters come
BUDGETS = [0, 1, 2, 3, 5, 8, 0, 13, 1, 6, None, 4]


def letters(tokens: list[int]) -> list[int]:
    """The characters of tokens, in capitals as `forced_token` has them."""
    return [ord(LETTERS[token].upper()) for token in tokens]


def forced(prompt: list[int], output: list[int], budget: int | None) -> int | None:
    found = forced_token(letters(prompt), letters(output), budget)
    return None if found is None else LETTERS.index(chr(found).lower())


class Rule(transformers.LogitsProcessor):
    """The rule, for transformers' generate: it looks at all tokens each time."""

    def __init__(self, num_prompt: int, budget: int | None) -> None:
        self.num_prompt, self.budget = num_prompt, budget
        self.num_forced = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = input_ids[0].tolist()
        token = forced(tokens[: self.num_prompt], tokens[self.num_prompt :], self.budget)
        if token is None:
            return scores
        self.num_forced += 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("thinking") / "model"
    tiny.save_changed("qwen3_window", target, vocab_size=VOCAB, pad_token_id=None, eos_token_id=VOCAB - 1)
    add_tokenizer(target, LETTERS)
    return target


@pytest.fixture
def engine(folder: Path) -> Iterator[LLMEngine]:
    with closing(opened(folder, **THINKS)) as made:
        yield made


def asked(params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, thinking_token_budget=budget) for budget in BUDGETS]


PROMPTS = [prompt + [BEGIN] * (at % 3 > 0) for at, prompt in enumerate(EVERY[: len(BUDGETS)])]  # some begin it


def test_the_answers_are_those_of_transformers_under_the_same_rule(folder: Path, engine: LLMEngine):
    model, counts = tiny.reference(folder), []
    every = engine.generate(PROMPTS, [replace(each, logprobs=2) for each in asked(GREEDY)])
    for prompt, budget, answer in zip(PROMPTS, BUDGETS, every, strict=True):
        rule = Rule(len(prompt), budget)
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, logits_processor=[rule], eos_token_id=None
        )[0, len(prompt) :].tolist()
        assert answer["token_ids"] == expected
        raw = tiny.logits(model, prompt + expected)[len(prompt) - 1 : -1].log_softmax(-1)
        for token, logits, reported in zip(expected, raw, answer["logprobs"], strict=True):
            assert reported.token == token, "of a forced token, its own probability and rank"
            assert reported.logprob == pytest.approx(logits[token].item(), abs=1e-3)
            assert reported.rank == 1 + int((logits > logits[token]).sum())
        counts.append(rule.num_forced)
    assert sum(count > 2 for count in counts) > 2, "some think again after their budget"


METHODS = ["draft_llama", "mtp_deepseek_v3", "eagle3_qwen3", "draft_recurrent"]


@pytest.fixture(scope="module")
def answers_of_none(case_of: Callable[[str], Case]) -> Callable[[str], list[list[int]]]:
    """What a case's model answers with budgets, without drafts and steps ahead."""

    @functools.cache
    def get(name: str) -> list[list[int]]:
        with closing(opened(case_of(name).folder, **THINKS)) as engine:
            return [each["token_ids"] for each in engine.generate(PROMPTS, asked(HOT))]

    return get


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "limits", "run_ahead"),
    [(name, limits, (at + place) % 3) for at, name in enumerate(METHODS) for place, limits in enumerate(LIMITS)],
)
def test_drafts_steps_ahead_and_preemption_change_no_token(
    name: str, limits: str, run_ahead: int, case_of: Callable[[str], Case],
    answers_of_none: Callable[[str], list[list[int]]], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    case, expected = case_of(name), answers_of_none(name)
    for prompt, budget, answer in zip(PROMPTS, BUDGETS, expected, strict=True):
        for at, token in enumerate(answer):
            assert forced(prompt, answer[:at], budget) in (None, token)
    monkeypatch.setattr("atom.assemble.runner.Runner", partial(Runner, run_ahead=run_ahead))
    engine = opened(case.folder, **case.fields, num_speculative_tokens=2, **LIMITS[limits], **THINKS)
    for _ in range(2 if limits == "eventful" else 1):  # the second time with prefix hits
        assert [each["token_ids"] for each in engine.generate(PROMPTS, asked(HOT))] == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_overrun > 0, "an answer that thinks again has tokens past the forced one"
    assert limits != "eventful" or (stats.num_chunks > 0 and stats.num_prefix_hit_tokens > 0)
    engine.close()


def test_drafts_that_the_host_looks_up_change_no_token(folder: Path, engine: LLMEngine):
    expected = [each["token_ids"] for each in engine.generate(PROMPTS, asked(GREEDY))]
    drafting = opened(folder, method="ngram", prompt_lookup_min=1, num_speculative_tokens=5, **THINKS)
    assert [each["token_ids"] for each in drafting.generate(PROMPTS, asked(GREEDY))] == expected
    assert drafting.metrics.scheduler.num_accepted_tokens > 0
    drafting.close()


def answer_of(engine: LLMEngine, params: SamplingParams) -> list[tuple[str, str]]:
    every = engine.generate(["deda"], params)
    return [("".join(LETTERS[token] for token in each["token_ids"]), each["finish_reason"]) for each in every]


def test_a_budget_goes_with_whatever_else_ends_or_shapes_an_answer(engine: LLMEngine):
    spent = replace(HOT, thinking_token_budget=0)
    assert all(text.startswith("bc") for text, _ in answer_of(engine, replace(spent, n=3)))
    unlimited = answer_of(engine, HOT)
    for no_limit in (-1, None):
        assert answer_of(engine, replace(HOT, thinking_token_budget=no_limit)) == unlimited
    assert answer_of(engine, replace(spent, stop_token_ids=[LETTERS.index("c")])) == [("bc", "stop_2")]
    assert answer_of(engine, replace(spent, stop_strings=["bc"])) == [("bc", "stop_sequence")]
    assert answer_of(engine, replace(spent, max_tokens=1)) == [("b", "max_tokens")]
    unwanted = {LETTERS.index("b"): -100.0, LETTERS.index("c"): -100.0}
    assert answer_of(engine, replace(spent, logit_bias=unwanted))[0][0].startswith("bc")
    among = answer_of(engine, replace(spent, allowed_token_ids=[LETTERS.index("d")], max_tokens=6))
    assert among == [("bcdddd", "max_tokens")]
    early = answer_of(engine, replace(spent, ignore_eos=False, stop_token_ids=[LETTERS.index("c")], min_tokens=3))
    assert early[0][0].startswith("bc") and len(early[0][0]) >= 3


@pytest.mark.parametrize("budget", [0, 3])
def test_a_constraint_begins_after_reasoning_that_its_budget_ends(engine: LLMEngine, budget: int):
    params = replace(
        HOT, ignore_eos=False, thinking_token_budget=budget, structured_outputs={"regex": "[d-h]{5}"},
        reasoning={"begin": "", "end": "bc"},
    )  # fmt: skip
    for seed in range(8):
        ((text, reason),) = answer_of(engine, replace(params, seed=seed))
        found = re.fullmatch(r"(.*?)bc([d-h]{5})-?", text)
        assert found and len(found[1]) <= budget and reason == "eos"


def test_a_model_without_markers_refuses_a_budget(folder: Path):
    with closing(opened(folder, **{"model.reasoning": None})) as engine:
        fault = "thinking_token_budget: nothing marks where this model's reasoning ends; leave it out"
        with pytest.raises(RequestError, match=f"^{fault}$"):
            engine.generate(["ab"], replace(GREEDY, thinking_token_budget=3))
        engine.generate(["ab"], replace(GREEDY, thinking_token_budget=-1))
