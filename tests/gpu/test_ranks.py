"""Ranks on two or four GPUs: collectives, the tokens of one rank, whatever happens, and what becomes of dead ones."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_kv_scales
import tiny
import torch
from gpu.collectives import EXPERTS, SHAPES, SIZES, inputs_of, of, two_ranks
from gpu.steps import FIELDS, GREEDY
from gpu.test_drafts import PARAMS as DRAFTED
from gpu.test_drafts import PROMPTS as REPEATING
from rank_checks import (
    answer_during_an_abort,
    assert_ends_by_a_signal,
    assert_goes_on_after_a_stop,
    assert_ranks_end_with_their_driver,
    assert_same_answers,
    assert_same_texts_of_a_grammar,
    eventful_prompts,
    save_with_texts,
    traced_by_each_rank,
)
from test_draft_engine import CASES, VOCAB
from test_host_blocks import SIZES as TALKS
from test_host_blocks import SMALL, load_always, talk
from test_kv_scales import checkpoint

from atom import LLMEngine, SamplingParams
from atom.errors import EngineDeadError

__all__ = ["checkpoint"]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")]

Open = Callable[..., LLMEngine]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVENTFUL = {"num_kvcache_blocks": 30, "block_size": 4, "max_model_len": 106, "max_num_batched_tokens": 16,
            "enable_prefix_caching": True}  # fmt: skip
DIVIDED = [
    ("llama", {"tensor_parallel_size": 2}),
    ("qwen3_moe", {"tensor_parallel_size": 2}),
    ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 2}),
    ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 2, "parallel.dispatch": "dispatch"}),
    ("deepseek_v3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("llama_tied", {"pipeline_parallel_size": 2}),
    ("qwen3_5", {"tensor_parallel_size": 2, "state_memory": 1 << 20}),
    ("lfm2_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True, "state_memory": 1 << 20}),
    ("qwen3_next", {"parallel.data": 2, "parallel.experts": 2, "state_memory": 1 << 20}),
    ("qwen3_next", {"tensor_parallel_size": 2, "state_memory": 1 << 20}),
]
AMONG_FOUR = [
    ("qwen3_moe", {"tensor_parallel_size": 4}),
    ("qwen3_moe", {"parallel.data": 4, "parallel.experts": 4}),
    ("qwen3_moe", {"parallel.data": 2, "tensor_parallel_size": 2, "parallel.experts": 4}),
    ("gpt_oss", {"tensor_parallel_size": 4, "parallel.experts": 2}),
    ("deepseek_v3", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    ("llama_tied", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
]
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are fewer than four GPUs here")
ON_FOUR = [pytest.param(*case, marks=four_gpus) for case in AMONG_FOUR]


def test_collectives_equal_those_in_float64_and_have_the_same_bits_on_each_rank():
    with two_ranks() as (_, _, run):
        ours, theirs = run("ops")
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for (dtype, shape), our, their in zip(cases, ours, theirs, strict=True):
        x, rows, weights, ids = (
            [inputs_of(rank, shape, dtype)[name] for rank in range(2)] for name in ("x", "rows", "weights", "ids")
        )
        eps = 4 * torch.finfo(dtype).eps
        total, _, part, *_ = our
        assert torch.equal(total, their[0]) and total.dtype == dtype
        assert torch.allclose(total.double(), x[0].double() + x[1].double(), rtol=eps, atol=eps)
        for each in (our, their):
            assert torch.equal(each[1], torch.hstack(x)[:, : 2 * shape[1] - 1]) and each[1].is_contiguous()
            assert all(torch.equal(a, torch.cat(b)) for a, b in zip(each[3:6], (x, weights, ids), strict=True))
        needed = [(torch.cat(ids) // EXPERTS == rank).any(-1, keepdim=True) for rank in range(2)]
        sums = sum(part.double().where(own, 0) for part, own in zip(rows, needed, strict=True))
        for rank, each in enumerate((our, their)):
            assert torch.equal(each[6], torch.cat(x).where(needed[rank], 0))
            assert torch.allclose(each[7].double(), sums.chunk(2)[rank], rtol=eps, atol=eps)
        both = (rows[0].double() + rows[1].double()).chunk(2)
        assert torch.allclose(part.double(), both[0], rtol=eps, atol=eps)
        assert torch.allclose(their[2].double(), both[1], rtol=eps, atol=eps)


def test_a_sum_in_a_fixed_order_is_that_of_the_ranks_tensors_for_any_shape():
    with two_ranks() as (_, _, run):
        ours, theirs = run("in_order")
    cases = [(dtype, shape) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    for (dtype, shape), our, their in zip(cases, ours, theirs, strict=True):
        exact = (of(0, shape, dtype).double() + of(1, shape, dtype).double()).to(dtype)  # rounded once
        assert torch.equal(our, exact) and torch.equal(their, exact), (dtype, shape)


def test_graphs_of_collectives_are_replayed_in_any_order_with_a_rank_that_is_late():
    with two_ranks() as (_, _, run):
        ours, theirs = run("replays")
    for seed, (size, our, their) in enumerate(zip(SIZES, ours, theirs, strict=True)):
        x = [of(rank, size, torch.bfloat16, seed) for rank in range(2)]
        total = (x[0].double() + x[1].double()).to(torch.bfloat16)
        for each in (our, their):
            assert torch.equal(each[0], total) and torch.equal(each[1], total * 2)
            assert torch.equal(each[2], torch.hstack(x))


def test_a_collective_that_waits_for_a_rank_which_is_gone_is_ended():
    with two_ranks() as (communicator, ranks, _):
        communicator.all_reduce(torch.ones(64, 64, device="cuda"), axis="tensor")
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        time.sleep(0.2)
        assert not event.query(), "it waits"
        ranks.fail(EngineDeadError("enough"))
        end = time.monotonic() + 3
        while not event.query():
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(EngineDeadError, match="the ranks have ended"):
            communicator.all_reduce(torch.ones(1, 1, device="cuda"), axis="tensor")


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(("name", "fields"), [*DIVIDED, *ON_FOUR])
def test_ranks_generate_the_tokens_of_the_reference(
    name: str, fields: dict[str, Any], level: int, open_engine: Open, references: Any
):
    engine = open_engine(name, level=level, **EVENTFUL, **fields)
    prompts = eventful_prompts()
    num_groups = fields.get("parallel.data", 1)
    prompts += [tiny.prompt(1 + 9 * (seed % 5), seed=seed + 3) for seed in range(4 * (num_groups - 1))]
    for batch in (prompts, prompts[::-1], prompts[:1]):  # the last leaves a group empty
        for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
            tiny.assert_greedy(answer, prompt, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0 and metrics.num_preemptions > 0
    assert metrics.num_ahead > 0


PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=32, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, top_k=20, min_p=0.02, seed=3, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.7, presence_penalty=0.4, repetition_penalty=1.2, seed=5, max_tokens=32),
    SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, logit_bias={3: 2.0}, min_tokens=3),
]


@pytest.mark.parametrize(("name", "fields"), [DIVIDED[0], DIVIDED[2], DIVIDED[3]])
def test_ranks_sample_what_one_samples(name: str, fields: dict[str, Any], open_engine: Open):
    prompts = [tiny.prompt(length, seed=length) for length in (9, 30, 1, 17)]
    single = open_engine(name, level=3).generate(prompts, PARAMS)
    engine = open_engine(name, level=3, **fields)
    assert_same_answers(answer_during_an_abort(engine, prompts, PARAMS), single)


@pytest.mark.parametrize(("name", "fields"), [DIVIDED[0], DIVIDED[3], DIVIDED[5]])
def test_ranks_look_up_drafts_and_keep_the_tokens_of_none(name: str, fields: dict[str, Any], open_engine: Open):
    expected = [answer["token_ids"] for answer in open_engine(name, level=3).generate(REPEATING, DRAFTED)]
    engine = open_engine(name, level=3, method="ngram", prompt_lookup_min=1, **fields)
    assert [answer["token_ids"] for answer in engine.generate(REPEATING, DRAFTED)] == expected
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.num_ahead > 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [("mtp_deepseek_v3", DIVIDED[4][1]), ("eagle3_qwen3", DIVIDED[0][1]), ("draft_fewer_rows", DIVIDED[0][1])],
)
def test_programs_of_ranks_draft_and_keep_the_tokens_of_none(
    name: str, fields: dict[str, Any], tmp_path: Path, gpu_cache: Path
):
    case, common = CASES[name](tmp_path), {**FIELDS, "level": 3, "cache": str(gpu_cache)}
    prompts, found = [[token % VOCAB for token in prompt] for prompt in REPEATING], []
    for own in ({}, {**case.fields, "num_speculative_tokens": 2, "max_verified_tokens": 256, **fields}):
        engine = LLMEngine(str(case.folder), **{**common, **own})
        found.append([answer["token_ids"] for answer in engine.generate(prompts, DRAFTED)])
        stats = engine.metrics.scheduler
        engine.close()
    assert found[1] == found[0] and 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(("name", "fields"), [DIVIDED[0], DIVIDED[5]])
def test_ranks_write_what_a_grammar_allows_as_one_does(
    name: str, fields: dict[str, Any], tmp_path: Path, gpu_cache: Path
):
    pytest.importorskip("llguidance")
    common = {**FIELDS, "level": 3, "cache": str(gpu_cache)}
    assert_same_texts_of_a_grammar(save_with_texts(name, tmp_path), common, fields)


def test_each_rank_writes_a_trace_of_its_own(open_engine: Open, tmp_path: Path):
    """Of the kernels of its GPU, those in CUDA graphs included."""
    engine = open_engine("llama", level=3, tensor_parallel_size=2, torch_profiler_dir=str(tmp_path))
    for events in traced_by_each_rank(engine, tmp_path):
        kernels = [event for event in events if event.get("cat") == "kernel"]
        assert len(kernels) >= 3 * 14, "of each layer and step"


@pytest.mark.parametrize(("name", "fields"), [DIVIDED[0], DIVIDED[3]])
def test_each_rank_keeps_its_share_of_what_goes_to_the_host(name: str, fields: dict[str, Any], open_engine: Open):
    expected = talk(open_engine(name, level=3, **TALKS, num_kvcache_blocks=200))
    engine = load_always(open_engine(name, level=3, **fields, **SMALL))
    assert talk(engine) == expected
    assert engine.metrics.scheduler.num_host_hit_tokens > 0


@pytest.mark.parametrize("checkpoint", ["LlamaConfig"], indirect=True)
def test_ranks_measure_the_scales_of_one(checkpoint: Path):
    scored, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    on_gpu = ("device=cuda", "level=3", "serve.num_kvcache_blocks=256", "serve.max_num_seqs=8")
    for number, fields in enumerate([[], ["parallel=tp2"], ["parallel=tp2"]]):
        engine = test_kv_scales.open_engine(checkpoint, *on_gpu, f"cache={checkpoint}.{number > 0}", *fields)
        (answer,) = engine.generate([test_kv_scales.TOKENS], scored)
        logprobs = [logprob.logprob for logprob in answer["prompt_logprobs"][1:]]
        found.append((test_kv_scales.scales_of(engine), logprobs))
        engine.close()
    single, measured, kept = found
    assert single[0] == measured[0] == kept[0] and max(single[0].values()) > 1
    for _, logprobs in (measured, kept):
        assert logprobs == pytest.approx(single[1], abs=0.05)  # entries that round to another number of fp8


@pytest.mark.timeout(300)
def test_ranks_tune_in_step_and_know_it_the_next_time(
    open_engine: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    fields = {"level": 3, "dtype": "bf16", "tune": True, "max_num_seqs": 1, "cudagraph_capture_sizes": [1]}
    answers = []
    for message in ("tune=true: a step of 1 decodes takes ", "tune=true knows all 5 linears of this model"):
        engine = open_engine("llama", cache=str(tmp_path), tensor_parallel_size=2, **fields)
        answers.append(engine.generate([tiny.prompt(20)], GREEDY)[0]["token_ids"])
        engine.close()
        err = capfd.readouterr().err
        assert err.count("tune=true") == err.count(message) == 1, "one rank reports it"
    assert answers[0] == answers[1]
    (file,) = (tmp_path / "tuned").iterdir()
    assert len(json.loads(file.read_text())["linear"]) == 5, "qkv, o, gate_up, down, head, of a rank"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        (DIVIDED[0][1], 0),
        (DIVIDED[6][1], 0),
        *(pytest.param({"tensor_parallel_size": 4}, place, marks=four_gpus) for place in range(3)),
    ],
)
def test_a_rank_that_dies_under_load_ends_the_engine_and_one_that_is_stopped_does_not(
    fields: dict[str, Any], place: int, open_engine: Open
):
    engine = open_engine("llama", level=3, **fields)
    engine.generate([tiny.prompt(9)], GREEDY)
    assert_goes_on_after_a_stop(engine, place)
    assert_ends_by_a_signal(engine, signal.SIGKILL, "has ended", place)
    torch.cuda.synchronize()  # nothing waits on the GPU


def test_ranks_end_with_the_process_that_drives_them(checkpoints: Callable[[str], Path], gpu_cache: Path):
    fields = {**FIELDS, "cudagraph_capture_sizes": [1], "max_num_seqs": 1, "cache": str(gpu_cache)}
    assert_ranks_end_with_their_driver(checkpoints("llama"), level=3, **fields)


def test_a_second_start_compiles_nothing(open_engine: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    fields = {"level": 3, "cache": str(tmp_path), "tensor_parallel_size": 2, "cudagraph_capture_sizes": [1, 4]}
    first = open_engine("llama", **fields)
    expected = first.generate([tiny.prompt(20)], GREEDY)[0]["token_ids"]
    first.close()
    binaries = {path.name for path in (tmp_path / "binaries").iterdir()}
    capfd.readouterr()
    second = open_engine("llama", **fields)
    assert second.generate([tiny.prompt(20)], GREEDY)[0]["token_ids"] == expected
    assert "has compiled" not in capfd.readouterr().err
    assert binaries == {path.name for path in (tmp_path / "binaries").iterdir()} and binaries
