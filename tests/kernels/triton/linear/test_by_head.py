"""Linears by head multiply each head's columns by its own rows of a weight, plain or packed."""

from __future__ import annotations

import pytest
import torch
from kernels.checks import BF16, assert_as_near, assert_equal, calls_of

pytest.importorskip("triton")

from kernels.triton.linear.test_packed_linear import MATRICES, laid_out, make_weight

from atom.graph import ops
from atom.kernels.triton.linear.linear import Linears
from atom.kernels.triton.linear.tiles import Matrix, Vector

LIBRARY = ["aten::bmm", "aten::baddbmm"]


def linears(tiles: Matrix | Vector | None) -> Linears:
    return Linears(lambda _shape, _gpu: tiles)


@pytest.mark.parametrize("rows", [1, 9, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_of_a_plain_weight_are_those_of_a_block_diagonal_one(triton_device, rows, has_bias):
    heads, out, inner = 3, 32, 40
    weight = torch.randn(heads * out, inner)
    bias = torch.randn(heads * out) if has_bias else None
    x = torch.randn(rows, heads * inner + 1)[:, :-1]  # rows lie apart
    expected = torch.nn.functional.linear(x, torch.block_diag(*weight.split(out)), bias)
    given = [None if each is None else each.to(triton_device) for each in (weight, bias)]
    x = torch.randn(rows, heads * inner + 1, device=triton_device)[:, :-1].copy_(x)
    calls = calls_of(lambda: assert_equal(linears(MATRICES[0]).linear_by_head(x, *given, heads=heads).cpu(), expected))
    assert any(name in LIBRARY for name in calls)


@pytest.mark.parametrize("tokens", [1, 6])
def test_heads_of_values_side_by_side_are_a_convolution(triton_device, tokens):
    x, weight, bias = torch.randn(tokens + 1, 24), torch.randn(6, 8, 2), torch.randn(6)
    expected = torch.nn.functional.conv1d(x.T, weight, bias, groups=3).T
    args = (each.to(triton_device) for each in (torch.cat((x[:-1], x[1:]), 1), weight, bias))
    assert_equal(linears(MATRICES[0]).linear_by_head(*args, heads=3).cpu(), expected)


@pytest.mark.parametrize(("fmt", "inner"), [("fp8[16, 32]", 96), ("int4[1, 128]", 384), ("q8_0", 96)])
@pytest.mark.parametrize(("tiles", "rows"), [(MATRICES[0], 1), (MATRICES[1], 9), (None, 5), (Vector(2, 4, 2, 3), 3)])
def test_heads_of_a_packed_weight_are_those_of_the_unpacked_one(triton_device, fmt, inner, tiles, rows):
    heads, out = 2, 32
    weight = make_weight(triton_device, fmt, heads * out, inner)
    x = torch.randn(rows, heads * inner, device=triton_device)
    plain = weight.unpack()
    expected = torch.nn.functional.linear(x, torch.block_diag(*plain.split(out)))
    assert_equal(ops.linear_by_head(x, weight, heads=heads), expected)
    calls = calls_of(
        lambda: assert_equal(linears(tiles).linear_by_head(x, laid_out(weight), heads=heads), expected, 2e-5)
    )
    assert any(name in LIBRARY for name in calls) != isinstance(tiles, Matrix)


def test_tiles_that_cross_a_head_are_left_to_the_library(triton_device):
    weight = make_weight(triton_device, "int4[1, 128]", 2 * 24, 128)
    x = torch.randn(4, 256, device=triton_device)
    calls = calls_of(lambda: linears(MATRICES[0]).linear_by_head(x, weight, heads=2))
    assert "aten::bmm" in calls


@pytest.mark.parametrize("dtype", [BF16])
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_half_precision_is_as_near_as_the_reference(triton_device, dtype, rows):
    weight = torch.randn(8 * 1024, 512, device=triton_device, dtype=dtype)
    x = torch.randn(rows, 8 * 512, device=triton_device, dtype=dtype)
    truth = ops.linear_by_head(x.float(), weight.float(), heads=8)
    by_reference = ops.linear_by_head(x, weight, heads=8)
    assert_as_near(Linears().linear_by_head(x, weight, heads=8), by_reference, truth)
