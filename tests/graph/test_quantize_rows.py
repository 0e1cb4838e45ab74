"""Rows of activations in 8 bits, against the same in plain torch and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atom.errors import PassError
from atom.graph import Graph, PackedWeight, Type, W, ops, parse, show
from atom.graph.formats import FormatError, act_of, check_act, rounded_act_of
from atom.graph.quantize_rows import quantize_rows, round_rows, round_weight
from atom.weights.quantize import quantize


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


def packed(fmt: str, plain: Tensor) -> PackedWeight:
    return PackedWeight(Type("fp32", tuple(plain.shape), fmt), quantize(fmt, plain))


@pytest.mark.parametrize("fmt", ["int4[1, 32]", "int4[1, 128]", "mxfp4"])
@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128)])
def test_weights_of_4_bits_are_rounded_to_fp8_by_powers_of_2_of_their_rows(fmt: str, shape: tuple[int, ...]):
    torch.manual_seed(0)
    weight = packed(fmt, torch.randn(shape) * torch.logspace(-3, 3, shape[-2]).unsqueeze(-1))
    exact = weight.unpack().double()
    for made, numbers in zip(
        round_weight(weight, "fp8[1, *]").view(-1, 128).double(), exact.view(-1, 128), strict=True
    ):
        scales = [2.0**power for power in range(-40, 40) if numbers.abs().max() <= 448 * 2.0**power]
        assert torch.equal(made, (numbers / scales[0]).to(torch.float8_e4m3fn).double() * scales[0])
    if fmt == "mxfp4":
        assert torch.equal(made, numbers), "e4m3 has all of e2m1"


def test_a_row_fits_by_the_smallest_scale_that_448_has():
    values = torch.full((4, 16), 0x88, dtype=torch.uint8)
    values[:, 0] = 0x8F  # 7, of which 448 is 64 times as much
    scales = torch.tensor([64, 72, 0, 2.0**-140]).unsqueeze(1)
    weight = PackedWeight(Type("fp32", (4, 32), "int4[1, 32]"), {"values": values, "scales": scales})
    assert weight.unpack()[:2, 0].tolist() == [448, 504]
    assert round_weight(weight, "fp8[1, *]")[:, 0].tolist() == [448, 512, 0, 0]


@pytest.mark.parametrize("fmt", ["fp8[1, *]", "int8[1, *]"])
def test_weights_whose_numbers_are_multiplied_as_stored_are_not_rounded(fmt: str):
    weight = packed(fmt, torch.randn(4, 64))
    act = act_of(fmt)
    assert rounded_act_of(fmt) is None and (act is None or torch.equal(round_weight(weight, act), weight.unpack()))


def test_a_linear_multiplies_rounded_rows_by_the_rounded_weight():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 128), packed("int4[1, 128]", torch.randn(3, 128))
    exact = rounded(x, 128, 448.0, whole=False) @ round_weight(weight, "fp8[1, *]").double().T
    assert torch.allclose(ops.linear(x, weight, act="fp8[1, *]").double(), exact, rtol=1e-5, atol=1e-4)
