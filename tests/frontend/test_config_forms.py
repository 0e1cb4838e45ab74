"""Values of config.json that choose a form of a family, whose logits are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from law import assert_same_logits
from probe import assert_logits, logits_of
from safetensors.torch import load_file, save_file

from atom import LLMEngine
from atom.config.load import load
from atom.errors import UnsupportedError

SIZES = {**tiny.SIZES, "hidden_size": 64}
CASES = [
    ("Phi", {"num_key_value_heads": 4}),
    ("Phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.25}),
    ("Phi", {"qk_layernorm": True, "num_key_value_heads": 2}),
    ("GPTNeoX", {}),
    ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    ("GPT2", {"n_positions": 256, "n_inner": 100, "tie_word_embeddings": False}),
    ("GPTBigCode", {"n_positions": 256, "multi_query": False}),
    ("Bloom", {"n_head": 4, "apply_residual_connection_post_layernorm": True}),
    ("Mpt", {"max_seq_len": 256, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}}),
    ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 64, "enable_bias": False, "activation_function": "gelu"}),
    ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 100}),
    (
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "rope_parameters": tiny.LINEAR,
        },
    ),
    (
        "Lfm3",
        {
            "head_dim": 20,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28, "clip_qkv": 0.7}),
    ("Exaone", {"attention_bias": True, "mlp_bias": True}),
    (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "head_dim": 16,
            "use_bias": True,
            "moe_layer_end_index": 1,
        },
    ),
    (
        "DeepseekV2",
        {
            **tiny.MLA,
            **tiny.EXPERTS,
            "n_routed_experts": 8,
            "topk_method": "greedy",
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "n_shared_experts": 1,
            "mlp_bias": True,
        },
    ),
    ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    ("Persimmon", {"qk_layernorm": False, "tie_word_embeddings": True}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_logits_are_those_of_transformers(family: str, changes: dict[str, Any], level: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = {**SIZES, **changes}
    if family == "GPTNeoX":
        del fields["num_key_value_heads"]
    config = getattr(transformers, f"{family}Config")(**fields)
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"  # Falcon's eager one adds the bias twice
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path)
    engine = LLMEngine(model=str(tmp_path), level=level, dtype="fp32", kv_cache_memory=1 << 22)
    tokens = tiny.prompt(30)
    assert_logits(engine, tokens, model)
    engine.close()


def test_baichuan_13b_is_a_llama_with_slopes_in_place_of_a_rope(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**tiny.SIZES, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 6}
    )
    model = tiny.randomized(config).eval()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}.self_attn"
        tensors[f"{at}.W_pack.weight"] = torch.cat([tensors.pop(f"{at}.{role}_proj.weight") for role in "qkv"])
    save_file(tensors, tmp_path / "model.safetensors")

    tokens = tiny.prompt(30)
    slopes = torch.tensor(
        [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    )  # of 4 heads, and every other one of 8
    distances = torch.arange(30).unsqueeze(1) - torch.arange(30)
    mask = (-slopes.view(1, -1, 1, 1) * distances).masked_fill(distances < 0, float("-inf"))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        still = torch.zeros(1, 30, dtype=torch.long)  # positions at which a rope turns nothing
        expected = model(torch.tensor([tokens]), attention_mask=mask, position_ids=still).logits[0]
    own = ["model.assumes.vocab_size=101", "model.attention.alibi=added", "model.attention.rope.kind=none"]
    engine = LLMEngine.from_config(
        load([f"checkpoint={tmp_path}", "dtype=fp32", "level=1", "serve.kv_cache_memory=4194304", *own])
    )
    assert_same_logits(logits_of(engine, tokens), expected)
    engine.close()


def test_a_value_inside_an_object_of_config_json_is_refused(tmp_path: Path) -> None:
    config = transformers.MptConfig(**tiny.SIZES, architectures=["MptForCausalLM"], attn_config={"alibi": False})
    config.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"attn_config.alibi=false in its config.json is not supported \(supported: true\)"
    ):
        load([f"checkpoint={tmp_path}"])


def test_a_falcon_of_the_new_form_has_as_many_groups_as_heads_without_a_number(tmp_path: Path) -> None:
    fields = {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "hidden_size": 48}
    fields |= {"num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 101}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    attention = load([f"checkpoint={tmp_path}"]).model.attention
    assert (attention.kv_heads, attention.qkv_chunks) == (4, 4)
