"""From a typed model to its semantic graph: a decoder is an embedding, layers of attention and mlp, and a head.

    graph = build(config.model, dtype="bf16", cache_dtype="bf16")
    print(show(graph))

Each block of the model file has one function here, chosen by the block's `kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from atom.config import AttentionConfig, MLPConfig, ModelConfig, RopeConfig
from atom.errors import ConfigError, UnsupportedError
from atom.graph import KV, Graph, Program, RopeFreqs, Type, W, ops


def build(model: ModelConfig, dtype: str, cache_dtype: str) -> Graph:
    """`body`: tokens and positions i64[T] to hidden states [T, H]; `head`: rows of them [R, H] to logits [R, V]."""
    graph = Graph()
    _Writer(model, graph.program("body"), dtype, cache_dtype).write_body()
    _Writer(model, graph.program("head"), dtype, cache_dtype).write_head()
    return graph


class Rotary(NamedTuple):
    """The turns of this step's positions, fp32[T, D / 2] each."""

    cos: Node
    sin: Node


@dataclass(frozen=True)
class _Writer:
    """Writes one program. A role is a part of the model; the model file says what the checkpoint calls it."""

    model: ModelConfig
    program: Program
    dtype: str
    cache_dtype: str

    def write_body(self) -> None:
        model, program = self.model, self.program
        tokens = program.input("tokens", Type("i64", ("T",)))
        positions = program.input("positions", Type("i64", ("T",)))
        rotary = self.rotary(positions, model.attention) if model.attention.rope.kind != "none" else None
        x = program.call(ops.embedding, tokens, self.weight("embedding", (model.vocab, model.hidden)), name="x")
        for layer in range(model.layers):
            x = self.layer(x, rotary, layer)
        program.output(self.norm(x, "final_norm", name="hidden"))

    def write_head(self) -> None:
        model = self.model
        hidden = self.program.input("hidden", Type(self.dtype, ("R", model.hidden)))
        weight = self.weight("embedding" if model.tied else "head", (model.vocab, model.hidden))
        self.program.output(self.program.call(ops.linear, hidden, weight, name="logits"))

    def layer(self, x: Node, rotary: Rotary | None, layer: int) -> Node:
        h = self.norm(x, "attention_norm", layer)
        attended = ATTENTIONS[self.model.attention.kind](self, h, rotary, layer)
        mlp = mlp_of(self.model, layer)
        if self.model.residual == "parallel":
            both = self.program.call(ops.add, attended, MLPS[mlp.kind](self, h, mlp, layer), name="o")
            return self.program.call(ops.add, x, both, name="x")
        x = self.program.call(ops.add, x, attended, name="x")
        h = self.norm(x, "mlp_norm", layer)
        return self.program.call(ops.add, x, MLPS[mlp.kind](self, h, mlp, layer), name="x")

    def gqa(self, h: Node, rotary: Rotary | None, layer: int) -> Node:
        """Grouped-query attention (Ainslie et al. 2023)."""
        model, attention, program = self.model, self.model.attention, self.program
        heads, kv_heads, dim = attention.heads, attention.kv_heads or attention.heads, head_dim(model)
        q, k, v = (
            program.call(
                ops.split_heads, self.linear(h, role, model.hidden, n * dim, attention.bias, layer), heads=n, name=role
            )
            for role, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if attention.qk_norm == "per_head":
            q, k = (self.norm(x, f"{name}_norm", layer, width=dim, name=name) for x, name in ((q, "q"), (k, "k")))
        if rotary:
            q, k = (program.call(ops.rope, x, *rotary, name=name) for x, name in ((q, "q"), (k, "k")))
        window = window_of(attention, layer)
        cache = KV(self.name("layer", layer), Type(self.cache_dtype, (2, kv_heads, dim)), window)
        scale = dim**-0.5 if attention.scale is None else attention.scale
        a = program.call(ops.attention, q, k, v, cache, scale=scale, window=window, name="a")
        return self.linear(
            program.call(ops.merge_heads, a, name="a"), "o", heads * dim, model.hidden, attention.o_bias, layer
        )

    def gated(self, h: Node, mlp: MLPConfig, layer: int) -> Node:
        """down(act(gate) * up) (Shazeer 2020)."""
        gate = self.linear(h, "gate", self.model.hidden, mlp.width, mlp.bias, layer)
        up = self.linear(h, "up", self.model.hidden, mlp.width, mlp.bias, layer)
        active = self.program.call(ops.activate, gate, kind=mlp.activation, name="active")
        m = self.program.call(ops.mul, active, up, name="m")
        return self.linear(m, "down", mlp.width, self.model.hidden, mlp.bias, layer)

    def plain(self, h: Node, mlp: MLPConfig, layer: int) -> Node:
        """down(act(up))."""
        up = self.linear(h, "up", self.model.hidden, mlp.width, mlp.bias, layer)
        m = self.program.call(ops.activate, up, kind=mlp.activation, name="m")
        return self.linear(m, "down", mlp.width, self.model.hidden, mlp.bias, layer)

    def linear(self, x: Node, role: str, inner: int, outer: int, has_bias: bool, layer: int) -> Node:
        bias = [self.weight(role, (outer,), layer, "bias")] if has_bias else []
        return self.program.call(ops.linear, x, self.weight(role, (outer, inner), layer), *bias, name=role)

    def norm(self, x: Node, role: str, layer: int | None = None, width: int | None = None, name: str = "h") -> Node:
        norm, shape = self.model.norm, (width or self.model.hidden,)
        bias = [self.weight(role, shape, layer, "bias")] if norm.bias else []
        return self.program.call(NORMS[norm.kind], x, self.weight(role, shape, layer), *bias, eps=norm.eps, name=name)

    def rotary(self, positions: Node, attention: AttentionConfig) -> Rotary:
        freqs = rope_freqs(attention.rope, head_dim(self.model))
        scale = rotary_scale(attention.rope)
        return Rotary(*self.program.call(ops.rotary, positions, freqs, scale=scale, name=("cos", "sin")))

    def weight(self, role: str, shape: tuple[int, ...], layer: int | None = None, part: str = "weight") -> W:
        return W(f"{self.name(role, layer)}.{part}", Type(self.dtype, shape))

    def name(self, role: str, layer: int | None = None) -> str:
        if role not in self.model.weights:
            raise ConfigError(f"model.weights: nothing says what the checkpoint calls '{role}'; add {role}: <name>")
        return self.model.weights[role].replace("{layer}", str(layer))


NORMS = {"rms": ops.rms_norm, "layer": ops.layer_norm}
ATTENTIONS: dict[str, Callable[[_Writer, Node, Rotary | None, int], Node]] = {"gqa": _Writer.gqa}
MLPS: dict[str, Callable[[_Writer, Node, MLPConfig, int], Node]] = {"gated": _Writer.gated, "plain": _Writer.plain}


def head_dim(model: ModelConfig) -> int:
    return model.attention.head_dim or model.hidden // model.attention.heads


def mlp_of(model: ModelConfig, layer: int) -> MLPConfig:
    """The first mlp entry that takes the layer."""
    for mlp in model.mlp:
        if (layer + 1) % mlp.every == 0 and layer not in mlp.skip:
            return mlp
    raise ConfigError(f"model.mlp: no entry takes layer {layer}")


def window_of(attention: AttentionConfig, layer: int) -> int | None:
    """The layer's window in tokens, or None."""
    if attention.layer_types is not None:
        return attention.window if attention.layer_types[layer] == "sliding_attention" else None
    return attention.window if layer >= attention.window_from else None


def rope_freqs(rope: RopeConfig, head_dim: int) -> RopeFreqs:
    """The recipe of the frequencies. ConfigError where the kind needs a value that nobody gave."""
    dim = int(head_dim * rope.partial)
    if rope.kind in ("llama3", "yarn") and rope.original_max_position is None:
        raise ConfigError(f"model.attention.rope: kind {rope.kind} needs original_max_position")
    match rope.kind:
        case "default":
            return RopeFreqs(dim, rope.theta)
        case "linear":
            return RopeFreqs(dim, rope.theta, "linear", rope.factor)
        case "llama3":
            return RopeFreqs(dim, rope.theta, "llama3", rope.factor, rope.original_max_position,
                             low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)  # fmt: skip
        case "yarn":
            return RopeFreqs(dim, rope.theta, "yarn", rope.factor, rope.original_max_position,
                             beta_fast=rope.beta_fast, beta_slow=rope.beta_slow, truncate=rope.truncate)  # fmt: skip
        case "factors":
            return RopeFreqs(dim, rope.theta, "factors", factors=tuple(rope.factors or ()))
    raise UnsupportedError(
        f"model.attention.rope.kind={rope.kind} is not built; kinds: none, default, linear, llama3, yarn, factors"
    )


def rotary_scale(rope: RopeConfig) -> float:
    """What yarn multiplies cos and sin by (Peng et al. 2023, section 3.4); 1 for the other kinds."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)
