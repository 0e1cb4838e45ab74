"""Adapters of a batch in one launch: the sums are those of each token's own factors."""

from __future__ import annotations

import pytest
import torch

from atom.graph import ops
from atom.kernels.triton.experts.grouping import group
from atom.kernels.triton.linear.lora import expand_lora, grouped_lora, lora

NUM, RANK = 3, 8


def expected(y, shrunk, b, adapters, sizes, rank):
    """y [T, O] and, token by token, the product of its own factors."""
    out, ends = y.double().clone(), [sum(sizes[: at + 1]) for at in range(len(sizes))]
    for token, number in enumerate(adapters.tolist()):
        for at, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            if number >= 0:
                first = at * b.shape[1] + number * rank
                own = shrunk[token, first : first + rank].double()
                factor = b[end - size : end, number * rank : (number + 1) * rank].double()
                out[token, end - size : end] += factor @ own
    return out


@pytest.mark.parametrize("tokens, sizes, num, rank", [
    (5, [48], NUM, RANK), (32, [70, 20, 36], 8, 16), (150, [40, 130], NUM, 24), (9, [33], 20, 16), (1, [16], 1, 1),
])  # fmt: skip
def test_each_token_gets_the_product_of_its_own_adapter(tokens, sizes, num, rank, triton_device: str):
    torch.manual_seed(0)
    outputs, columns = sum(sizes), num * rank
    both = torch.randn(tokens, outputs + len(sizes) * columns, device=triton_device)
    b = torch.randn(outputs, columns, device=triton_device)
    adapters = torch.randint(-1, num, (tokens,), device=triton_device)
    adapters[0] = num - 1
    wanted = expected(both[:, :outputs], both[:, outputs:], b, adapters, sizes, rank)
    for run in (expand_lora, ops.expand_lora):
        torch.testing.assert_close(
            run(both, b, adapters, rank=rank, sizes=sizes).double(), wanted, rtol=1e-5, atol=1e-4
        )
    x, a = torch.randn(tokens, 24, device=triton_device), torch.randn(len(sizes) * columns, 24, device=triton_device)
    wanted = expected(both[:, :outputs], (x.double() @ a.double().T), b, adapters, sizes, rank)
    for run in (lora, ops.lora):
        made = run(both[:, :outputs], x, a, b, adapters, rank=rank, sizes=sizes)
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("sizes", [[40, 40], [80]])
def test_gates_after_it_are_part_of_the_launch(sizes: list[int], triton_device: str):
    torch.manual_seed(0)
    columns = NUM * RANK
    both = torch.randn(7, 80 + len(sizes) * columns, device=triton_device)
    b, adapters = (
        torch.randn(80, columns, device=triton_device),
        torch.tensor([0, -1, 2, 1, 1, -1, 0], device=triton_device),
    )
    gate, up = expected(both[:, :80], both[:, 80:], b, adapters, sizes, RANK).chunk(2, dim=-1)
    wanted = gate * torch.sigmoid(gate) * up
    for run in (expand_lora, ops.expand_lora):
        made = run(both, b, adapters, rank=RANK, sizes=sizes, kind="silu")
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-4)


def test_rows_without_an_adapter_keep_every_bit(triton_device: str):
    both = torch.randn(6, 48 + NUM * RANK, device=triton_device, dtype=torch.bfloat16)
    b = torch.full((48, NUM * RANK), float("nan"), device=triton_device, dtype=torch.bfloat16)
    adapters = torch.full((6,), -1, device=triton_device)
    assert expand_lora(both, b, adapters, rank=RANK, sizes=[48]).equal(both[:, :48])


@pytest.mark.parametrize("tokens, loras, rank", [(3, 2, 4), (40, 3, 16)])
def test_each_row_of_an_expert_gets_the_product_of_its_own_adapter(
    tokens: int, loras: int, rank: int, triton_device: str
):
    torch.manual_seed(0)
    experts, inner, outputs = 5, 24, 40
    x = torch.randn(tokens, inner, device=triton_device)
    adapters = torch.randint(-1, loras, (tokens,), device=triton_device)
    ids = torch.rand(tokens, experts, device=triton_device).argsort(-1)[:, :2].contiguous()
    a = torch.randn(experts, loras + 1, rank, inner, device=triton_device)
    b = torch.randn(experts, loras + 1, outputs, rank, device=triton_device)
    a[:, 0] = b[:, 0] = 0
    grouped, order, ends = group(x, ops.pair_adapters(ids, adapters, loras=loras), experts=experts * (loras + 1))
    y = torch.randn(2 * tokens, outputs, device=triton_device)
    wanted = y.double().clone()
    for row, pair in enumerate(order.tolist()):
        token, expert = pair // 2, int(ids.flatten()[pair])
        slot = int(adapters[token]) + 1
        wanted[row] += b[expert, slot].double() @ (a[expert, slot].double() @ x[token].double())
    counts = torch.bincount(ids.flatten(), minlength=experts)
    assert ops.ends_of_experts(ends, loras=loras).tolist() == counts.cumsum(0).tolist()
    for run in (grouped_lora, ops.grouped_lora):
        torch.testing.assert_close(run(y, grouped, a, b, ends).double(), wanted, rtol=1e-5, atol=1e-4)
