from __future__ import annotations

import pytest
import torch
from graph.ops.checked import Cache, checked
from torch import Tensor
from torch.nn import functional as F

from atom.graph import BATCH, KV, Batch, Type, ops

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
    with pytest.raises(ValueError, match="there is no activation 'swish'"):
        ops.linear_activate.infer(x, weight, Type("fp32", (6,)), kind="swish")
    with pytest.raises(ValueError, match="7 does not divide by 2"):
        ops.norm_linear.infer(x, Type("fp32", (8,)), Type("fp32", (7, 8)), eps=EPS, kind="silu")


def test_a_linear_is_activated_with_its_bias(tensors: dict[str, Tensor]):
    x, weight, bias = (tensors[name] for name in ("a", "weight", "bias"))
    expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    made = checked(ops.linear_activate, x.float(), weight.float(), bias.float(), kind="gelu_tanh")
    assert_close(made, expected)


@pytest.mark.parametrize(
    "op", [ops.gated_linear, ops.linear_activate, ops.norm_linear, ops.add_norm_linear, ops.norm_rope_attention]
)
def test_they_are_ops_of_a_lowered_text_only(op: ops.Op):
    assert op.level == ops.LOWERED


def test_attention_with_the_norm_rotation_and_write_before_it_is_attention_of_normed_and_turned_heads():
    q, k, v = (torch.randn(5, heads, 6) for heads in (4, 2, 2))
    cos, sin = ops.rotary(torch.arange(5), torch.tensor([1.0, 0.1]))
    q_norm, k_norm, sinks = torch.rand(6), torch.rand(6), torch.randn(4)
    layer, cache = KV("0", Type("fp32", (2, 2, 6)), window=3), torch.full((4, 3, 2, 2, 6), float("nan"))
    turned = [
        ops.rope(ops.rms_norm(x, norm, eps=EPS), cos, sin, interleaved=True) for x, norm in ((q, q_norm), (k, k_norm))
    ]
    attributes = {"scale": 0.5, "window": 3, "softcap": 2.0}
    expected = ops.attention(*turned, v, None, sinks, **attributes)
    slots, table = torch.tensor([6, 7, 8, 3, 4]), torch.tensor([[2, 1]]).int()
    for first, last, num_decodes in ((0, 4, 0), (4, 5, 1)):  # a prompt, and after it a decode
        some = slice(first, last)
        starts, lengths = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        batch = Batch({layer.kind: table}, {layer.kind: slots[some]}, starts, lengths, num_decodes)
        out = checked(
            ops.norm_rope_attention, q[some], k[some], v[some], cos[some], sin[some], q_norm, k_norm, Cache(layer, cache),
            batch, sinks, eps=EPS, interleaved=True, **attributes,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[some])
    torch.testing.assert_close(cache.flatten(0, 1)[slots], torch.stack((turned[1], v), dim=1))


def test_attention_with_the_write_before_it_is_refused_with_what_does_not_fit():
    q, k, cache = Type("fp32", ("T", 4, 6)), Type("fp32", ("T", 2, 6)), KV("0", Type("fp32", (2, 2, 6)), window=3)
    rest = [None] * 4 + [cache, BATCH]
    with pytest.raises(ValueError, match="a query sees all tokens, the cache keeps 3"):
        ops.norm_rope_attention.infer(q, k, k, *rest, scale=0.5)
    with pytest.raises(ValueError, match="the cache keeps fp32"):
        ops.norm_rope_attention.infer(q, q, q, *rest, scale=0.5, window=3)
