"""Norm, rotary position and cache write in one pass over q and k together, in place in float32.

    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, slots, eps=1e-6)

q and k are joined, so that each step is one call of torch for both; they may be strided views of one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.kernels.torch.norm import normalize_


def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: Tensor, slots: Tensor, *, eps: float = 0.0) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D] -> q [T, N, D], a view of more;
    cache [blocks, block size, 2, K, D], slots i64[T]. Rounds once, after the rotation.
    """
    heads = q.shape[1]
    wide = torch.cat((q, k), dim=1).float()
    if q_norm is not None and k_norm is not None:
        normalize_(wide, eps)
        wide[:, :heads].mul_(q_norm)
        wide[:, heads:].mul_(k_norm)
    if cos is not None and sin is not None:
        rotate_(wide, cos.unsqueeze(1), sin.unsqueeze(1))
    turned = wide.to(q.dtype)
    entries = torch.stack((turned[:, heads:], v), dim=1).to(cache.dtype)
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, entries)
    return turned[:, :heads]


def rotate_(wide: Tensor, cos: Tensor, sin: Tensor) -> None:
    """fp32[T, N, D] in place: dim i turns with dim i + P by cos and sin fp32[T, 1, P], others stay (Su et al. 2021)."""
    first, second = wide[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
