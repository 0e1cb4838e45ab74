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
from atom.kernels.hopper.boxes import BLOCK_O, BOX, BYTES, SCALES, WORDS
from atom.kernels.hopper.gluon import EVEN_ODD_FP8_PTX, async_load, barrier, jit, reinterpret
from atom.kernels.hopper.kquants import EXPONENT, is_kquant, load_codes, unpack_codes
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors, align_rows
from atom.kernels.triton.activations import Gate, activate_rounded, constants_of
from atom.kernels.triton.linear.shuffled import Wgmma
from atom.kernels.triton.linear.weight_encoding import SPANS, encoding_of_weight
from atom.kernels.triton.padded_alloc import new_rows, readable_rows

WEIGHT = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
GATED = gl.constexpr(gl.NVMMASharedLayout(64, 8, 4))  # of 16 rows each 8 gate projections, then their up projections
UP_EXPONENT = gl.constexpr(32)
OUTPUTS = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))  # to store by

# of 4 bytes, as bf16; the exponents of e4m3 and e2m1 are those of bf16 less a power of 2
U4_ASM = gl.constexpr("""{
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
}""")
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
def _unpack(tile, operand, VALUES: gl.constexpr, LEFT: gl.constexpr):
    """Bytes [O, 64] of a box -> its numbers [O, columns]. operand: of `_load_operands`"""
    ROWS: gl.constexpr = tile.shape[0]
    if VALUES == "e4m3":
        numbers = gl.inline_asm_elementwise(
            EVEN_ODD_FP8_PTX, "=r,=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=4
        )
        numbers = numbers.reshape([ROWS, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([ROWS, 64])
    else:
        if is_kquant(VALUES):
            even, odd = unpack_codes(tile, operand, VALUES)
        else:
            ASM: gl.constexpr = U4_ASM if VALUES == "u4" else E2M1_ASM
            pairs = _find_offset(operand) if VALUES == "u4" else operand
            even, odd = gl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,r,r,r,r,r", [tile, pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
            )
        numbers = gl.join(even, odd).reshape([ROWS, 4, 4, 2, 2, 2]).permute((0, 2, 5, 3, 1, 4)).reshape([ROWS, 128])
    return gl.convert_layout(numbers, LEFT)


@jit
def _find_offset(zero):
    """What is subtracted from 128 + a number of 4 bits: pairs of bf16, i32[O, 64], the same in each column."""
    offset = 0x43004300 + zero.to(gl.int32) * 0x00010001
    return gl.expand_dims(offset, 1).broadcast_to([BLOCK_O, BOX])


@jit
def _load_factor(scales, blocks, block, NUM: gl.constexpr):
    """What unpacks e2m1, by the exponents of four blocks of columns: pairs of bf16, i32[O, 64].

    The bits lie where bf16 has its own, so that they are 2^126 times too small. Sums stay 2^UP_EXPONENT times too
    small: scales from 2^-94 to 2^33 fit in.
    """
    rows = gl.expand_dims(gl.convert_layout(blocks, gl.SliceLayout(1, SCALES)), 1)
    own = block + gl.arange(0, 4, layout=gl.SliceLayout(0, SCALES))[None, :]
    stored = gl.load(scales + rows + own, mask=own < NUM, other=0)
    pairs = (stored.to(gl.int32) + (126 - UP_EXPONENT)) * 0x00800080
    pairs = gl.convert_layout(pairs, gl.SliceLayout(1, gl.SliceLayout(3, WORDS)))
    pairs = gl.expand_dims(gl.expand_dims(pairs, 1), 3).broadcast_to([BLOCK_O, 4, 4, 4])
    return gl.convert_layout(pairs.reshape([BLOCK_O, BOX]), BYTES)


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
                   high=None):  # fmt: skip
    """What COUNT boxes are unpacked with: zero points [O] as they are stored, or of `_load_factor`. block: of the first

    Neither scales nor zero points are converted here: that would wait for the load.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, BYTES)
    loaded = ()
    for number in gl.static_range(COUNT):
        if VALUES == "u4":
            if zeros is None:
                zero = gl.full([BLOCK_O], 8, gl.int32, ROW)
            else:
                zero = gl.load(zeros + gl.convert_layout(blocks, ROW) + gl.minimum(block + number, NUM - 1))
            loaded += (zero,)  # type: ignore[assignment]
        elif is_kquant(VALUES):
            loaded += (load_codes(scales, zeros, high, blocks, block + number, NUM, VALUES),)  # type: ignore[assignment]
        else:
            loaded += (_load_factor(scales, blocks, (block + number) * 4, NUM),)  # type: ignore[assignment]
    return loaded


@jit
def _fetch(x, weight, x_row, weight_row, step, slot, memory, WITH_WEIGHT: gl.constexpr, WITH_X: gl.constexpr,
           BOXES: gl.constexpr, BLOCK_R: gl.constexpr, COLUMNS: gl.constexpr, KIND: gl.constexpr):  # fmt: skip
    """Send for a stage: the weight's boxes, those of x, or both."""
    x_boxes, weight_boxes, ready = memory
    bar = ready.index(slot)
    if WITH_WEIGHT:
        mbarrier.expect(bar, BOXES * (BLOCK_O * BOX + BLOCK_R * COLUMNS * 2))
        for number in gl.static_range(BOXES):
            byte, box = (step * BOXES + number) * BOX, weight_boxes.index(slot * BOXES + number)
            if KIND is None:
                async_load(weight, [weight_row, byte], bar, box)
            else:
                async_load(weight, [weight_row, 0, 0, byte], bar, box)
    if WITH_X:
        for number in gl.static_range(BOXES):
            column = (step * BOXES + number) * COLUMNS
            async_load(x, [x_row, column], bar, x_boxes.index(slot * BOXES + number))


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
def _allocate(x, KIND: gl.constexpr, BLOCK_R: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    """Shared memory for boxes of x and of the weight, the latter as tiles, and barriers."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, BLOCK_R, COLUMNS], X)
    if KIND is None:
        weight_boxes = gl.allocate_shared_memory(gl.uint8, [STAGES * BOXES, BLOCK_O, BOX], WEIGHT)
        tiles = weight_boxes
    else:
        weight_boxes = gl.allocate_shared_memory(gl.uint8, [STAGES * BOXES, BLOCK_O // 16, 2, 8, BOX], GATED)
        tiles = reinterpret(weight_boxes, gl.uint8, [STAGES * BOXES, BLOCK_O, BOX], WEIGHT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    barrier()
    return (x_boxes, weight_boxes, ready), tiles


@jit
def _sum_up(x, weight, scales, zeros, high, blocks, x_row, weight_row, begin, steps, memory, tiles,
            VALUES: gl.constexpr, SCALE_COLUMNS: gl.constexpr, NUM: gl.constexpr, KIND: gl.constexpr,
            BLOCK_R: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
            ACC: gl.constexpr):  # fmt: skip
    """A tile of the weight by x, fp32[BLOCK_O, BLOCK_R], in this many steps from `begin` on, of which some were sent
    for.

    blocks: where the scales of each row begin, of which it has NUM.
    """
    x_boxes, _, ready = memory
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    SCALES_SUMS: gl.constexpr = SCALE_COLUMNS is not None and VALUES != "e2m1" and not is_kquant(VALUES)
    EVERY: gl.constexpr = 1 if SCALE_COLUMNS is None else max(SCALE_COLUMNS // COLUMNS, 1)  # boxes with one scale
    COUNT: gl.constexpr = BOXES // EVERY
    gl.static_assert(BOXES % EVERY == 0, "a stage has whole blocks")
    acc = gl.zeros([BLOCK_O, BLOCK_R], gl.float32, ACC)
    factors, operands, block = None, None, begin * COUNT  # of the next boxes, since a load takes long
    if SCALES_SUMS:
        factors = _load_scales(scales, blocks, block, NUM, COUNT)
    if VALUES != "e4m3":
        operands = _load_operands(scales, zeros, blocks, block, NUM, COUNT, VALUES, high)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        block += COUNT
        if SCALES_SUMS:
            next_factors = _load_scales(scales, blocks, block, NUM, COUNT)
        if VALUES != "e4m3":
            next_operands = _load_operands(scales, zeros, blocks, block, NUM, COUNT, VALUES, high)
        for group in gl.static_range(COUNT):
            sums = gl.zeros([BLOCK_O, BLOCK_R], gl.float32, ACC) if SCALES_SUMS else acc
            for number in gl.static_range(EVERY):
                box = slot * BOXES + group * EVERY + number
                operand = None if VALUES == "e4m3" else operands[group]  # type: ignore[index]
                numbers = _unpack(tiles.index(box).load(BYTES), operand, VALUES, LEFT)
                sums = _multiply_box(numbers, x_boxes.index(box), sums, ACC)
            if SCALES_SUMS:
                acc += _wait_for(sums, ACC) * factors[group].to(gl.float32)[:, None]  # type: ignore[index]
            else:
                acc = sums
        if SCALES_SUMS:
            factors = next_factors
        else:
            acc = _wait_for(acc, ACC)
        if VALUES != "e4m3":
            operands = next_operands
        barrier()  # all have read the stage
        if step + STAGES < steps:
            _fetch(x, weight, x_row, weight_row, begin + step + STAGES, slot, memory, True, True, BOXES, BLOCK_R,
                   COLUMNS, KIND)  # fmt: skip
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
    if BLOCK_R == 8:
        ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    else:
        ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])  # type: ignore[no-redef]
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    tl.extra.cuda.gdc_launch_dependents()

    memory, tiles = _allocate(x, KIND, BLOCK_R, BOXES, STAGES, COLUMNS)
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
            _fetch(x, weight, x_row, weight_row, begin + stage, stage, memory, True, False, BOXES, BLOCK_R, COLUMNS,
                   KIND)  # fmt: skip
    if EXPERTS is None:
        tl.extra.cuda.gdc_wait()

    row = gl.arange(0, BLOCK_O, layout=ROW)
    own = _find_rows(row, first_row, expert, OUT, KIND)
    blocks = own // SCALE_ROWS * NUM
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _fetch(x, weight, x_row, weight_row, begin + stage, stage, memory, False, True, BOXES, BLOCK_R, COLUMNS,
                   KIND)  # fmt: skip
    acc = _sum_up(x, weight, scales, zeros, high, blocks, x_row, weight_row, begin, steps, memory, tiles, VALUES,
                  SCALE_COLUMNS, NUM, KIND, BLOCK_R, BOXES, STAGES, COLUMNS, ACC)  # fmt: skip
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


_weight_descriptors = TensorDescriptors((BLOCK_O.value, BOX.value), WEIGHT.value)
_gated_descriptors = TensorDescriptors((BLOCK_O.value // 16, 2, 8, BOX.value), GATED.value)


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


def gated_weights(values: Tensor, experts: int, out: int) -> Any:
    """The descriptor of shuffled values [experts, out, bytes] whose boxes alternate 8 rows of gate and of up."""
    return _gated_descriptors.find(values, *gated_shape(values, experts, out))


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
        weights = _weight_descriptors.find(values, (values.numel() // width, width), (width, 1))
    else:
        weights = gated_weights(values, experts or 1, out)
    columns = BOX.value * 8 // encoding.bits
    is_coded = encoding.factor == SPANS
    scale_columns = columns if is_coded else encoding.columns
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
    x_tiles = _x_descriptors(block_rows, columns).find(x, (readable_rows(x, block_rows), inner), x.stride())
    _multiply[(num_tiles, row_tiles, splits)](
        x_tiles, weights, *(_coded_scales(weight) if is_coded else _scales(weight)), bias, ends, y, partial,
        counters if splits > 1 else None, rows, out, inner, encoding.values, encoding.rows, scale_columns, experts,
        is_by_row, *constants_of(gate), block_rows, boxes, stages, splits, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def _scales(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Scales, zero points, and no other bits of numbers."""
    return weight.parts["scales"], weight.parts.get("zeros"), None


def _coded_scales(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Of K-quants: codes of 128 columns as a word, factors, and numbers' other bits, as kquants.py loads them."""
    codes, factors, high = weight.parts["scales"], weight.parts[SPANS], weight.parts.get("high")
    return (
        codes.view(len(codes), -1).view(torch.int64),
        factors.view(torch.int32 if factors.shape[-1] == 2 else factors.dtype),
        high if high is None or weight.kind == "q5_k" else high.view(torch.int64),
    )
