from typing import Any

import pytest
import torch
import triton
from kernels.checks import BF16, assert_as_near, assert_equal

from atom.graph import ops
from atom.kernels.triton.experts import router
from atom.kernels.triton.experts.router import FEW_TOKENS, Router
from atom.kernels.triton.gpu import Gpu, find_gpu

NAN = float("nan")


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of all": {"top_k": 3},
    "renormalized": {"top_k": 8, "renormalize": True, "scale": 2.5},
    "sigmoid": {"top_k": 1, "score": "sigmoid"},
    "groups that greedy ignores": {"top_k": 3, "groups": 4, "top_groups": 1},
    "best groups": {"top_k": 3, "method": "group_limited_greedy", "groups": 4, "top_groups": 2, "scale": 16.0},
    "pairs of the best": {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "groups": 4, "top_groups": 2,
                          "renormalize": True},
    "one group of three": {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "groups": 3, "top_groups": 1},
    "groups of one": {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "groups": 12, "top_groups": 5},
    "experts that all tokens share": {"top_k": 3, "renormalize": True, "scale": 2.5, "shared": 2},
    "shared experts with a gate": {"top_k": 3, "renormalize": True, "scale": 2.5, "shared": 2, "gated": True},
    "a gate next to groups": {"top_k": 4, "method": "noaux_tc", "score": "sigmoid", "groups": 3, "top_groups": 2,
                              "shared": 1, "gated": True},
    "chosen by logits": {"top_k": 3, "method": "noaux_tc", "score": "sigmoid", "renormalize": True, "ranks": "logits"},
    "root of softplus": {"top_k": 3, "method": "noaux_tc", "score": "sqrtsoftplus", "renormalize": True, "scale": 1.5},
    "one group": {"top_k": 2, "method": "noaux_tc", "score": "sigmoid", "renormalize": True},
}  # fmt: skip


def check_router(tokens: int, experts: int, inner: int, dtype: torch.dtype, device: str, **rule: Any) -> None:
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inner, generator=random).to(dtype).to(device)
    rows = experts + rule.get("gated", False)
    weight = (torch.randn(rows, inner, generator=random) / inner**0.5).to(dtype).to(device)
    bias, correction = (torch.randn(2, experts, generator=random) / 4).to(device)
    own = Router()
    for extra in ((None, None), (bias, correction), (bias, None)):
        weights, ids = own.router(x, weight, *extra, **rule)
        expected, expected_ids = ops.router.body(x, weight, *extra, **rule)
        assert ids.dtype == torch.int64
        is_same = (ids == expected_ids).all(1)  # of 300 tokens and 256 experts some are equal but for rounding
        assert (~is_same).sum() <= tokens // 100
        assert_equal(weights[is_same], expected[is_same])


def check_norm(tokens: int, experts: int, inner: int, dtype: torch.dtype, device: str, **rule: Any) -> None:
    random = torch.Generator().manual_seed(tokens)
    a, b = torch.randn(2, tokens, inner + 8, generator=random).to(dtype).to(device)[..., :inner]  # with gaps
    norm = torch.randn(inner, generator=random).to(dtype).to(device)
    rows = experts + rule.get("gated", False)
    weight = (torch.randn(rows, inner, generator=random) / inner**0.5).to(dtype).to(device)
    own = Router()
    for _ in range(2):  # the counters are as they were
        weights, ids, x, total = own.add_norm_router(a, b, norm, weight, eps=0.01, **rule)
        assert torch.equal(total, a + b)
        assert_as_near(
            x, ops.rms_norm.body(total, norm, eps=0.01), ops.rms_norm.body(total.float(), norm.float(), eps=0.01)
        )
        expected, expected_ids = ops.router.body(x, weight, **rule)
        assert torch.equal(ids, expected_ids)
        assert_equal(weights, expected)


@pytest.mark.sampled(12, gpu=4)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rule", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("units", [1, 100])  # with 100 the columns are summed in parts
def test_routers_choose_as_the_reference(units, rule, dtype, triton_device, monkeypatch):
    monkeypatch.setattr(router, "find_gpu", lambda device: find_gpu(device)._replace(units=units))
    for tokens, inner in ((1, 600), (5, 20), (9, 20)):  # few, and more
        check_router(tokens, 12, inner, dtype, triton_device, **rule)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize(("experts", "block_e"), [(20, 32), (40, 64), (130, 128)],
                         ids=["20 experts", "40 experts", "130 experts"])  # fmt: skip
def test_many_tokens_are_scored_by_tiles_of_many_experts(experts, block_e, triton_device, monkeypatch):
    gpu = find_gpu(torch.device(triton_device))._replace(units=1, shared_memory=200 << 10)
    monkeypatch.setattr(router, "find_gpu", lambda device: gpu)
    assert router._choose_tiles(270, experts, 2, gpu) == (64, block_e)
    check_router(270, experts, 140, torch.float16, triton_device, top_k=1)


@pytest.mark.parametrize(("tokens", "experts", "tile"), [
    (16384, 128, (64, 128)), (16384, 64, (64, 64)), (16384, 256, (64, 128)), (2048, 128, (64, 32)),
    (16384, 32, (64, 32)), (256, 128, (16, 32)),
])  # fmt: skip
def test_tiles_of_scores_are_the_fastest_of_an_h200(tokens, experts, tile):
    h200 = Gpu(132, 227 << 10, (9, 0))
    assert router._choose_tiles(tokens, experts, 2, h200) == tile
    assert router._choose_tiles(tokens, experts, 4, h200)[1] == 32, "float32 has no tensor cores"
    assert router._choose_tiles(tokens, experts, 2, h200._replace(shared_memory=64 << 10))[1] <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 32, 300])
@pytest.mark.parametrize("rule", [ROUTERS["renormalized"], {**ROUTERS["pairs of the best"], "groups": 8, "top_k": 8}])
def test_routers_of_many_experts_choose_as_the_reference(rule, tokens):
    check_router(tokens, 256, 2048, torch.float32, "cuda", **rule)


def test_a_router_without_numbers_still_names_experts(triton_device):
    if triton_device == "cpu" and triton.__version__.startswith("3.6."):
        pytest.skip("the interpreter of Triton 3.6 takes NaN for the largest number")
    x, weight = torch.full((3, 8), NAN).to(triton_device), torch.randn(5, 8).to(triton_device)
    ids = Router().router(x, weight, top_k=2)[1]
    assert ((ids >= 0) & (ids < 5)).all()


def test_a_weight_in_float32_scores_tokens_of_any_dtype(triton_device):
    x, weight = torch.randn(3, 8).half().to(triton_device), torch.randn(5, 8).to(triton_device)
    expected = ops.router.body(x, weight, top_k=2)
    weights, ids = Router().router(x, weight, top_k=2)
    assert torch.equal(ids, expected[1])
    assert_equal(weights, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1])
def test_sums_are_normed_ahead_of_the_choice(tokens, dtype, triton_device):
    for inner, name in (
        (20, "renormalized"),
        (600, "experts that all tokens share"),
        (33, "pairs of the best"),
        (24, "shared experts with a gate"),
    ):
        check_norm(tokens, 12, inner, dtype, triton_device, **ROUTERS[name])


@pytest.mark.parametrize("experts", [router.MAX_COUNTED, router.MAX_COUNTED + 1])
@pytest.mark.parametrize("tokens", [1, FEW_TOKENS + 1, "many"])
def test_the_first_of_equal_experts_is_chosen(tokens, experts, triton_device, monkeypatch):
    if tokens == "many":  # than those whose experts count
        monkeypatch.setattr(router, "COUNTED_TOKENS", FEW_TOKENS)
        tokens = FEW_TOKENS + 1
    x, weight = torch.ones(tokens, 8).to(triton_device), torch.ones(experts, 8).to(triton_device)
    weight[experts // 2] = 2.0
    weights, ids = Router().router(x, weight, top_k=3, renormalize=True)
    assert ids.tolist() == [[experts // 2, 0, 1]] * tokens
    assert_equal(weights.sum(1), torch.ones(tokens, device=triton_device))


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("experts", [6, 60, pytest.param(512, marks=pytest.mark.gpu)])
def test_the_gate_of_shared_experts_is_a_row_after_theirs(tokens, experts, triton_device):
    rule = {"top_k": 4, "renormalize": True, "shared": 3, "gated": True}
    check_router(tokens, experts, 40, torch.float32, triton_device, **rule)
    x, weight = torch.randn(tokens, 40).to(triton_device), torch.zeros(experts + 1, 40).to(triton_device)
    weight[-1] = 1.0  # by far the best, were it an expert
    weights, ids = Router().router(x.abs(), weight, **rule)
    assert ids.tolist() == [[0, 1, 2, 3, experts, experts + 1, experts + 2]] * tokens
    assert_equal(
        weights, torch.cat([torch.full_like(weights[:, :4], 0.25), x.abs().sum(1, True).sigmoid().expand(-1, 3)], 1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 9])
@pytest.mark.parametrize(("experts", "inner"), [(64, 2048), (128, 2048), (32, 2880), (256, 7168), (384, 7168),
                                                 (512, 2048)])  # fmt: skip
def test_routers_of_models_are_normed_ahead_of_the_choice(tokens, experts, inner):
    check_norm(tokens, experts, inner, torch.float32, "cuda", top_k=8, renormalize=True)
    check_norm(tokens, experts, inner, torch.float32, "cuda", top_k=8, renormalize=True, shared=1, gated=True)
