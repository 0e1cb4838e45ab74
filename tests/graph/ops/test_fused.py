from __future__ import annotations

import pytest
import torch
from graph.ops.checked import checked
from torch import Tensor
from torch.nn import functional as F

from atom.graph import Type, ops

EPS = 0.01


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """5 tokens of 12 dims in double precision, and weights of 14 rows."""
    torch.manual_seed(0)
    shapes = {"a": (5, 12), "b": (5, 12), "norm": (12,), "weight": (14, 12), "bias": (14,)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def assert_close(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected.float())


def test_a_gated_linear_has_the_gates_before_the_ups(tensors: dict[str, Tensor]):
    expected = gated(F.linear(tensors["a"], tensors["weight"]))
    assert_close(checked(ops.gated_linear, tensors["a"].float(), tensors["weight"].float(), kind="silu"), expected)


@pytest.mark.parametrize("kind", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_sum", [False, True])
def test_a_linear_takes_what_is_normed(tensors: dict[str, Tensor], kind: str | None, has_bias: bool, has_sum: bool):
    bias = tensors["bias"] if has_bias else None
    total = tensors["a"] + tensors["b"] if has_sum else tensors["a"]
    y = F.linear(F.rms_norm(total, (12,), tensors["norm"], EPS), tensors["weight"], bias)
    weights = [None if each is None else each.float() for each in (tensors["norm"], tensors["weight"], bias)]
    if has_sum:
        args = (tensors["a"].float(), tensors["b"].float(), *weights)
        out, summed = checked(ops.add_norm_linear, *args, eps=EPS, kind=kind)
        assert_close(summed, total)
    else:
        out = checked(ops.norm_linear, tensors["a"].float(), *weights, eps=EPS, kind=kind)
    assert_close(out, y if kind is None else gated(y))


def test_what_does_not_fit_is_refused():
    x, weight = Type("fp32", ("T", 8)), Type("fp32", (6, 8))
    with pytest.raises(ValueError, match=r"the norm is fp32\[7\] for fp32\[T, 8\]"):
        ops.norm_linear.infer(x, Type("fp32", (7,)), weight, eps=EPS)
    with pytest.raises(ValueError, match=r"fp32\[T, 8\] and fp32\[T, 6\] differ"):
        ops.add_norm_linear.infer(x, Type("fp32", ("T", 6)), Type("fp32", (8,)), weight, eps=EPS)
    with pytest.raises(ValueError, match="there is no activation 'swish'"):
        ops.gated_linear.infer(x, weight, kind="swish")
    with pytest.raises(ValueError, match="7 does not divide by 2"):
        ops.norm_linear.infer(x, Type("fp32", (8,)), Type("fp32", (7, 8)), eps=EPS, kind="silu")


@pytest.mark.parametrize("op", [ops.gated_linear, ops.norm_linear, ops.add_norm_linear])
def test_they_are_ops_of_a_lowered_text_alone(op: ops.Op):
    assert op.levels == {ops.LOWERED}
