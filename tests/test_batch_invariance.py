"""With batch_invariant=true a request has the same bits whatever else is in its batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from atom import LLMEngine, SamplingParams
from atom.compiler import compile_graph
from atom.compiler.saved_graph import show_saved
from atom.config.checks import check_tune
from atom.config.load import load
from atom.errors import ConfigError, UnsupportedError
from atom.graph import show
from atom.kernels import Target, find_kernel

H200 = Target("cuda", frozenset({"nvidia", "sm_90", "gluon"}))
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64, 65, 70)  # of prompts, around those of blocks and tiles
NUM_BATCHES = 200  # steps of several requests


def open_engine(folder: Path, **options: Any) -> LLMEngine:
    return LLMEngine(model=str(folder), block_size=4, max_model_len=96, batch_invariant=True, **options)


def ask(engine: LLMEngine, asked: list[tuple[list[int], int]]) -> list[Any]:
    """Tokens, and log probabilities of the 20 best of each: these are of all logits, since their sum is."""
    params = [  # prefixes are found only by those that report nothing of their prompts
        SamplingParams(
            temperature=0.7, seed=5, max_tokens=count, ignore_eos=True, logprobs=20, prompt_logprobs=of_prompt
        )
        for _, count in asked
        for of_prompt in [3 if count % 2 else None]
    ]
    answers = engine.generate([prompt for prompt, _ in asked], params)
    return [(answer["token_ids"], answer["logprobs"], answer.get("prompt_logprobs")) for answer in answers]


def ask_one_by_one(folder: Path, asked: list[tuple[list[int], int]], **options: Any) -> list[Any]:
    engine = open_engine(folder, enable_prefix_caching=False, max_num_seqs=1, **options)
    answers = [ask(engine, [each])[0] for each in asked]
    assert engine.metrics.scheduler.num_chunks == 0, "prompts are whole"
    engine.close()
    return answers


def draw(count: int) -> list[tuple[list[int], int]]:
    rng = random.Random(1)
    return [(tiny.prompt(rng.choice(SIZES), seed=seed), rng.randint(1, 20)) for seed in range(count)]


@pytest.mark.parametrize(
    ("name", "dtype", "level", "num_batches"),
    [
        ("qwen3", "bf16", 1, 60),
        *(
            pytest.param(*each, NUM_BATCHES, marks=pytest.mark.slow)
            for each in (
                ("qwen3", "fp32", 0), ("qwen3", "bf16", 2), ("llama_biases", "fp16", 2), ("qwen3_window", "fp32", 2),
                ("qwen3_moe", "fp32", 0), ("qwen3_moe", "bf16", 2), ("mixtral_odd", "fp32", 1),
            )
        ),
    ],
)  # fmt: skip
def test_a_request_has_the_same_bits_in_any_batch(
    name: str, dtype: str, level: int, num_batches: int, checkpoints: Callable[[str], Path]
):
    asked, folder = draw(16), checkpoints(name)
    alone = ask_one_by_one(folder, asked, dtype=dtype, level=level)
    # some are in chunks, and some begin with blocks of an earlier round; the fewest blocks, for which some are preempted
    engine = open_engine(
        folder, dtype=dtype, level=level, max_num_seqs=6, max_num_batched_tokens=37, num_kvcache_blocks=26
    )
    rng = random.Random(2)
    while engine.metrics.scheduler.num_steps < num_batches:
        some = rng.sample(range(len(asked)), 8)
        for number, answer in zip(some, ask(engine, [asked[each] for each in some]), strict=True):
            assert answer == alone[number], (number, asked[number])
    stats = engine.metrics.scheduler
    assert min(stats.num_chunks, stats.num_preemptions) > 0
    engine.close()
    engine = open_engine(folder, dtype=dtype, level=level)
    assert [ask(engine, [each])[0] for each in asked[:4] * 2] == alone[:4] * 2
    assert engine.metrics.scheduler.num_prefix_hit_tokens > 0
    engine.close()


def test_requests_that_are_drafted_for_change_no_bits(checkpoints: Callable[[str], Path]):
    """Only those are that report nothing: their tokens are the same, and so are the bits of the others."""
    asked, folder = [(tiny.prompt(n % 7 + 1, seed=n) * 4, 12 + n) for n in range(6)], checkpoints("qwen3")
    alone = ask_one_by_one(folder, asked, dtype="bf16", level=1)
    engine = open_engine(
        folder,
        dtype="bf16",
        level=1,
        num_kvcache_blocks=26,
        method="ngram",
        prompt_lookup_min=1,
        max_verified_tokens=64,
    )
    sampling = {"temperature": 0.7, "seed": 5, "ignore_eos": True}
    params = [
        SamplingParams(**sampling, max_tokens=count, logprobs=None if number % 2 else 20)
        for number, (_, count) in enumerate(asked)
    ]
    for answer, (tokens, logprobs, _), own in zip(
        engine.generate([prompt for prompt, _ in asked], params), alone, params, strict=True
    ):
        assert answer["token_ids"] == tokens
        assert own.logprobs is None or answer["logprobs"] == logprobs
    stats = engine.metrics.scheduler
    assert min(stats.num_draft_tokens, stats.num_preemptions) > 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_two_ranks_give_a_request_the_same_bits_in_any_batch(name: str, checkpoints: Callable[[str], Path]):
    asked, folder, options = draw(10), checkpoints(name), {"dtype": "bf16", "level": 1, "parallel": "tp2"}
    alone = ask_one_by_one(folder, asked, **options)
    engine = open_engine(folder, max_num_seqs=6, max_num_batched_tokens=37, **options)
    assert ask(engine, asked) == alone and ask(engine, asked[::-1]) == alone[::-1]
    assert engine.metrics.scheduler.num_chunks > 0
    engine.close()


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("target", [Target("cpu"), H200], ids=lambda target: target.device)
@pytest.mark.parametrize(("name", "quant"), [("qwen3", "none"), ("qwen3_moe", "none"), ("qwen3", "fp8")])
def test_a_text_of_any_level_has_only_kernels_that_declare_it(
    name: str, quant: str, target: Target, level: int, checkpoints: Callable[[str], Path]
):
    overrides = [f"checkpoint={checkpoints(name)}", f"level={level}", "dtype=bf16", f"quant={quant}"]
    config = load([*overrides, "batch_invariant=true"])
    graph = compile_graph(config, target=target)
    for node in (node for program in graph.programs.values() for node in program.nodes):
        assert find_kernel(node.target, node.meta["kernel"]).batch_invariant, node.target.name


@pytest.mark.parametrize("target", [Target("cpu"), H200], ids=lambda target: target.device)
def test_a_model_with_an_op_that_no_kernel_computes_so_is_refused(target: Target, checkpoints: Callable[[str], Path]):
    config = load([f"checkpoint={checkpoints('qwen3_next')}", "batch_invariant=true"])
    with pytest.raises(
        UnsupportedError,
        match=f"batch_invariant=true: on {target.device} no kernel gives the same bits in any batch for: "
        r".*batched_gated_delta.*; leave batch_invariant out",
    ):
        compile_graph(config, target=target)


def test_amd_gpus_are_refused_with_the_reason(checkpoints: Callable[[str], Path]):
    config = load([f"checkpoint={checkpoints('qwen3')}", "batch_invariant=true"])
    with pytest.raises(UnsupportedError, match=r"linear \(.*its bits were compared on NVIDIA's GPUs only.*\)"):
        compile_graph(config, target=Target("cuda", frozenset({"amd", "gfx942"})))


def test_a_text_that_names_another_kernel_is_refused(checkpoints: Callable[[str], Path], tmp_path: Path):
    overrides = [f"checkpoint={checkpoints('qwen3')}", "device=cpu", "level=1"]
    texts: dict[str, str] = {}
    compile_graph(load(overrides), lambda report: texts.update({report.name: show(report.graph)}))
    file = tmp_path / "graph.py"
    file.write_text(show_saved("select_kernels", texts["select_kernels"]))
    config = load([*overrides, f"job.graph={file}", "batch_invariant=true"])
    with pytest.raises(UnsupportedError, match=r"batch_invariant=true: the bits of \w+\.\w+ depend on the batch; name"):
        compile_graph(config)


def test_tiles_are_not_tuned_by_rows(checkpoints: Callable[[str], Path]):
    config = load([f"checkpoint={checkpoints('qwen3')}", "batch_invariant=true"])
    with pytest.raises(
        ConfigError, match="tune=true finds tiles by the rows of a step, batch_invariant=true has fixed"
    ):
        check_tune(replace(config, tune=True), "cuda")


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_the_variable_of_vllm_sets_it(
    value: str, expected: bool, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    overrides = [f"checkpoint={checkpoints('qwen3')}"]
    assert load(overrides).batch_invariant is expected
    assert load([*overrides, "batch_invariant=false"]).batch_invariant is False
