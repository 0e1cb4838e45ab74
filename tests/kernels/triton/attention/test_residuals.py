"""Attention residuals as Triton computes them, against the op's own body."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.checks import BF16, assert_as_near

from atom.graph import Type, ops
from atom.kernels import LoadContext, Target, find_kernel

KERNEL = find_kernel(ops.attend_residuals, "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("num_sums", "rows", "width"), [(2, 1, 64), (3, 7, 100), (9, 5, 2100), (16, 2, 16)])
def test_it_equals_the_reference(triton_device: str, num_sums: int, rows: int, width: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(width)
    sums = [(torch.randn(rows, width, generator=random) * 3 ** (n % 4)).to(dtype) for n in range(num_sums)]
    sums[1] = torch.cat((sums[1], sums[1]), 1)[:, :width]  # a view of wider rows
    norm, query = (torch.randn(*shape, generator=random).to(dtype) for shape in ((width,), (1, width)))
    own, args = ops.attend_residuals.body, (norm, query, *sums)
    ours = KERNEL.load(LoadContext())(*(each.to(triton_device) for each in args), eps=1e-5).cpu()
    theirs, truth = own(*args, eps=1e-5), own(*(each.double() for each in args), eps=1e-5)
    if dtype is torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    else:
        assert_as_near(ours, theirs, truth)


def test_it_takes_16_sums():
    row, gpu = Type("bf16", ("T", 64)), Target("cuda", frozenset({"nvidia", "sm_90"}))
    weights = Type("bf16", (64,)), Type("bf16", (1, 64))
    assert KERNEL.accepts(gpu, *weights, *[row] * 16, eps=1e-5) is None
    assert KERNEL.accepts(gpu, *weights, *[row] * 17, eps=1e-5) == "attends to 16 sums, not to 17"
