"""MiniMax-Text-01: the form of config.json that its first checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from semantic import assert_same_as_transformers

from atom.config.load import load


def test_the_first_checkpoint_has_other_names_in_config_json(tmp_path: Path):
    """As MiniMaxAI/MiniMax-Text-01, of which transformers reads the form MiniMax-Text-01-hf."""
    model = tiny.save_changed("minimax_text_01", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    config |= {"architectures": ["MiniMaxText01ForCausalLM"], "attn_type_list": [0, 1, 0], "postnorm": True}
    for name, older in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            config[f"layernorm_{older}_{factor}"] = config.pop(f"{name}_{factor}_factor")
    path.write_text(json.dumps(config))
    config = load([f"checkpoint={tmp_path}", "dtype=fp32"])
    assert config.model.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert_same_as_transformers(config, model.eval())
