"""Step 3.5, whose config.json lists thetas, shares of rotated dims and limits by layer, those of drafts too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.config.load import load
from atom.errors import ConfigError

TEXT = {**tiny.SIZES, **tiny.EXPERTS, "pad_token_id": 1, "n_routed_experts": 6, "head_dim": 12, "share_expert_dim": 20, "sliding_window": 7,
        "num_sliding_attention_heads": 8, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [None, 0.4, None], "swiglu_limits_shared": [None, None, 0.5],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}  # fmt: skip
OWN = {  # as stepfun-ai/Step-3.5-Flash; vllm/model_executor/models/step3p5.py
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 101,
    "max_position_embeddings": 256, "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 12, "rms_norm_eps": 1e-5, "moe_num_experts": 6, "moe_top_k": 2,
    "moe_intermediate_size": 24, "share_expert_dims": 20, "moe_layers_enum": "1,2", "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 1.0,
    "use_moe_router_bias": True, "need_fp32_gate": True, "use_head_wise_attn_gate": True, "use_qk_norm": True, "sink": False, "sliding_window": 7,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 12},
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"], "rope_theta": [5000.0, 1000.0, 1000.0, 5000.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5], "swiglu_limits": [0.0, 0.4, 0.0, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0],
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Any]:
    """Only the text, under the hub's names; the model."""
    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0}
    config = transformers.Step3p7Config(text_config=TEXT, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Step3p7ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path, save_original_format=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("vision_model", "vit_large"))}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    return tmp_path, model


def test_lists_by_layer_give_the_logits_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    assert_same_as_transformers(load([f"checkpoint={folder}", "dtype=fp32"]), model)


def test_layers_of_a_type_with_two_thetas_are_refused(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    (folder / "config.json").write_text(json.dumps(OWN | {"rope_theta": [5000.0, 1000.0, 900.0, 5000.0]}))
    with pytest.raises(
        ConfigError, match=r"rope.theta: layers of type sliding_attention differ in \[5000.0, 1000.0, 900.0, 5000.0\]"
    ):
        load([f"checkpoint={folder}"])
