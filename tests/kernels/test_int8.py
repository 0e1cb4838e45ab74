"""Matmuls of 8-bit integers on a CPU, against exact ones of plain torch."""

from __future__ import annotations

import pytest
import torch
from kernels.checks import relative_error
from torch import Tensor

from atom.graph import LaidOut, PackedWeight, Type, ops
from atom.kernels import Target, find_kernel, find_target, shuffle
from atom.kernels.backend import LoadContext

ACT = "int8[1, *]"
KERNEL = find_kernel(ops.linear, "int8")
CPU = Target("cpu", frozenset({"int8_products"}))
BOUNDS = {"fp32": 1e-6, "bf16": 4e-3, "fp16": 6e-4}  # one rounding of the result
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def draw(dtype: str, out: int, inner: int) -> tuple[LaidOut, Tensor, Tensor]:
    """A weight in panels, its integers, and the scales of its rows."""
    values, scales = torch.randint(-127, 128, (out, inner)), torch.rand(out, 1) / 100
    parts = {"values": values.to(torch.int8), "scales": scales}
    packed = shuffle(PackedWeight(Type(dtype, (out, inner), "int8[1, *]"), parts), "panels")
    assert isinstance(packed, LaidOut)
    if inner <= 64 and dtype == "bf16":
        scales = scales.bfloat16().float()  # as `cpp` keeps those of narrow groups
    return packed, values, scales


def exact(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The matmul of rounded rows, summed in int64."""
    row_scales = x.abs().amax(1, keepdim=True).float() / 127
    numbers = (x.float() / row_scales).round().long()
    y = (numbers @ values.T).double() * row_scales.double() * scales.double().T
    return y if bias is None else y + bias.double()


def run(x: Tensor, weight: LaidOut, bias: Tensor | None = None) -> Tensor:
    made: Tensor = KERNEL.load(LoadContext())(x, weight, bias, act=ACT)
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("out", "inner"), [(200, 192), (17, 34), (1, 2), (48, 61), (33, 700)])
@pytest.mark.parametrize("rows", [33, 70, 1100])
def test_many_rows_are_multiplied_as_integers(rows: int, out: int, inner: int, dtype: str):
    weight, values, scales = draw(dtype, out, inner)
    x, bias = torch.randn(rows, inner).to(DTYPES[dtype]), torch.randn(out).to(DTYPES[dtype])
    for each in (None, bias):
        y = run(x, weight, each)
        assert (y.dtype, y.shape) == (x.dtype, (rows, out))
        assert relative_error(y, exact(x, values, scales, each)) < BOUNDS[dtype]
    lying_apart = torch.randn(rows, inner + 3).to(DTYPES[dtype])[:, :inner]
    assert relative_error(run(lying_apart, weight), exact(lying_apart, values, scales, None)) < BOUNDS[dtype]


@pytest.mark.parametrize("rows", [1, 2, 17, 32])
def test_few_rows_are_multiplied_as_they_are(rows: int):
    weight, values, scales = draw("fp32", 200, 192)
    x = torch.randn(rows, 192)
    truth = x.double() @ (values * scales).double().T
    assert relative_error(run(x, weight), truth) < 1e-6
    assert relative_error(exact(x, values, scales, None), truth) > 1e-3, "rounding is seen"


def test_a_row_that_has_no_number_gives_none():
    weight, _, _ = draw("fp32", 20, 64)
    x = torch.randn(40, 64)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    is_bad = run(x, weight).isnan().all(1)
    assert is_bad.nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize(
    ("fmt", "act", "target", "reason"),
    [
        ("int8[1, *]", ACT, CPU, None),
        ("ct_int8[1, *]", ACT, CPU, None),
        ("int8[1, *]", None, CPU, "multiplies only quantized activations"),
        ("int8[1, *]", ACT, Target("cpu"), "this CPU has no int8 dot products"),
        ("int8[1, *]", ACT, Target("cuda"), "runs on cpu, not on cuda"),
        ("int8[1, 32]", "int8[1, 32]", CPU, "activations in int8[1, 32] are not multiplied by weights in int8[1, 32]"),
        ("fp8[1, *]", "fp8[1, *]", CPU, "has no matmuls of activations in fp8[1, *]"),
        ("fp8[1, *]", ACT, CPU, "activations in int8[1, *] are not multiplied by weights in fp8[1, *]"),
    ],
)
def test_what_it_takes(fmt: str, act: str | None, target: Target, reason: str | None):
    types = Type("bf16", ("T", 64)), Type("bf16", (64, 64), fmt)
    assert KERNEL.accepts(target, *types, **({} if act is None else {"act": act})) == reason


def test_the_text_of_this_machine_says_whether_it_has_them():
    with open("/proc/cpuinfo") as file:
        has = any(name in file.read().split() for name in ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm"))
    assert ("int8_products" in find_target("cpu").features) == has
