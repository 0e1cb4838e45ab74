"""Values of config.json that choose a form of a family, whose logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from probe import assert_logits

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


def test_a_value_inside_an_object_of_config_json_is_refused(tmp_path: Path) -> None:
    config = transformers.MptConfig(**tiny.SIZES, architectures=["MptForCausalLM"], attn_config={"alibi": False})
    config.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedError, match=r"attn_config.alibi=false in its config.json is not supported \(supported: true\)"
    ):
        load([f"checkpoint={tmp_path}"])
