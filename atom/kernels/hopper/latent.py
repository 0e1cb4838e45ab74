"""Latent attention on NVIDIA's Hopper: long prompts attend to expanded keys and values.

    attend = PagedLatentAttention()    # one object for all layers: it owns the memory that prompts are expanded to
    out = attend(q_nope, q_rope, kv_b, cache, batch, scale=0.1)

Entries are expanded (expand.py) for those prompts for which that multiplies less, which go to prefill_attention.py.
Decodes, few tokens and all other prompts are absorbed, by Triton's kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.kernels.hopper import chosen_attention, prefill_attention
from atom.kernels.triton.attention import latent
from atom.kernels.triton.attention.expand import Expansion
from atom.kernels.triton.attention.rows import Rows


class PagedLatentAttention(latent.PagedLatentAttention):
    """The op `paged_mla_attention`; its calls must run one after another."""

    def __init__(self) -> None:
        self._expansion = Expansion()
        self._tickets: Tensor | None = None  # of prompts, for good: graphs hold it

    def _sum_chosen(self, q: Tensor, q_rope: Tensor, cache: Tensor, k_scale: Tensor | None, rows: Rows,
                    selected: Tensor, sinks: Tensor | None, scale: float) -> latent.Sums:  # fmt: skip
        if sinks is None and chosen_attention.suits(q, q_rope, cache):
            return latent.Sums(*chosen_attention.attend_chosen(q, q_rope, cache, rows, selected, scale))
        return super()._sum_chosen(q, q_rope, cache, k_scale, rows, selected, sinks, scale)

    def _attend_expanded(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: PagedCache, batch: Batch,
                         k_scale: Tensor | None, scale: float, out: Tensor) -> Tensor | None:  # fmt: skip
        blocks, plain, rotated, num_decodes = cache.blocks, q_nope.shape[2], q_rope.shape[2], batch.num_decodes
        if not suits(q_nope, q_rope, weight, blocks, len(q_nope) - num_decodes * batch.query_len):
            return None
        if self._tickets is None:
            self._tickets = torch.zeros(2, dtype=torch.int32, device=q_nope.device)
        keys, table = latent.view_keys(blocks, q_rope.dtype), batch.tables[cache.kind]
        starts, num_more = batch.starts, num_decodes * (batch.query_len - 1)
        if num_more:  # it takes decodes to have one query each
            starts = starts - num_more
        sequences = starts, batch.lengths, num_decodes
        for some in self._expansion.split(weight, rotated):
            expanded = self._expansion.expand(blocks, keys, k_scale, table, *sequences, weight[some], plain, rotated)
            prefill_attention.prefill_expanded(q_nope[num_more:, some], q_rope[num_more:, some], *expanded, *sequences,
                                               out[num_more:, some], scale, self._tickets)  # fmt: skip
        return expanded.plan[num_decodes:]


def suits(q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: Tensor, num_tokens: int) -> bool:
    """Whether this many tokens of prompts are expanded, if it pays, for the kernel of prefill_attention.py."""
    (_, _, plain), rotated, value = q_nope.shape, q_rope.shape[2], weight.shape[1] - q_nope.shape[2]
    return (
        q_nope.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype in (q_nope.dtype, torch.float8_e4m3fn)
        and num_tokens > prefill_attention.FEW_TOKENS
        and (plain, rotated, value) == (128, 64, 128)
    )
