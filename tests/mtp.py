"""Tiny checkpoints with a layer that predicts further tokens, and a double of it in plain torch.

    folder = mtp.save("deepseek_v3", tmp_path / "mtp")
    double = mtp.Double(folder)
    hidden = double.hidden(tokens)                    # the model's own, after its final norm
    drafted = double.draft(tokens[1:], hidden[:-1])   # and double.logits(drafted), of the tokens from the third one on

The layer is as DeepSeek-V3's report and README_WEIGHTS.md describe it: embedding and hidden state, each normed, side by
side through eh_proj, then a decoder layer, which is transformers' own, and a norm. K-EXAONE's has the names of
Qwen3-Next's, and is of the kinds that vLLM's exaone_moe_mtp.py makes it of: those of the first layer, with a window.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import drafts
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_LAYERS = 3  # of the model; the one after them predicts
AT = f"model.layers.{NUM_LAYERS}."


class Names(NamedTuple):
    """What a checkpoint calls the layer, and what it has besides a layer's usual tensors."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    proj: str
    norm: str


OWN = Names("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
NAMES = {False: Names(AT, f"{AT}enorm", f"{AT}hnorm", f"{AT}eh_proj", f"{AT}shared_head.norm"), True: OWN}
KINDS: dict[str, dict[str, list[str]]] = {  # of layers, that which predicts included
    "exaone_moe": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
}


LISTED = {  # as KINDS, of names as others'
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "shared", "full"]},
    "axk2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
}


def save(name: str, target: Path, *, has_copies: bool = False, **changes: Any) -> Path:
    """Write a variant's checkpoint with such a layer. has_copies: it stores the embedding and the head once more"""
    kinds, names = dict(KINDS.get(name, {})), NAMES[name in KINDS]
    kinds |= LISTED.get(name, {})
    model = tiny.save_changed(name, target, **{"num_hidden_layers": NUM_LAYERS + 1, **kinds, **changes})
    stored, hidden = load_file(target / "model.safetensors"), model.config.hidden_size
    stored = {key.replace(AT, names.layer): tensor for key, tensor in stored.items()}
    for norm in (names.embedding_norm, names.hidden_norm, names.norm):
        stored[f"{norm}.weight"] = 1 + torch.randn(hidden) * 0.2
    stored[f"{names.proj}.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
    if has_copies:
        stored[f"{AT}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        stored[f"{AT}shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    written = json.loads((target / "config.json").read_text())
    written |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    written |= {key: of[:NUM_LAYERS] for key, of in kinds.items()}
    written |= tiny.PUBLISHED.get(name, {})
    (target / "config.json").write_text(json.dumps(written))
    return target


class Double(drafts.LayerDouble):
    def __init__(self, folder: Path) -> None:
        self.stored = load_file(folder / "model.safetensors")
        self.names = NAMES[f"{OWN.proj}.weight" in self.stored]
        kind = json.loads((folder / "config.json").read_text())["model_type"].removesuffix("_text")
        kinds = KINDS.get(kind, {})
        self.model = tiny.reference(folder, num_hidden_layers=NUM_LAYERS + 1, **kinds, **LISTED.get(kind, {}))
        self.model.config.num_hidden_layers = NUM_LAYERS  # so the last layer is not the model's
        if kinds:  # its names are none of transformers'
            at = self.names.layer
            own = {key.removeprefix(at): tensor for key, tensor in self.stored.items() if key.startswith(at)}
            self.model.model.layers[NUM_LAYERS].load_state_dict(own)
        self.window = getattr(self.model.config, "sliding_window", None) if kinds else None
        self.offset = 1.0 if "linear_num_key_heads" in vars(self.model.config) else 0.0  # of weights of norms

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.model.model(tokens[None]).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(tokens)
        normed = self._norm(embedded, self.names.embedding_norm), self._norm(hidden, self.names.hidden_norm)
        x = (torch.cat(normed, -1) @ self.stored[f"{self.names.proj}.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        unseen = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        if self.window is not None:
            unseen = unseen + torch.full_like(unseen, -torch.inf).tril(-self.window)
        x = self.model.model.layers[NUM_LAYERS](
            x,
            attention_mask=unseen[None, None],
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        x = x[0] if isinstance(x, tuple) else x  # GLM's gives what it chose, too
        return self._norm(x[0], self.names.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden fp32[T, H] -> fp32[T, V]"""
        logits: Tensor = self.model.lm_head(hidden)
        return logits

    def tokens(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * (self.stored[f"{name}.weight"] + self.offset)
