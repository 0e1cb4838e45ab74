"""Ops that pool runs of tokens to entries, by learned weights (DeepSeek-AI 2026).

A run is `every` tokens, from a multiple of that on. What is pooled of a run stands in the row of its last token:

    pooled = compress(kv, gate, W("bias", fp32[4, 512]), KV("0", bf16[2, 512], window=4, part="runs"))
    pooled = rope(rms_norm(pooled, …), …)
    a = mqa_attention(q, k, KV("0", …), …, pooled, KV("0", bf16[512], every=4, part="runs"), …)

So a run needs no place of its own in a step: rows of other tokens are zeros, and nothing keeps what becomes of them.
What a run needs of the tokens before a step is kept as the last tokens of a window are: a prefix may end amid a run, a
draft may be rejected, and nothing has to be copied.

Shapes by letter: n tokens of a run, C numbers of kv and gate, D of an entry: C, or half of it where runs overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph.batch import Batch, PagedCache
from atom.graph.ops.attention import entries_of, need_batch, queried, write_entries
from atom.graph.ops.base import LOWERED, SEMANTIC, divide, op
from atom.graph.recipes import KV
from atom.graph.types import BatchType, Type, need


def pool_runs(kv: Tensor, gate: Tensor, bias: Tensor, overlaps: bool) -> Tensor:
    """kv and gate [L, C], from the begin of a run on, bias [n, C] -> fp32[L // n, D], of each whole run"""
    every, width = bias.shape
    kv, gate = (x[: len(x) // every * every].float().view(-1, every, width) for x in (kv, gate))
    gate = gate + bias.float()
    if overlaps:
        half = width // 2
        before = [
            torch.cat((torch.full_like(x[:1, :, :half], fill), x[:-1, :, :half]))
            for x, fill in ((kv, 0.0), (gate, float("-inf")))
        ]
        kv, gate = (torch.cat((first, x[..., half:]), dim=1) for first, x in zip(before, (kv, gate), strict=True))
    return (kv * gate.softmax(1)).sum(1)


def _compress(kv: Type, gate: Type, bias: Type, cache: KV, *, overlaps: bool = False) -> Type:
    need(len(kv.shape) == 2 and gate == kv, f"kv is {kv}, gate {gate}")
    need(len(bias.shape) == 2 and bias.shape[1] == kv.shape[1], f"the bias is {bias} for kv {kv}")
    window = int(bias.shape[0]) * (2 if overlaps else 1)
    need(cache.type == Type(kv.dtype, (2, kv.shape[1])), f"the cache keeps {cache.type} of kv and gate {kv}")
    need(cache.window == window, f"entries are pooled of {window} tokens, the cache keeps {cache.window or 'all'}")
    return kv.with_last(divide(kv.shape[1], 2 if overlaps else 1))


@op(_compress, level=SEMANTIC)
def compress(kv: Tensor, gate: Tensor, bias: Tensor, cache: PagedCache | None, *, overlaps: bool = False) -> Tensor:
    """Pool each run by the softmax over its tokens of gate + bias, in float32; the T tokens are one whole sequence.

    kv and gate [T, C], bias [n, C] -> [T, D]: of the last token of a run what is pooled, zeros of others. The cache,
    where a lowered graph keeps kv and gate, is not touched.

    overlaps: an entry is pooled of two runs, of the first halves of the run before and the last halves of its own;
        of the first run only of its own
    """
    every, width = bias.shape
    out = kv.new_zeros(len(kv), width // 2 if overlaps else width)
    out[every - 1 :: every] = pool_runs(kv, gate, bias, overlaps).to(kv.dtype)
    return out


def _paged_compress(kv: Type, gate: Type, bias: Type, cache: KV, batch: BatchType, *, overlaps: bool = False) -> Type:
    need_batch(batch)
    return _compress(kv, gate, bias, cache, overlaps=overlaps)


@op(_paged_compress, level=LOWERED, state=True)
def paged_compress(kv: Tensor, gate: Tensor, bias: Tensor, cache: PagedCache, batch: Batch, *,
                   overlaps: bool = False) -> Tensor:  # fmt: skip
    """Write kv and gate to the cache, then `compress` the runs of a batch's sequences that end in it.

    kv and gate [T, C], bias [n, C], cache [blocks, block size, 2, C] -> [T, D]
    """
    write_entries(cache, batch, torch.stack((kv, gate), dim=1).to(cache.blocks.dtype))
    every, width = bias.shape
    out = kv.new_zeros(len(kv), width // 2 if overlaps else width)
    for row, own in queried(batch):
        stop = int(batch.lengths[row])
        start = stop - (own.stop - own.start)
        first, last = start // every, stop // every  # runs that end here
        before = min(first, int(overlaps))  # those that these are pooled of besides
        all_kv, all_gate = entries_of(cache, batch, row, first=(first - before) * every).unbind(1)
        ends = torch.arange(first + 1, last + 1, device=kv.device) * every - 1 - start + own.start
        out[ends] = pool_runs(all_kv, all_gate, bias, overlaps)[before:].to(kv.dtype)
    return out
