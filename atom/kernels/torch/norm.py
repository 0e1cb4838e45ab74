"""RMS norms on a CPU in float32.

They take fewer calls of torch than the reference, one temporary and one rounding.

    y = rms_norm(x, weight, eps=1e-6)
    y, total = add_rms_norm(a, b, weight, eps=1e-6)

`vector_norm`, one fused reduction, computes the mean square, and `addcmul` adds eps (Zhang and Sennrich 2019).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value)  # a tensor, since torch would convert a number at every call


def normalize_(wide: Tensor, eps: float) -> Tensor:
    """fp32[..., H], divided in place by the root of its mean square over the last dim."""
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.mul_(torch.addcmul(_scalar(eps), norm, norm, value=1 / wide.shape[-1]).rsqrt_())


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]"""
    wide = x.clone() if x.dtype is torch.float32 else x.float()
    return normalize_(wide, eps).mul_(weight).to(x.dtype)


def add_rms_norm(a: Tensor, b: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """a and b [T, H], weight [H] -> rms_norm(a + b), a + b"""
    total = a + b
    return rms_norm(total, weight, eps=eps), total
