"""Rows of activations in 8 bits, against the same in plain torch and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atom.errors import PassError
from atom.graph import Graph, Type, W, ops, parse, show
from atom.graph.formats import FormatError, act_of, check_act
from atom.graph.quantize_rows import quantize_rows, round_rows


def rounded(x: Tensor, span: int, largest: float, whole: bool) -> Tensor:
    """Each span of each row, one by one."""
    made = torch.empty(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], span):
            numbers = x[row, first : first + span].double()
            scale = (numbers.abs().max().clamp(min=1e-4) / largest).float()
            scaled = (numbers.float() / scale).double()
            made[row, first : first + span] = (scaled.round() if whole else scaled.to(torch.float8_e4m3fn).double()) * scale.double()  # fmt: skip
    return made


CASES = [("int8[1, *]", 50, 127.0, True), ("int8[1, 16]", 16, 127.0, True), ("fp8[1, *]", 50, 448.0, False), ("fp8[1, 16]", 16, 448.0, False)]  # fmt: skip


@pytest.mark.parametrize(("act", "span", "largest", "whole"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_span_is_rounded_by_its_own_scale(act: str, span: int, largest: float, whole: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    x = (torch.randn(7, 50) * torch.tensor([1e-6, 1e-3, 0, 1, 1, 30, 500]).unsqueeze(1)).to(dtype)
    expected = rounded(x, span, largest, whole)
    assert torch.allclose(round_rows(x, act).double(), expected, rtol=1e-6, atol=0)
    values, scales = quantize_rows(x, act)
    assert (values.shape, scales.shape) == (x.shape, (7, -(-50 // span)))
    assert values.dtype == (torch.int8 if whole else torch.float8_e4m3fn)
    again = values.double() * scales.double().repeat_interleave(span, 1)[:, :50]
    assert torch.allclose(again, expected, rtol=1e-6, atol=0)
    if span == 16:
        halves = torch.arange(-3.5, 4.5)  # of two whole numbers the even one
        x = torch.cat((torch.full((8, 1), 127.0), halves.unsqueeze(1)), 1)
        assert not whole or quantize_rows(x, act)[0][:, 1].tolist() == [-4, -2, -2, 0, 0, 2, 2, 4]


@pytest.mark.parametrize("act", ["int8[1, *]", "fp8[1, 16]"])
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_lost(act: str, fault: float):
    x = torch.ones(2, 32)
    x[1, 3] = fault
    outputs = ops.linear(x, torch.ones(4, 32), act=act)
    assert outputs[0].isfinite().all() and outputs[1].isnan().all()


def test_a_linear_multiplies_the_rounded_rows():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 50), torch.randn(3, 50), torch.randn(3)
    exact = rounded(x, 50, 127.0, whole=True) @ weight.double().T + bias.double()
    assert torch.allclose(ops.linear(x, weight, bias, act="int8[1, *]").double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ops.linear(x, weight, bias).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fmt", "act"),
    [
        ("fp8[128, 128]", "fp8[1, 128]"),
        ("ct_fp8[*, *]", "fp8[1, *]"),
        ("ct_fp8[1, *]", "fp8[1, *]"),
        ("int8[1, *]", "int8[1, *]"),
        ("ct_int8[1, 64]", "int8[1, 64]"),
        ("int4[1, 128]", None),
        ("ct_packed_int8[1, *]", None),  # stored with 128 added
        ("q8_0", None),
        ("mxfp4", None),
    ],
)
def test_activations_have_the_numbers_and_columns_of_the_weight(fmt: str, act: str | None):
    assert act_of(fmt) == act


@pytest.mark.parametrize("act", ["int4[1, 128]", "fp8[128, 128]", "mxfp4", "ct_fp8[1, *]", "fp8"])
def test_other_formats_of_activations_are_refused(act: str):
    with pytest.raises(FormatError, match="activations cannot be"):
        check_act(act)
    program = Graph().program("f")
    x = program.input("x", Type("fp32", ("T", 32)))
    with pytest.raises(PassError, match="activations cannot be"):
        program.call(ops.linear, x, W("w", Type("fp32", (8, 32))), act=act)


def test_the_format_of_activations_stands_in_the_text():
    text = """\
def f(x: bf16[T, 32], n: bf16[32]):
    y = linear(x, W("w", bf16[8, 32], fmt="fp8[1, *]"), act="fp8[1, *]")    # bf16[T, 8]
    z = norm_linear(x, n, W("z", bf16[8, 32], fmt="int8[1, *]"), eps=1e-06, kind="silu", act="int8[1, *]")    # bf16[T, 4]
    return y, z
"""
    assert show(parse(text)) == text
