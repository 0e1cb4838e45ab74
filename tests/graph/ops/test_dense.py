from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from graph.ops.checked import checked
from torch.nn import functional as F
from transformers.activations import XIELUActivation

from atom.config import MLPConfig
from atom.config.aliases import ACTIVATIONS as ALIASES
from atom.graph import Type, ops
from atom.graph.ops.dense import GATED_ACTIVATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_norm_rounds_once(dtype: torch.dtype, weight_dtype: torch.dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24).to(dtype), torch.randn(24).to(weight_dtype)
    expected = F.rms_norm(x.double(), (24,), weight.double(), 1e-6).to(dtype)
    torch.testing.assert_close(checked(ops.rms_norm, x, weight, eps=1e-6), expected, rtol=1e-6, atol=0)


def test_a_gate_of_one_column_multiplies_them_all():
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0], [0.5]])
    assert checked(ops.mul, a, b).tolist() == [[10.0, 20.0], [1.5, 2.0]]
    with pytest.raises(ValueError, match=r"fp32\[T, 6\] and fp32\[T, 2\] differ"):
        ops.mul.infer(Type("fp32", ("T", 6)), Type("fp32", ("T", 2)))


def test_scale_multiplies():
    assert checked(ops.scale, torch.tensor([[1.0, -2.0]]), by=0.5).tolist() == [[0.5, -1.0]]


def test_softcap_keeps_what_is_small_and_bounds_what_is_large():
    x = torch.tensor([0.001, -0.001, 1e6, -1e6, 30.0])
    out = checked(ops.softcap, x, cap=30.0)
    torch.testing.assert_close(out, torch.tensor([0.001, -0.001, 30.0, -30.0, 22.847825]))


def test_clamp_keeps_what_lies_within_the_limit():
    x = torch.tensor([0.25, -0.25, 3.0, -3.0])
    assert checked(ops.clamp, x, limit=0.5).tolist() == [0.25, -0.25, 0.5, -0.5]
    assert checked(ops.clip, x, torch.tensor(-0.5), torch.tensor(0.3)).tolist() == pytest.approx(
        [0.25, -0.25, 0.3, -0.5]
    )


def test_pad_adds_zeros_and_never_cuts():
    x = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert checked(ops.pad, x, size=3).tolist() == [[[1.0, 2.0, 0.0]], [[3.0, 4.0, 0.0]]]
    with pytest.raises(ValueError, match=r"size=1 is less than that of fp32\[T, 3, 2\]"):
        ops.pad.infer(Type("fp32", ("T", 3, 2)), size=1)


def test_xielu_is_that_of_transformers():
    reference = XIELUActivation(dtype=torch.float32)
    reference.alpha_p.data.fill_(0.3)
    reference.alpha_n.data.fill_(-1.2)
    x = torch.linspace(-6, 6, 97)
    out = checked(ops.xielu, x, torch.tensor([0.3]), torch.tensor([-1.2]))
    torch.testing.assert_close(out, reference._xielu_python(x).detach())


def test_sigmoid_gates():
    x = torch.tensor([0.0, 1.0986123])
    torch.testing.assert_close(checked(ops.activate, x, kind="sigmoid"), torch.tensor([0.5, 0.75]))
    torch.testing.assert_close(checked(ops.activate, x, kind="softplus"), torch.tensor([2.0, 4.0]).log())


def test_swigluoai_clamps_gate_and_up_by_hand():
    x = torch.tensor([[0.0, 1.0, 9.0, -9.0, 5.0, 1.0, -9.0, 9.0]])  # 4 gate columns, 4 up columns
    out = checked(ops.gated_activate, x, kind="swigluoai", limit=7.0, alpha=1.702)

    def gated(gate: float, up: float) -> float:
        return gate / (1 + float(torch.tensor(-1.702 * gate).exp())) * (up + 1)

    expected = [gated(0.0, 5.0), gated(1.0, 1.0), gated(7.0, -7.0), gated(-9.0, 7.0)]  # no gate is too low
    torch.testing.assert_close(out, torch.tensor([expected]))


@pytest.mark.parametrize("limit", [None, 25.0])
def test_situ_bends_gate_and_up_by_hand(limit: float | None):
    gates, ups = (0.0, 1.0, 9.0, -3.0), (5.0, -40.0, 2.0, 30.0)
    given = {"kind": "situ", "alpha": 4.0, **({} if limit is None else {"limit": limit})}
    out = checked(ops.gated_activate, torch.tensor([[*gates, *ups]]), **given)
    expected = [
        4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * (up if limit is None else 25 * math.tanh(up / 25))
        for gate, up in zip(gates, ups, strict=True)
    ]
    torch.testing.assert_close(out, torch.tensor([expected]))


def test_parts_are_joined_side_by_side():
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    assert checked(ops.join, a, b, a).tolist() == [[1.0, 3.0, 4.0, 1.0], [2.0, 5.0, 6.0, 2.0]]
    with pytest.raises(ValueError, match=r"fp32\[T, 6\] and bf16\[T, 2\] differ"):
        ops.join.infer(Type("fp32", ("T", 6)), Type("bf16", ("T", 2)))
    with pytest.raises(ValueError, match="there is nothing to join"):
        ops.join.infer()


def test_a_cold_draw_is_the_largest_logit_by_its_column_and_offset():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.0], [-3.0, -2.0, -1.0]])
    keys, zeros = torch.arange(3), torch.zeros(3)
    assert checked(ops.gumbel_argmax, logits, keys, zeros, zeros).tolist() == [1, 0, 2]
    assert checked(ops.gumbel_argmax, logits, keys, zeros, zeros, torch.tensor([10, 20, 0])).tolist() == [21, 10, 2]
    types = [Type("fp32", ("R", 3)), Type("i64", ("R",)), *[Type("fp32", ("R",))] * 2]
    with pytest.raises(ValueError, match=r"the offsets are i64\[4\]"):
        ops.gumbel_argmax.infer(*types, Type("i64", (4,)))
    with pytest.raises(ValueError, match=r"the keys are i64\[T\]"):
        ops.gumbel_argmax.infer(types[0], Type("i64", ("T",)), *types[2:])


def test_a_warm_draw_is_within_its_depth():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(1000, 1)
    keys, heats = torch.arange(1000) * 2**33 + torch.arange(1000), torch.full((1000,), 2.0)
    for depth, kept in ((0.0, {1}), (0.5, {1}), (1.0, {1, 2}), (torch.inf, {0, 1, 2})):
        assert set(ops.gumbel_argmax(logits, keys, heats, torch.full((1000,), depth)).tolist()) == kept


def test_a_gated_activation_takes_its_own_attributes_only():
    x = Type("fp32", ("T", 8))
    with pytest.raises(ValueError, match="limit=None and alpha=None for swigluoai: it takes a limit"):
        ops.gated_activate.infer(x, kind="swigluoai")
    with pytest.raises(
        ValueError, match=r"limit=7\.0 and alpha=None for swigluoai: only swigluoai and situ take alpha"
    ):
        ops.gated_activate.infer(x, kind="swigluoai", limit=7.0)
    with pytest.raises(ValueError, match="there is no activation 'swish'"):
        ops.gated_activate.infer(x, kind="swish")
    with pytest.raises(ValueError, match="7 does not divide by 2"):
        ops.gated_activate.infer(Type("fp32", ("T", 7)), kind="silu")


def test_every_activation_that_a_model_file_may_name_is_one_of_a_gate():
    (declared,) = (each.metadata["built"] for each in dataclasses.fields(MLPConfig) if each.name == "activation")
    named = {*declared, *ALIASES.values(), "sigmoid", "softplus"} - {
        "xielu"
    }  # the two are of outputs, xielu is of no gate
    assert named == set(GATED_ACTIVATIONS)
