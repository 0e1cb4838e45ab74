"""Ops for attention by layers of another engine, with their own cache.

    a = attention_layer(q, k, v, layer="model.layers.0", scale=0.125)

They have no body: whoever runs the program gives their kernels.
"""

from __future__ import annotations

from torch import Tensor

from atom.errors import UnsupportedError
from atom.graph.ops.base import divide, op
from atom.graph.types import Type, need


def _attention_layer(q: Type, k: Type, v: Type, sinks: Type | None = None, k_scale: Type | None = None,
                     v_scale: Type | None = None, *, layer: str, scale: float, window: int | None = None,
                     softcap: float | None = None) -> Type:  # fmt: skip
    tokens, heads, dim = q.shape
    need(k == v and k.shape[0] == tokens and k.shape[2] == dim, f"q is {q}, k {k}, v {v}")
    divide(heads, int(k.shape[1]))
    need(sinks is None or sinks.shape == (heads,), f"the sinks are {sinks} for q {q}")
    return q


@op(_attention_layer, state=True)
def attention_layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, layer: str, scale: float, window: int | None = None,
                    softcap: float | None = None) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], sinks [N], k_scale and v_scale fp32[1] -> [T, N, D], see `ops.attention`"""
    raise UnsupportedError(f"the attention of {layer} is another engine's, and there is none")


def _mla_attention_layer(q: Type, q_rope: Type, latent: Type, k_rope: Type, kv_b: Type, k_scale: Type | None = None, *,
                         layer: str, scale: float) -> Type:  # fmt: skip
    tokens, heads, plain = q.shape
    need(kv_b.shape[1] == latent.shape[1], f"kv_b is {kv_b} for a latent of {latent}")
    return Type(q.dtype, (tokens, heads, divide(kv_b.shape[0], int(heads)) - int(plain)))


@op(_mla_attention_layer, state=True, weight=4)
def mla_attention_layer(q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor,
                        k_scale: Tensor | None = None, *, layer: str, scale: float) -> Tensor:  # fmt: skip
    """q [T, N, P], q_rope [T, N, R], latent [T, L], k_rope [T, 1, R], kv_b [N (P + U), L], k_scale fp32[1] -> [T, N,
    U], see `ops.mla_attention`"""
    raise UnsupportedError(f"the attention of {layer} is another engine's, and there is none")
