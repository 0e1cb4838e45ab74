"""The text half of models that also read images: the logits of transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from law import assert_same_logits
from probe import logits_of

from atom import LLMEngine
from atom.checkpoint.folder import text_name

TEXT = {**tiny.SIZES, "num_hidden_layers": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 16}
SIGLIP = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of text_config and of vision_config
    "Gemma3": ({"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24}, {**SIGLIP, "image_size": 28, "patch_size": 14}),
    "Mistral3": ({"head_dim": 16, "model_type": "mistral"}, {**SIGLIP, "model_type": "pixtral", "head_dim": 8}),
    "Qwen2VL": ({"rope_parameters": MROPE}, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48}),
    "Qwen2_5_VL": ({"rope_parameters": MROPE}, VISION),
    "Qwen3VL": ({"head_dim": 12, "rope_parameters": MROPE}, {**VISION, "deepstack_visual_indexes": [0]}),
}  # fmt: skip


@pytest.mark.parametrize("is_original", [True, False], ids=["as on the hub", "as transformers 5 saves"])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_half_gives_the_logits_of_the_whole(
    name: str, is_original: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, vision = MODELS[name]
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    config = made.config_class(text_config={**TEXT, **text}, vision_config=vision)
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path, save_original_format=is_original)
    engine = LLMEngine(model=str(tmp_path), level=0, dtype="fp32", kv_cache_memory=1 << 22)
    assert f"{tmp_path} also reads images; here its text model runs alone" in capsys.readouterr().err
    tokens = tiny.prompt(24)
    assert_same_logits(logits_of(engine, tokens), tiny.logits(model, tokens))
    engine.close()


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.post_layernorm.bias", None),
        ("model.multi_modal_projector.norm.weight", None),
    ],
)
def test_names_of_the_text_are_those_of_the_text_model(stored: str, ours: str | None) -> None:
    assert text_name(stored) == ours
