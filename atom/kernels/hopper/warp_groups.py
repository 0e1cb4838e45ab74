"""The loop over steps of two groups of warps on NVIDIA's Hopper, in Gluon.

One warp loads boxes of x and of a weight by TMA, STAGES steps ahead; each group multiplies its own rows of x by all of
the weight's. `ready` tells the groups that a stage has arrived, `free` the loading warp that both are through with it.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom.kernels.hopper.gluon import jit

GROUPS = gl.constexpr(2)
STAGES = gl.constexpr(4)


@jit
def make_barriers():
    """The barriers of the stages: `ready` and `free`."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()
    return ready, free


@jit
def multiply_steps(x_boxes, weights, ready, free, first, steps, WHO: gl.constexpr, ACC: gl.constexpr):
    """The tile [rows, outs] in fp32 of group WHO, summed over two steps or more.

    first: the pipeline's iteration of the first step

    One MMA runs while the next stage is waited for.
    """
    acc, slot = start_steps(x_boxes, weights, ready, first, WHO, ACC)
    acc, slot = take_steps(acc, slot, x_boxes, weights, ready, free, first + 1, first + steps, WHO)
    return end_steps(acc, slot, free)


@jit
def start_steps(x_boxes, weights, ready, first, WHO: gl.constexpr, ACC: gl.constexpr):
    """The first step of `multiply_steps`: the sums of an MMA that still runs, and its slot."""
    ROWS: gl.constexpr = x_boxes.shape[1]
    OUTS: gl.constexpr = weights.shape[1]
    slot = first % STAGES
    mbarrier.wait(ready.index(slot), first // STAGES & 1)
    acc = gl.zeros([ROWS, OUTS], gl.float32, ACC)
    left, right = x_boxes.index(slot * GROUPS + WHO), weights.index(slot).permute((1, 0))
    acc = warpgroup_mma(left, right, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, slot


@jit
def take_steps(acc, slot, x_boxes, weights, ready, free, first, end, WHO: gl.constexpr):
    """The steps at iterations `first` to `end`, after one in this slot: as `start_steps`."""
    for iteration in range(first, end):
        before, slot = slot, iteration % STAGES
        mbarrier.wait(ready.index(slot), iteration // STAGES & 1)
        left, right = x_boxes.index(slot * GROUPS + WHO), weights.index(slot).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index(before))
    return acc, slot


@jit
def end_steps(acc, slot, free):
    """The sums, once the last MMA is done, which is that of this slot."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(slot))
    return acc
