"""Tiny checkpoints of GLM-5.3-Flash, which transformers has only with its tower, and a double of what it drafts by.

    model = glm5_next.save(tmp_path / "model")                  # transformers' model
    glm5_next.save(tmp_path / "drafting", drafts=True)          # and a layer that predicts further tokens
    double = glm5_next.Double(tmp_path / "drafting")

As vLLM's vllm/models/glm5next/common/mtp.py has it, that layer has one stream: embedding and hidden state, each normed,
side by side through a linear, then blocks of transformers' own that are added, and a norm. It has the kinds of a layer
with an indexer and of one with experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drafts
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

LINEAR, INDEXED, HUB_INDEXED = "linear_attention", "indexed_attention", "deepseek_sparse_attention"
TEXT: dict[str, Any] = {
    **tiny.SIZES, **tiny.EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 18, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "layer_types": [LINEAR, INDEXED, LINEAR, INDEXED], "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_routed_experts": 6,
    "index_n_heads": 24, "index_head_dim": 12, "index_topk": 12, "index_kpool": 4,  # of few heads many scores would be 0 and tie
    "linear_head_dim": 10, "linear_num_heads": 2, "hc_mult": 3, "hc_sinkhorn_iters": 5, "swiglu_limit": 1.0,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48, "projection_intermediate_size": 24,
          "image_size": 28}  # fmt: skip
LAYER = "model.language_model.layers.{layer}."


def make(folder: Path | None = None, **changes: Any) -> Any:
    """A model of random weights, or of a folder's."""
    config = Glm5NextConfig(text_config={**TEXT, **changes}, vision_config=VISION)
    config._attn_implementation = "eager"
    if folder is not None:
        return Glm5NextForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    torch.manual_seed(5)  # of others some queries choose between runs that nearly tie, of which rounding decides
    model = Glm5NextForConditionalGeneration(config).eval()
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for tensor in (*model.parameters(), *corrections):
        tensor.data += torch.randn_like(tensor) * 0.2
    return model


def kinds_of(layers: int) -> dict[str, Any]:
    """What a config lists by layer, with a last layer that drafts."""
    types = [*TEXT["layer_types"], INDEXED]
    return {
        "num_hidden_layers": layers + 1,
        "layer_types": types,
        "mlp_layer_types": [*TEXT["mlp_layer_types"], "sparse"],
    }


def save(target: Path, *, drafts: bool = False, as_stacked: bool = False, **changes: Any) -> Any:
    """Write a checkpoint; its model. as_stacked: under the names that transformers has in memory"""
    layers = TEXT["num_hidden_layers"]
    model = make(**changes, **(kinds_of(layers) if drafts else {}))
    model.save_pretrained(target, save_original_format=not as_stacked)
    if not drafts:
        return model
    stored, hidden = load_file(target / "model.safetensors"), TEXT["hidden_size"]
    layer = LAYER.format(layer=layers)
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(f"{layer}hc_")}
    stored |= {
        f"{layer}{norm}.weight": 1 + torch.randn(hidden) * 0.2 for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    stored[f"{layer}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    edit_text(
        target,
        num_hidden_layers=layers,
        num_nextn_predict_layers=1,
        layer_types=TEXT["layer_types"],
        mlp_layer_types=TEXT["mlp_layer_types"],
    )
    model.model.language_model.config.num_hidden_layers = layers  # it runs so many of its layers
    return model


def edit_text(folder: Path, without: tuple[str, ...] = (), **fields: Any) -> None:
    """Change fields of the text in config.json."""
    written = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in written["text_config"].items() if key not in without}
    (folder / "config.json").write_text(json.dumps(written | {"text_config": text | fields}))


def write_as_hub(folder: Path) -> None:
    """Name fields as zai-org/GLM-5.3-Flash does (vllm/models/glm5next/common/model.py)."""
    linear = {"head_dim": TEXT["linear_head_dim"], "num_heads": TEXT["linear_num_heads"], "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
              "kda_layers": [0, 2], "full_attn_layers": [1, 3]}  # fmt: skip
    fields = {"linear_attn_config": linear, "layer_types": [HUB_INDEXED if each == INDEXED else each for each in TEXT["layer_types"]],
              "first_k_dense_replace": 1, "moe_layer_freq": 1, "mhc": True, "mla_use_nope": True, "index_kpool_compress": True, "scoring_func": "sigmoid",
              "topk_method": "noaux_tc", "index_share_for_mtp_iteration": True, "indexer_rope_interleave": True, "moe_router_dtype": "float32"}  # fmt: skip
    edit_text(
        folder,
        ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound", "mlp_layer_types"),
        **fields,
    )


class Double(drafts.LayerDouble):
    def __init__(self, folder: Path, model: Any) -> None:
        """model: which `save` gave, and whose last layer drafts"""
        self.stored = load_file(folder / "model.safetensors")
        self.whole, self.text, self.at = model, model.model.language_model, TEXT["num_hidden_layers"]
        self.layer = self.text.layers[self.at]

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.text(tokens[None]).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        read = self.norm(self.text.embed_tokens(tokens), "enorm"), self.norm(hidden, "hnorm")
        x = (torch.cat(read, -1) @ self.stored[f"{LAYER.format(layer=self.at)}eh_proj.weight"].T)[None]
        seen = torch.ones(1, len(tokens)).bool()
        x = x + self.layer.self_attn(self.layer.input_layernorm(x), attention_mask=seen)[0]
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return self.norm(x[0], "shared_head.norm")

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden fp32[T, H] -> fp32[T, V]"""
        logits: Tensor = self.whole.lm_head(hidden)
        return logits

    def tokens(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.text.config.rms_norm_eps)
        return x * scale * self.stored[f"{LAYER.format(layer=self.at)}{name}.weight"]
