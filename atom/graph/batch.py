"""Batch and PagedCache: what ops read of a step and of a layer.

    batch = Batch({"full": table}, {"full": slots}, starts, lengths, num_decodes=2)
    out = ops.paged_attention(q, PagedCache(blocks, "full"), batch, scale=0.125)

A batch is one value of the text (`batch: Batch`), whatever kinds of cache a model has: a cache says which is its own.
Shapes by letter: S sequences, T tokens of them all, M blocks of the longest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

PREFIX_MULTIPLE = 128  # tokens, of the lengths of `SharedPrefixes`: whole tiles of any kernel


class SharedPrefixes(NamedTuple):
    """Groups of decodes whose tables begin with the same blocks, which a kernel may read once for a group.

    A hint: without it a kernel gives the same, up to rounding. Groups that are not used come last, and are empty.
    """

    kind: str  # of the tables, a state kind that keeps all tokens
    lengths: Tensor  # i32[D]: leading positions that each decode shares with its group; 0: it is in none
    members: Tensor  # i32[D]: the decodes, group by group; what follows the last group's is not read
    starts: Tensor  # i32[G + 1]: where the members of each group begin


class Batch(NamedTuple):
    """S sequences: s has queries starts[s] to starts[s + 1], the last of its lengths[s] positions."""

    tables: Mapping[str, Tensor]  # by state kind i32[S, M]: the blocks of each sequence
    slot_mappings: Mapping[str, Tensor]  # by state kind i64[T], where a token is written: block * block size + place
    starts: Tensor  # i32[S + 1]
    lengths: Tensor  # i32[S]
    num_decodes: int  # leading sequences of `query_len` queries each
    query_len: int = 1
    slots: Tensor | None = None  # i32[S], where the recurrent state of each sequence is; None: no layer has such state
    prefixes: SharedPrefixes | None = None  # of the decodes; None: they are not grouped
    block_size: int = 0  # tokens for each place in a table; 0: those of a block of any cache

    @property
    def num_single_query(self) -> int:
        """Leading sequences of one query each, which kernels for decodes take; they attend others as prompts."""
        return self.num_decodes if self.query_len == 1 else 0


class PagedCache(NamedTuple):
    """The run-time value of a `State` of the text."""

    blocks: Tensor  # [blocks, *`State.block`]
    kind: str  # of `State.kind`: its key in a batch's tables and slot mappings
