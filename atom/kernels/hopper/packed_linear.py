"""GEMM of few rows by packed weights on NVIDIA's Hopper, in Gluon.

    y = multiply(x, weight, bias, gate, counters, tiles)    # x [T, I], a shuffled weight [O, I] -> [T, O]
    y = multiply_grouped(x, weight, ends, bias, gate, counters, tiles)    # x [P, I], sorted by expert, weight [E, O, I]

A program has BLOCK_O rows of the weight and some rows of x. Boxes of both come by TMA, some stages ahead; those of the
weight while the kernel ahead still runs. A group of warps unpacks a box into the registers of the left operand, where
hopper/shuffle.py has its columns lie as the tensor cores want them: wgmma, or for 8 rows mma, which takes less time for
so few. Columns that share a scale are summed up by themselves in float32. Rounding is as in linear.py.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.graph import PackedWeight
from atom.kernels.hopper.boxes import BLOCK_O, BOX, BYTES, GROUPS
from atom.kernels.hopper.gluon import EVEN_ODD_FP8_PTX, async_load, barrier, jit, reinterpret
from atom.kernels.hopper.kquants import EXPONENT, INTEGER, is_kquant, load_codes, unpack_codes
from atom.kernels.hopper.kquants import U4_ASM as FMA_U4_ASM
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors, align_rows
from atom.kernels.triton.activations import Gate, activate_rounded, constants_of
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.weight_encoding import SPANS, encoding_of_weight
from atom.kernels.triton.padded_alloc import new_rows, readable_rows

WEIGHT = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
GATED = gl.constexpr(gl.NVMMASharedLayout(64, 8, 4))  # of 16 rows each 8 gate projections, then their up projections
EXPONENTS = gl.constexpr(gl.NVMMASharedLayout(32, 32, 3))  # words of 8 rows, by boxes and by 8 rows
GATED_EXPONENTS = gl.constexpr(gl.NVMMASharedLayout(32, 32, 4))
UP_EXPONENT = gl.constexpr(32)
# byte $2 of a word of exponents -> what unpacks by it, see _find_factor
EXPONENT_ASM = gl.constexpr("""{
.reg .b32 a;
prmt.b32 a, $1, 0, $2;
mad.lo.u32 $0, a, 0x00800080, 0x2f002f00;
}""")
OUTPUTS = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))  # to store by

PAIR_ASM = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
OCTETS = gl.constexpr(  # i32[8, 1, 8] of scales: as GROUPS has their rows
    gl.DistributedLinearLayout(
        [[1, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[2, 0, 0], [4, 0, 0]], [], [8, 1, 8]
    )
)

# of 4 bytes, as bf16; the exponents of e4m3 and e2m1 are those of bf16 less a power of 2
U4_PTX = """{
.reg .b32 a, b, c, d, e;
mov.b32 e, 0x43004300;
shr.u32 b, $4, 4;
shr.u32 c, $4, 8;
shr.u32 d, $4, 12;
lop3.b32 a, $4, 0x000f000f, e, 0xEA;
lop3.b32 b, b, 0x000f000f, e, 0xEA;
lop3.b32 c, c, 0x000f000f, e, 0xEA;
lop3.b32 d, d, 0x000f000f, e, 0xEA;
sub.rn.bf16x2 $0, a, $5;
sub.rn.bf16x2 $1, b, $5;
sub.rn.bf16x2 $2, c, $5;
sub.rn.bf16x2 $3, d, $5;
}"""
U4_ASM = gl.constexpr(U4_PTX)
# the same by a scale, $9
SCALED_U4_ASM = gl.constexpr(
    re.sub(r"(sub.rn.bf16x2) (\$\d), (\w), (.*);", r"\1 \3, \3, \4;\nmul.rn.bf16x2 \2, \3, $9;", U4_PTX)
)
E2M1_ASM = gl.constexpr("""{
.reg .b32 a, b, c, d, e;
shl.b32 a, $4, 6;
shl.b32 b, $4, 2;
shf.l.wrap.b32 c, $4, $4, 28;
shr.u32 d, $4, 8;
and.b32 a, a, 0x81c081c0;
and.b32 b, b, 0x81c081c0;
and.b32 c, c, 0x81c081c0;
and.b32 e, $4, 0x81808180;
lop3.b32 d, d, 0x00400040, e, 0xEA;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}""")


@jit
def _unpack(tile, operand, VALUES: gl.constexpr, LEFT: gl.constexpr, SCALED: gl.constexpr = False):
    """Bytes [O, 64] of a box -> its numbers [O, columns].

    operand: of `_load_operands`; SCALED: as there
    """
    ROWS: gl.constexpr = tile.shape[0]
    if VALUES == "e4m3":
        numbers = gl.inline_asm_elementwise(
            EVEN_ODD_FP8_PTX, "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4
        )
        numbers = numbers.reshape([ROWS, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS, 64])
    else:
        if is_kquant(VALUES):
            even, odd = unpack_codes(tile, operand, VALUES)
        elif SCALED:
            even, odd = _scale_u4(tile, *operand)
        else:
            ASM: gl.constexpr = U4_ASM if VALUES == "u4" else E2M1_ASM
            pairs = _find_offset(operand) if VALUES == "u4" else _find_factor(operand)
            even, odd = gl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,r,r,r,r,r", [tile, pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )
        numbers = gl.join(even, odd).reshape([ROWS, 4, 4, 2, 2, 2]).permute((0, 2, 5, 3, 1, 4)).reshape([ROWS, 128])
    return gl.convert_layout(numbers, LEFT)


@jit
def _scale_u4(tile, scale, zero=None):
    """Numbers of 4 bits by the scales [O]. zero: zero points [O]; None: they are from -8 on, and come 2^EXPONENT times
    too small, see kquants.py"""
    scale = scale.to(gl.float32)
    if zero is None:
        first, second = _pair(scale * 2.0 ** (INTEGER - EXPONENT)), _pair(scale * -(2.0 ** (3 - EXPONENT)))
        ASM: gl.constexpr = FMA_U4_ASM
    else:
        first, second = _find_offset(zero), _pair(scale)
        ASM: gl.constexpr = SCALED_U4_ASM  # type: ignore[no-redef]
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [tile, first, second], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=4,
    )  # fmt: skip


@jit
def _pair(values):
    """fp32[O] as pairs of bf16, i32[O, 64], the same in each column"""
    pairs = gl.inline_asm_elementwise(PAIR_ASM, "=r,r", [values], dtype=gl.int32, is_pure=True, pack=1)
    return gl.expand_dims(pairs, 1).broadcast_to([BLOCK_O, BOX])


@jit
def _find_offset(zero):
    """What is subtracted from 128 + a number of 4 bits: pairs of bf16, i32[O, 64], the same in each column."""
    offset = 0x43004300 + zero.to(gl.int32) * 0x00010001
    return gl.expand_dims(offset, 1).broadcast_to([BLOCK_O, BOX])


@jit
def _find_factor(words):
    """What unpacks e2m1, by a word of each row's exponents, i32[O]: pairs of bf16, i32[O, 64].

    The bits lie where bf16 has its own, so that they are 2^126 times too small. Sums stay 2^UP_EXPONENT times too
    small: scales from 2^-94 to 2^33 fit in.
    """
    selectors = 0x4440 + gl.arange(0, 4, layout=gl.SliceLayout(0, GROUPS))  # a byte of the word, then zeros
    pairs = gl.inline_asm_elementwise(
        EXPONENT_ASM, "=r,r,r",
        [gl.expand_dims(words, 1).broadcast_to([BLOCK_O, 4]), selectors[None, :].broadcast_to([BLOCK_O, 4])],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.expand_dims(gl.expand_dims(pairs, 1), 3).broadcast_to([BLOCK_O, 4, 4, 4])
    return gl.convert_layout(pairs.reshape([BLOCK_O, BOX]), BYTES)


@jit
def _find_blocks(rows, VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, NUM: gl.constexpr):
    """Where the scales of each row begin, of which it has NUM; of e2m1 words, which 8 rows have next to each other."""
    if VALUES == "e2m1":
        return rows // 8 * (8 * NUM) + rows % 8
    else:
        return rows // SCALE_ROWS * NUM


@jit
def _multiply_box(numbers, x_box, sums, ACC: gl.constexpr):
    """Add the MMAs of a box to its sums, which may still run while the next box is unpacked."""
    if ACC.version[0] == 3:
        return warpgroup_mma(numbers, x_box.permute((1, 0)), sums, is_async=True)
    else:
        return mma_v2(numbers, x_box.permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2)), sums)


@jit
def _wait_for(sums, ACC: gl.constexpr):
    return warpgroup_mma_wait(0, deps=(sums,)) if ACC.version[0] == 3 else sums


@jit
def _load_scales(scales, blocks, block, NUM: gl.constexpr, COUNT: gl.constexpr):
    """The scales [O] of COUNT blocks of columns each, as they are stored; beyond the end any."""
    loaded = ()
    for number in gl.static_range(COUNT):
        loaded += (gl.load(scales + blocks + gl.minimum(block + number, NUM - 1)),)  # type: ignore[assignment]
    return loaded


@jit
def _load_operands(scales, zeros, blocks, block, NUM: gl.constexpr, COUNT: gl.constexpr, VALUES: gl.constexpr,
                   high=None, SCALED: gl.constexpr = False):  # fmt: skip
    """What COUNT boxes are unpacked with, as it is stored: zero points or words of exponents [O].

    block: of the first
    SCALED: numbers of 4 bits by their scales; these and zero points, if there are any, are tuples

    Nothing is converted here: that would wait for the load.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, BYTES)
    loaded = ()
    for number in gl.static_range(COUNT):
        place = gl.convert_layout(blocks, ROW) + gl.minimum(block + number, NUM - 1)
        if SCALED and zeros is None:
            loaded += ((gl.load(scales + place),),)  # type: ignore[assignment]
        elif SCALED:
            loaded += ((gl.load(scales + place), gl.load(zeros + place)),)  # type: ignore[assignment]
        elif VALUES == "u4":
            zero = gl.full([BLOCK_O], 8, gl.int32, ROW) if zeros is None else gl.load(zeros + place)
            loaded += (zero,)  # type: ignore[assignment]
        elif is_kquant(VALUES):
            loaded += (load_codes(scales, zeros, high, blocks, block + number, NUM, VALUES),)  # type: ignore[assignment]
        else:
            words = scales + gl.convert_layout(blocks, gl.SliceLayout(1, GROUPS))
            loaded += (gl.load(words + gl.minimum(block + number, NUM - 1) * 8),)  # type: ignore[assignment]
    return loaded


@jit
def _fetch(x, weight, scales, x_row, weight_row, step, slot, memory, WITH_WEIGHT: gl.constexpr, WITH_X: gl.constexpr,
           KIND: gl.constexpr):  # fmt: skip
    """Send for a stage: the weight's bytes and exponents, x, or both.

    Each has a barrier of its own, since between copies with the same one all warps would meet.
    """
    x_stages, weight_stages, exponents, ready = memory
    COLUMNS: gl.constexpr = x_stages.shape[2]
    WIDTH: gl.constexpr = weight_stages.shape[-1]
    if WITH_X:
        mbarrier.expect(ready[0].index(slot), x_stages.shape[1] * COLUMNS * 2)
    if WITH_WEIGHT:
        mbarrier.expect(ready[1].index(slot), BLOCK_O * WIDTH)
        if len(exponents) > 0:
            mbarrier.expect(ready[2].index(slot), BLOCK_O * WIDTH // BOX * 4)
    if WITH_WEIGHT:
        box, byte = step * (WIDTH // BOX), step * WIDTH
        if KIND is None:
            async_load(weight, [weight_row, byte], ready[1].index(slot), weight_stages.index(slot))
            if len(exponents) > 0:
                async_load(scales, [weight_row // 8, box, 0], ready[2].index(slot), exponents[0].index(slot))
        else:
            async_load(weight, [weight_row, 0, 0, byte], ready[1].index(slot), weight_stages.index(slot))
            if len(exponents) > 0:
                async_load(scales, [weight_row, 0, box, 0], ready[2].index(slot), exponents[0].index(slot))
    if WITH_X:
        async_load(x, [x_row, step * COLUMNS], ready[0].index(slot), x_stages.index(slot))


@jit
def _find_tile(ends, place, EXPERTS: gl.constexpr, BY_ROW: gl.constexpr, BLOCK_R: gl.constexpr):
    """The expert of a place, its tile's first row, and the expert's last one; there may be no tile.

    BY_ROW: each row is a place, and those have a tile that begin one. Else an expert has room for its tiles from the
    number of whole ones in the rows before it, and one for each expert.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, triton.next_power_of_2(EXPERTS), layout=LANES)
    if BY_ROW:
        later = gl.load(ends + each, mask=each < EXPERTS, other=place + 1)
        expert = gl.sum((later <= place).to(gl.int32), 0)
    else:
        starts = gl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0).to(gl.int32)
        is_reached = (starts // BLOCK_R + each <= place) & (each < EXPERTS)
        expert = gl.sum(is_reached.to(gl.int32), 0) - 1
    start = gl.load(ends + expert - 1, mask=expert > 0, other=0).to(gl.int32)
    end = gl.load(ends + expert, mask=expert < EXPERTS, other=0).to(gl.int32)
    if BY_ROW:
        row = gl.where((place - start) % BLOCK_R == 0, place, end)
    else:
        row = start + (place - start // BLOCK_R - expert) * BLOCK_R
    return expert, row, end


@jit
def _find_rows(row, first_row, expert, OUT: gl.constexpr, KIND: gl.constexpr):
    """Where rows of a tile are in the weight of all experts. With a KIND 16 are 8 of gate and 8 of up."""
    own = first_row + row
    if KIND is not None:
        own = first_row // 2 + row // 16 * 8 + row % 8 + row // 8 % 2 * (OUT // 2)
    return expert * OUT + gl.minimum(own, OUT - 1)


@jit
def _allocate(x, VALUES: gl.constexpr, KIND: gl.constexpr, BLOCK_R: gl.constexpr, BOXES: gl.constexpr,
              STAGES: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """Shared memory for stages of x, of the weight and of its exponents, and barriers; the weight as tiles, too.

    Exponents come twice: as they are copied, and by 8 rows and boxes.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_R, BOXES * COLUMNS], X)
    exponents = ()
    if KIND is None:
        weight_stages = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_O, BOXES * BOX], WEIGHT)
        tiles = weight_stages
        if VALUES == "e2m1":
            words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_O // 8, BOXES, 8], EXPONENTS)
            exponents = (words, words)  # type: ignore[assignment]
    else:
        weight_stages = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_O // 16, 2, 8, BOXES * BOX], GATED)
        tiles = reinterpret(weight_stages, gl.uint8, [STAGES, BLOCK_O, BOXES * BOX], WEIGHT)
        if VALUES == "e2m1":
            words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_O // 16, 2, BOXES, 8], GATED_EXPONENTS)
            exponents = (words, reinterpret(words, gl.int32, [STAGES, BLOCK_O // 8, BOXES, 8], EXPONENTS))  # type: ignore[assignment]
    ready = ()
    for _ in gl.static_range(3 if VALUES == "e2m1" else 2):
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(bars.index(stage), count=1)
        ready += (bars,)  # type: ignore[assignment]
    fence_async_shared()
    barrier()
    return (x_stages, weight_stages, exponents, ready), tiles


@jit
def _sum_up(x, weight, scales, zeros, high, blocks, x_row, weight_row, begin, steps, memory, tiles,
            VALUES: gl.constexpr, SCALE_COLUMNS: gl.constexpr, NUM: gl.constexpr, KIND: gl.constexpr,
            BOXES: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, ACC: gl.constexpr,
            ROWS: gl.constexpr):  # fmt: skip
    """A tile of the weight by ROWS rows of x, fp32[BLOCK_O, ROWS], in this many steps from `begin` on, of which some
    were sent for.

    blocks: of `_find_blocks`
    """
    x_stages, _, exponents, ready = memory
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # multiplying sums by scales takes as many instructions as there are rows
    SCALED: gl.constexpr = VALUES == "u4" and SCALE_COLUMNS is not None and ROWS > 8
    SCALES_SUMS: gl.constexpr = (VALUES == "u4" or VALUES == "e4m3") and SCALE_COLUMNS is not None and not SCALED
    HAS_OPERANDS: gl.constexpr = VALUES == "u4" or is_kquant(VALUES)
    EVERY: gl.constexpr = 1 if SCALE_COLUMNS is None else max(SCALE_COLUMNS // COLUMNS, 1)  # boxes with one scale
    COUNT: gl.constexpr = BOXES // EVERY
    gl.static_assert(BOXES % EVERY == 0, "a stage has whole blocks")
    acc = gl.zeros([BLOCK_O, ROWS], gl.float32, ACC)
    factors, operands, block = None, None, begin * COUNT  # of the next boxes, since a load takes long
    if SCALES_SUMS:
        factors = _load_scales(scales, blocks, block, NUM, COUNT)
    if HAS_OPERANDS:
        operands = _load_operands(scales, zeros, blocks, block, NUM, COUNT, VALUES, high, SCALED)
    for step in range(steps):
        slot, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(ready[1].index(slot), phase)
        if VALUES == "e2m1":
            mbarrier.wait(ready[2].index(slot), phase)
        block += COUNT
        if SCALES_SUMS:
            next_factors = _load_scales(scales, blocks, block, NUM, COUNT)
        if HAS_OPERANDS:
            next_operands = _load_operands(scales, zeros, blocks, block, NUM, COUNT, VALUES, high, SCALED)
        for group in gl.static_range(COUNT):
            sums = gl.zeros([BLOCK_O, ROWS], gl.float32, ACC) if SCALES_SUMS else acc
            for box in gl.static_range(group * EVERY, (group + 1) * EVERY):
                operand = None
                if HAS_OPERANDS:
                    operand = operands[group]  # type: ignore[index]
                elif VALUES == "e2m1":
                    operand = exponents[1].index(slot).slice(box, 1, dim=1).load(OCTETS).reshape([BLOCK_O])
                    operand = gl.convert_layout(operand, gl.SliceLayout(1, GROUPS))
                tile = tiles.index(slot).slice(box * BOX, BOX, dim=1)
                numbers = _unpack(tile.load(BYTES), operand, VALUES, LEFT, SCALED)
                if box == 0:
                    mbarrier.wait(ready[0].index(slot), phase)
                x_box = x_stages.index(slot).slice(box * COLUMNS, COLUMNS, dim=1).slice(0, ROWS, dim=0)
                sums = _multiply_box(numbers, x_box, sums, ACC)
            if SCALES_SUMS:
                acc += _wait_for(sums, ACC) * factors[group].to(gl.float32)[:, None]  # type: ignore[index]
            else:
                acc = sums
        if SCALES_SUMS:
            factors = next_factors
        else:
            acc = _wait_for(acc, ACC)
        if HAS_OPERANDS:
            operands = next_operands
        barrier()  # all have read the stage
        if step + STAGES < steps:
            _fetch(x, weight, scales, x_row, weight_row, begin + step + STAGES, slot, memory, True, True, KIND)
    if SCALED and zeros is None:
        acc *= 2.0**EXPONENT
    return acc


@jit
def _add_splits(acc, row, partial, arrived, SPLITS: gl.constexpr):
    """The sums of all splits of a tile, always in one order; whether this is the last to arrive, which has them.

    row: as in the layout of acc.
    """
    BLOCK_R: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = acc.type.layout  # Triton 3.6 takes a layout as an argument only as a constexpr
    token = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, ACC))
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    place = partial + tile * BLOCK_O * BLOCK_R + row[:, None] * BLOCK_R + token[None, :]
    stride = gl.num_programs(0) * gl.num_programs(1) * BLOCK_O * BLOCK_R
    gl.store(place + gl.program_id(2) * stride, acc)
    barrier()
    is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = gl.zeros([BLOCK_O, BLOCK_R], gl.float32, ACC)
        for split in range(SPLITS):
            acc += gl.load(place + split * stride, cache_modifier=".cg")
        gl.store(arrived + tile, 0)
    return acc, is_last


@jit(do_not_specialize=["rows"])
def _multiply(
    x, weight, scales, zeros, high, bias, ends, y, partial, arrived, rows, OUT: gl.constexpr, INNER: gl.constexpr,
    VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, EXPERTS: gl.constexpr,
    BY_ROW: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BLOCK_R: gl.constexpr,
    BOXES: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """A tile of the result.

    OUT: of one expert, gate and up projections
    BY_ROW: see `_find_tile`
    """
    COLUMNS: gl.constexpr = BOX if VALUES == "e4m3" else 2 * BOX  # of a box
    NUM: gl.constexpr = 1 if SCALE_COLUMNS is None else (INNER + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    tl.extra.cuda.gdc_launch_dependents()

    memory, tiles = _allocate(x, VALUES, KIND, BLOCK_R, BOXES, STAGES, COLUMNS)
    WIDTH: gl.constexpr = BOXES * COLUMNS  # of a stage
    ALL: gl.constexpr = (INNER + WIDTH - 1) // WIDTH
    EACH: gl.constexpr = (ALL + SPLITS - 1) // SPLITS
    begin = gl.program_id(2) * EACH
    steps = gl.minimum(ALL - begin, EACH)
    first_row = gl.program_id(0) * BLOCK_O
    expert, x_row, end = 0, gl.program_id(1) * BLOCK_R, rows
    if EXPERTS is not None:
        tl.extra.cuda.gdc_wait()
        expert, x_row, end = _find_tile(ends, gl.program_id(1), EXPERTS, BY_ROW, BLOCK_R)
        if x_row >= end:
            return
    weight_row = expert * OUT + first_row
    if (
        KIND is not None
    ):  # in the order of its descriptor, which has 8 gate projections and their up projections at a time
        weight_row = expert * (OUT // 8) + first_row // 16
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _fetch(x, weight, scales, x_row, weight_row, begin + stage, stage, memory, True, False, KIND)
    if EXPERTS is None:
        tl.extra.cuda.gdc_wait()

    for stage in gl.static_range(STAGES):
        if stage < steps:
            _fetch(x, weight, scales, x_row, weight_row, begin + stage, stage, memory, False, True, KIND)
    given = (x, weight, scales, zeros, high, bias, y, partial, arrived)
    place = (expert, x_row, end, first_row, weight_row, begin, steps)
    # an expert has a third fewer rows than its tile on average: if half are enough, their MMAs take less time. In fp8
    # two ways to store what is not gated would take the memory of a third program
    HALVES: gl.constexpr = EXPERTS is not None and SPLITS == 1 and (VALUES != "e4m3" or KIND is not None)
    if HALVES and (BLOCK_R == 32 or BLOCK_R == 64):  # noqa: SIM102 - which is known when this is compiled
        if end - x_row <= BLOCK_R // 2:
            _multiply_rows(given, place, memory, tiles, OUT, VALUES, SCALE_ROWS, SCALE_COLUMNS, NUM, KIND, LIMIT,
                           ALPHA, BOXES, STAGES, COLUMNS, SPLITS, BLOCK_R // 2)  # fmt: skip
            return
    _multiply_rows(given, place, memory, tiles, OUT, VALUES, SCALE_ROWS, SCALE_COLUMNS, NUM, KIND, LIMIT, ALPHA, BOXES,
                   STAGES, COLUMNS, SPLITS, BLOCK_R)  # fmt: skip


@jit
def _multiply_rows(given, place, memory, tiles, OUT: gl.constexpr, VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr,
                   SCALE_COLUMNS: gl.constexpr, NUM: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr,
                   ALPHA: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
                   SPLITS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """The first ROWS rows of a tile, whose first stages were sent for."""
    x, weight, scales, zeros, high, bias, y, partial, arrived = given
    expert, x_row, end, first_row, weight_row, begin, steps = place
    if ROWS == 8:
        ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    else:
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # type: ignore[no-redef]
    row = gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, ACC))
    own = _find_rows(row, first_row, expert, OUT, KIND)
    blocks = _find_blocks(own, VALUES, SCALE_ROWS, NUM)
    acc = _sum_up(x, weight, scales, zeros, high, blocks, x_row, weight_row, begin, steps, memory, tiles, VALUES,
                  SCALE_COLUMNS, NUM, KIND, BOXES, STAGES, COLUMNS, ACC, ROWS)  # fmt: skip
    is_last = True
    if SPLITS > 1:
        acc, is_last = _add_splits(acc, row, partial, arrived, SPLITS)
    if is_last:
        _finish(
            acc, y, scales, blocks, bias, own, x_row, end, first_row, OUT, VALUES, SCALE_COLUMNS, KIND, LIMIT, ALPHA
        )


@jit
def _finish(acc, y, scales, blocks, bias, own, x_row, end, first_row, OUT: gl.constexpr, VALUES: gl.constexpr,
            SCALE_COLUMNS: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr):  # fmt: skip
    """Scale sums [outputs, tokens] by row, add their biases, and store them or their gated activation."""
    BLOCK_O: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    if VALUES == "e2m1":
        acc *= 1 << UP_EXPONENT
    if is_kquant(VALUES):
        acc *= 2.0**EXPONENT
    if SCALE_COLUMNS is None:
        acc *= gl.load(scales + blocks).to(gl.float32)[:, None]
    if bias is not None:
        acc += gl.load(bias + own).to(gl.float32)[:, None]
    result = acc.to(y.dtype.element_ty)
    if KIND is None:
        _store(result, y, x_row, end, first_row, OUT)
    else:
        halves = result.reshape([BLOCK_O // 16, 2, 8, ROWS]).permute((0, 2, 3, 1))
        gate, up = halves.reshape([BLOCK_O // 2, ROWS, 2]).split()
        m = activate_rounded(gate, up, KIND, LIMIT, ALPHA)
        _store(m, y, x_row, end, first_row // 2, OUT // 2)


@jit
def _store(result, y, x_row, end, first_row, OUT: gl.constexpr):
    """Rows of outputs by tokens, to tokens by outputs."""
    result = gl.convert_layout(result, OUTPUTS)
    out = first_row + gl.arange(0, result.shape[0], layout=gl.SliceLayout(1, OUTPUTS))
    token = x_row + gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, OUTPUTS))
    places = y + token.to(gl.int64)[None, :] * OUT + out[:, None]
    gl.store(places, result, mask=(out < OUT)[:, None] & (token < end)[None, :])


@functools.cache
def _x_descriptors(block_rows: int, columns: int) -> TensorDescriptors:
    return TensorDescriptors((block_rows, columns), gl.NVMMASharedLayout(2 * min(columns, 64), 16, 2))


@functools.cache
def _weight_descriptors(width: int) -> TensorDescriptors:
    return TensorDescriptors((BLOCK_O.value, width), WEIGHT.value)


@functools.cache
def _gated_descriptors(width: int) -> TensorDescriptors:
    return TensorDescriptors((BLOCK_O.value // 16, 2, 8, width), GATED.value)


@functools.cache
def _exponent_descriptors(boxes: int) -> TensorDescriptors:
    return TensorDescriptors((BLOCK_O.value // 8, boxes, 8), EXPONENTS.value)


@functools.cache
def _gated_exponent_descriptors(boxes: int) -> TensorDescriptors:
    return TensorDescriptors((BLOCK_O.value // 16, 2, boxes, 8), GATED_EXPONENTS.value)


def multiply(x: Tensor, weight: PackedWeight, bias: Tensor | None, gate: Gate | None, counters: Tensor,
             tiles: Wgmma) -> Tensor:  # fmt: skip
    """x [T, I], a shuffled weight [O, I], bias [O] -> [T, O], or [T, O / 2] with a gate.

    counters: of `matrix.make_counters`; calls that share them must run one after another
    """
    return _launch(x, weight, None, bias, gate, counters, tiles)


def multiply_grouped(
    x: Tensor, weight: PackedWeight, ends: Tensor, bias: Tensor | None, gate: Gate | None, counters: Tensor,
    tiles: Wgmma,
) -> Tensor:  # fmt: skip
    """x [P, I], sorted by expert, a shuffled weight [E, O, I], ends i64[E], bias [E, O] -> [P, O], or [P, O / 2] with
    a gate.

    counters: as in `multiply`
    """
    return _launch(x, weight, ends, bias, gate, counters, tiles)


def gated_weights(values: Tensor, experts: int, out: int, width: int) -> Any:
    """The descriptor of shuffled values [experts, out, bytes] whose copies, of `width` bytes of a row, alternate 8 rows
    of gate and of up."""
    return _gated_descriptors(width).find(values, *gated_shape(values, experts, out))


def gated_shape(values: Tensor, experts: int, out: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a weight's values as 8 gate projections and the up projections after them, of all experts.

    That up projections follow the last gate projections does not matter.
    """
    width = values.shape[-1]
    return (experts * out // 8 - out // 16, 2, 8, width), (8 * width, out // 2 * width, width, 1)


def _launch(
    x: Tensor, weight: PackedWeight, ends: Tensor | None, bias: Tensor | None, gate: Gate | None, counters: Tensor,
    tiles: Wgmma,
) -> Tensor:  # fmt: skip
    (*leading, out, inner), rows = weight.shape, len(x)
    experts = leading[0] if leading else None
    block_rows, boxes, stages, splits = tiles
    encoding = encoding_of_weight(weight)
    x = align_rows(x)
    values = weight.parts["values"]
    width = values.shape[-1]
    if gate is None:
        weights = _weight_descriptors(boxes * BOX.value).find(values, (values.numel() // width, width), (width, 1))
    else:
        weights = gated_weights(values, experts or 1, out, boxes * BOX.value)
    columns = BOX.value * 8 // encoding.bits
    scales, zeros, high, scale_columns = scale_parts(weight)
    if encoding.values == "e2m1":
        scales = _describe_exponents(scales, experts or 1, out, gate is not None, boxes)
    # with a gate for the next GEMM, which reads whole tiles
    y = x.new_empty(rows, out) if gate is None else new_rows(x, rows, out // 2)
    is_by_row = experts is not None and rows <= experts
    row_tiles = -(-rows // block_rows)
    if experts is not None:
        row_tiles = rows if is_by_row else rows // block_rows + experts
    num_tiles, partial = -(-out // BLOCK_O.value), None
    if num_tiles * row_tiles > counters.numel():
        splits = 1
    if splits > 1:
        partial = x.new_empty(splits, row_tiles, num_tiles, BLOCK_O.value, block_rows, dtype=torch.float32)
    x_tiles = _x_descriptors(block_rows, boxes * columns).find(x, (readable_rows(x, block_rows), inner), x.stride())
    _multiply[(num_tiles, row_tiles, splits)](
        x_tiles, weights, scales, zeros, high, bias, ends, y, partial,
        counters if splits > 1 else None, rows, out, inner, encoding.values, encoding.rows, scale_columns, experts,
        is_by_row, *constants_of(gate), block_rows, boxes, stages, splits, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def _describe_exponents(words: Tensor, experts: int, out: int, is_gated: bool, boxes: int) -> Any:
    """The descriptor of MXFP4's words, as the values' is."""
    num = words.shape[-1] // 8
    if not is_gated:
        return _exponent_descriptors(boxes).find(words, (experts * out // 8, num, 8), (8 * num, 8, 1))
    sizes, strides = (experts * out // 8 - out // 16, 2, num, 8), (8 * num, out // 2 * num, 8, 1)
    return _gated_exponent_descriptors(boxes).find(words, sizes, strides)


def scale_parts(weight: PackedWeight) -> tuple[Tensor, Tensor | None, Tensor | None, int | None]:
    """Scales, zero points and other bits of numbers as kernels load them, and the columns of a scale, None: all.

    Of MXFP4 and K-quants, a word has the scales of the 128 columns of a box.
    """
    parts, encoding = weight.parts, encoding_of_weight(weight)
    scales = parts["scales"]
    if encoding.values == "e2m1":
        return scales.view(torch.int32), None, None, 2 * BOX.value
    if encoding.factor != SPANS:
        return scales, parts.get("zeros"), None, encoding.columns
    factors, high = parts[SPANS], parts.get("high")  # codes, factors, and other bits, as kquants.py loads them
    return (
        scales.view(len(scales), -1).view(torch.int64),
        factors.view(torch.int32 if factors.shape[-1] == 2 else factors.dtype),
        high if high is None or weight.kind == "q5_k" else high.view(torch.int64),
        2 * BOX.value,
    )
