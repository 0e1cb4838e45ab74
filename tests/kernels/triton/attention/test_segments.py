"""Attention of segments on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.checks import BF16, assert_as_near, assert_equal

from atom.graph import ops
from atom.kernels.triton.attention.segments import Parameters, divide_dim, segment_attention

TILES = Parameters(16, 16, 4, 1)  # small, so that segments are of many
FEW = TILES._replace(segments=8)


def starts_of(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [(1,), (16, 1, 33, 0, 0), (40, 7)], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(3, 72), (1, 80), (2, 88), (2, 64), (1, 20), (1, 8), (1, 128)])
def test_segments_equal_the_reference(triton_device, heads, dim, sizes):
    starts = starts_of(*sizes)
    q, k, v = torch.randn(int(starts[-1]), 3, heads, dim).unbind(1)  # views of one output
    expected = ops.segment_attention.body(q, k, v, starts, scale=0.2)
    given = (each.to(triton_device) for each in (q, k, v, starts))
    made = segment_attention(*given, scale=0.2, parameters=TILES)
    assert_equal(made.cpu(), expected)


def test_windows_of_many_segments_find_their_own_tiles(triton_device):
    """More than are counted at a time."""
    starts = starts_of(*[4, 1] * 10)
    q, k, v = torch.randn(3, int(starts[-1]), 1, 16).unbind()
    sums = segment_attention(
        *(each.to(triton_device) for each in (q * 0, k, v, starts)), scale=1.0, parameters=FEW
    ).cpu()
    means = [v[first:last].mean(0, keepdim=True).expand(last - first, 1, 16) for first, last in
             itertools.pairwise(starts.tolist())]  # fmt: skip
    assert_equal(sums, torch.cat(means))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [64, 72, 80, 88, 128, 160])
@pytest.mark.parametrize("sizes", [(4096, 1, 900), (64,) * 40], ids=["images", "windows"])
def test_half_precision_is_as_near_as_the_reference(triton_device, dim, dtype, sizes):
    starts = starts_of(*sizes)
    q, k, v = torch.randn(int(starts[-1]), 3, 16, dim).to(triton_device, dtype).unbind(1)
    truth = ops.segment_attention.body(q.float(), k.float(), v.float(), starts, scale=dim**-0.5)
    by_flash = segment_attention(q, k, v, starts.to(triton_device), scale=dim**-0.5)
    assert_as_near(by_flash, ops.segment_attention.body(q, k, v, starts, scale=dim**-0.5), truth, 2.0)


def test_dims_past_a_power_of_two_are_multiplied_apart():
    assert [divide_dim(dim) for dim in (8, 16, 20, 64, 72, 80, 88, 96, 97, 128)] == [
        (16, 0), (16, 0), (32, 0), (64, 0), (64, 16), (64, 16), (64, 32), (64, 32), (128, 0), (128, 0)
    ]  # fmt: skip
