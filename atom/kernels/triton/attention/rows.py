"""Tokens of a batch, some at a time: of decodes, then of prompts.

for rows, own in split_rows("full", batch, len(q), at_once=1024):
    kernel[(rows.num,)](q[own], rows.table, rows.starts, rows.lengths, len(rows.lengths), rows.first, …)

If several tokens have an entry together, tables list the blocks of entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from atom.graph import Batch
from atom.kernels.triton.attention.common import sequence_bucket
from atom.kernels.triton.compile.jit import jit


class Rows(NamedTuple):
    """Some of a batch's tokens, and what they see: those of decodes, or of prompts."""

    table: Tensor  # i32[S, blocks of a sequence]
    starts: Tensor | None  # i32[S + 1], counted from any token before; None: each sequence has as many tokens as others
    lengths: Tensor  # i32[S]
    first: int  # of these tokens, as starts count them
    num: int
    every: int = 1  # tokens that have an entry together

    @property
    def queries(self) -> int:
        """Tokens of each sequence; 0: each has its own number."""
        return self.num // len(self.lengths) if self.starts is None else 0

    @property
    def bucket(self) -> int:
        return 1 if self.starts is None else sequence_bucket(len(self.lengths))


def split_rows(kind: str, batch: Batch, num_tokens: int, at_once: int,
               every: int = 1) -> Iterator[tuple[Rows, slice]]:  # fmt: skip
    """The tokens of decodes, then those of prompts; whole sequences of decodes, even if one has more than at_once."""
    table, num_decodes, queries = batch.tables[kind], batch.num_decodes, batch.query_len
    if every > 1 and (step := every // batch.block_size) > 1:  # an entry's block is at its last token's place
        table = table[:, step - 1 :: step].contiguous()
    decodes, at_once = max(1, at_once // queries), max(1, at_once)
    for first in range(0, num_decodes, decodes):
        some = slice(first, min(first + decodes, num_decodes))
        own = slice(some.start * queries, some.stop * queries)
        yield Rows(table[some], None, batch.lengths[some], 0, own.stop - own.start, every), own
    others = table[num_decodes:], batch.starts[num_decodes:], batch.lengths[num_decodes:]
    for first in range(num_decodes * queries, num_tokens, at_once):
        own = slice(first, min(first + at_once, num_tokens))
        yield Rows(*others, own.start, own.stop - own.start, every), own


@jit
def count_seen(starts, lengths, num_sequences, token, QUERIES: tl.constexpr, BLOCK_S: tl.constexpr,
               EVERY: tl.constexpr):  # fmt: skip
    """A token's sequence, and how many entries of EVERY tokens it sees: none if it is of no sequence."""
    if starts is None:
        sequence = token // QUERIES
        seen = tl.load(lengths + sequence) - QUERIES + token % QUERIES + 1
    else:
        sequences = tl.arange(0, BLOCK_S)
        ends = tl.load(starts + sequences + 1, mask=sequences < num_sequences, other=0x7FFFFFFF)
        sequence = tl.sum((ends <= token).to(tl.int32), 0)
        is_there = sequence < num_sequences
        end = tl.load(starts + sequence + 1, mask=is_there, other=0)
        seen = tl.load(lengths + sequence, mask=is_there, other=0) - (end - token) + 1
        seen = tl.where(is_there, seen, 0)
    return sequence, tl.maximum(seen, 0) // EVERY
