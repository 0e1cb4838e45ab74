"""Sums that are pushed between two GPUs: right, equal on both, and in graphs whatever comes late."""

from __future__ import annotations

import pytest
import torch
from gpu.collectives import PUSHED, of, two_ranks
from gpu.steps import ON_GPU

pytestmark = [*ON_GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")]


def test_pushed_sums_equal_those_in_float64_and_nccl_s_and_have_the_same_bits_on_each_rank():
    with two_ranks() as (_, _, run):
        ours, theirs = run("shots")
    cases = [(dtype, shape) for dtype in (torch.float32, torch.bfloat16, torch.float16) for shape in PUSHED]
    for (dtype, shape), our, their in zip(cases, ours, theirs, strict=True):
        exact = (of(0, shape, dtype).double() + of(1, shape, dtype).double()).to(dtype)
        for each in (*our, *their):  # of two ranks, a sum is rounded once
            assert torch.equal(each, exact), (dtype, shape)


def test_replays_of_mixed_calls_are_right_with_ranks_that_are_late():
    with two_ranks() as (_, _, run):
        ours, theirs = run("mixed")
    assert ours == theirs == [0, 10_000]
