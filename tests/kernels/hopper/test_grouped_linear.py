"""Grouped GEMMs of many rows on Hopper: that they compile, and on such a GPU what they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.checks import poisoned
from kernels.compiling import compile_for_hopper
from kernels.hopper.emulated import Value, WarpGroups, emulate, value
from kernels.hopper.test_hopper import FORMATS, H200, IS_HOPPER, draw, make
from kernels.triton.linear.test_row_kernels import in_order

from atom.graph import PackedWeight, ops
from atom.graph.quantize_rows import quantize_rows as ops_quantize
from atom.graph.quantize_rows import round_rows
from atom.kernels.hopper import grouped_linear as grouped_hopper
from atom.kernels.hopper import warp_groups
from atom.kernels.hopper.experts import unpack_experts
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear.row_kernels import FP8, QuantizedRows, quantize_rows, span_of

COMPILE = """
import sys, torch, triton
from kernels.compiling import use_hopper
from kernels.hopper.test_hopper import FORMATS, H200, draw
from atom.kernels.hopper.shuffle import shuffle
from atom.kernels.hopper import grouped_linear as grouped_hopper, grouped_packed_linear as grouped_packed_hopper
from atom.kernels.triton.experts import moe
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.linear.row_kernels import FP8

class Compile:
    def __init__(self, kernel, has_wgmma):
        self.kernel, self.has_wgmma = kernel, has_wgmma
    def __getitem__(self, grid):
        def compile(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            assert made.metadata.shared <= H200.shared_memory
            ptx = made.asm["ptx"]
            assert ("wgmma.mma_async" in ptx) == self.has_wgmma and ".local" not in ptx
            if self.has_wgmma:
                assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.bulk.tensor"), "inputs are waited for"
                print("compiled")
        return compile

use_hopper()
for module in (grouped_hopper, grouped_packed_hopper):
    module.find_gpu = lambda device: H200
    module._multiply = Compile(module._multiply, True)
grouped_hopper._plan_kernel = Compile(grouped_hopper._plan_kernel, False)
bf16 = torch.bfloat16
x, ends, weight, bias = torch.zeros(600, 512, dtype=bf16), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 256, 512, dtype=bf16), torch.zeros(4, 256, dtype=bf16)
silu, clamped = Gate("silu"), Gate("swigluoai", 7.0, 1.7)
calls = (bias, None), (None, silu), (None, None), (bias, clamped)
for own, gate in calls if sys.argv[1] == "all" else calls[:2]:
    grouped_hopper.multiply(x, weight, ends, own, gate)
for number, fmt in enumerate(FORMATS):
    experts = shuffle(draw(fmt, 4, 256, 512))
    calls = (), (bias, clamped)
    for rest in calls if sys.argv[1] == "all" else [calls[number % 2]]:
        grouped_packed_hopper.multiply(x, experts, grouped_packed_hopper.plan_tiles(ends, len(x)), *rest)
order = torch.zeros(600, dtype=torch.int64)
for fmt, spans in ("fp8[128, 128]", 4), ("fp8[1, *]", 1):
    experts = shuffle(draw(fmt, 4, 256, 512))
    for gate, own in (None, ()), (silu, (order, 8)):
        plan = grouped_hopper.plan_fp8(ends, len(x))
        grouped_hopper.multiply_fp8(x.to(FP8), torch.zeros(spans, 600).t(), experts, plan, None, gate, *own)
    if spans > 1:
        grouped_hopper.multiply_and_quantize(x.to(FP8), torch.zeros(spans, 600).t(), experts, plan, silu, order, 8)
"""


@pytest.mark.slow  # scripts/check-kernels compiles a variant of each kernel
@pytest.mark.parametrize("share", ["few", "all"])
def test_they_compile_for_such_a_gpu(share: str):
    done = compile_for_hopper(COMPILE, share)
    assert done.stdout.count("compiled") == (1 if share == "few" else 2) * (2 + len(FORMATS)) + 5
    assert "serialized" not in done.stderr, "of wgmma: ptxas warns where products would wait for each other"


IN_FP8 = pytest.mark.parametrize(("fmt", "act"), [("fp8[128, 128]", "fp8[1, 128]"), ("fp8[1, *]", "fp8[1, *]")])
COUNTS = pytest.mark.parametrize(
    "counts", [[1], [0, 1, 63, 64, 65, 0, 127, 128, 129, 300], [0, 0, 1500, 0], [5] * 40, [2100, 3], [255, 256, 257]]
)
SILU, CLAMPED = Gate("silu"), Gate("swigluoai", 7.0, 1.702)
GATES = pytest.mark.parametrize("gate", [None, SILU, CLAMPED])


def truth_of(x: torch.Tensor, weight: torch.Tensor, counts: list[int], bias: Any, gate: Any) -> torch.Tensor:
    """In float64, which experts without rows have no part in."""
    own = x.double().split(counts)
    products = [
        rows @ weight[expert].double().t() + (0 if bias is None else bias[expert].double())
        for expert, rows in enumerate(own)
        if len(rows)
    ]
    return torch.cat(products) if gate is None else ops.gated_activate.body(torch.cat(products), **gate._asdict())


def check(multiply: Any, x: torch.Tensor, counts: list[int], plain: torch.Tensor, bias: Any, gate: Any) -> None:
    truth = truth_of(x, plain, counts, bias, gate)
    y = multiply()
    assert y.dtype == torch.bfloat16 and y.shape == truth.shape and y.isfinite().all()
    assert (y.double() - truth).norm() <= 0.006 * truth.norm()
    assert (y.double() - truth).abs().max() <= 0.02 * truth.abs().max()
    assert all(torch.equal(multiply(), y) for _ in range(3))


def activate(_asm: str, _constraints: str, args: list[Value], **_: Any) -> Value:
    """The instructions of a silu."""
    gates, ups = args
    return value(ops.gated_activate.body(torch.cat([gates, ups], -1), kind="silu"))


def find_owner(counts: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends = counts.cumsum(0)
    return (ends <= tile).sum(), torch.where(ends <= tile, ends, 0).max()


@pytest.fixture(scope="module")
def emulated() -> SimpleNamespace:
    """The kernels, without a GPU: a program takes some tiles."""
    groups = WarpGroups().names
    shared = emulate(warp_groups, **groups)
    names = ("GROUPS", "STAGES", "make_barriers", "multiply_steps", "start_steps", "take_steps", "end_steps")
    own = {name: getattr(shared, name) for name in names}
    return emulate(
        grouped_hopper, **groups, **own, find_owner=find_owner, inline_asm_elementwise=activate,
        find_gpu=lambda _: H200._replace(units=3),
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("gate", [None, SILU])
@pytest.mark.parametrize("counts", [[1], [0, 64, 65, 0, 128, 130], [5] * 9])
def test_experts_multiply_their_rows_by_these_programs(counts: list[int], gate: Any, emulated: SimpleNamespace):
    x, weight = (torch.randn(shape).bfloat16() for shape in ((sum(counts), 136), (len(counts), 2 * 72, 136)))
    bias = torch.randn(len(counts), 2 * 72).bfloat16()
    weight[torch.tensor(counts) == 0] = torch.nan
    ends = torch.tensor(counts).cumsum(0)
    for each in (None, bias):
        y = emulated.multiply(x, weight * 0.1, ends, each, gate)
        truth = truth_of(x, weight * 0.1, counts, each, gate)
        assert (y.double() - truth).norm() <= 0.006 * truth.norm()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("inner", [64, 72, 136, 520])
@pytest.mark.parametrize("counts", [[1], [0, 64, 65, 0, 128, 130], [5] * 9, [0, 0, 400, 0]])
def test_tiles_are_stored_late_by_these_programs(counts: list[int], inner: int, emulated: SimpleNamespace):
    x, weight = (torch.randn(shape).bfloat16() for shape in ((sum(counts), inner), (len(counts), 328, inner)))
    weight[torch.tensor(counts) == 0] = torch.nan
    y = emulated.multiply(x, weight * 0.1, torch.tensor(counts).cumsum(0))
    truth = truth_of(x, weight * 0.1, counts, None, None)
    assert y.shape == truth.shape and (y.double() - truth).norm() <= 0.006 * truth.norm()


@pytest.mark.sampled(4)
@IN_FP8
@pytest.mark.parametrize("gate", [None, SILU])
@pytest.mark.parametrize("counts", [[2], [0, 64, 66, 0, 256, 130], [6] * 9])
def test_rows_in_fp8_find_the_scales_of_their_tokens_by_these_programs(
    counts: list[int], gate: Any, fmt: str, act: str, emulated: SimpleNamespace
):
    num, inner, width = sum(counts), 256, 128
    span = span_of(act, inner)
    tokens, order = torch.randn(num // 2, inner).to(FP8), torch.randperm(num)
    weight = draw(fmt, len(counts), 2 * width, inner, dtype="fp32")
    weight.parts["scales"].div_(256)
    scales = torch.rand(inner // span, num // 2).t() + 0.5
    numbers = tokens.float() * scales.repeat_interleave(span, 1)
    rows = tokens.view(torch.uint8)[order // 2].view(FP8)
    plan = emulated.plan_fp8(torch.tensor(counts).cumsum(0), num)
    truth = truth_of(numbers[order // 2], weight.unpack(), counts, None, gate)
    weight = poisoned(weight, torch.tensor(counts) == 0)
    for given, *pairs in ((scales, order, 2), (scales[order // 2].t().contiguous().t(),)):
        y = emulated.multiply_fp8(rows, given, weight, plan, None, gate, *pairs)
        assert (y.double() - truth).norm() <= 0.006 * truth.norm()


@pytest.mark.parametrize("counts", [[1], [0, 63, 65, 0, 128, 131]])
def test_gated_rows_are_quantized_by_these_programs(counts: list[int], emulated: SimpleNamespace):
    num, inner, width = sum(counts), 128, 256
    x, scales = torch.randn(num, inner).to(FP8), torch.rand(1, num).t() + 0.5
    weight = draw("fp8[128, 128]", len(counts), 2 * width, inner, dtype="fp32")
    weight.parts["scales"].div_(256)
    plan = emulated.plan_fp8(torch.tensor(counts).cumsum(0), num)
    m = emulated.multiply_fp8(x, scales, weight, plan, None, SILU)
    expected, expected_scales = ops_quantize(m, "fp8[1, 128]")
    values, made = emulated.multiply_and_quantize(x, scales, weight, plan, SILU)
    assert torch.equal(in_order(QuantizedRows(values, made, num, True), width), expected.view(torch.uint8))
    assert made.stride(0) == 1 and torch.equal(made, expected_scales)


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).cuda()


def spoil(counts: list[int], *tensors: torch.Tensor) -> None:
    """NaN in what experts without rows hold."""
    for tensor in tensors:
        tensor[torch.tensor(counts).cuda() == 0] = torch.nan


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    @COUNTS
    @GATES
    @pytest.mark.parametrize(("width", "inner"), [(72, 136), (768, 512), (192, 2880)])
    def test_experts_multiply_their_rows(self, counts: list[int], width: int, inner: int, gate: Any):
        x, weight = make(sum(counts), inner + 8)[:, :inner], make(len(counts), 2 * width, inner) * 0.1
        bias = make(len(counts), 2 * width)
        spoil(counts, weight, bias)
        for each in (None, bias):
            check(
                lambda each=each: grouped_hopper.multiply(x, weight, ends_of(counts), each, gate),
                x, counts, weight, each, gate,
            )  # fmt: skip

    @COUNTS
    @GATES
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_packed_experts_multiply_their_rows(self, counts: list[int], fmt: str, gate: Any):
        from atom.kernels.hopper import grouped_packed_linear as grouped_packed_hopper

        weight, x, bias = scaled(fmt, len(counts), 384, 640), make(sum(counts), 640), make(len(counts), 384)
        plain, shuffled = unpack_experts(weight, torch.float32), shuffle(poisoned(weight, torch.tensor(counts) == 0))
        spoil(counts, bias)
        plan = grouped_packed_hopper.plan_tiles(ends_of(counts), len(x))
        for each in (None, bias):
            check(
                lambda each=each: grouped_packed_hopper.multiply(x, shuffled, plan, each, gate),
                x, counts, plain, each, gate,
            )  # fmt: skip

    @COUNTS
    @GATES
    @IN_FP8
    @pytest.mark.parametrize(("width", "inner"), [(384, 256), (768, 640), (128, 128), (1024, 2048)])
    def test_both_may_be_in_fp8(self, counts: list[int], width: int, inner: int, gate: Any, fmt: str, act: str):
        weight, x = scaled(fmt, len(counts), 2 * width, inner), make(sum(counts), inner)
        plain, shuffled = unpack_experts(weight, torch.float32), shuffle(poisoned(weight, torch.tensor(counts) == 0))
        plan, rounded = grouped_hopper.plan_fp8(ends_of(counts), len(x)), round_rows(x, act)
        values, scales, *_ = quantize_rows(x, span_of(act, inner), FP8, is_shuffled=True)
        check(
            lambda: grouped_hopper.multiply_fp8(values[: len(x)], scales, shuffled, plan, None, gate),
            rounded, counts, plain, None, gate,
        )  # fmt: skip

    @COUNTS
    @pytest.mark.parametrize("gate", [SILU, CLAMPED])
    def test_gated_rows_are_quantized_to_the_bit(self, counts: list[int], gate: Gate):
        weight, x = scaled("fp8[128, 128]", len(counts), 2 * 384, 640), make(sum(counts), 640)
        x[-1] *= torch.nan
        shuffled, plan = shuffle(weight), grouped_hopper.plan_fp8(ends_of(counts), len(x))
        values, scales, *_ = quantize_rows(x, 128, FP8, is_shuffled=True)
        m = grouped_hopper.multiply_fp8(values[: len(x)], scales, shuffled, plan, None, gate)
        expected = quantize_rows(m, 128, FP8, is_shuffled=True)
        made, made_scales = grouped_hopper.multiply_and_quantize(values[: len(x)], scales, shuffled, plan, gate)
        assert made_scales[-1].isnan().all()
        assert torch.equal(made[:-1].view(torch.uint8), expected.values[: len(x) - 1].view(torch.uint8))
        assert torch.equal(made_scales[:-1], expected.scales[: len(x) - 1])

    @IN_FP8
    def test_rows_in_fp8_find_the_scales_of_their_tokens(self, fmt: str, act: str):
        counts, tokens = [100, 0, 333, 79], make(256, 640)
        order = torch.randperm(512, device="cuda")
        weight = scaled(fmt, len(counts), 384, 640)
        plain, shuffled = unpack_experts(weight, torch.float32), shuffle(weight)
        plan, rounded = grouped_hopper.plan_fp8(ends_of(counts), 512), round_rows(tokens, act)
        values, scales, *_ = quantize_rows(tokens, span_of(act, 640), FP8, is_shuffled=True)
        rows = values[order // 2]
        check(
            lambda: grouped_hopper.multiply_fp8(rows, scales, shuffled, plan, None, None, order, 2),
            rounded[order // 2], counts, plain, None, None,
        )  # fmt: skip

    def test_rows_of_no_expert_are_left_unchanged(self):
        x, weight, ends = make(700, 256), make(3, 256, 256), ends_of([100, 0, 333])
        y = grouped_hopper.multiply(x, weight, ends)
        truth = truth_of(x[:433], weight, [100, 0, 333], None, None)
        assert (y[:433].double() - truth).norm() <= 0.006 * truth.norm()
        assert grouped_hopper.multiply(x, weight, torch.zeros_like(ends)).shape == (700, 256)


def scaled(fmt: str, *shape: int) -> PackedWeight:
    """A weight whose results are of about 1."""
    weight = draw(fmt, *shape, device="cuda")
    scales = weight.parts["scales"]
    scales.copy_(scales - 8 if fmt == "mxfp4" else scales / 256)
    return weight
