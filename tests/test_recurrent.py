"""Models whose layers have recurrent state, from a checkpoint's folder to tokens, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from greedy import GREEDY, assert_all_greedy
from probe import assert_logits, logits_of
from test_runner_drafts import TURNS, draft_known, drafting
from test_speculation import KnownDrafts, tokens_of

from atom import LLMEngine, SamplingParams
from atom.errors import CapacityError
from atom.runtime.draft.speculation import draft_statistics

pytestmark = pytest.mark.early
__all__ = ["draft_known", "drafting"]

LONG = replace(GREEDY, max_tokens=64)
DRAWN = [GREEDY, replace(GREEDY, temperature=0.9, seed=3), replace(GREEDY, repetition_penalty=1.2), GREEDY]
NAMES = [*tiny.RECURRENT]
# each op with recurrent state, and each kind of layer around it; tests/frontend/test_decoder.py has all logits
QUICK = {"lfm2", "qwen3_5", "nemotron_h", "mamba", "kimi_linear", "minimax_text_01", "falcon_h1"}
# a variant of each kind of state, of which one or two are quick
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("nemotron_h", "kimi_linear", "zaya", "mamba")]
EVENTFUL = ["lfm2", "qwen3_5", *SLOW]
LONGEST = [pytest.param("lfm2", marks=pytest.mark.slow), "qwen3_5", *SLOW]

Open = Callable[..., LLMEngine]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if level and name in QUICK else pytest.mark.slow)
        for name in NAMES
        for level in (0, 1)
    ],
)
def test_logits_at_every_position_and_64_greedy_tokens(name: str, level: int, open_engine: Open, references: Any):
    engine, model = open_engine(name, level=level, max_num_batched_tokens=64), references(name)
    assert_logits(engine, tiny.prompt(100), model)
    assert engine.metrics.scheduler.num_chunks > 0
    prompt = tiny.prompt(40, seed=1)
    assert_all_greedy(engine.generate([prompt], LONG), [prompt], model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVENTFUL)
@pytest.mark.parametrize("chunk", [1, 4, 5, 7, 64])
def test_chunks_of_mixed_lengths_change_nothing(name: str, chunk: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (1, 3, 15, 16, 17, 2, 61, 33)]
    engine = open_engine(name, max_num_batched_tokens=chunk, block_size=4, enable_prefix_caching=chunk != 7)
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
    assert engine.metrics.scheduler.num_chunks > 10 or chunk == 64


@pytest.mark.parametrize("name", EVENTFUL)
def test_a_hit_begins_at_a_copy_of_the_state(name: str, open_engine: Open, references: Any):
    engine = open_engine(name, block_size=4)
    shared = tiny.prompt(37)
    prompts = [shared, shared, [*shared[:21], *tiny.prompt(9, seed=1)], [*shared[:21], *tiny.prompt(9, seed=2)]]
    hits = []
    for prompt in prompts:
        before = engine.metrics.scheduler.num_prefix_hit_tokens
        assert_all_greedy(engine.generate([prompt], GREEDY), [prompt], references(name))
        hits.append(engine.metrics.scheduler.num_prefix_hit_tokens - before)
    assert hits == [0, 36, 0, 20], "the KV of the third one matched further than any state, so it left one there"


@pytest.mark.parametrize("name", LONGEST)
def test_a_state_that_was_evicted_is_computed_again(name: str, open_engine: Open, references: Any):
    size = state_bytes(open_engine(name))
    engine = open_engine(name, block_size=4, state_memory=9 * size)  # 8 copies
    prompts = [tiny.prompt(30, seed=seed) for seed in range(5)]
    for batch in (prompts, prompts[::-1]):  # the least recently used ones were evicted
        assert_all_greedy(engine.generate(batch, GREEDY), batch, references(name))
    assert 0 < engine.metrics.scheduler.num_prefix_hit_tokens < 5 * 28


@pytest.mark.parametrize("name", LONGEST[:-1])  # without attention nothing grows, so no request is preempted
@pytest.mark.parametrize(("num_prompts", "at_least"), [(12, 15), pytest.param(54, 100, marks=pytest.mark.slow)])
def test_many_preemptions_change_nothing(
    name: str, num_prompts: int, at_least: int, open_engine: Open, references: Any
):
    engine = open_engine(name, num_kvcache_blocks=24, block_size=4, max_model_len=94, max_num_seqs=6)
    prompts = [tiny.prompt(9 + seed % 5, seed=seed) for seed in range(num_prompts)]
    assert_all_greedy(engine.generate(prompts, LONG), prompts, references(name))
    assert engine.metrics.scheduler.num_preemptions > at_least


@pytest.mark.parametrize("name", LONGEST)
def test_states_go_to_the_host_and_back(name: str, open_engine: Open, references: Any):
    engine = open_engine(name, **little_room(name, 16), block_size=4, max_model_len=60, swap_space=1 << 20)
    engine._engine.scheduler.cache.costs = None  # loading always pays
    talks = [tiny.prompt(16, seed=seed) for seed in range(8)]
    for turn in range(3):
        answers = engine.generate(talks, replace(GREEDY, max_tokens=6))
        assert_all_greedy(answers, talks, references(name))
        talks = [
            [*talk, *answer["token_ids"], *tiny.prompt(7, seed=turn)]
            for talk, answer in zip(talks, answers, strict=True)
        ]
    stats = engine.metrics.scheduler
    assert stats.num_saved_blocks > 0 and stats.num_loaded_blocks > 0 and stats.num_host_hit_tokens > 0


@pytest.mark.parametrize("name", LONGEST)
def test_states_survive_a_restart_in_files(name: str, open_engine: Open, references: Any, tmp_path: Path):
    fields = {**little_room(name, 24), "block_size": 4, "max_model_len": 60, "swap_space": 1 << 20}
    prompts = [tiny.prompt(40, seed=seed) for seed in range(4)]
    for number in range(2):
        engine = open_engine(name, kv_cache_dir=str(tmp_path / "kv"), **fields)
        engine._engine.scheduler.cache.costs = None
        assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
        stats = engine.metrics.scheduler
        engine.close()
        assert (stats.num_prefix_hit_tokens, stats.num_host_hit_tokens) == (0, 0) or number
    assert stats.num_prefix_hit_tokens >= 3 * 36 and stats.num_loaded_blocks >= 3 and stats.num_host_hit_tokens > 0


@pytest.mark.parametrize("name", LONGEST)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_siblings_begin_with_the_state_of_their_prompt(name: str, prefix_caching: bool, open_engine: Open):
    engine = open_engine(name, enable_prefix_caching=prefix_caching, block_size=4)
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=12, ignore_eos=True)
    answers = engine.generate([tiny.prompt(18)], params)
    stats = engine.metrics.scheduler
    assert (stats.num_prefix_hit_tokens, stats.num_forked_tokens) == ((48, 0) if prefix_caching else (0, 48))
    (lone,) = open_engine(name).generate([tiny.prompt(18)], replace(params, n=1, seed=13))
    assert lone["token_ids"] == answers[2]["token_ids"], "sibling i is the request of seed + i"


@pytest.mark.parametrize("name", LONGEST)
@pytest.mark.parametrize("num_turns", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_from_the_second_turn_on_nine_tenths_of_a_conversation_are_cached(name: str, num_turns: int, tmp_path: Path):
    """Of what is cached of a model without recurrent state."""
    cached: dict[str, list[int]] = {}
    for model in (name, "llama"):
        tiny.save_changed(model, tmp_path / model, max_position_embeddings=2048)
        engine = LLMEngine(model=str(tmp_path / model), level=1, kv_cache_memory=1 << 26)
        talk: list[int] = []
        cached[model] = []
        for turn in range(num_turns):
            talk += tiny.prompt(60 + 37 * turn, seed=turn)
            before = engine.metrics.scheduler.num_prefix_hit_tokens
            (answer,) = engine.generate([talk], replace(GREEDY, max_tokens=90 + 40 * turn))
            cached[model].append(engine.metrics.scheduler.num_prefix_hit_tokens - before)
            talk += answer["token_ids"]
        engine.close()
    assert min(cached["llama"][1:]) > 128
    for turn, (own, other) in enumerate(zip(cached[name], cached["llama"], strict=True)):
        assert own >= 0.9 * other, f"turn {turn}: {cached}"


@pytest.mark.parametrize("name", LONGEST)
def test_states_are_forgotten_over_a_sleep(name: str, open_engine: Open, references: Any):
    engine = open_engine(name, enable_sleep_mode=True, block_size=4)
    prompts = [tiny.prompt(30), tiny.prompt(17, seed=1)]
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
    engine.sleep(level=2)
    engine.wake_up()
    before = engine.metrics.scheduler.num_prefix_hit_tokens
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
    assert engine.metrics.scheduler.num_prefix_hit_tokens == before


@pytest.mark.parametrize("name", LONGEST)
def test_after_a_step_that_ran_out_of_memory_rows_go_back_to_a_copy(
    name: str, open_engine: Open, references: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = open_engine(name, block_size=4)
    prompts = [tiny.prompt(30), tiny.prompt(17, seed=1)]
    model, steps = engine._engine.runner.model, []
    score_of = type(model)._compute

    def fail_once(self: Any, inputs: Any) -> Any:  # after the body has written over states
        computed = score_of(self, inputs)
        steps.append(computed)
        if len(steps) == 3:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")
        return computed

    monkeypatch.setattr(type(model), "_compute", fail_once)
    ids = engine.add_request(prompts, GREEDY)
    ended: list[Any] = []
    num_failed = 0
    while not engine.is_finished():
        try:
            ended += engine.step()
        except CapacityError:
            num_failed += 1
    assert num_failed == 1 and engine.metrics.scheduler.num_preemptions == 2
    answers = {sequence.request_id: {"token_ids": sequence.output} for sequence in ended}
    assert_all_greedy([answers[id] for id in ids], prompts, references(name))


@pytest.mark.parametrize("name", LONGEST)
def test_a_request_at_fault_ends_and_no_other(
    name: str, open_engine: Open, references: Any, monkeypatch: pytest.MonkeyPatch
):
    engine = open_engine(name, block_size=4)
    model, num_failed = engine._engine.runner.model, []
    mix = type(model).mix

    def fail(self: Any, shape: Any, *packed: Any) -> Any:
        computed = mix(self, shape, *packed)
        if (computed.inputs.tokens == 100).any():
            num_failed.append(shape)
            raise ValueError("a token that fails")
        return computed

    monkeypatch.setattr(type(model), "mix", fail)
    prompts = [tiny.prompt(20 + seed, seed=seed) for seed in range(5)]
    prompts = [[min(token, 99) for token in prompt] for prompt in prompts]
    prompts[3][2] = 100
    answers = engine.generate(prompts, GREEDY)
    assert [answer["finish_reason"] for answer in answers] == ["max_tokens"] * 3 + ["error", "max_tokens"]
    others = [number for number in range(5) if number != 3]
    assert_all_greedy([answers[number] for number in others], [prompts[number] for number in others], references(name))
    assert len(num_failed) <= 3


@pytest.mark.parametrize("name", EVENTFUL)
def test_drafts_that_are_rejected_leave_no_trace(name: str, open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    """Drafts of the host: none, some or all are right. A second turn begins after a copy of the state in an answer."""
    fields = {**little_room(name, 26), "block_size": 4, "max_model_len": 80, "max_num_batched_tokens": 16}
    prompts = [tiny.prompt(9 + seed, seed=seed) for seed in range(len(DRAWN))]
    plain = open_engine(name, **fields)
    answers = tokens_of(plain, DRAWN, prompts)
    talks = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    further = tokens_of(plain, DRAWN, talks)
    known = {tuple(prompt): answer for prompt, answer in zip([*prompts, *talks], [*answers, *further], strict=True)}
    monkeypatch.setattr("atom.assemble.engine.open_drafter", lambda *_: KnownDrafts(known, TURNS["mixed"]))
    engine = open_engine(name, method="ngram", max_verified_tokens=100, **fields)
    assert tokens_of(engine, DRAWN, prompts) == answers
    before = engine.metrics.scheduler.num_prefix_hit_tokens
    assert tokens_of(engine, DRAWN[-1], talks[-1:]) == further[-1:]
    stats = engine.metrics.scheduler
    assert stats.num_prefix_hit_tokens - before > len(prompts[-1])
    assert tokens_of(engine, DRAWN, talks) == further
    stats = engine.metrics.scheduler
    assert all(draft_statistics(stats)["distribution"][number] for number in range(4))
    assert stats.num_chunks > 0 and (stats.num_preemptions > 0 or name == "mamba")


@pytest.mark.parametrize("name", LONGEST)
@pytest.mark.parametrize("run_ahead", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_drafts_of_the_runner_leave_no_trace(
    name: str, run_ahead: int, open_engine: Open, drafting: Any, draft_known: Any
):
    """It runs ahead, so that the host does not know which states have been reached."""
    prompts = [tiny.prompt(9 + seed, seed=seed) for seed in range(len(DRAWN))]
    plain = open_engine(name, block_size=4)
    answers = tokens_of(plain, DRAWN, prompts)
    talks = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    further = tokens_of(plain, DRAWN, talks)
    draft_known([[*tokens, *answer] for tokens, answer in zip([*talks, *prompts], [*further, *answers], strict=True)],
                TURNS["mixed"])  # fmt: skip
    drafting(run_ahead)
    engine = open_engine(name, method="ngram", max_verified_tokens=100, block_size=4, state_interval=4)
    assert tokens_of(engine, DRAWN, prompts) == answers
    before = engine.metrics.scheduler.num_prefix_hit_tokens
    assert tokens_of(engine, DRAWN, talks) == further
    stats = engine.metrics.scheduler
    assert stats.num_prefix_hit_tokens - before > sum(map(len, prompts)) + 20 * len(prompts)
    assert all(draft_statistics(stats)["distribution"][number] for number in range(4))
    assert (stats.num_ahead > 0) == (run_ahead > 0)


@pytest.mark.parametrize("name", ["qwen3_5", *SLOW[:2], pytest.param("minimax_text_01", marks=pytest.mark.slow)])
def test_states_of_16_bits_take_half_the_room_and_cost_their_rounding(name: str, open_engine: Open, references: Any):
    prompt = tiny.prompt(40)
    expected = tiny.logits(references(name), prompt)
    sizes, errors = dict[str, int](), dict[str, float]()
    for dtype in ("fp32", "bf16"):
        engine = open_engine(
            name, max_num_batched_tokens=8, **{"model.state_dtype": dtype}
        )  # in which they are rounded
        states = [state for state in engine._engine.runner.model.graph.states() if state.rule.in_slot]
        sizes[dtype] = sum(state.type.num_bytes for state in states if len(state.type.shape) == 3)
        errors[dtype] = float((logits_of(engine, prompt) - expected).norm() / expected.norm())
    assert sizes["bf16"] * 2 == sizes["fp32"] > 0
    assert errors["fp32"] < 1e-5 < errors["bf16"] < 0.1


def test_as_many_sequences_run_as_have_room_for_their_state(open_engine: Open, references: Any):
    size = state_bytes(open_engine("lfm2"))
    engine = open_engine("lfm2", max_num_seqs=64, kv_cache_memory=20 * size, max_model_len=16)
    assert engine._engine.scheduler.limits.max_num_seqs == 8
    prompts = [tiny.prompt(9, seed=seed) for seed in range(11)]
    answers = engine.generate(prompts, replace(GREEDY, max_tokens=7))
    assert_all_greedy(answers, prompts, references("lfm2"))


def state_bytes(engine: LLMEngine) -> int:
    """Bytes of the state of a sequence."""
    (pool,) = [pool for pool in engine._engine.scheduler.cache.pools if pool.kind.rule.in_slot]
    return pool.kind.block_bytes


def little_room(name: str, num_blocks: int) -> dict[str, int]:
    """Fields that give room for so many blocks; for a few sequences and copies if no layer has attention."""
    is_paged = name != "mamba"
    return {"num_kvcache_blocks": num_blocks} if is_paged else {"max_num_seqs": 4, "kv_cache_memory": 120_000}
