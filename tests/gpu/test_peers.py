"""Sums that are pushed between two GPUs: right, equal on both, and in graphs whatever comes late."""

from __future__ import annotations

import pytest
import torch
from gpu.collectives import PUSHED, of, push_among, two_ranks
from gpu.replaying import replay_among

from scripts import bench_gpu

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")


@two_gpus
def test_pushed_sums_equal_those_in_float64_and_nccl_s_and_have_the_same_bits_on_each_rank():
    with two_ranks() as (_, _, run):
        ours, theirs = run("shots")
    cases = [(dtype, shape) for dtype in (torch.float32, torch.bfloat16, torch.float16) for shape in PUSHED]
    for (dtype, shape), our, their in zip(cases, ours, theirs, strict=True):
        exact = (of(0, shape, dtype).double() + of(1, shape, dtype).double()).to(dtype)
        for each in (*our, *their):  # of two ranks, a sum is rounded once
            assert torch.equal(each, exact), (dtype, shape)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num", "count"), [(2, 10_000), (3, 200), (4, 200), pytest.param(4, 100_000, marks=pytest.mark.slow)]
)
def test_replays_of_mixed_calls_are_right_whichever_rank_is_late(num: int, count: int):
    """`scripts/soak-gpu --replays 100000` runs as many as one likes."""
    if count > 1000 and torch.cuda.device_count() < num:
        pytest.skip(f"there are fewer than {num} GPUs here: ranks that share one take turns")
    found = replay_among(num, count)
    assert [each.wrong for each in found] == [0] * num
    assert len({each.checksum for each in found}) == 1 and found[0].checksum != 0
    assert count < 1000 or all(each.num_late > 0 for each in found)


@two_gpus
def test_the_time_of_a_sum_is_measured_on_ranks_with_a_gpu_each():
    found = bench_gpu.measure_sums(2, runs=2)
    assert [len(times) for times in found] == [2, 2, 2], "8, 16 and 64 KB"
    assert all(0.5 < time < 100 for times in found for time in times), found


@pytest.mark.parametrize("num", [3, 4])
def test_more_ranks_push_what_float64_adds_and_have_the_same_bits(num: int):
    found = push_among(num)
    cases = [(dtype, shape) for dtype in (torch.float32, torch.bfloat16) for shape in PUSHED]
    for number, (dtype, shape) in enumerate(cases):
        own = (each[5 * number : 5 * number + 5] for each in found)
        totals, parts, tiled, scattered, gathered = zip(*own, strict=True)
        x = [of(rank, shape, dtype) for rank in range(num)]
        exact, eps = sum(each.double() for each in x), torch.finfo(dtype).eps
        for each in (*totals, *parts, *tiled):
            assert torch.equal(each, totals[0]) and torch.allclose(each.double(), exact, rtol=eps, atol=num * 1e-6)
        rows = sum(of(rank, (num * shape[0], shape[1]), dtype, seed=1).double() for rank in range(num))
        assert torch.allclose(torch.cat(scattered).double(), rows, rtol=eps, atol=num * 1e-6)
        assert all(torch.equal(each, torch.hstack(x)) for each in gathered)
