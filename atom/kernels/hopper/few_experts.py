"""Experts of few tokens in two launches on NVIDIA's Hopper, in Gluon.

    if suits_few(x, ids, gate_up, down):
        y = multiply_few(x, weights, ids, (gate_up, down), biases, Gate("silu"), counters)      # as the op `experts`

A weight is plain, or packed in the layout of shuffle.py. A program has ROWS rows of it: for the gate/up projection of
one pair of token and expert, half of them gate and half up; for the down projection an equal part of each of a token's
experts, or of each half of their columns where programs are few. Their boxes come by TMA, some stages ahead, as the
left operand (A) of mma; x is B. For the down projection, B has one column per selected expert, or half; only the
diagonal blocks, a column by its own rows, are kept. If the gate/up projection has few tiles, programs split the columns
of a tile, and the last one to arrive adds them up.

The down weights are fetched before the gate/up kernel has ended: the ids were written by a kernel that it waited for.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from atom.kernels.hopper.boxes import BYTES, GROUPS
from atom.kernels.hopper.gluon import async_load, barrier, jit, reinterpret
from atom.kernels.hopper.packed_linear import (
    UP_EXPONENT,
    _find_blocks,
    _unpack,
    gated_shape,
    scale_parts,
)
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors, align_rows
from atom.kernels.triton.activations import Gate, activate_rounded
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.linear.weight_encoding import PLAIN, Weight, WeightEncoding, encoding_of_weight
from atom.kernels.triton.padded_alloc import new_rows, readable_rows

ROWS, WIDTH = gl.constexpr(64), gl.constexpr(64)  # of a box of the weight: its rows, and bytes or plain numbers of each
TOKENS = gl.constexpr(8)  # rows of x in a box, the minimum of an mma
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
MAX_CHOSEN = 16  # experts of a token
MAX_CHOSEN_PACKED = 8  # that are unpacked with more than a scale, whose boxes have 64 rows
FEW_PLAIN, FEW_PACKED = 4, 2  # tokens, up to which they are not grouped: packed experts of more are as fast grouped
OTHER_MEMORY = 2048  # bytes of a program's shared memory besides its stages
MAX_STAGES = 8
HALVED_PROGRAMS = 2  # fewer on a multiprocessor than these halve the columns of their outputs, to be twice as many
NOWHERE = gl.constexpr(1 << 24)  # a column beyond any end
PROGRAMS = {8: 2, 4: 3}  # max on a multiprocessor if columns are split, by a number's bits; no plain ones are
MIN_STEPS = 4  # of a split


class Sizes(NamedTuple):
    """Rows of a box of the weight, and of x."""

    rows: int = ROWS.value
    tokens: int = TOKENS.value

    @classmethod
    def of_chosen(cls, top_k: int) -> Sizes:
        """With 8 rows or more of each of a token's experts, and a row of x for each."""
        parts = next_power_of_2(top_k)
        return cls(max(ROWS.value, 8 * parts), max(TOKENS.value, parts))


GATE_SIZES = Sizes()


class Ring(NamedTuple):
    """The shared memory of a program."""

    boxes: int  # in a stage
    stages: int
    splits: int = 1  # programs that share a tile's columns

    def steps(self, inner: int, columns: int) -> int:
        """Stages that a program goes through. columns: of a box"""
        return -(-inner // (self.boxes * columns))  # no constant of a kernel, whose loop would be unrolled


def choose_ring(
    programs: int, inner: int, encoding: WeightEncoding, gpu: Gpu, sizes: Sizes = GATE_SIZES, *,
    splits_columns: bool = False,
) -> Ring:  # fmt: skip
    """A ring that holds a program's part of the weight, or as much as fits where all programs run at once.

    splits_columns: those of a tile may be split, each of some steps, if there is room for more programs
    """
    columns, boxes = columns_of(encoding), boxes_of(encoding)
    steps = -(-inner // (boxes * columns))
    room = PROGRAMS.get(encoding.bits, 0) * gpu.units // programs if splits_columns else 1
    splits = max(1, min(room, steps // MIN_STEPS))
    together = min(-(-programs * splits // gpu.units), 4)
    stage, tables = boxes * box_bytes(encoding, sizes), table_bytes(inner, encoding, sizes)
    fitting = (gpu.shared_memory // together - OTHER_MEMORY - tables) // stage
    max_stages = MAX_STAGES - -(-tables // stage)  # the next kernel's programs must fit in, too
    return Ring(boxes, max(1, min(fitting, -(-steps // splits), max_stages)), splits)


def halve(inner: int, encoding: WeightEncoding) -> int | None:
    """Boxes of the first half of the columns, of which the second has at least as many, in whole stages; None: none.

    A half may end with boxes of zeros, unless that is another number once it is unpacked.
    """
    columns, boxes = columns_of(encoding), boxes_of(encoding)
    every = max((encoding.columns or 0) // columns, 1)  # with one scale
    num, rest = -(-inner // (every * columns)) * every, inner % (every * columns)
    first = num - boxes * -(-(num + bool(rest)) // (2 * boxes))
    is_even = 2 * first == num and not rest
    return first if first > 0 and (is_even or encoding.values in ("e4m3", "e2m1")) else None


def boxes_of(encoding: WeightEncoding) -> int:
    """Boxes of a stage, which has whole blocks."""
    return max(2, -(-(encoding.columns or 1) // columns_of(encoding)))


def columns_of(encoding: WeightEncoding) -> int:
    """Columns of a box."""
    return int(WIDTH.value) * encoding.per_byte


def box_bytes(encoding: WeightEncoding, sizes: Sizes) -> int:
    """The shared memory of a box of the weight, and of x next to it."""
    weight = sizes.rows * WIDTH.value * (2 if encoding.values is None else 1)
    return int(weight + sizes.tokens * columns_of(encoding) * 2)


def table_bytes(inner: int, encoding: WeightEncoding, sizes: Sizes) -> int:
    """The shared memory of a program's scales and zero points, if some of its columns share one, or more."""
    if encoding.columns is None:
        return 0
    shared = columns_of(encoding) if encoding.values == "e2m1" else encoding.columns
    return 4 * sizes.rows * max(next_power_of_2(-(-inner // shared)), boxes_of(encoding))


@jit
def _send(x, weight, x_row, starts, step, slot, memory, WITH_WEIGHT: gl.constexpr, WITH_X: gl.constexpr,
          PARTS: gl.constexpr, HALF: gl.constexpr, BOXES: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
          TOKENS: gl.constexpr):  # fmt: skip
    """Fetch a stage: the weight's boxes, those of x, or both.

    starts: where the parts of a box begin in the weight
    PARTS: that a box has, each of neighbouring rows; None: gate and up projections, alternating by 8.
    HALF: boxes of the first half of the columns, which every other part has, the next one the rest; None: each has all
    """
    x_boxes, weight_boxes, ready = memory
    bar = ready.index(slot)
    ALL: gl.constexpr = 1 if PARTS is None else PARTS  # that there is room for
    if WITH_WEIGHT:
        BYTES_OF_PART: gl.constexpr = ROWS // ALL * WIDTH * (weight_boxes.dtype.primitive_bitwidth // 8)
        mbarrier.expect(bar, BOXES * (len(starts) * BYTES_OF_PART + TOKENS * COLUMNS * 2))
        for number in gl.static_range(BOXES):
            column, box = (step * BOXES + number) * WIDTH, slot * BOXES + number
            if PARTS is None:
                async_load(weight, [starts[0], 0, 0, column], bar, weight_boxes.index(box))
            else:
                for part in gl.static_range(len(starts)):
                    place = weight_boxes.index(box * PARTS + part)
                    if HALF is None:
                        async_load(weight, [starts[part], column], bar, place)
                    elif part % 2 == 0:  # of what the other half has too, zeros from beyond the end
                        is_beyond = gl.minimum(gl.maximum(step * BOXES + number - HALF + 1, 0), 1)
                        async_load(weight, [starts[part], column + is_beyond * NOWHERE], bar, place)
                    else:
                        async_load(weight, [starts[part], column + HALF * WIDTH], bar, place)
    if WITH_X:
        for number in gl.static_range(BOXES):
            column, box = (step * BOXES + number) * COLUMNS, x_boxes.index(slot * BOXES + number)
            if PARTS is None:
                async_load(x, [x_row, column], bar, box)
            else:
                async_load(x, [x_row, 0, column], bar, box)


@jit
def _allocate(x, weight, PARTS: gl.constexpr, HALVES: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
              COLUMNS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr):  # fmt: skip
    """Shared memory for boxes of x and of the weight, barriers, and the boxes as matrices."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BITS: gl.constexpr = weight.dtype.primitive_bitwidth
    SWIZZLE: gl.constexpr = WIDTH * BITS // 8
    TILE: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, BITS, 2)
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PARTS is None:
        x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, TOKENS, COLUMNS], X)
        GATED: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, BITS, 4)
        boxes = gl.allocate_shared_memory(weight.dtype, [STAGES * BOXES, ROWS // 16, 2, 8, WIDTH], GATED)
    else:
        HALVED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, TOKENS // HALVES, HALVES, COLUMNS], HALVED)
        boxes = gl.allocate_shared_memory(weight.dtype, [STAGES * BOXES * PARTS, ROWS // PARTS, WIDTH], TILE)
    rows = reinterpret(x_boxes, x.dtype, [STAGES * BOXES, TOKENS, COLUMNS], X)
    tiles = reinterpret(boxes, weight.dtype, [STAGES * BOXES, ROWS, WIDTH], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    barrier()
    return (x_boxes, boxes, ready), (rows, tiles)


@jit
def _load_tables(scales, zeros, blocks, VALUES: gl.constexpr, SCALE_COLUMNS: gl.constexpr, COLUMNS: gl.constexpr,
                 BOXES: gl.constexpr, NUM: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Scales and zero points of a tile into shared memory, each as [blocks, ROWS]; () if all columns share one.

    In a loop each step would wait for its own from memory, as long as for some stages.

    blocks: where the scales of each row begin, of which it has NUM
    """
    tables = ()
    if SCALE_COLUMNS is not None:
        COUNT: gl.constexpr = BOXES // max(SCALE_COLUMNS // COLUMNS, 1)  # of a stage
        tables += (_load_table(scales, blocks, VALUES, COUNT, NUM, ROWS),)  # type: ignore[assignment]
        if zeros is not None:
            tables += (_load_table(zeros, blocks, VALUES, COUNT, NUM, ROWS),)  # type: ignore[assignment]
    return tables


@jit
def _load_table(values, blocks, VALUES: gl.constexpr, COUNT: gl.constexpr, NUM: gl.constexpr, ROWS: gl.constexpr):
    """As `_load_tables`; zeros beyond the end."""
    BLOCKS: gl.constexpr = triton.next_power_of_2((NUM + COUNT - 1) // COUNT * COUNT)
    EACH: gl.constexpr = min(BLOCKS, 4)  # neighbours of a thread
    LANES: gl.constexpr = min(BLOCKS // EACH, 32)
    if VALUES == "e2m1":  # whose words of 8 rows lie next to each other
        LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [4, 1], [1, 0])  # type: ignore[no-redef]
    first = gl.convert_layout(blocks, gl.SliceLayout(1, LAYOUT))
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    place = first[:, None] + block * (8 if VALUES == "e2m1" else 1)
    loaded = gl.load(values + place, mask=block < NUM, other=0)
    dtype = values.dtype.element_ty
    table = gl.allocate_shared_memory(dtype, [BLOCKS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    table.permute((1, 0)).store(loaded)
    return reinterpret(table, dtype, [BLOCKS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@jit
def _sum_up(x, weight, tables, x_row, starts, begin, steps, memory, tiles, VALUES: gl.constexpr,
            SCALE_COLUMNS: gl.constexpr, PARTS: gl.constexpr, HALF: gl.constexpr, BOXES: gl.constexpr,
            STAGES: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr):  # fmt: skip
    """A tile of the weight by x, fp32[ROWS, TOKENS], in this many steps from `begin` on, of which some were sent for.

    tables: of `_load_tables`
    """
    x_rows, tiles = tiles
    ready = memory[2]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    SCALES_SUMS: gl.constexpr = SCALE_COLUMNS is not None and VALUES != "e2m1"
    EVERY: gl.constexpr = 1 if SCALE_COLUMNS is None else max(SCALE_COLUMNS // COLUMNS, 1)  # boxes with one scale
    COUNT: gl.constexpr = BOXES // EVERY
    gl.static_assert(BOXES % EVERY == 0, "a stage has whole blocks")
    if len(tables) > 0:
        barrier()  # all have written their part
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        for group in gl.static_range(COUNT):
            block = (begin + step) * COUNT + group
            sums = gl.zeros([ROWS, TOKENS], gl.float32, ACC) if SCALES_SUMS else acc
            for number in gl.static_range(EVERY):
                box = slot * BOXES + group * EVERY + number
                if VALUES is None:
                    numbers = tiles.index(box).load(LEFT)
                else:
                    operand = None
                    if VALUES == "e2m1":
                        operand = tables[0].index(block).load(gl.SliceLayout(1, GROUPS))
                    elif VALUES == "u4" and len(tables) == 1:
                        operand = gl.full([ROWS], 8, gl.int32, gl.SliceLayout(1, BYTES))
                    elif VALUES == "u4":
                        operand = tables[1].index(block).load(gl.SliceLayout(1, BYTES))
                    numbers = _unpack(tiles.index(box).load(BYTES), operand, VALUES, LEFT)
                sums = mma_v2(numbers, x_rows.index(box).permute((1, 0)).load(RIGHT), sums)
            if SCALES_SUMS:
                acc += sums * tables[0].index(block).load(gl.SliceLayout(1, ACC)).to(gl.float32)[:, None]
            else:
                acc = sums
        if step + STAGES < steps:
            barrier()  # all have read the stage
            _send(x, weight, x_row, starts, begin + step + STAGES, slot, memory, True, True, PARTS, HALF, BOXES,
                  COLUMNS, ROWS, TOKENS)  # fmt: skip
    return acc


@jit
def _pick(acc, column):
    """One column of each row of acc, i32[ROWS]: fp32[ROWS]"""
    columns = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, ACC))
    return gl.sum(gl.where(columns[None, :] == column[:, None], acc, 0.0), 1)


@jit
def _finish(y, scale, term, VALUES: gl.constexpr):
    """The sums of rows, fp32[ROWS], scaled, with their biases."""
    if VALUES == "e2m1":
        y *= 1 << UP_EXPONENT
    if scale is not None:
        y *= scale.to(gl.float32)
    if term is not None:
        y += term.to(gl.float32)
    return y


@jit(do_not_specialize=["steps"])
def _gate_up_kernel(
    x, ids, weight, scales, zeros, bias, y, partial, arrived, steps, TOP_K: gl.constexpr, OUT: gl.constexpr,
    INNER: gl.constexpr, VALUES: gl.constexpr, COLUMNS: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """ROWS / 2 gate and up projections of one pair of token and expert, activated, in this many steps of all splits.

    OUT: gate and up projections of an expert.
    """
    NUM: gl.constexpr = 1 if SCALE_COLUMNS is None else (INNER + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    memory, tiles = _allocate(x, weight, None, 1, BOXES, STAGES, COLUMNS, ROWS, TOKENS)
    pair, first = gl.program_id(1), gl.program_id(0) * (ROWS // 2)
    each = (steps + SPLITS - 1) // SPLITS
    begin = gl.program_id(2) * each
    own_steps = gl.minimum(steps - begin, each)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    expert = gl.load(ids + pair).to(gl.int32)
    starts = ((expert * OUT + first) // 8,)
    for stage in gl.static_range(STAGES):
        if stage < own_steps:
            _send(x, weight, pair // TOP_K, starts, begin + stage, stage, memory, True, True, None, None, BOXES,
                  COLUMNS, ROWS, TOKENS)  # fmt: skip
    row = gl.arange(0, ROWS, layout=ROW)
    out = gl.minimum(first + row // 16 * 8 + row % 8, OUT // 2 - 1) + row // 8 % 2 * (OUT // 2)
    own = expert * OUT + out
    blocks = _find_blocks(own, VALUES, SCALE_ROWS, NUM)
    scale, term = None, None  # of `_finish`, ahead of the sums, since a load takes long
    if VALUES is not None and SCALE_COLUMNS is None:
        scale = gl.load(scales + own // SCALE_ROWS)
    if bias is not None:
        term = gl.load(bias + own)
    tables = _load_tables(scales, zeros, blocks, VALUES, SCALE_COLUMNS, COLUMNS, BOXES, NUM, ROWS)
    acc = _sum_up(x, weight, tables, pair // TOP_K, starts, begin, own_steps, memory, tiles, VALUES, SCALE_COLUMNS,
                  None, None, BOXES, STAGES, COLUMNS, ROWS, TOKENS)  # fmt: skip
    sums, is_last = _pick(acc, row * 0), True
    if SPLITS > 1:
        tile = pair * gl.num_programs(0) + gl.program_id(0)
        place = partial + tile * SPLITS * ROWS + row
        gl.store(place + gl.program_id(2) * ROWS, sums)
        barrier()
        is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            sums = gl.zeros([ROWS], gl.float32, ROW)
            for split in gl.static_range(SPLITS):
                sums += gl.load(place + split * ROWS, cache_modifier=".cg")
            gl.store(arrived + tile, 0)
    if is_last:
        result = _finish(sums, scale, term, VALUES).to(y.dtype.element_ty)
        gate, up = result.reshape([ROWS // 16, 2, 8]).permute((0, 2, 1)).split()
        m = activate_rounded(gate, up, KIND, LIMIT, ALPHA)
        block = gl.arange(0, ROWS // 16, layout=gl.SliceLayout(1, m.type.layout))
        column = first + block[:, None] * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, m.type.layout))[None, :]
        gl.store(y + pair * (OUT // 2) + column, m, mask=column < OUT // 2)


@jit(do_not_specialize=["steps"])
def _down_kernel(
    x, weights, ids, weight, scales, zeros, bias, y, steps, TOP_K: gl.constexpr, OUT: gl.constexpr, INNER: gl.constexpr,
    VALUES: gl.constexpr, COLUMNS: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    PARTS: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, BOXES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS / PARTS / HALVES outputs of a token, summed over its experts, in this many steps.

    PARTS: a power of 2, of which TOP_K are used.
    HALF: as in `_send`
    ROWS, TOKENS: as `Sizes`
    """
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    HALVES: gl.constexpr = 1 if HALF is None else 2
    EACH: gl.constexpr = ROWS // (PARTS * HALVES)
    FIRST: gl.constexpr = 0 if HALF is None or SCALE_COLUMNS is None else HALF * COLUMNS // SCALE_COLUMNS
    ALL: gl.constexpr = 1 if SCALE_COLUMNS is None else (INNER + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    memory, tiles = _allocate(x, weight, PARTS * HALVES, HALVES, BOXES, STAGES, COLUMNS, ROWS, TOKENS)
    first_pair, first = gl.program_id(1) * TOP_K, gl.program_id(0) * EACH
    starts = ()
    for choice in gl.static_range(TOP_K):
        expert = gl.load(ids + first_pair + choice, cache_modifier=".cg").to(gl.int32)
        for _ in gl.static_range(HALVES):
            starts += (expert * OUT + first,)  # type: ignore[assignment]
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _send(x, weight, first_pair, starts, stage + 0 * steps, stage, memory, True, False, PARTS * HALVES, HALF,
                  BOXES, COLUMNS, ROWS, TOKENS)  # fmt: skip
    row = gl.arange(0, ROWS, layout=ROW)
    choices = gl.minimum(row // (EACH * HALVES), TOP_K - 1)
    experts = gl.load(ids + first_pair + choices, cache_modifier=".cg").to(gl.int32)
    own = experts * OUT + gl.minimum(first + row % EACH, OUT - 1)
    blocks = _find_blocks(own, VALUES, SCALE_ROWS, ALL) + row // EACH % HALVES * (
        FIRST * (8 if VALUES == "e2m1" else 1)
    )
    shares = gl.load(weights + first_pair + choices, cache_modifier=".cg")
    scale, term = None, None  # of `_finish`, ahead of the sums, since a load takes long
    if VALUES is not None and SCALE_COLUMNS is None:
        scale = gl.load(scales + own // SCALE_ROWS)
    if bias is not None:
        term = gl.load(bias + own)
    tables = _load_tables(scales, zeros, blocks, VALUES, SCALE_COLUMNS, COLUMNS, BOXES, ALL - FIRST, ROWS)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _send(x, weight, first_pair, starts, stage, stage, memory, False, True, PARTS * HALVES, HALF, BOXES,
                  COLUMNS, ROWS, TOKENS)  # fmt: skip
    acc = _sum_up(x, weight, tables, first_pair, starts, 0, steps, memory, tiles, VALUES, SCALE_COLUMNS,
                  PARTS * HALVES, HALF, BOXES, STAGES, COLUMNS, ROWS, TOKENS)  # fmt: skip
    sums = _pick(acc, row // EACH)
    if HALVES > 1:  # of which the first one is what both add up to, and the other one zero
        both = gl.sum(sums.reshape([PARTS, HALVES, EACH]), 1)
        sums = gl.convert_layout(gl.expand_dims(both, 1).broadcast_to([PARTS, HALVES, EACH]).reshape([ROWS]), ROW)
    result = _finish(sums, scale, term, VALUES).to(y.dtype.element_ty).to(gl.float32) * shares
    is_own = (row // EACH % HALVES == 0) & (row // (EACH * HALVES) < TOP_K)
    total = gl.sum(gl.where(is_own, result, 0.0).reshape([PARTS * HALVES, EACH]), 0)
    place = first + gl.arange(0, EACH, layout=total.type.layout)
    gl.store(y + gl.program_id(1) * OUT + place, total.to(y.dtype.element_ty), mask=place < OUT)


@functools.cache
def _x_descriptors(*shape: int) -> TensorDescriptors:
    return TensorDescriptors(shape, gl.NVMMASharedLayout(128, 16, len(shape)))


@functools.cache
def _gate_descriptors(bits: int) -> TensorDescriptors:
    shape = (ROWS.value // 16, 2, 8, WIDTH.value)
    return TensorDescriptors(shape, gl.NVMMASharedLayout(WIDTH.value * bits // 8, bits, 4))


@functools.cache
def _down_descriptors(rows: int, bits: int) -> TensorDescriptors:
    return TensorDescriptors((rows, WIDTH.value), gl.NVMMASharedLayout(WIDTH.value * bits // 8, bits, 2))


class _Operand(NamedTuple):
    """A weight as the kernels take it."""

    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    scale_columns: int | None = None  # that share a scale, or a word of them; None: all
    encoding: WeightEncoding = PLAIN


def _operand_of(weight: Weight) -> _Operand:
    if isinstance(weight, Tensor):
        return _Operand(weight)
    scales, zeros, _, columns = scale_parts(weight)
    return _Operand(weight.parts["values"], scales, zeros, columns, encoding_of_weight(weight))


def max_chosen(weight: Weight) -> int:
    """The experts that a token may choose."""
    return MAX_CHOSEN if _operand_of(weight).encoding.values in (None, "e4m3") else MAX_CHOSEN_PACKED


def suits_few(x: Tensor, ids: Tensor, gate_up: Weight, down: Weight) -> bool:
    """Whether these tokens go through their experts without being grouped; packed ones are laid out for it."""
    _, out, inner = gate_up.shape
    max_tokens = FEW_PLAIN if isinstance(gate_up, Tensor) else FEW_PACKED
    is_few = 0 < len(x) <= max_tokens and ids.shape[1] <= min(map(max_chosen, (gate_up, down)))
    return is_few and x.dtype == torch.bfloat16 and out % 16 == inner % 8 == 0


def multiply_few(
    x: Tensor, weights: Tensor, ids: Tensor, matrices: tuple[Weight, Weight],
    biases: tuple[Tensor | None, Tensor | None], gate: Gate, counters: Tensor,
) -> Tensor:  # fmt: skip
    """experts of few tokens: x [T, H], weights fp32[T, k], ids i64[T, k], gate_up and down as in the op -> [T, H]"""
    m = multiply_gate_up(x, ids, matrices[0], biases[0], gate, counters)
    return multiply_down(m, weights, ids, matrices[1], biases[1])


def multiply_gate_up(
    x: Tensor, ids: Tensor, weight: Weight, bias: Tensor | None, gate: Gate, counters: Tensor,
    ring: Ring | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], ids i64[T, k], weight [E, 2 W, H], gate before up, bias [E, 2 W] -> gated_activate [k T, W].

    counters: of `matrix.make_counters`; calls that share them must run one after another
    """
    values, scales, zeros, scale_columns, encoding = _operand_of(weight)
    experts, out, inner = weight.shape
    x = align_rows(x)
    columns, tiles = columns_of(encoding), -(-out // ROWS.value)
    # as of a power of two tokens, for which kernels are compiled ahead
    programs = tiles * next_power_of_2(len(ids)) * ids.shape[1]
    has_counters = programs <= len(counters)
    ring = ring or choose_ring(programs, inner, encoding, find_gpu(x.device), splits_columns=has_counters)
    weights = _gate_descriptors(values.element_size() * 8).find(values, *gated_shape(values, experts, out))
    y, partial = new_rows(x, ids.numel(), out // 2), None
    if ring.splits > 1:
        partial = x.new_empty(len(y) * tiles * ring.splits * ROWS.value, dtype=torch.float32)
    x_tiles = _x_descriptors(TOKENS.value, columns).find(x, (readable_rows(x, TOKENS.value), inner), x.stride())
    _gate_up_kernel[(tiles, len(y), ring.splits)](
        x_tiles, ids, weights, scales, zeros, bias, y, partial, counters if ring.splits > 1 else None,
        ring.steps(inner, columns), ids.shape[1], out, inner, encoding.values, columns, encoding.rows,
        scale_columns, *gate, *ring, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def multiply_down(x: Tensor, weights: Tensor, ids: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [k T, W], weights fp32[T, k], ids i64[T, k], weight [E, H, W], bias [E, H] -> [T, H]

    The kernel ahead is `multiply_gate_up`, of the same ids.
    """
    values, scales, zeros, scale_columns, encoding = _operand_of(weight)
    experts, out, inner = weight.shape
    (tokens, top_k), width, columns = ids.shape, values.shape[-1], columns_of(encoding)
    parts, sizes, gpu = next_power_of_2(top_k), Sizes.of_chosen(top_k), find_gpu(x.device)
    each, half, halves = sizes.rows // parts, None, 1
    programs = -(-out // each) * next_power_of_2(tokens)
    is_few = programs < HALVED_PROGRAMS * gpu.units and encoding.bits < 16 and 2 * parts <= sizes.tokens
    if is_few and (half := halve(inner, encoding)):
        each, halves, programs = each // 2, 2, 2 * programs
    first = (half or 0) * columns
    ring = choose_ring(programs, inner - first, encoding, gpu, sizes)
    tiles = -(-out // each)
    down_weights = _down_descriptors(each, values.element_size() * 8).find(values, (experts * out, width), (width, 1))
    y = x.new_empty(tokens, out)
    # rows of x, in two halves whose second one is as long as the other may be
    x_sizes, x_strides = (len(x), halves, inner - first), (x.stride(0), first or x.stride(0), 1)
    x_tiles = _x_descriptors(sizes.tokens // halves, halves, columns).find(x, x_sizes, x_strides)
    _down_kernel[(tiles, tokens)](
        x_tiles, weights, ids, down_weights, scales, zeros, bias, y, ring.steps(inner - first, columns), top_k, out,
        inner, encoding.values, columns, encoding.rows, scale_columns, parts, half, *sizes, ring.boxes, ring.stages,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y
