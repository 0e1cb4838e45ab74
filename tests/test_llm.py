"""The whole way, from a checkpoint's folder to tokens, against transformers."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import torch
import transformers
from greedy import GREEDY, assert_all_greedy
from law import relative_error
from parting import naming_line
from probe import assert_logits, logits_of

from atom import LLMEngine, SamplingParams
from atom.checkpoint import embedded
from atom.errors import CapacityError, CheckpointError, ConfigError, EngineDeadError, RequestError
from atom.runtime.types import RequestOutput

pytestmark = pytest.mark.early

LONG = replace(GREEDY, max_tokens=64)
EVENTFUL = ["llama", "llama_odd_heads", "qwen2_window", "qwen3_window", "mistral_window"]
EVENTFUL_AT = [("llama", 0), ("qwen3_window", 0), *((name, 1) for name in EVENTFUL)]

SCHEDULED = {  # by level, the others are slow: at 0 each kind of cache and of layer, at 1 every model file
    0: ["deepseek_v3", "gemma3", "gpt_oss", "phi3", "qwen3_moe"],
    1: [*tiny.MODEL_FILES, "mistral_window_1", "smollm3_window"],
}
FP16 = {0: ["qwen3"], 1: ["deepseek_v3", "gemma2", "gpt_oss", "qwen3", "starcoder2"]}  # by level, the others are slow

Open = Callable[..., LLMEngine]


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if level == 1 or name in SCHEDULED[0] else pytest.mark.slow)
        for name in tiny.VARIANTS
        for level in (0, 1)
    ],
)
def test_logits_at_every_position_and_24_greedy_tokens(name: str, level: int, open_engine: Open, references: Any):
    engine, model = open_engine(name, level=level, max_num_batched_tokens=64), references(name)
    tokens = tiny.prompt(100)
    assert_logits(engine, tokens, model)
    assert engine.metrics.scheduler.num_chunks > 0
    prompt = tiny.prompt(40, seed=1)
    with naming_line(engine.config, model, prompt):
        assert_all_greedy(engine.generate([prompt], GREEDY), [prompt], model)


def test_the_tokens_are_those_that_transformers_generates(open_engine: Open, references: Any):
    prompt = tiny.prompt(30)
    expected = references("qwen3").generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 30), max_new_tokens=20, do_sample=False
    )
    (answer,) = open_engine("qwen3").generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    assert answer["token_ids"] == expected[0, 30:].tolist()


def test_bad_words_and_allowed_tokens_are_those_of_transformers(tmp_path: Path):
    folder = serving.save_talker(tmp_path / "talker")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    letters = list(range(64, 90))  # the tokens of a … z
    prompt = list(range(15, 25))  # digits: transformers looks for bad words in the prompt, too

    def generate(bad_words: list[list[int]]) -> list[int]:
        options = {"bad_words_ids": bad_words} if bad_words else {}
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
        found = model.generate(**inputs, **options, max_new_tokens=24, do_sample=False,
                               prefix_allowed_tokens_fn=lambda *_: letters)  # fmt: skip
        return list(found[0, len(prompt) :].tolist())

    free = generate([])
    bad = [free[3:5], free[9:12]]
    words = ["".join(chr(token + 33) for token in each) for each in bad]
    greedy = SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=letters)
    engine = LLMEngine(model=str(folder), level=1, dtype="fp32", kv_cache_memory=1 << 22, max_model_len=64)
    assert engine.generate([prompt], greedy)[0]["token_ids"] == free
    (answer,) = engine.generate([prompt], replace(greedy, bad_words=words))
    assert answer["token_ids"] == generate(bad) != free
    engine.close()


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "level"), EVENTFUL_AT)
def test_a_batch_of_odd_lengths_gives_each_its_own_tokens(name: str, level: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (1, 15, 16, 17, 2, 48, 33)]
    engine = open_engine(name, level=level)
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
    assert engine.metrics.scheduler.num_steps < 2 * GREEDY.max_tokens, "they ran together"


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "level"), EVENTFUL_AT)
def test_chunks_mixed_with_decodes_change_nothing(name: str, level: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (3, 61, 20, 50)]
    engine = open_engine(name, level=level, max_num_batched_tokens=7, block_size=3)
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(name))
    assert engine.metrics.scheduler.num_chunks > 10


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "level"), EVENTFUL_AT)
def test_prefix_hits_change_nothing(name: str, level: int, open_engine: Open, references: Any):
    engine = open_engine(name, level=level, enable_prefix_caching=True, block_size=4)
    shared = tiny.prompt(37)
    prompts = [shared, shared + tiny.prompt(9, seed=1), shared[:20] + tiny.prompt(30, seed=2), shared]
    for prompt in prompts:
        assert_all_greedy(engine.generate([prompt], GREEDY), [prompt], references(name))
    assert engine.metrics.scheduler.num_prefix_hit_tokens >= 36 + 20 + 36


def test_prompts_of_different_salts_share_no_prefix(open_engine: Open):
    engine = open_engine(
        "llama", enable_prefix_caching=True, block_size=4, **{"serve.pooler_config.pooling_type": "LAST"}
    )
    prompt = tiny.prompt(21)
    plain, mine, other = (
        {"prompt_token_ids": prompt, **salt} for salt in ({}, {"cache_salt": "mine"}, {"cache_salt": "other"})
    )

    def num_hits(run: Callable[[Any], object], given: Any) -> int:
        before = engine.metrics.scheduler.num_prefix_hit_tokens
        run([given])
        return engine.metrics.scheduler.num_prefix_hit_tokens - before

    hits = [num_hits(lambda given: engine.generate(given, GREEDY), each) for each in (plain, mine, other, mine, prompt)]
    assert hits == [0, 0, 0, 20, 20], "a salt finds its own, and none finds what has none"
    assert [num_hits(engine.embed, {**plain, "cache_salt": salt}) for salt in ("new", "mine")] == [0, 20]


def test_an_answer_is_a_prefix_for_the_next_turn(open_engine: Open, references: Any):
    engine = open_engine("llama", enable_prefix_caching=True, block_size=4)
    first = tiny.prompt(10)
    (answer,) = engine.generate([first], LONG)
    second = first + answer["token_ids"] + tiny.prompt(5, seed=3)
    assert_all_greedy(engine.generate([second], GREEDY), [second], references("llama"))
    assert engine.metrics.scheduler.num_prefix_hit_tokens >= 72, "blocks that decoding filled were found"


def test_prefixes_are_forgotten_while_requests_run(open_engine: Open, references: Any):
    engine = open_engine("llama", block_size=4)
    prompt, other = tiny.prompt(37), tiny.prompt(22, seed=1)
    expected = engine.generate([prompt], GREEDY)
    assert_all_greedy(expected, [prompt], references("llama"))
    assert engine.reset_prefix_cache() is True
    ids = engine.add_request([prompt, other], GREEDY)
    ended = [each for _ in range(4) for each in engine.step()]
    hits, preempted = engine.metrics.scheduler.num_prefix_hit_tokens, engine.metrics.scheduler.num_preemptions
    assert (hits, preempted, ended) == (0, 0, [])
    assert engine.reset_prefix_cache() is True
    while not engine.is_finished():
        ended += engine.step()
    answers = {sequence.request_id: sequence.output for sequence in ended}
    assert engine.metrics.scheduler.num_preemptions == 2
    assert answers[ids[0]] == expected[0]["token_ids"]
    assert_all_greedy([{"token_ids": answers[ids[1]]}], [other], references("llama"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "level"), EVENTFUL_AT)
def test_preemption_changes_nothing(name: str, level: int, open_engine: Open, references: Any):
    prompts = [tiny.prompt(length, seed=length) for length in (30, 25, 41)]
    engine = open_engine(name, level=level, num_kvcache_blocks=27, block_size=4, max_model_len=106)
    assert_all_greedy(engine.generate(prompts, LONG), prompts, references(name))
    if "window" not in name:
        assert engine.metrics.scheduler.num_preemptions > 0


@pytest.mark.sampled(36)
@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if name in SCHEDULED[level] else pytest.mark.slow)
        for name in tiny.VARIANTS
        if name not in EVENTFUL
        for level in (0, 1)
    ],
)
def test_all_of_these_together_change_nothing(name: str, level: int, open_engine: Open, references: Any):
    engine = open_engine(name, level=level, num_kvcache_blocks=30, block_size=4, max_model_len=106,
                         max_num_batched_tokens=16, enable_prefix_caching=True)  # fmt: skip
    shared = tiny.prompt(30)
    prompts = [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]
    for batch in (prompts, prompts[::-1]):
        assert_all_greedy(engine.generate(batch, GREEDY), batch, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0
    assert metrics.num_prefix_hit_tokens > 0
    has_only_windows = all(not pool.keeps_all for pool in engine._engine.scheduler.cache.pools)
    assert metrics.num_preemptions > 0 or has_only_windows, "a window's pool holds every sequence's window"


@pytest.mark.slow
def test_every_option_that_groups_tokens_gives_the_same_text_of_the_same_seed(open_engine: Open):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=32, ignore_eos=True)
    prompts = [tiny.prompt(length, seed=length) for length in (9, 30)]
    separate = open_engine("llama")
    expected = [separate.generate([prompt], params)[0]["token_ids"] for prompt in prompts]
    together = open_engine("llama", max_num_batched_tokens=8, num_kvcache_blocks=18, block_size=4, max_model_len=64)
    answers = together.generate(prompts, params)
    assert [answer["token_ids"] for answer in answers] == expected
    assert together.metrics.scheduler.num_preemptions > 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_siblings_share_the_prompt_and_differ_in_their_seeds(open_engine: Open, prefix_caching: bool):
    engine = open_engine("llama", enable_prefix_caching=prefix_caching, block_size=4)
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True)
    prompts = [tiny.prompt(18), tiny.prompt(3)]
    answers = engine.generate(prompts, params)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(answer["token_ids"]) for answer in answers[:3]}) == 3
    stats = engine.metrics.scheduler
    assert (stats.num_prefix_hit_tokens, stats.num_forked_tokens) == ((32, 0) if prefix_caching else (0, 32))
    lone = open_engine("llama").generate(
        [prompts[0]], SamplingParams(temperature=1.0, seed=13, max_tokens=12, ignore_eos=True)
    )
    assert lone[0]["token_ids"] == answers[2]["token_ids"], "sibling i is the request of seed + i"


def test_stop_tokens_and_lengths_end_an_answer(open_engine: Open):
    engine = open_engine("llama")
    prompt = tiny.prompt(20)
    (free,) = engine.generate([prompt], GREEDY)
    third = free["token_ids"][2]
    assert third not in free["token_ids"][:2]
    (stopped,) = engine.generate([prompt], SamplingParams(temperature=0, stop_token_ids=[third]))
    assert (stopped["finish_reason"], stopped["token_ids"]) == (f"stop_{third}", free["token_ids"][:3])
    (later,) = engine.generate(
        [prompt], SamplingParams(temperature=0, stop_token_ids=[third], min_tokens=5, max_tokens=9)
    )
    assert len(later["token_ids"]) >= 5
    assert free["finish_reason"] == "max_tokens"
    assert free["text"] is None, "the checkpoint has no tokenizer"
    (longest,) = engine.generate([tiny.prompt(250)], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert (longest["num_tokens_output"], longest["finish_reason"]) == (6, "max_tokens"), "max_model_len is 256"


def test_the_times_of_an_answer_add_up(open_engine: Open):
    (answer,) = open_engine("llama").generate(
        [tiny.prompt(5)], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    )
    assert (answer["num_tokens_input"], answer["num_tokens_output"]) == (5, 9)
    assert 0 < answer["ttft"] < answer["latency"]
    assert answer["ttft"] + 8 * answer["tpot"] == pytest.approx(answer["latency"])


def test_logprobs_are_those_of_the_reference(open_engine: Open, references: Any):
    prompt = tiny.prompt(30)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (answer,) = open_engine("llama", max_num_batched_tokens=8).generate([prompt], params)
    tokens = prompt + answer["token_ids"]
    expected = tiny.logits(references("llama"), tokens).log_softmax(-1)
    assert answer["prompt_logprobs"][0] is None, "nothing comes before the first token"
    assert len(answer["prompt_logprobs"]) == len(prompt)
    for place, entry in enumerate([*answer["prompt_logprobs"][1:], *answer["logprobs"]]):
        best = expected[place].topk(len(entry.top))
        assert entry.token == tokens[place + 1]
        assert entry.logprob == pytest.approx(expected[place, entry.token].item(), abs=1e-3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert entry.rank == 1 + (expected[place] > expected[place, entry.token]).sum()


def test_a_prompt_of_one_token_has_no_logprob_before_it(open_engine: Open):
    (answer,) = open_engine("llama").generate([tiny.prompt(1)], replace(GREEDY, prompt_logprobs=1))
    assert answer["prompt_logprobs"] == [None]


def test_requests_come_and_go_while_others_run(open_engine: Open):
    engine = open_engine("llama")
    seen: list[RequestOutput] = []
    prompts = [tiny.prompt(8, seed=seed) for seed in range(3)]
    expected = [
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0]["token_ids"]
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    first, second = engine.add_request(prompts[:2], params, seen.append)
    ended = [*engine.step(), *engine.step()]
    (third,) = engine.add_request(prompts[2:], params, seen.append)
    engine.abort(second)
    while not engine.is_finished():
        ended += engine.step()
    reasons = {sequence.request_id: sequence.finish_reason for sequence in ended}
    assert reasons == {first: "max_tokens", second: "abort", third: "max_tokens"}
    streamed = {
        id: [token for output in seen if output.request_id == id for token in output.token_ids] for id in reasons
    }
    assert streamed[first] == expected[0] and streamed[third] == expected[2]
    assert streamed[second] == expected[1][:2]
    assert [output.finish_reason for output in seen if output.finished and output.request_id == second] == ["abort"]
    assert engine._engine.scheduler.cache.fullest[0] == 0
    engine.abort(second)
    engine.abort("nobody")


def test_a_step_that_raises_can_be_taken_again(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("llama")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [tiny.prompt(8, seed=seed) for seed in range(3)]
    expected = [answer["token_ids"] for answer in engine.generate(prompts, params)]
    ids = engine.add_request(prompts, params)
    engine.step()
    runner = engine._engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort(ids[1])
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    answers = {sequence.request_id: sequence.output for sequence in ended}
    assert [answers[ids[0]], answers[ids[2]]] == [expected[0], expected[2]]
    assert engine._engine.scheduler.cache.fullest[0] == 0


def test_a_callback_that_raises_loses_nothing(open_engine: Open):
    engine = open_engine("llama")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (expected,) = engine.generate([[1, 2, 3]], params)

    def fail(output: RequestOutput) -> None:
        raise ValueError("mine")

    (id,) = engine.add_request([[1, 2, 3]], params, fail)
    ended = []
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            engine.step()
    ended = engine.step()
    assert [(sequence.request_id, sequence.output) for sequence in ended] == [(id, expected["token_ids"])]


def test_a_callback_that_raises_keeps_nothing_from_the_others(open_engine: Open):
    engine = open_engine("llama")
    seen: list[tuple[list[int], bool]] = []

    def fail(output: RequestOutput) -> None:
        raise ValueError("mine")

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request([[1, 2]], params, fail)
    engine.add_request([[3]], params, lambda output: seen.append((output.token_ids, output.finished)))
    ended = []
    for _ in range(6):
        with contextlib.suppress(ValueError):
            ended += engine.step()
    assert engine.is_finished() and len(ended) == 2
    assert [finished for _, finished in seen] == [False, True]
    assert [token for tokens, _ in seen for token in tokens] == ended[1].output


def test_a_callback_may_abort_its_own_request(open_engine: Open):
    engine = open_engine("llama")
    seen: list[tuple[int, bool]] = []

    def stop(output: RequestOutput) -> None:
        seen.append((output.index, output.finished))
        engine.abort(output.request_id)

    engine.add_request([[1, 2]], SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=1), stop)
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    assert {sequence.finish_reason for sequence in ended} == {"abort"} and len(ended) == 3
    assert sorted(index for index, finished in seen if finished) == [0, 1, 2], "each end is reported once"
    assert engine._engine.scheduler.cache.fullest[0] == 0


def test_an_interrupted_generate_leaves_other_requests_running(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("llama")
    (id,) = engine.add_request([[5, 6]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    execute, calls = engine._engine.runner.execute, iter(range(4))

    def interrupt(step: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return execute(step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._engine.runner, "execute", interrupt)
        engine.generate([[1, 2, 3]], GREEDY)
    assert [(sequence.request_id, sequence.finish_reason) for sequence in engine.step()] == [(id, "max_tokens")]
    assert engine.is_finished()


@pytest.mark.sampled(54)
@pytest.mark.parametrize("name", tiny.MODEL_FILES)
def test_bf16_is_as_near_to_float32_as_that_of_transformers(
    name: str, open_engine: Open, checkpoints: Any, references: Any
):
    engine, half = open_engine(name, dtype="bf16"), tiny.reference(checkpoints(name), torch.bfloat16)
    ours, theirs = 0.0, 0.0
    for seed in range(20):
        tokens = tiny.prompt(24, seed=seed)
        exact = tiny.logits(references(name), tokens)
        ours += relative_error(logits_of(engine, tokens), exact) / 20
        theirs += relative_error(tiny.logits(half, tokens), exact) / 20
    assert ours <= 1.25 * theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=() if name in FP16[level] else pytest.mark.slow)
        for name in tiny.VARIANTS
        for level in (0, 1)
        if name != "deepseek_v4"  # of which transformers 5.24 keeps linears in float32 and gives them fp16
    ],
)
def test_fp16_is_as_near_to_float32_as_that_of_transformers(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    engine = open_engine(name, dtype="fp16", level=level)
    tiny.assert_fp16(checkpoints(name), references(name), lambda tokens: logits_of(engine, tokens))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields",
    [{"dtype": "bf16", "kv_cache_dtype": "fp32"}, {"dtype": "fp32", "kv_cache_dtype": "bf16"}],
)
@pytest.mark.parametrize("level", [0, 1])
def test_other_dtypes_stay_near_the_reference(checkpoints: Any, references: Any, fields: dict[str, Any], level: int):
    engine = LLMEngine(model=str(checkpoints("qwen3")), level=level, kv_cache_memory=1 << 22, **fields)
    tokens = tiny.prompt(50)
    exact = tiny.logits(references("qwen3"), tokens)
    half = tiny.reference(checkpoints("qwen3"), torch.bfloat16)
    assert relative_error(logits_of(engine, tokens), exact) <= 1.25 * relative_error(tiny.logits(half, tokens), exact)
    engine.close()


@pytest.mark.parametrize("fields", [{"num_kvcache_blocks": 2 * 10**9}, {"kv_cache_memory": 10**15}])
def test_a_pool_that_memory_cannot_hold_names_the_knob(checkpoints: Any, fields: dict[str, int]):
    with pytest.raises(CapacityError, match=r"lower serve\.kv_cache_memory, or serve\.num_kvcache_blocks"):
        LLMEngine(model=str(checkpoints("llama")), level=1, **fields)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "the prompt is empty"),
        ([5, 101], "101 in the prompt is not a token id; they are numbers from 0 to 100"),
        ([-1], "-1 in the prompt"),
        ([True], "True in the prompt"),
        ([1.5], "1.5 in the prompt"),
        ("text", "has no tokenizer"),
        ([1] * 256, "max_model_len"),
        (7, "7"),
    ],
)
def test_a_bad_prompt_is_refused_and_disturbs_nobody(open_engine: Open, prompt: Any, reason: str):
    engine = open_engine("llama")
    (id,) = engine.add_request([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    with pytest.raises(RequestError, match=reason):
        engine.generate([[4, 5], prompt], GREEDY)
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    assert [(sequence.request_id, len(sequence.output)) for sequence in ended] == [(id, 4)], (
        "and none of its list was queued"
    )


def test_a_pool_of_too_few_blocks_for_the_longest_sequence_is_refused_with_what_to_set(open_engine: Open):
    with pytest.raises(ConfigError) as refused:
        open_engine("llama", num_kvcache_blocks=49, block_size=4, max_model_len=200)
    assert str(refused.value) == (
        "serve.num_kvcache_blocks=49 hold no sequence of serve.max_model_len=200, which takes 50 blocks of 4 tokens: set "
        "serve.num_kvcache_blocks=50 or more, or serve.max_model_len=196 or less"
    )
    engine = open_engine("llama", num_kvcache_blocks=50, block_size=4, max_model_len=200)
    (answer,) = engine.generate([tiny.prompt(180)], SamplingParams(max_tokens=20, ignore_eos=True))
    assert answer["num_tokens_output"] == 20, "which is what they hold"


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy])
def test_an_engine_is_neither_pickled_nor_copied(open_engine: Open, take: Callable[[Any], object]):
    with pytest.raises(TypeError, match="open one in each process, or serve the model"):
        take(open_engine("llama"))


def test_a_fork_of_the_engines_process_cannot_use_it_and_says_so(open_engine: Open):
    engine = open_engine("llama")
    errors = multiprocessing.get_context("fork").Queue()

    def use_it() -> None:
        try:
            engine.generate([[1]], GREEDY)
        except EngineDeadError as error:
            errors.put(str(error))

    child = multiprocessing.get_context("fork").Process(target=use_it)
    child.start()
    try:
        assert errors.get(timeout=60).startswith(
            f"the engine belongs to process {os.getpid()}, from which this one was"
        )
    finally:
        child.kill()
        child.join()


def test_bad_arguments_are_refused_with_what_to_give(open_engine: Open):
    engine = open_engine("llama")
    with pytest.raises(RequestError, match="has no tokenizer; give the prompt as a list"):
        engine.generate("one string")
    with pytest.raises(RequestError, match="'encoder_prompt' is not a key of a prompt"):
        engine.generate({"prompt": "one", "encoder_prompt": "two"})
    with pytest.raises(RequestError, match="a prompt has 2 of the keys"):
        engine.generate([{"prompt": "one", "prompt_token_ids": [1]}])
    with pytest.raises(RequestError, match="a prompt has 0 of the keys"):
        engine.generate([{"cache_salt": "mine"}])
    with pytest.raises(RequestError, match="cache_salt is ''; give a text that is not empty, or leave it out"):
        engine.generate([{"prompt_token_ids": [1], "cache_salt": ""}])
    with pytest.raises(RequestError, match=r"set serve\.pooler_config\.pooling_type=LAST"):
        engine.score([[1]], [[2]])
    with pytest.raises(RequestError, match="has no tokenizer; chat"):
        engine.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        engine.generate([[1]], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="101 is not a token id"):
        engine.generate([[1]], SamplingParams(logit_bias={101: 1.0}))
    with pytest.raises(RequestError, match="stop_strings needs a tokenizer"):
        engine.generate([[1]], SamplingParams(stop_strings=["x"]))
    with pytest.raises(RequestError, match="is no SamplingParams"):
        engine.generate([[1]], [None])
    with pytest.raises(RequestError, match=r"GenerationConfig .* is no SamplingParams"):
        engine.generate([[1]], transformers.GenerationConfig(max_new_tokens=4))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give only the input_ids"):
        engine.generate({"input_ids": [1], "attention_mask": [1]})
    with pytest.raises(ConfigError, match="are the same option"):
        LLMEngine(block_size=8, kv_cache_block_size=4)
    assert engine.generate([], GREEDY) == []
    engine.close()
    with pytest.raises(EngineDeadError):
        engine.generate([[1]])


def test_dummy_weights_need_only_a_config(checkpoints: Any, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoints("qwen3") / "config.json").read_bytes())
    engine = LLMEngine(model=str(tmp_path), load_dummy=True, kv_cache_memory=1 << 22, seed=3, level=1)
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    again = LLMEngine(model=str(tmp_path), load_dummy=True, kv_cache_memory=1 << 22, seed=3, level=1)
    assert (
        again.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]["token_ids"]
        == answer["token_ids"]
    )


def test_without_a_network_the_embedded_model_is_missed_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_requirement: str, _folder: Path) -> None:
        raise CheckpointError("no network")

    monkeypatch.setattr(embedded, "run_pip", refuse)
    with pytest.raises(CheckpointError, match="no network"):
        LLMEngine(cache=str(tmp_path), level=1)
    assert [each.name for each in tmp_path.iterdir()] == ["downloads"]


def test_the_sampling_that_a_checkpoint_recommends_is_the_default_and_printed(
    checkpoints: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "llama")
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 1, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    fields = {
        "model": str(folder),
        "kv_cache_memory": 1 << 22,
        "level": 1,
        "dtype": "fp32",
        "sampling.ignore_eos": True,
    }
    engine = LLMEngine(**fields)
    message = "sampling as the checkpoint says: temperature 0.7, max_tokens 5, top_k 1; sampling.defaults=none leaves it out\n"
    assert message in capsys.readouterr().err
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (default,), (expected,) = engine.generate([[1, 2, 3]]), engine.generate([[1, 2, 3]], greedy)
    assert default["token_ids"] == expected["token_ids"]
    (explicit,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=7, ignore_eos=True))
    assert explicit["num_tokens_output"] == 7
    (plain,) = LLMEngine(**fields, **{"sampling.defaults": "none"}).generate([[1, 2, 3]])
    assert plain["num_tokens_output"] == 64
    assert "sampling as" not in capsys.readouterr().err


def test_the_pool_is_printed_at_the_start(open_engine: Open, capsys: pytest.CaptureFixture[str]):
    open_engine("llama", num_kvcache_blocks=40, block_size=4, max_model_len=50)
    assert "KV: 160 tokens, 3 requests at max_model_len\n" in capsys.readouterr().err


def test_a_prompt_that_fails_where_others_run_has_its_error_as_answer(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    engine = open_engine("llama")
    prompts = [tiny.prompt(8, seed=seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = [answer["token_ids"] for answer in engine.generate(prompts, params)]
    build = engine._engine.builder.build

    def fail(plan: Any) -> Any:
        if any(row.sequence.prompt == prompts[1] and len(row.sequence.output) == 2 for row in plan.rows):
            raise ValueError("it is nan")
        return build(plan)

    monkeypatch.setattr(engine._engine.builder, "build", fail)
    first, second, third = engine.generate(prompts, params)
    assert [first["token_ids"], third["token_ids"]] == [expected[0], expected[2]]
    assert (second["finish_reason"], second["error"]) == ("error", "ValueError: it is nan")
    assert second["token_ids"] == expected[1][:2]
    assert "error" not in first
    assert engine._engine.scheduler.cache.fullest[0] == 0
    with pytest.raises(ValueError, match="it is nan"):
        engine.generate([prompts[1]], params)
    assert engine.is_finished()


@pytest.mark.slow
def test_a_profile_of_some_steps_lies_in_the_folder_of_its_rank(open_engine: Open, tmp_path: Path):
    engine = open_engine("llama", torch_profiler_dir=str(tmp_path / "my traces"), profiler_more=True)
    with pytest.raises(RequestError, match="start it first"):
        engine.stop_profile()
    engine.start_profile()
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    path = engine.stop_profile()
    assert path.parent == tmp_path / "my traces" / "rank_0" and path.name.endswith(".pt.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events if event["name"].startswith("aten::"))


def test_statistics_of_drafts(open_engine: Open, capsys: pytest.CaptureFixture[str]):
    assert open_engine("llama").print_mtp_statistics() is None
    assert "no token has been drafted (serve.method=ngram" in capsys.readouterr().out
    engine = open_engine("llama", method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
    engine.generate([[1, 2, 3] * 4], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    found = engine.get_mtp_statistics()
    num_drafted, num_accepted = found["total_draft_tokens"], found["total_accepted_tokens"]
    assert num_drafted > 0 and found["acceptance_rate"] == num_accepted / num_drafted
    counts = found["distribution"]
    assert sum(number * times for number, times in counts.items()) == num_accepted
    assert found["average_tokens_per_forward"] == pytest.approx(1 + num_accepted / sum(counts.values()))
    engine.print_mtp_statistics()
    assert f"Accepted/Total Draft tokens: {num_accepted}/{num_drafted}, " in capsys.readouterr().out


def test_chats_and_prompts_are_those_of_transformers(tmp_path: Path):
    folder = serving.save_talker(tmp_path / "talker")
    engine = LLMEngine(model=str(folder), level=1, dtype=torch.float32, kv_cache_memory=1 << 22, max_model_len=1024)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "find", "description": "it", "parameters": parameters}}]
    asked = [{"role": "user", "content": "hello"}]
    begun = [*asked, {"role": "assistant", "content": "well"}]
    own = "{% for m in messages %}<{{ m.role }}:{{ m.content }}{{ mood }}>{% endfor %}"

    def check(messages: list[dict[str, str]], ours: dict[str, Any], rendered: dict[str, Any]) -> None:
        prompt = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **rendered)
        (answer,) = engine.chat(messages, greedy, **ours)
        assert answer["num_tokens_input"] == len(prompt)
        tiny.assert_greedy(answer, prompt, model)

    check(asked, {}, {"add_generation_prompt": True})
    check(asked, {"tools": tools}, {"tools": tools, "add_generation_prompt": True})
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    check(begun, going_on, going_on)
    check(asked, {"chat_template": own, "chat_template_kwargs": {"mood": "!"}}, {"chat_template": own, "mood": "!"})
    both = engine.chat([asked, begun], greedy)
    assert [each["token_ids"] for each in both] == [
        engine.chat(each, greedy)[0]["token_ids"] for each in (asked, begun)
    ]
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        engine.chat(begun, greedy, continue_final_message=True)
    for wrong in ("hello", ["hello"], {"role": "user", "content": "hello"}, [{"content": "hello"}], [asked, "hello"]):
        with pytest.raises(RequestError, match="is no conversation; give"):
            engine.chat(wrong, greedy)  # type: ignore[arg-type]
    ids = theirs("hello")["input_ids"]
    forms: list[Any] = ["hello", ["hello"], [ids], {"prompt": "hello"}, [{"prompt_token_ids": ids}]]
    expected = engine.generate([ids], greedy)[0]["token_ids"]
    assert [engine.generate(form, greedy)[0]["token_ids"] for form in forms] == [expected] * len(forms)
    with pytest.raises(RequestError, match=r"1 is not a prompt; .* as in \[\[1, 2\]\]"):
        engine.generate([1, 2], greedy)  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"\{'max_tokens': 3\} is no SamplingParams"):
        engine.generate("hello", {"max_tokens": 3})  # type: ignore[arg-type]
    engine.close()


@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_scores_are_cosines_of_the_hidden_states_of_transformers(open_engine: Open, references: Any, pooling: str):
    engine = open_engine("qwen3", **{"serve.pooler_config.pooling_type": pooling})
    query, *documents = [tiny.prompt(size, seed=size) for size in (6, 1, 19, 33)]

    def embedding(prompt: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            states = references("qwen3").model(torch.tensor([prompt])).last_hidden_state[0]
        return states[-1] if pooling == "LAST" else states.mean(0)

    def cosine(one: list[int], other: list[int]) -> float:
        return torch.cosine_similarity(embedding(one), embedding(other), dim=0).item()

    found = engine.score([query], documents)
    assert found == pytest.approx([cosine(query, each) for each in documents], abs=1e-5)
    turned = documents[::-1]
    expected = [cosine(*pair) for pair in zip(documents, turned, strict=True)]
    assert engine.score(documents, turned) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RequestError, match="data_1 has 2 prompts and data_2 3"):
        engine.score(documents[:2], documents)
    assert engine._engine.scheduler.cache.fullest[0] == 0
    embedded = engine.embed([query, *documents])
    assert [each["num_tokens_input"] for each in embedded] == [6, 1, 19, 33]
    for each, prompt in zip(embedded, [query, *documents], strict=True):
        unit = torch.nn.functional.normalize(embedding(prompt), dim=0)
        torch.testing.assert_close(torch.tensor(each["embedding"]), unit, atol=2e-5, rtol=0)


def test_an_embedding_model_pools_as_its_files_say(references: Any, tmp_path: Path):
    folder = tmp_path / "embedder"  # as e5-mistral: the weights begin inside the model, without its head
    references("qwen3").model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["Qwen3Model"], False)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False})
    )
    engine = LLMEngine(model=str(folder), dtype="fp32", level=1, kv_cache_memory=1 << 22)
    pooler = engine.config.serve.pooler_config
    assert (pooler.pooling_type, pooler.normalize) == ("MEAN", False)
    prompt = tiny.prompt(19)
    with torch.inference_mode():
        expected = references("qwen3").model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
    (found,) = engine.embed([prompt])
    torch.testing.assert_close(torch.tensor(found["embedding"]), expected, atol=2e-5, rtol=0)
    engine.close()


def test_a_caller_may_watch_how_many_answers_are_done(open_engine: Open, capsys: pytest.CaptureFixture[str]):
    engine = open_engine("qwen3")
    silent = engine.generate([[1], [2]], SamplingParams(max_tokens=2, temperature=0))
    assert "answering" not in capsys.readouterr().err
    assert (
        engine.generate([[1], [2]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=True)[1]["text"]
        is silent[1]["text"]
    )
    assert "atom-run: answering: done in" in capsys.readouterr().err
