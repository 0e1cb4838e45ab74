"""Layouts of a packed weight's boxes in registers: bytes, words, groups.

tile = boxes.index(0).load(BYTES)    # u8[O, 64] of a box, as the tensor cores want the numbers that it holds
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from atom.kernels.triton.linear import shuffled

BLOCK_O, BOX = gl.constexpr(shuffled.BLOCK_OUT), gl.constexpr(shuffled.BOX)
BYTES = gl.constexpr(  # a thread has 16 neighbours of two rows, 8 apart
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]],
        [], [64, 64],
    )
)  # fmt: skip
WORDS = gl.constexpr(  # as BYTES, which a thread's four words of each row are, of four blocks of 32 columns
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]], [[16, 0, 0, 0], [32, 0, 0, 0]],
        [], [64, 4, 4, 4],
    )
)  # fmt: skip
GROUPS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, WORDS.value)))  # [O, 4]: of a row the 32 columns of a word
