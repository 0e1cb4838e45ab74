"""Paged attention on NVIDIA's Hopper: Gluon kernels where they are faster, else Triton's.

attend = PagedAttention()    # one object for all layers: it owns the memory that the parts of long sequences go through
out = attend(q, cache, batch, scale=0.125)

Decodes go to decode_attention.py, prompts of many tokens to prefill_attention.py. For those a cache in fp8 is unpacked
first, as far as there is memory for that; Triton's kernel attends the rest.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from atom.graph.batch import SharedPrefixes
from atom.kernels.hopper import decode_attention, prefill_attention
from atom.kernels.triton.attention import decode, paged, prefill
from atom.kernels.triton.attention.context import PIECE, Context


class Attention(paged.Attention):
    """Dispatches to the kernels for decodes and prompts; its calls must run one after another."""

    def __init__(self, context: Context | None = None) -> None:
        """context: the memory that contexts in fp8 are unpacked to; None: of the usual size"""
        super().__init__()
        self._tickets: Tensor | None = None  # of prompts, for good: graphs hold it
        self._context = context or Context()

    def _attend_decodes(self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int,
                        sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor,
                        scale: float, window: int | None, softcap: float | None, newest: decode.Newest | None,
                        query_len: int, slopes: Tensor | None, chunked: bool,
                        prefixes: SharedPrefixes | None) -> None:  # fmt: skip
        is_simple = slopes is None and prefixes is None and not chunked
        if not (is_simple and decode_attention.suits(q, cache, num_decodes, query_len)):
            return super()._attend_decodes(q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale,
                                           window, softcap, newest, query_len, slopes, chunked, prefixes)  # fmt: skip
        assert newest is None or (query_len == 1 and k_scale is v_scale is None), "their keys are in the cache"
        find_memory = partial(self._decode.find_memory, q.device)
        return decode_attention.decode(q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale,
                                       window, softcap, newest, query_len, find_memory)  # fmt: skip

    def _attend_prompts(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor,
                        num_decodes: int, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
                        out: Tensor, scale: float, window: int | None, softcap: float | None, slopes: Tensor | None,
                        chunked: bool, ends: Tensor | None) -> None:  # fmt: skip
        if self._tickets is None:
            self._tickets = torch.zeros(2, dtype=torch.int32, device=q.device)
        num_prompts = len(lengths) - num_decodes
        is_simple = slopes is None and ends is None and not chunked
        if not (is_simple and prefill_attention.suits(q, cache, num_decodes, num_prompts, window)):
            return super()._attend_prompts(q, cache, table, starts, lengths, num_decodes, sinks, k_scale, v_scale, out,
                                           scale, window, softcap, slopes, chunked, ends)  # fmt: skip
        blocks, places, plan = cache, table, None
        if cache.dtype != q.dtype:
            blocks, places, plan = self._context.unpack(cache, table, lengths, num_decodes, q.dtype)
        prefill_attention.prefill(q, blocks, places, starts, lengths, num_decodes, sinks, k_scale, v_scale, out, scale,
                                  window, softcap, self._tickets, plan)  # fmt: skip
        if plan is not None and table.shape[1] * cache.shape[1] * num_prompts > len(blocks) * PIECE:  # may not all fit
            prefill.prefill(q, cache, table, starts, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window,
                            softcap, plan=plan)  # fmt: skip
        return None


class PagedAttention(Attention, paged.PagedAttention):
    """The op `paged_attention`."""


class NormRopeAttention(Attention, paged.NormRopeAttention):
    """The op `norm_rope_attention`."""
