"""Paged attention: sequences with one query go to the decode kernel, prompts and their chunks to the prefill kernel.

attend = PagedAttention()    # one object for all layers: it owns the memory that the parts of long sequences go through
for layer in layers:
    out = attend(q, cache, table, starts, lengths, num_decodes, scale=0.125)
"""

from __future__ import annotations

import torch
from torch import Tensor

from atom.kernels.triton import decode, prefill
from atom.kernels.triton.tiles import has_rows


class PagedAttention:
    """The op `paged_attention`. Its calls must run one after another."""

    def __init__(self, decoding: decode.Parameters | None = None, prefilling: prefill.Parameters | None = None) -> None:
        """The kernels' parameters, where others are better than their defaults."""
        self._decode, self._prefilling = decode.Decode(decoding), prefilling

    def __call__(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, num_decodes: int,
                 sinks: Tensor | None = None, *, scale: float, window: int | None = None,
                 softcap: float | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op; the rows of q may lie apart. A token of no sequence and a sequence of no positions give
        zeros."""
        assert has_rows(q) and cache.is_contiguous(), "heads and blocks must lie side by side"
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if num_decodes:
            self._decode(q, cache, table, lengths, num_decodes, sinks, out, scale, window, softcap)
        if num_decodes < len(q):
            prefill.prefill(
                q, cache, table, starts, lengths, num_decodes, sinks, out, scale, window, softcap, self._prefilling
            )
        return out
