"""Fused ops, which are faster for few rows of tokens.

A linear fused with the norm before it or the gated activation after it; attention fused with the cache write before it.
The activation in `linear_activate` saves as much of many rows.
"""

from __future__ import annotations

from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.formats import check_act
from atom.graph.ops.attention import norm_rope_write, paged_attention
from atom.graph.ops.base import LOWERED, op
from atom.graph.ops.dense import (
    activate,
    activate_type,
    add_rms_norm,
    gated_activate,
    gated_activate_type,
    linear,
    linear_type,
    rms_norm,
)
from atom.graph.packed import PackedWeight
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def _check_given(gives: str | None, kind: str | None) -> None:
    need(gives is None or kind is not None, f"rows are given in {gives} after gates only")
    if gives is not None:
        check_act(gives)


def _gated_linear(x: Type, weight: Type, *, kind: str, act: str | None = None, gives: str | None = None) -> Type:
    _check_given(gives, kind)
    return gated_activate_type(linear_type(x, weight, act=act), kind=kind)


@op(_gated_linear, level=LOWERED, weight=1)
def gated_linear(x: Tensor, weight: Tensor | PackedWeight, *, kind: str, act: str | None = None,
                 gives: str | None = None) -> Tensor:  # fmt: skip
    """x [T, I], weight [2 W, I] with gate before up -> gated_activate(linear(x)), [T, W]; act as in linear

    gives: the act of the linears that read the result, if nothing else does: their kernel may take its rows quantized.
    """
    return gated_activate(linear(x, weight, act=act), kind=kind)  # type: ignore[no-any-return]


def _linear_activate(x: Type, weight: Type, bias: Type, *, kind: str) -> Type:
    return activate_type(linear_type(x, weight, bias), kind=kind)


@op(_linear_activate, level=LOWERED, weight=1)
def linear_activate(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor, *, kind: str) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> activate(linear(x)), [T, O]; kernels may skip the rounding in between"""
    return activate(linear(x, weight, bias), kind=kind)  # type: ignore[no-any-return]


def _norm_linear(x: Type, norm: Type, weight: Type, bias: Type | None = None, *, eps: float,
                 kind: str | None = None, act: str | None = None,
                 gives: str | None = None) -> Type:  # fmt: skip
    _check_given(gives, kind)
    need(norm.shape == x.shape[-1:], f"the norm is {norm} for {x}")
    y = linear_type(x, weight, bias, act=act)
    return y if kind is None else gated_activate_type(y, kind=kind)


@op(_norm_linear, level=LOWERED, weight=2)
def norm_linear(x: Tensor, norm: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, eps: float,
                kind: str | None = None, act: str | None = None,
                gives: str | None = None) -> Tensor:  # fmt: skip
    """x [T, I], norm [I], weight [O, I], bias [O] -> linear(rms_norm(x)), [T, O]; with a kind, O is 2 W, and
    gated_activate then gives [T, W]; act as in linear, gives as in gated_linear"""
    y = linear(rms_norm(x, norm, eps=eps), weight, bias, act=act)
    return y if kind is None else gated_activate(y, kind=kind)  # type: ignore[no-any-return]


def _add_norm_linear(a: Type, b: Type, norm: Type, weight: Type, bias: Type | None = None, *, eps: float,
                     kind: str | None = None, act: str | None = None,
                     gives: str | None = None) -> tuple[Type, Type]:  # fmt: skip
    need(a == b, f"{a} and {b} differ")
    return _norm_linear(a, norm, weight, bias, eps=eps, kind=kind, act=act, gives=gives), a


@op(_add_norm_linear, level=LOWERED, weight=3)
def add_norm_linear(a: Tensor, b: Tensor, norm: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *,
                    eps: float, kind: str | None = None, act: str | None = None,
                    gives: str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a and b [T, I], the others as in norm_linear -> norm_linear(a + b), a + b"""
    normed, total = add_rms_norm(a, b, norm, eps=eps)
    y = linear(normed, weight, bias, act=act)
    return (y if kind is None else gated_activate(y, kind=kind)), total


def _norm_rope_attention(q: Type, k: Type, v: Type, cos: Type | None, sin: Type | None, q_norm: Type | None,
                         k_norm: Type | None, cache: KV, batch: BatchType, sinks: Type | None = None,
                         k_scale: Type | None = None, v_scale: Type | None = None, slopes: Type | None = None,
                         ends: Type | None = None, *, eps: float = 0.0, interleaved: bool = False, scale: float,
                         window: int | None = None, softcap: float | None = None,
                         chunked: bool = False) -> Type | tuple[Type, ...]:  # fmt: skip
    scales = k_scale, v_scale
    q_type = norm_rope_write.infer(
        q, k, v, cos, sin, q_norm, k_norm, cache, batch, *scales, eps=eps, interleaved=interleaved
    )
    return paged_attention.infer(
        q_type, cache, batch, sinks, *scales, slopes, ends, scale=scale, window=window, softcap=softcap, chunked=chunked
    )


@op(_norm_rope_attention, level=LOWERED, state=True)
def norm_rope_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                        k_norm: Tensor | None, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                        ends: Tensor | None = None, *, eps: float = 0.0, interleaved: bool = False, scale: float,
                        window: int | None = None, softcap: float | None = None,
                        chunked: bool = False) -> Tensor:  # fmt: skip
    """norm_rope_write, and paged_attention of the q that it gives, with their arguments.

    q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D], cache [blocks, block size, 2, K, D],
    sinks [N], k_scale and v_scale fp32[1], slopes fp32[N], ends i32[T] -> [T, N, D]
    """
    scales = k_scale, v_scale
    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, batch, *scales, eps=eps, interleaved=interleaved)
    return paged_attention(  # type: ignore[no-any-return]
        q, cache, batch, sinks, *scales, slopes, ends, scale=scale, window=window, softcap=softcap, chunked=chunked
    )
