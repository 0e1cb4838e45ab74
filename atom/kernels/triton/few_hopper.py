"""Plain experts of few tokens in two launches on NVIDIA's Hopper, in Gluon; few_packed_hopper.py has packed ones.

    m = multiply_gates(x, ids, gate_up, bias, "silu")     # x [T, H], ids i64[T, k] -> [k T, W]
    y = multiply_downs(m, weights, ids, down, bias)       # and summed by the weights fp32[T, k]: [T, H]

A program has ROWS rows of a weight: gates and the ups beside them of one pair of token and expert, or so many downs of
each of a token's experts. Their boxes come by TMA, some stages ahead, and are multiplied by mma, of which x is the
right side. Of downs that has a column for each expert's x, and of the products those count in which a column meets its
own expert's rows.

Downs are sent for before gates and ups have ended: the ids were written by a kernel that these have waited for.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from atom.kernels.triton.activations import activate_rounded
from atom.kernels.triton.gluon import jit
from atom.kernels.triton.gpu import Gpu, find_gpu, next_power_of_2
from atom.kernels.triton.linear.packed_hopper import barrier, gated_shape
from atom.kernels.triton.tensor_descriptors import TensorDescriptors, align_rows

ROWS, COLUMNS = gl.constexpr(64), gl.constexpr(64)  # of a box of the weight
TOKENS = gl.constexpr(8)  # rows of x in a box, which a product by mma has at least
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
GATED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))  # of 16 rows each 8 gates, then their ups
ACC = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
BOXES = gl.constexpr(2)  # in a stage
MOST_CHOSEN = TOKENS.value  # experts of a token
FEW = 4  # tokens, up to which they are not grouped
BOX_BYTES = (ROWS.value + TOKENS.value) * COLUMNS.value * 2  # shared memory of a box of the weight, and of x beside it
OTHER_MEMORY = 2048  # bytes of a program's shared memory beside its stages
MAX_STAGES = 8


def choose_stages(programs: int, inner: int, gpu: Gpu) -> int:
    """Stages that hold a program's part of the weight, or as many as fit where all programs run at once."""
    together = min(-(-programs // gpu.units), 4)
    fitting = (gpu.shared_memory // together - OTHER_MEMORY) // (BOXES.value * BOX_BYTES)
    return int(max(1, min(fitting, count_steps(inner), MAX_STAGES)))


def count_steps(inner: int) -> int:
    """Stages that a program goes through."""
    return int(-(-inner // (BOXES.value * COLUMNS.value)))


@jit
def _send(x, weight, x_row, starts, step, slot, memory, WITH_WEIGHT: gl.constexpr, WITH_X: gl.constexpr,
          PARTS: gl.constexpr):  # fmt: skip
    """Send for a stage: the weight's boxes, those of x, or both. starts: where the parts of a box begin in the weight

    PARTS: that a box has, each of neighbouring rows; None: gates and ups, in turns of 8.
    """
    x_boxes, weight_boxes, ready = memory
    bar = ready.index(slot)
    ALL: gl.constexpr = 1 if PARTS is None else PARTS  # that there is room for
    if WITH_WEIGHT:
        mbarrier.expect(bar, BOXES * (len(starts) * (ROWS // ALL) + TOKENS) * COLUMNS * 2)
        for number in gl.static_range(BOXES):
            column, box = (step * BOXES + number) * COLUMNS, slot * BOXES + number
            if PARTS is None:
                tma.async_copy_global_to_shared(weight, [starts[0], 0, 0, column], bar, weight_boxes.index(box))
            else:
                for part in gl.static_range(len(starts)):
                    place = weight_boxes.index(box * PARTS + part)
                    tma.async_copy_global_to_shared(weight, [starts[part], column], bar, place)
    if WITH_X:
        for number in gl.static_range(BOXES):
            column = (step * BOXES + number) * COLUMNS
            tma.async_copy_global_to_shared(x, [x_row, column], bar, x_boxes.index(slot * BOXES + number))


@jit
def _allocate(x, weight, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for boxes of x and of the weight, the latter as tiles, and barriers."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, TOKENS, COLUMNS], TILE)
    if PARTS is None:
        boxes = gl.allocate_shared_memory(weight.dtype, [STAGES * BOXES, ROWS // 16, 2, 8, COLUMNS], GATED)
    else:
        boxes = gl.allocate_shared_memory(weight.dtype, [STAGES * BOXES * PARTS, ROWS // PARTS, COLUMNS], TILE)
    tiles = boxes._reinterpret(weight.dtype, [STAGES * BOXES, ROWS, COLUMNS], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    barrier()
    return (x_boxes, boxes, ready), tiles


@jit
def _sum_up(x, weight, x_row, starts, steps, memory, tiles, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The products of a tile by x, fp32[ROWS, TOKENS], in so many steps, of which some were sent for."""
    x_boxes, _, ready = memory
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), step // STAGES & 1)
        for number in gl.static_range(BOXES):
            box = slot * BOXES + number
            acc = mma_v2(tiles.index(box).load(LEFT), x_boxes.index(box).permute((1, 0)).load(RIGHT), acc)
        if step + STAGES < steps:
            barrier()  # all have read the stage
            _send(x, weight, x_row, starts, step + STAGES, slot, memory, True, True, PARTS)
    return acc


@jit
def _pick(acc, column):
    """One column of each row's products, i32[ROWS]: fp32[ROWS]"""
    columns = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))
    return gl.sum(gl.where(columns[None, :] == column[:, None], acc, 0.0), 1)


@jit(do_not_specialize=["steps"])
def _gates_kernel(
    x, ids, weight, bias, y, steps, TOP_K: gl.constexpr, OUT: gl.constexpr, KIND: gl.constexpr, LIMIT: gl.constexpr,
    ALPHA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS / 2 gates and their ups of one pair of token and expert, activated, in so many steps.

    OUT: gates and ups of an expert.
    """
    memory, tiles = _allocate(x, weight, None, STAGES)
    pair, first = gl.program_id(1), gl.program_id(0) * (ROWS // 2)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    expert = gl.load(ids + pair).to(gl.int32)
    starts = ((expert * OUT + first) // 8,)
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _send(x, weight, pair // TOP_K, starts, stage, stage, memory, True, True, None)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    acc = _sum_up(x, weight, pair // TOP_K, starts, steps, memory, tiles, None, STAGES)
    sums = _pick(acc, row * 0)
    if bias is not None:
        out = gl.minimum(first + row // 16 * 8 + row % 8, OUT // 2 - 1) + row // 8 % 2 * (OUT // 2)
        sums += gl.load(bias + expert * OUT + out).to(gl.float32)
    gates, ups = sums.to(y.dtype.element_ty).reshape([ROWS // 16, 2, 8]).permute((0, 2, 1)).split()
    m = activate_rounded(gates, ups, KIND, LIMIT, ALPHA)
    turn = gl.arange(0, ROWS // 16, layout=gl.SliceLayout(1, m.type.layout))
    column = first + turn[:, None] * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, m.type.layout))[None, :]
    gl.store(y + pair * (OUT // 2) + column, m, mask=column < OUT // 2)


@jit(do_not_specialize=["steps"])
def _downs_kernel(
    x, weights, ids, weight, bias, y, steps, TOP_K: gl.constexpr, OUT: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS / PARTS outputs of a token, summed over its experts, in so many steps.

    PARTS: a power of 2, of which TOP_K are used.
    """
    EACH: gl.constexpr = ROWS // PARTS
    memory, tiles = _allocate(x, weight, PARTS, STAGES)
    first_pair, first = gl.program_id(1) * TOP_K, gl.program_id(0) * EACH
    starts = ()
    for choice in gl.static_range(TOP_K):
        expert = gl.load(ids + first_pair + choice, cache_modifier=".cg").to(gl.int32)
        starts += (expert * OUT + first,)  # type: ignore[assignment]
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _send(x, weight, first_pair, starts, stage, stage, memory, True, False, PARTS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    choices = gl.minimum(row // EACH, TOP_K - 1)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        if stage < steps:
            _send(x, weight, first_pair, starts, stage, stage, memory, False, True, PARTS)
    shares = gl.load(weights + first_pair + choices)
    acc = _sum_up(x, weight, first_pair, starts, steps, memory, tiles, PARTS, STAGES)
    result = _pick(acc, row // EACH)
    if bias is not None:
        experts = gl.load(ids + first_pair + choices).to(gl.int32)
        result += gl.load(bias + experts * OUT + gl.minimum(first + row % EACH, OUT - 1)).to(gl.float32)
    result = gl.where(row // EACH < TOP_K, result.to(y.dtype.element_ty).to(gl.float32) * shares, 0.0)
    total = gl.sum(result.reshape([PARTS, EACH]), 0)
    place = first + gl.arange(0, EACH, layout=total.type.layout)
    gl.store(y + gl.program_id(1) * OUT + place, total.to(y.dtype.element_ty), mask=place < OUT)


X_BOXES = TensorDescriptors((TOKENS.value, COLUMNS.value), TILE.value)
GATE_BOXES = TensorDescriptors((ROWS.value // 16, 2, 8, COLUMNS.value), GATED.value)


@functools.cache
def _down_boxes(rows: int) -> TensorDescriptors:
    return TensorDescriptors((rows, COLUMNS.value), TILE.value)


def suits_few(x: Tensor, ids: Tensor, gate_up: Tensor) -> bool:
    """Whether these tokens go through their experts without being grouped."""
    _, out, inner = gate_up.shape
    is_few = 0 < len(x) <= FEW and ids.shape[1] <= MOST_CHOSEN
    return is_few and x.dtype == torch.bfloat16 and out % 16 == inner % 8 == 0


def multiply_gates(
    x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, kind: str, limit: float | None = None,
    alpha: float | None = None, stages: int | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], ids i64[T, k], weight [E, 2 W, H], gates before ups, bias [E, 2 W] -> gated_activate [k T, W]."""
    experts, out, inner = weight.shape
    x, tiles = align_rows(x), -(-out // ROWS.value)
    # as of a power of two tokens, for which kernels are compiled ahead
    programs = tiles * next_power_of_2(len(ids)) * ids.shape[1]
    stages = stages or choose_stages(programs, inner, find_gpu(x.device))
    weights = GATE_BOXES.find(weight, *gated_shape(weight, experts, out))
    y = x.new_empty(ids.numel(), out // 2)
    _gates_kernel[(tiles, len(y))](
        X_BOXES.find(x, tuple(x.shape), x.stride()), ids, weights, bias, y, count_steps(inner), ids.shape[1], out, kind,
        limit, alpha, stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


def multiply_downs(
    x: Tensor, weights: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, stages: int | None = None
) -> Tensor:
    """x [k T, W], weights fp32[T, k], ids i64[T, k], weight [E, H, W], bias [E, H] -> [T, H]

    The kernel ahead is `multiply_gates`, of the same ids.
    """
    (experts, out, inner), (tokens, top_k) = weight.shape, ids.shape
    parts = next_power_of_2(top_k)
    each = ROWS.value // parts
    tiles = -(-out // each)
    stages = stages or choose_stages(tiles * next_power_of_2(tokens), inner, find_gpu(x.device))
    downs = _down_boxes(each).find(weight, (experts * out, inner), (inner, 1))
    y = x.new_empty(tokens, out)
    _downs_kernel[(tiles, tokens)](
        X_BOXES.find(x, tuple(x.shape), x.stride()), weights, ids, downs, bias, y, count_steps(inner), top_k, out,
        parts, stages, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y
