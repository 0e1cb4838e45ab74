"""Norm, rope and cache write on a CPU, in one pass, in float32.

    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, batch, eps=1e-6)
    q_rope = norm_rope_write_latent(q_rope, latent, k_rope, cos, sin, norm, cache, batch, eps=1e-6)

q and k are concatenated, so that each operation is one call of torch; they may be strided views of one GEMM's output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.attention import to_entry, write_entries
from atom.graph.ops.latent import join_entries
from atom.kernels.torch.norm import normalize_, rms_norm


def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """q [T, N, D], k and v [T, K, D], cos and sin fp32[T, P], q_norm and k_norm [D], cache [blocks, block size, 2, K,
    D], k_scale and v_scale fp32[1] -> q [T, N, D], a view of a larger tensor. Rounds once, after the rotation.
    """
    heads = q.shape[1]
    wide = torch.cat((q, k), dim=1).float()
    if q_norm is not None and k_norm is not None:
        normalize_(wide, eps)
        wide[:, :heads].mul_(q_norm)
        wide[:, heads:].mul_(k_norm)
    if cos is not None and sin is not None:
        rotate_(wide, cos, sin, interleaved)
    rotated = wide.to(q.dtype)
    dtype = cache.blocks.dtype
    if dtype is torch.float8_e4m3fn:
        entries = torch.stack((to_entry(wide[:, heads:], dtype, k_scale), to_entry(v, dtype, v_scale)), dim=1)
    else:
        entries = torch.stack((rotated[:, heads:], v), dim=1).to(dtype)
    write_entries(cache, batch, entries)
    return rotated[:, :heads]


def norm_rope_write_latent(q_rope: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None,
                           norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None, *,
                           eps: float = 0.0, interleaved: bool = False) -> Tensor:  # fmt: skip
    """q_rope [T, N, R], latent [T, L], k_rope [T, 1, R], cos and sin fp32[T, R / 2], norm [L], cache [blocks, block
    size, E], k_scale fp32[1] -> q_rope [T, N, R], a view of a larger tensor"""
    rotated = torch.cat((q_rope, k_rope), dim=1)
    if cos is not None and sin is not None:
        wide = rotated.float()
        rotate_(wide, cos, sin, interleaved)
        rotated = wide.to(q_rope.dtype)
    if norm is not None:
        latent = rms_norm(latent, norm, eps=eps)
    write_entries(cache, batch, join_entries(latent, rotated[:, -1], cache.blocks.dtype, k_scale))
    return rotated[:, :-1]


def rotate_(wide: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate fp32[T, N, D] in place by cos and sin fp32[T, P]: dim i with i + P, or 2 i with 2 i + 1 if interleaved;
    the other dims stay (Su et al. 2021)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = wide[..., : 2 * cos.shape[-1]]
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
