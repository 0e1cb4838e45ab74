"""Find the states of a slot, of which it keeps the last ones.

    state = tl.load(states + row_of(slot, length - count, KEPT) * SIZE + places)     # that a step begins with

States are [slots + 1, KEPT, …], that after n tokens of a sequence in row n % KEPT, see `ops.run_batch`.
"""

from __future__ import annotations

import triton.language as tl

from atom.kernels.triton.compile.jit import jit


@jit
def row_of(slot, num_tokens, KEPT: tl.constexpr):
    """The row, of those of all slots, of a slot's state after this number of tokens."""
    return slot.to(tl.int64) * KEPT + num_tokens % KEPT
