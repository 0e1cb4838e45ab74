"""Ops of shared key-value attention (DeepSeek-AI 2026): one key, also its value.

A token's entry is one vector [D], which all heads read. Keys come rotated, and so do values: what follows the attention
turns its output back. Besides tokens, heads may read what runs of tokens have together, all of it or some:

    a = mqa_attention(q, kv, KV("0", bf16[8], window=128), W("sinks"), None, pooled, KV("0", bf16[8], every=4), …)
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import (
    causal_mask,
    chosen_mask,
    entries_of,
    need_batch,
    need_every,
    need_scales,
    need_selected,
    need_sinks,
    need_window,
    queried,
    runs_mask,
    to_entry,
    write_entries,
)
from atom.graph.ops.base import LOWERED, SEMANTIC, op
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def attend_entries(q: Tensor, kv: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """q [Q, N, D], kv [L, D], mask bool[Q, L], sinks [N] -> [Q, N, D], in float32"""
    wide = kv.float()
    scores = torch.einsum("qnd,ld->nql", q.float(), wide) * scale
    scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("nql,ld->qnd", scores.softmax(-1)[..., : len(kv)], wide).to(q.dtype)


def attend_both(q: Tensor, kv: Tensor, runs: Tensor | None, selected: Tensor | None, length: int, scale: float,
                window: int | None, every: int, sinks: Tensor | None) -> Tensor:  # fmt: skip
    """q [Q, N, D] at the last Q of `length` positions, kv [L, D] of the last L, runs [C, D] -> [Q, N, D]

    selected: i32[Q, 1, k], numbers of runs; None: all that have ended
    """
    mask = causal_mask(len(q), len(kv), window, q.device)
    if runs is not None:
        ended = runs_mask(len(q), length, every, q.device)
        if selected is not None:
            ended &= chosen_mask(selected, len(runs)).squeeze(1)
        kv, mask = torch.cat((kv.float(), runs.float())), torch.cat((mask, ended), dim=1)
    return attend_entries(q, kv, mask, scale, sinks)


def _attends(q: Type, cache: KV, sinks: Type | None, k_scale: Type | None, runs: KV | None, selected: Type | None,
             window: int | None, every: int) -> Type:  # fmt: skip
    """The type of the attention's result."""
    need_window(cache, window, chunked=False)
    need_sinks(sinks, q)
    need_scales(cache, k_scale)
    need(len(q.shape) == 3 and cache.type.shape == q.shape[2:], f"q is {q}, the cache keeps {cache.type}")
    need(selected is None or runs is not None, "what is selected are runs, of which there is no cache")
    if runs is not None:
        need_every(runs, every)
        need_selected(selected, q)
        need(runs.type.shape == q.shape[2:], f"q is {q}, the cache of runs keeps {runs.type}")
    return q


def _mqa_attention(q: Type, kv: Type, cache: KV, sinks: Type | None = None, k_scale: Type | None = None,
                   pooled: Type | None = None, runs: KV | None = None, selected: Type | None = None, *, scale: float,
                   window: int | None = None, every: int = 1) -> Type:  # fmt: skip
    need(kv == Type(q.dtype, q.shape[::2]), f"q is {q}, the keys are {kv}")
    need((pooled is None) == (runs is None) and pooled in (None, kv), f"what is pooled is {pooled}, the keys are {kv}")
    return _attends(q, cache, sinks, k_scale, runs, selected, window, every)


@op(_mqa_attention, level=SEMANTIC, heads={"q": 1, "sinks": 0})
def mqa_attention(q: Tensor, kv: Tensor, cache: PagedCache | None, sinks: Tensor | None = None,
                  k_scale: Tensor | None = None, pooled: Tensor | None = None, runs: PagedCache | None = None,
                  selected: Tensor | None = None, *, scale: float, window: int | None = None,
                  every: int = 1) -> Tensor:  # fmt: skip
    """q [T, N, D], kv [T, D], sinks [N] -> [T, N, D], causal: the T tokens are one sequence.

    A query sees the window's tokens up to its own. The caches, where a lowered graph keeps kv and pooled, are not
    touched, and so the scale of entries of kv is not needed.

    pooled: [T, D], at the last token of each run of `every` its entry, see `compress`, which a query at or after that
        token sees, too; None: it sees tokens only
    selected: i32[T, 1, k], the numbers of the runs that each query sees; None: all that have ended
    """
    entries = None if pooled is None else pooled[every - 1 :: every]
    return attend_both(q, kv, entries, selected, len(q), scale, window, every, sinks)


def _write_mqa(q: Type, kv: Type, cache: KV, batch: BatchType, k_scale: Type | None = None, *, every: int = 1) -> Type:
    need_batch(batch)
    need_scales(cache, k_scale)
    need_every(cache, every)
    need(cache.type.shape == kv.shape[1:], f"the cache keeps {cache.type} of {kv}")
    return q


@op(_write_mqa, level=LOWERED, state=True)
def write_mqa(q: Tensor, kv: Tensor, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None, *,
              every: int = 1) -> Tensor:  # fmt: skip
    """Write kv [T, D], of the last token of each run, to the cache [blocks, entries of a block, D], give q [T, N, D].

    k_scale: fp32[1], of entries in fp8, see `to_entry`
    """
    write_entries(cache, batch, to_entry(kv, cache.blocks.dtype, k_scale), every)
    return q


def _paged_mqa_attention(q: Type, cache: KV, batch: BatchType, sinks: Type | None = None, k_scale: Type | None = None,
                         runs: KV | None = None, selected: Type | None = None, *, scale: float,
                         window: int | None = None, every: int = 1) -> Type:  # fmt: skip
    need_batch(batch)
    return _attends(q, cache, sinks, k_scale, runs, selected, window, every)


@op(_paged_mqa_attention, level=LOWERED)
def paged_mqa_attention(q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                        k_scale: Tensor | None = None, runs: PagedCache | None = None,
                        selected: Tensor | None = None, *, scale: float, window: int | None = None,
                        every: int = 1) -> Tensor:  # fmt: skip
    """`mqa_attention` of a batch's sequences over the blocks that their rows of the table list.

    Rows of several tokens may list blocks that other rows of the batch write, so all entries are written before.

    q [T, N, D], cache [blocks, block size, D], sinks [N], k_scale fp32[1], which multiplies entries in fp8, runs
    [blocks, entries of a block, D], selected i32[T, 1, k] -> [T, N, D]
    """
    out = torch.zeros_like(q)
    for row, own in queried(batch):
        length = int(batch.lengths[row])
        first = 0 if window is None else max(length - (own.stop - own.start) - window + 1, 0)
        kv = entries_of(cache, batch, row, first)
        kv = kv if k_scale is None else kv.float() * k_scale
        entries = None if runs is None else entries_of(runs, batch, row, every=every)
        chosen = None if selected is None else selected[own]
        out[own] = attend_both(q[own], kv, entries, chosen, length, scale, window, every, sinks)
    return out
