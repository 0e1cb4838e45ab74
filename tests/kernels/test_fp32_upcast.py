"""GEMMs of 16-bit weights in float32, against float64."""

from __future__ import annotations

import pytest
import torch
from kernels.checks import relative_error

from atom.graph import Type, ops
from atom.kernels import Target, find_kernel
from atom.kernels.backend import LoadContext

BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # one rounding of the result


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("out", "inner"), [(200, 192), (17, 34), (1, 1), (700, 2000)])
@pytest.mark.parametrize("rows", [1, 11, 12, 70])
def test_results_are_rounded_once(rows: int, out: int, inner: int, dtype: torch.dtype):
    run = find_kernel(ops.linear, "widened").load(LoadContext())
    x, weight, bias = torch.randn(rows, inner).to(dtype), torch.randn(out, inner).to(dtype), torch.randn(out).to(dtype)
    truth = x.double() @ weight.double().T
    assert relative_error(run(x, weight), truth) < BOUNDS[dtype]
    assert relative_error(run(x, weight, bias), truth + bias.double()) < BOUNDS[dtype]
    assert run(x, weight).dtype == dtype


def test_experts_are_multiplied_by_their_own_rows():
    run = find_kernel(ops.grouped_linear, "widened").load(LoadContext())
    x, weight, bias = (torch.randn(size).bfloat16() for size in ((50, 64), (3, 40, 64), (3, 40)))
    weight[1] = float("nan")  # an expert without rows is not read
    ends = torch.tensor([20, 20, 45])
    y = run(x, weight, ends, bias)
    for expert, rows in ((0, slice(0, 20)), (2, slice(20, 45))):
        truth = x[rows].double() @ weight[expert].double().T + bias[expert].double()
        assert relative_error(y[rows], truth) < BOUNDS[torch.bfloat16]
    assert y[45:].count_nonzero() == 0


@pytest.mark.parametrize(
    ("features", "dtype", "reason"),
    [
        (frozenset(), "bf16", None),
        (frozenset({"onednn_bf16"}), "bf16", "oneDNN multiplies bf16 on this CPU"),
        (frozenset({"onednn_bf16"}), "fp16", None),
        (frozenset(), "fp32", "fp32 is as wide as float32"),
    ],
)
def test_it_accepts_the_dtypes_that_onednn_lacks(features: frozenset[str], dtype: str, reason: str | None):
    kernel = find_kernel(ops.linear, "widened")
    assert kernel.accepts(Target("cpu", features), Type(dtype, ("T", 64)), Type(dtype, (64, 64))) == reason
