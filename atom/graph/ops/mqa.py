"""Ops of shared key-value attention (DeepSeek-AI 2026).

All heads read one key, which is its value, too. A token's entry is one vector [D]. Keys come rotated, and so do values:
what follows the attention turns its output back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import (
    attend,
    cached_entries,
    need_batch,
    need_scales,
    need_sinks,
    need_window,
    to_entry,
    write_entries,
)
from atom.graph.ops.base import LOWERED, SEMANTIC, op
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def _entries(q: Type, cache: KV, sinks: Type | None, k_scale: Type | None, window: int | None) -> Type:
    """The type of the attention's result."""
    need_window(cache, window, chunked=False)
    need_sinks(sinks, q)
    need_scales(cache, k_scale)
    need(len(q.shape) == 3 and cache.type.shape == q.shape[2:], f"q is {q}, the cache keeps {cache.type}")
    return q


def _mqa_attention(q: Type, kv: Type, cache: KV, sinks: Type | None = None, k_scale: Type | None = None, *,
                   scale: float, window: int | None = None) -> Type:  # fmt: skip
    need(kv == Type(q.dtype, q.shape[::2]), f"q is {q}, the keys are {kv}")
    return _entries(q, cache, sinks, k_scale, window)


@op(_mqa_attention, level=SEMANTIC, heads={"q": 1, "sinks": 0})
def mqa_attention(q: Tensor, kv: Tensor, cache: PagedCache | None, sinks: Tensor | None = None,
                  k_scale: Tensor | None = None, *, scale: float, window: int | None = None) -> Tensor:  # fmt: skip
    """q [T, N, D], kv [T, D], sinks [N] -> [T, N, D], causal: the T tokens are one sequence.

    A query sees the window's tokens up to its own. The cache, where a lowered graph keeps kv, is not touched, and so
    the scale of its entries is not needed.
    """
    return attend(q, kv.unsqueeze(1), kv.unsqueeze(1), scale, window, sinks=sinks)


def _write_mqa(q: Type, kv: Type, cache: KV, batch: BatchType, k_scale: Type | None = None) -> Type:
    need_batch(batch)
    need_scales(cache, k_scale)
    need(cache.type.shape == kv.shape[1:], f"the cache keeps {cache.type} of {kv}")
    return q


@op(_write_mqa, level=LOWERED, state=True)
def write_mqa(q: Tensor, kv: Tensor, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None) -> Tensor:
    """Write kv [T, D] to the cache [blocks, block size, D], give q [T, N, D] as it is.

    k_scale: fp32[1], of entries in fp8, see `to_entry`
    """
    write_entries(cache, batch, to_entry(kv, cache.blocks.dtype, k_scale))
    return q


def _paged_mqa_attention(q: Type, cache: KV, batch: BatchType, sinks: Type | None = None, k_scale: Type | None = None,
                         *, scale: float, window: int | None = None) -> Type:  # fmt: skip
    need_batch(batch)
    return _entries(q, cache, sinks, k_scale, window)


@op(_paged_mqa_attention, level=LOWERED)
def paged_mqa_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, *, scale: float,
                        window: int | None = None) -> Tensor:  # fmt: skip
    """`mqa_attention` of a batch's sequences over the blocks that their rows of the table list.

    Rows of several tokens may list blocks that other rows of the batch write, so all entries are written before.

    q [T, N, D], cache [blocks, block size, D], sinks [N], k_scale fp32[1], which multiplies entries in fp8 -> [T, N, D]
    """
    out = torch.zeros_like(q)
    for own, entries in cached_entries(cache, batch):
        keys = (entries if k_scale is None else entries.float() * k_scale).unsqueeze(1)
        out[own] = attend(q[own], keys, keys, scale, window, sinks=sinks)
    return out
