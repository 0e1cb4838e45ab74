"""Tiny checkpoints of Mistral Large 4, which transformers has only with its tower.

    model = mistral_large4.save(tmp_path)                      # transformers' model, float32
    mistral_large4.save(tmp_path, as_stacked=True)             # under the names that transformers has in memory

Layers 0, 1, 2, 4 and 5 have a rope. Layer 3 and 6 have none, and 2, 5 and 6 read the latents of 1, 4 and 3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pixtral
import tiny
import torch
from transformers import MistralLarge4Config, MistralLarge4ForConditionalGeneration

ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.0}  # fmt: skip
TEXT: dict[str, Any] = {
    **tiny.SIZES, **tiny.EXPERTS, "num_hidden_layers": 7, "num_key_value_heads": 4, "kv_lora_rank": 18, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 6, **tiny.INDEX, "rope_parameters": ROPE, "no_rope_layers": [1, 1, 1, 0, 1, 1, 0],
    "kv_source_layers": [0, 1, 1, 3, 4, 4, 3], "indexer_types": ["full", "full", "full", "shared", "full", "shared", "full"],
    "final_logit_softcapping": 3.0,
}  # fmt: skip
FEW = {
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 0],
    "kv_source_layers": [0, 1, 1],
    "indexer_types": ["full", "shared", "full"],
}


def save(target: Path, *, as_stacked: bool = False, **changes: Any) -> Any:
    """Write a checkpoint of random weights; its model."""
    config = MistralLarge4Config(
        text_config={**TEXT, **changes}, vision_config=pixtral.TOWER, image_token_index=pixtral.IMAGE
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)  # of others a router's experts nearly tie, of which rounding decides
    model = MistralLarge4ForConditionalGeneration(config).eval()
    for tensor in model.parameters():
        tensor.data += torch.randn_like(tensor) * 0.2
    model.save_pretrained(target, save_original_format=not as_stacked)
    return model


def edit_text(folder: Path, without: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of the text in config.json."""
    written = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in written["text_config"].items() if key not in without}
    (folder / "config.json").write_text(json.dumps(written | {"text_config": text | fields}))
