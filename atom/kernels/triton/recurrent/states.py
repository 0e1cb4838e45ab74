"""Find the states of slots and the chunks of a step's prompts.

    state = tl.load(states + row_of(slot, length - count, KEPT) * SIZE + places)     # that a step begins with
    sequence, at = find_chunk(starts, program, num_sequences, CHUNK, SEQUENCES)      # of a grid of num_chunks(…)

States are [slots + 1, KEPT, …], that after n tokens of a sequence in row n % KEPT, see `ops.run_batch`.
"""

from __future__ import annotations

import triton.language as tl

from atom.kernels.triton.compile.jit import jit


@jit
def row_of(slot, num_tokens, KEPT: tl.constexpr):
    """The row, of those of all slots, of a slot's state after this number of tokens."""
    return slot.to(tl.int64) * KEPT + num_tokens % KEPT


@jit
def first_token(sequence, count, num_whole, KEPT: tl.constexpr):
    """The first token that goes by itself: of sequences from `num_whole` on the last KEPT - 1 do, see `chunks`."""
    return tl.where(sequence < num_whole, 0, tl.maximum(count - (KEPT - 1), 0))


def num_chunks(num_tokens: int, num_sequences: int, chunk: int) -> int:
    """Programs that take a chunk of any sequence each: at least as many as these tokens of so many sequences have."""
    return num_tokens // chunk + num_sequences


@jit
def first_chunk(starts, sequence, CHUNK: tl.constexpr):
    """The program, of those of `find_chunk`, that takes a sequence's first chunk."""
    return (tl.load(starts + sequence) - tl.load(starts)) // CHUNK + sequence


@jit
def find_chunk(starts, program, num_sequences, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence whose chunk a program takes, and the chunk's first token; beyond its tokens if there is none.

    starts: i32[num_sequences + 1]
    SEQUENCES: a power of two, from num_sequences on
    """
    sequences = tl.arange(0, SEQUENCES)
    is_there = sequences < num_sequences
    begins = tl.load(starts + sequences, mask=is_there, other=0) - tl.load(starts)
    # a sequence has at most one chunk more than the full ones that fit between its first token and the next one's
    sequence = tl.sum((is_there & (begins // CHUNK + sequences <= program)).to(tl.int32), 0) - 1
    return sequence, (program - first_chunk(starts, sequence, CHUNK)) * CHUNK
