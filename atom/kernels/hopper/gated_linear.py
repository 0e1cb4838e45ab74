"""Gated linear for many rows on NVIDIA's Hopper, in Gluon.

The GEMM and the gated activation are one kernel, where linear.py has two.

    m = gated_linear(x, weight)     # x [T, I], weight [2 W, I], gate before up -> gated_activate(linear(x)), [T, W]

One warp loads tiles of x and of the weight by TMA, and two groups of warps multiply half of a tile's rows each. A
tile of the result has gate projections in its left half and the matching up projections in its right half, so that a
thread holds both of a pair; results are stored while the next tile is multiplied. Rounding is as in linear.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from atom.kernels.hopper.gluon import async_load, async_store, jit, reinterpret
from atom.kernels.hopper.tensor_descriptors import TensorDescriptors
from atom.kernels.hopper.warp_groups import GROUPS, STAGES, make_barriers, multiply_steps
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.gpu import find_gpu

MANY_ROWS = 1024  # from which it is faster than the library on an H200
ROWS = gl.constexpr(128)  # of x, which a group of warps has
OUTS = gl.constexpr(64)  # gate projections, and as many up projections, in a tile
INNER = gl.constexpr(64)  # columns of x and of the weight in a stage
BAND = 2048 // 256  # rows of tiles that all outputs are made of before the next ones: they and the weight stay in L2
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SILU = gl.constexpr(  # of two at a time: the compiler's division, and rounding one by one, take twice as long
    """{
    .reg .f32 a, b, s, t;
    .reg .b32 active;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xffff0000;
    mul.f32 s, a, 0fBFB8AA3B;
    mul.f32 t, b, 0fBFB8AA3B;
    ex2.approx.ftz.f32 s, s;
    ex2.approx.ftz.f32 t, t;
    add.f32 s, s, 0f3F800000;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 s, s;
    rcp.approx.ftz.f32 t, t;
    mul.f32 a, a, s;
    mul.f32 b, b, t;
    cvt.rn.bf16x2.f32 active, b, a;
    mul.rn.bf16x2 $0, active, $2;
    }"""
)


@jit
def find_place(tile, sizes):
    """The row and column of a tile: the tiles of a band of rows are computed side by side."""
    _, _, row_tiles, out_tiles, band = sizes
    first = tile // (band * out_tiles) * band
    within = tile - first * out_tiles
    height = gl.minimum(row_tiles - first, band)
    return first + within % height, within // height


@jit
def produce(x, weight, sizes, memory):
    """Load the tiles of x and of the weight, gate and up projections, for each tile of this program."""
    out, steps, row_tiles, out_tiles, _ = sizes
    x_boxes, w_boxes, _, ready, free = memory
    iteration = 0
    for tile in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        row_tile, out_tile = find_place(tile, sizes)
        row, gate = row_tile * (GROUPS * ROWS), out_tile * OUTS
        for step in range(steps):
            slot, column = iteration % STAGES, step * INNER
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), iteration // STAGES & 1 ^ 1)
            mbarrier.expect(bar, (GROUPS * ROWS + 2 * OUTS) * INNER * 2)
            for who in gl.static_range(GROUPS):
                box = x_boxes.index(slot * GROUPS + who)
                async_load(x, [row + who * ROWS, column], bar, box)
            async_load(weight, [gate, column], bar, w_boxes.index(slot * 2))
            async_load(weight, [out + gate, column], bar, w_boxes.index(slot * 2 + 1))
            iteration += 1


@jit
def consume(y, sizes, memory, WHO: gl.constexpr):
    """ROWS rows of each tile."""
    _, steps, row_tiles, out_tiles, _ = sizes
    x_boxes, w_boxes, y_boxes, ready, free = memory
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTS, 16])
    STORED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTS, 16])
    weights = reinterpret(w_boxes, y_boxes.dtype, [STAGES, 2 * OUTS, INNER], SHARED)
    first = 0
    for tile in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        acc = multiply_steps(x_boxes, weights, ready, free, first, steps, WHO, ACC)
        first += steps

        tma.store_wait(0)  # of the tile before
        gate, up = acc.to(y_boxes.dtype).reshape([ROWS, 2, OUTS]).permute((0, 2, 1)).split()
        m = gl.inline_asm_elementwise(SILU, "=r,r,r", [gate, up], dtype=gl.bfloat16, is_pure=True, pack=2)
        box = y_boxes.index(WHO)
        box.store(gl.convert_layout(m, STORED))
        fence_async_shared()
        row_tile, out_tile = find_place(tile, sizes)
        async_store(y, [(row_tile * GROUPS + WHO) * ROWS, out_tile * OUTS], box)
    tma.store_wait(0)


@jit(do_not_specialize=["out", "steps", "row_tiles", "out_tiles", "band"])
def _gated_linear(x, weight, y, out, steps, row_tiles, out_tiles, band):
    """Some of row_tiles by out_tiles tiles, over at least two steps of INNER columns."""
    wait_for_inputs(True)
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * GROUPS, ROWS, INNER], SHARED)
    w_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * 2, OUTS, INNER], SHARED)
    y_boxes = gl.allocate_shared_memory(x.dtype, [GROUPS, ROWS, OUTS], SHARED)
    ready, free = make_barriers()

    sizes = (out, steps, row_tiles, out_tiles, band)
    memory = (x_boxes, w_boxes, y_boxes, ready, free)
    gl.warp_specialize(
        [
            (consume, (y, sizes, memory, 0)),
            (consume, (y, sizes, memory, 1)),
            (produce, (x, weight, sizes, memory)),
        ],
        [4, 1],  # warps
        [232, 40],  # registers a thread
    )


_x_descriptors = TensorDescriptors((ROWS.value, INNER.value), SHARED.value)
_weight_descriptors = TensorDescriptors((OUTS.value, INNER.value), SHARED.value)
_y_descriptors = TensorDescriptors((ROWS.value, OUTS.value), SHARED.value)


def suits(x: Tensor, weight: Tensor, kind: str | None) -> bool:
    """Whether `gated_linear` takes these and is faster than the library, as it is for many rows."""
    rows, inner = x.shape
    return (
        rows >= MANY_ROWS
        and kind == "silu"
        and x.dtype == weight.dtype == torch.bfloat16
        and inner > 64
        # elements between rows: the TMA wants 16 bytes
        and x.stride(0) % 8 == inner % 8 == weight.shape[0] // 2 % 8 == 0
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As Linears.gated_linear with kind="silu", if `suits` says so; rows of x may lie apart."""
    (rows, inner), out = x.shape, weight.shape[0] // 2
    y = x.new_empty(rows, out)
    descriptors = (
        _x_descriptors.find(x, (rows, inner), x.stride()),
        _weight_descriptors.find(weight, (2 * out, inner), weight.stride()),
        _y_descriptors.find(y, (rows, out), (out, 1)),
    )
    row_tiles, out_tiles = -(-rows // (GROUPS.value * ROWS.value)), -(-out // OUTS.value)
    _gated_linear[(min(find_gpu(x.device).units, row_tiles * out_tiles),)](
        *descriptors, out, -(-inner // INNER.value), row_tiles, out_tiles, BAND,
        num_warps=4, maxnreg=168, launch_pdl=True,
    )  # fmt: skip
    return y
