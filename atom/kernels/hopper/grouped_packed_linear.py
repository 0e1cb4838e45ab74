"""Grouped GEMM of many rows by packed experts on NVIDIA's Hopper, in Gluon.

    plan = plan_tiles(ends, len(x))         # shared by GEMMs of the same rows
    y = multiply(x, weight, plan, bias)     # x [P, I], sorted by expert, a shuffled weight [E, O, I] -> [P, O]
    m = multiply(x, weight, plan, bias, Gate("silu"))       # weight [E, 2 W, I], gate before up -> [P, W]

Programs take one tile after another, as in grouped_linear.py, of 128 rows. Each of two or three groups of warps unpacks
64 rows of the weight into the left operands of its MMAs, as in packed_linear.py, while the others' are multiplied.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from atom.graph import PackedWeight
from atom.kernels.hopper.boxes import BLOCK_O, BOX, BYTES
from atom.kernels.hopper.gluon import async_load, jit, reinterpret
from atom.kernels.hopper.grouped_linear import ENTRY, Plan, _find_place, make_plan
from atom.kernels.hopper.packed_linear import (
    GATED,
    WEIGHT,
    _find_blocks,
    _find_rows,
    _finish,
    _load_operands,
    _load_scales,
    _multiply_box,
    _unpack,
    _wait_for,
    _weight_descriptors,
    _x_descriptors,
    gated_weights,
    scale_parts,
)
from atom.kernels.triton.activations import Gate, constants_of
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.gpu import find_gpu
from atom.kernels.triton.linear.weight_encoding import WeightEncoding, encoding_of_weight

ROWS = gl.constexpr(128)  # of x in a tile
COLUMNS = gl.constexpr(128)  # of a stage


@jit
def _produce(x, weight, plan, sizes, memory, OUT: gl.constexpr, KIND: gl.constexpr, GROUPS: gl.constexpr,
             BOXES: gl.constexpr):  # fmt: skip
    """Load the tiles of x and of the weight for each tile of this program."""
    steps, out_tiles, num = sizes
    x_boxes, w_boxes, ready, free = memory
    STAGES: gl.constexpr = ready.shape[0]
    EACH: gl.constexpr = COLUMNS // BOXES
    iteration = 0
    for tile in range(gl.program_id(0), gl.load(plan + num * ENTRY) * out_tiles, gl.num_programs(0)):
        expert, row, _end, out_tile = _find_place(tile, plan, out_tiles, ROWS)
        first = out_tile * GROUPS * BLOCK_O
        for step in range(steps):
            slot = iteration % STAGES
            bar = ready.index(slot)
            mbarrier.wait(free.index(slot), iteration // STAGES & 1 ^ 1)
            mbarrier.expect(bar, ROWS * COLUMNS * 2 + GROUPS * BOXES * BLOCK_O * BOX)
            for number in gl.static_range(BOXES):
                column, byte = step * COLUMNS + number * EACH, (step * BOXES + number) * BOX
                async_load(x, [row, column], bar, x_boxes.index(slot * BOXES + number))
                for who in gl.static_range(GROUPS):
                    box = w_boxes.index((slot * GROUPS + who) * BOXES + number)
                    if KIND is None:
                        async_load(weight, [expert * OUT + first + who * BLOCK_O, byte], bar, box)
                    else:
                        octet = expert * (OUT // 8) + (first + who * BLOCK_O) // 16
                        async_load(weight, [octet, 0, 0, byte], bar, box)
            iteration += 1


@jit
def _consume(given, plan, sizes, memory, WHO: gl.constexpr, OUT: gl.constexpr, INNER: gl.constexpr,
             VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, KIND: gl.constexpr,
             LIMIT: gl.constexpr, ALPHA: gl.constexpr, GROUPS: gl.constexpr, BOXES: gl.constexpr):  # fmt: skip
    """BLOCK_O rows of the weight of each tile."""
    y, scales, zeros, bias = given
    steps, out_tiles, num = sizes
    x_boxes, w_boxes, ready, free = memory
    STAGES: gl.constexpr = ready.shape[0]
    SCALES_SUMS: gl.constexpr = SCALE_COLUMNS is not None and VALUES != "e2m1"
    NUM: gl.constexpr = 1 if SCALE_COLUMNS is None else (INNER + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    tiles = w_boxes
    if KIND is not None:
        tiles = reinterpret(w_boxes, gl.uint8, [STAGES * GROUPS * BOXES, BLOCK_O, BOX], WEIGHT)
    row = gl.arange(0, BLOCK_O, layout=gl.SliceLayout(1, ACC))
    first = 0
    for tile in range(gl.program_id(0), gl.load(plan + num * ENTRY) * out_tiles, gl.num_programs(0)):
        expert, x_row, end, out_tile = _find_place(tile, plan, out_tiles, ROWS)
        first_row = (out_tile * GROUPS + WHO) * BLOCK_O
        own = _find_rows(row, first_row, expert, OUT, KIND)
        blocks = _find_blocks(own, VALUES, SCALE_ROWS, NUM)
        acc = gl.zeros([BLOCK_O, ROWS], gl.float32, ACC)
        factors, operands = None, None  # of the next stage, since a load takes long
        if SCALES_SUMS:
            factors = _load_scales(scales, blocks, 0, NUM, 1)
        if VALUES != "e4m3":
            operands = _load_operands(scales, zeros, blocks, 0, NUM, 1, VALUES)
        for step in range(steps):
            iteration = first + step
            slot = iteration % STAGES
            if SCALES_SUMS:
                next_factors = _load_scales(scales, blocks, step + 1, NUM, 1)
            if VALUES != "e4m3":
                next_operands = _load_operands(scales, zeros, blocks, step + 1, NUM, 1, VALUES)
            mbarrier.wait(ready.index(slot), iteration // STAGES & 1)
            sums = gl.zeros([BLOCK_O, ROWS], gl.float32, ACC) if SCALES_SUMS else acc
            for number in gl.static_range(BOXES):
                operand = None if VALUES == "e4m3" else operands[0]  # type: ignore[index]
                box = tiles.index((slot * GROUPS + WHO) * BOXES + number)
                numbers = _unpack(box.load(BYTES), operand, VALUES, LEFT)
                sums = _multiply_box(numbers, x_boxes.index(slot * BOXES + number), sums, ACC)
            sums = _wait_for(sums, ACC)
            mbarrier.arrive(free.index(slot))
            if SCALES_SUMS:
                acc += sums * factors[0].to(gl.float32)[:, None]  # type: ignore[index]
                factors = next_factors
            else:
                acc = sums
            if VALUES != "e4m3":
                operands = next_operands
        first += steps
        _finish(
            acc, y, scales, blocks, bias, own, x_row, end, first_row, OUT, VALUES, SCALE_COLUMNS, KIND, LIMIT, ALPHA
        )


@jit(do_not_specialize=["num"])
def _multiply(x, weight, scales, zeros, bias, y, plan, num, OUT: gl.constexpr, INNER: gl.constexpr,
              VALUES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, KIND: gl.constexpr,
              LIMIT: gl.constexpr, ALPHA: gl.constexpr, GROUPS: gl.constexpr, BOXES: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """Some tiles of a plan of `num` entries. OUT: of one expert, gate and up projections"""
    wait_for_inputs(True)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, ROWS, COLUMNS // BOXES], X)
    if KIND is None:
        w_boxes = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS * BOXES, BLOCK_O, BOX], WEIGHT)
    else:
        w_boxes = gl.allocate_shared_memory(gl.uint8, [STAGES * GROUPS * BOXES, BLOCK_O // 16, 2, 8, BOX], GATED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()

    STEPS: gl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    OUT_TILES: gl.constexpr = (OUT + GROUPS * BLOCK_O - 1) // (GROUPS * BLOCK_O)
    sizes = (STEPS, OUT_TILES, num)
    memory = (x_boxes, w_boxes, ready, free)
    given = (y, scales, zeros, bias)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, plan, sizes, memory, 0, OUT, INNER, VALUES, SCALE_ROWS, SCALE_COLUMNS, KIND, LIMIT,
                            ALPHA, GROUPS, BOXES)),
                (_consume, (given, plan, sizes, memory, 1, OUT, INNER, VALUES, SCALE_ROWS, SCALE_COLUMNS, KIND, LIMIT,
                            ALPHA, GROUPS, BOXES)),
                (_produce, (x, weight, plan, sizes, memory, OUT, KIND, GROUPS, BOXES)),
            ],
            [4, 1],  # warps
            [232, 40],  # registers a thread
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (given, plan, sizes, memory, 0, OUT, INNER, VALUES, SCALE_ROWS, SCALE_COLUMNS, KIND, LIMIT,
                            ALPHA, GROUPS, BOXES)),
                (_consume, (given, plan, sizes, memory, 1, OUT, INNER, VALUES, SCALE_ROWS, SCALE_COLUMNS, KIND, LIMIT,
                            ALPHA, GROUPS, BOXES)),
                (_consume, (given, plan, sizes, memory, 2, OUT, INNER, VALUES, SCALE_ROWS, SCALE_COLUMNS, KIND, LIMIT,
                            ALPHA, GROUPS, BOXES)),
                (_produce, (x, weight, plan, sizes, memory, OUT, KIND, GROUPS, BOXES)),
            ],
            [4, 4, 1],
            [152, 152, 40],
        )  # fmt: skip


def choose_groups(encoding: WeightEncoding) -> int:
    """Of how many groups of warps a program is made: three if their registers hold no sums besides the total."""
    return 2 if encoding.columns is not None and encoding.values != "e2m1" else 3


def plan_tiles(ends: Tensor, rows: int) -> Plan:
    """The plan of `multiply`."""
    return make_plan(ends, rows, ROWS.value)


def multiply(
    x: Tensor, weight: PackedWeight, plan: Plan, bias: Tensor | None = None, gate: Gate | None = None
) -> Tensor:
    """x [P, I], sorted by expert, a shuffled weight [E, O, I], bias [E, O] -> [P, O], or [P, O / 2] with a gate"""
    (experts, out, inner), rows = weight.shape, len(x)
    encoding, values = encoding_of_weight(weight), weight.parts["values"]
    width = values.shape[-1]
    y = x.new_empty(rows, out if gate is None else out // 2)
    if gate is None:
        weights = _weight_descriptors(BOX.value).find(values, (experts * out, width), (width, 1))
    else:
        weights = gated_weights(values, experts, out, BOX.value)
    boxes, groups = encoding.bits // 4, choose_groups(encoding)
    scales, zeros, _, scale_columns = scale_parts(weight)
    assert plan.block_rows == ROWS.value, "the plan is of other tiles"
    out_tiles = -(-out // (groups * BLOCK_O.value))
    _multiply[(min(find_gpu(x.device).units, plan.num * out_tiles),)](
        _x_descriptors(ROWS.value, COLUMNS.value // boxes).find(x, (rows, inner), x.stride()), weights,
        scales, zeros, bias, y, plan.tiles, plan.num, out, inner, encoding.values, encoding.rows, scale_columns,
        *constants_of(gate), groups, boxes, 8 - boxes - groups, num_warps=4,
        maxnreg=168 if groups == 2 else 128, launch_pdl=True,
    )  # fmt: skip
    return y
