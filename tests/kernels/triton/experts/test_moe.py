from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernels.checks import BF16, assert_as_near, assert_equal, poisoned

from atom.graph import PackedWeight, Type, ops
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.experts import few_experts, grouping, moe
from atom.kernels.triton.experts.grouped_tiles import Shape, choose_tiles
from atom.kernels.triton.experts.router import Router
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear.weight_encoding import PLAIN
from atom.weights.quantize import quantize

NAN = float("nan")


def grouped_by(counts: list[int], out: int, inner: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x, weight, ends and bias of experts with so many rows each; what experts without rows hold is NaN."""
    random = torch.Generator().manual_seed(len(counts) + out + inner)
    x = torch.randn(sum(counts), inner, generator=random).to(dtype)
    weight = (torch.randn(len(counts), out, inner, generator=random) / inner**0.5).to(dtype)
    bias = torch.randn(len(counts), out, generator=random).to(dtype)
    is_empty = torch.tensor(counts) == 0
    weight[is_empty], bias[is_empty] = NAN, NAN
    return x.to(device), weight.to(device), torch.tensor(counts).cumsum(0).to(device), bias.to(device)


def check_grouped_linear(
    counts: list[int], out: int, inner: int, dtype: torch.dtype, device: str, has_bias: bool
) -> None:
    x, weight, ends, bias = grouped_by(counts, out, inner, dtype, device)
    bias = bias if has_bias else None
    y = moe.Experts().grouped_linear(x, weight, ends, bias)
    truth = ops.grouped_linear.body(x.float(), weight.float(), ends, None if bias is None else bias.float())
    assert_as_near(y, ops.grouped_linear.body(x, weight, ends, bias), truth)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("counts", "out", "inner"), [
    ([1], 1, 1),
    ([0, 1, 0], 7, 5),
    ([3, 0, 17, 1, 16], 33, 20),
    ([0, 0, 33, 0], 64, 40),
    ([2, 0, 0], 65, 129),
    ([15, 0, 31, 47, 1], 17, 32),
    ([130], 5, 3),
])  # fmt: skip
def test_grouped_linears_equal_the_reference_where_rows_are_few_or_odd(counts, out, inner, dtype, triton_device):
    for has_bias in (False, True):
        check_grouped_linear(counts, out, inner, dtype, triton_device, has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [
    [8 * (expert % 2) for expert in range(37)],
    [expert % 5 for expert in range(128)],
    [0, 1000, 3, 0, 129],
    [int(3 ** (expert % 6)) for expert in range(60)],
])  # fmt: skip
@pytest.mark.parametrize(("out", "inner"), [(256, 512), (100, 72), (1536, 2048)])
def test_grouped_linears_of_many_rows_equal_the_reference(counts, out, inner, dtype):
    check_grouped_linear(counts, out, inner, dtype, "cuda", has_bias=True)


def packed(weight: torch.Tensor, fmt: str, dtype: str = "fp32") -> PackedWeight:
    """A weight [E, O, I], packed, of experts that are unlike each other in their scales and zero points."""
    parts = quantize(fmt, weight)
    if "zeros" in parts:
        parts["zeros"] = torch.randint_like(parts["zeros"], 5, 12)
    if "mins" in parts:
        parts["mins"] *= torch.rand_like(parts["mins"])
    for name in ("factor", "divisor"):
        if name in parts:
            parts[name] = torch.rand_like(parts[name]) + 0.5
    return PackedWeight(Type(dtype, tuple(weight.shape), fmt), parts)


def on(device: str, weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.type, {name: part.to(device) for name, part in weight.parts.items()})


def check_packed(counts: list[int], out: int, inner: int, fmt: str, dtype: str, device: str) -> None:
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    x, weight, ends, bias = grouped_by(counts, out, inner, torch.float32, device)
    weight = packed(weight.nan_to_num(), fmt, dtype)
    exact = PackedWeight(replace(weight.type, dtype="fp32"), weight.parts)
    x, bias = x.to(torch_dtype), bias.to(torch_dtype)
    for each in (None, bias):
        truth = ops.grouped_linear.body(x.float(), exact, ends, None if each is None else each.float())
        expected = ops.grouped_linear.body(x, weight, ends, each)
        bad = poisoned(weight, torch.tensor(counts) == 0)
        assert_as_near(moe.Experts().grouped_linear(x, bad, ends, each), expected, truth)


FORMATS = ["mxfp4", "ct_nvfp4", "modelopt_nvfp4", "fp8[128, 128]", "fp8[64, 32]", "fp8[1, *]", "int8[1, *]", "int8[1, 32]",
           "int4[1, 32]", "ct_packed_int4z[1, 32]", "ct_packed_int4[1, *]", "awq_int4[1, 96]", "gptq_int8[1, 96]",
           "ct_packed_int8", "q4_0", "q4_1", "q8_0", "gguf_mxfp4"]  # fmt: skip


SHAPES = [([0, 1, 0], 7, 96), ([2, 0, 0], 130, 576), ([3, 0, 17, 1], 33, 96), ([0, 70], 5, 192)]  # few rows, and more


@pytest.mark.sampled(24, gpu=8)
@pytest.mark.parametrize(
    ("fmt", "shape"), [(fmt, 2 * more + at % 2) for at, fmt in enumerate(FORMATS) for more in (0, 1)]
)
def test_grouped_linears_of_packed_experts_equal_the_reference(fmt, shape, triton_device):
    check_packed(*SHAPES[shape], fmt, "fp32", triton_device)


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0"])
def test_a_row_may_be_one_block(fmt, triton_device):
    check_packed([2, 0, 17], 40, 32, fmt, "fp32", triton_device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if "fp4" not in fmt])
def test_packed_experts_are_multiplied_in_fp16(fmt, triton_device):
    check_packed([3, 0, 18], 40, 192, fmt, "fp16", triton_device)


@pytest.mark.parametrize("fmt", ["int4[1, 64]", "ct_packed_int4z[1, 128]", "awq_int4"])
@pytest.mark.parametrize("counts", [[1, 0, 5], [0, 40]])
def test_groups_of_columns_as_long_as_a_step_are_scaled_as_sums(fmt, counts, triton_device):
    check_packed(counts, 20, 384, fmt, "fp32", triton_device)


MANY = [
    [8 * (expert % 2) for expert in range(37)],
    [expert % 5 for expert in range(128)],
    [0, 1000, 3, 0, 129],
    [int(3 ** (expert % 6)) for expert in range(60)],
]
SIZES = [(256, 576), (100, 96), (768, 2112)]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("turn", range(len(MANY)))
def test_grouped_linears_of_many_rows_of_packed_experts_equal_the_reference(turn, fmt):
    """Each format with all numbers of rows, all sizes and, where it can, both dtypes."""
    at = FORMATS.index(fmt) + turn
    check_packed(MANY[turn], *SIZES[at % 3], fmt, "bf16" if "fp4" in fmt or turn % 2 else "fp16", "cuda")


BOTH_GATES = [{"kind": "silu"}, {"kind": "swigluoai", "limit": 0.5, "alpha": 1.7}]
CLAMPED = [
    {"kind": "gelu", "limit": 0.5},
    {"kind": "swiglustep", "limit": 0.3},
    {"kind": "situ", "limit": 0.6, "alpha": 0.4},
]
GATES = pytest.mark.parametrize("gate", BOTH_GATES + CLAMPED)


def check_gated(x: torch.Tensor, weight: Any, ends: torch.Tensor, bias: torch.Tensor, exact: Any, device: str,
                gate: dict[str, Any]) -> None:  # fmt: skip
    """A bias belongs to the sums, which are rounded ahead of the gates. exact: the weight, for matmuls in float32"""
    moved = on(device, weight) if isinstance(weight, PackedWeight) else weight.to(device)
    for each in (None, bias):
        rows = ops.grouped_linear.body(x.float(), exact, ends, None if each is None else each.float())
        truth = ops.gated_activate.body(rows, **gate)
        expected = ops.gated_activate.body(ops.grouped_linear.body(x, weight, ends, each), **gate)
        own = None if each is None else each.to(device)
        y = moe.Experts().multiply(x.to(device), moved, ends.to(device), own, Gate(**gate))
        assert_as_near(y.cpu(), expected, truth)


@pytest.mark.sampled(3)
@GATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("counts", "width", "inner"), [
    ([1], 1, 1),
    ([3, 0, 17, 1, 16], 33, 20),
    ([0, 0, 130, 0], 20, 40),
])  # fmt: skip
def test_gates_of_grouped_linears_equal_the_reference(counts, width, inner, dtype, gate, triton_device):
    x, weight, ends, bias = grouped_by(counts, 2 * width, inner, dtype, "cpu")
    check_gated(x, weight, ends, bias, weight.float(), triton_device, gate)


@pytest.mark.sampled(12, gpu=4)
@pytest.mark.parametrize(
    ("at", "fmt"),
    [*enumerate(["mxfp4", "ct_nvfp4", "fp8[128, 128]", "fp8[1, *]", "int4[1, 32]", "awq_int4[1, 96]", "q4_1"])],
)
@pytest.mark.parametrize(("counts", "width"), [([3, 0, 18], 20), ([0, 70], 65)])
def test_gates_of_packed_experts_equal_the_reference(counts, width, at, fmt, triton_device):
    gate = BOTH_GATES[(at + len(counts)) % 2]
    x, weight, ends, bias = grouped_by(counts, 2 * width, 192, torch.float32, "cpu")
    weight = packed(weight.nan_to_num(), fmt)
    check_gated(x, poisoned(weight, torch.tensor(counts) == 0), ends, bias, weight, triton_device, gate)


def test_scales_of_any_power_of_two_are_exact(triton_device):
    scales = torch.tensor([70, 100, 120, 127, 128, 150, 190], dtype=torch.uint8).expand(1, 16, -1).contiguous()
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(1, 16, 7, 16).contiguous()
    weight = PackedWeight(Type("fp32", (1, 16, 224), "mxfp4"), {"values": values, "scales": scales})
    x, ends = torch.eye(224).to(triton_device), torch.tensor([224]).to(triton_device)
    assert torch.equal(moe.Experts().grouped_linear(x, on(triton_device, weight), ends).cpu(), weight.unpack()[0].T)


def test_no_rows_at_all_give_none(triton_device):
    x, weight, ends, _ = grouped_by([0, 0], 5, 8, torch.float32, triton_device)
    assert moe.Experts().grouped_linear(x, weight, ends).shape == (0, 5)


@pytest.mark.gpu
def test_experts_past_two_billion_numbers_are_found():
    weight = torch.zeros(1100, 2048, 1024, dtype=torch.bfloat16, device="cuda")
    weight[-1] = torch.eye(2048, 1024)
    x = torch.randn(3, 1024, device="cuda").bfloat16()
    ends = torch.zeros(1100, dtype=torch.int64, device="cuda")
    ends[-1] = 3
    assert torch.equal(moe.Experts().grouped_linear(x, weight, ends), torch.nn.functional.pad(x, (0, 1024)))


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("shared_bytes", [64 << 10, 99 << 10, 227 << 10])
def test_tiles_fit_in_shared_memory(element_size, shared_bytes):
    for rows in (1, 100, 100 * 8, 100 * 16, 100 * 48, 100 * 49, 1_000_000):
        shape = Shape(rows, 100, 1536, 2048, 1, element_size, PLAIN)
        tiles = choose_tiles(shape, Gpu(132, shared_bytes, False))
        assert tiles.num_stages >= 2
        assert (tiles.rows + tiles.out) * tiles.inner * element_size * tiles.num_stages <= shared_bytes


def choices(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Ids of different experts a token; nobody chooses the last expert if there is another."""
    usable = max(top_k, experts - 1)
    return torch.stack([torch.randperm(usable)[:top_k] for _ in range(tokens)])


def use_counts(is_counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few pairs counted by experts, in blocks of which they fill some."""
    monkeypatch.setattr(grouping, "SEARCHED", 0 if is_counted else 2048)
    monkeypatch.setattr(grouping, "COUNTED", 64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "width"), [
    (1, 1, 1, 1), (1, 8, 9, 20), (7, 3, 5, 1025), (86, 3, 35, 8),
])  # fmt: skip
def test_tokens_are_grouped_as_by_the_reference(tokens, top_k, experts, width, is_counted, triton_device, monkeypatch):
    use_counts(is_counted, monkeypatch)
    x = torch.randn(tokens, 2 * width).to(triton_device)[:, :width]  # rows with gaps between them
    ids = choices(tokens, top_k, experts).to(triton_device)
    grouped = grouping.group(x, ids, experts=experts)
    for ours, expected in zip(grouped, ops.group.body(x, ids, experts=experts), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


@pytest.mark.sampled(9, gpu=3)
@pytest.mark.parametrize("first", [0, 4, 20])  # of 5 experts here, of 12; the last has none of them
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (43, 6), (90, 3)])
def test_experts_that_are_not_here_give_zeros(tokens, top_k, first, triton_device, monkeypatch):
    use_counts((top_k + (first == 4)) % 2 == 0, monkeypatch)
    x, weight = torch.randn(tokens, 24).to(triton_device), torch.randn(5, 20, 24).to(triton_device)
    ids, weights = choices(tokens, top_k, 12).to(triton_device), torch.rand(tokens, top_k).to(triton_device)
    base = torch.tensor([first]).to(triton_device)
    rows, order, ends = grouping.group(x, ids, base, experts=5)
    expected_rows, expected_order, expected_ends = ops.group.body(x, ids, base, experts=5)
    here = int(ends[-1])
    assert torch.equal(ends, expected_ends) and here == ((ids >= first) & (ids < first + 5)).sum()
    assert torch.equal(rows[:here], expected_rows[:here]) and torch.equal(order[:here], expected_order[:here])
    assert order[here:].tolist() == [tokens * top_k] * (tokens * top_k - here)
    y = moe.Experts().grouped_linear(rows, weight, ends)
    y[here:] = NAN  # what nothing writes
    expected = ops.combine.body(ops.grouped_linear.body(expected_rows, weight, ends), weights, expected_order)
    assert_equal(grouping.combine(y, weights, order), expected)


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("first", [None, 1])
def test_each_pair_learns_its_row(first, is_counted, triton_device, monkeypatch):
    use_counts(is_counted, monkeypatch)
    ids = torch.tensor([[2, 0], [1, 2], [0, 3]])
    base = None if first is None else torch.tensor([first]).to(triton_device)
    x = torch.randn(3, 8).to(triton_device)
    rows, _, _, places = grouping.group_pairs(x, ids.to(triton_device), base, 4 if first is None else 2)
    expected = [3, 0, 2, 4, 1, 5] if first is None else [1, -1, 0, 2, -1, -1]
    assert places.tolist() == expected
    weights = torch.rand(3, 2).to(triton_device)
    is_here = (places >= 0).view(3, 2).to(x.dtype)
    rows[int(sum(place >= 0 for place in expected)) :] = NAN  # what nothing writes
    assert_equal(grouping.combine_rows(rows, weights, places), x * (weights * is_here).sum(1, keepdim=True))


def test_tokens_that_all_choose_one_expert_keep_their_order(triton_device):
    x, ids = torch.randn(40, 4).to(triton_device), torch.full((40, 1), 3).to(triton_device)
    rows, order, ends = grouping.group(x, ids, experts=5)
    assert torch.equal(rows, x)
    assert order.tolist() == list(range(40))
    assert ends.tolist() == [0, 0, 0, 40, 40]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_searched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(1, 1, 1), (1, 8, 513), (43, 6, 20), (5, 3, 1100)])
def test_sums_over_the_experts_equal_the_reference(
    tokens, top_k, width, dtype, is_searched, triton_device, monkeypatch
):
    monkeypatch.setattr(grouping, "SEARCHED", 2048 if is_searched else 0)
    x = torch.randn(tokens * top_k, width).to(dtype).to(triton_device)
    weights, order = torch.rand(tokens, top_k).to(triton_device), torch.randperm(tokens * top_k).to(triton_device)
    truth = ops.combine.body(x.float(), weights, order)
    assert_as_near(grouping.combine(x, weights, order), ops.combine.body(x, weights, order), truth)


def check_experts(
    tokens: int, top_k: int, counts: tuple[int, int, int], dtype: torch.dtype, device: str, kind: str = "silu",
    ids: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """counts: experts, their width, and the hidden size; what experts hold that nobody chose is NaN."""
    experts, width, hidden = counts
    randn = partial(torch.randn, device=device)
    x = randn(tokens, hidden + 8).to(dtype)[:, :hidden]  # rows with gaps between them
    weights = torch.rand(tokens, top_k, device=device)
    ids = (choices(tokens, top_k, experts) if ids is None else ids).to(device)
    gate_up = (randn(experts, 2 * width, hidden) / hidden**0.5).to(dtype)
    down = (randn(experts, hidden, width) / width**0.5).to(dtype)
    is_chosen = torch.zeros(experts, dtype=torch.bool, device=device).index_fill(0, ids.flatten(), True)
    gate_up[~is_chosen] = down[~is_chosen] = NAN
    truth = ops.experts.body(x.float(), weights, ids, gate_up.float(), down.float(), kind=kind)
    expected = ops.experts.body(x, weights, ids, gate_up, down, kind=kind)
    assert_as_near(moe.Experts().experts(x, weights, ids, gate_up, down, kind=kind), expected, truth)


COUNTS = [(1, 1, 1), (5, 7, 20), (9, 33, 130), (4, 16, 64)]
TOKENS = [1, 3, 4, 5, 17]  # few, and more, which are grouped
FEW_HALVES = {(1, COUNTS[1]), (3, COUNTS[3]), (4, COUNTS[2]), (5, COUNTS[1]), (17, COUNTS[2])}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_equal_the_reference(tokens, counts, dtype, triton_device):
    if dtype == torch.float16 and triton_device == "cpu" and (tokens, counts) not in FEW_HALVES:
        pytest.skip("interpreted in float32")
    for top_k in {1, min(3, counts[0])}:
        check_experts(tokens, top_k, counts, dtype, triton_device)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_all_tokens_may_choose_one_expert(tokens, triton_device):
    check_experts(tokens, 1, (5, 12, 24), torch.float32, triton_device, ids=torch.full((tokens, 1), 3))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2"])
def test_experts_have_any_gate(kind, triton_device):
    for tokens in (2, 6):
        check_experts(tokens, 2, (4, 10, 24), torch.float32, triton_device, kind)


@pytest.mark.parametrize("gate", CLAMPED)
def test_few_tokens_have_limits_without_being_grouped(gate, triton_device):
    args = torch.randn(2, 24), torch.rand(2, 3), choices(2, 3, 4), torch.randn(4, 40, 24), torch.randn(4, 24, 20)
    moved = [each.to(triton_device) for each in args]
    assert_equal(moe.Experts().experts(*moved, **gate).cpu(), ops.experts.body(*args, **gate))


@pytest.mark.sampled(8)
@GATES
@pytest.mark.parametrize("first", [None, 0, 5, 20])  # of 4 experts here, of 12; the last has none of them
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("tokens", [1, 30])
def test_experts_of_a_rank_have_biases_and_limits(tokens, is_counted, first, gate, triton_device, monkeypatch):
    use_counts(is_counted, monkeypatch)
    x, ids = torch.randn(tokens, 24), choices(tokens, 3, 4 if first is None else 12)
    gate_up, down, weights = torch.randn(4, 40, 24) / 5, torch.randn(4, 24, 20) / 5, torch.rand(tokens, 3)
    base = None if first is None else torch.tensor([first])
    args = (x, weights, ids, gate_up, down, torch.randn(4, 40), torch.randn(4, 24), base)
    moved = [None if each is None else each.to(triton_device) for each in args]
    assert_equal(moe.Experts().experts(*moved, **gate).cpu(), ops.experts.body(*args, **gate))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 32, 300])
@pytest.mark.parametrize(("top_k", "counts"), [(6, (64, 1408, 2048)), (8, (128, 768, 2048)), (2, (8, 3584, 1000))])
def test_experts_of_models_equal_the_reference(tokens, top_k, counts):
    check_experts(tokens, top_k, counts, torch.bfloat16, "cuda")


def test_large_experts_are_grouped():
    assert few_experts.suits_few(1, 8, 7168, 2048)
    assert few_experts.suits_few(few_experts.FEW_TOKENS, 6, 2048, 1408)
    assert not few_experts.suits_few(few_experts.FEW_TOKENS + 1, 6, 2048, 1408)
    assert not few_experts.suits_few(1, 8, 2048, 14336)


@pytest.mark.gpu
def test_a_captured_step_follows_what_its_tokens_choose():
    gate, weight = torch.randn(16, 64).cuda(), (torch.randn(16, 64, 64) / 8).cuda()
    x = torch.randn(9, 64).cuda()

    def run(kernels: Any) -> torch.Tensor:
        weights, ids = kernels["router"](x, gate, top_k=4)
        rows, order, ends = kernels["group"](x, ids, experts=16)
        return kernels["combine"](kernels["grouped_linear"](rows, weight, ends), weights, order)

    ours: dict[str, Any] = {"router": Router().router, "group": grouping.group, "combine": grouping.combine}
    ours["grouped_linear"] = moe.Experts().grouped_linear
    run(ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(ours)
    for _ in range(3):
        x.copy_(torch.randn(9, 64))
        graph.replay()
        assert_equal(out, run({name: getattr(ops, name).body for name in ours}))
