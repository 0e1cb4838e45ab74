"""Segment attention on Hopper: when it is chosen, that it compiles, and on such a GPU what it computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near
from kernels.compiling import compile_for_hopper
from kernels.hopper.emulated import Pointer, emulate

from atom.graph import ops
from atom.graph.types import Type
from atom.kernels.backend import Target
from atom.kernels.hopper import GLUON, accepts_segments, segment_attention

HOPPER = Target("cuda", frozenset({GLUON}))
IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [(64, "bf16", None), (72, "bf16", None), (128, "bf16", None), (72, "fp16", "fp16"), (60, "bf16", "60 dims"), (136, "bf16", "136")],
)  # fmt: skip
def test_it_takes_heads_of_towers_in_bf16(dim: int, dtype: str, reason: str | None):
    q = Type(dtype, ("P", 16, dim))
    refused = accepts_segments(HOPPER, q, q, q, Type("i32", ("S",)), scale=0.1)
    assert refused is None if reason is None else reason in str(refused)


@pytest.mark.parametrize(
    "sizes", [(1,), (0, 128, 0), (129, 1, 0, 127, 128, 0, 257), (4096, 4096), (64,) * 9, (0,)], ids=str
)
def test_tiles_are_found_one_after_another(sizes: tuple[int, ...]):
    """Of 4 segments that are looked at together: 7, 9 and fewer; no number has a tile that is empty."""
    program = emulate(segment_attention, SOUGHT=4)
    starts = [0, *itertools.accumulate(sizes)]
    expected = [
        (first, end, begin) for first, end in itertools.pairwise(starts) for begin in range(first, end, program.ROWS)
    ]
    pointer = Pointer(torch.tensor(starts, dtype=torch.int32))
    assert program.count_all_tiles(pointer, len(sizes)) == len(expected)
    found = [tuple(map(int, program.find_tile(pointer, len(sizes), tile))) for tile in range(len(expected))]
    assert found == expected


COMPILE = """
import torch
from kernels.compiling import use_hopper
use_hopper()
from atom.kernels.hopper import segment_attention as segments
from atom.kernels.triton.gpu import Gpu

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **options: print(self.kernel.warmup(*args, grid=grid, **options).metadata.shared)

segments._segment_attention = Compile(segments._segment_attention)
segments.find_gpu = lambda device: Gpu(132, 227 << 10, (9, 0))
starts = torch.tensor([0, 600], dtype=torch.int32)
assert not segments.suits(torch.zeros(600, 1, 72), starts), "not in float32"
assert not segments.suits(torch.zeros(600, 1, 72).bfloat16(), torch.tensor([0, 300, 600])), "of few patches"
for dim in (64, 72, 88, 128):
    q, k, v = torch.zeros(600, 3, 2, dim, dtype=torch.bfloat16).unbind(1)
    segments.segment_attention(q, k, v, starts, scale=0.1)
"""


@pytest.mark.slow
def test_it_compiles():
    shared = [int(line) for line in compile_for_hopper(COMPILE).stdout.split()]
    assert len(shared) == 4 and max(shared) <= 227 << 10


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="runs on NVIDIA's Hopper only")
@pytest.mark.parametrize("dim", [64, 72, 80, 88, 96, 104, 128])
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize(
    "sizes", [(1,), (128,), (129, 1, 0, 127, 128, 0), (4096, 1, 900), (5, 0) * 70, (1000, 257)], ids=str
)
def test_segments_are_as_near_as_the_reference(heads: int, dim: int, sizes: tuple[int, ...]):
    """Whether it would be chosen or not; q, k and v are views of one output."""
    from atom.kernels.hopper.segment_attention import attend

    starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    q, k, v = torch.randn(int(starts[-1]), 3, heads, dim).to("cuda", torch.bfloat16).unbind(1)
    given: Any = {"scale": dim**-0.5}
    truth = ops.segment_attention.body(q.float(), k.float(), v.float(), starts, **given)
    expected = ops.segment_attention.body(q, k, v, starts, **given)
    assert_as_near(attend(q, k, v, starts.cuda(), dim**-0.5), expected, truth, 2.0)
