"""Linears of one row by packed weights on NVIDIA's Hopper, in Gluon.

    y, total = multiply_row(a, b, norm, weight, bias, 1e-6, Row(4))     # by a shuffled weight; b, norm, bias: or None

A program has EACH rows of the weight, all of whose columns come into shared memory by TMA while the kernel ahead still
runs. The columns are cut into PARTS: a tile of the tensor cores has the rows of all parts, and x a column for each, of
whose sums only those of a part by its own x are kept. So the warps share out a row's columns, none of which waits for
another program, and each program norms x again. Rounding is as in linear.py.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from atom.graph import PackedWeight
from atom.kernels.hopper.boxes import BOX, BYTES
from atom.kernels.hopper.few_experts import ACC, _finish, _pick
from atom.kernels.hopper.gluon import async_load, barrier, jit, reinterpret
from atom.kernels.hopper.packed_linear import _find_blocks, _load_operands, _load_scales, _unpack, scale_parts
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors
from atom.kernels.triton.linear.shuffled import EACH as NUM_EACH
from atom.kernels.triton.linear.shuffled import PARTS as NUM_PARTS
from atom.kernels.triton.linear.shuffled import Row
from atom.kernels.triton.linear.weight_encoding import encoding_of_weight

PARTS, EACH = gl.constexpr(NUM_PARTS), gl.constexpr(NUM_EACH)  # of the columns; rows of the weight
BOXES = gl.constexpr(gl.NVMMASharedLayout(64, 8, 3))


@jit
def _load_row(a, b, norm, norms, total, eps, place, x_boxes, INNER: gl.constexpr, NUM: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    """x as it is multiplied, into shared memory. place: of the first box's numbers in a row; norms: of NUM boxes"""
    loaded = ()
    squares = gl.zeros([PARTS, COLUMNS], gl.float32, gl.BlockedLayout([1, COLUMNS // 16], [2, 16], [4, 1], [1, 0]))
    for box in gl.static_range(NUM):
        x = gl.load(a + place + box * COLUMNS)
        if b is not None:
            other = gl.load(b + place + box * COLUMNS)
            x = (x.to(gl.float32) + other.to(gl.float32)).to(x.dtype)
        squares += x.to(gl.float32) * x.to(gl.float32)
        loaded += (x,)  # type: ignore[assignment]
    scale = None
    if norm is not None:
        scale = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / INNER + eps)
    for box in gl.static_range(NUM):
        x = loaded[box]
        if norm is not None:
            x = (x.to(gl.float32) * scale * norms[box].to(gl.float32)).to(x.dtype)
        x_boxes.index(box).store(x)
    if b is not None:  # noqa: SIM102 - which is known when this is compiled
        if gl.program_id(0) == 0:
            for box in gl.static_range(NUM):
                gl.store(total + place + box * COLUMNS, loaded[box])


@jit
def _multiply_row(
    a, b, norm, weight, scales, zeros, bias, total, y, eps, OUT: gl.constexpr, INNER: gl.constexpr,
    VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, NUM: gl.constexpr,
):  # fmt: skip
    """EACH outputs. NUM: boxes of a part"""
    tl.extra.cuda.gdc_launch_dependents()
    COLUMNS: gl.constexpr = BOX if VALUES == "e4m3" else 2 * BOX  # of a box
    ROWS: gl.constexpr = PARTS * EACH
    X: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 16], [2, 16], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    boxes = gl.allocate_shared_memory(weight.dtype, [NUM, PARTS, EACH, BOX], BOXES)
    tiles = reinterpret(boxes, weight.dtype, [NUM, ROWS, BOX], gl.NVMMASharedLayout(64, 8, 2))
    x_boxes = gl.allocate_shared_memory(a.dtype.element_ty, [NUM, PARTS, COLUMNS], gl.NVMMASharedLayout(128, 16, 2))
    ready = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for box in gl.static_range(NUM):
        mbarrier.init(ready.index(box), count=1)
    fence_async_shared()
    barrier()
    first = gl.program_id(0) * EACH
    for box in gl.static_range(NUM):
        mbarrier.expect(ready.index(box), ROWS * BOX)
        async_load(weight, [0, first, box * BOX], ready.index(box), boxes.index(box))

    # what else is no result of another kernel
    SCALES_SUMS: gl.constexpr = SCALE_COLUMNS is not None and VALUES != "e2m1"
    EVERY: gl.constexpr = 1 if SCALE_COLUMNS is None else max(SCALE_COLUMNS // COLUMNS, 1)  # boxes with one scale
    COUNT: gl.constexpr = NUM // EVERY
    BLOCKS: gl.constexpr = 1 if SCALE_COLUMNS is None else INNER // PARTS // SCALE_COLUMNS  # of scales of a part
    row = gl.arange(0, ROWS, layout=ROW)
    own = first + row % EACH
    blocks = _find_blocks(own, VALUES, SCALE_ROWS, BLOCKS if SCALE_COLUMNS is None else BLOCKS * PARTS)
    if SCALE_COLUMNS is not None:
        blocks += row // EACH * (BLOCKS * (8 if VALUES == "e2m1" else 1))
    factors, operands, norms = None, None, ()
    if SCALES_SUMS:
        factors = _load_scales(scales, blocks, 0, BLOCKS, COUNT)
    if VALUES != "e4m3":
        operands = _load_operands(scales, zeros, blocks, 0, BLOCKS, COUNT, VALUES)
    scale, term = None, None
    if SCALE_COLUMNS is None:
        scale = gl.load(scales + own // SCALE_ROWS)
    if bias is not None:
        term = gl.load(bias + own)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, X))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, X))
    place = part[:, None] * (INNER // PARTS) + column[None, :]
    if norm is not None:
        for box in gl.static_range(NUM):
            norms += (gl.load(norm + place + box * COLUMNS),)  # type: ignore[assignment]

    tl.extra.cuda.gdc_wait()
    _load_row(a, b, norm, norms, total, eps, place, x_boxes, INNER, NUM, COLUMNS)
    barrier()
    acc = gl.zeros([ROWS, PARTS], gl.float32, ACC)
    for group in gl.static_range(COUNT):
        sums = gl.zeros([ROWS, PARTS], gl.float32, ACC) if SCALES_SUMS else acc
        for number in gl.static_range(EVERY):
            box = group * EVERY + number
            mbarrier.wait(ready.index(box), 0)
            operand = None if operands is None else operands[group]
            numbers = _unpack(tiles.index(box).load(BYTES), operand, VALUES, LEFT)
            sums = mma_v2(numbers, x_boxes.index(box).permute((1, 0)).load(RIGHT), sums)
        if SCALES_SUMS:
            acc += sums * factors[group].to(gl.float32)[:, None]  # type: ignore[index]
        else:
            acc = sums

    sums = gl.sum(_pick(acc, row // EACH).reshape([PARTS, EACH]), 0)
    sums = gl.expand_dims(sums, 0).broadcast_to([PARTS, EACH]).reshape([ROWS])
    result = _finish(gl.convert_layout(sums, ROW), scale, term, VALUES)
    gl.store(y + own, result.to(y.dtype.element_ty), mask=row < EACH)


_descriptors = TensorDescriptors((NUM_PARTS, NUM_EACH, BOX.value), BOXES.value)


def multiply_row(
    a: Tensor, b: Tensor | None, norm: Tensor | None, weight: PackedWeight, bias: Tensor | None, eps: float, row: Row
) -> tuple[Tensor, Tensor]:
    """linear(rms_norm(a + b)) of a row [1, I] by a shuffled weight [O, I], and a + b, which is a without b."""
    (out, inner), values, encoding = weight.shape, weight.parts["values"], encoding_of_weight(weight)
    (scales, zeros, _, scale_columns), width = scale_parts(weight), values.shape[-1]
    weights = _descriptors.find(values, (NUM_PARTS, out, width // NUM_PARTS), (width // NUM_PARTS, width, 1))
    y, total = a.new_empty(1, out), a if b is None else a.new_empty(1, inner)
    _multiply_row[(out // NUM_EACH,)](
        a, b, norm, weights, scales, zeros, bias, total, y, eps, out, inner,
        encoding.values, encoding.rows, scale_columns, row.boxes, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y, total
