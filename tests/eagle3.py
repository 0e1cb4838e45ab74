"""Tiny drafts of EAGLE-3, and a double of them in plain torch.

    folder = eagle3.save(model_folder, tmp_path / "eagle3", draft_vocab=7)
    double = eagle3.Double(model_folder, folder)
    hidden = double.hidden(tokens)                    # of three layers' inputs, through fc
    drafted = double.draft(tokens[1:], hidden[:-1])   # ahead of the norm; and double.tokens(drafted)

The layer is as the paper (Li et al. 2025) and eagle/model/cnets.py of SafeAILab/EAGLE describe it: embedding and hidden
state, each normed, side by side into a Llama layer's attention, whose residual is the hidden state itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafts
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, WIDTH, THETA, EPS = 4, 2, 12, 56, 5000.0, 1e-5


def save(
    model: Path,
    target: Path,
    *,
    layer: str = "midlayer",
    hidden: int | None = None,
    draft_vocab: int | None = None,
    has_embedding: bool = False,
    **more: Any,
) -> Path:
    """Write a draft for a model's checkpoint. layer: what its names begin with; more: of its config.json"""
    of_model = json.loads((model / "config.json").read_text())
    theirs, vocab = of_model["hidden_size"], of_model["vocab_size"]
    ours, tokens = hidden or theirs, draft_vocab or vocab
    torch.manual_seed(3)
    shapes = {
        "fc": (ours, 3 * theirs),
        "lm_head": (tokens, ours),
        f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * ours),
        f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * ours),
        f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * ours),
        f"{layer}.self_attn.o_proj": (ours, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj": (WIDTH, ours),
        f"{layer}.mlp.up_proj": (WIDTH, ours),
        f"{layer}.mlp.down_proj": (ours, WIDTH),
        **({"embed_tokens": (vocab, ours)} if has_embedding else {}),
    }
    stored = {f"{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = ("norm", *(f"{layer}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    stored |= {f"{name}.weight": 1 + torch.randn(ours) * 0.2 for name in norms}
    if draft_vocab is not None:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        stored["d2t"] = chosen - torch.arange(draft_vocab)
        stored["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, value=True)
    target.mkdir(parents=True)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    write_config(target, of_model, hidden_size=ours, draft_vocab_size=tokens, **more)
    return target


def write_config(target: Path, of_model: dict[str, Any], **more: Any) -> None:
    """Write a draft's config.json."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": of_model["hidden_size"],
        "vocab_size": of_model["vocab_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 128,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        **more,
    }
    (target / "config.json").write_text(json.dumps(values))


class Double(drafts.LayerDouble):
    def __init__(self, model: Path, folder: Path, layers: Sequence[int] = ()) -> None:
        """layers: of the model, whose inputs it reads, where these are not those of the paper's code"""
        self.model = tiny.reference(model)
        depth = self.model.config.num_hidden_layers
        self.layers = sorted(layers or (2, depth // 2, depth - 3))
        stored = load_file(folder / "model.safetensors")
        self.stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
        self.is_normed = json.loads((folder / "config.json").read_text()).get("norm_before_residual", False)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor) -> Tensor:
        states = self.model.model(tokens[None], output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self.layers], -1) @ self.stored["fc.weight"].T

    @torch.inference_mode()
    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        own = self.stored.get("embed_tokens.weight")
        embedded = F.embedding(tokens, self.model.get_input_embeddings().weight if own is None else own)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if self.is_normed else hidden
        x = residual + self._attend(torch.cat([self._norm(embedded, "midlayer.input_layernorm"), normed], -1))
        h = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = self._linear(h, "midlayer.mlp.gate_proj"), self._linear(h, "midlayer.mlp.up_proj")
        return x + self._linear(F.silu(gate) * up, "midlayer.mlp.down_proj")

    @torch.inference_mode()
    def tokens(self, hidden: Tensor) -> Tensor:
        best = self._linear(self._norm(hidden, "norm"), "lm_head").argmax(-1)
        return best + self.stored["d2t"][best] if "d2t" in self.stored else best

    def _attend(self, x: Tensor) -> Tensor:
        """x fp32[T, 2 H] -> fp32[T, H]"""
        heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        q, k, v = (
            self._linear(x, f"midlayer.self_attn.{name}_proj").unflatten(-1, (num, HEAD_DIM)).transpose(0, 1)
            for name, num in heads.items()
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v))
        scores = q @ k.mT / math.sqrt(HEAD_DIM) + torch.full((len(x), len(x)), -torch.inf).triu(1)
        return self._linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.stored[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.stored[f"{name}.weight"]


def _rotated(x: Tensor) -> Tensor:
    """x fp32[N, T, D], each half of a head's dims with the other"""
    freqs = THETA ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = torch.arange(x.shape[1]).float()[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
