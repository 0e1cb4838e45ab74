"""What a step and graphs take of a GPU's memory, and that a start leaves nothing for the first requests to wait for."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from triton import knobs

from atom import LLMEngine, SamplingParams
from atom.graph import Type, W
from atom.runtime import memory
from atom.runtime.step.runner import Runner
from atom.weights import load_dummy

pytestmark = pytest.mark.gpu

Open = Callable[..., LLMEngine]
VOCAB = 50_000  # so that logits count
SIZES = [8, 16, 32, 64, 128, 256, 384, 512]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.9, "min_tokens": 2, "logit_bias": {5: 1.0}, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {5: 1.0}, "presence_penalty": 0.5, "logprobs": 0},
]


@pytest.fixture
def large_vocab(checkpoints: Any, tmp_path: Path) -> dict[str, Any]:
    """The fields of an engine on random weights, of a tiny model with a large vocabulary."""
    config = json.loads((checkpoints("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB}))
    return {"model": str(tmp_path), "device": "cuda", "dtype": "bf16", "load_dummy": True, "num_kvcache_blocks": 256,
            "max_num_batched_tokens": 512}  # fmt: skip


@pytest.fixture
def open_large(large_vocab: dict[str, Any], gpu_cache: Path) -> Any:
    opened: list[LLMEngine] = []

    def open(**fields: Any) -> tuple[LLMEngine, Runner]:
        opened.append(LLMEngine(**{**large_vocab, "cache": str(gpu_cache), **fields}))
        runner = opened[-1]._engine.runner
        assert isinstance(runner, Runner)
        return opened[-1], runner

    yield open
    for engine in opened:
        engine.close()
    torch.cuda.empty_cache()


def test_graphs_share_memory(open_large: Any):
    """Seven smaller ones take less than a quarter of what the largest takes. With memory of their own they would take
    1.7 times as much as that one, since it grows with rows: 888 of theirs next to its 512."""
    _, runner = open_large(level=3, max_num_seqs=512, cudagraph_capture_sizes=SIZES)

    def taken(is_lazy: bool) -> int:
        runner.graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        runner.graphs.capture(SIZES, is_lazy=is_lazy)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    largest = taken(is_lazy=True)
    assert largest > 512 * VOCAB * 2, "its logits are there"
    assert [size for size, each in runner.graphs._decodes.items() if each] == [512]
    assert taken(is_lazy=False) < 1.25 * largest
    assert all(runner.graphs._decodes.values())


@pytest.mark.parametrize(
    "way",
    [
        {"logprobs": memory.NUM_TOP, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "top_p": 0.9},
        {"prompt_logprobs": memory.NUM_TOP},
    ],
    ids=str,
)
def test_no_step_takes_more_than_the_one_that_is_measured(open_large: Any, way: dict[str, Any]):
    num_rows = 2 if "prompt_logprobs" in way else 256
    engine, runner = open_large(level=1, max_num_seqs=num_rows, num_kvcache_blocks=600)

    def peak(call: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    params = SamplingParams(temperature=0.9, max_tokens=3, ignore_eos=True, **way)
    prompts = [tiny.prompt(480 // num_rows, seed=seed, vocab_size=VOCAB) for seed in range(num_rows)]
    engine.generate(prompts, params)  # what stays is there
    measured = peak(lambda: memory.take_largest_step(runner.model, 512, num_rows))
    taken = peak(lambda: engine.generate(prompts, params))
    assert measured / 4 < taken < measured + (1 << 20)


def test_a_start_compiles_all_that_requests_need(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("qwen3", level=3)
    missed: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda repr, **_: missed.append(repr))
    for way in WAYS:
        for lengths in ([5], [40, 3, 1], [240], [100] * 6):
            prompts = [tiny.prompt(length, seed=length) for length in lengths]
            engine.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, seed=1, **way))
    assert missed == []


def test_weights_that_are_packed_leave_no_memory_between_them():
    """Plain tensors of two sizes in turns: a packed one in the place of the larger would hold all of it."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    shapes = [(16, rows, 2880) for rows in (5760, 2880)] * 2
    recipes = [W(str(at), Type("bf16", shape, "mxfp4")) for at, shape in enumerate(shapes)]
    made = load_dummy(recipes, 0, "cuda")
    torch.cuda.empty_cache()
    assert len(made) == 4
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < before + (64 << 20)
