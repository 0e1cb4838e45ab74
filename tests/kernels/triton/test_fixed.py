"""Kernels of fixed_triton: the ops' numbers, and for a row the same bits whatever rows are next to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from atom.graph import Batch, PagedCache, ops
from atom.kernels.triton.attention.fixed import paged_attention
from atom.kernels.triton.experts.fixed import FixedExperts, combine, router
from atom.kernels.triton.linear.fixed import FixedLinears
from atom.kernels.triton.step.log_sum_exp import log_sum_exp

ROWS = (1, 17, 33, 65)


def assert_near(made: Tensor, expected: Tensor) -> None:
    assert (made - expected).abs().max() <= (1e-3 if made.dtype == torch.float16 else 2e-6) * expected.abs().max()


def assert_same_rows(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = run(x)
    for count in (each for each in ROWS if each < len(x)):
        assert torch.equal(run(x[-count:]), whole[-count:]), f"the last {count}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_of_a_linear_has_the_same_bits_next_to_any_others(triton_device: str, dtype: torch.dtype):
    x, weight, bias = (torch.randn(*shape).to(triton_device, dtype) for shape in ((130, 96), (72, 96), (72,)))
    linears = FixedLinears()
    assert_near(linears.linear(x, weight, bias), torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    if dtype == torch.float32 or triton_device == "cuda":  # numpy sums 64 columns in another order than half of 128
        assert_same_rows(lambda rows: linears.linear(rows, weight, bias), x)


@pytest.mark.parametrize(("window", "group"), [(None, 4), (5, 1), (70, 3)])
def test_a_token_of_a_prompt_attends_as_a_decode_does(triton_device: str, window: int | None, group: int):
    numbers = torch.tensor([0, 1, 2, 32, 40], dtype=torch.int32)
    lengths = torch.tensor([9, 1, 137, 22], dtype=torch.int32)
    table = torch.stack([torch.randperm(60)[:35] for _ in lengths]).int()
    cache, q = torch.randn(60, 4, 2, 2, 16), torch.randn(42, 2 * group, 16)  # 2 of them are of no sequence
    numbers, lengths, table, cache, q = (each.to(triton_device) for each in (numbers, lengths, table, cache, q))
    paged, options = PagedCache(cache, "full"), {"scale": 0.25, "window": window}
    batch = Batch({"full": table}, {}, numbers, lengths, 2)
    made = paged_attention(q, paged, batch, **options)
    assert_near(made, ops.paged_attention(q, paged, batch, **options))
    for token in (2, 9, 18, 31):
        own = Batch({"full": table[2:3]}, {}, numbers[:2], lengths[2:3] - (31 - token), 1)
        assert torch.equal(paged_attention(q[token : token + 1], paged, own, **options)[0], made[token])


def test_a_token_has_the_same_experts_and_bits_next_to_any_others(triton_device: str):
    shapes = (34, 48), (8, 48), (8, 48, 48), (8, 48, 24)
    x, gate, gate_up, down = (torch.randn(*shape).to(triton_device) for shape in shapes)
    weights, ids = router(x, gate, top_k=2, renormalize=True)
    expected, chosen = ops.router(x, gate, top_k=2, renormalize=True)
    assert torch.equal(ids, chosen)
    assert_near(weights, expected)
    assert_same_rows(lambda rows: router(rows, gate, top_k=2, renormalize=True)[0], x)
    experts = FixedExperts()

    def run(rows: Tensor) -> Tensor:
        return experts.experts(rows, *router(rows, gate, top_k=2, renormalize=True), gate_up, down, kind="silu")

    assert_near(run(x), ops.experts(x, expected, chosen, gate_up, down, kind="silu"))
    assert_same_rows(run, x)
    grouped, order, _ = ops.group(x, ids, experts=8)
    assert_near(combine(grouped, weights, order), ops.combine(grouped, weights, order))


def test_log_sum_exps_of_rows_are_torchs(triton_device: str):
    logits = torch.randn(5, 9001, device=triton_device).mul_(5)
    logits[0, 4096] = torch.finfo(torch.float32).min
    assert_near(log_sum_exp(logits), logits.double().logsumexp(-1))
    assert torch.equal(log_sum_exp(logits[3:4]), log_sum_exp(logits)[3:4])
