"""Activations in the epilogue of the library's linears, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.checks import assert_as_near

from atom.graph import ops
from atom.kernels.triton.linear.epilogue import linear_activate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inner", "out"), [(4096, 1152, 4304), (1, 1152, 4304), (300, 1152, 2152), (7, 24, 34)]
)
def test_gelu_is_as_near_as_that_of_a_rounded_sum(rows: int, inner: int, out: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in ((rows, inner), (out, inner), (out,)))
    weight = weight / inner**0.5
    truth = F.gelu(F.linear(*(each.double() for each in (x, weight, bias))), approximate="tanh")
    made = linear_activate(x, weight, bias, kind="gelu_tanh")
    assert_as_near(made, ops.linear_activate(x, weight, bias, kind="gelu_tanh"), truth)
