"""Attention over a paged cache, and writes to it, by AITER's Triton kernels.

They accept strides of keys and values, so both are views of atom's cache [blocks, block size, 2, K, D]. AITER's
assembly kernels need separate tensors of keys and values, packed by 16 bytes, and are not called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.kernels.aiter.functions import Aiter
from atom.kernels.aiter.linear import rms_norm


def norm_rope_write(aiter: Aiter, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """cos and sin fp32[T, D / 2]: a row per token, so the position passed for a token is its index."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(aiter, q, q_norm, eps=eps), rms_norm(aiter, k, k_norm, eps=eps)
    _, _, both, heads, dim = cache.blocks.shape
    # blocks of one entry, since AITER needs powers of two: a slot is a block
    keys, values = cache.blocks.view(-1, 1, both, heads, dim).unbind(2)
    places = torch.arange(len(q), device=q.device)
    rotated, *_ = aiter["rope_and_write"](
        q, k, v, keys, values, batch.slot_mappings[cache.kind], places, cos, sin, k_scale, v_scale,
        not interleaved, True, output_zeros=False,
    )  # fmt: skip
    return rotated  # type: ignore[no-any-return]


def paged_attention(aiter: Aiter, q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                    k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, scale: float,
                    window: int | None = None, softcap: float | None = None) -> Tensor:  # fmt: skip
    keys, values = cache.blocks.unbind(2)
    table, out = batch.tables[cache.kind], torch.zeros_like(q)
    # the host knows only bounds of the longest, which affect the choice of a kernel, not the result
    longest = 1 if batch.num_single_query == len(batch.lengths) else len(q)
    left = -1 if window is None else window - 1
    aiter["attention"](
        q, keys, values, out, batch.starts, longest, batch.lengths, table.shape[1] * keys.shape[1], scale, True,
        (left, -1 if window is None else 0), table, softcap or 0.0, None, k_scale, v_scale, sinks=sinks,
    )  # fmt: skip
    return out


def norm_rope_attention(aiter: Aiter, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
                        k_norm: Tensor | None, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, v_scale: Tensor | None = None, *, eps: float = 0.0,
                        interleaved: bool = False, scale: float, window: int | None = None,
                        softcap: float | None = None) -> Tensor:  # fmt: skip
    scales = k_scale, v_scale
    q = norm_rope_write(
        aiter, q, k, v, cos, sin, q_norm, k_norm, cache, batch, *scales, eps=eps, interleaved=interleaved
    )
    return paged_attention(aiter, q, cache, batch, sinks, *scales, scale=scale, window=window, softcap=softcap)
