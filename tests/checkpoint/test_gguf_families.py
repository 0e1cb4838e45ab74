"""GGUF files of every family that is read: the logits of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tiny
import torch
from law import assert_same_logits
from probe import assert_logits, logits_of
from safetensors.torch import load_file, save_file

from atom import LLMEngine
from atom.dtypes import GGUF_FORMATS

GEMMA3 = {"query_pre_attn_scalar": 256}
YARN = {**tiny.YARN_MLA, "mscale": tiny.YARN_MLA["mscale_all_dim"]}  # a file has one number for both
EACH_WITH_MOE = ["linear_attention", "moe", "full_attention", "moe"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # variant of `tiny`, changes, how it is converted
    "gemma3": ("gemma3", GEMMA3, {}),
    "gemma3_softcap": ("gemma3_untied", GEMMA3, {}),
    "gemma4": ("gemma4", {}, {}),
    "gemma4_shared": ("gemma4_shared", {}, {}),
    "gemma4_experts": ("gemma4_experts", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "phi3": ("phi3_window_tied", {}, {}),
    "phi3_longrope": ("phi3_longrope_long", {}, {}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4}, {}),
    "granite": ("granite", {}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": None}, {}),
    "deepseek_v2": ("deepseek_v2_groups", {"rope_parameters": YARN}, {}),
    "deepseek_v2_old": ("deepseek_v2", {}, {"old_mla": True}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN}, {}),
    "llama_biases": ("llama_biases", {}, {}),
    "llama_scales": ("llama", {}, {"scaled": True}),
    "qwen3_moe_scales": ("qwen3_moe", {}, {"scaled": True}),
    "deepseek_scales": ("deepseek_v2", {}, {"scaled": True}),
    "lfm2": ("lfm2", {}, {}),
    "lfm2_moe": ("lfm2_moe", {"norm_topk_prob": True, "routed_scaling_factor": 1.0}, {}),
    "qwen3_next": ("qwen3_next", {}, {}),
    "qwen3_5": ("qwen3_5", {}, {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}, {}),
    "granitehybrid": ("granitemoehybrid", {}, {}),
    "granitehybrid_dense": (
        "granitemoehybrid_stacked",
        {"position_embedding_type": "nope", "mamba_proj_bias": False},
        {},
    ),
    "nemotron_h": ("nemotron_h", {}, {}),
    "nemotron_h_moe": ("nemotron_h_experts", {"layers_block_type": EACH_WITH_MOE}, {}),
    "nemotron_h_latent": (
        "nemotron_h_experts",
        {"layers_block_type": EACH_WITH_MOE, "moe_latent_size": 20, "n_group": 2, "norm_topk_prob": False},
        {},
    ),
    "falcon_h1": ("falcon_h1", {}, {}),
    "falcon_h1_normed": (
        "falcon_h1_normed",
        {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        {},
    ),
    "mamba": ("mamba", {}, {}),
    "mamba_biases": ("mamba_biases", {}, {}),
    "falcon_mamba": ("falcon_mamba", {"mixer_rms_eps": 1e-6}, {}),
    "mamba2": ("mamba2", {}, {}),
    "mamba2_biases": ("mamba2_biases", {}, {}),
    "jamba": ("jamba", {}, {}),
    "jamba_dense": ("jamba_dense", {"mamba_dt_rank": 5}, {}),
    "kimi_linear": ("kimi_linear", {"linear_num_heads": 4}, {}),
    "split": ("qwen3_moe_dense_list", {"mlp_only_layers": [], "norm_topk_prob": True}, {"max_tensors": 9}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    variant, changes, options = CASES[case]
    folder = tmp_path / "checkpoint"
    tiny.save_changed(variant, folder, **changes)
    path = gguf_files.convert(folder, tmp_path / "tiny.gguf", **options)
    engine = LLMEngine(model=str(path), level=0, dtype="fp32", kv_cache_memory=1 << 22)
    tokens = tiny.prompt(40)
    assert_logits(engine, tokens, tiny.reference(folder))
    engine.close()


def test_biases_of_queries_keys_and_values_may_be_the_only_ones(tmp_path: Path) -> None:
    """As in a Qwen2 that was saved as a llama; transformers has a bias of zeros on the output then."""
    folder, tokens = tmp_path / "checkpoint", tiny.prompt(40)
    tiny.save_changed("llama_biases", folder, mlp_bias=False)
    tensors = load_file(folder / "model.safetensors")
    outputs = {name: tensor.zero_() for name, tensor in tensors.items() if name.endswith("o_proj.bias")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = tiny.logits(tiny.reference(folder), tokens)
    save_file({name: tensors[name] for name in tensors.keys() - outputs.keys()}, folder / "model.safetensors")
    path = gguf_files.convert(folder, tmp_path / "tiny.gguf")
    engine = LLMEngine(model=str(path), level=0, dtype="fp32", kv_cache_memory=1 << 22)
    assert len(outputs) == 3
    assert_same_logits(logits_of(engine, tokens), expected)
    engine.close()


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
LAYERS = {
    "gemma4_experts": {
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {1: {"head_dim": 24}},
    }
}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
KDA = {"linear_num_heads": 4, "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32, "rope_parameters": YARN}


@pytest.mark.parametrize(
    ("variant", "changes", "options"),
    [
        ("qwen3_moe", SIZES, {}),
        ("deepseek_v3", SIZES | LATENT, {}),
        ("deepseek_v3", SIZES | LATENT, {"old_mla": True}),
        ("gpt_oss", SIZES, {}),
        ("qwen3_5", SIZES | DELTA, {}),
        ("kimi_linear", SIZES | LATENT | KDA | {"mlp_layer_types": ["dense", "sparse"]}, {}),
    ],
)
def test_packed_tensors_are_those_that_they_round_to(
    variant: str, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    tiny.save_changed(variant, tmp_path / "checkpoint", **changes)
    made = []
    for packed in (False, True):
        path = tmp_path / f"{packed}.gguf"
        gguf_files.convert(tmp_path / "checkpoint", path, rounded="Q8_0", packed=packed, **options)
        engine = LLMEngine(model=str(path), level=0, dtype="fp32", kv_cache_memory=1 << 22)
        made.append(logits_of(engine, tiny.prompt(20)))
        engine.close()
    assert_same_logits(made[1], made[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q5_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss", "gemma4_experts"])  # as three tensors, biases too, two
def test_experts_stay_packed(variant: str, kind: str, tmp_path: Path) -> None:
    widths = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
    sizes = SIZES | LAYERS.get(variant, {}) | (widths if kind.endswith("_K") else {})
    tiny.save_changed(variant, tmp_path / "checkpoint", **sizes)
    made: dict[bool, torch.Tensor] = {}
    for packed in (False, True):
        path = tmp_path / f"{packed}.gguf"
        gguf_files.convert(tmp_path / "checkpoint", path, rounded=kind, packed=packed)
        engine = LLMEngine(model=str(path), level=1, dtype="fp32", kv_cache_memory=1 << 22)
        graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
        formats = [recipe.type.fmt for recipe in graph.recipes() if len(recipe.type.shape) == 3]
        assert formats == [GGUF_FORMATS[kind] if packed else None] * 4
        made[packed] = logits_of(engine, tiny.prompt(20))
        engine.close()
    assert_same_logits(made[True], made[False])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_a_dense_model_stays_packed_with_its_tied_head(kind: str, tmp_path: Path) -> None:
    tiny.save_changed("smollm3", tmp_path / "checkpoint", **SIZES | {"hidden_size": 256, "intermediate_size": 512})
    made: dict[bool, torch.Tensor] = {}
    for packed in (False, True):
        path = tmp_path / f"{packed}.gguf"
        gguf_files.convert(tmp_path / "checkpoint", path, rounded=kind, packed=packed)
        engine = LLMEngine(model=str(path), level=1, dtype="fp32", kv_cache_memory=1 << 22)
        graph = engine._engine.runner.model.graph  # type: ignore[attr-defined]
        formats = {recipe.type.fmt for recipe in graph.recipes()}
        assert GGUF_FORMATS[kind] in formats if packed else formats == {None}
        made[packed] = logits_of(engine, tiny.prompt(20))
        engine.close()
    assert_same_logits(made[True], made[False])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["qwen3_moe", "gpt_oss"])
def test_experts_are_packed_anew_from_the_numbers_of_a_file(variant: str, tmp_path: Path) -> None:
    tiny.save_changed(variant, tmp_path / "checkpoint", **SIZES)
    made = []
    for packed in (False, True):
        path = tmp_path / f"{packed}.gguf"
        gguf_files.convert(tmp_path / "checkpoint", path, rounded="Q4_1", packed=packed)
        fields = {"quant": {"fmt": "int8"}, "cache": str(tmp_path / "cache")}
        engine = LLMEngine(model=str(path), level=1, dtype="fp32", kv_cache_memory=1 << 22, **fields)
        made.append(logits_of(engine, tiny.prompt(20)))
        engine.close()
    assert_same_logits(made[1], made[0])
