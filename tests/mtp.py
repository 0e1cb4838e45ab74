"""Tiny checkpoints with a layer that predicts further tokens, and a double of it in plain torch.

    folder = mtp.save("deepseek_v3", tmp_path / "mtp")
    double = mtp.Double(folder)
    hidden = double.hidden(tokens)                    # the model's own, behind its final norm
    drafted = double.draft(tokens[1:], hidden[:-1])   # and double.logits(drafted), of the tokens from the third one on

The layer is as DeepSeek-V3's report and README_WEIGHTS.md describe it: embedding and hidden state, each normed, side by
side through eh_proj, then a decoder layer, which is transformers' own, and a norm.
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

NUM_LAYERS = 3  # of the model; the one behind them predicts
AT = f"model.layers.{NUM_LAYERS}."


def save(name: str, target: Path, *, has_copies: bool = False, **changes: Any) -> Path:
    """Write a variant's checkpoint with such a layer. has_copies: it stores the embedding and the head once more"""
    model = tiny.save_changed(name, target, **{"num_hidden_layers": NUM_LAYERS + 1, **changes})
    stored, hidden = load_file(target / "model.safetensors"), model.config.hidden_size
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"{AT}{norm}.weight"] = 1 + torch.randn(hidden) * 0.2
    stored[f"{AT}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    if has_copies:
        stored[f"{AT}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        stored[f"{AT}shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    stated = json.loads((target / "config.json").read_text())
    stated |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    stated |= tiny.PUBLISHED.get(name, {})
    (target / "config.json").write_text(json.dumps(stated))
    return target


class Double(drafts.LayerDouble):
    def __init__(self, folder: Path) -> None:
        self.model = tiny.reference(folder, num_hidden_layers=NUM_LAYERS + 1)
        self.model.config.num_hidden_layers = NUM_LAYERS  # so the last layer is not the model's
        self.stored = load_file(folder / "model.safetensors")

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(tokens[None]).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(tokens)
        joined = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")], -1)
        x = (joined @ self.stored[f"{AT}eh_proj.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        unseen = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        x = self.model.model.layers[NUM_LAYERS](
            x,
            attention_mask=unseen,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return self._norm(x[0], "shared_head.norm")

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden fp32[T, H] -> fp32[T, V]"""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def tokens(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * self.stored[f"{AT}{name}.weight"]
