"""Kernels of fixed_cpp: the ops' numbers, and for a row the same bits whatever rows are next to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from atom.errors import UnsupportedError
from atom.graph import Batch, PagedCache, ops
from atom.kernels import LoadContext, find_kernel
from atom.kernels.cpp import fixed

ROWS = (1, 2, 3, 4, 5, 8, 31, 33, 69)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def load(op: ops.Op) -> Callable[..., Any]:
    return find_kernel(op, "fixed_cpp").load(LoadContext())


def assert_near(made: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (made.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= ERRORS[dtype], error


def assert_same_rows(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = run(x)
    for count in ROWS:
        assert torch.equal(run(x[:count]), whole[:count]), f"the first {count}"
        assert torch.equal(run(x[-count:]), whole[-count:]), f"the last {count}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("out", "inner"), [(65, 48), (130, 257), (3, 7)])
def test_a_row_of_a_linear_has_the_same_bits_next_to_any_others(out: int, inner: int, dtype: torch.dtype):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((70, inner), (out, inner), (out,)))
    linear = load(ops.linear)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert_near(linear(x, weight, bias), expected, dtype)
    assert_same_rows(lambda rows: linear(rows, weight, bias), x)
    assert_same_rows(lambda rows: linear(rows, weight), x)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_norms_and_activations_are_those_of_the_ops(dtype: torch.dtype):
    x, other = torch.randn(2, 70, 202).mul_(3).to(dtype)
    weight = torch.randn(202).to(dtype)
    norm, add_norm, activate, gate = map(load, (ops.rms_norm, ops.add_rms_norm, ops.activate, ops.gated_activate))
    assert_near(norm(x, weight, eps=1e-6), ops.rms_norm(x, weight, eps=1e-6), dtype)
    for made, expected in zip(
        add_norm(x, other, weight, eps=1e-6), ops.add_rms_norm(x, other, weight, eps=1e-6), strict=True
    ):
        assert_near(made, expected, dtype)
    assert_same_rows(lambda rows: norm(rows, weight, eps=1e-6), x)
    for kind in fixed.KINDS:
        assert_near(activate(x, kind=kind), ops.activate(x, kind=kind), dtype)
        assert_near(gate(x, kind=kind), ops.gated_activate(x, kind=kind), dtype)
        assert_same_rows(lambda rows, kind=kind: gate(rows, kind=kind), x)  # type: ignore[misc]


@pytest.mark.parametrize("score", fixed.SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_a_router_chooses_as_the_op(score: str, renormalize: bool):
    x, weight, correction = torch.randn(70, 50), torch.randn(17, 50), torch.randn(17)
    rule = {"top_k": 3, "score": score, "renormalize": renormalize, "scale": 1.5, "shared": 1}
    route = load(ops.router)
    (weights, ids), (expected, chosen) = (run(x, weight, None, correction, **rule) for run in (route, ops.router))
    assert torch.equal(ids, chosen)
    assert_near(weights, expected, torch.float32)
    assert_same_rows(lambda rows: route(rows, weight, None, correction, **rule)[0], x)


def test_rotations_and_sums_of_experts_are_those_of_the_ops():
    positions, freqs = torch.arange(1000, 1070), 10000 ** -(torch.arange(0, 24, 2) / 24)
    rotary = load(ops.rotary)
    for made, expected in zip(
        rotary(positions, freqs, scale=0.7), ops.rotary(positions, freqs, scale=0.7), strict=True
    ):
        assert_near(made, expected, torch.float32)
    assert_same_rows(lambda rows: torch.cat(rotary(rows, freqs), 1), positions)
    y, weights, order = torch.randn(210, 50), torch.rand(70, 3), torch.randperm(210)
    assert_near(load(ops.combine)(y, weights, order), ops.combine(y, weights, order), torch.float32)


@pytest.mark.parametrize("window", [None, 5, 130])
def test_a_token_of_a_prompt_attends_as_a_decode_does(window: int | None):
    cache, table = PagedCache(torch.randn(90, 4, 2, 2, 16), "full"), torch.randperm(80).view(2, 40).int()
    lengths, starts = torch.tensor([1, 150], dtype=torch.int32), torch.tensor([0, 1, 41], dtype=torch.int32)
    q, sinks = torch.randn(43, 6, 16), torch.randn(6)  # 40 tokens of the second sequence, and 2 of none
    attend, options = load(ops.paged_attention), {"scale": 0.25, "window": window}
    made = attend(q, cache, Batch({"full": table}, {}, starts, lengths, 1), sinks, **options)
    expected = ops.paged_attention(q, cache, Batch({"full": table}, {}, starts, lengths, 1), sinks, **options)
    assert_near(made, expected, torch.float32)
    for token in (1, 2, 24, 40):
        length = torch.tensor([150 - (40 - token)], dtype=torch.int32)
        own = Batch({"full": table[1:]}, {}, torch.tensor([0, 1], dtype=torch.int32), length, 1)
        assert torch.equal(attend(q[token : token + 1], cache, own, sinks, **options)[0], made[token])


def test_without_a_compiler_the_start_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fixed, "load_library", lambda _: False)
    with pytest.raises(UnsupportedError, match=r"batch_invariant=true: rms_norm needs fixed.cpp, which cannot be comp"):
        load(ops.rms_norm)
