"""Paged attention, and norm, rope and cache write, in C++.

    attend = PagedAttention()                                # one object for all layers, as torch's
    out = attend(q, cache, batch, scale=0.125)
    q = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, batch, eps=1e-6)

Decodes that choose blocks have a table for each key/value head, of these blocks only.

In torch, attention and the write are about ten calls each per layer, whose overhead exceeds a decode's work, and a
prompt's scores pass through memory several times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from atom.graph import Batch, PagedCache
from atom.graph.ops.block_sparse import chooses_all
from atom.kernels.backend import LoadContext
from atom.kernels.cpp.build import ATTENTION, load_library
from atom.kernels.torch import attention, rope
from atom.kernels.torch.block_sparse import chosen_tables

MAX_DIM = 512  # of a head in C++

LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_decode(Tensor q, Tensor cache, Tensor table, Tensor lengths, Tensor? sinks, float scale, float value_scale, "
    "int window, float softcap) -> Tensor"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "paged_prefill(Tensor q, Tensor cache, Tensor table, Tensor starts, Tensor lengths, Tensor? sinks, Tensor? slopes, "
    "Tensor? ends, int num_decodes, float scale, float value_scale, int window, float softcap, bool chunked) -> Tensor"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "norm_rope_write(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, "
    "Tensor(a!) cache, Tensor slots, Tensor? k_scale, Tensor? v_scale, float eps, bool interleaved) -> Tensor"
)


def load_attention(context: LoadContext) -> Any:
    return context.share(PagedAttention if load_library(ATTENTION) else attention.PagedAttention)


def load_write(_context: LoadContext) -> Any:
    return norm_rope_write if load_library(ATTENTION) else rope.norm_rope_write


class PagedAttention(attention.PagedAttention):
    """The op `paged_attention`: in C++ but for chosen blocks in prompts and slopes or chunks in decodes."""

    def __call__(self, q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                 k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                 ends: Tensor | None = None, selected: Tensor | None = None, *, scale: float,
                 window: int | None = None, softcap: float | None = None, chunked: bool = False,
                 block: int = 1) -> Tensor:  # fmt: skip
        """Shapes as in the op."""
        if selected is not None and chooses_all(selected, cache, batch, block):
            selected = None
        num_decodes = batch.num_single_query
        has_prompts = num_decodes < len(q)
        cuts_blocks = selected is not None and (has_prompts or block % cache.blocks.shape[1] > 0)
        is_other = num_decodes > 0 and (slopes is not None or chunked)
        if q.shape[2] > MAX_DIM or cuts_blocks or is_other:
            return super().__call__(q, cache, batch, sinks, k_scale, v_scale, slopes, ends, selected, scale=scale,
                                    window=window, softcap=softcap, chunked=chunked, block=block)  # fmt: skip
        of_keys, of_values = (1.0 if each is None else float(each) for each in (k_scale, v_scale))
        table, lengths, q = batch.tables[cache.kind], batch.lengths, q.contiguous()
        if selected is not None:
            table, lengths = chosen_tables(selected, cache, batch, block)
        rule = scale * of_keys, of_values, window or 0, softcap or 0.0
        if not has_prompts:
            return torch.ops.atom.paged_decode(q, cache.blocks, table, lengths, sinks, *rule)  # type: ignore[no-any-return]
        out: Tensor = torch.ops.atom.paged_prefill(
            q, cache.blocks, table, batch.starts, lengths, sinks, slopes, ends, num_decodes, *rule, chunked
        )
        if num_decodes:
            tokens = slice(num_decodes)
            out[tokens] = torch.ops.atom.paged_decode(
                q[tokens], cache.blocks, table[tokens], lengths[tokens], sinks, *rule
            )
        return out


def norm_rope_write(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                    k_norm: Tensor | None, cache: PagedCache, batch: Batch, k_scale: Tensor | None = None,
                    v_scale: Tensor | None = None, *, eps: float = 0.0,
                    interleaved: bool = False) -> Tensor:  # fmt: skip
    """Shapes as in the op. Rounds once, after the rotation."""
    return torch.ops.atom.norm_rope_write(  # type: ignore[no-any-return]
        q, k, v, cos, sin, q_norm, k_norm, cache.blocks, batch.slot_mappings[cache.kind], k_scale, v_scale, eps,
        interleaved,
    )  # fmt: skip
