from __future__ import annotations

import pytest
import torch
from graph.ops.checked import Cache, checked
from graph.ops.recurrences import MAKERS, in_steps, make_case, states_of, with_drafts
from torch.nn import functional as F
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from atom.graph import BATCH, KV, Batch, LatestState, Type, ops

OPTIONS = [(name, {}) for name in MAKERS] + [("gated_delta", {"by_dim": True}), ("causal_conv", {"kind": None})]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65])
def test_sequences_in_chunks_and_in_any_slots_are_the_whole_ones(name: str, options: dict[str, bool], chunk: int):
    lengths = [130, 1, 65, 9] if chunk > 1 else [5, 1, 3]
    cases = [make_case(name, length, seed=n, **options) for n, length in enumerate(lengths)]
    run = cases[0].op.lowered
    assert run is not None
    for case, out in zip(cases, in_steps(run, cases, chunk), strict=True):
        torch.testing.assert_close(out, case.run(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("kept", "first", "in_rows"), [(2, 1, False), (4, 9, False), (4, 2, True), (1, 3, False)])
def test_drafts_that_are_rejected_leave_no_trace(name: str, kept: int, first: int, in_rows: bool):
    case = make_case(name, 30)
    assert case.op.lowered is not None
    out = with_drafts(case.op.lowered, case, kept, first, in_rows=in_rows)
    torch.testing.assert_close(out, case.run(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("rows", [0, 2])
def test_a_step_of_padding_only_changes_no_state(name: str, rows: int):
    case = make_case(name, 3)
    slots = states_of(case.zeros, 2) + 1
    nothing = torch.zeros(rows).int()
    batch = Batch({}, {}, torch.zeros(rows + 1).int(), nothing, 0, slots=nothing)
    assert case.op.lowered is not None
    out = case.op.lowered(*case.values, slots, batch, *case.weights, **case.attributes)
    assert out.shape == case.run().shape and bool((slots == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_a_recurrence_of_small_dtypes_rounds_once(name: str, dtype: torch.dtype):
    case = make_case(name, 65, dtype)
    torch.testing.assert_close(case.run(), case.wide().run().to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_sees_the_last_tokens(taps: int, has_bias: bool):
    case = make_case("causal_conv", 65, taps=taps, has_bias=has_bias)
    weight, bias = case.weights
    padded = F.pad(case.values[0].T, (taps - 1, 0))
    assert weight is not None
    expected = F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight)).T)
    torch.testing.assert_close(case.run(), expected)


@pytest.mark.parametrize("tokens", [1, 2, 65])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_short_convolution_is_that_of_lfm2(tokens: int, has_bias: bool):
    config = Lfm2Config(hidden_size=24, conv_bias=has_bias, num_hidden_layers=1, layer_types=["conv"])
    torch.manual_seed(0)
    layer, x = Lfm2ShortConv(config, 0), torch.randn(tokens, 24)
    with torch.no_grad():
        expected = layer(x.unsqueeze(0)).squeeze(0)
        b, c, v = ops.split(ops.linear(x, layer.in_proj.weight, layer.in_proj.bias), sizes=[24] * 3)
        state = Cache(LatestState("0", Type("fp32", (2, 24))), torch.zeros(2, 24))
        conv = checked(ops.causal_conv, ops.mul(b, v), state, layer.conv.weight.squeeze(1), layer.conv.bias)
        out = ops.linear(ops.mul(c, conv), layer.out_proj.weight, layer.out_proj.bias)
    torch.testing.assert_close(out, expected)


def test_a_convolution_that_does_not_fit_is_refused():
    x, weight, state = Type("bf16", ("T", 8)), Type("bf16", (8, 4)), LatestState("0", Type("bf16", (3, 8)))
    assert ops.causal_conv.infer(x, state, weight) == x
    with pytest.raises(ValueError, match=r"the weight is bf16\[4, 8\] for x bf16\[T, 8\]"):
        ops.causal_conv.infer(x, state, Type("bf16", (4, 8)))
    with pytest.raises(ValueError, match="a convolution of 1 tap needs no state"):
        ops.causal_conv.infer(x, state, Type("bf16", (8, 1)))
    with pytest.raises(ValueError, match=r"the state is bf16\[3, 8\] of 3 taps of bf16\[T, 8\]"):
        ops.causal_conv.infer(x, state, Type("bf16", (8, 3)))
    with pytest.raises(ValueError, match=r"the bias is bf16\[7\] for x"):
        ops.causal_conv.infer(x, state, weight, Type("bf16", (7,)))
    with pytest.raises(ValueError, match="swish is no activation"):
        ops.causal_conv.infer(x, state, weight, kind="swish")
    with pytest.raises(ValueError, match="is no recurrent state"):
        ops.causal_conv.infer(x, KV("0", Type("bf16", (3, 8))), weight)


def test_a_batched_op_takes_its_batch_after_the_state():
    batched = ops.OPS["batched_causal_conv"]
    assert (batched.level, batched.is_state) == ("lowered", True)
    assert list(batched.signature.parameters) == ["x", "state", "batch", "weight", "bias", "kind"]
    x, weight, state = Type("bf16", ("T", 8)), Type("bf16", (8, 4)), LatestState("0", Type("bf16", (3, 8)))
    assert batched.infer(x, state, BATCH, weight) == x
    with pytest.raises(ValueError, match=r"bf16\[8, 4\] is no Batch"):
        batched.infer(x, state, weight, BATCH)
