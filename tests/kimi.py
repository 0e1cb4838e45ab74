"""Kimi-K3 and AliceAI in plain torch, token by token in float32: transformers has no class of them.

model = KimiK3(CONFIG)                       # of random weights, under the hub's names
model.save(folder)
logits = model(torch.tensor([tokens])).logits    # [1, T, V]

Written from the formulas of "Attention Residuals" and "Kimi Linear" (Kimi Team 2025 and 2026) and from what vLLM 0.33
computes: vllm/models/kimi_k3/nvidia (model.py, kda.py, mla.py, ops/attn_res.py), layers/activation.py, alice_ai.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 6, "rms_norm_eps": 1e-5,
                         "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}  # fmt: skip
KIMI_K3: dict[str, Any] = {
    **SIZES, "model_type": "kimi_linear", "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 80, "q_lora_rank": 20,
    "kv_lora_rank": 18, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "mla_use_nope": True, "mla_use_output_gate": True,
    "linear_attn_config": {"num_heads": 2, "head_dim": 12, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
                           "kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]},
    "attn_res_block_size": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 2,
    "moe_intermediate_size": 32, "routed_expert_hidden_size": 32, "latent_moe_use_norm": True, "hidden_act": "situ", "activation_situ_beta": 0.8,
    "activation_situ_linear_beta": 1.5, "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.3,
    "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "num_nextn_predict_layers": 0, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
ALICE_AI: dict[str, Any] = {
    **SIZES, "architectures": ["AliceAIForCausalLM"], "model_type": "alice_ai", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 12, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "block_attn_res_block_size": 4, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "norm_topk_prob": True, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


class Reference:
    """Weights by name, and what both models compute."""

    prefix = ""  # of stored names
    offset = 0.0  # added to the weights of norms
    plain_norms = ("_res_norm", "o_norm")  # in whose names are those without it

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.weights, self.num_rounds = config, dict[str, Tensor](), 0
        self.generator = torch.Generator().manual_seed(1)
        self(torch.tensor([[0]]))  # makes the weights

    def weight(self, name: str, *shape: int) -> Tensor:
        """A weight, made when it is first read: around 0, of norms around what leaves a row as it is."""
        if name not in self.weights:
            spread = 1.0 if "A_log" in name or "a_log" in name or "dt_bias" in name else 0.2
            made = torch.randn(*shape, generator=self.generator) * spread
            is_norm = "norm" in name
            self.weights[name] = made + (1.0 - self.offset_of(name) if is_norm else 0.0)
        return self.weights[name]

    def offset_of(self, name: str) -> float:
        return 0.0 if any(part in name for part in self.plain_norms) else self.offset

    def linear(self, x: Tensor, name: str, rows: int) -> Tensor:
        return x @ self.weight(f"{name}.weight", rows, x.shape[-1]).T

    def norm(self, x: Tensor, name: str) -> Tensor:
        """name: of the tensor"""
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * (self.offset_of(name) + self.weight(name, x.shape[-1]))

    def attend(self, sums: list[Tensor], proj: str, norm: str) -> Tensor:
        """The sums s_j, weighted by softmax_j(proj . norm(s_j))."""
        scores = torch.cat([self.linear(self.norm(each, norm), proj, 1) for each in sums], -1)
        return (torch.softmax(scores, -1).unsqueeze(1) @ torch.stack(sums, 1)).squeeze(1)

    def conv(self, x: Tensor, name: str, taps: int) -> Tensor:
        """x [T, C] -> silu of each channel's sum over the last taps tokens, weighted"""
        weight = self.weight(f"{name}.weight", x.shape[1], 1, taps).squeeze(1)
        padded = F.pad(x, (0, 0, taps - 1, 0))
        return F.silu(sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(taps)))  # type: ignore[arg-type]

    def kda(self, x: Tensor, at: str, heads: int, dim: int, taps: int, *, a_log: str, num_rates: int,
            floor: float | None, is_gate_low: bool) -> Tensor:  # fmt: skip
        """Kimi Delta Attention: S = diag(exp g) S; S += beta k (v - S^T k)^T; o = S^T q / sqrt(dim)."""
        inner = heads * dim
        q, k, v = (self.conv(self.linear(x, f"{at}.{each}_proj", inner), f"{at}.{each}_conv1d", taps) for each in "qkv")
        q, k, v = (each.view(-1, heads, dim) for each in (q, k, v))
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        raw = self.linear(self.linear(x, f"{at}.f_a_proj", dim), f"{at}.f_b_proj", inner)
        raw = (raw + self.weight(f"{at}.dt_bias", inner)).view(-1, heads, dim)
        rate = self.weight(f"{at}.{a_log}", num_rates)[:heads].exp().unsqueeze(-1)
        g = -rate * F.softplus(raw) if floor is None else floor * torch.sigmoid(rate * raw)
        beta = torch.sigmoid(self.linear(x, f"{at}.b_proj", heads))
        state, out = torch.zeros(heads, dim, dim), []
        for t in range(len(x)):
            state = state * g[t].exp().unsqueeze(-1)
            error = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("nkv,nk->nv", state, k[t]))
            state = state + torch.einsum("nk,nv->nkv", k[t], error)
            out.append(torch.einsum("nkv,nk->nv", state, q[t] * dim**-0.5))
        low = self.linear(x, f"{at}.g_a_proj", dim) if is_gate_low else x
        gate = self.linear(low, f"{at}.g_b_proj" if is_gate_low else f"{at}.g_proj", inner).view(-1, heads, dim)
        o = self.norm(torch.stack(out), f"{at}.o_norm.weight") * torch.sigmoid(gate)
        return self.linear(o.flatten(1), f"{at}.o_proj", x.shape[1])

    def softmax_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k [T, N, D], v [T, N, U] -> [T, N U]"""
        scores = torch.einsum("tnd,snd->nts", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -math.inf)
        return torch.einsum("nts,snu->tnu", torch.softmax(scores, -1), v).flatten(1)

    def choose(self, x: Tensor, at: str, experts: int, top_k: int, scale: float) -> Tensor:
        """The weights [T, E] of experts: sigmoid scores of the best corrected ones, which add up to scale."""
        scores = torch.sigmoid(self.linear(x, f"{at}.gate", experts))
        best = (scores + self.weight(f"{at}.gate.e_score_correction_bias", experts)).topk(top_k, -1).indices
        weights = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
        return weights / weights.sum(-1, keepdim=True) * scale

    def layer(self, sums: list[Tensor], last: Tensor | None, number: int) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        config = self.config
        embedding = self.weight("model.embed_tokens.weight", config["vocab_size"], config["hidden_size"])
        sums, last = list[Tensor](), embedding[tokens[0]]
        for number in range(config["num_hidden_layers"]):
            sums, last = self.layer(sums, last, number)
        hidden = self.norm(self.attend([*sums, last], *self.final), "model.norm.weight")
        return SimpleNamespace(logits=self.linear(hidden, "lm_head", config["vocab_size"]).unsqueeze(0))

    final = ("", "")  # names of the last attention over sums

    def run_layer(self, sums: list[Tensor], last: Tensor, number: int, block_size: int, *names: tuple[str, str],
                  attention: Any, mlp: Any) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """A sum of each block of layers; the first is the embedding.

        names: of the attention over sums ahead of attention and of mlp
        """
        at, is_first = f"model.layers.{number}", number % block_size == 0
        read = last if number == 0 else self.attend([*sums, last], *names[0])
        given = attention(self.norm(read, f"{at}.input_layernorm.weight"))
        sums, last = ([*sums, last], given) if is_first else (sums, last + given)
        read = self.attend([*sums, last], *names[1])
        return sums, last + mlp(self.norm(read, f"{at}.post_attention_layernorm.weight"))

    def stored(self) -> dict[str, Tensor]:
        return {self.prefix + name: tensor.contiguous() for name, tensor in self.weights.items()}

    def save(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.stored() if tensors is None else tensors, folder / "model.safetensors")


class KimiK3(Reference):
    prefix = "language_model."
    final = ("model.output_attn_res_proj", "model.output_attn_res_norm.weight")

    def layer(self, sums: list[Tensor], last: Tensor | None, number: int) -> tuple[list[Tensor], Tensor]:
        at, linear = f"model.layers.{number}", self.config["linear_attn_config"]

        def attention(h: Tensor) -> Tensor:
            if number + 1 in linear["full_attn_layers"]:
                return self.mla(h, f"{at}.self_attn")
            sizes = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
            return self.kda(h, f"{at}.self_attn", *sizes, a_log="A_log", num_rates=128, floor=linear["gate_lower_bound"],
                            is_gate_low=False)  # fmt: skip

        def mlp(h: Tensor) -> Tensor:
            is_dense = number < self.config["first_k_dense_replace"]
            return self.gated(h, f"{at}.mlp", self.config["intermediate_size"]) if is_dense else self.moe(h, at)

        names = [(f"{at}.{each}_res_proj", f"{at}.{each}_res_norm.weight") for each in ("self_attention", "mlp")]
        if number == 0:  # stored, and of one sum only
            self.weight(f"{names[0][0]}.weight", 1, self.config["hidden_size"])
            self.weight(names[0][1], self.config["hidden_size"])
        assert last is not None
        return self.run_layer(
            sums, last, number, self.config["attn_res_block_size"], *names, attention=attention, mlp=mlp
        )

    def mla(self, x: Tensor, at: str) -> Tensor:
        """Latent attention without positions, whose output a gate weighs."""
        config = self.config
        heads, plain, shared, value = (
            config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q = self.norm(self.linear(x, f"{at}.q_a_proj", config["q_lora_rank"]), f"{at}.q_a_layernorm.weight")
        q = self.linear(q, f"{at}.q_b_proj", heads * (plain + shared)).view(-1, heads, plain + shared)
        latent, k_shared = self.linear(x, f"{at}.kv_a_proj_with_mqa", config["kv_lora_rank"] + shared).split(
            [config["kv_lora_rank"], shared], -1
        )
        latent = self.norm(latent, f"{at}.kv_a_layernorm.weight")
        kv = self.linear(latent, f"{at}.kv_b_proj", heads * (plain + value)).view(-1, heads, plain + value)
        k = torch.cat((kv[..., :plain], k_shared.unsqueeze(1).expand(-1, heads, -1)), -1)
        o = self.softmax_attention(q, k, kv[..., plain:])
        o = o * torch.sigmoid(self.linear(x, f"{at}.g_proj", heads * value))
        return self.linear(o, f"{at}.o_proj", x.shape[1])

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up

    def gated(
        self, x: Tensor, at: str, width: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Tensor:
        gate, up, down = (f"{at}.{name}" for name in names)
        return self.linear(self.situ(self.linear(x, gate, width), self.linear(x, up, width)), down, x.shape[1])

    def moe(self, x: Tensor, layer: str) -> Tensor:
        config, at = self.config, f"{layer}.block_sparse_moe"
        width = config["moe_intermediate_size"]
        weights = self.choose(
            x, at, config["num_experts"], config["num_experts_per_token"], config["routed_scaling_factor"]
        )
        latent = self.linear(x, f"{at}.routed_expert_down_proj", config["routed_expert_hidden_size"])
        experts = [
            self.gated(latent, f"{at}.experts.{n}", width, ("w1", "w3", "w2")) for n in range(config["num_experts"])
        ]
        routed = (weights.unsqueeze(-1) * torch.stack(experts, 1)).sum(1)
        routed = self.linear(
            self.norm(routed, f"{at}.routed_expert_norm.weight"), f"{at}.routed_expert_up_proj", x.shape[1]
        )
        return routed + self.gated(x, f"{at}.shared_experts", width * config["num_shared_experts"])


class AliceAI(Reference):
    offset = 1.0
    final = ("model.attnres_final.res_proj", "model.attnres_final.res_norm_weight")
    plain_norms = ("res_norm_weight", "o_norm")

    def layer(self, sums: list[Tensor], last: Tensor | None, number: int) -> tuple[list[Tensor], Tensor]:
        at, config = f"model.layers.{number}", self.config

        def attention(h: Tensor) -> Tensor:
            if config["layer_types"][number] == "full_attention":
                return self.gqa(h, f"{at}.self_attn")
            sizes = config["linear_num_key_heads"], config["linear_key_head_dim"], config["linear_conv_kernel_dim"]
            return self.kda(
                h, f"{at}.linear_attn", *sizes, a_log="a_log_bias", num_rates=sizes[0], floor=None, is_gate_low=True
            )

        names = [(f"{at}.{each}_res_proj", f"{at}.{each}_res_norm_weight") for each in ("attn", "mlp")]
        assert last is not None
        return self.run_layer(sums, last, number, config["block_attn_res_block_size"], *names, attention=attention,
                              mlp=lambda h: self.moe(h, f"{at}.mlp"))  # fmt: skip

    def gqa(self, x: Tensor, at: str) -> Tensor:
        """Attention with norms of heads, a rope on half of their dims, and a gate that is stored with the queries."""
        config = self.config
        heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, gate = self.linear(x, f"{at}.q_proj", heads * 2 * dim).view(-1, heads, 2 * dim).chunk(2, -1)
        k, v = (self.linear(x, f"{at}.{each}_proj", kv_heads * dim).view(-1, kv_heads, dim) for each in "kv")
        q, k = (self.rope(self.norm(each, f"{at}.{name}_norm.weight")) for each, name in ((q, "q"), (k, "k")))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        o = self.softmax_attention(q, k, v) * torch.sigmoid(gate.flatten(1))
        return self.linear(o, f"{at}.o_proj", x.shape[1])

    def rope(self, x: Tensor) -> Tensor:
        rope = self.config["rope_parameters"]
        rotated = int(x.shape[-1] * rope["partial_rotary_factor"])
        angles = torch.arange(len(x)).unsqueeze(1) * rope["rope_theta"] ** (-torch.arange(0, rotated, 2) / rotated)
        cos, sin = (each.unsqueeze(1) for each in (angles.cos(), angles.sin()))
        first, second, rest = x.split([rotated // 2, rotated // 2, x.shape[-1] - rotated], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def gated(self, x: Tensor, at: str, width: int) -> Tensor:
        m = F.silu(self.linear(x, f"{at}.gate_proj", width)) * self.linear(x, f"{at}.up_proj", width)
        return self.linear(m, f"{at}.down_proj", x.shape[1])

    def moe(self, x: Tensor, at: str) -> Tensor:
        config = self.config
        weights = self.choose(x, at, config["num_experts"], config["num_experts_per_tok"], 1.0)
        width = config["moe_intermediate_size"]
        experts = [self.gated(x, f"{at}.experts.{number}", width) for number in range(config["num_experts"])]
        routed = (weights.unsqueeze(-1) * torch.stack(experts, 1)).sum(1)
        share = torch.sigmoid(self.linear(x, f"{at}.shared_expert_gate", 1))
        return routed + share * self.gated(x, f"{at}.shared_expert", config["shared_expert_intermediate_size"])
