"""Mixtures of experts on Hopper as a whole: which kernels multiply them, and that they give what the op does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near

pytest.importorskip("triton")

from kernels.hopper.test_few_experts import make_experts, without_others
from kernels.hopper.test_hopper import CLAMPED, HOPPER, IS_HOPPER
from kernels.hopper.ways import watch_ways

from atom.graph import PackedWeight, Type, ops
from atom.kernels import find_kernel
from atom.kernels.hopper.experts import Experts
from atom.kernels.hopper.shuffle import shuffle

ROWS, BLOCKS = "fp8[1, *]", "fp8[128, 128]"
ACTS = {ROWS: "fp8[1, *]", BLOCKS: "fp8[1, 128]"}  # of experts that are multiplied with activations in fp8
ROUNDED = dict.fromkeys(("int4[1, 128]", "awq_int4[1, 128]", "mxfp4"), ACTS[ROWS])  # of 4 bits, rounded to fp8 first
SIZES: dict[str | None, tuple[int, int]] = {  # width and hidden size by format: odd numbers of what its layout takes
    None: (360, 1000),  # plain
    ROWS: (448, 960),
    BLOCKS: (384, 640),
    "fp8[64, 128]": (192, 640),  # as gates and ups have it that end within blocks of 128 x 128
    "int4[1, 128]": (384, 1408),
    "awq_int4[1, 128]": (384, 1408),  # with zero points
    "mxfp4": (352, 1440),
}
PACKED = [fmt for fmt in SIZES if fmt is not None]
SILU = {"kind": "silu"}
LIMITED = [{"kind": "silu", "limit": 0.7}, {"kind": "swiglustep", "limit": 0.4}]
GATES = pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "swigluoai"])


def choose(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Ids of different experts a token; nobody chooses the last one."""
    return torch.rand(tokens, experts - 1).topk(top_k).indices


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """What is allocated holds NaN, or the largest integers, until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(
    fmt: str | None, experts: int, ids: torch.Tensor, gate: dict[str, Any], *, act: str | None = None,
    first: int | None = None, way: str, taken: list[str],
) -> None:  # fmt: skip
    """Experts that nobody chose hold NaN. first: of those that are here. way: by which they are to be multiplied"""
    width, hidden = SIZES[fmt]
    gate_up, down, *biases = make_experts(fmt, experts, width, hidden, gate == CLAMPED and act is None, "cuda")
    x = torch.randn(len(ids), hidden + 8).cuda().bfloat16()[:, :hidden]  # rows with gaps between them
    weights, ids = torch.rand(ids.shape).cuda(), ids.cuda()
    base = None if first is None else torch.tensor([first], device="cuda")
    rounded = {**gate, "act": act if way == "fp8" else None}
    wide = [None if each is None else each.float() for each in biases]
    truth = ops.experts.body(x.float(), weights, ids, exact(gate_up), exact(down), *wide, base, **rounded)
    expected = ops.experts.body(x, weights, ids, gate_up, down, *biases, base, **rounded)

    chosen = set((ids - (first or 0)).flatten().tolist())
    laid_out = [without_others(each, chosen) for each in (gate_up, down)]
    laid_out = [shuffle(each) if isinstance(each, PackedWeight) else each for each in laid_out]
    for bias in (each for each in biases if each is not None):
        bias[[expert not in chosen for expert in range(experts)]] = torch.nan
    products = Experts()

    def run() -> torch.Tensor:
        y: torch.Tensor = products.experts(x, weights, ids, *laid_out, *biases, base, **gate, act=act)
        return y

    with nan_in_new_memory():
        y = run()
    assert taken == [way] * 2
    is_here = truth.any(dim=1)  # an expert of the token
    assert y.shape == truth.shape and not y[~is_here].any()
    if is_here.any():
        assert_as_near(y, expected, truth)
        worst, allowed = (
            ((each - truth).norm(dim=1) / truth.norm(dim=1))[is_here].max().item() for each in (y, expected)
        )
        assert worst <= 1.5 * allowed, f"a token is {worst:.3g} off, of the reference's {allowed:.3g}"
    assert torch.equal(run(), y)


def exact(weight: torch.Tensor | PackedWeight) -> torch.Tensor | PackedWeight:
    """A weight for products in float32."""
    if isinstance(weight, torch.Tensor):
        return weight.float()
    return replace(weight, type=replace(weight.type, dtype="fp32"))


@pytest.mark.parametrize("fmt", PACKED)
def test_the_backend_takes_these_sizes(fmt: str):
    width, hidden = SIZES[fmt]
    gate_up, down = Type("bf16", (128, 2 * width, hidden), fmt), Type("bf16", (128, hidden, width), fmt)
    x, weights, ids = Type("bf16", ("T", hidden)), Type("fp32", ("T", 8)), Type("i64", ("T", 8))
    accepts = find_kernel(ops.experts, "hopper").accepts
    assert accepts(HOPPER, x, weights, ids, gate_up, down, **SILU) is None
    biases = Type("bf16", (128, 2 * width)), Type("bf16", (128, hidden))
    assert accepts(HOPPER, x, weights, ids, gate_up, down, *biases, Type("i64", (1,)), **CLAMPED) is None
    for gate in (SILU, CLAMPED):
        for act in ACTS.values():
            refused = accepts(HOPPER, x, weights, ids, gate_up, down, **gate, act=act)
            assert (refused is None) == (ROUNDED.get(fmt, ACTS.get(fmt)) == act)
    for gate in LIMITED:
        assert accepts(HOPPER, x, weights, ids, gate_up, down, **gate) is None
        assert accepts(HOPPER, x, weights, ids, gate_up, down, **gate, act=ACTS[BLOCKS]) is not None


def cases(plain: Sequence[tuple[int, str]], packed: Sequence[tuple[int, str]]) -> Any:
    """Formats with numbers of tokens and the ways that these are multiplied in."""
    each = [(fmt, *case) for fmt in SIZES for case in (plain if fmt is None else packed)]
    return pytest.mark.parametrize(("fmt", "tokens", "way"), each)


def rounded(*more: tuple[int, str]) -> Any:
    """Formats with numbers of tokens whose activations may be in fp8."""
    return pytest.mark.parametrize(("fmt", "tokens", "way"), [(fmt, *case) for fmt in ACTS for case in more])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return watch_ways(monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    """Against the op's body. Of 5 experts and 2 a token, 160 tokens are 64 rows an expert, and 320 are 128."""

    @GATES
    @cases(
        plain=[
            (1, "few"),
            (4, "few"),
            (5, "plain groups"),
            (319, "plain groups"),
            (320, "many plain"),
            (321, "many plain"),
        ],
        packed=[(1, "few"), (2, "few"), (3, "groups"), (319, "groups"), (320, "many"), (321, "many")],
    )
    def test_tokens_go_through_their_experts(
        self, fmt: str | None, tokens: int, way: str, gate: dict[str, Any], taken: list[str]
    ):
        check(fmt, 5, choose(tokens, 2, 5), gate, way=way, taken=taken)

    @pytest.mark.parametrize("gate", LIMITED, ids=["silu", "swiglustep"])
    @cases(
        plain=[(3, "few"), (20, "plain groups"), (321, "many plain")],
        packed=[(2, "few"), (20, "groups"), (321, "many")],
    )
    def test_gates_have_limits(self, fmt: str | None, tokens: int, way: str, gate: dict[str, Any], taken: list[str]):
        check(fmt, 5, choose(tokens, 2, 5), gate, way=way, taken=taken)

    @GATES
    @rounded((2, "few"), (3, "groups"), (159, "groups"), (160, "fp8"), (161, "fp8"), (641, "fp8"))
    def test_activations_of_many_rows_are_in_fp8(
        self, fmt: str, tokens: int, way: str, gate: dict[str, Any], taken: list[str]
    ):
        check(fmt, 5, choose(tokens, 2, 5), gate, act=ACTS[fmt], way=way, taken=taken)

    @cases(
        plain=[(1, "few"), (5, "plain groups"), (640, "many plain")],
        packed=[(1, "few"), (2, "few"), (3, "groups"), (639, "groups"), (640, "many")],
    )
    def test_all_may_choose_one_expert(self, fmt: str | None, tokens: int, way: str, taken: list[str]):
        check(fmt, 5, torch.full((tokens, 1), 3), SILU, way=way, taken=taken)

    @rounded((319, "groups"), (320, "fp8"), (1281, "fp8"))
    def test_all_may_choose_one_expert_in_fp8(self, fmt: str, tokens: int, way: str, taken: list[str]):
        check(fmt, 5, torch.full((tokens, 1), 3), SILU, act=ACTS[fmt], way=way, taken=taken)

    @pytest.mark.parametrize("first", [0, 5, 20])  # of 5 experts here, of 12; the last has none of them
    @cases(plain=[(20, "plain groups"), (320, "many plain")], packed=[(20, "groups"), (320, "many")])
    def test_experts_of_a_rank_are_a_part(self, fmt: str | None, tokens: int, way: str, first: int, taken: list[str]):
        check(fmt, 5, choose(tokens, 2, 12), CLAMPED, first=first, way=way, taken=taken)

    @pytest.mark.parametrize("first", [0, 5, 20])
    @rounded((159, "groups"), (160, "fp8"))
    def test_experts_of_a_rank_are_a_part_in_fp8(self, fmt: str, tokens: int, way: str, first: int, taken: list[str]):
        check(fmt, 5, choose(tokens, 2, 12), SILU, act=ACTS[fmt], first=first, way=way, taken=taken)

    @cases(
        plain=[(1, "few"), (4, "few"), (5, "plain groups"), (100, "plain groups"), (2048, "many plain")],
        packed=[(1, "few"), (2, "few"), (3, "groups"), (100, "groups"), (2048, "many")],
    )
    def test_128_experts_may_have_odd_sizes(self, fmt: str | None, tokens: int, way: str, taken: list[str]):
        check(fmt, 128, choose(tokens, 8, 128), CLAMPED if fmt == "mxfp4" else SILU, way=way, taken=taken)

    @rounded((4096, "fp8"))
    def test_128_experts_may_have_activations_in_fp8(self, fmt: str, tokens: int, way: str, taken: list[str]):
        check(fmt, 128, choose(tokens, 8, 128), SILU, act=ACTS[fmt], way=way, taken=taken)
