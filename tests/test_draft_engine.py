"""Drafts of the text's programs, in an engine: those of doubles, and the tokens of none."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import drafts
import eagle3
import glm5_next
import mtp
import mtp_streams
import pytest
import tiny
import torch
from test_kv_scales import add_tokenizer
from test_speculation import (
    BUSY,
    EVENTFUL,
    GREEDY,
    PARAMS,
    assert_ends_within,
    count_next_to_prompts,
    note_preempted_drafts,
    prompts,
    tokens_of,
)
from thread_ranks import ThreadRanks, thread_ranks
from torch import Tensor

from atom import LLMEngine, SamplingParams
from atom.runtime.draft.speculation import draft_statistics
from atom.runtime.step.cuda_graphs import Graphs
from atom.runtime.step.model import Model
from atom.runtime.step.runner import Runner

pytestmark = pytest.mark.early
__all__ = ["thread_ranks"]

VOCAB = 11  # so few tokens that drafts of random weights are right now and then
FEW = {"vocab_size": VOCAB, "pad_token_id": None, "eos_token_id": VOCAB - 1}
LETTERS = "abcdefghij-"  # the texts of the tokens


class Case(NamedTuple):
    folder: Path
    fields: dict[str, Any]  # of an engine that drafts
    double: drafts.Double


HOT = SamplingParams(temperature=9.0, seed=5, max_tokens=16, ignore_eos=True)  # the noise draws, which drafts share
ASKED = [*PARAMS, replace(HOT, n=2)]
EVERY = [[token % VOCAB for token in prompt] for prompt in prompts(len(ASKED))]


def mtp_case(at: Path, name: str) -> Case:
    folder = mtp.save(name, at / "model", **FEW)
    add_tokenizer(folder, LETTERS)
    return Case(folder, {"method": "mtp"}, mtp.Double(folder))


def streams_case(at: Path) -> Case:
    folder = mtp_streams.save(at / "model", **FEW)
    add_tokenizer(folder, LETTERS)
    return Case(folder, {"method": "mtp"}, mtp_streams.Double(folder))


def pooled_case(at: Path) -> Case:
    model = glm5_next.save(at / "model", drafts=True, **FEW)
    add_tokenizer(at / "model", LETTERS)
    return Case(at / "model", {"method": "mtp"}, glm5_next.Double(at / "model", model))


def eagle3_case(at: Path, name: str, changes: dict[str, Any], **values: Any) -> Case:
    tiny.save_changed(name, at / "model", **FEW, **changes)
    add_tokenizer(at / "model", LETTERS)
    folder = eagle3.save(at / "model", at / "draft", **values)
    layers = values.get("eagle_aux_hidden_state_layer_ids", ())
    layers = layers or [1 + layer for layer in values.get("eagle_config", {}).values() for layer in layer]
    double = eagle3.Double(at / "model", folder, layers)
    return Case(at / "model", {"method": "eagle3", "draft_model": str(folder)}, double)


def draft_case(at: Path, name: str, of: str, **changes: Any) -> Case:
    tiny.save_changed(name, at / "model", **FEW)
    add_tokenizer(at / "model", LETTERS)
    tiny.save_changed(of, at / "draft", **{**FEW, **changes})
    fields = {"method": "draft", "draft_model": str(at / "draft")}
    return Case(at / "model", fields, drafts.ModelDouble(at / "draft", VOCAB))


CASES: dict[str, Callable[[Path], Case]] = {
    "mtp_deepseek_v3": partial(mtp_case, name="deepseek_v3"),
    "mtp_glm4_moe": partial(mtp_case, name="glm4_moe"),
    "mtp_glm_moe_dsa": partial(mtp_case, name="glm_moe_dsa"),
    "mtp_exaone_moe": partial(mtp_case, name="exaone_moe"),
    "mtp_streams": streams_case,
    "mtp_qwen3_5": partial(mtp_case, name="qwen3_5"),
    "eagle3_qwen3": partial(eagle3_case, name="qwen3", changes={"num_hidden_layers": 7}),
    "eagle3_d2t": partial(eagle3_case, name="llama", changes={}, draft_vocab=7, layer="layers.0"),
    "eagle3_own_embedding": partial(
        eagle3_case, name="gemma2", changes={"num_hidden_layers": 4}, draft_vocab=9, has_embedding=True, hidden=40,
        target_hidden_size=48, norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[0, 1, 3],
    ),
    "eagle3_latent": partial(
        eagle3_case, name="deepseek_v3", changes={"num_hidden_layers": 5},
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    ),
    "draft_llama": partial(draft_case, name="qwen3_window", of="llama", num_hidden_layers=1),
    "draft_fewer_rows": partial(draft_case, name="llama", of="gemma2", vocab_size=9),
    "draft_more_rows": partial(draft_case, name="qwen3", of="deepseek_v3", vocab_size=14),
    "draft_recurrent": partial(draft_case, name="nemotron_h", of="lfm2"),
    "mtp_deepseek_v32": partial(mtp_case, name="deepseek_v32"),
    "mtp_pooled": pooled_case,
}  # fmt: skip


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = CASES[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="module")
def tokens_of_none(case_of: Callable[[str], Case]) -> Callable[[str], list[list[int]]]:
    """What a case's model answers EVERY without drafts."""

    @functools.cache
    def get(name: str) -> list[list[int]]:
        with closing(opened(case_of(name).folder)) as engine:
            return tokens_of(engine, ASKED, EVERY)

    return get


def opened(folder: Path, **fields: Any) -> LLMEngine:
    drafts = {"max_verified_tokens": 100} if "method" in fields else {}
    fields = {"dtype": "fp32", "device": "cpu", "level": 1, "max_num_seqs": 8, **drafts, **fields}
    return LLMEngine(str(folder), **fields)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "num_drafts"), [(name, 3 - at % 2 * 2) for at, name in enumerate(CASES)])
def test_drafts_are_those_of_the_double(
    name: str, num_drafts: int, case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
):
    """At each step of an answer, whose prompt came in chunks; after drafts that were accepted and rejected."""
    case, draft = case_of(name), Model._draft
    found: list[tuple[int, list[int]]] = []

    def record(model: Model, slots: Tensor, inputs: Any) -> None:
        draft(model, slots, inputs)
        assert model.state.drafts is not None
        if len(slots):
            drafted = model.state.drafts[slots[0], : inputs.batch.query_len - 1]
            found.append((int(model.state.lengths[slots[0]]), drafted.tolist()))

    monkeypatch.setattr(Model, "_draft", record)
    engine = opened(case.folder, **case.fields, num_speculative_tokens=num_drafts, max_num_batched_tokens=16)
    prompt = [token % VOCAB for token in tiny.prompt(39)]
    answer = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]["token_ids"]
    engine.close()
    tokens = torch.tensor(prompt + answer)
    assert len(found) >= 24 // (1 + num_drafts) and max(length for length, _ in found) > 50
    for length, drafted in found:
        assert length <= len(tokens)
        assert drafted == case.double.drafts(tokens[:length], len(drafted)), "fewer at the end"


LIMITS = {"roomy": {}, "eventful": {**EVENTFUL, "num_kvcache_blocks": 12, "block_size": 8}, "busy": BUSY}
METHODS = ["draft_llama", "mtp_deepseek_v3", "eagle3_qwen3"]  # with all limits, and each number of steps ahead in one


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("name", "limits", "run_ahead"),
    [
        (name, limits, run_ahead)
        for at, name in enumerate(CASES)
        for place, limits in enumerate(LIMITS if name in METHODS else ["roomy", "eventful"])
        for run_ahead in (
            [(METHODS.index(name) + place) % 3]
            if name in METHODS
            else [at % 2 * 2 if limits == "roomy" else 2 - at % 3]
        )
    ],
)
def test_tokens_are_those_of_none(
    name: str, limits: str, run_ahead: int, case_of: Callable[[str], Case],
    tokens_of_none: Callable[[str], list[list[int]]], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    case = case_of(name)
    monkeypatch.setattr("atom.assemble.runner.Runner", partial(Runner, run_ahead=run_ahead))
    counts, preempted = count_next_to_prompts(monkeypatch), note_preempted_drafts(monkeypatch)
    engine = opened(case.folder, **case.fields, num_speculative_tokens=2, **LIMITS[limits])
    for _ in range(2 if limits == "eventful" else 1):  # the second time with prefix hits
        assert tokens_of(engine, ASKED, EVERY) == tokens_of_none(name)
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert draft_statistics(stats)["distribution"][2] > 0, "all drafts of a step were accepted"
    assert limits != "eventful" or (stats.num_preemptions > 0 and stats.num_chunks > 0)
    assert limits != "eventful" or name not in METHODS or preempted, "with drafts under way"
    assert limits != "busy" or 0 < counts["accepted"] < counts["drafted"], "in steps that hold prompts"
    engine.close()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("draft_fewer_rows", {"tensor_parallel_size": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mtp_deepseek_v3", {"tensor_parallel_size": 2}),
                ("mtp_glm4_moe", {"parallel.data": 2}),
                ("mtp_glm_moe_dsa", {"tensor_parallel_size": 2}),
                ("mtp_glm_moe_dsa", {"parallel.data": 2, "parallel.experts": 2}),
                ("mtp_deepseek_v32", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
                ("mtp_pooled", {"tensor_parallel_size": 2}),
                ("mtp_pooled", {"parallel.data": 2, "parallel.experts": 2}),
                ("mtp_streams", {"tensor_parallel_size": 2, "parallel.data": 2}),
                ("eagle3_own_embedding", {"tensor_parallel_size": 2}),
                ("mtp_deepseek_v3", {"parallel.pipeline": 2}),
                ("mtp_streams", {"parallel.pipeline": 2, "parallel.data": 2}),
                ("mtp_glm4_moe", {"parallel.pipeline": 2, "parallel.data": 2}),
                ("draft_llama", {"parallel.pipeline": 3}),
                ("draft_fewer_rows", {"parallel.pipeline": 2, "tensor_parallel_size": 2}),
            )
        ),
    ],
)
def test_ranks_groups_and_stages_draft_alike(
    name: str, fields: dict[str, Any], thread_ranks: list[ThreadRanks], case_of: Callable[[str], Case]
):
    """With the parts of another rank, they would draft other tokens; a group may have no sequence."""
    case, params = case_of(name), PARAMS[:5]
    every = EVERY[: len(params)]
    one = opened(case.folder, **case.fields, num_speculative_tokens=2, **EVENTFUL)
    expected, counts = tokens_of(one, params, every), one.metrics.scheduler
    engine = opened(case.folder, **case.fields, num_speculative_tokens=2, **EVENTFUL, **fields)
    assert tokens_of(engine, params, every) == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_chunks > 0
    if "parallel.data" not in fields:
        assert stats.num_preemptions > 0
        assert (stats.num_drafts, stats.accepted_per_pos) == (counts.num_drafts, counts.accepted_per_pos)
    one_by_one = []
    for each in (one, engine):
        before = each.metrics.scheduler
        answer = tokens_of(each, HOT, every[:1])
        after = each.metrics.scheduler
        one_by_one.append((answer, after.num_accepted_tokens - before.num_accepted_tokens))
        each.close()
    assert one_by_one[1] == one_by_one[0] and one_by_one[0][1] > 0, "as one rank where the other group has none"


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("name", ["mtp_glm4_moe", "eagle3_d2t", "draft_llama"])
def test_padded_steps_give_the_tokens_of_none(
    name: str, run_ahead: int, case_of: Callable[[str], Case], tokens_of_none: Callable[[str], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """As a CUDA graph pads them."""
    case = case_of(name)
    monkeypatch.setattr("atom.assemble.runner.Runner", partial(Runner, run_ahead=run_ahead))
    monkeypatch.setattr(Graphs, "draft_sizes", ((3, 2), (7, 2), (16, 2)))
    engine = opened(case.folder, **case.fields, num_speculative_tokens=2, max_num_seqs=16)
    assert tokens_of(engine, ASKED, EVERY) == tokens_of_none(name)
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    engine.close()


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_is_always_right(checkpoints: Callable[[str], Path]):
    """Sampled, too: a draft is drawn with the noise of the draw that it guesses."""
    folder = checkpoints("qwen3_window")
    engine = opened(folder, method="draft", draft_model=str(folder), num_speculative_tokens=3)
    every = prompts(3)
    hot = [SamplingParams(temperature=heat, seed=9, max_tokens=24, ignore_eos=True) for heat in (0.7, 1.0, 3.0)]
    answers = [tokens_of(engine, params, every) for params in (GREEDY, hot)]
    stats = engine.metrics.scheduler
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 6 * 14
    assert answers[0] != answers[1]
    assert_ends_within(engine, every[0], answers[0][0])
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_an_end_within_accepted_tokens_is_the_end(name: str, case_of: Callable[[str], Case]):
    """Of a token and of strings to stop at, next to answers of a grammar, for which nothing is drafted."""
    pytest.importorskip("llguidance")
    case, pattern, every = case_of(name), "[a-e]{3}[f-h]{2,9}", [*EVERY[:3], EVERY[0]]
    written = replace(HOT, n=2, ignore_eos=False, structured_outputs={"regex": pattern})
    with closing(opened(case.folder)) as plain:
        free = plain.generate(every, [HOT, HOT, HOT, written])
    texts = [answer["text"] for answer in free]
    engine = opened(case.folder, **case.fields, num_speculative_tokens=3)
    assert_ends_within(engine, every[0], free[0]["token_ids"], HOT)
    before = engine.metrics.scheduler.num_overrun
    for place in (3, 6):
        stops = [text[place : place + 3] for text in texts[:3]]
        asked = [*(replace(HOT, stop_strings=[stop]) for stop in stops), written]
        ended = [text.partition(stop)[0] for text, stop in zip(texts, stops, strict=False)]
        answers = engine.generate(every, asked)
        assert [each["text"] for each in answers] == [*ended, *texts[3:]]
        assert {each["finish_reason"] for each in answers[:3]} == {"stop_sequence"}
    stats = engine.metrics.scheduler
    assert stats.num_overrun > before, "accepted tokens behind a string"
    assert all(re.fullmatch(pattern, text) for text in texts[3:]), texts
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert draft_statistics(stats)["distribution"][3] > 0, "all drafts of a step were accepted"
    engine.close()


@pytest.mark.slow
def test_another_model_of_random_weights_is_hardly_ever_right(checkpoints: Callable[[str], Path]):
    engine = opened(checkpoints("qwen3"), method="draft", draft_model=str(checkpoints("llama")))
    tokens_of(engine, GREEDY, prompts(4))
    stats = engine.metrics.scheduler
    assert stats.num_accepted_tokens < 0.1 * stats.num_draft_tokens
    engine.close()


@pytest.mark.slow
def test_drafts_over_latents_in_fp8_change_no_token(case_of: Callable[[str], Case]):
    case, answers = case_of("mtp_deepseek_v3"), []
    for fields in ({}, {**case.fields, "num_speculative_tokens": 2}):
        with closing(opened(case.folder, **fields, kv_cache_dtype="fp8")) as engine:
            answers.append(tokens_of(engine, ASKED, EVERY))
            stats = engine.metrics.scheduler
    assert answers[0] == answers[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
