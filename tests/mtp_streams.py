"""Tiny checkpoints with a layer that predicts further tokens of several streams, and a double of it.

    folder = mtp_streams.save(tmp_path / "mtp")
    double = mtp_streams.Double(folder)
    double.drafts(tokens, 3)

As vLLM's vllm/models/deepseek_v4/amd/mtp.py has it: each stream that the last layer leaves is normed, and goes through one
linear; what another linear makes of the embedding is added to each. The layer is transformers' own, and a head of its own
merges the streams for the norm and the model's head.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import drafts
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_LAYERS = 3  # of the model; the one after them predicts


def save(target: Path, **changes: Any) -> Path:
    """Write the checkpoint of DeepSeek-V4 with such a layer, which has a window."""
    kinds = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    more = {key: tiny.DEEPSEEK_V4[key] + last for key, last in kinds.items()}
    model = tiny.save_changed("deepseek_v4", target, num_hidden_layers=NUM_LAYERS + 1, **more, **changes)
    hidden, streams = model.config.hidden_size, model.config.hc_mult
    stored = {re.sub(rf"^model\.layers\.{NUM_LAYERS}\.", "mtp.0.", key): tensor
              for key, tensor in load_file(target / "model.safetensors").items()}  # fmt: skip
    stored["mtp.0.attn.kv_norm.weight"] = stored.pop("mtp.0.attn.norm.weight")
    stored |= {f"mtp.0.{norm}.weight": 1 + torch.randn(hidden) * 0.2 for norm in ("enorm", "hnorm", "norm")}
    stored |= {f"mtp.0.{linear}.weight": torch.randn(hidden, hidden) * 0.2 for linear in ("e_proj", "h_proj")}
    shapes = {"fn": (streams, streams * hidden), "base": (streams,), "scale": (1,)}
    stored |= {f"mtp.0.hc_head_{part}": torch.randn(shape) * 0.2 for part, shape in shapes.items()}
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    written = json.loads((target / "config.json").read_text())
    written |= {key: written[key][:NUM_LAYERS] for key in kinds}
    written |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(written))
    return target


class Double(drafts.LayerDouble):
    """hidden: the streams side by side, fp32[T, S H]"""

    def __init__(self, folder: Path) -> None:
        written = json.loads((folder / "config.json").read_text())
        kinds = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
        self.model = tiny.reference(folder, num_hidden_layers=NUM_LAYERS + 1,
                                    **{key: written[key] + last for key, last in kinds.items()})  # fmt: skip
        self.stored = load_file(folder / "model.safetensors")
        self.layer = self.model.model.layers[NUM_LAYERS]
        self.load_layer()
        self.model.model.layers = self.model.model.layers[:NUM_LAYERS]

    def load_layer(self) -> None:
        """Load the layer, whose names in the file are none of transformers'."""
        own = {key.removeprefix("mtp.0."): each for key, each in self.stored.items() if key.startswith("mtp.0.")}
        names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.wq_a": "self_attn.q_a_proj",
                 "attn.q_norm": "self_attn.q_a_norm", "attn.wq_b": "self_attn.q_b_proj", "attn.wkv": "self_attn.kv_proj",
                 "attn.kv_norm": "self_attn.kv_norm", "attn.wo_a": "self_attn.o_a_proj", "attn.wo_b": "self_attn.o_b_proj",
                 "ffn.gate": "mlp.gate", **{f"ffn.shared_experts.w{number}": f"mlp.shared_experts.{name}_proj"
                                            for number, name in ((1, "gate"), (2, "down"), (3, "up"))}}  # fmt: skip
        state = {f"{theirs}.weight": own[f"{ours}.weight"] for ours, theirs in names.items()}
        state |= {f"{block}_hc.{part}": own[f"hc_{block}_{part}"]
                  for block in ("attn", "ffn") for part in ("fn", "base", "scale")}  # fmt: skip
        experts = [[own[f"ffn.experts.{number}.w{part}.weight"] for part in (1, 3, 2)]
                   for number in range(self.model.config.n_routed_experts)]  # fmt: skip
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(each[:2]) for each in experts])
        state["mlp.experts.down_proj"] = torch.stack([each[2] for each in experts])
        state["mlp.gate.e_score_correction_bias"] = own["ffn.gate.bias"]
        state["self_attn.sinks"] = own["attn.attn_sink"]
        self.layer.load_state_dict(state)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        found: list[Tensor] = []
        hook = self.model.model.layers[-1].register_forward_hook(lambda _module, _args, out: found.append(out))
        self.model.model(tokens[None])
        hook.remove()
        return found[0][0].flatten(1)

    @torch.inference_mode()
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        body, config = self.model.model, self.model.config
        e = self._linear(self._norm(body.embed_tokens(tokens), "enorm"), "e_proj")
        h = self._linear(self._norm(hidden.unflatten(1, (config.hc_mult, -1)), "hnorm"), "h_proj")
        x, positions = (e[:, None] + h)[None], torch.arange(len(tokens))[None]
        unseen = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)
        unseen = unseen + torch.full_like(unseen, -torch.inf).tril(-config.sliding_window)
        angles = {name: body.rotary_emb(x, position_ids=positions, layer_type=name) for name in ("main", "compress")}
        made: Tensor = self.layer(x, input_ids=tokens[None], position_embeddings=angles, position_ids=positions,
                                  attention_mask=unseen[None, None])  # fmt: skip
        return made[0].flatten(1)

    def tokens(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).argmax(-1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden fp32[T, S H] -> fp32[T, V]"""
        config = self.model.config
        fn, base, scale = (self.stored[f"mtp.0.hc_head_{part}"] for part in ("fn", "base", "scale"))
        normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        weights = torch.sigmoid(normed @ fn.T * scale + base) + config.hc_eps
        merged = torch.einsum("ts,tsh->th", weights, hidden.unflatten(1, (config.hc_mult, -1)))
        logits: Tensor = self.model.lm_head(self._norm(merged, "norm"))
        return logits

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.stored[f"mtp.0.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * self.stored[f"mtp.0.{name}.weight"]
