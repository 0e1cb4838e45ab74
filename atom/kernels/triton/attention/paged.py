"""Paged attention: dispatch decodes and prompts to their kernels.

Prompts may be chunks of prompts. Queries that choose blocks go to block_sparse.py.

attend = PagedAttention()    # one object for all layers: it owns the memory that the parts of long sequences go through
for layer in layers:
    out = attend(q, cache, batch, scale=0.125)

attend = NormRopeAttention()    # with norm, rotation and cache write: one launch if all are decodes
out = attend(q, k, v, cos, sin, q_norm, k_norm, cache, batch, eps=1e-6, scale=0.1)
"""

from __future__ import annotations

from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.batch import SharedPrefixes
from atom.graph.ops.block_sparse import chooses_all
from atom.kernels.triton.attention import block_sparse, decode, prefill, shared_prefix
from atom.kernels.triton.attention.common import has_rows
from atom.kernels.triton.attention.rope import norm_rope_write
from atom.kernels.triton.padded_alloc import new_rows


def find_prefixes(cache: PagedCache, batch: Batch, slopes: Tensor | None, window: int | None) -> SharedPrefixes | None:
    """The prefixes that decodes share in this cache, if the kernel for them has what this call needs."""
    prefixes = batch.prefixes
    is_fit = prefixes is not None and prefixes.kind == cache.kind and slopes is None and window is None
    return prefixes if is_fit and batch.num_decodes else None


class Attention:
    """Dispatches to the decode and prefill kernels; its calls must run one after another."""

    def __init__(self, decoding: decode.Parameters | None = None, prefilling: prefill.Parameters | None = None,
                 sharing: shared_prefix.Tiling | None = None) -> None:  # fmt: skip
        """The kernels' parameters, None for their defaults."""
        self._decode, self._prefilling = decode.Decode(decoding), prefilling
        self._attend_prefixes = shared_prefix.PrefixAttention(sharing)

    def _attend(self, q: Tensor, rotated: Tensor, newest: decode.Newest | None, cache: PagedCache, batch: Batch,
                sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, slopes: Tensor | None,
                ends: Tensor | None, scale: float, window: int | None, softcap: float | None,
                chunked: bool) -> Tensor:  # fmt: skip
        """Decodes have their queries in q, prompts in rotated. A token of no sequence and a sequence of no positions
        give zeros."""
        blocks, table, num_decodes = cache.blocks, batch.tables[cache.kind], batch.num_decodes
        assert has_rows(q) and blocks.is_contiguous(), "heads and blocks must lie side by side"
        out = new_rows(q, *q.shape)
        if num_decodes:
            self._attend_decodes(q, blocks, table, batch.lengths, num_decodes, sinks, k_scale, v_scale, out, scale,
                                 window, softcap, newest, batch.query_len, slopes, chunked,
                                 find_prefixes(cache, batch, slopes, window))  # fmt: skip
        if num_decodes * batch.query_len < q.shape[0]:
            starts, num_more = batch.starts, num_decodes * (batch.query_len - 1)
            if num_more:  # it takes decodes to have one query each
                starts = starts - num_more
                ends = None if ends is None else ends[num_more:]
            self._attend_prompts(rotated[num_more:], blocks, table, starts, batch.lengths, num_decodes, sinks, k_scale,
                                 v_scale, out[num_more:], scale, window, softcap, slopes, chunked, ends)  # fmt: skip
        return out

    def _attend_decodes(self, q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, num_decodes: int,
                        sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor,
                        scale: float, window: int | None, softcap: float | None, newest: decode.Newest | None,
                        query_len: int, slopes: Tensor | None, chunked: bool,
                        prefixes: SharedPrefixes | None) -> None:  # fmt: skip
        """As `decode.Decode`, which attends after the shared prefixes, if any."""
        shared = None
        if prefixes is not None:
            parts = self._attend_prefixes(q, cache, table, prefixes, k_scale, scale, softcap, query_len)
            shared = prefixes.lengths, parts
        self._decode(q, cache, table, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window, softcap,
                     newest, query_len, slopes, chunked, *(shared or ()))  # fmt: skip

    def _attend_prompts(self, q: Tensor, cache: Tensor, table: Tensor, starts: Tensor, lengths: Tensor,
                        num_decodes: int, sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
                        out: Tensor, scale: float, window: int | None, softcap: float | None, slopes: Tensor | None,
                        chunked: bool, ends: Tensor | None) -> None:  # fmt: skip
        """As `prefill.prefill`."""
        prefill.prefill(q, cache, table, starts, lengths, num_decodes, sinks, k_scale, v_scale, out, scale, window,
                        softcap, self._prefilling, slopes=slopes, chunked=chunked, ends=ends)  # fmt: skip


class PagedAttention(Attention):
    def __call__(self, q: Tensor, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                 k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                 ends: Tensor | None = None, selected: Tensor | None = None, *, scale: float,
                 window: int | None = None, softcap: float | None = None, chunked: bool = False,
                 block: int = 1) -> Tensor:  # fmt: skip
        """Shapes as in the op; the rows of q may lie apart."""
        if selected is not None and not chooses_all(selected, cache, batch, block):
            assert has_rows(q) and cache.blocks.is_contiguous(), "heads and blocks must lie side by side"
            out = new_rows(q, *q.shape)
            block_sparse.attend_blocks(q, cache, batch, selected, sinks, k_scale, v_scale, out, scale, softcap, block)
            return out
        return self._attend(q, q, None, cache, batch, sinks, k_scale, v_scale, slopes, ends, scale, window, softcap,
                            chunked)  # fmt: skip


class NormRopeAttention(Attention):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, q_norm: Tensor | None,
                 k_norm: Tensor | None, cache: PagedCache, batch: Batch, sinks: Tensor | None = None,
                 k_scale: Tensor | None = None, v_scale: Tensor | None = None, slopes: Tensor | None = None,
                 ends: Tensor | None = None, *, eps: float = 0.0, interleaved: bool = False, scale: float,
                 window: int | None = None, softcap: float | None = None,
                 chunked: bool = False) -> Tensor:  # fmt: skip
        """Shapes as in the op; the rows of q, k and v may lie apart. A token's key is written whether it has a sequence
        or not."""
        assert has_rows(k) and has_rows(v), "heads must lie side by side"
        assert cos is None or sin is None or (cos.is_contiguous() and sin.is_contiguous()), "cos and sin have gaps"
        # a prefix's queries are rotated for all kernels first
        prefixes = find_prefixes(cache, batch, slopes, window)
        is_one_launch = batch.query_len == 1 and cache.blocks.element_size() > 1 and prefixes is None
        rotated, newest = q, None
        if (
            not is_one_launch or batch.num_decodes < q.shape[0]
        ):  # those of decodes too, which in such a step costs nothing
            rotated = norm_rope_write(q, k, v, cos, sin, q_norm, k_norm, cache, batch, k_scale, v_scale, eps=eps,
                                      interleaved=interleaved)  # fmt: skip
        if is_one_launch:
            newest = decode.Newest(k, v, cos, sin, q_norm, k_norm, batch.slot_mappings[cache.kind], eps, interleaved)
        decoding = rotated if newest is None else q
        return self._attend(decoding, rotated, newest, cache, batch, sinks, k_scale, v_scale, slopes, ends, scale,
                            window, softcap, chunked)  # fmt: skip
