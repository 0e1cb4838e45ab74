"""Ops that pool runs of tokens to entries, by weights (DeepSeek-AI 2026) or evenly.

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


def pool_runs(kv: Tensor, gate: Tensor | None, bias: Tensor | None, overlaps: bool, every: int) -> Tensor:
    """kv and gate [L, C], from the begin of a run on, bias [n, C] -> fp32[L // n, D], of each whole run"""
    kv = _by_run(kv, every)
    if gate is None or bias is None:
        return kv.mean(1)
    gate, width = _by_run(gate, every) + bias.float(), kv.shape[2]
    if overlaps:
        half = width // 2
        before = [
            torch.cat((torch.full_like(x[:1, :, :half], fill), x[:-1, :, :half]))
            for x, fill in ((kv, 0.0), (gate, float("-inf")))
        ]
        kv, gate = (torch.cat((first, x[..., half:]), dim=1) for first, x in zip(before, (kv, gate), strict=True))
    return (kv * gate.softmax(1)).sum(1)


def _by_run(x: Tensor, every: int) -> Tensor:
    """[L, C] -> fp32[L // every, every, C]"""
    return x[: len(x) // every * every].float().view(-1, every, x.shape[1])


def _compress(kv: Type, gate: Type | None, bias: Type | None, cache: KV, *, overlaps: bool = False,
              every: int = 0) -> Type:  # fmt: skip
    need(len(kv.shape) == 2 and gate in (kv, None), f"kv is {kv}, gate {gate}")
    need((gate is None) == (bias is None) == (every > 0), f"the gate is {gate}, the bias {bias}, every={every}")
    need(gate is not None or not overlaps, "runs whose mean is taken do not overlap")
    need(bias is None or (len(bias.shape) == 2 and bias.shape[1] == kv.shape[1]), f"the bias is {bias} for kv {kv}")
    window = (every if bias is None else int(bias.shape[0])) * (2 if overlaps else 1)
    kept = Type(kv.dtype, (1 if gate is None else 2, kv.shape[1]))
    need(cache.type == kept, f"the cache keeps {cache.type} of kv and gate {kv}, not {kept}")
    need(cache.window == window, f"entries are pooled of {window} tokens, the cache keeps {cache.window or 'all'}")
    return kv.with_last(divide(kv.shape[1], 2 if overlaps else 1))


@op(_compress, level=SEMANTIC)
def compress(kv: Tensor, gate: Tensor | None, bias: Tensor | None, cache: PagedCache | None, *, overlaps: bool = False,
             every: int = 0) -> Tensor:  # fmt: skip
    """Pool each run by the softmax over its tokens of gate + bias, in float32; the T tokens are one whole sequence.

    kv and gate [T, C], bias [n, C] -> [T, D]: of the last token of a run what is pooled, zeros of others. The cache,
    where a lowered graph keeps kv and gate, is not touched.

    overlaps: an entry is pooled of two runs, of the first halves of the run before and the last halves of its own;
        of the first run only of its own
    every: without gate and bias, the tokens of a run, whose mean is taken
    """
    num, out = _size(bias, every), kv.new_zeros(len(kv), kv.shape[1] // 2 if overlaps else kv.shape[1])
    out[num - 1 :: num] = pool_runs(kv, gate, bias, overlaps, num).to(kv.dtype)
    return out


def _size(bias: Tensor | None, every: int) -> int:
    """The tokens of a run."""
    return every if bias is None else len(bias)


def _paged_compress(kv: Type, gate: Type | None, bias: Type | None, cache: KV, batch: BatchType, *,
                    overlaps: bool = False, every: int = 0) -> Type:  # fmt: skip
    need_batch(batch)
    return _compress(kv, gate, bias, cache, overlaps=overlaps, every=every)


@op(_paged_compress, level=LOWERED, state=True)
def paged_compress(kv: Tensor, gate: Tensor | None, bias: Tensor | None, cache: PagedCache, batch: Batch, *,
                   overlaps: bool = False, every: int = 0) -> Tensor:  # fmt: skip
    """Write kv and gate to the cache, then `compress` the runs of a batch's sequences that end in it.

    kv and gate [T, C], bias [n, C], cache [blocks, block size, 2, C], without a gate [..., 1, C] -> [T, D]
    """
    write_entries(cache, batch, to_pool(kv, gate).to(cache.blocks.dtype))
    num, out = _size(bias, every), kv.new_zeros(len(kv), kv.shape[1] // 2 if overlaps else kv.shape[1])
    for row, own in queried(batch):
        stop = int(batch.lengths[row])
        start = stop - (own.stop - own.start)
        first, last = start // num, stop // num  # runs that end here
        before = min(first, int(overlaps))  # those that these are pooled of besides
        all_kv, *gates = entries_of(cache, batch, row, first=(first - before) * num).unbind(1)
        ends = torch.arange(first + 1, last + 1, device=kv.device) * num - 1 - start + own.start
        pooled = pool_runs(all_kv, gates[0] if gates else None, bias, overlaps, num)
        out[ends] = pooled[before:].to(kv.dtype)
    return out


def to_pool(kv: Tensor, gate: Tensor | None) -> Tensor:
    """What is kept of tokens until their run ends: [T, 2, C], without a gate [T, 1, C]"""
    return kv.unsqueeze(1) if gate is None else torch.stack((kv, gate), dim=1)
