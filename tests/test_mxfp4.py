"""Experts that are stored as MXFP4 blocks, against transformers' own reading of the same file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import relative_error
from probe import assert_logits, logits_of
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from atom import LLMEngine, SamplingParams, weights
from atom.checkpoint.progress import SILENT
from atom.compiler import compile_graph, semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import CheckpointError
from atom.graph import show
from atom.kernels import Target

EXPERTS = 5
SIZES = {**tiny.SIZES, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": EXPERTS, "head_dim": 16,
         "num_experts_per_tok": 2, "sliding_window": 9}  # fmt: skip
DOWN = "model.layers.0.mlp.experts.down_proj"
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in GptOssForCausalLM(config).state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = tensor + torch.randn_like(tensor) * 0.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = {**config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    config = Mxfp4Config(dequantize=True, modules_to_not_convert=PLAIN)
    model = GptOssForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=config, attn_implementation="eager"
    )
    return model.float().eval()  # transformers 5.17 unpacks to bf16 whatever is asked, which holds an MXFP4 exactly


@pytest.fixture(
    scope="module",
    params=[("cpu", 0), ("cpu", 1), *(pytest.param(("cuda", level), marks=pytest.mark.gpu) for level in (0, 1, 3))],
)
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    device, level = request.param
    engine = LLMEngine(model=str(checkpoint), dtype="fp32", device=device, level=level, kv_cache_memory=1 << 22)
    yield engine
    engine.close()


@pytest.mark.sampled(2, gpu=1)
def test_logits_and_greedy_tokens(engine: LLMEngine, reference: Any):
    tokens = tiny.prompt(60)
    assert_logits(engine, tokens, reference)
    (answer,) = engine.generate([tokens[:20]], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    tiny.assert_greedy(answer, tokens[:20], reference)


def test_experts_of_a_layer_may_be_plain_and_exceptions_unsaid(checkpoint: Path, reference: Any, tmp_path: Path):
    stored, plain = load_file(checkpoint / "model.safetensors"), reference.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        module = f"model.layers.1.mlp.experts.{name}"
        del stored[f"{module}_blocks"], stored[f"{module}_scales"]
        stored[module] = plain[module].contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine, tokens = LLMEngine(model=str(tmp_path), dtype="fp32", level=1, kv_cache_memory=1 << 22), tiny.prompt(40)
    try:
        assert_logits(engine, tokens, reference)
    finally:
        engine.close()


def test_a_saved_text_is_unpacked_too_and_one_that_calls_dequantize_itself(checkpoint: Path, tmp_path: Path):
    given = [f"checkpoint={checkpoint}", "dtype=fp32", "level=0"]
    config = load(given)
    text = show(semantic_graph(config))
    by_leaf = re.sub(r'(W\("[^"]*", fp32\[[\d, ]*\], fmt="mxfp4"\))', r"dequantize(\1)", text)
    assert text.count('fmt="mxfp4"') == by_leaf.count("dequantize") > 0
    opened = open_for(config, SILENT)
    tensors = []
    for name, saved in (("packed", text), ("unpacked", by_leaf)):
        (tmp_path / f"{name}.py").write_text(f"# job.stage=semantic\n{saved}")
        graph = compile_graph(load([*given, f"job.graph={tmp_path}/{name}.py"]))
        weights.refuse_packed(graph)
        weights.check(graph, opened.tensors)
        loaded = weights.load(graph.recipes(), opened, SILENT)
        tensors.append([loaded[recipe] for recipe in graph.recipes()])
    opened.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*tensors, strict=True))


@pytest.mark.parametrize("level", [pytest.param(level, marks=pytest.mark.gpu) for level in (1, 3)])
def test_bf16_on_a_gpu_is_as_near_to_float32_as_that_of_transformers(checkpoint: Path, reference: Any, level: int):
    engine = LLMEngine(model=str(checkpoint), dtype="bf16", device="cuda", level=level, kv_cache_memory=1 << 22)
    half = copy.deepcopy(reference).bfloat16()
    ours, theirs = 0.0, 0.0
    try:
        for seed in range(20):
            tokens = tiny.prompt(24, seed=seed)
            exact = tiny.logits(reference, tokens)
            ours += relative_error(logits_of(engine, tokens), exact) / 20
            theirs += relative_error(tiny.logits(half, tokens), exact) / 20
    finally:
        engine.close()
    assert ours <= 1.25 * theirs


def test_a_gpu_keeps_the_experts_packed(checkpoint: Path):
    gpu = Target("cuda", frozenset({"nvidia", "sm_90"}))
    graph = compile_graph(load([f"checkpoint={checkpoint}"]), target=gpu)
    kept = [recipe.type for recipe in graph.recipes() if recipe.type.fmt is not None]
    assert [type.shape for type in kept] == [(EXPERTS, 192, 64), (EXPERTS, 64, 96)] * 3
    assert "dequantize" not in show(graph)
    assert show(graph).count("triton.experts(") == 3


def test_scales_that_are_missing_are_named(checkpoint: Path):
    config = load([f"checkpoint={checkpoint}"])
    opened = open_for(config, SILENT)
    stored = {name: each for name, each in opened.tensors.items() if name != f"{DOWN}_scales"}
    with pytest.raises(CheckpointError, match=f"has no tensor {DOWN}_scales; is it whole"):
        weights.check(compile_graph(config), stored)
    opened.close()


def test_the_text_marks_what_is_stored_packed_and_the_lowered_one_what_is_unpacked(checkpoint: Path):
    config = load([f"checkpoint={checkpoint}"])
    unpacked = load([f"checkpoint={checkpoint}", "level=0"])
    text, lowered = show(semantic_graph(config)), show(compile_graph(unpacked))
    stored = f'W("model.layers.0.mlp.experts.gate_up_proj", bf16[{EXPERTS}, 192, 64], fmt="mxfp4")'
    joined = f"cat([slice({stored}, 0, 192, dim=1, step=2), slice({stored}, 1, 192, dim=1, step=2)], dim=1)"
    assert joined in text and "dequantize" not in text
    assert f"dequantize({joined})" in lowered
    assert 'W("model.layers.0.self_attn.q_proj.weight", bf16[64, 64])' in text
