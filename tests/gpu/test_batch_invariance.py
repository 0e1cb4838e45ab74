"""batch_invariant=true on a GPU: the bits of a row, and of a request, are the same in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from atom import LLMEngine, SamplingParams
from atom.graph import PackedWeight, Type, ops
from atom.kernels import LoadContext, find_kernel, find_target, shuffle
from atom.weights.quantize import quantize

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
ROWS = (1, 2, 7, 8, 16, 17, 31, 33, 64, 65, 128, 129, 200, 513)


@pytest.mark.parametrize(
    "fmt", [None, "fp8[1, *]", "fp8[128, 128]", "int4[1, 32]", "int4[1, 128]", "mxfp4", "int8[1, 128]"]
)
@pytest.mark.parametrize("backend", ["fixed_triton", "fixed_hopper"])
def test_a_row_of_a_linear_has_the_same_bits_next_to_any_others(fmt: str | None, backend: str):
    kernel, type = find_kernel(ops.linear, backend), Type("bf16", (768, 1024), fmt)
    weight: Any = torch.randn(768, 1024, device="cuda", dtype=torch.bfloat16)
    if fmt is not None:
        weight = PackedWeight(type, quantize(fmt, weight))
    if (reason := kernel.accepts(find_target("cuda"), Type("bf16", ("T", 1024)), type)) is not None:
        pytest.skip(reason)
    if (layout := kernel.layout_of(type)) is not None:
        weight = shuffle(weight, layout)
    linear = kernel.load(LoadContext())
    x = torch.randn(1000, 1024, device="cuda", dtype=torch.bfloat16)
    whole = linear(x, weight)
    for count in ROWS:
        for first in (0, 1000 - count):
            rows = slice(first, first + count)
            assert torch.equal(linear(x[rows], weight), whole[rows]), (count, first)


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3", 1),
        ("qwen3_window", 1),
        ("qwen3_moe", 1),
        pytest.param("qwen3", 2, marks=two_gpus),
        pytest.param("qwen3_moe", 2, marks=two_gpus),
    ],
)
def test_a_request_has_the_same_bits_in_any_batch(
    name: str, ranks: int, level: int, checkpoints: Callable[[str], Path]
):
    rng = random.Random(1)
    prompts = [[rng.randrange(101) for _ in range(rng.choice((1, 15, 16, 17, 63, 65, 130)))] for _ in range(24)]
    params = [
        SamplingParams(temperature=0.7, seed=5, max_tokens=rng.randint(1, 40), ignore_eos=True, logprobs=20)
        for _ in prompts
    ]
    options = {"model": str(checkpoints(name)), "dtype": "bf16", "level": level, "batch_invariant": True}
    options |= {"block_size": 16, "max_model_len": 192, "gpu_memory_utilization": 0.3}
    options |= {"tensor_parallel_size": ranks}
    alone = LLMEngine(**options, enable_prefix_caching=False, max_num_seqs=1)
    expected = [alone.generate([each], own)[0] for each, own in zip(prompts, params, strict=True)]
    alone.close()

    def compare(engine: LLMEngine, rounds: int, drafts: bool = False) -> Any:
        """drafts: of those that report nothing, which only they get"""
        for _ in range(rounds):
            some = rng.sample(range(len(prompts)), 16)
            asked = [replace(params[each], logprobs=None) if drafts and each % 2 else params[each] for each in some]
            answers = engine.generate([prompts[each] for each in some], asked)
            for number, answer, own in zip(some, answers, asked, strict=True):
                assert answer["token_ids"] == expected[number]["token_ids"]
                assert own.logprobs is None or answer["logprobs"] == expected[number]["logprobs"]
        stats = engine.metrics.scheduler
        engine.close()
        return stats

    stats = compare(LLMEngine(**options, max_num_seqs=12, max_num_batched_tokens=100), 6)
    assert min(stats.num_chunks, stats.num_prefix_hit_tokens) > 0
    few = {"max_num_seqs": 12, "num_kvcache_blocks": 16}  # of 12 for the longest: some requests give way
    looked_up = {"method": "ngram", "prompt_lookup_min": 1, "max_verified_tokens": 100}
    stats = compare(LLMEngine(**options, **few, **looked_up), 4, drafts=True)
    assert min(stats.num_preemptions, stats.num_draft_tokens) > 0
