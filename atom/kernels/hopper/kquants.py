"""Unpack boxes of GGUF's K-quants into the left operand of tensor cores.

    codes = load_codes(scales, factors, high, blocks, box, NUM, "u6k")    # of a box, a stage ahead
    even, odd = unpack_codes(tile, codes, "u6k")                          # u8[O, 64] -> bf16[O, 64] twice

Numbers are scaled and get their minima in registers, rounded to bf16, so that sums need no scales. A bf16 of 8 bits
without a sign is an integer, 2^133 times too small: so a number is where it is stored, or 2^k times larger, and one
instruction scales it and adds its minimum. All are 2^EXPONENT times too small, as are the sums.

Of a number of more than 4 bits the others are in a plane of their own, `high`, of which a thread has a word or two for
32 numbers of a row; rotated, the word has them next to the 4 bits (shuffle.py).
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl

from atom.kernels.hopper.boxes import BLOCK_O, BOX, BYTES, GROUPS, WORDS
from atom.kernels.hopper.gluon import jit
from atom.kernels.triton.linear.weight_encoding import KQUANTS

ROWS = gl.constexpr(gl.SliceLayout(1, GROUPS.value))
THREADS = gl.constexpr(gl.SliceLayout(2, gl.SliceLayout(3, WORDS.value)))  # [O, 4]: of a row the threads that share it
EXPONENT = gl.constexpr(64)
INTEGER = gl.constexpr(133)  # the exponent of an integer's bits as a bf16

# The two numbers in the lower bytes of each half of a word, then those in the upper bytes: the first is where it is
# stored, the second 2^LEFT times larger. $5 is the scale, $9 the minimum, as pairs of bf16.
U4_ASM = gl.constexpr("""{
.reg .b32 a, b, c, d, e, h;
mov.b32 h, 0x3d803d80;
mul.rn.bf16x2 h, $5, h;
shr.u32 e, $4, 8;
and.b32 a, $4, 0x000f000f;
and.b32 b, $4, 0x00f000f0;
and.b32 c, e, 0x000f000f;
and.b32 d, e, 0x00f000f0;
fma.rn.bf16x2 $0, a, $5, $9;
fma.rn.bf16x2 $1, b, h, $9;
fma.rn.bf16x2 $2, c, $5, $9;
fma.rn.bf16x2 $3, d, h, $9;
}""")
# $13 has the other bits, which a rotation by $17 and one by MORE bits more put where they belong
HIGH_ASM = """
.reg .b32 a, b, c, d, e, f, g, r;
add.u32 r, $17, MORE;
shf.r.wrap.b32 f, $13, $13, $17;
shf.r.wrap.b32 g, $13, $13, r;
shr.u32 e, $4, 8;
and.b32 a, f, FIRST;
and.b32 b, f, SECOND;
and.b32 c, g, FIRST;
and.b32 d, g, SECOND;
lop3.b32 a, $4, 0x000f000f, a, 0xEA;
lop3.b32 b, $4, 0x00f000f0, b, 0xEA;
lop3.b32 c, e, 0x000f000f, c, 0xEA;
lop3.b32 d, e, 0x00f000f0, d, 0xEA;
"""
U5_ASM = gl.constexpr(
    "{" + HIGH_ASM.replace("MORE", "2").replace("FIRST", "0x00100010").replace("SECOND", "0x00080008")
    + """.reg .b32 h;
mov.b32 h, 0x3e003e00;
mul.rn.bf16x2 h, $5, h;
fma.rn.bf16x2 $0, a, $5, $9;
fma.rn.bf16x2 $1, b, h, $9;
fma.rn.bf16x2 $2, c, $5, $9;
fma.rn.bf16x2 $3, d, h, $9;
}"""
)  # fmt: skip
# $9 is the scale of the upper bytes' numbers; all are 32 larger than they should be
U6_ASM = gl.constexpr(
    "{" + HIGH_ASM.replace("MORE", "4").replace("FIRST", "0x00300030").replace("SECOND", "0x000c000c")
    + """.reg .b32 h, i, m, n;
mov.b32 i, 0x3e803e80;
mov.b32 n, 0x80208020;
mul.rn.bf16x2 h, $5, i;
mul.rn.bf16x2 i, $9, i;
mul.rn.bf16x2 m, $5, n;
mul.rn.bf16x2 n, $9, n;
fma.rn.bf16x2 $0, a, $5, m;
fma.rn.bf16x2 $1, b, h, m;
fma.rn.bf16x2 $2, c, $9, n;
fma.rn.bf16x2 $3, d, i, n;
}"""
)  # fmt: skip
# a byte of a code by its factor, as a pair of bf16; $3 is what the byte's bits as a float are larger by, by the factor
CODE_ASM = """{
.reg .b32 a;
.reg .f32 b;
prmt.b32 a, $1, 0x4B000000, SELECTOR;
mov.b32 b, a;
fma.rn.f32 b, b, $2, $3;
cvt.rn.bf16x2.f32 $0, b, b;
}"""
FIRST_ASM = gl.constexpr(CODE_ASM.replace("SELECTOR", "0x7440"))
SECOND_ASM = gl.constexpr(CODE_ASM.replace("SELECTOR", "0x7441"))


@triton.constexpr_function
def is_kquant(VALUES):
    return VALUES in KQUANTS


@jit
def load_codes(scales, factors, high, blocks, box, NUM: gl.constexpr, VALUES: gl.constexpr):
    """What a box is unpacked with, as it is stored: the codes of its groups, i64[O], factors [O], and other bits.

    blocks: where the codes of each row begin, of which it has NUM
    """
    own = gl.minimum(box, NUM - 1)
    place = gl.convert_layout(blocks, ROWS) + own
    codes, factor = gl.load(scales + place), gl.load(factors + place // 2)
    if VALUES == "u4k":
        return codes, factor
    else:
        thread = gl.arange(0, 4, layout=gl.SliceLayout(0, THREADS))
        rows = gl.expand_dims(gl.convert_layout(blocks, gl.SliceLayout(1, THREADS)), 1)
        return codes, factor, gl.load(high + (rows + own) * 4 + thread[None, :])


@jit
def unpack_codes(tile, codes, VALUES: gl.constexpr):
    """Bytes [O, 64] of a box -> its numbers by the halves of bytes, see packed_linear.py. codes: of `load_codes`"""
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))
    UP: gl.constexpr = 2.0 ** (INTEGER - EXPONENT)
    if VALUES == "u6k":
        own = (gl.expand_dims(codes[0] ^ -0x7F7F7F7F7F7F7F80, 1) >> (group * 16)[None, :]).to(gl.int32)
        factor = codes[1].to(gl.float32) * UP
        first = _pair_codes(own, factor, 128, FIRST_ASM)
        second = _pair_codes(own, factor, 128, SECOND_ASM)
    else:
        own = (gl.expand_dims(codes[0], 1) >> (group * 16)[None, :]).to(gl.int32)
        first = _pair_codes(own, _half(codes[1]) * UP, 0, FIRST_ASM)
        second = _pair_codes(own, _half(codes[1] >> 16) * 2.0**-EXPONENT, 0, SECOND_ASM)
    if VALUES == "u4k":
        return gl.inline_asm_elementwise(
            U4_ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [tile, first, second], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        ASM: gl.constexpr = U5_ASM if VALUES == "u5k" else U6_ASM
        words, rotations = _spread_words(codes[2], VALUES)
        return gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [tile, first, second, words, rotations],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip


@jit
def _half(bits):
    """The lower 16 bits as the fp16 that they are, in fp32."""
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@jit
def _pair_codes(codes, factor, MORE: gl.constexpr, ASM: gl.constexpr):
    """A byte of codes [O, 4] less MORE by the factors [O] as pairs of bf16, i32[O, 64], each for its group's bytes."""
    wide = gl.expand_dims(factor, 1).broadcast_to([BLOCK_O, 4])
    less = gl.expand_dims(factor * -(2.0**23 + MORE), 1).broadcast_to([BLOCK_O, 4])
    pairs = gl.inline_asm_elementwise(ASM, "=r,r,r,r", [codes, wide, less], dtype=gl.int32, is_pure=True, pack=1)
    return _spread(gl.expand_dims(pairs, 1))


@jit
def _spread_words(high, VALUES: gl.constexpr):
    """The word with the other bits of each byte's numbers, i32[O, 64], and by how much it is rotated first."""
    IN_WORD: gl.constexpr = 4 if VALUES == "u5k" else 2  # groups
    group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, WORDS))))
    group = gl.expand_dims(gl.expand_dims(group, 0), 0)
    words = gl.expand_dims(high, 2)
    if VALUES == "u6k":
        words = (words >> (group // IN_WORD * 32)).to(gl.int32)
    rotations = group % IN_WORD * (16 // IN_WORD)
    return _spread(words), _spread(rotations)


@jit
def _spread(values):
    """Values of [O, threads, groups], of which dims may be 1, for each byte of a box: [O, 64]."""
    values = gl.expand_dims(values, 3).broadcast_to([BLOCK_O, 4, 4, 4])
    return gl.convert_layout(values.reshape([BLOCK_O, BOX]), BYTES)
