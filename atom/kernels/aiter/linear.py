"""Norms, gates and linears by AITER's functions.

y = linear(aiter, h, weight)                                    # bf16
y = norm_linear(aiter, x, norm, packed, eps=eps, act="fp8[1, *]")   # norm and quantization are one kernel
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import PackedWeight
from atom.kernels.aiter.functions import Aiter


def rms_norm(aiter: Aiter, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # heads of a joined GEMM are strided
    return aiter["rms_norm"](rows, weight, eps).view(x.shape)  # type: ignore[no-any-return]


def add_rms_norm(aiter: Aiter, a: Tensor, b: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = (torch.empty_like(a, memory_format=torch.contiguous_format) for _ in range(2))
    aiter["add_rms_norm"](normed, a.contiguous(), b.contiguous(), total, weight, eps)
    return normed, total


def gated_activate(aiter: Aiter, x: Tensor, *, kind: str, limit: float | None = None,
                   alpha: float | None = None) -> Tensor:  # fmt: skip
    """kind is silu"""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    aiter["silu_and_mul"](out, x.contiguous())
    return out


def linear(aiter: Aiter, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *,
           act: str | None = None) -> Tensor:  # fmt: skip
    if not isinstance(weight, PackedWeight):
        return aiter["linear"](x.contiguous(), weight, bias)  # type: ignore[no-any-return]
    values, x = weight.parts["values"], x.contiguous()
    if _is_by_token(act):
        quantized, scales = aiter["quantize_tokens"](x, quant_dtype=values.dtype)
    else:
        quantized, scales = aiter["quantize_spans"](x, quant_dtype=values.dtype, group_size=128, transpose_scale=True)
    return _multiply(aiter, quantized, scales, weight, bias, act, x.dtype)


def gated_linear(aiter: Aiter, x: Tensor, weight: Tensor | PackedWeight, *, kind: str,
                 act: str | None = None) -> Tensor:  # fmt: skip
    return gated_activate(aiter, linear(aiter, x, weight, act=act), kind=kind)


def norm_linear(aiter: Aiter, x: Tensor, norm: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *,
                eps: float, kind: str | None = None, act: str | None = None) -> Tensor:  # fmt: skip
    if isinstance(weight, PackedWeight) and _is_by_token(act):
        quantized, scales = _rows_for(x, weight)
        aiter["rms_norm_quantize"](quantized, x.contiguous(), scales, norm, eps)
        y = _multiply(aiter, quantized, scales, weight, bias, act, x.dtype)
    else:
        y = linear(aiter, rms_norm(aiter, x, norm, eps=eps), weight, bias, act=act)
    return y if kind is None else gated_activate(aiter, y, kind=kind)


def add_norm_linear(aiter: Aiter, a: Tensor, b: Tensor, norm: Tensor, weight: Tensor | PackedWeight,
                    bias: Tensor | None = None, *, eps: float, kind: str | None = None,
                    act: str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    if isinstance(weight, PackedWeight) and _is_by_token(act):
        quantized, scales = _rows_for(a, weight)
        total = torch.empty_like(a, memory_format=torch.contiguous_format)
        aiter["add_rms_norm_quantize"](quantized, a.contiguous(), b.contiguous(), total, scales, norm, eps)
        y = _multiply(aiter, quantized, scales, weight, bias, act, a.dtype)
    else:
        normed, total = add_rms_norm(aiter, a, b, norm, eps=eps)
        y = linear(aiter, normed, weight, bias, act=act)
    return (y if kind is None else gated_activate(aiter, y, kind=kind)), total


def _is_by_token(act: str | None) -> bool:
    return act == "fp8[1, *]"


def _rows_for(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """Memory for rows in the fp8 of a weight, and for their scales."""
    dtype = weight.parts["values"].dtype
    return torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(len(x), 1, dtype=torch.float32)


def _multiply(
    aiter: Aiter, quantized: Tensor, scales: Tensor, weight: PackedWeight, bias: Tensor | None, act: str | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    name = "linear_by_token" if _is_by_token(act) else "linear_by_block"
    y: Tensor = aiter[name](quantized, weight.parts["values"], scales, weight.parts["scales"], dtype=dtype)
    return y if bias is None else y.add_(bias)
